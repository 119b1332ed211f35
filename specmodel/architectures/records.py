"""A model as its cost model sees it: layers of parts, embeddings, formats, draft-head wiring."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.architectures.compressed import CompressedAttention
from specmodel.architectures.parts import (
    Attention,
    FeedForward,
    LatentAttention,
    Linear,
    MoE,
    Recurrent,
    Role,
)
from specmodel.dtypes import BYTES, Quantisation, default_quantisation
from specmodel.errors import DomainError

Mixer = Attention | LatentAttention | CompressedAttention | Recurrent


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer: a mixer, a feed-forward network, and `norms` norms of the hidden size.

    Either part may be missing (hybrids that alternate them). `extra_params` counts parameters
    that no matrix or norm above holds; `unquantised` names roles that quantisation leaves out
    in this layer.
    """

    mixer: Mixer | None
    mlp: FeedForward | None
    norms: int = 2
    extra_params: int = 0
    unquantised: frozenset[str] = frozenset()

    @property
    def attention(self) -> Attention | LatentAttention | CompressedAttention | None:
        """The mixer, where it is attention."""
        return None if isinstance(self.mixer, Recurrent) else self.mixer

    @property
    def kind(self) -> str:
        """A short description for people."""
        return " + ".join(part.kind for part in (self.mixer, self.mlp) if part is not None)

    @property
    def expert_role(self) -> Role:
        """Role of the layer's routed experts."""
        return "kept" if "experts" in self.unquantised else "experts"

    def linears(self, hidden: int) -> Iterator[Linear]:
        """Yield the matrices that every token goes through."""
        for part in (self.mixer, self.mlp):
            for linear in part.linears(hidden) if part is not None else ():
                kept = linear.role in self.unquantised
                yield replace(linear, role="kept") if kept else linear

    def shard(self, tp: int, expert_ranks: int | None = None) -> Layer:
        """Return one rank's share under tensor parallelism, experts spread where asked."""
        return replace(
            self,
            mixer=self.mixer and self.mixer.shard(tp),
            mlp=self.mlp and self.mlp.shard(tp, expert_ranks),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """The matrix in front of a draft head that merges its inputs into one hidden vector.

    `every_pass`: applied by each draft pass (EAGLE, MTP: token embedding and feature), or
    only to the target's features in the first one (EAGLE-3). `norms` are of the hidden size,
    `input_norms` go over all its inputs together or part by part (EAGLE-3.1).
    """

    inputs: int
    bias: bool = False
    every_pass: bool = True
    norms: int = 0
    input_norms: int = 0

    def norm_params(self, hidden: int) -> int:
        """Return the parameters of its norms."""
        return self.norms * hidden + self.input_norms * self.inputs


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
    dtype, kv_dtype : str
        Of activations and unquantised weights, of the KV cache.
    quantisation : Quantisation or None
        How quantised matrices are kept; None: all weights are in `dtype`.
    norm_size : int
        Parameters of one norm, in hidden sizes: 1, or 2 where norms have biases (LayerNorm).
    position_params : int
        Learnt position embeddings.
    head_kind : str or None
        ``eagle``, ``eagle3``, ``peagle``, ``mtp``, ``dflash``, ``dspark`` or ``medusa`` for a
        draft head, None for a whole model.
    fusion : Fusion or None
        Input fusion of a draft head.
    own_embedding, own_head : bool
        False where a draft head uses the target's table.
    final_norm : bool
        Whether a norm precedes the LM head.
    mtp_layers : int
        Multi-token-prediction blocks that the checkpoint carries, not counted as parameters.
    mtp_quantised : bool
        Whether those blocks are quantised as the layers are.
    mtp_layer : Layer or None
        Their layer where it is not like the model's last.
    block_size : int or None
        Positions that a block-diffusion head fills at most, the last committed token included.
    bigram_rank : int
        Rank of the correction of each draft by the one before it (DSpark); 0: there is none.
    encoder_params : int
        Parameters in memory that decoding does not read: an encoder, with the projections of its
        output to keys and values. Kept in `dtype`.
    expert_quantisation : Quantisation or None
        Of the routed experts, where it is another than the rest's.
    max_positions : int or None
        Longest context the model was made for.
    checkpoint_bytes : int or None
        Size that the checkpoint's own index states, where one was found. [B]
    notes : tuple of str
        What had to be assumed to read it.
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
    kv_dtype: str = "bfloat16"
    quantisation: Quantisation | None = None
    norm_size: int = 1
    position_params: int = 0
    head_kind: str | None = None
    fusion: Fusion | None = None
    own_embedding: bool = True
    own_head: bool = True
    final_norm: bool = True
    mtp_layers: int = 0
    mtp_quantised: bool = True
    mtp_layer: Layer | None = None
    block_size: int | None = None
    bigram_rank: int = 0
    encoder_params: int = 0
    expert_quantisation: Quantisation | None = None
    max_positions: int | None = None
    checkpoint_bytes: int | None = None
    notes: tuple[str, ...] = ()
    source: str = ""

    @property
    def weight_dtype(self) -> str:
        """Format of the layers' matrices."""
        return self.quantisation.dtype if self.quantisation else self.dtype

    def quantisation_of(self, role: str) -> Quantisation | None:
        """Return how the matrices of a role are quantised; None: they are not."""
        for quantisation in (self.expert_quantisation, self.quantisation):
            if quantisation is not None and role in quantisation.roles:
                return quantisation
        return None

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
            name="LM head", inputs=self.hidden_size, outputs=self.head_vocab_size, role="head"
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
            role="fusion",
        )

    @property
    def bigram(self) -> Architecture | None:
        """The bigram correction as a model of its own: a small embedding and its LM head."""
        if not self.bigram_rank:
            return None
        return replace(
            self,
            name=f"bigram correction of {self.name}",
            hidden_size=self.bigram_rank,
            layers=(),
            fusion=None,
            final_norm=False,
            own_embedding=True,
            own_head=True,
            tied_embeddings=False,
            quantisation=None,
            bigram_rank=0,
        )

    def moe_layers(self) -> Iterator[tuple[MoE, Role, int]]:
        """Yield each distinct mixture of experts, its experts' role, how many layers have it."""
        for layer, count in self.distinct_layers().items():
            if isinstance(layer.mlp, MoE):
                yield layer.mlp, layer.expert_role, count

    def _experts(self, *, active: bool) -> int:
        """Return the weights and biases of all routed experts, or of those one token uses."""
        hidden = self.hidden_size
        return sum(
            count
            * (moe.top_k if active else moe.held)
            * (moe.expert_weights(hidden) + moe.expert_biases(hidden))
            for moe, _, count in self.moe_layers()
        )

    @property
    def routed_expert_params(self) -> int:
        """Parameters of all routed experts."""
        return self._experts(active=False)

    @property
    def matmul_params(self) -> int:
        """Weights that one token is multiplied with: all layers (active experts), LM head."""
        experts = sum(
            n * m.top_k * m.expert_weights(self.hidden_size) for m, _, n in self.moe_layers()
        )
        return sum(n * linear.weights for linear, n in self._linears()) + experts

    def _linears(self) -> Iterator[tuple[Linear, int]]:
        for layer, count in self.distinct_layers().items():
            for linear in layer.linears(self.hidden_size):
                yield linear, count
        if self.fusion_linear is not None:
            yield self.fusion_linear, 1
        yield self.lm_head, 1

    def most_streamed(self) -> Linear:
        """Return the matrix (of the experts: one of them) whose kind holds most weights."""
        found = [(linear.weights * n, linear) for linear, n in self._linears()]
        for moe, role, n in self.moe_layers():
            one = Linear(name="expert", inputs=self.hidden_size, outputs=moe.width, role=role)
            found.append((n * moe.experts * moe.matrices * one.weights, one))
        return max(found, key=lambda pair: pair[0])[1]

    @property
    def vector_params(self) -> int:
        """Norm weights, biases (of experts aside) and other vectors."""
        norm = self.norm_size * self.hidden_size
        total = norm * int(self.final_norm)
        total += self.norm_size * self.fusion.norm_params(self.hidden_size) if self.fusion else 0
        for layer, count in self.layers:
            own = layer.norms * norm + layer.extra_params
            own += layer.mixer.norm_params if layer.mixer is not None else 0
            own += layer.mlp.extra_params if isinstance(layer.mlp, MoE) else 0
            total += count * own
        return total + sum(n * linear.bias for linear, n in self._linears())

    @property
    def total_params(self) -> int:
        """All parameters held by this model; tied tables once, MTP blocks left out."""
        matrices = sum(n * linear.weights for linear, n in self._linears())
        total = matrices + self.routed_expert_params + self.vector_params + self.position_params
        total += self.encoder_params + (self.bigram.total_params if self.bigram else 0)
        if self.tied_embeddings or not self.own_head:
            total -= self.lm_head.weights
        return total + (self.embedding_params if self.own_embedding else 0)

    @property
    def active_params(self) -> int:
        """Parameters that decoding one token uses, both embedding tables counted."""
        resting = self.routed_expert_params + self.encoder_params
        return self.total_params - resting + self._experts(active=True)

    @property
    def kv_elements_per_token(self) -> int:
        """Elements that one token adds to the KV cache, windowed layers included."""
        return sum(self.kv_elements_by_window().values())

    def kv_elements_by_window(self) -> dict[int | None, int]:
        """Return the cached elements per token by the window that caps them; None: uncapped."""
        found: Counter[int | None] = Counter()
        for layer, count in self.layers:
            kept = layer.mixer.kept() if layer.mixer is not None else {}
            for window, elements in kept.items():
                found[window] += count * elements
        return {window: elements for window, elements in found.items() if elements}

    # -- bytes ---------------------------------------------------------------------------

    def matrix_bytes(self, inputs: int, outputs: int, role: str) -> float:
        """Return the bytes of one ``inputs x outputs`` matrix with its quantisation scales."""
        quantisation = self.quantisation_of(role)
        if quantisation is not None:
            return quantisation.matrix_bytes(inputs, outputs)
        return inputs * outputs * BYTES[self.dtype]

    def linear_bytes(self, linear: Linear) -> float:
        """Return the bytes of a matrix with its bias and its quantisation scales."""
        stored = self.matrix_bytes(linear.inputs, linear.outputs, linear.role) * linear.copies
        return stored + linear.bias * BYTES[self.dtype]

    def expert_bytes(self, moe: MoE, role: Role = "experts") -> tuple[float, float]:
        """Return the bytes of one routed expert: its up (and gate) matrices, its down matrix."""
        hidden, each = self.hidden_size, BYTES[self.dtype]
        ups = moe.matrices - 1
        up = ups * self.matrix_bytes(hidden, moe.width, role)
        down = self.matrix_bytes(moe.width, hidden, role)
        if moe.bias:
            up, down = up + ups * moe.width * each, down + hidden * each
        return up, down

    @property
    def weight_bytes(self) -> float:
        """Bytes that the weights take in memory."""
        total = sum(n * self.linear_bytes(linear) for linear, n in self._linears())
        total += sum(
            n * moe.held * sum(self.expert_bytes(moe, role)) for moe, role, n in self.moe_layers()
        )
        biases = sum(n * linear.bias for linear, n in self._linears())
        others = self.vector_params - biases + self.position_params + self.encoder_params
        total += others * BYTES[self.dtype] + (self.bigram.weight_bytes if self.bigram else 0.0)
        if self.tied_embeddings or not self.own_head:
            total -= self.linear_bytes(self.lm_head)
        return total + (self.embedding_params * BYTES[self.dtype] if self.own_embedding else 0.0)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes that one token adds to the KV cache, index keys of sparse attention aside."""
        return self.kv_elements_per_token * BYTES[self.kv_dtype]

    def kv_bytes(self, context: ArrayLike) -> NDArray[np.float64]:
        """Return the bytes of cache of one sequence: KV within windows, index keys."""
        each, context = BYTES[self.kv_dtype], np.asarray(context, dtype=np.float64)
        kept = sum(
            elements * np.minimum(context, window or math.inf)
            for window, elements in self.kv_elements_by_window().items()
        )
        index = partial = np.asarray(0.0)
        for layer, count in self.layers:
            mixer = layer.mixer
            if isinstance(mixer, CompressedAttention):
                index = index + count * mixer.index_dim * context / (mixer.ratio or 1)
                partial = partial + count * mixer.partial_bytes(context)
            elif isinstance(mixer, Attention | LatentAttention):
                index = index + count * mixer.index_dim * context
        return np.asarray(each * (kept + index) + partial)

    @property
    def state_bytes(self) -> float:
        """Bytes of constant recurrent state per sequence."""
        return sum(
            count * layer.mixer.state_bytes
            for layer, count in self.layers
            if isinstance(layer.mixer, Recurrent)
        )

    # -- variants ------------------------------------------------------------------------

    def shard(self, tp: int, expert_ranks: int | None = None) -> Architecture:
        """Return one rank's share under tensor parallelism of degree `tp`.

        Routed experts are sliced as everything else is, or with `expert_ranks` kept whole and
        spread over so many devices.

        Raises
        ------
        DomainError
            When the heads, a feed-forward width or the experts cannot be divided.
        """
        if tp == 1 and expert_ranks is None:
            return self
        try:
            layers = tuple((layer.shard(tp, expert_ranks), n) for layer, n in self.layers)
        except DomainError as error:
            raise DomainError(f"{self.name}: {error}") from None
        return replace(
            self,
            layers=layers,
            vocab_size=math.ceil(self.vocab_size / tp),
            head_vocab_size=math.ceil(self.head_vocab_size / tp),
            encoder_params=math.ceil(self.encoder_params / tp),
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
            mixer = layer.mixer
            if isinstance(mixer, LatentAttention):
                raise DomainError("a KV budget is not modelled for latent attention (MLA)")
            if isinstance(mixer, CompressedAttention):
                raise DomainError("a KV budget is not modelled for compressed attention")
            if isinstance(mixer, Attention) and mixer.index_topk:
                raise DomainError("a KV budget is not modelled for sparse attention")
            if isinstance(mixer, Attention):
                mixer = replace(mixer, window=min(tokens, mixer.window or tokens))
            layers.append((replace(layer, mixer=mixer), count))
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
            kv_follows = self.kv_dtype == self.dtype
            result = replace(result, dtype=dtype, kv_dtype=dtype if kv_follows else self.kv_dtype)
        if weights is not None and weights != result.weight_dtype:
            plain = weights == result.dtype
            result = replace(
                result,
                quantisation=None if plain else default_quantisation(weights),
                expert_quantisation=None,
            )
        return replace(result, kv_dtype=kv) if kv is not None else result
