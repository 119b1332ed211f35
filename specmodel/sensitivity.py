"""What an answer hangs on: how the speedup at one point moves with each thing it depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from specmodel.acceptance import PerPosition
from specmodel.calibration import FittedOperator
from specmodel.errors import DomainError
from specmodel.forms import form_named
from specmodel.report import Setup, extrapolations
from specmodel.speculation import round_time

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
        time of an operator (operator level), the PCIe bandwidth (offloading), the conditional
        acceptance of each position (no higher than 1), the context and the batch. [-]

    Raises
    ------
    DomainError
        When k or `step` is out of range.
    """
    if k < 1 or not 0 < step < 1:
        raise DomainError(f"needs k >= 1 and a step between 0 and 1; got {k} and {step:g}")
    batch, context = setup.batches[0], setup.contexts[0]

    def at(changed: Setup, *, B: float = 1.0, L: float = 1.0) -> float:
        with extrapolations():
            G = changed.tokens(k)
        times = round_time(
            changed.device, changed.target, changed.drafter, B=batch * B, k=k, L=context * L,
            execution=changed.execution, T_h=changed.T_h, T_o=changed.T_o,
        )  # fmt: skip
        return G / float(times.cost)

    changes: dict[str, Callable[[float], float]] = {
        "memory bandwidth": lambda x: at(_device(setup, M=x)),
        "peak FLOP/s": lambda x: at(_device(setup, F=x)),
        "time of an operator": lambda x: at(_operator(setup, x)),
        "PCIe bandwidth": lambda x: at(_device(setup, pcie=x)),
        "acceptance": lambda x: at(_acceptance(setup, k, x)),
        "context": lambda x: at(setup, L=x),
        "batch": lambda x: at(setup, B=x),
    }
    if setup.execution.level == "ideal":
        del changes["time of an operator"]
    if not setup.execution.offload:
        del changes["PCIe bandwidth"]
    return {name: (change(1 - step), change(1 + step)) for name, change in changes.items()}


def _device(setup: Setup, *, M: float = 1.0, F: float = 1.0, pcie: float = 1.0) -> Setup:
    """Scale the bandwidth, peak and PCIe bandwidth of the target's device."""
    device = setup.device
    rates = {dtype: rate * F for dtype, rate in device.peak_flops.items()}
    link = device.pcie_bandwidth
    faster = replace(
        device,
        memory_bandwidth=device.memory_bandwidth * M,
        peak_flops=rates,
        pcie_bandwidth=None if link is None else link * pcie,
    )
    return replace(setup, device=faster)


def _operator(setup: Setup, x: float) -> Setup:
    """Scale every fixed time, generic and fitted."""
    efficiency = setup.execution.efficiency
    slower = replace(efficiency, t_op=efficiency.t_op * x)
    device = setup.device
    if device.calibration is not None:
        operators = {
            kind: {dtype: _slower(fit, x) for dtype, fit in by_dtype.items()}
            for kind, by_dtype in device.calibration.operators.items()
        }
        device = replace(device, calibration=replace(device.calibration, operators=operators))
    return replace(setup, device=device, execution=replace(setup.execution, efficiency=slower))


def _slower(fit: FittedOperator, x: float) -> FittedOperator:
    times = {p.name for p in form_named(fit.form).parameters if p.unit == "s"}
    values = {name: value * (x if name in times else 1.0) for name, value in fit.values.items()}
    return replace(fit, values=values)


def _acceptance(setup: Setup, k: int, x: float) -> Setup:
    with extrapolations():
        rates = np.asarray(setup.acceptance.rates(k), dtype=np.float64)
    before = np.concatenate(([1.0], rates[:-1]))
    conditional = np.divide(rates, before, out=np.zeros_like(rates), where=before > 0)
    scaled = np.minimum(conditional * x, 1.0)
    return replace(setup, acceptance=PerPosition(list(scaled), conditional=True))
