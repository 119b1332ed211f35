"""How fast the package answers: import, whole command, and a broadcast grid.

    python benchmarks/speed.py

Prints medians and ratios. Machines differ and are noisy: compare ratios, and run it twice.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import numpy as np

REPEATS = 9


def median_seconds(*command: str) -> float:
    """Median wall-clock time of a command, in a process of its own. [s]"""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def imports() -> None:
    python = median_seconds(sys.executable, "-c", "pass")
    numpy = median_seconds(sys.executable, "-c", "import numpy")
    names = "import specmodel; specmodel.speculate"  # the package loads its names on demand
    package = median_seconds(sys.executable, "-c", names)
    print(f"python             {python:.3f} s")
    print(f"import numpy       {numpy:.3f} s")
    print(f"specmodel.speculate {package:.3f} s, {package - numpy:.3f} s after numpy (target 0.25)")


def command() -> None:
    seconds = median_seconds(sys.executable, "-m", "specmodel", "predict", "--gpu", "h100")
    print(f"specmodel predict --gpu h100, whole process: {seconds:.3f} s (target 1)")


def grid() -> None:
    """T_p, T_v, T_d, G, S and k* over 200 batches x 16 k x 50 contexts x 20 alphas."""
    import specmodel as sm

    setup = (sm.load_device("h100"), sm.load_model("llama-3.1-8b"), sm.Eagle3())
    axes = {"B": np.arange(1, 201), "k": range(1, 17), "L": 1024 * np.arange(50)}
    law = sm.Geometric(np.linspace(0.05, 0.98, 20))
    import xarray  # noqa: F401  (imported before the clock starts)

    rates = []
    for _ in range(REPEATS):
        start = time.thread_time()
        result = sm.speculate(*setup, law, **axes)
        rates.append(result.S.size / (time.thread_time() - start))
    print(
        f"grid of {result.S.size:,} points at the operator level, one thread: "
        f"{statistics.median(rates) / 1e6:.1f} million points/s (target 1)"
    )


if __name__ == "__main__":
    imports()
    command()
    grid()
