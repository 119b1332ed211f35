"""Rounds of drafting and verifying, with the time that each phase took."""

from __future__ import annotations

import math
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
from calibrate.engine.generate import check_prompts, fill, prefill
from calibrate.engine.graphs import Graphs, capture
from calibrate.speculate.proposals import Drafter, Layout, Proposal, Uniform
from calibrate.speculate.text import Stop, Text
from calibrate.speculate.trees import Tree
from specmodel.errors import DomainError
from specmodel.law import Transform, draw, seen_along, verify_chain, verify_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of a batch.

    Attributes
    ----------
    active : ndarray of bool (batch,)
        Sequences that had not ended before it; the other fields mean nothing for the rest.
    drafted, accepted, committed : ndarray of int (batch,)
        Positions that were drafted for, drafts accepted, and tokens that entered the text:
        accepted + 1, fewer where it ended.
    overlap : ndarray of float (batch, k)
        Sum of min(p, q) over the vocabulary for each draft of a chain; NaN where there was none,
        of trees, and where acceptance is imposed. [-]
    candidates, ranks : ndarray of int (batch, k)
        How many tokens were proposed for each position that was reached, and which of them was
        accepted, from 0; -1: none.
    surprisal, entropy : ndarray of float (batch, k + 1)
        Of each token that entered the text, and of the law it came from, under the target's own
        law before any transform; NaN beyond. [bit]
    T_d, T_v, T_o : float
        Drafting, the verification pass, and all else. [s]
    """

    active: NDArray[np.bool_]
    drafted: NDArray[np.int64]
    accepted: NDArray[np.int64]
    committed: NDArray[np.int64]
    overlap: NDArray[np.float64]
    candidates: NDArray[np.int64]
    ranks: NDArray[np.int64]
    surprisal: NDArray[np.float64]
    entropy: NDArray[np.float64]
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
    k: int | Tree,
    max_new_tokens: int,
    transform: Transform | None = None,
    seed: int = 0,
    eos: Sequence[int] | None = None,
    stop: Stop | None = None,
    filled: bool = False,
) -> Outcome:
    """Continue prompts by speculative decoding; the law of the text is the target's [1]_.

    Parameters
    ----------
    target : Decoder
    drafter : Drafter or None
        None, or k = 0: plain decoding by the same loop.
    prompts : sequence of token sequences
        Of any lengths; every sequence accepts its own number each round.
    k : int or Tree
        Drafts of a round: a chain of so many [token], or a tree.
    max_new_tokens : int
    transform : Transform, optional
        Of target and drafter alike; greedy by default.
    seed : int
    eos : sequence of int, optional
        Tokens that end a text, by default the target's; none to go on to `max_new_tokens`.
    stop : callable, optional
        Given the new tokens of a text, how many of them it ends after, or None (`stop_strings`).
    filled : bool
        Fill caches with noise instead of reading the prompts: to time models of random weights.

    Raises
    ------
    DomainError
        For an empty prompt, one that leaves no room in the model's context, logits that are not
        finite, or more than the memory has room for.

    References
    ----------
    .. [1] Leviathan et al., ICML 2023, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318.
    """
    tree = k if isinstance(k, Tree) else Tree.chain(k)
    drafter = drafter if tree.k else None
    capture(target)
    check_prompts(target, prompts, max_new_tokens)
    how = Transform(temperature=0) if transform is None else transform
    generator = torch.Generator(target.device).manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64, device=target.device, generator=generator)

    # Rejected rows of the last round may stand behind the longest text.
    rows = 0 if drafter is None else drafter.rows(tree)
    capacity = max(map(len, prompts)) + max_new_tokens + rows
    cache = target.cache(len(prompts), capacity)
    text = Text(
        prompts,
        capacity,
        vocab=target.config.vocab,
        filled=filled,
        hidden=target.config.hidden if drafter is not None and drafter.reads_features else 0,
        dtype=target.dtype,
        device=target.device,
    )
    features = text.features if text.features.shape[2] else None
    if filled:
        fill(text.lengths, cache, features)
        logits = target.logits(torch.zeros(len(prompts), target.config.hidden).to(target.norm))
    else:
        logits = prefill(target, prompts, cache, features)
    prompt_lengths = text.lengths.clone()
    ends = torch.tensor(
        target.config.eos if eos is None else list(eos), dtype=torch.int64, device=target.device
    )
    limits = prompt_lengths + max_new_tokens
    batch = _Batch(target, cache, text, how, uniform, ends, stop, prompt_lengths, limits)
    batch.commit(draw(batch.law(logits), uniform(len(prompts)))[:, None])
    if drafter is not None:
        drafter.start(text, cache)
    rounds = list(batch.rounds(drafter, tree))
    if drafter is not None:
        drafter.end()
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
    stop: Stop | None
    starts: Tensor  # of the new tokens
    limits: Tensor
    active: Any = None

    def rounds(self, drafter: Drafter | None, tree: Tree) -> Iterator[Round]:
        """Run rounds until every sequence has ended."""
        clock = Clock(torch.device(self.target.device))
        while bool(self.active.any()):
            yield self._round(drafter, tree, lambda: clock.now() - Graphs.spent)

    def _round(self, drafter: Drafter | None, tree: Tree, now: Callable[[], float]) -> Round:
        size, was = len(self.text.tokens), self.active
        begin = now()
        if drafter is None:
            found = Proposal(
                torch.zeros(size, 0, dtype=torch.int64, device=self.cache.lengths.device)
            )
        else:
            found = _cut(drafter.propose(tree, self.transform, self.uniform))
        drafted = now()
        hidden, logits = self._pass(found)
        verified = now()
        nodes = found.tokens.shape[1]
        log_p = self.law(logits[:, : nodes + 1], found)
        path, accepted, token = self._verdict(log_p, found)
        block = torch.cat((found.tokens.gather(1, path), token[:, None]), 1)
        block.scatter_(1, accepted[:, None], token[:, None])
        counts = self.commit(block, accepted + 1)
        rows = torch.nn.functional.pad(path + 1, (1, 0))  # of the pass: root, then accepted
        if found.layout is None:
            self.cache.advance(counts)
        else:
            self.cache.keep(rows, counts)
        if self.text.features.shape[2]:
            index = rows[..., None].expand(-1, -1, hidden.shape[2])
            self.text.keep_features(hidden.gather(1, index), counts)
        if drafter is not None:
            if found.extra is not None:
                found.extra.observe(logits[:, nodes + 1 :])
            drafter.settle(path, accepted)
        done = now()
        k = 0 if drafter is None else tree.k
        return Round(
            active=was.cpu().numpy(),
            drafted=_positions(found).cpu().numpy(),
            accepted=accepted.cpu().numpy(),
            committed=counts.cpu().numpy(),
            overlap=_overlap(log_p, found, k).cpu().double().numpy(),
            **_ranks(found, path, accepted, k),
            **_information(logits, rows, block, counts, k + 1),
            T_d=drafted - begin,
            T_v=verified - drafted,
            T_o=done - verified,
        )

    def _pass(self, found: Proposal) -> tuple[Tensor, Tensor]:
        """Return the target's features and logits at root, drafts and extra rows."""
        parts = [self.text.last(torch.ones_like(self.cache.lengths), 1), found.tokens.clamp(min=0)]
        where: dict[str, Tensor] = {}
        if found.extra is not None:
            parts.append(found.extra.tokens)
        if found.layout is not None:
            where["positions"] = self.cache.lengths[:, None] + found.layout.places
            where["mask"] = found.layout.sees.expand(len(self.cache.lengths), -1, -1)
        hidden = self.target.hidden(torch.cat(parts, 1), self.cache, **where)
        return hidden, self.target.logits(hidden)

    def law(self, logits: Tensor, found: Proposal | None = None) -> Tensor:
        """Return log p of logits (batch, vocab), or of those along drafts (batch, rows, vocab).

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
            if found is not None:
                parents = None if found.layout is None else found.layout.parents
                seen = seen_along(seen, found.tokens, parents)
        law: Tensor = self.transform.log_probabilities(logits, seen)
        return law

    def _verdict(self, log_p: Tensor, found: Proposal) -> tuple[Tensor, Tensor, Tensor]:
        """Return accepted nodes (batch, n) from the root down, how many count, and what follows."""
        size, nodes = found.tokens.shape
        u = self.uniform(size, nodes + 1)
        path = torch.arange(nodes, device=u.device).expand(size, -1)
        if found.layout is None:
            accepted, token = verify_chain(log_p, found.log_q, found.tokens, u, found.lengths)
        else:
            taken, token = verify_tree(
                log_p, found.log_q, found.tokens, found.layout.parents, u, replacement=False
            )
            path = torch.argsort((~taken).long(), dim=1, stable=True)
            path, accepted = path[:, : _depth(found.layout, nodes)], taken.sum(1)
        if found.accepted is None:
            return path, accepted, token
        if found.layout is not None:
            path = _deepest(found.layout, size)
        rows = torch.arange(size, device=u.device)
        last = torch.nn.functional.pad(path + 1, (1, 0))[rows, found.accepted]
        return path, found.accepted, draw(log_p[rows, last], u[:, nodes])

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
        if self.stop is not None:
            stopped, over = self._stopped(self.stop)
            ended = ended | stopped
            self.text.lengths -= over
            counts = counts - over
        self.active = self.active & ~ended & (self.text.lengths < self.limits)
        return counts

    def _stopped(self, stop: Stop) -> tuple[Tensor, Tensor]:
        """Return which active texts have come to a stop, and by how many tokens they passed it."""
        over = torch.zeros_like(self.text.lengths)
        stopped = torch.zeros_like(self.active)
        for row in self.active.nonzero()[:, 0].tolist():
            new = self.text.tokens[row, self.starts[row] : self.text.lengths[row]].tolist()
            if (kept := stop(new)) is not None:
                stopped[row], over[row] = True, len(new) - kept
        return stopped, over


def _cut(found: Proposal) -> Proposal:
    """Return a proposal without the columns in which no sequence has a draft."""
    if found.lengths is None:
        return found
    width = int(found.lengths.max())
    log_q = None if found.log_q is None else found.log_q[:, :width]
    return found._replace(tokens=found.tokens[:, :width], log_q=log_q)


def _depth(layout: Layout, nodes: int) -> int:
    """Return the depth of the deepest node. [token]"""
    return int(layout.places[..., : nodes + 1].max())


def _deepest(layout: Layout, size: int) -> Tensor:
    """Return the nodes down to the first of the deepest, (size, depth)."""
    parents = layout.parents.tolist()
    node = int(layout.places[1 : len(parents) + 1].argmax())
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return torch.tensor(path, device=layout.parents.device).expand(size, -1)


def _positions(found: Proposal) -> Tensor:
    """Return how many positions each sequence has drafts for, (batch,). [token]"""
    size, nodes = found.tokens.shape
    if found.lengths is not None:
        return found.lengths
    if found.layout is None:
        return torch.full((size,), nodes, device=found.tokens.device)
    places = found.layout.places[..., 1 : nodes + 1].expand(size, -1)
    return torch.where(found.tokens >= 0, places, 0).amax(1)


def _overlap(log_p: Tensor, found: Proposal, k: int) -> Tensor:
    """Return the sum of min(p, q) at each draft (batch, k), NaN where a sequence has none."""
    width = found.tokens.shape[1]
    if found.layout is not None or found.accepted is not None:
        return torch.full((len(log_p), k), torch.nan)
    before = log_p[:, :width]
    if found.log_q is None:
        shared = before.gather(2, found.tokens[:, :, None])[..., 0].exp()
    else:
        shared = torch.minimum(before, found.log_q).exp().sum(-1)
    if found.lengths is not None:
        there = torch.arange(width, device=shared.device) < found.lengths[:, None]
        shared = torch.where(there, shared, torch.nan)
    return torch.nn.functional.pad(shared, (0, k - width), value=torch.nan)


def _ranks(found: Proposal, path: Tensor, accepted: Tensor, k: int) -> dict[str, Any]:
    """Return candidates and rank of the accepted one at each depth, (batch, k)."""
    size, nodes = found.tokens.shape
    parents = torch.arange(-1, nodes - 1) if found.layout is None else found.layout.parents.cpu()
    parents = parents.expand(size, -1)
    there = found.tokens.cpu() >= 0
    if found.lengths is not None:
        there &= torch.arange(nodes) < found.lengths.cpu()[:, None]
    alike = (parents[:, :, None] == parents[:, None]) & there[:, None]
    rank = alike.tril(-1).sum(2)  # siblings before each node
    children = torch.zeros(size, nodes + 1, dtype=torch.int64)
    children.scatter_add_(1, parents + 1, there.long())
    path, accepted = path.cpu(), accepted.cpu()
    depth = torch.arange(path.shape[1])
    above = torch.nn.functional.pad(path[:, :-1] + 1, (1, 0)) if nodes else path
    reached = depth <= accepted[:, None]
    values = {
        "candidates": torch.where(reached, children.gather(1, above), 0),
        "ranks": torch.where(depth < accepted[:, None], rank.gather(1, path), -1),
    }
    pad = (0, k - path.shape[1])
    fill = {"candidates": 0, "ranks": -1}
    return {
        name: torch.nn.functional.pad(value, pad, value=fill[name]).numpy()
        for name, value in values.items()
    }


def _information(
    logits: Tensor, rows: Tensor, block: Tensor, counts: Tensor, width: int
) -> dict[str, Any]:
    """Return surprisal and entropy (batch, width) of what was committed, in bits."""
    taken = logits.gather(1, rows[..., None].expand(-1, -1, logits.shape[2])).float()
    law = torch.log_softmax(taken, -1)
    there = torch.arange(block.shape[1], device=block.device) < counts[:, None]
    found = {
        "surprisal": -law.gather(2, block.clamp(min=0)[..., None])[..., 0],
        "entropy": -(law.exp() * law.clamp(min=-1e30)).sum(-1),
    }
    pad = (0, width - block.shape[1])
    return {
        name: torch.nn.functional.pad(
            torch.where(there, values / math.log(2), torch.nan), pad, value=torch.nan
        )
        .cpu()
        .double()
        .numpy()
        for name, values in found.items()
    }
