"""The operators that a decoder pass is made of; a builder a kind turns a case into calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from calibrate.bench import TORCH, Bench, Work, attention, kernel_name
from calibrate.cases import Case

_LAUNCHES = 64  # tiny kernels in one graph


def build(bench: Bench, case: Case) -> Work:
    """Return what to time for an operator case; a pass is built by `calibrate.passes`."""
    return _BUILDERS[case.operator](bench, case)


def _whole(*values: int | None) -> tuple[int, ...]:
    """Return the dimensions that a kind of case always has."""
    return tuple(value or 0 for value in values)


def _stream(bench: Bench, case: Case) -> Work:
    """Copy of half of `bytes`, which are read and written."""
    (size,) = _whole(case.bytes)
    bench.allow(size)
    source = torch.ones(size // 8, dtype=torch.float32, device=bench.device)
    target = torch.empty_like(source)
    return Work([partial(target.copy_, source)], kernel="copy")


def _gemm(bench: Bench, case: Case) -> Work:
    """y[m, n] = x[m, k] w[n, k]^T with a colder weight matrix each time."""
    m, n, k = _whole(case.m, case.n, case.k)
    weights = bench.cold("weights", (n, k), case.dtype)
    x = bench.random(m, k, dtype=case.dtype)
    if case.dtype != "fp8":
        return Work([partial(F.linear, x, w) for w in weights], kernel="linear")
    one = torch.ones((), device=bench.device)
    multiply = partial(
        torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return Work([partial(multiply, x, w.t()) for w in weights], kernel="scaled_mm")


def _attention(bench: Bench, case: Case) -> Work:
    """One layer's attention over a preallocated cache, grouped heads folded into rows."""
    batch, width, context = _whole(case.batch, case.width, case.context)
    heads, kv_heads, head_dim = _whole(case.heads, case.kv_heads, case.head_dim)
    caches = bench.cold("cache", (2, batch, kv_heads, context, head_dim), case.dtype)
    rows = heads // kv_heads * width
    query = bench.random(batch, kv_heads, rows, head_dim, dtype=case.dtype)
    backend = bench.attention_backend(case.dtype)
    calls = [partial(attention, query, kv[0], kv[1], backend) for kv in caches]
    return Work(calls, kernel=kernel_name(backend), note="heads folded into rows, no mask")


def _elementwise(bench: Bench, case: Case) -> Work:
    """What lies between matrix products, as a pass of torch kernels has it.

    Inputs were just written, as in a pass, so they may be warm. ``add-norm``: the residual's
    addition, then the norm. ``kv-write``: queries brought into the kernel's order, new keys and
    values, each a quarter as wide as the queries, into the cache of their sequence.
    """
    m, n = _whole(case.m, case.n)
    x, y = (bench.random(m, n, dtype=case.dtype) for _ in range(2))
    if case.kernel == "add-norm":
        weight = bench.random(n, dtype=case.dtype)
        norm = lambda: F.rms_norm(x + y, (n,), weight, 1e-5)  # noqa: E731
        return Work([norm], kernel="add-norm", note="two kernels")
    if case.kernel == "kv-write":
        return Work([_kv_write(bench, x, y)], kernel="kv-write", note="three kernels")
    if case.kernel == "silu-mul":
        gate, value = bench.random(m, 2 * n, dtype=case.dtype).chunk(2, -1)  # as a pass has them
        return Work([lambda: F.silu(gate) * value], kernel="silu-mul", note="two kernels")
    return Work([partial(torch.add, x, y)], kernel="add")


def _kv_write(bench: Bench, queries: Any, new: Any) -> Callable[[], object]:
    m, n = queries.shape
    heads = 4
    cache = bench.random(2 * m, heads, n // (4 * heads), dtype=_name(queries.dtype))
    where = torch.arange(m, device=bench.device)
    keys, values = new.view(m, 4, heads, n // (4 * heads))[:, :2].unbind(1)

    def run() -> None:
        queries.view(m, heads, n // heads).transpose(0, 1).contiguous()
        cache[:m].index_put_((where,), keys)
        cache[m:].index_put_((where,), values)

    return run


def _name(dtype: Any) -> str:
    return next(name for name, kind in TORCH.items() if kind == dtype)


def _launch(bench: Bench, case: Case) -> Work:
    """From one launch of a tiny kernel to the next, or from one replay of a graph of it."""
    x = torch.zeros(16, dtype=TORCH[case.dtype], device=bench.device)
    add = partial(x.add_, 1)
    if case.kernel == "graph replay":
        return Work([bench.clock.prepare([add], "graph").run], kernel="graph replay", mode="eager")
    return Work([add] * _LAUNCHES, kernel="add")


# -- experts -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Which rows each expert works on, drawn once: captured graphs need fixed shapes.

    `order` lists rows by expert; `inverse` finds a row's `top_k` results in that list; `ends` is
    where each expert's rows end in it, on the device, and `counts` their number, on the host.
    """

    order: Any
    inverse: Any
    ends: Any
    counts: tuple[int, ...]
    top_k: int


def route(bench: Bench, rows: int, experts: int, top_k: int) -> Routing:
    """Let every row choose `top_k` distinct experts, all equally likely."""
    rng = np.random.default_rng(bench.seed)
    chosen = np.argsort(rng.random((rows, experts)), axis=1)[:, :top_k].ravel()
    order = np.argsort(chosen, kind="stable")
    counts = np.bincount(chosen, minlength=experts)

    def tensor(values: Any, kind: torch.dtype) -> Any:
        return torch.as_tensor(values, dtype=kind, device=bench.device)

    return Routing(
        order=tensor(order // top_k, torch.int64),
        inverse=tensor(np.argsort(order), torch.int64),
        ends=tensor(np.cumsum(counts), torch.int32),
        counts=tuple(int(count) for count in counts),
        top_k=top_k,
    )


Grouped = Callable[[Any, Any, Routing], Any]


def grouped_mm(x: Any, weights: Any, routing: Routing) -> Any:
    """Multiply each expert's rows with its matrix in one kernel."""
    return torch._grouped_mm(x, weights.transpose(1, 2), offs=routing.ends)


def expert_loop(x: Any, weights: Any, routing: Routing) -> Any:
    """Multiply each expert's rows with its matrix, one kernel an expert with rows."""
    parts, start = [], 0
    for expert, count in enumerate(routing.counts):
        if count:
            parts.append(F.linear(x[start : start + count], weights[expert]))
            start += count
    return torch.cat(parts)


def choose_grouped(bench: Bench, dtype: str) -> tuple[str, Grouped]:
    """Return the grouped kernel where torch has one that can be captured, else the loop."""

    def choose(dtype: str) -> str:
        if not bench.cuda or dtype != "bfloat16":
            return "expert loop"
        x = bench.random(16, 64, dtype=dtype)
        weights = bench.random(2, 64, 64, dtype=dtype)
        routing = route(bench, 16, 2, 1)
        try:
            bench.clock.prepare([partial(grouped_mm, x, weights, routing)], "graph")
        except (AttributeError, RuntimeError):  # there is none, or it waits for the device
            return "expert loop"
        return "grouped_mm"

    name = bench.once("experts", dtype, choose)
    return name, grouped_mm if name == "grouped_mm" else expert_loop


def expert_layer(x: Any, up: Any, down: Any, routing: Routing, multiply: Grouped) -> Any:
    """Send rows to their experts, apply gate, up and down matrices, and add the results.

    Parameters
    ----------
    x : (rows, hidden)
    up : (experts, 2 * width, hidden), gate and up together
    down : (experts, hidden, width)
    routing : Routing
    multiply : `grouped_mm` or `expert_loop`
    """
    gate, value = multiply(x[routing.order], up, routing).chunk(2, -1)
    found = multiply(F.silu(gate) * value, down, routing)
    return found[routing.inverse].view(len(x), routing.top_k, -1).sum(1)


def _experts(bench: Bench, case: Case) -> Work:
    """One layer's routed experts: m tokens, width n, hidden size k."""
    m, n, k = _whole(case.m, case.n, case.k)
    experts, top_k = _whole(case.experts, case.top_k)
    whole = 3 * experts * n * k
    layers = bench.cold("weights", (whole,), case.dtype)
    x = bench.random(m, k, dtype=case.dtype)
    routing = route(bench, m, experts, top_k)
    kernel, multiply = choose_grouped(bench, case.dtype)
    calls: Sequence[Callable[[], object]] = [
        partial(
            expert_layer,
            x,
            layer[: whole // 3 * 2].view(experts, 2 * n, k),
            layer[whole // 3 * 2 :].view(experts, k, n),
            routing,
            multiply,
        )
        for layer in layers
    ]
    touched = sum(count > 0 for count in routing.counts)
    return Work(calls, kernel=kernel, note=f"uniform routing, {touched} experts touched")


_BUILDERS: dict[str, Callable[[Bench, Case], Work]] = {
    "stream": _stream,
    "gemm": _gemm,
    "reference": _gemm,
    "attention": _attention,
    "experts": _experts,
    "elementwise": _elementwise,
    "launch": _launch,
}
