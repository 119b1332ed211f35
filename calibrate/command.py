"""What ``specmodel calibrate`` does; the command line finds it by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from calibrate.profile import fit_and_write
from calibrate.run import Settings, measure
from specmodel.checking import check_text
from specmodel.files import check_output
from specmodel.hardware import YAML


def calibrate(output: Path, settings: Settings, *, overwrite: bool = False) -> str:
    """Measure (or finish measuring) a table, write the profile, and return what to print.

    Raises
    ------
    SpecmodelError
        When a file is there that may not be replaced, the device is not there, the table belongs
        to another run, or the run was too noisy.
    """
    check_output(output, endings=YAML, overwrite=overwrite)
    record = measure(settings)
    *_, check = fit_and_write(settings.table, output, overwrite=overwrite)
    checked = f"\n\n{check_text(check)}" if check is not None else ""
    where = f"{settings.table} holds the measurements, {output} the profile"
    return f"{summary(record)}{checked}\n\n{where}"


def summary(record: dict[str, Any]) -> str:
    """Return a run's outcome in a few lines."""
    device, noise, peak = record["device"], record["noise"], record["peak"]
    lines = [f"{device['device']}, torch {record['torch']}, {record['elapsed']:.0f} s measured"]
    if "memory_bandwidth" in peak:
        lines.append(f"copy {peak['memory_bandwidth'] / 1e9:,.4g} GB/s")
    lines += [f"{dtype} {rate / 1e12:,.4g} TFLOP/s" for dtype, rate in peak["flops"].items()]
    lines.append(
        f"noise: reference {noise['reference']:.1%}, drift {noise['drift']:+.1%}, "
        f"rows {noise['rows']:.1%} (median), {noise['worst']:.0%} (worst)"
    )
    lines += [
        f"{name}: {state['measured']} of the {state['planned']} shapes that a fit should have; "
        "a larger --budget measures the rest"
        for name, state in record["sections"].items()
        if state.get("measured", 0) < state["planned"]
    ]
    return "\n".join(lines)
