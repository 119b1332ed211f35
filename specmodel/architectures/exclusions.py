"""Which matrices a checkpoint left unquantised: its list of modules, matched to layers by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from specmodel.architectures.families import runs
from specmodel.architectures.parts import MLP, MoE, Recurrent
from specmodel.architectures.records import Architecture, Layer
from specmodel.errors import ArchitectureError

_OTHER = re.compile(
    r"lm_head|embed|norm|router|conv1d|e_score|vision|visual|audio|mm_projector|multi_modal|mtp|eh_proj"
)
"""Modules that are never quantised here, or are not part of the text model."""

_GATED = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
_FEEDING = ("mlp", "feed_forward", "mixer", "block_sparse_moe")


def _attention() -> Iterator[tuple[str, str | None]]:
    yield "self_attention.query_key_value", "attention"
    yield "self_attention.dense", "attention output"
    for block in ("self_attn", "mixer", "attention"):
        for name in ("q", "k", "v", "qkv", "q_a", "q_b", "kv_b", "fused_qkv_a"):
            yield f"{block}.{name}_proj", "attention"
        for name in ("kv_a_proj_with_mqa", "indexer.wq_b", "indexer.wk"):
            yield f"{block}.{name}", "attention"
        yield f"{block}.indexer.weights_proj", None
        for name in ("o", "out"):
            yield f"{block}.{name}_proj", "attention output"


def _recurrent() -> Iterator[tuple[str, str | None]]:
    for block in ("linear_attn", "mamba", "mixer"):
        for name in ("in_proj", "in_proj_qkvz", "in_proj_qkv", "in_proj_z", "x_proj", "dt_proj"):
            yield f"{block}.{name}", "attention"
        for name in ("in_proj_ba", "in_proj_a", "in_proj_b"):
            yield f"{block}.{name}", None
        yield f"{block}.out_proj", "attention output"


def _dense() -> Iterator[tuple[str, str | None]]:
    for block in ("mlp", "feed_forward", "mixer"):
        for name in (*_GATED, "fc1", "fc2", "dense_h_to_4h", "dense_4h_to_h"):
            yield f"{block}.{name}", "mlp"


def _routed() -> Iterator[tuple[str, str | None]]:
    for block in _FEEDING:
        yield f"{block}.gate", None
        yield f"{block}.router", None
        yield f"{block}.shared_expert_gate", None
        for name in (*_GATED, "w1", "w2", "w3"):
            for expert in ("experts", "experts.0"):
                yield f"{block}.{expert}.{name}", "experts"
        for shared in ("shared_expert", "shared_experts"):
            for name in _GATED:
                yield f"{block}.{shared}.{name}", "shared"


_ATTENTION, _RECURRENT = tuple(_attention()), tuple(_recurrent())
_DENSE, _ROUTED = tuple(_dense()), tuple(_routed())
_KNOWN = (*_ATTENTION, *_RECURRENT, *_DENSE, *_ROUTED)
"""Modules of a layer as checkpoints name them, and the role of each; None: never quantised."""


def exclude(
    architecture: Architecture, names: Iterable[str], error: Callable[[str], ArchitectureError]
) -> Architecture:
    """Keep the listed modules' matrices in the activation format.

    A name may be a module or one that holds it, with ``*`` for any text, with or without what
    stands before ``layers``; or a regular expression (``re:``) that matches from the start of
    a module's name. A role counts as excluded in a layer as soon as one of its projections is.

    Raises
    ------
    ArchitectureError
        By `error`, for a name that fits no module that a layer may have.
    """
    layers = [layer for layer, count in architecture.layers for _ in range(count)]
    kept: list[set[str]] = [set() for _ in layers]
    mtp_quantised = architecture.mtp_quantised
    for name in names:
        matches = _matcher(name, error)
        index = re.search(r"layers\\?\.(\d+)(?![\d)|\]])", name)
        if "mtp" in name or (index is not None and int(index[1]) >= len(layers)):
            mtp_quantised = False  # the blocks behind the last layer
            continue
        known = False
        only = int(index[1]) if index is not None and _ends_index(name, index.end()) else None
        for i in range(len(layers)) if only is None else (only,):
            found = [(part, role) for part, role in _KNOWN if matches(f"layers.{i}.{part}")]
            known = known or bool(found)
            own = dict(_modules(layers[i]))
            kept[i] |= {role for part, role in found if role is not None and part in own}
        if not known and not _OTHER.search(name):
            raise error(f"{name!r} is not understood")
    return _keep(replace(architecture, mtp_quantised=mtp_quantised), layers, kept)


def _matcher(
    name: str, error: Callable[[str], ArchitectureError]
) -> Callable[[str], re.Match[str] | None]:
    """Return a test of a module's name, which starts at ``layers``."""
    if not name.startswith("re:"):
        stem = re.sub(r"^.*?(?=\blayers\.)", "", name).strip(".").removesuffix(".weight")
        glob = re.escape(stem).replace(r"\*", ".*")
        return re.compile(rf"(?:.*\.)?{glob}(?:\..*)?").fullmatch
    try:
        pattern = re.compile(name.removeprefix("re:"))
    except re.error as problem:
        raise error(f"{name!r} is no regular expression: {problem}") from None
    before = ("model.", "model.language_model.", "language_model.model.", "backbone.")

    def matches(module: str) -> re.Match[str] | None:
        found = (pattern.match(prefix + module) for prefix in before)
        return next((one for one in found if one), None)

    return matches


def _ends_index(name: str, end: int) -> bool:
    return end == len(name) or name[end:].lstrip("\\").startswith((".", "$"))


def _modules(layer: Layer) -> Iterator[tuple[str, str | None]]:
    """Return the modules that a layer may hold under any of their names."""
    if layer.mixer is not None:
        yield from _RECURRENT if isinstance(layer.mixer, Recurrent) else _ATTENTION
    if isinstance(layer.mlp, MoE):
        yield from _ROUTED
    elif isinstance(layer.mlp, MLP):
        yield from _DENSE


def _keep(architecture: Architecture, layers: list[Layer], kept: list[set[str]]) -> Architecture:
    """Return the model with the roles kept in each layer, or everywhere where each layer does."""
    quantisation = architecture.quantisation
    assert quantisation is not None  # noqa: S101 (the caller has just set it)
    roles = [_roles(layer, architecture.hidden_size) for layer in layers]
    if not any(found & quantisation.roles for found in roles):
        raise ArchitectureError(f"{quantisation.dtype} quantises nothing of {architecture.name}")
    everywhere = {
        role
        for role in quantisation.roles
        if any(role in found for found in roles)
        and all(role in k for k, found in zip(kept, roles, strict=True) if role in found)
    }
    partly = [frozenset(k - everywhere) & quantisation.roles for k in kept]
    return replace(
        architecture,
        layers=runs(replace(x, unquantised=k) for x, k in zip(layers, partly, strict=True)),
        quantisation=replace(quantisation, roles=quantisation.roles - everywhere),
    )


def _roles(layer: Layer, hidden: int) -> set[str]:
    found = {linear.role for linear in layer.linears(hidden)}
    return {*found, "experts"} if isinstance(layer.mlp, MoE) else {*found}
