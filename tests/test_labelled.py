"""Labelled results: dimensions, units, agreement with the plain functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import specmodel as sm
from specmodel.overheads import load_engine
from specmodel.speculation import round_time


def test_dimensions_follow_what_was_asked(h100: sm.Device, llama: sm.Architecture) -> None:
    drafter = sm.DraftModel(sm.load_model("llama-3.2-1b"))
    r = sm.speculate(h100, llama, drafter, sm.Geometric(0.75), B=[1, 8], k=range(5), L=2048)
    assert r.S.dims == ("B", "k")
    assert r.T_p.dims == ("B",)
    assert r.L.item() == 2048
    one = sm.speculate(h100, llama, drafter, sm.Geometric(0.75), B=[8], k=[3], L=[64])
    assert one.S.dims == ("B", "k", "L")
    scalar = sm.speculate(h100, llama, drafter, sm.Geometric(0.75), B=8, k=3)
    assert scalar.S.dims == ()
    many = sm.speculate(h100, llama, drafter, sm.Geometric([0.5, 0.7]), B=[1, 8], k=[2], L=0)
    assert many.S.dims == ("B", "k", "alpha")
    assert many.G.dims == ("k", "alpha")


def test_values_units_and_basis(h100: sm.Device, llama: sm.Architecture) -> None:
    B, k, L = [1, 64], [0, 2, 4], [128, 4096]
    r = sm.speculate(h100, llama, sm.Eagle3(), sm.Geometric(0.7), B=B, k=k, L=L, tp=2)
    how = sm.Execution(tp=2)
    for b in B:
        for n in k:
            for context in L:
                t = round_time(h100, llama, sm.Eagle3(), B=b, k=n, L=context, execution=how)
                at = r.sel(B=b, k=n, L=context)
                assert at.T_v.item() == pytest.approx(float(t.T_v), rel=1e-13)
                assert at.T_d.item() == pytest.approx(float(t.T_d), rel=1e-13)
                S = float(sm.Geometric(0.7).tokens(n) / t.cost)
                assert at.S.item() == pytest.approx(S, rel=1e-13)
    assert (r.S.sel(k=0) == 1).all()
    np.testing.assert_array_equal(r.k_star, np.array(k)[r.S.argmax("k")])
    assert r.attrs["basis"] == "calibrated, generic for all-gather"
    assert r.attrs["device"] == "h100-sxm"
    assert (r.T_v.attrs["units"], r.S.attrs["units"]) == ("s", "1")
    ideal = sm.speculate(h100, llama, sm.Eagle3(), sm.Geometric(0.7), B=1, k=2, level="ideal")
    assert ideal.attrs["basis"] == "datasheet"


def test_best_width_is_the_scan(h100: sm.Device, llama: sm.Architecture) -> None:
    setup = (h100, llama, sm.Eagle3(), sm.MeanLength(2.25, k=3))
    with pytest.warns(sm.ExtrapolationWarning, match="asked for k = 4"):
        best = sm.best_width(*setup, B=[1, 8, 64, 256], L=2048)
    with pytest.warns(sm.ExtrapolationWarning):
        r = sm.speculate(*setup, B=[1, 8, 64, 256], k=range(17), L=2048)
    np.testing.assert_array_equal(best.k, r.S.argmax("k"))
    np.testing.assert_array_equal(best.W, best.k + 1)
    np.testing.assert_allclose(best.S, r.S.max("k"))
    assert "k_star" not in best


def test_a_choice_within_what_was_measured_does_not_warn(
    h100: sm.Device, llama: sm.Architecture
) -> None:
    steep = sm.PerPosition([0.6, 0.1, 0.01])
    best = sm.best_width(h100, llama, sm.Eagle3(), steep, B=[1, 8], L=2048)
    assert int(best.k.max()) <= 3
    runs = sm.schedule(h100, llama, sm.Eagle3(), steep, L=2048, max_batch=16)
    assert max(run.k for run in runs) <= 3
    with pytest.warns(sm.ExtrapolationWarning):
        sm.schedule(h100, llama, sm.Eagle3(), sm.PerPosition([0.9]), L=2048, max_batch=4)


def test_execution_or_its_fields(h100: sm.Device, llama: sm.Architecture) -> None:
    setup = (h100, llama, sm.Eagle3(), sm.Geometric(0.7))
    fields = sm.speculate(*setup, B=4, k=3, level="ideal", tp=2)
    whole = sm.speculate(*setup, B=4, k=3, execution=sm.Execution(level="ideal", tp=2))
    assert fields.S.item() == whole.S.item()


def test_bad_axes(h100: sm.Device, llama: sm.Architecture) -> None:
    with pytest.raises(sm.DomainError, match="batch must be >= 1; got 0"):
        sm.speculate(h100, llama, sm.Eagle3(), sm.Geometric(0.7), B=0, k=1)
    with pytest.raises(sm.DomainError, match="scalars or one-dimensional"):
        sm.speculate(h100, llama, sm.Eagle3(), sm.Geometric(0.7), B=[[1]], k=1)


def test_names_and_numbers_stand_for_records(h100: sm.Device, llama: sm.Architecture) -> None:
    where = {"B": [1, 64], "k": range(4), "L": 1024}
    named = sm.speculate("h100", "llama-3.1-8b", "eagle3", 0.7, **where)
    assert named.identical(sm.speculate(h100, llama, sm.Eagle3(), sm.Geometric(0.7), **where))
    engine = load_engine("vllm-2025")
    how = sm.Execution(engine="vllm-2025")
    assert how == sm.Execution(engine=engine)
    assert sm.DraftModel("llama-3.2-1b").architecture == sm.load_model("llama-3.2-1b")
    assert sm.pass_time("h100", "llama-3.1-8b", B=1).T == sm.pass_time(h100, llama, B=1).T


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": 3.35}, "device must be a name, a file or a Device; got 3.35"),
        ({"target": None}, "model must be a name, a file or an Architecture; got None"),
        ({"drafter": 0.7}, r"drafter must be a record such as Eagle3\(\); got 0.7"),
        ({"drafter": "eagel3"}, "did you mean 'eagle3'"),
        ({"acceptance": "0.7"}, "acceptance must be alpha or a record such as"),
        ({"engine": 1}, "engine must be a name, a file or an Engine; got 1"),
        ({"engine": "vlm"}, "unknown engine 'vlm'"),
    ],
)
def test_what_is_no_record_is_named(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"device": "h100", "target": "llama-3.1-8b", "drafter": "eagle3"}
    given = {**given, "acceptance": 0.7, "B": 1, "k": 2, **change}
    with pytest.raises(sm.SpecmodelError, match=message):
        sm.speculate(**given)
    if "engine" not in change and change != {"drafter": "eagel3"}:
        records = {"drafter": sm.Eagle3(), **{x: given[x] for x in ("device", "target")}}
        records |= {"acceptance": given["acceptance"], **change}
        with pytest.raises(sm.SpecmodelError, match=message):
            sm.schedule(**records, max_batch=2)
