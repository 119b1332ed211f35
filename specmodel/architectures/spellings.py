"""Models by the names that papers and tables give them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from specmodel.architectures.presets import load_model, model_names, normalise
from specmodel.architectures.records import Architecture
from specmodel.dtypes import ACTIVATION_DTYPES, canonical_dtype
from specmodel.errors import DomainError, UnknownNameError, did_you_mean
from specmodel.yaml_text import parse_yaml

_VERSIONS = re.compile(r"-(thinking|\d{4})(?=-|$)")
"""Ways to answer and release dates, which change no layer."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([mb])")
_TOLERANCE = 0.1  # 7B is said of 6.74e9 parameters; the sizes of a family are further apart


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
    preset = next((p for size in sizes if (p := _preset(f"{name}-{size[1]}{size[2]}"))), None)
    preset = preset or _preset(name)
    if preset is None and (found := _format(name.rpartition("-")[2])):
        preset, formats = _preset(name.rpartition("-")[0]), [found, *formats]
    if preset is None:
        hint = did_you_mean(name, [*model_names(), *_aliases()])
        raise UnknownNameError(f"unknown model {text!r}{hint}")
    model = load_model(preset)
    for size in sizes:
        stated = float(size[1]) * {"m": 1e6, "b": 1e9}[size[2]]
        if abs(model.total_params / stated - 1) > _TOLERANCE:
            raise UnknownNameError(
                f"unknown model {text!r}: {preset} has {model.total_params:,} parameters"
            )
    for dtype in formats:
        activations = dtype if dtype in ACTIVATION_DTYPES else None
        model = model.with_dtypes(dtype=activations, weights=dtype)
    return model


@cache
def _aliases() -> Mapping[str, str]:
    file = files("specmodel") / "data" / "model_aliases.yaml"
    aliases: dict[str, str] = parse_yaml(file.read_text(encoding="utf-8"))
    return aliases


def _preset(name: str) -> str | None:
    return name if name in model_names() else _aliases().get(name)


def _format(text: str) -> str | None:
    try:
        return canonical_dtype(text)
    except DomainError:
        return None
