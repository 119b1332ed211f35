"""Rows of published results: the one reader of their CSV layout."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from specmodel.errors import DomainError, brief
from specmodel.files import csv_records, parse_json, read_text
from specmodel.overheads import study_of

_NEEDED = ("id", "hardware", "engine", "target_model", "drafter_kind", "batch", "speedup", "url")
_LIMITS = {
    "year": (1990, 2100),
    "n_gpus": (1, 1e6),
    "tp": (1, 1e6),
    "k": (0, 1000),
    "batch": (1, 1e6),
    "temperature": (0, 100),
    "tokens_per_step_G": (1, 1e4),
    "baseline_throughput": (1e-9, 1e12),
    "sd_throughput": (1e-9, 1e12),
    "speedup": (1e-6, 1e4),
}
_WHOLE = ("n_gpus", "tp", "k")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published measurement; empty text and None where the source does not say.

    `tokens_per_step_G` counts the bonus token; `k` is drafts for chains and depth for trees.
    `url` names the study, `source` the table or figure in it; `timing` is JSON, of which
    ``fraction_of_time`` (draft, verify, sampling, overhead) and ``T_p_ms`` are read.
    """

    id: str
    hardware: str = ""
    engine: str = ""
    target_model: str = ""
    target_dtype: str = ""
    drafter_kind: str = ""
    draft_model: str = ""
    tree: str = ""
    parallel: str = ""
    context_len: str = ""
    output_len: str = ""
    dataset: str = ""
    throughput_unit: str = ""
    timing: str = ""
    speedup_baseline: str = ""
    speedup_def: str = ""
    quality: str = ""
    source: str = ""
    url: str = ""
    year: float | None = None
    n_gpus: float | None = None
    tp: float | None = None
    k: float | None = None
    batch: float | None = None
    temperature: float | None = None
    tokens_per_step_G: float | None = None
    baseline_throughput: float | None = None
    sd_throughput: float | None = None
    speedup: float | None = None

    @property
    def study(self) -> str:
        """The study, whichever of its addresses `url` is."""
        return study_of(self.url)

    @property
    def timed(self) -> dict[str, Any]:
        """What `timing` holds."""
        try:
            values = parse_json(self.timing or "{}", "timing")
        except DomainError:
            return {}
        return values if isinstance(values, dict) else {}

    @property
    def plain_step(self) -> float | None:
        """Time of a plain step, ``T_p_ms`` of `timing`. [s]"""
        step = self.timed.get("T_p_ms")
        if not isinstance(step, int | float) or isinstance(step, bool):
            return None
        return step / 1e3 if 0 < step < 1e9 else None

    @property
    def series(self) -> tuple[object, ...]:
        """What rows have in common that differ in batch alone."""
        return (
            self.source,
            self.study,
            self.hardware,
            self.engine,
            self.target_model,
            self.drafter_kind,
            self.draft_model,
            self.k,
            self.tree,
            self.tp or self.n_gpus,
            self.target_dtype,
            self.dataset,
            self.context_len,
            self.temperature,
        )


_NUMBERS = tuple(f.name for f in fields(Row) if f.name in _LIMITS)
_TEXTS = tuple(f.name for f in fields(Row) if f.name not in _LIMITS)


def read_results(path: Path | str) -> list[Row]:
    """Read a table of results.

    Parameters
    ----------
    path : path
        A CSV file with a line of column names; columns that `Row` does not name are ignored.

    Raises
    ------
    DomainError
        When the file is missing or no such table; names file and line.
    """
    return _rows(read_text(path), str(path))


def golden_rows() -> list[Row]:
    """Return the published results that ship with the package."""
    text = (files("specmodel") / "data" / "results.csv").read_text(encoding="utf-8")
    return _rows(text, "results.csv")


def _rows(text: str, where: str) -> list[Row]:
    found: dict[str, Row] = {}
    for at, record in csv_records(text, where, _NEEDED):
        texts = {name: _text(record.get(name)) for name in _TEXTS}
        numbers = {name: _number(record.get(name), name, at) for name in _NUMBERS}
        row = Row(**texts, **numbers)  # type: ignore[arg-type]
        if not row.id:
            raise DomainError(f"{at}: a row needs an id")
        if row.id in found:
            raise DomainError(f"{at}: id {brief(row.id)} occurs twice")
        found[row.id] = row
    if not found:
        raise DomainError(f"{where}: holds no rows")
    return list(found.values())


def _text(value: str | None) -> str:
    text = (value or "").strip()
    return "" if text.lower() in ("nan", "null", "none") else text


def _number(value: str | None, name: str, at: str) -> float | None:
    text = _text(value)
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        raise DomainError(f"{at}: {name} must be a number; got {brief(text)}") from None
    low, high = _LIMITS[name]
    if not (math.isfinite(number) and low <= number <= high):
        raise DomainError(f"{at}: {name} must be {low:g} to {high:g}; got {brief(text)}")
    if name in _WHOLE and number != int(number):
        raise DomainError(f"{at}: {name} must be a whole number; got {brief(text)}")
    return number
