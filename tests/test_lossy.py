"""Lossy rules: by hand, by simulation, and what they cost in exactness."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import specmodel as sm
from specmodel.acceptance import alpha_from_distributions
from specmodel.lossy import lossy_alpha, lossy_output, lossy_relaxed, lossy_typical

weights = arrays(np.float64, 6, elements=st.floats(0.01, 1.0))


def law(values: np.ndarray) -> np.ndarray:
    return values / values.sum()


def test_typical_threshold_follows_entropy() -> None:
    """Two equal tokens: exp(-H) = 1/2, so delta 0.6 asks for more than 0.3 of each."""
    assert lossy_typical([0.5, 0.5], epsilon=0.9, delta=0.6).all()
    assert not lossy_typical([0.5, 0.5], epsilon=0.9, delta=1.0).any()
    flat = np.full(100, 0.01)
    assert lossy_typical(flat, epsilon=0.09, delta=0.3).all()  # threshold 0.3 / 100
    assert not lossy_typical([0.92, 0.08], epsilon=0.09, delta=1.0)[1]


def test_relaxed_takes_the_likeliest_and_its_rivals() -> None:
    p = [0.4, 0.3, 0.25, 0.05]
    assert lossy_relaxed(p, top=1, delta=1).tolist() == [True, False, False, False]
    assert lossy_relaxed(p, top=3, delta=0.11).tolist() == [True, True, False, False]
    assert lossy_relaxed(p, top=4, delta=0.5).all()
    assert lossy_relaxed([0.5, 0.5], top=1, delta=0).sum() == 1  # of a tie, one


@given(p=weights, q=weights)
def test_relaxed_with_one_candidate_is_greedy(p: np.ndarray, q: np.ndarray) -> None:
    target = law(p)
    mask = lossy_relaxed(target, top=1, delta=0)
    out = lossy_output(mask, target, law(q))
    assert out[target.argmax()] == pytest.approx(1)


@given(p=weights, q=weights, epsilon=st.floats(0, 1), delta=st.floats(0, 1))
def test_output_is_a_law_and_a_looser_rule_takes_more(
    p: np.ndarray, q: np.ndarray, epsilon: float, delta: float
) -> None:
    target, draft = law(p), law(q)
    mask = lossy_typical(target, epsilon=epsilon, delta=delta)
    assert lossy_output(mask, target, draft).sum() == pytest.approx(1)
    looser = lossy_typical(target, epsilon=epsilon / 2, delta=delta / 2)
    assert lossy_alpha(looser, draft) >= lossy_alpha(mask, draft)
    assert lossy_alpha(np.ones(6, bool), draft) == pytest.approx(1)


def test_output_law_is_what_a_simulation_draws() -> None:
    rng = np.random.default_rng(1)
    target, draft = law(rng.random(6)), law(rng.random(6))
    mask = lossy_relaxed(target, top=3, delta=0.1)
    drawn = rng.choice(6, 200_000, p=draft)
    committed = np.where(mask[drawn], drawn, target.argmax())
    found = np.bincount(committed, minlength=6) / drawn.size
    np.testing.assert_allclose(found, lossy_output(mask, target, draft), atol=0.005)
    assert mask[drawn].mean() == pytest.approx(float(lossy_alpha(mask, draft)), abs=0.005)


def test_a_rule_may_accept_more_or_less_than_the_exact_one() -> None:
    p, q = [0.6, 0.3, 0.1], [0.2, 0.3, 0.5]
    exact = float(alpha_from_distributions(p, q))
    assert exact == pytest.approx(0.6)
    strict = lossy_typical(p, epsilon=0.5, delta=1.0)
    loose = lossy_relaxed(p, top=3, delta=1)
    assert float(lossy_alpha(strict, q)) == pytest.approx(0.2)
    assert float(lossy_alpha(loose, q)) == 1
    assert np.abs(lossy_output(loose, p, q) - p).sum() / 2 == pytest.approx(1 - exact)


def test_bad_input() -> None:
    for call, message in (
        (lambda: lossy_typical([0.5, 0.4], epsilon=0.1, delta=0.1), "p must sum to 1"),
        (lambda: lossy_typical([0.5, 0.5], epsilon=-0.1, delta=0.1), "epsilon must be in"),
        (lambda: lossy_relaxed([0.5, 0.5], top=0, delta=0), "top must be"),
        (lambda: lossy_relaxed([0.5, 0.5], top=3, delta=0), "top must be"),
        (lambda: lossy_alpha([1, 0], [0.5, 0.5]), "accepted must be true or false"),
        (lambda: lossy_alpha([True], [0.5, 0.5]), "accepted must be true or false"),
    ):
        with pytest.raises(sm.DomainError, match=message):
            call()
