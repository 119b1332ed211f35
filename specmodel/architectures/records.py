"""What a model is made of, as far as its cost is concerned.

A record knows its matrices; parameter counts, weight bytes and (in `specmodel.costs`)
FLOPs all follow from that one list, so they cannot disagree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from specmodel.dtypes import BYTES
from specmodel.errors import DomainError


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One weight matrix, or several of the same shape that run as one kernel.

    `inputs` and `outputs` are per matrix; `copies` matrices run side by side. `bias`
    counts bias elements over all copies. `quantised` matrices take the weight dtype,
    the others the activation dtype.
    """

    name: str
    inputs: int
    outputs: int
    copies: int = 1
    bias: int = 0
    quantised: bool = True

    @property
    def weights(self) -> int:
        """Weight elements, biases left out."""
        return self.inputs * self.outputs * self.copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Softmax attention with per-head keys and values (MHA, GQA or MQA).

    `window` caps the context that is kept and read [token]; None reads all of it.
    `input_width` is the width of the vector that queries, keys and values are projected
    from, when it is not the hidden size (EAGLE-3: twice it).
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    input_width: int | None = None

    @property
    def kind(self) -> str:
        """The usual name of the variant."""
        name = {self.heads: "MHA", 1: "MQA"}.get(self.kv_heads, "GQA")
        return f"{name}, window {self.window}" if self.window else name

    @property
    def kv_elements(self) -> int:
        """Cached elements per token."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def norm_params(self) -> int:
        """Parameters of norms inside the attention."""
        return 2 * self.head_dim if self.qk_norm else 0

    @property
    def normed_elements(self) -> int:
        """Elements per row that norms inside the attention go over."""
        return (self.heads + self.kv_heads) * self.head_dim if self.qk_norm else 0

    @property
    def flops_per_pair(self) -> int:
        """FLOPs for one query position against one cached position."""
        return 4 * self.heads * self.head_dim

    def linears(self, hidden: int) -> Iterator[Linear]:
        """Yield the weight matrices."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        width = self.input_width or hidden
        yield Linear(name="qkv", inputs=width, outputs=qkv, bias=qkv if self.qkv_bias else 0)
        yield Linear(
            name="attention output",
            inputs=self.heads * self.head_dim,
            outputs=hidden,
            bias=hidden if self.output_bias else 0,
        )

    def shard(self, tp: int) -> Attention:
        """Return one rank's share under tensor parallelism; KV heads replicate past their count."""
        if self.heads % tp:
            raise DomainError(f"tp must divide the {self.heads} attention heads; got {tp}")
        if self.kv_heads % tp and tp % self.kv_heads:
            raise DomainError(
                f"tp must divide the {self.kv_heads} KV heads or be a multiple of them; got {tp}"
            )
        return replace(self, heads=self.heads // tp, kv_heads=max(1, self.kv_heads // tp))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (MLA), decoded in its absorbed form.

    The cache holds one latent vector of ``kv_lora_rank + rope_dim`` per token, shared by
    all heads. In the absorbed form the up-projection is applied to the query and to the
    attention output instead of to the cache (DeepSeek-V2, arXiv:2405.04434, section 2.1).
    """

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    bias: bool = False

    window: ClassVar[None] = None

    @property
    def kind(self) -> str:
        """The usual name of the variant."""
        return "MLA"

    @property
    def normed_elements(self) -> int:
        """Elements per row that norms inside the attention go over."""
        return self.norm_params

    @property
    def kv_elements(self) -> int:
        """Cached elements per token."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def norm_params(self) -> int:
        """Parameters of norms inside the attention."""
        return self.kv_lora_rank + (self.q_lora_rank or 0)

    @property
    def flops_per_pair(self) -> int:
        """FLOPs for one query position against one cached position."""
        return 2 * self.heads * (2 * self.kv_lora_rank + self.rope_dim)

    def linears(self, hidden: int) -> Iterator[Linear]:
        """Yield the weight matrices."""
        latent = self.kv_lora_rank + self.rope_dim
        q_width = self.heads * (self.nope_dim + self.rope_dim)
        if self.q_lora_rank is None:
            yield Linear(name="q", inputs=hidden, outputs=q_width)
            yield Linear(
                name="kv down", inputs=hidden, outputs=latent, bias=latent if self.bias else 0
            )
        else:
            down = self.q_lora_rank + latent
            yield Linear(
                name="q and kv down", inputs=hidden, outputs=down, bias=down if self.bias else 0
            )
            yield Linear(name="q up", inputs=self.q_lora_rank, outputs=q_width)
        yield Linear(
            name="absorbed k up", inputs=self.nope_dim, outputs=self.kv_lora_rank, copies=self.heads
        )
        yield Linear(
            name="absorbed v up", inputs=self.kv_lora_rank, outputs=self.v_dim, copies=self.heads
        )
        yield Linear(
            name="attention output",
            inputs=self.heads * self.v_dim,
            outputs=hidden,
            bias=hidden if self.bias else 0,
        )

    def shard(self, tp: int) -> LatentAttention:
        """Return one rank's share: heads are split, the latent cache is replicated."""
        if self.heads % tp:
            raise DomainError(f"tp must divide the {self.heads} attention heads; got {tp}")
        return replace(self, heads=self.heads // tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLP:
    """A gated feed-forward network (SwiGLU: three matrices)."""

    width: int
    bias: bool = False

    @property
    def kind(self) -> str:
        """The usual name of the variant."""
        return "dense"

    def linears(self, hidden: int) -> Iterator[Linear]:
        """Yield the weight matrices."""
        up = 2 * self.width
        yield Linear(name="gate and up", inputs=hidden, outputs=up, bias=up if self.bias else 0)
        yield Linear(
            name="down", inputs=self.width, outputs=hidden, bias=hidden if self.bias else 0
        )

    def shard(self, tp: int) -> MLP:
        """Return one rank's share."""
        return replace(self, width=_split(self.width, tp, "feed-forward width"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """A mixture of gated experts: a router, routed experts and an always-active shared expert.

    `shared_width` is the summed width of the shared experts (0: none); `shared_gate`
    says that the shared expert has its own scalar gate (Qwen2-MoE).
    """

    experts: int
    top_k: int
    width: int
    shared_width: int = 0
    shared_gate: bool = False

    @property
    def kind(self) -> str:
        """The usual name of the variant."""
        return f"MoE {self.experts} top-{self.top_k}"

    @property
    def expert_weights_per_hidden(self) -> int:
        """Weights of one routed expert, divided by the hidden size."""
        return 3 * self.width

    def linears(self, hidden: int) -> Iterator[Linear]:
        """Yield the matrices that every token goes through; the routed experts are apart."""
        yield Linear(name="router", inputs=hidden, outputs=self.experts, quantised=False)
        if self.shared_width:
            yield Linear(name="shared gate and up", inputs=hidden, outputs=2 * self.shared_width)
            yield Linear(name="shared down", inputs=self.shared_width, outputs=hidden)
        if self.shared_gate:
            yield Linear(name="shared gate", inputs=hidden, outputs=1, quantised=False)

    def shard(self, tp: int) -> MoE:
        """Return one rank's share: every expert's width is split."""
        return replace(
            self,
            width=_split(self.width, tp, "expert width"),
            shared_width=_split(self.shared_width, tp, "shared expert width"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer: attention, feed-forward, and `norms` norms of the hidden size."""

    attention: Attention | LatentAttention
    mlp: MLP | MoE
    norms: int = 2

    @property
    def kind(self) -> str:
        """A short description for people."""
        return f"{self.attention.kind} + {self.mlp.kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """The matrix in front of a draft head that merges its inputs into one hidden vector.

    `every_pass`: applied by each draft pass (EAGLE, MTP: token embedding and feature), or
    only to the target's features in the first one (EAGLE-3).
    """

    inputs: int
    bias: bool = False
    every_pass: bool = True
    norms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A transformer as its cost model sees it.

    Attributes
    ----------
    name : str
        For people.
    model_type : str
        As in ``config.json``.
    hidden_size, vocab_size : int
        Width of the residual stream; rows of the token embedding.
    layers : tuple of (Layer, int)
        Runs of identical layers in order, from the input on.
    tied_embeddings : bool
        Whether the LM head is the embedding table.
    dense_width : int or None
        Width of a dense feed-forward layer of this model (``intermediate_size``); it shapes a
        draft head that is derived from the model.
    head_vocab_size : int
        Rows of the LM head; smaller than `vocab_size` for a reduced draft vocabulary.
    dtype, weight_dtype, kv_dtype : str
        Of activations and unquantised weights, of quantised matrices, of the KV cache.
    scale_block : tuple of int or None
        A float32 scale for each such block of a quantised matrix; None: scales not counted.
    head_kind : str or None
        ``eagle``, ``eagle3``, ``mtp`` or ``medusa`` for a draft head, None for a whole model.
    fusion : Fusion or None
        Input fusion of a draft head.
    own_embedding, own_head : bool
        False where a draft head uses the target's table.
    final_norm : bool
        Whether a norm precedes the LM head.
    mtp_layers : int
        Multi-token-prediction blocks that the checkpoint carries, not counted as parameters.
    max_positions : int or None
        Longest context the model was made for.
    source : str
        Where the description came from.
    """

    name: str
    model_type: str
    hidden_size: int
    vocab_size: int
    layers: tuple[tuple[Layer, int], ...]
    head_vocab_size: int
    dense_width: int | None = None
    tied_embeddings: bool = False
    dtype: str = "bfloat16"
    weight_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    scale_block: tuple[int, int] | None = None
    head_kind: str | None = None
    fusion: Fusion | None = None
    own_embedding: bool = True
    own_head: bool = True
    final_norm: bool = True
    mtp_layers: int = 0
    max_positions: int | None = None
    source: str = ""

    @property
    def n_layers(self) -> int:
        """Decoder layers."""
        return sum(count for _, count in self.layers)

    def distinct_layers(self) -> dict[Layer, int]:
        """Return how often each distinct layer occurs."""
        counts: Counter[Layer] = Counter()
        for layer, count in self.layers:
            counts[layer] += count
        return dict(counts)

    def layers_by_kind(self) -> dict[str, int]:
        """Return how many layers of each described kind there are."""
        counts: Counter[str] = Counter()
        for layer, count in self.layers:
            counts[layer.kind] += count
        return dict(counts)

    # -- counts --------------------------------------------------------------------------

    @property
    def embedding_params(self) -> int:
        """Elements of the input embedding table."""
        return self.vocab_size * self.hidden_size

    @property
    def lm_head(self) -> Linear:
        """The LM head; where the embeddings are tied it is the same table."""
        return Linear(
            name="LM head", inputs=self.hidden_size, outputs=self.head_vocab_size, quantised=False
        )

    @property
    def fusion_linear(self) -> Linear | None:
        """The input fusion of a draft head as a matrix."""
        if self.fusion is None:
            return None
        return Linear(
            name="input fusion",
            inputs=self.fusion.inputs,
            outputs=self.hidden_size,
            bias=self.hidden_size if self.fusion.bias else 0,
            quantised=False,
        )

    @property
    def routed_expert_params(self) -> int:
        """Parameters of all routed experts."""
        return sum(
            count * layer.mlp.experts * layer.mlp.expert_weights_per_hidden * self.hidden_size
            for layer, count in self.layers
            if isinstance(layer.mlp, MoE)
        )

    @property
    def matmul_params(self) -> int:
        """Weights that one token is multiplied with: all layers (active experts), LM head."""
        return sum(n * linear.weights for linear, n in self._linears()) + self._active_experts

    @property
    def _active_experts(self) -> int:
        return sum(
            count * layer.mlp.top_k * layer.mlp.expert_weights_per_hidden * self.hidden_size
            for layer, count in self.layers
            if isinstance(layer.mlp, MoE)
        )

    def _linears(self) -> Iterator[tuple[Linear, int]]:
        for layer, count in self.distinct_layers().items():
            for linear in layer.attention.linears(self.hidden_size):
                yield linear, count
            for linear in layer.mlp.linears(self.hidden_size):
                yield linear, count
        if self.fusion_linear is not None:
            yield self.fusion_linear, 1
        yield self.lm_head, 1

    @property
    def vector_params(self) -> int:
        """Norm weights and biases."""
        norms = sum(
            count * (layer.norms * self.hidden_size + layer.attention.norm_params)
            for layer, count in self.layers
        )
        norms += self.hidden_size * (
            int(self.final_norm) + (self.fusion.norms if self.fusion else 0)
        )
        return norms + sum(n * linear.bias for linear, n in self._linears())

    @property
    def total_params(self) -> int:
        """All parameters held by this model; tied tables once, MTP blocks left out."""
        matrices = sum(n * linear.weights for linear, n in self._linears())
        total = matrices + self.routed_expert_params + self.vector_params
        if self.tied_embeddings or not self.own_head:
            total -= self.lm_head.weights
        return total + (self.embedding_params if self.own_embedding else 0)

    @property
    def active_params(self) -> int:
        """Parameters used for one token, both embedding tables counted."""
        return self.total_params - self.routed_expert_params + self._active_experts

    @property
    def kv_elements_per_token(self) -> int:
        """Elements that one token adds to the KV cache."""
        return sum(count * layer.attention.kv_elements for layer, count in self.layers)

    # -- bytes ---------------------------------------------------------------------------

    def linear_bytes(self, linear: Linear) -> float:
        """Bytes of a matrix with its bias and its quantisation scales."""
        return (
            self.matrix_bytes(linear.inputs, linear.outputs, quantised=linear.quantised)
            * linear.copies
            + linear.bias * BYTES[self.dtype]
        )

    def matrix_bytes(self, inputs: int, outputs: int, *, quantised: bool) -> float:
        """Bytes of one ``inputs x outputs`` matrix with its quantisation scales."""
        if not quantised:
            return inputs * outputs * BYTES[self.dtype]
        stored = inputs * outputs * BYTES[self.weight_dtype]
        if self.scale_block and self.weight_dtype != self.dtype:
            rows, columns = self.scale_block
            stored += math.ceil(outputs / rows) * math.ceil(inputs / columns) * BYTES["float32"]
        return stored

    def expert_bytes(self, moe: MoE) -> float:
        """Bytes of one routed expert."""
        return 2 * self.matrix_bytes(
            self.hidden_size, moe.width, quantised=True
        ) + self.matrix_bytes(moe.width, self.hidden_size, quantised=True)

    @property
    def weight_bytes(self) -> float:
        """Bytes that the weights take in memory."""
        total = sum(n * self.linear_bytes(linear) for linear, n in self._linears())
        for layer, count in self.layers:
            if isinstance(layer.mlp, MoE):
                total += count * layer.mlp.experts * self.expert_bytes(layer.mlp)
        biases = sum(n * linear.bias for linear, n in self._linears())
        total += (self.vector_params - biases) * BYTES[self.dtype]
        if self.tied_embeddings or not self.own_head:
            total -= self.linear_bytes(self.lm_head)
        return total + (self.embedding_params * BYTES[self.dtype] if self.own_embedding else 0.0)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes that one token adds to the KV cache."""
        return self.kv_elements_per_token * BYTES[self.kv_dtype]

    def kv_bytes(self, context: float) -> float:
        """Bytes of KV cache of one sequence of `context` tokens, windows respected."""
        return BYTES[self.kv_dtype] * sum(
            count * layer.attention.kv_elements * min(context, layer.attention.window or math.inf)
            for layer, count in self.layers
        )

    # -- variants ------------------------------------------------------------------------

    def shard(self, tp: int) -> Architecture:
        """Return one rank's share under tensor parallelism of degree `tp`.

        Raises
        ------
        DomainError
            When the heads or a feed-forward width cannot be divided.
        """
        if tp == 1:
            return self
        try:
            layers = tuple(
                (replace(x, attention=x.attention.shard(tp), mlp=x.mlp.shard(tp)), count)
                for x, count in self.layers
            )
        except DomainError as error:
            raise DomainError(f"{self.name}: {error}") from None
        return replace(
            self,
            layers=layers,
            vocab_size=math.ceil(self.vocab_size / tp),
            head_vocab_size=math.ceil(self.head_vocab_size / tp),
        )

    def first_layers(self, count: int) -> Architecture:
        """Return the model cut down to its first `count` layers (LM head kept)."""
        kept: list[tuple[Layer, int]] = []
        for layer, run in self.layers:
            take = min(run, count - sum(n for _, n in kept))
            if take > 0:
                kept.append((layer, take))
        return replace(self, layers=tuple(kept))

    def with_kv_budget(self, tokens: int) -> Architecture:
        """Return the model with the KV that its layers read capped at `tokens` per sequence."""
        layers = []
        for layer, count in self.layers:
            attention = layer.attention
            if isinstance(attention, LatentAttention):
                raise DomainError("a KV budget is not modelled for latent attention (MLA)")
            window = min(tokens, attention.window or tokens)
            layers.append((replace(layer, attention=replace(attention, window=window)), count))
        return replace(self, layers=tuple(layers))

    def with_dtypes(
        self, *, dtype: str | None = None, weights: str | None = None, kv: str | None = None
    ) -> Architecture:
        """Return the model run in other number formats.

        `dtype` is what activations, unquantised weights and, unless said otherwise, the KV
        cache are kept in; `weights` is what the layers' matrices are quantised to.
        """
        result = self
        if dtype is not None:
            unquantised = self.weight_dtype == self.dtype
            kv_follows = self.kv_dtype == self.dtype
            result = replace(
                result,
                dtype=dtype,
                weight_dtype=dtype if unquantised else self.weight_dtype,
                kv_dtype=dtype if kv_follows else self.kv_dtype,
            )
        if weights is not None:
            same = weights == self.weight_dtype
            block = self.scale_block if same else None
            result = replace(result, weight_dtype=weights, scale_block=block)
        return replace(result, kv_dtype=kv) if kv is not None else result


def _split(width: int, tp: int, what: str) -> int:
    if width % tp:
        raise DomainError(f"tp must divide the {what} {width}; got {tp}")
    return width // tp
