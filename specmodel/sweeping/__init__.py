"""Sweeps: `speculate` over any axes, in blocks of bounded memory, to a file, resumable.

Axes are of two kinds. A *case* is one combination of everything that is not a number of the
model's closed range (device, target, drafter, degree of parallelism, ...); within it B, L, k
and alpha form a grid that is evaluated by array arithmetic. Blocks of that grid go to workers
(this process, local processes, a Dask cluster: anything with the interface of
`concurrent.futures.Executor`) and come back to the one writer. While the sweep runs, each
finished block is a file of NumPy arrays in a folder beside the output; at the end the blocks are
turned into the form asked for, one after the other.
"""

from specmodel.sweeping.forms import FORMS, check_installed
from specmodel.sweeping.place import checked_place
from specmodel.sweeping.plan import (
    DEFAULT_VARIABLES,
    REGIMES,
    Block,
    Case,
    Sweep,
    evaluate,
)
from specmodel.sweeping.running import sweep

__all__ = [
    "FORMS",
    "DEFAULT_VARIABLES",
    "REGIMES",
    "Case",
    "Sweep",
    "Block",
    "evaluate",
    "sweep",
    "checked_place",
    "check_installed",
]
