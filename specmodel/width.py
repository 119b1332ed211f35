r"""Choosing the draft length: exact scan, closed form, marginal rule, schedules, policies."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.acceptance import Acceptance, as_acceptance, expected_tokens, warn_beyond
from specmodel.architectures import Architecture, load_model
from specmodel.defaults import drafter_of
from specmodel.drafters import Drafter, checked_drafter
from specmodel.errors import (
    ConvergenceError,
    DomainError,
    ExtrapolationWarning,
    brief,
    one_number,
    one_whole,
    real_array,
    whole_array,
)
from specmodel.hardware import Device, load_device
from specmodel.roofline import Execution, ExecutionOptions
from specmodel.speculation import context_from_which, round_time, tokens_per_round
from specmodel.uncertainty import NORMAL_90

Floats = NDArray[np.float64]
RatioErrors = Callable[[ArrayLike, ArrayLike], Floats]


class Best(NamedTuple):
    """The best draft length and what it brings; k = 0 and S = 1 mean off."""

    k: NDArray[np.int_]
    S: Floats


def best_of(S: ArrayLike, k: ArrayLike, *, axis: int = -1) -> Best:
    """Return the k with the highest S along an axis, ties to the smaller k; off unless S > 1.

    Parameters
    ----------
    S : array_like
        Speedup, one entry along `axis` for each of `k`. [-] Entries at k = 0 count as 1.
    k : array_like of int
        [token]
    axis : int

    Raises
    ------
    DomainError
        When S is negative or NaN.

    Examples
    --------
    >>> k = np.arange(0, 21)
    >>> S = expected_tokens(0.8, k) / (1 + 0.05 * k)
    >>> int(best_of(S, k).k)
    8
    """
    values = np.moveaxis(real_array(S, "S", low=0), axis, -1)
    drafts = whole_array(k, "k", unit="token").astype(int)
    order = np.argsort(drafts, kind="stable")
    values, drafts = values[..., order], drafts[order]
    values = np.where(drafts > 0, values, 1.0)
    index = np.argmax(values, axis=-1)
    top = np.take_along_axis(values, index[..., None], axis=-1)[..., 0]
    pays = top > 1.0
    return Best(k=np.where(pays, drafts[index], 0), S=np.where(pays, top, 1.0))


def scan(
    device: Device,
    target: Architecture,
    drafter: Drafter,
    acceptance: Acceptance,
    *,
    B: ArrayLike,
    L: ArrayLike = 0,
    k_max: int = 16,
    T_h: float = 0.0,
    T_o: float = 0.0,
    execution: Execution | None = None,
    **options: Unpack[ExecutionOptions],
) -> tuple[Floats, NDArray[np.int_]]:
    """Return S for every k from 0 to `k_max` along a new last axis, and those k.

    Extrapolated acceptance is not warned of here: whoever chooses a k from the scan does
    (`specmodel.acceptance.warn_beyond`).

    Parameters
    ----------
    device, target, drafter, acceptance
        Acceptance without axes of its own.
    B, L : array_like
        Sequences [-], context [token]. Broadcast.
    k_max : int
        [token]
    execution, T_h, T_o
        As in `specmodel.speculation.round_time`.

    Returns
    -------
    S : ndarray
        Speedup, k last. [-]
    k : ndarray of int
        [token]
    """
    most = one_whole(k_max, "k_max", unit="token")
    drafter, acceptance = checked_drafter(drafter), as_acceptance(acceptance)
    if np.size(getattr(acceptance, "alpha", 0.0)) > 1:
        raise DomainError(f"acceptance must have one alpha; got {acceptance.label}")
    k = np.arange((most if drafter.max_k is None else min(most, drafter.max_k)) + 1)
    times = round_time(
        device,
        target,
        drafter,
        B=np.asarray(B, dtype=np.float64)[..., None],
        k=k,
        L=np.asarray(L, dtype=np.float64)[..., None],
        execution=Execution.of(execution, options),
        T_h=T_h,
        T_o=T_o,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExtrapolationWarning)
        G = tokens_per_round(acceptance, drafter, k)
    return np.where(k > 0, G / times.cost, 1.0), k


def width_closed_form(alpha: float, A: float, C: float) -> float:
    r"""Return the stationary width of G / (A + C W), for a cost that is affine in W.

    With :math:`a = -\ln\alpha` it is :math:`W = \ln(u)/a` where
    :math:`u - \ln u = 1 + aA/C`, u > 1, that is :math:`u = -W_{-1}(-e^{-1-aA/C})` in terms
    of the lower branch of Lambert's function.

    Parameters
    ----------
    alpha : float
        [-], strictly between 0 and 1.
    A, C : float
        Cost of a round is A + C W, both > 0. [s] or any one unit.

    Raises
    ------
    DomainError
        When alpha, A or C is out of range: then there is no interior optimum.

    Examples
    --------
    >>> round(width_closed_form(0.8, 0.95, 0.05), 6)
    8.856654
    """
    if one_number(alpha, "alpha", low=0, high=1) in (0, 1):
        raise DomainError(f"alpha must be strictly between 0 and 1; got {alpha:g}")
    for name, value in (("A", A), ("C", C)):
        one_number(value, name, positive=True)
    a = -np.log(alpha)
    excess = a * A / C  # u - ln u = 1 + excess
    if excess < 1e-8:  # the branch point: u = 1 + sqrt(2 excess), to rounding
        return float(np.log1p(np.sqrt(2 * excess)) / a)
    if excess < 700:
        from scipy.special import lambertw

        u = float(-lambertw(-np.exp(-1 - excess), -1).real)
    else:  # the exponential underflows
        u = 1 + excess + np.log1p(excess)
    for _ in range(50):  # Newton polishes the first and solves the second
        step = (u - np.log(u) - 1 - excess) / (1 - 1 / u)
        u -= step
        if abs(step) <= 1e-15 * u:
            break
    return float(np.log(u) / a)


def best_affine_width(alpha: float, A: float, C: float, *, low: int = 1, high: int = 10_000) -> int:
    """Return the integer W in [low, high] that maximises G / (A + C W), ties to the smaller.

    The better of floor and ceiling of the stationary point; an end of the segment where there
    is none (alpha 0 or 1, C = 0, A <= 0).

    Examples
    --------
    >>> best_affine_width(0.52, 0.99, 0.01)
    7
    """
    one_number(alpha, "alpha", low=0, high=1)
    one_number(A, "A")
    one_number(C, "C", low=0)
    if not 1 <= one_whole(low, "low") <= one_whole(high, "high"):
        raise DomainError(f"segment must satisfy 1 <= low <= high; got [{low}, {high}]")
    if alpha == 0 or (A <= 0 and C > 0):
        return low
    if alpha == 1 or C == 0:
        return high
    stationary = width_closed_form(alpha, A, C)
    at = np.unique(np.clip([np.floor(stationary), np.ceil(stationary)], low, high))
    value = expected_tokens(alpha, at - 1) / (A + C * at)
    return int(at[np.argmax(value)])


def best_piecewise_width(
    alpha: float, cost: Callable[[int], float], kinks: Sequence[int], *, high: int
) -> int:
    """Return the integer W in [1, high] that maximises G / cost where cost is affine between kinks.

    Each segment's closed form, both integers beside every kink, and the ends are compared.

    Examples
    --------
    >>> best_piecewise_width(0.9, lambda W: max(1.0, W / 4) + 0.02 * (W - 1), [4], high=64)
    4
    """
    edges = sorted({1, high, *(k for k in kinks if 1 <= k <= high)})
    candidates = set(edges) | {min(e + 1, high) for e in edges} | {max(e - 1, 1) for e in edges}
    for left, right in pairwise(edges):
        C = (cost(right) - cost(left)) / (right - left)
        A = cost(left) - C * left
        candidates.add(best_affine_width(alpha, A, max(C, 0.0), low=left, high=right))
    at = np.array(sorted(candidates))
    value = expected_tokens(alpha, at - 1) / np.array([cost(int(W)) for W in at])
    return int(at[np.argmax(value)])


def marginal_gain(
    alpha: ArrayLike, k: ArrayLike, T: ArrayLike, T_next: ArrayLike
) -> NDArray[np.bool_]:
    """Return whether one draft more than k pays: alpha^W / G(W) > dT(W) / T(W), with W = k + 1.

    A local rule, right from k >= 1 on where T is convex. It cannot decide between off and on: a
    drafter with a fixed cost can lose at k = 1 and win at k = 4.

    Parameters
    ----------
    alpha, k : array_like
        [-], [token]
    T, T_next : array_like
        Cost of a round with k and with k + 1 drafts. [s]
    """
    W = whole_array(k, "k", unit="token") + 1
    now = np.asarray(T, dtype=np.float64)
    gain = real_array(alpha, "alpha", low=0, high=1) ** W / expected_tokens(alpha, W - 1)
    return np.asarray(gain > (np.asarray(T_next) - now) / now)


@dataclass(frozen=True, slots=True)
class Interval:
    """A run of batches that want the same k; k = 0 is off."""

    first: int
    last: int
    k: int


def schedule(
    device: Device | str,
    target: Architecture | str,
    drafter: Drafter | str,
    acceptance: Acceptance | float,
    *,
    L: float = 0,
    max_batch: int = 1024,
    k_max: int = 16,
    k: int | None = None,
    fits: Callable[[int], float] | None = None,
    T_h: float = 0.0,
    T_o: float = 0.0,
    keep: float = 0.0,
    errors: RatioErrors | None = None,
    execution: Execution | None = None,
    **options: Unpack[ExecutionOptions],
) -> tuple[Interval, ...]:
    """Return the best k for every batch from 1 to `max_batch`, run-length encoded.

    With `k` given, only that k and off are compared. Warns (`ExtrapolationWarning`) when a chosen
    k lies beyond what the acceptance was measured at.

    Parameters
    ----------
    device, target, drafter, acceptance
        As in `specmodel.speculate`: records, or names, and alpha. [-]
    L : float
        Context. [token]
    max_batch, k_max : int
        Largest batch and draft length considered. [-], [token]
    k : int, optional
        The only draft length considered. [token]
    fits : callable, optional
        Largest batch that memory allows with so many drafts; beyond it they are not considered.
    T_h, T_o : float
        What a plain step and a round cost besides their passes. [s]
    keep : float
        The k of the batch before is kept while its S is within this share of the best: steps of
        a fitted pass that are smaller than its errors do not change the answer to and fro. [-]
    errors : callable, optional
        From batches and draft lengths to the standard deviation of the logarithm of the ratio of
        two S, by batch, k and the other k (`specmodel.uncertainty.ratio_errors`). With it, gaps
        and islands are joined to a run beside them, as long or longer, where it cannot tell the
        two k apart: runs of a k that is below, or above, those of both runs beside it. The first
        and the last run stay.
    execution : Execution, optional
        Or its fields as keywords.

    Raises
    ------
    DomainError
        When an argument is out of range.
    """
    device, target = load_device(device), load_model(target)
    drafter, acceptance = drafter_of(drafter, target), as_acceptance(acceptance)
    for name, time in (("T_h", T_h), ("T_o", T_o)):
        one_number(time, name, low=0, unit="s")
    for name, function in (("fits", fits), ("errors", errors)):
        if function is not None and not callable(function):
            raise DomainError(f"{name} must be a function or None; got {brief(function)}")
    one_number(keep, "keep", low=0, high=1)
    batches = np.arange(1, one_whole(max_batch, "max_batch", low=1) + 1)
    S, drafts = scan(
        device,
        target,
        drafter,
        acceptance,
        B=batches,
        L=one_number(L, "context", low=0, unit="token"),
        k_max=one_whole(k_max if k is None else k, "k_max" if k is None else "k", unit="token"),
        execution=Execution.of(execution, options),
        T_h=T_h,
        T_o=T_o,
    )
    if k is not None:
        k = one_whole(k, "k", high=drafts[-1], unit="token")
        S, drafts = S[:, [0, k]], drafts[[0, k]]
    if fits is not None:
        limit = [
            one_number(fits(int(n)), f"fits({n})", finite=False) if n else np.inf for n in drafts
        ]
        S = np.where(batches[:, None] <= limit, S, 0.0)
    best = np.searchsorted(drafts, best_of(S, drafts).k)
    best = _kept(S, best, keep) if keep else best
    best = drafts[_joined(S, best, drafts, errors) if errors is not None else best]
    warn_beyond(acceptance, int(best.max()))
    return tuple(
        Interval(first=int(batches[a]), last=int(batches[b - 1]), k=int(best[a]))
        for a, b in _runs(best)
    )


def _runs(values: NDArray[np.int_]) -> list[tuple[int, int]]:
    """Return the start and the end, exclusive, of each run of equal values."""
    edges = (np.flatnonzero(np.diff(values)) + 1).tolist()
    return list(zip([0, *edges], [*edges, len(values)], strict=True))


def _kept(S: Floats, best: NDArray[np.int_], keep: float) -> NDArray[np.int_]:
    """Return the best column by row of S, changed only where it gains more than a share of S."""
    kept = best.copy()
    for row in range(1, len(kept)):
        before, now = kept[row - 1], best[row]
        if S[row, before] >= (1 - keep) * S[row, now]:
            kept[row] = before
    return kept


def _joined(
    S: Floats, best: NDArray[np.int_], drafts: NDArray[np.int_], errors: RatioErrors
) -> NDArray[np.int_]:
    """Return the columns by row of S without the gaps and islands that errors cannot tell apart.

    A run is joined to one beside it that is as long or longer (as a ratio of batches, so that a
    hill of k is not worn down from the side of large ones), the run that gives up least by it
    first: few batches, or a small gain. A short island of on goes with the off around it as a
    short gap of off with the on around it, so that the last edge leans neither way.
    """
    runs = [(start, end, int(best[start])) for start, end in _runs(best)]
    if not any(_stands_out(runs, i) for i in range(len(runs))):
        return best
    with np.errstate(divide="ignore"):
        log_S = np.log(S)  # what does not fit has S = 0
    columns = sorted({column for _, _, column in runs})
    rows = [
        start + int(np.argmax(log_S[start:end, column] - log_S[start:end, columns].min(axis=1)))
        for start, end, column in runs
    ]
    sure = NORMAL_90 * errors(np.asarray(rows) + 1, drafts[columns])
    at = np.searchsorted(rows, np.arange(len(S))).clip(max=len(rows) - 1)  # the next one looked at
    order = {column: i for i, column in enumerate(columns)}
    known: dict[tuple[int, int, int], float] = {}

    def given_up(start: int, end: int, other: int) -> float:
        """Return the sum of log S that a k gives up; infinite where errors can tell it apart."""
        key = (start, end, other)
        if key not in known:
            own = best[start:end]
            loss = log_S[np.arange(start, end), own] - log_S[start:end, other]
            clear = loss > sure[at[start:end], np.searchsorted(columns, own), order[other]]
            known[key] = np.inf if clear.any() else float(loss.sum())
        return known[key]

    while True:
        choices = [
            (given_up(*runs[i][:2], other), i, other)
            for i in range(len(runs))
            if _stands_out(runs, i)
            for start, end, other in (runs[i - 1], runs[i + 1])
            if _octaves(start, end) >= _octaves(*runs[i][:2])
        ]
        loss, i, other = min(choices, default=(np.inf, 0, 0))
        if not np.isfinite(loss):
            return np.repeat([c for *_, c in runs], [end - start for start, end, _ in runs])
        runs[i] = (*runs[i][:2], other)
        runs = [
            (same[0][0], same[-1][1], column)
            for column, same in ((c, list(g)) for c, g in groupby(runs, key=lambda run: run[2]))
        ]


def _octaves(start: int, end: int) -> float:
    """Return how long a run of rows is on the scale of batches, where k falls ever more slowly."""
    return float(np.log2((end + 1) / (start + 1)))


def _stands_out(runs: Sequence[tuple[int, int, int]], i: int) -> bool:
    """Return whether a run's k is below those of the runs on both sides of it, or above them."""
    if not 0 < i < len(runs) - 1:
        return False
    before, own, after = (runs[j][2] for j in (i - 1, i, i + 1))
    return (own - before) * (own - after) > 0


class Policy(NamedTuple):
    """Draft length by kind of request, and the tokens per second of the whole."""

    k: tuple[int, ...]
    rate: float


def context_where_speedup_rises(
    device: Device,
    target: Architecture,
    drafter: Drafter,
    acceptance: Acceptance,
    *,
    low: float,
    high: float,
    longest: float,
    k_max: int = 16,
    k: int | None = None,
    T_h: float = 0.0,
    T_o: float = 0.0,
    execution: Execution | None = None,
    **options: Unpack[ExecutionOptions],
) -> float:
    """Return the context from which on a larger batch gains as much from speculation, and gains.

    Short contexts lose speedup with batch, as verification turns compute-bound. Where reading
    KV rules, larger batches gain as much: the rows of a sequence share that reading.

    Parameters
    ----------
    device, target, drafter, acceptance, k_max, execution, T_h, T_o
        As in `scan`.
    low, high : float
        The two batches. [-]
    longest : float
        Contexts are looked at up to here. [token]
    k : int, optional
        Held; the best k of each point by default.

    Returns
    -------
    float
        To within 0.5%, infinite where it is none up to `longest`. [token]

    References
    ----------
    .. [1] MagicDec, Chen et al., ICLR 2025, arXiv:2408.11049, section 3.
    """
    how = Execution.of(execution, options)
    if k is not None:
        most = np.inf if drafter.max_k is None else drafter.max_k
        k = one_whole(k, "k", low=1, high=most, unit="token")
    for name, value in (("low", low), ("high", high)):
        one_number(value, name, positive=True)
    one_number(longest, "longest context", low=1, unit="token")

    def gains(contexts: Floats) -> NDArray[np.bool_]:
        S, _ = scan(
            device, target, drafter, acceptance, B=np.array([[low], [high]]), L=contexts,
            k_max=k_max if k is None else k, T_h=T_h, T_o=T_o, execution=how,
        )  # fmt: skip
        best = S.max(axis=-1) if k is None else S[..., k]
        return np.asarray((best[1] >= best[0]) & (best[1] > 1))

    return context_from_which(gains, longest=longest)


def best_policy(
    alphas: Sequence[float],
    shares: Sequence[float],
    T: Callable[[Floats], Floats],
    *,
    k_max: int = 64,
) -> Policy:
    r"""Return the draft lengths that maximise long-run tokens per second over kinds of rounds.

    The rate is :math:`\lambda = \sum w_i G_i(k_i) / \sum w_i T(k_i)` with w the share of
    rounds. At the optimum each kind maximises :math:`G_i - \lambda T`: it goes on while the
    next token's survival exceeds :math:`\lambda\,\Delta T` (Dinkelbach's iteration).

    Parameters
    ----------
    alphas, shares : sequence of float
        Acceptance of each kind, and its share of the rounds. [-]
    T : callable
        Cost of a round for an array of k. [s]
    k_max : int
        [token]

    Examples
    --------
    >>> best_policy([0.9, 0.3], [0.5, 0.5], lambda k: 1 + 0.1 * k).k
    (12, 1)
    """
    weights = real_array(shares, "shares", low=0, high=1)
    chances = real_array(alphas, "alphas", low=0, high=1)
    if chances.shape != weights.shape or chances.ndim != 1 or not weights.sum() > 0:
        raise DomainError("shares must be as many as alphas, and not all zero")
    k = np.arange(one_whole(k_max, "k_max", unit="token") + 1)
    G = expected_tokens(chances[:, None], k)
    cost = np.asarray(T(k.astype(np.float64)), dtype=np.float64)
    if not (cost > 0).all():
        raise DomainError("T must be > 0 for every k")
    rate = 0.0
    for _ in range(100):
        chosen = np.argmax(G - rate * cost, axis=1)
        picked = np.take_along_axis(G, chosen[:, None], axis=1)[:, 0]
        update = float(weights @ picked / (weights @ cost[chosen]))
        if update <= rate * (1 + 1e-15):
            return Policy(k=tuple(int(c) for c in chosen), rate=rate)
        rate = update
    raise ConvergenceError("the policy's rate did not settle in 100 iterations")
