"""Predict rows, each by a model that has not seen what it is judged by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from specmodel.engine_fitting import HOST_SPREAD, KERNEL_SPREAD, Observation, fit_engine
from specmodel.errors import SpecmodelError
from specmodel.overheads import HOST, Engine, engine_names, fitted_to, load_engine
from specmodel.requests import Accepted, Requests, Served, solved
from specmodel.uncertainty import NORMAL_90
from specmodel.validation.rows import Row
from specmodel.validation.setups import Setup, Unpredictable, setup
from specmodel.validation.shares import Shares, time_shares

CLOSE = 0.05
"""Within this of S = 1 the answer is "too close to call". [-]"""
GENERIC_SPREAD = 0.15
"""Spread of an engine's kernels on a device that nobody calibrated. [-]"""
_SHORTEST = 0.1  # output over prompt, from which on decoding dominates
PEAK = (1.0, 2.0, 4.0, 8.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0)
"""Batches among which the peak of a row that names none is looked for. [-]"""


@dataclass(slots=True, kw_only=True)
class Judged:
    """A row and what was predicted of it.

    Attributes
    ----------
    row, setup
        `setup` None: nothing could be predicted.
    why : str
        Why nothing was, or why it does not count.
    given, shape : float or None
        S from the row's own G, and from the acceptance that the smallest batch of its series
        implies. [-]
    given_in_study, shape_in_study : float or None
        The same under an engine that was fitted to more of the study.
    interval : (float, float) or None
        Least and largest S, without host time and under the engines that ship, slow ones, where
        nobody measured this one. [-]
    anchors : set of str
        What the row was used for, if anything: ``engine``, ``shape``.
    """

    row: Row
    setup: Setup | None = None
    why: str = ""
    given: float | None = None
    shape: float | None = None
    given_in_study: float | None = None
    shape_in_study: float | None = None
    interval: tuple[float, float] | None = None
    anchors: set[str] = field(default_factory=set)

    @property
    def best(self) -> float | None:
        """The prediction that decisions go by: of the shape where there is one."""
        return self.shape if self.shape is not None else self.given


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Rows with their predictions, and those that state shares of time."""

    judged: tuple[Judged, ...]
    shares: tuple[Shares, ...] = ()


def validate(rows: Iterable[Row], *, each: Literal["study", "deployment"] = "study") -> Validation:
    """Predict every row that can be predicted.

    An engine's host times are taken without the row's study. The study's first plain rate and
    first speculative row at batch 1, on that engine and device, move them (`fit_engine`); that
    row does not count, and plain rates are never what is judged.

    Parameters
    ----------
    rows : iterable of Row
    each : {"study", "deployment"}
        Whether those two rows are taken of each study, or of each target, drafter and degree of
        parallelism in it, as somebody who measures their own deployment would.
    """
    judged = [prepared(row) for row in rows]
    by_deployment: dict[Any, list[Judged]] = defaultdict(list)
    for one in judged:
        if one.setup is not None:
            r = one.row
            key: tuple[object, ...] = (r.study, r.engine, r.hardware)
            if each == "deployment":
                key += (r.target_model, r.target_dtype, r.drafter_kind, r.tp or r.n_gpus)
            by_deployment[key].append(one)
    for together in by_deployment.values():
        _deployment(together)
    shares = time_shares(one.row for one in judged if one.row.timing)
    return Validation(judged=tuple(judged), shares=tuple(shares))


def prepared(row: Row) -> Judged:
    """Return a row with its setup, or with the reason why there is none."""
    if row.speedup is None:
        return Judged(row=row, why="no speedup measured")
    if row.speedup_baseline != "no_spec_same_engine":
        return Judged(row=row, why="not against plain decoding")
    if "lossy" in row.quality:
        return Judged(row=row, why="lossy acceptance")
    if "suspect" in row.quality:
        return Judged(row=row, why="its table marks it suspect")
    try:
        made = setup(row)
    except (Unpredictable, SpecmodelError) as error:
        return Judged(row=row, why=str(error))
    one = Judged(row=row, setup=made)
    if row.batch is None and "peak over batch" not in row.speedup_def.lower():
        one.why, one.setup = "no batch", None
    elif _prefill_dominates(made.requests):
        one.why, one.setup = "prefill dominates", None
    return one


def _prefill_dominates(requests: Requests) -> bool:
    if not np.isfinite(requests.output).all():
        return False
    made, given = requests.weight @ requests.output, requests.weight @ requests.prompt
    return bool(made < _SHORTEST * given)


@dataclass(slots=True)
class _Case:
    """A judged row with its passes timed."""

    judged: Judged
    at: tuple[Served, ...]  # several batches: S is the largest over them

    def speedup(self, engine: Engine | None, law: Accepted) -> float:
        return max(one.speedup(engine, law) for one in self.at)

    @property
    def row(self) -> Row:
        return self.judged.row

    def own(self) -> Accepted | None:
        """Return the acceptance that the row states."""
        G = self.row.tokens_per_step_G
        return None if G is None else self.at[0].accepted_to(G)


def _timed(one: Judged) -> _Case | None:
    made = one.setup
    if made is None:
        return None
    batches = PEAK if one.row.batch is None else (one.row.batch,)
    try:
        return _Case(one, tuple(made.at(B) for B in batches))
    except SpecmodelError as error:
        one.why, one.setup = str(error), None
        return None


def _deployment(together: Sequence[Judged]) -> None:
    """Predict the rows of one deployment."""
    made = together[0].setup
    assert made is not None  # noqa: S101 (of every row of a deployment)
    name, url = made.engine, together[0].row.study
    whole = load_engine(name, study=url) if name else None
    measured = name is not None and bool(fitted_to(name, without=url))
    base = load_engine(name, without=url) if measured and name else _typical(url)
    cases = [case for one in together if (case := _timed(one)) is not None]
    laws = [_law(case) for case in cases]
    seen = _observations(cases, laws)
    spread = KERNEL_SPREAD if _calibrated(made) else GENERIC_SPREAD
    engine = fit_engine(base, seen, kernel_spread=spread).engine if seen else base
    known = measured or any("engine" in case.judged.anchors for case in cases)
    in_study = whole if whole is not None and url in fitted_to(name or "") else None
    for case, law in zip(cases, laws, strict=True):
        if law is None:
            continue
        if known:
            case.judged.given = case.speedup(engine, law)
        else:
            case.judged.interval = _interval(case, law)
            case.judged.why = "nobody measured the engine's host time: an interval"
        if in_study is not None:
            case.judged.given_in_study = case.speedup(in_study, law)
    by_series: dict[Any, list[_Case]] = defaultdict(list)
    for case in cases:
        by_series[case.row.series].append(case)
    for series in by_series.values():
        _shape(series, engine, known=known, in_study=in_study)
    for case in cases:
        one = case.judged
        if one.given is None and one.shape is None and one.interval is None and not one.why:
            one.why = "" if "shape" in one.anchors else "no acceptance, and no smaller batch beside"


def _law(case: _Case) -> Accepted | None:
    try:
        return case.own()
    except SpecmodelError as error:
        case.judged.why = str(error)
        return None


def _calibrated(made: Setup) -> bool:
    return made.device.calibration is not None


def _typical(url: str) -> Engine:
    """Return host times of no engine in particular."""
    some = load_engine("vllm-2025", without=url)
    return replace(some, name="typical", title="any engine", unknown=frozenset(HOST))


def _observations(cases: Sequence[_Case], laws: Sequence[Accepted | None]) -> list[Observation]:
    """Return the plain rate and the speculative row at batch 1 that a deployment is known by."""
    seen: list[Observation] = []
    plain = next((c for c in cases if plain_rate(c.row) is not None and len(c.at) == 1), None)
    if plain is not None:
        rate = plain_rate(plain.row)
        seen.append(Observation(served=plain.at[0], what="plain", value=float(rate or 0.0)))
    for case, law in zip(cases, laws, strict=True):
        if law is not None and case.row.batch == 1 and case.row.speedup is not None:
            case.judged.anchors.add("engine")
            seen.append(
                Observation(served=case.at[0], what="speedup", value=case.row.speedup, accepted=law)
            )
            break
    return seen


def plain_rate(row: Row) -> float | None:
    """Return the plain tokens per second of the whole batch, where the unit says what it is.

    A row that states the time of a plain step instead tells it as well.
    """
    unit, rate = row.throughput_unit.lower(), row.baseline_throughput
    if rate is None and row.batch is not None and row.plain_step is not None:
        return row.batch / row.plain_step
    if rate is None or row.batch is None or "total" in unit:
        return None
    if "user" in unit:
        return rate * row.batch
    if "gpu" in unit:
        return rate * (row.n_gpus or row.tp or 1.0)
    return rate if unit.startswith(("tok/s", "output tok/s")) and "rank" not in unit else None


def _interval(case: _Case, law: Accepted) -> tuple[float, float]:
    """Return S under any of the engines that ship, as far off as one's host times may be."""
    slow = float(np.exp(NORMAL_90 * HOST_SPREAD))
    each = [
        case.speedup(replace(one, **{name: slow * getattr(one, name) for name in HOST}), law)
        for one in map(load_engine, engine_names())
    ]
    each.append(case.speedup(None, law))  # not the largest where a long step hides drafts
    return min(each), max(each)


def _shape(
    series: Sequence[_Case], engine: Engine, *, known: bool, in_study: Engine | None
) -> None:
    """Predict a series from its smallest batch."""
    ordered = sorted(
        (c for c in series if c.row.batch is not None), key=lambda c: c.row.batch or 0.0
    )
    if len({c.row.batch for c in ordered}) < 2:
        return
    first, *rest = ordered
    if not known and in_study is None:
        return
    first.judged.anchors.add("shape")
    for name, by in (("shape", engine if known else None), ("shape_in_study", in_study)):
        if by is None:
            continue
        try:
            scale = _scale(first, by)
        except SpecmodelError as error:
            for case in rest if name == "shape" else ():
                case.judged.why = case.judged.why or str(error)
            continue
        for case in rest:
            if case.row.batch != first.row.batch:
                law = case.at[0].accepted(scale)
                setattr(case.judged, name, case.speedup(by, law))


def _scale(first: _Case, engine: Engine) -> float:
    served, wanted = first.at[0], float(first.row.speedup or 0.0)

    def off(scale: float) -> float:
        return served.speedup(engine, served.accepted(scale)) - wanted

    return solved(off, f"S = {wanted:g} at batch {first.row.batch:g}")
