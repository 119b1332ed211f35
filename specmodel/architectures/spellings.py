"""Models by the names that papers and tables give them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path

from specmodel.architectures.config import read_config, read_record
from specmodel.architectures.presets import model_names, normalise, preset
from specmodel.architectures.records import Architecture
from specmodel.dtypes import ACTIVATION_DTYPES, canonical_dtype
from specmodel.errors import ArchitectureError, DomainError, UnknownNameError, brief, did_you_mean
from specmodel.yaml_text import parse_yaml

_VERSIONS = re.compile(r"-(thinking|\d{4})(?=-|$)")
"""Ways to answer and release dates, which change no layer."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([mb])")
_TOLERANCE = 0.1  # 7B is said of 6.74e9 parameters; the sizes of a family are further apart


def load_model(model: str | os.PathLike[str] | Architecture) -> Architecture:
    """Return a model's architecture.

    Parameters
    ----------
    model : str or path
        A name as `find_model` reads it, a ``config.json``, a directory that holds one, or a
        model's record in JSON or YAML.

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
    if not isinstance(model, str | os.PathLike):
        raise ArchitectureError(
            f"model must be a name, a file or an Architecture; got {brief(model)}"
        )
    text = os.fspath(model)
    path = Path(text)
    if text.endswith((".yaml", ".yml")):
        return read_record(text)
    described = (path.exists() and not path.is_dir()) or (path / "config.json").is_file()
    if described or text.endswith(".json"):
        return read_config(text)
    if path.is_dir() and len(path.parts) > 1:
        raise ArchitectureError(f"{text}: holds no config.json")
    return find_model(text)


def find_model(text: str) -> Architecture:
    """Return the model that a name means, as papers, tables and model hubs spell it.

    The organisation, what the model was tuned for, release dates and remarks in parentheses or
    after a comma are left out; models of the same layers as one that ships are found by
    ``data/model_aliases.yaml``. A number format, at the end of the name or as a remark, is that
    of the weights. A size as a remark must be the model's.

    Parameters
    ----------
    text : str
        The name; never a path, unlike for `load_model`.

    Raises
    ------
    UnknownNameError
        When no model that ships is meant, or not one of the size that is stated.

    Examples
    --------
    >>> find_model("LLaMA-3.3-70B-Instruct").name
    'llama-3.1-70b'
    >>> find_model("T5-small (77M)").total_params, find_model("T5-small").total_params
    (76961152, 60506624)
    >>> find_model("Qwen/Qwen3-Next-80B-A3B-Instruct-FP8").weight_dtype
    'fp8'
    """
    first, *remarks = (part.strip() for part in re.split(r"[(),;]", text.lower()))
    name = _VERSIONS.sub("", normalise(first))
    sizes = [size for size in map(_SIZE.fullmatch, remarks) if size]
    formats = [found for found in map(_format, remarks) if found]
    meant = next((p for size in sizes if (p := _meant(f"{name}-{size[1]}{size[2]}"))), None)
    meant = meant or _meant(name)
    if meant is None and (found := _format(name.rpartition("-")[2])):
        meant, formats = _meant(name.rpartition("-")[0]), [found, *formats]
    if meant is None:
        family = [known for known in (*model_names(), *_aliases()) if _of_family(known, name)]
        hint = did_you_mean(name, [*model_names(), *_aliases()])
        if name and family:
            hint = f" is a family: say which, such as {', '.join(sorted(family)[:6])}"
        raise UnknownNameError(f"unknown model {brief(text)}{hint}")
    model = preset(meant)
    for size in sizes:
        stated = float(size[1]) * {"m": 1e6, "b": 1e9}[size[2]]
        if abs(model.total_params / stated - 1) > _TOLERANCE:
            raise UnknownNameError(
                f"unknown model {brief(text)}: {meant} has {model.total_params:,} parameters"
            )
    for dtype in formats:
        activations = dtype if dtype in ACTIVATION_DTYPES else None
        model = model.with_dtypes(dtype=activations, weights=dtype)
    return model


def _of_family(known: str, name: str) -> bool:
    """Return whether a known name is a family's, with a size behind it."""
    rest = known.removeprefix(name)
    return rest != known and re.match(r"(-distill.*)?-\d", rest) is not None


@cache
def _aliases() -> Mapping[str, str]:
    file = files("specmodel") / "data" / "model_aliases.yaml"
    aliases: dict[str, str] = parse_yaml(file.read_text(encoding="utf-8"))
    return aliases


def _meant(name: str) -> str | None:
    return name if name in model_names() else _aliases().get(name)


def _format(text: str) -> str | None:
    try:
        return canonical_dtype(text)
    except DomainError:
        return None
