"""Steps summed from published kernels against fits that have not seen the model's shapes.

    python benchmarks/step_sums.py KERNELS

KERNELS is a folder of published kernel tables. A step of Llama-3.1-8B (one device) or Llama-3.1-70B
(a rank of four) is the sum of its matrix products and attention; products whose shape lies
between those of the table are interpolated linearly in N and K, beyond it in proportion to N.
Decode steps have B rows, verification B W with the attention of a decode step, as no table has
another. The fits leave out every (N, K) and head configuration that a step uses, and are made on
all other rows or on about 24 matrix products and 20 attentions of them.
"""

from __future__ import annotations

import sys
from itertools import product

import numpy as np
from rich.console import Console
from rich.table import Table as Printed

import specmodel as sm
from specmodel.calibration import FittedOperator
from specmodel.fitting import Measured, fit_operator
from specmodel.forms import form_for
from specmodel.published import read_published
from specmodel.tables import Table, features, groups

MODELS = {
    "8B": (32, ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), (128256, 4096), (32, 8)),
    "70B, a rank of 4": (
        80,
        ((2560, 8192), (8192, 2048), (14336, 8192), (8192, 7168)),
        (32064, 8192),
        (16, 2),
    ),
}
"""Layers, (N, K) of a layer's products, of the LM head, (heads, KV heads); heads of 128."""

SHAPES = (
    (4096, 4096), (1024, 8192), (16384, 4096), (4096, 1024), (4096, 16384), (2048, 2048),
    (10240, 8192), (1536, 5120), (7168, 2560), (3072, 12288), (65536, 4096), (12288, 1536),
)  # fmt: skip
ROWS = ((1, 128), (16, 256), (64, 512), (32, 192), (8, 256), (48, 512))
BATCHES, WIDTHS = (1, 4, 8, 16, 32, 64), (1, 2, 4, 8)
CONTEXTS = (1024, 4096, 16384, 65536)


class Kernels:
    """Times of a table's kernels, interpolated between its shapes."""

    def __init__(self, rows: Table) -> None:
        c = rows.of("gemm").in_format("gemm", "bfloat16").numbers
        self.gemms = {
            (int(m), int(n), int(k)): float(s)
            for m, n, k, s in zip(c["m"], c["n"], c["k"], c["seconds"], strict=True)
        }
        self.sizes = np.unique(c["n"]), np.unique(c["k"])
        a = rows.of("attention").in_format("attention", "bfloat16").numbers
        keys = ("batch", "context", "heads", "kv_heads", "head_dim")
        columns = [a[key].astype(int) for key in keys]
        self.attentions = {
            key: float(s) for *key, s in zip(*columns, a["seconds"], strict=True)
            for key in [tuple(key)]
        }  # fmt: skip

    def cells(self, n: int, k: int) -> dict[tuple[int, int], float]:
        """Return the table's shapes that a shape is interpolated from, and their weights."""
        return {
            (a, b): x * y
            for (a, x), (b, y) in product(_between(n, self.sizes[0]), _between(k, self.sizes[1]))
        }

    def gemm(self, m: int, n: int, k: int) -> float:
        return sum(w * self.gemms[m, a, b] for (a, b), w in self.cells(n, k).items())


def _between(value: int, known: np.ndarray) -> list[tuple[int, float]]:
    if value in known:
        return [(value, 1.0)]
    if value > known[-1]:
        return [(int(known[-1]), value / known[-1])]
    high = int(np.searchsorted(known, value))
    low, top = int(known[high - 1]), int(known[high])
    share = (value - low) / (top - low)
    return [(low, 1 - share), (top, share)]


def main(folder: str) -> None:
    every = []
    table = Printed("gpu", "model", "steps", "rows", "T", "T_v/T_p", "24 + 20 rows: T", "T_v/T_p")
    for gpu in ("a100_sxm", "h100_sxm", "b200_sxm", "l40s"):
        device = sm.load_device(gpu.removesuffix("_sxm"))
        rows = read_published(folder, gpu=gpu, engine="vllm", device=device)
        kernels = Kernels(rows)
        for name, model in MODELS.items():
            cells = {cell for shape in (*model[1], model[2]) for cell in kernels.cells(*shape)}
            wide = fits(rows, device, cells, model[3], few=False)
            few = fits(rows, device, cells, model[3], few=True)
            found = [errors(kernels, device, model, pair) for pair in (wide, few)]
            every.append([*found[0][:2], *found[1][:2]])
            n = int(found[0][2])
            cells_ = [f"{x:.1%}" for one in found for x in one[:2]]
            table.add_row(gpu, name, str(n), f"{wide[0].n + wide[1].n:,}", *cells_)
    table.add_row("mean", "", "", "", *(f"{x:.1%}" for x in np.mean(every, axis=0)))
    Console(width=110).print(table)
    print("mean of |predicted / summed - 1|")


def fits(
    rows: Table,
    device: sm.Device,
    cells: set[tuple[int, int]],
    heads: tuple[int, int],
    *,
    few: bool,
) -> tuple[FittedOperator, FittedOperator]:
    """Return fits of matrix products and of attention without a model's own shapes."""
    found = []
    for operator in ("gemm", "attention"):
        part = rows.of(operator).in_format(operator, "bfloat16")
        c = part.numbers
        if operator == "gemm":
            own = np.array([cell in cells for cell in zip(c["n"], c["k"], strict=True)])
            if few:
                wanted = {
                    (m, *shape)
                    for i, shape in enumerate(s for s in SHAPES if s not in cells)
                    for m in ROWS[i % len(ROWS)]
                }
                own |= ~np.array([x in wanted for x in zip(c["m"], c["n"], c["k"], strict=True)])
        else:
            own = (c["heads"] == heads[0]) & (c["kv_heads"] == heads[1]) & (c["head_dim"] == 128)
            if few:  # spread evenly over the rows, sorted by their bytes
                order = np.argsort(features(part, operator)["kv_bytes"] + 1e30 * own)
                chosen = order[np.linspace(0, (~own).sum() - 1, 20).astype(int)]
                own = ~np.isin(np.arange(len(part)), chosen)
        part = part.where(~own)
        data = Measured(
            features=features(part, operator),
            seconds=part.numbers["seconds"],
            groups=groups(part, operator),
            rates=device.rates("bfloat16"),
        )
        found.append(fit_operator(form_for(operator, "bfloat16"), data))
    return found[0], found[1]


def errors(
    kernels: Kernels,
    device: sm.Device,
    model: tuple[int, tuple[tuple[int, int], ...], tuple[int, int], tuple[int, int]],
    pair: tuple[FittedOperator, FittedOperator],
) -> tuple[float, float, int]:
    """Return the mean errors of T and of T_v / T_p, and the steps they are over."""
    layers, products, head, (q, kv) = model
    rates = device.rates("bfloat16")

    def predicted(m: int, n: int, k: int) -> float:
        shape = {"m": m, "n": n, "k": k, "weight_bytes": 2 * n * k, "activation_bytes_each": 2}
        return float(pair[0].seconds(shape, rates))

    def attention(batch: int, context: int) -> float:
        shape = {
            "batch": batch,
            "kv_heads": kv,
            "width": 1,
            "context": context,
            "kv_bytes": 4.0 * batch * kv * context * 128,
            "flops": 4.0 * batch * q * context * 128,
            "query_bytes": 4.0 * batch * q * 128,
        }
        return float(pair[1].seconds(shape, rates))

    off, apart, steps = [], [], 0
    for batch, context in product(BATCHES, CONTEXTS):
        key = (batch, context, q, kv, 128)
        if key not in kernels.attentions:
            continue
        ratio: dict[int, tuple[float, float]] = {}
        for width in WIDTHS:
            m = batch * width
            if (m, *products[0]) not in kernels.gemms:
                continue
            summed = layers * (
                sum(kernels.gemm(m, *shape) for shape in products) + kernels.attentions[key]
            ) + kernels.gemm(m, *head)
            model_ = layers * (
                sum(predicted(m, *shape) for shape in products) + attention(batch, context)
            ) + predicted(m, *head)
            ratio[width] = model_, summed
            off.append(abs(model_ / summed - 1))
            steps += 1
        if 1 in ratio:
            plain = ratio.pop(1)
            apart += [abs(x / plain[0] / (y / plain[1]) - 1) for x, y in ratio.values()]
    return float(np.mean(off)), float(np.mean(apart)), steps


if __name__ == "__main__":
    main(*sys.argv[1:])
