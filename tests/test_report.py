"""Every field of a point, worked out on the side from costs and formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import specmodel as sm
from specmodel.costs import pass_operators
from specmodel.report import Setup, _gaps, headline, predict
from specmodel.width import Interval

H100 = sm.load_device("h100")
F, M = 989.4e12, 3.35e12
LLAMA = sm.load_model("llama-3.1-8b")
MOE = sm.load_model("qwen3-30b-a3b")


def make(**changes: Any) -> Setup:
    fields: dict[str, Any] = {
        "device": H100,
        "target": LLAMA,
        "drafter": sm.Eagle3(),
        "acceptance": sm.Geometric(0.7),
        "execution": sm.Execution(level="ideal"),
        "batches": (8,),
        "contexts": (0,),
        "k": 4,
    }
    return Setup(**{**fields, **changes})


@pytest.mark.parametrize(("B", "name"), [(8, "I"), (128, "II"), (500, "III")])
def test_every_field_by_hand(B: int, name: str) -> None:
    """Ideal level, Llama-3.1-8B, EAGLE-3 of one layer, k = 4, alpha = 0.7, empty context."""
    k, W, N = 4, 5, 7_504_924_672
    (p,) = predict(make(batches=(B,))).points
    c = 2 * (N - 65 * 4096)
    T_p = max(2 * N / M, B * c / F)
    T_v = max(2 * N / M, B * W * c / F)
    H, V = 4096, 32_000
    layer = 2 * H * 6144 + H * H + 3 * H * 14_336  # q, k, v from 2H; output; feed-forward
    norms = 4 * H
    fusion, head = 3 * H * H, H * V
    first = max(2 * (layer + norms + fusion + head) / M, 2 * B * (W * (layer + fusion) + head) / F)
    other = max(2 * (layer + norms + head) / M, 2 * B * (layer + head) / F)
    T_d = first + 3 * other
    G = 1 + 0.7 + 0.7**2 + 0.7**3 + 0.7**4
    cost = (T_d + T_v) / T_p
    expected = {
        "batch": B, "context": 0, "k": k, "W": W, "G": G, "T_p": T_p, "T_v": T_v, "T_d": T_d,
        "T_h": 0.0, "T_o": 0.0, "round_cost": cost, "S": G / cost,
        "B_p_star": F / M * 2 * N / c, "B_v_star": F / M * 2 * N / c / W,
        "gemm_turn_rows": F / M,
        "tokens_per_second_per_sequence": G / (T_d + T_v),
        "tokens_per_second": B * G / (T_d + T_v),
        "mfu_decode": B * c / F / T_p, "mbu_decode": 2 * N / M / T_p,
        "mfu_verify": B * W * c / F / T_v, "mbu_verify": 2 * N / M / T_v,
        "intensity_decode": B * c / (2 * N), "intensity_verify": B * W * c / (2 * N),
        "T_d_break_even": G * T_p - T_v,
    }  # fmt: skip
    for field, value in expected.items():
        assert p[field] == pytest.approx(value, rel=1e-9), field
    assert p["regime"] == name
    even = p["alpha_break_even"]
    assert (even is None) == (cost > W)
    if even is not None:
        assert sum(even**j for j in range(k + 1)) == pytest.approx(cost, rel=1e-9)
    # memory: weights and one candidate block of W positions in both caches
    kv = 131_072 * W + 4096 * W
    weights = 2 * 8_030_261_248 + 2 * (layer + norms + fusion + head)
    assert p["memory_bytes"] == weights + B * kv
    assert p["max_batch"] == (80e9 - weights) // kv
    assert p["fits"] is True
    assert p["devices_needed"] == 1
    assert p["speedup_by_k"][0] == 1.0
    assert p["speedup_by_k"][4] == pytest.approx(G / cost, rel=1e-9)
    assert p["k_star"] == int(np.argmax(p["speedup_by_k"]))
    assert p["S_star"] == max(p["speedup_by_k"])
    assert p["W_star"] == p["k_star"] + 1
    assert p["verdict"] == ("on" if G / cost > 1.05 else "off")
    shares = p["time_shares"]
    assert shares["draft"] == pytest.approx(T_d / (T_d + T_v), rel=1e-9)
    assert sum(shares.values()) == pytest.approx(1)


def test_kv_counts_in_bandwidth_use_and_memory() -> None:
    L, B = 10_000, 4
    (p,) = predict(make(contexts=(L,), batches=(B,), k=0)).points
    moved = 2 * 7_504_924_672 + B * L * 131_072
    assert p["mbu_decode"] == pytest.approx(1, rel=1e-12)
    assert p["T_p"] == pytest.approx(moved / M, rel=1e-12)
    assert p["memory_bytes"] == 2 * 8_030_261_248 + B * (L + 1) * 131_072
    assert (
        "decode is memory-bound (20.3 GB read" in predict(make(contexts=(L,), batches=(B,))).why[0]
    )


def test_moe_point_reads_the_experts_it_touches() -> None:
    B, k, L = 2, 3, 1024
    (p,) = predict(make(target=MOE, batches=(B,), contexts=(L,), k=k)).points

    def read(tokens: int) -> float:
        experts = 128 * (1 - (1 - 8 / 128) ** tokens) * 48 * 3 * 2048 * 768
        rest = 30_532_122_624 - 28_991_029_248 - 151_936 * 2048
        return 2 * (rest + experts) + B * L * 98_304

    assert p["T_p"] == pytest.approx(read(B) / M, rel=1e-9)
    assert p["T_v"] == pytest.approx(read(B * (k + 1)) / M, rel=1e-9)


def test_tensor_parallel_point() -> None:
    """Each rank reads half of everything but the norms; all-reduces come on top of the pass."""
    B, L, tp = 16, 2048, 2
    how = sm.Execution(tp=tp, calibrated=False)
    (p,) = predict(make(execution=how, batches=(B,), contexts=(L,), k=2)).points
    step, eta = 5e-6, 0.5
    reduce = 65 * (step + (tp - 1) * B * 4096 * 2 / (eta * 4.5e11))  # one step each
    gather = step + (tp - 1) / tp * B * 128_256 * 2 / (eta * 4.5e11)
    groups = sm.pass_time(H100, LLAMA, B=B, L=L, execution=how).groups
    assert float(groups["collectives"]) == pytest.approx(reduce + gather, rel=1e-12)
    alone = predict(make(execution=sm.Execution(), batches=(B,), contexts=(L,), k=2)).points[0]
    assert 0.5 < p["T_p"] / alone["T_p"] < 0.7
    norms = 2 * LLAMA.vector_params
    halved = sm.pass_time(H100, LLAMA, B=B, L=L, execution=how).bytes
    whole = sm.pass_time(H100, LLAMA, B=B, L=L).bytes
    assert float(halved) == pytest.approx((float(whole) - norms) / 2 + norms, rel=1e-12)


def test_ngram_point() -> None:
    B, k, h = 1, 4, 0.25
    (p,) = predict(make(drafter=sm.NGram(hit=h), batches=(B,), contexts=(500,), k=k)).points
    G = 1 + h * (0.7 + 0.7**2 + 0.7**3 + 0.7**4)
    assert p["G"] == pytest.approx(G)
    assert p["T_d"] == 0
    full = sm.pass_time(H100, LLAMA, B=B, W=k + 1, L=500, level="ideal").T
    assert p["T_v"] == pytest.approx(h * float(full) + (1 - h) * p["T_p"], rel=1e-12)
    stars = sm.critical_batch(H100, LLAMA, W=1 + h * k, L=500, level="ideal")
    assert p["B_v_star"] == (float(stars) if np.isfinite(stars) else None)


def test_a_head_first_takes_every_verified_row() -> None:
    """At a compute-bound batch the first EAGLE-3 pass costs about W rows, the others one."""
    B, k = 4000, 3
    (p,) = predict(make(batches=(B,), k=k)).points
    head = sm.Eagle3().weights(LLAMA)
    wide = sm.pass_time(H100, head, B=B, W=k + 1, head_rows=1, level="ideal").T
    narrow = sm.pass_time(H100, head, B=B, fuse=False, level="ideal").T
    assert p["T_d"] == pytest.approx(float(wide + 2 * narrow), rel=1e-12)
    assert float(wide) > 2 * float(narrow)


def test_mtp_block_is_kept_in_the_targets_format() -> None:
    v3 = sm.load_model("deepseek-v3")
    head = sm.MTP().weights(v3)
    assert (head.weight_dtype, head.quantisation) == ("fp8", v3.quantisation)
    assert head.weight_bytes < 1.1 * head.total_params
    eagle = sm.Eagle3().weights(sm.load_model("qwen3-32b-fp8"))
    assert eagle.weight_dtype == "bfloat16"


def test_expert_activations_are_counted() -> None:
    """Gate and up, activation, down, combine: what each reads and writes a routed row."""
    (experts,) = (op for op in pass_operators(MOE, B=16, W=2) if op.kind == "experts")
    pairs = 16 * 2 * 8
    elements = (2048 + 2 * 768) + 3 * 768 + (768 + 2048) + 2048
    assert float(np.asarray(experts.activation_bytes)) == (pairs * elements + 32 * 2048) * 2


def test_schedule_ends_where_the_drafter_no_longer_fits() -> None:
    setup = make(k=None, contexts=(2048,), execution=sm.Execution(), drafter=sm.Eagle3())
    (answer,) = predict(setup).answers
    on = [run for run in answer.schedule if run.k]
    assert on[-1].last == setup.memory(on[-1].k, 2048).max_batch < answer.plain.batch
    assert answer.memory_ends_it
    assert headline(answer, setup).endswith("the drafter no longer fits")


def test_throughput_at_the_largest_batch() -> None:
    setup = make(contexts=(2048,), execution=sm.Execution(), k=2)
    (answer,) = predict(setup).answers
    B = setup.memory(2, 2048).max_batch
    times = setup.round(B, 2048, 2)
    rate = B * setup.tokens(2) / float(times.T_d + times.T_v)
    assert answer.with_drafter.batch == B
    assert answer.with_drafter.tokens_per_second == pytest.approx(rate, rel=1e-12)
    assert answer.plain.tokens_per_second == pytest.approx(
        answer.plain.batch / float(setup.round(answer.plain.batch, 2048, 0).T_p), rel=1e-12
    )


def test_many_runs_are_joined_not_dropped() -> None:
    setup = make(target=MOE, k=None, contexts=(1024,), acceptance=sm.Geometric(0.6))
    (answer,) = predict(setup).answers
    assert len(answer.schedule) > 6
    text = headline(answer, setup)
    ends = [run.last for run in answer.schedule if run.k == 0]
    assert all(f"{end}" in text for end in ends)
    assert text.startswith("speculation pays in part: ")


def test_answers_at_a_limit_say_so() -> None:
    long = predict(make(contexts=(200_000,), k=None, k_max=3))
    assert any("beyond the 131072 positions" in note for note in long.warnings)
    assert any("largest considered, 3" in note for note in long.warnings)
    assert predict(make()).warnings == ()


def test_devices_needed_counts_batch_and_drafter() -> None:
    big = sm.load_model("llama-3.1-70b")
    small = make(target=big, drafter=sm.DraftModel(sm.load_model("llama-3.1-8b")), k=3)
    (p,) = predict(Setup(**{**_fields(small), "batches": (16,), "contexts": (1024,)})).points
    assert (p["fits"], p["devices_needed"]) == (False, 4)  # 165 GB; three do not divide it
    (p,) = predict(Setup(**{**_fields(small), "batches": (200,), "contexts": (4096,)})).points
    assert p["devices_needed"] == 8


def test_all_k_at_once_give_what_each_gives_alone() -> None:
    setup = make(k=None, k_max=40, contexts=(2048,), execution=sm.Execution())
    (answer,) = predict(setup).answers
    alone = [
        predict(make(k=k, contexts=(2048,), execution=sm.Execution())).answers[0].with_drafter
        for k in (1, 3, 40)
    ]
    best = answer.with_drafter
    assert best.tokens_per_second >= max(one.tokens_per_second for one in alone)
    assert best in (setup_largest(setup, k) for k in range(1, 41))
    k = np.arange(41)
    assert setup.max_batches(k, 2048).tolist() == [setup.max_batch(int(n), 2048) for n in k]


def setup_largest(setup: Setup, k: int) -> object:
    (answer,) = predict(replace(setup, k=k)).answers
    return answer.with_drafter


STEPPED = {
    "contexts": (0,),
    "batches": (256,),
    "execution": sm.Execution(),
    "acceptance": sm.Geometric(0.7),
    "k_max": 8,
}


def test_a_gap_that_measurements_cannot_tell_is_joined() -> None:
    """By best estimates: k = 1 up to 480, off for 481 to 512, k = 1 up to 544."""
    setup = make(k=None, **STEPPED)
    runs = setup.schedule(0, 1024, in_memory=False)
    assert [run.k for run in runs] == sorted((run.k for run in runs), reverse=True)
    assert 480 <= runs[-2].last <= 544
    S, _ = setup.scan(np.arange(481, 513), 0)
    assert S[:, 1].max() < 1  # each of them is off by itself


def test_a_gap_is_explained_by_the_step_behind_it() -> None:
    """1,792 columns of tiles: the pass over 962 rows runs 16 rows of tiles in place of 15."""
    setup = make(k=None, **STEPPED)
    runs = (Interval(171, 480, 1), Interval(481, 512, 0), Interval(513, 544, 1))
    (text,) = _gaps(setup, 0, runs)
    assert text == (
        "off for 481 to 512: at batch 481 (962 rows) the time of verification's weight GEMMs "
        "rises by 5% (gate and up: 28 waves of tiles in place of 26); at batch 513 the time of "
        "T_p's weight GEMMs rises by 13% (gate and up: 16 waves of tiles in place of 14)"
    )
    tiles_a_row, units = np.ceil(2 * 14_336 / 128), 132
    assert [np.ceil(n * tiles_a_row / units) for n in (15, 16, 8, 9)] == [26, 28, 14, 16]


def test_a_step_of_the_all_reduce_is_named() -> None:
    """512 rows of 8,192 elements of 2 bytes are 8 MiB."""
    big = sm.load_model("llama-3.1-70b")
    setup = make(target=big, k=None, **{**STEPPED, "execution": sm.Execution(tp=4)})
    (text,) = _gaps(setup, 0, (Interval(171, 480, 1), Interval(481, 511, 0), Interval(512, 672, 1)))
    assert "at batch 512 the time of T_p's collectives rises by" in text
    assert text.endswith("(all-reduce: vectors reach 8 MiB)")


def test_a_gap_without_a_step_is_explained_by_what_grows() -> None:
    setup = make(target=MOE, k=None, contexts=(1024,), acceptance=sm.Geometric(0.6))
    (answer,) = predict(setup).answers
    off = [run for run in answer.schedule[1:-1] if run.k == 0]
    assert len(answer.gaps) == len(off) > 0
    assert "experts a layer are read instead of" in answer.gaps[0]
    assert answer.gaps[0].startswith(f"off for {off[0].first} to {off[0].last}: verifying")


def test_a_point_whose_k_is_not_the_schedules_says_so() -> None:
    """At batch 35 alone k = 4 is best by a little; the schedule stays with k = 5 around it."""
    how = {"contexts": (2048,), "batches": (1, 35), "execution": sm.Execution()}
    setup = make(k=None, **how)
    result = predict(setup)
    (run,) = (run for run in result.answers[0].schedule if run.first <= 35 <= run.last)
    point = result.points[1]
    assert (point["k"], point["k_star"], run.k) == (4, 4, 5)
    assert point["speedup_by_k"][4] > point["speedup_by_k"][5] > 0.96 * point["S"]
    (note,) = (text for text in result.warnings if "the best k" in text)
    assert "context 2048: at batch 35 the best k is 4, the schedule's 5 (gains" in note
    assert not any("the best k" in text for text in predict(make(k=5, **how)).warnings)


def _fields(setup: Setup) -> dict[str, Any]:
    return {name: getattr(setup, name) for name in Setup.__dataclass_fields__}
