"""Plain decoding, one token a pass: the reference for what speculation returns and takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from calibrate.engine.cache import Cache
from calibrate.engine.decoder import Decoder
from calibrate.engine.graphs import capture
from specmodel.errors import DomainError

_CHUNK = 512  # prompt positions a pass: bounds the mask and the logits


@torch.inference_mode()  # type: ignore[untyped-decorator]
def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    generator: Any = None,
    eos: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the new tokens of each prompt, its end token included.

    Parameters
    ----------
    decoder : Decoder
    prompts : sequence of token sequences
        Of any lengths.
    max_new_tokens : int
    temperature : float
        0: the most likely token, the first of equals.
    generator : torch.Generator, optional
        On the decoder's device; needed for a temperature above 0.
    eos : sequence of int, optional
        Tokens that end a text, by default the decoder's.

    Raises
    ------
    DomainError
        For an empty prompt, a token outside the vocabulary, more tokens than the model or the
        memory has room for, or logits that are not finite.
    """
    capture(decoder)
    check_prompts(decoder, prompts, max_new_tokens)
    if temperature < 0 or (temperature > 0 and generator is None):
        raise DomainError(f"temperature {temperature} must be >= 0, and above 0 with a generator")
    stops = decoder.config.eos if eos is None else tuple(eos)
    ends = torch.tensor(stops, dtype=torch.int64, device=decoder.device)
    cache = decoder.cache(len(prompts), max(map(len, prompts)) + max_new_tokens)
    logits = prefill(decoder, prompts, cache)
    running = torch.ones(len(prompts), dtype=torch.bool, device=decoder.device)
    found: list[Tensor] = []
    kept: list[Tensor] = []
    for step in range(max_new_tokens):
        tokens = choose(logits, temperature, generator)
        found.append(tokens)
        kept.append(running)
        running = running & ~torch.isin(tokens, ends)
        if step + 1 == max_new_tokens or not bool(running.any()):
            break
        logits = decoder(tokens[:, None], cache)[:, 0]
        cache.advance(running.long())  # a sequence that ended stays as it is
    rows = zip(torch.stack(found, 1).tolist(), torch.stack(kept, 1).sum(1).tolist(), strict=True)
    return [tokens[:count] for tokens, count in rows]


def check_prompts(decoder: Decoder, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
    """Refuse prompts that cannot be continued by `new_tokens`.

    Raises
    ------
    DomainError
        Naming the prompt, counted from 0.
    """
    c = decoder.config
    if not prompts:
        raise DomainError("there must be a prompt")
    if new_tokens < 1:
        raise DomainError(f"max_new_tokens must be >= 1; got {new_tokens}")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise DomainError(f"prompt {i} is empty: a first token needs one before it")
        if len(prompt) + new_tokens > c.context:
            raise DomainError(
                f"prompt {i}: {len(prompt)} tokens and {new_tokens} new ones are more than the "
                f"model's {c.context}"
            )
        for token in prompt:
            if not 0 <= token < c.vocab:
                raise DomainError(f"prompt {i}: token {token} is outside [0, {c.vocab - 1}]")


def prefill(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    cache: Cache,
    features: Tensor | None = None,
) -> Tensor:
    """Write prompts into an empty cache, commit them, return the logits (batch, vocab) after each.

    Prompts of a ragged batch are padded on the right; what padding writes is not committed.
    `features` (batch, n, hidden), n at least the longest prompt's, takes the normalised last
    hidden state at each of their positions.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    padded = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = torch.as_tensor(prompt)
    padded, lengths = padded.to(decoder.device), lengths.to(decoder.device)
    rows = torch.arange(len(prompts), device=decoder.device)
    last = torch.zeros(
        len(prompts), decoder.config.hidden, dtype=decoder.dtype, device=decoder.device
    )
    for start in range(0, padded.shape[1], _CHUNK):
        chunk = padded[:, start : start + _CHUNK]
        found = decoder.hidden(chunk, cache, eager=True)  # few chunks are alike
        column = lengths - 1 - start
        inside = (column >= 0) & (column < chunk.shape[1])
        if features is not None:
            features[:, start : start + chunk.shape[1]] = found
        taken = found[rows, column.clamp(0, chunk.shape[1] - 1)]
        last = torch.where(inside[:, None], taken, last)
        cache.advance((lengths - cache.lengths).clamp(0, chunk.shape[1]))
    return decoder.logits(last)


def fill(lengths: Tensor, cache: Cache, features: Tensor | None = None) -> None:
    """Commit noise in place of prompts, `lengths` (batch,) tokens: for timing alone.

    What stands in the cache of a model with random weights means nothing either way, and a long
    prompt of every sequence takes a while.
    """
    cache.keys.normal_()
    if cache.latent is None:
        cache.values.normal_()
    if features is not None:
        features.normal_()
    cache.advance(lengths)


def choose(logits: Tensor, temperature: float, generator: Any = None) -> Tensor:
    """Return a token (batch,) for each row of logits (batch, vocab).

    Raises
    ------
    DomainError
        When logits are NaN or infinite.
    """
    finite = torch.isfinite(logits).all(-1)
    if not bool(finite.all()):
        rows = (~finite).nonzero()[:, 0].tolist()
        raise DomainError(f"logits of sequences {rows} are not finite")
    if temperature == 0:
        return logits.argmax(-1)
    chances = torch.softmax(logits.float() / temperature, -1)
    return torch.multinomial(chances, 1, generator=generator)[:, 0]
