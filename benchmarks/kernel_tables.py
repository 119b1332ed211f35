"""Errors of the fitted operator forms on published kernel tables, beside a plain soft roofline.

    python benchmarks/kernel_tables.py FOLDER [ENGINE]

FOLDER has gemm.parquet and the others (see `specmodel.published`), or is ``aiconfigurator-core``,
the installed package. Each error is the mean of |predicted / measured - 1|: on the fitted rows,
and on shapes left out of the fit; then median and 90th percentile of the latter. The last two
columns fit half of the shapes, and tell how often the 90% intervals of that fit hold the times of
the other half, and how wide they are (high over low).
"""

from __future__ import annotations

import sys

import numpy as np
from rich.console import Console
from rich.table import Table

from specmodel.errors import FitError
from specmodel.fitting import Measured, fit_operator, fit_table, predictive_interval
from specmodel.forms import Form, form_named
from specmodel.published import device_of, read_published

GPUS = ("a100_sxm", "h100_sxm", "b200_sxm", "l40s")


def main(folder: str, engine: str = "vllm") -> None:
    table = Table(
        "gpu", "operator", "format", "form", "rows", "numbers", "fitted", "left out", "median",
        "p90", "plain fitted", "plain left out", "90% hold", "high/low",
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
            share, width = coverage(form_named(fit.form), fitted.rows[kind, dtype])
            cells = [f"{error:.1%}" for error in errors] + [f"{share:.0%}", f"{width:.2f}"]
            table.add_row(gpu, kind, dtype, fit.form, f"{fit.n:,}", str(len(fit.names)), *cells)
        for note in fitted.calibration.notes:
            print(f"{gpu}: {note}")
    Console(width=180).print(table)


def coverage(form: Form, data: Measured) -> tuple[float, float]:
    """Return how often intervals of a fit to half of the shapes hold the other half, and width."""
    shapes = np.random.default_rng(0).permutation(np.unique(data.groups))
    first = np.isin(data.groups, shapes[::2])
    fit, rest = fit_operator(form, data.part(first)), data.part(~first)
    low, high = predictive_interval(fit, rest.features, rest.rates)
    judged = np.ones(rest.seconds.size, bool) if rest.judged is None else rest.judged
    inside = ((low <= rest.seconds) & (rest.seconds <= high))[judged]
    return float(inside.mean()), float(np.median((high / low)[judged]))


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
