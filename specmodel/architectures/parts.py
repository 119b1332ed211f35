"""The parts a layer is made of: mixers (attention, recurrent states) and feed-forward networks.

Each part knows its matrices; parameter counts, weight bytes and (in `specmodel.costs`) FLOPs
all follow from that one list, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from specmodel.errors import ArchitectureError, DomainError

Role = Literal[
    "attention", "attention output", "mlp", "experts", "shared", "router", "head", "fusion", "kept"
]
"""What a matrix belongs to, as far as quantisation tells them apart; ``kept``: left out of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One weight matrix, or several of the same shape that run as one kernel.

    `inputs` and `outputs` are per matrix; `copies` matrices run side by side. `bias` counts
    bias elements over all copies. `split` is what tensor parallelism divides, where the part
    says no more of it.
    """

    name: str
    inputs: int
    outputs: int
    role: Role
    copies: int = 1
    bias: int = 0
    split: Literal["outputs", "inputs"] = "outputs"

    @property
    def weights(self) -> int:
        """Weight elements, biases left out."""
        return self.inputs * self.outputs * self.copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Softmax attention with per-head keys and values (MHA, GQA or MQA).

    Attributes
    ----------
    heads, kv_heads, head_dim : int
    v_dim : int or None
        Width of a value head where it is not that of a key head.
    window : int or None
        Context that is kept and read [token]; None: all of it.
    chunk : int or None
        Context is read within its chunk of so many tokens (Llama 4) [token].
    qkv_bias, output_bias : bool
    qk_norm : {None, "head", "full"}
        Norms on queries and keys: one of `head_dim` each, or over the whole projections.
    sinks : bool
        One learnt logit for each head.
    output_gate : bool
        A gate as wide as the queries, projected with them.
    shared_kv : bool
        Keys serve as values: one tensor is projected and kept.
    input_width : int or None
        Width that queries, keys and values are projected from, when not the hidden size
        (EAGLE-3: twice it).
    index_heads, index_dim, index_topk
        With an indexer (MiniMax-M3) as in `LatentAttention`, each of whose heads selects for one
        head of keys and values: tokens in whole blocks.
    cross : bool
        The layer attends to an encoder's output as well (T5), with a query and an output
        projection of its own. A token of the context is kept and read by one of the two.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int | None = None
    window: int | None = None
    chunk: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["head", "full"] | None = None
    sinks: bool = False
    output_gate: bool = False
    shared_kv: bool = False
    input_width: int | None = None
    index_heads: int = 0
    index_dim: int = 0
    index_topk: int | None = None
    cross: bool = False

    state_elements: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ArchitectureError(
                f"{self.kv_heads} heads of keys and values must divide {self.heads} heads"
            )

    @property
    def kind(self) -> str:
        """The usual name of the variant."""
        name = {self.heads: "MHA", 1: "MQA"}.get(self.kv_heads, "GQA")
        if self.cross:
            return f"{name} and cross-attention"
        if self.index_topk:
            return f"{name}, best {self.index_topk}"
        if self.window:
            return f"{name}, window {self.window}"
        return f"{name}, chunks of {self.chunk}" if self.chunk else name

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.v_dim or self.head_dim

    @property
    def kv_elements(self) -> int:
        """Cached elements per token."""
        return self.kv_heads * (self.head_dim + (0 if self.shared_kv else self.value_dim))

    @property
    def reductions(self) -> int:
        """All-reduces that tensor parallelism needs."""
        return 2 if self.cross else 1

    def kept(self) -> dict[int | None, int]:
        """Return the cached elements per token by the window that caps them."""
        return {self.window: self.kv_elements}

    @property
    def norm_params(self) -> int:
        """Parameters besides matrices: norms on queries and keys (of an indexer too), sinks."""
        norms = {
            None: 0,
            "head": 2 * self.head_dim,
            "full": (self.heads + self.kv_heads) * self.head_dim,
        }[self.qk_norm]
        return norms + 2 * self.index_dim + (self.heads if self.sinks else 0)

    @property
    def normed_elements(self) -> int:
        """Elements per row that norms inside the attention go over."""
        own = (self.heads + self.kv_heads) * self.head_dim if self.qk_norm else 0
        return own + (self.index_heads + 1) * self.index_dim

    @property
    def flops_per_pair(self) -> int:
        """FLOPs for one query position against one cached position."""
        return 2 * self.heads * (self.head_dim + self.value_dim)

    @property
    def query_width(self) -> int:
        """Elements of all query heads, a row."""
        return self.heads * self.head_dim

    @property
    def output_width(self) -> int:
        """Elements of all output heads, a row."""
        return self.heads * self.value_dim

    def linears(self, hidden: int) -> Iterator[Linear]:
        """Yield the weight matrices."""
        gate = self.output_width if self.output_gate else 0
        values = 0 if self.shared_kv else self.kv_heads * self.value_dim
        qkv = self.query_width + gate + self.kv_heads * self.head_dim + values
        width = self.input_width or hidden
        yield Linear(
            name="qkv",
            inputs=width,
            outputs=qkv,
            bias=qkv if self.qkv_bias else 0,
            role="attention",
        )
        yield Linear(
            name="attention output",
            inputs=self.output_width,
            outputs=hidden,
            bias=hidden if self.output_bias else 0,
            role="attention output",
        )
        if self.cross:
            yield Linear(name="cross q", inputs=hidden, outputs=self.query_width, role="attention")
            yield Linear(
                name="cross output",
                inputs=self.output_width,
                outputs=hidden,
                role="attention output",
            )
        if self.index_heads:
            yield Linear(
                name="index q and k",
                inputs=hidden,
                outputs=(self.index_heads + 1) * self.index_dim,
                role="attention",
            )

    def shard(self, tp: int) -> Attention:
        """Return one rank's share under tensor parallelism; KV heads replicate past their count."""
        divide(self.heads, tp, "attention heads")
        if self.kv_heads % tp and tp % self.kv_heads:
            raise DomainError(
                f"tp must divide the {self.kv_heads} KV heads or be a multiple of them; got {tp}"
            )
        return replace(
            self,
            heads=self.heads // tp,
            kv_heads=max(1, self.kv_heads // tp),
            index_heads=self.index_heads and max(1, self.index_heads // tp),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (MLA), decoded in its absorbed form.

    The cache holds one latent vector of ``kv_lora_rank + rope_dim`` per token, shared by
    all heads. In the absorbed form the up-projection is applied to the query and to the
    attention output instead of to the cache (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    With an indexer (DeepSeek sparse attention, DeepSeek-V3.2) a light scorer of `index_heads`
    heads looks at every cached key of `index_dim`, and attention reads the best `index_topk`.
    """

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    bias: bool = False
    index_heads: int = 0
    index_dim: int = 0
    index_topk: int | None = None

    window: ClassVar[None] = None
    chunk: ClassVar[None] = None
    cross: ClassVar[bool] = False
    state_elements: ClassVar[int] = 0
    reductions: ClassVar[int] = 1

    @property
    def kind(self) -> str:
        """The usual name of the variant."""
        return f"MLA, best {self.index_topk}" if self.index_topk else "MLA"

    def kept(self) -> dict[int | None, int]:
        """Return the cached elements per token by the window that caps them: all are kept."""
        return {None: self.kv_elements}

    @property
    def kv_elements(self) -> int:
        """Cached elements per token that attention reads; index keys are apart."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def norm_params(self) -> int:
        """Parameters of norms inside the attention (the index key's has a bias)."""
        return self.kv_lora_rank + (self.q_lora_rank or 0) + 2 * self.index_dim

    @property
    def normed_elements(self) -> int:
        """Elements per row that norms inside the attention go over."""
        return self.kv_lora_rank + (self.q_lora_rank or 0) + self.index_dim

    @property
    def flops_per_pair(self) -> int:
        """FLOPs for one query position against one cached position."""
        return 2 * self.heads * (2 * self.kv_lora_rank + self.rope_dim)

    @property
    def query_width(self) -> int:
        """Elements of all absorbed query heads, a row."""
        return self.heads * self.kv_elements

    @property
    def output_width(self) -> int:
        """Elements of all latent output heads, a row."""
        return self.heads * self.kv_lora_rank

    def linears(self, hidden: int) -> Iterator[Linear]:
        """Yield the weight matrices."""
        latent = self.kv_lora_rank + self.rope_dim
        q_width = self.heads * (self.nope_dim + self.rope_dim)
        down = latent + (self.q_lora_rank or q_width)
        yield Linear(
            name="q and kv down",
            inputs=hidden,
            outputs=down,
            bias=(down if self.q_lora_rank else latent) if self.bias else 0,
            role="attention",
        )
        if self.q_lora_rank is not None:
            yield Linear(name="q up", inputs=self.q_lora_rank, outputs=q_width, role="attention")
        yield Linear(
            name="absorbed k up",
            inputs=self.nope_dim,
            outputs=self.kv_lora_rank,
            copies=self.heads,
            role="attention",
        )
        yield Linear(
            name="absorbed v up",
            inputs=self.kv_lora_rank,
            outputs=self.v_dim,
            copies=self.heads,
            role="attention",
        )
        yield Linear(
            name="attention output",
            inputs=self.heads * self.v_dim,
            outputs=hidden,
            bias=hidden if self.bias else 0,
            role="attention output",
        )
        if self.index_heads:
            yield Linear(
                name="index q",
                inputs=self.q_lora_rank or hidden,
                outputs=self.index_heads * self.index_dim,
                role="attention",
            )
            yield Linear(
                name="index k and weights",
                inputs=hidden,
                outputs=self.index_dim + self.index_heads,
                role="attention",
            )

    def shard(self, tp: int) -> LatentAttention:
        """Return one rank's share: heads are split, latent cache and indexer are replicated."""
        divide(self.heads, tp, "attention heads")
        return replace(self, heads=self.heads // tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent:
    """A mixer with a constant state per sequence: gated delta rule, Mamba or Mamba-2.

    Attributes
    ----------
    name : str
        ``gated delta``, ``mamba`` or ``mamba2``.
    matrices : tuple of Linear
        Projections in and out, given for the whole model.
    convolved : int
        Channels of the short convolution.
    kernel : int
        Its length [token].
    recurrent_elements : int
        Elements of the recurrent state per sequence, besides the convolution's.
    vector_params : int
        Parameters besides matrices: convolution, decay, norms.
    heads : int
        What tensor parallelism splits.
    state_bytes_each : float
        Bytes of one state element (engines keep it in float32 unless told). [B]
    flops_per_element : int
        FLOPs of one row for each state element. [FLOP]
    """

    name: str
    matrices: tuple[Linear, ...]
    convolved: int
    kernel: int
    recurrent_elements: int
    vector_params: int
    heads: int
    state_bytes_each: float = 4.0
    flops_per_element: int = 6

    window: ClassVar[None] = None
    chunk: ClassVar[None] = None
    kv_elements: ClassVar[int] = 0
    flops_per_pair: ClassVar[int] = 0
    normed_elements: ClassVar[int] = 0

    def kept(self) -> dict[int | None, int]:
        """Return no cached elements: the state does not grow."""
        return {}

    @property
    def kind(self) -> str:
        """The usual name of the variant."""
        return self.name

    @property
    def norm_params(self) -> int:
        """Parameters besides matrices."""
        return self.vector_params

    @property
    def state_elements(self) -> int:
        """Elements kept per sequence: the recurrent state and the convolution's tail."""
        return self.recurrent_elements + self.convolved * (self.kernel - 1)

    @property
    def state_bytes(self) -> float:
        """Bytes kept per sequence; the convolution's tail is kept in 16 bits. [B]"""
        tail = self.convolved * (self.kernel - 1)
        return self.recurrent_elements * self.state_bytes_each + 2.0 * tail

    @property
    def reductions(self) -> int:
        """All-reduces that tensor parallelism needs: one for each product with split inputs."""
        return sum(m.split == "inputs" for m in self.matrices)

    @property
    def query_width(self) -> int:
        """Elements a row brings to the state update."""
        return self.convolved

    @property
    def output_width(self) -> int:
        """Elements a row takes from the state."""
        return self.matrices[-1].inputs

    @property
    def flops_per_row(self) -> int:
        """FLOPs of one row: decay, write and read the state; the delta rule reads it twice."""
        return self.flops_per_element * self.recurrent_elements + 2 * self.convolved * self.kernel

    def linears(self, hidden: int) -> Iterator[Linear]:
        """Yield the weight matrices."""
        yield from self.matrices

    def shard(self, tp: int) -> Recurrent:
        """Return one rank's share: heads are split with their projections."""
        if tp == 1:
            return self
        divide(self.heads, tp, "state heads")
        return replace(
            self,
            matrices=tuple(_split(m, tp) for m in self.matrices),
            convolved=-(-self.convolved // tp),
            recurrent_elements=self.recurrent_elements // tp,
            vector_params=-(-self.vector_params // tp),
            heads=self.heads // tp,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MLP:
    """A feed-forward network, gated (three matrices) or not (two)."""

    width: int
    gated: bool = True
    bias: bool = False

    @property
    def kind(self) -> str:
        """The usual name of the variant."""
        return "dense"

    def linears(self, hidden: int) -> Iterator[Linear]:
        """Yield the weight matrices."""
        up = self.width * (2 if self.gated else 1)
        name = "gate and up" if self.gated else "up"
        yield Linear(name=name, inputs=hidden, outputs=up, bias=up if self.bias else 0, role="mlp")
        yield Linear(
            name="down",
            inputs=self.width,
            outputs=hidden,
            bias=hidden if self.bias else 0,
            role="mlp",
        )

    def shard(self, tp: int, expert_ranks: int | None = None) -> MLP:
        """Return one rank's share; there are no experts to spread."""
        return replace(self, width=divide(self.width, tp, "feed-forward width"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """A mixture of experts: a router, routed experts and an always-active shared expert.

    Attributes
    ----------
    experts, top_k, width : int
    shared_width : int
        Summed width of the shared experts, 0 for none.
    shared_gate : bool
        The shared expert has its own scalar gate (Qwen2-MoE).
    gated : bool
        Experts are gated (three matrices) or not (two).
    bias : bool
        Router and experts have biases (gpt-oss).
    extra_params : int
        Parameters of the layer besides: routing corrections, scales.
    ranks : int
        Devices that the routed experts are spread over, whole ones, in equal numbers.
    """

    experts: int
    top_k: int
    width: int
    shared_width: int = 0
    shared_gate: bool = False
    gated: bool = True
    bias: bool = False
    extra_params: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise ArchitectureError(f"top_k must be 1 to {self.experts} experts; got {self.top_k}")

    @property
    def kind(self) -> str:
        """The usual name of the variant."""
        return f"MoE {self.experts} top-{self.top_k}"

    @property
    def held(self) -> int:
        """Routed experts that one device keeps."""
        return self.experts // self.ranks

    @property
    def matrices(self) -> int:
        """Matrices of one expert."""
        return 3 if self.gated else 2

    def expert_weights(self, hidden: int) -> int:
        """Return the weights of one routed expert."""
        return self.matrices * self.width * hidden

    def expert_biases(self, hidden: int) -> int:
        """Return the bias elements of one routed expert."""
        return (self.matrices - 1) * self.width + hidden if self.bias else 0

    def linears(self, hidden: int) -> Iterator[Linear]:
        """Yield the matrices that every token goes through; the routed experts are apart."""
        yield Linear(
            name="router",
            inputs=hidden,
            outputs=self.experts,
            bias=self.experts if self.bias else 0,
            role="router",
        )
        if self.shared_width:
            up = (self.matrices - 1) * self.shared_width
            yield Linear(name="shared gate and up", inputs=hidden, outputs=up, role="shared")
            yield Linear(
                name="shared down", inputs=self.shared_width, outputs=hidden, role="shared"
            )
        if self.shared_gate:
            yield Linear(name="shared gate", inputs=hidden, outputs=1, role="router")

    def shard(self, tp: int, expert_ranks: int | None = None) -> MoE:
        """Return one rank's share: every expert's width is split, or whole experts are spread."""
        shared = divide(self.shared_width, tp, "shared expert width")
        if expert_ranks is not None:
            divide(self.experts, expert_ranks, "experts", flag="tp x dp")
            return replace(self, shared_width=shared, ranks=expert_ranks)
        width = divide(self.width, tp, "expert width")
        return replace(self, width=width, shared_width=shared)


FeedForward = MLP | MoE


_MOST_RANKS = 64  # that an error message suggests


def divide(width: int, tp: int, what: str, flag: str = "tp") -> int:
    """Return one rank's share of a width, or raise naming the degrees that would divide it."""
    if width % tp:
        would = [str(n) for n in range(2, min(width, _MOST_RANKS) + 1) if width % n == 0]
        near = ", ".join(would) or "none"
        raise DomainError(f"{flag} must divide the {width} {what}; got {tp} ({near} would)")
    return width // tp


def _split(matrix: Linear, tp: int) -> Linear:
    """Return one rank's share of a matrix, its bias with its outputs."""
    if matrix.split == "inputs":
        return replace(matrix, inputs=-(-matrix.inputs // tp))
    return replace(matrix, outputs=-(-matrix.outputs // tp), bias=-(-matrix.bias // tp))
