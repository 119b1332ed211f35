"""Number formats: canonical names, the aliases people type, bytes per value, quantised weights."""

from __future__ import annotations

from dataclasses import dataclass

from specmodel.errors import DomainError, brief, did_you_mean

BYTES: dict[str, float] = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
    "mxfp4": 0.5,
    "nvfp4": 0.5,
}
"""Bytes per value of each known format; scales of grouped formats are apart."""

ACTIVATION_DTYPES = ("float32", "float16", "bfloat16")
"""Formats that activations (and unquantised weights) are kept in."""

KV_DTYPES = ("float32", "float16", "bfloat16", "fp8", "int8")
"""Formats that a KV cache is kept in."""

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
    "w4a16": "int4",
    "awq": "int4",
    "gptq": "int4",
    "fp4": "nvfp4",
}


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
        raise DomainError(f"{what} must be one of {', '.join(BYTES)}; got {brief(name)}{hint}")
    return key


QUANTISABLE = frozenset({"attention", "attention output", "mlp", "experts", "shared"})
"""Roles of the matrices that quantisation usually covers (`specmodel.architectures.Role`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """How quantised matrices are stored and multiplied.

    Attributes
    ----------
    dtype : str
        Stored format.
    roles : frozenset of str
        Which matrices are quantised (`specmodel.architectures.Role`).
    block : (int, int) or None
        A float32 scale for each such block of outputs x inputs; None: no block scales.
    group : int or None
        Weights along the inputs that share a scale; None: scales are not counted.
    scale_bytes : float
        Bytes of one group's scale and zero point. [B]
    weight_only : bool
        Weights are expanded to the activation format before they are multiplied.
    """

    dtype: str
    roles: frozenset[str] = QUANTISABLE
    block: tuple[int, int] | None = None
    group: int | None = None
    scale_bytes: float = 0.0
    weight_only: bool = False

    def matrix_bytes(self, inputs: int, outputs: int) -> float:
        """Return the bytes of one quantised matrix with its scales. [B]"""
        stored = inputs * outputs * BYTES[self.dtype]
        if self.block is not None:
            rows, columns = self.block
            stored += -(-outputs // rows) * -(-inputs // columns) * BYTES["float32"]
        if self.group is not None:
            stored += outputs * -(-inputs // self.group) * self.scale_bytes
        return stored


def default_quantisation(dtype: str) -> Quantisation:
    """Return the usual form of a quantised weight format.

    ``int4`` is weight-only with a 16-bit scale for each 128 weights (AWQ, GPTQ), ``mxfp4`` has an
    8-bit scale for each 32 (OCP MX), ``nvfp4`` an fp8 scale for each 16; ``fp8`` and ``int8``
    have one scale a matrix, not counted.
    """
    if dtype == "int4":
        return Quantisation(dtype=dtype, group=128, scale_bytes=2.0, weight_only=True)
    if dtype == "mxfp4":
        return Quantisation(dtype=dtype, group=32, scale_bytes=1.0, weight_only=True)
    if dtype == "nvfp4":
        return Quantisation(dtype=dtype, group=16, scale_bytes=1.0)
    return Quantisation(dtype=dtype)
