"""Errors of the fitted operator forms on published kernel tables, beside a plain soft roofline.

    python benchmarks/kernel_tables.py FOLDER [ENGINE]

FOLDER has gemm.parquet and the others (see `specmodel.published`), or is ``aiconfigurator-core``,
the installed package. Each error is the mean of |predicted / measured - 1|: on the fitted rows,
and on shapes left out of the fit; then median and 90th percentile of the latter.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from specmodel.errors import FitError
from specmodel.fitting import fit_table
from specmodel.published import device_of, read_published

GPUS = ("a100_sxm", "h100_sxm", "b200_sxm", "l40s")


def main(folder: str, engine: str = "vllm") -> None:
    table = Table(
        "gpu", "operator", "format", "form", "rows", "numbers", "fitted", "left out", "median",
        "p90", "plain fitted", "plain left out",
    )  # fmt: skip
    for gpu in GPUS:
        device = device_of(gpu)
        if device is None:
            continue
        try:
            fitted = fit_table(read_published(folder, gpu=gpu, engine=engine), device)
        except FitError as error:
            print(error)
            continue
        for (kind, dtype), _ in fitted.rows.items():
            fit, plain = fitted.calibration.operators[kind][dtype], fitted.baseline[kind][dtype]
            if fit.held_out is None or plain.held_out is None:
                continue
            held, base = fit.held_out, plain.held_out
            errors = (
                fit.in_sample.mean, held.mean, held.median, held.p90, plain.in_sample.mean,
                base.mean,
            )  # fmt: skip
            cells = [f"{error:.1%}" for error in errors]
            table.add_row(gpu, kind, dtype, fit.form, f"{fit.n:,}", str(len(fit.names)), *cells)
        for note in fitted.calibration.notes:
            print(f"{gpu}: {note}")
    Console(width=150).print(table)


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
