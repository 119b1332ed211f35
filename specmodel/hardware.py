"""Device records, and the only reader of their YAML files.

A file has a ``datasheet`` block, each value with the figure as quoted and its source. Rates
are dense peaks in FLOP/s and one-direction bandwidths in bytes/s.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.calibration import Calibration, calibration
from specmodel.dtypes import BYTES
from specmodel.errors import (
    DomainError,
    ProfileError,
    UnknownNameError,
    brief,
    did_you_mean,
    one_number,
    one_of,
    one_text,
    one_whole,
)
from specmodel.fields import Fields
from specmodel.files import check_output, read_text, write_text
from specmodel.forms import Rates
from specmodel.plausible import check_plausible, check_together
from specmodel.yaml_text import parse_yaml, yaml_text

_RATE_DTYPES = (*BYTES, "fp4")
_SCALARS = {
    "memory_bandwidth": True,
    "memory_capacity": True,
    "l2_cache": False,
    "multiprocessors": False,
    "interconnect_bandwidth": False,
    "pcie_bandwidth": False,
    "board_power": False,
}
_KEYS = (
    "schema", "name", "title", "vendor", "family", "sources", "datasheet", "aliases", "status",
    "calibration",
)  # fmt: skip
_STATUS = ("released", "announced")
_OTHER_KINDS = {
    "fits": "an engine's file, for --engine",
    "model_type": "a model's description, for --model",
    "specmodel_architecture": "a model's record, for --model",
    "points": "what measure prints, for --acceptance",
}
"""Keys of files that are given where a device's is expected."""

_VALUE = ("value", "quoted", "note", "source")
_SCHEMA = 1
_CITATION = re.compile(r"(.+?) \((.+), (\S+), read (\S+)\)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Link:
    """What joins two devices, one direction.

    Attributes
    ----------
    latency : float
        One way. [s]
    bandwidth : float
        [B/s]
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        one_number(self.latency, "link latency", low=0, unit="s")
        one_number(self.bandwidth, "link bandwidth", positive=True, unit="B/s")

    def time(self, size: ArrayLike) -> NDArray[np.float64]:
        """Return the time of one message of `size` bytes. [s]"""
        return self.latency + np.asarray(size, dtype=np.float64) / self.bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator or CPU, from its datasheet.

    Attributes
    ----------
    name, title, vendor, family : str
        File name, name for people, maker, architecture family.
    peak_flops : mapping of str to float
        Dense peak by number format. [FLOP/s]
    memory_bandwidth : float
        M. [B/s]
    memory_capacity : float
        [B]
    l2_cache : float or None
        Last-level cache. [B]
    multiprocessors : int or None
        SMs, compute units or cores.
    interconnect_bandwidth, pcie_bandwidth : float or None
        Per device and direction. [B/s]
    board_power : float or None
        [W]
    status : str
        ``released``, or ``announced`` where the figures are the maker's ahead of the product.
    sources : mapping of str to str
        Field to the citation of its value.
    calibration : Calibration or None
        What was measured on it.
    """

    name: str
    title: str
    vendor: str
    family: str
    peak_flops: Mapping[str, float]
    memory_bandwidth: float
    memory_capacity: float
    l2_cache: float | None = None
    multiprocessors: int | None = None
    interconnect_bandwidth: float | None = None
    pcie_bandwidth: float | None = None
    board_power: float | None = None
    aliases: tuple[str, ...] = ()
    status: str = "released"
    sources: Mapping[str, str] = field(default_factory=dict)
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        for name in ("name", "title", "vendor", "family"):
            one_text(getattr(self, name), f"device {name}")
        if not isinstance(self.peak_flops, Mapping) or not self.peak_flops:
            raise DomainError(
                f"peak_flops must name at least one dtype; got {brief(self.peak_flops)}"
            )
        for dtype, rate in self.peak_flops.items():
            one_number(rate, f"peak_flops of {brief(dtype)}", positive=True, unit="FLOP/s")
        for name, required in _SCALARS.items():
            if required or getattr(self, name) is not None:
                one_number(getattr(self, name), name, positive=True)
        if self.multiprocessors is not None:
            one_whole(self.multiprocessors, "multiprocessors", low=1)
        one_of(self.status, "status", _STATUS)
        if not isinstance(self.aliases, tuple) or not all(isinstance(a, str) for a in self.aliases):
            raise DomainError(f"aliases must be a tuple of text; got {brief(self.aliases)}")
        if not isinstance(self.sources, Mapping):
            raise DomainError(f"sources must be a mapping; got {brief(self.sources)}")
        if not isinstance(self.calibration, Calibration | None):
            raise DomainError(
                f"calibration must be a Calibration or None; got {brief(self.calibration)}"
            )

    @property
    def label(self) -> str:
        """Its title, marked where its figures were announced ahead of the product."""
        return self.title + (" (announced)" if self.status == "announced" else "")

    def flops(self, dtype: str) -> float:
        """Return the dense peak for a number format. [FLOP/s]

        Raises
        ------
        DomainError
            When the device has no rate for that format.
        """
        if dtype not in self.peak_flops:
            has = ", ".join(self.peak_flops)
            raise DomainError(f"{self.name} has no {dtype} arithmetic (it has {has}: use one)")
        return self.peak_flops[dtype]

    def rho(self, dtype: str) -> float:
        """Return F / M, the FLOPs per byte at which arithmetic and memory balance. [FLOP/B]"""
        return self.flops(dtype) / self.memory_bandwidth

    def rates(self, dtype: str) -> Rates:
        """Return what a form needs to know of the device, arithmetic in a number format.

        Raises
        ------
        DomainError
            When the device has no rate for that format.
        """
        return Rates(
            bandwidth=self.memory_bandwidth,
            flops=self.flops(dtype),
            multiprocessors=self.multiprocessors,
            l2=self.l2_cache,
            link=None if self.link is None else self.link[1],
        )

    @property
    def link(self) -> tuple[str, float] | None:
        """What joins it to its neighbours, the interconnect or else PCIe, and its rate. [B/s]"""
        if self.interconnect_bandwidth is not None:
            return "interconnect", self.interconnect_bandwidth
        return None if self.pcie_bandwidth is None else ("PCIe", self.pcie_bandwidth)


def load_device(device: str | os.PathLike[str] | Device) -> Device:
    """Return a device record.

    Parameters
    ----------
    device : str or path
        A name or alias (case, spaces, underscores and a vendor in front do not matter), or
        the path of a YAML file.

    Raises
    ------
    ProfileError
        When the name is unknown or the file is not a valid record.

    Examples
    --------
    >>> round(load_device("H100 SXM").rho("bfloat16"), 2)
    295.34
    """
    if isinstance(device, Device):
        return device
    if not isinstance(device, str | os.PathLike):
        raise ProfileError(f"device must be a name, a file or a Device; got {brief(device)}")
    text = os.fspath(device)
    if text.endswith((".yaml", ".yml")) or os.sep in text:
        return read_device(Path(text))
    name = _normalise(text)
    known = _spellings()
    if name not in known:
        raise UnknownNameError(f"unknown GPU {brief(text)}{did_you_mean(name, known)}")
    return _shipped(known[name])


@cache
def device_names() -> tuple[str, ...]:
    """Return the names of the devices that ship with the package."""
    return tuple(
        sorted(
            file.name[:-5] for file in profiles_folder().iterdir() if file.name.endswith(".yaml")
        )
    )


@cache
def _datasheet(name: str) -> Device:
    return read_device(profiles_folder() / f"{name}.yaml")


@cache
def _shipped(name: str) -> Device:
    """Return a record that ships, with the calibration that lies apart from it."""
    device = _datasheet(name)
    apart = profiles_folder() / "calibrations" / f"{name}.yaml"
    if not apart.is_file():
        return device
    keys = Fields(_parsed(apart), str(apart), fault=ProfileError)
    keys.refuse_unknown(("calibration",))
    return replace(device, calibration=calibration(keys.mapping("calibration")))


@cache
def profiles_folder() -> Traversable:
    """Return the folder of records: in the package when installed, beside it in a checkout."""
    installed = files("specmodel") / "hardware_profiles"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "hardware_profiles"


@cache
def _spellings() -> dict[str, str]:
    """Return every accepted spelling and the name it stands for."""
    spellings: dict[str, str] = {}
    for name in device_names():
        for spelling in (name, *_datasheet(name).aliases):
            if spellings.setdefault(spelling, name) != name:
                raise ProfileError(f"{brief(spelling)} names both {spellings[spelling]} and {name}")
    return spellings


def _normalise(text: str) -> str:
    name = re.sub(r"[\s_]+", "-", text.strip().lower())
    return re.sub(
        r"^(nvidia|amd|intel|geforce|instinct|tesla)-",
        "",
        re.sub(r"^(nvidia|amd|intel)-", "", name),
    )


# -- reading -------------------------------------------------------------------------------------


def read_device(file: Path | Traversable) -> Device:
    """Read one device file.

    Raises
    ------
    ProfileError
        As ``path: key``, when the file is unreadable, has a YAML tag, an unknown or missing
        key, or a value of the wrong type.
    """
    return _device(_parsed(file), str(file))


def _parsed(file: Path | Traversable) -> Any:
    text = read_text(file, fault=ProfileError)
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise ProfileError(f"{file}: {error}") from None


def device_yaml(device: Device) -> str:
    """Return a record as the text of a device file, which `read_device` reads back.

    Notes beside values are not part of a record, so they are not in the text.

    Raises
    ------
    ProfileError
        When a value has no source, or one in another form than ``quoted (title, url, read)``.
    """
    keys: dict[tuple[str, ...], str] = {}

    def entry(key: str, value: float) -> dict[str, Any]:
        found = _CITATION.fullmatch(device.sources.get(key, ""))
        if found is None:
            raise ProfileError(f"{device.name}: {key}: its source is not known")
        quoted, *source = found.groups()
        name = keys.setdefault(tuple(source), f"source-{len(keys) + 1}")
        return {"value": value, "quoted": quoted, "source": name}

    rates = {k: entry(f"peak_flops.{k}", rate) for k, rate in device.peak_flops.items()}
    stated = {key: getattr(device, key) for key in _SCALARS if getattr(device, key) is not None}
    sheet = {"peak_flops": rates, **{key: entry(key, value) for key, value in stated.items()}}
    parts = ("title", "url", "read")
    record = {
        "schema": _SCHEMA,
        **{key: getattr(device, key) for key in ("name", "title", "vendor", "family")},
        "aliases": list(device.aliases),
        "status": device.status,
        "sources": {name: dict(zip(parts, s, strict=True)) for s, name in keys.items()},
        "datasheet": sheet,
        **({"calibration": device.calibration.record()} if device.calibration else {}),
    }
    return yaml_text(record)


YAML = (".yaml", ".yml")
"""Endings of a device's or an engine's file."""


def write_device(device: Device, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a record as a device file, whole or not at all.

    Parameters
    ----------
    device : Device
    path : path
        Ends in one of `YAML`.
    overwrite : bool
        Whether to replace a file that is there.

    Raises
    ------
    ProfileError
        When a value has no source.
    DomainError
        When the folder is not there, or something is that may not be replaced.
    """
    text = device_yaml(device)
    write_text(check_output(path, endings=YAML, overwrite=overwrite), text)


def _device(record: Any, where: str) -> Device:
    keys = Fields(record, where, fault=ProfileError)
    keys.refuse_kinds(_OTHER_KINDS)
    keys.refuse_unknown(_KEYS)
    keys.version(_SCHEMA)
    titles = _titles(keys.mapping("sources"))
    sheet = keys.mapping("datasheet")
    sheet.refuse_unknown(("peak_flops", *_SCALARS))
    for key, needed in _SCALARS.items():
        if needed:
            sheet.raw(key)
    sources: dict[str, str] = {}

    def value(entry: Fields, key: str) -> float:
        entry.refuse_unknown(_VALUE)
        number = entry.number("value")
        check_plausible(key.partition(".")[0], number, f"{entry.where}: value", fault=ProfileError)
        entry.text("note", "")
        if (source := entry.text("source")) not in titles:
            raise entry.error("source", f"{brief(source)} is not among the file's sources")
        sources[key] = f"{entry.text('quoted')} ({titles[source]})"
        return number

    rates = sheet.mapping("peak_flops")
    if not rates.values:
        raise sheet.error("peak_flops", "must name at least one dtype; got {}")
    for dtype in rates.values:
        if dtype not in _RATE_DTYPES:
            hint = did_you_mean(dtype, _RATE_DTYPES)
            raise sheet.error("peak_flops", f"unknown dtype {brief(dtype)}{hint}")
    peaks = {dtype: value(rates.mapping(dtype), f"peak_flops.{dtype}") for dtype in rates.values}
    scalars: dict[str, Any] = {
        key: value(sheet.mapping(key), key) for key in _SCALARS if key in sheet.values
    }
    check_together(max(peaks.values()), scalars["memory_bandwidth"], where, fault=ProfileError)
    if (units := scalars.get("multiprocessors")) is not None:
        if units != int(units):
            raise sheet.error("multiprocessors", f"must be a whole number; got {units:g}")
        scalars["multiprocessors"] = int(units)
    return Device(
        name=keys.text("name"),
        title=keys.text("title"),
        vendor=keys.text("vendor"),
        family=keys.text("family"),
        aliases=keys.text_list("aliases"),
        status=keys.choice("status", _STATUS, "released"),
        peak_flops=peaks,
        **scalars,
        sources=sources,
        calibration=calibration(keys.mapping("calibration"))
        if "calibration" in keys.values
        else None,
    )


def _titles(sources: Fields) -> dict[str, str]:
    """Return the citation of each source."""
    titles = {}
    for key in sources.values:
        source = sources.mapping(key)
        source.refuse_unknown(("title", "url", "read"))
        titles[key] = f"{source.text('title')}, {source.text('url')}, read {source.raw('read')}"
    return titles
