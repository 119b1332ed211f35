"""Where a sweep writes: the output, and the folder beside it that holds the finished blocks.

Both are checked before anything is replaced or removed. Of what is at the output's name only a
regular file, or a store that holds what a sweep wrote and nothing else, is replaced; in the folder
only what a sweep made is removed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from specmodel.errors import DomainError
from specmodel.files import check_output, parse_json, read_text
from specmodel.sweeping.forms import FORMS
from specmodel.sweeping.plan import Block, Sweep, check_text
from specmodel.sweeping.store import check_replaceable

_PLAN = "plan.json"
_UNFINISHED = "unfinished specmodel sweep"
_VALUES, _REFUSED = ".npz", ".refused"
_BLOCK = re.compile(r"[0-9]+(-[0-9]+)+(\.npz|\.refused)")
_WRITING, _FINISHED, _REPLACED = "writing", "finished", "replaced"


def checked_place(path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Return where a sweep may write; called before the work, and again before the end.

    Parameters
    ----------
    path : path
        Ends in one of `FORMS`.
    overwrite : bool
        Whether a regular file, or a Zarr store that is as a sweep wrote it, may be replaced.

    Raises
    ------
    DomainError
        When the name is no UTF-8 text, the ending is unknown, the folder is not there or not
        writable, something is there that may not be replaced, or the name of the folder for
        finished blocks is in use.
    """
    target = Path(path)
    check_text(str(target), "output")
    if target.suffix.lower() == ".zarr" and target.is_dir() and not target.is_symlink():
        check_replaceable(target)
        if not overwrite:
            raise DomainError(f"{target}: exists: choose another name, or --overwrite it")
    else:
        check_output(target, endings=FORMS, overwrite=overwrite)
    if os.path.lexists(folder := _folder_of(target)):
        _check_folder(folder)
    return target


def _folder_of(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


def _check_folder(folder: Path) -> str:
    """Return the key of the plan whose blocks lie in a folder, after checking all that is in it."""
    stranger = DomainError(
        f"{folder}: is not the folder of an unfinished sweep: move it, or choose another name"
    )
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise stranger
    plan = folder / _PLAN
    if plan.is_symlink() or not plan.is_file():
        raise stranger
    try:
        state = parse_json(read_text(plan), str(plan))
    except DomainError:
        raise stranger from None
    if not isinstance(state, dict) or state.get("format") != _UNFINISHED:
        raise stranger
    for path in folder.iterdir():
        if not _is_made_by_a_sweep(path):
            raise DomainError(f"{path}: no sweep wrote it: move it, or choose another name")
    return str(state.get("key"))


def _is_made_by_a_sweep(path: Path) -> bool:
    """Whether something in the folder has a name and a kind that a sweep gives."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:  # a sweep that runs has just renamed it
        return True
    if path.name in (_FINISHED, _REPLACED):
        return stat.S_ISREG(mode) or stat.S_ISDIR(mode)
    named = path.name in (_PLAN, _WRITING) or _BLOCK.fullmatch(path.name) is not None
    return named and stat.S_ISREG(mode)


class Scratch:
    """The folder of finished blocks, its lock held."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.done = {path.stem for path in folder.iterdir() if _BLOCK.fullmatch(path.name)}

    def save(self, block: Block, values: dict[str, NDArray[Any]] | str) -> None:
        """Keep a block's variables, or why it has none: whole, or not at all."""
        writing = self._folder / _WRITING
        if isinstance(values, str):
            writing.write_text(values, encoding="utf-8")
        else:
            with writing.open("wb") as file:
                np.savez(file, **values)  # type: ignore[arg-type]
        ending = _REFUSED if isinstance(values, str) else _VALUES
        writing.replace(self._folder / f"{block.name}{ending}")

    def refusal(self, block: Block) -> str | None:
        """Return why a block has no variables; None where it has."""
        path = self._folder / f"{block.name}{_REFUSED}"
        return read_text(path) if path.exists() else None

    def values(self, block: Block) -> dict[str, NDArray[Any]]:
        """Return a block's variables.

        Raises
        ------
        DomainError
            When its file is damaged.
        """
        path = self._folder / f"{block.name}{_VALUES}"
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                return {name: stored[name] for name in block.variables}
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
            raise DomainError(
                f"{path}: is damaged: remove it and run the same sweep again ({error})"
            ) from None

    @property
    def finished(self) -> Path:
        """A free name for the file that goes to the output's place."""
        path = self._folder / _FINISHED
        _remove(path)
        return path

    def put(self, target: Path, *, overwrite: bool) -> None:
        """Move the finished file to the output's place, by renaming.

        Raises
        ------
        DomainError
            When something is there by now that may not be replaced, or it cannot be; it is left
            there, and the blocks are kept.
        """
        finished, aside = self._folder / _FINISHED, self._folder / _REPLACED
        checked_place(target, overwrite=overwrite)
        if not (finished.is_dir() and target.exists()):
            finished.replace(target)
            return
        target.rename(aside)
        try:
            finished.rename(target)
        except OSError as error:
            raise _put_back(aside, target, error.strerror) from None

    def remove(self, lock: TextIO) -> None:
        """Remove the folder; the plan goes last, so that one cut short is still a sweep's."""
        for entry in self._folder.iterdir():
            if entry.name != _PLAN:
                _remove(entry)
        if sys.platform == "win32":  # an open file cannot be removed there
            lock.close()
        (self._folder / _PLAN).unlink()
        self._folder.rmdir()


def _put_back(aside: Path, target: Path, why: str | None) -> DomainError:
    """Rename a store that was not replaced to its own name; return what to say of it."""
    try:
        aside.rename(target)
    except OSError as error:
        return DomainError(
            f"{target}: cannot be replaced: {why}. What was there is now {aside} and cannot be "
            f"renamed back: {error.strerror}"
        )
    return DomainError(f"{target}: cannot be replaced: {why}")


def _recover(folder: Path, target: Path) -> None:
    """Rename to its own name what a run set aside that ended before it was replaced.

    Raises
    ------
    DomainError
        When something else is at that name by now.
    """
    aside = folder / _REPLACED
    if not aside.exists():
        return
    if not os.path.lexists(target):
        aside.rename(target)
    elif (folder / _FINISHED).exists():
        raise DomainError(f"{aside}: was at {target} before: move it, or choose another name")
    else:
        _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def scratch(plan: Sweep, target: Path) -> Iterator[tuple[Scratch, TextIO]]:
    """Yield the folder of a sweep's finished blocks, made or gone on with, and its lock.

    Raises
    ------
    DomainError
        When the folder is another plan's or no sweep's, or another sweep is writing.
    """
    folder, key = _folder_of(target), plan.key()
    if not os.path.lexists(folder):
        _create(folder, key)
    _check_folder(folder)
    with (folder / _PLAN).open("r+", encoding="utf-8") as lock:
        if not _locks(lock) or not _is_still(folder / _PLAN, lock):
            raise DomainError(f"another sweep is writing {target}")
        _recover(folder, target)
        if _check_folder(folder) != key:
            raise DomainError(
                f"{folder}: belongs to another sweep (or version): remove it, or choose another "
                "name"
            )
        _LOCKS.add(lock)
        try:
            yield Scratch(folder), lock
        finally:
            _LOCKS.discard(lock)


_LOCKS: set[TextIO] = set()


def _drop_locks() -> None:
    """Close a forked worker's copies: it would hold a lock on when its parent is killed."""
    for lock in _LOCKS:
        lock.close()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_drop_locks)


def _create(folder: Path, key: str) -> None:
    """Make a folder with its plan in it, in one step."""
    try:
        made = Path(tempfile.mkdtemp(dir=folder.absolute().parent, prefix=f".{folder.name}."))
    except OSError as error:
        raise DomainError(f"{folder}: cannot be made: {error.strerror}") from None
    state = {"format": _UNFINISHED, "key": key}
    (made / _PLAN).write_text(json.dumps(state) + "\n", encoding="utf-8")
    try:
        made.rename(folder)
    except OSError:  # another sweep was faster
        shutil.rmtree(made)


def _is_still(path: Path, file: TextIO) -> bool:
    """Whether a path is still the file that was opened: another sweep may just have removed it."""
    return path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno()))


if sys.platform == "win32":
    import msvcrt

    def _locks(file: TextIO) -> bool:
        """Lock a file for as long as it is open; return whether it was free."""
        file.seek(2**20)  # beyond what is read: a locked byte cannot be read
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _locks(file: TextIO) -> bool:
        """Lock a file for as long as it is open; return whether it was free."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
