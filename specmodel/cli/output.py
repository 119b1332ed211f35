"""Output forms: text, JSON, CSV; written in whatever encoding the reader has."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

_ANY_WIDTH = 10_000  # a table takes what it needs; a terminal wraps what it cannot show


def plain_table(*columns: str) -> Table:
    """Return a table of right-aligned columns."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


_ASCII = str.maketrans("\u2500\u2501\u2026", "--~")


def write(text: str) -> None:
    """Print text; rules become dashes, and what is left question marks, where needed."""
    if sys.stdout is None:
        return  # closed before we started
    encoding = sys.stdout.encoding or "ascii"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
    print(text)


class Out:
    """Collects lines and tables as text."""

    def __init__(self) -> None:
        self._file = io.StringIO()
        self._console = Console(file=self._file, width=_ANY_WIDTH, highlight=False)

    def line(self, text: str = "") -> None:
        """Add a line, never wrapped."""
        self._console.print(text, markup=False, soft_wrap=True)

    def table(self, table: Table) -> None:
        """Add a table."""
        self._console.print(table)

    def text(self) -> str:
        """Return everything, without trailing blanks."""
        lines = self._file.getvalue().splitlines()
        return "\n".join(line.rstrip() for line in lines).strip("\n")


def cell(value: Any) -> str:
    """Return one value for people."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def to_json(value: Any) -> str:
    """Return strict JSON; a NaN or an infinity would be an error."""
    return json.dumps(value, indent=2, allow_nan=False)


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the scalar fields of `rows` under one header."""
    columns = [key for key, value in rows[0].items() if not isinstance(value, dict | list)]
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")
