"""Engines fitted to a few rows: planted host times come back, and rows say what they touch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import specmodel as sm
from specmodel.drafters import Drafter, NGram
from specmodel.engine_fitting import (
    HOST_SPREAD,
    Observation,
    StepLimits,
    fit_engine,
    step_limits,
)
from specmodel.overheads import HOST, Engine, engine_names, load_engine
from specmodel.requests import Requests, Served, served

H100, LLAMA = sm.load_device("h100"), sm.load_model("llama-3.1-8b")
BASE = Engine(
    name="base",
    title="Base",
    step=1e-3,
    step_sequence=7e-6,
    round=1e-3,
    round_row=2e-6,
    head_pass=1e-3,
    draft_pass=4e-4,
    draft_layer=5e-5,
    pass_sequence=1e-6,
    lookup=5e-5,
)
"""No `lookup_sequence` and no `eager_layer`: what is 0 stays so."""


pytestmark = pytest.mark.slow  # seconds together


@cache
def rows_at(drafter: Drafter, B: float, k: int) -> Served:
    requests = Requests.alike(1024)
    return served(H100, LLAMA, drafter, requests, B=B, k=k, execution=sm.Execution())


def plain(truth: Engine, B: float = 1, off: float = 1.0) -> Observation:
    one = rows_at(sm.Eagle(), B, 1)
    return Observation(served=one, what="plain", value=off * one.throughput(truth))


def drafted(truth: Engine, B: float = 1, k: int = 3, drafter: Drafter | None = None) -> Observation:
    one = rows_at(drafter or sm.Eagle(), B, k)
    law = one.accepted_to(
        1 + 0.2 * min(k, 3) if isinstance(drafter, NGram) else 1 + 0.5 * min(k, 3)
    )
    return Observation(served=one, what="drafted", value=one.throughput(truth, law), accepted=law)


def speedup(truth: Engine, B: float = 1, k: int = 3, off: float = 1.0) -> Observation:
    one = rows_at(sm.Eagle(), B, k)
    law = one.accepted_to(2.4)
    return Observation(
        served=one, what="speedup", value=off * one.speedup(truth, law), accepted=law
    )


def many(truth: Engine) -> list[Observation]:
    """Return rows that tell step, round and head pass apart."""
    return [
        *(plain(truth, B) for B in (1, 16)),
        *(drafted(truth, B, k) for B in (1, 16) for k in (1, 7)),
    ]


# -- what comes back -----------------------------------------------------------------------------


def test_planted_host_times_come_back() -> None:
    names, factors = ("step", "round", "head_pass"), (2.5, 0.6, 1.5)
    truth = replace(BASE, **{n: f * getattr(BASE, n) for n, f in zip(names, factors, strict=True)})
    found = fit_engine(BASE, many(truth), kernel_spread=1e-6)
    for name in names:
        told = found.told[name]
        off = abs(np.log(getattr(found.engine, name) / getattr(truth, name)))
        assert told > 0.5, name
        assert off < 2 * HOST_SPREAD * np.sqrt(1 - told), name  # within the interval it states
        before = abs(np.log(getattr(BASE, name) / getattr(truth, name)))
        assert off < 0.5 * before or before == 0, name
    for one in many(truth):
        assert one.predicted(found.engine) == pytest.approx(one.value, rel=0.01)


def test_rows_that_agree_with_the_engine_leave_it_where_it_is() -> None:
    found = fit_engine(BASE, many(BASE))
    for name in (*HOST, "kernels"):
        assert getattr(found.engine, name) == pytest.approx(getattr(BASE, name), rel=1e-6), name


def test_slow_kernels_come_back() -> None:
    truth = replace(BASE, kernels=1.2)
    found = fit_engine(BASE, [plain(truth, B) for B in (1, 128, 256)], kernel_spread=0.3)
    assert found.engine.kernels == pytest.approx(1.2, rel=0.03)
    held = fit_engine(BASE, [plain(truth, 64)], kernel_spread=1e-6)
    assert held.engine.kernels == pytest.approx(1.0, rel=1e-4)


def test_what_is_zero_stays_so() -> None:
    found = fit_engine(BASE, many(replace(BASE, lookup_sequence=1e-3)))
    assert (found.engine.lookup_sequence, found.engine.eager_layer) == (0.0, 0.0)
    assert set(found.told) == set(HOST) - {"lookup_sequence", "eager_layer"} | {"kernels"}


def test_two_rows_help_on_a_third() -> None:
    """One plain and one speculative row at batch 1, judged by a speedup at another k and batch."""
    truth = replace(BASE, step=2.5 * BASE.step, round=5e-4, head_pass=2 * BASE.head_pass)
    found = fit_engine(BASE, [plain(truth), drafted(truth)])
    for third in (speedup(truth, B=4, k=5), speedup(truth, B=16, k=2)):
        before, after = (
            abs(np.log(third.predicted(e) / third.value)) for e in (BASE, found.engine)
        )
        assert after < 0.5 * before


# -- what rows say -------------------------------------------------------------------------------


def test_nothing_is_told_of_what_rows_do_not_touch() -> None:
    rows = [plain(BASE), plain(BASE, 16)]
    told = fit_engine(BASE, rows).told
    for name in ("round", "round_row", "head_pass", "draft_pass", "draft_layer", "lookup"):
        assert told[name] == pytest.approx(0, abs=1e-12), name
    assert 0.3 < told["step"] < 1
    assert 0.3 < told["kernels"] < 1
    assert fit_engine(BASE, rows, kernel_spread=1e-6).told["step"] > 0.9
    heads = fit_engine(BASE, [drafted(BASE)]).told
    assert heads["head_pass"] > 0.5
    for name in ("draft_pass", "draft_layer", "lookup"):
        assert heads[name] == pytest.approx(0, abs=1e-12), name
    lookups = fit_engine(replace(BASE, lookup=2e-3), [drafted(BASE, drafter=NGram(hit=1.0))]).told
    assert lookups["lookup"] > 0.3
    assert lookups["head_pass"] == pytest.approx(0, abs=1e-12)


def test_more_rows_tell_more() -> None:
    one, three = (fit_engine(BASE, rows).told for rows in ([plain(BASE)], [plain(BASE)] * 3))
    assert 0 < one["step"] < three["step"] < 1
    assert all(0 <= value <= 1 for value in three.values())


def test_untouched_values_stay() -> None:
    found = fit_engine(BASE, [plain(replace(BASE, step=3e-3))]).engine
    for name in ("round", "round_row", "head_pass", "draft_pass", "draft_layer", "lookup"):
        assert getattr(found, name) == pytest.approx(getattr(BASE, name), rel=1e-9), name
    assert found.step > 2 * BASE.step
    assert (found.name, found.captured_rows) == (BASE.name, BASE.captured_rows)


def test_rows_that_contradict_one_another_tell_less() -> None:
    """Six rows that agree within nothing: a mean between them, and less is told of it."""
    agree = [plain(BASE), *(speedup(BASE) for _ in range(6))]
    torn = [plain(BASE), *(speedup(BASE, off=off) for off in (0.6, 1.6) * 3)]
    sure, unsure = fit_engine(BASE, agree), fit_engine(BASE, torn)
    for name in ("step", "head_pass"):
        assert unsure.told[name] < sure.told[name]
        assert np.isfinite(getattr(unsure.engine, name))
    ratio = speedup(BASE).predicted(unsure.engine) / speedup(BASE).value
    assert 0.6 < ratio < 1.6
    for name in HOST:
        base = getattr(BASE, name)
        assert base * np.exp(-5 * HOST_SPREAD) <= getattr(unsure.engine, name)
        assert getattr(unsure.engine, name) <= base * np.exp(5 * HOST_SPREAD)


def test_a_row_that_no_engine_gives_does_not_break() -> None:
    found = fit_engine(BASE, [plain(BASE, off=50.0), drafted(BASE)])
    assert all(np.isfinite(getattr(found.engine, name)) for name in HOST)
    assert found.engine.step < BASE.step


def test_engines_that_ship_can_be_fitted() -> None:
    base = load_engine("hf-eager")
    found = fit_engine(base, [plain(replace(base, step=1.5 * base.step))])
    assert base.step < found.engine.step < 1.6 * base.step


def test_rows_fitted_as_arrays_are_those_fitted_one_by_one() -> None:
    truth = replace(BASE, step=2 * BASE.step, head_pass=0.5 * BASE.head_pass)
    B, k, G = [1.0, 16.0, 1.0, 16.0], [1, 1, 7, 7], 2.0
    each = [rows_at(sm.Eagle(), b, n) for b, n in zip(B, k, strict=True)]
    laws = [one.accepted_alike(G) for one in each]
    singly = [plain(truth), plain(truth, 16)] + [
        Observation(served=one, what="drafted", value=one.throughput(truth, law), accepted=law)
        for one, law in zip(each, laws, strict=True)
    ]
    how = sm.Execution()
    two, four = (
        served(H100, LLAMA, sm.Eagle(), Requests.alike(1024), B=b, k=n, execution=how)
        for b, n in ((B[:2], [1, 1]), (B, k))
    )
    law = four.accepted_alike(np.full(4, G))
    together = [
        Observation(served=two, what="plain", value=two.rates(truth)),
        Observation(served=four, what="drafted", value=four.rates(truth, law), accepted=law),
    ]
    one, other = fit_engine(BASE, singly), fit_engine(BASE, together)
    for name in one.told:
        assert getattr(one.engine, name) == pytest.approx(getattr(other.engine, name), rel=1e-9)
        assert one.told[name] == pytest.approx(other.told[name], rel=1e-6, abs=1e-9)


# -- which times are plausible -------------------------------------------------------------------


def limits(k: Any, *, L: float = 1024, drafter: Drafter | None = None) -> StepLimits:
    how = sm.Execution(engine=BASE)
    return step_limits(H100, LLAMA, drafter or sm.Eagle(), B=1, k=k, L=L, execution=how)


def test_limits_are_an_eighth_and_a_hundred_times_the_ideal() -> None:
    at = limits([0, 3])
    read = sm.speculate(H100, LLAMA, sm.Eagle(), 0.7, B=1, k=[0, 3], L=1024, level="ideal")
    bare = sm.speculate(H100, LLAMA, sm.Eagle(), 0.7, B=1, k=0, L=0, level="ideal")
    assert at.ideal.tolist() == [float(bare.T_p)] * 2
    assert at.shortest == pytest.approx(at.ideal / 8, rel=1e-12)
    rounds = np.asarray(read.T_v + read.T_d).ravel()
    assert at.longest == pytest.approx(100 * rounds + [0.2, 0.8], rel=1e-12)  # three draft passes


def test_a_context_changes_only_the_longest_time() -> None:
    """A context that is stated too long, such as the default's, must refuse no true row."""
    short, long = limits(3, L=0), limits(3, L=100_000)
    assert long.shortest == short.shortest
    assert long.longest > short.longest


def test_engines_that_ship_are_within_the_limits() -> None:
    at = limits(3)
    for name in engine_names():
        one, engine = rows_at(sm.Eagle(), 1, 3), load_engine(name)
        law = one.accepted_alike(2.0)
        seconds = np.array([1 / one.throughput(engine), 2.0 / one.throughput(engine, law)])
        assert at.hold(seconds).all(), name
        assert at.likely(seconds).all(), name
    assert not at.hold(np.array([1e3, 1e-3]) * seconds).any()


# -- what is refused -----------------------------------------------------------------------------


def test_no_rows_are_no_fit() -> None:
    with pytest.raises(sm.DomainError, match="at least one row"):
        fit_engine(BASE, [])


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_a_row_needs_a_value(value: float) -> None:
    with pytest.raises(sm.DomainError, match="a row's value must be above 0"):
        replace(plain(BASE), value=value)


def test_a_speedup_needs_an_acceptance() -> None:
    one = replace(speedup(BASE), accepted=None)
    with pytest.raises(sm.DomainError, match="a speedup needs an acceptance"):
        fit_engine(BASE, [one])
