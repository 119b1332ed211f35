"""Rounds of drafting and verifying, with the time that each phase took."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calibrate.clock import Clock
from calibrate.engine.cache import Cache
from calibrate.engine.decoder import Decoder
from calibrate.engine.generate import check_prompts, prefill
from calibrate.speculate.drafters import Drafter, Proposal, Uniform
from calibrate.speculate.text import Text
from specmodel.errors import DomainError
from specmodel.law import Transform, draw, seen_along, verify_chain


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of a batch.

    Attributes
    ----------
    active : ndarray of bool (batch,)
        Sequences that had not ended before it; the other fields mean nothing for the rest.
    drafted, accepted, committed : ndarray of int (batch,)
        Drafts verified, drafts accepted, and tokens that entered the text: accepted + 1, fewer
        where it ended.
    overlap : ndarray of float (batch, k)
        Sum of min(p, q) over the vocabulary for each draft, NaN where there was none. [-]
    T_d, T_v, T_o : float
        Drafting, the verification pass, and all else. [s]
    """

    active: NDArray[np.bool_]
    drafted: NDArray[np.int64]
    accepted: NDArray[np.int64]
    committed: NDArray[np.int64]
    overlap: NDArray[np.float64]
    T_d: float
    T_v: float
    T_o: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a batch came to.

    Attributes
    ----------
    tokens : list of list of int
        New tokens of each prompt, its end token included.
    rounds : list of Round
    """

    tokens: list[list[int]]
    rounds: list[Round] = field(repr=False)


@torch.inference_mode()  # type: ignore[untyped-decorator]
def speculate(
    target: Decoder,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    k: int,
    max_new_tokens: int,
    transform: Transform | None = None,
    seed: int = 0,
    eos: Sequence[int] | None = None,
) -> Outcome:
    """Continue prompts by speculative decoding; the law of the text is the target's [1]_.

    Parameters
    ----------
    target : Decoder
    drafter : Drafter or None
        None, or k = 0: plain decoding by the same loop.
    prompts : sequence of token sequences
        Of any lengths; every sequence accepts its own number each round.
    k : int
        Drafts of a round. [token]
    max_new_tokens : int
    transform : Transform, optional
        Of target and drafter alike; greedy by default.
    seed : int
    eos : sequence of int, optional
        Tokens that end a text, by default the target's; none to go on to `max_new_tokens`.

    Raises
    ------
    DomainError
        For an empty prompt, one that leaves no room in the model's context, logits that are not
        finite, or more than the memory has room for.

    References
    ----------
    .. [1] Leviathan et al., ICML 2023, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318.
    """
    if k < 0:
        raise DomainError(f"k must be >= 0; got {k}")
    check_prompts(target, prompts, max_new_tokens)
    how = Transform(temperature=0) if transform is None else transform
    generator = torch.Generator(target.device).manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64, device=target.device, generator=generator)

    # Rejected drafts of the last round may stand behind the longest text.
    capacity = max(map(len, prompts)) + max_new_tokens + k
    cache = target.cache(len(prompts), capacity)
    logits = prefill(target, prompts, cache)
    text = Text(prompts, capacity, vocab=target.config.vocab, device=target.device)
    prompt_lengths = text.lengths.clone()
    ends = torch.tensor(
        target.config.eos if eos is None else list(eos), dtype=torch.int64, device=target.device
    )
    batch = _Batch(target, cache, text, how, uniform, ends, prompt_lengths + max_new_tokens)
    batch.commit(draw(batch.law(logits), uniform(len(prompts)))[:, None])
    if drafter is not None and k:
        drafter.start(text, cache)
    rounds = list(batch.rounds(drafter if k else None, k))
    new = [
        row[start:end].tolist()
        for row, start, end in zip(text.tokens, prompt_lengths, text.lengths, strict=True)
    ]
    return Outcome(new, rounds)


@dataclass(slots=True)
class _Batch:
    """A batch on its way: its text and the target's cache, one token behind the text."""

    target: Decoder
    cache: Cache
    text: Text
    transform: Transform
    uniform: Uniform
    ends: Tensor
    limits: Tensor
    active: Any = None

    def rounds(self, drafter: Drafter | None, k: int) -> Iterator[Round]:
        """Run rounds until every sequence has ended."""
        now = Clock(torch.device(self.target.device)).now
        while bool(self.active.any()):
            yield self._round(drafter, k, now)

    def _round(self, drafter: Drafter | None, k: int, now: Callable[[], float]) -> Round:
        size, was = len(self.text.tokens), self.active
        begin = now()
        if drafter is None:
            found = Proposal(
                torch.zeros(size, 0, dtype=torch.int64, device=self.cache.lengths.device)
            )
        else:
            found = _cut(drafter.propose(k, self.transform, self.uniform))
        drafted = now()
        one = torch.ones_like(self.cache.lengths)
        logits = self.target(torch.cat((self.text.last(one, 1), found.tokens), 1), self.cache)
        verified = now()
        log_p = self.law(logits, found.tokens)
        accepted, token = self._verdict(log_p, found)
        block = torch.cat((found.tokens, token[:, None]), 1)
        block[torch.arange(size, device=block.device), accepted] = token
        counts = self.commit(block, accepted + 1)
        self.cache.advance(torch.where(was, self.text.lengths - 1 - self.cache.lengths, 0))
        if drafter is not None:
            drafter.settle()
        done = now()
        lengths = torch.full_like(accepted, found.tokens.shape[1])
        return Round(
            active=was.cpu().numpy(),
            drafted=(lengths if found.lengths is None else found.lengths).cpu().numpy(),
            accepted=accepted.cpu().numpy(),
            committed=counts.cpu().numpy(),
            overlap=_overlap(log_p, found, k).cpu().double().numpy(),
            T_d=drafted - begin,
            T_v=verified - drafted,
            T_o=done - verified,
        )

    def law(self, logits: Tensor, drafts: Tensor | None = None) -> Tensor:
        """Return log p of logits (batch, vocab), or of those along drafts (batch, k + 1, vocab).

        Raises
        ------
        DomainError
            When logits of a sequence are NaN or infinite.
        """
        finite = torch.isfinite(logits).flatten(1).all(1)
        if not bool(finite.all()):
            rows = (~finite).nonzero()[:, 0].tolist()
            raise DomainError(f"logits of sequences {rows} are not finite")
        seen = None
        if self.transform.repetition_penalty != 1:
            seen = self.text.seen()
            seen = seen if drafts is None else seen_along(seen, drafts)
        law: Tensor = self.transform.log_probabilities(logits, seen)
        return law

    def _verdict(self, log_p: Tensor, found: Proposal) -> tuple[Tensor, Tensor]:
        """Return how many drafts each sequence accepts, and the token that follows."""
        size, k = found.tokens.shape
        u = self.uniform(size, k + 1)
        if found.accepted is not None:
            rows = torch.arange(size, device=u.device)
            return found.accepted, draw(log_p[rows, found.accepted], u[:, k])
        return verify_chain(log_p, found.log_q, found.tokens, u, found.lengths)

    def commit(self, block: Tensor, counts: Tensor | None = None) -> Tensor:
        """Append the first `counts` tokens of a block to active sequences, up to where they end.

        Returns how many were; sequences that end in it stop being active.
        """
        if self.active is None:
            self.active = torch.ones(len(block), dtype=torch.bool, device=block.device)
        counts = torch.ones_like(self.limits) if counts is None else counts
        counts = torch.minimum(counts, self.limits - self.text.lengths)
        columns = torch.arange(block.shape[1], device=block.device)
        end = torch.isin(block, self.ends) & (columns < counts[:, None])
        ended = end.any(1)
        counts = torch.where(ended, end.long().argmax(1) + 1, counts)
        counts = torch.where(self.active, counts, 0)
        self.text.append(block, counts)
        self.active = self.active & ~ended & (self.text.lengths < self.limits)
        return counts


def _cut(found: Proposal) -> Proposal:
    """Return a proposal without the columns in which no sequence has a draft."""
    if found.lengths is None:
        return found
    width = int(found.lengths.max())
    log_q = None if found.log_q is None else found.log_q[:, :width]
    return found._replace(tokens=found.tokens[:, :width], log_q=log_q)


def _overlap(log_p: Tensor, found: Proposal, k: int) -> Tensor:
    """Return the sum of min(p, q) at each draft (batch, k), NaN where a sequence has none."""
    width = found.tokens.shape[1]
    before = log_p[:, :width]
    if found.log_q is None:
        shared = before.gather(2, found.tokens[:, :, None])[..., 0].exp()
    else:
        shared = torch.minimum(before, found.log_q).exp().sum(-1)
    if found.lengths is not None:
        there = torch.arange(width, device=shared.device) < found.lengths[:, None]
        shared = torch.where(there, shared, torch.nan)
    return torch.nn.functional.pad(shared, (0, k - width), value=torch.nan)
