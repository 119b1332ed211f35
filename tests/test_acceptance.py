"""Acceptance records: identities, monotonicity, conversions, errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import specmodel as sm
from specmodel.acceptance import (
    Acceptance,
    alpha_for_tokens,
    alpha_from_distributions,
    correction_distribution,
    expected_tokens,
)

alphas = st.floats(0, 1)
ks = st.integers(0, 40)
records: st.SearchStrategy[Acceptance] = st.one_of(
    st.builds(sm.Geometric, alphas),
    st.builds(
        lambda rates: sm.PerPosition(rates, conditional=True),
        st.lists(alphas, min_size=40, max_size=40),
    ),
    st.builds(sm.Histogram, st.lists(st.integers(1, 100), min_size=41, max_size=41)),
    st.builds(sm.BetaMixture, st.floats(0.1, 30), st.floats(0.1, 30)),
    st.builds(
        lambda x, y: sm.BetaMixture(x, y, over="requests"), st.floats(0.5, 30), st.floats(0.5, 30)
    ),
)


@given(record=records, k=ks)
def test_tokens_lie_between_one_and_W_and_sum_the_rates(record: Acceptance, k: int) -> None:
    G = float(record.tokens(k))
    assert G * (1 + 1e-12) >= 1
    assert (k + 1) * (1 + 1e-12) >= G
    assert pytest.approx(1 + np.sum(record.rates(k)), rel=1e-9) == G
    assert float(record.tokens(0)) == 1.0
    assert np.all(np.diff(record.rates(k)) <= 1e-12)


@given(k=ks)
def test_exact_at_the_ends(k: int) -> None:
    assert float(sm.Geometric(1.0).tokens(k)) == k + 1
    assert float(sm.Geometric(0.0).tokens(k)) == 1
    assert float(expected_tokens(1.0, k)) == k + 1
    assert float(expected_tokens(0.3, 0)) == 1


@given(a=alphas, b=alphas, k=ks)
def test_tokens_grow_with_alpha(a: float, b: float, k: int) -> None:
    low, high = sorted((a, b))
    assert float(expected_tokens(low, k)) <= float(expected_tokens(high, k))


@given(alpha=st.floats(0.001, 0.999), k=st.integers(1, 40))
def test_alpha_for_tokens_inverts(alpha: float, k: int) -> None:
    G = float(expected_tokens(alpha, k))
    assert float(alpha_for_tokens(G, k)) == pytest.approx(alpha, rel=1e-6)
    assert float(sm.MeanLength(G, k=k).alpha) == pytest.approx(alpha, rel=1e-6)
    assert float(sm.MeanLength(G - 1, k=k, includes_bonus=False).alpha) == pytest.approx(
        alpha, rel=1e-6
    )


def test_a_point_mass_mixture_is_geometric() -> None:
    for over in ("rounds", "requests"):
        narrow = sm.BetaMixture(7e6, 3e6, over=over)
        expected = sm.Geometric(0.7).tokens([1, 4, 9])
        np.testing.assert_allclose(narrow.tokens([1, 4, 9]), expected, rtol=1e-5)


def test_harmonic_mean_is_what_requests_measure() -> None:
    """Simulate requests of equal length: tokens over rounds, pooled."""
    rng = np.random.default_rng(0)
    alpha = rng.beta(7, 3, size=200_000)
    rounds = 1 / expected_tokens(alpha, 4)
    assert float(sm.BetaMixture(7, 3, over="requests").tokens(4)) == pytest.approx(
        1 / rounds.mean(), rel=2e-3
    )


@pytest.mark.parametrize(
    ("x", "y"), [(0.5, 0.5), (0.5000000000000001, 0.5), (7, 3), (200, 90), (0.05, 3)]
)
def test_mixture_over_requests_against_quantiles(x: float, y: float) -> None:
    from scipy.special import betaincinv

    alpha = betaincinv(x, y, (np.arange(200_000) + 0.5) / 200_000)
    pooled = 1 / np.mean(1 / expected_tokens(alpha, 5))
    assert float(sm.BetaMixture(x, y, over="requests").tokens(5)) == pytest.approx(pooled, rel=1e-4)


def test_histogram_counts_accepted_drafts() -> None:
    record = sm.Histogram([10, 20, 30, 40])
    assert record.rates(3).tolist() == [0.9, 0.7, 0.4]
    assert float(record.tokens(3)) == pytest.approx(1 + 2.0)


def test_beyond_what_was_measured() -> None:
    record = sm.PerPosition([0.8, 0.4])
    with pytest.warns(sm.ExtrapolationWarning, match="measured up to k = 2.*asked for k = 4"):
        assert record.rates(4).tolist() == pytest.approx([0.8, 0.4, 0.2, 0.1])
    with pytest.warns(sm.ExtrapolationWarning):
        assert sm.PerPosition([0.8, 0.0]).rates(3).tolist() == [0.8, 0, 0]
    with pytest.warns(sm.ExtrapolationWarning):
        assert float(sm.MeanLength(2.25, k=3).tokens(5)) > 2.25


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sm.Geometric(1.3), r"alpha must be in \[0, 1\]; got 1.3"),
        (lambda: sm.Geometric(float("nan")), r"alpha must be in \[0, 1\]; got nan"),
        (lambda: sm.Geometric("high"), "alpha must be a number; got 'high'"),
        (lambda: sm.PerPosition([0.4, 0.6]), "must not increase; got 0.4 then 0.6"),
        (lambda: sm.PerPosition([]), "at least one number"),
        (lambda: sm.PerPosition([1.2]), "acceptance rates must be in"),
        (lambda: sm.MeanLength(4.5, k=3), r"acceptance length must be in \[1, 4\] token; got 4.5"),
        (lambda: sm.MeanLength(0.5, k=3), "acceptance length must be in"),
        (lambda: sm.MeanLength(3.5, k=3, includes_bonus=False), r"must be in \[0, 3\]"),
        (lambda: sm.Histogram([1.0]), "at least two"),
        (lambda: sm.Histogram([0, 0]), "not all zero"),
        (lambda: sm.BetaMixture(0, 1), "x must be > 0 and finite; got 0"),
        (lambda: sm.BetaMixture(1, 1, over="days"), "over must be rounds or requests"),
        (lambda: sm.Geometric(0.5).tokens(-1), "k must be >= 0 token; got -1"),
        (lambda: sm.Geometric(0.5).tokens(1.5), "k must be a whole number; got 1.5"),
        (lambda: alpha_from_distributions([0.5, 0.6], [0.5, 0.5]), "p must sum to 1"),
    ],
)
def test_out_of_range(make: object, message: str) -> None:
    with pytest.raises(sm.DomainError, match=message):
        make()  # type: ignore[operator]


@given(st.integers(2, 6), st.integers(0, 2**32 - 1))
def test_overlap_and_correction_rebuild_the_target(size: int, seed: int) -> None:
    """q min(1, p/q) plus the rejected mass times the correction law is p."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.ones(size)), rng.dirichlet(np.ones(size))
    alpha = float(alpha_from_distributions(p, q))
    np.testing.assert_allclose(
        np.minimum(p, q) + (1 - alpha) * correction_distribution(p, q), p, atol=1e-12
    )
    assert alpha == pytest.approx(1 - 0.5 * np.abs(p - q).sum())
    np.testing.assert_array_equal(correction_distribution(p, p), p)
