"""``fit`` of an engine: a table of measured rates becomes an engine file."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmodel import defaults
from specmodel.architectures import Architecture, load_model
from specmodel.cli.output import Out, Table, to_json
from specmodel.cli.parsing import optional, parse_counts, parse_whole
from specmodel.drafters import Drafter
from specmodel.engine_fitting import (
    HOST_SPREAD,
    KERNEL_SPREAD,
    ROW_SPREAD,
    EngineFit,
    Observation,
    StepLimits,
    fit_engine,
    step_limits,
)
from specmodel.errors import DomainError, brief
from specmodel.files import check_output, csv_records, csv_rows, read_text, write_text
from specmodel.hardware import Device, load_device
from specmodel.overheads import LIMITS, Engine, engine_yaml, load_engine
from specmodel.published import is_published
from specmodel.requests import Requests, served
from specmodel.roofline import Execution

Floats = NDArray[np.float64]

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
_MOST_K, _MOST_BATCH, _MOST_MS = 1000.0, 1e6, 1e9
_UNITS: tuple[tuple[str, Callable[[Floats, Floats], Floats]], ...] = (
    ("seconds", lambda value, batch: value),
    ("microseconds", lambda value, batch: value / 1e6),
    ("nanoseconds", lambda value, batch: value / 1e9),
    ("tokens per second of a sequence", lambda value, batch: 1 / value),
    ("tokens per second of the batch", lambda value, batch: batch / value),
)
"""What a column of milliseconds may hold by mistake, and the seconds a token it then means."""
_RATES = _UNITS[3:]

_MISSED = 10.0  # times `ROW_SPREAD`, from which on a row is not fitted
_FAR = 3.0  # standard deviations from the preset, from which on a fitted value is doubted
_ALIKE = 3.0  # times: rows that are no further apart are in one unit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rates:
    """A table of rates; arrays over its rows.

    Attributes
    ----------
    at : tuple of str
        ``path:line`` of each row.
    k, batch : ndarray
        Drafts [token]; sequences [-].
    tpot : ndarray
        Time per token of a sequence. [s]
    G : ndarray
        Tokens per round, 1 of plain rows. [token]
    """

    at: tuple[str, ...]
    k: Floats
    batch: Floats
    tpot: Floats
    G: Floats


def rates_text(table: str) -> str | None:
    """Return the text of a table of an engine's rates, None where it is another table.

    A table of rates has a column ``tpot_ms``, or one whose name starts like it, or ``k`` and
    ``batch``, which measured operators have too.

    Raises
    ------
    DomainError
        When there is no such file, it cannot be read or is empty, or a pipe holds another table.
    """
    if is_published(table):
        return None
    path = Path(table)
    if not path.exists():
        raise DomainError(f"{table}: no such file or folder")
    text = read_text(table)
    _, head = next(csv_rows(text, table), (0, []))
    if not head:
        raise DomainError(f"{table}: is empty")
    names = {name.strip().lower() for name in head}
    of_operators = bool(names & {"operator", "m", "n"})
    if any(name.startswith("tpot") for name in names) or (
        {"k", "batch"} <= names and not of_operators
    ):
        return text
    if not path.is_file():
        raise DomainError(f"{table}: a pipe can only hold a table of rates (k, batch, tpot_ms)")
    if "operator" not in names:
        raise DomainError(
            f"{table}: has neither the columns of an engine's rates (k, batch, tpot_ms) nor those "
            f"of a measurement table (operator, ..., seconds); it has {brief(', '.join(head))}"
        )
    return None


def fit_rates(table: str, text: str, form: str, options: dict[str, Any]) -> str:
    """Fit an engine to rows, write its file and return what was found.

    Parameters
    ----------
    table, text : str
        The table's path, and what `rates_text` read from it.
    form : {"table", "json"}
    options : dict
        Of the command, `output` among them.

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
    file = check_output(
        options["output"], endings=(".yaml", ".yml"), overwrite=options["overwrite"]
    )
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
    rows = read_rates(text, table)
    how = Execution(tp=tp, kv_reread=base.kv_reread)
    limits = step_limits(
        device, target, drafter, B=rows.batch, k=rows.k, L=float(context), execution=how
    )
    _check_plausible(rows, limits, device, target)
    seen = _observations(rows, device, target, drafter, context, how)
    found = fit_engine(base, list(seen.values()))
    name, source = file.stem, Path(table).name
    doubts = _doubts(rows, seen, base, found)
    causes = _causes(rows, limits, seen, base) if doubts else ""
    _check_limits(found, table, causes)
    warnings = [f"WARNING: {'; '.join(doubts)}. {causes}"] * bool(doubts)
    engine = replace(
        found.engine,
        name=name,
        title=f"{name} (from {base.title})",
        unknown=frozenset(),
        studies={source: "; ".join([f"{source}, {_count(len(rows.at), 'row')}", *warnings])},
    )
    write_text(file, engine_yaml(engine))
    before, after = (_tpot(rows, seen, one) for one in (base, engine))
    return _text(engine, base, found, rows, before, after, warnings, form)


# -- reading -------------------------------------------------------------------------------------


def read_rates(text: str, table: str) -> _Rates:
    """Read a table of rates."""
    at: list[str] = []
    found: list[tuple[float, float, float, float]] = []
    for where, row in csv_records(text, table, _NEEDED):
        k = _number(row, "k", where, low=0, high=_MOST_K)
        if k != int(k):
            raise DomainError(f"{where}: k must be a whole number; got {k:g}")
        batch = _number(row, "batch", where, low=1, high=_MOST_BATCH)
        tpot = _number(row, "tpot_ms", where, low=0, high=_MOST_MS)
        if tpot == 0:
            raise DomainError(f"{where}: tpot_ms must be above 0; got 0")
        at.append(where)
        found.append((k, batch, tpot / 1e3, _length(row, k, where)))
    if not found:
        raise DomainError(f"{table}: holds no rows")
    k_, batch_, tpot_, G = np.array(found).T
    return _Rates(at=tuple(at), k=k_, batch=batch_, tpot=tpot_, G=G)


def _length(row: dict[str, str], k: float, where: str) -> float:
    """Return the acceptance length of a row; a plain one needs none."""
    if not row.get("acceptance_length"):
        if k:
            raise DomainError(f"{where}: acceptance_length is missing; rows with k > 0 need it")
        return 1.0
    length = _number(row, "acceptance_length", where)
    if not 1 <= length <= k + 1:
        needed = f"in [1, {k + 1:g}] at k = {k:g}, the bonus token included" if k else "1 at k = 0"
        raise DomainError(f"{where}: acceptance_length must be {needed}; got {length:g}")
    return length


def _number(
    row: dict[str, str], name: str, where: str, *, low: float = -np.inf, high: float = np.inf
) -> float:
    text = row[name]
    if not text:
        raise DomainError(f"{where}: {name} is missing")
    try:
        value = float(text)
    except ValueError:
        value = np.nan
    if np.isnan(value):
        why = " (a decimal comma is not read; write a point)" * bool(_COMMA.fullmatch(text))
        raise DomainError(f"{where}: {name} must be a number; got {brief(text)}{why}")
    if not low <= value <= high:
        raise DomainError(f"{where}: {name} must be in [{low:g}, {high:g}]; got {value:g}")
    return value


_COMMA = re.compile(r"[+-]?\d+,\d+")


# -- whether rows can be true --------------------------------------------------------------------


def _check_plausible(
    rows: _Rates, limits: StepLimits, device: Device, target: Architecture
) -> None:
    """Refuse times that no engine takes, which are mostly times in another unit.

    Raises
    ------
    DomainError
        When a row's step or round is shorter or longer than `step_limits`.
    """
    step = rows.tpot * rows.G
    if (held := limits.hold(step)).all():
        return
    first = int(np.flatnonzero(~held)[0])
    took = f"{_ms(rows.tpot[first])} a token"
    if rows.k[first]:
        took += f" and {rows.G[first]:.4g} tokens a round are {_ms(step[first])} a round,"
    else:
        took += " is"
    if step[first] < limits.shortest[first]:
        broken = (
            f"less than an eighth of what one pass of {target.name} takes at least on "
            f"{device.name} ({_ms(limits.ideal[first])})"
        )
    else:
        broken = (
            f"more than {_ms(limits.longest[first])} (a hundred times the least time of the passes "
            f"of {target.name} on {device.name}, and 0.2 s of host time for each)"
        )
    raise DomainError(f"{rows.at[first]}: {took} {broken}: {_likely(rows, limits, held)}")


def _doubts(
    rows: _Rates, seen: dict[bool, Observation], base: Engine, found: EngineFit
) -> list[str]:
    """Return which values the fit moved far from the preset's, and which rows it misses."""
    doubts = []
    for name in found.told:
        spread = KERNEL_SPREAD if name == "kernels" else HOST_SPREAD
        factor = getattr(found.engine, name) / getattr(base, name)
        if abs(np.log(factor)) > _FAR * spread:
            doubts.append(f"{_value(found.engine, name)} is {factor:.3g} times the preset's")
    fitted = _tpot(rows, seen, found.engine)
    off = np.abs(np.log(fitted / rows.tpot))
    if (missed := off > _MISSED * ROW_SPREAD).any():
        worst = int(np.argmax(off))
        line = rows.at[worst].rpartition(":")[2]
        doubts.append(
            f"the fit misses {missed.sum()} of {missed.size} rows by more than "
            f"{np.expm1(_MISSED * ROW_SPREAD):.0%} (line {line}: {_ms(rows.tpot[worst])} a token, "
            f"fitted {_ms(fitted[worst])})"
        )
    return doubts


def _causes(rows: _Rates, limits: StepLimits, seen: dict[bool, Observation], base: Engine) -> str:
    """Return what may have led a fit astray; rates first where they would fit without a doubt."""
    units = []
    for name, seconds in _RATES[: 1 if (rows.batch == 1).all() else 2]:
        read = replace(rows, tpot=seconds(rows.tpot * 1e3, rows.batch))
        if not limits.likely(read.tpot * read.G).all():
            continue
        again = {
            drafted: replace(one, value=(read.batch / read.tpot)[(rows.k > 0) == drafted])
            for drafted, one in seen.items()
        }
        if not _doubts(read, again, base, fit_engine(base, list(again.values()))):
            units.append(name)
    first = f"tpot_ms may hold {' or '.join(units)}: read so, the rows agree with the preset. "
    return (
        f"{first * bool(units)}Check that tpot_ms holds milliseconds, then --model, --gpu, --tp, "
        "--context and the column batch; an eager or faulty engine is possible too"
    )


def _value(engine: Engine, name: str) -> str:
    """Return a value's name and, but for kernels, its time."""
    label = name.replace("_", " ")
    return label if name == "kernels" else f"{label} ({_ms(getattr(engine, name))})"


def _check_limits(found: EngineFit, table: str, causes: str) -> None:
    """Refuse values that `load_engine` would refuse in the file.

    Raises
    ------
    DomainError
        Names the first one.
    """
    for name in found.told:
        value, (low, high, unit) = getattr(found.engine, name), LIMITS[name]
        if not low <= value <= high:
            scale, shown = (1e3, " ms") if unit else (1.0, "")
            why = (
                f"{table}: {name.replace('_', ' ')} would be {value * scale:.4g}{shown}, and an "
                f"engine file takes {low * scale:g} to {high * scale:g}{shown}"
            )
            raise DomainError(". ".join([why, *[causes] * bool(causes)]))


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 1e3 else f"{value:.3g} ms"


def _likely(rows: _Rates, limits: StepLimits, held: NDArray[np.bool_]) -> str:
    """Return the unit that makes every row likely, or else the refused rows, or other causes."""
    plausible = {
        name: limits.likely(seconds(rows.tpot * 1e3, rows.batch) * rows.G)
        for name, seconds in _UNITS[: 4 if (rows.batch == 1).all() else 5]
    }
    if units := [name for name, good in plausible.items() if good.all()]:
        return f"tpot_ms seems to be in {' or '.join(units)}"
    units = [name for name, good in plausible.items() if good[~held].all()]
    least, most = rows.tpot[~held].min() / _ALIKE, rows.tpot[~held].max() * _ALIKE
    alike = held & (rows.tpot >= least) & (rows.tpot <= most)
    if units and not alike.any():  # rows of the same size would be in the same unit
        some = f"{(~held).sum()} of {held.size} rows"
        return f"tpot_ms seems to be in {' or '.join(units)} in {some}"
    return (
        "another unit does not explain it: check --model, --gpu and --tp, and that batch counts "
        "the sequences that run at once"
    )


# -- fitting -------------------------------------------------------------------------------------


def _observations(
    rows: _Rates,
    device: Device,
    target: Architecture,
    drafter: Drafter,
    context: int,
    how: Execution,
) -> dict[bool, Observation]:
    """Return plain rows (False) and drafted ones (True), each kind's passes timed as arrays."""
    found = {}
    for drafted in (False, True):
        these = (rows.k > 0) == drafted
        if not these.any():
            continue
        batch, k = rows.batch[these], np.maximum(rows.k[these], 1.0)
        requests = Requests.alike(float(context))
        one = served(device, target, drafter, requests, B=batch, k=k, execution=how)
        found[drafted] = Observation(
            served=one,
            what="drafted" if drafted else "plain",
            value=batch / rows.tpot[these],
            accepted=one.accepted_alike(rows.G[these]) if drafted else None,
        )
    return found


def _tpot(rows: _Rates, seen: dict[bool, Observation], engine: Engine) -> Floats:
    """Return the time per token of each row under an engine. [s]"""
    tpot = np.empty_like(rows.batch)
    for drafted, one in seen.items():
        these = (rows.k > 0) == drafted
        tpot[these] = rows.batch[these] / one.predicted(engine)
    return tpot


def _text(
    engine: Engine,
    base: Engine,
    found: EngineFit,
    rows: _Rates,
    before: Floats,
    after: Floats,
    warnings: list[str],
    form: str,
) -> str:
    each = list(zip(rows.k, rows.batch, rows.tpot, before, after, strict=True))
    if form == "json":
        names = ("batch", "tpot", "before", "after")
        return to_json(
            {
                "engine": engine.name,
                "warnings": warnings,
                "values": {
                    name: {"value": getattr(engine, name), "told": told}
                    for name, told in found.told.items()
                },
                "rows": [
                    {"k": int(k), **dict(zip(names, map(float, values), strict=True))}
                    for k, *values in each
                ],
            }
        )
    out = Out()
    out.line(f"{engine.title}")
    for warning in warnings:
        out.line(warning)
    order = ["value", "fitted", "decided by your rows", "before"]
    table = Table("value", "before", "fitted", "decided by your rows", order=order)
    for name, told in found.told.items():
        unit = 1.0 if name == "kernels" else 1e3
        was, now = getattr(base, name) * unit, getattr(engine, name) * unit
        label = name.replace("_", " ") + ("" if name == "kernels" else " (ms)")
        table.add_row(label, f"{was:.4g}", f"{now:.4g}", f"{told:.0%}")
    out.table(table)
    order = ["k", "batch", "tpot ms", "fitted", "before"]
    table = Table("k", "batch", "tpot ms", "before", "fitted", order=order)
    for k, B, tpot, b, a in each:
        table.add_row(f"{k:g}", f"{B:g}", f"{tpot * 1e3:.2f}", f"{b * 1e3:.2f}", f"{a * 1e3:.2f}")
    out.table(table)
    out.line(
        "decided by your rows, 0%: your rows do not determine this value and it keeps the "
        "preset's; 100%: your rows alone determine it"
    )
    return out.text()
