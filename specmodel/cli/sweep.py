"""``sweep``: from lists of options to a plan, run with a progress bar."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from specmodel.acceptance import Geometric
from specmodel.cli.output import Out
from specmodel.cli.parsing import parse_counts, parse_number, parse_whole
from specmodel.cli.setup import MOST_DRAFTS, Request, build
from specmodel.errors import DomainError, SpecmodelError, brief, whole_array
from specmodel.sweeping import DEFAULT_VARIABLES, Case, Sweep, check_installed, checked_place, sweep

_INNER = ("batch", "context", "k", "alpha")
_HAVE_COMMAS = ("acceptance_rates", "link", "network")  # separated by semicolons instead
_MOST_CASES = 100_000
_CONNECT_SECONDS = 5
_MOST_NUMBERS = 10_000
_MOST_REASONS = 5  # of refused cases, that are printed


def run_sweep(options: dict[str, Any], *, output: str, variables: str | None, **how: Any) -> str:
    """Run a sweep and say what was written.

    Raises
    ------
    SpecmodelError
        When an option is out of range, no case is possible, a package is missing, or something
        is at the output's name that may not be replaced.
    """
    target = checked_place(output, overwrite=how["overwrite"])
    check_installed(target.suffix.lower())
    plan = _plan(options, variables)
    workers = parse_whole(how["workers"], name="workers")
    with ExitStack() as stack:
        executor, width = stack.enter_context(_executor(how["cluster"], workers))
        bar = stack.enter_context(_bar())
        task = bar.add_task(f"{plan.points:,} points", total=_possible(plan))
        refused = sweep(
            plan,
            target,
            executor=executor,
            workers=width,
            overwrite=how["overwrite"],
            progress=lambda points: bar.advance(task, points),
        )
    return _said(plan, target, refused)


def _plan(options: dict[str, Any], variables: str | None) -> Sweep:
    inner = {name: options[name] for name in _INNER}
    for name in ("price", "draft_price"):
        if options[name] is not None:
            raise DomainError(f"--{name.replace('_', '-')} does not go with sweep")
    k_max = parse_whole(options["k_max"], name="k_max")
    alphas = None if inner["alpha"] is None else _numbers(inner["alpha"], name="alpha")
    lists = {
        name: _split(text, ";" if name in _HAVE_COMMAS else ",")
        for name, text in options.items()
        if name not in (*_INNER, "k_max") and isinstance(text, str)
    }
    axes = {name: values for name, values in lists.items() if len(values) > 1}
    if (count := prod(len(values) for values in axes.values())) > _MOST_CASES:
        raise DomainError(f"at most {_MOST_CASES:,} cases besides batch, context, k; got {count:,}")
    base = {
        **options,
        **{name: values[0] for name, values in lists.items()},
        "alpha": None if alphas is None else str(alphas[0]),
        "batch": "1",
        "context": "0",
        "k": inner["k"] if inner["k"].isdecimal() else "auto",
    }
    cases: dict[tuple[Any, ...], Case | str] = {}
    requests: list[Request] = []
    for where in product(*axes.values()):
        try:
            requests.append(build({**base, **dict(zip(axes, where, strict=True))}))
        except SpecmodelError as error:
            cases[where] = str(error)
            continue
        setup = requests[-1].setup
        cases[where] = Case(
            device=setup.device,
            target=setup.target,
            drafter=setup.drafter,
            acceptance=setup.acceptance if alphas is None else Geometric(alphas),
            execution=setup.execution,
            T_h=setup.T_h,
            T_o=setup.T_o,
        )
    drafts = parse_counts(f"0-{k_max}" if inner["k"] == "auto" else inner["k"], name="k", low=0)
    whole_array(drafts, "k", high=MOST_DRAFTS, unit="token")
    kept = DEFAULT_VARIABLES if variables is None else _split(variables, ",")
    return Sweep(
        axes=axes,
        cases=cases,
        B=np.asarray(parse_counts(inner["batch"], name="batch", low=1), dtype=float),
        k=np.asarray(drafts, dtype=float),
        L=np.asarray(parse_counts(inner["context"], name="context", low=0), dtype=float),
        variables=kept,
        attrs=_attrs(requests, axes),
    )


def _attrs(requests: list[Request], axes: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """Return what is the same in all cases: settings, and what was assumed."""
    every = [{**one.inputs, **_named(one.assumed)} for one in requests]
    shared = set.intersection(*(set(one) for one in every)) if every else set()
    left = {*axes, *_INNER, "k_max"}
    return (
        {
            name: str(every[0][name])
            for name in every[0]
            if name in shared - left and all(one[name] == every[0][name] for one in every)
        }
        if every
        else {}
    )


def _named(assumed: dict[str, str]) -> dict[str, str]:
    return {f"assumed_{name}": value for name, value in assumed.items()}


def _split(text: str, separator: str) -> tuple[str, ...]:
    """Return the parts of a list, without repeats."""
    parts = [part.strip() for part in text.split(separator)]
    if not all(parts):
        raise DomainError(f"a list must not have empty parts; got {brief(text)}")
    return tuple(dict.fromkeys(parts))


def _numbers(text: str, *, name: str) -> list[float]:
    """Read a list of numbers and ranges ``first:last:step``, the last included."""
    found: list[float] = []
    for part in _split(text, ","):
        ends = [parse_number(x, name=name) for x in part.split(":")]
        if len(ends) == 1:
            found += ends
        elif len(ends) == 3 and np.isfinite(ends).all() and ends[2] > 0 and ends[1] >= ends[0]:
            steps = int((ends[1] - ends[0]) / ends[2] + 1e-9)
            if steps >= _MOST_NUMBERS:
                raise DomainError(f"{name} lists at most {_MOST_NUMBERS:,} values; got {part!r}")
            found += [round(ends[0] + i * ends[2], 12) for i in range(steps + 1)]
        else:
            raise DomainError(f"{name} must be numbers or FIRST:LAST:STEP; got {part!r}")
    return list(dict.fromkeys(found))


@contextmanager
def _executor(cluster: str | None, workers: int) -> Iterator[tuple[Executor | None, int]]:
    """Yield where blocks are evaluated, and how many at a time."""
    whole_array(workers, "workers", low=1, high=os.cpu_count() or 1)
    if cluster is not None:
        try:
            from distributed import Client
        except ImportError:
            raise DomainError(
                "--cluster needs distributed: pip install 'specmodel[sweep]' brings it"
            ) from None
        try:
            client = Client(cluster, timeout=_CONNECT_SECONDS)  # type: ignore[no-untyped-call]
        except (OSError, ValueError) as error:
            raise DomainError(f"no Dask scheduler at {cluster}: {error}") from None
        with client:
            threads = sum(client.nthreads().values())  # type: ignore[no-untyped-call]
            yield client.get_executor(), max(1, threads)  # type: ignore[no-untyped-call]
    elif workers == 1:
        yield None, 1
    else:
        # spawned: a fork would copy this process's threads' locks and the lock of the output
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, context, initializer=_end_with_parent) as pool:
            yield pool, workers


def _end_with_parent() -> None:
    """End this worker when the process that started it is killed; it would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent.sentinel,), daemon=True).start()


def _exit_after(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def _bar() -> Progress:
    """Return a progress bar on standard error, with the time left; nothing where it is a file."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def _possible(plan: Sweep) -> int:
    """Return the points of cases that were not refused outright."""
    possible = sum(isinstance(case, Case) for case in plan.cases.values())
    return plan.points // len(plan.cases) * possible


def _said(plan: Sweep, path: Path, refused: dict[tuple[Any, ...], str]) -> str:
    sizes = " x ".join(f"{name} {size}" for name, size in plan.sizes.items())
    size = (
        sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        if path.is_dir()
        else path.stat().st_size
    )
    out = Out()
    out.line(f"{path}: {plan.points:,} points ({sizes}), {size / 1e6:.1f} MB")
    if refused:
        out.line(f"{len(refused)} of {len(plan.cases)} cases refused, such as")
        for where, why in islice(refused.items(), _MOST_REASONS):
            out.line(f"  {plan.label(where)}: {why}")
    assumed = {n.removeprefix("assumed_"): v for n, v in plan.attrs.items() if "assumed_" in n}
    if assumed:
        out.line("assumed in all cases, as you did not say")
        for name, value in assumed.items():
            out.line(f"  {name}: {value}")
    if plan.extrapolated_from is not None:
        out.line(
            f"note: acceptance was measured up to k = {plan.extrapolated_from}; beyond it the last "
            "conditional rate continues"
        )
    return out.text()
