"""Figures draw on the axes they are given, label units, and refuse what they cannot draw."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib as mpl
import numpy as np
import pytest

import specmodel as sm

mpl.use("Agg")


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def test_speedup_draws_the_numbers(h100: sm.Device, llama: sm.Architecture) -> None:
    import matplotlib.pyplot as plt

    r = sm.speculate(h100, llama, sm.Eagle3(), sm.Geometric(0.7), B=[1, 8, 64], k=range(4), L=1024)
    _, ax = plt.subplots()
    assert sm.plots.speedup(r, ax=ax) is ax
    lines = {line.get_label(): line for line in ax.get_lines()}
    np.testing.assert_allclose(lines["k = 2"].get_ydata(), r.S.sel(k=2))
    assert "k = 0" not in lines
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("batch B [-]", "speedup S [-]")
    one = sm.speculate(h100, llama, sm.Eagle3(), sm.Geometric(0.7), B=[1, 8], k=3, L=1024)
    assert sm.plots.speedup(one).get_lines()[0].get_label() == "k = 3"


def test_speedup_over_two_contexts_is_refused(h100: sm.Device, llama: sm.Architecture) -> None:
    r = sm.speculate(h100, llama, sm.Eagle3(), sm.Geometric(0.7), B=[1, 8], k=[2], L=[0, 1024])
    with pytest.raises(sm.DomainError, match="got dimensions B, k, L"):
        sm.plots.speedup(r)


def test_breakdown_stacks_to_the_round(h100: sm.Device, llama: sm.Architecture) -> None:
    r = sm.speculate(h100, llama, sm.Eagle3(), sm.Geometric(0.7), B=[1, 64], k=3, L=1024, T_o=1e-3)
    ax = sm.plots.breakdown(r)
    tops = [bar.get_y() + bar.get_height() for bar in ax.patches]
    total = ((r.T_d + r.T_v + r.T_o) * 1e3).to_numpy()
    assert any(np.isclose(tops, total[0])) and any(np.isclose(tops, total[1]))  # noqa: PT018
    assert ax.get_ylabel() == "time [ms]"


def test_roofline_points_lie_under_the_roof() -> None:
    points = [
        {"intensity_decode": 1.0, "mfu_decode": 0.002, "intensity_verify": 5.0, "mfu_verify": 0.01}
    ]
    ax = sm.plots.roofline(1e15, 3e12, points)
    roof = ax.get_lines()[0]
    for line in ax.get_lines()[1:3]:
        x, y = line.get_xdata()[0], line.get_ydata()[0]
        assert y <= np.interp(x, roof.get_xdata(), roof.get_ydata())
