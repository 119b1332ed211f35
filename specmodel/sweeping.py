"""Sweeps: `speculate` over any axes, in blocks of bounded memory, to a file, resumable.

Axes are of two kinds. A *case* is one combination of everything that is not a number of the
model's closed range (device, target, drafter, degree of parallelism, ...); within it B, L, k
and alpha form a grid that is evaluated by array arithmetic. Blocks of that grid go to workers
(this process, local processes, a Dask cluster: anything with the interface of
`concurrent.futures.Executor`) and come back to the one writer. Results lie in a Zarr store
while the sweep runs, and are turned into the form asked for at its end.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.util import find_spec
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specmodel._version import __version__
from specmodel.acceptance import Acceptance
from specmodel.architectures import Architecture
from specmodel.drafters import Drafter
from specmodel.errors import (
    DomainError,
    ExtrapolationWarning,
    SpecmodelError,
    did_you_mean,
    real_array,
    whole_array,
)
from specmodel.hardware import Device
from specmodel.labelled import VARIABLES, speculate
from specmodel.roofline import Execution

if TYPE_CHECKING:
    import xarray as xr

FORMS = (".zarr", ".nc", ".parquet", ".csv")
"""Endings of the files that a sweep writes."""

DEFAULT_VARIABLES = ("T_p", "T_v", "T_d", "G", "S", "k_star", "S_star")
"""What a sweep keeps unless told."""

REGIMES = ("I", "II", "III")
"""Regimes as a file holds them: 1, 2, 3; 0 where a case was refused."""

_INNER = ("B", "k", "L", "alpha")
_BLOCK_POINTS = 250_000
_AHEAD = 2  # blocks in flight for each worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One setup, whose numbers of sequences, drafts and context the sweep varies.

    `acceptance` may have an axis of its own (`Geometric` of several alphas), the same in all
    cases of a sweep.
    """

    device: Device
    target: Architecture
    drafter: Drafter
    acceptance: Acceptance
    execution: Execution
    T_h: float = 0.0
    T_o: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What is swept.

    Attributes
    ----------
    axes : mapping of str to tuple
        Names and labels of the axes of the cases, slowest first.
    cases : mapping of tuple to Case or str
        The case at each combination of labels, or why there is none.
    B, k, L : ndarray
        Sequences [-], drafts [token], context [token]; one-dimensional.
    variables : tuple of str
        Which of `speculate`'s variables are kept.
    block_points : int
        Points of the grid that are in memory at a time, about.
    attrs : mapping of str to str
        What the file says of itself, beside the version.

    Raises
    ------
    DomainError
        When a case is missing, no case is possible, or an axis is empty or unordered.
    """

    axes: Mapping[str, tuple[Any, ...]]
    cases: Mapping[tuple[Any, ...], Case | str]
    B: NDArray[np.float64]
    k: NDArray[np.float64]
    L: NDArray[np.float64]
    variables: tuple[str, ...] = DEFAULT_VARIABLES
    block_points: int = _BLOCK_POINTS
    attrs: Mapping[str, str] = field(default_factory=dict)
    alpha: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        for name, values, low in (("B", self.B, 1), ("L", self.L, 0)):
            real_array(values, name, low=low)
        whole_array(self.k, "k", unit="token")
        whole_array(self.block_points, "block_points", low=1)
        for name in ("B", "k", "L"):
            values = getattr(self, name)
            if values.ndim != 1 or not values.size or len(np.unique(values)) < values.size:
                raise DomainError(f"{name} must be one-dimensional, not empty, without repeats")
        for name in self.variables:
            if name not in VARIABLES:
                hint = did_you_mean(name, VARIABLES)
                raise DomainError(f"unknown variable {name!r}{hint}")
        for where in product(*self.axes.values()):
            if where not in self.cases:
                raise DomainError(f"the sweep has no case for {self.label(where)}")
        possible = [case for case in self.cases.values() if isinstance(case, Case)]
        if not possible:
            raise DomainError(
                f"no case of the sweep is possible: {next(iter(self.cases.values()))}"
            )
        alphas = {_alphas(case) for case in possible}
        if len(alphas) > 1:
            raise DomainError("acceptance must have the same axis of alphas in all cases, or none")
        object.__setattr__(self, "alpha", alphas.pop())

    @property
    def extrapolated_from(self) -> int | None:
        """The fewest drafts beyond which some case's acceptance is extrapolated; None: none."""
        known = [c.acceptance.measured_k for c in self.cases.values() if isinstance(c, Case)]
        least = min((k for k in known if k is not None), default=None)
        return least if least is not None and self.k.max() > least else None

    def label(self, where: tuple[Any, ...]) -> str:
        """Return a combination of labels in words."""
        return ", ".join(f"{name} {value}" for name, value in zip(self.axes, where, strict=True))

    @property
    def sizes(self) -> dict[str, int]:
        """Length of every axis, in the order of the file."""
        inner = {"B": self.B.size, "k": self.k.size, "L": self.L.size}
        if self.alpha:
            inner["alpha"] = len(self.alpha)
        return {**{name: len(labels) for name, labels in self.axes.items()}, **inner}

    @property
    def points(self) -> int:
        """Combinations of all axes."""
        return math.prod(self.sizes.values())

    @property
    def block(self) -> tuple[int, int]:
        """Lengths in B and L of the blocks that the grid is cut into; k and alpha stay whole."""
        across = self.k.size * max(1, len(self.alpha))
        contexts = min(self.L.size, max(1, self.block_points // across))
        batches = min(self.B.size, max(1, self.block_points // (across * contexts)))
        return batches, contexts

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks of every possible case, in order."""
        batches, contexts = self.block
        for where in product(*self.axes.values()):
            case = self.cases[where]
            if isinstance(case, str):
                continue
            outer = tuple(
                labels.index(value) for labels, value in zip(self.axes.values(), where, strict=True)
            )
            for b in range(0, self.B.size, batches):
                for c in range(0, self.L.size, contexts):
                    yield Block(
                        case=case,
                        outer=outer,
                        start=(b, c),
                        B=self.B[b : b + batches],
                        k=self.k,
                        L=self.L[c : c + contexts],
                        variables=self.variables,
                    )

    def key(self) -> str:
        """Return a hash of everything the results depend on."""
        parts = (
            __version__,
            list(self.axes.items()),
            [(where, self.cases[where]) for where in product(*self.axes.values())],
            (self.B, self.k, self.L),
            self.variables,
            self.block,
        )
        return hashlib.sha256(repr(_plain(parts)).encode()).hexdigest()


def _alphas(case: Case) -> tuple[float, ...]:
    """Return the axis of alphas that a case's acceptance has; empty where it has none."""
    found = np.asarray(getattr(case.acceptance, "alpha", np.nan))
    return tuple(float(a) for a in found) if found.ndim else ()


def _plain(value: Any) -> Any:
    """Return a value made of records, sets and arrays in a form whose text is always the same."""
    if is_dataclass(value):
        kept = {f.name: getattr(value, f.name) for f in fields(value)}
        return type(value).__name__, _plain(kept)
    if isinstance(value, Mapping):
        return sorted((str(key), _plain(each)) for key, each in value.items())
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """A part of one case's grid: what a worker is sent."""

    case: Case
    outer: tuple[int, ...]
    start: tuple[int, int]
    B: NDArray[np.float64]
    k: NDArray[np.float64]
    L: NDArray[np.float64]
    variables: tuple[str, ...]

    @property
    def name(self) -> str:
        """How the journal calls it."""
        return " ".join(str(i) for i in (*self.outer, *self.start))


def evaluate(block: Block) -> dict[str, NDArray[Any]] | str:
    """Return the block's variables over their own axes of B, k, L, alpha; or why it has none."""
    case = block.case
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExtrapolationWarning)
            found = speculate(
                case.device,
                case.target,
                case.drafter,
                case.acceptance,
                B=block.B,
                k=block.k,
                L=block.L,
                T_h=case.T_h,
                T_o=case.T_o,
                execution=case.execution,
            )
    except SpecmodelError as error:
        return str(error)
    values = {name: np.asarray(found[name].values) for name in block.variables}
    if "regime" in values:
        values["regime"] = np.searchsorted(REGIMES, values["regime"]).astype(np.int8) + 1
    return values


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
        Ends in ``.zarr``, ``.nc`` (NetCDF), ``.parquet`` or ``.csv``. While the sweep runs its
        results lie in a Zarr store beside it, with a journal of finished blocks.
    executor : concurrent.futures.Executor, optional
        Where blocks are evaluated: a pool of processes, ``dask.distributed.Client.get_executor()``.
        This process by default.
    workers : int
        How many blocks the executor works on at a time.
    overwrite : bool
        Whether to replace a finished file.
    progress : callable, optional
        Called with the points of each block when it is finished, those of an earlier run first.

    Returns
    -------
    mapping of tuple to str
        The cases that were refused, and why; the file holds NaN there, or no rows.

    Raises
    ------
    DomainError
        When the ending is unknown, the file exists, or an unfinished sweep of another plan is
        in the way.
    """
    _check_installed()
    target = Path(path)
    if target.suffix not in FORMS:
        raise DomainError(f"a sweep's file must end in {', '.join(FORMS)}; got {target.name!r}")
    if target.exists() and not overwrite:
        raise DomainError(f"{target} exists: choose another name, or overwrite it")
    if not target.absolute().parent.is_dir():
        raise DomainError(f"{target.parent}: no such directory")
    from filelock import FileLock, Timeout

    lock = FileLock(target.with_name(target.name + ".lock"), timeout=0)
    try:
        with lock:
            try:
                return _run(plan, target, executor, workers, progress or (lambda _: None))
            finally:
                Path(lock.lock_file).unlink(missing_ok=True)
    except Timeout:
        raise DomainError(f"another sweep is writing {target}") from None


def _run(
    plan: Sweep,
    target: Path,
    executor: Executor | None,
    workers: int,
    tell: Callable[[int], None],
) -> dict[tuple[Any, ...], str]:
    """Evaluate what is left of a sweep, its lock held."""
    store = target.with_name(target.name + ".partial.zarr")
    journal = target.with_name(target.name + ".journal")
    done = _resume(plan, store, journal)
    refused: dict[tuple[int, ...], str] = {}
    if done:
        tell(sum(_points(plan, block) for block in plan.blocks() if block.name in done))
    waiting = (block for block in plan.blocks() if block.name not in done)
    with journal.open("a", encoding="utf-8") as finished:
        for block, values in _evaluated(waiting, executor, workers):
            if isinstance(values, str):
                refused.setdefault(block.outer, values)
            else:
                _write(plan, store, block, values)
            finished.write(json.dumps([block.name, values if isinstance(values, str) else ""]))
            finished.write("\n")
            finished.flush()
            tell(_points(plan, block))
    for name, why in _entries(journal)[1:]:
        if why:
            refused.setdefault(tuple(int(i) for i in name.split()[:-2]), why)
    labels = list(plan.axes.values())
    everything = {where: why for where, why in plan.cases.items() if isinstance(why, str)}
    for outer, why in refused.items():
        everything[tuple(axis[i] for axis, i in zip(labels, outer, strict=True))] = why
    if len(everything) == len(plan.cases):
        _remove(store)
        journal.unlink()
        raise DomainError(
            f"no case of the sweep could be computed: {next(iter(everything.values()))}"
        )
    _finish(plan, store, target, everything)
    journal.unlink()
    return everything


def _check_installed() -> None:
    missing = [
        n
        for n in ("dask", "filelock", "h5netcdf", "h5py", "pyarrow", "zarr")
        if find_spec(n) is None
    ]
    if missing:
        raise DomainError(
            f"a sweep needs {', '.join(missing)}: pip install 'specmodel[sweep]' brings them"
        )


def _points(plan: Sweep, block: Block) -> int:
    return block.B.size * block.L.size * plan.k.size * max(1, len(plan.alpha))


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


# -- the store -----------------------------------------------------------------------------------


def _resume(plan: Sweep, store: Path, journal: Path) -> set[str]:
    """Return the blocks that an earlier run finished; make the store where there was none."""
    if journal.exists() and store.exists():
        entries = _entries(journal)
        if not entries or entries[0] != ["plan", plan.key()]:
            raise DomainError(
                f"{journal}: belongs to another sweep (or version): remove it and {store}, or "
                "choose another name"
            )
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
        journal.write_text(text, encoding="utf-8")  # a line cut short is dropped
        return {name for name, _ in entries[1:]}
    if store.exists():
        shutil.rmtree(store)
    template = _template(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of strings, which Zarr's third format has yet to fix
        template.to_zarr(store, compute=False, consolidated=False)
    journal.write_text(json.dumps(["plan", plan.key()]) + "\n", encoding="utf-8")
    return set()


def _entries(journal: Path) -> list[list[str]]:
    """Return the journal's complete lines."""
    entries = []
    for line in journal.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            entry = json.loads(line)
        except ValueError:
            break
        if not line.endswith("\n"):
            break
        entries.append(entry)
    return entries


def _template(plan: Sweep) -> xr.Dataset:
    """Return the whole dataset without its values, chunked as it will be written."""
    import dask.array
    import xarray as xr

    batches, contexts = plan.block
    chunk = dict.fromkeys(plan.axes, 1) | {"B": batches, "L": contexts}
    sizes = plan.sizes
    variables = {}
    for name in plan.variables:
        dims, units, long_name = VARIABLES[name]
        own = [*plan.axes, *(d for d in _INNER if d in dims.split() and d in sizes)]
        shape = [sizes[d] for d in own]
        chunks = tuple(min(chunk.get(d, sizes[d]), sizes[d]) for d in own)
        regime = name == "regime"
        attrs: dict[str, Any] = {"units": units, "long_name": long_name}
        if regime:
            attrs |= {"flag_values": [1, 2, 3], "flag_meanings": " ".join(REGIMES)}
        empty = dask.array.full(  # type: ignore[no-untyped-call]
            shape, 0 if regime else np.nan, dtype=np.int8 if regime else np.float64, chunks=chunks
        )
        variables[name] = (own, empty, attrs)
    coords: dict[str, Any] = {name: np.asarray(labels) for name, labels in plan.axes.items()}
    coords |= {"B": plan.B, "k": plan.k.astype(int), "L": plan.L}
    if plan.alpha:
        coords["alpha"] = np.asarray(plan.alpha)
    data = xr.Dataset(
        variables, coords=coords, attrs={"specmodel_version": __version__, **plan.attrs}
    )
    for name, units in (("B", "1"), ("k", "token"), ("L", "token")):
        data[name].attrs["units"] = units
    return data


def _write(plan: Sweep, store: Path, block: Block, values: Mapping[str, NDArray[Any]]) -> None:
    import zarr

    group = zarr.open_group(store, mode="r+")
    spans = {d: slice(at, at + n) for d, at, n in _extents(block)}
    for name, array in values.items():
        own = [d for d in _INNER if d in VARIABLES[name][0].split() and d in plan.sizes]
        where = (*block.outer, *(spans.get(d, slice(None)) for d in own))
        group[name][where] = array  # type: ignore[index]


def _finish(plan: Sweep, store: Path, target: Path, refused: Mapping[tuple[Any, ...], str]) -> None:
    """Add why cases are missing, and turn the store into the form asked for, block by block."""
    import xarray as xr

    reasons = np.full([len(labels) for labels in plan.axes.values()], "", dtype=object)
    for index, where in zip(np.ndindex(*reasons.shape), product(*plan.axes.values()), strict=True):
        reasons[index] = refused.get(where, "")
    data = xr.open_zarr(store, consolidated=False, chunks={})
    longest = max((len(text) for text in reasons.reshape(-1)), default=0)
    data["refused"] = (list(plan.axes), reasons.astype(f"<U{max(longest, 1)}"))
    data["refused"].attrs["long_name"] = "why the case could not be computed"
    scratch = target.with_name(target.name + ".tmp")
    _remove(scratch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if target.suffix == ".zarr":
            data[["refused"]].to_zarr(store, mode="a", consolidated=True)
            shutil.move(store, scratch)
        elif target.suffix == ".nc":
            data.to_netcdf(scratch, engine="h5netcdf")
        else:
            _rows(plan, data, scratch, csv=target.suffix == ".csv")
    data.close()
    _remove(target)
    scratch.rename(target)
    _remove(store)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _rows(plan: Sweep, data: xr.Dataset, path: Path, *, csv: bool) -> None:
    """Write one row a point, block by block; refused cases have no rows."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    inner = [d for d in _INNER if d in plan.sizes]
    columns = [*plan.axes, *inner, *plan.variables]
    reasons = data["refused"].values
    writer: Any = None
    for block in plan.blocks():
        if reasons[block.outer]:
            continue
        spans = {d: slice(at, at + n) for d, at, n in _extents(block)}
        part = data.drop_vars("refused").isel(
            {**dict(zip(plan.axes, block.outer, strict=True)), **spans}
        )
        frame = part.to_dataframe(dim_order=inner).reset_index()[columns]
        table = pa.Table.from_pandas(frame, preserve_index=False)
        if writer is None:
            writer = (pa.csv.CSVWriter if csv else pa.parquet.ParquetWriter)(path, table.schema)
        writer.write_table(table)
    writer.close()


def _extents(block: Block) -> tuple[tuple[str, int, int], ...]:
    """Return where a block begins along the axes that blocks are cut along, and its length."""
    return ("B", block.start[0], block.B.size), ("L", block.start[1], block.L.size)
