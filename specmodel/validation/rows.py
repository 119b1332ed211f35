"""Rows of published results: the one reader of their CSV layout."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from specmodel.errors import DomainError
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
            values = json.loads(self.timing or "{}")
        except ValueError:
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
    file = Path(path)
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            return _rows(lines, str(file))
    except FileNotFoundError:
        raise DomainError(f"{file}: no such file") from None
    except IsADirectoryError:
        raise DomainError(f"{file}: is a folder") from None
    except UnicodeDecodeError:
        raise DomainError(f"{file}: not a text file in UTF-8") from None
    except csv.Error as error:
        raise DomainError(f"{file}: {error}") from None


def golden_rows() -> list[Row]:
    """Return the published results that ship with the package."""
    text = (files("specmodel") / "data" / "results.csv").read_text(encoding="utf-8")
    return _rows(text.splitlines(), "results.csv")


def _rows(lines: Iterable[str], where: str) -> list[Row]:
    table = csv.DictReader(lines)
    missing = [name for name in _NEEDED if name not in (table.fieldnames or ())]
    if missing:
        raise DomainError(f"{where}: no column {', '.join(missing)}")
    found: dict[str, Row] = {}
    for record in table:
        at = f"{where}:{table.line_num}"
        if None in record:
            raise DomainError(f"{at}: more cells than columns")
        texts = {name: _text(record.get(name)) for name in _TEXTS}
        numbers = {name: _number(record.get(name), name, at) for name in _NUMBERS}
        row = Row(**texts, **numbers)  # type: ignore[arg-type]
        if not row.id:
            raise DomainError(f"{at}: a row needs an id")
        if row.id in found:
            raise DomainError(f"{at}: id {row.id!r} occurs twice")
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
        raise DomainError(f"{at}: {name} must be a number; got {text!r}") from None
    low, high = _LIMITS[name]
    if not (math.isfinite(number) and low <= number <= high):
        raise DomainError(f"{at}: {name} must be {low:g} to {high:g}; got {text}")
    if name in _WHOLE and number != int(number):
        raise DomainError(f"{at}: {name} must be a whole number; got {text}")
    return number
