"""From costs to seconds: the two levels of the model behind one function.

``ideal``: datasheet rates, memory and compute overlap perfectly over the whole pass.
``operators``: kernels run one after another, each a soft roofline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, Unpack, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.architectures import Architecture, load_model
from specmodel.collectives import Fabric
from specmodel.costs import Layout, Operator, gemm, pass_operators
from specmodel.errors import (
    ConvergenceError,
    DomainError,
    brief,
    check_broadcast,
    one_flag,
    one_number,
    one_of,
    one_whole,
    unwrap,
)
from specmodel.hardware import Device, Link, load_device
from specmodel.kernels import Efficiency, Kernels
from specmodel.overheads import Engine, load_engine

Level = Literal["operators", "ideal"]
_LEVELS: tuple[str, ...] = get_args(Level)
Floats = NDArray[np.float64]


GENERIC = Efficiency(
    t_op=4e-6, eta_m=0.85, eta_f=0.75, p=2.5, t_link=5e-6, eta_link=0.5, basis="generic"
)
"""What is assumed of a device that nobody has calibrated. Fixed in advance, fitted to nothing."""

DATASHEET = Efficiency(
    t_op=0.0, eta_m=1.0, eta_f=1.0, p=np.inf, t_link=0.0, eta_link=1.0, basis="datasheet"
)
"""Perfect kernels: what the ideal level uses."""


CALIBRATED = "calibrated"
"""The basis of an answer all of whose operators were measured on the device."""


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
    calibrated: bool
    engine: Engine | None


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
        Of operators that were not measured on the device. The ideal level ignores it.
    calibrated : bool
        Whether the device's calibration is used where it has one.
    engine : Engine or None
        The serving engine, whose host time comes on top of passes; `pass_time` is without it.
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
    calibrated: bool = True
    engine: Engine | None = None

    def __post_init__(self) -> None:
        if self.engine is not None:  # a name or a file is as good
            self._set("engine", load_engine(self.engine))
        one_of(self.level, "level", _LEVELS)
        for name in ("tp", "dp", "pp", "devices_per_node"):
            self._set(name, one_whole(getattr(self, name), name, low=1))
        for name in ("ep", "calibrated"):
            self._set(name, one_flag(getattr(self, name), name))
        for name in ("kv_reread", "expert_overlap", "offload"):
            self._set(name, one_number(getattr(self, name), name, low=0, high=1))
        if not isinstance(self.network, Link | None):
            raise DomainError(f"network must be a Link or None; got {brief(self.network)}")
        if not isinstance(self.efficiency, Efficiency):
            raise DomainError(f"efficiency must be an Efficiency; got {brief(self.efficiency)}")
        self._check_nodes()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_nodes(self) -> None:
        layout = self.layout
        if layout.devices > self.devices_per_node and self.network is None:
            raise DomainError(
                f"{layout.devices} devices are more than a node of {self.devices_per_node}: "
                "say what network joins the nodes"
            )
        layout.check_nodes()

    @classmethod
    def of(cls, execution: Execution | None, options: ExecutionOptions) -> Execution:
        """Return `execution`, or one made of keyword options; both at once is an error.

        Raises
        ------
        DomainError
            When `execution` is something else, or an option is out of range.
        """
        if execution is None:
            return cls(**options)
        if not isinstance(execution, cls):
            raise DomainError(
                "execution must be a record such as Execution(level='ideal'); got "
                f"{brief(execution)}"
            )
        if options:
            raise TypeError(f"give execution or {', '.join(options)}, not both")
        return execution

    @property
    def layout(self) -> Layout:
        """How the model is divided over devices."""
        node = self.devices_per_node
        return Layout(tp=self.tp, dp=self.dp, pp=self.pp, ep=self.ep, devices_per_node=node)

    @property
    def effective(self) -> Efficiency:
        """The efficiencies that the level uses."""
        return DATASHEET if self.level == "ideal" else self.efficiency


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
    fitted, others : frozenset of str
        Kinds of operators whose time comes from measurements of the device, and the others.
    assumed : str
        Where the numbers of the others come from.
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
    fitted: frozenset[str]
    others: frozenset[str]
    assumed: str

    @property
    def intensity(self) -> Floats:
        """Arithmetic intensity. [FLOP/B]"""
        return self.flops / self.bytes

    @property
    def memory_bound(self) -> NDArray[np.bool_]:
        """Whether memory takes longer than arithmetic over the pass."""
        return self.weights + self.rows > self.compute


def pass_time(
    device: Device | str,
    architecture: Architecture | str,
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
    device : Device or str
    architecture : Architecture or str
        Records, names or files.
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
    how, fuse = Execution.of(execution, options), one_flag(fuse, "fuse")
    device, architecture = load_device(device), load_model(architecture)
    check_broadcast(B=B, W=W, L=L, head_rows=head_rows)
    operators = operators_of(architecture, how, B=B, W=W, L=L, head_rows=head_rows, fuse=fuse)
    kernels = kernels_of(device, how)
    return (_ideal if how.level == "ideal" else _soft)(kernels, operators)


def operators_of(
    architecture: Architecture,
    how: Execution,
    *,
    B: ArrayLike,
    W: ArrayLike = 1,
    L: ArrayLike = 0,
    head_rows: ArrayLike | None = None,
    fuse: bool = True,
) -> tuple[Operator, ...]:
    """Return the operators of a pass that runs in a given way."""
    return pass_operators(
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


def _weight_seconds(device: Device, offload: float) -> float:
    """Return the time to stream one byte of weights at the datasheet's rates. [s/B]"""
    if not offload:
        return 1 / device.memory_bandwidth
    if device.pcie_bandwidth is None:
        raise DomainError(f"{device.name} has no PCIe bandwidth: offload must be 0")
    return (1 - offload) / device.memory_bandwidth + offload / device.pcie_bandwidth


def _ideal(kernels: Kernels, operators: tuple[Operator, ...]) -> PassTime:
    """Overlap over the whole pass: weights and KV on one side, matrix FLOPs on the other.

    Collectives are left out: the level stays a bound, and its closed forms hold in any layout.
    """
    totals = _Totals(kernels, operators, with_activations=False)
    memory = totals.weights + totals.rows
    T = np.maximum(memory, totals.compute)
    bound = memory >= totals.compute
    groups: dict[str, Floats] = {}
    bandwidth = kernels.device.memory_bandwidth
    for op in operators:
        if op.kind != "collective":
            moved = np.asarray(op.weight_bytes) * kernels.stream_seconds + op.kv_bytes / bandwidth
            share = np.where(bound, op.count * moved, op.count * kernels.arithmetic(op))
            groups[op.group] = groups.get(op.group, 0.0) + share
    return totals.result(T, groups)


def _soft(kernels: Kernels, operators: tuple[Operator, ...]) -> PassTime:
    """Operators in sequence, each with its own overlap."""
    groups: dict[str, Floats] = {}
    for op in operators:
        groups[op.group] = groups.get(op.group, 0.0) + op.count * kernels.seconds(op)
    totals = _Totals(kernels, operators, with_activations=True)
    return totals.result(np.asarray(sum(groups.values())), groups)


def kernels_of(device: Device, how: Execution) -> Kernels:
    """Return what operators take on a device."""
    return Kernels(
        device=device,
        efficiency=how.effective,
        fabric=_fabric(device, how),
        stream_seconds=_weight_seconds(device, how.offload),
        fitted=how.calibrated and how.level == "operators",
        kv_reread=how.kv_reread,
    )


def _fabric(device: Device, how: Execution) -> Fabric:
    """Return what joins the devices: the interconnect at the share reached, the network as is."""
    eff, link = how.effective, device.link
    return Fabric(
        link=link and Link(latency=eff.t_link, bandwidth=eff.eta_link * link[1]),
        network=how.network,
        devices_per_node=how.devices_per_node,
    )


def basis_of(passes: Iterable[PassTime]) -> str:
    """Return where the numbers behind some passes come from.

    ``datasheet``, ``generic``, ``calibrated`` where every operator was measured on the device,
    or else ``calibrated, generic for`` and the kinds of operators that were not.
    """
    every = list(passes)
    others = sorted(set().union(*(one.others for one in every)))
    if not any(one.fitted for one in every):
        return every[0].assumed
    return CALIBRATED if not others else f"{CALIBRATED}, {every[0].assumed} for {', '.join(others)}"


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
        fitted=passes[0].fitted,
        others=passes[0].others,
        assumed=passes[0].assumed,
    )


class _Totals:
    """Sums over a pass, each operator at the rates it can reach."""

    def __init__(
        self, kernels: Kernels, operators: tuple[Operator, ...], *, with_activations: bool
    ) -> None:
        self.bandwidth = kernels.device.memory_bandwidth
        zero = np.asarray(0.0)
        self.flops = self.peak_compute = self.bytes = zero
        self.compute = self.weights = self.rows = zero
        kinds: dict[bool, set[str]] = {True: set(), False: set()}
        for op in operators:
            count, (eta_m, eta_f) = np.asarray(op.count), kernels.shares(op)
            arithmetic = count * kernels.arithmetic(op)
            extra = np.asarray(op.kv_bytes) + (op.activation_bytes if with_activations else 0.0)
            self.flops = self.flops + count * op.flops
            self.peak_compute = self.peak_compute + arithmetic
            self.bytes = self.bytes + count * (np.asarray(op.weight_bytes) + op.kv_bytes)
            self.compute = self.compute + arithmetic / eta_f
            streamed = count * op.weight_bytes * kernels.stream_seconds
            self.weights = self.weights + streamed / eta_m
            self.rows = self.rows + count * extra / (eta_m * self.bandwidth)
            kinds[kernels.fit(op) is not None].add(op.collective or op.kind)
        self.fitted, self.others = (frozenset(kinds[x]) for x in (True, False))
        self.assumed = kernels.efficiency.basis

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
                fitted=self.fitted,
                others=self.others,
                assumed=self.assumed,
            )


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
    >>> round(gemm_turn_rows(h100, llama, calibrated=False), 1)
    260.6
    """
    kernels = kernels_of(device, Execution.of(execution, options))
    linear = architecture.most_streamed()
    one = gemm(architecture, linear)
    eta_m, eta_f = kernels.shares(one)
    seconds = float(kernels.arithmetic(one)) / eta_f
    streaming = architecture.matrix_bytes(linear.inputs, linear.outputs, linear.role)
    return streaming * linear.copies / (eta_m * device.memory_bandwidth) / seconds


def critical_batch(
    device: Device | str,
    architecture: Architecture | str,
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
    device, architecture = load_device(device), load_model(architecture)

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
