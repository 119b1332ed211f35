"""The mark by which a sweep knows a Zarr store that it may replace.

The mark is a digest of all that the store holds. A program that opens the store and writes a
changed copy copies the mark too, and there it does not match.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from specmodel.errors import DomainError
from specmodel.files import parse_json, read_text

CONTENTS = "contents_sha256"
"""Attribute of a store that holds its mark."""

_ROOT = "zarr.json"
_OF_AN_ARRAY = re.compile(r"zarr\.json|c(/[0-9]+)*")


def contents(store: Path, attributes: Mapping[str, Any]) -> str:
    """Return the digest of a store's attributes, and of the names and bytes of its files.

    Parameters
    ----------
    store : Path
        Its root's metadata are left out: they hold the digest.
    attributes : mapping
        The root's attributes; `CONTENTS` is left out.
    """
    kept = {name: value for name, value in attributes.items() if name != CONTENTS}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    for path in sorted(store.rglob("*")):
        name = path.relative_to(store).as_posix()
        if name != _ROOT and path.is_file():
            with path.open("rb") as file:
                held = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"\n{held} {name}".encode(errors="surrogateescape"))
    return digest.hexdigest()


def check_replaceable(store: Path) -> None:
    """Check that a folder is a Zarr store that holds what a sweep wrote, and nothing else.

    Raises
    ------
    DomainError
        When it is none, when something else lies in it, or when its contents have changed.
    """
    attributes, arrays = _metadata(store)
    if CONTENTS not in attributes:
        raise _no_store(store)
    if (stranger := next(_strangers(store, arrays), None)) is not None:
        raise DomainError(f"{stranger}: no sweep wrote it: move it, or choose another name")
    if contents(store, attributes) != attributes[CONTENTS]:
        raise DomainError(
            f"{store}: holds other data than a sweep wrote there: choose another name"
        )


def _no_store(store: Path) -> DomainError:
    return DomainError(f"{store}: is a folder that no sweep wrote: choose another name")


def _metadata(store: Path) -> tuple[Mapping[str, Any], Container[str]]:
    """Return the attributes of a store's root, and the names of its arrays."""
    root = store / _ROOT
    if root.is_symlink() or not root.is_file():
        raise _no_store(store)
    try:
        held = parse_json(read_text(root), str(root))
        attributes, arrays = held["attributes"], held["consolidated_metadata"]["metadata"]
    except (DomainError, LookupError, TypeError):
        raise _no_store(store) from None
    if not isinstance(attributes, dict) or not isinstance(arrays, dict):
        raise _no_store(store)
    return attributes, arrays


def _strangers(store: Path, arrays: Container[str]) -> Iterator[Path]:
    """Yield what has no place in a store of these arrays, a folder before what lies in it."""
    for path in store.rglob("*"):
        array, _, within = path.relative_to(store).as_posix().partition("/")
        mode = path.lstat().st_mode  # a link is neither a file nor a folder
        if array == _ROOT and not within:
            belongs = stat.S_ISREG(mode)
        elif not within:
            belongs = array in arrays and stat.S_ISDIR(mode)
        else:
            named = array in arrays and _OF_AN_ARRAY.fullmatch(within) is not None
            belongs = named and (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
        if not belongs:
            yield path
