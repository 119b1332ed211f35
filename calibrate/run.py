"""The run: a plan within a budget, rows to the file as they come, taken up again after a stop."""

from __future__ import annotations

import os
import random
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import torch

from calibrate import operators, passes, ranks
from calibrate.bench import TORCH, Bench, OutOfMemory, Work, default_dtypes
from calibrate.cases import Case
from calibrate.clock import Prepared, noise, spread
from calibrate.environment import describe
from calibrate.models import Setting
from calibrate.peaks import peaks
from calibrate.plan import Plan, Section, make_plan
from calibrate.progress import Progress, progress
from calibrate.table import Table, read_sidecar, write_sidecar
from specmodel.architectures import load_model
from specmodel.dtypes import canonical_dtype
from specmodel.errors import DomainError, ProfileError, SpecmodelError

now = monotonic
"""The clock of the budget; a test puts another in its place."""

ROUNDS = 3
"""How often a block's cases are visited, in another order each time."""

BLOCK = 12
"""Cases that are interleaved; rows are written when a block is done."""

Stage = Literal["base", "more"]
STAGES: tuple[Stage, ...] = ("base", "more")
"""What every fit needs, and what makes it better."""

_VISIT = 0.05  # seconds that a visit takes at least, roughly


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured, and where to.

    Attributes
    ----------
    device : str
        ``cpu`` or ``cuda:N``.
    table : Path
        CSV to write or to take up again.
    budget : float
        Time for measuring, all runs on this table together. [s]
    dtypes : tuple of str
        Number formats, the activations' first; empty: what the device is fast in.
    threads : int or None
        Threads of torch on the CPU; None: one on a CPU, torch's choice beside a GPU.
    seed : int
    model : str or None
        Name or ``config.json`` of a model whose own shapes are measured too.
    tiny : bool
        Small shapes that check the code, not the device.
    memory_limit : float or None
        What one allocation may take; None: most of what is free. [B]
    only : tuple of str
        Sections to measure; empty: all.
    """

    device: str
    table: Path
    budget: float = 60.0
    dtypes: tuple[str, ...] = ()
    threads: int | None = None
    seed: int = 0
    model: str | None = None
    tiny: bool = False
    memory_limit: float | None = None
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.budget < 1e6:
            raise DomainError(f"budget must be > 0 s; got {self.budget:g}")
        most = os.cpu_count() or 1
        if self.threads is not None and not 1 <= self.threads <= most:
            raise DomainError(
                f"threads must be in [1, {most}], the cores of this machine; got {self.threads}"
            )
        for dtype in self.dtypes:
            if canonical_dtype(dtype) not in TORCH:
                raise DomainError(f"dtype must be one of {', '.join(TORCH)}; got {dtype!r}")
        if self.dtypes[:1] == ("fp8",):
            raise DomainError("dtype must name the activations' format before fp8")


def measure(
    settings: Settings, *, skip_started: bool = False, lines: bool = False
) -> dict[str, Any]:
    """Measure, and return the table's sidecar record.

    Parameters
    ----------
    settings : Settings
    skip_started : bool
        Leave out sections that an earlier run began and did not end: what killed it may be in
        them.
    lines : bool
        Say at times what is being measured, where there is no terminal too.

    Raises
    ------
    DomainError
        When the device is not there.
    ProfileError
        When the table was begun with other arguments or on another device.
    SpecmodelError
        When the device fails for good.
    """
    describe(settings.device)  # refuses a device that is not there
    if settings.threads is not None or settings.device == "cpu":
        torch.set_num_threads(settings.threads or 1)
    with torch.inference_mode():
        return Run(settings, skip_started=skip_started).run(lines=lines)


class Run:
    """One run over a table."""

    def __init__(self, settings: Settings, *, skip_started: bool) -> None:
        self.settings, self.skip_started = settings, skip_started
        self.bench = Bench(settings.device, seed=settings.seed, memory_limit=settings.memory_limit)
        dtypes = tuple(canonical_dtype(name) for name in settings.dtypes)
        self.dtypes = dtypes or default_dtypes(self.bench.device)
        self.plan = self._plan()
        settings.table.parent.mkdir(parents=True, exist_ok=True)
        self.record = self._take_up()
        self.bench.kernels = self.record["kernels"]
        write_sidecar(settings.table, self.record)  # a table without one belongs to nobody
        self.table = Table(settings.table)
        self.start = now() - float(self.record["elapsed"])
        self.progress: Progress

    def _plan(self) -> Plan:
        cuda = self.bench.cuda
        setting = Setting(
            kind=self.bench.device.type,
            dtypes=self.dtypes,
            cache=self.bench.cache_bytes,
            memory=0.8 * self.bench.capacity_bytes(),
            devices=torch.cuda.device_count() if cuda else 1,
            tiny=self.settings.tiny,
        )
        model = load_model(self.settings.model) if self.settings.model else None
        return make_plan(setting, seed=self.settings.seed, model=model)

    def _take_up(self) -> dict[str, Any]:
        """Return the record of the run so far, or a new one."""
        settings = self.settings
        environment = asdict(describe(settings.device))
        arguments = {
            "device": settings.device,
            "dtypes": list(self.dtypes),
            "threads": torch.get_num_threads(),
            "seed": settings.seed,
            "model": settings.model,
            "tiny": settings.tiny,
        }
        found = read_sidecar(settings.table)
        if not found:
            if settings.table.exists():
                raise ProfileError(
                    f"{settings.table}: is there, but not the JSON that belongs to it"
                )
            return {
                "schema": 1,
                "device": environment,
                "torch": environment["torch"],
                "driver": environment["driver"],
                "threads": environment["threads"],
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
                "arguments": arguments,
                "budget": settings.budget,
                "elapsed": 0.0,
                "sections": {},
                "models": {name: asdict(shape) for name, shape in self.plan.models.items()},
                "kernels": {},
                "memory_capacity": self.bench.capacity_bytes(),
                "cache": self.bench.cache_bytes,
                "peak": {},
                "noise": {},
            }
        for key, now in (("arguments", arguments), ("device", environment)):
            if found[key] != now:
                other = [k for k in now if found[key].get(k) != now[k]]
                raise ProfileError(
                    f"{settings.table}: was begun with another {', '.join(other)}: "
                    "give another --table"
                )
        if settings.budget > found["budget"]:  # there is time for more
            found["budget"] = settings.budget
            for state in found["sections"].values():
                state.pop("more", None)
                if state.get("measured", 0) < state["planned"]:
                    state.pop("base", None)
        return found

    @property
    def elapsed(self) -> float:
        """Seconds of measuring, earlier runs on this table included. [s]"""
        return now() - self.start

    def run(self, *, lines: bool = False) -> dict[str, Any]:
        """Measure what is left of the plan: what every fit needs first, more while time lasts."""
        self._save()
        self.bench.clock.warm_up()
        with progress(self.settings.budget, lines=lines) as self.progress:
            for stage in STAGES:
                names = self.settings.only or tuple(s.name for s in self.plan.sections)
                todo = [s for s in self.plan.sections if s.name in names and self._open(s, stage)]
                while todo:
                    left = max(0.0, self.settings.budget - self.elapsed)
                    share = todo[0].share / sum(section.share for section in todo)
                    self._section(todo.pop(0), stage, now() + left * share)
                    self.bench.release()
        self._save()
        return self.record

    def _open(self, section: Section, stage: Stage) -> bool:
        state = self.record["sections"].get(section.name, {})
        if stage == "more" and state.get("base") != "done":
            return False
        return stage not in state or (state[stage] == "started" and not self.skip_started)

    def _save(self) -> None:
        self.record["elapsed"] = round(self.elapsed, 3)
        self.record["noise"] = {k: round(v, 4) for k, v in noise(self.table.rows).items()}
        self.record["peak"] = peaks(self.table.rows)
        self.record["rows"] = len(self.table.rows)
        write_sidecar(self.settings.table, self.record)

    def _section(self, section: Section, stage: Stage, deadline: float) -> None:
        """Measure one stage of a section in blocks, until it is done or its time is over."""
        state = self.record["sections"].setdefault(section.name, {})
        state["planned"], state[stage] = len(section.base), "started"
        cases = section.base if stage == "base" else section.more
        queue = [case for case in cases if case not in self.table]
        least = stage == "base" and not any(case in self.table for case in cases)
        while queue and (least or now() < deadline):
            least = False
            self._save()
            block, queue = queue[:BLOCK], queue[BLOCK:]
            if section.name == "allreduce":
                self._collectives(block)
            else:
                queue = self._block(section.name, block, deadline) + queue
        state["measured"] = sum(case in self.table for case in section.base)
        state[stage] = "done"
        self._save()

    def _collectives(self, block: Sequence[Case]) -> None:
        for count in sorted({case.ranks or 1 for case in block}):
            cases = [case for case in block if case.ranks == count]
            self.progress.show(cases[0].label, self.elapsed)
            try:
                rows = ranks.measure(cases, kind=self.bench.device.type)
            except Exception as error:  # noqa: BLE001 (a rank that fails costs its cases alone)
                text = f"error: {' '.join(str(error).split())[-200:]}"
                rows = [{**case.row(), "note": text} for case in cases]
            for row in rows:
                self._row(row)

    def _block(self, name: str, block: Sequence[Case], deadline: float) -> list[Case]:
        """Measure cases in turn and write their rows; return those there was no time for."""
        reference = self.plan.reference
        queue = sorted(block, key=lambda case: case.size, reverse=True)
        ready: dict[Case, tuple[Work, Prepared]] = {}
        self._prepare(reference, ready)
        takes = 0.0
        while queue:
            if len(ready) > 1 and now() + takes > deadline:
                break
            case = queue.pop(0)
            self.progress.show(f"{name}: {case.label}", self.elapsed)
            smaller = self._prepare(case, ready)
            if smaller is not None and smaller not in self.table and smaller not in ready:
                queue.insert(0, smaller)
            if case in ready:
                takes += ROUNDS * (_VISIT + 2 * ready[case][1].once)
        rng = random.Random(self.settings.seed)  # noqa: S311 (an order, not a secret)
        for turn in range(ROUNDS):
            if turn and now() > deadline + takes:
                break
            order = list(ready)
            rng.shuffle(order)
            for case in order:
                self.progress.show(f"{name}: {case.label}", self.elapsed)
                self.bench.clock.visit(ready[case][1])
        for case, (work, prepared) in ready.items():
            times = prepared.samples
            note = f"beside {name}" if case is reference else work.note
            self._row(
                {
                    **case.row(),
                    "seconds": statistics.median(times),
                    "spread": spread(times),
                    "repeats": len(times),
                    "kernel": work.kernel,
                    "note": note,
                }
            )
        return queue

    def _prepare(self, case: Case, ready: dict[Case, tuple[Work, Prepared]]) -> Case | None:
        """Build a case and make it ready; record it where it fails, and return a smaller one."""
        try:
            if case.operator == "pass":
                work = passes.build(self.bench, case, self.plan.models[case.model or ""])
            else:
                work = operators.build(self.bench, case)
            ready[case] = work, self.bench.clock.prepare(work.calls, work.mode or case.mode)
        except (OutOfMemory, RuntimeError) as error:
            full = out_of_memory(error)
            text = "out of memory" if full else f"{type(error).__name__}: {str(error)[:160]}"
            self._row({**case.row(), "note": f"error: {text}"})
            self._still_works()
            return case.smaller() if full else None
        return None

    def _still_works(self) -> None:
        """Stop where a failure was the device's for good: every later case would fail too."""
        try:
            self.bench.clock.synchronise()
        except RuntimeError as error:
            raise SpecmodelError(
                f"{self.settings.device} failed ({str(error)[:160]}): what was measured is in "
                f"{self.settings.table}, and the same command goes on behind the failure"
            ) from None

    def _row(self, row: dict[str, Any]) -> None:
        self.table.append({**row, "device": self.record["device"]["device"]})


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        word in str(error).lower() for word in words
    )
