"""Models that keep more of the context than they read: DeepSeek-V4, MiniMax-M3."""

from __future__ import annotations

from typing import Any

from specmodel.architectures.compressed import CompressedAttention
from specmodel.architectures.families import (
    Family,
    attention,
    bias_flag,
    check_activation,
    deepseek_moe,
    depth,
    mtp_blocks,
    routed,
    runs,
    sparse_layers,
)
from specmodel.architectures.keys import Keys
from specmodel.architectures.parts import MLP
from specmodel.architectures.records import Architecture, Layer
from specmodel.errors import brief


def _by_layer(keys: Keys, key: str, layers: int) -> list[bool]:
    """Return a list of 0 or 1, one for each layer."""
    stated = keys.whole_list(key)
    if len(stated) != layers or set(stated) - {0, 1}:
        raise keys.error(key, "must hold 0 or 1 for each layer")
    return [x == 1 for x in stated]


# -- DeepSeek-V4 ---------------------------------------------------------------------------------

_INDEXED, _HEAVY = 4, 128
"""The two compressions that public code knows: with an indexer, and without (transformers 5.24.0
``configuration_deepseek_v4.py``, vLLM ``models/deepseek_v4/compressor.py``, read 2026-11-29)."""


def deepseek_v4(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """DeepSeek-V4: a window, compressed older context, several residual streams.

    ``compress_ratios`` names the layers' compressions, 0 for the window alone; the last are of
    the blocks for multi-token prediction (vLLM, ``models/deepseek_v4/amd/mtp.py``).
    """
    check_activation(keys, "hidden_act")
    for key in ("qk_rope_head_dim", "hc_sinkhorn_iters", "hc_eps", "swiglu_limit",
                "compress_rope_theta", "num_hash_layers"):  # fmt: skip
        keys.raw(key, None)  # of rotary embedding, mixing, activation; how experts are chosen
    if bias_flag(keys):
        raise keys.error("attention_bias", "must be false")
    if keys.whole("num_key_value_heads") != 1:
        raise keys.error("num_key_value_heads", "must be 1")
    layers, mtp = depth(keys), mtp_blocks(keys)
    ratios = keys.whole_list("compress_ratios")
    if len(ratios) != layers + mtp:
        raise keys.error(
            "compress_ratios", f"must hold {layers} + {mtp} numbers (layers, MTP blocks)"
        )
    if set(ratios) - {0, _INDEXED, _HEAVY}:
        raise keys.error("compress_ratios", f"must be 0, {_INDEXED} or {_HEAVY} each")
    hidden, streams = fields["hidden_size"], keys.whole("hc_mult", low=2)
    heads, groups = keys.whole("num_attention_heads"), keys.whole("o_groups")
    if heads % groups:
        raise keys.error("o_groups", f"must divide {heads} heads; got {groups}")
    moe = deepseek_moe(keys)
    index = {
        "index_heads": keys.whole("index_n_heads"),
        "index_dim": keys.whole("index_head_dim"),
        "index_topk": keys.whole("index_topk"),
    }

    def layer(ratio: int, **kwargs: Any) -> Layer:
        mixer = CompressedAttention(
            heads=heads,
            head_dim=keys.whole("head_dim"),
            q_lora_rank=keys.whole("q_lora_rank"),
            output_groups=groups,
            output_rank=keys.whole("o_lora_rank"),
            window=keys.whole("sliding_window"),
            ratio=ratio or None,
            streams=streams,
            **(index if ratio == _INDEXED else {}),
        )
        return Layer(mixer=mixer, mlp=moe, **kwargs)

    merged = streams * streams * hidden + streams + 1  # the streams, before the final norm
    blocks = [layer(ratio) for ratio in ratios[: layers - 1]]
    blocks.append(layer(ratios[layers - 1], extra_params=merged))
    predicting = {layer(ratio, extra_params=merged) for ratio in ratios[layers:]}
    if len(predicting) > 1:
        raise keys.error("compress_ratios", "MTP blocks that differ are not supported")
    return Architecture(
        **fields,
        layers=runs(blocks),
        mtp_layers=mtp,
        mtp_layer=next(iter(predicting), None),
    )


# -- MiniMax-M3 ----------------------------------------------------------------------------------


def minimax_m3(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """MiniMax-M3: all keys and values are kept, blocks of them read on most layers.

    Layout after transformers 5.24.0 (``models/minimax_m3_vl/modeling_minimax_m3_vl.py``) and vLLM
    (``models/minimax_m3/nvidia/model.py``), read 2026-11-29.
    """
    check_activation(keys, "hidden_act")
    for key in ("rotary_dim", "swiglu_alpha", "swiglu_limit", "swiglu_beta", "use_gemma_norm",
                "num_nextn_predict_layers"):  # fmt: skip
        keys.raw(key, None)
    for key, only in (("use_qk_norm", True), ("attention_output_gate", False)):
        if keys.flag(key) != only:
            raise keys.error(key, f"must be {only}")
    if keys.text("qk_norm_type") != "per_head":
        raise keys.error("qk_norm_type", "must be per_head")
    keys.flag("use_routing_bias")  # a buffer of corrections, not a parameter
    width, shared = keys.whole("intermediate_size"), keys.whole("n_shared_experts", low=0)
    for key, expected in (
        ("moe_intermediate_size", width),
        ("shared_intermediate_size", width * shared),
    ):
        if keys.whole(key, expected, low=0) != expected:
            raise keys.error(key, f"must be {expected}, as intermediate_size implies")
    moe = routed(
        keys, experts="num_local_experts", width="intermediate_size", shared_width=width * shared
    )
    dense = MLP(width=keys.whole("dense_intermediate_size"))
    count = depth(keys)
    full = attention(keys, fields, qk_norm="head")
    index, indexed = _block_sparse(keys, count, full.kv_heads)
    sparse = attention(keys, fields, qk_norm="head", **index)
    layers = (
        Layer(mixer=sparse if blocks else full, mlp=moe if experts else dense)
        for blocks, experts in zip(indexed, sparse_layers(keys, count), strict=True)
    )
    fields["dense_width"] = dense.width
    return Architecture(
        **fields,
        layers=runs(layers),
        mtp_layers=mtp_blocks(keys, "num_mtp_modules"),
        mtp_layer=Layer(mixer=sparse, mlp=moe),
    )


def _block_sparse(keys: Keys, layers: int, kv_heads: int) -> tuple[dict[str, int], list[bool]]:
    """Return the indexer's sizes and which layers have one."""
    values = keys.raw("sparse_attention_config")
    if not isinstance(values, dict):
        raise keys.error("sparse_attention_config", f"must be an object; got {brief(values)}")
    config = Keys(values, f"{keys.where}: sparse_attention_config")
    if not config.flag("use_sparse_attention"):
        raise config.error("use_sparse_attention", "must be true")
    indexed = _by_layer(config, "sparse_attention_freq", layers)
    if _by_layer(config, "sparse_disable_index_value", layers) != indexed:
        raise config.error("sparse_disable_index_value", "must be 1 wherever attention is sparse")
    heads = config.whole("sparse_num_index_heads")
    if heads != kv_heads:
        raise config.error("sparse_num_index_heads", f"must be the {kv_heads} KV heads")
    if config.whole("sparse_init_block", low=0):
        raise config.error("sparse_init_block", "must be 0")
    config.whole("sparse_local_block", low=0)  # among the best blocks
    config.raw("sparse_score_type")
    sizes = {
        "index_heads": heads,
        "index_dim": config.whole("sparse_index_dim"),
        "index_topk": config.whole("sparse_topk_blocks") * config.whole("sparse_block_size"),
    }
    config.refuse_unread()
    return sizes, indexed


SPARSE: dict[str, Family] = {"deepseek_v4": deepseek_v4, "minimax_m3": minimax_m3}
"""Readers by ``model_type``."""
