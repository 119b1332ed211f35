"""What a measurement ran on: device, driver, torch, threads."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from specmodel.errors import DomainError


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The device and software of a measurement run.

    Attributes
    ----------
    device : str
        The device's own name.
    kind : str
        Torch's device type, such as ``cpu`` or ``cuda``.
    memory_bytes : int or None
        Memory of the device, where torch can tell. [B]
    multiprocessors : int or None
        Streaming multiprocessors, where torch can tell.
    driver : str or None
        Of a CUDA device: the driver's version, where ``nvidia-smi`` tells it, and the CUDA
        version torch was built for.
    torch : str
    threads : int
        Threads torch uses for one operator on the CPU.
    python : str
    """

    device: str
    kind: str
    memory_bytes: int | None
    multiprocessors: int | None
    driver: str | None
    torch: str
    threads: int
    python: str


def describe(device: str = "cpu") -> Environment:
    """Return what `device` is.

    Parameters
    ----------
    device : str
        As torch spells it: ``cpu``, ``cuda:0``.

    Raises
    ------
    DomainError
        When torch does not know the device or it is not there.
    """
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise DomainError(f"device {device!r} is unknown to torch: {error}") from None
    name, memory, units, driver = _cpu_name(), None, None, None
    if place.type == "cuda":
        if not torch.cuda.is_available() or (place.index or 0) >= torch.cuda.device_count():
            raise DomainError(
                f"device {device!r} is not there: {torch.cuda.device_count()} CUDA devices"
            )
        properties = torch.cuda.get_device_properties(place)
        name, memory = properties.name, properties.total_memory
        units, driver = properties.multi_processor_count, _driver()
    elif place.type != "cpu":
        raise DomainError(f"device must be cpu or cuda:N; got {device!r}")
    return Environment(
        device=name,
        kind=place.type,
        memory_bytes=memory,
        multiprocessors=units,
        driver=driver,
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        python=platform.python_version(),
    )


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def _driver() -> str:
    """Return the versions of the driver and of CUDA; asks, changes nothing."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = ""
    with suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)  # noqa: S603
        driver = found.stdout.strip()
    return ", ".join(filter(None, [driver, f"CUDA {torch.version.cuda}"]))
