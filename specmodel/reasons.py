"""Why a round costs what it costs, in one line."""

from __future__ import annotations

import numpy as np

from specmodel.architectures import Architecture, MoE
from specmodel.costs import experts_touched
from specmodel.drafters import Drafter
from specmodel.hardware import Device
from specmodel.roofline import Execution, gemm_turn_rows
from specmodel.speculation import RoundTime


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
