"""From costs to seconds: the two levels of the model behind one function.

``ideal``: datasheet rates, memory and compute overlap perfectly over the whole pass.
``operators``: kernels run one after another, each a soft roofline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.architectures import Architecture
from specmodel.collectives import Fabric, collective_time
from specmodel.costs import Layout, Operator, gemm, pass_operators
from specmodel.errors import ConvergenceError, DomainError, real_array, unwrap
from specmodel.hardware import Device, Link

Level = Literal["operators", "ideal"]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """How far kernels fall short of the datasheet.

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
        real_array(self.t_op, "t_op", low=0, unit="s")
        real_array(self.t_link, "t_link", low=0, unit="s")
        for name in ("eta_m", "eta_f", "eta_link"):
            value = getattr(self, name)
            real_array(value, name, low=0, high=1)
            if value == 0:
                raise DomainError(f"{name} must be > 0; got 0")
        real_array(self.p, "p", low=1, finite=False)


GENERIC = Efficiency(
    t_op=4e-6, eta_m=0.85, eta_f=0.75, p=2.5, t_link=5e-6, eta_link=0.5, basis="generic"
)
"""What is assumed of a device that nobody has calibrated. Fixed in advance, fitted to nothing."""

DATASHEET = Efficiency(
    t_op=0.0, eta_m=1.0, eta_f=1.0, p=np.inf, t_link=0.0, eta_link=1.0, basis="datasheet"
)
"""Perfect kernels: what the ideal level uses."""


class ExecutionOptions(TypedDict, total=False):
    """The keyword arguments that say how passes run; see `Execution`."""

    level: Level
    tp: int
    dp: int
    pp: int
    ep: bool
    network: Link | None
    devices_per_node: int
    kv_reread: float
    expert_overlap: float
    offload: float
    efficiency: Efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How passes run.

    Attributes
    ----------
    level : {"operators", "ideal"}
        Which of the two models answers.
    tp, dp, pp, ep
        Tensor, data and pipeline parallelism, and whether experts are spread; see
        `specmodel.costs.Layout`.
    network : Link or None
        What joins nodes, the share of one device; needed by a deployment of several nodes.
    devices_per_node : int
    kv_reread : float
        r in kappa_v = kappa (1 + r (W - 1)). [-]
    expert_overlap : float
        How alike the routing of a sequence's positions is, 0 to 1. [-]
    offload : float
        Share of the weights that stay in host memory and are streamed over PCIe in each
        pass. [-]
    efficiency : Efficiency
        Used at the operator level; the ideal level ignores it.
    """

    level: Level = "operators"
    tp: int = 1
    dp: int = 1
    pp: int = 1
    ep: bool = False
    network: Link | None = None
    devices_per_node: int = 8
    kv_reread: float = 0.0
    expert_overlap: float = 0.0
    offload: float = 0.0
    efficiency: Efficiency = GENERIC

    def __post_init__(self) -> None:
        if self.level not in ("operators", "ideal"):
            raise DomainError(f"level must be operators or ideal; got {self.level!r}")
        layout = self.layout
        if layout.devices > self.devices_per_node and self.network is None:
            raise DomainError(
                f"{layout.devices} devices are more than a node of {self.devices_per_node}: "
                "say what network joins the nodes"
            )
        real_array(self.kv_reread, "kv_reread", low=0, high=1)
        real_array(self.expert_overlap, "expert_overlap", low=0, high=1)
        real_array(self.offload, "offload", low=0, high=1)

    @classmethod
    def of(cls, execution: Execution | None, options: ExecutionOptions) -> Execution:
        """Return `execution`, or one made of keyword options; both at once is an error."""
        if execution is not None and options:
            raise TypeError(f"give execution or {', '.join(options)}, not both")
        return execution or cls(**options)

    @property
    def layout(self) -> Layout:
        """How the model is divided over devices."""
        node = self.devices_per_node
        return Layout(tp=self.tp, dp=self.dp, pp=self.pp, ep=self.ep, devices_per_node=node)

    @property
    def effective(self) -> Efficiency:
        """The efficiencies that the level uses."""
        return DATASHEET if self.level == "ideal" else self.efficiency

    @property
    def basis(self) -> str:
        """Where the numbers behind an answer come from."""
        return self.effective.basis


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassTime:
    """One forward pass in seconds. Arrays broadcast over B, W and L.

    Attributes
    ----------
    T : float or ndarray
        The whole pass. [s]
    groups : mapping of str to float or ndarray
        The same time by group of operators; they sum to `T`. [s]
    compute, weights, rows : float or ndarray
        Time that arithmetic, streaming weights, and memory traffic proportional to the rows
        (KV cache, activations) would take alone, at the rates in use. [s]
    flops, bytes : float or ndarray
        FLOPs; weight and KV bytes. Per device. [FLOP], [B]
    mfu, mbu : float or ndarray
        Share of peak FLOP/s and of memory bandwidth that the pass uses. [-]
    """

    T: Floats
    groups: Mapping[str, Floats] = field(repr=False)
    compute: Floats
    weights: Floats
    rows: Floats
    flops: Floats
    bytes: Floats
    mfu: Floats
    mbu: Floats

    @property
    def intensity(self) -> Floats:
        """Arithmetic intensity. [FLOP/B]"""
        return self.flops / self.bytes

    @property
    def memory_bound(self) -> NDArray[np.bool_]:
        """Whether memory takes longer than arithmetic over the pass."""
        return self.weights + self.rows > self.compute


def pass_time(
    device: Device,
    architecture: Architecture,
    *,
    B: ArrayLike,
    W: ArrayLike = 1,
    L: ArrayLike = 0,
    head_rows: ArrayLike | None = None,
    fuse: bool = True,
    execution: Execution | None = None,
    **options: Unpack[ExecutionOptions],
) -> PassTime:
    r"""Return the time of one pass over W positions of B sequences.

    .. math::
        T^{\mathrm{ideal}} = \max\Big(\tfrac{sN + B\kappa}{M}, \tfrac{W B c}{F}\Big), \qquad
        T^{\mathrm{op}} = \sum_{op} t_{op} +
        \Big[\big(\tfrac{bytes}{\eta_m M}\big)^p + \big(\tfrac{flops}{\eta_f F}\big)^p\Big]^{1/p}

    Parameters
    ----------
    device : Device
    architecture : Architecture
    B, W, L : array_like
        Sequences [-], positions per sequence [token], context [token]. Broadcast.
    head_rows, fuse
        As in `specmodel.costs.pass_operators`.
    execution : Execution, optional
        Level, parallelism, KV rereading, efficiencies; or its fields as keywords.

    Raises
    ------
    DomainError
        When an argument is out of range, the layout does not divide the model, or the device
        lacks the number format.

    References
    ----------
    .. [1] Williams, Waterman, Patterson, Roofline, CACM 52(4), 2009.

    Examples
    --------
    >>> import specmodel as sm
    >>> h100, llama = sm.load_device("h100"), sm.load_model("llama-3.1-8b")
    >>> t = pass_time(h100, llama, B=1, level="ideal")
    >>> round(float(t.T) * 1e3, 3)
    4.481
    """
    how = Execution.of(execution, options)
    operators = pass_operators(
        architecture,
        B=B,
        W=W,
        L=L,
        layout=how.layout,
        kv_reread=how.kv_reread,
        expert_overlap=how.expert_overlap,
        head_rows=head_rows,
        fuse=fuse,
    )
    return _ideal(device, operators, how) if how.level == "ideal" else _soft(device, operators, how)


def _weight_seconds(device: Device, offload: float) -> float:
    """Return the time to stream one byte of weights at the datasheet's rates. [s/B]"""
    if not offload:
        return 1 / device.memory_bandwidth
    if device.pcie_bandwidth is None:
        raise DomainError(f"{device.name} has no PCIe bandwidth: offload must be 0")
    return (1 - offload) / device.memory_bandwidth + offload / device.pcie_bandwidth


def _ideal(device: Device, operators: tuple[Operator, ...], how: Execution) -> PassTime:
    """Overlap over the whole pass: weights and KV on one side, matrix FLOPs on the other.

    Collectives are left out: the level stays a bound, and its closed forms hold in any layout.
    """
    each = _weight_seconds(device, how.offload)
    totals = _Totals(device, operators, DATASHEET, each, with_activations=False)
    memory = totals.weights + totals.rows
    T = np.maximum(memory, totals.compute)
    bound = memory >= totals.compute
    groups: dict[str, Floats] = {}
    for op in operators:
        if op.kind != "collective":
            share = np.where(
                bound,
                op.count
                * (np.asarray(op.weight_bytes) * each + op.kv_bytes / device.memory_bandwidth),
                op.count * _arithmetic(device, op),
            )
            groups[op.group] = groups.get(op.group, 0.0) + share
    return totals.result(T, groups)


def _soft(device: Device, operators: tuple[Operator, ...], how: Execution) -> PassTime:
    """Operators in sequence, each with its own overlap."""
    eff = how.effective
    each = _weight_seconds(device, how.offload)
    fabric = _fabric(device, how)
    groups: dict[str, Floats] = {}
    for op in operators:
        if op.collective is not None:
            time = collective_time(op.collective, op.link_bytes, op.ranks, fabric)
        else:
            moved = np.asarray(op.kv_bytes) + op.activation_bytes
            memory = (op.weight_bytes * each + moved / device.memory_bandwidth) / eff.eta_m
            time = op.launches * eff.t_op + p_norm(
                memory, _arithmetic(device, op) / eff.eta_f, eff.p
            )
        groups[op.group] = groups.get(op.group, 0.0) + op.count * time
    totals = _Totals(device, operators, eff, each, with_activations=True)
    return totals.result(np.asarray(sum(groups.values())), groups)


def _arithmetic(device: Device, op: Operator) -> Floats:
    """Return the time of one run's FLOPs at the dense peak of their format. [s]"""
    if op.compute_dtype is None:
        return np.asarray(0.0)
    dtype = op.compute_dtype
    if op.else_dtype is not None and dtype not in device.peak_flops:
        dtype = op.else_dtype
    return np.asarray(op.flops) / device.flops(dtype)


def _fabric(device: Device, how: Execution) -> Fabric:
    """Return what joins the devices: the interconnect at the share reached, the network as is."""
    eff, link = how.effective, device.link
    return Fabric(
        link=link and Link(latency=eff.t_link, bandwidth=eff.eta_link * link[1]),
        network=how.network,
        devices_per_node=how.devices_per_node,
    )


def mean_pass(passes: Sequence[PassTime], weights: Sequence[ArrayLike]) -> PassTime:
    """Return the mean of passes that occur with the given shares."""

    def mean(values: Sequence[Floats]) -> Floats:
        pairs = zip(values, weights, strict=True)
        return unwrap(np.asarray(sum(np.asarray(share) * value for value, share in pairs)))

    T = mean([one.T for one in passes])
    return PassTime(
        T=T,
        groups={name: mean([one.groups[name] for one in passes]) for name in passes[0].groups},
        **{
            name: mean([getattr(one, name) for one in passes])
            for name in ("compute", "weights", "rows", "flops", "bytes")
        },
        mfu=mean([one.mfu * one.T for one in passes]) / T,
        mbu=mean([one.mbu * one.T for one in passes]) / T,
    )


class _Totals:
    """Sums over a pass, at the rates given."""

    def __init__(
        self,
        device: Device,
        operators: tuple[Operator, ...],
        eff: Efficiency,
        weight_seconds: float,
        *,
        with_activations: bool,
    ) -> None:
        bandwidth = device.memory_bandwidth
        zero = np.float64(0.0)
        streamed = sum((np.asarray(op.count) * op.weight_bytes for op in operators), zero)
        cached = sum((np.asarray(op.count) * op.kv_bytes for op in operators), zero)
        moved = sum((np.asarray(op.count) * op.activation_bytes for op in operators), zero)
        self.flops = np.asarray(sum((np.asarray(op.count) * op.flops for op in operators), zero))
        peak = sum((op.count * _arithmetic(device, op) for op in operators), zero)
        self.peak_compute = np.asarray(peak)
        self.bytes = np.asarray(streamed + cached)
        self.bandwidth = bandwidth
        self.compute = self.peak_compute / eff.eta_f
        self.weights = np.asarray(streamed) * weight_seconds / eff.eta_m
        extra = cached + moved if with_activations else cached
        self.rows = np.asarray(extra) / (eff.eta_m * bandwidth)

    def result(self, T: Floats, groups: Mapping[str, Floats]) -> PassTime:
        with np.errstate(invalid="ignore", divide="ignore"):  # an empty pass takes no time
            return PassTime(
                T=unwrap(T),
                groups={name: unwrap(np.asarray(time)) for name, time in groups.items()},
                compute=unwrap(self.compute),
                weights=unwrap(self.weights),
                rows=unwrap(self.rows),
                flops=unwrap(self.flops),
                bytes=unwrap(self.bytes),
                mfu=unwrap(self.peak_compute / T),
                mbu=unwrap(self.bytes / self.bandwidth / T),
            )


def p_norm(a: ArrayLike, b: ArrayLike, p: float) -> Floats:
    """Return ``(a**p + b**p)**(1/p)`` for non-negative a and b; the maximum when p is infinite."""
    high, low = np.maximum(a, b), np.minimum(a, b)
    if np.isinf(p):
        return np.asarray(high)
    with np.errstate(invalid="ignore"):
        ratio = np.where(high > 0, low / np.where(high > 0, high, 1.0), 0.0)
    return np.asarray(high * (1.0 + ratio**p) ** (1.0 / p))


def gemm_turn_rows(
    device: Device,
    architecture: Architecture,
    *,
    execution: Execution | None = None,
    **options: Unpack[ExecutionOptions],
) -> float:
    r"""Return the rows at which a weight GEMM turns compute-bound, activations ignored.

    .. math:: \rho\,\frac{\eta_f}{\eta_m}\,\frac{s}{2}

    with s and F of the matrices that hold most weights.

    Returns
    -------
    float
        Rows, batch times width. [-]

    Raises
    ------
    DomainError
        When the device lacks the weights' number format.

    Examples
    --------
    >>> import specmodel as sm
    >>> h100, llama = sm.load_device("h100"), sm.load_model("llama-3.1-8b")
    >>> round(gemm_turn_rows(h100, llama), 1)
    260.6
    """
    eff = Execution.of(execution, options).effective
    linear = architecture.most_streamed()
    one = gemm(architecture, linear)
    seconds = float(np.asarray(_arithmetic(device, one))) / eff.eta_f
    streaming = architecture.matrix_bytes(linear.inputs, linear.outputs, linear.role)
    return streaming * linear.copies / (eff.eta_m * device.memory_bandwidth) / seconds


def critical_batch(
    device: Device,
    architecture: Architecture,
    *,
    W: ArrayLike = 1,
    L: ArrayLike = 0,
    execution: Execution | None = None,
    **options: Unpack[ExecutionOptions],
) -> Floats:
    r"""Return the batch at which a pass over W positions turns compute-bound, B*.

    .. math:: B^* = \frac{\rho\, s N(B^*)}{W c(L) - \rho\, \kappa_v(W, L)}

    At the operator level flops count at eta_f F and bytes, activations included, at eta_m M.
    N depends on the rows of the pass for an MoE; the root is found by fixed-point iteration
    from above, which is monotone because expert coverage is concave.

    Parameters
    ----------
    device, architecture
    W, L : array_like
        Positions per sequence, context. [token] Broadcast.
    execution : Execution, optional
        Or its fields as keywords.

    Returns
    -------
    float or ndarray
        [-]; infinite where the pass never turns compute-bound.

    Raises
    ------
    DomainError
        When an argument is out of range.
    ConvergenceError
        When the iteration does not settle.
    """
    how = Execution.of(execution, options)

    def at(batch: ArrayLike) -> PassTime:
        return pass_time(device, architecture, B=batch, W=W, L=L, execution=how)

    least = how.dp * how.pp  # from here on, rows are proportional to the batch
    unit = at(least)
    slope = np.asarray(unit.compute - unit.rows, dtype=np.float64) / least
    bound = slope > 0
    safe = np.where(bound, slope, 1.0)
    batch = np.broadcast_to(at(1e30).weights, slope.shape) / safe
    for _ in range(500):
        update = at(batch).weights / safe
        if np.all(np.abs(update - batch) <= 1e-13 * update):
            return unwrap(np.where(bound, update, np.inf))
        batch = update
    raise ConvergenceError("the critical batch did not settle in 500 iterations")
