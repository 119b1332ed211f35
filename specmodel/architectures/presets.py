"""Models by name: small descriptions that ship with the package."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path

from specmodel.architectures.config import from_dict, read_config, read_record
from specmodel.architectures.records import Architecture
from specmodel.errors import ArchitectureError, UnknownNameError, did_you_mean

_SUFFIXES = re.compile(r"-(instruct|chat|it|base|hf)(?=-|$)")


@cache
def model_names() -> tuple[str, ...]:
    """Return the names of the models that ship with the package."""
    folder = files("specmodel") / "data" / "models"
    return tuple(
        sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".json"))
    )


def load_model(model: str | os.PathLike[str] | Architecture) -> Architecture:
    """Return a model's architecture.

    Parameters
    ----------
    model : str or path
        A name from `model_names` (case, an organisation in front and ``-Instruct`` do not
        matter), a ``config.json``, a directory that holds one, or a model's record in JSON or
        YAML.

    Raises
    ------
    ArchitectureError
        When the name is unknown or the file is not understood.

    Examples
    --------
    >>> load_model("meta-llama/Llama-3.1-8B-Instruct").total_params
    8030261248
    """
    if isinstance(model, Architecture):
        return model
    text = os.fspath(model)
    path = Path(text)
    if text.endswith((".yaml", ".yml")):
        return read_record(text)
    if text.endswith(".json") or path.is_file() or (path / "config.json").is_file():
        return read_config(text)
    if path.is_dir() and len(path.parts) > 1:
        raise ArchitectureError(f"{text}: holds no config.json")
    name = normalise(text)
    if name not in model_names():
        raise UnknownNameError(f"unknown model {text!r}{did_you_mean(name, model_names())}")
    return _preset(name)


@cache
def _preset(name: str) -> Architecture:
    file = files("specmodel") / "data" / "models" / f"{name}.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    return replace(from_dict(values, name=name, where=f"preset {name}"), source=values["_source"])


def normalise(text: str) -> str:
    """Return a name as `model_names` spells it, as far as its form goes.

    Examples
    --------
    >>> normalise("meta-llama/Llama2-7B-chat")
    'llama-2-7b'
    """
    name = text.strip().lower().rsplit("/", 1)[-1].replace("_", "-").replace(" ", "-")
    if name in model_names():  # t5-base is a size
        return name
    name = _SUFFIXES.sub("", name.removeprefix("meta-"))
    return re.sub(r"^llama-?(\d)", r"llama-\1", name)
