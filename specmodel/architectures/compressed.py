"""Compressed attention (DeepSeek-V4): a short window of tokens beside compressed older ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.architectures.parts import Linear, divide
from specmodel.errors import ArchitectureError

PARTIAL_BYTES = 4.0
"""Bytes of an element of a window that is not closed yet, kept in float32. [B]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttention:
    """Attention to the last tokens and to one entry for each `ratio` tokens before.

    All heads share one key that serves as value (MQA). What a pass reads is not what is kept:
    the last `window` tokens and the entries, all of them or, with an indexer, the best
    `index_topk`, whose score takes a key of `index_dim` for each entry. An indexed entry is
    gathered from the tokens of two windows, so that twice as much is projected for it. Tokens of
    a window that is not closed are kept, values and gates in float32, until it is. The output is
    projected in `output_groups` groups of heads, each to `output_rank`, then together.

    The residual runs in `streams` parallel streams, mixed before and after each part; both
    mixings of a layer are counted here.

    Layout after transformers 5.24.0 (``models/deepseek_v4/modeling_deepseek_v4.py``), state of
    open windows after vLLM (``vllm/models/deepseek_v4/compressor.py``), read 2026-11-29.
    """

    heads: int
    head_dim: int
    q_lora_rank: int
    output_groups: int
    output_rank: int
    window: int
    ratio: int | None = None
    index_heads: int = 0
    index_dim: int = 0
    index_topk: int | None = None
    streams: int = 1

    chunk: ClassVar[None] = None
    state_elements: ClassVar[int] = 0
    reductions: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.heads % self.output_groups:
            raise ArchitectureError(
                f"{self.output_groups} output groups must divide {self.heads} heads"
            )
        if self.ratio and (self.head_dim % self.ratio or self.index_dim % self.ratio):
            raise ArchitectureError(
                f"a compression of {self.ratio} must divide the head's {self.head_dim} and the "
                f"index key's {self.index_dim} elements"
            )

    @property
    def kind(self) -> str:
        """The usual name of the variant."""
        name = f"MQA, window {self.window}"
        if self.ratio is None:
            return name
        best = f", best {self.index_topk}" if self.index_topk else ""
        return f"{name}, rest 1/{self.ratio}{best}"

    @property
    def series(self) -> int:
        """Windows that an entry is gathered from."""
        return 2 if self.index_topk else 1

    @property
    def kv_elements(self) -> int:
        """Elements of one token in the window, or of one entry."""
        return self.head_dim

    def kept(self) -> dict[int | None, int]:
        """Return the cached elements per token by the window that caps them."""
        found: dict[int | None, int] = {self.window: self.head_dim}
        return found if self.ratio is None else {**found, None: self.head_dim // self.ratio}

    @property
    def partial_elements(self) -> int:
        """Elements that a token of an open window keeps: values and gates."""
        return 0 if self.ratio is None else 2 * self.series * (self.head_dim + self.index_dim)

    def partial_bytes(self, context: ArrayLike) -> NDArray[np.float64]:
        """Return the bytes kept of windows that are not closed. [B]"""
        tokens = np.minimum(context, self.series * (self.ratio or 0))
        return np.asarray(tokens * self.partial_elements * PARTIAL_BYTES)

    @property
    def norm_params(self) -> int:
        """Parameters besides matrices: norms, sinks, positions within a window, mixing."""
        count = self.q_lora_rank + self.head_dim + self.heads
        for dim in (self.head_dim, self.index_dim) if self.ratio else ():
            count += dim + (self.ratio or 0) * self.series * dim
        return count + (2 * (self._mixed + 3) if self.streams > 1 else 0)

    @property
    def normed_elements(self) -> int:
        """Elements per row that norms inside the attention go over."""
        return self.q_lora_rank + self.query_width + self.head_dim

    @property
    def _mixed(self) -> int:
        """Weights that mixing takes for each row: into a part, out of it, among the streams."""
        return self.streams * (2 + self.streams)

    @property
    def flops_per_pair(self) -> int:
        """FLOPs for one query position against one token or entry."""
        return 4 * self.heads * self.head_dim

    @property
    def query_width(self) -> int:
        """Elements of all query heads, a row."""
        return self.heads * self.head_dim

    @property
    def output_width(self) -> int:
        """Elements of all output heads, a row."""
        return self.heads * self.head_dim

    def linears(self, hidden: int) -> Iterator[Linear]:
        """Yield the weight matrices; those that published checkpoints leave unquantised: kept."""
        down = self.q_lora_rank + self.head_dim
        yield Linear(name="q and kv down", inputs=hidden, outputs=down, role="attention")
        yield Linear(
            name="q up", inputs=self.q_lora_rank, outputs=self.query_width, role="attention"
        )
        if self.ratio is not None:
            both = 2 * self.series * self.head_dim
            yield Linear(name="compression", inputs=hidden, outputs=both, role="kept")
        if self.index_heads:
            yield Linear(
                name="index q",
                inputs=self.q_lora_rank,
                outputs=self.index_heads * self.index_dim,
                role="attention",
            )
            both = 2 * self.series * self.index_dim
            yield Linear(
                name="index compression and weights",
                inputs=hidden,
                outputs=both + self.index_heads,
                role="kept",
            )
        yield Linear(
            name="grouped output",
            inputs=self.output_width // self.output_groups,
            outputs=self.output_rank,
            copies=self.output_groups,
            role="attention output",
        )
        yield Linear(
            name="attention output",
            inputs=self.output_groups * self.output_rank,
            outputs=hidden,
            role="attention output",
        )
        if self.streams > 1:
            for part in ("attention", "experts"):
                yield Linear(
                    name=f"mixing around {part}",
                    inputs=self.streams * hidden,
                    outputs=self._mixed,
                    role="kept",
                )

    def shard(self, tp: int) -> CompressedAttention:
        """Return one rank's share: heads and output groups are split, the rest replicated."""
        return replace(
            self,
            heads=divide(self.heads, tp, "attention heads"),
            output_groups=divide(self.output_groups, tp, "output groups"),
        )
