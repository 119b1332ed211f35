"""Read a Hugging Face ``config.json`` into an `Architecture`; refuse what is not understood."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specmodel.architectures.draft_configs import DRAFTS
from specmodel.architectures.encoder_decoder import t5
from specmodel.architectures.families import FAMILIES, Family, common
from specmodel.architectures.hybrids import HYBRIDS
from specmodel.architectures.keys import Keys
from specmodel.architectures.quantisation import from_hf_quant_config, with_quantisation
from specmodel.architectures.records import Architecture
from specmodel.architectures.serialise import MARK, from_record, from_yaml
from specmodel.architectures.sparse import SPARSE
from specmodel.errors import ArchitectureError, brief, did_you_mean
from specmodel.files import parse_json, read_text

_MOST_PARAMETERS = 1e14  # some thirty times the largest that anybody has named
_READERS: dict[str, Family] = {**FAMILIES, **HYBRIDS, **SPARSE, "t5": t5}
_WRAPPER = re.compile(
    r".*(vision|image|video|audio|media|multimodal|text_config|boa|boi|eoa|eoi|ignore_index).*"
)
"""Keys of a multimodal model's file that do not concern its text part."""
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
}
"""Defaults of classes whose multimodal files leave them out: transformers' Gemma3TextConfig
(configuration_gemma3.py at 008f5c8c, read 2026-11-29)."""
_HEAD = re.compile(r"Eagle|Medusa|MTP|NextN|Draft|DSpark|Speculator", re.IGNORECASE)
_SAME = ("tie_word_embeddings", "dtype", "torch_dtype", "vocab_size", "hidden_size")
_CAUSAL = re.compile(r".*(ForCausalLM|ForConditionalGeneration|LMHeadModel)")


def read_config(path: str | os.PathLike[str], *, name: str | None = None) -> Architecture:
    """Read a ``config.json``, the one in a directory, or a model's record in JSON.

    Parameters
    ----------
    path : path
        The file, or a directory that holds ``config.json``. A ``hf_quant_config.json`` beside
        a file of that name is read with it, and the checkpoint's size from a
        ``model.safetensors.index.json``.
    name : str, optional
        Name of the result; by default the file's or directory's.

    Raises
    ------
    ArchitectureError
        Naming the file and the missing, unknown or impossible key.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    values = _load(file)
    if MARK in values:
        return from_record(values, where=str(path))
    if name is None:
        name = file.resolve().parent.name if file.name == "config.json" else file.stem
        name = "".join(char if char.isprintable() else "?" for char in name)
    beside = file.with_name("hf_quant_config.json")
    if "quantization_config" not in values and file.name == "config.json" and beside.exists():
        values["quantization_config"] = from_hf_quant_config(Keys(_load(beside), str(beside)))
    model = from_dict(values, name=name, where=str(path))
    index = file.with_name("model.safetensors.index.json")
    if file.name == "config.json" and index.exists():
        model = replace(model, checkpoint_bytes=_checkpoint_bytes(Keys(_load(index), str(index))))
    return model


def from_dict(values: Mapping[str, Any], *, name: str, where: str) -> Architecture:
    """Build an `Architecture` from the parsed keys of a ``config.json``.

    A file that states no activation format (gpt-oss, MiniMax) is taken as bfloat16, and the
    result says so in its `notes`, as it does where a multimodal file leaves its class's defaults
    out (Gemma 3).

    Raises
    ------
    ArchitectureError
        Naming the missing, unknown or impossible key.
    """
    inner = values.get("text_config")
    taken: dict[str, Any] = {}
    if isinstance(inner, dict):
        values = _text_part(values, inner, where)
        taken = _class_defaults(values)
        values = {**values, **taken}
    keys = Keys({k: v for k, v in values.items() if k != "dtype" or v is not None}, where)
    family = _family(keys)
    try:
        result = with_quantisation(family(keys, common(keys, name, where)), keys)
    except (TypeError, OverflowError) as error:  # a value of a shape no family expects
        raise ArchitectureError(f"{where}: {error}") from error
    except ArchitectureError as error:  # of a part: it does not know the file
        if str(error).startswith(where):
            raise
        raise ArchitectureError(f"{where}: {error}") from None
    keys.refuse_unread()
    if result.total_params > _MOST_PARAMETERS:
        raise ArchitectureError(
            f"{where}: {result.total_params:.3g} parameters are more than any model has "
            f"(at most {_MOST_PARAMETERS:g})"
        )
    if not taken:
        return result
    stated = ", ".join(f"{key} {value}" for key, value in taken.items())
    return replace(result, notes=(*result.notes, f"from its class's defaults: {stated}"))


def _class_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys that a multimodal file leaves out where its text part is its class's default."""
    defaults = _DEFAULTS.get(str(values.get("model_type")), {})
    taken = {key: value for key, value in defaults.items() if key not in values}
    if "_sliding_window_pattern" in values or "layer_types" in values:
        taken.pop("sliding_window_pattern", None)
    return taken


def _checkpoint_bytes(keys: Keys) -> int:
    metadata = keys.raw("metadata")
    if not isinstance(metadata, dict):
        raise keys.error("metadata", f"must be an object; got {brief(metadata)}")
    return Keys(metadata, f"{keys.where}: metadata").whole("total_size", high=10**15)


def _family(keys: Keys) -> Family:
    classes = keys.raw("architectures", None) or []
    if not isinstance(classes, list) or not all(isinstance(c, str) for c in classes):
        raise keys.error("architectures", f"must be a list of class names; got {brief(classes)}")
    for name in classes:
        if name in DRAFTS:
            return DRAFTS[name]
    model_type = keys.text("model_type")
    if model_type not in _READERS:
        hint = did_you_mean(model_type, _READERS)
        raise keys.error("model_type", f"{brief(model_type)} is not supported{hint}")
    if any(_HEAD.search(c) for c in classes):
        raise keys.error(
            "architectures", f"{brief(classes[0])} is a draft head that is not supported"
        )
    if not all(_CAUSAL.fullmatch(c) for c in classes):
        raise keys.error(
            "architectures",
            f"{brief(classes[0])} is not supported (it is no causal language model)",
        )
    return _READERS[model_type]


def _text_part(outer: Mapping[str, Any], inner: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the text part of a multimodal model's file; the rest is left out."""
    values = {k: v for k, v in inner.items() if k != "architectures"}
    for key, value in outer.items():
        if key in ("model_type", "architectures") or _WRAPPER.fullmatch(key):
            continue
        if key in _SAME and values.get(key, value) != value:
            raise ArchitectureError(
                f"{where}: {key}: {brief(value)} contradicts {brief(values[key])} of text_config"
            )
        values.setdefault(key, value)
    if "torch_dtype" in values and "dtype" in values and values["dtype"] is not None:
        values.pop("torch_dtype")
    values["architectures"] = outer.get("architectures")
    return values


def read_record(path: str | os.PathLike[str]) -> Architecture:
    """Read a model's record in YAML.

    Raises
    ------
    ArchitectureError
        Naming the file and the missing, unknown or impossible key.
    """
    return from_yaml(read_text(path, fault=ArchitectureError), where=str(path))


def is_record(path: str | os.PathLike[str]) -> bool:
    """Return whether a readable file says that it is a model's record."""
    file = Path(path)
    return file.is_file() and MARK in read_text(file, fault=ArchitectureError)


def _load(file: Path) -> dict[str, Any]:
    text = read_text(file, fault=ArchitectureError)
    values = parse_json(text, str(file), fault=ArchitectureError)
    if not isinstance(values, dict):
        raise ArchitectureError(f"{file}: must hold a JSON object; got {type(values).__name__}")
    return values
