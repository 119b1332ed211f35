"""The time of one operator: by fitted numbers where its device was measured, else generic ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.calibration import FittedOperator
from specmodel.collectives import Fabric, collective_time
from specmodel.costs import Operator
from specmodel.dtypes import BYTES
from specmodel.errors import one_number, one_text
from specmodel.forms import Features, Rates, p_norm
from specmodel.hardware import Device

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """How far kernels fall short of the datasheet, where nobody measured them one by one.

    Attributes
    ----------
    t_op : float
        Fixed time of one operator. [s]
    eta_m, eta_f : float
        Share of memory bandwidth and of peak FLOP/s that is reached. [-]
    p : float
        Sharpness of the roofline's knee; infinity is a hard maximum. [-]
    t_link : float
        Latency of one step of a collective inside a node. [s]
    eta_link : float
        Share of the interconnect's bandwidth that collectives reach. [-]
    basis : str
        Where the numbers come from.
    """

    t_op: float
    eta_m: float
    eta_f: float
    p: float
    t_link: float
    eta_link: float
    basis: str

    def __post_init__(self) -> None:
        for name in ("t_op", "t_link"):
            one_number(getattr(self, name), name, low=0, unit="s")
        for name in ("eta_m", "eta_f", "eta_link"):
            one_number(getattr(self, name), name, high=1, positive=True)
        one_number(self.p, "p", low=1, finite=False)
        one_text(self.basis, "basis")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What operators take on one device.

    Attributes
    ----------
    device : Device
    efficiency : Efficiency
        For operators that were not measured.
    fabric : Fabric
        What joins it to others.
    stream_seconds : float
        Time to stream one byte of weights at the datasheet's rates; more than that of the
        memory where weights are offloaded. [s/B]
    fitted : bool
        Whether the device's calibration is used where it has one.
    kv_reread : float
        r as the user states it; above 0 it overrides what was measured of attention. [-]
    """

    device: Device
    efficiency: Efficiency
    fabric: Fabric
    stream_seconds: float
    fitted: bool = True
    kv_reread: float = 0.0

    def fit(self, op: Operator) -> FittedOperator | None:
        """Return the fitted numbers of an operator, None where nobody measured its kind."""
        key = self.fit_key(op)
        if key is None or self.device.calibration is None:
            return None
        return self.device.calibration.operators[key[0]][key[1]]

    def fit_key(self, op: Operator) -> tuple[str, str] | None:
        """Return the kind and format of the fit that an operator uses.

        The two 16-bit formats stand for each other: they are moved and multiplied at the same
        rates. Elementwise kernels stand for each other where one was not measured.
        """
        if not self.fitted or self.device.calibration is None:
            return None
        kind = "allreduce" if op.collective == "all-reduce" else op.collective or op.kind
        if op.collective is not None and (
            self.device.link is None or op.ranks > self.fabric.devices_per_node
        ):
            return None
        if op.kind == "attention" and self.kv_reread > 0:
            return None
        by_dtype = self.device.calibration.operators.get(kind, {})
        wanted = (op.dtype, *_STANDS_IN.get(op.kind, (_TWIN.get(op.dtype, ""),)))
        return next(((kind, dtype) for dtype in wanted if dtype in by_dtype), None)

    def seconds(self, op: Operator) -> Floats:
        """Return the time of one run. [s]"""
        found = self.fit(op)
        if found is not None:
            return found.seconds(self.features(op), self.rates(op))
        eff = self.efficiency
        if op.collective is not None:
            return collective_time(op.collective, op.link_bytes, op.ranks, self.fabric)
        moved = np.asarray(op.kv_bytes) + op.activation_bytes
        memory = op.weight_bytes * self.stream_seconds + moved / self.device.memory_bandwidth
        arithmetic = self.arithmetic(op) / eff.eta_f
        return op.launches * eff.t_op + p_norm(memory / eff.eta_m, arithmetic, eff.p)

    def log_gradient(self, op: Operator, found: FittedOperator) -> Floats:
        """Return d log T / d log parameter; the last axis runs over the fitted parameters."""
        return found.log_gradient(self.features(op), self.rates(op))

    def arithmetic(self, op: Operator) -> Floats:
        """Return the time of one run's FLOPs at the dense peak of their format. [s]"""
        dtype = self._multiplied_in(op)
        return np.asarray(0.0 if dtype is None else np.asarray(op.flops) / self.device.flops(dtype))

    def _multiplied_in(self, op: Operator) -> str | None:
        missing = op.compute_dtype not in self.device.peak_flops
        return op.else_dtype if op.else_dtype is not None and missing else op.compute_dtype

    def shares(self, op: Operator) -> tuple[float, float]:
        """Return the shares of bandwidth and of peak FLOP/s that an operator can reach. [-]"""
        found = self.fit(op)
        values = {} if found is None or op.collective is not None else found.values
        eff = self.efficiency
        return values.get("eta_m", eff.eta_m), values.get("eta_f", eff.eta_f)

    def rates(self, op: Operator) -> Rates:
        """Return what a form needs to know of the device."""
        return self.device.rates(self._multiplied_in(op) or next(iter(self.device.peak_flops)))

    def features(self, op: Operator) -> Features:
        """Return what a form needs to know of an operator."""
        found = dict(_FEATURES[op.kind](op, self.stream_seconds * self.device.memory_bandwidth))
        fit = self.fit(op)
        if op.kind == "attention" and fit is not None:
            # the kernel that was measured divides no context where every head has its own cache
            whole = fit.ranges.get("split", (1.0, 1.0))[0] == 0
            found["split"] = 0.0 if whole and op.shape["heads"] == op.shape["kv_heads"] else 1.0
        return found

    def outside(self, op: Operator, found: FittedOperator) -> dict[str, Floats]:
        """Return how far features lie outside what was measured, as logarithms above 0."""
        features = self.features(op)
        far: dict[str, Floats] = {}
        for name in _TOLD.get(op.kind, ()):
            low, high = found.ranges.get(name, (0.0, np.inf))
            value = np.maximum(np.asarray(features[name], dtype=np.float64), 1e-30)
            beyond = np.maximum(np.log(value / high), np.log(max(low, 1e-30) / value))
            if np.any(beyond > 0):
                far[name] = np.maximum(beyond, 0.0)
        return far


_TOLD = {
    "gemm": ("m", "n", "k"),
    "attention": ("batch", "context"),
    "mla": ("kv_bytes",),
    "experts": ("m", "hidden", "width"),
}
"""Features whose measured range is told of; small contexts and caches are not extrapolated."""

_STANDS_IN = {
    "collective": ("bfloat16", "float16"),
    "elementwise": ("add", "add-norm", "silu-mul", "kv-write"),
}
_TWIN = {"bfloat16": "float16", "float16": "bfloat16"}


def _gemm(op: Operator, slowdown: float) -> dict[str, ArrayLike]:
    each = BYTES.get(op.compute_dtype or op.dtype, 2.0)
    weights = np.asarray(op.weight_bytes) * slowdown
    return {**op.shape, "weight_bytes": weights, "activation_bytes_each": each}


def _attention(op: Operator, _: float) -> dict[str, ArrayLike]:
    return {**op.shape, **_mla(op, 1.0)}


def _mla(op: Operator, _: float) -> dict[str, ArrayLike]:
    return {"kv_bytes": op.kv_bytes, "flops": op.flops, "query_bytes": op.activation_bytes}


def _experts(op: Operator, slowdown: float) -> dict[str, ArrayLike]:
    shape: dict[str, ArrayLike] = dict(op.shape)
    ranks = shape.pop("ranks")
    return {
        **shape,
        "top_k": np.asarray(op.shape["top_k"]) / ranks,  # of the experts that this device has
        "weight_bytes": np.asarray(op.shape["weight_bytes"]) * slowdown,
        "flops": op.flops,
    }


def _elementwise(op: Operator, _: float) -> dict[str, ArrayLike]:
    return {"bytes": np.asarray(op.weight_bytes) + op.activation_bytes}


def _collective(op: Operator, _: float) -> dict[str, ArrayLike]:
    return {"bytes": op.link_bytes, "ranks": op.ranks}


_FEATURES: Mapping[str, Callable[[Operator, float], dict[str, ArrayLike]]] = {
    "gemm": _gemm,
    "attention": _attention,
    "mla": _mla,
    "experts": _experts,
    "elementwise": _elementwise,
    "collective": _collective,
}
