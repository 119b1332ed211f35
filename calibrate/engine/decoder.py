"""A decoder pass: grouped or latent attention, MLPs or experts, rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calibrate.bench import free_memory
from calibrate.engine.cache import Cache
from calibrate.engine.config import DecoderConfig
from calibrate.engine.experts import Experts
from calibrate.engine.latent import Latent
from specmodel.errors import DomainError

__all__ = ["Decoder", "DecoderConfig", "Stack"]


class Pass(NamedTuple):
    """What the layers of one pass share.

    Attributes
    ----------
    cosine, sine : Tensor (batch, width, 1, rotary_dim / 2)
        Of each new position's angles.
    mask : Tensor (batch, 1, group * width, span)
        Added to scores: 0 or minus infinity; query heads of a group are rows.
    cache : Cache or None
        None: the new positions attend to each other alone.
    where : tuple of Tensor
        Index of the new positions in one layer of the cache.
    """

    cosine: Tensor
    sine: Tensor
    mask: Tensor
    cache: Cache | None
    where: tuple[Tensor, ...]

    def rotate(self, x: Tensor) -> Tensor:
        """Return x (batch, width, heads, head_dim) with its halves rotated by their angles."""
        return _rotate(x, self.cosine, self.sine)


class Layer(nn.Module):  # type: ignore[misc]
    """One decoder layer; projections that read the same input are one matrix, as engines do.

    Parameters
    ----------
    config : DecoderConfig
    index : int
        Its place in the decoder: the first layers may be dense where others have experts.
    **kind
        `dtype` and `device`, as torch takes them.
    """

    def __init__(self, config: DecoderConfig, index: int = 0, **kind: Any) -> None:
        super().__init__()
        c = self.config = config

        def weight(*shape: int) -> Any:
            return nn.Parameter(torch.empty(*shape, **kind))

        self.attention_norm = weight(c.hidden)
        self.latent = self.experts = None
        if c.latent is not None:
            self.latent = Latent(c.latent, c.hidden, c.norm_eps, **kind)
            self.out = weight(c.hidden, c.latent.heads * c.latent.v_dim)
        else:
            rows = (c.heads + 2 * c.kv_heads) * c.head_dim
            self.qkv = weight(rows, c.hidden)
            self.qkv_bias = weight(rows) if c.qkv_bias else None
            self.q_norm = weight(c.head_dim) if c.qk_norm else None
            self.k_norm = weight(c.head_dim) if c.qk_norm else None
            self.out = weight(c.hidden, c.heads * c.head_dim)
        self.mlp_norm = weight(c.hidden)
        if c.experts is not None and index >= c.dense_layers:
            self.experts = Experts(c.experts, c.hidden, **kind)
        else:
            self.gate_up = weight(2 * c.intermediate, c.hidden)
            self.down = weight(c.hidden, c.intermediate)

    def forward(self, x: Tensor, index: int, shared: Pass) -> Tensor:
        """Return x (batch, width, hidden) after this layer, whose cache is number `index`."""
        eps = self.config.norm_eps
        y = F.rms_norm(x, x.shape[-1:], self.attention_norm, eps)
        if self.latent is not None:
            found = self.latent(y, index, shared)
        else:
            found = self._attend(F.linear(y, self.qkv, self.qkv_bias), index, shared)
        x = x + F.linear(found, self.out)
        y = F.rms_norm(x, x.shape[-1:], self.mlp_norm, eps)
        if self.experts is not None:
            return x + self.experts(y)
        gate, up = F.linear(y, self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)

    def _attend(self, qkv: Tensor, index: int, shared: Pass) -> Tensor:
        c = self.config
        B, W = qkv.shape[:2]
        group = c.heads // c.kv_heads
        qkv = qkv.view(B, W, -1, c.head_dim)
        qk, v = qkv[:, :, : c.heads + c.kv_heads], qkv[:, :, c.heads + c.kv_heads :]
        if self.q_norm is not None:
            q, k = qk[:, :, : c.heads], qk[:, :, c.heads :]
            q = F.rms_norm(q, (c.head_dim,), self.q_norm, c.norm_eps)
            k = F.rms_norm(k, (c.head_dim,), self.k_norm, c.norm_eps)
            qk = torch.cat((q, k), 2)
        qk = _rotate(qk, shared.cosine, shared.sine)
        q, k = qk[:, :, : c.heads], qk[:, :, c.heads :]
        if shared.cache is None:
            keys, values = k.transpose(1, 2), v.transpose(1, 2)
        else:
            span = shared.mask.shape[-1]
            keys, values = shared.cache.keys[index], shared.cache.values[index]
            keys.index_put_(shared.where, k)
            values.index_put_(shared.where, v)
            keys, values = keys[:, :, :span], values[:, :, :span]
        q = q.view(B, W, c.kv_heads, group, c.head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(B, c.kv_heads, group * W, c.head_dim)
        found = F.scaled_dot_product_attention(q, keys, values, attn_mask=shared.mask)
        found = found.view(B, c.kv_heads, group, W, c.head_dim).permute(0, 3, 1, 2, 4)
        return found.reshape(B, W, c.heads * c.head_dim)


class Stack(nn.Module):  # type: ignore[misc]
    """Layers over hidden states and a final norm, with rotary positions: a decoder's, a head's.

    Weights are empty until loaded (`checkpoints`), trained or drawn (`randomise`).

    Parameters
    ----------
    config : DecoderConfig
        Its vocabulary is not read.
    norm : bool
        Whether there is a final norm.
    dtype, device : as torch takes them

    Attributes
    ----------
    graphs : Graphs or None
        What replays passes over a cache (`calibrate.engine.graphs.capture`); None: all are eager.
    capturable : bool
        Whether they may be: none of their shapes depends on values. False keeps them eager.
    """

    graphs: Any = None

    def __init__(
        self,
        config: DecoderConfig,
        *,
        norm: bool = True,
        dtype: Any = torch.float32,
        device: Any = "cpu",
    ) -> None:
        super().__init__()
        kind = {"dtype": dtype, "device": device}
        c = self.config = config
        # grouped products of other formats wait for the device
        self.capturable = config.experts is None or dtype == torch.bfloat16
        self.layers = nn.ModuleList(Layer(c, i, **kind) for i in range(c.layers))
        self.register_parameter(
            "norm", nn.Parameter(torch.empty(c.hidden, **kind)) if norm else None
        )
        steps = torch.arange(0, c.rotary_dim, 2, dtype=torch.float32, device=device)
        frequencies = 1.0 / c.rope_theta ** (steps / c.rotary_dim)
        if c.rope_factors is not None:
            frequencies = frequencies / torch.tensor(c.rope_factors, device=device)
        self.register_buffer("frequencies", frequencies, persistent=False)

    @property
    def dtype(self) -> Any:
        """Number format of the weights."""
        return self.layers[0].out.dtype

    @property
    def device(self) -> Any:
        """Where the weights are."""
        return self.layers[0].out.device

    def cache(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache of this stack's format and device."""
        return Cache(self.config, batch, capacity, dtype=self.dtype, device=self.device)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def randomise(self, seed: int = 0) -> Self:
        """Draw all weights: matrices so that layers keep their input's scale, norms near 1."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                scale = 1.0 if name == "embedding" and not self.config.tied else None
                weight.normal_(0, scale or weight.shape[-1] ** -0.5, generator=generator)
            else:
                mean = 0.0 if name.endswith("bias") else 1.0
                weight.normal_(mean, 0.1, generator=generator)
        return self

    def run(
        self,
        x: Tensor,
        cache: Cache | None = None,
        *,
        layers: Sequence[int] | None = None,
        **place: Any,
    ) -> Tensor:
        """Return the last layer's output (batch, width, hidden), before the final norm.

        Parameters
        ----------
        x : Tensor (batch, width, hidden)
        cache : Cache, optional
        layers : sequence of int, optional
            See `Decoder.forward`.
        **place
            `positions`, `mask`, `written` and `span` of `Decoder.forward`.
        """
        shared = self.prepare(*x.shape[:2], cache=cache, **place)
        with torch.set_grad_enabled(cache is None and torch.is_grad_enabled()):
            for index in range(self.config.layers) if layers is None else layers:
                x = self.layers[index](x, index, shared)
            return x

    def replayed(
        self,
        run: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        cache: Cache | None,
        *,
        eager: bool = False,
        **place: Any,
    ) -> Tensor:
        """Return ``run(*inputs, cache, **place)``, replayed from a graph where this stack has them.

        A replayed pass returns memory that the next one over the same cache overwrites.
        """
        graphs = self.graphs if self.capturable and not torch.is_grad_enabled() else None
        if eager or cache is None or graphs is None:
            return run(*inputs, cache, **place)
        found: Tensor = graphs(run, inputs, cache, **place)
        return found

    def normalise(self, x: Tensor) -> Tensor:
        """Return hidden states after the final norm."""
        return F.rms_norm(x, x.shape[-1:], self.norm, self.config.norm_eps)

    def prepare(
        self,
        batch: int,
        width: int,
        *,
        cache: Cache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        written: int = 0,
        span: int | None = None,
    ) -> Pass:
        """Return what the layers of a pass share: angles, mask, slots; see `Decoder.forward`."""
        c, device = self.config, self.device
        columns = torch.arange(written + width, device=device)
        if cache is None:
            lengths, span = torch.zeros(batch, dtype=torch.int64, device=device), width
        else:
            lengths, span = cache.lengths, _span(cache, batch, written + width, span)
        slots = lengths[:, None] + columns  # of all that is uncommitted, the new ones last
        if positions is None:
            positions = slots
        angles = (positions[:, written:, None] * self.frequencies)[:, :, None]
        allowed = _allowed(lengths, slots, positions, mask, width, span, c.window)
        added = torch.zeros(allowed.shape, dtype=self.dtype, device=device)
        added = added.masked_fill_(~allowed, -torch.inf).repeat(1, c.heads // c.kv_heads, 1)
        rows = torch.arange(batch, device=device)[:, None, None]
        heads = torch.arange(c.kv_heads, device=device)[None, None]
        return Pass(
            angles.cos().to(self.dtype),
            angles.sin().to(self.dtype),
            added[:, None],
            cache,
            (rows, heads, slots[:, written:, None]),
        )


class Decoder(Stack):
    """A stack between an embedding and an LM head: tokens in, logits out.

    Parameters
    ----------
    config : DecoderConfig
    dtype, device : as torch takes them

    Raises
    ------
    DomainError
        When the weights need more memory than is free.
    """

    def __init__(
        self, config: DecoderConfig, *, dtype: Any = torch.float32, device: Any = "cpu"
    ) -> None:
        size, free = config.parameters * dtype.itemsize, free_memory(torch.device(device))
        if size > free:
            raise DomainError(f"weights take {size / 1e9:.3g} GB; {free / 1e9:.3g} GB are free")
        super().__init__(config, dtype=dtype, device=device)

        def table() -> Any:
            return nn.Parameter(
                torch.empty(config.vocab, config.hidden, dtype=dtype, device=device)
            )

        self.embedding = table()
        self.head = self.embedding if config.tied else table()

    def forward(
        self,
        tokens: Tensor,
        cache: Cache | None = None,
        *,
        features: bool = False,
        **options: Any,
    ) -> Any:
        """Run `width` new positions of every sequence.

        Each sequence's positions are written behind its own ``cache.lengths``, which stay as
        they are: the caller commits what it wants of them (`Cache.advance`, `Cache.keep`).

        Parameters
        ----------
        tokens : Tensor (batch, width) of int64
            Of ragged sequences, padded on the right with any token.
        cache : Cache, optional
            Without one the new positions attend to each other alone, and gradients flow.
        features : bool
            Return the normalised last hidden state too.
        positions : Tensor (batch, written + width) of int64, optional
            Place in its text of each uncommitted column, by default ``lengths + column``; for
            nodes of a tree ``lengths + depth``. [token]
        mask : Tensor (batch, width, written + width) of bool, optional
            Which uncommitted column each new row sees, itself always; by default causal.
        written : int
            Columns behind ``lengths`` that earlier passes wrote and nothing committed: the new
            ones stand behind them. [token]
        layers : sequence of int, optional
            The layers to run, in this order; by default all. Only these write the cache.
        span : int, optional
            Slots of the cache to read, at least ``max(lengths) + written + width``; by default
            just that, and where graphs are replayed somewhat more. [token]
        eager : bool
            Replay no graph (`calibrate.engine.graphs`): for widths that hardly come again.

        Returns
        -------
        Tensor (batch, width, vocab), or a pair with features (batch, width, hidden)

        Raises
        ------
        DomainError
            When the cache has too few slots or another batch.
        """
        found = self.hidden(tokens, cache, **options)
        logits = self.logits(found)
        return (logits, found) if features else logits

    def hidden(self, tokens: Tensor, cache: Cache | None = None, **options: Any) -> Tensor:
        """Return the normalised last hidden state (batch, width, hidden); see `forward`.

        Where graphs are replayed, the next pass over the same cache overwrites it.
        """
        return self.replayed(self._hidden, (tokens,), cache, **options)

    def _hidden(self, tokens: Tensor, cache: Cache | None, **options: Any) -> Tensor:
        return self.normalise(self.run(F.embedding(tokens, self.embedding), cache, **options))

    def logits(self, features: Tensor) -> Tensor:
        """Return logits (..., vocab) of normalised hidden states (..., hidden)."""
        return F.linear(features, self.head)


def _span(cache: Cache, batch: int, width: int, span: int | None) -> int:
    if cache.batch != batch:
        raise DomainError(f"{batch} sequences for a cache of {cache.batch}")
    if span is None:
        span = cache.longest + width
    if not width <= span <= cache.capacity:
        raise DomainError(
            f"a pass of {width} positions that reads {span} slots does not fit a cache of "
            f"{cache.capacity}"
        )
    return span


def _allowed(
    lengths: Tensor,
    slots: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    width: int,
    span: int,
    window: int | None,
) -> Tensor:
    """Return which slot each of the last `width` columns sees, (batch, width, span) of bool."""
    read = torch.arange(span, device=slots.device)
    if mask is None:
        allowed = read <= slots[:, -width:, None]
    else:
        index = slots[:, None].expand(-1, width, -1)
        committed = (read < lengths[:, None, None]).expand(-1, width, -1)
        allowed = committed.scatter(2, index, mask.expand(index.shape))
    if window is not None:
        place = read.expand(len(slots), -1).scatter(1, slots, positions)
        allowed = allowed & (place[:, None] > positions[:, -width:, None] - window)
    return allowed


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return x (batch, width, heads, head_dim) with its halves rotated by their angles."""
    one, two = x.chunk(2, -1)
    return torch.cat((one * cosine - two * sine, two * cosine + one * sine), -1)
