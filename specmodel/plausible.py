"""What a device can have: values outside it are refused with the unit they seem to be in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from specmodel.errors import SpecmodelError
from specmodel.yaml_text import parse_yaml


def check_plausible(
    quantity: str, value: float, where: str, *, fault: Callable[[str], SpecmodelError]
) -> None:
    """Raise where no device has such a value.

    Parameters
    ----------
    quantity : str
        A key of ``data/plausible.yaml``, such as ``memory_bandwidth``.
    value : float
        In SI units.
    where : str
        What to call it: a file and key, or a flag.
    fault : callable
        Makes the error from its text.

    Raises
    ------
    SpecmodelError
        `fault`, with the range and the unit that the value seems to be in.

    Examples
    --------
    >>> from specmodel.errors import DomainError
    >>> check_plausible("memory_bandwidth", 3.35, "M", fault=DomainError)
    Traceback (most recent call last):
        ...
    specmodel.errors.DomainError: M: 3.35 B/s is outside what any device has (5e+08 to 1e+17 B/s);
    it seems to be in TB/s: write 3.35e+12, or in GB/s: write 3.35e+09
    """
    limits = _limits()[quantity]
    low, high, unit = limits["low"], limits["high"], limits["unit"]
    if low <= value <= high:
        return
    least, most = limits["usual"]
    units = [(u, value * f) for u, f in limits["units"].items() if least <= value * f <= most]
    units.sort(key=lambda unit: abs(math.log(unit[1] / limits["typical"])))
    meant = ", or in ".join(f"{unit}: write {number:.6g}" for unit, number in units)
    hint = f"; it seems to be in {meant}" if meant else ""
    raise fault(
        f"{where}: {value:g} {unit} is outside what any device has ({low:g} to {high:g} {unit})"
        f"{hint}"
    )


def check_together(
    peak_flops: float, bandwidth: float, where: str, *, fault: Callable[[str], SpecmodelError]
) -> None:
    """Raise where no device has such a peak beside such a bandwidth.

    Parameters
    ----------
    peak_flops : float
        Of its fastest number format. [FLOP/s]
    bandwidth : float
        [B/s]
    where : str
        File, for the error.
    fault : callable
        Makes the error from its text.

    Raises
    ------
    SpecmodelError
        `fault`, with the ratio and its range.
    """
    limits = _limits()["rho"]
    rho = peak_flops / bandwidth
    if not limits["low"] <= rho <= limits["high"]:
        raise fault(
            f"{where}: {peak_flops:g} FLOP/s at {bandwidth:g} B/s are {rho:.3g} FLOP/B, where any "
            f"device has {limits['low']:g} to {limits['high']:g}: is one of them in another unit?"
        )


@cache
def _limits() -> Mapping[str, Mapping[str, Any]]:
    limits: dict[str, dict[str, Any]] = parse_yaml(
        (files("specmodel") / "data" / "plausible.yaml").read_text(encoding="utf-8")
    )
    return limits
