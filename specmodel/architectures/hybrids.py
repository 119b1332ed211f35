"""Families that mix attention with recurrent layers, or whose layers differ one by one."""

from __future__ import annotations

from typing import Any

from specmodel.architectures.families import (
    Family,
    as_dtype,
    attention,
    bias_flag,
    check_activation,
    depth,
    layer_types,
    mtp_blocks,
    qwen_moe_parts,
    qwen_shared_moe,
    routed,
    runs,
)
from specmodel.architectures.keys import Keys
from specmodel.architectures.parts import MLP, Attention, FeedForward, Linear, Recurrent
from specmodel.architectures.records import Architecture, Layer
from specmodel.dtypes import BYTES
from specmodel.errors import brief


def _state_bytes(keys: Keys, key: str) -> float:
    """Return the bytes of one state element, float32 where the file says nothing. [B]"""
    stated = keys.raw(key, None)
    return BYTES["float32" if stated is None else as_dtype(keys, key, stated)]


def _state_out(inner: int, hidden: int) -> Linear:
    return Linear(
        name="state out", inputs=inner, outputs=hidden, role="attention output", split="inputs"
    )


def _gated_delta(keys: Keys, fields: dict[str, Any]) -> Recurrent:
    """Gated delta rule: keys and values of their own head counts, one decay and step a head."""
    hidden, kernel = fields["hidden_size"], keys.whole("linear_conv_kernel_dim")
    k_heads, v_heads = keys.whole("linear_num_key_heads"), keys.whole("linear_num_value_heads")
    k_dim, v_dim = keys.whole("linear_key_head_dim"), keys.whole("linear_value_head_dim")
    wide_k, wide_v = k_heads * k_dim, v_heads * v_dim
    if v_heads % k_heads:
        raise keys.error("linear_num_value_heads", f"must be a multiple of {k_heads}")
    convolved = 2 * wide_k + wide_v
    return Recurrent(
        name="gated delta",
        matrices=(
            Linear(name="state in", inputs=hidden, outputs=convolved + wide_v, role="attention"),
            Linear(name="decay in", inputs=hidden, outputs=2 * v_heads, role="router"),
            _state_out(wide_v, hidden),
        ),
        convolved=convolved,
        kernel=kernel,
        recurrent_elements=v_heads * k_dim * v_dim,
        vector_params=convolved * kernel + 2 * v_heads + v_dim,
        heads=k_heads,
        state_bytes_each=_state_bytes(keys, "mamba_ssm_dtype"),
        flops_per_element=8,
    )


def qwen3_next(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """Qwen3-Next and Qwen3.5: a gated attention layer after three of gated delta rule."""
    check_activation(keys, "hidden_act")
    for key in ("mtp_use_dedicated_embeddings",):
        keys.raw(key, None)
    count = depth(keys)
    if keys.flag("attn_output_gate", True) is not True:
        raise keys.error("attn_output_gate", "must be true")
    bias = bias_flag(keys)
    full = attention(
        keys, fields, qk_norm="head", output_gate=True, qkv_bias=bias, output_bias=bias
    )
    linear = _gated_delta(keys, fields)
    kinds = layer_types(keys, count, ("linear_attention", "full_attention"))
    interval = keys.whole("full_attention_interval", 4)
    if kinds is None:
        kinds = [
            "full_attention" if (i + 1) % interval == 0 else "linear_attention"
            for i in range(count)
        ]
    parts: list[FeedForward]
    if "num_experts" in keys.values:
        parts = list(qwen_moe_parts(keys, qwen_shared_moe(keys), count))
    else:
        keys.whole_list("mlp_only_layers")
        parts = [MLP(width=keys.whole("intermediate_size"))] * count
    layers = (
        Layer(mixer=full if kind == "full_attention" else linear, mlp=part)
        for kind, part in zip(kinds, parts, strict=True)
    )
    mtp = mtp_blocks(keys, "mtp_num_hidden_layers")
    return Architecture(**fields, layers=runs(layers), mtp_layers=mtp)


def _mamba2(keys: Keys, fields: dict[str, Any]) -> Recurrent:
    hidden, kernel = fields["hidden_size"], keys.whole("conv_kernel")
    heads, head_dim = keys.whole("mamba_num_heads"), keys.whole("mamba_head_dim")
    state, groups = keys.whole("ssm_state_size"), keys.whole("n_groups")
    inner = heads * head_dim
    convolved = inner + 2 * groups * state
    for key in ("mamba_proj_bias", "use_bias"):
        if keys.flag(key, False):
            raise keys.error(key, "must be false")
    bias = convolved if keys.flag("use_conv_bias", True) else 0
    return Recurrent(
        name="mamba2",
        matrices=(
            Linear(
                name="state in",
                inputs=hidden,
                outputs=inner + convolved + heads,
                role="attention",
            ),
            _state_out(inner, hidden),
        ),
        convolved=convolved,
        kernel=kernel,
        recurrent_elements=inner * state,
        vector_params=convolved * kernel + bias + 3 * heads + inner,
        heads=heads,
        state_bytes_each=_state_bytes(keys, "mamba_ssm_cache_dtype"),
    )


def nemotron_h(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """Nemotron-H: each layer is one part, spelt M (Mamba-2), * (attention), - (MLP) or E (MoE)."""
    check_activation(keys, "mlp_hidden_act", known=("relu2",))
    for key in (
        "chunk_size", "expand", "layer_norm_epsilon", "norm_eps", "mamba_hidden_act",
        "num_logits_to_keep", "rescale_prenorm_residual", "residual_in_fp32", "time_step_floor",
        "time_step_max", "time_step_min", "time_step_limit", "time_step_rank",
        "use_mamba_kernels", "sliding_window",
    ):  # fmt: skip
        keys.raw(key, None)
    pattern = keys.text("hybrid_override_pattern")
    if len(pattern) != depth(keys) or set(pattern) - set("M*-E"):
        raise keys.error("hybrid_override_pattern", "must hold M, *, - or E for each layer")
    if keys.flag("mlp_bias", False) or bias_flag(keys):
        raise keys.error("mlp_bias", "biases are not supported")
    head = "head_dim" if "head_dim" in keys.values else "attention_head_dim"
    star = Attention(
        heads=keys.whole("num_attention_heads"),
        kv_heads=keys.whole("num_key_value_heads"),
        head_dim=keys.whole(head),
    )
    parts: dict[str, Layer] = {
        "*": Layer(mixer=star, mlp=None, norms=1),
        "-": Layer(
            mixer=None, mlp=MLP(width=keys.whole("intermediate_size"), gated=False), norms=1
        ),
    }
    if "M" in pattern:
        parts["M"] = Layer(mixer=_mamba2(keys, fields), mlp=None, norms=1)
    if "E" in pattern:
        moe = routed(
            keys,
            experts="n_routed_experts",
            width="moe_intermediate_size",
            shared_width=(keys.whole_or_none("n_shared_experts", low=0) or 0)
            * keys.whole("moe_shared_expert_intermediate_size"),
            gated=False,
        )
        parts["E"] = Layer(mixer=None, mlp=moe, norms=1)
    return Architecture(**fields, layers=runs(parts[c] for c in pattern))


def jamba(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """Jamba: an attention layer among Mamba layers, experts on every other layer."""
    check_activation(keys, "hidden_act")
    for key in ("use_mamba_kernels", "use_mambapy", "use_associative_scan"):
        keys.raw(key, None)
    hidden, count = fields["hidden_size"], depth(keys)
    state, kernel = keys.whole("mamba_d_state"), keys.whole("mamba_d_conv")
    inner, rank = keys.whole("mamba_expand") * hidden, keys.whole("mamba_dt_rank")
    if keys.flag("mamba_proj_bias", False):
        raise keys.error("mamba_proj_bias", "must be false")
    bias = inner if keys.flag("mamba_conv_bias", True) else 0
    mamba = Recurrent(
        name="mamba",
        matrices=(
            Linear(name="state in", inputs=hidden, outputs=2 * inner, role="attention"),
            Linear(
                name="x out",
                inputs=inner,
                outputs=rank + 2 * state,
                role="attention",
                split="inputs",
            ),
            Linear(name="step in", inputs=rank, outputs=inner, bias=inner, role="attention"),
            _state_out(inner, hidden),
        ),
        convolved=inner,
        kernel=kernel,
        recurrent_elements=inner * state,
        vector_params=inner * kernel + bias + inner * state + inner + rank + 2 * state,
        heads=inner,
    )
    star = attention(keys, fields)
    dense = MLP(width=keys.whole("intermediate_size"))
    one = keys.values.get("num_experts") == 1  # then no router either
    moe: FeedForward = routed(keys, experts="num_experts", width="intermediate_size")
    moe = dense if one else moe
    every, first = keys.whole("attn_layer_period"), keys.whole("attn_layer_offset", low=0)
    moe_every, moe_first = (
        keys.whole("expert_layer_period"),
        keys.whole("expert_layer_offset", low=0),
    )
    if first >= every:
        raise keys.error("attn_layer_offset", f"must be below attn_layer_period {every}")
    layers = (
        Layer(
            mixer=star if i % every == first else mamba,
            mlp=moe if i % moe_every == moe_first else dense,
        )
        for i in range(count)
    )
    return Architecture(**fields, layers=runs(layers))


def nemotron_nas(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """Nemotron NAS (DeciLM): ``block_configs`` says for each layer what is left of it."""
    check_activation(keys, "hidden_act")
    keys.raw("num_key_value_heads", None)  # null: each block has its own
    if keys.flag("mlp_bias", False) or bias_flag(keys):
        raise keys.error("mlp_bias", "biases are not supported")
    blocks = keys.raw("block_configs")
    if not isinstance(blocks, list) or len(blocks) != depth(keys):
        raise keys.error("block_configs", "must hold an entry for each layer")
    heads, hidden = keys.whole("num_attention_heads"), fields["hidden_size"]
    layers = []
    for i, block in enumerate(blocks):
        where = f"{keys.where}: block_configs[{i}]"
        sections = block if isinstance(block, dict) else {}
        if not all(isinstance(sections.get(n), dict) for n in ("attention", "ffn")):
            raise keys.error("block_configs", f"entry {i} must describe attention and ffn")
        mixing, feeding = (Keys(sections[n], where) for n in ("attention", "ffn"))
        for key in ("unshifted_sink", "use_prefill_window_in_sink_attention", "num_sink_tokens"):
            mixing.raw(key, None)
        layers.append(
            Layer(
                mixer=_nas_attention(mixing, heads, hidden),
                mlp=_nas_feed_forward(feeding, hidden),
                norms=sum(not x.values.get("no_op") for x in (mixing, feeding)),
            )
        )
        mixing.refuse_unread()
        feeding.refuse_unread()
    return Architecture(**fields, layers=runs(layers))


def _nas_attention(keys: Keys, heads: int, hidden: int) -> Attention | None:
    group = keys.raw("n_heads_in_group", None)
    if keys.flag("no_op"):
        return None
    for key in ("replace_with_linear", "sparsify", "num_sink_tokens", "window_length"):
        if keys.raw(key, None):
            raise keys.error(key, f"{brief(keys.values[key])} is not supported")
    group = keys.whole("n_heads_in_group")
    if heads % group or hidden % heads:
        raise keys.error("n_heads_in_group", f"must divide {heads} heads; got {group}")
    return Attention(heads=heads, kv_heads=heads // group, head_dim=hidden // heads)


def _nas_feed_forward(keys: Keys, hidden: int) -> MLP | None:
    multiple = keys.raw("ffn_mult", None)
    if keys.flag("no_op"):
        return None
    if keys.raw("replace_with_linear", None) or keys.raw("sparsify", None):
        raise keys.error("replace_with_linear", "is not supported")
    if isinstance(multiple, bool) or not isinstance(multiple, int | float) or not multiple > 0:
        raise keys.error("ffn_mult", f"must be a positive number; got {brief(multiple)}")
    width = int(2 * multiple * hidden / 3)
    return MLP(width=-(-width // 256) * 256)


HYBRIDS: dict[str, Family] = {
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_next,
    "qwen3_5_moe_text": qwen3_next,
    "nemotron_h": nemotron_h,
    "nemotron-nas": nemotron_nas,
    "jamba": jamba,
}
"""Readers by ``model_type``."""
