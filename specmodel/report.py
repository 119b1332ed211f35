"""The answer to "should I turn it on?": numbers for each point, a schedule, and the reasons."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.acceptance import Acceptance, warn_beyond
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
_FURTHEST_ASKED = 4096


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

    def round(self, batch: int, context: int, k: int) -> RoundTime:
        """Return the times of a round of k drafts."""
        return round_time(
            self.device,
            self.target,
            self.drafter,
            B=batch,
            k=k,
            L=context,
            execution=self.execution,
            T_h=self.T_h,
            T_o=self.T_o,
        )

    def scan(
        self, batch: ArrayLike, context: int, k_max: int | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.int_]]:
        """Return S over k from 0 to `k_max` (its own by default) along a new last axis, and k."""
        return scan(
            self.device,
            self.target,
            self.drafter,
            self.acceptance,
            B=batch,
            L=context,
            k_max=self.k_max if k_max is None else k_max,
            execution=self.execution,
            T_h=self.T_h,
            T_o=self.T_o,
        )

    def schedule(self, context: int, max_batch: int) -> tuple[Interval, ...]:
        """Return the best k by batch (or the k asked for against off)."""
        return schedule(
            self.device,
            self.target,
            self.drafter,
            self.acceptance,
            L=context,
            max_batch=max_batch,
            k_max=self.k_max,
            k=self.k,
            execution=self.execution,
            T_h=self.T_h,
            T_o=self.T_o,
        )

    def tokens(self, k: int) -> float:
        """Return G at k drafts."""
        return float(tokens_per_round(self.acceptance, self.drafter, k))

    def memory(self, k: int, context: int) -> Memory:
        """Return what a deployment with k drafts takes; k = 0 is without the drafter."""
        drafter = self.drafter if k else None
        return memory(self.device, self.target, drafter, k=k, L=context, tp=self.execution.tp)

    def devices_needed(self, batch: int, context: int, k: int) -> int | None:
        """Return how many devices a deployment with k drafts takes."""
        drafter = self.drafter if k else None
        return devices_needed(self.device, self.target, drafter, batch=batch, k=k, L=context)

    def critical_batch(self, context: int, W: ArrayLike) -> NDArray[np.float64]:
        """Return the batch at which a pass over W positions turns compute-bound."""
        return critical_batch(self.device, self.target, W=W, L=context, execution=self.execution)


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest batch that fits and its throughput; batch 0 where the weights do not fit."""

    batch: int
    k: int
    tokens_per_second: float


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
    devices_needed : int or None
        Devices that would hold the target and one sequence.
    best_loss : float
        Highest S of any k >= 1 where all of them lose; NaN where one pays. [-]
    """

    context: int
    schedule: tuple[Interval, ...]
    plain: Largest
    with_drafter: Largest
    devices_needed: int | None
    best_loss: float


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
    with extrapolations() as notes:
        answers = tuple(_answer(setup, context) for context in setup.contexts)
        for context in setup.contexts:
            for batch in setup.batches:
                point, reason = _point(setup, batch, context)
                points.append(point)
                why.append(reason)
    return Prediction(
        setup=setup, points=tuple(points), answers=answers, why=tuple(why), warnings=tuple(notes)
    )


@contextmanager
def extrapolations() -> Iterator[list[str]]:
    """Collect how far acceptance was extrapolated; let other warnings through."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield notes
    found = []
    for warning in caught:
        if issubclass(warning.category, ExtrapolationWarning):
            found.append(str(warning.message))
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    notes += sorted(set(found), key=lambda text: (len(text), text))[-1:]


def _point(setup: Setup, batch: int, context: int) -> tuple[dict[str, Any], str]:
    """Return the fields of one point, and why they are so."""
    S, drafts = setup.scan(batch, context, max(setup.k_max, setup.k or 0))
    considered = S[: setup.k_max + 1]
    best = best_of(considered, drafts[: setup.k_max + 1])
    k = int(best.k) if setup.k is None else setup.k
    warn_beyond(setup.acceptance, max(k, int(best.k)))
    # where the answer is off, the break-evens and reasons are of the best k >= 1
    on = k or (int(np.argmax(considered[1:])) + 1 if setup.k_max and setup.k is None else 1)
    times = setup.round(batch, context, k)
    used = setup.memory(k, context)
    point = {
        "batch": batch,
        "context": context,
        "k": k,
        "W": k + 1,
        "G": setup.tokens(k),
        **_times(times, float(S[k]), batch),
        **_critical(setup, batch, context, k),
        "k_star": int(best.k),
        "W_star": int(best.k) + 1,
        "S_star": float(best.S),
        "verdict": _verdict(float(S[on]) if k or setup.k is None else 1.0),
        **_break_even(setup, batch, context, on),
        "memory_bytes": used.total(batch),
        "max_batch": used.max_batch,
        "fits": used.total(batch) <= used.capacity,
        "devices_needed": setup.devices_needed(batch, context, k),
        "speedup_by_k": [float(s) for s in S],
        "time_shares": _shares(times),
    }
    reason = reasons(
        setup.device,
        setup.target,
        setup.drafter,
        setup.round(batch, context, on),
        G=setup.tokens(on),
        batch=batch,
        k=on,
        execution=setup.execution,
        off=k == 0,
    )
    return point, reason


def _times(times: RoundTime, speed: float, batch: int) -> dict[str, float]:
    """Return times, speedup, throughput and the use of the device."""
    step = float(times.T_p + times.T_h)
    return {
        **{name: float(getattr(times, name)) for name in ("T_p", "T_v", "T_d", "T_h", "T_o")},
        "round_cost": float(times.cost),
        "S": speed,
        "tokens_per_second_per_sequence": speed / step,
        "tokens_per_second": batch * speed / step,
        "mfu_decode": float(times.decode.mfu),
        "mbu_decode": float(times.decode.mbu),
        "mfu_verify": float(times.verify.mfu),
        "mbu_verify": float(times.verify.mbu),
        "intensity_decode": float(times.decode.intensity),
        "intensity_verify": float(times.verify.intensity),
    }


def _critical(setup: Setup, batch: int, context: int, k: int) -> dict[str, Any]:
    """Return critical batches (None: never) and the regime they put the batch in."""
    decode, verify = (float(star) for star in setup.critical_batch(context, [1, k + 1]))
    return {
        "regime": str(regime(batch, verify, decode)),
        "B_p_star": _finite(decode),
        "B_v_star": _finite(verify),
        "gemm_turn_rows": gemm_turn_rows(setup.device, setup.target, execution=setup.execution),
    }


def _break_even(setup: Setup, batch: int, context: int, k: int) -> dict[str, Any]:
    """Return the (geometric) alpha and the draft time at which k drafts just pay."""
    times = setup.round(batch, context, k)
    alpha = float(alpha_break_even(times.cost, k, hit_rate=setup.drafter.hit_rate))
    return {
        "break_even_k": k,
        "alpha_break_even": _finite(alpha),
        "T_d_break_even": float(draft_time_break_even(setup.tokens(k), times)),
    }


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
    plain = setup.memory(0, context).max_batch
    asked = min(max(setup.batches), _FURTHEST_ASKED)
    runs = setup.schedule(context, max(asked, min(plain, _FURTHEST_BATCH), 1))
    loss = np.nan
    if all(run.k == 0 for run in runs) and setup.k != 0 and setup.k_max:
        S, _ = setup.scan(np.asarray(setup.batches), context, setup.k)
        loss = float(S[:, 1:].max() if setup.k is None else S[:, setup.k].max())
    return Answer(
        context=context,
        schedule=runs,
        plain=_largest(setup, context, 0),
        with_drafter=max(
            (_largest(setup, context, k) for k in _candidates(setup)),
            key=lambda largest: largest.tokens_per_second,
        ),
        devices_needed=setup.devices_needed(1, context, 0),
        best_loss=loss,
    )


def _candidates(setup: Setup) -> range | tuple[int, ...]:
    return range(1, setup.k_max + 1) if setup.k is None and setup.k_max else (setup.k or 0,)


def _largest(setup: Setup, context: int, k: int) -> Largest:
    """Return the largest batch that fits with k drafts, and its throughput."""
    fits = setup.memory(k, context).max_batch
    if not fits:
        return Largest(batch=0, k=k, tokens_per_second=0.0)
    times = setup.round(fits, context, k)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExtrapolationWarning)  # of candidates that are not chosen
        speed = setup.tokens(k) / float(times.cost)
    rate = fits * speed / float(times.T_p + times.T_h)
    return Largest(batch=fits, k=k, tokens_per_second=rate)


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
