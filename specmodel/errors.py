"""Exceptions, the one warning, and the range checks that raise them."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_LONGEST = 500  # characters of an error, whatever it quotes
_LONGEST_NAME = 200  # characters of a name that is compared with known ones


class SpecmodelError(Exception):
    """Base class of every error this package raises on purpose; a very long text is shortened."""

    def __init__(self, message: str = "") -> None:
        super().__init__(_shortened(message, _LONGEST))


class DomainError(SpecmodelError, ValueError):
    """An argument outside its range."""


class ProfileError(SpecmodelError):
    """A device record that cannot be read or lacks what is asked of it."""


class ArchitectureError(SpecmodelError):
    """A model description that cannot be read or is not understood."""


class UnknownNameError(ProfileError, ArchitectureError):
    """A device or model name that nothing goes by."""


class ConvergenceError(SpecmodelError):
    """An iteration that did not settle."""


class FitError(SpecmodelError):
    """A fit that the measurements do not support."""


class CheckpointError(SpecmodelError):
    """Weights or a tokenizer that cannot be read, or do not fit the model they are for."""


class ExtrapolationWarning(UserWarning):
    """A number outside the range that its inputs were measured in."""


_QUOTES = reprlib.Repr()
_QUOTES.maxstring = _QUOTES.maxother = _QUOTES.maxlong = 60


def real_array(
    value: ArrayLike,
    name: str,
    *,
    low: float = -np.inf,
    high: float = np.inf,
    unit: str = "",
    finite: bool = True,
) -> NDArray[np.float64]:
    """Return `value` as a float array after checking ``low <= value <= high``.

    Infinities are out of range unless `finite` is False; NaN and text always are.

    Raises
    ------
    DomainError
        When a value is not a number, NaN, or out of range.
    """
    array = numbers_of(value)
    if array is None:
        raise DomainError(f"{name} must be a number; got {brief(value)}")
    bad = ~((array >= low) & (array <= high)) | (finite & np.isinf(array))
    if bad.any():
        first = array[bad].flat[0] if array.ndim else array[()]
        raise DomainError(f"{name} must be {_range(low, high)}{unit and ' ' + unit}; got {first:g}")
    return array


def whole_array(
    value: ArrayLike, name: str, *, low: int = 0, high: float = np.inf, unit: str = ""
) -> NDArray[np.float64]:
    """Return `value` as a float array of whole numbers after checking its range.

    Raises
    ------
    DomainError
        When a value is not a whole number, not finite, or out of range.
    """
    array = real_array(value, name, low=low, high=high, unit=unit)
    bad = array != np.floor(array)
    if bad.any():
        raise DomainError(f"{name} must be a whole number; got {np.atleast_1d(array[bad])[0]:g}")
    return array


def one_number(
    value: Any,
    name: str,
    *,
    low: float = -np.inf,
    high: float = np.inf,
    unit: str = "",
    finite: bool = True,
    positive: bool = False,
) -> float:
    """Return `value` as a float after checking that it is one number and ``low <= value <= high``.

    Infinities are out of range unless `finite` is False; text, NaN, true and false always are.
    With `positive` the number must be finite and above 0.

    Raises
    ------
    DomainError
        When the value is not one number, NaN, or out of range.

    Examples
    --------
    >>> one_number(0.5, "kv_reread", low=0, high=1)
    0.5
    """
    array = _one(value, name)
    if positive and not 0 < array < np.inf:
        limits = f"> 0{unit and ' ' + unit} and " + (
            "finite" if np.isinf(high) else f"at most {high:g}"
        )
        raise DomainError(f"{name} must be {limits}; got {array:g}")
    return float(real_array(array, name, low=low, high=high, unit=unit, finite=finite))


def one_whole(value: Any, name: str, *, low: int = 0, high: float = np.inf, unit: str = "") -> int:
    """Return `value` as an int after checking that it is one whole number in its range.

    Raises
    ------
    DomainError
        When the value is not one number, not whole, not finite, or out of range.

    Examples
    --------
    >>> one_whole(4.0, "tp", low=1)
    4
    """
    array = _one(value, name)
    return int(whole_array(array, name, low=low, high=high, unit=unit))


def one_flag(value: Any, name: str) -> bool:
    """Return `value` as a bool after checking that it is true or false.

    Raises
    ------
    DomainError
        When it is anything else, a number included.
    """
    if not isinstance(value, bool | np.bool_):
        raise DomainError(f"{name} must be True or False; got {brief(value)}")
    return bool(value)


def one_of(value: Any, name: str, choices: Sequence[str]) -> None:
    """Refuse a value that is not one of some words.

    Raises
    ------
    DomainError
        When it is not.
    """
    if not isinstance(value, str) or value not in choices:
        hint = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise DomainError(f"{name} must be {' or '.join(choices)}; got {brief(value)}{hint}")


def one_text(value: Any, name: str) -> None:
    """Refuse a value that is not text.

    Raises
    ------
    DomainError
        When it is not.
    """
    if not isinstance(value, str):
        raise DomainError(f"{name} must be text; got {brief(value)}")


def unwrap(array: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a scalar for a 0-d array, anything else unchanged: scalar in, scalar out."""
    result: NDArray[np.float64] = np.asarray(array)[()]
    return result


def numbers_of(value: Any) -> NDArray[np.float64] | None:
    """Return `value` as a float array, None where it is anything but numbers."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # rows of different lengths
        return None
    return array.astype(np.float64) if array.dtype.kind in "biuf" else None


def _one(value: Any, name: str) -> NDArray[np.float64]:
    """Return one number as an array without axes."""
    array = numbers_of(value)
    if array is None or array.ndim or isinstance(value, bool | np.bool_):
        raise DomainError(f"{name} must be one number; got {brief(value)}")
    return array


def check_broadcast(**values: Any) -> None:
    """Refuse arrays whose shapes do not broadcast by NumPy's rules; None is left out.

    Raises
    ------
    DomainError
        When they do not.
    """
    found = {name: numbers_of(value) for name, value in values.items()}
    shapes = {name: array.shape for name, array in found.items() if array is not None}
    try:
        np.broadcast_shapes(*shapes.values())
    except ValueError:
        given = ", ".join(f"{name} {shape}" for name, shape in shapes.items() if shape)
        raise DomainError(f"arrays must have shapes that broadcast; got {given}") from None


def _range(low: float, high: float) -> str:
    if np.isfinite(low) and np.isfinite(high):
        return f"in [{low:g}, {high:g}]"
    return (
        f">= {low:g}" if np.isfinite(low) else f"<= {high:g}" if np.isfinite(high) else "a number"
    )


def brief(value: Any) -> str:
    """Return a value as an error quotes it: as Python writes it, at most about a line.

    Examples
    --------
    >>> brief("a" * 1000)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaa...aaaaaaaaaaaaaaaaaaaaaaaaaaaa'"
    """
    if isinstance(value, str) and len(value) > _LONGEST:  # its repr would be as long
        value = value[:_LONGEST] + value[-_LONGEST:]
    return _shortened(_QUOTES.repr(value), 64)


def _shortened(text: str, most: int) -> str:
    """Return a text with its middle left out where it is longer than `most` characters."""
    if len(text) <= most:
        return text
    each = (most - 3) // 2
    return f"{text[:each]}...{text[-each:]}"


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known name, or an empty string."""
    if len(text := str(name).lower()) > _LONGEST_NAME:
        return ""
    close = difflib.get_close_matches(text, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
