"""Reading and writing of files: the one way in and the one way out.

A reader takes regular files and pipes up to a size, in UTF-8 or with a byte-order mark. A writer
checks its place before any work, writes beside it and renames, so that a file is there whole or
not at all, and replaces only what it was told to.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from specmodel.errors import DomainError, SpecmodelError, brief

MOST_BYTES = 64 * 2**20
"""Size of the largest text file that is read. [B]"""

MOST_CELL = csv.field_size_limit()
"""Length of the longest cell of a table. [character]"""

_MARKS = (
    (b"\xef\xbb\xbf", "utf-8"),
    (b"\xff\xfe\x00\x00", "utf-32-le"),
    (b"\x00\x00\xfe\xff", "utf-32-be"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
)
_DELIMITERS = ",;\t|"

Fault = Callable[[str], SpecmodelError]
"""Makes the error that a reader raises, from its text."""


def read_bytes(
    path: str | os.PathLike[str] | Traversable,
    *,
    fault: Fault = DomainError,
    most: int = MOST_BYTES,
) -> bytes:
    """Return what a regular file or a pipe holds.

    Parameters
    ----------
    path : path
        On disk, or of a resource of the package.
    fault : callable
        The error's class.
    most : int
        Largest size. [B]

    Raises
    ------
    SpecmodelError
        `fault`, as ``path: reason``: there is none, it is a folder or a device, it is larger
        than `most`, or it cannot be read.
    """
    if not isinstance(path, str | os.PathLike):
        return path.read_bytes()  # ships with the package
    check_input(path, fault=fault)
    try:
        with Path(path).open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise fault(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > most:
        raise fault(f"{path}: is larger than {most:,} bytes")
    return data


def check_input(path: str | os.PathLike[str], *, fault: Fault = DomainError) -> None:
    """Refuse a path that is neither a regular file nor a pipe.

    Raises
    ------
    SpecmodelError
        `fault`, as ``path: reason``.
    """
    try:
        mode = Path(path).stat().st_mode
    except FileNotFoundError:
        raise fault(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise fault(f"{brief(str(path))}: cannot be read: {reason}") from None
    if stat.S_ISDIR(mode):
        raise fault(f"{path}: is a folder, not a file")
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        raise fault(f"{path}: is no regular file")


def read_text(
    path: str | os.PathLike[str] | Traversable,
    *,
    fault: Fault = DomainError,
    most: int = MOST_BYTES,
) -> str:
    """Return the text of a file in UTF-8, or in what its byte-order mark says.

    Raises
    ------
    SpecmodelError
        `fault`, as `read_bytes` does, and when the file is no text.
    """
    return decoded(read_bytes(path, fault=fault, most=most), str(path), fault=fault)


def decoded(data: bytes, where: str, *, fault: Fault = DomainError) -> str:
    """Return bytes as text, with a line feed alone at the end of each line.

    Raises
    ------
    SpecmodelError
        `fault`, when they are no text.
    """
    mark, encoding = next(((m, e) for m, e in _MARKS if data.startswith(m)), (b"", "utf-8"))
    try:
        text = data[len(mark) :].decode(encoding)
    except UnicodeDecodeError:
        raise fault(f"{where}: not a text file in {encoding.upper()}") from None
    if "\0" in text:
        raise fault(f"{where}: not a text file (UTF-16 needs its byte-order mark)")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def parse_json(text: str, where: str, *, fault: Fault = DomainError) -> Any:
    """Return what a JSON text holds; NaN and infinities too, which model descriptions have.

    Raises
    ------
    SpecmodelError
        `fault`, when it is not valid, nests too deeply or names a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=no_duplicates)
    except RecursionError:
        raise fault(f"{where}: not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise fault(f"{where}: not valid JSON: {error}") from None


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object, or raise `ValueError` where a key occurs twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"key {brief(twice)} occurs twice")
    return values


def csv_rows(
    text: str, where: str, *, fault: Fault = DomainError
) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a table that hold anything, each with the line it ends on.

    Lines that start with ``#`` before the header are left out. A first line ``sep=X`` names the
    character between cells; without one it is the comma, semicolon, tab or bar that divides the
    header and the first row into most named columns, the comma where several do.

    Raises
    ------
    SpecmodelError
        `fault`, as ``path: line N: what is wrong``.
    """
    file = io.StringIO(text, newline="")
    before, delimiter = _to_header(file)
    reader = csv.reader(file, delimiter=delimiter)
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            why = (
                f"a cell of more than {MOST_CELL:,} characters"
                if "field limit" in str(error)
                else error
            )
            raise fault(f"{where}: line {before + reader.line_num}: {why}") from None
        if row is None:
            return
        if any(cell.strip() for cell in row):
            yield before + reader.line_num, row


_BLANK = f"{_DELIMITERS} \n"
_SEPARATOR = re.compile(rf'"?sep=([^\w\s"]|\t)"?[{_BLANK}]*', re.IGNORECASE)
_NAME = re.compile(rf"[^\W\d][^{_DELIMITERS}]*")


def _to_header(file: io.StringIO) -> tuple[int, str]:
    """Go to the header of a table; return how many lines are before it, and the delimiter."""
    before, stated = 0, ""
    while True:
        start = file.tell()
        line = file.readline()
        if before == 0 and (separator := _SEPARATOR.fullmatch(line)):
            stated = separator[1]
        elif not line or (line.strip(_BLANK) and not line.lstrip(' "').startswith("#")):
            break
        before += 1
    row = next((below for below in file if below.strip(_BLANK)), None)
    file.seek(start)
    return before, stated or max(_DELIMITERS, key=lambda one: _columns(line, row, one))


def _columns(header: str, row: str | None, delimiter: str) -> int:
    """Return how many named columns a delimiter makes of a header, at most a row's or 2."""
    try:
        cells = next(csv.reader([header], delimiter=delimiter), [])
    except csv.Error:  # the reader of the whole table says what is wrong
        return 0
    named = sum(_NAME.fullmatch(cell.strip()) is not None for cell in cells)
    return min(named, 2 if row is None else row.count(delimiter) + 1)


def csv_records(
    text: str, where: str, needed: Sequence[str] = (), *, fault: Fault = DomainError
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield ``path:line`` and the cells by column name of each row below a line of names.

    Raises
    ------
    SpecmodelError
        `fault`, when a needed column is missing, a name occurs twice, or a row has more cells
        than there are columns; cells that a row lacks are empty.
    """
    rows = csv_rows(text, where, fault=fault)
    _, head = next(rows, (0, []))
    names = [name.strip() for name in head]
    if missing := [name for name in needed if name not in names]:
        raise fault(f"{where}: no column {', '.join(missing)} (it has {brief(', '.join(names))})")
    if twice := sorted({name for name in names if name and names.count(name) > 1}):
        raise fault(f"{where}: column {brief(twice[0])} occurs twice")
    for line, cells in rows:
        if len(cells) > len(names) and any(cell.strip() for cell in cells[len(names) :]):
            raise fault(f"{where}:{line}: more cells than columns")
        padded = [*cells, *[""] * (len(names) - len(cells))]
        yield (
            f"{where}:{line}",
            {name: cell.strip() for name, cell in zip(names, padded, strict=False)},
        )


# -- writing -------------------------------------------------------------------------------------

_FORMATS = {".png": b"\x89PNG", ".pdf": b"%PDF"}


def check_output(
    path: str | os.PathLike[str],
    *,
    endings: Sequence[str],
    overwrite: bool = False,
    own_format: bool = False,
    own_start: str = "",
    what: str = "output",
) -> Path:
    """Return a path to which a file may be written; called before the work whose result it holds.

    Parameters
    ----------
    path : path
    endings : sequence of str
        What its name may end in, such as ``.yaml``.
    overwrite : bool
        Whether a regular file that is there may be replaced.
    own_format : bool
        Whether one may be replaced that is empty or holds the format its name says.
    own_start : str
        How a text begins that may be replaced.
    what : str
        What to call it in errors.

    Raises
    ------
    DomainError
        When the ending is another, the folder is not there or not writable, a file is there
        that may not be replaced, or something that is no regular file.
    """
    file = Path(path)
    if file.suffix.lower() not in endings:
        raise DomainError(f"{what} must end in {', '.join(endings)}; got {brief(str(path))}")
    if not file.parent.is_dir():
        raise DomainError(f"{file.parent}: no such folder")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise DomainError(f"{file.parent}: cannot be written to")
    try:
        mode = file.lstat().st_mode
    except FileNotFoundError:
        return file
    except OSError as error:
        raise DomainError(f"{brief(str(path))}: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise DomainError(f"{file}: is no regular file, and only those are replaced")
    if overwrite or ((own_format or own_start) and _holds_own_format(file, own_start)):
        return file
    kind = "report of this command" if own_start else file.suffix
    why = f"holds no {kind}" if own_format or own_start else "exists"
    more = "" if own_format or own_start else ", or --overwrite it"
    raise DomainError(f"{file}: {why}: choose another name{more}")


def _holds_own_format(file: Path, own_start: str) -> bool:
    with file.open("rb") as opened:
        start = opened.read(4096)
    if not start:
        return True
    if own_start:
        return start.startswith(own_start.encode())
    if file.suffix.lower() == ".svg":
        return b"<svg" in start or b"<!DOCTYPE svg" in start
    return start.startswith(_FORMATS[file.suffix.lower()])


@contextmanager
def written_beside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary name beside a path, and rename it to the path when the block is left.

    Nothing is left behind where the block raises.
    """
    target = Path(path)
    handle, name = tempfile.mkstemp(
        dir=target.absolute().parent, prefix=f".{target.stem}.", suffix=target.suffix
    )
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text in UTF-8, whole or not at all."""
    with written_beside(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
