r"""Speculative sampling of a chain: accept, correct, or add the bonus token.

A draft y drawn from q is accepted with chance :math:`\min(1, p(y)/q(y))`. The first one that is
not is replaced by a draw from :math:`\mathrm{normalise}(\max(0, p - q))`; when none is rejected
one more token is drawn from p. What is committed then follows p exactly, whatever q is [1]_ [2]_.
A deterministic drafter (prompt lookup, greedy) is the case of a q that is all on its draft.
For one draft no rule that knows only p and q accepts more often; judged as whole blocks, several
drafts can be accepted more often still [3]_.

References
----------
.. [1] Leviathan et al., ICML 2023, Algorithm 1 and Appendix A.1, arXiv:2211.17192.
.. [2] Chen et al., 2023, Algorithm 2 and Theorem 1, arXiv:2302.01318.
.. [3] Sun et al., ICLR 2025 (block verification), arXiv:2403.10444.
"""

from __future__ import annotations

import numpy as np

from specmodel.errors import DomainError
from specmodel.law.arrays import (
    Array,
    at,
    expect_shape,
    floats,
    integers,
    namespace,
    normalise,
    put,
    quiet,
    uniforms,
)


@quiet()
def accept_chance(log_p: Array, log_q: Array | None, token: Array) -> Array:
    """Return the chance that a draft is accepted, min(1, p/q).

    Parameters
    ----------
    log_p, log_q : array, shape (..., V)
        Target's and drafter's transformed laws; None is a drafter all on its token.
    token : array of int, shape (...)

    Returns
    -------
    array, shape (...)
        0 where p = 0. Else 1 where q = 0: no drafter draws that token, so it costs nothing.

    Examples
    --------
    >>> p, q = np.log([[0.5, 0.5]]), np.log([[0.8, 0.2]])
    >>> accept_chance(p, q, np.array([0])).tolist()
    [0.625]
    """
    xp, target = namespace(log_p), at(log_p, token)
    if log_q is None:
        return xp.exp(target)
    ratio = xp.where(target == -xp.inf, target, target - at(log_q, token))
    return xp.exp(xp.clip(ratio, None, 0.0))


@quiet()
def residual(log_p: Array, log_q: Array) -> Array:
    """Return the log of normalise(max(0, p - q)), the law of the token after a rejection.

    Where p = q nothing is rejected and the law is p; where the supports are disjoint it is p too.

    Parameters
    ----------
    log_p, log_q : array, shape (..., V)

    Returns
    -------
    array, shape (..., V)
        Normalised. Computed as log p + log(1 - q/p), so that no small difference is lost.

    Examples
    --------
    >>> p, q = np.log([0.5, 0.3, 0.2]), np.log([0.2, 0.4, 0.4])
    >>> np.exp(residual(p, q)).tolist()
    [1.0, 0.0, 0.0]
    """
    xp = namespace(log_p)
    gap = log_q - log_p
    left = log_p + xp.log(-xp.expm1(gap))
    left = xp.where((log_p == -xp.inf) | (gap >= 0), -xp.inf, left)
    none = xp.amax(left, axis=-1, keepdims=True) == -xp.inf
    return normalise(xp.where(none, log_p, left))


def without(log_q: Array, token: Array) -> Array:
    """Return q with `token` taken out and the rest renormalised; all -inf when none is left.

    Parameters
    ----------
    log_q : array, shape (..., V)
    token : array of int, shape (...)

    Examples
    --------
    >>> np.exp(without(np.log([0.5, 0.25, 0.25]), np.array(0))).round(3).tolist()
    [0.0, 0.5, 0.5]
    """
    xp = namespace(log_q)
    taken = put(np.arange(log_q.shape[-1]), log_q) == token[..., None]
    return normalise(xp.where(taken, -xp.inf, log_q))


def correction(log_p: Array, log_q: Array | None, token: Array) -> Array:
    """Return the law of the token after `token` was rejected: the residual, [..., V].

    Without chance in the draft (log_q None) that is p without it; a p all on it rejects nothing.
    """
    if log_q is not None:
        return residual(log_p, log_q)
    rest = without(log_p, token)
    none = namespace(rest).amax(rest, axis=-1, keepdims=True) == -np.inf
    return namespace(rest).where(none, log_p, rest)


def draw(log_p: Array, u: Array) -> Array:
    """Return the token at quantile `u`, never one of zero probability.

    Parameters
    ----------
    log_p : array, shape (..., V)
        Normalised.
    u : array, shape (...)
        Uniform in [0, 1).

    Returns
    -------
    array of int64, shape (...)

    Raises
    ------
    DomainError
        When log_p is not normalised within 1e-3, as where it holds NaN, or u is out of range.

    Examples
    --------
    >>> draw(np.log([[0.5, 0.5], [0.5, 0.5]]), np.array([0.49, 0.5])).tolist()
    [0, 1]
    """
    xp = namespace(log_p)
    uniform = uniforms(u, log_p, tuple(log_p.shape[:-1]))
    p = xp.exp(log_p)
    below = xp.cumsum(p, axis=-1)
    # A parallel sum need not be monotone, so the total is the largest sum at a possible token.
    total = xp.amax(xp.where(p > 0, below, xp.zeros_like(p)), axis=-1, keepdims=True)
    if not bool((abs(total - 1) <= 1e-3).all()):
        raise DomainError("log_p must be normalised over its last axis, without NaN")
    hit = (below > uniform[..., None] * total) & (p > 0)  # u < 1, so at least one token
    return xp.argmax(xp.asarray(hit, dtype=xp.int8), axis=-1)


def verify_chain(
    log_p: Array, log_q: Array | None, drafts: Array, u: Array, lengths: Array | None = None
) -> tuple[Array, Array]:
    """Return how many drafts each sequence accepts, and the token that follows them.

    Parameters
    ----------
    log_p : array, shape (B, k + 1, V)
        The target's transformed law before each draft, and after the last.
    log_q : array, shape (B, k, V), or None
        The law each draft was drawn from, after the same transforms; None when drafts were
        chosen without chance.
    drafts : array of int, shape (B, k)
    u : array, shape (B, k + 1)
        Independent uniforms in [0, 1): one for each draft, the last for the token that follows.
    lengths : array of int, shape (B,), optional
        Drafts each sequence has, 0 to k; what lies beyond is ignored. All k without it. Whether
        a draft counts may depend on the drafts before it, not on what was drawn for it.

    Returns
    -------
    accepted : array of int64, shape (B,)
        0 to `lengths`. [token]
    token : array of int64, shape (B,)
        The correction where a draft was rejected, else the bonus.

    Raises
    ------
    DomainError
        When shapes differ, a law is not normalised or holds NaN, a draft is no token, or a
        uniform or a length is out of range.

    Examples
    --------
    >>> log_p = np.log([[[0.5, 0.5], [0.5, 0.5]]])
    >>> verify_chain(log_p, None, np.array([[1]]), np.array([[0.4, 0.9]]))
    (array([1]), array([1]))
    >>> verify_chain(log_p, None, np.array([[1]]), np.array([[0.6, 0.9]]))
    (array([0]), array([0]))
    """
    log_p, log_q, (B, k, size) = check_laws(log_p, log_q, drafts, rows=0)
    xp = namespace(log_p)
    limit = put([k] * B if lengths is None else lengths, log_p)
    limit = integers(limit, "lengths", log_p, low=0, high=k)
    expect_shape(limit, "lengths", (B,))
    uniform = uniforms(u, log_p, (B, k + 1))
    here = put(np.arange(k), log_p) < limit[:, None]
    tokens = xp.where(here, put(drafts, log_p), 0)
    tokens = integers(tokens, "drafts", log_p, low=0, high=size - 1)
    passed = here & (uniform[:, :k] < accept_chance(log_p[:, :k], log_q, tokens))
    accepted = xp.sum(xp.cumprod(xp.asarray(passed, dtype=xp.int64), axis=-1), axis=-1)
    return accepted, draw(_following(log_p, log_q, tokens, accepted, limit), uniform[:, k])


def _following(
    log_p: Array, log_q: Array | None, drafts: Array, accepted: Array, lengths: Array
) -> Array:
    """Return the law of the token after the accepted drafts, [B, V]."""
    xp, k = namespace(log_p), drafts.shape[-1]
    rows = put(np.arange(len(drafts)), log_p)
    target = log_p[rows, accepted]
    if k == 0:
        return target
    first = xp.clip(accepted, None, k - 1)  # the first rejected, where one was
    drafted = None if log_q is None else log_q[rows, first]
    corrected = correction(target, drafted, drafts[rows, first])
    return xp.where((accepted < lengths)[:, None], corrected, target)


def check_laws(
    log_p: Array, log_q: Array | None, drafts: Array, *, rows: int
) -> tuple[Array, Array | None, tuple[int, int, int]]:
    """Return both laws as floats and (B, drafts, V); log_q has `rows` more rows than drafts.

    Raises
    ------
    DomainError
        When a shape does not fit, so that target and drafter differ in vocabulary, say.
    """
    log_p = floats(log_p, "log_p")
    if log_p.ndim != 3:
        raise DomainError(f"log_p must have the axes (B, drafts + 1, V); got {tuple(log_p.shape)}")
    B, positions, size = (int(n) for n in log_p.shape)
    expect_shape(put(drafts, log_p), "drafts", (B, positions - 1))
    if log_q is not None:
        log_q = floats(log_q, "log_q")
        expect_shape(log_q, "log_q", (B, positions - 1 + rows, size))
    return log_p, log_q, (B, positions - 1, size)
