"""The measurement table: a CSV that grows by whole lines, and the JSON beside it."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from calibrate.cases import COLUMNS, OPERATORS, Case, row_key
from specmodel.dtypes import BYTES
from specmodel.errors import ProfileError, brief
from specmodel.fields import Fields
from specmodel.files import csv_rows, parse_json, read_bytes, read_text, write_text
from specmodel.tables import check_sidecar

Row = dict[str, str]

_COUNTS = (
    *("m", "n", "k", "batch", "width", "context", "heads", "kv_heads", "head_dim", "experts"),
    *("top_k", "ranks", "bytes", "layers", "repeats"),
)


class Table:
    """Rows in a file; each is there in full or not at all.

    A file that exists is taken up again: a last line without its end (the run was killed while
    it wrote) is cut off.

    Raises
    ------
    ProfileError
        When the file is not a measurement table.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        whole = b""
        if path.exists():
            data = read_bytes(path, fault=ProfileError)
            head = (",".join(COLUMNS) + "\n").encode()
            if data[: len(head)] != head[: len(data)]:
                raise ProfileError(f"{path}: not a measurement table: its columns are others")
            whole = data[: data.rfind(b"\n") + 1]
            if len(whole) < len(data):
                os.truncate(path, len(whole))
        if not whole:
            path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
        self.rows = read_rows(path)
        self._done = {row_key(row) for row in self.rows}

    def __contains__(self, case: Case) -> bool:
        return case.key in self._done

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row and hand it to the operating system."""
        text = {column: _text(row.get(column)) for column in COLUMNS}
        check_row(text, f"{self.path}: new row")
        line = io.StringIO()
        csv.DictWriter(line, COLUMNS, lineterminator="\n").writerow(text)
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(line.getvalue())
        self.rows.append(text)
        self._done.add(row_key(text))


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.9g}"
    return " ".join(str(value).split())  # one line, whatever an error message holds


def read_rows(path: Path) -> list[Row]:
    """Read a table.

    Raises
    ------
    ProfileError
        As ``path: line``, when it is not a measurement table.
    """
    lines = csv_rows(read_text(path, fault=ProfileError), str(path), fault=ProfileError)
    if tuple(next(lines, (0, ()))[1]) != COLUMNS:
        raise ProfileError(f"{path}: not a measurement table: its columns are others")
    rows = []
    for number, cells in lines:
        if len(cells) != len(COLUMNS):
            raise ProfileError(f"{path}: line {number}: must have the columns {', '.join(COLUMNS)}")
        row = dict(zip(COLUMNS, cells, strict=True))
        check_row(row, f"{path}: line {number}")
        rows.append(row)
    return rows


def check_row(row: Mapping[str, str], where: str) -> None:
    """Check one row against the schema.

    Raises
    ------
    ProfileError
        When a column is missing or has a value it cannot have.
    """

    def require(holds: bool, column: str) -> None:
        if not holds:
            raise ProfileError(f"{where}: {column}: cannot be {brief(row.get(column))}")

    if set(row) != set(COLUMNS) or None in row.values():
        raise ProfileError(f"{where}: must have the columns {', '.join(COLUMNS)}")
    require(row["operator"] in OPERATORS, "operator")
    require(row["dtype"] in BYTES, "dtype")
    require(row["kv_dtype"] in ("", *BYTES), "kv_dtype")
    require(row["mode"] in ("graph", "eager"), "mode")
    for column in _COUNTS:
        require(row[column] == "" or row[column].isdecimal(), column)
    if row["note"].startswith("error:"):
        require(row["seconds"] == "", "seconds")
        return
    for column, low in (("seconds", 1e-12), ("spread", 0.0)):
        try:
            require(low <= float(row[column]) < 1e9, column)
        except ValueError:
            require(False, column)
    require(row["repeats"] not in ("", "0"), "repeats")


def sidecar_path(table: Path) -> Path:
    """Return the JSON that stands beside a table."""
    return table.with_suffix(".json")


def read_sidecar(table: Path) -> dict[str, Any]:
    """Read what stands beside a table; nothing where there is none yet.

    Raises
    ------
    ProfileError
        When it is not such a record.
    """
    path = sidecar_path(table)
    if not os.path.lexists(path):
        return {}
    found: dict[str, Any] = parse_json(
        read_text(path, fault=ProfileError), str(path), fault=ProfileError
    )
    keys = Fields(found, str(path), fault=ProfileError)
    if type(keys.raw("schema")) is not int or found["schema"] != 1:
        raise keys.error("schema", f"must be 1; got {brief(found['schema'])}")
    check_sidecar(keys)
    keys.mapping("device").text("device")
    keys.mapping("arguments")
    keys.mapping("kernels")
    for key in ("budget", "elapsed"):
        keys.number(key, low=0.0)
    sections = keys.mapping("sections")
    for name in sections.values:
        state = sections.mapping(name)
        state.whole("planned", low=0)
        state.whole("measured", 0, low=0)
    return found


def write_sidecar(table: Path, record: Mapping[str, Any]) -> None:
    """Replace the JSON beside a table in one step."""
    write_text(sidecar_path(table), json.dumps(record, indent=1) + "\n")


def measured(rows: Sequence[Row], operator: str) -> list[Row]:
    """Return the rows of one kind that have a time."""
    return [row for row in rows if row["operator"] == operator and row["seconds"]]
