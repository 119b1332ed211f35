"""How hard tokens are to guess, in bits: the surprisal of what came, the entropy of what could.

A confident model leaves little to guess, so drafts are accepted; both say where in a text a
drafter can be expected to fail.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.acceptance import distribution
from specmodel.errors import real_array

Floats = NDArray[np.float64]


def surprisal(p: ArrayLike) -> Floats:
    r"""Return :math:`-\log_2 p`, infinite at p = 0. [bit]

    Parameters
    ----------
    p : array_like
        Probabilities of the tokens that came, of any shape. [-]

    Raises
    ------
    DomainError
        When a probability is outside [0, 1].

    Examples
    --------
    >>> surprisal([1.0, 0.5, 0.125]).tolist()
    [0.0, 1.0, 3.0]
    """
    chance = real_array(p, "probability", low=0, high=1)
    with np.errstate(divide="ignore"):
        return np.abs(np.log2(chance))


def surprisal_from_log(log_p: ArrayLike) -> Floats:
    """Return surprisal from natural logarithms of probabilities, as engines report them. [bit]

    Parameters
    ----------
    log_p : array_like
        At most 0; minus infinity is p = 0.

    Raises
    ------
    DomainError
        When a logarithm is positive or NaN.
    """
    values = real_array(log_p, "log-probability", high=0, finite=False)
    return np.asarray(np.abs(values) / np.log(2))


def entropy(p: ArrayLike) -> Floats:
    r"""Return :math:`-\sum p \log_2 p` of distributions over the last axis. [bit]

    Raises
    ------
    DomainError
        When a probability is outside [0, 1] or a distribution does not sum to 1 within 1e-6.

    Examples
    --------
    >>> entropy([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]).tolist()
    [1.0, 0.0]

    References
    ----------
    .. [1] Shannon, A Mathematical Theory of Communication, Bell System Technical Journal 27,
       1948, section 6.
    """
    chance = distribution(p, "p")
    logs = np.log2(chance, out=np.zeros_like(chance), where=chance > 0)
    return np.asarray(np.abs((chance * logs).sum(axis=-1)))
