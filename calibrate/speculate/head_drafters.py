"""The drafters that heads on the target's features make."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from calibrate.engine.cache import Cache
from calibrate.engine.decoder import Decoder
from calibrate.engine.generate import fill
from calibrate.engine.graphs import capture
from calibrate.speculate.drafters import Passes, place
from calibrate.speculate.heads import FeatureHead, MedusaHeads
from calibrate.speculate.proposals import Proposal, Uniform, draft
from calibrate.speculate.text import Text
from calibrate.speculate.trees import Tree
from specmodel.errors import DomainError
from specmodel.law import Transform

_CHUNK = 512  # positions of a prompt a pass


class FeatureDrafter(Passes):
    """EAGLE- or MTP-style: a head over features, its own ones where the target's are not there.

    Its first pass of a round takes every token committed since with the target's true feature.

    Parameters
    ----------
    target : Decoder
    head : FeatureHead
        Made for that target.
    """

    reads_features = True

    def __init__(self, target: Decoder, head: FeatureHead) -> None:
        if head.fuse.shape[0] != target.config.hidden:
            raise DomainError(
                f"the head takes features of width {head.fuse.shape[0]}, the target has "
                f"{target.config.hidden}"
            )
        self.target, self.head = target, head
        capture(head)

    def start(self, text: Text, cache: Cache) -> None:
        """Read the prompts."""
        self.text, self.cache = text, self.head.cache(len(text.tokens), cache.capacity)
        goal = text.lengths - 2  # the last entry belongs to the first round
        if text.filled:
            fill(goal, self.cache)
            return
        for _ in range(0, int(goal.max()), _CHUNK):
            self._read((goal - self.cache.lengths).clamp(0, _CHUNK), eager=True)

    def _read(self, counts: Tensor, *, eager: bool = False) -> Tensor:
        """Take the next `counts` tokens (batch,) with their features; return what it found."""
        columns = torch.arange(int(counts.max()), device=counts.device)
        at = (self.cache.lengths[:, None] + columns).clamp(max=self.text.tokens.shape[1] - 2)
        tokens = self.text.tokens.gather(1, at + 1)
        features = self.text.features_at(at)
        found: Tensor = self.head(self._embed(tokens), features, self.cache, eager=eager)
        self.cache.advance(counts)
        return found

    def _embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.target.embedding)

    def propose(self, tree: Tree, transform: Transform, uniform: Uniform) -> Proposal:
        """Return drafts for each sequence, by a pass of the head for each depth."""
        counts = self.text.lengths - 1 - self.cache.lengths
        rows = torch.arange(len(counts), device=counts.device)
        found = self._read(counts)[rows, counts - 1][:, None]
        above = range(-1, 0)

        def following(tokens: Tensor, level: range) -> Tensor:
            nonlocal found, above
            before = found[:, [tree.parents[node] - above.start for node in level]]
            where = place(tree, level, self.cache.lengths, root=False)
            found, above = self.head(self._embed(tokens), before, self.cache, **where), level
            return self.head.logits(found, self.target)

        first = self.head.logits(found[:, 0], self.target)
        return draft(first, following, tree, transform, uniform, self.seen(transform))

    def settle(self, nodes: Tensor, counts: Tensor) -> None:
        """Leave an entry to read for every sequence."""
        self.cache.rollback(torch.minimum(self.cache.lengths, self.text.lengths - 2))


class Medusa(Passes):
    """Heads that draft every position from one feature, none knowing what the others drew.

    Parameters
    ----------
    heads : MedusaHeads
        Made for the target.
    """

    reads_features = True

    def __init__(self, heads: MedusaHeads) -> None:
        self.heads = heads

    def rows(self, tree: Tree) -> int:
        """Return the number of nodes.

        Raises
        ------
        DomainError
            When the tree is deeper than there are heads.
        """
        if tree.k > self.heads.count:
            raise DomainError(f"{self.heads.count} Medusa heads do not draft {tree.k} positions")
        return super().rows(tree)

    def propose(self, tree: Tree, transform: Transform, uniform: Uniform) -> Proposal:
        """Return drafts for each sequence, by one pass of the heads."""
        feature = self.text.features_at(self.text.lengths[:, None] - 2)[:, 0]
        logits = self.heads(feature, tree.k)

        def following(tokens: Tensor, level: range) -> Tensor:
            return logits[tree.depths[level.start], :, None].expand(-1, tokens.shape[1], -1)

        return draft(logits[0], following, tree, transform, uniform, self.seen(transform))
