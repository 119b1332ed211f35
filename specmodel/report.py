"""The answer to "should I turn it on?": numbers for each point, a schedule, and the reasons."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specmodel.acceptance import Acceptance
from specmodel.architectures import Architecture
from specmodel.drafters import Drafter
from specmodel.errors import ExtrapolationWarning
from specmodel.hardware import Device
from specmodel.memory import Memory, devices_needed, memory
from specmodel.reasons import reasons
from specmodel.roofline import Execution, critical_batch, gemm_turn_rows
from specmodel.speculation import (
    RoundTime,
    alpha_break_even,
    draft_time_break_even,
    regime,
    round_time,
    tokens_per_round,
)
from specmodel.width import Interval, best_of, scan, schedule

CLOSE = 0.05
"""Within this of S = 1 the model does not claim to know the sign."""

_FURTHEST_BATCH = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything a prediction depends on; `k` None means the best one at each point."""

    device: Device
    target: Architecture
    drafter: Drafter
    acceptance: Acceptance
    execution: Execution
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    k: int | None = None
    k_max: int = 16
    T_h: float = 0.0
    T_o: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What holds at one context, over batches.

    Attributes
    ----------
    context : int
        [token]
    schedule : tuple of Interval
        Best k by batch (or the given k against off).
    plain, with_drafter : Largest
        The largest batch that fits, and what it yields.
    best_loss : float
        Highest S of any k >= 1 where all of them lose; NaN where one pays. [-]
    """

    context: int
    schedule: tuple[Interval, ...]
    plain: Largest
    with_drafter: Largest
    best_loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest batch that fits and its throughput; batch 0 where the weights do not fit."""

    batch: int
    k: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Points, answers and reasons of a setup."""

    setup: Setup
    points: tuple[Mapping[str, Any], ...]
    answers: tuple[Answer, ...]
    why: tuple[str, ...] = field(repr=False)
    warnings: tuple[str, ...] = ()


def predict(setup: Setup) -> Prediction:
    """Evaluate every (batch, context) of a setup.

    Raises
    ------
    DomainError
        When an argument is out of range, or the device lacks a number format.
    """
    points: list[dict[str, Any]] = []
    why: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ExtrapolationWarning)
        answers = tuple(_answer(setup, context) for context in setup.contexts)
        for context in setup.contexts:
            for batch in setup.batches:
                point, reason = _point(setup, batch, context)
                points.append(point)
                why.append(reason)
    notes = sorted({str(w.message) for w in caught}, key=lambda text: (len(text), text))
    return Prediction(
        setup=setup,
        points=tuple(points),
        answers=answers,
        why=tuple(why),
        warnings=tuple(notes[-1:]),  # one kind of warning, the furthest k says it all
    )


def _round(setup: Setup, batch: int, context: int, k: int) -> RoundTime:
    return round_time(
        setup.device,
        setup.target,
        setup.drafter,
        B=batch,
        k=k,
        L=context,
        execution=setup.execution,
        T_h=setup.T_h,
        T_o=setup.T_o,
    )


def _point(setup: Setup, batch: int, context: int) -> tuple[dict[str, Any], str]:
    S, drafts = scan(
        setup.device,
        setup.target,
        setup.drafter,
        setup.acceptance,
        B=batch,
        L=context,
        k_max=max(setup.k_max, setup.k or 0),
        execution=setup.execution,
        T_h=setup.T_h,
        T_o=setup.T_o,
    )
    upto = S[: setup.k_max + 1]
    best = best_of(upto, drafts[: setup.k_max + 1])
    k = int(best.k) if setup.k is None else setup.k
    times = _round(setup, batch, context, k)
    G = float(tokens_per_round(setup.acceptance, setup.drafter, k))
    speed = float(S[k])
    stars = [
        float(critical_batch(setup.device, setup.target, W=W, L=context, execution=setup.execution))
        for W in (1, k + 1)
    ]
    used = _memory(setup, k, context)
    step = float(times.T_p + times.T_h)
    even = float(alpha_break_even(times.cost, k, hit_rate=setup.drafter.hit_rate))
    on = k or (int(np.argmax(upto[1:])) + 1 if setup.k_max and setup.k is None else 0)
    point = {
        "batch": batch,
        "context": context,
        "k": k,
        "W": k + 1,
        "G": G,
        "T_p": float(times.T_p),
        "T_v": float(times.T_v),
        "T_d": float(times.T_d),
        "T_h": float(times.T_h),
        "T_o": float(times.T_o),
        "round_cost": float(times.cost),
        "S": speed,
        "regime": str(regime(batch, stars[1], stars[0])),
        "B_p_star": _finite(stars[0]),
        "B_v_star": _finite(stars[1]),
        "gemm_turn_rows": gemm_turn_rows(setup.device, setup.target, setup.execution),
        "k_star": int(best.k),
        "W_star": int(best.k) + 1,
        "S_star": float(best.S),
        "verdict": _verdict(float(S[on])),
        "alpha_break_even": _finite(even),
        "T_d_break_even": float(draft_time_break_even(G, times)),
        "tokens_per_second_per_sequence": speed / step,
        "tokens_per_second": batch * speed / step,
        "mfu_decode": float(times.decode.mfu),
        "mbu_decode": float(times.decode.mbu),
        "mfu_verify": float(times.verify.mfu),
        "mbu_verify": float(times.verify.mbu),
        "intensity_decode": float(times.decode.intensity),
        "intensity_verify": float(times.verify.intensity),
        "memory_bytes": used.total(batch),
        "max_batch": used.max_batch,
        "fits": used.total(batch) <= used.capacity,
        "devices_needed": devices_needed(
            setup.device, setup.target, setup.drafter if k else None, batch=batch, k=k, L=context
        ),
        "speedup_by_k": [float(s) for s in S],
        "time_shares": _shares(times),
    }
    shown = on or 1
    reason = reasons(
        setup.device,
        setup.target,
        setup.drafter,
        _round(setup, batch, context, shown),
        G=float(tokens_per_round(setup.acceptance, setup.drafter, shown)),
        batch=batch,
        k=shown,
        execution=setup.execution,
        off=k == 0,
    )
    return point, reason


def _memory(setup: Setup, k: int, context: int) -> Memory:
    drafter = setup.drafter if k else None
    return memory(setup.device, setup.target, drafter, k=k, L=context, tp=setup.execution.tp)


def _verdict(speed: float) -> str:
    """Judge the speedup of the k asked for, or of the best k >= 1."""
    if speed != 1 and abs(speed - 1) <= CLOSE:
        return "too close to call"
    return "on" if speed > 1 else "off"


def _shares(times: RoundTime) -> dict[str, float]:
    """Share of a round by group: verification's groups, drafting, and what is besides passes."""
    total = float(times.T_d + times.T_v + times.T_o)
    verify = sum(float(seconds) for seconds in times.verify.groups.values())
    shares = {
        f"verify {group}": float(times.T_v) / total * float(seconds) / verify
        for group, seconds in times.verify.groups.items()
    }
    return {**shares, "draft": float(times.T_d) / total, "other": float(times.T_o) / total}


def _answer(setup: Setup, context: int) -> Answer:
    plain = _memory(setup, 0, context).max_batch
    furthest = max(*setup.batches, min(plain, _FURTHEST_BATCH), 1)
    runs = schedule(
        setup.device,
        setup.target,
        setup.drafter,
        setup.acceptance,
        L=context,
        max_batch=furthest,
        k_max=setup.k_max,
        k=setup.k,
        execution=setup.execution,
        T_h=setup.T_h,
        T_o=setup.T_o,
    )
    loss = np.nan
    if all(run.k == 0 for run in runs) and setup.k != 0 and setup.k_max:
        S, _ = scan(
            setup.device,
            setup.target,
            setup.drafter,
            setup.acceptance,
            B=np.asarray(setup.batches),
            L=context,
            k_max=setup.k_max if setup.k is None else setup.k,
            execution=setup.execution,
            T_h=setup.T_h,
            T_o=setup.T_o,
        )
        loss = float(S[:, 1:].max() if setup.k is None else S[:, setup.k].max())
    return Answer(
        context=context,
        schedule=runs,
        plain=_largest(setup, context, k=0),
        with_drafter=_largest(setup, context, k=setup.k),
        best_loss=loss,
    )


def _largest(setup: Setup, context: int, *, k: int | None) -> Largest:
    """Return the largest batch that fits with k drafts (None: the best k at that batch)."""
    chosen = setup.k_max if k is None else k
    fits = _memory(setup, chosen, context).max_batch
    if not fits:
        return Largest(batch=0, k=chosen, tokens_per_second=0.0)
    S, drafts = scan(
        setup.device,
        setup.target,
        setup.drafter,
        setup.acceptance,
        B=fits,
        L=context,
        k_max=chosen,
        execution=setup.execution,
        T_h=setup.T_h,
        T_o=setup.T_o,
    )
    if k is None and drafts.size > 1:
        chosen = int(drafts[1:][np.argmax(S[1:])])
    step = float(_round(setup, fits, context, 0).T_p) + setup.T_h
    return Largest(batch=fits, k=chosen, tokens_per_second=fits * float(S[chosen]) / step)


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


# -- words ---------------------------------------------------------------------------------------


def headline(answer: Answer, *, k: int | None) -> str:
    """Return the schedule of one context as a sentence; `k` is the one asked for, if any."""
    runs = answer.schedule
    last = runs[-1].last
    if all(run.k == 0 for run in runs):
        if k == 0:
            return "speculation is off, as asked (k = 0)"
        tried = "no k pays" if k is None else f"k = {k} does not pay"
        best = (
            f" (the best reaches S = {answer.best_loss:.2f})"
            if np.isfinite(answer.best_loss)
            else ""
        )
        return f"leave speculation off: {tried} at any batch up to {last}{best}"
    if all(run.k for run in runs):
        return f"speculation pays at every batch up to {last}: {_steps(runs)}"
    on = [run for run in runs if run.k]
    if runs[0].k and runs[-1].k == 0 and all(run.k for run in runs[:-1]):
        return f"speculation pays up to batch {on[-1].last}: {_steps(on)}, above {on[-1].last} off"
    return "speculation pays in part: " + ", ".join(_span(run) for run in _listed(runs))


def _steps(runs: tuple[Interval, ...] | list[Interval]) -> str:
    shown = runs if len(runs) <= 6 else [*runs[:3], runs[-1]]
    words = [f"k = {shown[0].k}"]
    words += [f"from {run.first} k = {run.k}" for run in shown[1:]]
    if len(runs) > 6:
        words.insert(3, "...")
    return ", ".join(words)


def _listed(runs: tuple[Interval, ...]) -> list[Interval]:
    """Return the runs to list: all of them, or both ends when there are too many."""
    return list(runs) if len(runs) <= 8 else [*runs[:4], *runs[-3:]]


def _span(run: Interval) -> str:
    where = f"batch {run.first}" if run.first == run.last else f"{run.first} to {run.last}"
    return f"{f'k = {run.k}' if run.k else 'off'} for {where}"
