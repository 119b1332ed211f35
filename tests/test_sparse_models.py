"""DeepSeek-V4, MiniMax-M3 and T5: what is kept, what a step reads, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import specmodel as sm
from specmodel.architectures import Attention, CompressedAttention, from_dict, mtp_head
from specmodel.costs import Layout, pass_operators
from specmodel.defaults import default_kind, make_drafter

PRESETS = Path(sm.__file__).parent / "data" / "models"
H100_BANDWIDTH = 3.35e12
V4 = json.loads((PRESETS / "deepseek-v4-flash.json").read_text())
M3 = json.loads((PRESETS / "minimax-m3.json").read_text())
T5 = json.loads((PRESETS / "t5-small.json").read_text())


def read(values: dict[str, Any], **changes: Any) -> sm.Architecture:
    return from_dict(
        {k: v for k, v in {**values, **changes}.items() if v is not ...}, name="t", where="x.json"
    )


def cache_read(model: sm.Architecture, L: int, W: int = 1, r: float = 0.0) -> float:
    """Return the bytes of cache that a pass reads for one sequence."""
    operators = pass_operators(model, B=1, W=W, L=L, kv_reread=r)
    return sum(float(op.count * op.kv_bytes) for op in operators)


# -- DeepSeek-V4: 2 layers of a window, 21 indexed, 20 heavily compressed --------------------------


def test_v4_keeps_a_window_and_compressed_entries() -> None:
    v4, L = sm.load_model("deepseek-v4-flash"), 100_000
    window = 43 * 128 * 512
    entries = 21 * (L / 4) * (512 + 128) + 20 * (L / 128) * 512
    # values and gates of windows still open, in float32: two windows of 4, or one of 128
    open_windows = 4 * (21 * 8 * 4 * (512 + 128) + 20 * 128 * 2 * 512)
    assert v4.kv_bytes(L) == 2 * (window + entries) + open_windows
    assert v4.kv_bytes(0) == 0


def test_v4_reads_the_window_the_best_entries_and_every_index_key() -> None:
    v4, L = sm.load_model("deepseek-v4-flash"), 100_000
    read_once = 43 * 128 * 512 + 21 * (512 * 512 + (L / 4) * 128) + 20 * (L / 128) * 512
    assert cache_read(v4, L) == pytest.approx(2 * read_once)
    # each of four positions picks its own entries; the rest is read once
    assert cache_read(v4, L, W=4) == pytest.approx(2 * (read_once + 3 * 21 * 512 * 512))
    # without reuse each of them reads all that it looks at
    assert cache_read(v4, L, W=4, r=1) == pytest.approx(4 * 2 * read_once)
    # below the selection all entries are read
    short = 43 * 128 * 512 + 21 * 256 * (512 + 128) + 20 * 8 * 512
    assert cache_read(v4, 1024) == pytest.approx(2 * short)


def test_v4_experts_are_in_four_bits_and_the_rest_in_eight() -> None:
    v4 = sm.load_model("deepseek-v4-flash")
    experts = 43 * 256 * 3 * 4096 * 2048
    assert v4.routed_expert_params == experts
    plain = read(V4, expert_dtype=...)
    scales = 43 * 256 * 3 * (4096 // 128) * (2048 // 128) * 4
    assert plain.weight_bytes - v4.weight_bytes == experts + scales - experts * (0.5 + 1 / 32)
    assert read(V4, quantization_config=..., expert_dtype=...).weight_bytes == 2 * v4.total_params
    # the published repository takes 159,630,041,626 bytes, MTP block and tokenizer included
    total = v4.weight_bytes + mtp_head(v4).weight_bytes
    assert total == pytest.approx(159.63e9, rel=2e-3)


def test_v4_predicts_with_a_block_of_its_own_kind() -> None:
    ((layer, _),) = mtp_head(sm.load_model("deepseek-v4-flash")).layers
    assert isinstance(layer.mixer, CompressedAttention)
    assert layer.mixer.ratio is None


def test_v4_shards() -> None:
    v4 = sm.load_model("deepseek-v4-flash")
    share = v4.shard(8)
    mixer = share.layers[0][0].mixer
    assert isinstance(mixer, CompressedAttention)
    assert (mixer.heads, mixer.output_groups) == (8, 1)
    assert share.kv_bytes(4096) == v4.kv_bytes(4096)  # every rank keeps the one head
    with pytest.raises(sm.DomainError, match="tp must divide the 8 output groups"):
        v4.shard(16)
    with pytest.raises(sm.DomainError, match="not modelled for compressed attention"):
        v4.with_kv_budget(512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": ...}, r"compress_ratios: must hold 43 \+ 1 numbers"),
        ({"compress_ratios": [0] * 43}, r"compress_ratios: must hold 43 \+ 1"),
        ({"compress_ratios": [8] * 44}, "compress_ratios: must be 0, 4 or 128"),
        ({"num_key_value_heads": 2}, "num_key_value_heads: must be 1"),
        ({"o_groups": 7}, "o_groups: must divide 64 heads"),
        ({"hc_mult": 1}, "hc_mult: must be a whole number >= 2"),
        ({"head_dim": 510}, "compression of 4 must divide"),
        ({"expert_dtype": "fp6"}, "expert_dtype: must be fp4 or fp8"),
        ({"attention_bias": True}, "attention_bias: must be false"),
        ({"index_topk": ...}, "index_topk: missing"),
    ],
)
def test_v4_is_read_strictly(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(sm.ArchitectureError, match=message) as caught:
        read(V4, **changes)
    assert str(caught.value).startswith("x.json: ")


# -- MiniMax-M3: 3 full layers, 57 that read 16 blocks of 128 --------------------------------------


def test_m3_reads_blocks_and_keeps_all() -> None:
    m3, L = sm.load_model("minimax-m3"), 100_000
    token = 2 * 4 * 128
    assert m3.kv_bytes(L) == 2 * (60 * L * token + 57 * L * 128)
    once = 3 * L * token + 57 * (16 * 128 * token + L * 128)
    assert cache_read(m3, L) == pytest.approx(2 * once)
    assert cache_read(m3, 1000) == pytest.approx(2 * (60 * 1000 * token + 57 * 1000 * 128))


def test_m3_predicts_with_a_sparse_block_and_shards() -> None:
    m3 = sm.load_model("minimax-m3")
    assert mtp_head(m3).layers == ((m3.layers[-1][0], 1),)
    share = m3.shard(8).layers[-1][0].mixer  # four heads of keys and values replicate
    assert isinstance(share, Attention)
    assert (share.heads, share.kv_heads, share.index_heads) == (8, 1, 1)
    with pytest.raises(sm.DomainError, match="not modelled for sparse attention"):
        m3.with_kv_budget(512)


def sparse(**changes: Any) -> dict[str, Any]:
    return {"sparse_attention_config": {**M3["sparse_attention_config"], **changes}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_output_gate": True}, "attention_output_gate: must be False"),
        ({"qk_norm_type": "per_layer"}, "qk_norm_type: must be per_head"),
        ({"moe_intermediate_size": 4096}, "moe_intermediate_size: must be 3072"),
        ({"shared_intermediate_size": 6144}, "shared_intermediate_size: must be 3072"),
        ({"sparse_attention_config": None}, "sparse_attention_config: must be an object"),
        (sparse(sparse_num_index_heads=8), "sparse_num_index_heads: must be the 4 KV heads"),
        (sparse(sparse_attention_freq=[1]), "sparse_attention_freq: must hold 0 or 1"),
        (sparse(sparse_disable_index_value=[0] * 60), "must be 1 wherever attention is sparse"),
        (sparse(sparse_init_block=1), "sparse_init_block: must be 0"),
        (sparse(use_sparse_attention=False), "use_sparse_attention: must be true"),
        (sparse(wild=2), "sparse_attention_config: wild: unknown key: its effect"),
    ],
)
def test_m3_is_read_strictly(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(sm.ArchitectureError, match=message) as caught:
        read(M3, **changes)
    assert str(caught.value).startswith("x.json: ")


# -- T5 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "d", "ff", "inner", "heads", "layers", "total"),
    [
        ("t5-small", 512, 2048, 8 * 64, 8, 6, 60_506_624),
        ("t5-base", 768, 3072, 12 * 64, 12, 12, 222_903_552),
        ("t5-large", 1024, 4096, 16 * 64, 16, 24, 737_668_096),
        ("t5-3b", 1024, 16384, 32 * 128, 32, 24, 2_851_598_336),
        ("t5-11b", 1024, 65536, 128 * 128, 128, 24, 11_307_321_344),
    ],
)
def test_t5_is_counted_by_hand(
    name: str, d: int, ff: int, inner: int, heads: int, layers: int, total: int
) -> None:
    """One table, and in each stack: layers, a bias for each of 32 distances and head, a norm."""
    encoder = layers * (4 * d * inner + 2 * d * ff + 2 * d) + 32 * heads + d
    decoder = layers * (8 * d * inner + 2 * d * ff + 3 * d) + 32 * heads + d
    model = sm.load_model(name)
    assert model.total_params == 32_128 * d + encoder + decoder == total
    # what decoding reads: the decoder but for its projections of the encoder's output, the table
    matrices = layers * (6 * d * inner + 2 * d * ff) + 32_128 * d
    assert model.matmul_params == matrices
    streamed = sum(float(op.count * op.weight_bytes) for op in pass_operators(model, B=1))
    assert streamed == 2 * (matrices + (3 * layers + 1) * d)
    assert model.weight_bytes == 2 * total
    assert model.kv_elements_per_token == 2 * inner * layers


def test_t5_reads_every_token_of_the_context_once_a_layer() -> None:
    model = sm.load_model("t5-11b")
    assert cache_read(model, 1000) == 1000 * model.kv_bytes_per_token
    assert cache_read(model, 1000, W=4, r=1) == 4000 * model.kv_bytes_per_token
    kernels = [op for op in pass_operators(model, B=1, L=1000) if op.name == "attention"]
    assert sum(int(op.count) for op in kernels) == 2 * 24
    shared = pass_operators(model, B=1, layout=Layout(tp=2))
    (reduced,) = [op for op in shared if op.collective == "all-reduce"]
    assert reduced.count == 3 * 24 + 1  # after both attentions and the feed-forward part


def test_t5_successors() -> None:
    """T5 v1.1 large, as its file says: gated, and with a table of its own for the LM head."""
    large = json.loads((PRESETS / "t5-large.json").read_text())
    model = read(large, feed_forward_proj="gated-gelu", tie_word_embeddings=False, d_ff=2816,
                 dropout_rate=0.1, relative_attention_max_distance=128)  # fmt: skip
    d, inner, ff = 1024, 16 * 64, 2816
    encoder = 24 * (4 * d * inner + 3 * d * ff + 2 * d) + 32 * 16 + d
    decoder = 24 * (8 * d * inner + 3 * d * ff + 3 * d) + 32 * 16 + d
    assert model.total_params == 2 * 32_128 * d + encoder + decoder == 783_150_080
    tied = read(large, feed_forward_proj="gated-gelu", d_ff=2816)
    assert tied.total_params == 750_251_008


def test_t5_drafts_for_t5() -> None:
    target = sm.load_model("t5-11b")
    drafter, assumed = make_drafter("draft-model", target)
    assert assumed == {"draft": "t5-small"}
    assert default_kind(target, None) == "ngram"
    with pytest.raises(sm.ArchitectureError, match="cannot be derived from t5-11b"):
        make_drafter("eagle3", target)
    r = sm.speculate(sm.load_device("h100"), target, drafter, sm.Geometric(0.8), B=1, k=5, L=512)
    assert 1 < float(r.S) < float(r.G)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": ...}, "d_model: missing"),
        ({"d_kv": ...}, "d_kv: missing"),
        ({"feed_forward_proj": "gated-silu"}, "feed_forward_proj: must be one of relu, gated-gelu"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder: must be true"),
        ({"num_layers": 0}, "num_layers: must be a whole number >= 1"),
        ({"wild": 1}, "wild: unknown key for model_type 't5'"),
    ],
)
def test_t5_is_read_strictly(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(sm.ArchitectureError, match=message):
        read(T5, **changes)
