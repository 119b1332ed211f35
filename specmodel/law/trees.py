r"""Speculative sampling of a tree: several candidates for a position, each tried in turn.

At a node the children are tried in order. Each is accepted with chance :math:`\min(1, r(y)/s(y))`,
r being the target's law p at first and :math:`\mathrm{normalise}(\max(0, r - s))` after each
rejection; s is the law the child was drawn from. Siblings drawn independently share s = q [1]_;
siblings drawn without replacement have s = q without the earlier ones, renormalised [2]_. When
no child is accepted the token comes from r, at a leaf from p. Every path preserves p.

Which nodes exist may depend on the tokens *above* a node, not on the drawn tokens of its
siblings or below; a tree pruned by drawn tokens is exact only as a deterministic one.

References
----------
.. [1] Miao et al., SpecInfer, ASPLOS 2024 (multi-step speculative sampling), arXiv:2305.09781.
.. [2] Chen et al., Sequoia, NeurIPS 2024 (sampling without replacement), arXiv:2402.12374.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specmodel.law.arrays import (
    Array,
    floats,
    integers,
    namespace,
    one_hot,
    put,
    tree_parents,
    uniforms,
)
from specmodel.law.rules import accept_chance, check_laws, correction, draw, without


def draw_siblings(log_q: Array, u: Array, *, replacement: bool = True) -> Array:
    """Return candidates for one position, drawn from q independently or without replacement.

    Parameters
    ----------
    log_q : array, shape (..., V)
    u : array, shape (..., n)
        Independent uniforms in [0, 1).
    replacement : bool
        Whether a token may be drawn twice.

    Returns
    -------
    array of int64, shape (..., n)
        -1 (no candidate) where every possible token has been drawn.

    Examples
    --------
    >>> draw_siblings(np.log([0.5, 0.5]), np.array([0.1, 0.1, 0.1]), replacement=False).tolist()
    [0, 1, -1]
    """
    law = floats(log_q, "log_q")
    xp = namespace(law)
    uniform = uniforms(u, law, (*law.shape[:-1], np.shape(u)[-1]))
    tokens = []
    for i in range(uniform.shape[-1]):
        spent = xp.amax(law, axis=-1) == -xp.inf
        some = xp.where(spent[..., None], one_hot(spent * 0, law.shape[-1], law), law)
        token = draw(some, uniform[..., i])
        tokens.append(xp.where(spent, -1, token))
        law = law if replacement else without(law, token)
    return xp.stack(tokens, axis=-1)


def reject(
    law: Array, drafted: Array | None, token: Array, *, replacement: bool
) -> tuple[Array, Array | None]:
    """Return r and s for the next sibling after `token` was rejected, [..., V] each.

    `drafted` is s, None for candidates chosen without chance.
    """
    spent = drafted is None or replacement
    return correction(law, drafted, token), drafted if spent else without(drafted, token)


def verify_tree(
    log_p: Array,
    log_q: Array | None,
    tokens: Array,
    parents: Sequence[int] | Array,
    u: Array,
    *,
    replacement: bool = True,
) -> tuple[Array, Array]:
    """Return which nodes of its tree each sequence accepts, and the token that follows them.

    Parameters
    ----------
    log_p : array, shape (B, N + 1, V)
        The target's transformed law after the root (the last committed token), then after each
        node.
    log_q : array, shape (B, N + 1, V), or None
        The law the children of the root and of each node were drawn from, after the same
        transforms; rows of leaves are not read. None when candidates were chosen without chance.
    tokens : array of int, shape (B, N)
        -1 where a sequence has no such node; what hangs below it is out of reach.
    parents : sequence of int, shape (N,) or (B, N)
        -1 for the root, else an earlier node. Siblings are tried in the order of their numbers.
    u : array, shape (B, N + 1)
        Independent uniforms in [0, 1): one for each node, the last for the token that follows.
    replacement : bool
        Whether siblings were drawn independently; False: without replacement.

    Returns
    -------
    accepted : array of bool, shape (B, N)
        The accepted nodes, a path from the root. In order of their numbers they are committed.
    token : array of int64, shape (B,)
        The correction where no child of the last of them was accepted, or the bonus at a leaf.

    Raises
    ------
    DomainError
        When shapes differ, a law is not normalised or holds NaN, a token is none of the
        vocabulary, a parent does not come first, or a uniform is out of range.

    Examples
    --------
    >>> log_p = np.log([[[0.5, 0.5]] * 3])
    >>> verify_tree(log_p, None, np.array([[0, 1]]), [-1, -1], np.array([[0.6, 0.9, 0.2]]))
    (array([[False,  True]]), array([0]))
    """
    log_p, log_q, (B, n, size) = check_laws(log_p, log_q, tokens, rows=1)
    xp = namespace(log_p)
    drafts = integers(tokens, "tokens", log_p, low=-1, high=size - 1)
    above, uniform = tree_parents(parents, drafts), uniforms(u, log_p, (B, n + 1))
    accepted = drafts < -1  # none yet
    node = put([-1] * B, log_p)
    law, drafted = log_p[:, 0], None if log_q is None else log_q[:, 0]
    for i in range(n):
        tried = (above[:, i] == node) & (drafts[:, i] >= 0)
        if not bool(tried.any()):
            continue
        token = xp.clip(drafts[:, i], 0, None)
        passed = tried & (uniform[:, i] < accept_chance(law, drafted, token))
        failed = (tried & ~passed)[:, None]
        next_law, next_drafted = reject(law, drafted, token, replacement=replacement)
        law = xp.where(passed[:, None], log_p[:, i + 1], xp.where(failed, next_law, law))
        if log_q is not None:
            drafted = xp.where(
                passed[:, None], log_q[:, i + 1], xp.where(failed, next_drafted, drafted)
            )
        node = xp.where(passed, i, node)
        accepted[:, i] = passed
    return accepted, draw(law, uniform[:, n])
