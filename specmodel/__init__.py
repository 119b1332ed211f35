"""Does speculative decoding pay on this device, and with which drafter and how many drafts?

An analytic model of the times of one round (T_p, T_v, T_d), the tokens it commits (G), the
speedup (S), critical batches and the best draft length, from a device's datasheet and a
model's ``config.json``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from specmodel._version import __version__
from specmodel.acceptance import BetaMixture, Geometric, Histogram, MeanLength, PerPosition
from specmodel.architectures import Architecture, load_model, model_names
from specmodel.drafters import (
    MTP,
    BlockDiffusion,
    DraftModel,
    Eagle,
    Eagle3,
    Lookahead,
    Medusa,
    NGram,
    Parallel,
    SelfSpeculative,
    SparseKV,
)
from specmodel.errors import (
    ArchitectureError,
    DomainError,
    ExtrapolationWarning,
    FitError,
    ProfileError,
    SpecmodelError,
)
from specmodel.hardware import Device, Link, device_names, load_device
from specmodel.kernels import Efficiency
from specmodel.labelled import best_width, speculate
from specmodel.roofline import Execution, critical_batch, pass_time
from specmodel.width import schedule

if TYPE_CHECKING:
    from specmodel import information, lossy, plots, symbolic

_ON_DEMAND = ("information", "lossy", "plots", "symbolic")  # they import matplotlib and SymPy


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return importlib.import_module(f"specmodel.{name}")
    raise AttributeError(f"module 'specmodel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_ON_DEMAND])


__all__ = [
    "MTP",
    "Architecture",
    "ArchitectureError",
    "BetaMixture",
    "BlockDiffusion",
    "Device",
    "DomainError",
    "DraftModel",
    "Eagle",
    "Eagle3",
    "Efficiency",
    "Execution",
    "ExtrapolationWarning",
    "FitError",
    "Geometric",
    "Histogram",
    "Link",
    "Lookahead",
    "MeanLength",
    "Medusa",
    "NGram",
    "Parallel",
    "PerPosition",
    "ProfileError",
    "SelfSpeculative",
    "SparseKV",
    "SpecmodelError",
    "__version__",
    "best_width",
    "critical_batch",
    "device_names",
    "information",
    "load_device",
    "load_model",
    "lossy",
    "model_names",
    "pass_time",
    "plots",
    "schedule",
    "speculate",
    "symbolic",
]
