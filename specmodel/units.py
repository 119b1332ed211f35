"""The few spellings of sizes that people type.

Inside the package everything is SI: seconds, bytes, FLOP/s, bytes/s. Units are
converted only at the edges (command line, CSV headers, axis labels).
"""

from __future__ import annotations

import re
from fractions import Fraction

from specmodel.errors import DomainError, brief

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(k|m)?\s*", re.IGNORECASE)
_BINARY = {"": 1, "k": 1024, "m": 1024**2}


def parse_count(text: str, *, name: str) -> int:
    """Read a whole number, with ``k`` for 1,024 and ``m`` for 1,048,576.

    Parameters
    ----------
    text : str
        For instance ``"4096"``, ``"4k"``.
    name : str
        What the number is, for the error.

    Raises
    ------
    DomainError
        When the text is not a whole number.

    Examples
    --------
    >>> parse_count("4k", name="context")
    4096
    """
    match = _SIZE.fullmatch(text)
    if match and re.match(r"0\d", match[1]):
        raise DomainError(f"{name} must not begin with 0; got {brief(text.strip())}")
    if not match:
        raise DomainError(f"{name} must be a whole number (1k = 1,024); got {brief(text.strip())}")
    value = Fraction(match[1]) * _BINARY[(match[2] or "").lower()]
    if value != int(value):
        raise DomainError(f"{name} must be a whole number (1k = 1,024); got {brief(text.strip())}")
    return int(value)
