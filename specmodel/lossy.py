"""Lossy acceptance rules: they commit tokens that the target would not have drawn.

Everything here says so in its name. The exact rule is `specmodel.acceptance`; these are for
measuring what another one gains and what it changes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.acceptance import distribution
from specmodel.errors import DomainError, brief, numbers_of, one_number, one_whole

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


def lossy_typical(p: ArrayLike, *, epsilon: float, delta: float) -> Mask:
    r"""Return which tokens Medusa's typical acceptance takes.

    .. math:: p(x) > \min(\epsilon, \delta\, e^{-H(p)})

    with the entropy H in nats. Greedy decoding (temperature 0) is exact there, and not this rule.

    Parameters
    ----------
    p : array_like
        The target's distributions over the last axis. [-]
    epsilon, delta : float
        Absolute threshold, and the one that falls with entropy. [-], 0 to 1.

    Raises
    ------
    DomainError
        When p is not a distribution or a threshold is out of range.

    References
    ----------
    .. [1] Cai et al., Medusa, ICML 2024, section 2.3.1, arXiv:2401.10774; FasterDecoding/Medusa
       ``medusa/model/utils.py`` ``evaluate_posterior``, read 2026-11-30.

    Examples
    --------
    >>> lossy_typical([0.6, 0.3, 0.1], epsilon=0.3, delta=0.5).tolist()
    [True, True, False]
    """
    target = distribution(p, "p")
    low = one_number(epsilon, "epsilon", low=0, high=1)
    scale = one_number(delta, "delta", low=0, high=1)
    logs = np.log(target, out=np.zeros_like(target), where=target > 0)
    spread = np.exp((target * logs).sum(axis=-1, keepdims=True))  # e to the minus entropy
    return np.asarray(target > np.minimum(low, scale * spread))


def lossy_relaxed(p: ArrayLike, *, top: int, delta: float) -> Mask:
    r"""Return which tokens TensorRT-LLM's relaxed acceptance takes (MTP, while a model thinks).

    The `top` likeliest tokens, of those the ones with :math:`p(x) \ge \max p - \delta`; the
    likeliest always.

    Parameters
    ----------
    p : array_like
        The target's distributions over the last axis. [-]
    top : int
        ``relaxed_topk``, at least 1. [token]
    delta : float
        ``relaxed_delta``. [-], 0 to 1.

    Raises
    ------
    DomainError
        When p is not a distribution, or `top` or `delta` is out of range.

    References
    ----------
    .. [1] NVIDIA/TensorRT-LLM ``mtpKernels.cu`` ``mtpRelaxedAcceptanceKernel``, at 3585984,
       read 2026-11-30.

    Examples
    --------
    >>> lossy_relaxed([0.5, 0.4, 0.1], top=2, delta=0.2).tolist()
    [True, True, False]
    """
    target = distribution(p, "p")
    most = one_whole(top, "top", low=1, high=target.shape[-1], unit="token")
    margin = one_number(delta, "delta", low=0, high=1)
    best = target.max(axis=-1, keepdims=True)
    ranks = np.argsort(np.argsort(-target, axis=-1, kind="stable"), axis=-1)
    return np.asarray((ranks == 0) | ((ranks < most) & (target >= best - margin)))


def lossy_alpha(accepted: ArrayLike, q: ArrayLike) -> Floats:
    r"""Return the chance that a draft from q is taken, :math:`\sum_{x\ accepted} q(x)`. [-]

    Parameters
    ----------
    accepted : array_like of bool
        As the rules above return it.
    q : array_like
        The drafter's distributions; for a greedy drafter all on one token. [-]

    Raises
    ------
    DomainError
        When q is not a distribution or the shapes differ.

    Examples
    --------
    >>> float(lossy_alpha([True, False], [0.75, 0.25]))
    0.75
    """
    return np.asarray(_taken(accepted, q).sum(axis=-1))


def lossy_output(accepted: ArrayLike, p: ArrayLike, q: ArrayLike) -> Floats:
    """Return the law of the committed token: a taken draft, or else the target's likeliest token.

    Its total variation from p, ``abs(lossy_output(...) - p).sum() / 2``, is what the rule
    changes; the exact rule's is 0.

    Raises
    ------
    DomainError
        When p or q is not a distribution or the shapes differ.

    Examples
    --------
    >>> lossy_output([True, False], p=[0.5, 0.5], q=[0.25, 0.75]).tolist()
    [1.0, 0.0]
    """
    target, taken = distribution(p, "p"), _taken(accepted, q)
    if target.shape != taken.shape:
        raise DomainError(f"p must have the shape {taken.shape} of q; got {target.shape}")
    rest = 1.0 - taken.sum(axis=-1, keepdims=True)
    likeliest = np.arange(target.shape[-1]) == target.argmax(axis=-1)[..., None]
    return np.asarray(taken + rest * likeliest)


def _taken(accepted: ArrayLike, q: ArrayLike) -> Floats:
    if numbers_of(accepted) is None:
        raise DomainError(f"accepted must be true or false for each token; got {brief(accepted)}")
    draft, mask = distribution(q, "q"), np.asarray(accepted)
    if mask.dtype != np.bool_ or mask.shape != draft.shape:
        raise DomainError(
            f"accepted must be true or false with the shape {draft.shape} of q; got {mask.dtype} "
            f"with {mask.shape}"
        )
    return np.where(mask, draft, 0.0)
