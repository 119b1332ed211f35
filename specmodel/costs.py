"""FLOPs and bytes of one forward pass, operator by operator. Knows no hardware.

One multiply-add is 2 FLOP. A pass evaluates W positions of each of B sequences that hold L
tokens of context; the new tokens are left out of the context. Everything is per device, as the
`Layout` of the deployment divides it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.architectures import (
    Architecture,
    Attention,
    CompressedAttention,
    LatentAttention,
    Layer,
    Linear,
    MoE,
    Recurrent,
)
from specmodel.architectures.compressed import PARTIAL_BYTES
from specmodel.collectives import Collective
from specmodel.dtypes import BYTES
from specmodel.errors import DomainError, real_array, unwrap, whole_array

Kind = Literal[
    "gemm",
    "attention",
    "mla",
    "compressed",
    "index",
    "state",
    "experts",
    "elementwise",
    "collective",
]
Floats = NDArray[np.float64]
Numbers = float | Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operator:
    """One kernel of a pass, run `count` times. Array fields broadcast over B, W and L.

    Attributes
    ----------
    name, kind : str
        Which operator; which family of kernels it belongs to.
    count : float or ndarray
        How often it runs in the pass. [-]
    launches : int
        Kernels that one run takes. [-]
    flops : float or ndarray
        FLOPs of one run; elementwise work is not counted. [FLOP]
    weight_bytes, kv_bytes, activation_bytes, link_bytes : float or ndarray
        Bytes of one run: weights streamed, KV cache read, activations moved, and the message
        of a collective. [B]
    collective, ranks : str or None, int
        Which collective it is (of kind ``collective``), and over how many devices.
    compute_dtype, else_dtype : str or None
        Format the multiplications run in (None: there are none), and the one to take on
        devices without arithmetic for it (None: they cannot run it).
    dtype : str
        Format that measurements of it are filed by: of the weights (with ``_block`` scales, or
        ``weights`` alone quantised), of the KV cache, or the elementwise kernel.
    shape : mapping of str to float or ndarray
        What a fitted form of its kind needs besides (see `specmodel.forms`).
    group : str
        The heading it is reported under.
    """

    name: str
    kind: Kind
    group: str
    count: Numbers = 1.0
    launches: int = 1
    flops: Numbers = 0.0
    weight_bytes: Numbers = 0.0
    kv_bytes: Numbers = 0.0
    activation_bytes: Numbers = 0.0
    link_bytes: Numbers = 0.0
    collective: Collective | None = None
    ranks: int = 1
    compute_dtype: str | None = None
    else_dtype: str | None = None
    dtype: str = ""
    shape: Mapping[str, Numbers] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a deployment divides a model over devices.

    A stage of the pipeline is `dp` replicas of `tp` ranks; B sequences are split over the
    replicas, and within one over `pp` micro-batches that follow each other through the stages.

    Attributes
    ----------
    tp : int
        Tensor-parallel degree: ranks that share each matrix.
    dp : int
        Data-parallel degree: replicas that share the sequences.
    pp : int
        Pipeline-parallel degree: stages that share the layers, taken to be equally long.
    ep : bool
        Whether routed experts are kept whole and spread over the ``tp dp`` devices of a stage
        (routing balanced over them), rather than each one sliced over `tp`.
    devices_per_node : int
        The ranks of a replica are neighbours, then the replicas of a stage, then the stages.
    """

    tp: int = 1
    dp: int = 1
    pp: int = 1
    ep: bool = False
    devices_per_node: int = 8

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "pp", "devices_per_node"):
            whole_array(getattr(self, name), name, low=1)

    @property
    def stage(self) -> int:
        """Devices of one pipeline stage."""
        return self.tp * self.dp

    @property
    def devices(self) -> int:
        """All devices."""
        return self.stage * self.pp

    @property
    def hops_between_nodes(self) -> int:
        """Stages whose successor is in another node."""
        node = [s * self.stage // self.devices_per_node for s in range(self.pp)]
        return sum(a != b for a, b in pairwise(node))

    def shard(self, architecture: Architecture) -> Architecture:
        """Return what one device of a stage that had all layers would hold.

        Raises
        ------
        DomainError
            When the degrees do not divide the model, or there are no experts to spread.
        """
        if self.ep and not any(architecture.moe_layers()):
            raise DomainError(f"{architecture.name} has no experts: ep must be off")
        if self.pp > max(architecture.n_layers, 1):
            raise DomainError(
                f"{architecture.name}: pp must be at most its {architecture.n_layers} layers; "
                f"got {self.pp}"
            )
        return architecture.shard(self.tp, expert_ranks=self.stage if self.ep else None)

    def where_spread(self, architecture: Architecture) -> Layout:
        """Return the layout for a model that may have no experts to spread."""
        return self if any(architecture.moe_layers()) else replace(self, ep=False)

    def check_nodes(self) -> None:
        """Refuse a replica or a stage that lies across the edge of a node.

        Raises
        ------
        DomainError
        """
        node = self.devices_per_node
        if self.devices <= node:
            return
        for size, what in ((self.tp, "tp"), (self.stage, "tp x dp")):
            if node % size and size % node:
                raise DomainError(
                    f"{what} must divide a node's {node} devices or fill whole nodes; got {size}"
                )

    def micro_batches(self, B: ArrayLike) -> Floats:
        """Return how many micro-batches are on their way through the pipeline at once. [-]"""
        own = np.asarray(B, dtype=np.float64) / self.dp
        return np.clip(own, 1.0, self.pp)

    def of_replica(self, B: ArrayLike) -> Floats:
        """Return the sequences of a micro-batch on one replica: the mean, at least one."""
        batch = np.asarray(B, dtype=np.float64)
        return np.maximum(batch / (self.dp * self.pp), np.minimum(batch, 1.0))

    def of_stage(self, B: ArrayLike) -> Floats:
        """Return the sequences of a micro-batch on all replicas."""
        batch = np.asarray(B, dtype=np.float64)
        return np.maximum(batch / self.pp, np.minimum(batch, 1.0))


def experts_touched(experts: ArrayLike, top_k: ArrayLike, tokens: ArrayLike) -> Floats:
    r"""Return the expected number of distinct experts that `tokens` tokens are routed to.

    .. math:: E \left(1 - (1 - k/E)^T\right)

    Parameters
    ----------
    experts, top_k : array_like
        Experts of a layer, E, and experts that one token uses, k. [-]
    tokens : array_like
        Tokens routed uniformly and independently, T; may be fractional. [token]

    Returns
    -------
    float or ndarray
        [-], 0 to experts.

    Raises
    ------
    DomainError
        When an argument is out of range.

    Examples
    --------
    >>> float(experts_touched(4, 2, 3))
    3.5
    """
    e = real_array(experts, "experts", low=1)
    t = real_array(tokens, "tokens", low=0)
    k = real_array(top_k, "top_k", low=0)
    if np.any(k > e):
        raise DomainError(f"top_k must be at most the {e.max():g} experts; got {k.max():g}")
    every = np.where(t > 0, e, 0.0)
    share = np.where(k < e, k / e, 0.5)  # top_k = E touches all: its logarithm is not needed
    spread = -e * np.expm1(t * np.log1p(-share))
    return unwrap(np.where(k == e, every, np.where(t == 1, k, spread)))


def pass_operators(
    architecture: Architecture,
    *,
    B: ArrayLike,
    W: ArrayLike = 1,
    L: ArrayLike = 0,
    layout: Layout | None = None,
    kv_reread: float = 0.0,
    expert_overlap: float = 0.0,
    head_rows: ArrayLike | None = None,
    fuse: bool = True,
) -> tuple[Operator, ...]:
    """Return the operators of one pass on one device, in a pipeline on one of each stage.

    Parameters
    ----------
    architecture : Architecture
        The whole model; it is sharded here.
    B, W, L : array_like
        Sequences [-], positions per sequence [token], context [token]. Broadcast.
    layout : Layout, optional
        Division over devices, which adds collectives; one device by default.
    kv_reread : float
        r: 0, the KV cache is read once for all W positions; 1, once per position.
    expert_overlap : float
        Share of routing choices that extra positions of a sequence have in common with its
        first: 0 independent, 1 identical. B W rows route like B (1 + (W - 1)(1 - overlap)).
    head_rows : array_like, optional
        Rows per sequence that go through the LM head; W by default. [token]
    fuse : bool
        Whether the input fusion of a draft head runs in this pass.

    Raises
    ------
    DomainError
        When an argument is out of range or the layout does not divide the model.
    """
    layout = layout or Layout()
    sharded = layout.shard(architecture)
    everyone = real_array(B, "batch", low=0)
    batch = layout.of_replica(everyone)
    width = real_array(W, "W", low=0, unit="token")
    context = real_array(L, "context", low=0, unit="token")
    reread = real_array(kv_reread, "kv_reread", low=0, high=1)
    overlap = real_array(expert_overlap, "expert_overlap", low=0, high=1)
    rows = batch * width
    experts_see = layout.of_stage(everyone) if layout.ep else batch
    operators: list[Operator] = []
    for layer, count in sharded.distinct_layers().items():
        sizes = _Sizes(batch, width, context, reread, experts_see, overlap)
        operators += _layer_operators(sharded, layer, count, sizes)
    fusion = sharded.fusion_linear if fuse else None
    if fusion is not None:
        operators.append(_gemm(sharded, fusion, 1, rows, "weight GEMMs"))
        if sharded.fusion is not None and sharded.fusion.input_norms:
            each = fusion.inputs * BYTES[architecture.dtype]
            norms = sharded.fusion.input_norms
            operators.append(_elementwise("fusion norm", norms, 2 * rows * each, weights=each))
    hidden = architecture.hidden_size * BYTES[architecture.dtype]
    extra_norms = int(sharded.final_norm) + (
        sharded.fusion.norms if fusion is not None and sharded.fusion is not None else 0
    )
    operators.append(_norm(sharded, extra_norms, rows))
    if sharded.layers:  # a Medusa head starts from the target's feature, not from a token
        operators.append(_elementwise("embedding", 1, 2 * rows * hidden))
    head = rows if head_rows is None else batch * real_array(head_rows, "head_rows", low=0)
    operators.append(_gemm(sharded, sharded.lm_head, 1, head, "LM head"))
    operators += _collectives(architecture, layout, rows, head)
    return tuple(operators)


class _Sizes(NamedTuple):
    """What a pass is over; `everyone`: the sequences whose tokens reach this device's experts."""

    batch: Floats
    width: Floats
    context: Floats
    reread: Floats
    everyone: Floats
    overlap: Floats

    @property
    def rows(self) -> Floats:
        return self.batch * self.width

    @property
    def again(self) -> Floats:
        """How often what all positions share is read."""
        return 1 + self.reread * np.maximum(self.width - 1, 0)

    def read(self, cached: Floats, picks: int | None) -> Floats:
        """Return what a sequence reads of `cached` entries, of which each position picks some.

        Positions pick their own: all of them differ, as far as there are entries, and where
        nothing is reused (r = 1) each position reads all that it picked.
        """
        if picks is None:
            return cached * self.again
        width = np.maximum(self.width, 1)
        together = np.minimum(cached, picks * width)
        own = width * np.minimum(cached, picks)
        return np.asarray((1 - self.reread) * together + self.reread * own)

    @property
    def routed(self) -> Floats:
        """Rows that route independently, of all that reach this device's experts."""
        return self.everyone * (1 + np.maximum(self.width - 1, 0) * (1 - self.overlap))


def _layer_operators(
    a: Architecture, layer: Layer, count: int, sizes: _Sizes
) -> Iterator[Operator]:
    for linear in layer.linears(a.hidden_size):
        yield _gemm(a, linear, count, sizes.rows, "weight GEMMs")
    yield _norm(a, count * layer.norms, sizes.rows)
    mixer = layer.mixer
    if mixer is not None and mixer.norm_params:
        yield _elementwise(  # read and write what is normalised
            "inner norm",
            count,
            2.0 * sizes.rows * mixer.normed_elements * BYTES[a.dtype],
            weights=mixer.norm_params * BYTES[a.dtype],
        )
    if isinstance(mixer, Recurrent):
        yield _state(a, mixer, count, sizes)
    elif isinstance(mixer, CompressedAttention):
        yield from _compressed(a, mixer, count, sizes)
    elif mixer is not None:
        yield from _attention(a, mixer, count, sizes)
    if isinstance(layer.mlp, MoE):
        yield from _experts(a, layer, layer.mlp, count, sizes)
    elif layer.mlp is not None:
        yield _activation(a, count, sizes.rows, layer.mlp.width)


_KERNELS = {
    "norm": "add-norm",
    "inner norm": "add-norm",
    "activation": "silu-mul",
    "rotary and KV write": "kv-write",
}
"""Kernel that stands for an elementwise operator in measurements; ``add`` for all others."""


def _elementwise(name: str, count: float, moved: Floats, weights: float = 0.0) -> Operator:
    return Operator(
        name=name,
        kind="elementwise",
        dtype=_KERNELS.get(name, "add"),
        group="elementwise",
        count=count,
        weight_bytes=weights,
        activation_bytes=moved,
    )


def gemm(architecture: Architecture, linear: Linear) -> Operator:
    """Return the product of one row with one matrix of a model."""
    return _gemm(architecture, linear, 1, np.asarray(1.0), "weight GEMMs")


def _gemm(a: Architecture, linear: Linear, count: float, rows: Floats, group: str) -> Operator:
    """A matrix product of `rows` rows: weights once, activations in and out."""
    inputs, outputs = linear.inputs * linear.copies, linear.outputs * linear.copies
    dtype, other = _multiplied_in(a, linear.role)
    return Operator(
        name=linear.name,
        kind="gemm",
        group=group,
        count=count,
        flops=2.0 * rows * linear.weights,
        weight_bytes=a.linear_bytes(linear),
        activation_bytes=rows * (inputs + outputs) * BYTES[a.dtype],
        compute_dtype=dtype,
        else_dtype=other,
        dtype=_stored(a, linear.role),
        shape={"m": rows, "n": linear.outputs, "k": linear.inputs, "copies": linear.copies},
    )


_ARITHMETIC = {"nvfp4": "fp4"}


def _multiplied_in(a: Architecture, role: str) -> tuple[str, str | None]:
    """Return the format a product runs in, and the one for devices that lack it.

    Formats of 4 bits run weight-only, in the activation format, where there is no arithmetic
    for them; 8-bit formats need theirs.
    """
    quantisation = a.quantisation_of(role)
    if quantisation is None or quantisation.weight_only:
        return a.dtype, None
    stored = quantisation.dtype
    if stored in _ARITHMETIC:
        return _ARITHMETIC[stored], a.dtype
    return stored, None


def _stored(a: Architecture, role: str) -> str:
    """Return the format that measurements of a matrix are filed by."""
    quantisation = a.quantisation_of(role)
    if quantisation is None:
        return a.dtype
    kind = " weights" if quantisation.weight_only else "_block" if quantisation.block else ""
    return f"{quantisation.dtype}{kind}"


def _norm(a: Architecture, count: float, rows: Floats) -> Operator:
    """A norm with its residual addition: two vectors read, two written."""
    elements, each = a.hidden_size, BYTES[a.dtype]
    moved = 4.0 * rows * elements * each
    return _elementwise("norm", count, moved, weights=a.norm_size * elements * each)


def _attention(
    a: Architecture, attention: Attention | LatentAttention, count: int, sizes: _Sizes
) -> Iterator[Operator]:
    rows, value = sizes.rows, BYTES[a.dtype]
    cap = np.asarray(min(attention.window or np.inf, attention.chunk or np.inf))
    within = np.minimum(sizes.context, cap)
    seen = np.minimum(within, attention.index_topk or np.inf)
    read = sizes.read(within, attention.index_topk)
    cached = attention.kv_elements * BYTES[a.kv_dtype]
    new = 2 * attention.query_width * value + attention.kv_elements * value + cached
    # rotary embedding in place, new keys and values into the cache
    yield _elementwise("rotary and KV write", count, rows * new)
    if attention.index_heads:
        yield _index_scores(a, attention, count, sizes, sizes.context)
    kernels = 2 if attention.cross else 1  # which share the context
    yield Operator(
        name="attention",
        kind="mla" if isinstance(attention, LatentAttention) else "attention",
        group="attention",
        count=count * kernels,
        flops=rows * seen * attention.flops_per_pair / kernels,
        kv_bytes=sizes.batch * read * cached / kernels,
        activation_bytes=rows * (attention.query_width + attention.output_width) * value,
        compute_dtype=a.dtype,
        dtype=a.kv_dtype,
        shape={
            "batch": sizes.batch,
            "kv_heads": getattr(attention, "kv_heads", 1),
            "heads": attention.heads,
            "width": sizes.width,
            "context": read / kernels,
        },
    )


def _index_scores(
    a: Architecture,
    attention: Attention | LatentAttention | CompressedAttention,
    count: int,
    sizes: _Sizes,
    keys: Floats,
) -> Operator:
    """An indexer's score of every cached index key."""
    index = attention.index_heads * attention.index_dim
    return Operator(
        name="index scores",
        kind="index",
        group="attention",
        count=count,
        flops=2.0 * sizes.rows * keys * index,
        kv_bytes=sizes.batch * keys * attention.index_dim * BYTES[a.kv_dtype] * sizes.again,
        activation_bytes=sizes.rows * index * BYTES[a.dtype],
        compute_dtype=a.dtype,
    )


def _compressed(
    a: Architecture, attention: CompressedAttention, count: int, sizes: _Sizes
) -> Iterator[Operator]:
    """Attention to a window and to compressed entries, and the mixing of residual streams.

    There are L / ratio entries (a fraction, so that time grows evenly). An open window is
    written token by token and read once when it closes.
    """
    context, rows = sizes.context, sizes.rows
    value, cache = BYTES[a.dtype], BYTES[a.kv_dtype]
    recent = np.minimum(context, attention.window)
    entries = context / attention.ratio if attention.ratio else np.zeros_like(context)
    seen = np.minimum(entries, attention.index_topk or np.inf)
    read = recent * sizes.again + sizes.read(entries, attention.index_topk)
    kept = sum(attention.kept().values()) + attention.index_dim / (attention.ratio or 1)
    partial = (1 + attention.series) * attention.partial_elements * PARTIAL_BYTES
    new = (2 * attention.query_width + attention.kv_elements) * value + kept * cache + partial
    yield _elementwise("rotary and KV write", count, rows * new)
    if attention.index_heads:
        yield _index_scores(a, attention, count, sizes, entries)
    yield Operator(
        name="attention",
        kind="compressed",
        group="attention",
        count=count,
        flops=rows * (recent + seen) * attention.flops_per_pair,
        kv_bytes=sizes.batch * read * attention.kv_elements * cache,
        activation_bytes=rows * (attention.query_width + attention.output_width) * value,
        compute_dtype=a.dtype,
    )
    if attention.streams > 1:  # around both parts: all streams and the part's result in, all out
        moved = (2 * attention.streams + 1) * a.hidden_size * value
        yield _elementwise("stream mixing", 2 * count, rows * moved)


def _state(a: Architecture, mixer: Recurrent, count: int, sizes: _Sizes) -> Operator:
    """A recurrent state: read once, and written for every position, to roll back to."""
    state = mixer.state_bytes
    moved = mixer.query_width + mixer.output_width
    return Operator(
        name="state update",
        kind="state",
        group="state",
        count=count,
        flops=sizes.rows * float(mixer.flops_per_row),
        kv_bytes=sizes.batch * (1 + sizes.width) * state,
        activation_bytes=sizes.rows * moved * BYTES[a.dtype],
        compute_dtype=a.dtype,
    )


def _experts(
    a: Architecture, layer: Layer, moe: MoE, count: int, sizes: _Sizes
) -> Iterator[Operator]:
    """Routed experts, each touched one's weights read once, and the shared expert's activation.

    The routed ones are one operator of four kernels: gate and up, activation, down, combine.
    """
    value, hidden = BYTES[a.dtype], a.hidden_size
    rows = sizes.rows
    pairs = sizes.everyone * sizes.width * moe.top_k / moe.ranks
    touched = experts_touched(moe.experts, moe.top_k, sizes.routed)
    touched = np.maximum(touched / moe.ranks, np.minimum(touched, 1.0))  # where a pass waits
    weights = sum(a.expert_bytes(moe, layer.expert_role))
    dtype, other = _multiplied_in(a, layer.expert_role)
    moved = (moe.matrices + 3) * moe.width + 3 * hidden  # in and out of the four, a routed row
    yield Operator(
        name="routed experts",
        kind="experts",
        group="experts",
        count=count,
        launches=4,
        flops=2.0 * pairs * moe.expert_weights(hidden),
        weight_bytes=touched * weights,
        activation_bytes=(pairs * moved + rows * hidden) * value,
        compute_dtype=dtype,
        else_dtype=other,
        dtype=_stored(a, layer.expert_role),
        shape={
            "m": sizes.everyone * sizes.width,
            "top_k": moe.top_k,
            "experts": moe.experts,
            "ranks": moe.ranks,
            "touched": touched,
            "hidden": hidden,
            "width": moe.width,
            "weight_bytes": weights,
        },
    )
    if moe.shared_width:
        yield _activation(a, count, rows, moe.shared_width)
    yield _elementwise("top-k", count, rows * moe.experts * value)


def _activation(a: Architecture, count: float, rows: Floats, width: int) -> Operator:
    """SiLU times gate: two vectors read, one written."""
    return _elementwise("activation", count, 3.0 * rows * width * BYTES[a.dtype])


def _collectives(a: Architecture, layout: Layout, rows: Floats, head: Floats) -> Iterator[Operator]:
    """All-reduces over tp, all-to-alls of spread experts, logits, and the pipeline's sends.

    Experts that are spread over several replicas take two all-to-alls a layer: dispatch, a copy
    of the row (in the experts' format) to each device that has a chosen expert, and combine, each
    of a replica's tp ranks for its share of the rows; the all-reduce that ends the layer then
    gives every rank all of them.
    Spread over the ranks of one replica they need that all-reduce alone, as sliced ones do.
    """
    value, tp = BYTES[a.dtype], layout.tp
    vector = rows * a.hidden_size * value
    if tp > 1:
        yield _collective("all-reduce", tp, _reductions(a), vector)
        yield _collective("all-gather", tp, 1, head * a.head_vocab_size * value, "of logits")
    if layout.ep and layout.dp > 1:
        for moe, role, count in a.moe_layers():
            copies = experts_touched(layout.stage, 1, moe.top_k)  # devices that have any of k
            sent = rows / tp * copies * a.hidden_size
            dtype, _ = _multiplied_in(a, role)
            narrow = min(BYTES.get(dtype, value), value)
            yield _collective("all-to-all", layout.stage, count, sent * narrow, "dispatch")
            yield _collective("all-to-all", layout.stage, count, sent * value, "combine")
    if layout.pp > 1:
        away = layout.hops_between_nodes
        hops: dict[Collective, int] = {
            "send": layout.pp - 1 - away,
            "send between nodes": away,
        }
        used = [kind for kind, count in hops.items() if count]
        for kind in used:
            yield _collective(kind, layout.stage, hops[kind], vector)
        yield _collective(used[-1], layout.stage, 1, 4.0 * rows, "of token ids")


def _collective(
    collective: Collective, ranks: int, count: float, size: Floats, what: str = ""
) -> Operator:
    return Operator(
        name=f"{collective} {what}".strip(),
        kind="collective",
        group="collectives",
        count=count,
        collective=collective,
        ranks=ranks,
        link_bytes=size,
    )


def _reductions(a: Architecture) -> int:
    """One for the embedding and one for each product whose inputs are split over the ranks."""
    found = 0
    for layer, count in a.layers:
        mixing = layer.mixer.reductions if layer.mixer is not None else 0
        found += count * (mixing + (layer.mlp is not None))
    return found + 1 if a.layers else 0
