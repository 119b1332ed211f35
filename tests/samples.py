"""Small inputs that several tests start from: the keys of real configurations, a device file,
tiny models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specmodel.architectures import MLP, Architecture, Attention, LatentAttention, Layer, MoE

LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MOE = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_attention_heads": 32,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
MLA = {
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
}

DECODER: dict[str, Any] = {
    "model_type": "llama",
    "layers": 3,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "intermediate": 48,
    "vocab": 23,
    "rope_theta": 10_000.0,
    "norm_eps": 1e-5,
}
"""Sizes of a decoder that runs in no time."""

MINIMAL_DEVICE = """\
schema: 1
name: x
title: X
vendor: V
family: f
sources: {s: {title: t, url: u, read: 2026-11-29}}
datasheet:
  peak_flops: {bfloat16: {value: 1.0e+14, quoted: q, source: s}}
  memory_bandwidth: {value: 1.0e+12, quoted: q, source: s}
  memory_capacity: {value: 1.0e+10, quoted: q, source: s}
"""


def _tiny(name: str, *layers: tuple[Layer, int]) -> Architecture:
    sizes = {"hidden_size": 48, "vocab_size": 97, "head_vocab_size": 97, "dense_width": 80}
    return Architecture(
        name=name,
        model_type=name,
        layers=layers,
        dtype="float32",
        kv_dtype="float32",
        max_positions=256,
        **sizes,
    )


_GROUPED = Attention(heads=4, kv_heads=2, head_dim=16)
_LATENT = LatentAttention(
    heads=4, q_lora_rank=24, kv_lora_rank=20, nope_dim=12, rope_dim=8, v_dim=10
)
_EXPERTS = MoE(experts=8, top_k=3, width=20)
_SHARED = replace(_EXPERTS, shared_width=28)

RECORDS = {
    "mixtral": _tiny("mixtral", (Layer(mixer=_GROUPED, mlp=_EXPERTS), 3)),
    "qwen3 moe": _tiny(
        "qwen3_moe", (Layer(mixer=replace(_GROUPED, qk_norm="head"), mlp=_EXPERTS), 3)
    ),
    "qwen2 moe": _tiny(
        "qwen2_moe",
        (
            Layer(mixer=replace(_GROUPED, qkv_bias=True), mlp=replace(_SHARED, shared_gate=True)),
            3,
        ),
    ),
    "glm": _tiny(
        "glm",
        (Layer(mixer=_GROUPED, mlp=MLP(width=80)), 1),
        (Layer(mixer=_GROUPED, mlp=_SHARED), 2),
    ),
    "latent": _tiny(
        "latent", (Layer(mixer=replace(_LATENT, q_lora_rank=None), mlp=MLP(width=80)), 3)
    ),
    "deepseek": _tiny(
        "deepseek",
        (Layer(mixer=_LATENT, mlp=MLP(width=80)), 1),
        (Layer(mixer=_LATENT, mlp=_SHARED), 2),
    ),
}
"""Tiny models with experts, latent attention or both, which run with random weights."""
