"""From logits to the distribution that is sampled: the same transforms for target and drafter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specmodel.errors import DomainError, real_array, whole_array
from specmodel.law.arrays import (
    Array,
    at,
    expect_shape,
    floats,
    integers,
    largest,
    namespace,
    normalise,
    one_hot,
    put,
    quiet,
    tree_parents,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    r"""How logits become the probabilities that tokens are drawn from.

    In the order of Hugging Face ``generate``: repetition penalty, temperature, top-k, top-p over
    what top-k left, min-p. Verification preserves the law *after* these, so p and q both go
    through them, and q is the law that drafts were really drawn from.

    Parameters
    ----------
    temperature : float
        [-], >= 0. 0 is greedy: all on the likeliest token, the first of equals. One so small
        that its inverse overflows is the limit towards 0, which shares among equals.
    top_k : int, optional
        Tokens kept, the likeliest; of equals the first. [token], >= 1.
    top_p : float, optional
        The fewest likeliest tokens that together have this mass are kept. [-], in (0, 1].
    min_p : float, optional
        Tokens with at least this fraction of the largest probability are kept. [-], 0 to 1.
    repetition_penalty : float
        Positive logits of tokens seen before are divided by it, others multiplied. [-], > 0.

    Raises
    ------
    DomainError
        When a value is out of range.

    References
    ----------
    .. [1] Keskar et al., CTRL, section 4.1 (repetition penalty), arXiv:1909.05858.
    .. [2] Fan et al., ACL 2018 (top-k), arXiv:1805.04833; Holtzman et al., ICLR 2020 (top-p),
       arXiv:1904.09751; Nguyen et al., ICLR 2025 (min-p), arXiv:2407.01082.

    Examples
    --------
    >>> logits = np.log([[0.5, 0.3, 0.2]])
    >>> np.exp(Transform(top_k=2).log_probabilities(logits)).round(3).tolist()
    [[0.625, 0.375, 0.0]]
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        real_array(self.temperature, "temperature", low=0)
        if self.top_k is not None:
            whole_array(self.top_k, "top_k", low=1, unit="token")
        for name in ("top_p", "min_p"):
            if getattr(self, name) is not None:
                real_array(getattr(self, name), name, low=0, high=1)
        real_array(self.repetition_penalty, "repetition_penalty", low=0)
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0:
                raise DomainError(f"{name} must be > 0; got 0")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0 or self.top_k == 1

    @quiet()
    def log_probabilities(self, logits: Array, seen: Array | None = None) -> Array:
        """Return log p, normalised, -inf where a token is cut.

        Parameters
        ----------
        logits : array, shape (..., V)
            -inf is a token that cannot be drawn.
        seen : array of bool, shape (..., V), optional
            Tokens in the prompt or the output so far; needed with a repetition penalty.

        Returns
        -------
        array, shape (..., V)
            float64 in NumPy, the tensor's dtype in torch (float32 for half precision).

        Raises
        ------
        DomainError
            When a row holds NaN, +inf or nothing but -inf, or `seen` is missing or misshapen.
        """
        x = self._penalised(floats(logits, "logits"), seen)
        xp = namespace(x)
        best = xp.amax(x, axis=-1, keepdims=True)
        if not bool(xp.isfinite(best).all()):
            raise DomainError("logits must have a finite maximum, and no NaN, in every row")
        if self.greedy:
            return one_hot(xp.argmax(x, axis=-1), x.shape[-1], x)
        x = (x - best) / max(self.temperature, float(xp.finfo(x.dtype).tiny))
        if self.top_k is not None or self.top_p not in (None, 1):
            x = self._likeliest(x)
        if self.min_p:
            x = xp.where(x >= math.log(self.min_p), x, -xp.inf)  # the largest is 0
        return normalise(x)

    def _penalised(self, x: Array, seen: Array | None) -> Array:
        if self.repetition_penalty == 1:
            return x
        if seen is None:
            raise DomainError("a repetition penalty needs `seen`, the tokens that came before")
        mask = put(seen, x)
        expect_shape(mask, "seen", tuple(x.shape))
        scale = self.repetition_penalty
        return namespace(x).where(mask, namespace(x).where(x > 0, x / scale, x * scale), x)

    def _likeliest(self, x: Array) -> Array:
        """Return x with all but the likeliest tokens cut, as many as top-k and top-p allow."""
        xp, size = namespace(x), int(x.shape[-1])
        ordered = largest(x, size if self.top_k is None else min(int(self.top_k), size))
        p = xp.exp(normalise(ordered))
        enough = math.inf if self.top_p in (None, 1) else self.top_p
        last = xp.sum(xp.cumsum(p, axis=-1) - p < enough, axis=-1) - 1  # by the mass before it
        least = at(ordered, last)[..., None]
        above, equal = x > least, x == least
        room = last[..., None] + 1 - xp.sum(above, axis=-1, keepdims=True)
        return xp.where(above | (equal & (xp.cumsum(equal, axis=-1) <= room)), x, -xp.inf)


def seen_along(seen: Array, tokens: Array, parents: Sequence[int] | Array | None = None) -> Array:
    """Return which tokens precede each row that a round verifies, for the repetition penalty.

    Parameters
    ----------
    seen : array of bool, shape (B, V)
        Tokens before the round, the last committed one included.
    tokens : array of int, shape (B, N)
        Drafts; -1 is none.
    parents : sequence of int, shape (N,) or (B, N), optional
        The tree, as in `verify_tree`; a chain without it.

    Returns
    -------
    array of bool, shape (B, N + 1, V)

    Examples
    --------
    >>> seen_along(np.array([[True, False, False]]), np.array([[2]])).astype(int).tolist()
    [[[1, 0, 0], [1, 0, 1]]]
    """
    size, n = seen.shape[-1], tokens.shape[-1]
    drafts = integers(tokens, "tokens", seen, low=-1, high=size - 1)
    above = tree_parents(np.arange(n) - 1 if parents is None else parents, drafts)
    rows, every = put(np.arange(len(seen)), seen), put(np.arange(size), seen)
    result = namespace(seen).stack([seen] * (n + 1), axis=1)
    for i in range(n):
        result[:, i + 1] = result[rows, above[:, i] + 1] | (every == drafts[:, i, None])
    return result
