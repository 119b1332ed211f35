"""What a table itself says of a device: bandwidth from the copy, arithmetic from the best GEMM."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from calibrate.table import Row, measured
from specmodel.errors import FitError
from specmodel.hardware import Device


def peaks(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the best rates measured.

    Returns
    -------
    dict
        ``memory_bandwidth`` of the fastest copy, read and written bytes alike [B/s], and
        ``flops`` of the fastest matrix product in each format [FLOP/s]; what was not measured is
        left out.
    """
    flops: dict[str, float] = {}
    for row in measured(rows, "gemm"):
        work = 2.0 * int(row["m"]) * int(row["n"]) * int(row["k"])
        rate = work / float(row["seconds"])
        flops[row["dtype"]] = max(flops.get(row["dtype"], 0.0), rate)
    copies = [int(row["bytes"]) / float(row["seconds"]) for row in measured(rows, "stream")]
    return ({"memory_bandwidth": max(copies)} if copies else {}) | {"flops": flops}


def measured_device(rows: Sequence[Row], record: Mapping[str, Any], table: Path) -> Device:
    """Return a device record from measurements alone, for a device without a datasheet.

    Parameters
    ----------
    rows : sequence of row
    record : mapping
        The table's sidecar.
    table : Path
        Named as the source.

    Raises
    ------
    FitError
        When the table has no copy or no matrix product.
    """
    found = peaks(rows)
    if "memory_bandwidth" not in found or not found["flops"]:
        raise FitError(f"{table}: has no copy and matrix product to take rates from")
    environment = record["device"]
    title, kind = environment["device"], environment["kind"]
    date = str(record["date"])[:10]
    by = f"measured by specmodel calibrate with torch {record['torch']}, {table.name}, read {date}"
    sources = {
        "memory_bandwidth": f"{found['memory_bandwidth'] / 1e9:.4g} GB/s ({by})",
        "memory_capacity": f"{record['memory_capacity'] / 1e9:.4g} GB ({by})",
        "l2_cache": f"{record['cache']} B ({by})",
    }
    sources |= {
        f"peak_flops.{dtype}": f"{rate / 1e12:.4g} TFLOP/s ({by})"
        for dtype, rate in found["flops"].items()
    }
    units = environment["multiprocessors"]
    if units is None:
        units = record["threads"]
    sources["multiprocessors"] = f"{units} ({by})"
    return Device(
        name=re.sub(r"[^a-z0-9.]+", "-", title.lower()).strip("-") + "-measured",
        title=f"{title} (measured)",
        vendor="unknown",
        family=kind,
        aliases=(),
        status="released",
        peak_flops=found["flops"],
        memory_bandwidth=found["memory_bandwidth"],
        memory_capacity=float(record["memory_capacity"]),
        l2_cache=float(record["cache"]),
        multiprocessors=int(units),
        sources=sources,
    )
