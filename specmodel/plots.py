"""Figures; the only module that imports matplotlib.

Each function draws on the axes it is given, or on new ones, and returns them. Colours are
safe for colour-blind readers (Okabe and Ito).
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import QuadMesh
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter
from numpy.typing import ArrayLike, NDArray

from specmodel.comparison import Comparison
from specmodel.errors import DomainError
from specmodel.files import check_output, written_beside
from specmodel.report import Answer, Prediction, Setup
from specmodel.speculation import regime

if TYPE_CHECKING:
    import xarray as xr

    from specmodel.fitting import TableFit

Floats = NDArray[np.float64]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette."""

_MARKERS = "osD^vP*"
_MOST_CELLS = 144  # of a map, for its numbers to be legible
_MOST_TICKS = 20  # of a map's axis
_MOST_PANELS = 24  # contexts of a figure
_SUFFIXES = (".png", ".pdf", ".svg")
_OFF = "0.6"  # grey
_HATCH: dict[str, Any] = {
    "facecolor": "none", "edgecolor": "black", "alpha": 0.3, "hatch": "//", "linewidth": 0
}  # fmt: skip


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
    most = max(int(k.max()), 1)
    style = {"cmap": mpl.colormaps["viridis"].resampled(most + 1), **mesh}
    drawn = _draft_map(axes, result["B"].to_numpy(), result["L"].to_numpy(), k, S, **style)
    ticks = range(0, most + 1, max(1, most // 8))
    axes.figure.colorbar(drawn, ax=axes, ticks=ticks, label="best k [token], 0: off")
    return axes


def _draft_map(
    axes: Axes, batches: Any, contexts: Any, k: NDArray[np.int_], S: Floats, **mesh: Any
) -> QuadMesh:
    """Draw a map of k with k and S written in each cell, where they are few enough to read."""
    most = max(int(k.max()), 1)
    style = {"vmin": -0.5, "vmax": most + 0.5, "shading": "nearest", **mesh}
    drawn = axes.pcolormesh(np.arange(len(batches)), np.arange(len(contexts)), k, **style)
    _value_ticks(axes.xaxis, batches)
    _value_ticks(axes.yaxis, contexts)
    if k.size <= _MOST_CELLS:
        for (y, x), drafts in np.ndenumerate(k):
            text = f"{int(drafts)}\n{S[y, x]:.2f}" if drafts else "off"
            ink = _ink(drawn.to_rgba(np.array([drafts]))[0])
            axes.annotate(text, (x, y), ha="center", va="center", fontsize=7, color=ink)
    axes.set_xlabel("batch B [-]")
    axes.set_ylabel("context L [token]")
    return drawn


def _value_ticks(axis: Axis, values: Any) -> None:
    """Name the columns or rows of a map, as many of them as can be read."""
    step = -(-len(values) // _MOST_TICKS)
    places = range(0, len(values), step)
    axis.set_ticks(places, [f"{float(values[i]):.10g}" for i in places])


def _ink(colour: Any) -> str:
    """Return the colour of text that is read on another."""
    red, green, blue = to_rgb(colour)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


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
    for inside, marker, kind in (("black", "o", "decode"), ("none", "s", "verify")):
        intensity = [p[f"intensity_{kind}"] for p in points]
        rate = [p[f"mfu_{kind}"] * peak / 1e12 for p in points]
        style: dict[str, Any] = {
            "markersize": 5,
            "markerfacecolor": inside,
            "markeredgecolor": "black",
        }
        axes.plot(intensity, rate, marker, label=kind, **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.axvline(ridge, color="0.7", linestyle=":", linewidth=1)
    axes.set_ylim(top=peak / 1e12 * 3)
    axes.annotate(
        f"rho = {ridge:.0f}", (ridge, peak / 1e12), (-4, 4), textcoords="offset points", ha="right"
    )
    axes.set_xlabel("arithmetic intensity [FLOP/B]")
    axes.set_ylabel("rate [TFLOP/s]")
    axes.legend(frameon=False, fontsize="small", loc="lower right")
    return axes


def prediction_figure(result: Prediction) -> Figure:
    """Return a figure: speedup against batch with k* and regimes shaded, and the roofline.

    Where several batches and contexts were asked for, a map of the best k over both follows. A
    k has one colour throughout the figure; what does not fit is dashed, hollow or hatched.

    Raises
    ------
    DomainError
        When there are more contexts than a figure can show.
    """
    setup = result.setup
    contexts = _shown_contexts(setup.contexts)
    mapped = min(len(contexts), len(setup.batches)) > 1
    rows = len(contexts) + mapped
    figure = Figure(figsize=(11, 4.2 * rows), layout="constrained")
    cells = figure.add_gridspec(rows, 2, width_ratios=(3, 2))
    colours = _colours_of_k(result, mapped=mapped)
    for i, answer in enumerate(result.answers):
        left, right = (figure.add_subplot(cells[i, j]) for j in range(2))
        _speedup_by_batch(left, result, answer, colours)
        here = [p for p in result.points if p["context"] == answer.context]
        dtype = setup.target.weight_dtype
        roofline(setup.device.flops(dtype), setup.device.memory_bandwidth, here, ax=right)
        right.set_title(f"roofline, {dtype}, at the batches asked for")
    if mapped:
        _prediction_map(figure.add_subplot(cells[-1, :]), result, colours)
    _legend_below(figure, _prediction_keys(result, colours))
    held = setup.drafter.weights(setup.target)
    drafter = setup.drafter.kind + (f" ({held.name})" if held is not None else "")
    _title(
        figure,
        f"Speedup by batch: {setup.target.name} on {_devices(setup)}, drafter {drafter}",
        f"{setup.execution.level} level, basis {setup.basis}",
    )
    return figure


def _shown_contexts(contexts: Sequence[int]) -> Sequence[int]:
    if len(contexts) > _MOST_PANELS:
        raise DomainError(
            f"a figure shows at most {_MOST_PANELS} contexts; got {len(contexts):,} (--context)"
        )
    return contexts


def _devices(setup: Setup) -> str:
    count = setup.execution.layout.devices
    return f"{count} x {setup.device.label}" if count > 1 else setup.device.label


def _title(figure: Figure, *lines: str) -> None:
    """Write a title in lines that are no wider than the figure; a dollar sign starts no formula."""
    width = int(figure.get_figwidth() * 10)
    folded = [part for line in lines for part in textwrap.wrap(line, width)]
    figure.suptitle("\n".join(folded), parse_math=False)


def _legend_below(figure: Figure, handles: Sequence[Artist]) -> None:
    """Add a legend below all panels, in as many columns as fit; the figure grows by its rows."""
    labels = [str(handle.get_label()).replace("$", r"\$") for handle in handles]
    column = 0.6 + 0.075 * max(map(len, labels))
    rows = -(-len(labels) // max(1, int(figure.get_figwidth() / column)))
    columns = -(-len(labels) // rows)
    figure.set_figheight(figure.get_figheight() + 0.2 * rows)
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize="small"
    )


def _ks_of(result: Prediction, answer: Answer) -> list[int]:
    """Return the k >= 1 that have a line at a context: the schedule's, or the best that loses."""
    setup = result.setup
    ks = {run.k for run in answer.schedule} - {0}
    if not ks and setup.k is None and setup.k_max:
        ks = {p["break_even_k"] for p in result.points if p["context"] == answer.context}
    return sorted(ks) or ([setup.k] if setup.k else [])


def _colours_of_k(result: Prediction, *, mapped: bool) -> dict[int, Any]:
    """Return a colour for each k of a figure: of the palette, or of a scale where they are many."""
    ks = {k for answer in result.answers for k in _ks_of(result, answer)}
    if mapped:
        ks |= {p["k_star"] for p in result.points} - {0}
    scale = [mpl.colormaps["viridis"](x) for x in np.linspace(0.1, 0.95, len(ks))]
    colours: Sequence[Any] = COLOURS[:-1] if len(ks) < len(COLOURS) else scale
    return {0: _OFF, **dict(zip(sorted(ks), colours, strict=False))}


def _prediction_keys(result: Prediction, colours: Mapping[int, Any]) -> list[Artist]:
    """Return what the legend explains, of what the figure shows."""
    setup, fixed = result.setup, result.setup.k
    dots: dict[str, Any] = {"marker": "o", "color": "black", "linestyle": "none", "markersize": 4}
    keys: list[Artist] = [Patch(color=colours[k], label=f"k = {k}") for k in colours if k]
    best_of_runs = {run.k for answer in result.answers for run in answer.schedule}
    if 0 in best_of_runs | {p["k_star"] for p in result.points}:
        keys.append(Patch(color=_OFF, alpha=0.5, label="off"))
    if fixed != 0:
        name = "best k" if fixed is None else f"k = {fixed} or off"
        keys.append(Line2D([], [], color="black", linewidth=4, label=name))
    if any(p["fits"] for p in result.points):
        keys.append(Line2D([], [], **dots, label="batch asked for"))
    if not all(p["fits"] for p in result.points):
        hollow = {**dots, "markerfacecolor": "white"}
        keys.append(Line2D([], [], **hollow, label="asked for, does not fit"))
    if any(
        setup.max_batch(k, answer.context) < _last_batch(setup, answer)
        for answer in result.answers
        for k in _ks_of(result, answer)
    ):
        keys.append(Line2D([], [], color="0.3", linestyle="--", label="k that does not fit"))
    return keys


def _prediction_map(axes: Axes, result: Prediction, colours: Mapping[int, Any]) -> None:
    setup = result.setup
    at = {(p["context"], p["batch"]): p for p in result.points}
    rows = [[at[context, batch] for batch in setup.batches] for context in setup.contexts]
    k = np.array([[p["k_star"] for p in row] for row in rows])
    S = np.array([[p["S_star"] for p in row] for row in rows])
    shades = ListedColormap([colours.get(n, "white") for n in range(max(int(k.max()), 1) + 1)])
    _draft_map(axes, setup.batches, setup.contexts, k, S, cmap=shades)
    for y, row in enumerate(rows):
        for x, point in enumerate(row):
            used = setup.memory(point["k_star"], point["context"])
            if not used.fits(point["batch"]):
                axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **_HATCH))
    axes.set_title("best k and its speedup over batch and context; hatched: does not fit")


def check_file(file: str | os.PathLike[str]) -> None:
    """Refuse a file that no figure may be written to; call it before any work.

    A regular file is replaced where it is empty or holds the format that its name says.

    Raises
    ------
    DomainError
        When the ending is unknown, the folder is not there, or something else is in the place.
    """
    check_output(file, endings=_SUFFIXES, own_format=True)


def save(figure: Figure, file: str | os.PathLike[str]) -> None:
    """Write a figure, whole or not at all; the ending says the format.

    Raises
    ------
    DomainError
        When `check_file` refuses the file, or it cannot be written.
    """
    check_file(file)
    try:
        with written_beside(file) as temporary:
            figure.savefig(temporary, dpi=150)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DomainError(f"{os.fspath(file)}: cannot be written: {reason}") from None


def _last_batch(setup: Setup, answer: Answer) -> int:
    return max(answer.schedule[-1].last, *setup.batches)


def _speedup_by_batch(
    axes: Axes, result: Prediction, answer: Answer, colours: Mapping[int, Any]
) -> None:
    """Draw S of each k over batch, dashed where it does not fit, and the schedule's best k."""
    setup, runs, context = result.setup, answer.schedule, answer.context
    ks = _ks_of(result, answer)
    limits = {k: setup.max_batch(k, context) for k in [0, *ks]}
    end = _last_batch(setup, answer)
    edges = [x for run in runs for x in (run.first, run.last)] + list(limits.values())
    grid = np.round(np.geomspace(1, end, 200))
    batches = np.unique([*grid, *(x for x in edges if 1 <= x <= end)])
    S, _ = setup.scan(batches, context, max([0, *ks]))
    for k in ks:
        for here, style in ((batches <= limits[k], "-"), (batches >= limits[k], "--")):
            axes.plot(batches[here], S[here, k], color=colours[k], linewidth=1.2, linestyle=style)
    planned = batches[batches <= runs[-1].last]
    _best_line(axes, answer, planned, S, limits, colours)
    for point in (p for p in result.points if p["context"] == context):
        inside = "black" if point["fits"] else "white"
        axes.plot(point["batch"], point["S"], "ko", markersize=4, markerfacecolor=inside, zorder=4)
    axes.axhline(1.0, color="0.4", linewidth=1, linestyle=":")
    axes.margins(y=0.12)
    _batch_axis(axes)
    width = max(np.log(end), np.log(2))
    axes.set_xlim(np.exp(-0.04 * width), end * np.exp(0.09 * width))
    _shade(axes, answer, colours)
    _regime_strip(axes, result, answer, planned)
    _memory_edges(axes, limits, batches, S[:, [0, *ks]].max(axis=1))
    axes.set_ylabel("speedup S [-]")
    what = "best k" if setup.k is None else f"k = {setup.k} or off" if setup.k else "off"
    axes.set_title(f"context {context} tokens; shading: {what}, strip: regime")


def _best_line(
    axes: Axes,
    answer: Answer,
    batches: Floats,
    S: Floats,
    limits: Mapping[int, int],
    colours: Mapping[int, Any],
) -> None:
    """Draw the schedule's S, cased in black; it is broken where a k ends for want of memory.

    Parameters
    ----------
    batches : ndarray
        Those of the schedule. [-]
    S : ndarray, shape (at least as many batches, k from 0)
        [-]
    limits : mapping of int to int
        The largest batch that fits with each k. [-]
    """
    best = np.array([next(run.k for run in answer.schedule if b <= run.last) for b in batches])
    reached = S[np.arange(len(batches)), best]
    full = np.array([limits[k] for k in best[:-1]]) < batches[1:]
    ends = np.flatnonzero((np.diff(best) != 0) & full) + 1
    x, y = np.insert(batches, ends, batches[ends]), np.insert(reached, ends, np.nan)
    style: dict[str, Any] = {
        "linestyle": "-" if answer.plain.batch else "--",
        "solid_capstyle": "butt",
    }
    axes.plot(x, y, color="black", linewidth=4, zorder=2.5, label="best k", **style)
    for k in np.unique(best):
        own = np.where(np.insert(best, ends, -1) == k, y, np.nan)
        axes.plot(x, own, color=colours[int(k)], linewidth=1.6, zorder=2.6, **style)


def _shade(axes: Axes, answer: Answer, colours: Mapping[int, Any]) -> None:
    """Shade the runs of one k; name the k at the bottom where there is room."""
    low, high = axes.get_xlim()
    for run in answer.schedule:
        left, right = max(run.first - 0.5, low), min(run.last + 0.5, high)
        axes.axvspan(left, right, color=colours[run.k], alpha=0.22, linewidth=0, zorder=0)
        if _room(axes, left, right) > 0.06:
            axes.annotate(
                f"k={run.k}" if run.k else "off",
                (np.sqrt(left * right), 0.02),
                xycoords=("data", "axes fraction"),
                ha="center",
                fontsize="small",
            )


def _room(axes: Axes, left: float, right: float) -> float:
    """Return the share of the axis between two batches."""
    low, high = axes.get_xlim()
    return float(np.log(right / left) / np.log(high / low))


def _memory_edges(axes: Axes, limits: Mapping[int, int], batches: Floats, highest: Floats) -> None:
    """Mark the batches above which the drafter, and the target alone, do not fit.

    Parameters
    ----------
    limits : mapping of int to int
        The largest batch that fits with each k. [-]
    batches, highest : ndarray
        The highest line over batch, which names of edges keep clear of. [-]
    """
    low, high = axes.get_xlim()
    plain = limits[0]
    drafting = max((batch for k, batch in limits.items() if k), default=plain)
    marks = [(drafting, "drafter does not fit", "right")] if drafting < plain else []
    for batch, text, side in [*marks, (plain, "does not fit", "left")]:
        if not batch:
            _note(axes, low, 0.09, f"{text} at any batch", ha="left")
        elif batch < high:
            axes.axvline(batch + 0.5, ymax=0.95, color="0.3", linewidth=1, linestyle="-.")
            bottom, top = axes.get_ylim()
            above = np.interp(batch, batches, highest) > (bottom + top) / 2
            style = {"va": "bottom"} if above else {"va": "top"}
            _note(axes, batch + 0.5, 0.16 if above else 0.92, text, ha=side, rotation=90, **style)
    if plain < high:
        axes.axvspan(plain + 0.5 if plain else low, high, **_HATCH, zorder=0)


def _note(axes: Axes, batch: float, height: float, text: str, *, ha: str, **style: Any) -> None:
    """Write a text on white beside a batch, below the lines."""
    axes.annotate(
        text,
        (batch, height),
        (-3 if ha == "right" else 3, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha=ha,
        fontsize="x-small",
        bbox={"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 1},
        zorder=1.5,
        **style,
    )


def _regime_strip(axes: Axes, result: Prediction, answer: Answer, batches: Floats) -> None:
    """Divide a strip along the top by the regime at the best k (at k = 1 where it is off)."""
    setup = result.setup
    widths = np.arange(1, max(1, *(run.k for run in answer.schedule)) + 2)
    stars = setup.critical_batch(answer.context, widths)
    runs = [next(r for r in answer.schedule if r.first <= b <= r.last) for b in batches]
    names = regime(batches, stars[[max(run.k, 1) for run in runs]], stars[0])
    low, high = axes.get_xlim()
    borders = np.append(np.maximum(batches - 0.5, low), min(batches[-1] + 0.5, high))
    edges = [0, *(np.flatnonzero(names[1:] != names[:-1]) + 1).tolist(), len(batches)]
    for left, right in pairwise(edges):
        name = str(names[left])
        ends = float(borders[left]), float(borders[right])
        shade = {"I": "1.0", "II": "0.85", "III": "0.7"}[name]
        axes.axvspan(*ends, ymin=0.95, facecolor=shade, edgecolor="0.4", linewidth=0.5)
        if _room(axes, *ends) < 0.03:
            continue
        middle = (np.sqrt(ends[0] * ends[1]), 0.972)
        axes.annotate(
            f"regime {name}" if _room(axes, *ends) > 0.12 else name, middle,
            xycoords=("data", "axes fraction"), ha="center", va="center", fontsize="x-small",
        )  # fmt: skip


def _batch_axis(axes: Axes) -> None:
    """Scale the axis by powers of two; where it spans less than two of them, by whole numbers."""
    low, high = axes.dataLim.intervalx
    axes.set_xscale("log", base=2)
    if low == high:
        axes.xaxis.set_major_locator(FixedLocator([low]))
    elif high < 4 * low:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("batch B [-]")


def _axes() -> Axes:
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(layout="constrained")
    return axes


def comparison_figure(result: Comparison) -> Figure:
    """Return a figure of speedup over batch, a line for each drafter, a panel for each context.

    Raises
    ------
    DomainError
        When there are more contexts than a figure can show.
    """
    setup = result.setup
    contexts = _shown_contexts(setup.contexts)
    columns = 2 if len(contexts) == 4 else min(len(contexts), 3)
    rows = -(-len(contexts) // columns)
    size = (max(7.5, 5.2 * columns), 3.8 * rows + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    for axes, context in zip(grid, contexts, strict=False):
        for i in range(len(result.rows)):
            _comparison_line(axes, result, i, context)
        axes.axhline(1.0, color="0.5", linewidth=1)
        _batch_axis(axes)
        axes.set_ylabel("speedup S at the best k [-]")
        axes.set_title(f"context {context} tokens (S = 1: off)")
    for axes in grid[len(contexts) :]:
        axes.set_visible(False)
    keys = [Line2D([], [], **_line_style(i), label=row.candidate.label)
            for i, row in enumerate(result.rows)]  # fmt: skip
    if not all(p["fits"] for row in result.rows for p in row.points):
        hollow: dict[str, Any] = {"marker": "o", "color": "black", "markerfacecolor": "white"}
        keys.append(Line2D([], [], linestyle="none", markersize=5, **hollow, label="does not fit"))
    _legend_below(figure, keys)
    _title(
        figure,
        f"Speedup by drafter: {setup.target.name} on {_devices(setup)}",
        f"{setup.execution.level} level, basis {setup.basis}",
    )
    return figure


def _line_style(index: int) -> dict[str, Any]:
    """Return a look that no other drafter has, up to the square of the palette's length."""
    again = index // len(COLOURS)
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": _MARKERS[(index + again) % len(_MARKERS)],
        "linestyle": ("-", "--", ":", "-.")[again % 4],
        "markersize": 5,
    }


def _comparison_line(axes: Axes, result: Comparison, index: int, context: int) -> None:
    """Draw one drafter, with hollow markers where it does not fit."""
    points = [p for p in result.rows[index].points if p["context"] == context]
    batches, S = [p["batch"] for p in points], [p["S"] for p in points]
    style = _line_style(index)
    axes.plot(batches, S, **style)
    hollow = [i for i, p in enumerate(points) if not p["fits"]]
    over = {**style, "linestyle": "none", "markerfacecolor": "white"}
    axes.plot([batches[i] for i in hollow], [S[i] for i in hollow], **over)


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
    _legend_below(figure, grid[0, 0].get_legend_handles_labels()[0])
    _title(figure, f"{record['target']}, drafts by {record['draft']}, {record['device']}")
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
