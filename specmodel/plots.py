"""Figures; the only module that imports matplotlib.

Each function draws on the axes it is given, or on new ones, and returns them. Colours are
safe for colour-blind readers (Okabe and Ito).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter
from numpy.typing import ArrayLike, NDArray

from specmodel.comparison import Comparison
from specmodel.errors import DomainError
from specmodel.report import Answer, Prediction
from specmodel.speculation import regime

if TYPE_CHECKING:
    import xarray as xr

    from specmodel.fitting import TableFit

Floats = NDArray[np.float64]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette."""

_MARKERS = "osD^vP*"
_MOST_CELLS = 144  # of a map, for its numbers to be legible
_SUFFIXES = (".png", ".pdf", ".svg")


def speedup(result: xr.Dataset, *, ax: Axes | None = None, **line: Any) -> Axes:
    """Plot S against B from `specmodel.speculate`, one line for each k.

    Parameters
    ----------
    result : xarray.Dataset
        With dimension B, and k or not; other dimensions must have been selected away.
    ax : Axes, optional
    **line
        Passed to `Axes.plot`.
    """
    axes = ax or _axes()
    speed = result["S"]
    extra = [d for d in speed.dims if d not in ("B", "k")]
    if extra or "B" not in speed.dims:
        raise DomainError(
            f"speedup needs S over B and k; got dimensions {', '.join(map(str, speed.dims))}"
        )
    rows = [speed] if "k" not in speed.dims else [speed.isel(k=i) for i in range(speed.sizes["k"])]
    for i, row in enumerate(r for r in rows if int(r["k"]) > 0):
        style = {"color": COLOURS[i % len(COLOURS)], "marker": _MARKERS[i % len(_MARKERS)], **line}
        axes.plot(row["B"], row, label=f"k = {int(row['k'])}", markersize=4, **style)
    _batch_axis(axes)
    axes.set_ylabel("speedup S [-]")
    axes.axhline(1.0, color="0.5", linewidth=1)
    axes.legend(frameon=False, fontsize="small", ncols=2)
    return axes


def breakdown(result: xr.Dataset, *, ax: Axes | None = None, **bars: Any) -> Axes:
    """Plot a round's T_d, T_v and T_o beside G plain steps, as stacked bars over B.

    Parameters
    ----------
    result : xarray.Dataset
        From `specmodel.speculate`, at one k and L.
    """
    axes = ax or _axes()
    place = np.arange(result.sizes["B"])
    bottom = np.zeros(place.size)
    for i, (name, label) in enumerate(
        (("T_d", "drafting T_d"), ("T_v", "verifying T_v"), ("T_o", "besides T_o"))
    ):
        height = np.broadcast_to(result[name].to_numpy() * 1e3, place.shape)
        if height.any():
            axes.bar(place - 0.2, height, 0.4, bottom=bottom, color=COLOURS[i], label=label, **bars)
        bottom = bottom + height
    plain = result["G"].to_numpy() * (result["T_p"] + result["T_h"]).to_numpy() * 1e3
    axes.bar(place + 0.2, plain, 0.4, color="0.7", label="G plain steps", **bars)
    axes.set_xticks(place, [f"{b:g}" for b in result["B"].to_numpy()])
    axes.set_xlabel("batch B [-]")
    axes.set_ylabel("time [ms]")
    axes.legend(frameon=False, fontsize="small")
    return axes


def draft_map(result: xr.Dataset, *, ax: Axes | None = None, **mesh: Any) -> Axes:
    """Plot the best k over batch and context, with its S; whether they fit is not looked at.

    Parameters
    ----------
    result : xarray.Dataset
        From `specmodel.best_width`, over dimensions B and L.
    ax : Axes, optional
    **mesh
        Passed to `Axes.pcolormesh`.

    Raises
    ------
    DomainError
        When the dimensions are others, or have fewer than two values.
    """
    best = result["k"]
    if set(best.dims) != {"B", "L"} or min(best.shape) < 2:
        raise DomainError(f"draft_map needs k over two or more B and L; got {dict(best.sizes)}")
    axes = ax or _axes()
    k, S = (result[name].transpose("L", "B").to_numpy() for name in ("k", "S"))
    _draft_map(axes, result["B"].to_numpy(), result["L"].to_numpy(), k, S, **mesh)
    return axes


def _draft_map(
    axes: Axes, batches: Any, contexts: Any, k: NDArray[np.int_], S: Floats, **mesh: Any
) -> None:
    """Draw a map of k with k and S written in each cell, where they are few enough to read."""
    most = max(int(k.max()), 1)
    colours = mpl.colormaps["viridis"].resampled(most + 1)
    style = {"cmap": colours, "vmin": -0.5, "vmax": most + 0.5, "shading": "nearest", **mesh}
    places = np.arange(len(batches)), np.arange(len(contexts))
    drawn = axes.pcolormesh(*places, k, **style)
    axes.set_xticks(places[0], [f"{b:g}" for b in batches])
    axes.set_yticks(places[1], [f"{x:g}" for x in contexts])
    if k.size <= _MOST_CELLS:
        for (y, x), drafts in np.ndenumerate(k):
            text = f"{int(drafts)}\n{S[y, x]:.2f}" if drafts else "off"
            colour = "black" if drafts > most / 2 else "white"
            axes.annotate(text, (x, y), ha="center", va="center", fontsize=7, color=colour)
    ticks = range(0, most + 1, max(1, most // 8))
    axes.figure.colorbar(drawn, ax=axes, ticks=ticks, label="best k [token], 0: off")
    axes.set_xlabel("batch B [-]")
    axes.set_ylabel("context L [token]")


def surprisal(
    bits: ArrayLike,
    *,
    tokens: Sequence[Sequence[str]] | None = None,
    ax: Axes | None = None,
    **mesh: Any,
) -> Axes:
    """Plot the surprisal or entropy of tokens as a heat map, one row for each sequence.

    Parameters
    ----------
    bits : array_like, shape (sequences, positions)
        From `specmodel.information`; NaN and infinity leave a cell grey. [bit]
    tokens : sequence of sequences of str, optional
        Of the same shape; written into the cells.
    ax : Axes, optional
    **mesh
        Passed to `Axes.pcolormesh`.

    Raises
    ------
    DomainError
        When the shapes are others.
    """
    values = np.asarray(bits, dtype=np.float64)
    if values.ndim != 2 or not values.size:
        raise DomainError(f"surprisal needs sequences by positions; got shape {values.shape}")
    if tokens is not None and [len(row) for row in tokens] != [values.shape[1]] * len(values):
        raise DomainError(f"tokens must have the shape of bits, {values.shape}")
    axes = ax or _axes()
    axes.set_facecolor("0.8")
    shown = np.ma.masked_invalid(values)
    style = {"cmap": "cividis", "vmin": 0, "shading": "nearest", **mesh}
    drawn = axes.pcolormesh(np.arange(values.shape[1]), np.arange(len(values)), shown, **style)
    axes.figure.colorbar(drawn, ax=axes, label="surprisal [bit]")
    for y, row in enumerate(tokens or ()):
        for x, token in enumerate(row):
            light = np.isfinite(values[y, x]) and values[y, x] < drawn.get_clim()[1] / 2
            colour = "white" if light else "black"
            # a dollar sign would start a formula
            text = token.replace("$", r"\$")
            axes.annotate(text, (x, y), ha="center", va="center", fontsize=7, color=colour)
    axes.set_yticks(np.arange(len(values)))
    axes.invert_yaxis()
    axes.set_xlabel("position [token]")
    axes.set_ylabel("sequence [-]")
    return axes


def roofline(
    peak: float,
    bandwidth: float,
    points: Sequence[Mapping[str, Any]],
    *,
    ax: Axes | None = None,
) -> Axes:
    """Plot the roofline of a device with decode and verify passes on it.

    Parameters
    ----------
    peak, bandwidth : float
        [FLOP/s], [B/s]
    points : sequence of mapping
        Of a `Prediction`: ``intensity_decode``, ``mfu_decode`` and the same for verify.
    """
    axes = ax or _axes()
    found = [p[f"intensity_{kind}"] for p in points for kind in ("decode", "verify")]
    ridge = peak / bandwidth
    low, high = min(*found, ridge) / 2, max(*found, ridge) * 4
    x = np.geomspace(low, high, 200)
    axes.plot(x, np.minimum(peak, x * bandwidth) / 1e12, color="black", label="roofline")
    for colour, marker, kind in ((COLOURS[0], "o", "decode"), (COLOURS[1], "s", "verify")):
        intensity = [p[f"intensity_{kind}"] for p in points]
        rate = [p[f"mfu_{kind}"] * peak / 1e12 for p in points]
        axes.plot(intensity, rate, marker, color=colour, label=kind, markersize=5, alpha=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.axvline(ridge, color="0.7", linestyle=":", linewidth=1)
    axes.annotate(f"rho = {ridge:.0f}", (ridge, peak / 1e12), (3, -12), textcoords="offset points")
    axes.set_xlabel("arithmetic intensity [FLOP/B]")
    axes.set_ylabel("rate [TFLOP/s]")
    axes.legend(frameon=False, fontsize="small", loc="lower right")
    return axes


def prediction_figure(result: Prediction) -> Figure:
    """Return a figure: speedup against batch with k* and regimes shaded, and the roofline.

    Where several batches and contexts were asked for, a map of the best k over both follows;
    what does not fit is hatched.
    """
    contexts, batches = result.setup.contexts, result.setup.batches
    mapped = min(len(contexts), len(batches)) > 1
    rows = len(contexts) + mapped
    figure = Figure(figsize=(11, 4.2 * rows), layout="constrained")
    cells = figure.add_gridspec(rows, 2, width_ratios=(3, 2))
    grid = [[figure.add_subplot(cells[i, j]) for j in range(2)] for i in range(len(contexts))]
    if mapped:
        _prediction_map(figure.add_subplot(cells[-1, :]), result)
    device, target = result.setup.device, result.setup.target
    for row, answer in zip(grid, result.answers, strict=True):
        _speedup_by_batch(row[0], result, answer)
        here = [p for p in result.points if p["context"] == answer.context]
        roofline(device.flops(target.weight_dtype), device.memory_bandwidth, here, ax=row[1])
        row[1].set_title(f"roofline, {target.weight_dtype} (points: batches asked for)")
    figure.suptitle(
        f"{target.name} on {device.label}, {result.setup.drafter.kind}, "
        f"{result.setup.execution.level} level, basis {result.setup.basis}"
    )
    return figure


def _prediction_map(axes: Axes, result: Prediction) -> None:
    setup = result.setup
    at = {(p["context"], p["batch"]): p for p in result.points}
    rows = [[at[context, batch] for batch in setup.batches] for context in setup.contexts]
    k = np.array([[p["k_star"] for p in row] for row in rows])
    S = np.array([[p["S_star"] for p in row] for row in rows])
    _draft_map(axes, setup.batches, setup.contexts, k, S)
    for y, row in enumerate(rows):
        for x, point in enumerate(row):
            used = setup.memory(point["k_star"], point["context"])
            if not used.fits(point["batch"]):
                cell = Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, hatch="//", edgecolor="0.6")
                cell.set_linewidth(0)
                axes.add_patch(cell)
    axes.set_title("best k and its speedup over batch and context; hatched: does not fit")


def check_file(file: str | os.PathLike[str]) -> None:
    """Refuse a file that no figure can be written to.

    Raises
    ------
    DomainError
        When the ending is unknown or the folder is not there.
    """
    path = Path(file)
    if path.suffix.lower() not in _SUFFIXES:
        raise DomainError(f"cannot write {path}: a figure ends in {', '.join(_SUFFIXES)}")
    if not path.parent.is_dir():
        raise DomainError(f"cannot write {path}: no folder {path.parent}")


def save(figure: Figure, file: str | os.PathLike[str]) -> None:
    """Write a figure; the ending says the format.

    Raises
    ------
    DomainError
        When the ending is unknown or the file cannot be written.
    """
    check_file(file)
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:
        raise DomainError(f"cannot write {os.fspath(file)}: {error}") from None


def _speedup_by_batch(axes: Axes, result: Prediction, answer: Answer) -> None:
    setup = result.setup
    last = answer.schedule[-1].last
    batches = np.unique(np.round(np.geomspace(1, last, 120)))
    shown = {run.k for run in answer.schedule if run.k} or {1}
    ks = sorted(shown)
    ks = ks if len(ks) <= 5 else [ks[i] for i in np.linspace(0, len(ks) - 1, 5).astype(int)]
    best = [next(r for r in answer.schedule if r.first <= b <= r.last) for b in batches]
    S, drafts = setup.scan(batches, answer.context, max(shown))
    for i, k in enumerate(ks):
        axes.plot(batches, S[:, drafts == k], color=COLOURS[i], linewidth=1, label=f"k = {k}")
    envelope = [S[i, run.k] for i, run in enumerate(best)]
    axes.plot(batches, envelope, color="black", linewidth=2, label="best k")
    axes.margins(y=0.12)
    _shade(axes, answer)
    _regime_strip(axes, result, answer, batches)
    asked = [p for p in result.points if p["context"] == answer.context]
    axes.plot([p["batch"] for p in asked], [p["S"] for p in asked], "ko", markersize=4)
    axes.axhline(1.0, color="0.4", linewidth=1, linestyle="--")
    _batch_axis(axes)
    axes.set_ylabel("speedup S [-]")
    axes.set_title(f"context {answer.context}; shading: best k (grey: off), strip: regime")
    axes.legend(frameon=False, fontsize="small", loc="best")


def _shade(axes: Axes, answer: Answer) -> None:
    """Shade the runs of one k; name the k at the bottom where there is room."""
    low, high = axes.get_xlim()
    for i, run in enumerate(answer.schedule):
        left, right = max(run.first - 0.5, 0.8), run.last + 0.5
        colour = "0.75" if run.k == 0 else COLOURS[5] if i % 2 == 0 else COLOURS[4]
        axes.axvspan(left, right, color=colour, alpha=0.18, linewidth=0)
        if np.log(right / left) > np.log(max(high, 2) / max(low, 0.8)) * 0.06:
            axes.annotate(
                f"k={run.k}" if run.k else "off",
                (np.sqrt(left * right), 0.02),
                xycoords=("data", "axes fraction"),
                ha="center",
                fontsize="small",
            )


def _regime_strip(axes: Axes, result: Prediction, answer: Answer, batches: Floats) -> None:
    """Colour a strip along the top by the regime at the best k (at k = 1 where it is off)."""
    setup = result.setup
    widths = np.arange(1, max(1, *(run.k for run in answer.schedule)) + 2)
    stars = setup.critical_batch(answer.context, widths)
    runs = [next(r for r in answer.schedule if r.first <= b <= r.last) for b in batches]
    names = regime(batches, stars[[max(run.k, 1) for run in runs]], stars[0])
    edges = [0, *(np.flatnonzero(names[1:] != names[:-1]) + 1).tolist(), len(batches) - 1]
    for left, right in pairwise(edges):
        name = str(names[left])
        ends = batches[left], batches[right]
        colour = {"I": COLOURS[2], "II": COLOURS[4], "III": COLOURS[1]}[name]
        axes.axvspan(*ends, ymin=0.95, color=colour, alpha=0.5, linewidth=0)
        middle = (np.sqrt(ends[0] * ends[1]), 0.972)
        axes.annotate(
            name if left else f"regime {name}", middle, xycoords=("data", "axes fraction"),
            ha="center", va="center", fontsize="x-small",
        )  # fmt: skip


def _batch_axis(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("batch B [-]")


def _axes() -> Axes:
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(layout="constrained")
    return axes


def comparison_figure(result: Comparison) -> Figure:
    """Return a figure of speedup over batch, a line for each drafter, a panel for each context."""
    contexts = result.setup.contexts
    figure = Figure(figsize=(5.5 * len(contexts) + 2.5, 4.2), layout="constrained")
    for axes, context in zip(
        figure.subplots(1, len(contexts), squeeze=False)[0], contexts, strict=True
    ):
        for i, row in enumerate(result.rows):
            points = [p for p in row.points if p["context"] == context]
            axes.plot(
                [p["batch"] for p in points],
                [p["S"] for p in points],
                color=COLOURS[i % len(COLOURS)],
                marker=_MARKERS[i % len(_MARKERS)],
                linestyle="-" if i < len(COLOURS) else "--",
                markersize=4,
                label=row.candidate.label,
            )
        axes.axhline(1.0, color="0.5", linewidth=1)
        _batch_axis(axes)
        axes.set_ylabel("speedup S at the best k [-]")
        axes.set_title(f"context {context} tokens (1: off)")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize="small")
    setup = result.setup
    figure.suptitle(
        f"{setup.target.name} on {setup.device.label}, {setup.execution.level} level, "
        f"basis {setup.basis}"
    )
    return figure


def residual_figure(fitted: TableFit) -> Figure:
    """Return a figure of measured over predicted time, a panel for each operator and format."""
    panels = list(fitted.rows)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.5 * columns, 3.2 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    for axes, (kind, dtype) in zip(grid, panels, strict=False):
        data, fit = fitted.rows[kind, dtype], fitted.calibration.operators[kind][dtype]
        predicted = fit.seconds(data.features, data.rates)
        axes.plot(
            data.seconds * 1e6,
            data.seconds / predicted,
            linestyle="none",
            marker=".",
            markersize=3,
            alpha=0.4,
            color=COLOURS[0],
            rasterized=True,
        )
        axes.axhline(1.0, color="0.3", linewidth=1)
        spread = np.exp(1.645 * fit.residual)
        axes.axhspan(1 / spread, spread, color=COLOURS[4], alpha=0.2, linewidth=0)
        axes.set_xscale("log")
        axes.set_xlabel("measured [us]")
        axes.set_ylabel("measured / predicted [-]")
        axes.set_title(f"{kind} {dtype}: {fit.in_sample.mean:.1%} of {fit.n:,} rows")
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle("measured over predicted time; the band holds 90% of it")
    return figure


def measured_figure(record: Mapping[str, Any]) -> Figure:
    """Return a figure of what `measure` found: T_p, T_v, T_d and S over k, beside the prediction.

    Filled markers are measured, crosses on lines predicted; a row of panels for each temperature,
    a colour for each batch.

    Parameters
    ----------
    record : mapping
        As ``specmodel measure --format json`` prints it.
    """
    points = record["points"]
    temperatures = sorted({point["temperature"] for point in points})
    names = {"T_p": "T_p [ms]", "T_v": "T_v [ms]", "T_d": "T_d [ms]", "S": "speedup S [-]"}
    figure = Figure(figsize=(13, 3.1 * len(temperatures) + 0.6), layout="constrained")
    grid = figure.subplots(len(temperatures), len(names), squeeze=False)
    for row, temperature in zip(grid, temperatures, strict=True):
        here = [point for point in points if point["temperature"] == temperature]
        for axes, (name, label) in zip(row, names.items(), strict=True):
            scale = 1.0 if name == "S" else 1e3
            for i, batch in enumerate(sorted({point["batch"] for point in here})):
                own = sorted((p for p in here if p["batch"] == batch), key=lambda p: p["k"])
                k = [point["k"] for point in own]
                style = {"color": COLOURS[i % len(COLOURS)]}
                measured = [scale * point[name] for point in own]
                marker = _MARKERS[i % len(_MARKERS)]
                axes.plot(k, measured, marker, label=f"B = {batch}, measured", **style)
                line = [scale * point["predicted"][name] for point in own]
                axes.plot(k, line, "x-", markersize=5, label=f"B = {batch}, predicted", **style)
            if name == "S":
                axes.axhline(1.0, color="0.5", linewidth=1)
            most = max(p[name] for point in here for p in (point, point["predicted"]))
            axes.set_ylim(0, 1.1 * scale * most or 1.0)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.set_xlabel("drafts k [token]")
            axes.set_ylabel(label)
            axes.set_title(f"temperature {temperature:g}", fontsize="medium")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize="small")
    figure.suptitle(f"{record['target']}, drafts by {record['draft']}, {record['device']}")
    return figure


_GIVEN = {"given_acceptance": "given acceptance", "shape": "larger batches from the smallest"}


def validation_figure(values: Mapping[str, Any]) -> Figure:
    """Return a figure of predicted against measured speedups, a colour for each engine.

    Lines are 10% off. Rows that an engine or an acceptance was taken from are left out.

    Parameters
    ----------
    values : mapping
        As `specmodel.validation.scores.report` returns it.
    """
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    panels = figure.subplots(1, len(_GIVEN))
    engines = sorted({row["engine"] or "unknown" for row in values["rows"] if row["target"]})
    anchors = {"given_acceptance": "engine", "shape": "shape"}
    for axes, (test, title) in zip(panels, _GIVEN.items(), strict=True):
        rows = [
            row
            for row in values["rows"]
            if row[test] is not None and anchors[test] not in row["anchors"]
        ]
        for i, engine in enumerate(engines):
            here = [row for row in rows if (row["engine"] or "unknown") == engine]
            axes.plot(
                [row["measured"] for row in here],
                [row[test] for row in here],
                linestyle="none",
                marker=_MARKERS[(i + i // len(COLOURS)) % len(_MARKERS)],
                markersize=4,
                alpha=0.6,
                color=COLOURS[i % len(COLOURS)],
                label=engine,
            )
        ends = [x for row in rows for x in (row["measured"], row[test])] or [0.5, 2.0]
        low, high = min(ends) / 1.1, max(ends) * 1.1
        axes.plot([low, high], [low, high], color="0.3", linewidth=1)
        for factor in (0.9, 1.1):
            axes.plot([low, high], [low * factor, high * factor], ":", color="0.5", linewidth=1)
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(FixedLocator([0.5, 1, 2, 4, 8]))
            axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("measured speedup S [-]")
        axes.set_ylabel("predicted speedup S [-]")
        axes.set_title(f"{title}, {len(rows)} rows", fontsize="medium")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize="small")
    figure.suptitle("held-out predictions against published measurements; dotted: 10% off")
    return figure
