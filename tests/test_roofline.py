"""Times: identities, scaling, the two levels against each other, and published kernel sums."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specmodel as sm
from specmodel.costs import pass_operators
from specmodel.forms import p_norm
from specmodel.roofline import DATASHEET, GENERIC

IDEAL = sm.Execution(level="ideal")
H100 = sm.load_device("h100")
MODELS = [sm.load_model(n) for n in ("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v2-lite")]

settings_ = settings(max_examples=60, deadline=None)
models = st.sampled_from(MODELS)
batches = st.integers(1, 2000)
widths = st.integers(1, 32)
contexts = st.integers(0, 200_000)


def test_generic_level_against_published_kernel_sums(llama: sm.Architecture) -> None:
    """Llama-3.1-8B bf16 on H100, context 1,024: sums of published kernel times.

    6.18, 6.60, 8.32, 10.35, 12.83 ms at batch 1, 8, 32, 64, 128, from the kernel tables of
    aiconfigurator-core 0.12.0 (Apache-2.0). The generic set is not fitted to them.
    """
    published = np.array([6.18, 6.60, 8.32, 10.35, 12.83]) * 1e-3
    batches = [1, 8, 32, 64, 128]
    found = sm.pass_time(H100, llama, B=batches, L=1024, calibrated=False).T
    assert np.abs(found / published - 1).max() < 0.06
    fitted = sm.pass_time(H100, llama, B=batches, L=1024).T  # to those tables, shape by shape
    assert np.abs(fitted / published - 1).mean() < 0.04


def test_generic_set_is_the_documented_one() -> None:
    assert (GENERIC.t_op, GENERIC.eta_m, GENERIC.eta_f, GENERIC.p) == (4e-6, 0.85, 0.75, 2.5)
    assert (GENERIC.basis, DATASHEET.basis) == ("generic", "datasheet")


@settings_
@given(model=models, B=batches, W=widths, L=contexts)
def test_groups_sum_to_the_pass(model: sm.Architecture, B: int, W: int, L: int) -> None:
    for execution in (sm.Execution(), IDEAL):
        time = sm.pass_time(H100, model, B=B, W=W, L=L, execution=execution)
        assert float(sum(time.groups.values())) == pytest.approx(float(time.T), rel=1e-12)
        assert 0 < float(time.mfu) <= 1 + 1e-12
        assert 0 < float(time.mbu) <= 1 + 1e-12


@settings_
@given(model=models, B=batches, W=widths, L=contexts)
def test_ideal_is_a_bound_and_hard_operators_lie_between(
    model: sm.Architecture, B: int, W: int, L: int
) -> None:
    """p infinite, no overhead, unit efficiencies: the sum over operators of a hard maximum."""
    hard = sm.Execution(efficiency=DATASHEET, calibrated=False)
    ideal = float(sm.pass_time(H100, model, B=B, W=W, L=L, execution=IDEAL).T)
    summed = float(sm.pass_time(H100, model, B=B, W=W, L=L, execution=hard).T)
    soft = float(sm.pass_time(H100, model, B=B, W=W, L=L, calibrated=False).T)
    assert ideal <= summed * (1 + 1e-12) <= soft * (1 + 1e-9)
    by_hand = sum(
        float(op.count)
        * max(
            float(np.asarray(op.weight_bytes) + op.kv_bytes + op.activation_bytes)
            / H100.memory_bandwidth,
            float(op.flops) / H100.flops(op.compute_dtype or "bfloat16"),
        )
        for op in pass_operators(model, B=B, W=W, L=L)
    )
    assert summed == pytest.approx(by_hand, rel=1e-12)


@settings_
@given(model=models, B=batches, W=widths, L=contexts, level=st.sampled_from(["ideal", "operators"]))
def test_doubling_every_rate_halves_every_time(
    model: sm.Architecture, B: int, W: int, L: int, level: str
) -> None:
    twice = replace(
        H100,
        memory_bandwidth=2 * H100.memory_bandwidth,
        peak_flops={k: 2 * v for k, v in H100.peak_flops.items()},
    )
    no_overhead = replace(GENERIC, t_op=0.0)
    how = sm.Execution(level=level, efficiency=no_overhead, calibrated=False)  # type: ignore[arg-type]
    slow = sm.pass_time(H100, model, B=B, W=W, L=L, execution=how).T
    fast = sm.pass_time(twice, model, B=B, W=W, L=L, execution=how).T
    assert float(slow) == pytest.approx(2 * float(fast), rel=1e-12)


def test_broadcasting_equals_a_loop() -> None:
    B, W, L = np.array([1, 7, 300]), np.array([1, 4]), np.array([0, 1000, 50_000])
    for model in MODELS:
        for how in (sm.Execution(), IDEAL):
            grid = sm.pass_time(H100, model, B=B[:, None, None], W=W[:, None], L=L, execution=how).T
            for i, b in enumerate(B):
                for j, w in enumerate(W):
                    for n, context in enumerate(L):
                        one = sm.pass_time(H100, model, B=b, W=w, L=context, execution=how).T
                        assert grid[i, j, n] == pytest.approx(float(one), rel=1e-14)


@settings_
@given(model=models, B=batches, W=widths, L=contexts)
def test_more_work_takes_longer(model: sm.Architecture, B: int, W: int, L: int) -> None:
    base = float(sm.pass_time(H100, model, B=B, W=W, L=L).T)
    for more in ({"B": B + 1}, {"W": W + 1}, {"L": L + 100}):
        assert float(sm.pass_time(H100, model, **{"B": B, "W": W, "L": L, **more}).T) >= base


@settings_
@given(W=st.integers(1, 16), L=st.integers(0, 3000), level=st.sampled_from(["ideal", "operators"]))
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3"])
def test_critical_batch_is_where_the_two_sides_meet(name: str, W: int, L: int, level: str) -> None:
    model = sm.load_model(name)
    how = sm.Execution(level=level)  # type: ignore[arg-type]
    star = float(sm.critical_batch(H100, model, W=W, L=L, execution=how))
    if np.isfinite(star):
        time = sm.pass_time(H100, model, B=star, W=W, L=L, execution=how)
        assert float(time.compute) == pytest.approx(float(time.weights + time.rows), rel=1e-9)
    else:
        for B in (1.0, 1e3, 1e6, 1e9):
            time = sm.pass_time(H100, model, B=B, W=W, L=L, execution=how)
            assert float(time.compute) < float(time.weights + time.rows)


def test_moe_critical_batches_are_roots_not_a_ratio(llama: sm.Architecture) -> None:
    h20 = sm.load_device("h20")

    def ratio(model: sm.Architecture) -> float:
        stars = sm.critical_batch(h20, model, W=[1, 4], L=0, expert_overlap=0.9, level="ideal")
        return float(stars[0] / stars[1])

    assert ratio(llama) == pytest.approx(4, rel=1e-12)
    # rows of a sequence that route alike touch fewer experts: verification turns earlier
    assert ratio(sm.load_model("qwen3-30b-a3b")) > 4.001


@given(a=st.floats(0, 1e3), b=st.floats(0, 1e3), p=st.floats(1, 50))
def test_p_norm(a: float, b: float, p: float) -> None:
    value = float(p_norm(a, b, p))
    assert max(a, b) <= value * (1 + 1e-12)
    assert value <= (a + b) * (1 + 1e-12)
    assert float(p_norm(a, b, np.inf)) == max(a, b)


def test_tensor_parallel_needs_a_link(llama: sm.Architecture) -> None:
    lonely = replace(H100, interconnect_bandwidth=None, pcie_bandwidth=None)
    with pytest.raises(sm.DomainError, match="has no interconnect: it works alone"):
        sm.pass_time(lonely, llama, B=1, tp=2)
    one = sm.pass_time(H100, llama, B=1, L=1024).T
    two = sm.pass_time(H100, llama, B=1, L=1024, tp=2).T
    assert 0.5 < float(two / one) < 0.75


def test_bad_execution() -> None:
    with pytest.raises(sm.DomainError, match="level must be operators or ideal; got 'best'"):
        sm.Execution(level="best")  # type: ignore[arg-type]
    with pytest.raises(sm.DomainError, match="eta_m must be > 0"):
        replace(GENERIC, eta_m=0.0)
    with pytest.raises(TypeError, match="give execution or level, not both"):
        sm.pass_time(H100, MODELS[0], B=1, execution=IDEAL, level="ideal")
