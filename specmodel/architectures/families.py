"""Transformer families, from the keys of their ``config.json`` to an `Architecture`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from specmodel.architectures.keys import Keys
from specmodel.architectures.parts import MLP, Attention, LatentAttention, MoE
from specmodel.architectures.records import Architecture, Layer
from specmodel.dtypes import ACTIVATION_DTYPES, canonical_dtype
from specmodel.errors import DomainError, brief

Family = Callable[[Keys, dict[str, Any]], Architecture]
"""Builds a model from its keys and the fields that all families share."""

_MOST_LAYERS = 10_000  # no model has as many; a typo must not be built layer by layer
_GATED = {"silu", "swish", "swiglu", "swigluoai", "gelu_pytorch_tanh", "gelu"}


NO_DTYPE = "no dtype in its file: bfloat16 assumed"


def common(keys: Keys, name: str, where: str) -> dict[str, Any]:
    """Return the fields that every family has."""
    vocab = keys.whole("vocab_size")
    dtype = read_dtype(keys)
    stated = any(keys.values.get(key) is not None for key in ("dtype", "torch_dtype"))
    positions = keys.raw("max_position_embeddings", None)
    return {
        "name": name,
        "source": where,
        "model_type": keys.text("model_type"),
        "hidden_size": keys.whole(
            "d_model" if keys.values["model_type"] == "t5" else "hidden_size"
        ),
        "vocab_size": vocab,
        "dense_width": keys.whole_or_none("intermediate_size", None),
        "head_vocab_size": vocab,
        "tied_embeddings": keys.flag("tie_word_embeddings", False),
        "dtype": dtype,
        "kv_dtype": dtype,
        "notes": () if stated else (NO_DTYPE,),
        "max_positions": None if positions is None else keys.whole("max_position_embeddings"),
    }


def read_dtype(keys: Keys) -> str:
    """Return the activation format that the file states; bfloat16 where it states none."""
    key = "dtype" if "dtype" in keys.values else "torch_dtype"
    if keys.raw(key, None) is None:
        return "bfloat16"
    dtype = as_dtype(keys, key, keys.text(key))
    if "torch_dtype" in keys.values and keys.values["torch_dtype"] != keys.values[key]:
        raise keys.error("torch_dtype", f"{brief(keys.values['torch_dtype'])} contradicts {key}")
    if dtype not in ACTIVATION_DTYPES:
        raise keys.error(key, f"must be one of {', '.join(ACTIVATION_DTYPES)}; got {brief(dtype)}")
    return dtype


def as_dtype(keys: Keys, key: str, value: object) -> str:
    """Return the canonical name of a format, or raise naming the key."""
    try:
        return canonical_dtype(str(value), what=key)
    except DomainError as error:
        raise keys.error(key, str(error)) from None


def check_activation(keys: Keys, *names: str, known: Iterable[str] = _GATED) -> None:
    """Refuse an activation that the family's feed-forward form does not go with."""
    found = next((name for name in names if keys.values.get(name) is not None), names[0])
    activation = keys.text(found)
    for name in names:
        keys.raw(name, None)
    if activation not in known:
        raise keys.error(
            found, f"must be one of {', '.join(sorted(known))}; got {brief(activation)}"
        )


def depth(keys: Keys) -> int:
    """Return the number of layers."""
    return keys.whole("num_hidden_layers", high=_MOST_LAYERS)


def mtp_blocks(keys: Keys, key: str = "num_nextn_predict_layers") -> int:
    """Return the number of MTP blocks, 0 where the key is absent; at most one for each layer."""
    return keys.whole(key, 0, low=0, high=depth(keys))


_HEADS_SPLIT_HIDDEN = frozenset(
    """
    llama mistral mixtral phi3 olmo2 qwen2 qwen2_moe mimo jamba bailing_moe
    """.split()
)
"""Families whose head width is hidden size over heads where the file says nothing."""


def attention(keys: Keys, fields: dict[str, Any], **kwargs: Any) -> Attention:
    """Return an attention of the usual keys."""
    heads = keys.whole("num_attention_heads")
    if keys.values["model_type"] == "llama":  # the one family whose default is one for each head
        kv_heads = keys.whole("num_key_value_heads", heads)
    else:
        kv_heads = keys.whole("num_key_value_heads")
    split = keys.values["model_type"] in _HEADS_SPLIT_HIDDEN
    head_dim = keys.whole_or_none("head_dim", None) if split else keys.whole("head_dim")
    if head_dim is None:
        hidden = fields["hidden_size"]
        if hidden % heads:
            raise keys.error(
                "num_attention_heads", f"must divide hidden_size {hidden}; got {heads}"
            )
        head_dim = hidden // heads
    if heads % kv_heads:
        raise keys.error("num_key_value_heads", f"must divide {heads} heads; got {kv_heads}")
    return Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, **kwargs)


def routed(
    keys: Keys, *, experts: str, width: str, top_k: str = "num_experts_per_tok", **kwargs: Any
) -> MoE:
    """Return a mixture of experts."""
    count, active = keys.whole(experts), keys.whole(top_k)
    if active > count:
        raise keys.error(top_k, f"must be at most {count}; got {active}")
    return MoE(experts=count, top_k=active, width=keys.whole(width), **kwargs)


def runs(layers: Iterable[Layer]) -> tuple[tuple[Layer, int], ...]:
    """Return layers run-length encoded."""
    found: list[tuple[Layer, int]] = []
    for layer in layers:
        if found and found[-1][0] == layer:
            found[-1] = (layer, found[-1][1] + 1)
        else:
            found.append((layer, 1))
    return tuple(found)


def layer_types(keys: Keys, layers: int, known: Iterable[str]) -> list[str] | None:
    """Return ``layer_types`` where the file has it, one of `known` for each layer."""
    kinds = keys.raw("layer_types", None)
    if kinds is None:
        return None
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or not all(isinstance(kind, str) and kind in known for kind in kinds)
    ):
        raise keys.error("layer_types", f"must name {' or '.join(known)} for each layer")
    return kinds


def bias_flag(keys: Keys) -> bool:
    """Return ``attention_bias``."""
    return keys.flag("attention_bias", False)


# -- dense ---------------------------------------------------------------------------------------


def llama(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """Llama 1 to 3, TinyLlama, SmolLM and others of that form."""
    check_activation(keys, "hidden_act")
    bias = bias_flag(keys)
    mixer = attention(keys, fields, qkv_bias=bias, output_bias=bias)
    mlp = MLP(width=keys.whole("intermediate_size"), bias=keys.flag("mlp_bias", False))
    return Architecture(**fields, layers=((Layer(mixer=mixer, mlp=mlp), depth(keys)),))


def mistral(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """Mistral: as Llama, with a window on every layer where one is set."""
    check_activation(keys, "hidden_act")
    mixer = attention(keys, fields, window=keys.whole_or_none("sliding_window"))
    layer = Layer(mixer=mixer, mlp=MLP(width=keys.whole("intermediate_size")))
    return Architecture(**fields, layers=((layer, depth(keys)),))


def phi3(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """Phi-3 and Phi-4 mini."""
    check_activation(keys, "hidden_act")
    for key in ("original_max_position_embeddings", "full_attn_mod", "interpolate_factor"):
        keys.raw(key, None)  # long-context rotary embedding
    if bias_flag(keys):
        raise keys.error("attention_bias", "must be false: Phi-3's projections have none")
    mixer = attention(keys, fields, window=keys.whole_or_none("sliding_window", None))
    mlp = MLP(width=keys.whole("intermediate_size"))
    return Architecture(**fields, layers=((Layer(mixer=mixer, mlp=mlp), depth(keys)),))


def olmo2(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """OLMo-2: norms after the parts, and over whole queries and keys."""
    check_activation(keys, "hidden_act")
    bias = bias_flag(keys)
    mixer = attention(keys, fields, qk_norm="full", qkv_bias=bias, output_bias=bias)
    layer = Layer(mixer=mixer, mlp=MLP(width=keys.whole("intermediate_size")))
    return Architecture(**fields, layers=((layer, depth(keys)),))


def qwen_windows(keys: Keys, layers: int) -> list[int | None]:
    """Return each layer's window: as ``layer_types`` says, else from ``max_window_layers`` on."""
    window = keys.whole_or_none("sliding_window", None)
    first = keys.whole_or_none("max_window_layers", None, low=0)
    slides = keys.flag("use_sliding_window", False) and window is not None
    if not slides and "layer_types" not in keys.values:
        return [None] * layers
    known: dict[str, int | None] = {"full_attention": None}
    if slides:
        known["sliding_attention"] = window
    kinds = layer_types(keys, layers, known)
    if kinds is not None:
        return [known[kind] for kind in kinds]
    if first is None:
        raise keys.error("max_window_layers", "missing")
    return [window if i >= first else None for i in range(layers)]


def qwen_dense(keys: Keys, fields: dict[str, Any], **kwargs: Any) -> Architecture:
    """Return Qwen's dense layers, their attention with the fields given."""
    check_activation(keys, "hidden_act")
    mlp = MLP(width=keys.whole("intermediate_size"))
    base = attention(keys, fields, **kwargs)
    windows = qwen_windows(keys, depth(keys))
    return Architecture(
        **fields, layers=runs(Layer(mixer=replace(base, window=w), mlp=mlp) for w in windows)
    )


def qwen2(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """Qwen2 and Qwen2.5."""
    return qwen_dense(keys, fields, qkv_bias=True)


def qwen3(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """Qwen3."""
    bias = bias_flag(keys)
    return qwen_dense(keys, fields, qk_norm="head", qkv_bias=bias, output_bias=bias)


def mimo(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """MiMo: as Qwen2, with MTP blocks."""
    keys.raw("use_mrope", None)
    mtp = mtp_blocks(keys)
    return replace(qwen_dense(keys, fields, qkv_bias=bias_flag(keys)), mtp_layers=mtp)


def _gemma(
    keys: Keys, fields: dict[str, Any], windows: list[int | None], **kwargs: Any
) -> Architecture:
    check_activation(keys, "hidden_activation", "hidden_act")
    bias = bias_flag(keys)
    base = attention(keys, fields, qkv_bias=bias, output_bias=bias, **kwargs)
    mlp = MLP(width=keys.whole("intermediate_size"))
    fields["tied_embeddings"] = keys.flag("tie_word_embeddings", True)
    layers = (Layer(mixer=replace(base, window=w), mlp=mlp, norms=4) for w in windows)
    return Architecture(**fields, layers=runs(layers))


def gemma2(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """Gemma 2: every other layer has a window, the first included."""
    window, count = keys.whole("sliding_window"), depth(keys)
    kinds = layer_types(keys, count, ("sliding_attention", "full_attention"))
    slides = (
        [k == "sliding_attention" for k in kinds] if kinds else [i % 2 == 0 for i in range(count)]
    )
    return _gemma(keys, fields, [window if s else None for s in slides])


def gemma3(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """Gemma 3: one layer in ``sliding_window_pattern`` without a window, norms on q and k."""
    window, count = keys.whole("sliding_window"), depth(keys)
    kinds = layer_types(keys, count, ("sliding_attention", "full_attention"))
    if kinds is not None:
        keys.raw("sliding_window_pattern", None)
        slides = [kind == "sliding_attention" for kind in kinds]
    else:
        name = "sliding_window_pattern"
        pattern = keys.whole(name if name in keys.values else f"_{name}")
        slides = [(i + 1) % pattern != 0 for i in range(count)]
    return _gemma(keys, fields, [window if s else None for s in slides], qk_norm="head")


def gemma4(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """Gemma 4 MoE: wider global heads whose keys serve as values, a dense and a routed path."""
    check_activation(keys, "hidden_activation")
    fields["tied_embeddings"] = keys.flag("tie_word_embeddings", True)
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if keys.whole(key, 0, low=0):
            raise keys.error(key, "per-layer inputs and shared KV layers are not supported")
    for key in ("use_double_wide_mlp", "enable_moe_block"):
        if keys.flag(key, False) != (key == "enable_moe_block"):
            raise keys.error(key, f"{keys.values.get(key)} is not supported")
    keys.raw("vocab_size_per_layer_input", None)
    keys.raw("use_bidirectional_attention", None)
    local = attention(keys, fields, qk_norm="head", window=keys.whole("sliding_window"))
    wide = replace(
        local,
        kv_heads=keys.whole("num_global_key_value_heads"),
        head_dim=keys.whole("global_head_dim"),
        shared_kv=keys.flag("attention_k_eq_v"),
        window=None,
    )
    moe = routed(
        keys,
        experts="num_experts",
        top_k="top_k_experts",
        width="moe_intermediate_size",
        shared_width=keys.whole("intermediate_size"),
        # a scale for each expert and one for each input of the router
        extra_params=keys.whole("num_experts") + fields["hidden_size"],
    )
    kinds = layer_types(keys, depth(keys), ("sliding_attention", "full_attention"))
    if kinds is None:
        raise keys.error("layer_types", "missing")
    layers = (
        # four norms around the parts, three more around the two feed-forward paths
        Layer(mixer=local if k == "sliding_attention" else wide, mlp=moe, norms=7)
        for k in kinds
    )
    return Architecture(**fields, layers=runs(layers))


def opt(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """OPT: LayerNorm, biases, learnt positions, an ungated feed-forward network."""
    hidden = fields["hidden_size"]
    check_activation(keys, "activation_function", known=("relu",))
    for key, only in (("do_layer_norm_before", True), ("enable_bias", True)):
        if keys.flag(key, only) != only:
            raise keys.error(key, f"must be {only}")
    if keys.whole("word_embed_proj_dim", hidden) != hidden:
        raise keys.error("word_embed_proj_dim", "projected embeddings are not supported")
    for key in ("prefix", "layerdrop", "init_std", "output_projection"):
        keys.raw(key, None)
    if not keys.flag("layer_norm_elementwise_affine", True):
        raise keys.error("layer_norm_elementwise_affine", "must be true")
    fields["final_norm"] = not keys.flag("_remove_final_layer_norm", False)
    heads = keys.whole("num_attention_heads")
    if hidden % heads:
        raise keys.error("num_attention_heads", f"must divide hidden_size {hidden}; got {heads}")
    width = keys.whole("ffn_dim")
    layer = Layer(
        mixer=Attention(
            heads=heads, kv_heads=heads, head_dim=hidden // heads, qkv_bias=True, output_bias=True
        ),
        mlp=MLP(width=width, gated=False, bias=True),
    )
    return Architecture(
        **{
            **fields,
            "tied_embeddings": keys.flag("tie_word_embeddings", True),
            "dense_width": width,
            "norm_size": 2,
            "position_params": (keys.whole("max_position_embeddings") + 2) * hidden,
        },
        layers=((layer, depth(keys)),),
    )


def falcon(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """Falcon: LayerNorm, one head of keys and values (or some, in the new form), no gates.

    Where the attention and feed-forward parts run in parallel they share one norm, or in the
    new form have one each.
    """
    hidden, heads = fields["hidden_size"], keys.whole("num_attention_heads")
    if keys.text("activation", "gelu") != "gelu":
        raise keys.error("activation", "must be gelu")
    for key in ("alibi", "apply_residual_connection_post_layernorm"):
        keys.raw(key, None)
    if hidden % heads:
        raise keys.error("num_attention_heads", f"must divide hidden_size {hidden}; got {heads}")
    new, parallel = keys.flag("new_decoder_architecture"), keys.flag("parallel_attn", True)
    grouped = keys.whole_or_none("num_kv_heads", None) or heads
    single = keys.flag("multi_query", True)
    kv_heads = grouped if new else 1 if single else heads
    if heads % kv_heads:
        raise keys.error("num_kv_heads", f"must divide {heads} heads; got {kv_heads}")
    norms = (keys.whole_or_none("num_ln_in_parallel_attn", None) or 2) if new else 2 - parallel
    bias = keys.flag("bias")
    width = keys.whole_or_none("ffn_hidden_size", None) or 4 * hidden
    layer = Layer(
        mixer=Attention(
            heads=heads, kv_heads=kv_heads, head_dim=hidden // heads,
            qkv_bias=bias, output_bias=bias,
        ),
        mlp=MLP(width=width, gated=False, bias=bias),
        norms=norms,
    )  # fmt: skip
    return Architecture(
        **{
            **fields,
            "tied_embeddings": keys.flag("tie_word_embeddings", True),
            "dense_width": width,
            "norm_size": 2,
        },
        layers=((layer, depth(keys)),),
    )


# -- mixtures of experts -------------------------------------------------------------------------


def mixtral(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """Mixtral."""
    check_activation(keys, "hidden_act")
    window = keys.whole_or_none("sliding_window", None)
    moe = routed(keys, experts="num_local_experts", width="intermediate_size")
    layer = Layer(mixer=attention(keys, fields, window=window), mlp=moe)
    return Architecture(**fields, layers=((layer, depth(keys)),))


def qwen_moe_parts(keys: Keys, moe: MoE, count: int) -> list[MLP | MoE]:
    """Return each layer's feed-forward part: sparse every ``decoder_sparse_step``, but for some."""
    step = keys.whole("decoder_sparse_step", 1)
    dense_layers = keys.whole_list("mlp_only_layers")
    sparse = [i not in dense_layers and (i + 1) % step == 0 for i in range(count)]
    if all(sparse):
        keys.raw("intermediate_size", None)
        return [moe] * count
    dense = MLP(width=keys.whole("intermediate_size"))
    return [moe if s else dense for s in sparse]


def _qwen_moe(keys: Keys, fields: dict[str, Any], moe: MoE, base: Attention) -> Architecture:
    check_activation(keys, "hidden_act")
    count = depth(keys)
    parts = qwen_moe_parts(keys, moe, count)
    windows = qwen_windows(keys, count)
    layers = (
        Layer(mixer=replace(base, window=window), mlp=part)
        for part, window in zip(parts, windows, strict=True)
    )
    return Architecture(**fields, layers=runs(layers))


def qwen_shared_moe(keys: Keys) -> MoE:
    """Return Qwen's mixture with a gated shared expert."""
    return routed(
        keys,
        experts="num_experts",
        width="moe_intermediate_size",
        shared_width=keys.whole("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def qwen2_moe(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """Qwen1.5-MoE and Qwen2-MoE."""
    return _qwen_moe(keys, fields, qwen_shared_moe(keys), attention(keys, fields, qkv_bias=True))


def qwen3_moe(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """Qwen3 MoE."""
    moe = routed(keys, experts="num_experts", width="moe_intermediate_size")
    bias = bias_flag(keys)
    base = attention(keys, fields, qk_norm="head", qkv_bias=bias, output_bias=bias)
    return _qwen_moe(keys, fields, moe, base)


def sparse_layers(keys: Keys, count: int) -> list[bool]:
    """Return which layers have experts: ``moe_layer_freq``, a list or a period after the first."""
    pattern = keys.raw("moe_layer_freq", 1)
    if isinstance(pattern, list):
        keys.raw("first_k_dense_replace", None)
        if len(pattern) != count or not all(x in (0, 1) for x in pattern):
            raise keys.error("moe_layer_freq", "must hold 0 or 1 for each layer")
        return [x == 1 for x in pattern]
    first = keys.whole("first_k_dense_replace", low=0, high=count)
    step = keys.whole("moe_layer_freq", 1, high=count)
    return [i >= first and i % step == 0 for i in range(count)]


def deepseek_moe(keys: Keys, **kwargs: Any) -> MoE:
    """Return DeepSeek's mixture, its shared experts as one."""
    width = keys.whole("moe_intermediate_size")
    shared = keys.whole_or_none("n_shared_experts", low=0) or 0
    return routed(
        keys,
        experts="n_routed_experts",
        width="moe_intermediate_size",
        shared_width=shared * width,
        **kwargs,
    )


def _dense_then_sparse(
    keys: Keys, fields: dict[str, Any], mixer: Attention | LatentAttention, moe: MoE
) -> Architecture:
    dense = MLP(width=keys.whole("intermediate_size"))
    layers = (
        Layer(mixer=mixer, mlp=moe if sparse else dense)
        for sparse in sparse_layers(keys, depth(keys))
    )
    mtp = mtp_blocks(keys)
    return Architecture(**fields, layers=runs(layers), mtp_layers=mtp)


def deepseek(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """DeepSeek-V2, V3, R1, V3.2 (sparse attention), Kimi-K2, GLM-5."""
    check_activation(keys, "hidden_act")
    heads = keys.whole("num_attention_heads")
    keys.whole("num_key_value_heads", heads)  # unused by MLA; checked for sense only
    for key in ("head_dim", "qk_head_dim", "rope_interleave", "indexer_rope_interleave"):
        keys.raw(key, None)  # follow from the others, or concern rotary embedding only
    index: dict[str, Any] = {}
    if keys.values["model_type"] in ("deepseek_v32", "glm_moe_dsa"):
        index = {
            "index_heads": keys.whole("index_n_heads"),
            "index_dim": keys.whole("index_head_dim"),
            "index_topk": keys.whole("index_topk"),
        }
    mixer = LatentAttention(
        heads=heads,
        q_lora_rank=keys.whole_or_none("q_lora_rank"),
        kv_lora_rank=keys.whole("kv_lora_rank"),
        nope_dim=keys.whole("qk_nope_head_dim"),
        rope_dim=keys.whole("qk_rope_head_dim"),
        v_dim=keys.whole("v_head_dim"),
        bias=bias_flag(keys),
        **index,
    )
    return _dense_then_sparse(keys, fields, mixer, deepseek_moe(keys))


def glm4_moe(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """GLM-4.5 and Air: grouped attention in front of DeepSeek's mixture.

    Layout after transformers 5.24.0 (``models/glm4_moe/modeling_glm4_moe.py``), read 2026-11-30.
    """
    check_activation(keys, "hidden_act")
    norm = "head" if keys.flag("use_qk_norm", False) else None
    mixer = attention(keys, fields, qkv_bias=bias_flag(keys), qk_norm=norm)
    return _dense_then_sparse(keys, fields, mixer, deepseek_moe(keys))


def bailing_moe(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """Ling and Ling 2.0: the latter with norms on queries and keys."""
    check_activation(keys, "hidden_act")
    for key in ("score_function", "router_dtype", "moe_router_enable_expert_bias", "norm_head",
                "norm_softmax", "use_rmsnorm", "rotary_dim", "mtp_loss_scaling_factor",
                "max_window_layers", "embedding_dropout", "output_dropout"):  # fmt: skip
        keys.raw(key, None)  # of routing, of the head's values, of rotary embedding, of training
    norm = "head" if keys.flag("use_qk_norm", False) else None
    mixer = attention(
        keys, fields, qk_norm=norm,
        qkv_bias=keys.flag("use_qkv_bias", False), output_bias=keys.flag("use_bias", False),
    )  # fmt: skip
    shared = keys.whole_or_none("moe_shared_expert_intermediate_size", None)
    moe = routed(
        keys,
        experts="num_experts",
        width="moe_intermediate_size",
        shared_width=keys.whole("num_shared_experts", low=0)
        * (shared or keys.whole("moe_intermediate_size")),
    )
    return _dense_then_sparse(keys, fields, mixer, moe)


def gpt_oss(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """gpt-oss: windows on half the layers, sinks, biases on everything."""
    check_activation(keys, "hidden_act")
    for key in ("initial_context_length", "experts_per_token", "swiglu_limit"):
        keys.raw(key, None)
    window, count = keys.whole("sliding_window"), depth(keys)
    bias = keys.flag("attention_bias")
    base = attention(keys, fields, qkv_bias=bias, output_bias=bias, sinks=True)
    moe = routed(keys, experts="num_local_experts", width="intermediate_size", bias=True)
    kinds = layer_types(keys, count, ("sliding_attention", "full_attention"))
    if kinds is None:
        raise keys.error("layer_types", "missing")
    layers = (
        Layer(mixer=replace(base, window=window if k == "sliding_attention" else None), mlp=moe)
        for k in kinds
    )
    return Architecture(**fields, layers=runs(layers))


def llama4(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """Llama 4: three layers in four attend within chunks, experts on every n-th layer."""
    check_activation(keys, "hidden_act")
    for key in ("use_qk_norm", "attn_scale", "attn_temperature_tuning", "floor_scale",
                "for_llm_compressor"):  # fmt: skip
        keys.raw(key, None)  # the norm on queries and keys has no parameters
    if keys.whole_list("moe_layers"):
        raise keys.error("moe_layers", "is not supported (interleave_moe_layer_step is)")
    count, step = depth(keys), keys.whole("interleave_moe_layer_step")
    bias = bias_flag(keys)
    base = attention(keys, fields, qkv_bias=bias, output_bias=bias)
    chunk = keys.whole("attention_chunk_size")
    width = keys.whole("intermediate_size")
    moe = routed(keys, experts="num_local_experts", width="intermediate_size", shared_width=width)
    dense = MLP(width=keys.whole("intermediate_size_mlp"))
    every = keys.whole("no_rope_layer_interval", 4)
    chunked = keys.whole_list("no_rope_layers") or [(i + 1) % every != 0 for i in range(count)]
    if len(chunked) != count:
        raise keys.error("no_rope_layers", "must hold 0 or 1 for each layer")
    layers = (
        Layer(
            mixer=replace(base, chunk=chunk if chunked[i] else None),
            mlp=moe if (i + 1) % step == 0 else dense,
        )
        for i in range(count)
    )
    fields["dense_width"] = dense.width
    return Architecture(**fields, layers=runs(layers))


def minimax_m2(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """MiniMax-M2: norms over whole queries and keys."""
    check_activation(keys, "hidden_act")
    for key in ("rotary_dim", "use_mtp", "mtp_transformer_layers"):
        keys.raw(key, None)
    if not keys.flag("use_qk_norm") or keys.text("qk_norm_type") != "per_layer":
        raise keys.error("qk_norm_type", "must be per_layer")
    if keys.whole("shared_intermediate_size", 0, low=0):
        raise keys.error("shared_intermediate_size", "must be 0")
    keys.flag("use_routing_bias")  # a buffer of corrections, not a parameter
    moe = routed(keys, experts="num_local_experts", width="intermediate_size")
    layer = Layer(mixer=attention(keys, fields, qk_norm="full"), mlp=moe)
    mtp = mtp_blocks(keys, "num_mtp_modules")
    return Architecture(**fields, layers=((layer, depth(keys)),), mtp_layers=mtp)


def mimo_v2(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """MiMo-V2: most layers have a short window, more KV heads and sinks."""
    check_activation(keys, "hidden_act")
    for key in ("swa_rope_theta", "attention_value_scale", "sliding_window_size",
                "attention_chunk_size", "layernorm_epsilon"):  # fmt: skip
        keys.raw(key, None)
    count = depth(keys)
    pattern = keys.whole_list("hybrid_layer_pattern")
    if len(pattern) != count or set(pattern) - {0, 1}:
        raise keys.error("hybrid_layer_pattern", "must hold 0 (full) or 1 (window) for each layer")
    full = attention(
        keys, fields, v_dim=keys.whole("v_head_dim"),
        sinks=keys.flag("add_full_attention_sink_bias", False),
    )  # fmt: skip
    heads, kv_heads = (keys.whole(f"swa_num_{name}_heads") for name in ("attention", "key_value"))
    local = Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=keys.whole("swa_head_dim"),
        v_dim=keys.whole("swa_v_head_dim"),
        window=keys.whole("sliding_window"),
        sinks=keys.flag("add_swa_attention_sink_bias", False),
    )
    if bias_flag(keys):
        raise keys.error("attention_bias", "must be false")
    moe, dense = deepseek_moe(keys), MLP(width=keys.whole("intermediate_size"))
    layers = (
        Layer(mixer=local if slides else full, mlp=moe if sparse else dense)
        for slides, sparse in zip(pattern, sparse_layers(keys, count), strict=True)
    )
    return Architecture(**fields, layers=runs(layers))


FAMILIES: dict[str, Family] = {
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "phi3": phi3,
    "olmo2": olmo2,
    "opt": opt,
    "falcon": falcon,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gemma4_text": gemma4,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "deepseek_v32": deepseek,
    "glm_moe_dsa": deepseek,
    "kimi_k2": deepseek,
    "glm4_moe": glm4_moe,
    "bailing_moe": bailing_moe,
    "gpt_oss": gpt_oss,
    "llama4_text": llama4,
    "minimax_m2": minimax_m2,
    "mimo": mimo,
    "mimo_v2_flash": mimo_v2,
}
"""Readers by ``model_type``."""
