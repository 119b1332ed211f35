"""``fit`` of an engine: a few rows of somebody's own rates become an engine file."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from specmodel import defaults
from specmodel.architectures import load_model
from specmodel.cli.output import Out, plain_table, to_json
from specmodel.cli.parsing import optional, parse_counts, parse_whole
from specmodel.engine_fitting import EngineFit, Observation, fit_engine
from specmodel.errors import DomainError
from specmodel.hardware import load_device
from specmodel.overheads import Engine, engine_yaml, load_engine
from specmodel.requests import Requests, Served, served
from specmodel.roofline import Execution

_NEEDED = ("k", "batch", "tpot_ms")
_START = "vllm-2026"
_NOT_OF_RATES = (
    "plot",
    "bandwidth",
    "flops",
    "memory",
    "l2",
    "multiprocessors",
    "link_bandwidth",
)


def is_rates(table: str) -> bool:
    """Return whether a file is a table of an engine's rates."""
    try:
        with Path(table).open(encoding="utf-8-sig", newline="") as lines:
            return "tpot_ms" in next(csv.reader(lines), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return False


def fit_rates(table: str, output: str, form: str, options: dict[str, Any]) -> str:
    """Fit an engine to rows, write its file and return what was found.

    Raises
    ------
    DomainError
        When an option is missing or a row is not understood; names the line.
    """
    for name in ("gpu", "model"):
        if options[name] is None:
            raise DomainError(f"an engine's rates need --{name}")
    for name in _NOT_OF_RATES:
        if options[name] is not None:
            raise DomainError(f"--{name.replace('_', '-')} does not go with an engine's rates")
    if not output.endswith((".yaml", ".yml")):
        raise DomainError(f"an engine's file ends in .yaml; got {output}")
    target = load_model(options["model"])
    draft = None if options["draft"] is None else load_model(options["draft"])
    kind = options["drafter"] or defaults.default_kind(target, draft)
    drafter, _ = defaults.make_drafter(kind, target, draft=draft)
    device = load_device(options["gpu"])
    tp = optional(parse_whole, options["tp"], name="tp") or 1
    context, *others = parse_counts(options["context"], name="context", low=0)
    if others:
        raise DomainError(f"an engine's rates have one context; got {options['context']}")
    base = load_engine(options["engine"] or _START)
    rows = _rows(Path(table))
    seen = []
    for at, k, batch, tpot, length in rows:
        where: Served = served(
            device,
            target,
            drafter,
            Requests.alike(float(context)),
            B=batch,
            k=max(k, 1),
            execution=Execution(tp=tp, kv_reread=base.kv_reread),
        )
        if k == 0:
            seen.append(Observation(served=where, what="plain", value=batch / tpot))
            continue
        if length is None:
            raise DomainError(f"{at}: a row with drafts needs acceptance_length")
        try:
            law = where.accepted_to(length)
        except DomainError as error:
            raise DomainError(f"{at}: acceptance_length: {error}") from None
        seen.append(Observation(served=where, what="drafted", value=batch / tpot, accepted=law))
    found = fit_engine(base, seen)
    name = Path(output).stem
    own = f"{Path(table).name}, {len(rows)} rows"
    engine = Engine(
        **{
            **{f: getattr(found.engine, f) for f in Engine.__dataclass_fields__},
            "name": name,
            "title": f"{name} (from {base.title})",
            "unknown": frozenset(),
            "studies": {Path(table).name: own},
        }
    )
    Path(output).write_text(engine_yaml(engine), encoding="utf-8")
    return _text(engine, base, found, seen, rows, form)


def _rows(file: Path) -> list[tuple[str, int, float, float, float | None]]:
    """Return place, k, batch, time per token [s] and acceptance length of each row."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise DomainError(f"{file}: not a text file in UTF-8") from None
    with io.StringIO(text, newline="") as lines:
        table = csv.DictReader(lines)
        missing = [name for name in _NEEDED if name not in (table.fieldnames or ())]
        if missing:
            raise DomainError(f"{file}: no column {', '.join(missing)}")
        found = []
        for row in table:
            at = f"{file}:{table.line_num}"
            k = _number(row, "k", at, whole=True)
            batch, tpot = _number(row, "batch", at), _number(row, "tpot_ms", at)
            length = row.get("acceptance_length") or None
            if not batch or not tpot:
                raise DomainError(f"{at}: batch and tpot_ms must be above 0")
            G = None if length is None else _number(row, "acceptance_length", at)
            found.append((at, int(k), batch, tpot / 1e3, G))
    if not found:
        raise DomainError(f"{file}: holds no rows")
    return found


def _number(row: dict[str, Any], name: str, at: str, *, whole: bool = False) -> float:
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        raise DomainError(f"{at}: {name} must be a number; got {row.get(name)!r}") from None
    if not 0 <= value < 1e9 or (whole and value != int(value)):
        raise DomainError(f"{at}: {name} must be {'a whole number ' * whole}from 0; got {value:g}")
    return value


def _text(
    engine: Engine,
    base: Engine,
    found: EngineFit,
    seen: list[Observation],
    rows: list[tuple[str, int, float, float, float | None]],
    form: str,
) -> str:
    before = [one.predicted(base) for one in seen]
    after = [one.predicted(engine) for one in seen]
    if form == "json":
        return to_json(
            {
                "engine": engine.name,
                "values": {
                    name: {"value": getattr(engine, name), "told": told}
                    for name, told in found.told.items()
                },
                "rows": [
                    {"k": k, "batch": B, "tpot": tpot, "before": B / b, "after": B / a}
                    for (_, k, B, tpot, _), b, a in zip(rows, before, after, strict=True)
                ],
            }
        )
    out = Out()
    out.line(f"{engine.title}")
    table = plain_table("value", "before", "fitted", "told by the rows")
    for name, told in found.told.items():
        unit = 1.0 if name == "kernels" else 1e3
        was, now = getattr(base, name) * unit, getattr(engine, name) * unit
        label = name.replace("_", " ") + ("" if name == "kernels" else " (ms)")
        table.add_row(label, f"{was:.4g}", f"{now:.4g}", f"{told:.0%}")
    out.table(table)
    table = plain_table("k", "batch", "tpot ms", "before", "fitted")
    for (_, k, B, tpot, _), b, a in zip(rows, before, after, strict=True):
        table.add_row(
            str(k), f"{B:g}", f"{tpot * 1e3:.2f}", f"{B / b * 1e3:.2f}", f"{B / a * 1e3:.2f}"
        )
    out.table(table)
    out.line("told: 0% the rows say nothing of it and it is where it was, 100% they alone decide")
    return out.text()
