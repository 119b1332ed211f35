"""Model records as text and back: every field of an `Architecture`, nothing derived.

A ``config.json`` says what a family's code makes of it; a record says what the cost model sees,
so that a model that no family describes can be written down, or one changed by hand.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal

from specmodel.architectures.compressed import CompressedAttention
from specmodel.architectures.parts import (
    MLP,
    Attention,
    LatentAttention,
    Linear,
    MoE,
    Recurrent,
    Role,
)
from specmodel.architectures.records import Architecture, Fusion, Layer
from specmodel.dtypes import ACTIVATION_DTYPES, BYTES, KV_DTYPES, Quantisation
from specmodel.errors import ArchitectureError, brief, did_you_mean
from specmodel.files import parse_json
from specmodel.yaml_text import parse_yaml, yaml_text

MARK = "specmodel_architecture"
"""Key that marks a record; its value is the version of the form."""
_VERSION = 1
_MOST = 10**15
_MOST_LAYERS = 10_000

_PARTS = {
    part.__name__: part
    for part in (Attention, LatentAttention, CompressedAttention, Recurrent, MLP, MoE)
}
_ROLES = frozenset(typing.get_args(Role))
_HINTS: dict[type, dict[str, Any]] = {
    kind: typing.get_type_hints(kind)
    for kind in (Architecture, Layer, Fusion, Quantisation, Linear, *_PARTS.values())
}
_FROM = {"dtype": ACTIVATION_DTYPES, "kv_dtype": KV_DTYPES}
_HEADS = ("eagle", "eagle3", "peagle", "mtp", "dflash", "dspark", "medusa")


# -- out -----------------------------------------------------------------------------------------


def to_dict(architecture: Architecture) -> dict[str, Any]:
    """Return a record as plain values; fields at their default are left out."""
    values = _plain(architecture)
    values["layers"] = [{"count": n, **_plain(layer)} for layer, n in architecture.layers]
    return {MARK: _VERSION, **values}


def to_json(architecture: Architecture) -> str:
    """Return a record as JSON, which `from_json` reads back to an equal one.

    Examples
    --------
    >>> from specmodel.architectures import load_model
    >>> model = load_model("llama-3.1-8b")
    >>> from_json(to_json(model)) == model
    True
    """
    return json.dumps(to_dict(architecture), indent=1)


def to_yaml(architecture: Architecture) -> str:
    """Return a record as YAML, which `from_yaml` reads back to an equal one."""
    return yaml_text(to_dict(architecture), leaves_on_one_line=True)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        part = {"part": type(value).__name__} if type(value).__name__ in _PARTS else {}
        shown = {f.name: getattr(value, f.name) for f in fields(value)}
        kept = {f.name: shown[f.name] for f in fields(value) if not _is_default(f, shown[f.name])}
        return {**part, **{name: _plain(inner) for name, inner in kept.items()}}
    if isinstance(value, frozenset):
        return sorted(value)
    return [_plain(inner) for inner in value] if isinstance(value, tuple) else value


def _is_default(field: Field[Any], value: Any) -> bool:
    return field.default is not MISSING and value == field.default


# -- in ------------------------------------------------------------------------------------------


def from_json(text: str, *, where: str = "record") -> Architecture:
    """Read a record from JSON.

    Raises
    ------
    ArchitectureError
        Naming the missing, unknown or impossible key.
    """
    return from_record(parse_json(text, where, fault=ArchitectureError), where=where)


def from_yaml(text: str, *, where: str = "record") -> Architecture:
    """Read a record from YAML.

    Raises
    ------
    ArchitectureError
        Naming the missing, unknown or impossible key.
    """
    try:
        values = parse_yaml(text)
    except ValueError as error:
        raise ArchitectureError(f"{where}: {error}") from None
    return from_record(values, where=where)


def from_record(values: Any, *, where: str) -> Architecture:
    """Build an `Architecture` from a record's plain values.

    Raises
    ------
    ArchitectureError
        Naming the missing, unknown or impossible key.
    """
    if not isinstance(values, Mapping):
        raise ArchitectureError(f"{where}: must hold a mapping; got {type(values).__name__}")
    if "datasheet" in values or "fits" in values:
        kind = "a device's file, for --profile" if "datasheet" in values else "an engine's file"
        raise ArchitectureError(f"{where}: is {kind}")
    if MARK not in values:
        raise ArchitectureError(f"{where}: {MARK}: missing: this is no record of a model")
    if values[MARK] is True or values[MARK] != _VERSION:
        raise ArchitectureError(f"{where}: {MARK}: must be {_VERSION}; got {brief(values[MARK])}")
    rest = {key: value for key, value in values.items() if key != MARK}
    result: Architecture = _Reader(where).record(Architecture, rest, "")
    total, active = result.total_params, result.active_params
    if not 0 < active <= total:
        raise ArchitectureError(f"{where}: {active} parameters of {total} are used: impossible")
    return result


class _Reader:
    """Reads plain values into records by their annotated types, keeping track of the key."""

    def __init__(self, where: str) -> None:
        self._where = where

    def _error(self, key: str, problem: str) -> ArchitectureError:
        place = f"{self._where}: {brief(key)[1:-1]}" if key else self._where
        return ArchitectureError(f"{place}: {problem}")

    def record(self, kind: type, values: Any, key: str) -> Any:
        """Return a record of a kind."""
        if not isinstance(values, Mapping):
            raise self._error(key, f"must be a mapping; got {brief(values)}")
        known = {field.name: field for field in fields(kind)}
        for name in values:
            if name not in known:
                hint = did_you_mean(str(name), known)
                raise self._error(_join(key, name), f"unknown field of {kind.__name__}{hint}")
        built = {}
        for name, field in known.items():
            if name in values:
                built[name] = self._value(_HINTS[kind][name], values[name], field, _join(key, name))
            elif field.default is MISSING:
                raise self._error(_join(key, name), "missing")
        self._check(kind, built, key)
        try:
            return kind(**built)
        except ArchitectureError as error:
            raise self._error(key, str(error)) from None

    def _check(self, kind: type, built: dict[str, Any], key: str) -> None:
        """Refuse what fields that are fine alone cannot be together."""
        if kind is Architecture:
            if built["head_vocab_size"] > built["vocab_size"]:
                raise self._error("head_vocab_size", f"must be at most {built['vocab_size']}")
            if not built["layers"] and built.get("head_kind") is None:
                raise self._error("layers", "must hold a layer")
        if kind is MoE and built["experts"] % built.get("ranks", 1):
            raise self._error(_join(key, "ranks"), f"must divide {built['experts']} experts")
        if kind is Recurrent and not built["matrices"]:
            raise self._error(_join(key, "matrices"), "must hold a matrix")

    def _value(self, hint: Any, value: Any, field: Field[Any], key: str) -> Any:
        """Return a value of an annotated type."""
        options = typing.get_args(hint) if _is_union(hint) else (hint,)
        if types.NoneType in options:
            if value is None:
                return None
            options = tuple(option for option in options if option is not types.NoneType)
        if len(options) > 1:
            return self._part(options, value, key)
        (only,) = options
        if is_dataclass(only):
            return self.record(typing.cast(type, only), value, key)
        if typing.get_origin(only) is Literal:
            return self._one_of(typing.get_args(only), value, key)
        if typing.get_origin(only) in (tuple, frozenset):
            return self._many(only, value, field, key)
        return self._scalar(only, value, field, key)

    def _part(self, options: tuple[Any, ...], value: Any, key: str) -> Any:
        if not isinstance(value, Mapping):
            raise self._error(key, f"must be a mapping; got {brief(value)}")
        names = [option.__name__ for option in options]
        name = self._one_of(names, value.get("part"), _join(key, "part"))
        rest = {inner: x for inner, x in value.items() if inner != "part"}
        return self.record(_PARTS[name], rest, key)

    def _many(self, hint: Any, value: Any, field: Field[Any], key: str) -> Any:
        if not isinstance(value, list):
            raise self._error(key, f"must be a list; got {brief(value)}")
        if field.name == "layers":
            return self._layers(value, key)
        if typing.get_origin(hint) is frozenset:
            return frozenset(self._one_of(sorted(_ROLES), x, key) for x in value)
        inner = typing.get_args(hint)
        if inner[-1] is not Ellipsis and len(value) != len(inner):
            raise self._error(key, f"must hold {len(inner)} values; got {len(value)}")
        return tuple(self._value(inner[0], x, field, f"{key}[{i}]") for i, x in enumerate(value))

    def _layers(self, value: list[Any], key: str) -> tuple[tuple[Layer, int], ...]:
        runs: list[tuple[Layer, int]] = []
        for i, run in enumerate(value):
            here = f"{key}[{i}]"
            if not isinstance(run, Mapping):
                raise self._error(here, f"must be a mapping; got {brief(run)}")
            count = self._whole(run.get("count"), 1, _join(here, "count"), high=_MOST_LAYERS)
            rest = {name: x for name, x in run.items() if name != "count"}
            runs.append((self.record(Layer, rest, here), count))
        if sum(count for _, count in runs) > _MOST_LAYERS:
            raise self._error(key, f"must be at most {_MOST_LAYERS} layers")
        return tuple(runs)

    def _scalar(self, hint: Any, value: Any, field: Field[Any], key: str) -> Any:
        if hint is bool:
            if not isinstance(value, bool):
                raise self._error(key, f"must be true or false; got {brief(value)}")
            return value
        if hint is str:
            return self._text(value, field.name, key)
        zero = field.default == 0 or field.name in _MAY_BE_NONE_OF
        if hint is int:
            return self._whole(value, 0 if zero else 1, key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(key, f"must be a number; got {brief(value)}")
        if not (math.isfinite(value) and (value > 0 or (zero and value == 0)) and value <= _MOST):
            raise self._error(key, f"must be above 0 and finite; got {brief(value)}")
        return float(value)

    def _whole(self, value: Any, low: int, key: str, high: int = _MOST) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._error(
                key, f"must be a whole number from {low} to {high}; got {brief(value)}"
            )
        return value

    def _text(self, value: Any, name: str, key: str) -> str:
        if not isinstance(value, str) or not value.isprintable():
            raise self._error(key, f"must be printable text; got {brief(value)}")
        allowed = _FROM.get(name, _HEADS if name == "head_kind" else None)
        if name == "dtype" and "quantisation" in key:
            allowed = tuple(BYTES)
        return value if allowed is None else str(self._one_of(allowed, value, key))

    def _one_of(self, allowed: typing.Iterable[Any], value: Any, key: str) -> Any:
        choices = list(allowed)
        if not any(value is choice or (value == choice and type(value) is type(choice))
                   for choice in choices):  # fmt: skip
            shown = ", ".join(str(choice) for choice in choices)
            raise self._error(key, f"must be one of {shown}; got {brief(value)}")
        return value


_MAY_BE_NONE_OF = frozenset({"norms", "vector_params", "recurrent_elements", "convolved"})
"""Counts that may be 0 although they are not by default."""


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)
