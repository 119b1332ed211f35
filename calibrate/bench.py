"""What cases share: a device, its memory filled once with random values, its cache's size."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from calibrate.clock import Clock
from specmodel.dtypes import BYTES
from specmodel.errors import DomainError

TORCH = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}
"""Torch's name of each number format that is measured."""

_TILE = 1 << 22  # values drawn at random; larger tensors repeat them
_ALIGN = 256  # elements: every view starts where an allocation could
_ROTATION = 4  # copies in turn span so many last-level caches
_MOST_COPIES = {"graph": 64, "eager": 512}
_FLASH, _CUDNN = "FLASH_ATTENTION", "CUDNN_ATTENTION"
_CUDNN_GAIN = 0.9  # cuDNN attention plans every shape anew, 0.4 s each: only where it is faster


@dataclass(slots=True)
class Work:
    """What one case runs: calls that do the same on different memory, and what ran it.

    `mode` is the clock's where it differs from the case's.
    """

    calls: Sequence[Callable[[], object]]
    kernel: str = ""
    note: str = ""
    mode: str | None = None


class OutOfMemory(MemoryError):
    """A case that needs more memory than it may take."""


class Pool:
    """One stretch of random values that cases take views of.

    Drawing values anew for every case would take longer than timing it, and views of a stretch
    larger than the last-level cache, taken in turn, are cold without a copy each.
    """

    def __init__(self, bench: Bench, dtype: str) -> None:
        self._bench, self._dtype = bench, dtype
        self._values = torch.empty(0, dtype=TORCH[dtype], device=bench.device)

    def views(self, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        """Return a tensor of each shape, one behind the other."""
        sizes = [-(-math.prod(shape) // _ALIGN) * _ALIGN for shape in shapes]
        if sum(sizes) > len(self._values):
            self._grow(sum(sizes))
        found, start = [], 0
        for shape, size in zip(shapes, sizes, strict=True):
            found.append(self._values[start : start + math.prod(shape)].view(shape))
            start += size
        return found

    def _grow(self, size: int) -> None:
        kind, device = TORCH[self._dtype], self._bench.device
        self._values = torch.empty(0, dtype=kind, device=device)  # lets go of it first
        self._bench.allow(size * BYTES[self._dtype])
        values = torch.empty(size, dtype=kind, device=device)
        scale = 0.5 if self._dtype == "fp8" else 0.02  # fp8 would round 0.02 to a few values
        drawn = torch.randn(min(size, _TILE), device=device, generator=self._bench.generator)
        tile = (drawn * scale).to(kind)
        for part in values.split(_TILE):
            part.copy_(tile[: len(part)])
        self._values = values


class Bench:
    """One device and what cases on it share.

    Parameters
    ----------
    device : str
        As torch spells it.
    seed : int
    memory_limit : float, optional
        What one allocation may take, by default four fifths of what is free. [B]
    """

    def __init__(self, device: str, *, seed: int = 0, memory_limit: float | None = None) -> None:
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        if self.cuda and self.device.index is None:
            self.device = torch.device("cuda", 0)
        if self.cuda:
            torch.cuda.set_device(self.device)
        self.seed = seed
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.mode = "graph" if self.cuda else "eager"
        self.clock = Clock(self.device)
        self.cache_bytes = cache_bytes(self.device)
        self._limit = memory_limit
        self._pools: dict[tuple[str, str], Pool] = {}
        self.kernels: dict[str, str] = {}

    def pool(self, purpose: str, dtype: str) -> Pool:
        """Return the pool for a purpose (``weights``, ``cache``) and format."""
        return self._pools.setdefault((purpose, dtype), Pool(self, dtype))

    def release(self) -> None:
        """Give back all memory that no case holds."""
        self._pools.clear()
        if self.cuda:
            torch.cuda.empty_cache()

    def free_bytes(self) -> float:
        """Return the memory that may be taken. [B]"""
        if self._limit is not None:
            return self._limit
        return free_memory(self.device)

    def capacity_bytes(self) -> float:
        """Return the memory of the device. [B]"""
        if self.cuda:
            return float(torch.cuda.get_device_properties(self.device).total_memory)
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

    def allow(self, size: float) -> None:
        """Refuse an allocation that would not fit: a CPU would swap or kill instead.

        Raises
        ------
        OutOfMemory
        """
        if size > (free := self.free_bytes()):
            raise OutOfMemory(f"out of memory: {size / 1e9:.3g} GB needed, {free / 1e9:.3g} free")

    def random(self, *shape: int, dtype: str) -> Any:
        """Return normal values."""
        self.allow(math.prod(shape) * BYTES[dtype])
        drawn = torch.randn(*shape, device=self.device, generator=self.generator)
        return drawn.to(TORCH[dtype])

    def copies(self, size: float) -> int:
        """Return how many buffers of `size` bytes in turn stay colder than the cache."""
        return max(2, min(_MOST_COPIES[self.mode], math.ceil(_ROTATION * self.cache_bytes / size)))

    def cold(self, purpose: str, shape: tuple[int, ...], dtype: str) -> list[Any]:
        """Return tensors of one shape that, used in turn, are colder than the cache."""
        count = self.copies(math.prod(shape) * BYTES[dtype])
        return self.pool(purpose, dtype).views([shape] * count)

    def once(self, what: str, dtype: str, choose: Callable[[str], str]) -> str:
        """Return a kernel chosen once: a run (and what takes it up) must not mix two curves."""
        key = f"{what} {dtype}"
        if key not in self.kernels:
            self.kernels[key] = choose(dtype)
        return self.kernels[key]

    def attention_backend(self, dtype: str) -> SDPBackend | None:
        """Return the attention kernel to ask for; None: torch's own choice, on a CPU.

        On CUDA flash attention, which splits the cache when few blocks run, or cuDNN where it is
        a tenth faster at widths 1 and 8 of one shape; whatever works where neither does.
        """
        if not self.cuda:
            return None
        return getattr(SDPBackend, self.once("attention", dtype, self._fastest))

    def _fastest(self, dtype: str) -> str:
        batch, kv_heads, group, context, head_dim = 16, 8, 4, 2048, 128
        keys, values = (
            self.random(batch, kv_heads, context, head_dim, dtype=dtype) for _ in range(2)
        )
        queries = [self.random(batch, kv_heads, group * W, head_dim, dtype=dtype) for W in (1, 8)]
        took: dict[str, float] = {}

        def attend(name: str) -> list[Any]:
            backend = getattr(SDPBackend, name)
            return [attention(query, keys, values, backend) for query in queries]

        for name in (_FLASH, _CUDNN):
            with suppress(RuntimeError):  # the device or format may not have it
                ready = self.clock.prepare([partial(attend, name)], "graph")
                self.clock.visit(ready)
                took[name] = min(ready.samples)
        if _FLASH in took:
            faster = took.get(_CUDNN, math.inf) < _CUDNN_GAIN * took[_FLASH]
            return _CUDNN if faster else _FLASH
        return _CUDNN if _CUDNN in took else "MATH"


def free_memory(device: torch.device) -> float:
    """Return the memory of a device that may be taken without swapping. [B]"""
    if device.type == "meta":
        return math.inf
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return 0.95 * float(torch.cuda.mem_get_info(device)[0] + held)
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return 0.8 * 1024 * int(line.split()[1])
    return 0.5 * float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def kernel_name(backend: SDPBackend | None) -> str:
    """Return a backend's name for the table."""
    return "sdpa" if backend is None else f"sdpa {backend.name.lower().removesuffix('_attention')}"


def attention(query: Any, keys: Any, values: Any, backend: SDPBackend | None) -> Any:
    """Attend with the heads of a group folded into rows of their KV head.

    Parameters
    ----------
    query : (batch, kv_heads, group * width, head_dim)
    keys, values : (batch, kv_heads, context, head_dim)
    backend : SDPBackend or None

    Notes
    -----
    No mask: causality among the `width` positions would skip less than width / context of it.
    """
    if backend is None:
        return F.scaled_dot_product_attention(query, keys, values)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, keys, values)


def cache_bytes(device: torch.device) -> int:
    """Return the size of the last-level cache. [B]

    Raises
    ------
    DomainError
        When neither torch nor the operating system says.
    """
    if device.type == "cuda":
        size = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        if size:
            return int(size)
        raise DomainError(f"device {device}: torch does not tell the size of its L2 cache")
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text(encoding="ascii").strip()
        scale = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * scale)
    return max(sizes, default=32 << 20)


def bf16_is_fast(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 in hardware, as far as torch can tell."""
    if device.type == "cuda":
        return bool(torch.cuda.get_device_capability(device) >= (8, 0))
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(supported is not None and supported())


def default_dtypes(device: torch.device) -> tuple[str, ...]:
    """Return the formats measured unless others are asked for: activations first, then fp8."""
    if device.type == "cpu":
        return ("bfloat16",) if bf16_is_fast(device) else ("float32",)
    main = "bfloat16" if bf16_is_fast(device) else "float16"
    has_fp8 = torch.cuda.get_device_capability(device) >= (8, 9)
    return (main, "fp8") if has_fp8 else (main,)
