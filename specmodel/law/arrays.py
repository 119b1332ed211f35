"""What the law needs of an array library, spelt so that NumPy and torch both understand it.

Torch takes NumPy's names of axes (`axis`, `keepdims`), so most calls are the same in both. The
few that differ are here. Torch is never imported: a tensor brings its own.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from specmodel.errors import DomainError

Array = Any  # numpy.ndarray or torch.Tensor, of one library within one call


def quiet() -> np.errstate:
    """Return a decorator under which NumPy does not warn of log 0 and what follows from it."""
    return np.errstate(divide="ignore", over="ignore", invalid="ignore")


def namespace(array: Array) -> Any:
    """Return the library that `array` belongs to: torch for its tensors, NumPy for all else."""
    return sys.modules["torch"] if type(array).__module__.split(".")[0] == "torch" else np


def put(values: Any, like: Array) -> Array:
    """Return `values` as an array of the library and on the device of `like`, dtype kept."""
    xp = namespace(like)
    return np.asarray(values) if xp is np else xp.asarray(values, device=like.device)


def floats(values: Any, name: str) -> Array:
    """Return floats: float64 in NumPy, the tensor's own in torch, half precision as float32.

    Raises
    ------
    DomainError
        When there is no axis, or a tensor is not of floats.
    """
    xp = namespace(values)
    try:
        array: Array = np.asarray(values, dtype=np.float64) if xp is np else values
    except (TypeError, ValueError):
        raise DomainError(f"{name} must be an array of numbers") from None
    if xp is not np and array.dtype in (xp.float16, xp.bfloat16):
        array = array.to(xp.float32)
    if array.dtype not in (xp.float32, xp.float64):
        raise DomainError(f"{name} must be floats; got {array.dtype}")
    if array.ndim == 0 or array.shape[-1] == 0:
        raise DomainError(f"{name} must have a last axis of at least one token")
    return array


def integers(values: Any, name: str, like: Array, *, low: int, high: int) -> Array:
    """Return int64 on the device of `like` after checking ``low <= values <= high``.

    Raises
    ------
    DomainError
        When a value is no integer or out of range.
    """
    array, xp = put(values, like), namespace(like)
    if "int" not in str(array.dtype) and 0 not in array.shape:
        raise DomainError(f"{name} must be integers; got {array.dtype}")
    array = xp.asarray(array, dtype=xp.int64)
    if bool(((array < low) | (array > high)).any()):
        raise DomainError(f"{name} must be in [{low}, {high}]")
    return array


def uniforms(values: Any, like: Array, shape: tuple[int, ...]) -> Array:
    """Return uniform random numbers, checked to lie in [0, 1) and to have `shape`.

    Raises
    ------
    DomainError
        When one is out of range or NaN, or the shape differs.
    """
    array = put(values, like)
    expect_shape(array, "u", shape)
    if not bool(((array >= 0) & (array < 1)).all()):
        raise DomainError("u must be in [0, 1)")
    return array


def expect_shape(array: Array, name: str, shape: tuple[int, ...]) -> None:
    """Raise DomainError unless `array` has `shape`."""
    if tuple(array.shape) != shape:
        raise DomainError(f"{name} must have the shape {shape}; got {tuple(array.shape)}")


def at(array: Array, index: Array) -> Array:
    """Return ``array[..., index]`` for one index a row: [..., V] and [...] to [...]."""
    xp = namespace(array)
    if xp is np:
        return np.take_along_axis(array, index[..., None], axis=-1)[..., 0]
    return xp.take_along_dim(array, index[..., None], -1)[..., 0]


def largest(array: Array, n: int) -> Array:
    """Return the n largest of the last axis, from the largest down."""
    xp = namespace(array)
    if xp is np:
        return -np.sort(np.partition(-array, n - 1, axis=-1)[..., :n], axis=-1)
    return xp.topk(array, n, -1).values


def one_hot(token: Array, size: int, like: Array) -> Array:
    """Return log probabilities all on `token`: [...] to [..., size], 0 there and -inf elsewhere."""
    xp = namespace(like)
    hot = put(np.arange(size), like) == token[..., None]
    return xp.asarray(xp.where(hot, 0.0, -xp.inf), dtype=like.dtype)


@quiet()
def normalise(logs: Array) -> Array:
    """Return `logs` minus the log of their summed exponentials; rows without mass unchanged."""
    xp = namespace(logs)
    top = xp.amax(logs, axis=-1, keepdims=True)
    top = xp.where(top == -xp.inf, xp.zeros_like(top), top)
    total = top + xp.log(xp.sum(xp.exp(logs - top), axis=-1, keepdims=True))
    return xp.where(total == -xp.inf, logs, logs - total)


def tree_parents(parents: Any, tokens: Array) -> Array:
    """Return the parent of each node for each sequence, [B, N], checked to come before it.

    Raises
    ------
    DomainError
        When a parent is neither -1 (the root) nor an earlier node.
    """
    B, n = tokens.shape
    array = integers(parents, "parents", tokens, low=-1, high=n)
    expect_shape(array, "parents", (n,) if array.ndim == 1 else (B, n))
    array = namespace(tokens).zeros_like(tokens) + array
    if bool((array >= put(np.arange(n), tokens)).any()):
        raise DomainError("parents must be -1 or an earlier node: the tree lists parents first")
    return array
