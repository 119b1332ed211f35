"""The answer to "should I turn it on?": numbers for each point, a schedule, and the reasons."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.acceptance import Acceptance, warn_beyond
from specmodel.architectures import Architecture
from specmodel.drafters import Drafter
from specmodel.errors import ExtrapolationWarning, one_number
from specmodel.hardware import Device
from specmodel.memory import Memory, devices_needed, memory
from specmodel.reasons import gap_reason, reasons
from specmodel.roofline import CALIBRATED, Execution, critical_batch, gemm_turn_rows
from specmodel.speculation import (
    RoundTime,
    alpha_break_even,
    context_where_kv_passes_weights,
    draft_time_break_even,
    drafter_execution,
    mean_width,
    plain_run,
    regime,
    round_time,
    tokens_per_round,
    verify_runs,
)
from specmodel.uncertainty import INTERVALS, beyond_measured, intervals, ratio_errors
from specmodel.width import Interval, best_of, context_where_speedup_rises, scan, schedule

_DEAREST = 10_000.0  # of a device, for an hour [USD]

CLOSE = 0.05
"""Within this of S = 1 the model does not claim to know the sign."""

KEEP = 0.01
"""A schedule's k changes where S gains more than this share: fitted passes rise in small steps."""

_POINT_AXES = {"B": "batch", "k": "k", "L": "context", "S": "S"}
_FURTHEST_BATCH = 1024
_FURTHEST_ASKED = 4096
_FURTHEST_CONTEXT = 2**20


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
    price: float | None = None  # of one device for an hour, in USD
    draft_price: float | None = None  # of a device of the drafter's own

    def __post_init__(self) -> None:
        for name in ("price", "draft_price"):
            if getattr(self, name) is not None:
                one_number(getattr(self, name), name, low=0, high=_DEAREST, unit="USD an hour")
        if self.drafter.max_k is not None and self.k_max > self.drafter.max_k:
            # a block ends the search for the best k, and the settings say where
            object.__setattr__(self, "k_max", self.drafter.max_k)

    @property
    def basis(self) -> str:
        """Where the numbers behind its passes come from."""
        return self.round(self.batches[0], self.contexts[0], max(self.k or 1, 1)).basis

    @property
    def calibrated(self) -> bool:
        """Whether any of those numbers was measured on the device."""
        return self.basis.startswith(CALIBRATED)

    def devices(self, *, drafting: bool) -> list[tuple[Device, int, float | None]]:
        """Return the devices in use, how many of each, and the price of one for an hour."""
        own = [(self.device, self.execution.layout.devices, self.price)]
        if drafting and self.drafter.device is not None:
            count = drafter_execution(self.execution, self.drafter).layout.devices
            price = self.price if self.draft_price is None else self.draft_price
            own.append((self.drafter.device, count, price))
        return own

    def cost_per_million_tokens(self, tokens_per_second: float, *, drafting: bool) -> float | None:
        """Return what a million tokens cost at a rate, all devices counted. [USD]"""
        if self.price is None or not tokens_per_second:
            return None
        hours = 1e6 / tokens_per_second / 3600
        return hours * sum(n * (price or 0.0) for _, n, price in self.devices(drafting=drafting))

    def joules_per_token(self, tokens_per_second: float, *, drafting: bool) -> float | None:
        """Return the energy of a token at board power, an upper bound. [J]"""
        used = self.devices(drafting=drafting)
        if not tokens_per_second or any(device.board_power is None for device, *_ in used):
            return None
        return sum(n * (device.board_power or 0.0) for device, n, _ in used) / tokens_per_second

    def round(self, batch: ArrayLike, context: int, k: ArrayLike) -> RoundTime:
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

    def schedule(self, context: int, max_batch: int, *, in_memory: bool) -> tuple[Interval, ...]:
        """Return the best k by batch (or the k asked for against off), within memory or not.

        Gaps and islands that the errors of what was measured cannot tell from the k beside them
        are joined to it. Where nothing was measured there are no such errors, and no steps of
        fitted passes either: what gaps there are come from the costs, and stay.
        """
        k = np.arange(self.k_max + 1) if self.k is None else np.array([0, self.k])
        limits = dict(zip(k.tolist(), self.max_batches(k, context).tolist(), strict=True))
        return schedule(
            self.device,
            self.target,
            self.drafter,
            self.acceptance,
            L=context,
            max_batch=max_batch,
            k_max=self.k_max,
            k=self.k,
            fits=limits.__getitem__ if in_memory else None,
            execution=self.execution,
            T_h=self.T_h,
            T_o=self.T_o,
            keep=KEEP if self.calibrated else 0.0,
            errors=partial(self._ratio_errors, context) if self.calibrated else None,
        )

    def _ratio_errors(self, context: int, batch: ArrayLike, k: ArrayLike) -> NDArray[np.float64]:
        return ratio_errors(
            self.device,
            self.target,
            self.drafter,
            B=batch,
            k=k,
            L=context,
            T_h=self.T_h,
            T_o=self.T_o,
            execution=self.execution,
        )

    def tokens(self, k: int) -> float:
        """Return G at k drafts."""
        return float(tokens_per_round(self.acceptance, self.drafter, k))

    def memory(self, k: ArrayLike, context: int) -> Memory:
        """Return what a deployment with k drafts takes; without the drafter where all k are 0."""
        drafter = self.drafter if np.any(np.asarray(k) > 0) else None
        return memory(
            self.device,
            self.target,
            drafter,
            k=k,
            L=context,
            layout=self.execution.layout,
            offload=self.execution.offload,
        )

    def max_batch(self, k: int, context: int) -> int:
        """Return the largest batch that fits with k drafts."""
        return int(self.memory(k, context).max_batch)

    def max_batches(self, k: NDArray[np.int_], context: int) -> NDArray[np.int_]:
        """Return the largest batch that fits with each of some k."""
        return np.where(k > 0, self.memory(k, context).max_batch, self.max_batch(0, context))

    def devices_needed(self, batch: int, context: int, k: int) -> int | None:
        """Return how many devices a deployment with k drafts takes."""
        drafter = self.drafter if k else None
        return devices_needed(
            self.device,
            self.target,
            drafter,
            batch=batch,
            k=k,
            L=context,
            layout=self.execution.layout,
            offload=self.execution.offload,
        )

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
    kv_passes_weights : float or None
        Context from which on decoding reads more KV than weights at the largest batch that
        fits there; None where it never does. [token]
    memory_ends_it : bool
        Whether the last run that is on ends because the drafter no longer fits.
    best_loss : float
        Highest S of any k >= 1 where the schedule is off throughout, above 1 where those that
        pay do not fit; NaN where one is on. [-]
    gaps : tuple of str
        Why it is off between batches that are on, a line for each such gap.
    """

    context: int
    schedule: tuple[Interval, ...]
    plain: Largest
    with_drafter: Largest
    devices_needed: int | None
    kv_passes_weights: float | None
    memory_ends_it: bool
    best_loss: float
    gaps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Points, answers and reasons of a setup.

    `speedup_rises_from` is the context from which on the largest batch gains as much as the
    smallest; None where none does up to the longest the model is for, or for one batch. [token]
    """

    setup: Setup
    points: tuple[Mapping[str, Any], ...]
    answers: tuple[Answer, ...]
    why: tuple[str, ...] = field(repr=False)
    warnings: tuple[str, ...] = ()
    speedup_rises_from: float | None = None


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
        rises = _rises_from(setup)
    return Prediction(
        setup=setup,
        points=tuple(_with_intervals(setup, points)),
        answers=answers,
        why=tuple(why),
        warnings=(
            *notes,
            *_limits(setup, points),
            *_apart(answers, points),
            *_beyond(setup, points),
        ),
        speedup_rises_from=rises,
    )


def _beyond(setup: Setup, points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return which operators of the target's passes were not measured at such sizes."""
    if not setup.calibrated:
        return []
    B, k, L = (np.array([p[key] for p in points]) for key in ("batch", "k", "context"))
    device, target, how = setup.device, setup.target, setup.execution
    decode = plain_run(device, target, B=B, L=L, execution=how)
    verify = verify_runs(device, target, setup.drafter, B=B, k=k, L=L, execution=how)
    return beyond_measured([decode, *verify])


def _with_intervals(setup: Setup, points: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Add low and high of times and speedup; None where nothing was measured on the device."""
    found: dict[str, tuple[Any, Any]] = {}
    if setup.calibrated:
        found = intervals(
            setup.device,
            setup.target,
            setup.drafter,
            **{name: np.array([p[key] for p in points]) for name, key in _POINT_AXES.items()},
            T_h=setup.T_h,
            T_o=setup.T_o,
            execution=setup.execution,
        )
    for i, point in enumerate(points):
        bounds = {
            f"{name}_{end}": float(np.broadcast_to(found[name][side], len(points))[i])
            if found
            else None
            for name in INTERVALS
            for side, end in enumerate(("low", "high"))
        }
        yield {**point, **bounds}


def _rises_from(setup: Setup) -> float | None:
    low, high = min(setup.batches), max(setup.batches)
    if low == high or (setup.k_max if setup.k is None else setup.k) == 0:
        return None
    return _finite(
        context_where_speedup_rises(
            setup.device,
            setup.target,
            setup.drafter,
            setup.acceptance,
            low=low,
            high=high,
            longest=setup.target.max_positions or _FURTHEST_CONTEXT,
            k_max=setup.k_max,
            k=setup.k,
            T_h=setup.T_h,
            T_o=setup.T_o,
            execution=setup.execution,
        )
    )


def _limits(setup: Setup, points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return notes on answers at a limit that was set, not found."""
    notes = []
    longest, most = max(setup.contexts), setup.target.max_positions
    if most is not None and longest > most:
        notes.append(f"context {longest} is beyond the {most} positions {setup.target.name} is for")
    if setup.k is None and setup.k_max and any(p["k_star"] == setup.k_max for p in points):
        notes.append(f"the best k is the largest considered, {setup.k_max} (k_max)")
    full = [p for p in points if "drafter" in (p["full"] or "")]
    if full and setup.drafter.device is not None:
        least = min(full, key=lambda p: p["draft_memory_bytes"])
        need, held = (least[f"draft_memory_{what}"] / 1e9 for what in ("bytes", "capacity"))
        notes.append(
            f"the drafter does not fit on {setup.drafter.device.label}, its own device: it needs "
            f"{need:.3g} of {held:.3g} GB at batch {least['batch']}, context {least['context']}"
        )
    return notes


def _apart(answers: Sequence[Answer], points: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say where the best k of a point is not its schedule's, which small gains do not change."""
    for answer in answers:
        found = [
            f"batch {p['batch']} the best k is {p['k'] or 'off'}, the schedule's {run.k or 'off'}"
            for p in points
            if p["context"] == answer.context and p["fits"] and p["k"] == p["k_star"]
            for run in answer.schedule
            if run.first <= p["batch"] <= run.last and p["k"] != run.k
        ]
        if found:
            yield (
                f"context {answer.context}: at {'; at '.join(found)} (gains too small to tell "
                "apart do not change a schedule's k)"
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
    best = best_of(S, drafts)
    k = int(best.k) if setup.k is None else setup.k
    warn_beyond(setup.acceptance, max(k, int(best.k)))
    # where the answer is off, the break-evens and reasons are of the best k >= 1
    on = k or (int(np.argmax(S[1:])) + 1 if S.size > 1 and setup.k is None else 1)
    times = setup.round(batch, context, k)
    drafting = setup.memory(on, context)
    # a drafter on a device that cannot hold it makes the deployment impossible, off or not
    impossible = not drafting.draft_fits(1)
    used = drafting if impossible and setup.k != 0 else setup.memory(k, context)
    point = {
        "batch": batch,
        "context": context,
        "k": k,
        "W": int(setup.drafter.rows(k)),
        "G": setup.tokens(k),
        **_times(times, float(S[k]), batch),
        **_critical(setup, batch, context, k),
        "k_star": int(best.k),
        "W_star": int(setup.drafter.rows(int(best.k))),
        "S_star": float(best.S),
        "verdict": _verdict(float(S[on]) if on < S.size and setup.k != 0 else 1.0),
        **_break_even(setup, batch, context, on),
        "memory_bytes": float(used.total(batch)),
        **_on_the_drafters_device(used, batch),
        "max_batch": int(used.max_batch),
        "fits": bool(used.fits(batch)),
        "drafter_fits": bool(drafting.fits(batch)),
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


def _on_the_drafters_device(used: Memory, batch: int) -> dict[str, Any]:
    """Return what a device of the drafter's own takes and holds (None: has none), and what is full.

    ``full`` names the devices on which the batch does not fit: the target's, the drafter's.
    """
    own = used.draft_capacity is not None
    full = {
        "target": not bool(used.target_fits(batch)),
        "drafter": not bool(used.draft_fits(batch)),
    }
    return {
        "draft_memory_bytes": float(used.draft_total(batch)) if own else None,
        "draft_memory_capacity": used.draft_capacity,
        "full": " and ".join(name for name, holds in full.items() if holds) or None,
    }


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
    rows = float(mean_width(setup.drafter, k))
    decode, verify = (float(star) for star in setup.critical_batch(context, [1, rows]))
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
    plain = setup.max_batch(0, context)
    asked = min(max(setup.batches), _FURTHEST_ASKED)
    furthest = min(plain, max(asked, _FURTHEST_BATCH)) if plain else asked
    runs = setup.schedule(context, furthest, in_memory=bool(plain))
    on = [run for run in runs if run.k]
    ends = bool(plain and on and on[-1].last == setup.max_batch(on[-1].k, context))
    loss = np.nan
    if all(run.k == 0 for run in runs) and setup.k != 0 and setup.k_max:
        S, _ = setup.scan(np.asarray(setup.batches), context, setup.k)
        loss = float(S[:, 1:].max() if setup.k is None else S[:, setup.k].max())
    return Answer(
        context=context,
        schedule=runs,
        plain=_largest(setup, context, np.array([0])),
        with_drafter=_largest(setup, context, _candidates(setup)),
        devices_needed=setup.devices_needed(1, context, 0),
        kv_passes_weights=_finite(
            context_where_kv_passes_weights(
                setup.device, setup.target, B=max(plain, 1), execution=setup.execution
            )
        ),
        memory_ends_it=ends,
        best_loss=loss,
        gaps=tuple(_gaps(setup, context, runs)),
    )


def _gaps(setup: Setup, context: int, runs: Sequence[Interval]) -> Iterator[str]:
    """Say of each run that is off between two that are on why it is."""
    for before, run in pairwise(runs[:-1]):
        if run.k == 0:
            yield gap_reason(
                setup.device,
                setup.target,
                setup.drafter,
                lambda batch, k: setup.round(batch, context, k),
                first=run.first,
                last=run.last,
                k=before.k,
                L=context,
                execution=setup.execution,
            )


def _candidates(setup: Setup) -> NDArray[np.int_]:
    if setup.k is None and setup.k_max:
        return np.arange(1, setup.k_max + 1)
    return np.array([setup.k or 0])


def _largest(setup: Setup, context: int, k: NDArray[np.int_]) -> Largest:
    """Return the largest batch that fits with the k of highest throughput there."""
    most = setup.max_batches(k, context)
    if not most.any():
        return Largest(batch=0, k=int(k[0]), tokens_per_second=0.0)
    k, most = k[most > 0], most[most > 0]
    times = setup.round(most, context, k)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExtrapolationWarning)  # of candidates that are not chosen
        speed = tokens_per_round(setup.acceptance, setup.drafter, k) / times.cost
    rates = most * speed / (times.T_p + times.T_h)
    best = int(np.argmax(rates))
    return Largest(batch=int(most[best]), k=int(k[best]), tokens_per_second=float(rates[best]))


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


# -- words ---------------------------------------------------------------------------------------


def headline(answer: Answer, setup: Setup) -> str:
    """Return the schedule of one context as a sentence."""
    runs, k = answer.schedule, setup.k
    tried = setup.k_max if k is None else k
    last = runs[-1].last
    if all(run.k == 0 for run in runs):
        if not tried:
            return "speculation is off, as asked (k = 0)"
        if answer.best_loss > 1:
            pays = f"it would pay (S = {answer.best_loss:.2f})"
            return f"leave speculation off: {pays} but {does_not_fit(setup, answer)}"
        what = "no k pays" if k is None else f"k = {k} does not pay"
        best = (
            f" (the best reaches S = {answer.best_loss:.2f})"
            if np.isfinite(answer.best_loss)
            else ""
        )
        return f"leave speculation off: {what} at any batch up to {last}{best}"
    if all(run.k for run in runs):
        return f"speculation pays at every batch up to {last}: {_steps(runs)}"
    on = [run for run in runs if run.k]
    if runs[0].k and runs[-1].k == 0 and all(run.k for run in runs[:-1]):
        edge = on[-1].last
        beyond = _full_above(setup, answer, on[-1]) if answer.memory_ends_it else "off"
        return f"speculation pays up to batch {edge}: {_steps(on)}, above {edge} {beyond}"
    return f"speculation pays in part: {', '.join(_spans(runs))}"


def does_not_fit(setup: Setup, answer: Answer) -> str:
    """Say what does not fit at a batch of 1: the drafter beside the model, or on its own device."""
    used = setup.memory(answer.with_drafter.k, answer.context)
    device = setup.drafter.device
    if device is None or used.draft_fits(1):
        return "the drafter and its draft positions do not fit beside the model"
    need, held = float(used.draft_total(1)) / 1e9, device.memory_capacity / 1e9
    return f"the drafter needs {need:.3g} GB on {device.label}, which holds {held:.3g} GB"


def _full_above(setup: Setup, answer: Answer, run: Interval) -> str:
    """Say what is full above a run that memory ends."""
    used = setup.memory(run.k, answer.context)
    if used.draft_fits(run.last + 1) or setup.drafter.device is None:
        return "the drafter no longer fits"
    return f"the drafter's own device, {setup.drafter.device.label}, is full"


def _steps(runs: tuple[Interval, ...] | list[Interval]) -> str:
    shown = runs if len(runs) <= 6 else [*runs[:3], runs[-1]]
    words = [f"k = {shown[0].k}"]
    words += [f"from {run.first} k = {run.k}" for run in shown[1:]]
    if len(runs) > 6:
        words.insert(3, "...")
    return ", ".join(words)


def _spans(runs: tuple[Interval, ...]) -> list[str]:
    """Return each run in words; neighbouring runs that are on are joined when there are many."""
    if len(runs) <= 6:
        return [f"{f'k = {run.k}' if run.k else 'off'} for {_batches(run, run)}" for run in runs]
    words = []
    for on, group in groupby(runs, key=lambda run: run.k > 0):
        same = list(group)
        drafts = sorted({run.k for run in same})
        spread = f"{drafts[0]} to {drafts[-1]}" if len(drafts) > 1 else f"{drafts[0]}"
        words.append(f"{f'k = {spread}' if on else 'off'} for {_batches(same[0], same[-1])}")
    return words


def _batches(first: Interval, last: Interval) -> str:
    return f"batch {first.first}" if first.first == last.last else f"{first.first} to {last.last}"
