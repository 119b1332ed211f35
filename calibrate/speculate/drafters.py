"""Drafters that run: what proposes the tokens that the target verifies.

All but the n-gram draft a chain with passes of their own, one after another, and differ in whose
layers and whose cache those passes take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from calibrate.engine.cache import Cache
from calibrate.engine.decoder import Decoder
from calibrate.engine.generate import prefill
from calibrate.speculate.text import Text
from specmodel.errors import DomainError
from specmodel.law import Transform, draw

Uniform = Callable[..., Tensor]
"""Returns uniform numbers in [0, 1) of the shape it is given."""


class Proposal(NamedTuple):
    """Drafts of one round.

    Attributes
    ----------
    tokens : Tensor (batch, k) of int64
    log_q : Tensor (batch, k, vocab) or None
        What they were drawn from; None: chosen without chance.
    lengths : Tensor (batch,) of int64, or None
        Drafts that each sequence has; None: k.
    accepted : Tensor (batch,) of int64, or None
        Accept so many instead of verifying (`Forced`).
    """

    tokens: Tensor
    log_q: Tensor | None = None
    lengths: Tensor | None = None
    accepted: Tensor | None = None


class Drafter(Protocol):
    """What the loop asks of a drafter.

    A drafter is told by `start` of a new batch, whose `text` (prompt and first token) and target
    `cache` it keeps and reads; the cache holds all of the text but its last token, and a drafter
    leaves its lengths as they were.
    """

    def start(self, text: Text, cache: Cache) -> None:
        """Begin with a batch; slots beyond the text hold a round's drafts."""

    def propose(self, k: int, transform: Transform, uniform: Uniform) -> Proposal:
        """Return k drafts for each sequence."""

    def settle(self) -> None:
        """Forget what was rejected: `text` holds what is committed."""


def check_pair(target: Decoder, draft: Decoder) -> None:
    """Refuse a draft model whose vocabulary is not the target's.

    Raises
    ------
    DomainError
        When sizes or devices differ. Tokenizers are compared where they are loaded.
    """
    if draft.config.vocab != target.config.vocab:
        raise DomainError(
            f"the draft model's vocabulary of {draft.config.vocab} tokens is not the target's "
            f"of {target.config.vocab}"
        )
    if draft.device != target.device:
        raise DomainError(f"the draft model is on {draft.device}, the target on {target.device}")


def draft_chain(
    logits: Tensor,
    following: Callable[[Tensor, int], Tensor],
    k: int,
    transform: Transform,
    uniform: Uniform,
    seen: Tensor | None,
) -> Proposal:
    """Draw k tokens one after another from a drafter's own law.

    Parameters
    ----------
    logits : Tensor (batch, vocab)
        After the text.
    following : callable
        Given a token (batch,) and its number from 0, returns the logits after it; not asked
        for those after the last draft.
    k : int
    transform : Transform
    uniform : callable
    seen : Tensor (batch, vocab) of bool, or None
        Tokens of the text, where the transform asks for them.
    """
    tokens: list[Tensor] = []
    laws: list[Tensor] = []
    for j in range(k):
        law = transform.log_probabilities(logits, seen)
        token = draw(law, uniform(len(law)))
        tokens.append(token)
        laws.append(law)
        if j + 1 < k:
            logits = following(token, j)
            if seen is not None:
                seen = seen.scatter(1, token[:, None], True)
    return Proposal(torch.stack(tokens, 1), torch.stack(laws, 1))


class _Chain:
    """What the drafters that run passes have in common."""

    text: Text
    cache: Cache

    def start(self, text: Text, cache: Cache) -> None:
        self.text, self.cache = text, cache

    def settle(self) -> None:
        pass

    def _seen(self, transform: Transform) -> Tensor | None:
        return self.text.seen() if transform.repetition_penalty != 1 else None


class DraftModel(_Chain):
    """A smaller model with a cache of its own.

    Its first pass of a round takes what was committed since: one token, or two where every draft
    was accepted, so that each draft costs one pass.

    Parameters
    ----------
    decoder : Decoder
        Of the target's vocabulary (`check_pair`).
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def start(self, text: Text, cache: Cache) -> None:
        """Read the prompts."""
        self.text, self.cache = text, self.decoder.cache(len(text.tokens), cache.capacity)
        lengths = text.lengths.tolist()
        prefill(
            self.decoder,
            [row[: n - 1] for row, n in zip(text.tokens, lengths, strict=True)],
            self.cache,
        )

    def propose(self, k: int, transform: Transform, uniform: Uniform) -> Proposal:
        """Return k drafts for each sequence, by k passes."""
        missing = self.text.lengths - self.cache.lengths
        width = int(missing.max())
        found = self.decoder.hidden(self.text.last(missing, width), self.cache)
        self.cache.advance(missing)
        rows = torch.arange(len(missing), device=missing.device)

        def following(token: Tensor, _: int) -> Tensor:
            logits = self.decoder(token[:, None], self.cache)[:, 0]
            self.cache.advance(1)
            return logits

        first = self.decoder.logits(found[rows, missing - 1])
        return draft_chain(first, following, k, transform, uniform, self._seen(transform))

    def settle(self) -> None:
        """Drop the rejected drafts from the cache."""
        self.cache.rollback(torch.minimum(self.cache.lengths, self.text.lengths - 1))


class SelfLayers(_Chain):
    """The target's own layers, some of them: early exit, or layers left out.

    Drafts read and write the target's cache; verification overwrites what they wrote. Passes of
    the first layers alone (early exit) read the keys and values that those layers would compute
    anyway; with layers left out in between [1]_, those of the whole model.

    Parameters
    ----------
    target : Decoder
    layers : sequence of int
        Increasing, at least one, not all.

    Raises
    ------
    DomainError
        For other layers.

    References
    ----------
    .. [1] Zhang et al., Draft & Verify, ACL 2024, arXiv:2309.08168.
    """

    def __init__(self, target: Decoder, layers: Sequence[int]) -> None:
        count = target.config.layers
        chosen = list(layers)
        if not chosen or chosen != sorted(set(chosen)) or not 0 <= chosen[0] <= chosen[-1] < count:
            shown = ", ".join(map(str, chosen[:8])) + ", ..." * (len(chosen) > 8)
            raise DomainError(f"layers must increase within [0, {count - 1}]; got {shown}")
        if len(chosen) == count:
            raise DomainError(f"layers must leave some of the {count} out")
        self.target, self.layers = target, chosen

    def propose(self, k: int, transform: Transform, uniform: Uniform) -> Proposal:
        """Return k drafts for each sequence, by k passes of some layers."""
        committed = self.cache.lengths.clone()

        def run(tokens: Tensor) -> Tensor:
            logits: Tensor = self.target(tokens, self.cache, layers=self.layers)[:, 0]
            self.cache.advance(1)
            return logits

        first = run(self.text.last(torch.ones_like(committed), 1))
        found = draft_chain(
            first,
            lambda token, _: run(token[:, None]),
            k,
            transform,
            uniform,
            self._seen(transform),
        )
        self.cache.rollback(committed)
        return found


class SparseCache(_Chain):
    """The whole target over a part of its cache: the first tokens and the last ones.

    Each round copies that part, so that drafts at long context read little [1]_.

    Parameters
    ----------
    target : Decoder
    sink, window : int
        First and last committed tokens kept; the window at least 1. [token]

    References
    ----------
    .. [1] Sun et al., TriForce, COLM 2024, arXiv:2404.11912; sinks: Xiao et al., ICLR 2024,
       arXiv:2309.17453.
    """

    def __init__(self, target: Decoder, *, sink: int = 4, window: int = 256) -> None:
        if sink < 0 or window < 1:
            raise DomainError(f"sink must be >= 0 and window >= 1; got {sink} and {window}")
        if target.config.window is not None:
            raise DomainError("a part of the cache needs a target without sliding window")
        self.target, self.sink, self.window = target, sink, window

    def propose(self, k: int, transform: Transform, uniform: Uniform) -> Proposal:
        """Return k drafts for each sequence, by k passes that read the part."""
        committed = self.cache.lengths.clone()
        part = self._part(k)

        def run(token: Tensor, j: int) -> Tensor:
            place = (committed + j)[:, None]
            logits: Tensor = self.target(token, part, positions=place)[:, 0]
            part.advance(1)
            return logits

        first = run(self.text.last(torch.ones_like(committed), 1), 0)
        return draft_chain(
            first,
            lambda token, j: run(token[:, None], j + 1),
            k,
            transform,
            uniform,
            self._seen(transform),
        )

    def _part(self, k: int) -> Cache:
        """Return a cache of the kept slots, with room for k more."""
        kept = min(self.sink + self.window, self.cache.capacity)
        part = self.target.cache(self.cache.batch, kept + k)
        slots = torch.arange(kept, device=self.cache.lengths.device)
        left_out = (self.cache.lengths - kept).clamp(min=0)[:, None]
        slots = slots + torch.where(slots >= self.sink, left_out, 0)
        rows = torch.arange(self.cache.batch, device=slots.device)[:, None]
        for whole, some in ((self.cache.keys, part.keys), (self.cache.values, part.values)):
            some.permute(1, 3, 0, 2, 4)[:, :kept] = whole.permute(1, 3, 0, 2, 4)[rows, slots]
        part.advance(self.cache.lengths.clamp(max=kept))
        return part


class NGram:
    """Prompt lookup: what followed the latest earlier place where the last tokens stood.

    The longest match counts, of `longest` down to `shortest` tokens; none: no drafts [1]_.

    References
    ----------
    .. [1] Saxena, prompt lookup decoding, 2023; prompt-lookup decoding in the engines.
    """

    def __init__(self, *, longest: int = 3, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest:
            raise DomainError(f"1 <= shortest <= longest does not hold for {shortest}, {longest}")
        self.longest, self.shortest = longest, shortest

    def start(self, text: Text, cache: Cache) -> None:
        """Begin with a batch."""
        self.text = text

    def propose(self, k: int, transform: Transform, uniform: Uniform) -> Proposal:
        """Return up to k drafts for each sequence."""
        tokens, lengths = self.text.tokens, self.text.lengths
        start = torch.zeros_like(lengths)  # of what followed; 0: nothing found
        for n in range(self.longest, self.shortest - 1, -1):
            if n >= tokens.shape[1]:
                continue
            suffix = self.text.last(torch.full_like(lengths, n), n)
            same = (tokens.unfold(1, n, 1) == suffix[:, None]).all(-1)
            after = torch.arange(n, n + same.shape[1], device=tokens.device)
            # What followed lies within the text, and the suffix is not its own earlier place.
            same &= (after < lengths[:, None]) & (lengths >= n)[:, None]
            start = torch.where(start > 0, start, (same * after).amax(1))
        columns = start[:, None] + torch.arange(k, device=tokens.device)
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        drafts = tokens[rows, columns.clamp(max=tokens.shape[1] - 1)]
        return Proposal(drafts, lengths=torch.where(start > 0, (lengths - start).clamp(max=k), 0))

    def settle(self) -> None:
        """Do nothing: the text is all it reads."""


class Forced:
    """Another drafter whose acceptance is imposed: every pass is real, every verdict is drawn.

    For timing models whose weights are random. What comes out does not follow the target.

    Parameters
    ----------
    drafter : Drafter
    rates : sequence of float
        Chance that draft j is accepted given that those before it were; the last one goes on.

    Raises
    ------
    DomainError
        When there is no rate, or one is outside [0, 1].
    """

    def __init__(self, drafter: Drafter, rates: Sequence[float]) -> None:
        self.rates = torch.tensor(list(rates), dtype=torch.float64)
        if not len(self.rates) or not bool(((self.rates >= 0) & (self.rates <= 1)).all()):
            raise DomainError(f"rates must be numbers in [0, 1]; got {list(rates)}")
        self.drafter = drafter

    def start(self, text: Text, cache: Cache) -> None:
        """Begin with a batch."""
        self.drafter.start(text, cache)

    def propose(self, k: int, transform: Transform, uniform: Uniform) -> Proposal:
        """Return the drafts, and how many of them count as accepted."""
        found = self.drafter.propose(k, transform, uniform)
        last = len(self.rates) - 1
        rates = self.rates[torch.arange(k).clamp(max=last)].to(found.tokens.device)
        passed = uniform(len(found.tokens), k) < rates
        accepted = passed.long().cumprod(1).sum(1)
        if found.lengths is not None:
            accepted = torch.minimum(accepted, found.lengths)
        return found._replace(accepted=accepted)

    def settle(self) -> None:
        """Forget what was rejected."""
        self.drafter.settle()
