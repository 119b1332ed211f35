"""The run: blocks go to workers, come back, and become a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmodel.errors import DomainError
from specmodel.sweeping.forms import Reasons, check_installed, write
from specmodel.sweeping.place import Scratch, checked_place, scratch
from specmodel.sweeping.plan import Block, Sweep, evaluate

_AHEAD = 2  # blocks in flight for each worker


def sweep(
    plan: Sweep,
    path: str | os.PathLike[str],
    *,
    executor: Executor | None = None,
    workers: int = 1,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> dict[tuple[Any, ...], str]:
    """Evaluate a sweep into a file, or go on with one that was interrupted.

    Parameters
    ----------
    plan : Sweep
    path : path
        Ends in ``.zarr``, ``.nc`` (NetCDF), ``.parquet`` or ``.csv``. While the sweep runs, its
        finished blocks lie in a folder beside it, whose name adds ``.partial``.
    executor : concurrent.futures.Executor, optional
        Where blocks are evaluated: a pool of processes, ``dask.distributed.Client.get_executor()``.
        This process by default.
    workers : int
        How many blocks the executor works on at a time. [-]
    overwrite : bool
        Whether to replace a finished file. A folder is replaced only where it is a Zarr store as
        a sweep wrote it; a link or a device never is.
    progress : callable, optional
        Called with the points of each block when it is finished, those of an earlier run first.

    Returns
    -------
    mapping of tuple to str
        The cases that were refused, and why; the file holds NaN there, or no rows.

    Raises
    ------
    DomainError
        When the ending is unknown, a package is missing that this form needs, something is at
        the output's name that may not be replaced, an unfinished sweep of another plan is
        in the way, or no case can be computed.
    """
    target = checked_place(path, overwrite=overwrite)
    form = target.suffix.lower()
    check_installed(form)
    with scratch(plan, target) as (folder, lock):
        _evaluate_all(plan, folder, executor, workers, progress or (lambda _: None))
        refused = _refused(plan, folder)
        if len(refused) == len(plan.cases):
            folder.remove(lock)
            raise DomainError(
                f"no case of the sweep could be computed: {next(iter(refused.values()))}"
            )
        write(form, plan, folder.finished, _stored(plan, folder), _reasons(plan, refused))
        folder.put(target, overwrite=overwrite)
        folder.remove(lock)
    return refused


def _evaluate_all(
    plan: Sweep,
    folder: Scratch,
    executor: Executor | None,
    workers: int,
    tell: Callable[[int], None],
) -> None:
    """Evaluate the blocks that an earlier run has not finished."""
    if folder.done:
        tell(sum(block.points for block in plan.blocks() if block.name in folder.done))
    waiting = (block for block in plan.blocks() if block.name not in folder.done)
    for block, values in _evaluated(waiting, executor, workers):
        folder.save(block, values)
        tell(block.points)


def _evaluated(
    blocks: Iterator[Block], executor: Executor | None, workers: int
) -> Iterator[tuple[Block, dict[str, NDArray[Any]] | str]]:
    """Yield results as they come; never more than a few blocks are in memory."""
    if executor is None:
        for block in blocks:
            yield block, evaluate(block)
        return
    running: dict[Future[Any], Block] = {}
    while True:
        for block in islice(blocks, _AHEAD * workers - len(running)):
            running[executor.submit(evaluate, block)] = block
        if not running:
            return
        finished, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            yield running.pop(future), future.result()


def _refused(plan: Sweep, folder: Scratch) -> dict[tuple[Any, ...], str]:
    """Return why cases could not be computed, by their labels."""
    refused = {where: why for where, why in plan.cases.items() if isinstance(why, str)}
    for block in plan.blocks():
        if (why := folder.refusal(block)) is not None:
            labels = zip(plan.axes.values(), block.outer, strict=True)
            refused.setdefault(tuple(axis[i] for axis, i in labels), why)
    return refused


def _reasons(plan: Sweep, refused: dict[tuple[Any, ...], str]) -> Reasons:
    """Return the same over the axes of the cases, empty where there is a result."""
    reasons = np.full([len(labels) for labels in plan.axes.values()], "", dtype=object)
    for index in np.ndindex(*reasons.shape):
        labels = zip(plan.axes.values(), index, strict=True)
        reasons[index] = refused.get(tuple(axis[i] for axis, i in labels), "")
    return reasons


def _stored(plan: Sweep, folder: Scratch) -> Iterator[tuple[Block, dict[str, NDArray[Any]]]]:
    """Yield the blocks that could be evaluated, one in memory at a time."""
    for block in plan.blocks():
        if folder.refusal(block) is None:
            yield block, folder.values(block)
