"""Time and peak memory of a sweep of 10^8 points: python benchmarks/sweep.py [ENDING].

ENDING: .zarr (default), .nc, .parquet or .csv.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GRID = ["--batch", "1-10000", "--context", "1k:100k:1k", "--k", "0-9", "--alpha", "0.5:0.95:0.05"]


def main() -> None:
    ending = sys.argv[1] if len(sys.argv) > 1 else ".zarr"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"sweep{ending}"
        command = [sys.executable, "-m", "specmodel", "sweep", "--gpu", "h100", *GRID]
        start = time.perf_counter()
        subprocess.run([*command, "--variables", "S,k_star", "-o", str(path)], check=True)
        seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    print(f"{seconds:.1f} s, {1e8 / seconds / 1e6:.1f} M points/s, {peak:.2f} GB at most")


if __name__ == "__main__":
    main()
