"""``fit``: from a measurement table to a device file, and what the fit is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specmodel._version import __version__
from specmodel.calibration import Calibration, FittedOperator
from specmodel.checking import Check, check_record, check_text, checked_device
from specmodel.cli.output import Out, Rendered, Table, prose, to_json
from specmodel.errors import DomainError
from specmodel.files import check_output
from specmodel.fitting import TableFit, calibrated_device, fit_table
from specmodel.hardware import YAML, Device
from specmodel.published import device_of, is_published, read_published
from specmodel.rates import device_of_table, with_multiprocessors
from specmodel.tables import read_table, refuse_noise


def run_fit(table: str, options: dict[str, Any]) -> tuple[Device, TableFit, Check | None]:
    """Read a table, fit it, and return the calibrated device, the fit, and a check of passes."""
    check_output(options["output"], endings=YAML, overwrite=options["overwrite"])
    if options["plot"] is not None:
        check_output(options["plot"], endings=(".png", ".pdf", ".svg"), own_format=True)
    gpu, engine = options["gpu"], options["engine"]
    for name in ("model", "drafter", "draft"):
        if options[name] is not None:
            raise DomainError(f"--{name} goes with a table of an engine's rates (tpot_ms)")
    if is_published(table):
        if gpu is None or engine is None:
            raise DomainError(f"{table} holds several devices: say --gpu and --engine")
        known = device_of(gpu)
        rows = read_published(table, gpu=gpu, engine=engine, device=known)
    else:
        if not Path(table).exists():
            raise DomainError(f"{table}: no such file or folder")
        if engine is not None:
            raise DomainError("--engine goes with a folder of published tables")
        known = device_of(gpu) if gpu is not None else _named_in(table)
        rows = read_table(table, device=known)
        if not options["accept_noise"]:
            refuse_noise(rows)
    estimated = known is None
    name = str(gpu or rows.texts["device"][0] or "device")
    notes: list[str] = []
    device = known or device_of_table(rows, name, _stated(options))
    if estimated:
        notes.append("no datasheet: rates are estimated from the table or given by hand")
        if device.multiprocessors is None:
            device, note = with_multiprocessors(device, rows)
            notes += [note] if note else []
        if device.l2_cache is None:
            notes.append("L2 cache not known: rows that it may have served are fitted too (--l2)")
    fitted = fit_table(rows, device)
    found, check = checked_device(rows, calibrated_device(device, fitted, notes=tuple(notes)))
    return found, fitted, check


def _named_in(table: str) -> Device | None:
    """Return the record of the device that a table names."""
    name = str(read_table(table).texts["device"][0])
    return device_of(name)


def _stated(options: dict[str, Any]) -> dict[str, float]:
    """Return rates given by hand, in SI units."""
    units = {
        "bandwidth": 1e9,
        "flops": 1e12,
        "link_bandwidth": 1e9,
        "memory": 1e9,
        "l2": 1e6,
        "multiprocessors": 1.0,
    }
    return {key: options[key] * unit for key, unit in units.items() if options[key] is not None}


def fit_text(device: Device, fitted: TableFit, check: Check | None, form: str) -> str:
    """Return what the fit found, in the form asked for."""
    if form == "json":
        passes = None if check is None else check_record(check)
        return to_json({**_json(device, fitted), "passes": passes})
    text = _table(device, fitted)
    return text if check is None else Rendered(f"{text}\n\n{prose(check_text(check))}")


def _json(device: Device, fitted: TableFit) -> dict[str, Any]:
    calibration = device.calibration or fitted.calibration
    operators = {
        kind: {
            dtype: {
                **fit.record(),
                "soft_roofline": {
                    name: None if errors is None else errors.record()
                    for name, errors in (
                        ("in_sample", fitted.baseline[kind][dtype].in_sample),
                        ("held_out", fitted.baseline[kind][dtype].held_out),
                    )
                },
            }
            for dtype, fit in by_dtype.items()
        }
        for kind, by_dtype in calibration.operators.items()
    }
    return {
        "device": device.name,
        "specmodel_version": __version__,
        "source": dict(calibration.source),
        "operators": operators,
        "uncalibrated": list(calibration.uncalibrated),
        "notes": list(calibration.notes),
    }


def _table(device: Device, fitted: TableFit) -> str:
    calibration = device.calibration or fitted.calibration
    out = Out()
    out.line(f"{device.title}, from {_source(calibration)}")
    out.line("errors: mean, median and 90th percentile of |predicted / measured - 1|")
    table = Table(
        "operator", "format", "rows", "fitted rows", "shapes left out", "plain soft roofline",
        order=("operator", "format", "shapes left out", "rows", "plain soft roofline"),
    )  # fmt: skip
    for kind, by_dtype in calibration.operators.items():
        for dtype, fit in by_dtype.items():
            plain = fitted.baseline[kind][dtype]
            table.add_row(
                kind,
                dtype,
                f"{fit.n:,}",
                _errors(fit, held=False),
                _errors(fit, held=True),
                _errors(plain, held=True),
            )
    out.table(table)
    heads = ("operator", "format", "number", "value", "+-", "unit", "pinned because")
    numbers = Table(*heads, order=heads, fold="pinned because")
    for kind, by_dtype in calibration.operators.items():
        for dtype, fit in by_dtype.items():
            for name, entry in fit.record()["parameters"].items():
                error = f"{entry['error']:.1g}" if "error" in entry else "-"
                why = entry.get("pinned", "")
                numbers.add_row(
                    kind, dtype, name, f"{entry['value']:.4g}", error, entry["unit"], why
                )
    out.table(numbers)
    if calibration.uncalibrated:
        out.line(f"not calibrated, generic numbers: {', '.join(calibration.uncalibrated)}")
    for note in calibration.notes:
        out.line(f"note: {note}")
    return out.text()


def _source(calibration: Calibration) -> str:
    source = calibration.source
    return f"{source.get('table', 'a table')} ({source.get('engine', 'engine not stated')})"


def _errors(fit: FittedOperator, *, held: bool) -> str:
    errors = fit.held_out if held else fit.in_sample
    if errors is None:
        return "-"
    return f"{errors.mean:.1%} {errors.median:.1%} {errors.p90:.1%}"
