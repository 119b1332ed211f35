"""Which matrices a checkpoint left unquantised: its list of modules, matched to layers by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from specmodel.architectures.families import runs
from specmodel.architectures.parts import MLP, MoE, Recurrent
from specmodel.architectures.records import Architecture, Layer
from specmodel.errors import ArchitectureError, SpecmodelError, brief

_OTHER = re.compile(
    r"lm_head|embed|norm|router|conv1d|e_score|vision|visual|audio|mm_projector|multi_modal|eh_proj"
)
"""Modules that are never quantised here, or are not part of the text model."""

_TOWER = re.compile(r"vision|visual|image|audio|mm_projector|multi_modal")
_BEFORE = ("model.", "model.language_model.", "language_model.model.", "backbone.", "")
_DENSE_BESIDE_EXPERTS = frozenset({"gemma4_text"})
"""Families whose layers have a dense feed-forward part (counted as shared) beside experts."""

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
_BARE = tuple((f"experts.{x}{n}", "experts") for x in ("", "0.") for n in _GATED)
_KNOWN = (*_ATTENTION, *_RECURRENT, *_DENSE, *_ROUTED, *_BARE)
"""Modules of a layer as checkpoints name them, and the role of each; None: never quantised."""


def exclude(
    architecture: Architecture, names: Iterable[str], error: Callable[[str], SpecmodelError]
) -> Architecture:
    """Keep the listed modules' matrices in the activation format.

    A name may be a module or one that holds it, with ``*`` for any text, with or without what
    stands before ``layers``; or a regular expression (``re:``) that matches from the start of
    a module's name. A role counts as excluded in a layer as soon as one of its projections is,
    the experts when each of them is. Blocks for multi-token prediction are quantised unless a
    name that is theirs alone leaves out a projection of them.

    Raises
    ------
    ArchitectureError
        By `error`, for a name that fits no module that a layer may have, or leaves out some
        experts of a layer.
    """
    layers = [layer for layer, count in architecture.layers for _ in range(count)]
    own = [dict(_modules(layer, architecture.model_type)) for layer in layers]
    kept: list[set[str]] = [set() for _ in layers]
    single: dict[int, set[str]] = {}
    mtp_quantised = architecture.mtp_quantised
    for name in names:
        pattern = _Pattern(name, error)
        if pattern.elsewhere:
            continue
        known = False
        if pattern.of_mtp or (pattern.index is not None and pattern.index >= len(layers)):
            before = "mtp." if pattern.of_mtp else ""
            index = 0 if pattern.of_mtp else pattern.index
            hit = [r for part, r in _KNOWN if pattern.matches(f"{before}layers.{index}.{part}")]
            mtp_quantised = mtp_quantised and not any(hit)
            known = True
            if not pattern.expression:
                continue
        for i in range(len(layers)) if pattern.only is None else (pattern.only,):
            found = [part for part, _ in _KNOWN if pattern.matches(f"layers.{i}.{part}")]
            known = known or bool(found)
            roles = {role for part in found if (role := own[i].get(part)) is not None}
            if pattern.expert is not None and "experts" in roles:
                single.setdefault(i, set()).add(pattern.expert)
                roles.remove("experts")
            kept[i] |= roles
        if not known and not _OTHER.search(name):
            raise error(f"{brief(name)} is not understood")
    for i, experts in single.items():
        mlp = layers[i].mlp
        if isinstance(mlp, MoE) and "experts" not in kept[i]:
            if len(experts) < mlp.experts:
                raise error(f"some experts of layer {i} are listed, not all: not supported")
            kept[i].add("experts")
    return _keep(replace(architecture, mtp_quantised=mtp_quantised), layers, kept)


class _Pattern:
    """One listed name.

    Attributes
    ----------
    expression : bool
        Whether it is a regular expression.
    elsewhere, of_mtp : bool
        Whether it is of an encoder of images or sound, or of multi-token prediction.
    index, only : int or None
        The layer it names, and that layer where it can match no other.
    expert : str or None
        The one expert it names.
    """

    def __init__(self, name: str, error: Callable[[str], SpecmodelError]) -> None:
        self.expression = name.startswith("re:")
        found = re.search(r"layers\\?\.(\d+)(?![\d)|\]])", name)
        self.index = None if found is None else int(found[1])
        after = name[found.end() :] if found is not None else ""
        ends = after.startswith(("\\.", "$")) or (
            not self.expression and (not after or after.startswith("."))
        )
        self.only = self.index if ends else None
        self.of_mtp = "mtp" in name
        self.elsewhere = not self.expression and bool(_TOWER.search(name.partition("layers.")[0]))
        one = re.search(r"experts\\?\.(\d+)", name)
        self.expert = None if one is None else one[1]
        if self.expression and one is not None:
            raise error(f"{brief(name)} names one expert: not supported")
        self._match = self._expression(name, error) if self.expression else self._plain(name)

    def matches(self, module: str) -> bool:
        """Return whether it covers a module, whose name starts at ``layers`` or ``mtp``."""
        before = _BEFORE if self.expression else ("",)
        return any(self._match(prefix + module) for prefix in before)

    @staticmethod
    def _plain(name: str) -> Callable[[str], object]:
        start = r"^.*?(?=\bmtp\b)" if "mtp" in name else r"^.*?(?=\blayers\.)"
        stem = re.sub(start, "", name).strip(".").removesuffix(".weight")
        stem = re.sub(r"experts\.\d+", "experts.0", stem)
        glob = re.escape(stem).replace(r"\*", ".*")
        return re.compile(rf"(?:.*\.)?{glob}(?:\..*)?").fullmatch

    @staticmethod
    def _expression(name: str, error: Callable[[str], SpecmodelError]) -> Callable[[str], object]:
        try:
            return re.compile(name.removeprefix("re:")).match
        except re.error as problem:
            raise error(f"{brief(name)} is no regular expression: {problem}") from None


def _modules(layer: Layer, model_type: str) -> Iterator[tuple[str, str | None]]:
    """Return the modules that a layer may hold under any of their names, with their roles."""
    if layer.mixer is not None:
        yield from _RECURRENT if isinstance(layer.mixer, Recurrent) else _ATTENTION
    if isinstance(layer.mlp, MoE) and model_type in _DENSE_BESIDE_EXPERTS:
        yield from ((part, "shared") for part, _ in _DENSE)
        yield from _BARE
    elif isinstance(layer.mlp, MoE):
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
