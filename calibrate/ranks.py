"""All-reduce over several devices: one process a device, times taken by the first."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from calibrate.bench import TORCH
from calibrate.cases import Case
from calibrate.clock import Clock, spread
from specmodel.dtypes import BYTES

_ROUNDS = 3
_CALLS = 20  # all-reduces in one graph, or in a row
_SAMPLES = 5


def measure(cases: Sequence[Case], *, kind: str) -> list[dict[str, Any]]:
    """Return the rows of all-reduce cases, all over as many devices.

    Parameters
    ----------
    cases : sequence of Case
        Of one `ranks`.
    kind : {"cuda", "cpu"}
        NCCL over the first GPUs, or gloo over processes of this machine.
    """
    ranks = cases[0].ranks or 1
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, args=(ranks, list(cases), kind, folder), nprocs=ranks)
        found = torch.load(Path(folder) / "rows.pt", weights_only=True)
    return [{**case.row(), **row} for case, row in zip(cases, found, strict=True)]


def _worker(rank: int, ranks: int, cases: list[Case], kind: str, folder: str) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    clock = Clock(device)
    vectors = [
        torch.zeros(int((case.bytes or 0) / BYTES[case.dtype]), dtype=TORCH[case.dtype]).to(device)
        for case in cases
    ]
    calls = [_Repeated(vector) for vector in vectors]
    runs = [clock.prepare([call], case.mode).run for call, case in zip(calls, cases, strict=True)]
    samples: list[list[float]] = [[] for _ in cases]
    for _ in range(_ROUNDS):
        for run, times in zip(runs, samples, strict=True):
            for _ in range(_SAMPLES):
                dist.barrier()
                clock.synchronise()
                start = time.perf_counter()
                run()
                clock.synchronise()
                times.append((time.perf_counter() - start) / _CALLS)
    if rank == 0:
        rows = [
            {
                "seconds": statistics.median(times),
                "spread": spread(times),
                "repeats": len(times),
                "kernel": backend,
            }
            for times in samples
        ]
        torch.save(rows, Path(folder) / "rows.pt")
    dist.barrier()
    dist.destroy_process_group()


class _Repeated:
    """So many all-reduces of one vector in a row, a little more than launching them takes."""

    def __init__(self, vector: Any) -> None:
        self.vector = vector

    def __call__(self) -> None:
        for _ in range(_CALLS):
            dist.all_reduce(self.vector)
