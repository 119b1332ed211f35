r"""How many drafts are accepted: :math:`a_j` and :math:`G = 1 + \sum_j a_j`.

:math:`a_j` is the chance that the first j drafts are all accepted. A record answers
`rates` (a_1 .. a_k) and `tokens` (G for each k), bonus token included. Records made from
measurements beyond whose k one asks continue with the last conditional rate, and warn.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.errors import (
    DomainError,
    ExtrapolationWarning,
    brief,
    numbers_of,
    one_flag,
    one_number,
    one_of,
    one_whole,
    real_array,
    unwrap,
    whole_array,
)

Floats = NDArray[np.float64]


@runtime_checkable
class Acceptance(Protocol):
    """What `specmodel.speculation` asks of an acceptance record."""

    @property
    def label(self) -> str:
        """One line for people."""

    @property
    def measured_k(self) -> int | None:
        """The k up to which it was measured; None where it is a law for every k. [token]"""

    def rates(self, k: int) -> Floats:
        """Return a_1 .. a_k along the last axis; leading axes are the record's own."""

    def tokens(self, k: ArrayLike) -> Floats:
        """Return G for each k (last axes); leading axes are the record's own."""


class _FromRates:
    """G as the running sum of the rates."""

    __slots__ = ()

    @property
    def measured_k(self) -> int | None:
        """The k up to which it was measured; None where it is a law for every k. [token]"""
        return None

    def rates(self, k: int) -> Floats:
        raise NotImplementedError

    def tokens(self, k: ArrayLike) -> Floats:
        """Return G for each k, bonus token included. [token]"""
        wanted = whole_array(k, "k", unit="token").astype(int)
        rates = self.rates(int(wanted.max(initial=0)))
        first = np.ones((*rates.shape[:-1], 1))
        cumulative = np.cumsum(np.concatenate([first, rates], axis=-1), axis=-1)
        return cumulative[..., wanted]


@dataclass(frozen=True, slots=True, eq=False)
class Geometric(_FromRates):
    r"""Every draft token is accepted with the same chance given its predecessors were.

    .. math:: a_j = \alpha^j, \qquad G = \sum_{j=0}^{k} \alpha^j = \frac{1-\alpha^{k+1}}{1-\alpha}

    Parameters
    ----------
    alpha : array_like
        [-], 0 to 1.

    Raises
    ------
    DomainError
        When alpha is out of range or NaN.

    References
    ----------
    .. [1] Leviathan et al., ICML 2023, Eq. (1), arXiv:2211.17192.

    Examples
    --------
    >>> round(float(Geometric(0.7).tokens(4)), 4)
    2.7731
    """

    alpha: ArrayLike

    def __post_init__(self) -> None:
        alpha = real_array(self.alpha, "alpha", low=0, high=1)
        if alpha.ndim > 1 or not alpha.size:
            raise DomainError(
                f"alpha must be a number or a list of at least one; got {brief(self.alpha)}"
            )
        object.__setattr__(self, "alpha", alpha)

    @property
    def label(self) -> str:
        """One line for people."""
        alpha = np.atleast_1d(self.alpha)
        return f"alpha = {alpha[0]:.4g}" if alpha.size == 1 else f"{alpha.size} values of alpha"

    def rates(self, k: int) -> Floats:
        """Return a_1 .. a_k."""
        alpha = np.asarray(self.alpha, dtype=np.float64)
        return alpha[..., None] ** np.arange(1.0, k + 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class PerPosition(_FromRates):
    """Rates by draft position, as engines log them.

    Parameters
    ----------
    values : sequence of float
        One rate per position. [-]
    conditional : bool
        False: chance that the first j drafts are all accepted (vLLM's per-position rate; must
        not increase). True: chance that draft j is accepted given the ones before it were.

    Raises
    ------
    DomainError
        When a rate is outside [0, 1], or unconditional rates increase.

    Examples
    --------
    >>> round(float(PerPosition([0.68, 0.46, 0.31, 0.21, 0.15]).tokens(5)), 2)
    2.81
    >>> round(float(PerPosition([0.8, 0.7, 0.6], conditional=True).tokens(3)), 3)
    2.696
    """

    values: Sequence[float]
    conditional: bool = False

    def __post_init__(self) -> None:
        values = real_array(self.values, "acceptance rates", low=0, high=1)
        if values.ndim != 1 or not values.size:
            raise DomainError("acceptance rates must be a list of at least one number")
        one_flag(self.conditional, "conditional")
        if not self.conditional and np.any(np.diff(values) > 0):
            j = int(np.argmax(np.diff(values) > 0)) + 1
            raise DomainError(
                "unconditional acceptance rates must not increase; "
                f"got {values[j - 1]:g} then {values[j]:g}"
            )
        object.__setattr__(self, "values", tuple(float(v) for v in values))

    @property
    def measured_k(self) -> int:
        """The k up to which it was measured. [token]"""
        return len(self.values)

    @property
    def label(self) -> str:
        """One line for people."""
        kind = "conditional" if self.conditional else "unconditional"
        return f"{kind} rates " + ", ".join(f"{v:g}" for v in self.values)

    def rates(self, k: int) -> Floats:
        """Return a_1 .. a_k; beyond the measured positions the last conditional rate continues."""
        values = np.asarray(self.values)
        if self.conditional:
            unconditional, last = np.cumprod(values), values[-1]
        else:
            unconditional = values
            before = values[-2] if values.size > 1 else 1.0
            last = values[-1] / before if before > 0 else 0.0
        if k <= values.size:
            return unconditional[:k]
        _warn_beyond(values.size, k)
        return np.concatenate(
            [unconditional, unconditional[-1] * last ** np.arange(1, k - values.size + 1)]
        )


@dataclass(frozen=True, slots=True, eq=False)
class MeanLength(_FromRates):
    """A mean acceptance length at one k, inverted to the alpha of a geometric law.

    Parameters
    ----------
    length : float
        Tokens committed per round. [token]
    k : int
        Draft tokens per round it was measured at. [token]
    includes_bonus : bool
        Whether `length` counts the bonus (or corrected) token, as vLLM and SGLang do.

    Raises
    ------
    DomainError
        When the length cannot occur at that k.

    Examples
    --------
    >>> round(float(MeanLength(2.25, k=3).alpha), 6)
    0.622139
    """

    length: float
    k: int
    includes_bonus: bool = True
    alpha: float = field(init=False)

    def __post_init__(self) -> None:
        k = one_whole(self.k, "k", low=1, unit="token")
        bonus = 0 if one_flag(self.includes_bonus, "includes_bonus") else 1
        low, high = 1 - bonus, k + 1 - bonus
        length = one_number(self.length, "acceptance length", low=low, high=high, unit="token")
        object.__setattr__(self, "k", k)
        object.__setattr__(self, "alpha", float(alpha_for_tokens(length + bonus, k)))

    @property
    def measured_k(self) -> int:
        """The k it was measured at. [token]"""
        return self.k

    @property
    def label(self) -> str:
        """One line for people."""
        return f"acceptance length {self.length:g} at k = {self.k} (alpha = {self.alpha:.4g})"

    def rates(self, k: int) -> Floats:
        """Return a_1 .. a_k."""
        if k > self.k:
            _warn_beyond(self.k, k)
        return np.asarray(self.alpha ** np.arange(1.0, k + 1.0))


@dataclass(frozen=True, slots=True, eq=False)
class Histogram(_FromRates):
    """How often a round accepted 0, 1, 2, .. k drafts.

    Parameters
    ----------
    counts : sequence of float
        Rounds (or their share) by number of accepted drafts, starting with none. [-]

    Raises
    ------
    DomainError
        When a count is negative or all are zero.

    Examples
    --------
    >>> float(Histogram([1, 1, 2]).tokens(2))
    2.25
    """

    counts: Sequence[float]

    def __post_init__(self) -> None:
        counts = real_array(self.counts, "histogram counts", low=0)
        if counts.ndim != 1 or counts.size < 2 or not counts.sum() > 0 or np.isinf(counts.sum()):
            raise DomainError("a histogram needs at least two finite counts that are not all zero")
        object.__setattr__(self, "counts", tuple(float(c) for c in counts))

    @property
    def measured_k(self) -> int:
        """The k it was counted at. [token]"""
        return len(self.counts) - 1

    @property
    def label(self) -> str:
        """One line for people."""
        return f"histogram of {len(self.counts) - 1} drafts"

    def rates(self, k: int) -> Floats:
        """Return a_1 .. a_k, the share of rounds that accepted at least j."""
        counts = np.asarray(self.counts)
        at_least = np.cumsum(counts[::-1])[::-1] / counts.sum()
        return PerPosition(np.minimum.accumulate(at_least[1:]).tolist()).rates(k)


@dataclass(frozen=True, slots=True, eq=False)
class BetaMixture(_FromRates):
    r"""An alpha that varies, Beta(x, y) distributed, over rounds or over requests.

    Over rounds :math:`a_j = E[\alpha^j] = B(x+j, y)/B(x, y)`. Over requests of equal length
    tokens per round is harmonic, :math:`G = 1/E[1/G(\alpha)]`, because slow requests take more
    rounds.

    Parameters
    ----------
    x, y : float
        Shape, both > 0. The mean alpha is x / (x + y).
    over : {"rounds", "requests"}

    Examples
    --------
    >>> [round(float(BetaMixture(7, 3, over=o).tokens(4)), 6) for o in ("rounds", "requests")]
    [2.884615, 2.704298]
    """

    x: float
    y: float
    over: Literal["rounds", "requests"] = "rounds"

    def __post_init__(self) -> None:
        for name, value in (("x", self.x), ("y", self.y)):
            one_number(value, name, positive=True)
        one_of(self.over, "over", ("rounds", "requests"))

    @property
    def label(self) -> str:
        """One line for people."""
        return f"Beta({self.x:g}, {self.y:g}) over {self.over}"

    def rates(self, k: int) -> Floats:
        """Return a_1 .. a_k; over requests they depend on k, because rounds are pooled."""
        i = np.arange(float(k))
        if self.over == "rounds":
            return np.asarray(np.cumprod((self.x + i) / (self.x + self.y + i)))
        alpha, weight = self._nodes()
        rounds = weight / expected_tokens(alpha, k)
        pooled = rounds @ alpha[:, None] ** (i + 1) / rounds.sum()
        return np.asarray(pooled, dtype=np.float64)

    def tokens(self, k: ArrayLike) -> Floats:
        """Return G for each k, bonus token included. [token]"""
        wanted = whole_array(k, "k", unit="token").astype(int)
        top = int(wanted.max(initial=0))
        if self.over == "rounds":
            G = np.concatenate([[1.0], 1.0 + np.cumsum(self.rates(top))])
        else:
            alpha, weight = self._nodes()
            G = 1 / (weight @ (1 / Geometric(alpha).tokens(np.arange(top + 1))))
            G[0] = 1.0  # exactly, not to rounding
        return np.take(G, wanted)

    def _nodes(self) -> tuple[Floats, Floats]:
        """Return values of alpha and weights that integrate over the mixture.

        With alpha = 1/(1 + exp(-t)) the density is smooth on the whole line and falls off
        exponentially at both ends, where the trapezoidal rule converges exponentially.
        """
        spread = 12 * np.sqrt(1 / self.x + 1 / self.y)
        centre = np.log(self.x / self.y)
        t = np.linspace(centre - spread - 45 / self.x, centre + spread + 45 / self.y, 20_001)
        log_alpha, log_rest = -np.logaddexp(0, -t), -np.logaddexp(0, t)
        density = self.x * log_alpha + self.y * log_rest
        weight = np.exp(density - density.max())
        return np.exp(log_alpha), weight / weight.sum()


def as_acceptance(value: Any) -> Acceptance:
    """Return an acceptance record; a number or an array is the alpha of a geometric law.

    Raises
    ------
    DomainError
        When it is neither, or alpha is out of range.

    Examples
    --------
    >>> as_acceptance(0.7).label
    'alpha = 0.7'
    """
    if isinstance(value, Acceptance) and not isinstance(value, type):
        return value
    if numbers_of(value) is None:
        raise DomainError(
            "acceptance must be alpha or a record such as PerPosition([0.7, 0.5]); got "
            f"{brief(value)}"
        )
    return Geometric(value)


def warn_beyond(acceptance: Acceptance, k: int) -> None:
    """Warn when k drafts were chosen from acceptance that was measured with fewer."""
    if acceptance.measured_k is not None and k > acceptance.measured_k:
        _warn_beyond(acceptance.measured_k, k)


def _warn_beyond(measured: int, k: int) -> None:
    warnings.warn(
        f"acceptance was measured up to k = {measured}; beyond it the last conditional rate "
        f"continues (asked for k = {k})",
        ExtrapolationWarning,
        stacklevel=4,
    )


# -- laws ----------------------------------------------------------------------------------------


def expected_tokens(alpha: ArrayLike, k: ArrayLike) -> Floats:
    r"""Mean tokens committed by one chain round, :math:`G`, for any broadcast of alpha and k.

    .. math:: G = \sum_{j=0}^{k} \alpha^j = \frac{1-\alpha^{k+1}}{1-\alpha}

    Parameters
    ----------
    alpha : array_like
        Probability that a draft token is accepted given its predecessors were, i.i.d. [-], 0 to 1.
    k : array_like of int
        Draft tokens per round. [token], >= 0. Broadcasts with `alpha`.

    Returns
    -------
    float or ndarray
        Tokens per round, the bonus token included. [token], 1 to k + 1.

    References
    ----------
    .. [1] Leviathan et al., ICML 2023, Eq. (1), arXiv:2211.17192.

    Examples
    --------
    >>> round(float(expected_tokens(0.8, 4)), 4)
    3.3616
    """
    a = real_array(alpha, "alpha", low=0, high=1)
    n = whole_array(k, "k", unit="token")
    a, n = np.broadcast_arrays(a, n)
    total = np.ones(a.shape)
    for step in range(int(n.max(initial=0))):  # Horner's rule: exact at alpha 0 and 1, and at k = 0
        total = np.where(step < n, 1.0 + a * total, total)
    return unwrap(total)


def alpha_for_tokens(G: ArrayLike, k: ArrayLike) -> Floats:
    """Return the alpha of a geometric law that commits `G` tokens per round at `k` drafts.

    Parameters
    ----------
    G : array_like
        Tokens per round, bonus included. [token] Broadcasts with `k`.
    k : array_like of int
        Draft tokens per round. [token]

    Returns
    -------
    float or ndarray
        [-]; 0 where G <= 1 (any drafter reaches it), NaN where G > k + 1 (none does).

    Examples
    --------
    >>> round(float(alpha_for_tokens(1.4, 4)), 8)
    0.28710775
    """
    wanted, n = np.broadcast_arrays(
        real_array(G, "G", low=0, unit="token"), whole_array(k, "k", unit="token")
    )
    low, high = np.zeros(wanted.shape), np.ones(wanted.shape)
    for _ in range(60):  # bisection to the last bit: G grows with alpha
        middle = (low + high) / 2
        below = expected_tokens(middle, n) < wanted
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    root = np.where(wanted <= 1, 0.0, np.where(wanted >= n + 1, 1.0, high))
    result = np.where(wanted > n + 1, np.nan, root)
    return unwrap(result)


def alpha_from_distributions(p: ArrayLike, q: ArrayLike) -> Floats:
    r"""Return the acceptance of one draft drawn from q for a target p, over the last axis.

    .. math:: \alpha = \sum_x \min(p(x), q(x)) = 1 - TV(p, q)

    Raises
    ------
    DomainError
        When a row is not a distribution.

    References
    ----------
    .. [1] Leviathan et al., ICML 2023, Theorem 3.5, arXiv:2211.17192.

    Examples
    --------
    >>> float(alpha_from_distributions([0.5, 0.3, 0.2], [0.2, 0.5, 0.3]))
    0.7
    """
    return np.asarray(np.minimum(distribution(p, "p"), distribution(q, "q")).sum(axis=-1))


def correction_distribution(p: ArrayLike, q: ArrayLike) -> Floats:
    """Return the law of the token that replaces a rejected draft: normalise(max(0, p - q)).

    Where p = q nothing is ever rejected; the law is then p itself.

    Examples
    --------
    >>> correction_distribution([0.5, 0.3, 0.2], [0.2, 0.5, 0.3]).tolist()
    [1.0, 0.0, 0.0]
    """
    target, draft = distribution(p, "p"), distribution(q, "q")
    residual = np.maximum(target - draft, 0.0)
    mass = residual.sum(axis=-1, keepdims=True)
    return np.where(mass > 0, residual / np.where(mass > 0, mass, 1.0), target)


def distribution(values: ArrayLike, name: str) -> Floats:
    """Return checked probabilities over the last axis.

    Raises
    ------
    DomainError
        When one is outside [0, 1], or they do not sum to 1 within 1e-6.
    """
    array = real_array(values, name, low=0, high=1)
    if array.ndim == 0 or np.any(np.abs(array.sum(axis=-1) - 1) > 1e-6):
        raise DomainError(f"{name} must sum to 1 over its last axis")
    return array
