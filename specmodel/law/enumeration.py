"""What a round commits, exactly, by running the sampler over every case of a small vocabulary.

The sampler is a function of the drafts and of uniform numbers. For given drafts its answer is
constant on boxes of the uniforms: an acceptance has one cut, the last draw the cuts of the
cumulative laws it may draw from. So `verify_chain` and `verify_tree` themselves run once in each
box, and the volumes of the boxes are the chances of what they answered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmodel.errors import DomainError, whole_array
from specmodel.law.rules import accept_chance, verify_chain
from specmodel.law.trees import reject, verify_tree

Floats = NDArray[np.float64]
Tokens = tuple[int, ...]
Model = Callable[[Tokens], Any]  # from the tokens drawn so far to log probabilities, [V]
Block = tuple[list[int], int]  # accepted nodes, and the token that follows


@dataclass(frozen=True, slots=True, eq=False)
class OutputLaw:
    """What one round commits, and the text that plain sampling then continues from it.

    Parameters
    ----------
    blocks : dict
        Chance of each block of tokens that a round commits, the last token included. [-]
    law : ndarray, shape (V,) * n
        Joint law of the first n tokens, n the most a round can commit: the block, continued by
        the target where it is shorter. [-]
    target : ndarray, shape (V,) * n
        The target's own. [-] A sampler is exact when they are equal for every target.
    """

    blocks: dict[Tokens, float]
    law: Floats
    target: Floats

    @property
    def G(self) -> float:
        """Mean tokens committed a round. [token]"""
        return sum(len(block) * chance for block, chance in self.blocks.items())

    @property
    def total_variation(self) -> float:
        """Distance of the two joint laws, half the sum of absolute differences. [-], 0 to 1."""
        return float(abs(self.law - self.target).sum() / 2)


def output_law_chain(
    target: Model,
    drafter: Model,
    k: int,
    *,
    length: int | Callable[[Tokens], int] | None = None,
    deterministic: bool = False,
    claimed: Model | None = None,
) -> OutputLaw:
    """Return the exact law of a round of `verify_chain` with k drafts.

    Parameters
    ----------
    target, drafter : callable
        From a tuple of tokens (the drafts so far) to log probabilities [V], in NumPy.
    k : int
        Columns of drafts. [token]
    length : int or callable, optional
        Drafts the sequence really has, as in a ragged batch, or a function of the k drafts that
        says how many of them are proposed; k without it. [token]
    deterministic : bool
        Whether the draft is the drafter's likeliest token instead of a draw.
    claimed : callable, optional
        The law that verification is told drafts were drawn from, `drafter` without it: what
        becomes of the output when the two differ.

    Raises
    ------
    DomainError
        As `verify_chain`, or when k is no whole number.

    Examples
    --------
    >>> p, q = np.log([0.5, 0.3, 0.2]), np.log([0.2, 0.5, 0.3])
    >>> found = output_law_chain(lambda prefix: p, lambda prefix: q, 1)
    >>> round(found.G, 6), found.total_variation < 1e-15
    (1.7, True)
    """
    k = int(whole_array(k, "k", unit="token"))
    kept = length if callable(length) else lambda drafts: k if length is None else length

    def verify(log_p: Any, log_q: Any, tokens: Any, u: Any) -> Iterator[Block]:
        lengths = np.array([kept(tuple(row)) for row in tokens.tolist()])
        log_q = None if log_q is None else log_q[:, :k]
        accepted, token = verify_chain(log_p, log_q, tokens, u, lengths)
        return ((list(range(a)), t) for a, t in zip(accepted, token, strict=True))

    chain = _Tree(range(-1, k - 1), True, deterministic)
    return _enumerate(target, drafter, claimed or drafter, chain, verify, k + 1)


def output_law_tree(
    target: Model,
    drafter: Model,
    parents: Sequence[int],
    *,
    replacement: bool = True,
    deterministic: bool = False,
    claimed: Model | None = None,
) -> OutputLaw:
    """Return the exact law of a round of `verify_tree`; it grows as V to the number of nodes.

    Parameters
    ----------
    target, drafter, claimed : callable
        As in `output_law_chain`.
    parents : sequence of int
        -1 for the root, else an earlier node.
    replacement : bool
        Whether siblings are drawn independently; False: without replacement, and missing where
        the drafter has no further token.
    deterministic : bool
        Whether siblings are the drafter's likeliest tokens, in that order.

    Raises
    ------
    DomainError
        As `verify_tree`.

    Examples
    --------
    >>> p, q = np.log([0.5, 0.3, 0.2]), np.log([0.2, 0.5, 0.3])
    >>> found = output_law_tree(lambda _: p, lambda _: q, [-1, -1], replacement=False)
    >>> round(found.G, 6), found.total_variation < 1e-15
    (1.808571, True)
    """
    depth: list[int] = []
    for i, parent in enumerate(parents):
        if not -1 <= parent < i:
            raise DomainError(f"parents must be -1 or an earlier node; node {i} has {parent}")
        depth.append(1 if parent < 0 else depth[parent] + 1)

    def verify(log_p: Any, log_q: Any, tokens: Any, u: Any) -> Iterator[Block]:
        accepted, token = verify_tree(log_p, log_q, tokens, parents, u, replacement=replacement)
        return ((np.flatnonzero(a).tolist(), t) for a, t in zip(accepted, token, strict=True))

    tree = _Tree(parents, replacement, deterministic)
    return _enumerate(target, drafter, claimed or drafter, tree, verify, 1 + max(depth, default=0))


def target_law(target: Model, n: int, prefix: Tokens = ()) -> Floats:
    """Return the target's joint law of the n tokens after `prefix`, shape (V,) * n. [-]

    Examples
    --------
    >>> target_law(lambda prefix: np.log([0.5, 0.5]), 2).round(2).tolist()
    [[0.25, 0.25], [0.25, 0.25]]
    """
    if n == 0:
        return np.ones(())
    p = np.exp(target(prefix))
    return np.stack([p[t] * target_law(target, n - 1, (*prefix, t)) for t in range(len(p))])


@dataclass(frozen=True, slots=True)
class _Tree:
    """How candidates are placed and drawn; a chain is a tree without siblings."""

    parents: Sequence[int]
    replacement: bool
    deterministic: bool

    def prefix(self, tokens: Tokens, node: int) -> Tokens:
        """Return the tokens from below the root down to `node`."""
        path: Tokens = ()
        while node >= 0:
            path, node = (tokens[node], *path), self.parents[node]
        return path


def _enumerate(
    target: Model, drafter: Model, claimed: Model, tree: _Tree, verify: Any, n: int
) -> OutputLaw:
    """Run `verify` once in every box, and continue what it commits to n tokens."""
    log_p, log_q, drafts, uniforms, volumes = [], [], [], [], []
    for tokens, weight in _assignments(drafter, tree):
        p, q = _rows(target, tree, tokens), _rows(claimed, tree, tokens)
        for u, volume in _boxes(p, None if tree.deterministic else q, tokens, tree):
            log_p.append(p)
            log_q.append(q)
            drafts.append(tokens)
            uniforms.append(u)
            volumes.append(weight * volume)
    told = None if tree.deterministic else np.array(log_q)
    drafted = np.array(drafts, dtype=np.int64).reshape(len(drafts), -1)
    blocks: dict[Tokens, float] = {}
    answers = verify(np.array(log_p), told, drafted, np.array(uniforms))
    for (nodes, last), row, volume in zip(answers, drafts, volumes, strict=True):
        block = (*(row[i] for i in nodes), int(last))
        blocks[block] = blocks.get(block, 0.0) + volume
    plain = target_law(target, n)
    law = np.zeros_like(plain)
    for block, chance in blocks.items():
        law[block] += chance * target_law(target, n - len(block), block)
    return OutputLaw(blocks, law, plain)


def _rows(model: Model, tree: _Tree, tokens: Tokens) -> Floats:
    """Return the model's law after the root and after each node, [N + 1, V].

    Below a missing node nothing is ever read; the root's law stands there.
    """
    paths = [tree.prefix(tokens, node) for node in range(-1, len(tokens))]
    return np.stack([np.asarray(model(() if -1 in path else path)) for path in paths])


def _assignments(drafter: Model, tree: _Tree) -> list[tuple[Tokens, float]]:
    """Return every way the nodes can be filled, with its chance."""
    done: list[tuple[Tokens, float]] = [((), 1.0)]
    for node, parent in enumerate(tree.parents):
        grown = []
        for tokens, weight in done:
            path = tree.prefix(tokens, parent)
            earlier = [tokens[i] for i in range(node) if tree.parents[i] == parent]
            chances = {-1: 1.0} if -1 in path else _candidate(drafter(path), earlier, tree)
            grown += [((*tokens, t), weight * c) for t, c in chances.items()]
        done = grown
    return done


def _candidate(log_q: Any, earlier: list[int], tree: _Tree) -> dict[int, float]:
    """Return the chance of each token to be the next sibling; -1 where none is left."""
    q = np.exp(log_q)
    if tree.deterministic:
        order = [int(t) for t in np.argsort(-q, kind="stable")]
        return {order[len(earlier)] if len(earlier) < len(order) else -1: 1.0}
    if not tree.replacement:
        q[[t for t in earlier if t >= 0]] = 0.0
    return {t: float(c / q.sum()) for t, c in enumerate(q) if c > 0} or {-1: 1.0}


def _boxes(
    log_p: Floats, log_q: Floats | None, tokens: Tokens, tree: _Tree
) -> Iterator[tuple[list[float], float]]:
    """Yield a point inside each box of the uniforms, and the volume of the box."""
    laws = list(log_p)
    drafted = [None] * len(laws) if log_q is None else list(log_q)
    sides = []
    for token, parent in zip(tokens, tree.parents, strict=True):
        row, chance = parent + 1, 1.0
        if token >= 0:
            here = np.array(token)
            chance = float(accept_chance(laws[row], drafted[row], here))
            law = reject(laws[row], drafted[row], here, replacement=tree.replacement)
            laws[row], drafted[row] = law
        sides.append(_side(np.array([0.0, chance, 1.0])))
    ends = [np.cumsum(np.exp(law)) for law in (*log_p, *laws)]
    cuts = np.unique(np.clip(np.concatenate([[0.0, 1.0], *ends]), 0.0, 1.0))
    for box in itertools.product(*sides, _side(cuts)):
        yield [u for u, _ in box], float(np.prod([width for _, width in box]))


def _side(cuts: Floats) -> list[tuple[float, float]]:
    """Return the middle and the width of each interval that is not empty."""
    middle = np.minimum((cuts[1:] + cuts[:-1]) / 2, np.nextafter(1.0, 0.0))
    return [(m, w) for m, w in zip(middle.tolist(), np.diff(cuts).tolist(), strict=True) if w > 0]
