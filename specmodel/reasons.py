"""Why a round costs what it costs, and why a schedule has a gap, in a line each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.architectures import Architecture, MoE
from specmodel.costs import Operator, experts_touched
from specmodel.drafters import Drafter
from specmodel.forms import OWN_KERNEL, tiles
from specmodel.hardware import Device
from specmodel.kernels import Kernels
from specmodel.roofline import Execution, gemm_turn_rows
from specmodel.speculation import (
    RoundTime,
    Run,
    draft_runs,
    mean_width,
    plain_run,
    verify_runs,
)

Floats = NDArray[np.float64]

_STEP = 0.01
"""Share of a round from which a rise from one batch to the next is named as a step."""

_WINDOW = 64
"""Batches before an edge in which its step is looked for; fitted tiles have at most as many rows
for one position."""


def reasons(
    device: Device,
    target: Architecture,
    drafter: Drafter,
    times: RoundTime,
    *,
    G: float,
    batch: int,
    k: int,
    execution: Execution,
    off: bool,
) -> str:
    """Return where the time of a round of k drafts goes and what it buys."""
    decode = times.decode
    binding = "memory-bound" if bool(decode.memory_bound) else "compute-bound"
    words = [
        f"decode is {binding} ({float(decode.bytes) / 1e9:.3g} GB read, "
        f"{float(decode.mbu):.0%} of bandwidth, {float(decode.mfu):.0%} of peak FLOP/s)",
        _verification(device, target, drafter, times, batch=batch, k=k, execution=execution),
        _drafting(drafter, times, k=k),
    ]
    if float(times.T_o) > 0:
        words.append(f"{float(times.T_o) * 1e3:.2f} ms besides the passes")
    cost = float(times.cost)
    verdict = f"{G:.2f} tokens for a cost of {cost:.2f}: S = {G / cost:.2f}"
    return "; ".join([*words, f"so off, as {verdict} at k = {k}" if off else verdict])


def _verification(
    device: Device,
    target: Architecture,
    drafter: Drafter,
    times: RoundTime,
    *,
    batch: int,
    k: int,
    execution: Execution,
) -> str:
    """Say what verification costs over a decode step, and which group of operators is why."""
    ratio = float(times.T_v / times.T_p)
    rows = int(drafter.rows(k))
    text = f"verifying {rows} rows each takes {ratio:.2f} T_p"
    growth = {
        group: float(seconds) - float(times.decode.groups.get(group, 0.0))
        for group, seconds in times.verify.groups.items()
    }
    if ratio < 1.05 or not growth:
        return f"{text} (the rows share the weight stream)"
    group = max(growth, key=lambda name: growth[name])
    share = growth[group] / max(sum(growth.values()), np.finfo(float).tiny)
    detail = f"{share:.0%} of the growth from {group}"
    if group == "experts":
        detail += f": expert coverage, {_coverage(target, batch, rows - 1, execution)}"
    elif group in ("weight GEMMs", "LM head"):
        turn = gemm_turn_rows(device, target, execution=execution)
        own = float(execution.layout.of_replica(batch)) * rows
        detail += f": {own:.0f} rows, weight GEMMs turn compute-bound at {turn:.0f}"
    elif group == "attention" and execution.kv_reread:
        detail += f": KV read {1 + execution.kv_reread * (rows - 1):.2f} times"
    return f"{text} ({detail})"


def _coverage(target: Architecture, batch: int, k: int, execution: Execution) -> str:
    moe = next(layer.mlp for layer, _ in target.layers if isinstance(layer.mlp, MoE))
    layout = execution.layout
    own = float((layout.of_stage if layout.ep else layout.of_replica)(batch))
    rows = own * (1 + k * (1 - execution.expert_overlap))
    before, after = (float(experts_touched(moe.experts, moe.top_k, n)) for n in (own, rows))
    return f"{after:.0f} of {moe.experts} experts a layer are read instead of {before:.0f}"


def _drafting(drafter: Drafter, times: RoundTime, *, k: int) -> str:
    if drafter.hit_rate < 1:
        return f"drafts are found in {drafter.hit_rate:.0%} of rounds, at no device time"
    ratio = float(times.T_d / times.T_p)
    largest = max(times.T_d_groups, key=lambda name: float(times.T_d_groups[name]), default="")
    if not float(times.T_d):
        return "drafting takes no device time"
    share = float(times.T_d_groups[largest]) / float(times.T_d)
    return f"{k} draft{'s take' if k > 1 else ' takes'} {ratio:.2f} T_p ({share:.0%} {largest})"


class _Step(NamedTuple):
    """A rise of a group of operators from one batch to the next."""

    part: str  # verification or drafting
    group: str
    batch: int  # the first of the higher time
    rise: float  # of the group's time [-]


def gap_reason(
    device: Device,
    target: Architecture,
    drafter: Drafter,
    round_at: Callable[[ArrayLike, int], RoundTime],
    *,
    first: int,
    last: int,
    k: int,
    L: float,
    execution: Execution,
) -> str:
    """Return why speculation is off between two runs of batches that are on.

    Parameters
    ----------
    device, target, drafter
    round_at : callable
        From batches and k to the times of a round.
    first, last : int
        The batches that are off. [-]
    k : int
        Drafts of the run before. [token]
    L : float
        Context. [token]
    execution : Execution
    """
    where = f"off for batch {first}" if first == last else f"off for {first} to {last}"
    batches = np.arange(max(first - _WINDOW, 1), first + 1)
    times = round_at(batches, k)
    parts = {("verification", name): each for name, each in times.verify.groups.items()}
    parts |= {("drafting", name): each for name, each in times.T_d_groups.items()}
    step = _last_step(batches, parts, times.T_d + times.T_v + times.T_o)
    if step is None:
        here = round_at(first, k)
        grows = _verification(device, target, drafter, here, batch=first, k=k, execution=execution)
        return f"{where}: {grows}, {_drafting(drafter, here, k=k)}"
    runs = (verify_runs if step.part == "verification" else draft_runs)(
        device, target, drafter, B=np.array([step.batch - 1, step.batch]), k=k, L=L,
        execution=execution,
    )  # fmt: skip
    rows = float(execution.layout.of_replica(step.batch) * mean_width(drafter, k))
    mean = "" if drafter.hit_rate in (0.0, 1.0) else "a mean of "
    at = f"batch {step.batch} ({mean}{rows:.0f} rows)"
    text = f"{where}: {_rise(step, runs, execution, at)}"
    batches = np.arange(first, last + 2)
    times = round_at(batches, k)
    plain = {("T_p", name): each for name, each in times.decode.groups.items()}
    later = _last_step(batches, plain, times.T_p + times.T_h)
    if later is None:
        return f"{text}; no part of T_p rises in a step up to batch {last + 1}"
    edge = np.array([later.batch - 1, later.batch])
    decode = plain_run(device, target, B=edge, L=L, execution=execution)
    return f"{text}; {_rise(later, [decode], execution, f'batch {later.batch}')}"


def _rise(step: _Step, runs: Iterable[Run], execution: Execution, at: str) -> str:
    """Say a step in words, and what makes it where that is known."""
    detail = _cause(runs, step.group, execution)
    text = f"at {at} the time of {step.part}'s {step.group} rises by {step.rise:.0%}"
    return f"{text} ({detail})" if detail else text


def _last_step(
    batches: NDArray[np.int_], parts: Mapping[tuple[str, str], ArrayLike], whole: Floats
) -> _Step | None:
    """Return the last step of any part, the largest one there; None where there is none.

    A step is a rise from one batch to the next that is a share of the whole that counts, and
    several times the usual rise of its part.
    """
    found: list[tuple[int, float, _Step]] = []
    for (part, group), values in parts.items():
        seconds = np.broadcast_to(np.asarray(values, dtype=np.float64), batches.shape)
        rises = np.diff(seconds) / whole[:-1]
        if rises.size < 2:
            continue
        for at in np.flatnonzero(rises >= max(_STEP, 3.0 * float(np.median(rises))))[-1:]:
            own = float(seconds[at + 1] / seconds[at] - 1)
            step = _Step(part, group, int(batches[at + 1]), own)
            found.append((int(at), float(rises[at]), step))
    return max(found)[-1] if found else None


def _cause(runs: Iterable[Run], group: str, execution: Execution) -> str:
    """Return which operator of a group rises most between two batches, and what makes it."""
    engine = execution.engine
    if group == "launch" and engine is not None:
        return f"passes of more than {engine.captured_rows:.0f} rows are launched one by one"
    most, text = 0.0, ""
    for run in runs:
        kernels, operators = run.operators()
        for op in operators:
            seconds = np.asarray(run.count * op.count * kernels.seconds(op))
            if op.group == group and seconds.size == 2 and np.ptp(seconds) > most:
                why = _step_of(kernels, op)
                most, text = float(np.ptp(seconds)), f"{op.name}{': ' if why else ''}{why}"
    return text


def _step_of(kernels: Kernels, op: Operator) -> str:
    """Return what makes the fitted time of an operator rise between two batches, if it is known."""
    fit = kernels.fit(op)
    if fit is None:
        return ""
    features = kernels.features(op)
    if op.collective == "all-reduce":
        before, after = np.broadcast_to(features["bytes"], 2)
        return "vectors reach 8 MiB" if before < OWN_KERNEL <= after else ""
    if op.kind == "experts":
        experts = float(op.shape["experts"])
        before, after = np.broadcast_to(features["m"], 2)
        return f"more rows than its {experts:.0f} experts" if before <= experts < after else ""
    if op.kind != "gemm" or "tile_n" not in fit.values:
        return ""
    rows, count, units = tiles(features, kernels.rates(op), fit.values)
    rows, count = np.broadcast_to(rows, 2), np.broadcast_to(count, 2)
    if rows[0] != rows[1]:
        return f"tiles of {rows[1]:.0f} rows in place of {rows[0]:.0f}"
    full = np.ceil(count / units)
    if full[0] != full[1]:
        return f"{full[1]:.0f} waves of tiles in place of {full[0]:.0f}"
    return f"{count[1]:.0f} tiles in place of {count[0]:.0f}" if count[0] != count[1] else ""
