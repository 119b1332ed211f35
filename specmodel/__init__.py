"""Does speculative decoding pay on this device, and with which drafter and how many drafts?

An analytic model of the times of one round (T_p, T_v, T_d), the tokens it commits (G), the
speedup (S), critical batches and the best draft length, from a device's datasheet and a
model's ``config.json``.
"""

from __future__ import annotations

import importlib

from specmodel._version import __version__

TYPE_CHECKING = False  # as `typing` has it, whose import would take most of this file's time
if TYPE_CHECKING:
    from typing import Any

    from specmodel import information, lossy, plots, symbolic
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

_FROM = {
    "acceptance": "BetaMixture Geometric Histogram MeanLength PerPosition",
    "architectures": "Architecture load_model model_names",
    "drafters": "MTP BlockDiffusion DraftModel Eagle Eagle3 Lookahead Medusa NGram Parallel "
    "SelfSpeculative SparseKV",
    "errors": "ArchitectureError DomainError ExtrapolationWarning FitError ProfileError "
    "SpecmodelError",
    "hardware": "Device Link device_names load_device",
    "kernels": "Efficiency",
    "labelled": "best_width speculate",
    "roofline": "Execution critical_batch pass_time",
    "width": "schedule",
}
"""Modules, and the public names that each holds."""

_WHERE = {name: module for module, names in _FROM.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Load a public name, or a module of the package, when it is first asked for.

    So the command line can answer Ctrl-C before NumPy is loaded.
    """
    if name in _WHERE:
        value = getattr(importlib.import_module(f"specmodel.{_WHERE[name]}"), name)
        globals()[name] = value
        return value
    try:
        return importlib.import_module(f"specmodel.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"specmodel.{name}":
            raise
    raise AttributeError(f"module 'specmodel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


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
