"""Strict access to the keys of a mapping that a file holds: each is read, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from specmodel.errors import DomainError, SpecmodelError, brief, did_you_mean

_MISSING = object()


class Fields:
    """The keys of one mapping, remembering which were read.

    Parameters
    ----------
    values : mapping
        As a JSON or YAML reader returns it.
    where : str
        The file and the keys that lead to this mapping, for errors.
    fault : callable
        Makes the error from its text.

    Raises
    ------
    SpecmodelError
        `fault`, when `values` is no mapping.
    """

    def __init__(
        self, values: Any, where: str, *, fault: Callable[[str], SpecmodelError] = DomainError
    ) -> None:
        self.where = where
        self.fault = fault
        if not isinstance(values, Mapping):
            raise fault(f"{where}: must be a mapping; got {brief(values)}")
        self.values: Mapping[str, Any] = values
        self._read: set[str] = set()

    def error(self, key: str, problem: str) -> SpecmodelError:
        """Return an error that names the file and the key."""
        return self.fault(f"{self.where}: {key}: {problem}")

    def raw(self, key: str, default: Any = _MISSING) -> Any:
        """Return a value of any type; without a default the key must be there."""
        self._read.add(key)
        value = self.values.get(key, default)
        if value is _MISSING:
            raise self.error(key, "missing")
        return value

    def _stated(self, key: str, default: Any) -> Any:
        """Return a value; null is absent where there is a default."""
        value = self.raw(key, default)
        return default if value is None and default is not _MISSING else value

    def whole(self, key: str, default: Any = _MISSING, *, low: int = 1, high: int = 10**8) -> int:
        """Return a whole number from `low` to `high`; null is absent where there is a default."""
        value = self._stated(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.error(key, f"must be a whole number >= {low}; got {brief(value)}")
        if value > high:
            raise self.error(key, f"must be at most {high}; got {brief(value)}")
        return value

    def whole_or_none(self, key: str, default: Any = _MISSING, *, low: int = 1) -> int | None:
        """Return a whole number >= `low`, or None where the file says null."""
        return None if self.raw(key, default) is None else self.whole(key, low=low)

    def number(
        self,
        key: str,
        default: Any = _MISSING,
        *,
        low: float = -math.inf,
        high: float = math.inf,
        unit: str = "",
    ) -> float:
        """Return a finite number from `low` to `high`; null is absent where there is a default."""
        value = self._stated(key, default)
        if not is_number(value):
            form = " (as in 3.35e+12)" if isinstance(value, str) else ""
            raise self.error(key, f"must be a number{form}; got {brief(value)}")
        if not low <= value <= high:
            limits = f">= {low:g}" if math.isinf(high) else f"in [{low:g}, {high:g}]"
            raise self.error(key, f"must be {limits}{unit and ' ' + unit}; got {value:g}")
        return float(value)

    def number_or_none(self, key: str, *, low: float = -math.inf) -> float | None:
        """Return a finite number >= `low`, or None where there is none."""
        return None if self.raw(key, None) is None else self.number(key, low=low)

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        """Return true or false."""
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false; got {brief(value)}")
        return value

    def text(self, key: str, default: Any = _MISSING) -> str:
        """Return a string."""
        value = self.raw(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string; got {brief(value)}")
        return value

    def refuse_kinds(self, marks: Mapping[str, str]) -> None:
        """Raise where a key marks the file as one of another kind: key to what it is."""
        for key, what in marks.items():
            if key in self.values:
                raise self.fault(f"{self.where}: is {what}")

    def version(self, expected: int, key: str = "schema") -> None:
        """Refuse a file of another version."""
        value = self.raw(key)
        if isinstance(value, bool) or value != expected or not isinstance(value, int):
            raise self.error(key, f"must be {expected}; got {brief(value)}")

    def text_list(self, key: str) -> tuple[str, ...]:
        """Return a list of strings, empty where the key is absent."""
        value = self.raw(key, [])
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.error(key, f"must be a list of text; got {brief(value)}")
        return tuple(value)

    def choice(self, key: str, known: Collection[str], default: Any = _MISSING) -> str:
        """Return one of the known strings."""
        value = self.raw(key, default)
        if not isinstance(value, str) or value not in known:
            hint = did_you_mean(value, known)
            raise self.error(key, f"must be one of {', '.join(known)}; got {brief(value)}{hint}")
        return value

    def whole_list(self, key: str) -> tuple[int, ...]:
        """Return a list of whole numbers, empty where the key is absent."""
        value = self.raw(key, [])
        if not isinstance(value, list) or any(
            isinstance(x, bool) or not isinstance(x, int) or x < 0 for x in value
        ):
            raise self.error(key, f"must be a list of whole numbers >= 0; got {brief(value)}")
        return tuple(value)

    def number_list(
        self, key: str, *, low: float = -math.inf, high: float = math.inf
    ) -> tuple[float, ...]:
        """Return a list of finite numbers from `low` to `high`."""
        value = self.raw(key)
        if not isinstance(value, list) or not all(is_number(x) and low <= x <= high for x in value):
            limits = f"in [{low:g}, {high:g}]"
            raise self.error(key, f"must be a list of numbers {limits}; got {brief(value)}")
        return tuple(map(float, value))

    def mapping(self, key: str, default: Any = _MISSING) -> Fields:
        """Return a mapping's own keys."""
        value = self._stated(key, default)
        return Fields(value, f"{self.where}: {key}", fault=self.fault)

    def mappings(self, key: str) -> list[Fields]:
        """Return the keys of each mapping of a list."""
        value = self.raw(key)
        if not isinstance(value, list):
            raise self.error(key, f"must be a list of mappings; got {brief(value)}")
        return [
            Fields(each, f"{self.where}: {key} {number}", fault=self.fault)
            for number, each in enumerate(value, start=1)
        ]

    def refuse_unknown(self, known: Collection[str] = ()) -> None:
        """Raise for a key that was not read and is not among the known ones."""
        for key in self.values:
            if key not in self._read and key not in known:
                hint = did_you_mean(key, [*self._read, *known])
                raise self.error(brief(key)[1:-1], f"unknown key{hint}")


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number that a float holds (true and false are none)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -1.7e308 < value < 1.7e308  # false for NaN
