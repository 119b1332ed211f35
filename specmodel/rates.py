"""A device known only by its measurements: rates estimated from a table, or given by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from typing import Any

import numpy as np

from specmodel.errors import FitError
from specmodel.fitting import Measured, fit_operator
from specmodel.forms import GEMM_SPLIT_K, traffic
from specmodel.hardware import Device, device_names, load_device
from specmodel.plausible import check_plausible
from specmodel.tables import Table, check_times, features, groups, plain_format

_ALONE = 3.0  # times the next rate: a row that stands alone is a mistake
_TOP = 0.99  # quantile of what rows reach, taken as the rate: one row may be a mistake
_FIELDS = {
    "memory_bandwidth": "bandwidth",
    "memory_capacity": "memory",
    "l2_cache": "l2",
    "multiprocessors": "multiprocessors",
    "interconnect_bandwidth": "link_bandwidth",
}
"""Field of a device, and the key of its rate here."""

_OPERATORS = ("stream", "gemm", "attention", "mla", "experts", "elementwise")


def device_of_table(table: Table, name: str, stated: Mapping[str, float]) -> Device:
    """Return the record of a device without a datasheet.

    From the fastest copy and the fastest matrix product in each format where a calibration run
    made the table, else the best rates that the rows reach; what is stated goes before either.

    Parameters
    ----------
    table : Table
    name : str
        As people write it.
    stated : mapping of str to float
        Any of bandwidth [B/s], flops [FLOP/s] (of every format), link_bandwidth [B/s], memory
        [B], l2 [B], multiprocessors [-].

    Raises
    ------
    FitError
        When a rate is neither stated nor in the table, or one that is in it cannot be: a single
        row far above all others, or a rate that no device has, the sign of another unit.
    """
    record, machine = table.record, table.record.get("device", {})
    own = "memory_capacity" in record
    found: dict[str, float] = _of_run(table, name) if own else _of_rows(table)
    if own:
        found |= {"memory": float(record["memory_capacity"]), "l2": float(record["cache"])}
        found["multiprocessors"] = float(machine.get("multiprocessors") or record["threads"])
    formats = [key for key in found if key.startswith("peak_flops.")]
    if "flops" in stated:
        found |= dict.fromkeys(formats, stated["flops"])
    found |= {key: value for key, value in stated.items() if key != "flops"}
    for key, flag in (("bandwidth", "--bandwidth GB/S"), ("memory", "--memory GB")):
        if key not in found:
            raise FitError(f"{name} has no record and the table does not tell its {key}: {flag}")
    if not formats:
        raise FitError(f"{name}: no row tells its FLOP/s: the table has no matrix product")
    for key in formats:
        check_plausible("peak_flops", found[key], _of(name, key), fault=FitError)
    for field, key in _FIELDS.items():
        if key in found:
            check_plausible(field, found[key], _of(name, key), fault=FitError)
    by = f"measured by specmodel calibrate with torch {record.get('torch')}" if own else "of rows"
    when = str(record.get("date"))[:10] if own else str(date.today())

    def cite(key: str) -> str:
        how = "given by hand" if key in stated or (key in formats and "flops" in stated) else by
        return f"{found[key]:.6g} ({how}, {table.source.get('table', 'table')}, read {when})"

    known = {field: key for field, key in _FIELDS.items() if key in found}
    values: dict[str, Any] = {field: found[key] for field, key in known.items()}
    if "multiprocessors" in values:
        values["multiprocessors"] = int(values["multiprocessors"])
    device = Device(
        name=_name(name),
        title=f"{name} (measured)" if own else name,
        vendor="unknown",
        family=str(machine.get("kind", "unknown")),
        peak_flops={key.partition(".")[2]: found[key] for key in formats},
        **values,
        sources={
            **{key: cite(key) for key in formats},
            **{field: cite(key) for field, key in known.items()},
        },
    )
    if stated:  # what was given by hand must let the rows be as fast as they are
        check_times(table, table.source.get("table", "table"), device)
    return device


def _of(name: str, key: str) -> str:
    return f"{name}: {key} from the table or its flag (are seconds in another unit?)"


def _of_run(table: Table, name: str) -> dict[str, float]:
    """Return the rates of the fastest copy and products, none of them alone at the top."""
    copies, products = table.of("stream"), table.of("gemm")
    if not len(copies) or not len(products):
        raise FitError(f"{name}: the table has no copy or no matrix product to take rates from")
    c = products.numbers
    work = 2.0 * c["m"] * c["n"] * c["k"] / c["seconds"]
    found = {"bandwidth": float(np.max(copies.numbers["bytes"] / copies.numbers["seconds"]))}
    for dtype in np.unique(products.texts["dtype"]):
        mine = products.texts["dtype"] == dtype
        order = np.argsort(work[mine])
        best = work[mine][order[-1]]
        if mine.sum() > 1 and best > _ALONE * work[mine][order[-2]]:
            line = products.lines[mine][order[-1]]
            raise FitError(
                f"{table.source['table']}: line {line}: {best / 1e12:.3g} TFLOP/s is "
                f"{best / work[mine][order[-2]]:.3g} times the next: is its time in another unit?"
            )
        found[f"peak_flops.{dtype}"] = float(best)
    peak = table.record.get("peak", {})
    stated = {"bandwidth": peak.get("memory_bandwidth")}
    stated |= {f"peak_flops.{key}": rate for key, rate in peak.get("flops", {}).items()}
    for key, rate in stated.items():
        if rate and key in found and not 0.8 < found[key] / rate < 1.25:
            raise FitError(
                f"{table.source['table']}: {key} of {found[key]:.4g} a second, where the run that "
                f"made it found {rate:.4g}: the table was changed, or is in other units"
            )
    return found


def _of_rows(table: Table) -> dict[str, float]:
    """Return the best rates that rows reach, FLOP/s by number format."""
    found: dict[str, list[float]] = {}
    for operator in _OPERATORS:
        rows = table.of(operator)
        if not len(rows):
            continue
        moved, flops = traffic(operator, features(rows, operator))
        seconds = rows.numbers["seconds"]
        found.setdefault("bandwidth", []).append(float(np.quantile(moved / seconds, _TOP)))
        for dtype in np.unique([plain_format(x) for x in rows.texts["dtype"] if x]):
            mine = np.array([plain_format(x) == dtype for x in rows.texts["dtype"]])
            rate = float(np.quantile((flops / seconds)[mine], _TOP))
            found.setdefault(f"peak_flops.{dtype}", []).append(rate)
    return {key: max(values) for key, values in found.items()}


def with_multiprocessors(device: Device, table: Table) -> tuple[Device, str]:
    """Return the device with the number of multiprocessors that its products fit best.

    Parameters
    ----------
    device : Device
        Without that number.
    table : Table
        With 16-bit matrix products.

    Returns
    -------
    Device, str
        Its family becomes ``estimated``; and a note on what was tried. Unchanged, and an empty
        text, where the table has no such product.
    """
    rows = table.of("gemm")
    rows = rows.where(np.isin(rows.texts["dtype"], ("bfloat16", "float16")))
    if not len(rows):
        return device, ""
    some = rows.where(np.arange(len(rows)) % (1 + len(rows) // 1000) == 0)
    tried = sorted({load_device(name).multiprocessors or 0 for name in device_names()} - {0})
    off = {}
    for units in tried:
        data = Measured(
            features=features(some, "gemm"),
            seconds=some.numbers["seconds"],
            groups=groups(some, "gemm"),
            rates=replace(device, multiprocessors=units).rates(str(some.texts["dtype"][0])),
        )
        off[units] = fit_operator(GEMM_SPLIT_K, data).in_sample.mean
    best = min(off, key=lambda units: off[units])
    cited = f"{best} (estimated, {table.source.get('table', 'table')}, read {date.today()})"
    found = replace(
        device, multiprocessors=best, sources={**device.sources, "multiprocessors": cited}
    )
    return found, f"multiprocessors: {best} fit the products best of {len(tried)} numbers tried"


def _name(title: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", title.lower()).strip("-")
