"""What a table itself says of a device: bandwidth from the copy, arithmetic from the best GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from calibrate.table import Row, measured


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
