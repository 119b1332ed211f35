"""What ``specmodel calibrate`` does; the command line finds it by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from calibrate.profile import fit_and_write
from calibrate.run import Settings, measure, refuse_noise


def calibrate(output: Path, settings: Settings) -> str:
    """Measure (or finish measuring) a table, write the profile, and return what to print.

    Raises
    ------
    SpecmodelError
        When the device is not there, the table belongs to another run, or the run was too noisy.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    record = measure(settings)
    refuse_noise(record, settings.table)
    fit_and_write(settings.table, output)
    return f"{summary(record)}\n{settings.table} holds the measurements, {output} the profile"


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
