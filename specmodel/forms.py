"""The operator forms that a calibration fits: seconds from shapes, rates and a few numbers.

A form is a pure function of features (arrays that broadcast), the device's rates, and positive
parameters, each a physical quantity. The same functions serve the fit and the predictions. Forms
and their starting values were worked out on the kernel tables of aiconfigurator-core 0.12.0
(Apache-2.0): A100, H100, B200 and L40S, three serving engines.

Features of each operator
-------------------------
gemm
    m, n, k; weight_bytes of the whole operator, scales included; activation_bytes_each, bytes of
    one input activation; copies, batched matrices (default 1). Outputs have 2 bytes.
attention
    batch, kv_heads, width, context (cached tokens read); kv_bytes, the cache read once; flops;
    query_bytes, queries in and outputs out; split, 0 where the kernel does not divide the context
    of a sequence among multiprocessors (default 1).
mla
    kv_bytes, flops, query_bytes.
experts
    m, top_k, experts, hidden, width; touched, distinct experts; weight_bytes of one expert; flops.
elementwise
    bytes.
allreduce
    bytes of the vector, ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.errors import DomainError, FitError, did_you_mean, real_array

Floats = NDArray[np.float64]
Features = Mapping[str, ArrayLike]
Values = Mapping[str, float]

_SHARP = 3.0  # memory and compute inside one kernel
_HALF_RAMP = 0.5  # of the L2 cache: half the ramp
_PADDED = 6.0  # a short context rounds up to a tile
OWN_KERNEL = 8 * 2**20  # all-reduce kernels of vLLM and SGLang take vectors below it [B]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device does at most; efficiencies are shares of these.

    Attributes
    ----------
    bandwidth : float
        Memory. [B/s]
    flops : float
        Dense peak in the operator's format. [FLOP/s]
    multiprocessors : int or None
        Independent units that tiles are spread over.
    l2 : float or None
        Last-level cache. [B]
    link : float or None
        To the other devices of a node, one direction. [B/s]
    """

    bandwidth: float
    flops: float
    multiprocessors: int | None = None
    l2: float | None = None
    link: float | None = None

    def __post_init__(self) -> None:
        for name in ("bandwidth", "flops", "multiprocessors", "l2", "link"):
            value = getattr(self, name)
            if value is not None and not real_array(value, name, low=0):
                raise DomainError(f"{name} must be > 0; got 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One number of a form.

    Attributes
    ----------
    name, unit, meaning : str
    start : float
        Typical value: where the fit starts and the centre of its prior.
    prior : float
        Standard deviation of the prior on the logarithm; weak. 0: a constant, never fitted.
    low, high : float
        Bounds; beyond them the number would not be the quantity it stands for.
    absent : float or None
        Value where a table cannot tell; `start` where None.
    """

    name: str
    unit: str
    meaning: str
    start: float
    prior: float
    low: float
    high: float
    absent: float | None = None

    @property
    def pinned(self) -> float:
        """Its value where a table cannot tell."""
        return self.start if self.absent is None else self.absent


Seconds = Callable[[Features, Rates, Values], Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A function from features to seconds, and its parameters.

    Attributes
    ----------
    name, operator, meaning : str
    seconds : callable
        ``seconds(features, rates, values)``. [s]
    parameters : tuple of Parameter
    choices : tuple of mapping
        Sets of constants of which a fit keeps the best; such as tile shapes.
    """

    name: str
    operator: str
    meaning: str
    seconds: Seconds = field(repr=False)
    parameters: tuple[Parameter, ...]
    choices: tuple[Values, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return tuple(parameter.name for parameter in self.parameters)


def p_norm(a: ArrayLike, b: ArrayLike, p: float) -> Floats:
    """Return ``(a**p + b**p)**(1/p)`` for non-negative a and b; the maximum when p is infinite."""
    high, low = np.maximum(a, b), np.minimum(a, b)
    if np.isinf(p):
        return np.asarray(high)
    with np.errstate(invalid="ignore"):
        ratio = np.where(high > 0, low / np.where(high > 0, high, 1.0), 0.0)
    return np.asarray(high * (1.0 + ratio**p) ** (1.0 / p))


# -- matrix products -----------------------------------------------------------------------------


def _gemm_sizes(features: Features) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Return m, n, k, copies and all bytes moved."""
    m, n, k = (np.asarray(features[key], dtype=np.float64) for key in ("m", "n", "k"))
    copies = np.asarray(features.get("copies", 1.0), dtype=np.float64)
    each = np.asarray(features["activation_bytes_each"], dtype=np.float64)
    moved = np.asarray(features["weight_bytes"]) + copies * (m * k * each + 2.0 * m * n)
    return m, n, k, copies, moved


def tiles(features: Features, rates: Rates, v: Values) -> tuple[Floats, Floats, int]:
    """Return a matrix product's rows in a tile, its tiles, and the multiprocessors they run on."""
    m, n, _, copies, _ = _gemm_sizes(features)
    if rates.multiprocessors is None:
        raise FitError("tiles need the device's number of multiprocessors")
    rows = np.exp2(np.ceil(np.log2(np.maximum(m, 1.0))))
    rows = np.clip(rows, v["tile_m_min"], v["tile_m_max"])
    count = copies * np.ceil(m / rows) * np.ceil(n / v["tile_n"])
    return rows, count, rates.multiprocessors


def _tiled(features: Features, rates: Rates, v: Values) -> Floats:
    r"""Return the time of the tiles, memory and arithmetic overlapping. [s]

    .. math::
        b_M = \mathrm{clip}(2^{\lceil \log_2 M \rceil}), \quad
        x = \lceil M/b_M \rceil \lceil N/b_N \rceil / SM, \quad
        path = \frac{2 K b_M b_N SM}{\eta_f F}\, x \left(\frac{\lceil x \rceil}{x}\right)^s
    """
    _, _, k, _, moved = _gemm_sizes(features)
    rows, count, units = tiles(features, rates, v)
    waves = count / units
    full = np.ceil(waves) / np.where(waves > 0, waves, 1.0)
    path = 2.0 * k * rows * v["tile_n"] * units / (v["eta_f"] * rates.flops) * waves
    return p_norm(moved / (v["eta_m"] * rates.bandwidth), path * full ** v["s"], _SHARP)


def _gemm_split_k(features: Features, rates: Rates, v: Values) -> Floats:
    k = np.asarray(features["k"], dtype=np.float64)
    return v["t0"] + _tiled(features, rates, v) + v["t_k"] * k / (k + 2048.0)


def _gemm_serial_k(features: Features, rates: Rates, v: Values) -> Floats:
    m, _, k, copies, _ = _gemm_sizes(features)
    quantise = v["r"] * 3.0 * copies * m * k / rates.bandwidth
    return v["t0"] + _tiled(features, rates, v) + v["tau"] * k / 1024.0 + quantise


def _gemm_columns(features: Features, rates: Rates, v: Values) -> Floats:
    m, n, k, copies, moved = _gemm_sizes(features)
    arithmetic = 2.0 * copies * m * n * k / (v["eta_f"] * rates.flops)
    share = v["eta_m"] * np.where(m > 1, 1.0, v["eta_1"])
    memory = moved / (share * rates.bandwidth)
    return v["t0"] + v["t_n"] * copies * n + p_norm(memory, arithmetic, v["p"])


_MICROSECONDS = (2e-8, 1e-2)
_T0 = Parameter(
    name="t0",
    unit="s",
    meaning="fixed time of one kernel",
    start=3e-6,
    prior=1.0,
    low=_MICROSECONDS[0],
    high=_MICROSECONDS[1],
)
_ETA_M = Parameter(
    name="eta_m",
    unit="-",
    meaning="share of the memory bandwidth that streaming reaches",
    start=0.85,
    prior=0.5,
    low=0.001,
    high=1.3,
)
_ETA_F = Parameter(
    name="eta_f",
    unit="-",
    meaning="share of the peak FLOP/s that arithmetic reaches",
    start=0.7,
    prior=0.5,
    low=0.001,
    high=1.3,
)
_P = Parameter(
    name="p",
    unit="-",
    meaning="sharpness of the roofline's knee",
    start=2.5,
    prior=0.7,
    low=1.0,
    high=20.0,
)
_S = Parameter(
    name="s",
    unit="-",
    meaning="cost of a partly filled last wave of tiles, 0 none (stream-K) to 1 a full wave",
    start=0.4,
    prior=1.0,
    low=0.01,
    high=1.5,
)
_T_K = Parameter(
    name="t_k",
    unit="s",
    meaning="cost of splitting K, growing with K and saturating near 2,048",
    start=4e-6,
    prior=1.0,
    low=_MICROSECONDS[0],
    high=_MICROSECONDS[1],
)
_TAU = Parameter(
    name="tau",
    unit="s",
    meaning="serial loop over K, for each 1,024 of it",
    start=1.5e-7,
    prior=1.0,
    low=1e-9,
    high=1e-4,
)
_R_ROWS = Parameter(
    name="r",
    unit="-",
    meaning="cost of quantising one row's activations, in passes of 3 bytes an element",
    start=1.5,
    prior=1.5,
    low=0.01,
    high=50.0,
)


def _tile(name: str, meaning: str, size: float) -> Parameter:
    unit = "row" if name.startswith("tile_m") else "column"
    return Parameter(
        name=name, unit=unit, meaning=meaning, start=size, prior=0.0, low=size, high=size
    )


def _tiles(low: float, high: float, columns: float) -> tuple[Parameter, ...]:
    return (
        _tile("tile_m_min", "fewest rows of a tile", low),
        _tile("tile_m_max", "most rows of a tile", high),
        _tile("tile_n", "columns of a tile", columns),
    )


_FP8_TILES: tuple[Values, ...] = tuple(
    {"tile_m_min": low, "tile_m_max": high, "tile_n": columns}
    for low, high, columns in (
        (64, 256, 64),
        (128, 128, 64),
        (16, 128, 64),
        (64, 128, 128),
        (16, 64, 128),
    )
)

GEMM_SPLIT_K = Form(
    name="gemm-split-k",
    operator="gemm",
    meaning="tiles in waves, memory and arithmetic overlap, K is split (16-bit kernels)",
    seconds=_gemm_split_k,
    parameters=(_T0, _ETA_M, _ETA_F, _S, _T_K, *_tiles(16, 64, 128)),
)
GEMM_SERIAL_K = Form(
    name="gemm-serial-k",
    operator="gemm",
    meaning="tiles in waves, K in sequence, activations quantised first (8-bit kernels)",
    seconds=_gemm_serial_k,
    parameters=(_T0, _ETA_M, _ETA_F, _S, _TAU, _R_ROWS, *_tiles(64, 128, 64)),
    choices=_FP8_TILES,
)
GEMM_COLUMNS = Form(
    name="gemm-columns",
    operator="gemm",
    meaning="a soft roofline with a cost by output and a kernel of its own for one row (CPUs)",
    seconds=_gemm_columns,
    parameters=(
        _T0,
        _ETA_M,
        _ETA_F,
        _P,
        Parameter(
            name="t_n",
            unit="s",
            meaning="cost of one output column, which a short K does not hide",
            start=1e-9,
            prior=3.0,
            low=1e-13,
            high=1e-5,
            absent=0.0,
        ),
        Parameter(
            name="eta_1",
            unit="-",
            meaning="bandwidth with one row, over that with several",
            start=1.0,
            prior=0.5,
            low=0.01,
            high=3.0,
        ),
    ),
)


# -- attention -----------------------------------------------------------------------------------


def _attention(features: Features, rates: Rates, v: Values) -> Floats:
    r"""Return the time of attention over a cache. [s]

    .. math::
        T = t_0 + ramp(K) + c B n_{kv} + \frac{q}{\eta M} + \frac{s\,K}{B n_{kv} M} +
        \left[\left(\frac{\kappa}{\eta M}\right)^3 +
        \left(\frac{flops}{\eta_f F}\right)^3\right]^{1/3}

    K is the cache in bytes and kappa what is read of it: a context shorter than a tile counts as
    one, and W > 1 positions read 1 + r (W - 1) times as much at eta_w of the rate. Where a kernel
    does not split the context, (sequence, KV head) pairs fewer than `streams` leave bandwidth idle.
    A stream from memory takes `ramp` to get going, which a cache much smaller than the L2 cache
    does not need.
    """
    keys = ("batch", "kv_heads", "width", "kv_bytes", "flops", "query_bytes", "context")
    batch, heads, width, cache, flops, query, context = (
        np.asarray(features[key], dtype=np.float64) for key in keys
    )
    split = np.asarray(features.get("split", 1.0), dtype=np.float64)
    units = batch * heads
    rate = v["eta_m"] * rates.bandwidth
    padded = p_norm(context, np.where(context > 0, v["kv_tile"], 0.0), _PADDED)
    wide = np.where(width > 1, (1.0 + v["r"] * np.maximum(width - 1.0, 0.0)) / v["eta_w"], 1.0)
    read = cache * padded / np.where(context > 0, context, 1.0) / rate * wide
    idle = p_norm(1.0, v["streams"] / np.where(units > 0, units, np.inf), 4.0)
    read = read * np.where(split > 0, 1.0, idle)
    chain = v["s"] * cache / np.where(units > 0, units, 1.0) / rates.bandwidth
    arithmetic = flops / (v["eta_f"] * rates.flops)
    fixed = v["t0"] + v["c"] * units + query / rate + chain
    if rates.l2 is not None:
        fixed = fixed + v["ramp"] * cache / (cache + _HALF_RAMP * rates.l2)
    return fixed + p_norm(read, arithmetic, _SHARP)


def _mla(features: Features, rates: Rates, v: Values) -> Floats:
    cache, flops, query = (
        np.asarray(features[key], dtype=np.float64) for key in ("kv_bytes", "flops", "query_bytes")
    )
    arithmetic = flops / (v["eta_f"] * rates.flops)
    read = p_norm(cache / (v["eta_m"] * rates.bandwidth), arithmetic, _SHARP)
    return v["t0"] + read + v["r"] * query / rates.bandwidth


_T0_ATTENTION = replace(_T0, start=1.5e-5)

ATTENTION = Form(
    name="attention-split-kv",
    operator="attention",
    meaning="a cache streamed by (sequence, KV head) pairs",
    seconds=_attention,
    parameters=(
        _T0_ATTENTION,
        Parameter(
            name="c",
            unit="s",
            meaning="cost of one (sequence, KV head) pair",
            start=1e-8,
            prior=1.5,
            low=1e-11,
            high=1e-4,
            absent=0.0,
        ),
        replace(_ETA_M, meaning="share of the memory bandwidth that one query row reads KV at"),
        Parameter(
            name="kv_tile",
            unit="token",
            meaning="shortest context a kernel's loop works on",
            start=64.0,
            prior=1.0,
            low=1.0,
            high=1024.0,
        ),
        Parameter(
            name="s",
            unit="-",
            meaning="time along one pair's cache that is not hidden, over streaming it alone",
            start=0.3,
            prior=1.5,
            low=1e-3,
            high=30.0,
            absent=0.0,
        ),
        Parameter(
            name="streams",
            unit="pair",
            meaning="pairs that saturate the memory where the context is not split",
            start=64.0,
            prior=1.0,
            low=1.0,
            high=1024.0,
        ),
        Parameter(
            name="eta_w",
            unit="-",
            meaning="bandwidth with more than one query position, over that with one",
            start=1.0,
            prior=0.25,
            low=0.01,
            high=2.0,
        ),
        Parameter(
            name="r",
            unit="-",
            meaning="share of the cache that each further query position reads again",
            start=0.03,
            prior=1.5,
            low=1e-4,
            high=1.5,
            absent=0.0,
        ),
        replace(_ETA_F, start=0.5),
        Parameter(
            name="ramp",
            unit="s",
            meaning="time that a stream from memory takes to get going",
            start=5e-6,
            prior=1.0,
            low=1e-9,
            high=1e-3,
            absent=0.0,
        ),
    ),
)
MLA = Form(
    name="mla-latent",
    operator="mla",
    meaning="a latent cache, memory and arithmetic overlap, a cost by query bytes",
    seconds=_mla,
    parameters=(
        _T0_ATTENTION,
        _ETA_M,
        _ETA_F,
        Parameter(
            name="r",
            unit="-",
            meaning="traffic by query, in passes over queries and outputs",
            start=2.0,
            prior=1.5,
            low=1e-2,
            high=50.0,
            absent=1.0,
        ),
    ),
)


# -- experts, elementwise, all-reduce ------------------------------------------------------------


def _experts(features: Features, rates: Rates, v: Values) -> Floats:
    r"""Return the time of the routed experts of a layer. [s]

    .. math::
        T = t_0 + \frac{A w}{\eta_m M}\,\frac{I + c}{I} +
        \frac{2 p\,(m k + b A\,[m > E])}{\eta_f F} + \frac{r\,m k\,(4 h + 6 I)}{M}

    A experts are touched, of p parameters and w bytes each. Once tokens outnumber the experts,
    kernels take larger tiles and each touched expert's rows are padded by b.
    """
    keys = ("m", "top_k", "experts", "touched", "hidden", "width", "weight_bytes", "flops")
    m, top_k, experts, touched, hidden, width, each, flops = (
        np.asarray(features[key], dtype=np.float64) for key in keys
    )
    pairs = m * top_k
    padded = 1.0 + v["b"] * touched * (m > experts) / np.where(pairs > 0, pairs, 1.0)
    weights = touched * each / (v["eta_m"] * rates.bandwidth) * (width + v["c"]) / width
    rows = v["r"] * pairs * (4.0 * hidden + 6.0 * width) / rates.bandwidth
    return v["t0"] + weights + flops * padded / (v["eta_f"] * rates.flops) + rows


def _elementwise(features: Features, rates: Rates, v: Values) -> Floats:
    moved = np.asarray(features["bytes"], dtype=np.float64)
    return v["t0"] + moved / (v["eta_m"] * rates.bandwidth)


def _launch(features: Features, rates: Rates, v: Values) -> Floats:
    return np.full(np.shape(features["bytes"]), v["t0"])


def _all_reduce(features: Features, rates: Rates, v: Values) -> Floats:
    r"""Return the time of an all-reduce of S bytes over n devices inside a node. [s]

    .. math::
        T = t_0 + a (n - 2) + \min\left(\frac{(n-1) S}{q\,\eta M},\;
        t_1 + \frac{2 S (n-1)}{n\,\eta M}\right) + t_2\,[S \ge 8\,\mathrm{MiB}]

    Every device reads all vectors whole, or reduces its share and then gathers the others';
    the serving engines' own kernels take vectors below 8 MiB and leave larger ones to a library.
    """
    size, n = (np.asarray(features[key], dtype=np.float64) for key in ("bytes", "ranks"))
    if rates.link is None:
        raise FitError("an all-reduce needs the bandwidth of the link between devices")
    rate = v["eta_m"] * rates.link
    one_shot = (n - 1.0) * size / (v["q"] * rate)
    two_shot = v["t1"] + 2.0 * size * (n - 1.0) / n / rate
    large = v["t2"] * (size >= OWN_KERNEL)
    return v["t0"] + v["a"] * (n - 2.0) + np.minimum(one_shot, two_shot) + large


EXPERTS = Form(
    name="experts-fused",
    operator="experts",
    meaning="touched experts' weights, then arithmetic, then traffic by row",
    seconds=_experts,
    parameters=(
        replace(_T0, start=2e-5),
        _ETA_M,
        _ETA_F,
        Parameter(
            name="c",
            unit="column",
            meaning="expert width that a touched expert costs beside its own",
            start=10.0,
            prior=1.5,
            low=1e-2,
            high=2000.0,
            absent=0.0,
        ),
        Parameter(
            name="r",
            unit="-",
            meaning="traffic by row and chosen expert, in passes over its activations",
            start=1.5,
            prior=1.5,
            low=1e-2,
            high=50.0,
        ),
        Parameter(
            name="b",
            unit="row",
            meaning="padding of a touched expert's rows once tokens outnumber the experts",
            start=16.0,
            prior=1.0,
            low=0.1,
            high=256.0,
            absent=0.0,
        ),
    ),
)
ELEMENTWISE = Form(
    name="elementwise",
    operator="elementwise",
    meaning="a launch and a stream",
    seconds=_elementwise,
    parameters=(_T0, _ETA_M),
)
LAUNCH = Form(
    name="launch",
    operator="launch",
    meaning="from launch to launch",
    seconds=_launch,
    parameters=(_T0,),
)
ALL_REDUCE = Form(
    name="all-reduce",
    operator="allreduce",
    meaning="the quicker of one shot and two",
    seconds=_all_reduce,
    parameters=(
        replace(_T0, start=5e-6),
        replace(_ETA_M, start=0.5, meaning="share of the link's bandwidth that is reached"),
        Parameter(
            name="a",
            unit="s",
            meaning="latency of each device beyond two",
            start=1e-7,
            prior=1.5,
            low=1e-10,
            high=1e-3,
            absent=0.0,
        ),
        Parameter(
            name="t1",
            unit="s",
            meaning="latency of the second shot",
            start=4e-6,
            prior=1.0,
            low=_MICROSECONDS[0],
            high=_MICROSECONDS[1],
        ),
        Parameter(
            name="q",
            unit="-",
            meaning="bandwidth of one shot, over that of two",
            start=1.0,
            prior=0.7,
            low=0.05,
            high=5.0,
        ),
        Parameter(
            name="t2",
            unit="s",
            meaning="what handing a vector of 8 MiB or more to a library costs",
            start=1e-5,
            prior=1.5,
            low=1e-8,
            high=1e-3,
            absent=0.0,
        ),
    ),
)


# -- baseline ------------------------------------------------------------------------------------


def traffic(operator: str, features: Features) -> tuple[Floats, Floats]:
    """Return the bytes and FLOPs of an operator, all that a plain roofline knows of it."""
    f = {key: np.asarray(value, dtype=np.float64) for key, value in features.items()}
    if operator == "gemm":
        m, n, k, copies, moved = _gemm_sizes(features)
        return moved, 2.0 * copies * m * n * k
    if operator in ("attention", "mla"):
        return f["kv_bytes"] + f["query_bytes"], f["flops"]
    if operator == "experts":
        rows = f["m"] * f["top_k"] * (4.0 * f["hidden"] + 6.0 * f["width"])
        return f["touched"] * f["weight_bytes"] + rows, f["flops"]
    if operator == "allreduce":
        moved = 2.0 * f["bytes"] * (f["ranks"] - 1.0) / f["ranks"]
        return moved, np.zeros_like(moved)
    return f["bytes"], np.zeros_like(f["bytes"])


def soft_roofline(operator: str) -> Form:
    """Return the baseline of an operator: ``t0 + ((bytes / eta_m M)^p + (flops / eta_f F)^p)^1/p``.

    An all-reduce streams over the link instead of the memory.
    """

    def seconds(features: Features, rates: Rates, v: Values) -> Floats:
        moved, flops = traffic(operator, features)
        bandwidth = rates.link if operator == "allreduce" else rates.bandwidth
        if bandwidth is None:
            raise FitError("an all-reduce needs the bandwidth of the link between devices")
        memory = moved / (v["eta_m"] * bandwidth)
        return v["t0"] + p_norm(memory, flops / (v["eta_f"] * rates.flops), v["p"])

    return Form(
        name=f"{operator}-plain",
        operator=operator,
        meaning="a plain soft roofline",
        seconds=seconds,
        parameters=(_T0, _ETA_M, _ETA_F, _P),
    )


FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        GEMM_SPLIT_K,
        GEMM_SERIAL_K,
        GEMM_COLUMNS,
        ATTENTION,
        MLA,
        EXPERTS,
        ELEMENTWISE,
        LAUNCH,
        ALL_REDUCE,
        soft_roofline("gemm"),
        soft_roofline("attention"),
        soft_roofline("mla"),
        soft_roofline("experts"),
    )
}
"""Every form a profile can name."""


def form_named(name: str) -> Form:
    """Return a form by name.

    Raises
    ------
    DomainError
        When no form has that name.
    """
    if name not in FORMS:
        raise DomainError(f"unknown form {name!r}{did_you_mean(name, FORMS)}")
    return FORMS[name]


def form_for(operator: str, dtype: str, *, tiled: bool = True) -> Form:
    """Return the form that fits an operator in a number format.

    Parameters
    ----------
    operator, dtype : str
    tiled : bool
        Whether the device runs tiles on multiprocessors, as GPUs do.
    """
    if operator == "gemm":
        if not tiled:
            return GEMM_COLUMNS
        return GEMM_SERIAL_K if dtype in ("fp8", "int8") else GEMM_SPLIT_K
    for form in FORMS.values():
        if form.operator == operator:
            return form
    raise DomainError(f"no form for operator {operator!r}")
