"""An engine's host times from a few rows of somebody's own: plain rates, drafted rates, speedups.

Few rows cannot tell a dozen times apart. Each starts from what the engine is known for and moves
from there only as far as the rows ask: a posterior mode, log-normal priors around the engine's
own values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from specmodel.errors import DomainError
from specmodel.overheads import HOST, Engine
from specmodel.requests import Accepted, Served

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
        What the rows say of each value, 0 (nothing: it is where it started) to 1 (all). [-]
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
