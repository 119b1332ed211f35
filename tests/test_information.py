"""Bits: known values, bounds, and what is no distribution."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import specmodel as sm
from specmodel.acceptance import alpha_from_distributions
from specmodel.information import entropy, surprisal, surprisal_from_log
from specmodel.speculation import padding_loss

mpl.use("Agg")
WEIGHTS = arrays(np.float64, 7, elements=st.floats(0.01, 1))


def test_known_values() -> None:
    assert surprisal(0) == np.inf
    np.testing.assert_allclose(surprisal_from_log(np.log([0.5, 0.1])), surprisal([0.5, 0.1]))
    assert entropy(np.full(1024, 1 / 1024)) == pytest.approx(10)
    assert entropy(np.full((2, 3, 4), 1 / 4)).shape == (2, 3)


@given(p=WEIGHTS, q=WEIGHTS)
def test_bounds(p: np.ndarray, q: np.ndarray) -> None:
    p, q = p / p.sum(), q / q.sum()
    assert 0 <= entropy(p) <= np.log2(7) + 1e-12
    assert entropy(p) == pytest.approx(float((p * surprisal(p)).sum()))
    # Pinsker's inequality bounds what acceptance loses to a draft from q
    lost = 1 - float(alpha_from_distributions(p, q))
    divergence = max(0.0, float((p * np.log(p / q)).sum()))
    assert lost <= np.sqrt(divergence / 2) + 1e-9


@pytest.mark.parametrize("bad", [[0.5, 0.6], [1.5, -0.5], [np.nan, 1.0], 1.0])
def test_what_is_no_distribution_is_refused(bad: object) -> None:
    with pytest.raises(sm.DomainError):
        entropy(bad)  # type: ignore[arg-type]


def test_other_refusals() -> None:
    with pytest.raises(sm.DomainError, match=r"must be <= 0; got 0\.1"):
        surprisal_from_log([-1.0, 0.1])
    with pytest.raises(sm.DomainError, match="at least one sequence"):
        padding_loss([])


def test_padding_loss() -> None:
    assert padding_loss([100, 100]) == 0
    assert padding_loss([0, 0]) == 0
    assert padding_loss([4096, 0, 0, 0]) == 0.75


def test_heat_map_of_surprisal() -> None:
    bits = surprisal([[0.5, 0.25, 0.0], [1.0, 0.125, 0.5]])
    ax = sm.plots.surprisal(bits, tokens=[["a", "$b", "c"], ["d", "e", "f"]])
    (mesh,) = ax.collections
    drawn = mesh.get_array()
    np.testing.assert_array_equal(drawn.mask, ~np.isfinite(bits))
    np.testing.assert_array_equal(drawn.compressed(), bits[np.isfinite(bits)])
    assert len(ax.texts) == 6
    ax.figure.draw_without_rendering()
    for wrong in ([1.0, 2.0], [[]]):
        with pytest.raises(sm.DomainError, match="sequences by positions"):
            sm.plots.surprisal(wrong)
    with pytest.raises(sm.DomainError, match="shape of bits"):
        sm.plots.surprisal(bits, tokens=[["a"], ["b"]])
