"""FLOPs and bytes of a pass, counted by hand on the side."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import specmodel as sm
from specmodel.costs import Layout, experts_touched, pass_operators


def total(operators: object, name: str) -> float:
    return float(sum(np.sum(op.count * getattr(op, name)) for op in operators))  # type: ignore[attr-defined]


def test_matrix_flops_are_twice_the_weights_per_row(llama: sm.Architecture) -> None:
    operators = pass_operators(llama, B=3, W=2, L=0)
    assert total(operators, "flops") == 3 * 2 * 2 * llama.matmul_params


def test_active_experts_only(qwen_moe: sm.Architecture) -> None:
    operators = pass_operators(qwen_moe, B=5, L=0)
    assert total(operators, "flops") == pytest.approx(5 * 2 * qwen_moe.matmul_params, rel=1e-12)
    norms = qwen_moe.vector_params
    table = qwen_moe.embedding_params
    assert qwen_moe.matmul_params + norms + table == qwen_moe.active_params


def test_attention_flops_and_kv_bytes(llama: sm.Architecture) -> None:
    L = 1000
    plain = pass_operators(llama, B=2, L=L)
    empty = pass_operators(llama, B=2, L=0)
    flops = total(plain, "flops") - total(empty, "flops")
    assert flops == 2 * 4 * L * 32 * 128 * 32  # sequences, 4 L heads head_dim, layers
    assert total(plain, "kv_bytes") == 2 * L * 131_072


def test_mla_reads_one_latent_per_token_for_all_heads() -> None:
    v3 = sm.load_model("deepseek-v3")
    L = 1000
    operators = pass_operators(v3, B=1, L=L)
    assert total(operators, "kv_bytes") == L * 70_272
    flops = total(operators, "flops") - total(pass_operators(v3, B=1, L=0), "flops")
    assert flops == pytest.approx(61 * 2 * L * 128 * (2 * 512 + 64), rel=1e-9)


def test_kv_rereading(llama: sm.Architecture) -> None:
    once = total(pass_operators(llama, B=1, W=5, L=100), "kv_bytes")
    each = total(pass_operators(llama, B=1, W=5, L=100, kv_reread=1.0), "kv_bytes")
    some = total(pass_operators(llama, B=1, W=5, L=100, kv_reread=0.25), "kv_bytes")
    assert (each, some) == (5 * once, 2 * once)


def test_lm_head_works_on_all_verified_rows_unless_told(llama: sm.Architecture) -> None:
    def head(**kwargs: float) -> float:
        operators = pass_operators(llama, B=2, W=4, L=0, **kwargs)
        return float(sum(np.sum(op.flops) for op in operators if op.name == "LM head"))

    assert head() == 2 * 8 * 4096 * 128256
    assert head(head_rows=1) == 2 * 2 * 4096 * 128256


def test_tied_embeddings_stream_the_table_once_as_the_head() -> None:
    small = sm.load_model("llama-3.2-1b")
    streamed = total(pass_operators(small, B=1, L=0), "weight_bytes")
    assert streamed == 2 * small.total_params


def test_tensor_parallel_adds_two_all_reduces_a_layer(llama: sm.Architecture) -> None:
    assert not [op for op in pass_operators(llama, B=1) if op.kind == "collective"]
    operators = pass_operators(llama, B=4, W=2, layout=Layout(tp=4))
    (reduce,) = (op for op in operators if op.name == "all-reduce")
    assert reduce.count == 2 * 32 + 1
    assert float(np.asarray(reduce.link_bytes)) == 8 * 4096 * 2
    alone = total(pass_operators(llama, B=4, W=2), "flops")
    assert total(operators, "flops") * 4 == pytest.approx(alone, rel=1e-9)


@given(
    experts=st.integers(1, 512), share=st.floats(0.01, 1), tokens=st.floats(1, 1e6)
)  # coverage stays between top_k and all experts, and grows with tokens
def test_expert_coverage(experts: int, share: float, tokens: float) -> None:
    top_k = max(1, round(share * experts))
    touched = float(experts_touched(experts, top_k, tokens))
    assert top_k * (1 - 1e-12) <= touched <= experts * (1 + 1e-12)
    assert float(experts_touched(experts, top_k, tokens + 1)) >= touched * (1 - 1e-12)


def test_expert_coverage_equals_enumeration() -> None:
    from itertools import combinations, product

    routes = list(combinations(range(5), 2))
    seen = [len(set().union(*map(set, chosen))) for chosen in product(routes, repeat=3)]
    assert float(experts_touched(5, 2, 3)) == pytest.approx(np.mean(seen), rel=1e-12)


def test_full_overlap_routes_like_one_row(qwen_moe: sm.Architecture) -> None:
    def weights(**kwargs: float) -> float:
        operators = pass_operators(qwen_moe, B=2, L=0, **kwargs)  # type: ignore[arg-type]
        return sum(float(np.sum(op.weight_bytes)) for op in operators if op.kind == "experts")

    assert weights(W=4, expert_overlap=1.0) == weights(W=1)
    assert weights(W=1) < weights(W=4, expert_overlap=0.5) < weights(W=4)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"B": -1}, "batch must be >= 0; got -1"),
        ({"B": float("nan")}, "batch must be .*got nan"),
        ({"B": 1, "L": -5}, "context must be >= 0 token; got -5"),
        ({"B": 1, "kv_reread": 1.5}, r"kv_reread must be in \[0, 1\]; got 1.5"),
        ({"B": "many"}, "batch must be a number; got 'many'"),
    ],
)
def test_out_of_range(llama: sm.Architecture, kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(sm.DomainError, match=message):
        pass_operators(llama, **kwargs)  # type: ignore[arg-type]
