"""How a case is timed: CUDA events around captured graphs, or the time of a CPU thread.

On a GPU a case is captured as a CUDA graph and replayed between two events, behind a short wait on
the device, so that what launching costs is not timed; ``eager`` is timed from the host, launches
included. On a CPU one thread is timed by its own time, which other programs disturb least, and
several threads by the wall clock, which needs an idle machine.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch

from calibrate.table import Row, measured

_VISIT = 0.03  # seconds of timing a visit aims at
_SAMPLE = {"cuda": 1e-3, "cpu": 2e-4}  # shortest interval that one sample may cover
_MOST_SAMPLES = 5
_WAIT_CYCLES = 2_000_000  # about 1 ms on the device: launches queue up behind it


@dataclass(slots=True)
class Prepared:
    """Something that can be timed again and again.

    Attributes
    ----------
    run : callable
        One run, of `per` calls.
    per : int
    host : bool
        Timed from the host, launches included.
    once : float
        About what one run takes. [s]
    samples : list of float
        Seconds of one call, as collected so far. [s]
    """

    run: Callable[[], object]
    per: int
    host: bool
    once: float = 0.0
    samples: list[float] = field(default_factory=list)


class Clock:
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self._side = torch.cuda.Stream(device) if self.cuda else None
        one = not self.cuda and torch.get_num_threads() == 1
        self._now = time.thread_time if one else time.perf_counter

    def synchronise(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def now(self) -> float:
        """Return the time after all that was asked of the device is done. [s]"""
        self.synchronise()
        return self._now()

    def warm_up(self) -> None:
        """Keep a GPU busy for about a second, so that its clocks rise before anything is timed."""
        if self.cuda:
            x = torch.randn(4096, 4096, device=self.device, dtype=torch.float16)
            end = time.perf_counter() + 1.0
            while time.perf_counter() < end:
                for _ in range(50):
                    torch.mm(x, x)
                self.synchronise()

    def prepare(self, calls: Sequence[Callable[[], object]], mode: str) -> Prepared:
        """Make calls ready to be timed: all in one graph, or one after another in turn."""
        if self.cuda and mode == "graph":
            ready = Prepared(self._capture(calls), len(calls), host=False)
        else:
            turn = cycle(calls)
            ready = Prepared(lambda: next(turn)(), 1, host=True)
        for _ in range(2):  # the first run may compile, load or allocate
            self.synchronise()
            start = self._now()
            ready.run()
            self.synchronise()
            ready.once = max(self._now() - start, 1e-7)
        return ready

    def _capture(self, calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
        def every() -> None:
            for call in calls:
                call()

        replay = record(every, self._side, torch.cuda.graph_pool_handle())

        def again(keep: object = calls) -> None:  # what the graph reads must outlive it
            replay()

        return again

    def visit(self, ready: Prepared) -> None:
        """Run a case once unseen, then add a few samples of it."""
        ready.run()
        self.synchronise()
        shortest = _SAMPLE["cuda" if self.cuda else "cpu"]
        many = max(1, min(200, round(shortest / ready.once)))
        count = max(1, min(_MOST_SAMPLES, int(_VISIT / (ready.once * many))))
        for _ in range(count):
            between = self._by_events if self.cuda and not ready.host else self._by_host
            ready.samples.append(between(ready.run, many) / many / ready.per)

    def _by_host(self, run: Callable[[], object], many: int) -> float:
        start = self._now()
        for _ in range(many):
            run()
        return self.now() - start

    def _by_events(self, run: Callable[[], object], many: int) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_WAIT_CYCLES)
        first.record()
        for _ in range(many):
            run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3


def record(run: Callable[[], Any], side: Any, pool: Any) -> Callable[[], Any]:
    """Run something twice on a side stream, then capture it as a CUDA graph.

    Parameters
    ----------
    run : callable
        Without waits and copies from the host.
    side : torch.cuda.Stream
    pool : handle of the memory that it is captured into

    Returns
    -------
    callable
        Replays it and returns what `run` returned: memory of the pool, written again by each
        replay. It does not keep alive what else the graph reads and writes.
    """
    current = torch.cuda.current_stream(side.device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=side):
            found = run()
    except BaseException:
        # a broken capture leaves its stream current and the allocator capturing
        torch.cuda.set_stream(torch.cuda.default_stream(side.device))
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(side.device.index, pool)
        raise

    def replay() -> Any:
        graph.replay()
        return found

    return replay


def spread(samples: Sequence[float]) -> float:
    """Return the interquartile range over the median.

    Examples
    --------
    >>> spread([1.0, 2.0, 3.0])
    0.5
    """
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def noise(rows: Sequence[Row]) -> dict[str, float]:
    """Return how steady a run was, as fractions of the time measured.

    ``reference``: interquartile range over the median of the times of the reference point,
    which was measured again throughout the run; ``drift``: its last third against its first;
    ``rows``: the median of the rows' own spreads; ``worst``: the largest of them.
    """
    times = [float(row["seconds"]) for row in measured(rows, "reference")]
    spreads = [float(row["spread"]) for row in rows if row["seconds"]]
    third = max(1, len(times) // 3)
    ends = [statistics.median(part) for part in (times[:third], times[-third:])] if times else []
    return {
        "reference": spread(times),
        "drift": ends[1] / ends[0] - 1 if ends else 0.0,
        "rows": statistics.median(spreads) if spreads else 0.0,
        "worst": max(spreads, default=0.0),
    }
