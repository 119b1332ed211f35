"""Drafters that run: what proposes the tokens that the target verifies.

All but the n-gram draft with passes of their own, one for each depth, and differ in whose layers
and whose cache those passes take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from calibrate.engine.cache import Cache
from calibrate.engine.decoder import Decoder
from calibrate.engine.generate import fill, prefill
from calibrate.engine.graphs import capture
from calibrate.speculate.proposals import Drafter, Proposal, Uniform, draft, only_chains
from calibrate.speculate.text import Text
from calibrate.speculate.trees import Tree
from specmodel.errors import DomainError
from specmodel.law import Transform

_PADDING = 0.01


def check_pair(target: Decoder, draft: Decoder) -> None:
    """Refuse a draft model whose vocabulary is not the target's.

    Tables padded to another multiple differ by less than 1%.

    Raises
    ------
    DomainError
        When sizes or devices differ. Tokenizers are compared where they are loaded.
    """
    if abs(draft.config.vocab / target.config.vocab - 1) > _PADDING:
        raise DomainError(
            f"the draft model's vocabulary of {draft.config.vocab} tokens is not the target's "
            f"of {target.config.vocab}"
        )
    if draft.device != target.device:
        raise DomainError(f"the draft model is on {draft.device}, the target on {target.device}")


class Passes:
    """What the drafters that run passes have in common."""

    reads_features = False
    text: Text
    cache: Cache

    def start(self, text: Text, cache: Cache) -> None:
        """Begin with a batch."""
        self.text, self.cache = text, cache

    def rows(self, tree: Tree) -> int:
        """Return the number of nodes."""
        return len(tree.parents)

    def end(self) -> None:
        """Let go of the batch's memory."""
        for name in ("text", "cache"):
            vars(self).pop(name, None)

    def settle(self, nodes: Tensor, counts: Tensor) -> None:
        """Do nothing: no more is kept than `text` and the target's cache."""

    def seen(self, transform: Transform) -> Tensor | None:
        """Return the tokens of the text where the transform asks for them."""
        return self.text.seen() if transform.repetition_penalty != 1 else None


def place(tree: Tree, level: range, lengths: Tensor, *, root: bool) -> dict[str, Any]:
    """Return where a pass over one depth stands: `positions`, `mask`, `written` for the decoder.

    Parameters
    ----------
    tree : Tree
    level : range
        Its nodes.
    lengths : Tensor (batch,)
        The text that stands before what is uncommitted. [token]
    root : bool
        Whether the root is the first uncommitted column, else the last committed one.
    """
    device, first = lengths.device, 0 if root else 1
    columns = slice(first, level.stop + 1)
    found = {
        "positions": lengths[:, None] + tree.places(device)[columns] - first,
        "written": level.start + 1 - first,
    }
    if not tree.is_chain:
        sees = tree.sees(device)[level.start + 1 : level.stop + 1, columns]
        found["mask"] = sees.expand(len(lengths), -1, -1)
    return found


class DraftModel(Passes):
    """A smaller model with a cache of its own.

    Its first pass of a round takes what was committed since: one token, or two where every draft
    was accepted, so that each draft costs one pass.

    Parameters
    ----------
    decoder : Decoder
        Of the target's vocabulary (`check_pair`). Where its table is padded otherwise, tokens
        that only the target has are never drafted, those that only it has neither.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        capture(decoder)

    def start(self, text: Text, cache: Cache) -> None:
        """Read the prompts."""
        self.text, self.cache = text, self.decoder.cache(len(text.tokens), cache.capacity)
        if text.filled:
            fill(text.lengths - 1, self.cache)
            return
        lengths = text.lengths.tolist()
        tokens = self._known(text.tokens)
        prefill(
            self.decoder,
            [row[: n - 1] for row, n in zip(tokens, lengths, strict=True)],
            self.cache,
        )

    def _known(self, tokens: Tensor) -> Tensor:
        """Return tokens as the draft model's table has them."""
        return tokens.clamp(max=self.decoder.config.vocab - 1)

    def _logits(self, features: Tensor) -> Tensor:
        """Return logits over the target's vocabulary."""
        logits = self.decoder.logits(features)
        missing = self.text.vocab - logits.shape[-1]
        return logits if not missing else F.pad(logits, (0, missing), value=-torch.inf)

    def propose(self, tree: Tree, transform: Transform, uniform: Uniform) -> Proposal:
        """Return drafts for each sequence, by a pass for each depth."""
        missing = self.text.lengths - self.cache.lengths
        width = int(missing.max())
        found = self.decoder.hidden(self._known(self.text.last(missing, width)), self.cache)
        self.cache.advance(missing)
        rows = torch.arange(len(missing), device=missing.device)
        self._depths, self._chain = max(tree.k - 1, 0), tree.is_chain

        def following(tokens: Tensor, level: range) -> Tensor:
            where = place(tree, level, self.cache.lengths, root=False)
            known = self._known(tokens)
            return self._logits(self.decoder.hidden(known, self.cache, **where))

        first = self._logits(found[rows, missing - 1])
        return draft(first, following, tree, transform, uniform, self.seen(transform))

    def settle(self, nodes: Tensor, counts: Tensor) -> None:
        """Keep the accepted drafts that passes were run for."""
        counts = counts.clamp(max=self._depths)
        if self._chain:
            self.cache.advance(counts)
        else:
            self.cache.keep(nodes[:, : self._depths], counts)
        self.cache.rollback(torch.minimum(self.cache.lengths, self.text.lengths - 1))


class SelfLayers(Passes):
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

    def propose(self, tree: Tree, transform: Transform, uniform: Uniform) -> Proposal:
        """Return drafts for each sequence, by a pass of some layers for each depth."""

        def run(tokens: Tensor, **where: Any) -> Tensor:
            logits: Tensor = self.target(tokens, self.cache, layers=self.layers, **where)
            return logits

        first = run(self.text.last(torch.ones_like(self.cache.lengths), 1))[:, 0]
        return draft(
            first,
            lambda tokens, level: run(tokens, **place(tree, level, self.cache.lengths, root=True)),
            tree,
            transform,
            uniform,
            self.seen(transform),
        )


class SparseCache(Passes):
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

    part: Cache | None  # stays for a batch, so that graphs over it do

    def __init__(self, target: Decoder, *, sink: int = 4, window: int = 256) -> None:
        if sink < 0 or window < 1:
            raise DomainError(f"sink must be >= 0 and window >= 1; got {sink} and {window}")
        if target.config.window is not None:
            raise DomainError("a part of the cache needs a target without sliding window")
        self.target, self.sink, self.window = target, sink, window

    def start(self, text: Text, cache: Cache) -> None:
        """Begin with a batch."""
        self.text, self.cache, self.part = text, cache, None

    def propose(self, tree: Tree, transform: Transform, uniform: Uniform) -> Proposal:
        """Return drafts for each sequence, by a pass over the part for each depth."""
        lengths = self.cache.lengths
        part = self._part(len(tree.parents))

        def run(tokens: Tensor, **where: Any) -> Tensor:
            logits: Tensor = self.target(tokens, part, **where)
            return logits

        first = run(self.text.last(torch.ones_like(lengths), 1), positions=lengths[:, None])
        return draft(
            first[:, 0],
            lambda tokens, level: run(tokens, **place(tree, level, lengths, root=True)),
            tree,
            transform,
            uniform,
            self.seen(transform),
        )

    def end(self) -> None:
        """Let go of the batch's memory, the part's too."""
        super().end()
        self.part = None

    def _part(self, nodes: int) -> Cache:
        """Return a cache of the kept slots, with room for root and nodes."""
        kept = min(self.sink + self.window, self.cache.capacity)
        part = self.part
        if part is None or part.capacity != kept + 1 + nodes:
            part = self.part = self.target.cache(self.cache.batch, kept + 1 + nodes)
        part.rollback(0)
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

    reads_features = False

    def start(self, text: Text, cache: Cache) -> None:
        """Begin with a batch."""
        self.text = text

    def propose(self, tree: Tree, transform: Transform, uniform: Uniform) -> Proposal:
        """Return up to k drafts for each sequence."""
        k = self.rows(tree)
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

    def rows(self, tree: Tree) -> int:
        """Return the drafts of a chain."""
        return only_chains(tree, "prompt lookup")

    def end(self) -> None:
        """Do nothing: it holds a text."""

    def settle(self, nodes: Tensor, counts: Tensor) -> None:
        """Do nothing: the text is all it reads."""


class Forced:
    """Another drafter whose acceptance is imposed: passes and verification run, verdicts are drawn.

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
        self.drafter, self.reads_features = drafter, drafter.reads_features

    def start(self, text: Text, cache: Cache) -> None:
        """Begin with a batch."""
        self.drafter.start(text, cache)

    def propose(self, tree: Tree, transform: Transform, uniform: Uniform) -> Proposal:
        """Return the drafts, and how many of them count as accepted."""
        found = self.drafter.propose(tree, transform, uniform)
        if found.extra is not None:
            raise DomainError("acceptance cannot be imposed on guesses that may not be there")
        last = len(self.rates) - 1
        rates = self.rates[torch.arange(tree.k).clamp(max=last)].to(found.tokens.device)
        passed = uniform(len(found.tokens), tree.k) < rates
        accepted = passed.long().cumprod(1).sum(1)
        if found.lengths is not None:
            accepted = torch.minimum(accepted, found.lengths)
        return found._replace(tokens=found.tokens.clamp(min=0), accepted=accepted)

    def rows(self, tree: Tree) -> int:
        """Return the other drafter's."""
        return self.drafter.rows(tree)

    def end(self) -> None:
        """Let go of the other drafter's memory."""
        self.drafter.end()

    def settle(self, nodes: Tensor, counts: Tensor) -> None:
        """Forget what was rejected."""
        self.drafter.settle(nodes, counts)
