"""Whole decoder passes with random weights: the check that no fit has seen.

Llama-style layers (or layers with routed experts), a static cache that is written at each
sequence's own positions and read whole, an LM head on every row. Made of the same operators that
are timed by themselves. Values mean nothing; times do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from calibrate.bench import Bench, Work, attention, kernel_name
from calibrate.cases import Case
from calibrate.models import ModelShape
from calibrate.operators import choose_grouped, expert_layer, route


def build(bench: Bench, case: Case, shape: ModelShape) -> Work:
    """Return one pass over `width` positions of `batch` sequences, `context` tokens cached."""
    batch, width, context = case.batch or 1, case.width or 1, case.context or 0
    decoder = Decoder(bench, shape, case.dtype, batch=batch, width=width, context=context)
    kernel = kernel_name(decoder.backend) + (f", {decoder.grouped}" if shape.experts else "")
    return Work([decoder.run], kernel=kernel)


class Decoder:
    """A decoder for one pass shape; its weights and its cache are views of the bench's pools.

    Notes
    -----
    There is no rotary embedding: the copy that brings queries into the order of the attention
    kernel costs what a fused one would. Experts are routed once, uniformly (captured graphs need
    fixed shapes); the router and its choice are computed all the same.
    """

    def __init__(
        self, bench: Bench, shape: ModelShape, dtype: str, *, batch: int, width: int, context: int
    ) -> None:
        self.shape, self.batch, self.width = shape, batch, width
        self.backend = bench.attention_backend(dtype)
        s, rows, length = shape, batch * width, context + width
        each = (s.experts,) if s.experts else ()
        layer: list[tuple[int, ...]] = [
            (s.qkv, s.hidden),
            (s.hidden, s.heads * s.head_dim),
            (max(1, s.experts), s.hidden),
            (*each, 2 * s.intermediate, s.hidden),
            (*each, s.hidden, s.intermediate),
        ]
        tables = [(s.vocab, s.hidden), (s.vocab, s.hidden)]
        views = bench.pool("weights", dtype).views([*layer * s.layers, *tables])
        self.layers = [tuple(views[5 * i : 5 * i + 5]) for i in range(s.layers)]
        self.embedding, self.head = views[-2:]
        self.norm = bench.random(s.hidden, dtype=dtype)
        kv = (s.layers, 2, batch, s.kv_heads, length, s.head_dim)
        (self.cache,) = bench.pool("cache", dtype).views([kv])
        self.grouped, self.multiply = choose_grouped(bench, dtype)
        self.routing = route(bench, rows, s.experts, s.top_k) if s.experts else None

        def index(count: int, start: int = 0) -> Any:
            return torch.arange(start, start + count, device=bench.device)

        positions = index(width, context).expand(batch, width)  # each sequence has its own
        self.where = (
            index(batch)[:, None, None],
            index(s.kv_heads)[None, None],
            positions[:, :, None],
        )
        self.ids = torch.randint(
            0, s.vocab, (batch, width), device=bench.device, generator=bench.generator
        )

    def run(self) -> None:
        """Run one pass, launching its kernels on the current stream."""
        x = F.embedding(self.ids.view(-1), self.embedding)
        for weights, cache in zip(self.layers, self.cache, strict=True):
            qkv, out, router, up, down = weights
            x = x + F.linear(self._attend(F.linear(self._normed(x), qkv), cache), out)
            y = self._normed(x)
            x = x + self._feed_forward(y, router, up, down)
        self.logits = F.linear(self._normed(x), self.head)

    def _normed(self, x: Any) -> Any:
        return F.rms_norm(x, (self.shape.hidden,), self.norm, 1e-5)

    def _attend(self, qkv: Any, cache: Any) -> Any:
        s, B, W = self.shape, self.batch, self.width
        group = s.heads // s.kv_heads
        split = qkv.view(B, W, s.heads + 2 * s.kv_heads, s.head_dim).split(
            (s.heads, s.kv_heads, s.kv_heads), 2
        )
        query, keys, values = split
        cache[0].index_put_(self.where, keys)
        cache[1].index_put_(self.where, values)
        # a copy at every width, where width 1 could do with a view: the same kernels for all
        query = query.view(B, W, s.kv_heads, group, s.head_dim).permute(0, 2, 3, 1, 4)
        query = query.clone(memory_format=torch.contiguous_format)
        query = query.view(B, s.kv_heads, group * W, s.head_dim)
        found = attention(query, cache[0], cache[1], self.backend)
        found = found.view(B, s.kv_heads, group, W, s.head_dim).permute(0, 3, 1, 2, 4)
        return found.reshape(B * W, s.heads * s.head_dim)

    def _feed_forward(self, x: Any, router: Any, up: Any, down: Any) -> Any:
        if self.routing is None:
            return _mlp(x, up, down)
        torch.topk(torch.softmax(F.linear(x, router), -1), self.shape.top_k)
        return expert_layer(x, up, down, self.routing, self.multiply)


def _mlp(x: Any, up: Any, down: Any) -> Any:
    gate, value = F.linear(x, up).chunk(2, -1)
    return F.linear(F.silu(gate) * value, down)
