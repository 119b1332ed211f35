"""Models by name: small descriptions that ship with the package."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from importlib.resources import files

from specmodel.architectures.config import from_dict
from specmodel.architectures.records import Architecture

_SUFFIXES = re.compile(r"-(instruct|chat|it|base|hf)(?=-|$)")


@cache
def model_names() -> tuple[str, ...]:
    """Return the names of the models that ship with the package."""
    folder = files("specmodel") / "data" / "models"
    return tuple(
        sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".json"))
    )


@cache
def preset(name: str) -> Architecture:
    """Return a model by one of `model_names`."""
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
