"""Files of draft heads: EAGLE-3 and 3.1, with experts or in parallel, DFlash and DSpark.

Layouts after sgl-project/SpecForge (``specforge/modeling/draft/``: ``llama3_eagle.py``,
``qwen3_moe_eagle.py``, ``peagle.py``, ``dflash.py``, ``dspark.py``) and vLLM
(``llama_eagle3.py``, ``v1/worker/gpu/spec_decode/dspark/speculator.py``), read 2026-11-29.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specmodel.architectures.families import (
    Family,
    attention,
    bias_flag,
    check_activation,
    depth,
    qwen_dense,
    qwen_windows,
    routed,
)
from specmodel.architectures.heads import eagle3_record
from specmodel.architectures.keys import Keys
from specmodel.architectures.parts import MLP, Attention, MoE
from specmodel.architectures.records import Architecture, Fusion, Layer
from specmodel.errors import brief


def _inner(keys: Keys, name: str) -> Keys:
    """Return the keys of an object inside the file."""
    values = keys.raw(name)
    if not isinstance(values, dict):
        raise keys.error(name, f"must be an object; got {brief(values)}")
    return Keys(values, f"{keys.where}: {name}")


# -- EAGLE-3 -------------------------------------------------------------------------------------


def _fused_norms(keys: Keys) -> int:
    """Return the norms on the target's features: one over all, one for each, both or none."""
    keys.flag("norm_output", False)  # where the feature of the next pass is taken
    keys.flag("norm_before_residual", False)
    before = keys.flag("norm_before_fc", False)
    if keys.raw("eagle_config", None) is not None:
        inner = _inner(keys, "eagle_config")
        fed = inner.raw("eagle_aux_hidden_state_layer_ids", None)
        if fed is not None and not (isinstance(fed, list) and len(fed) == 3):
            raise keys.error(
                "eagle_config", f"must name three layers that feed it; got {brief(fed)}"
            )
        if not inner.flag("use_aux_hidden_state", True):
            raise inner.error("use_aux_hidden_state", "must be true: features of three layers")
        before = inner.flag("norm_before_fc", before)
        inner.refuse_unread()
    if keys.whole("num_aux_hidden_states", 3) != 3:
        raise keys.error("num_aux_hidden_states", "must be 3")
    return before + keys.flag("fc_norm", False)


def _eagle3(
    keys: Keys, fields: dict[str, Any], base: Attention, mlp: MLP | MoE, layers: int
) -> Architecture:
    keys.raw("target_model_type", None)
    vocab = fields["vocab_size"]
    fields["head_vocab_size"] = keys.whole("draft_vocab_size", vocab, high=vocab)
    return eagle3_record(
        fields,
        base,
        mlp,
        target_hidden=keys.whole("target_hidden_size", fields["hidden_size"]),
        layers=layers,
        input_norms=_fused_norms(keys),
    )


def eagle3(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """An EAGLE-3 head, or one of EAGLE-3.1, which norms the features before it fuses them."""
    check_activation(keys, "hidden_act")
    for key in ("num_experts", "decoder_sparse_step", "moe_intermediate_size"):
        keys.raw(key, None)  # of the target
    layers = depth(keys)
    bias = bias_flag(keys)
    window = qwen_windows(keys, layers)[0]
    base = attention(keys, fields, qkv_bias=bias, output_bias=bias, window=window)
    mlp = MLP(width=keys.whole("intermediate_size"), bias=keys.flag("mlp_bias", False))
    return _eagle3(keys, fields, base, mlp, layers)


def eagle3_moe(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """An EAGLE-3 head whose one layer is a mixture of experts, with norms on queries and keys."""
    check_activation(keys, "hidden_act")
    for key in ("intermediate_size", "decoder_sparse_step", "mlp_only_layers"):
        keys.raw(key, None)  # of its class; the one layer is sparse whatever they say
    if depth(keys) != 1:
        raise keys.error("num_hidden_layers", "must be 1: heads with experts have one layer")
    if bias_flag(keys):
        raise keys.error("attention_bias", "must be false")
    window = qwen_windows(keys, 1)[0]
    base = attention(keys, fields, qk_norm="head", window=window)
    moe = routed(keys, experts="num_experts", width="moe_intermediate_size")
    return _eagle3(keys, fields, base, moe, 1)


def peagle(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """A P-EAGLE head: EAGLE-3's layers, and a learnt feature where the target has none yet."""
    head = eagle3(keys, fields)
    assert head.fusion is not None  # noqa: S101 (of every EAGLE-3 head)
    (first, _), *rest = head.layers
    masked = replace(first, extra_params=head.fusion.inputs)
    return replace(head, head_kind="peagle", layers=((masked, 1), *rest))


# -- block diffusion -----------------------------------------------------------------------------


def _block_head(keys: Keys, fields: dict[str, Any], kind: str) -> tuple[Architecture, Keys]:
    """Return layers of Qwen3's form over fused features of the target, and ``dflash_config``."""
    check_activation(keys, "hidden_act")
    block = keys.whole("block_size", low=2)
    deepest = keys.whole("num_target_layers")
    config = _inner(keys, "dflash_config")
    features = config.whole_list("target_layer_ids")
    if not features or len(set(features)) < len(features) or max(features) > deepest:
        raise keys.error("dflash_config", f"must list target_layer_ids up to {deepest}, each once")
    mode = config.text("attention_mode", "gqa")
    if mode not in ("gqa", "mha"):
        raise config.error("attention_mode", f"{brief(mode)} is not supported; gqa and mha are")
    projector = config.text("projector_type", kind)
    if projector != kind:
        raise config.error("projector_type", f"must be {kind}; got {brief(projector)}")
    config.raw("mask_token_id", None)
    head = replace(
        qwen_dense(keys, fields, qk_norm="head"),
        head_kind=kind,
        block_size=block,
        fusion=Fusion(inputs=len(features) * fields["hidden_size"], norms=1),
        own_embedding=False,
        own_head=False,
    )
    return head, config


def dflash(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """A DFlash head."""
    head, config = _block_head(keys, fields, "dflash")
    config.refuse_unread()
    return head


def dspark(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """A DSpark head: DFlash's layers, a bigram correction and a guess of what is accepted.

    The correction (``markov_*``) is an embedding of the draft before it and a projection to
    logits, both of `bigram_rank`; the guess (``confidence_head``) is one row with a bias, which
    counts as parameters of the last layer.
    """
    head, config = _block_head(keys, fields, "dspark")
    rank = config.whole("markov_rank", low=0)
    kind = config.text("markov_head_type", "vanilla")
    if rank and kind != "vanilla":
        raise config.error("markov_head_type", f"{brief(kind)} is not supported; vanilla is")
    config.raw("confidence_head_alpha", None)  # of its training
    with_bigram = config.flag("confidence_head_with_markov", False)
    if config.flag("enable_confidence_head"):
        *before, (last, count) = head.layers
        guess = fields["hidden_size"] + (rank if with_bigram else 0) + 1
        run: list[tuple[Layer, int]] = [(last, count - 1)] if count > 1 else []
        layers = (*before, *run, (replace(last, extra_params=guess), 1))
        head = replace(head, layers=layers)
    config.refuse_unread()
    return replace(head, bigram_rank=rank)


DRAFTS: dict[str, Family] = {
    "LlamaForCausalLMEagle3": eagle3,
    "Eagle3LlamaForCausalLM": eagle3,
    "Qwen3MoEForCausalLMEagle3": eagle3_moe,
    "PEagleDraftModel": peagle,
    "DFlashDraftModel": dflash,
    "DSparkDraftModel": dspark,
}
"""Readers of draft heads by their class."""
