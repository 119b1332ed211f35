"""Rounds: identities, every drafter, published phenomena that need no calibration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specmodel as sm
from specmodel.acceptance import expected_tokens
from specmodel.architectures import from_dict
from specmodel.costs import Layout
from specmodel.drafters import KINDS, Drafter
from specmodel.memory import devices_needed, memory
from specmodel.speculation import (
    alpha_break_even,
    context_from_which,
    draft_time_break_even,
    regime,
    round_time,
    speedup,
    tokens_per_round,
)

H100 = sm.load_device("h100")
LLAMA = sm.load_model("llama-3.1-8b")
V3 = sm.load_model("deepseek-v3")
SMALL = sm.load_model("llama-3.2-1b")
IDEAL = sm.Execution(level="ideal")


def dflash_head() -> sm.Architecture:
    """The published head for Qwen3-8B: five layers, features of five target layers."""
    keys = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_act": "silu",
        "block_size": 16, "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33]},
        "num_target_layers": 36, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 5,
        "vocab_size": 151936, "torch_dtype": "bfloat16",
    }  # fmt: skip
    return from_dict(keys, name="dflash", where="config.json")


DRAFTERS: list[tuple[Drafter, sm.Architecture]] = [
    (sm.DraftModel(SMALL), LLAMA),
    (sm.Eagle(), LLAMA),
    (sm.Eagle3(), LLAMA),
    (sm.MTP(), V3),
    (sm.Medusa(), LLAMA),
    (sm.Parallel(SMALL), LLAMA),
    (sm.NGram(hit=0.3), LLAMA),
    (sm.Lookahead(), LLAMA),
    (sm.BlockDiffusion(dflash_head()), sm.load_model("qwen3-8b")),
    (sm.SelfSpeculative(0.25), LLAMA),
    (sm.SparseKV(512), LLAMA),
]


def test_every_kind_is_covered() -> None:
    assert {drafter.kind for drafter, _ in DRAFTERS} == set(KINDS)


@pytest.mark.parametrize(("drafter", "target"), DRAFTERS, ids=lambda x: getattr(x, "kind", ""))
@pytest.mark.parametrize("level", ["ideal", "operators"])
def test_no_drafts_is_exactly_plain_decoding(
    drafter: Drafter, target: sm.Architecture, level: str
) -> None:
    how = sm.Execution(level=level)  # type: ignore[arg-type]
    B = np.array([1, 8, 64])
    times = round_time(H100, target, drafter, B=B, k=0, L=1000, execution=how, T_h=1e-3, T_o=5e-3)
    np.testing.assert_array_equal(times.T_v, times.T_p)
    assert not np.any(times.T_d)
    assert np.all(times.T_o == 1e-3)
    assert np.all(times.cost == 1.0)


@pytest.mark.parametrize(("drafter", "target"), DRAFTERS, ids=lambda x: getattr(x, "kind", ""))
def test_cost_is_what_its_parts_say(drafter: Drafter, target: sm.Architecture) -> None:
    k = np.arange(1, 9)
    times = round_time(H100, target, drafter, B=4, k=k, L=2000, T_h=1e-3, T_o=2e-3)
    parts = (times.T_d + times.T_v + times.T_o) / (times.T_p + times.T_h)
    np.testing.assert_allclose(times.cost, parts, rtol=1e-15)
    np.testing.assert_allclose(sum(times.T_d_groups.values()), times.T_d)
    assert np.all(np.diff(times.T_d) >= 0)
    assert np.all(times.T_v >= times.T_p)
    G = tokens_per_round(sm.Geometric(0.7), drafter, k)
    S = speedup(G, times.T_p, times.T_v, times.T_d, times.T_h, times.T_o)
    np.testing.assert_allclose(S, G / times.cost, rtol=1e-14)


def test_draft_model_is_k_passes_of_the_small_model() -> None:
    k = 5
    times = round_time(H100, LLAMA, sm.DraftModel(SMALL), B=2, k=k, L=1000)
    first = sm.pass_time(H100, SMALL, B=2, W=2, L=1000, head_rows=1).T
    each = sm.pass_time(H100, SMALL, B=2, W=1, L=1000).T
    assert float(times.T_d) == pytest.approx(float(first + 4 * each), rel=1e-12)


def test_eagle3_fuses_once_and_eagle_every_pass() -> None:
    def fusions(drafter: Drafter) -> float:
        return sum(float(p.count) for p in drafter.passes(LLAMA, 4) if p.fuse)

    assert (fusions(sm.Eagle3()), fusions(sm.Eagle())) == (1, 4)


def test_one_pass_drafters_take_one_pass() -> None:
    (only,) = sm.Parallel(SMALL).passes(LLAMA, 6)
    assert (float(only.count), float(only.W), float(only.head_rows)) == (1, 7, 6)
    times = round_time(H100, LLAMA, sm.Medusa(), B=1, k=[2, 4], L=0, execution=IDEAL)
    heads = 4096 * 4096 + 4096 + 4096 * 128256  # residual block, its bias, LM head
    np.testing.assert_allclose(times.T_d, np.array([2, 4]) * heads * 2 / 3.35e12, rtol=1e-12)


def test_self_speculation_runs_its_share_of_the_layers() -> None:
    whole = round_time(H100, LLAMA, sm.SelfSpeculative(1.0), B=1, k=3, L=1000)
    assert float(whole.T_d) == pytest.approx(3 * float(whole.T_p), rel=1e-12)


def test_lookahead_verifies_window_and_guesses() -> None:
    drafter = sm.Lookahead(window=5, guesses=5)
    assert drafter.rows([0, 3]).tolist() == [1, 30]
    times = round_time(H100, LLAMA, drafter, B=1, k=3, L=100)
    assert float(times.T_d) == 0
    assert float(times.T_v) == float(sm.pass_time(H100, LLAMA, B=1, W=30, L=100).T)
    assert memory(H100, LLAMA, drafter, k=3, L=100).target_kv == 130 * 131_072


def test_block_diffusion_is_one_pass_over_its_block() -> None:
    head, target = dflash_head(), sm.load_model("qwen3-8b")
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    assert head.total_params == 5 * layer + 5 * 4096 * 4096 + 2 * 4096  # fusion, two norms
    (only,) = sm.BlockDiffusion(head).passes(target, 15)
    assert (float(only.count), float(only.W), float(only.head_rows)) == (1, 16, 15)
    with pytest.raises(sm.ArchitectureError, match="a whole model: it cannot be the draft"):
        round_time(H100, target, sm.BlockDiffusion(SMALL), B=1, k=2)


def test_a_round_without_a_match_verifies_one_row() -> None:
    always = round_time(H100, LLAMA, sm.NGram(hit=1.0), B=64, k=7, L=1000)
    never = round_time(H100, LLAMA, sm.NGram(hit=0.0), B=64, k=7, L=1000)
    some = round_time(H100, LLAMA, sm.NGram(hit=0.25), B=64, k=7, L=1000)
    assert float(never.T_v) == float(never.T_p)
    assert float(never.T_v) < float(some.T_v) < float(always.T_v)
    assert float(tokens_per_round(sm.Geometric(0.5), sm.NGram(hit=0.25), 2)) == 1 + 0.25 * 0.75
    host = round_time(H100, LLAMA, sm.NGram(hit=1.0, host_time=1e-3), B=64, k=[0, 7], L=1000)
    assert host.T_d.tolist() == [0, 1e-3]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b"])
@pytest.mark.parametrize(("B", "bound"), [(1, 1e-12), (2, 2e-3), (6, 2e-3), (40, 2e-3)])
def test_sequences_find_drafts_independently(name: str, B: int, bound: float) -> None:
    """Against the sum over the binomial number of sequences with drafts; exact for one."""
    from scipy.stats import binom

    model, hit, k = sm.load_model(name), 0.226, 7
    smooth = sm.Execution(calibrated=False)  # tiles make a fitted pass rise in steps
    found = round_time(H100, model, sm.NGram(hit=hit), B=B, k=k, L=1000, execution=smooth)
    n = np.arange(B + 1)
    passes = sm.pass_time(H100, model, B=B, W=1 + k * n / B, L=1000, execution=smooth)
    exact = float(binom.pmf(n, B, hit) @ passes.T)
    assert float(found.T_v) == pytest.approx(exact, rel=bound)
    assert sum(float(t) for t in found.verify.groups.values()) == pytest.approx(float(found.T_v))
    mfu = float(binom.pmf(n, B, hit) @ (passes.mfu * passes.T)) / exact
    assert float(found.verify.mfu) == pytest.approx(mfu, rel=2 * bound)


def test_regime_three_never_exceeds_tokens_over_width() -> None:
    """Ideal level, compute-bound decoding: S = G / (W + T_d / T_p) <= G / W <= 1."""
    k = np.arange(1, 9)
    B, alpha = 600, 0.9
    stars = sm.critical_batch(H100, LLAMA, L=0, level="ideal")
    assert float(stars) < B
    times = round_time(H100, LLAMA, sm.Eagle3(), B=B, k=k, L=0, execution=IDEAL)
    G = expected_tokens(alpha, k)
    S = G / times.cost
    np.testing.assert_allclose(times.T_v / times.T_p, k + 1, rtol=1e-12)
    assert np.all(G / (k + 1) >= S)
    assert np.all(S <= 1)
    assert set(regime(B, sm.critical_batch(H100, LLAMA, W=k + 1, L=0, level="ideal"), stars)) == {
        "III"
    }


def test_moe_loses_at_batch_one_by_expert_coverage() -> None:
    """Ideal level, Qwen3-30B-A3B, EAGLE-3 head, k = 3, context 1,024: about 0.81, 0.95, 1.10."""
    moe = sm.load_model("qwen3-30b-a3b")
    times = round_time(H100, moe, sm.Eagle3(), B=1, k=3, L=1024, execution=IDEAL)
    S = expected_tokens(np.array([0.6, 0.7, 0.8]), 3) / times.cost
    np.testing.assert_allclose(S, [0.81, 0.95, 1.10], atol=0.01)
    growth = {
        g: float(times.verify.groups[g] - times.decode.groups[g]) for g in times.verify.groups
    }
    assert growth["experts"] / float(times.T_v - times.T_p) > 0.99
    alike = sm.Execution(level="ideal", expert_overlap=1.0)
    same = round_time(H100, moe, sm.Eagle3(), B=1, k=3, L=1024, execution=alike)
    assert float(same.T_v) == float(same.T_p)


def test_sparse_kv_speedup_grows_with_batch_at_long_context() -> None:
    """MagicDec, ICLR 2025: beyond the critical context speculation gains from batch."""
    B = np.array([1, 4, 16, 64, 256])
    times = round_time(H100, LLAMA, sm.SparseKV(512), B=B, k=3, L=32_768)
    S = expected_tokens(0.82, 3) / times.cost
    assert np.all(np.diff(S) > 0)
    assert S[0] < 1 < S[-1]


@settings(max_examples=60, deadline=None)
@given(alpha=st.floats(0.01, 0.99), k=st.integers(1, 12), B=st.integers(1, 256))
def test_break_evens_are_where_speedup_is_one(alpha: float, k: int, B: int) -> None:
    times = round_time(H100, LLAMA, sm.Eagle3(), B=B, k=k, L=512)
    even = float(alpha_break_even(times.cost, k))
    if np.isnan(even):
        assert float(times.cost) > k + 1
    else:
        assert float(expected_tokens(even, k) / times.cost) == pytest.approx(1, abs=1e-9)
    G = expected_tokens(alpha, k)
    T_d = float(draft_time_break_even(G, times))
    assert float(speedup(G, times.T_p, times.T_v, T_d)) == pytest.approx(1, abs=1e-12)
    hits = float(alpha_break_even(1.1, 4, hit_rate=0.5))
    assert 1 + 0.5 * (float(expected_tokens(hits, 4)) - 1) == pytest.approx(1.1, abs=1e-12)


def test_memory_by_hand() -> None:
    used = memory(H100, LLAMA, sm.DraftModel(SMALL), k=3, L=1000)
    assert used.target_weights == 2 * 8_030_261_248
    assert used.draft_weights == 2 * 1_235_814_400
    assert used.target_kv == 1004 * 131_072
    assert used.draft_kv == 1004 * 32_768
    fits = used.max_batch
    assert used.total(fits) <= 80e9 < used.total(fits + 1)
    plain = memory(H100, LLAMA, L=1000)
    assert plain.draft_weights == plain.draft_kv == 0
    assert plain.max_batch > fits
    medusa = memory(H100, LLAMA, sm.Medusa(), k=4, L=1000)
    assert medusa.draft_weights == 2 * 4 * (4096 * 4096 + 4096 + 4096 * 128256)
    assert memory(H100, LLAMA, sm.SelfSpeculative(), k=4, L=1000).draft_weights == 0
    sparse = memory(H100, LLAMA, sm.SparseKV(512), k=4, L=10_000)
    assert sparse.draft_kv == 512 * 131_072


def test_a_drafter_with_its_own_tensor_parallel_degree() -> None:
    alone = sm.DraftModel(SMALL, tp=1)
    shared = round_time(H100, LLAMA, sm.DraftModel(SMALL), B=1, k=4, L=1000, tp=4)
    single = round_time(H100, LLAMA, alone, B=1, k=4, L=1000, tp=4)
    reference = round_time(H100, LLAMA, alone, B=1, k=4, L=1000)
    assert float(single.T_d) == float(reference.T_d)
    assert float(single.T_p) == float(shared.T_p) != float(reference.T_p)
    assert memory(H100, LLAMA, alone, k=4, layout=Layout(tp=4)).draft_weights == 2 * 1_235_814_400


def test_devices_needed() -> None:
    big = sm.load_model("llama-3.1-70b")
    assert memory(H100, big, L=1000).max_batch == 0
    assert devices_needed(H100, big, batch=1, L=1000) == 2
    assert devices_needed(H100, LLAMA, batch=1, L=1000) == 1
    tiny = replace(H100, memory_capacity=1e6)
    assert devices_needed(tiny, LLAMA, batch=1) is None


def test_heads_of_another_model_are_refused() -> None:
    other = sm.load_model("qwen3-8b-eagle3")
    with pytest.raises(sm.ArchitectureError, match=r"vocabulary of 151936, llama-3\.1-8b one of"):
        round_time(H100, LLAMA, sm.Eagle3(other), B=1, k=2)
    with pytest.raises(sm.ArchitectureError, match="an eagle3 head: it cannot be the draft of mtp"):
        round_time(H100, LLAMA, sm.MTP(sm.load_model("llama-3.1-8b-eagle3")), B=1, k=2)
    with pytest.raises(sm.ArchitectureError, match="vocabulary of 151936"):
        round_time(H100, LLAMA, sm.DraftModel(sm.load_model("qwen3-0.6b")), B=1, k=2)
    wide = sm.load_model("llama-3.1-70b-eagle3")
    with pytest.raises(sm.ArchitectureError, match="takes features of width 8192"):
        round_time(H100, LLAMA, sm.Eagle3(wide), B=1, k=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sm.NGram(hit=1.5), r"hit rate must be in \[0, 1\]"),
        (lambda: sm.NGram(hit=0.5, host_time=-1), "host time must be >= 0"),
        (lambda: sm.DraftModel(SMALL, tp=0), "the drafter's tp must be >= 1"),
        (lambda: round_time(H100, LLAMA, sm.SelfSpeculative(0.001), B=1, k=1), "layers is none"),
        (lambda: memory(H100, LLAMA, L=float("nan")), "context must be"),
        (lambda: memory(H100, LLAMA, L=-1), "context must be"),
        (lambda: sm.SelfSpeculative(0.0), "layer fraction must be > 0"),
        (lambda: sm.SparseKV(0), "kv budget must be >= 1"),
        (lambda: round_time(H100, LLAMA, sm.Eagle3(), B=1, k=-1), "k must be >= 0 token; got -1"),
        (lambda: round_time(H100, LLAMA, sm.Eagle3(), B=1, k=2, T_o=-1), "T_o must be >= 0"),
        (lambda: round_time(H100, V3, sm.SparseKV(), B=1, k=2), "not modelled for latent"),
    ],
)
def test_out_of_range(make: object, message: str) -> None:
    with pytest.raises(sm.DomainError, match=message):
        make()  # type: ignore[operator]


@given(start=st.floats(0.01, 1e9))
def test_context_from_which_something_holds(start: float) -> None:
    found = context_from_which(lambda contexts: contexts >= start, longest=1e9, rounds=5)
    assert start <= found <= start * (1 + 1e-8) + 1e-8


def test_context_from_which_it_always_or_never_holds() -> None:
    always, never = np.array(True), np.array(False)
    assert context_from_which(lambda _: always, longest=100) == 0
    assert context_from_which(lambda _: never, longest=100) == np.inf
    # held before, and again for good
    assert context_from_which(lambda c: (c < 3) | (c > 50), longest=100, rounds=4) > 50


def test_a_tree_of_one_node_a_depth_is_a_chain(h100: sm.Device) -> None:
    from specmodel.drafters import DraftTree

    target = sm.load_model("deepseek-v3")
    llama = sm.load_model("llama-3.1-8b")
    small = sm.DraftModel(sm.load_model("llama-3.2-1b"), host_time=1e-4)
    for model, drafter in (
        (llama, small),
        (llama, sm.Eagle3()),
        (llama, sm.Medusa()),
        (llama, sm.SelfSpeculative()),
        (llama, sm.SparseKV()),
        (target, sm.MTP()),
    ):
        tree = DraftTree(drafter=drafter, widths=(1,) * 5)
        one, two = (
            round_time(h100, model, d, B=[[1], [32]], k=[0, 1, 3, 5], L=2048)
            for d in (drafter, tree)
        )
        np.testing.assert_allclose(one.T_d, two.T_d, rtol=1e-12)
        np.testing.assert_allclose(one.T_v, two.T_v, rtol=1e-12)


def test_a_tree_runs_a_pass_for_each_depth(llama: sm.Architecture) -> None:
    from specmodel.drafters import DraftTree

    tree = DraftTree(drafter=sm.Eagle(), widths=(3, 6, 6))
    found = tree.passes(llama, np.array([0, 1, 2, 3]))
    counts = [np.broadcast_to(one.count, (4,)).tolist() for one in found]
    assert counts == [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]]
    assert [np.broadcast_to(one.W, (4,))[-1] for one in found] == [4, 3, 6]
    assert tree.rows([0, 1, 2, 3]).tolist() == [1, 4, 10, 16]
    with pytest.raises(sm.DomainError, match="at most"):
        DraftTree(drafter=tree, widths=(1,) * 4)
