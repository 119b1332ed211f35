"""Choosing k: closed form against scan, kinks, off, schedules, policies."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specmodel as sm
from specmodel import width
from specmodel.acceptance import expected_tokens
from specmodel.speculation import round_time


@settings(max_examples=200)
@given(alpha=st.floats(0.01, 0.99), A=st.floats(1e-3, 10), C=st.floats(1e-3, 10))
def test_closed_form_equals_the_scan(alpha: float, A: float, C: float) -> None:
    W = np.arange(1, 20_000)
    value = expected_tokens_closed(alpha, W) / (A + C * W)
    best = width.best_affine_width(alpha, A, C, high=int(W[-1]))
    assert value[best - 1] >= value.max() * (1 - 1e-12)


def expected_tokens_closed(alpha: float, W: np.ndarray) -> np.ndarray:
    return -np.expm1(W * np.log(alpha)) / (1 - alpha)


@given(alpha=st.floats(0.01, 0.99), A=st.floats(1e-3, 1e3), C=st.floats(1e-6, 10))
def test_closed_form_is_stationary(alpha: float, A: float, C: float) -> None:
    W = width.width_closed_form(alpha, A, C)
    a = -np.log(alpha)
    # d/dW of ln(1 - alpha^W) equals C / (A + C W)
    assert a / np.expm1(a * W) == pytest.approx(C / (A + C * W), rel=1e-6)


@pytest.mark.parametrize(
    ("alpha", "A", "C", "expected"),
    [(0.0, 1.0, 0.1, 1), (1.0, 1.0, 0.1, 50), (0.7, 1.0, 0.0, 50), (0.7, -0.05, 1.05, 1)],
)
def test_ends_of_the_segment(alpha: float, A: float, C: float, expected: int) -> None:
    assert width.best_affine_width(alpha, A, C, high=50) == expected


@settings(max_examples=100)
@given(
    alpha=st.floats(0.05, 0.98),
    kink=st.integers(2, 30),
    slope=st.floats(0.001, 0.2),
    steep=st.floats(0.01, 1.0),
)
def test_kinks(alpha: float, kink: int, slope: float, steep: float) -> None:
    def cost(W: float) -> float:
        return 1 + slope * W + steep * max(0.0, W - kink)

    W = np.arange(1, 65)
    value = expected_tokens_closed(alpha, W) / np.array([cost(w) for w in W])
    best = width.best_piecewise_width(alpha, cost, [kink], high=64)
    assert value[best - 1] >= value.max() * (1 - 1e-12)


def test_off_is_compared_with_the_best_not_with_the_first() -> None:
    """A fixed draft cost loses at k = 1 and wins at k = 4."""
    k = np.arange(0, 30)
    cost = 1 + np.where(k > 0, 0.5 + 0.02 * k, 0)
    S = expected_tokens(0.45, k) / cost
    assert S[1] < 1 < S[4]
    assert tuple(int(x) for x in width.best_of(S, k)[:1]) == (4,)


def test_ties_go_to_the_smaller_k_and_to_off() -> None:
    assert int(width.best_of([1.0, 1.2, 1.2], [0, 2, 1]).k) == 1
    best = width.best_of([1.0, 1.0], [0, 3])
    assert (int(best.k), float(best.S)) == (0, 1.0)


@settings(max_examples=40)
@given(alpha=st.floats(0.05, 0.95), slope=st.floats(0.005, 0.5))
def test_marginal_rule_stops_at_the_scan(alpha: float, slope: float) -> None:
    """On a convex cost, adding drafts from k = 1 while the rule says so ends at the best k >= 1."""
    k = np.arange(0, 400)
    cost = 1 + slope * k
    goes_on = width.marginal_gain(alpha, k[1:-1], cost[1:-1], cost[2:])
    stop = int(np.argmin(goes_on)) + 1
    value = expected_tokens_closed(alpha, k[1:] + 1) / cost[1:]
    assert value[stop - 1] == pytest.approx(value.max(), rel=1e-12)


def test_policy_equals_brute_force() -> None:
    alphas, shares = [0.9, 0.5, 0.2], [0.2, 0.5, 0.3]

    def cost(k: np.ndarray) -> np.ndarray:
        return 1 + 0.08 * k

    best = max(
        (
            sum(w * expected_tokens(a, n) for a, w, n in zip(alphas, shares, ks, strict=True))
            / sum(w * cost(np.asarray(n)) for w, n in zip(shares, ks, strict=True)),
            ks,
        )
        for ks in product(range(25), repeat=3)
    )
    policy = width.best_policy(alphas, shares, cost, k_max=24)
    assert policy.rate == pytest.approx(float(best[0]), rel=1e-12)
    assert policy.k == best[1]


def test_schedule_is_the_scan_run_length_encoded(h100: sm.Device, llama: sm.Architecture) -> None:
    setup = (h100, llama, sm.Eagle3(), sm.Geometric(0.6))
    runs = width.schedule(*setup, L=512, max_batch=200)
    assert runs[0].first == 1
    assert runs[-1].last == 200
    for before, after in pairwise(runs):
        assert after.first == before.last + 1
        assert after.k != before.k
    for batch in (1, 17, 64, 200):
        k = next(r.k for r in runs if r.first <= batch <= r.last)
        times = round_time(h100, llama, sm.Eagle3(), B=batch, k=np.arange(17), L=512)
        S = sm.Geometric(0.6).tokens(np.arange(17)) / times.cost
        assert int(width.best_of(S, np.arange(17)).k) == k


def test_zero_acceptance_is_off_everywhere(h100: sm.Device, llama: sm.Architecture) -> None:
    (run,) = width.schedule(h100, llama, sm.Eagle3(), sm.Geometric(0.0), L=1024, max_batch=300)
    assert (run.first, run.last, run.k) == (1, 300, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: width.width_closed_form(1.0, 1, 1), "strictly between 0 and 1"),
        (lambda: width.width_closed_form(0.5, 0, 1), "A must be > 0 and finite; got 0"),
        (lambda: width.width_closed_form(0.5, 1, float("nan")), "C must be"),
        (lambda: width.best_affine_width(0.5, 1, 1, low=3, high=2), "low <= high"),
        (lambda: width.best_affine_width(1.5, 1, 1), "alpha must be in"),
    ],
)
def test_out_of_range(call: object, message: str) -> None:
    with pytest.raises(sm.DomainError, match=message):
        call()  # type: ignore[operator]


@pytest.mark.parametrize("k", [None, 3])
def test_context_from_which_speedup_rises_with_batch(k: int | None) -> None:
    gpu, target, law = sm.load_device("h100"), sm.load_model("llama-3.1-8b"), sm.Geometric(0.7)

    def best(batch: float, context: float) -> float:
        S, _ = width.scan(gpu, target, sm.Eagle3(), law, B=batch, L=context)
        return float(S.max() if k is None else S[k])

    found = width.context_where_speedup_rises(
        gpu, target, sm.Eagle3(), law, low=1, high=64, longest=131_072, k=k
    )
    assert 1000 < found < 131_072
    for share in (1.01, 2.0):
        assert best(64, found * share) >= best(1, found * share)
    assert best(64, found * 0.99) < best(1, found * 0.99)


def test_where_speedup_rises_at_every_context_or_none() -> None:
    gpu, target = sm.load_device("h100"), sm.load_model("llama-3.1-8b")
    with pytest.raises(sm.DomainError, match="k must"):
        width.context_where_speedup_rises(
            gpu, target, sm.Eagle3(), sm.Geometric(0.7), low=1, high=2, longest=9, k=0
        )

    def found(law: sm.Geometric, high: float, **options: float) -> float:
        return width.context_where_speedup_rises(
            gpu, target, sm.Eagle3(), law, low=1, high=high, longest=4096, **options
        )

    assert found(sm.Geometric(0.0), 64) == np.inf  # off everywhere gains nothing
    # while verification stays memory-bound and drafts cost nothing, all batches gain G
    free = width.context_where_speedup_rises(
        gpu, target, sm.NGram(hit=1.0), sm.Geometric(0.7), low=1, high=8, longest=4096, k_max=4,
        level="ideal",
    )  # fmt: skip
    assert free == 0.0
    assert found(sm.Geometric(0.7), 64, kv_reread=1.0) == np.inf


def joined(k: list[int], gain: float, error: float) -> list[int]:
    """Join runs of k by batch, the best k of which gains so much over every other."""
    drafts = np.unique([0, *k])
    best = np.searchsorted(drafts, k)
    S = np.ones((len(k), drafts.size))
    S[np.arange(len(k)), best] = np.exp(gain)

    def errors(B: np.ndarray, n: np.ndarray) -> np.ndarray:
        return np.full((np.size(B), np.size(n), np.size(n)), error)

    return drafts[width._joined(S, best, drafts, errors)].tolist()


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        ([1] * 9 + [0] * 2 + [1] * 5 + [0] * 9, [1] * 16 + [0] * 9),  # a gap of off
        ([1] * 9 + [0] * 5 + [1] * 2 + [0] * 9, [1] * 9 + [0] * 16),  # an island of on
        ([3] * 5 + [2] * 2 + [3] * 2 + [1] * 5, [3] * 9 + [1] * 5),  # another k
        ([2] * 4 + [1] * 2 + [0] * 9, [2] * 4 + [1] * 2 + [0] * 9),  # steps in order stay
        ([0] * 2 + [1] * 9 + [2] * 2, [0] * 2 + [1] * 9 + [2] * 2),  # and so do the ends
        ([1] * 2 + [0] * 9 + [1] * 3, [1] * 2 + [0] * 9 + [1] * 3),  # longer than both beside it
        ([1, 4, 4, 4, 3, 3, 1, 1], [1, 4, 4, 4, 3, 3, 1, 1]),  # a hill is no island
    ],
)
def test_gaps_and_islands_that_errors_cannot_tell_are_joined(
    k: list[int], expected: list[int]
) -> None:
    assert joined(k, gain=0.03, error=0.02) == expected
    assert joined(k, gain=0.03, error=0.01) == k  # 1.64 of them are less than the gain


def test_what_does_not_fit_is_not_joined() -> None:
    S = np.array([[1.0, 1.1], [1.0, 1.1], [1.0, 0.0], [1.0, 1.1], [1.0, 1.1]])
    best = np.array([1, 1, 0, 1, 1])

    def errors(B: np.ndarray, n: np.ndarray) -> np.ndarray:
        return np.full((np.size(B), np.size(n), np.size(n)), 9.0)

    assert width._joined(S, best, np.array([0, 1]), errors).tolist() == best.tolist()
