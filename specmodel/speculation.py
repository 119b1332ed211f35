r"""One round of speculation against plain decoding: T_p, T_v, T_d, G and S.

.. math:: S = \frac{G\,(T_p + T_h)}{T_d + T_v + T_o}

The functions here broadcast plain arrays; `specmodel.speculate` labels them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.acceptance import Acceptance, alpha_for_tokens, as_acceptance
from specmodel.architectures import Architecture, load_model
from specmodel.costs import Layout, Operator
from specmodel.drafters import Drafter, checked_drafter
from specmodel.errors import DomainError, real_array, unwrap, whole_array
from specmodel.hardware import Device, load_device
from specmodel.kernels import Kernels
from specmodel.overheads import Engine, joined
from specmodel.roofline import (
    Execution,
    ExecutionOptions,
    PassTime,
    basis_of,
    critical_batch,
    kernels_of,
    mean_pass,
    operators_of,
    pass_time,
)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundTime:
    """Times of one round and of the plain step it replaces. Arrays broadcast over B, k and L.

    Attributes
    ----------
    decode, verify : PassTime
        The target's decode step, and its pass over W positions.
    T_p, T_v, T_d, T_h, T_o : ndarray
        The plain step's pass, the verification pass, drafting, and what a plain step and a
        round cost besides. T_v is the mean over passes: a sequence for which the drafter finds
        nothing has one row to verify. [s]
    T_d_groups : mapping of str to ndarray
        T_d by group of operators; host time under ``host``. [s]
    basis : str
        Where the numbers behind the passes come from.
    cost : ndarray
        (T_d + T_v + T_o) / (T_p + T_h); 1 exactly at k = 0. [-]
    """

    decode: PassTime
    verify: PassTime
    T_p: Floats
    T_v: Floats
    T_d: Floats
    T_h: Floats
    T_o: Floats
    T_d_groups: Mapping[str, Floats] = field(repr=False)
    basis: str
    cost: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """One kind of pass in a round, and how often it runs; fields broadcast over B, k and L.

    Attributes
    ----------
    device : Device
    architecture : Architecture
    execution : Execution
    count : ndarray
        Passes per round. [-]
    B, W, L : ndarray
        Sequences [-], positions per sequence [token], context [token].
    head_rows, fuse
        As in `specmodel.costs.pass_operators`.
    """

    device: Device
    architecture: Architecture
    execution: Execution
    count: Floats
    B: ArrayLike
    W: ArrayLike
    L: ArrayLike
    head_rows: ArrayLike | None = None
    fuse: bool = True

    def time(self) -> PassTime:
        """Return what one of these passes takes."""
        return pass_time(self.device, self.architecture, execution=self.execution, **self._sizes())

    def operators(self) -> tuple[Kernels, tuple[Operator, ...]]:
        """Return the operators of one of these passes, and what they take on the device."""
        kernels = kernels_of(self.device, self.execution)
        return kernels, operators_of(self.architecture, self.execution, **self._sizes())

    def _sizes(self) -> dict[str, Any]:
        return {
            "B": self.B,
            "W": self.W,
            "L": self.L,
            "head_rows": self.head_rows,
            "fuse": self.fuse,
        }


def plain_run(
    device: Device, target: Architecture, *, B: ArrayLike, L: ArrayLike, execution: Execution
) -> Run:
    """Return the pass of a plain decode step."""
    one = np.asarray(1.0)
    return Run(device=device, architecture=target, execution=execution, count=one, B=B, W=1, L=L)


def draft_runs(
    device: Device,
    target: Architecture,
    drafter: Drafter,
    *,
    B: ArrayLike,
    k: ArrayLike,
    L: ArrayLike,
    execution: Execution,
) -> tuple[Run, ...]:
    """Return the passes that produce k drafts.

    Parameters
    ----------
    device, target, drafter
    B, k, L : array_like
        Sequences [-], drafts [token], context [token]. Broadcast.
    execution : Execution
        Of the target.

    Raises
    ------
    DomainError
        When an argument is out of range.
    """
    how = drafter_execution(execution, drafter)
    # on one stage or device it drafts for a micro-batch at a time
    batch = B if drafter.in_stages else execution.layout.of_stage(B)
    return tuple(
        Run(
            device=drafter.device or device,
            architecture=one.architecture,
            execution=how if any(one.architecture.moe_layers()) else replace(how, ep=False),
            count=one.count,
            B=batch,
            W=one.W,
            L=L,
            head_rows=one.head_rows,
            fuse=one.fuse,
        )
        for one in drafter.passes(target, k)
    )


def drafter_execution(execution: Execution, drafter: Drafter) -> Execution:
    """Return how the drafter's passes run: its own degree, nothing offloaded.

    In a pipeline on its last stage alone, unless it is the target itself.
    """
    alone = drafter.device is not None
    own = (1 if alone else execution.tp) if drafter.tp is None else drafter.tp
    pp = execution.pp if drafter.in_stages else 1
    return replace(execution, tp=own, pp=pp, offload=0.0)


def round_time(
    device: Device,
    target: Architecture,
    drafter: Drafter,
    *,
    B: ArrayLike,
    k: ArrayLike,
    L: ArrayLike = 0,
    T_h: ArrayLike = 0.0,
    T_o: ArrayLike = 0.0,
    execution: Execution | None = None,
    **options: Unpack[ExecutionOptions],
) -> RoundTime:
    """Return what a round of k drafts costs, and the plain step beside it.

    Parameters
    ----------
    device, target, drafter
    B, k, L : array_like
        Sequences [-], drafts [token], context [token]. Broadcast.
    T_h, T_o : array_like
        What a plain step and a round cost besides their passes, and besides the engine's host
        time where the execution has one. [s] T_o is T_h at k = 0.
    execution : Execution, optional
        Or its fields as keywords.

    Raises
    ------
    DomainError
        When an argument is out of range.
    """
    how = Execution.of(execution, options)
    parts = round_parts(device, target, drafter, B=B, k=k, L=L, execution=how)
    return parts.times(how.engine, T_h=T_h, T_o=T_o)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundParts:
    """The passes of a round and of the plain step it replaces, before any host time.

    Attributes
    ----------
    target, drafter, execution
    B, k : ndarray
        Sequences [-], drafts [token].
    decode : PassTime
        The plain step's pass.
    verify : tuple of (Run, PassTime)
        Verification passes, their shares as counts.
    drafts : tuple of (Run, PassTime)
        Draft passes.
    """

    target: Architecture
    drafter: Drafter
    execution: Execution
    B: Floats
    k: Floats
    decode: PassTime
    verify: tuple[tuple[Run, PassTime], ...]
    drafts: tuple[tuple[Run, PassTime], ...]

    def times(
        self, engine: Engine | None = None, *, T_h: ArrayLike = 0.0, T_o: ArrayLike = 0.0
    ) -> RoundTime:
        """Return the round's times under an engine; `T_h` and `T_o` come on top. [s]

        Raises
        ------
        DomainError
            When a time is negative.
        """
        on, layout = self.k > 0, self.execution.layout
        host = real_array(T_h, "T_h", low=0, unit="s")
        other = real_array(T_o, "T_o", low=0, unit="s")
        if engine is not None:
            mine = layout.of_replica(self.B)
            host = host + engine.plain(mine)
            other = other + engine.rounds(mine, mean_width(self.drafter, self.k))
        other = np.where(on, other, host)
        decode = self._of_target(engine, self.decode, 1.0)
        checks = [self._of_target(engine, time, run.W) for run, time in self.verify]
        shares = [run.count for run, _ in self.verify]
        verify = checks[0] if len(checks) == 1 else mean_pass(checks, shares)
        drafting = [self._of_draft(engine, run, time) for run, time in self.drafts]
        groups = self._draft_groups(engine, drafting)
        T_d = np.asarray(sum(groups.values()))
        T_v = np.where(on, verify.T, decode.T)
        exposed = _exposed(self.drafter, layout, B=self.B, T_d=T_d, T_v=T_v)
        if exposed is not T_d:
            share = np.where(T_d > 0, exposed / np.where(T_d > 0, T_d, 1.0), 0.0)
            groups = {name: seconds * share for name, seconds in groups.items()}
            T_d = exposed
        cost = np.where(on, (T_d + T_v + other) / (decode.T + host), 1.0)
        return RoundTime(
            decode=decode,
            verify=verify,
            T_p=decode.T,
            T_v=T_v,
            T_d=T_d,
            T_h=host,
            T_o=other,
            T_d_groups=groups,
            basis=basis_of([decode, verify, *drafting]),
            cost=cost,
        )

    def _of_target(self, engine: Engine | None, time: PassTime, W: ArrayLike) -> PassTime:
        if engine is None:
            return time
        rows = self.execution.layout.of_replica(self.B) * np.asarray(W, dtype=np.float64)
        return _launched(time, engine, engine.target_launch(self.target.n_layers, rows))

    def _of_draft(self, engine: Engine | None, run: Run, time: PassTime) -> PassTime:
        if engine is None:
            return time
        draft = run.architecture
        head = draft.head_kind is not None
        mine = self.execution.layout.of_replica(self.B)
        return _launched(time, engine, engine.draft_launch(draft.n_layers, mine, head=head))

    def _draft_groups(self, engine: Engine | None, times: Sequence[PassTime]) -> dict[str, Floats]:
        """Return T_d by group of operators, with host time and what crosses a link."""
        drafter, batch = self.drafter, self.execution.layout.of_replica(self.B)
        groups: dict[str, Floats] = {}
        for (run, _), time in zip(self.drafts, times, strict=True):
            for group, seconds in time.groups.items():
                groups[group] = groups.get(group, np.float64(0.0)) + run.count * seconds
        host = np.asarray(drafter.host_time)
        if engine is not None and not times:
            host = host + engine.finding(batch)
        groups["host"] = np.where(self.k > 0, host, 0.0)
        if drafter.link is not None:  # what was committed goes over, the drafts come back
            size = batch * drafter.message_bytes(self.target, self.k)  # a replica has its own link
            there_and_back = drafter.link.latency + drafter.link.time(size)
            groups["link"] = np.where(self.k > 0, there_and_back, 0.0)
        return groups


def _launched(alone: PassTime, engine: Engine, launch: Floats) -> PassTime:
    """Return a pass under an engine: by its kernels, launched from the host."""
    device = engine.kernels * alone.T
    T = unwrap(joined(device, launch))
    groups = {name: engine.kernels * seconds for name, seconds in alone.groups.items()}
    return replace(alone, T=T, groups={**groups, "launch": unwrap(T - device)})


def round_parts(
    device: Device,
    target: Architecture,
    drafter: Drafter,
    *,
    B: ArrayLike,
    k: ArrayLike,
    L: ArrayLike = 0,
    execution: Execution,
) -> RoundParts:
    """Return the passes of a round of k drafts, each timed on the device.

    Raises
    ------
    DomainError
        When an argument is out of range.
    """
    device, target, drafter = load_device(device), load_model(target), checked_drafter(drafter)
    drafts = whole_array(k, "k", unit="token")
    checks = verify_runs(device, target, drafter, B=B, k=drafts, L=L, execution=execution)
    runs = draft_runs(device, target, drafter, B=B, k=drafts, L=L, execution=execution)
    return RoundParts(
        target=target,
        drafter=drafter,
        execution=execution,
        B=real_array(B, "batch", low=0),
        k=drafts,
        decode=plain_run(device, target, B=B, L=L, execution=execution).time(),
        verify=tuple((run, run.time()) for run in checks),
        drafts=tuple((run, run.time()) for run in runs),
    )


def _exposed(drafter: Drafter, layout: Layout, *, B: ArrayLike, T_d: Floats, T_v: Floats) -> Floats:
    r"""Return what drafting adds to a round.

    In a pipeline with m micro-batches on their way, a drafter that sits on the last stage drafts
    for one after the other while the stages before it wait. The cycle is the longer of one
    micro-batch's way and the last stage's work, :math:`m (T_v / pp + T_d)`; for a device of its
    own, of the way and :math:`m T_d`.
    """
    if layout.pp > 1 and not drafter.in_stages:
        m = layout.micro_batches(B)
        own = 0.0 if drafter.device is not None else m / layout.pp
        T_d = np.maximum(T_d, m * T_d - (1.0 - own) * T_v)
    return np.maximum(T_d - T_v, 0.0) if drafter.overlapped else T_d


def verify_runs(
    device: Device,
    target: Architecture,
    drafter: Drafter,
    *,
    B: ArrayLike,
    k: ArrayLike,
    L: ArrayLike,
    execution: Execution,
) -> tuple[Run, ...]:
    """Return the verification pass; several with their shares where drafts are not always found.

    Of B sequences a binomial number n have drafts, so that a pass verifies B + n (W - 1) rows.
    The mean is taken at two values of n that reproduce the first three moments (Gauss
    quadrature), which is exact for one sequence: n = 0 and n = 1.
    """
    batch, W, hit = real_array(B, "batch", low=0), drafter.rows(k), drafter.hit_rate

    def run(width: Floats, share: Floats) -> Run:
        return Run(
            device=device, architecture=target, execution=execution, count=share, B=B, W=width, L=L
        )

    if hit in (0.0, 1.0):
        return (run(W if hit else np.ones_like(W), np.asarray(1.0)),)
    root = np.sqrt((1 - 2 * hit) ** 2 + 4 * batch * hit * (1 - hit))
    runs = []
    for sign in (-1.0, 1.0):
        n = batch * hit + (1 - 2 * hit + sign * root) / 2
        drafted = np.clip(n / np.maximum(batch, 1e-300), 0.0, 1.0)  # rounding only
        runs.append(run(1 + (W - 1) * drafted, (1 - sign * (1 - 2 * hit) / root) / 2))
    return tuple(runs)


def mean_width(drafter: Drafter, k: ArrayLike) -> Floats:
    """Return the mean rows a sequence brings to a pass, 1 + hit rate (W - 1). [token]"""
    return 1.0 + drafter.hit_rate * (drafter.rows(k) - 1.0)


def tokens_per_round(acceptance: Acceptance, drafter: Drafter, k: ArrayLike) -> Floats:
    """Return G; rounds in which the drafter finds nothing commit one token. [token]"""
    return 1.0 + drafter.hit_rate * (as_acceptance(acceptance).tokens(k) - 1.0)


def speedup(
    G: ArrayLike,
    T_p: ArrayLike,
    T_v: ArrayLike,
    T_d: ArrayLike,
    T_h: ArrayLike = 0.0,
    T_o: ArrayLike = 0.0,
) -> Floats:
    """Return S = G (T_p + T_h) / (T_d + T_v + T_o).

    References
    ----------
    .. [1] Leviathan et al., ICML 2023, Theorem 3.8, arXiv:2211.17192, with the target's own
       verification time in place of one decode step.

    Examples
    --------
    >>> round(float(speedup(3.68928, T_p=1.0, T_v=1.0, T_d=5 * 0.05)), 3)
    2.951
    """
    p, v, d, h, o = (np.asarray(x, dtype=np.float64) for x in (T_p, T_v, T_d, T_h, T_o))
    return np.asarray(np.asarray(G, dtype=np.float64) * (p + h) / (d + v + o))


def regime(B: ArrayLike, B_v_star: ArrayLike, B_p_star: ArrayLike) -> NDArray[np.str_]:
    """Return I (verification memory-bound), II (only decoding is) or III (neither is).

    Examples
    --------
    >>> [str(regime(b, 59.07, 295.35)) for b in (1, 128, 512)]
    ['I', 'II', 'III']
    """
    batch = np.asarray(B, dtype=np.float64)
    verify, decode = np.asarray(B_v_star), np.asarray(B_p_star)
    return np.where(batch < verify, "I", np.where(batch < decode, "II", "III"))


def alpha_break_even(cost: ArrayLike, k: ArrayLike, *, hit_rate: float = 1.0) -> Floats:
    """Return the alpha at which a round of k drafts just pays, NaN where none does.

    Parameters
    ----------
    cost : array_like
        Round cost, G / S. [-]
    k : array_like
        Drafts. [token]
    hit_rate : float
        Share of rounds with a proposal. [-]

    Examples
    --------
    >>> round(float(alpha_break_even(1.3, 1)), 3)
    0.3
    """
    if hit_rate == 0:
        return np.where(np.asarray(cost) <= 1, 0.0, np.nan)
    return alpha_for_tokens(1.0 + (np.asarray(cost, dtype=np.float64) - 1.0) / hit_rate, k)


def draft_time_break_even(G: ArrayLike, times: RoundTime) -> Floats:
    """Return the T_d at which S = 1; negative where even free drafts lose. [s]"""
    tokens = np.asarray(G, dtype=np.float64)
    return np.asarray(tokens * (times.T_p + times.T_h) - times.T_v - times.T_o)


def context_where_infinite(
    device: Device,
    target: Architecture,
    *,
    W: int = 1,
    execution: Execution | None = None,
    **options: Unpack[ExecutionOptions],
) -> float:
    """Return the context from which on a pass over W positions never turns compute-bound. [token]

    Infinite where it always can (no KV cache, or W positions amortise it without end).
    """
    from scipy.optimize import brentq

    how = Execution.of(execution, options)

    def slope(context: float) -> float:
        one = pass_time(device, target, B=1.0, W=W, L=context, execution=how)
        return float(one.compute - one.rows)

    high = 1.0
    while slope(high) > 0:
        high *= 2
        if high > 1e12:
            return np.inf
    return 0.0 if slope(0.0) <= 0 else float(brentq(slope, 0.0, high, xtol=1e-9))


def context_where_kv_passes_weights(
    device: Device,
    target: Architecture,
    *,
    B: float,
    execution: Execution | None = None,
    **options: Unpack[ExecutionOptions],
) -> float:
    """Return the context from which on B sequences' KV takes longer to read than the weights.

    Infinite where windows or states keep the KV small for good. [token]

    References
    ----------
    .. [1] The critical context of MagicDec, Chen et al., ICLR 2025, arXiv:2408.11049, at one
       batch and without the drafter.
    """
    how = replace(Execution.of(execution, options), level="ideal")

    def passes(contexts: Floats) -> NDArray[np.bool_]:
        one = pass_time(device, target, B=B, L=contexts, execution=how)
        return np.asarray(one.rows >= one.weights)

    return context_from_which(passes, longest=1e12, rounds=5)


def context_from_which(
    holds: Callable[[Floats], NDArray[np.bool_]], *, longest: float, rounds: int = 1
) -> float:
    """Return the context from which on, up to the longest, something holds; infinite if none.

    A grid of contexts a factor apart is narrowed, each round 64 times, around the last of them
    at which it does not hold. SciPy's root finders would need a function that crosses zero
    once, and their import takes longer than a prediction.

    Parameters
    ----------
    holds : callable
        From contexts to whether it holds at each. [token]
    longest : float
        [token]
    rounds : int
    """
    contexts = np.concatenate(([0.0], np.geomspace(1, longest, 64)))
    for _ in range(rounds + 1):
        failing = np.flatnonzero(~np.broadcast_to(holds(contexts), contexts.shape))
        if failing.size == 0:
            return float(contexts[0])
        last = int(failing[-1])
        if last == contexts.size - 1:
            return np.inf
        contexts = np.linspace(contexts[last], contexts[last + 1], 65)
    return float(contexts[-1])


def padding_loss(lengths: ArrayLike) -> float:
    """Return the share of a padded batch that is padding: 1 - mean / longest. [-]

    Parameters
    ----------
    lengths : array_like
        Of the batch's sequences: contexts where kernels pad the KV cache, rows where a round
        drafts a different number for each. Engines with ragged kernels lose none of it. [token]

    Raises
    ------
    DomainError
        When there are no lengths, or one is negative or not finite.

    Examples
    --------
    >>> padding_loss([1024, 512, 512])
    0.33333333333333337
    """
    values = real_array(lengths, "length", low=0, unit="token")
    if not values.size:
        raise DomainError("a batch has at least one sequence")
    longest = float(values.max())
    return 1 - float(values.mean()) / longest if longest else 0.0


__all__ = [
    "RoundTime",
    "alpha_break_even",
    "context_from_which",
    "context_where_infinite",
    "context_where_kv_passes_weights",
    "critical_batch",
    "draft_runs",
    "draft_time_break_even",
    "drafter_execution",
    "mean_width",
    "padding_loss",
    "plain_run",
    "regime",
    "round_time",
    "speedup",
    "tokens_per_round",
    "verify_runs",
]
