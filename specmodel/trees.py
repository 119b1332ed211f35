r"""Trees of candidates: what a round commits, the best tree of a size, and the size that pays.

Acceptance is told by rank: :math:`p_r` is the chance that the r-th candidate for a position is
accepted and none before it, given that the position is reached. The tree is static; a node at the
end of ranks :math:`r_1 \dots r_d` is accepted with chance :math:`\prod p_{r_i}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq, linprog

from specmodel.acceptance import distribution
from specmodel.architectures import Architecture
from specmodel.drafters import Drafter, DraftTrees
from specmodel.errors import DomainError, brief, real_array, whole_array
from specmodel.hardware import Device
from specmodel.roofline import Execution
from specmodel.speculation import round_time, speedup

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeChoice:
    """The tree that gains most on a device.

    Attributes
    ----------
    parents : tuple of int
        Parent of each node, listed by depth; -1 is the root. Empty: none gains.
    G : float
        Tokens committed per round; one where the drafter finds nothing. [token]
    S : float
        Speedup; 1 where none gains. [-]
    """

    parents: tuple[int, ...]
    G: float
    S: float


def tree_widths(parents: Sequence[int]) -> tuple[int, ...]:
    """Return the number of nodes of each depth, as `DraftTree` takes them.

    Raises
    ------
    DomainError
        When a parent is neither -1 (the root) nor an earlier node.

    Examples
    --------
    >>> tree_widths([-1, -1, 0, 0, 1, 1])
    (2, 4)
    """
    depths = _depths(parents)
    return tuple(np.bincount(depths, minlength=1)[1:].tolist()) if depths else ()


def tree_tokens(parents: Sequence[int], rates: ArrayLike) -> float:
    r"""Return G of a tree, :math:`1 + \sum_v \prod_{i \le d(v)} p_{r_i}`. [token]

    Parameters
    ----------
    parents : sequence of int
        -1 for the root, else an earlier node; siblings are ranked in the order of their numbers.
    rates : array_like, shape (ranks,)
        Acceptance by rank. [-], each 0 to 1, at most 1 together. Ranks beyond are never accepted.

    Raises
    ------
    DomainError
        When a rate is out of range, or a parent does not come first.

    References
    ----------
    .. [1] Chen et al., Sequoia, NeurIPS 2024, Proposition 3.4, arXiv:2402.12374.

    Examples
    --------
    >>> round(tree_tokens([-1, -1, 0], [0.6, 0.2]), 2)
    2.16
    """
    chances = _rates(rates)
    _depths(parents)
    ranks: dict[int, int] = {}
    reached: list[float] = []
    for parent in parents:
        rank = ranks[parent] = ranks.get(parent, -1) + 1
        above = 1.0 if parent < 0 else reached[parent]
        reached.append(above * float(chances[rank]) if rank < len(chances) else 0.0)
    return 1.0 + sum(reached)


def best_trees(rates: ArrayLike, nodes: int, depth: int) -> list[tuple[int, ...]]:
    r"""Return the tree of at most n nodes with the largest G, for each n from 0 to `nodes`.

    By dynamic programming: below a node with m descendants and d levels left, child r with a
    subtree of j nodes brings :math:`p_r (1 + F_{d-1}(j - 1))`.

    Parameters
    ----------
    rates : array_like, shape (ranks,)
        As in `tree_tokens`. At most so many children a node.
    nodes, depth : int
        Most nodes and levels. [token]

    Returns
    -------
    list of tuple of int
        Parents, listed by depth. Smaller trees of equal G come first.

    Raises
    ------
    DomainError
        When an argument is out of range.

    References
    ----------
    .. [1] Chen et al., Sequoia, NeurIPS 2024, section 3.1, arXiv:2402.12374.

    Examples
    --------
    >>> best_trees([0.6, 0.2, 0.1], 4, 8)[4]
    (-1, -1, 0, 2)
    """
    tables = _tables(_rates(rates), nodes, depth)
    return [tables.tree(size, len(tables.splits)) for size in range(int(nodes) + 1)]


def best_tree(
    device: Device,
    target: Architecture,
    drafter: Drafter,
    rates: ArrayLike,
    *,
    B: int,
    L: int = 0,
    nodes: int = 64,
    depth: int = 8,
    T_h: float = 0.0,
    T_o: float = 0.0,
    execution: Execution | None = None,
) -> TreeChoice:
    """Return the tree whose round gains most on a device: the best of each size and depth, priced.

    Parameters
    ----------
    device, target, drafter
    rates : array_like, shape (ranks,)
        Acceptance by rank, as in `tree_tokens`.
    B, L : int
        Sequences [-], context [token].
    nodes, depth : int
        Most nodes and levels. [token]
    T_h, T_o : float
        What a plain step and a round cost besides their passes. [s]
    execution : Execution, optional

    Raises
    ------
    DomainError
        When an argument is out of range, or the drafter has fewer positions than `depth`.

    References
    ----------
    .. [1] Chen et al., Sequoia, NeurIPS 2024, section 3.3 (the size by hardware),
       arXiv:2402.12374.
    """
    tables = _tables(_rates(rates), nodes, depth)
    none = TreeChoice(parents=(), G=1.0, S=1.0)
    if not tables.splits:
        return none
    # all sizes of all depths, so that of equals the smallest comes first and then the shallowest
    widths = tables.widths.swapaxes(0, 1).reshape(-1, len(tables.splits))
    times = round_time(
        device,
        target,
        DraftTrees(drafter=drafter, widths=widths),
        B=B,
        k=(widths > 0).sum(1),
        L=L,
        T_h=T_h,
        T_o=T_o,
        execution=execution,
    )
    G = 1.0 + drafter.hit_rate * tables.accepted.T.ravel()
    S = speedup(G, times.T_p, times.T_v, times.T_d, times.T_h, times.T_o)
    found = int(S.argmax())
    if S[found] <= 1:
        return none
    size, level = divmod(found, len(tables.splits))
    return TreeChoice(parents=tables.tree(size, level + 1), G=float(G[found]), S=float(S[found]))


def candidate_acceptance(
    p: ArrayLike,
    q: ArrayLike,
    n: int,
    *,
    rule: Literal["independent", "distinct", "k-seq", "optimal"] = "independent",
) -> float:
    r"""Return the chance that one of n candidates for a position is accepted. [-]

    Parameters
    ----------
    p, q : array_like, shape (V,)
        Laws of target and drafter.
    n : int
        Candidates, >= 1.
    rule : str
        ``independent``: drawn with replacement, tried in turn against the residual [1]_;
        ``distinct``: without replacement [2]_; ``k-seq``: with one ratio for all, the best [3]_;
        ``optimal``: what no rule for independent candidates exceeds, a linear programme in
        V to the n + 1 unknowns [3]_.

    Raises
    ------
    DomainError
        When a law is none, their sizes differ, or the rule is unknown.

    References
    ----------
    .. [1] Miao et al., SpecInfer, ASPLOS 2024, arXiv:2305.09781.
    .. [2] Chen et al., Sequoia, NeurIPS 2024, arXiv:2402.12374.
    .. [3] Sun et al., SpecTr, NeurIPS 2023, arXiv:2310.15141.

    Examples
    --------
    >>> p, q = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]
    >>> [round(candidate_acceptance(p, q, n), 3) for n in (1, 2)]
    [0.7, 0.76]
    """
    target, drafted = distribution(p, "p"), distribution(q, "q")
    if target.shape != drafted.shape or target.ndim != 1:
        raise DomainError(f"p and q must be laws of one size; got {target.shape}, {drafted.shape}")
    count = int(whole_array(n, "candidates", low=1))
    if rule == "optimal":
        return _optimal(target, drafted, count)
    if rule == "k-seq":
        return _k_seq(target, drafted, count)
    if rule not in ("independent", "distinct"):
        raise DomainError(
            f"rule must be independent, distinct, k-seq or optimal; got {brief(rule)}"
        )
    return _in_turn(target, drafted, count, distinct=rule == "distinct")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Tables:
    """The best tree of each size, by the levels it may have from 1 on.

    `accepted` is levels by sizes, `widths` levels by sizes by depths; `splits` gives, for each
    number of levels, the nodes of child r by r and by what is left.
    """

    accepted: Floats
    widths: Floats
    splits: list[Any]

    def tree(self, size: int, levels: int) -> tuple[int, ...]:
        """Return the parents of a tree."""
        return _ordered(_built(self.splits, size, levels))


def _tables(chances: Floats, nodes: int, depth: int) -> _Tables:
    n = int(whole_array(nodes, "nodes", unit="token"))
    levels = min(int(whole_array(depth, "depth", unit="token")), n)
    sizes = np.arange(n + 1)
    left = sizes[:, None] - sizes
    below, widths = np.zeros(n + 1), np.zeros((n + 1, levels))  # of no level
    accepted, all_widths, splits = [], [], []
    for _ in range(levels):
        child, of_child = np.zeros(n + 1), np.zeros((n + 1, levels))  # a subtree of j nodes
        child[1:], of_child[1:, 0], of_child[1:, 1:] = 1.0 + below[:-1], 1.0, widths[:-1, :-1]
        rest, of_rest, taken = np.zeros(n + 1), np.zeros((n + 1, levels)), []
        for chance in chances[::-1]:
            value = np.where(left >= 0, chance * child + rest[np.maximum(left, 0)], -1.0)
            value[:, 0] = 0.0  # without this child there is none of a later rank
            most = value.argmax(1)  # the fewest nodes of equals
            both = of_child[most] + of_rest[sizes - most]
            of_rest = np.where(most[:, None] > 0, both, 0.0)
            taken.append(most)
            rest = value.max(1)
        below, widths = rest, of_rest
        accepted.append(below)
        all_widths.append(widths)
        splits.append(taken[::-1])
    return _Tables(accepted=np.array(accepted), widths=np.array(all_widths), splits=splits)


def _rates(rates: ArrayLike) -> Floats:
    chances = np.atleast_1d(real_array(rates, "acceptance by rank", low=0, high=1))
    if chances.ndim != 1 or not chances.size or chances.sum() > 1 + 1e-9:
        raise DomainError(
            f"acceptance by rank must be a list that sums to at most 1; got {np.asarray(rates)}"
        )
    return chances


def _depths(parents: Sequence[int]) -> list[int]:
    found: list[int] = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise DomainError(f"parents must be -1 or an earlier node; node {node} has {parent}")
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def _built(splits: list[Any], size: int, levels: int, parent: int = -1) -> list[tuple[int, int]]:
    """Return (depth from below the root, parent) of nodes in the order they are met."""
    found: list[tuple[int, int]] = []

    def grow(parent: int, left: int, levels: int, depth: int) -> None:
        if not levels:
            return
        for taken in splits[levels - 1]:
            nodes = int(taken[left])
            if not nodes:
                break
            found.append((depth, parent))
            grow(len(found) - 1, nodes - 1, levels - 1, depth + 1)
            left -= nodes

    grow(parent, size, levels, 1)
    return found


def _ordered(found: list[tuple[int, int]]) -> tuple[int, ...]:
    """Return the parents with nodes listed by depth, siblings in their order."""
    order = sorted(range(len(found)), key=lambda node: found[node][0])
    place = {old: new for new, old in enumerate(order)} | {-1: -1}
    return tuple(place[found[old][1]] for old in order)


def _in_turn(p: Floats, q: Floats, n: int, *, distinct: bool) -> float:
    total = q.sum()
    if n == 0 or total <= 0 or p.sum() <= 0:
        return 0.0
    q = q / total
    accepted = float(np.minimum(p, q).sum())
    residual = np.maximum(p - q, 0.0)
    if n == 1 or residual.sum() <= 0:
        return accepted
    residual = residual / residual.sum()
    if not distinct:
        return accepted + (1 - accepted) * _in_turn(residual, q, n - 1, distinct=False)
    for token in np.flatnonzero(q > p):  # the ones that can be rejected
        rest = q.copy()
        rest[token] = 0.0
        accepted += float(q[token] - p[token]) * _in_turn(residual, rest, n - 1, distinct=True)
    return accepted


def _k_seq(p: Floats, q: Floats, n: int) -> float:
    def share(ratio: float) -> float:
        return float(np.minimum(p / ratio, q).sum())

    def excess(ratio: float) -> float:
        return 1 - (1 - share(ratio)) ** n - ratio * share(ratio)

    if n == 1 or excess(1.0) <= 0:
        return 1 - (1 - share(1.0)) ** n if n > 1 else share(1.0)
    ratio: float = brentq(excess, 1.0, n, xtol=1e-14)
    return 1 - (1 - share(ratio)) ** n


def _optimal(p: Floats, q: Floats, n: int) -> float:
    size = len(p)
    tuples = np.stack(np.meshgrid(*[np.arange(size)] * n, indexing="ij"), -1).reshape(-1, n)
    chance = q[tuples].prod(1)
    row, token = np.nonzero((tuples[:, :, None] == np.arange(size)).any(1))
    limits = np.zeros((len(tuples) + size, len(row)))
    limits[row, np.arange(len(row))] = 1.0
    limits[len(tuples) + token, np.arange(len(row))] = 1.0
    found = linprog(-np.ones(len(row)), A_ub=limits, b_ub=np.concatenate((chance, p)))
    if found.x is None:
        raise DomainError(f"the linear programme was not solved: {found.message}")
    return float(found.x.sum())
