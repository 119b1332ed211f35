"""What was trained once, kept by a hash of everything it came from."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch

from specmodel.errors import CheckpointError

Module = TypeVar("Module")


def digest(parts: Iterable[bytes]) -> str:
    """Return 16 hexadecimal digits that stand for bytes."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:16]


def cache_folder() -> Path:
    """Return where this machine keeps what was trained."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "specmodel"


def kept(
    folder: Path, name: str, empty: Callable[[], Module], train: Callable[[], tuple[Module, Any]]
) -> tuple[Module, dict[str, Any]]:
    """Return a module with its weights, and the record of its training: read, or trained now.

    Parameters
    ----------
    folder : Path
        Of this corpus, code and seed.
    name : str
    empty : callable
        Returns the module without weights.
    train : callable
        Returns the trained module and its record.

    Raises
    ------
    CheckpointError
        When the folder holds something else under that name.
    """
    file = folder / f"{name}.pt"
    if not file.is_file():
        trained, record = train()
        _write(folder, name, trained, record)
    module: Any = empty()
    try:
        module.load_state_dict(torch.load(file, weights_only=True, map_location="cpu"))
        return module, json.loads((folder / f"{name}.json").read_text())
    except (OSError, ValueError, RuntimeError, UnpicklingError) as error:
        kind = type(error).__name__
        raise CheckpointError(f"{folder}: cannot be read ({kind}); delete it") from None


def _write(folder: Path, name: str, module: Any, record: dict[str, Any]) -> None:
    """Write weights and record so that a reader finds both whole, or none."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record))
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        torch.save(module.state_dict(), file)
    Path(file.name).replace(folder / f"{name}.pt")
