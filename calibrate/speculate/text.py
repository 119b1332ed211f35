"""What every sequence of a batch says so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Text:
    """Committed tokens of a batch, each sequence with its own length.

    Parameters
    ----------
    prompts : sequence of token sequences
        None of them empty.
    capacity : int
        Most tokens of a sequence. [token]
    vocab : int
        Size of the vocabulary.
    device : as torch takes it

    Attributes
    ----------
    tokens : Tensor (batch, capacity) of int64
        Zero beyond each length.
    lengths : Tensor (batch,) of int64
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], capacity: int, *, vocab: int, device: Any = "cpu"
    ) -> None:
        self.vocab = vocab
        self.tokens = torch.zeros(len(prompts), capacity, dtype=torch.int64, device=device)
        for row, prompt in zip(self.tokens, prompts, strict=True):
            row[: len(prompt)] = torch.as_tensor(prompt, device=device)
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self._rows = torch.arange(len(prompts), device=device)[:, None]

    def last(self, count: Tensor, width: int) -> Tensor:
        """Return the last `count` (batch,) tokens of each, padded on the right: (batch, width)."""
        start = (self.lengths - count)[:, None]
        columns = start + torch.arange(width, device=self.tokens.device)
        return self.tokens[self._rows, columns.clamp(0, self.tokens.shape[1] - 1)]

    def append(self, tokens: Tensor, counts: Tensor) -> None:
        """Commit the first `counts` (batch,) of `tokens` (batch, width) to each sequence."""
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        row, column = (columns < counts[:, None]).nonzero(as_tuple=True)
        self.tokens[row, self.lengths[row] + column] = tokens[row, column]
        self.lengths += counts

    def seen(self) -> Tensor:
        """Return which tokens of the vocabulary occur so far, (batch, vocab) of bool."""
        columns = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        row, column = (columns < self.lengths[:, None]).nonzero(as_tuple=True)
        found = torch.zeros(
            len(self.tokens), self.vocab, dtype=torch.bool, device=self.tokens.device
        )
        found[row, self.tokens[row, column]] = True
        return found
