"""Passes over a cache, captured as CUDA graphs and replayed, as serving engines do.

Launched one by one from Python, the kernels of a narrow pass take longer to launch than to run.
Prompts, sampling and verification stay eager: the first hardly come again in the same shape, the
others wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from calibrate.clock import Clock, record
from calibrate.engine.cache import Cache

_SPAN = 256  # slots: a pass reads the next multiple, so that a graph serves so many tokens

Replay = Callable[[], Tensor]
Recorder = Callable[[Callable[[], Tensor]], Replay]
"""Runs a pass, captures it, and returns what replays it into the same memory."""


def capture(stack: Any) -> None:
    """Replay a stack's passes over a cache from now on, where it is on a CUDA device.

    Its weights may change in place; they may not move.
    """
    device = torch.device(stack.device)
    if stack.graphs is None and device.type == "cuda":
        stack.graphs = Graphs(device, lambda: _recorder(device))


class Graphs:
    """The graphs of one stack, those of each cache in a memory pool of their own.

    A graph belongs to a cache, the shapes of what a pass is given, and all of it that is no
    tensor: layers, columns written before, slots to read. A cache takes its graphs with it.

    Parameters
    ----------
    device : torch.device
    recorder : callable
        Returns what captures the passes over one cache.

    Attributes
    ----------
    spent : float
        Seconds of this process that went into capturing, for whoever times rounds. [s]
    """

    spent: ClassVar[float] = 0.0

    def __init__(self, device: Any, recorder: Callable[[], Recorder]) -> None:
        self._clock, self._recorder = Clock(device), recorder
        self._caches: WeakKeyDictionary[Cache, _Passes] = WeakKeyDictionary()

    def __len__(self) -> int:
        """Number of graphs that are kept."""
        return sum(len(passes.known) for passes in self._caches.values())

    def __call__(
        self, run: Callable[..., Tensor], inputs: Sequence[Tensor], cache: Cache, **place: Any
    ) -> Tensor:
        """Return ``run(*inputs, cache, **place)``, captured if it is new, replayed in any case.

        Parameters
        ----------
        run : callable
            The same for every call of these graphs. It writes only behind the cache's lengths,
            so that running it again changes nothing.
        inputs : sequence of Tensor (batch, width, ...)
        cache : Cache
        **place
            Of `Decoder.forward`. Without `span`, the next multiple of 256 that is enough, as far
            as the cache has so many slots.

        Returns
        -------
        Tensor
            Overwritten by the next pass over the same cache, whatever its shape: graphs of a
            pool share memory.
        """
        tensors = {name: value for name, value in place.items() if isinstance(value, Tensor)}
        fixed = {
            name: tuple(value) if isinstance(value, Sequence) else value
            for name, value in place.items()
            if value is not None and name not in tensors
        }
        if "span" not in fixed:
            fixed["span"] = _span(cache, inputs[0].shape[1] + fixed.get("written", 0))
        given = [*inputs, *tensors.values()]
        shapes = tuple((value.shape, value.dtype) for value in given)
        key = (shapes, tuple(tensors), tuple(sorted(fixed.items())))
        passes = self._caches.get(cache)
        if passes is None:
            passes = self._caches[cache] = _Passes(self._recorder(), {})
        if key not in passes.known:
            start = self._clock.now()
            buffers = [value.clone(memory_format=torch.contiguous_format) for value in given]
            named = dict(zip(tensors, buffers[len(inputs) :], strict=True))
            once = partial(run, *buffers[: len(inputs)], cache, **named, **fixed)
            passes.known[key] = _Pass(buffers, passes.record(once))
            passes.known[key].replay()  # the first one loads it onto the device
            Graphs.spent += self._clock.now() - start
        buffers, replay = passes.known[key]
        for buffer, value in zip(buffers, given, strict=True):
            buffer.copy_(value)
        return replay()


class _Pass(NamedTuple):
    """A captured pass, and the memory that it reads its input from."""

    buffers: list[Tensor]
    replay: Replay


class _Passes(NamedTuple):
    """The captured passes over one cache."""

    record: Recorder
    known: dict[Hashable, _Pass]


def _span(cache: Cache, width: int) -> int:
    """Return how many slots a pass reads; more than there are is refused by the pass. [token]"""
    needed = cache.longest + width
    return max(needed, min(-(-needed // _SPAN) * _SPAN, cache.capacity))


def _recorder(device: torch.device) -> Recorder:
    return partial(record, side=_side(device), pool=torch.cuda.graph_pool_handle())


@lru_cache
def _side(device: torch.device) -> Any:
    """Return the stream that all graphs of a device are captured on."""
    return torch.cuda.Stream(device)
