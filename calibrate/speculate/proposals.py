"""What a drafter hands to verification, and how its law is drawn from along a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from calibrate.engine.cache import Cache
from calibrate.speculate.text import Text
from calibrate.speculate.trees import Tree
from specmodel.errors import DomainError
from specmodel.law import Transform, draw, draw_siblings

Uniform = Callable[..., Tensor]
"""Returns uniform numbers in [0, 1) of the shape it is given."""


class Layout(NamedTuple):
    """How the rows of a verification pass stand to each other: root, nodes, then extra rows.

    Attributes
    ----------
    parents : Tensor (nodes,) or (batch, nodes) of int64
    places : Tensor (rows,) or (batch, rows) of int64
        Position of each row behind the root. [token]
    sees : Tensor (1 or batch, rows, rows) of bool
    """

    parents: Tensor
    places: Tensor
    sees: Tensor

    @classmethod
    def of(cls, tree: Tree, device: Any) -> Layout:
        """Return the layout of a tree alone."""
        return cls(
            torch.tensor(tree.parents, dtype=torch.int64, device=device),
            tree.places(device),
            tree.sees(device)[None],
        )


class Extra(NamedTuple):
    """Rows that a drafter lets the target's pass carry beside the drafts.

    Attributes
    ----------
    tokens : Tensor (batch, m) of int64
    observe : callable
        Takes their logits (batch, m, vocab).
    """

    tokens: Tensor
    observe: Callable[[Tensor], None]


class Proposal(NamedTuple):
    """Drafts of one round.

    Attributes
    ----------
    tokens : Tensor (batch, nodes) of int64
        -1 where a sequence has no such node.
    log_q : Tensor or None
        What they were drawn from, of a chain (batch, k, vocab), of a tree what the children of
        root and nodes were drawn from (batch, nodes + 1, vocab). None: chosen without chance.
    lengths : Tensor (batch,) of int64, or None
        Drafts that each sequence has of a chain; None: all.
    layout : Layout or None
        Of a tree; None: a chain.
    extra : Extra or None
    accepted : Tensor (batch,) of int64, or None
        Accept so many nodes on the way to the deepest, whatever verification says (`Forced`).
    """

    tokens: Tensor
    log_q: Tensor | None = None
    lengths: Tensor | None = None
    layout: Layout | None = None
    extra: Extra | None = None
    accepted: Tensor | None = None


class Drafter(Protocol):
    """What the loop asks of a drafter.

    A drafter is told by `start` of a new batch, whose `text` (prompt and first token) and target
    `cache` it keeps and reads; the cache holds all of the text but its last token, and a drafter
    leaves its lengths as they were.

    Attributes
    ----------
    reads_features : bool
        Whether it needs ``text.features``.
    """

    reads_features: bool

    def start(self, text: Text, cache: Cache) -> None:
        """Begin with a batch; slots beyond the text hold a round's drafts."""

    def propose(self, tree: Tree, transform: Transform, uniform: Uniform) -> Proposal:
        """Return drafts for each sequence, at most those of `tree`."""

    def rows(self, tree: Tree) -> int:
        """Return how many rows beside the root a verification pass carries at most.

        Raises
        ------
        DomainError
            When it cannot draft such a tree.
        """

    def end(self) -> None:
        """Let go of the batch's memory."""

    def settle(self, nodes: Tensor, counts: Tensor) -> None:
        """Forget what was rejected: `text` holds what is committed.

        Parameters
        ----------
        nodes : Tensor (batch, n) of int64
            Accepted nodes from the root down.
        counts : Tensor (batch,) of int64
            How many of `nodes` count.
        """


def only_chains(tree: Tree, who: str) -> int:
    """Return k of a chain.

    Raises
    ------
    DomainError
        When it is a tree.
    """
    if not tree.is_chain:
        raise DomainError(f"{who} drafts chains, no trees")
    return tree.k


def draft(
    first: Tensor,
    following: Callable[[Tensor, range], Tensor],
    tree: Tree,
    transform: Transform,
    uniform: Uniform,
    seen: Tensor | None,
) -> Proposal:
    """Draw the nodes of a tree, depth by depth, from a drafter's own law.

    Siblings are distinct: drawn without replacement, and where the transform leaves no chance
    the likeliest ones.

    Parameters
    ----------
    first : Tensor (batch, vocab)
        Logits after the text.
    following : callable
        Given the tokens (batch, n) of one depth and their numbers, returns the logits
        (batch, n, vocab) after them; not asked for those after the last depth.
    tree : Tree
    transform : Transform
    uniform : callable
    seen : Tensor (batch, vocab) of bool, or None
        Tokens of the text, where the transform asks for them.
    """
    size, likeliest = len(first), transform.greedy and not tree.is_chain
    how = Transform(repetition_penalty=transform.repetition_penalty) if likeliest else transform
    logits, levels, laws = first[:, None], [], []
    seen = None if seen is None else seen[:, None]
    above = range(-1, 0)
    for level in tree.levels:
        law = how.log_probabilities(logits, seen)
        laws.append(law)
        parents = [tree.parents[node] - above.start for node in level]
        found = []
        for parent in sorted(set(parents)):
            count = parents.count(parent)
            if count > law.shape[-1]:
                raise DomainError(f"{count} candidates for a token of a vocabulary of fewer")
            if likeliest:
                found.append(law[:, parent].topk(count).indices)
            elif count == 1:
                found.append(draw(law[:, parent], uniform(size))[:, None])
            else:
                u = uniform(size, count)
                found.append(draw_siblings(law[:, parent], u, replacement=False))
        tokens = torch.cat(found, 1)
        levels.append(tokens)
        if level.stop < len(tree.parents):
            known = tokens.clamp(min=0)
            logits = following(known, level)
            if seen is not None:
                seen = seen[:, parents].scatter(2, known[..., None], True)
        above = level
    drafts = torch.cat(levels, 1)
    if tree.is_chain:
        return Proposal(drafts, torch.cat(laws, 1))
    layout = Layout.of(tree, first.device)
    if likeliest:
        return Proposal(drafts, None, layout=layout)
    leaves = laws[0].expand(-1, len(tree.levels[-1]), -1)  # not read
    return Proposal(drafts, torch.cat((*laws, leaves), 1), layout=layout)
