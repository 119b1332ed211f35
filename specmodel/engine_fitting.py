"""An engine's host times from a few measured rows: plain rates, drafted rates, speedups.

Few rows cannot tell a dozen times apart. Each time starts at the engine's preset and moves from
there only as far as the rows ask: a posterior mode with log-normal priors around the preset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares

from specmodel.architectures import Architecture
from specmodel.drafters import Drafter
from specmodel.errors import DomainError
from specmodel.hardware import Device
from specmodel.overheads import HOST, Engine
from specmodel.requests import Accepted, Served
from specmodel.roofline import Execution
from specmodel.speculation import plain_run, round_parts

Floats = NDArray[np.float64]

HOST_SPREAD = 0.7
"""Standard deviation of the logarithm of a host time before any row is seen: a factor of 2. [-]"""
KERNEL_SPREAD = 0.1
"""The same of an engine's kernels against those the device was calibrated with; two engines
measure one GEMM 4 to 6% apart. [-]"""
ROW_SPREAD = 0.03
"""Of one measured row, at least; more where the rows disagree with every engine. [-]"""
_STEP = np.array(1e-3)  # of the derivatives
_ENOUGH = 6  # rows, from which on their own disagreement is told
_FASTEST = 8.0
"""How far below its ideal time a pass may seem to be: weights of 4 bits for 16 (4 times) that run
on twice the devices. [-]"""
_SLOWEST = 100.0
"""How far above its ideal time a round may be besides host time: kernels that reach a hundredth of
the device's rates, or steps that wait for prefills. [-]"""
_LIKELY = 4.0
"""How far below the longest time most engines stay at least. [-]"""
_HOST_OF_A_PASS = 0.2
"""The longest host time of a pass: 20,000 eager launches of 10 us. [s]"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observation:
    """One measured row, or the rows of one kind that `served` holds.

    Attributes
    ----------
    served : Served
    what : {"plain", "drafted", "speedup"}
        A speedup is one row's.
    value : float or ndarray
        Tokens per second of the batch [token/s], or S [-]; as many as `served` has rows.
    accepted : Accepted or None
        How drafts were accepted; None for plain rows.
    """

    served: Served
    what: Literal["plain", "drafted", "speedup"]
    value: float | Floats
    accepted: Accepted | None = None

    def __post_init__(self) -> None:
        values = np.atleast_1d(self.value)
        if (bad := ~((values > 0) & (values < np.inf))).any():
            raise DomainError(f"a row's value must be above 0; got {values[bad][0]:g}")

    def predicted(self, engine: Engine) -> float | Floats:
        """Return what the rows would read under an engine, in the unit of `value`."""
        if self.what == "speedup":
            if self.accepted is None:
                raise DomainError("a speedup needs an acceptance")
            return self.served.speedup(engine, self.accepted)
        return self.served.rates(engine, self.accepted)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFit:
    """An engine fitted to rows.

    Attributes
    ----------
    engine : Engine
    told : mapping of str to float
        How far the rows decide each value: 0 where it keeps the base's, 1 where the rows alone
        determine it. [-]
    """

    engine: Engine
    told: Mapping[str, float]


def fit_engine(
    base: Engine, observations: Sequence[Observation], *, kernel_spread: float = KERNEL_SPREAD
) -> EngineFit:
    """Return an engine whose host times go with the rows.

    Parameters
    ----------
    base : Engine
        Where times start from; one that is 0 stays so.
    observations : sequence of Observation
    kernel_spread : float
        Standard deviation of the logarithm of `Engine.kernels`. [-]

    Raises
    ------
    DomainError
        When there are no rows.
    """
    if not observations:
        raise DomainError("an engine is fitted to at least one row")
    names = [*(name for name in HOST if getattr(base, name) > 0), "kernels"]
    spread = np.array([HOST_SPREAD] * (len(names) - 1) + [kernel_spread])

    def engine(x: Floats) -> Engine:
        moved = np.exp(spread * x)
        values = {n: getattr(base, n) * float(m) for n, m in zip(names, moved, strict=True)}
        return replace(base, **values)

    measured = np.log(np.hstack([one.value for one in observations]))

    def off(x: Floats) -> Floats:
        at = engine(x)
        return np.asarray(np.log(np.hstack([one.predicted(at) for one in observations])) - measured)

    x, row = np.zeros(spread.size), ROW_SPREAD
    for _ in range(2 if measured.size >= _ENOUGH else 1):

        def residuals(y: Floats, scale: float = row) -> Floats:
            return np.concatenate([off(y) / scale, y])

        fit = least_squares(residuals, x, diff_step=_STEP)
        x = fit.x
        row = max(ROW_SPREAD, float(np.sqrt(np.mean(off(x) ** 2))))
    slope = np.asarray(fit.jac)
    left = np.diag(np.linalg.inv(slope.T @ slope))  # variance left, of 1 before any row
    told = dict(zip(names, (1 - np.minimum(left, 1.0)).tolist(), strict=True))
    return EngineFit(engine=engine(x), told=told)


# -- whether rows can be true --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepLimits:
    """Between which times a plain step or a round lies under any engine; arrays over rows.

    Attributes
    ----------
    ideal : ndarray
        The least time of one pass over one position of each sequence, without any context, at
        the rates of the device's datasheet. [s]
    shortest, longest : ndarray
        [s]
    """

    ideal: Floats
    shortest: Floats
    longest: Floats

    def hold(self, seconds: Floats) -> NDArray[np.bool_]:
        """Return which times are within the limits."""
        return np.asarray((seconds >= self.shortest) & (seconds <= self.longest))

    def likely(self, seconds: Floats) -> NDArray[np.bool_]:
        """Return which times are within the limits and not close to the longest."""
        return self.hold(seconds) & (seconds <= self.longest / _LIKELY)


def step_limits(
    device: Device,
    target: Architecture,
    drafter: Drafter,
    *,
    B: ArrayLike,
    k: ArrayLike,
    L: ArrayLike,
    execution: Execution,
) -> StepLimits:
    r"""Return between which times steps and rounds lie, whatever the engine.

    .. math:: T^{ideal}_p(L = 0) / 8 \le T \le 100 (T^{ideal}_v + T^{ideal}_d) + (1 + n_d) 0.2 s

    with :math:`n_d` draft passes.

    Parameters
    ----------
    device, target, drafter
    B, k, L : array_like
        Sequences [-], drafts [token] (0: a plain step), context [token]. Broadcast.
    execution : Execution

    Raises
    ------
    DomainError
        When an argument is out of range.
    """
    how = replace(execution, level="ideal", engine=None)
    # Every step reads the weights and computes one position of each sequence. It need not read a
    # context (the one stated may be too long), nor verify drafts (busy engines leave them out).
    ideal = plain_run(device, target, B=B, L=0, execution=how).time().T
    parts = round_parts(device, target, drafter, B=B, k=k, L=L, execution=how)
    times = parts.times()
    passes = sum((run.count for run, _ in parts.drafts), np.zeros(()))
    host = _HOST_OF_A_PASS * (1.0 + np.where(parts.k > 0, passes, 0.0))
    longest = _SLOWEST * (times.T_v + times.T_d) + host
    ideal, longest = np.broadcast_arrays(ideal, longest)
    return StepLimits(ideal=ideal, shortest=ideal / _FASTEST, longest=longest)
