"""What an answer hangs on: how the speedup at one point moves with each thing it depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from specmodel.acceptance import PerPosition
from specmodel.errors import DomainError
from specmodel.report import Setup, extrapolations

STEP = 0.1
"""Relative change that `sensitivity` makes."""


def sensitivity(setup: Setup, k: int, step: float = STEP) -> Mapping[str, tuple[float, float]]:
    """Return S with each input lower and higher by a share, all others and k held.

    Parameters
    ----------
    setup : Setup
        Its first batch and context are used.
    k : int
        Drafts per round, at least 1. [token]
    step : float
        Relative change, between 0 and 1.

    Returns
    -------
    dict of str to (float, float)
        S at (1 - step) and (1 + step) times the memory bandwidth, the peak FLOP/s, the fixed
        time of an operator (operator level), the conditional acceptance of each position (no
        higher than 1), the context and the batch (their nearest whole numbers). [-]

    Raises
    ------
    DomainError
        When k or `step` is out of range.
    """
    if k < 1 or not 0 < step < 1:
        raise DomainError(f"needs k >= 1 and a step between 0 and 1; got {k} and {step:g}")
    changes: dict[str, Callable[[float], Setup]] = {
        "memory bandwidth": lambda x: _device(setup, M=x),
        "peak FLOP/s": lambda x: _device(setup, F=x),
        "time of an operator": lambda x: _operator(setup, x),
        "acceptance": lambda x: _acceptance(setup, k, x),
        "context": lambda x: replace(setup, contexts=(round(setup.contexts[0] * x),)),
        "batch": lambda x: replace(setup, batches=(max(1, round(setup.batches[0] * x)),)),
    }
    if setup.execution.level == "ideal":
        del changes["time of an operator"]
    return {
        name: (_speedup(change(1 - step), k), _speedup(change(1 + step), k))
        for name, change in changes.items()
    }


def _speedup(setup: Setup, k: int) -> float:
    with extrapolations():
        G = setup.tokens(k)
    return G / float(setup.round(setup.batches[0], setup.contexts[0], k).cost)


def _device(setup: Setup, *, M: float = 1.0, F: float = 1.0) -> Setup:
    """Scale the bandwidth and peak of the target's device."""
    device = setup.device
    rates = {dtype: rate * F for dtype, rate in device.peak_flops.items()}
    faster = replace(device, memory_bandwidth=device.memory_bandwidth * M, peak_flops=rates)
    return replace(setup, device=faster)


def _operator(setup: Setup, x: float) -> Setup:
    efficiency = setup.execution.efficiency
    slower = replace(efficiency, t_op=efficiency.t_op * x)
    return replace(setup, execution=replace(setup.execution, efficiency=slower))


def _acceptance(setup: Setup, k: int, x: float) -> Setup:
    with extrapolations():
        rates = np.asarray(setup.acceptance.rates(k), dtype=np.float64)
    before = np.concatenate(([1.0], rates[:-1]))
    conditional = np.divide(rates, before, out=np.zeros_like(rates), where=before > 0)
    scaled = np.minimum(conditional * x, 1.0)
    return replace(setup, acceptance=PerPosition(list(scaled), conditional=True))
