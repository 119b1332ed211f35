"""Figures draw on the axes they are given, label units, and refuse what they cannot draw."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest

import specmodel as sm
from specmodel.report import Setup, predict

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


def test_draft_map_shows_the_best_k(h100: sm.Device, llama: sm.Architecture) -> None:
    best = sm.best_width(
        h100, llama, sm.Eagle3(), sm.Geometric(0.6), B=[1, 32, 256], L=[512, 8192], k_max=6
    )
    ax = sm.plots.draft_map(best)
    (mesh,) = ax.collections
    np.testing.assert_array_equal(mesh.get_array(), best.k.transpose("L", "B"))
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("batch B [-]", "context L [token]")
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1", "32", "256"]
    cell = best.isel(B=0, L=0)
    assert ax.texts[0].get_text() == f"{int(cell.k)}\n{float(cell.S):.2f}"
    with pytest.raises(sm.DomainError, match="needs k over two or more B and L"):
        sm.plots.draft_map(best.isel(L=0))


def test_a_prediction_over_batches_and_contexts_has_a_map(
    h100: sm.Device, llama: sm.Architecture
) -> None:
    setup = Setup(
        device=h100,
        target=llama,
        drafter=sm.Eagle3(),
        acceptance=sm.Geometric(0.6),
        execution=sm.Execution(),
        batches=(1, 64),
        contexts=(1024, 131_072),
    )
    result = predict(setup)
    figure = sm.plots.prediction_figure(result)
    (panel,) = [ax for ax in figure.axes if ax.get_ylabel() == "context L [token]"]
    assert len(panel.patches) == sum(not p["fits"] for p in result.points) == 1
    alone = sm.plots.prediction_figure(predict(replace(setup, contexts=(1024,))))
    assert not [ax for ax in alone.axes if ax.get_ylabel() == "context L [token]"]
