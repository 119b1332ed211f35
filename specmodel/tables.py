"""Measurement tables: one timed shape a row, read strictly.

A table that is cut short, mixes devices or states impossible times is refused with the line that
shows it: a fit would turn such a row into a number that nobody can trace.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmodel.dtypes import BYTES, KV_DTYPES
from specmodel.errors import FitError, UnknownNameError, brief, did_you_mean
from specmodel.fields import Fields
from specmodel.files import csv_rows, decoded, parse_json, read_bytes, read_text
from specmodel.forms import Floats, traffic
from specmodel.hardware import Device, load_device

COLUMNS = tuple(
    "operator dtype mode m n k batch width context heads kv_heads head_dim kv_dtype experts top_k "
    "ranks bytes layers model seconds spread repeats kernel device note".split()
)
"""Columns of a table, in order."""

TEXTS = ("operator", "dtype", "mode", "kv_dtype", "model", "kernel", "device", "note")
NUMBERS = tuple(name for name in COLUMNS if name not in TEXTS)

NEEDS: dict[str, tuple[str, ...]] = {
    "stream": ("bytes",),
    "gemm": ("m", "n", "k"),
    "attention": ("batch", "width", "context", "heads", "kv_heads", "head_dim"),
    "mla": ("batch", "width", "context", "heads"),
    "experts": ("m", "n", "k", "experts", "top_k"),
    "elementwise": ("m", "n", "bytes"),
    "launch": (),
    "allreduce": ("bytes", "ranks"),
    "pass": (),
    "reference": (),
}
"""Operators, and the columns that each one's rows must fill."""

LATENT, ROPE = 512, 64
"""Elements of an MLA cache entry: latent and rotary part."""

_TOUCHED = re.compile(r"(\d+) experts touched")
ANCHOR = "anchor"
"""In the note of rows that help a fit and that its errors are not told of."""

_LARGEST = 1e18  # more than any count or number of bytes of a shape
_LIMITS = {"seconds": (1e-9, 1e6), "spread": (0.0, 1e6)}
_WHOLE = set(NUMBERS) - {"seconds", "spread", "bytes"}
_ATTENTION_LIKE = ("attention", "mla")
_FAST, _SLOW, _SLACK = 2.0, 200.0, 1e-3  # over the datasheet's time; [s] on top of it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """Timed rows.

    Attributes
    ----------
    texts : mapping of str to ndarray of str
        Columns of text; empty where not applicable.
    numbers : mapping of str to ndarray
        Columns of numbers in SI units; NaN where not applicable.
    lines : ndarray of int
        Line of the file that each row stands on.
    source : mapping of str to str
        Table, checksum, and what a sidecar says of the run.
    failures : tuple of str
        Cases that could not run, as the table says.
    record : mapping
        What a sidecar holds, such as the device and the shapes of decoders (``models``).
    """

    texts: Mapping[str, NDArray[np.str_]]
    numbers: Mapping[str, Floats]
    lines: NDArray[np.intp]
    source: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.lines.size

    @property
    def unsteady(self) -> str | None:
        """Why its run is not to be trusted; None where it is, or only checked the code."""
        if self.record.get("arguments", {}).get("tiny"):
            return None
        return too_noisy(self.record.get("noise", {}))

    def where(self, keep: NDArray[np.bool_]) -> Table:
        """Return some of the rows."""
        return replace(
            self,
            texts={key: column[keep] for key, column in self.texts.items()},
            numbers={key: column[keep] for key, column in self.numbers.items()},
            lines=self.lines[keep],
        )

    def of(self, operator: str) -> Table:
        """Return the rows of one operator."""
        return self.where(self.texts["operator"] == operator)

    def formats(self, operator: str) -> tuple[str, ...]:
        """Return what an operator's fits are divided by: formats, KV formats, modes, kernels."""
        keys = self._keys(operator)[self.texts["operator"] == operator]
        return tuple(sorted(map(str, np.unique(keys))))

    def in_format(self, operator: str, key: str) -> Table:
        """Return the rows of one operator and one of its `formats`."""
        return self.where((self.texts["operator"] == operator) & (self._keys(operator) == key))

    def _keys(self, operator: str) -> NDArray[np.str_]:
        if operator in _ATTENTION_LIKE:
            return np.where(
                self.texts["kv_dtype"] == "", self.texts["dtype"], self.texts["kv_dtype"]
            )
        if operator == "launch":
            replay = self.texts["kernel"] == "graph replay"
            return np.where(replay, "replay", self.texts["mode"])
        return self.texts["kernel" if operator == "elementwise" else "dtype"]


def read_table(path: str | Path, *, device: Device | None = None) -> Table:
    """Read a measurement table.

    Parameters
    ----------
    path : path
        CSV in UTF-8 with the columns `COLUMNS`; ``TABLE.json`` beside it is read when there.
    device : Device, optional
        The device it is said to be of; times are checked against its datasheet.

    Raises
    ------
    FitError
        As ``path: line N: what is wrong``.
    """
    path = Path(path)
    raw = read_bytes(path, fault=FitError)
    text = decoded(raw, str(path), fault=FitError)
    if not text.strip():
        raise FitError(f"{path}: empty")
    last = text.count("\n") + (not text.endswith("\n"))
    if not text.endswith("\n"):
        raise FitError(f"{path}: line {last}: cut short, no end of line")
    lines = csv_rows(text, str(path), fault=FitError)
    _, header = next(lines)
    if tuple(header) != COLUMNS:
        raise FitError(f"{path}: line 1: {_header_fault(header)}")
    rows: list[dict[str, Any]] = []
    kept: list[int] = []
    failures: list[str] = []
    for line, fields in lines:
        row = _row(fields, f"{path}: line {line}")
        if math.isnan(row["seconds"]):
            failures.append(f"{row['operator']}: {row['note'].removeprefix('error:').strip()}")
        else:
            rows.append(row)
            kept.append(line)
    if not rows:
        raise FitError(f"{path}: no timed row")
    sidecar, record = _sidecar(path.with_suffix(".json"))
    table = Table(
        texts={key: np.array([row[key] for row in rows], dtype=np.str_) for key in TEXTS},
        numbers={key: np.array([row[key] for row in rows]) for key in NUMBERS},
        lines=np.array(kept, dtype=np.intp),
        source={"table": path.name, "sha256": hashlib.sha256(raw).hexdigest(), **sidecar},
        failures=tuple(failures),
        record=record,
    )
    wanted = record.get("rows")
    if isinstance(wanted, int) and len(rows) + len(failures) < wanted:
        raise FitError(
            f"{path}: line {last}: cut short, the run wrote {wanted} rows and "
            f"{len(rows) + len(failures)} are here"
        )
    _check_duplicates(table, str(path))
    _check_device(table, str(path), device)
    if device is not None:
        check_times(table, str(path), device)
    return table


def _header_fault(header: list[str]) -> str:
    for name in COLUMNS:
        if name not in header:
            return f"column {brief(name)} is missing{did_you_mean(name, header)}"
    return f"columns must be {','.join(COLUMNS)}"


def _row(fields: list[str], where: str) -> dict[str, Any]:
    if len(fields) != len(COLUMNS):
        why = " (cut short?)" if len(fields) < len(COLUMNS) else ""
        raise FitError(f"{where}: {len(fields)} of {len(COLUMNS)} fields{why}")
    row: dict[str, Any] = {}
    for name, field_ in zip(COLUMNS, (text.strip() for text in fields), strict=True):
        row[name] = field_ if name in TEXTS else _number(name, field_, where)
    operator = row["operator"]
    if operator not in NEEDS:
        raise FitError(
            f"{where}: unknown operator {brief(operator)}{did_you_mean(operator, NEEDS)}"
        )
    if row["dtype"] not in BYTES and (row["dtype"] or operator in _ATTENTION_LIKE):
        hint = did_you_mean(row["dtype"], BYTES)
        raise FitError(f"{where}: unknown dtype {brief(row['dtype'])}{hint}")
    if row["kv_dtype"] and row["kv_dtype"] not in KV_DTYPES:
        hint = did_you_mean(row["kv_dtype"], KV_DTYPES)
        raise FitError(f"{where}: unknown kv_dtype {brief(row['kv_dtype'])}{hint}")
    if row["mode"] not in ("graph", "eager"):
        raise FitError(f"{where}: mode must be graph or eager; got {brief(row['mode'])}")
    if math.isnan(row["seconds"]):
        if not row["note"].startswith("error:"):
            raise FitError(f"{where}: seconds: missing, and the note gives no error")
        return row
    for name in NEEDS[operator]:
        if math.isnan(row[name]):
            raise FitError(f"{where}: {name}: missing in a row of {operator}")
    return row


def _number(name: str, text: str, where: str) -> float:
    if not text:
        return math.nan
    try:
        value = float(text)
    except ValueError:
        raise FitError(f"{where}: {name}: must be a number; got {brief(text)}") from None
    if not math.isfinite(value):
        raise FitError(f"{where}: {name}: must be finite; got {brief(text)}")
    positive = name not in ("context", "spread")
    if value < 0 or (positive and value == 0):
        raise FitError(
            f"{where}: {name}: must be {'> 0' if positive else '>= 0'}; got {brief(text)}"
        )
    low, high = _LIMITS.get(name, (0.0, _LARGEST))
    if not low <= value <= high:
        raise FitError(f"{where}: {name}: must be in [{low:g}, {high:g}]; got {brief(text)}")
    if name in _WHOLE and value != int(value):
        raise FitError(f"{where}: {name}: must be a whole number; got {brief(text)}")
    return value


def _sidecar(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return what a sidecar says of the run in words, and all of it; empty where there is none."""
    if not os.path.lexists(path):
        return {}, {}
    record = parse_json(read_text(path, fault=FitError), str(path), fault=FitError)
    check_sidecar(Fields(record, str(path), fault=FitError))
    record = _without_nulls(record)
    wanted = ("torch", "driver", "threads", "date", "command")
    found = {key: str(record[key]) for key in wanted if record.get(key) is not None}
    if "torch" in found:
        found = {"engine": f"torch {found.pop('torch')}", **found}
    return found, record


def _without_nulls(record: Any) -> Any:
    """Return plain values without those that are null: they are as good as absent."""
    if isinstance(record, dict):
        return {key: _without_nulls(each) for key, each in record.items() if each is not None}
    return record


def check_sidecar(keys: Fields) -> None:
    """Check what this package reads of a sidecar; other keys are the run's own."""
    for key in ("torch", "date", "command"):
        if keys.raw(key, None) is not None:
            keys.text(key)
    for key in ("threads", "rows"):
        keys.whole_or_none(key, None, low=0)
    for key in ("memory_capacity", "cache"):
        keys.number_or_none(key, low=0.0)
    device = keys.mapping("device", {})
    device.whole_or_none("multiprocessors", None)
    device.text("kind", "")
    keys.mapping("arguments", {}).flag("tiny", False)
    noise = keys.mapping("noise", {})
    for key in noise.values:
        noise.number(key, low=-math.inf if key == "drift" else 0.0)
    peak = keys.mapping("peak", {})
    peak.number_or_none("memory_bandwidth", low=0.0)
    rates = peak.mapping("flops", {})
    for dtype in rates.values:
        rates.number(dtype, low=0.0)
    models = keys.mapping("models", {})
    for name in models.values:
        models.mapping(name)
    if "memory_capacity" in keys.values:  # of a calibration run, which states all of these
        keys.whole("threads")
        keys.number("cache", low=0.0)
        for key in ("reference", "rows"):  # without them the run's verdict would be lost
            keys.mapping("noise").number(key, low=0.0)


MOST_REFERENCE_SPREAD = 0.15
"""Interquartile range over median of the reference point's times, above which a run is refused."""

MOST_ROW_SPREAD = 0.25
"""The same of a typical row's repeated timings."""


def too_noisy(noise: Mapping[str, float]) -> str | None:
    """Return why a run is too unsteady to fit anything to, None where it is steady.

    Parameters
    ----------
    noise : mapping of str to float
        A sidecar's ``noise``: ``reference`` and ``rows``, shares of the times measured. [-]
    """
    for key, most, what in (
        ("reference", MOST_REFERENCE_SPREAD, "the reference point varied by {:.0%} during the run"),
        ("rows", MOST_ROW_SPREAD, "repeated timings of one shape varied by {:.0%}"),
    ):
        if noise.get(key, 0.0) > most:
            return f"{what.format(noise[key])}, and at most {most:.0%} is accepted"
    return None


def refuse_noise(table: Table) -> None:
    """Raise where the run that made a table was too unsteady.

    Raises
    ------
    FitError
        Naming the table and how much its times varied.
    """
    if table.unsteady is not None:
        raise FitError(
            f"{table.source['table']}: too noisy to trust: {table.unsteady}: measure again on a "
            "quieter machine, into another table"
        )


def _check_duplicates(table: Table, where: str) -> None:
    shape = [name for name in COLUMNS if name not in ("seconds", "spread", "repeats", "note")]
    columns = [(table.texts if name in TEXTS else table.numbers)[name] for name in shape]
    seen: dict[tuple[str, ...], int] = {}
    notes = table.texts["note"]
    for line, note, *values in zip(table.lines, notes, *columns, strict=True):
        if values[0] == "reference":  # repeated on purpose, to see drift
            continue
        key = (*map(str, values), str(note) if values[0] == "experts" else "")
        if key in seen:
            raise FitError(f"{where}: line {line}: the same shape as line {seen[key]}")
        seen[key] = int(line)


def _check_device(table: Table, where: str, device: Device | None) -> None:
    names = table.texts["device"]
    if (other := names != names[0]).any():
        at = int(np.argmax(other))
        raise FitError(
            f"{where}: line {table.lines[at]}: device {brief(str(names[at]))}, "
            f"but {brief(str(names[0]))} before it"
        )
    if device is None or not names[0]:
        return
    try:
        found = load_device(str(names[0]))
    except UnknownNameError:
        return  # a name that no record claims, such as a CPU's
    if found.name != device.name:
        raise FitError(
            f"{where}: line {table.lines[0]}: a table of {brief(str(names[0]))}, not "
            f"of {device.title}"
        )


def check_times(table: Table, where: str, device: Device) -> None:
    """Refuse times that the device cannot have taken, the usual sign of another unit.

    Raises
    ------
    FitError
        Naming the line: faster than twice the datasheet's rates (data larger than twice the
        cache), or slower than 200 times the datasheet's time plus 1 ms (CPUs excepted).
    """
    for operator in ("stream", "gemm", "attention", "mla", "experts", "elementwise"):
        rows = table.of(operator)
        moved, flops = traffic(operator, features(rows, operator))
        peak = np.array([_peak(device, dtype) for dtype in rows.texts["dtype"]])
        seconds = rows.numbers["seconds"]
        cached = moved <= 2 * (device.l2_cache or 0.0)
        bandwidth, rate = moved / seconds, flops / seconds
        too_fast = ~cached & (bandwidth > _FAST * device.memory_bandwidth) | (rate > _FAST * peak)
        ideal = moved / device.memory_bandwidth + flops / peak
        # one thread of a server's CPU is that much slower than the whole
        limit = np.inf if device.family == "cpu" else _SLOW
        bad = too_fast | (seconds > limit * ideal + _SLACK)
        if bad.any():
            at = int(np.argmax(bad))
            raise FitError(
                f"{where}: line {rows.lines[at]}: {seconds[at]:g} s for this {operator} would be "
                f"{bandwidth[at] / 1e9:.3g} GB/s and {rate[at] / 1e12:.3g} TFLOP/s, which "
                f"{device.title} cannot do: are seconds in another unit, or is it another device?"
                if too_fast[at]
                else f"{where}: line {rows.lines[at]}: {seconds[at]:g} s for this {operator} is "
                f"{seconds[at] / ideal[at]:.3g} times what {device.title} needs: are seconds in "
                "another unit?"
            )


def _peak(device: Device, dtype: str) -> float:
    return device.peak_flops.get(dtype, max(device.peak_flops.values()))


def plain_format(dtype: str) -> str:
    """Return the number format of a way to file measurements: without block scales."""
    return str(dtype).removesuffix("_block")


# -- from columns to what forms take -------------------------------------------------------------


def features(table: Table, operator: str) -> dict[str, Floats]:
    """Return the features of one operator's rows, as `specmodel.forms` names them."""
    c = table.numbers
    each = np.array([BYTES.get(plain_format(dtype), 2.0) for dtype in table.texts["dtype"]])
    if operator == "gemm":
        return {
            "m": c["m"],
            "n": c["n"],
            "k": c["k"],
            "weight_bytes": c["n"] * c["k"] * each,
            "activation_bytes_each": each,
        }
    if operator in _ATTENTION_LIKE:
        kept = [
            BYTES[kv or dtype]
            for kv, dtype in zip(table.texts["kv_dtype"], table.texts["dtype"], strict=True)
        ]
        rows = c["batch"] * c["width"]
        pairs = rows * c["context"]  # the new positions' own pairs are neglected
        latent = operator == "mla"
        dim = np.full(len(table), 1.0 * LATENT + ROPE) if latent else 2 * c["head_dim"]
        moved = np.full(len(table), 2.0 * LATENT + ROPE) if latent else 2 * c["head_dim"]
        heads = np.ones(len(table)) if latent else c["kv_heads"]
        return {
            "batch": c["batch"],
            "kv_heads": heads,
            "width": c["width"],
            "context": c["context"],
            "kv_bytes": c["batch"] * heads * c["context"] * dim * np.array(kept),
            "flops": 2.0 * pairs * c["heads"] * moved,
            "query_bytes": rows * c["heads"] * moved * np.maximum(each, 2.0),
            "split": _splits(table),
            **({} if latent else {"head_dim": c["head_dim"]}),
        }
    if operator == "experts":
        matrices = np.where(noted(table, "ungated"), 2.0, 3.0)
        weights = matrices * c["n"] * c["k"]
        return {
            "m": c["m"],
            "top_k": c["top_k"],
            "experts": c["experts"],
            "touched": touched(table),
            "hidden": c["k"],
            "width": c["n"],
            "weight_bytes": weights * each,
            "flops": 2.0 * c["m"] * c["top_k"] * weights,
        }
    if operator == "allreduce":
        return {"bytes": c["bytes"], "ranks": c["ranks"]}
    moved = np.nan_to_num(c["bytes"], nan=0.0)
    return {"bytes": moved}


def groups(table: Table, operator: str) -> NDArray[np.intp]:
    """Return which shape each row is of; a held-out error leaves out whole shapes."""
    keys = {
        "gemm": ("n", "k"),
        "attention": ("heads", "kv_heads", "head_dim"),
        "mla": ("heads",),
        "experts": ("experts", "top_k", "n", "k"),
        "elementwise": ("n",),
    }.get(operator, ("bytes",))
    shape = np.stack([np.nan_to_num(table.numbers[key]) for key in keys], axis=-1)
    index: NDArray[np.intp] = np.unique(shape, axis=0, return_inverse=True)[1]
    return index.reshape(-1)


def touched(table: Table) -> Floats:
    r"""Return the distinct experts of each row: counted in its note, or by the routing it names.

    Balanced: min(E, m k). Power law: k for the first token and :math:`(E - k) \lambda / (1 +
    \lambda)`, :math:`\lambda = (m - 1) k / E`, for the others, the skew that the published tables
    imply (256 experts, top-8: 120 at 32 tokens, 205 at 128). Otherwise uniform:
    :math:`E (1 - (1 - k/E)^m)`.
    """
    m, e, k = (table.numbers[key] for key in ("m", "experts", "top_k"))
    later = (m - 1) * k / e
    skewed = k + (e - k) * later / (1 + later)
    uniform = e * (1 - (1 - np.minimum(k / e, 1.0)) ** m)
    known = [noted(table, "balanced"), noted(table, "power_law")]
    expected = np.select(known, [np.minimum(e, m * k), skewed], uniform)
    counts = [_TOUCHED.search(str(note)) for note in table.texts["note"]]
    said = np.array([float(count[1]) if count else np.nan for count in counts])
    return np.where(np.isnan(said), expected, said)


def noted(table: Table, word: str) -> NDArray[np.bool_]:
    """Return the rows whose note holds a word."""
    return np.char.find(table.texts["note"], word) >= 0


def _splits(table: Table) -> Floats:
    """FlashAttention-2 divides the context only where heads share their keys and values."""
    c = table.numbers
    v2 = np.char.find(table.texts["kernel"], "flash_attn") >= 0
    v2 &= ~(np.char.find(table.texts["kernel"], "fa3") >= 0)
    v2 &= ~(np.char.find(table.texts["kernel"], "fa4") >= 0)
    whole = v2 & (c["heads"] == c["kv_heads"]) | noted(table, "no split")
    return np.where(whole, 0.0, 1.0)
