"""What a serving engine costs besides the passes: host time of steps, rounds and launches.

A file of ``hardware_profiles/engines`` holds what was fitted to each of several studies; an
engine's value is their geometric mean, so that a study can be left out where it is the test.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.errors import (
    DomainError,
    ProfileError,
    UnknownNameError,
    brief,
    did_you_mean,
    real_array,
)
from specmodel.fields import Fields
from specmodel.files import read_text
from specmodel.hardware import profiles_folder
from specmodel.yaml_text import parse_yaml, yaml_text

Floats = NDArray[np.float64]

LAUNCH_NORM = 3.0
"""Exponent that joins a pass's time on the device and its launch on the host: the longer of the
two nearly, and more than either where they are alike. [-]"""

HOST = (
    "step",
    "step_sequence",
    "round",
    "round_row",
    "head_pass",
    "draft_pass",
    "draft_layer",
    "pass_sequence",
    "lookup",
    "lookup_sequence",
    "eager_layer",
)
"""Host times of an engine, each fitted or taken from other engines."""

_CAPS = ("captured_rows", "max_running", "max_running_speculating", "kv_reread")
_FITTED = (*HOST, "kernels")
_SCHEMA = 1
_KEYS = ("schema", "name", "title", "spelled", "years", "serving", "caps", "sources", "fits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Host time of a serving engine. Times in seconds; what nobody measured is named in `unknown`.

    Attributes
    ----------
    name, title : str
    step, step_sequence : float
        Of a plain step, and per sequence in it: scheduling, sampling, output.
    round, round_row : float
        What a round of speculation adds, and per row beyond the first of each sequence:
        rejection sampling, bookkeeping.
    head_pass, draft_pass, draft_layer, pass_sequence : float
        To launch a pass of a draft head; of a draft model, and per layer of it; per sequence.
    lookup, lookup_sequence : float
        Of a drafter without passes (n-gram), a round, and per sequence.
    eager_layer : float
        To launch a layer of a pass that is not captured.
    kernels : float
        Time of its passes on the device over what the device's record makes of them. [-]
    captured_rows : float
        Rows up to which the target's passes are captured (CUDA graphs) and launch at once;
        0: eager. [-]
    max_running, max_running_speculating : float
        Default caps on running sequences, without and with speculation. [-]
    kv_reread : float
        How verification reads the KV cache, as `specmodel.roofline.Execution` takes it: 1 where
        each draft is verified as a sequence of its own. [-]
    unknown : frozenset of str
        Values that nobody measured; they are other engines' mean, or 0.
    studies : mapping of str to str
        URL to citation of what it was fitted to.
    """

    name: str
    title: str
    step: float = 0.0
    step_sequence: float = 0.0
    round: float = 0.0
    round_row: float = 0.0
    head_pass: float = 0.0
    draft_pass: float = 0.0
    draft_layer: float = 0.0
    pass_sequence: float = 0.0
    lookup: float = 0.0
    lookup_sequence: float = 0.0
    eager_layer: float = 0.0
    kernels: float = 1.0
    captured_rows: float = np.inf
    max_running: float = np.inf
    max_running_speculating: float = np.inf
    kv_reread: float = 0.0
    unknown: frozenset[str] = frozenset()
    studies: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in HOST:
            real_array(getattr(self, name), name, low=0, unit="s")
        if not real_array(self.kernels, "kernels", low=0) > 0:
            raise DomainError("kernels must be above 0; got 0")
        real_array(self.captured_rows, "captured_rows", low=0, finite=False)
        for name in ("max_running", "max_running_speculating"):
            real_array(getattr(self, name), name, low=1, finite=False)
        real_array(self.kv_reread, "kv_reread", low=0, high=1)

    def plain(self, B: ArrayLike) -> Floats:
        """Return T_h at B running sequences. [s]"""
        return np.asarray(self.step + self.step_sequence * np.asarray(B, dtype=np.float64))

    def rounds(self, B: ArrayLike, W: ArrayLike) -> Floats:
        """Return T_o of a round that verifies W positions of B sequences. [s]"""
        rows = np.asarray(B, dtype=np.float64) * (np.asarray(W, dtype=np.float64) - 1.0)
        return self.plain(B) + self.round + self.round_row * rows

    def finding(self, B: ArrayLike) -> Floats:
        """Return the time a drafter without passes takes. [s]"""
        return np.asarray(self.lookup + self.lookup_sequence * np.asarray(B, dtype=np.float64))

    def draft_launch(self, layers: int, B: ArrayLike, *, head: bool) -> Floats:
        """Return the host time that launching a draft pass takes. [s]"""
        own = self.head_pass if head else self.draft_pass + self.draft_layer * layers
        return np.asarray(own + self.pass_sequence * np.asarray(B, dtype=np.float64))

    def target_launch(self, layers: int, rows: ArrayLike) -> Floats:
        """Return the host time that launching a pass of the target takes: 0 where captured. [s]"""
        captured = np.asarray(rows, dtype=np.float64) <= self.captured_rows
        return np.where(captured, 0.0, self.eager_layer * layers)


def joined(device: ArrayLike, launch: ArrayLike) -> Floats:
    """Return the time of a pass from its time on the device and its launch on the host. [s]"""
    p = LAUNCH_NORM
    total = np.asarray(device, dtype=np.float64) ** p + np.asarray(launch, dtype=np.float64) ** p
    return np.asarray(total ** (1 / p))


# -- what ships ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """An engine's file: what each study says of it."""

    name: str
    title: str
    spelled: str
    years: tuple[int, int]
    serving: bool
    caps: Mapping[str, float]
    fits: Mapping[str, Mapping[str, float]]  # by `study_of` its URL
    studies: Mapping[str, str]

    def values(self, without: str | None, study: str | None = None) -> dict[str, float]:
        """Return the geometric mean of what the studies say, one left out or one alone."""
        by_name: dict[str, list[float]] = {}
        for url, fit in self.fits.items():
            if url != without:
                for name, value in fit.items():
                    by_name.setdefault(name, []).append(value)
        pooled = {name: _mean(found) for name, found in by_name.items()}
        return pooled | dict(self.fits.get(study or "", {}))


def engine_names() -> tuple[str, ...]:
    """Return the names of the engines that ship with the package."""
    return tuple(_records())


def load_engine(
    engine: str | os.PathLike[str] | Engine,
    *,
    without: str | None = None,
    study: str | None = None,
) -> Engine:
    """Return an engine's host times.

    What none of its studies says is taken from the other engines that serve (their geometric
    mean) and named in `unknown`.

    Parameters
    ----------
    engine : str or path
        One of `engine_names`; an engine's name alone, which means its newest record, or with a
        version, which means the record that covers it; or a file that `engine_yaml` wrote.
    without, study : str, optional
        URL of a study that does not count; of one that alone counts where it says anything.

    Raises
    ------
    ProfileError
        When the name is unknown or the file is no engine's.

    Examples
    --------
    >>> load_engine("vllm-2025").step < 2e-3
    True
    >>> load_engine("vllm").name, load_engine("vllm 0.11.2").name
    ('vllm-2026', 'vllm-2025')
    """
    if isinstance(engine, Engine):
        return engine
    if not isinstance(engine, str | os.PathLike):
        raise ProfileError(f"engine must be a name, a file or an Engine; got {brief(engine)}")
    without, study = (url and study_of(url) for url in (without, study))
    text = os.fspath(engine)
    if text.endswith((".yaml", ".yml")) or os.sep in text:
        return _engine(_read(Path(text)), without, study)
    name = text if text in _records() else _meant(text)
    if name is None:
        hint = did_you_mean(text, engine_names())
        known = f"known: {', '.join(engine_names())}, or a name and its version, such as name-0.11"
        raise UnknownNameError(f"unknown engine {brief(text)}{hint} ({known})")
    return _shipped(name, without, study)


_NAME_AND_VERSION = re.compile(r"(.*?[a-z])(?:[\s_=v-]*(\d+(?:\.\w+)+))?")


def _meant(text: str) -> str | None:
    """Return the record of a family's name: its newest, or the one that covers a version."""
    match = _NAME_AND_VERSION.fullmatch(text.strip().lower())
    if match is None:
        return None
    family, version = match.groups()
    for record in _records().values():
        own = re.sub(r"-20\d\d$", "", record.name)
        if family == own or re.fullmatch(record.spelled, family, re.IGNORECASE):
            return engine_for(f"{family} {version or ''}", None)
    return None


def fitted_to(name: str, *, without: str | None = None) -> frozenset[str]:
    """Return the studies (`study_of`) that tell any of an engine's host times."""
    fits = _records()[name].fits
    told = {url for url, fit in fits.items() if any(value in HOST for value in fit)}
    return frozenset(told) - {without and study_of(without)}


def study_of(url: str) -> str:
    """Return one address for every address that a study has.

    Scheme, case, a version of an arXiv paper and a slash at the end do not matter; other addresses
    of a study are those that the engines' files name beside its own.

    Examples
    --------
    >>> study_of("http://arxiv.org/abs/1706.03762v2") == study_of("https://arxiv.org/abs/1706.03762/")
    True
    """
    plain = _address(url)
    return _other_addresses().get(plain, plain)


def _address(url: str) -> str:
    text = url.strip().lower().removeprefix("https://").removeprefix("http://").rstrip("/")
    return re.sub(r"^arxiv\.org/(?:abs|pdf)/(\d+\.\d+)(v\d+)?$", r"arxiv.org/abs/\1", text)


@cache
def _other_addresses() -> dict[str, str]:
    files = sorted(entry.name for entry in _folder().iterdir() if entry.name.endswith(".yaml"))
    found: dict[str, str] = {}
    for name in files:
        record = parse_yaml((_folder() / name).read_text(encoding="utf-8"))
        for source in record["sources"].values():
            found |= {_address(other): _address(source["url"]) for other in source.get("also", ())}
    return found


def serves(name: str) -> bool:
    """Return whether an engine serves requests, rather than a research implementation."""
    return _records()[name].serving


def engine_for(text: str, year: float | None) -> str | None:
    """Return the name of the engine that a table's text and year mean, None where nobody did.

    A version that the text states decides; where it says that none was stated, a paper's year
    stands for the year before, when it was measured. Without a year the newest engine of the name
    is meant.

    Examples
    --------
    >>> engine_for("vLLM v0.10.1", 2026), engine_for("HF Transformers-based, FP16", 2024)
    ('vllm-2025', 'hf-eager')
    >>> engine_for("vLLM (version not stated)", 2025)
    'vllm-2024'
    """
    when = _year(text) or (year - 1 if year and "not stated" in text else year)
    named = [one for one in _records().values() if re.search(one.spelled, text, re.IGNORECASE)]
    if when is not None:
        named = [one for one in named if one.years[0] <= when <= one.years[1]]
    return max(named, key=lambda one: (one.serving, one.years)).name if named else None


_VLLM = ((0, 2023), (4, 2024), (7, 2025), (13, 2026))
"""Minor versions of vLLM from which on a year's engine is meant."""


def _year(text: str) -> int | None:
    version = re.search(r"vllm\D*?v?>?=?0\.(\d+)", text.lower())
    if version is None:
        return None
    return max(year for minor, year in _VLLM if int(version[1]) >= minor)


def engine_yaml(engine: Engine) -> str:
    """Return an engine as the text of a file that `load_engine` reads."""
    study = next(iter(engine.studies), "own rows")
    fit = {name: float(getattr(engine, name)) for name in _FITTED if name not in engine.unknown}
    caps = {name: getattr(engine, name) for name in _CAPS}
    return yaml_text(
        {
            "schema": _SCHEMA,
            "name": engine.name,
            "title": engine.title,
            "serving": True,
            "caps": {name: float(value) for name, value in caps.items() if np.isfinite(value)},
            "sources": {"fit": {"title": engine.studies.get(study, "own rows"), "url": study}},
            "fits": {"fit": fit},
        }
    )


@cache
def _shipped(name: str, without: str | None, study: str | None) -> Engine:
    return _engine(_records()[name], without, study)


def _engine(record: _Record, without: str | None, study: str | None) -> Engine:
    values = record.values(without, study)
    typical = _typical(without)
    unknown = frozenset(name for name in HOST if name not in values)
    return Engine(
        name=record.name,
        title=record.title,
        **{name: values.get(name, typical.get(name, 0.0)) for name in HOST},
        kernels=values.get("kernels", 1.0),
        **record.caps,
        unknown=unknown,
        studies={url: text for url, text in record.studies.items() if study_of(url) != without},
    )


_RECENT = 2025  # engines that nobody runs any more say nothing of others


@cache
def _typical(without: str | None) -> dict[str, float]:
    """Return what engines that serve say of each host time, the geometric mean."""
    each = [
        record.values(without)
        for record in _records().values()
        if record.serving and record.years[1] >= _RECENT
    ]
    return {name: _mean(found) for name in HOST if (found := [v[name] for v in each if name in v])}


def _mean(values: list[float]) -> float:
    if len(values) == 1:
        return values[0]  # exactly, and 0 where it is
    return float(np.exp(np.mean(np.log(np.maximum(values, 1e-12)))))


@cache
def _records() -> dict[str, _Record]:
    files_ = sorted(entry.name for entry in _folder().iterdir() if entry.name.endswith(".yaml"))
    records = [_read(_folder() / name) for name in files_]
    return {record.name: record for record in records}


@cache
def _folder() -> Traversable:
    return profiles_folder() / "engines"


def _read(file: Path | Traversable) -> _Record:
    """Read one engine file.

    Raises
    ------
    ProfileError
        When it is not valid; names the key.
    """
    where = str(file)
    try:
        record = parse_yaml(read_text(file, fault=ProfileError))
    except ValueError as error:
        raise ProfileError(f"{where}: {error}") from None
    keys = Fields(record, where, fault=ProfileError)
    keys.refuse_kinds({"datasheet": "a device's file, for --profile or --gpu"})
    keys.refuse_unknown(_KEYS)
    if keys.raw("schema") is True or keys.raw("schema") != _SCHEMA:
        raise keys.error("schema", f"must be {_SCHEMA}; got {brief(keys.raw('schema'))}")
    sources, fits = keys.mapping("sources"), keys.mapping("fits")
    by_url: dict[str, dict[str, float]] = {}
    for study in fits.values:
        if study not in sources.values:
            raise fits.error(study, "is not among the file's sources")
        values = _numbers(fits.mapping(study), _FITTED)
        by_url[study_of(sources.mapping(study).text("url"))] = values
    spelled = keys.text("spelled", "(?!)")
    try:
        re.compile(spelled)
    except (re.error, RecursionError, OverflowError) as error:
        raise keys.error("spelled", f"must be a regular expression: {error}") from None
    years = keys.raw("years", [1990, 2100])
    if not (isinstance(years, list) and [type(year) for year in years] == [int, int]):
        raise keys.error("years", f"must be the first and the last; got {brief(years)}")
    return _Record(
        name=keys.text("name"),
        title=keys.text("title"),
        spelled=spelled,
        years=(years[0], years[1]),
        serving=keys.flag("serving", False),
        caps=_numbers(keys.mapping("caps", {}), _CAPS),
        fits=by_url,
        studies=_studies(sources),
    )


def _studies(sources: Fields) -> dict[str, str]:
    """Return the titles of a file's sources by their URL."""
    found: dict[str, str] = {}
    for name in sources.values:
        source = sources.mapping(name)
        if (url := source.text("url")) in found:
            raise source.error("url", "is another source's as well")
        found[url] = source.text("title")
    return found


_SLOWEST = {"step": 0.2, "round": 0.2, "lookup": 0.2, "head_pass": 0.2, "draft_pass": 0.2}
_SLOWEST |= {"draft_layer": 0.02, "eager_layer": 0.02, "round_row": 1e-3}
_SLOWEST |= dict.fromkeys(("step_sequence", "pass_sequence", "lookup_sequence"), 2e-3)
"""No engine takes as long; what does is in milliseconds. [s]"""

LIMITS = {
    **{name: (0.0, slowest, "s") for name, slowest in _SLOWEST.items()},
    "kernels": (0.01, 100.0, ""),
    "captured_rows": (0.0, 1e9, ""),
    "max_running": (1.0, 1e9, ""),
    "max_running_speculating": (1.0, 1e9, ""),
    "kv_reread": (0.0, 1.0, ""),
}
"""Lowest and highest of each value that an engine file may hold, and its unit."""


def _numbers(keys: Fields, known: tuple[str, ...]) -> dict[str, float]:
    keys.refuse_unknown(known)
    values = {}
    for name in known:
        if name in keys.values:
            low, high, unit = LIMITS[name]
            values[name] = keys.number(name, low=low)
            if values[name] > high:
                hint = " (is it in milliseconds?)" if unit == "s" else ""
                raise keys.error(
                    name,
                    f"must be in [{low:g}, {high:g}]{unit and ' s'}; got {values[name]:g}{hint}",
                )
    return values
