"""What can be measured, as plain data: one case is one timed shape, one row of the table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

COLUMNS = (
    *("operator", "dtype", "mode", "m", "n", "k", "batch", "width", "context", "heads"),
    *("kv_heads", "head_dim", "kv_dtype", "experts", "top_k", "ranks", "bytes", "layers", "model"),
    *("seconds", "spread", "repeats", "kernel", "device", "note"),
)
"""Columns of a measurement table, in order; a blank is "not applicable"."""

OPERATORS = (
    *("stream", "gemm", "attention", "mla", "experts", "elementwise", "launch", "allreduce"),
    *("pass", "reference"),
)
"""What a row can be about."""

_SHAPE = COLUMNS[: COLUMNS.index("seconds")]
_NAMED = ("elementwise", "launch")  # kinds that `kernel` tells apart; elsewhere it is found out
_HALVES = {  # what shrinks a case that does not fit, first what it may lose most of
    "stream": ("bytes",),
    "gemm": ("n", "m"),
    "attention": ("batch", "context"),
    "experts": ("experts", "m"),
    "elementwise": ("m",),
    "pass": ("batch", "context"),
    "allreduce": ("bytes",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One shape to time; the fields are columns of the table, None where a column is blank."""

    operator: str
    dtype: str
    mode: str
    m: int | None = None
    n: int | None = None
    k: int | None = None
    batch: int | None = None
    width: int | None = None
    context: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    kv_dtype: str | None = None
    experts: int | None = None
    top_k: int | None = None
    ranks: int | None = None
    bytes: int | None = None
    layers: int | None = None
    model: str | None = None
    kernel: str | None = None

    def row(self) -> dict[str, Any]:
        """Return the columns that say what the case is."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    @property
    def key(self) -> tuple[str, ...]:
        """What tells it from every other case."""
        return row_key(self.row())

    @property
    def label(self) -> str:
        """A few words for a progress bar."""
        shown = {k: v for k, v in self.row().items() if isinstance(v, int)}
        names = [self.operator, self.dtype, self.model or "", self.kernel or ""]
        return " ".join([*filter(None, names), *(f"{k} {v}" for k, v in shown.items())])

    @property
    def size(self) -> int:
        """A number that grows with the memory it takes: the largest are prepared first."""
        if self.operator in ("attention", "pass"):
            return (self.batch or 1) * ((self.context or 0) + 1) * (self.layers or 1)
        return self.bytes or (self.n or 1) * (self.k or 1) * (self.experts or 1)

    def smaller(self) -> Case | None:
        """Return the case with one dimension halved, None where nothing can be."""
        for field in _HALVES.get(self.operator, ()):
            value = getattr(self, field)
            if value is not None and value // 2 >= max(1, (self.top_k or 0)):
                return replace(self, **{field: value // 2})
        return None


def row_key(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what tells a row's case from every other, the same for a row read back as text."""
    columns = (*_SHAPE, "kernel") if row["operator"] in _NAMED else _SHAPE
    return tuple(str(row.get(column, "")) for column in columns)


def distinct(cases: Iterable[Case]) -> list[Case]:
    """Return the cases without repeats, in order."""
    return list({case.key: case for case in cases}.values())
