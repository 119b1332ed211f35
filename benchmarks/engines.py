"""What published rows say of each engine's host times, study by study.

    python benchmarks/engines.py results.csv cases.yaml

prints, for every engine and study whose rows state their acceptance, the values that its rows tell
at least half of, as ``fits`` of a file of ``hardware_profiles/engines`` take them.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from specmodel.engine_fitting import KERNEL_SPREAD, Observation, fit_engine
from specmodel.errors import SpecmodelError
from specmodel.overheads import Engine
from specmodel.requests import Served
from specmodel.validation import PEAK, Judged, plain_rate, prepared, read_cases, read_results
from specmodel.validation.judging import GENERIC_SPREAD

START = Engine(
    name="start",
    title="no engine in particular",
    step=1e-3,
    step_sequence=1e-5,
    round=5e-4,
    round_row=5e-6,
    head_pass=1e-3,
    draft_pass=5e-4,
    draft_layer=1e-4,
    pass_sequence=1e-6,
    lookup=1e-5,
    lookup_sequence=1e-6,
)
"""Where every fit starts from: round numbers, of no study. [s]"""
EAGER = {"eager_layer": 5e-4, "draft_layer": 5e-4, "captured_rows": 0.0}
"""What is different at the start for an engine that launches kernel by kernel."""
TOLD = 0.5


def main() -> None:
    files = [
        (read_cases if name.endswith(".yaml") else read_results)(name) for name in sys.argv[1:]
    ]
    rows = [prepared(row) for row in chain(*files) if "conflict" not in row.quality]
    studies: dict[Any, list[Judged]] = defaultdict(list)
    for one in rows:
        if one.setup is not None and one.setup.engine is not None:
            studies[one.setup.engine, one.row.url].append(one)
    for (name, url), together in sorted(studies.items()):
        base = replace(START, **EAGER) if name == "hf-eager" else START
        calibrated = all(one.setup and one.setup.device.calibration for one in together)
        seen = [row for one in together for row in observed(one, base)]
        if not seen:
            continue
        fit = fit_engine(base, seen, kernel_spread=KERNEL_SPREAD if calibrated else GENERIC_SPREAD)
        off = np.log([o.predicted(fit.engine) / o.value for o in seen])
        print(f"{name}  # {url}")
        print(f"  # {len(seen)} rows, off by {np.median(abs(off)):.1%} in the median", end="")
        print(f", {np.quantile(abs(off), 0.9):.1%} at the 90th percentile")
        for value, told in fit.told.items():
            if told > TOLD:
                print(f"    {value}: {getattr(fit.engine, value):.3g}  # {told:.0%} told")


def observed(one: Judged, base: Engine) -> list[Observation]:
    """Return what a row says: its plain rate, and its speedup where it states acceptance.

    A row that is the peak over batches is taken where the peak is before the fit.
    """
    found: list[Observation] = []
    row, setup = one.row, one.setup
    if setup is None or row.speedup is None:
        return found
    try:
        if row.batch is None:
            served = max(map(setup.at, PEAK), key=lambda at: peak(at, one, base))
        else:
            served = setup.at(row.batch)
        if (rate := plain_rate(row)) is not None:
            found.append(Observation(served=served, what="plain", value=rate))
        if row.tokens_per_step_G is not None:
            law = served.accepted_to(row.tokens_per_step_G)
            found.append(
                Observation(served=served, what="speedup", value=row.speedup, accepted=law)
            )
    except SpecmodelError:
        return found
    return found


def peak(served: Served, one: Judged, base: Engine) -> float:
    return served.speedup(base, served.accepted_to(one.row.tokens_per_step_G or 1.0))


if __name__ == "__main__":
    main()
