"""From the text people type to values; every mistake is a `DomainError` naming the flag."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from specmodel.errors import DomainError, brief
from specmodel.hardware import Link
from specmodel.plausible import check_plausible
from specmodel.units import parse_count

_RANGE = re.compile(r"([^-:]+)[-:]([^-:]+)(?::([^-:]+))?")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\dkm.])", re.IGNORECASE)
_MOST = 10_000
_LARGEST = 10**9

Value = TypeVar("Value")


def parse_counts(text: str, *, name: str, low: int) -> tuple[int, ...]:
    """Read a list of whole numbers and ranges: ``1,8,64``, ``1k,8k``, ``1-16``, ``0:8k:1k``.

    Raises
    ------
    DomainError
        When a part is not a whole number >= `low` or the list is empty or huge.

    Examples
    --------
    >>> parse_counts("1,4-6,16:64:16", name="batch", low=1)
    (1, 4, 5, 6, 16, 32, 48, 64)
    """
    values: list[int] = []
    refuse_separators(text, name=name)
    for part in text.split(","):
        if match := _RANGE.fullmatch(part.strip()):
            first, last = (parse_count(x, name=name) for x in match.group(1, 2))
            step = parse_count(match[3], name=name) if match[3] else 1
            if step < 1 or last < first:
                raise DomainError(
                    f"{name} range must go up, by at least 1; got {brief(part.strip())}"
                )
            if (last - first) // step >= _MOST:
                raise DomainError(
                    f"{name} lists at most {_MOST:,} values; got {brief(part.strip())}"
                )
            values += range(first, last + 1, step)
        else:
            values.append(parse_count(part, name=name))
    for value in values:
        if not low <= value <= _LARGEST:
            raise DomainError(f"{name} must be from {low} to {_LARGEST:,}; got {value}")
    if len(values) > _MOST:
        raise DomainError(f"{name} lists at most {_MOST:,} values; got {len(values):,}")
    return tuple(dict.fromkeys(values))


def refuse_separators(text: str, *, name: str) -> None:
    """Raise where commas seem to divide thousands rather than values.

    They do where a part of three digits begins with 0 (``4,096``), and in contexts where the
    parts join to a multiple of 1,024 (``12,288``).

    Raises
    ------
    DomainError
        With both readings.
    """
    for match in _THOUSANDS.finditer(text):
        first, *others = match[0].split(",")
        joined = int(first + "".join(others))
        whole = name == "context" and joined % 1024 == 0
        if first != "0" and (whole or any(group[0] == "0" for group in others)):
            values = [int(group) for group in (first, *others)]
            raise DomainError(
                f"{name} {match[0]} reads as {joined} or as {' and '.join(map(str, values))}: "
                f"write {joined}, or '{', '.join(map(str, values))}' with spaces"
            )


def parse_number(text: str, *, name: str) -> float:
    """Read a number.

    Raises
    ------
    DomainError
        When the text is not a number.
    """
    try:
        return float(text)
    except ValueError:
        raise DomainError(f"{name} must be a number; got {brief(text)}") from None


def parse_whole(text: str, *, name: str) -> int:
    """Read a plain whole number (a sign is read, so that a negative one can be named).

    Raises
    ------
    DomainError
        When the text is not a whole number.
    """
    try:
        return int(text)
    except ValueError:
        raise DomainError(f"{name} must be a whole number; got {brief(text)}") from None


def parse_seconds(text: str, *, name: str) -> float:
    """Read a duration: ``60s``, ``5m`` or plain seconds. [s]

    Raises
    ------
    DomainError
        When the text is not a duration.

    Examples
    --------
    >>> parse_seconds("5m", name="budget")
    300.0
    """
    scale = {"s": 1.0, "m": 60.0}.get(text[-1:])
    return parse_number(text[:-1] if scale else text, name=name) * (scale or 1.0)


def parse_rates(text: str) -> tuple[float, ...]:
    """Read a list of rates.

    Raises
    ------
    DomainError
        When a part is not a number.
    """
    return tuple(parse_number(part, name="acceptance rates") for part in text.split(","))


def parse_link(text: str, *, name: str) -> Link:
    """Read a latency in microseconds and a bandwidth in GB/s.

    Raises
    ------
    DomainError
        When the text is not two numbers, the second above 0, or no link has such values.

    Examples
    --------
    >>> parse_link("5,50", name="network")
    Link(latency=5e-06, bandwidth=50000000000.0)
    """
    parts = [parse_number(part, name=name) for part in text.split(",")]
    if len(parts) != 2:
        raise DomainError(f"{name} must be LATENCY_US,BANDWIDTH_GB_PER_S; got {brief(text)}")
    link = Link(latency=parts[0] / 1e6, bandwidth=parts[1] * 1e9)
    for quantity, value in (("link_latency", link.latency), ("link_bandwidth", link.bandwidth)):
        check_plausible(quantity, value, name, fault=DomainError)
    return link


def optional(parse: Callable[..., Value], text: str | None, *, name: str) -> Value | None:
    """Read a value where there is one."""
    return None if text is None else parse(text, name=name)
