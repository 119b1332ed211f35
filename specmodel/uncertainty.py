"""How sure a prediction is: intervals that follow from what was measured.

The error of a time has four parts. Fitted parameters are uncertain together (their covariance),
the same in every pass that uses them; so are, by their priors, those that the table does not
tell. A kernel departs from its form: by `shared` of that variance in the same way at every number
of rows of one shape, for the rest anew in each, and the more the further it is outside what was
measured. And where whole passes were measured, they depart from the sum of their operators.
Operators that nobody measured are taken to be off by the same unknown factor everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.architectures import Architecture
from specmodel.costs import Operator
from specmodel.drafters import Drafter
from specmodel.hardware import Device
from specmodel.kernels import Kernels
from specmodel.roofline import Execution
from specmodel.speculation import Run, draft_runs, plain_run, round_time, verify_runs

Floats = NDArray[np.float64]

CONFIDENCE = 0.9
"""Chance that an interval holds what would be measured."""

UNMEASURED = 0.3
"""Standard deviation of the logarithm of an operator's time where nobody measured it. [-]"""

INTERVALS = ("T_p", "T_v", "T_d", "S")
"""What `intervals` gives bounds of."""

NORMAL_90 = 1.6448536269514722
"""Standard deviations on either side that hold `CONFIDENCE` of a normal law."""

TOLD_FROM = 1.5
"""Times beyond the measured range from which an answer says that it extrapolates."""

_Fit = tuple[str, str, str]  # device, kind, dtype
_Shape = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A time and what its error is made of.

    Attributes
    ----------
    T : ndarray
        [s]
    gradients : mapping to ndarray
        dT / d log parameter of each fit that it uses; the last axis runs over parameters. [s]
    covariances : mapping to ndarray
        Of the logarithms of those parameters. [-]
    departures : mapping to ndarray
        Standard deviation that each kernel shape's departure from its form gives. [s]
    shared : mapping to float
        Share of a departure's variance that is the same at any number of rows. [-]
    """

    T: Floats
    gradients: Mapping[_Fit, Floats]
    covariances: Mapping[_Fit, Floats]
    departures: Mapping[_Shape, Floats]
    shared: Mapping[_Shape, float]


@dataclass(slots=True)
class _Sum:
    T: Floats = field(default_factory=lambda: np.asarray(0.0))
    gradients: dict[_Fit, Floats] = field(default_factory=dict)
    covariances: dict[_Fit, Floats] = field(default_factory=dict)
    departures: dict[_Shape, Floats] = field(default_factory=dict)
    shared: dict[_Shape, float] = field(default_factory=dict)

    def add(self, kernels: Kernels, op: Operator, count: Floats) -> None:
        """Add an operator that runs so often."""
        found, device = kernels.fit(op), kernels.device.name
        seconds = count * kernels.seconds(op)
        self.T = self.T + seconds
        if found is None:
            shape: _Shape = (device, op.collective or op.kind)
            off, shared = np.asarray(UNMEASURED), 1.0
        else:
            shape = (device, op.name, op.dtype, op.shape.get("n"), op.shape.get("k"))
            far = sum(kernels.outside(op, found).values(), np.asarray(0.0))
            off, shared = found.residual * (1.0 + far), found.shared
            fit = (device, *(kernels.fit_key(op) or ("", "")))
            for name, value in found.unknown().items():
                other = replace(found, values={**found.values, name: value})
                moved = other.seconds(kernels.features(op), kernels.rates(op))
                self.depart((*fit, name), count * moved - seconds, 1.0)
            if found.names:
                gradient = seconds[..., None] * kernels.log_gradient(op, found)
                self.gradients[fit] = self.gradients.get(fit, np.asarray(0.0)) + gradient
                self.covariances[fit] = np.asarray(found.covariance)
        self.depart(shape, off * seconds, shared)

    def depart(self, shape: _Shape, off: Floats, shared: float) -> None:
        """Add a departure that goes with those of the same shape."""
        self.departures[shape] = self.departures.get(shape, np.asarray(0.0)) + off
        self.shared[shape] = shared


def spread(runs: Iterable[Run]) -> Spread:
    """Return the time of some passes together, with its error."""
    total = _Sum()
    for run in runs:
        kernels, operators = run.operators()
        before = total.T
        for op in operators:
            total.add(kernels, op, np.asarray(run.count * op.count, dtype=np.float64))
        calibration = kernels.device.calibration if kernels.fitted else None
        if calibration is not None and calibration.passes is not None:
            total.depart(
                (kernels.device.name, "passes"),
                calibration.passes.residual * (total.T - before),
                calibration.passes.shared,
            )
    return Spread(
        T=total.T,
        gradients=total.gradients,
        covariances=total.covariances,
        departures=total.departures,
        shared=total.shared,
    )


def beyond_measured(runs: Iterable[Run]) -> list[str]:
    """Return, in words, which operators are predicted outside what was measured of them.

    A line for each kind and format, with the features that are off by more than `TOLD_FROM`.
    """
    found: dict[str, dict[str, tuple[float, float, float, float]]] = {}
    for run in runs:
        kernels, operators = run.operators()
        for op in operators:
            fit, key = kernels.fit(op), kernels.fit_key(op)
            if fit is None or key is None:
                continue
            for name, far in kernels.outside(op, fit).items():
                worst = int(np.argmax(far))
                if far.reshape(-1)[worst] < np.log(TOLD_FROM):
                    continue
                values = np.broadcast_to(np.asarray(kernels.features(op)[name]), far.shape)
                value = float(values.reshape(-1)[worst])
                mine = found.setdefault(" ".join(key), {})
                if name not in mine or far.max() > mine[name][0]:
                    mine[name] = (float(far.max()), value, *fit.ranges[name])
    return [
        f"{what} outside what was measured: "
        + ", ".join(
            f"{name} {v:,.0f} ({a:,.0f} to {b:,.0f})" for name, (_, v, a, b) in each.items()
        )
        for what, each in found.items()
    ]


def log_error(terms: Sequence[tuple[ArrayLike, Spread]]) -> Floats:
    r"""Return the standard deviation of :math:`\sum_i w_i\, \delta T_i`. [-]

    With w = 1 / T it is that of log T; with opposite signs it is that of a ratio, in which
    what two times share cancels.

    Parameters
    ----------
    terms : sequence of (array_like, Spread)
        Weights [1/s] and times.
    """
    variance: Floats = np.asarray(0.0)
    weights = [np.asarray(weight, dtype=np.float64) for weight, _ in terms]
    for fit in dict.fromkeys(key for _, one in terms for key in one.gradients):
        parts = [
            w[..., None] * one.gradients[fit]
            for w, (_, one) in zip(weights, terms, strict=True)
            if fit in one.gradients
        ]
        gradient = np.asarray(sum(parts))
        covariance = next(one.covariances[fit] for _, one in terms if fit in one.gradients)
        variance = variance + np.einsum("...i,ij,...j->...", gradient, covariance, gradient)
    for shape in dict.fromkeys(key for _, one in terms for key in one.departures):
        parts = [
            w * one.departures[shape]
            for w, (_, one) in zip(weights, terms, strict=True)
            if shape in one.departures
        ]
        shared = next(one.shared[shape] for _, one in terms if shape in one.departures)
        apart = sum(part**2 for part in parts)
        variance = variance + shared * np.asarray(sum(parts)) ** 2 + (1 - shared) * apart
    return np.asarray(np.sqrt(np.maximum(variance, 0.0)))


def intervals(
    device: Device,
    target: Architecture,
    drafter: Drafter,
    *,
    B: ArrayLike,
    k: ArrayLike,
    L: ArrayLike,
    S: ArrayLike,
    T_h: ArrayLike = 0.0,
    T_o: ArrayLike = 0.0,
    execution: Execution,
) -> dict[str, tuple[Floats, Floats]]:
    """Return low and high of T_p, T_v, T_d and S, which hold with `CONFIDENCE`.

    Parameters
    ----------
    device, target, drafter
    B, k, L : array_like
        Sequences [-], drafts [token], context [token], at each point.
    S : array_like
        Predicted speedup; the acceptance behind it is taken as known. [-]
    T_h, T_o : array_like
        What a plain step and a round cost besides their passes, taken as known. [s]
    execution : Execution

    Returns
    -------
    dict of str to (ndarray, ndarray)
        [s]; S [-]. T_d of drafters without passes is exact.
    """
    where = {"B": B, "k": k, "L": L, "execution": execution}
    times = round_time(device, target, drafter, T_h=T_h, T_o=T_o, **where)  # type: ignore[arg-type]
    decode = spread([plain_run(device, target, B=B, L=L, execution=execution)])
    verify = spread(verify_runs(device, target, drafter, **where))  # type: ignore[arg-type]
    draft = spread(draft_runs(device, target, drafter, **where))  # type: ignore[arg-type]
    on = np.asarray(k) > 0
    per_step = 1 / (times.T_p + times.T_h)
    per_round = 1 / (times.T_d + times.T_v + times.T_o)
    # what is exposed of drafting, host and link time (taken as known) included
    seen = times.T_d / np.where(draft.T > 0, draft.T, 1.0) if drafter.overlapped else 1.0
    ratio = [(per_step, decode), (-per_round, verify), (-per_round * seen, draft)]
    some = np.where(times.T_d > 0, times.T_d, 1.0)
    found = {
        "T_p": (times.T_p, log_error([(1 / times.T_p, decode)])),
        "T_v": (times.T_v, log_error([(1 / times.T_v, verify)])),
        "T_d": (times.T_d, log_error([(seen / some, draft)])),
        "S": (np.asarray(S), np.where(on, log_error(ratio), 0.0)),
    }
    return {name: interval(value, off) for name, (value, off) in found.items()}


def ratio_errors(
    device: Device,
    target: Architecture,
    drafter: Drafter,
    *,
    B: ArrayLike,
    k: ArrayLike,
    L: float,
    T_h: float = 0.0,
    T_o: float = 0.0,
    execution: Execution,
) -> Floats:
    """Return how sure the ratio of the speedups of two k is, for every pair of some k.

    What two rounds share cancels: fitted parameters, and what a kernel departs from its form by
    at any number of rows. k = 0 is a plain step.

    Parameters
    ----------
    device, target, drafter
    B, k : array_like
        Sequences [-] and drafts [token], one-dimensional.
    L, T_h, T_o : float
        Context [token]; what a plain step and a round cost besides their passes [s].
    execution : Execution

    Returns
    -------
    ndarray
        Standard deviation of log(S of one k / S of another), by B, k and the other k. [-]
    """
    drafts = np.atleast_1d(np.asarray(k))
    where = {"B": np.atleast_1d(B)[:, None], "k": drafts, "L": L, "execution": execution}
    times = round_time(device, target, drafter, T_h=T_h, T_o=T_o, **where)  # type: ignore[arg-type]
    verify = spread(verify_runs(device, target, drafter, **where))  # type: ignore[arg-type]
    draft = spread(draft_runs(device, target, drafter, **where))  # type: ignore[arg-type]
    per_round = 1 / (times.T_d + times.T_v + times.T_o)
    seen = times.T_d / np.where(draft.T > 0, draft.T, 1.0) if drafter.overlapped else 1.0
    shape = (np.size(B), drafts.size)
    terms = []
    for axis, sign in ((2, -1.0), (1, 1.0)):  # (B, k) against (B, other k)
        for weight, part in ((per_round, verify), (per_round * seen, draft)):
            weights = np.expand_dims(np.broadcast_to(sign * weight, shape), axis)
            terms.append((weights, _spread_along(part, shape, axis)))
    return log_error(terms)


def _spread_along(part: Spread, shape: tuple[int, int], axis: int) -> Spread:
    """Return a spread over (B, k) with an axis more, to broadcast against another."""

    def along(values: Floats, *beside: int) -> Floats:
        return np.expand_dims(np.broadcast_to(values, (*shape, *beside)), axis)

    return replace(
        part,
        T=along(part.T),
        gradients={key: along(each, each.shape[-1]) for key, each in part.gradients.items()},
        departures={key: along(each) for key, each in part.departures.items()},
    )


def interval(value: ArrayLike, off: ArrayLike) -> tuple[Floats, Floats]:
    """Return the bounds of a value whose logarithm has a standard deviation of `off`."""
    factor = np.exp(NORMAL_90 * np.asarray(off))
    return np.asarray(value) / factor, np.asarray(value) * factor
