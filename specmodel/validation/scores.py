"""Errors of predictions, and whether the decisions that follow from them are right."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specmodel.overheads import fitted_to, serves
from specmodel.validation.judging import CLOSE, Judged, Validation

WITHIN = 0.03
"""A chosen number of drafts is right where its measured speed is this close to the best. [-]"""


def errors(pairs: Iterable[tuple[float, float]]) -> dict[str, float | int | None]:
    """Return ``n``, and ``median``, ``mean`` and ``p90`` of |predicted / measured - 1|, ``bias``.

    Parameters
    ----------
    pairs : iterable of (float, float)
        Predicted, measured.

    Examples
    --------
    >>> errors([(1.1, 1.0), (0.9, 1.0)])["bias"]
    0.0
    """
    off = np.array([predicted / measured - 1 for predicted, measured in pairs])
    if not off.size:
        return {"n": 0, "median": None, "mean": None, "p90": None, "bias": None}
    size = np.abs(off)
    return {
        "n": int(off.size),
        "median": float(np.median(size)),
        "mean": float(size.mean()),
        "p90": float(np.quantile(size, 0.9)),
        "bias": float(np.round(off.mean(), 12)),
    }


def report(validation: Validation) -> dict[str, Any]:
    """Return summary, groups and rows of a validation, as ``validate --format json`` prints them.

    ``summary.given_acceptance`` counts dense targets on engines that serve; ``moe`` and
    ``research`` beside it the others, ``in_study`` what used more of its study.
    """
    judged = validation.judged
    return {
        "summary": {
            "shape": _shape(judged),
            "given_acceptance": _given(judged),
            "decisions": decisions(judged),
            "time_shares": {
                "n": len(validation.shares),
                "points": float(np.mean([one.points for one in validation.shares]))
                if validation.shares
                else None,
                "in_study": sum(one.in_study for one in validation.shares),
            },
        },
        "groups": {
            name: {
                key: {"shape": _shape(some), "given_acceptance": _of(some, "given")}
                for key, some in sorted(_by(judged, of).items())
            }
            for name, of in _GROUPS.items()
        },
        "excluded": dict(Counter(one.why for one in judged if one.why).most_common()),
        "rows": [_row(one) for one in judged],
    }


def _shape(judged: Sequence[Judged]) -> dict[str, Any]:
    return {**_of(judged, "shape"), "in_study": _of(judged, "shape_in_study")}


def _given(judged: Sequence[Judged]) -> dict[str, Any]:
    parts: dict[str, list[Judged]] = {"serving": [], "moe": [], "research": []}
    for one in judged:
        if one.setup is not None:
            parts[_part(one)].append(one)
    return {
        **_of(parts["serving"], "given"),
        "moe": _of(parts["moe"], "given"),
        "research": _of(parts["research"], "given"),
        "in_study": {
            **_of(parts["serving"], "given_in_study"),
            "moe": _of(parts["moe"], "given_in_study"),
            "research": _of(parts["research"], "given_in_study"),
        },
        "interval_only": _intervals(judged),
    }


def _intervals(judged: Sequence[Judged]) -> dict[str, float | int | None]:
    some = [one for one in judged if one.interval is not None]
    held = [one.interval[0] <= (one.row.speedup or 0) <= one.interval[1] for one in some]  # type: ignore[index]
    return {"n": len(some), "held": float(np.mean(held)) if held else None}


def _part(one: Judged) -> str:
    made = one.setup
    assert made is not None  # noqa: S101
    if any(made.target.moe_layers()):
        return "moe"
    return "serving" if made.engine is not None and serves(made.engine) else "research"


_ANCHOR = {"given": "engine", "shape": "shape"}


def counted(one: Judged, what: str) -> tuple[float, float] | None:
    """Return prediction and measurement of a row that counts, None where it does not."""
    predicted, anchor = getattr(one, what), _ANCHOR.get(what)
    if predicted is None or one.row.speedup is None:
        return None
    if anchor is not None and anchor in one.anchors:
        return None
    return predicted, one.row.speedup


def _of(judged: Iterable[Judged], what: str) -> dict[str, Any]:
    return errors(pair for one in judged if (pair := counted(one, what)) is not None)


# -- groups --------------------------------------------------------------------------------------


def _architecture(one: Judged) -> str:
    if one.setup is None:
        return "unknown"
    target = one.setup.target
    return ", ".join(dict.fromkeys(k.split(" + ")[-1] for k in target.layers_by_kind())) or "dense"


def _batch(one: Judged) -> str:
    batch = one.row.batch
    if batch is None:
        return "not stated"
    return (
        "1" if batch <= 1 else "2 to 16" if batch <= 16 else "17 to 64" if batch <= 64 else "65 on"
    )


_GROUPS: Mapping[str, Callable[[Judged], str]] = {
    "source": lambda one: one.row.source or one.row.url,
    "engine": lambda one: one.setup.engine or "unknown" if one.setup else "unknown",
    "drafter": lambda one: one.row.drafter_kind,
    "architecture": _architecture,
    "batch": _batch,
    "quality": lambda one: one.row.quality or "not stated",
}


def _by(judged: Iterable[Judged], of: Callable[[Judged], str]) -> dict[str, list[Judged]]:
    groups: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        if one.best is not None or one.given_in_study is not None:
            groups[of(one)].append(one)
    return groups


def _row(one: Judged) -> dict[str, Any]:
    made = one.setup
    return {
        "id": one.row.id,
        "measured": one.row.speedup,
        "given_acceptance": one.given,
        "shape": one.shape,
        "given_acceptance_in_study": one.given_in_study,
        "shape_in_study": one.shape_in_study,
        "interval": None if one.interval is None else list(one.interval),
        "anchors": sorted(one.anchors),
        "engine": made.engine if made else None,
        "device": made.device.name if made else None,
        "target": made.target.name if made else None,
        "drafter": made.drafter.kind if made else None,
        "k": made.k if made else None,
        "assumed": list(made.assumed) if made else [],
        "basis": _basis(one),
        "why": one.why or None,
    }


def _basis(one: Judged) -> str:
    """Return what a prediction rests on: measurements of the device, of the engine."""
    made = one.setup
    if made is None:
        return "nothing"
    device = "a calibrated device" if made.device.calibration else "a device nobody calibrated"
    studies = 0 if made.engine is None else len(fitted_to(made.engine, without=one.row.study))
    return f"{device}, {studies} other studies of the engine"


# -- decisions -----------------------------------------------------------------------------------


def decisions(judged: Iterable[Judged]) -> dict[str, Any]:
    """Return how often the number of drafts chosen is right, and the answer on or off.

    A series has the same deployment, batch, dataset and temperature, and several numbers of
    drafts or trees of one drafter, every one with a prediction; one that an engine was moved by is
    left out. What is chosen is right within `WITHIN` of the measured best, plain decoding included;
    ``longest`` is what choosing the most tokens per round scores, where all rows state them. On or
    off is asked of every row that counts; "too close to call" is right where the measurement is
    within `CLOSE` of 1.
    """
    every = [one for one in judged if one.row.speedup is not None and _plainly(one)]
    series: dict[Any, list[Judged]] = defaultdict(list)
    for one in every:
        r = one.row
        deployment = (r.study, r.engine, r.hardware, r.target_model, r.target_dtype, r.tp, r.n_gpus)
        drafts = (r.drafter_kind, r.draft_model)
        key = (*deployment, *drafts, r.batch, r.dataset, r.temperature, r.context_len)
        series[key].append(one)
    several = [
        some
        for some in series.values()
        if len({(one.row.k, one.row.tree) for one in some}) > 1
        and all(one.best is not None and "engine" not in one.anchors for one in some)
    ]
    chosen = [_chosen(some, lambda one: one.best or 0.0) for some in several]
    longest = [
        _chosen(some, lambda one: one.row.tokens_per_step_G or 0.0)
        for some in several
        if all(one.row.tokens_per_step_G for one in some)
    ]
    rows = [one for one in every if one.best is not None]
    answers = [(_answer(one.best or 0.0), one.row.speedup or 0.0) for one in rows]
    counts = [
        answer
        for answer, one in zip(answers, rows, strict=True)
        if counted(one, "shape" if one.shape is not None else "given") is not None
    ]
    right = [_right(answer, measured) for answer, measured in counts]
    losses = [answer for answer, measured in counts if measured < 1]
    caught = [_right(answer, measured) for answer, measured in counts if measured < 1]
    return {
        "series": len(several),
        "best_or_near": _share([measured >= best * (1 - WITHIN) for measured, best in chosen]),
        "longest_series": len(longest),
        "longest_best_or_near": _share([m >= best * (1 - WITHIN) for m, best in longest]),
        "lost": float(np.mean([1 - m / b for m, b in chosen])) if chosen else None,
        "rows": len(counts),
        "on_off_right": _share(right),
        "always_on_right": _share([measured > 1 for _, measured in counts]),
        "too_close_to_call": sum(answer == "close" for answer, _ in counts),
        "losses": len(losses),
        "losses_caught": _share(caught),
    }


def _plainly(one: Judged) -> bool:
    """Return whether a row is against plain decoding, lossless."""
    row = one.row
    return row.speedup_baseline == "no_spec_same_engine" and "lossy" not in row.quality


def _share(right: Sequence[bool]) -> float | None:
    return float(np.mean(right)) if right else None


def _chosen(some: Sequence[Judged], by: Callable[[Judged], float]) -> tuple[float, float]:
    """Return the measured speed of the candidate that is largest by something, and the best."""
    best = max(some, key=by)
    speed = (best.row.speedup or 0.0) if by(best) > 1 else 1.0
    return speed, max(1.0, *(one.row.speedup or 0.0 for one in some))


def _answer(S: float) -> str:
    return "close" if abs(S - 1) <= CLOSE else "on" if S > 1 else "off"


def _right(answer: str, measured: float) -> bool:
    if answer == "close":
        return abs(measured - 1) <= CLOSE
    return (measured > 1) == (answer == "on")
