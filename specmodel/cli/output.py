"""Output forms: text, JSON, CSV; as wide as the reader's terminal, in the reader's encoding."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

_ANY_WIDTH = 10_000  # rich lays nothing out: lines and columns are as wide as they should be
_LEAST_FOLDED = 20  # a folded column narrower than this cannot be read
_WIDE, _NARROW = 3, 2  # blanks between columns

STYLES: Mapping[str, str] = {"on": "green", "too close to call": "yellow", "off": "red"}
"""Colour of each verdict on speculation."""

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_CONTROLS.pop(ord("\n"))
_CONTROLS.pop(ord("\t"))


class Rendered(str):
    """Text that `Out` made: the control characters in it are our own colours."""

    __slots__ = ()


def visible(text: str) -> str:
    r"""Return a text whose control characters, but for line feeds and tabs, are written out.

    Examples
    --------
    >>> print(visible("a\x1b[31mb"))
    a\x1b[31mb
    """
    return text.translate(_CONTROLS)


def shown_width() -> int | None:
    """Return the width that output keeps to, None where it has none. [character]

    The environment's COLUMNS where it is a positive number, else the terminal's.
    """
    columns = os.environ.get("COLUMNS", "")
    if re.fullmatch("[0-9]{1,9}", columns) and int(columns):
        return int(columns)
    if not _on_terminal():
        return None
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):  # a terminal that does not say
        return None


def _on_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def _in_colour() -> bool:
    """Return whether stdout is a terminal that shows colours, and NO_COLOR is unset."""
    if not _on_terminal():
        return False
    terminal = Console(file=sys.stdout)
    return terminal.color_system in ("standard", "256", "truecolor") and not terminal.no_color


def styled(text: str, style: str | None) -> Text:
    """Return a text in a colour, or in none."""
    return Text(visible(text).expandtabs(), style=style or "")


def _text(part: str | Text) -> Text:
    return styled(part, None) if isinstance(part, str) else part


def _size(text: Text) -> int:
    return max(map(cell_len, text.plain.split("\n")))


class Table:
    """Rows of cells under headings, which leave columns out where the width does not suffice.

    Parameters
    ----------
    columns : str
        Headings.
    order : sequence of str
        Headings, the most important first. Others are less important, the last one least.
    left : sequence of str
        Headings of columns aligned left.
    fold : str, optional
        Heading of the one column whose texts may take several lines.
    """

    def __init__(
        self,
        *columns: str,
        order: Sequence[str] = (),
        left: Sequence[str] = (),
        fold: str | None = None,
    ) -> None:
        self._columns = columns
        self._heads = [_text(name) for name in columns]
        self._ranks = [
            (order.index(name) if name in order else len(order), at)
            for at, name in enumerate(columns)
        ]
        self._left = left
        self._fold = None if fold is None else columns.index(fold)
        self._rows: list[list[Text]] = []

    def add_row(self, *cells: str | Text) -> None:
        """Add a row, a cell for each column."""
        self._rows.append([_text(cell) for cell in cells])

    def fitted(self, width: int | None) -> tuple[RichTable, list[str]]:
        """Return the table within a width, and the headings of columns left out.

        Parameters
        ----------
        width : int or None
            None: any. [character]
        """
        gap, sizes = self._sizes(width)
        table = RichTable(
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1) if gap == _WIDE else (0, 1, 0, 0),
            header_style="none",
        )
        for at, size in sizes.items():
            side: Any = "left" if self._columns[at] in self._left else "right"
            table.add_column(self._heads[at], justify=side, overflow="fold", width=size)
        for row in self._rows:
            table.add_row(*(row[at] for at in sizes))
        left_out = (name for at, name in enumerate(self._columns) if at not in sizes)
        return table, list(dict.fromkeys(left_out))

    def _sizes(self, width: int | None) -> tuple[int, dict[int, int]]:
        """Return the blanks between columns, and the width of each column that is kept."""
        every = zip(self._heads, *self._rows, strict=True)
        sizes = {at: max(map(_size, cells)) for at, cells in enumerate(every)}
        if width is None or _total(sizes.values(), _WIDE) <= width:
            return _WIDE, sizes

        def least(at: int) -> int:
            return min(sizes[at], _LEAST_FOLDED) if at == self._fold else sizes[at]

        while len(sizes) > 1 and _total(map(least, sizes), _NARROW) > width:
            del sizes[max(sizes, key=self._ranks.__getitem__)]
        excess = _total(sizes.values(), _NARROW) - width
        if excess > 0:
            narrowed = next((at for at in sizes if at == self._fold), next(iter(sizes)))
            sizes[narrowed] = max(1, sizes[narrowed] - excess)
        return _NARROW, sizes


def _total(sizes: Iterable[int], gap: int) -> int:
    """Return the width of a table: a blank, its columns and what is between them."""
    each = list(sizes)
    return 1 + sum(each) + gap * (len(each) - 1)


_ASCII = str.maketrans("\u2500\u2501\u2026", "--~")


def write(text: str) -> None:
    """Print text; rules become dashes, and what is left question marks, where needed."""
    if sys.stdout is None:
        return  # closed before we started
    if not isinstance(text, Rendered):
        text = visible(text)
    encoding = sys.stdout.encoding or "ascii"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
    print(text)


class Out:
    """Collects lines and tables as text, as wide and as coloured as stdout shows them."""

    def __init__(self) -> None:
        self._file = io.StringIO()
        self._width = shown_width()
        self._console = Console(
            file=self._file,
            width=_ANY_WIDTH,
            highlight=False,
            markup=False,
            emoji=False,
            force_jupyter=False,
            force_terminal=(coloured := _in_colour()),
            color_system="standard" if coloured else None,
        )

    def line(self, *parts: str | Text) -> None:
        """Add a line of parts joined; it wraps at words, two blanks further in, where needed."""
        whole = Text.assemble(*map(_text, parts))
        for text in whole.split("\n", allow_blank=True):
            for piece in _wrapped(text, self._width):
                self._console.print(piece, soft_wrap=True)

    def table(self, table: Table) -> None:
        """Add a table, and name the columns that the width leaves out."""
        shown, left_out = table.fitted(self._width)
        self._console.print(shown)
        if left_out:
            self.line(
                f"not shown in {self._width} columns: {', '.join(left_out)} (--format json or a "
                "wider terminal shows them)"
            )

    def pairs(self, pairs: Iterable[tuple[str, str]], *, most: int) -> None:
        """Add names with their values in a second column, or after a colon where it is too narrow.

        Parameters
        ----------
        pairs : iterable of tuple of str
        most : int
            Width beyond which a value takes several lines. [character]
        """
        texts = [(_text(name), _text(value)) for name, value in pairs]
        beside = max(_size(name) for name, _ in texts) + 2
        room = most if self._width is None else min(most, self._width - beside)
        if room >= _LEAST_FOLDED:
            table = RichTable(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
            table.add_column(width=beside - 2)
            table.add_column(overflow="fold", max_width=room)
            for name, value in texts:
                table.add_row(name, value)
            self._console.print(table)
            return
        for name, value in texts:
            self.line(name, ": ", value)

    def text(self) -> Rendered:
        """Return everything, without trailing blanks."""
        lines = self._file.getvalue().split("\n")
        return Rendered("\n".join(line.rstrip() for line in lines).strip("\n"))


def prose(text: str) -> Rendered:
    """Return lines of text that wrap at words where the reader's width is known."""
    out = Out()
    for line in text.split("\n"):
        out.line(line)
    return out.text()


def _wrapped(text: Text, width: int | None) -> list[Text]:
    """Return a line as lines within a width; a word longer than that stays whole."""
    if width is None or text.cell_len <= width:
        return [text]
    indent = " " * min(len(text.plain) - len(text.plain.lstrip()) + 2, width // 2)
    used, starts = 0, []
    for word in re.finditer(r"\s*\S+(?: = \S+)*", text.plain):  # k = 5 stays together
        size, bare = cell_len(word[0]), word[0].lstrip()
        if used and used + size > width:
            starts.append(word.end() - len(bare))
            used = len(indent) + cell_len(bare)
        else:
            used += size
    first, *others = text.divide(starts)
    lines = [first, *(Text(indent) + other for other in others)]
    for line in lines:
        line.rstrip()
    return lines


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
