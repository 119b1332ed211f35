"""Figures draw on the axes they are given, label units, and refuse what they cannot draw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

import specmodel as sm
from specmodel.comparison import candidates, compare
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


def _setup(device: sm.Device, target: sm.Architecture) -> Setup:
    return Setup(
        device=device,
        target=target,
        drafter=sm.Eagle3(),
        acceptance=sm.Geometric(0.6),
        execution=sm.Execution(),
        batches=(1, 64),
        contexts=(1024,),
    )


def _texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def _keys(figure: Figure) -> dict[str, tuple[float, float, float]]:
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    handles = zip(names, legend.legend_handles, strict=True)
    return {name: to_rgb(handle.get_facecolor()) for name, handle in handles if name[:4] == "k = "}


def test_a_prediction_over_batches_and_contexts_has_a_map(
    h100: sm.Device, llama: sm.Architecture
) -> None:
    setup = replace(_setup(h100, llama), contexts=(1024, 131_072))
    result = predict(setup)
    figure = sm.plots.prediction_figure(result)
    (panel,) = [ax for ax in figure.axes if ax.get_ylabel() == "context L [token]"]
    assert len(panel.patches) == sum(not p["fits"] for p in result.points) == 1
    alone = sm.plots.prediction_figure(predict(replace(setup, contexts=(1024,))))
    assert not [ax for ax in alone.axes if ax.get_ylabel() == "context L [token]"]


@pytest.mark.parametrize("k_max", [6, 40])
def test_a_k_has_one_colour_throughout_a_figure(
    h100: sm.Device, llama: sm.Architecture, k_max: int
) -> None:
    acceptance = sm.Geometric(0.6 if k_max == 6 else 0.97)
    few = replace(_setup(h100, llama), contexts=(1024, 8192), k_max=k_max, acceptance=acceptance)
    result = predict(few)
    figure = sm.plots.prediction_figure(result)
    keys = _keys(figure)
    assert len(set(keys.values())) == len(keys)
    for panel, answer in zip(figure.axes[:4:2], result.answers, strict=True):
        shades = panel.patches[: len(answer.schedule)]
        lines = {to_rgb(line.get_color()) for line in panel.get_lines()}
        for shade, run in zip(shades, answer.schedule, strict=True):
            colour = to_rgb(shade.get_facecolor())
            assert colour == (keys[f"k = {run.k}"] if run.k else to_rgb("0.6"))
            assert colour in lines
    (mesh,) = figure.axes[4].collections
    for k in {p["k_star"] for p in result.points}:
        assert to_rgb(mesh.to_rgba(np.array([k]))[0]) == pytest.approx(keys[f"k = {k}"])


def test_the_best_line_ends_where_the_drafter_no_longer_fits(
    h100: sm.Device, llama: sm.Architecture
) -> None:
    result = predict(_setup(h100, llama))
    (answer,) = result.answers
    assert answer.memory_ends_it
    panel = sm.plots.prediction_figure(result).axes[0]
    assert {"drafter does not fit", "does not fit"} <= set(_texts(panel))
    (line,) = [one for one in panel.get_lines() if one.get_label() == "best k"]
    batches, S = (np.asarray(values) for values in line.get_data())
    last = answer.schedule[-2].last
    (gap,) = np.flatnonzero(np.isnan(S))
    assert batches[gap - 1] == last
    assert (S[gap + 1 :] == 1).all()
    assert S[gap - 1] > 1.2
    assert line.get_linestyle() == "-"
    fits = sm.plots.prediction_figure(predict(replace(_setup(h100, llama), contexts=(1,))))
    assert "does not fit" not in _texts(fits.axes[0])


@pytest.mark.parametrize(("model", "text"), [("llama-3.1-405b", ""), ("llama-3.1-8b", "drafter ")])
def test_what_fits_at_no_batch_is_named(h100: sm.Device, model: str, text: str) -> None:
    target = sm.load_model(model)
    setup = replace(_setup(h100, target), batches=(1, 2, 4))
    if text:
        room = sm.load_model("llama-3.1-8b").weight_bytes * 1.02
        drafter = sm.DraftModel(sm.load_model("llama-3.2-1b"))
        small = replace(h100, memory_capacity=room)
        setup = replace(setup, device=small, drafter=drafter)
    result = predict(setup)
    figure = sm.plots.prediction_figure(result)
    assert f"{text}does not fit at any batch" in _texts(figure.axes[0])
    (line,) = [one for one in figure.axes[0].get_lines() if one.get_label() == "best k"]
    assert line.get_linestyle() == ("-" if text else "--")
    dots = [one for one in figure.axes[0].get_lines() if one.get_marker() == "o"]
    assert [one.get_markerfacecolor() for one in dots] == ["white"] * 3
    (legend,) = figure.legends
    names = [one.get_text() for one in legend.get_texts()]
    assert {"asked for, does not fit", "k that does not fit"} <= set(names)
    assert "batch asked for" not in names


def test_titles_say_what_is_shown(h100: sm.Device, llama: sm.Architecture) -> None:
    named = replace(h100, title="A $10 device " + "with a very long name " * 12)
    figure = sm.plots.prediction_figure(predict(_setup(named, llama)))
    figure.draw_without_rendering()
    title = figure.get_suptitle()
    for text in ("A $10 device", "llama-3.1-8b", "drafter eagle3", "operators level", "basis "):
        assert text in title
    (drawn,) = [one for one in figure.texts if one.get_text() == title]
    box = drawn.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width


@pytest.mark.parametrize("contexts", [(2048,), (2048, 8192), (1024, 2048, 8192, 32_768)])
@pytest.mark.parametrize("drafters", [3, 12])
def test_the_legend_of_a_comparison_keeps_clear(
    h100: sm.Device, llama: sm.Architecture, contexts: Sequence[int], drafters: int
) -> None:
    named = replace(h100, title="A device with a very long name " * 5)
    setup = replace(_setup(named, llama), contexts=tuple(contexts))
    found, _ = candidates(llama)
    few = [replace(one, label=f"{one.label} {i}") for i, one in enumerate(found * 2)][:drafters]
    figure = sm.plots.comparison_figure(compare(setup, few))
    figure.draw_without_rendering()
    (legend,) = figure.legends
    (title,) = [one for one in figure.texts if one.get_text() == figure.get_suptitle()]
    names = [one.get_text() for one in legend.get_texts()]
    assert names[:drafters] == [one.label for one in few]
    panels = [axes.get_tightbbox() for axes in figure.axes if axes.get_visible()]
    assert len(panels) == len(contexts)
    boxes = [legend.get_window_extent(), title.get_window_extent(), *panels]
    for i, one in enumerate(boxes):
        assert one.x0 >= 0
        assert one.x1 <= figure.bbox.width
        for other in boxes[i + 1 :]:
            assert not (one.overlaps(other) and one.width * other.width)
    styles = [(line.get_color(), line.get_linestyle()) for line in figure.axes[0].get_lines()]
    assert len({style for style in styles if style[1] != "None"}) == drafters + 1


def test_too_many_contexts_are_refused(h100: sm.Device, llama: sm.Architecture) -> None:
    result = predict(replace(_setup(h100, llama), batches=(1,), contexts=tuple(range(1, 26))))
    with pytest.raises(sm.DomainError, match=r"at most 24 contexts; got 25 \(--context\)"):
        sm.plots.prediction_figure(result)


def test_batches_between_powers_of_two_are_named(h100: sm.Device, llama: sm.Architecture) -> None:
    r = sm.speculate(h100, llama, sm.Eagle3(), sm.Geometric(0.7), B=[5, 6, 7], k=[2], L=1024)
    ax = sm.plots.speedup(r)
    ax.figure.canvas.draw()
    assert {"5", "6", "7"} <= {tick.get_text() for tick in ax.get_xticklabels()}


def test_a_figure_replaces_only_its_like(tmp_path: Path) -> None:
    def file(name: str, data: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(data)
        return path

    for path in (file("empty.png", b""), file("old.PNG", b"\x89PNG"), tmp_path / "new.svg"):
        sm.plots.save(Figure(), path)
        assert path.stat().st_size > 100
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "link.png").symlink_to(tmp_path / "empty.png")
    text = file("text.png", b"not a picture")
    for path, message in (
        (tmp_path / "folder.png", "is no regular file"),
        (tmp_path / "link.png", "is no regular file"),
        (text, "holds no .png"),
        (tmp_path / "a.gif", "must end in .png, .pdf, .svg"),
        (tmp_path / "nowhere" / "a.png", "no such folder"),
    ):
        with pytest.raises(sm.DomainError, match=message):
            sm.plots.check_file(path)
        with pytest.raises(sm.DomainError, match=message):
            sm.plots.save(Figure(), path)
    assert text.read_bytes() == b"not a picture"


def test_a_figure_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(sm.DomainError, match=r"a\.png: cannot be written: Image size"):
        sm.plots.save(Figure(figsize=(1, 1e6)), tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []
