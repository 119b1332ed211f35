"""The model against published kernel times summed over a decode step.

    python benchmarks/kernel_sums.py

Llama-3.1-8B bf16 on H100 SXM, context 1,024. The published step times are sums over the kernel
tables of aiconfigurator-core 0.12.0 (Apache-2.0). The calibration that ships was fitted to those
tables, shape by shape; nothing in the generic set was.
"""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.table import Table

import specmodel as sm

BATCH = (1, 8, 32, 64, 128)
PUBLISHED_MS = (6.18, 6.60, 8.32, 10.35, 12.83)


def main() -> None:
    gpu, model = sm.load_device("h100"), sm.load_model("llama-3.1-8b")
    generic = sm.pass_time(gpu, model, B=BATCH, L=1024, calibrated=False).T * 1e3
    fitted = sm.pass_time(gpu, model, B=BATCH, L=1024).T * 1e3
    ideal = sm.pass_time(gpu, model, B=BATCH, L=1024, level="ideal").T * 1e3
    table = Table("batch", "published ms", "calibrated", "", "generic", "", "ideal", "")
    for row in zip(BATCH, PUBLISHED_MS, fitted, generic, ideal, strict=True):
        batch, measured, *found = (float(x) for x in row)
        cells = [text for x in found for text in (f"{x:.2f}", f"{x / measured - 1:+.1%}")]
        table.add_row(f"{batch:.0f}", f"{measured:.2f}", *cells)
    Console().print(table)
    for name, found in (("calibrated", fitted), ("generic", generic)):
        off = np.abs(found / np.array(PUBLISHED_MS) - 1)
        print(f"{name}: mean error {off.mean():.1%}, largest {off.max():.1%}")


if __name__ == "__main__":
    main()
