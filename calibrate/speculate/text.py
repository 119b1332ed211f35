"""What every sequence of a batch says so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specmodel.errors import DomainError

Stop = Callable[[Sequence[int]], int | None]
"""Given the new tokens of a text, returns how many of them it ends after, if it ends."""


def stop_strings(decode: Callable[[Sequence[int]], str], strings: Sequence[str]) -> Stop:
    """Return what ends a text after the token that completes one of some strings.

    Parameters
    ----------
    decode : callable
        From tokens to their text.
    strings : sequence of str

    Raises
    ------
    DomainError
        When one is empty.

    Examples
    --------
    >>> stop_strings(lambda tokens: bytes(tokens).decode(), ["def"])(list(b"a def b"))
    5
    """
    if "" in strings:
        raise DomainError("a stop string must not be empty")

    def stop(tokens: Sequence[int]) -> int | None:
        def complete(count: int) -> bool:
            text = decode(tokens[:count])
            return any(string in text for string in strings)

        count = len(tokens)
        if not complete(count):
            return None
        while complete(count - 1):
            count -= 1
        return count

    return stop


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
    hidden : int
        Width of the target's features, where a drafter reads them; 0: none are kept.
    filled : bool
        Whether caches hold noise in place of the prompts (`calibrate.engine.generate.fill`).
    dtype, device : as torch takes them

    Attributes
    ----------
    tokens : Tensor (batch, capacity) of int64
        Of no meaning beyond each length.
    lengths : Tensor (batch,) of int64
    features : Tensor (batch, capacity, hidden)
        The target's normalised last hidden state at every token but the last.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        capacity: int,
        *,
        vocab: int,
        hidden: int = 0,
        filled: bool = False,
        dtype: Any = torch.float32,
        device: Any = "cpu",
    ) -> None:
        self.vocab, self.filled = vocab, filled
        self.tokens = torch.zeros(len(prompts), capacity, dtype=torch.int64, device=device)
        for row, prompt in zip(self.tokens, prompts, strict=True):
            row[: len(prompt)] = torch.as_tensor(prompt, device=device)
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self._rows = torch.arange(len(prompts), device=device)[:, None]
        self.features = torch.zeros(len(prompts), capacity, hidden, dtype=dtype, device=device)

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

    def keep_features(self, found: Tensor, counts: Tensor) -> None:
        """Take the features (batch, width, hidden) of the `counts` tokens before the last."""
        columns = torch.arange(found.shape[1], device=found.device)
        row, column = (columns < counts[:, None]).nonzero(as_tuple=True)
        start = self.lengths - 1 - counts
        self.features[row, start[row] + column] = found[row, column]

    def features_at(self, positions: Tensor) -> Tensor:
        """Return the features (batch, n, hidden) at positions (batch, n)."""
        return self.features[self._rows, positions]

    def seen(self) -> Tensor:
        """Return which tokens of the vocabulary occur so far, (batch, vocab) of bool."""
        columns = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        row, column = (columns < self.lengths[:, None]).nonzero(as_tuple=True)
        found = torch.zeros(
            len(self.tokens), self.vocab, dtype=torch.bool, device=self.tokens.device
        )
        found[row, self.tokens[row, column]] = True
        return found
