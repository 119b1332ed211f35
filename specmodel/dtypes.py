"""Number formats: canonical names, the aliases people type, and bytes per value."""

from __future__ import annotations

from specmodel.errors import DomainError, did_you_mean

BYTES: dict[str, float] = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
}
"""Bytes per value of each known format."""

_ALIASES = {
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "float8": "fp8",
    "f8": "fp8",
    "e4m3": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "w8a8": "int8",
}

ACTIVATION_DTYPES = ("float32", "float16", "bfloat16")
"""Formats that activations (and unquantised weights) are kept in."""


def canonical_dtype(name: str, *, what: str = "dtype") -> str:
    """Return the canonical name of a number format.

    Raises
    ------
    DomainError
        When the name is unknown.

    Examples
    --------
    >>> canonical_dtype("bf16")
    'bfloat16'
    """
    key = str(name).strip().lower().removeprefix("torch.")
    key = _ALIASES.get(key, key)
    if key not in BYTES:
        hint = did_you_mean(key, [*BYTES, *_ALIASES])
        raise DomainError(f"{what} must be one of {', '.join(BYTES)}; got {name!r}{hint}")
    return key
