"""Heads on the target's own features, and the drafters that they make.

What the target computed at a token, its feature, says more of what follows than the token: one
layer over it (EAGLE, MTP) or one matrix for each position (Medusa) drafts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calibrate.engine.cache import Cache
from calibrate.engine.config import DecoderConfig
from calibrate.engine.decoder import Decoder, Stack
from calibrate.engine.graphs import capture
from calibrate.speculate.drafters import Passes, place
from calibrate.speculate.proposals import Proposal, Uniform, draft
from calibrate.speculate.text import Text
from calibrate.speculate.trees import Tree
from specmodel.errors import DomainError
from specmodel.law import Transform

_CHUNK = 512  # positions of a prompt a pass


class FeatureHead(Stack):
    """One layer over a token's embedding and the feature before it: the next feature.

    EAGLE [1]_ takes both as they are and returns a feature for the target's LM head; an MTP
    block [2]_ normalises both, and its output before the LM head. Embedding and LM head are the
    target's.

    Parameters
    ----------
    config : DecoderConfig
        The target's: the layer is like the target's own.
    norms : bool
        Whether it normalises, as MTP does.
    dtype, device : as torch takes them

    References
    ----------
    .. [1] Li et al., EAGLE, ICML 2024, arXiv:2401.15077.
    .. [2] DeepSeek-AI, DeepSeek-V3 Technical Report, section 2.2, arXiv:2412.19437.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        norms: bool,
        dtype: Any = torch.float32,
        device: Any = "cpu",
    ) -> None:
        # an MTP block is like the target's last layer, an EAGLE head's layer has no experts
        like = replace(config, layers=1, window=None, dense_layers=0 if norms else 1)
        super().__init__(like, norm=norms, dtype=dtype, device=device)
        kind = {"dtype": dtype, "device": device}
        self.fuse = nn.Parameter(torch.empty(config.hidden, 2 * config.hidden, **kind))
        for name in ("embedding_norm", "feature_norm"):
            weight = nn.Parameter(torch.ones(config.hidden, **kind)) if norms else None
            self.register_parameter(name, weight)

    def forward(
        self, embedding: Tensor, feature: Tensor, cache: Cache | None = None, **where: Any
    ) -> Tensor:
        """Return the next features (batch, width, hidden), replayed as `Decoder.hidden` is.

        Parameters
        ----------
        embedding, feature : Tensor (batch, width, hidden)
            Of each token, and the feature at the token before it.
        cache, **where
            As of `Stack.replayed` and `Stack.run`.
        """
        return self.replayed(self._next, (embedding, feature), cache, **where)

    def _next(
        self, embedding: Tensor, feature: Tensor, cache: Cache | None, **where: Any
    ) -> Tensor:
        if self.embedding_norm is not None:
            eps = self.config.norm_eps
            embedding = F.rms_norm(embedding, embedding.shape[-1:], self.embedding_norm, eps)
            feature = F.rms_norm(feature, feature.shape[-1:], self.feature_norm, eps)
        return self.run(F.linear(torch.cat((embedding, feature), -1), self.fuse), cache, **where)

    def logits(self, features: Tensor, target: Decoder) -> Tensor:
        """Return logits (..., vocab) of the features that it returned."""
        return target.logits(features if self.norm is None else self.normalise(features))


class MedusaHeads(nn.Module):  # type: ignore[misc]
    """A residual block and an LM head for each position ahead of the next [1]_.

    Parameters
    ----------
    hidden, vocab, count : int
        Width of the features, tokens, heads.
    dtype, device : as torch takes them

    References
    ----------
    .. [1] Cai et al., Medusa, ICML 2024, arXiv:2401.10774.
    """

    def __init__(
        self,
        hidden: int,
        vocab: int,
        count: int,
        *,
        dtype: Any = torch.float32,
        device: Any = "cpu",
    ) -> None:
        super().__init__()
        kind = {"dtype": dtype, "device": device}
        self.block = nn.Parameter(torch.zeros(count, hidden, hidden, **kind))
        self.bias = nn.Parameter(torch.zeros(count, hidden, **kind))
        self.head = nn.Parameter(torch.empty(count, vocab, hidden, **kind))

    @property
    def count(self) -> int:
        """Positions that it drafts for."""
        return len(self.block)

    def forward(self, features: Tensor, count: int) -> Tensor:
        """Return logits (count, n, vocab) of features (n, hidden) for the first positions."""
        found = []
        for block, bias, head in zip(
            self.block[:count], self.bias[:count], self.head[:count], strict=True
        ):
            x = features + F.silu(F.linear(features, block, bias))
            found.append(F.linear(x, head))
        return torch.stack(found)


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

    def propose(self, tree: Tree, transform: Transform, uniform: Uniform) -> Proposal:
        """Return drafts for each sequence, by one pass of the heads.

        Raises
        ------
        DomainError
            When the tree is deeper than there are heads.
        """
        if tree.k > self.heads.count:
            raise DomainError(f"{self.heads.count} Medusa heads do not draft {tree.k} positions")
        feature = self.text.features_at(self.text.lengths[:, None] - 2)[:, 0]
        logits = self.heads(feature, tree.k)

        def following(tokens: Tensor, level: range) -> Tensor:
            return logits[tree.depths[level.start], :, None].expand(-1, tokens.shape[1], -1)

        return draft(logits[0], following, tree, transform, uniform, self.seen(transform))
