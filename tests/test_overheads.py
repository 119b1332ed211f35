"""Engine records: what a file says, what nobody measured, and the arithmetic of host times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specmodel as sm
from specmodel.overheads import (
    HOST,
    Engine,
    engine_for,
    engine_names,
    engine_yaml,
    fitted_to,
    joined,
    load_engine,
    serves,
    study_of,
)

MINE = """\
schema: 1
name: mine
title: Mine
serving: true
caps: {captured_rows: 64}
sources:
  one: {title: One, url: u1, read: 2026-11-29}
  two: {title: Two, url: u2, read: 2026-11-29}
fits:
  one: {step: 1.0e-3, round: 2.0e-4}
  two: {step: 4.0e-3, head_pass: 5.0e-4, kernels: 1.2}
"""

BY_HAND = Engine(
    name="x",
    title="X",
    step=1e-3,
    step_sequence=1e-5,
    round=2e-4,
    round_row=3e-6,
    head_pass=7e-4,
    draft_pass=4e-4,
    draft_layer=5e-5,
    pass_sequence=2e-6,
    lookup=1e-4,
    lookup_sequence=4e-6,
    eager_layer=6e-5,
    captured_rows=64,
)
"""Values of which no two sums are alike."""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(MINE)
    return file


# -- arithmetic ----------------------------------------------------------------------------------


def test_a_plain_step_pays_by_sequence() -> None:
    assert BY_HAND.plain([1, 10]).tolist() == pytest.approx([1.01e-3, 1.1e-3], rel=1e-12)


def test_a_round_pays_for_rows_beyond_the_first() -> None:
    """Of 10 sequences and 4 positions 30 rows count, besides the step and the round."""
    found = BY_HAND.rounds([1, 10], 4)
    assert found.tolist() == pytest.approx([1.01e-3 + 2e-4 + 9e-6, 1.1e-3 + 2e-4 + 9e-5], rel=1e-12)
    assert float(BY_HAND.rounds(7, 1)) == pytest.approx(1.07e-3 + 2e-4, rel=1e-12)


def test_launches() -> None:
    assert float(BY_HAND.draft_launch(16, 10, head=True)) == pytest.approx(7.2e-4, rel=1e-12)
    small = float(BY_HAND.draft_launch(16, 10, head=False))
    assert small == pytest.approx(4e-4 + 16 * 5e-5 + 2e-5, rel=1e-12)
    assert float(BY_HAND.finding(10)) == pytest.approx(1.4e-4, rel=1e-12)


def test_what_is_captured_launches_at_once() -> None:
    assert BY_HAND.target_launch(32, [64, 65]).tolist() == pytest.approx([0.0, 32 * 6e-5])
    eager = replace(BY_HAND, captured_rows=0.0)
    assert float(eager.target_launch(32, 1)) == pytest.approx(32 * 6e-5)
    assert float(replace(BY_HAND, captured_rows=np.inf).target_launch(32, 1e9)) == 0.0


@given(device=st.floats(1e-6, 1.0), launch=st.floats(1e-6, 1.0))
def test_joined_is_the_longer_nearly(device: float, launch: float) -> None:
    """Never less than either, at most 2^(1/3) of the longer, symmetric."""
    T, longer = float(joined(device, launch)), max(device, launch)
    assert longer * (1 - 1e-12) <= T <= 2 ** (1 / 3) * longer * (1 + 1e-12)
    assert pytest.approx(float(joined(launch, device)), rel=1e-12) == T


def test_joined_at_its_limits() -> None:
    assert joined([1e-3, 0.0], [0.0, 2e-3]).tolist() == pytest.approx([1e-3, 2e-3], rel=1e-12)
    assert float(joined(1e-3, 1e-3)) == pytest.approx(2 ** (1 / 3) * 1e-3, rel=1e-12)
    assert float(joined(1e-3, 1e-5)) == pytest.approx(1e-3, rel=1e-6)
    assert float(joined(0.0, 0.0)) == 0.0


@pytest.mark.parametrize("name", HOST)
@pytest.mark.parametrize("value", [-1e-6, np.nan, np.inf])
def test_host_times_out_of_range(name: str, value: float) -> None:
    with pytest.raises(sm.DomainError, match=rf"{name} must be >= 0 s; got"):
        replace(BY_HAND, **{name: value})


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_kernels_take_some_time(value: float) -> None:
    with pytest.raises(sm.DomainError, match="kernels must be"):
        replace(BY_HAND, kernels=value)


# -- what studies say ----------------------------------------------------------------------------


def test_an_engine_is_the_geometric_mean_of_its_studies(mine: Path) -> None:
    engine = load_engine(mine)
    assert engine.step == pytest.approx(2e-3, rel=1e-12)  # of 1 and 4 ms
    assert (engine.round, engine.head_pass, engine.kernels) == (2e-4, 5e-4, 1.2)
    assert (engine.captured_rows, engine.max_running) == (64, np.inf)
    assert engine.studies == {"u1": "One", "u2": "Two"}
    assert load_engine(engine) is engine


def test_a_study_left_out_says_nothing(mine: Path) -> None:
    left = load_engine(mine, without="u2")
    assert (left.step, left.round, left.kernels) == (1e-3, 2e-4, 1.0)
    assert "head_pass" in left.unknown
    assert left.head_pass != 5e-4
    assert set(left.studies) == {"u1"}


def test_a_study_alone_counts_where_it_says_anything(mine: Path) -> None:
    alone = load_engine(mine, study="u1")
    assert (alone.step, alone.round) == (1e-3, 2e-4)
    assert (alone.head_pass, alone.kernels) == (5e-4, 1.2)  # u1 says nothing of them
    assert load_engine(mine, study="nowhere") == load_engine(mine)


def typical(name: str, url: str | None = None) -> float:
    """Return the geometric mean of what engines still in use say of a host time."""
    serving = [
        load_engine(engine, without=url)
        for engine in engine_names()
        if serves(engine) and engine != "vllm-2024"
    ]
    said = [getattr(one, name) for one in serving if name not in one.unknown]
    return float(np.exp(np.mean(np.log(said)))) if said else 0.0


def test_what_nobody_measured_is_typical_of_engines_that_serve(mine: Path) -> None:
    engine = load_engine(mine)
    assert engine.unknown == set(HOST) - {"step", "round", "head_pass"}
    for name in engine.unknown:
        assert getattr(engine, name) == pytest.approx(typical(name), rel=1e-9), name
    assert engine.draft_layer > 0


def test_what_is_typical_leaves_the_study_out_too(mine: Path) -> None:
    """A study that one engine is judged by says nothing of it by way of another engine."""
    moved = 0
    for url in set().union(*map(fitted_to, engine_names())):
        left = load_engine(mine, without=url)
        for name in left.unknown:
            assert getattr(left, name) == pytest.approx(typical(name, url), rel=1e-9), name
            moved += getattr(left, name) != getattr(load_engine(mine), name)
    assert moved > 5


@pytest.mark.parametrize("name", engine_names())
def test_engines_that_ship(name: str) -> None:
    engine = load_engine(name)
    assert engine.name == name
    assert fitted_to(name) <= {study_of(url) for url in engine.studies}
    assert engine.unknown <= set(HOST)
    assert all(0 <= getattr(engine, host) < 0.5 for host in HOST)
    for url in fitted_to(name):
        assert url not in load_engine(name, without=url).studies
        assert fitted_to(name, without=url) == fitted_to(name) - {url}


def test_names_of_engines() -> None:
    assert {"vllm-2024", "vllm-2025", "vllm-2026", "sglang", "hf-eager"} <= set(engine_names())
    assert serves("sglang")
    assert not serves("hf-eager")
    with pytest.raises(sm.ProfileError, match=r"unknown engine 'vllm-2052'; did you mean 'vllm-20"):
        load_engine("vllm-2052")


# -- which engine a table means ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "year", "name"),
    [
        ("vLLM v0.6.3", 2026, "vllm-2024"),
        ("vLLM v0.7.0", None, "vllm-2025"),
        ("vllm 0.12.1", 2020, "vllm-2025"),
        ("vLLM >=0.13", None, "vllm-2026"),
        ("vLLM main (~0.22)", 2026, "vllm-2026"),
        ("vLLM", 2025, "vllm-2025"),
        ("vLLM", 2026, "vllm-2026"),
        ("vLLM (version not stated)", 2026, "vllm-2025"),
        ("vLLM (version not stated)", 2025, "vllm-2024"),
        ("SGLang v0.5.9", 2026, "sglang"),
        ("TensorRT-LLM 0.14", 2024, "tensorrt-llm"),
        ("llama.cpp b4077", None, "llama.cpp"),
        ("gpt-fast", 2024, "hf-compiled"),
        ("HF Transformers, FP16", 2024, "hf-eager"),
        ("an engine of our own", 2026, None),
        ("", None, None),
    ],
)
def test_engine_by_version_and_year(text: str, year: float | None, name: str | None) -> None:
    assert engine_for(text, year) == name


# -- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema: 1", "schema: 2", "schema: must be 1"),
        ("name: mine", "name: 3", "name: must be a string"),
        ("title: Mine\n", "", "title: missing"),
        ("serving:", "servng:", "servng: unknown key; did you mean 'serving'"),
        ("one: {step", "three: {step", "fits: three: is not among the file's sources"),
        ("round: 2.0e-4", "roud: 2.0e-4", "fits: one: roud: unknown key; did you mean 'round'"),
        ("round: 2.0e-4", "round: 2e-4", "fits: one: round: must be a number"),
        ("round: 2.0e-4", "round: -1.0", "fits: one: round: must be >= 0; got -1"),
        ("round: 2.0e-4", "round: .nan", "fits: one: round: must be a number"),
        ("round: 2.0e-4", "round: .inf", "fits: one: round: must be a number"),
        ("round: 2.0e-4", "round: true", "fits: one: round: must be a number"),
        ("round: 2.0e-4", "round: " + "9" * 400, "fits: one: round: must be a number"),
        ("kernels: 1.2", "kernels: 0", "fits: two: kernels: must be >= 0.01; got 0"),
        ("  one: {step: 1.0e-3, round: 2.0e-4}", "  one: 3", "fits: one: must be a mapping"),
        ("{captured_rows: 64}", "[1]", "caps: must be a mapping"),
        ("captured_rows:", "captured_row:", "caps: captured_row: unknown key"),
        ("fits:", "fit:", "fit: unknown key; did you mean 'fits'"),
        ("url: u1, ", "", "sources: one: url: missing"),
        ("title: One, ", "", "sources: one: title: missing"),
        ("{title: One, url: u1, read: 2026-11-29}", "3", "sources: one: must be a mapping"),
        ("url: u1", "url: u2", "sources: two: url: is another source's"),
        ("serving: true", "years: 2025", "years: must be the first and the last"),
        ("serving: true", "years: [2025]", "years: must be the first and the last"),
        ("serving: true", "years: [a, b]", "years: must be the first and the last"),
        ("serving: true", "spelled: [a]", "spelled: must be a string"),
        ("serving: true", "name: twice", "duplicate key 'name'"),
        ("schema: 1", "schema: [", "not valid YAML"),
    ],
)
def test_bad_files_name_the_key(mine: Path, old: str, new: str, message: str) -> None:
    assert old in MINE
    mine.write_text(MINE.replace(old, new, 1))
    with pytest.raises(sm.ProfileError) as caught:
        load_engine(mine)
    assert str(caught.value).startswith(f"{mine}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "just text", "[1, 2]", "schema: 1\nname: x\ntitle: X\n"])
def test_files_that_are_no_record(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(sm.ProfileError, match=r"must be a mapping|sources: missing"):
        load_engine(file)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(sm.ProfileError, match=r"absent\.yaml: no such file"):
        load_engine(tmp_path / "absent.yaml")
    with pytest.raises(sm.ProfileError, match="x"):
        load_engine(f"{tmp_path}/x/")
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(sm.ProfileError, match=r"x\.yaml: "):
        load_engine(tmp_path / "x.yaml")


@given(
    values=st.lists(st.just(0.0) | st.floats(1e-9, 1e-3), min_size=len(HOST), max_size=len(HOST)),
    kernels=st.floats(0.5, 2.0),
    rows=st.sampled_from([0.0, 64.0, np.inf]),
)
@settings(max_examples=40)
def test_numbers_are_read_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, values: list[float], kernels: float, rows: float
) -> None:
    engine = Engine(
        name="own",
        title="Own: # of [rows]",
        **dict(zip(HOST, values, strict=True)),
        kernels=kernels,
        captured_rows=rows,
        max_running=8,
        kv_reread=1,
        studies={"rates.csv": "rates.csv, 3 rows"},
    )
    file = tmp_path_factory.mktemp("engine") / "own.yaml"
    file.write_text(engine_yaml(engine), encoding="utf-8")
    found = load_engine(file)
    assert found == engine
    assert found.studies == engine.studies


def test_what_is_unknown_is_not_written() -> None:
    text = engine_yaml(replace(BY_HAND, unknown=frozenset({"lookup"})))
    assert "round_row:" in text
    assert "lookup:" not in text
    assert "lookup_sequence:" in text


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("vllm", "vllm-2026"), ("vLLM 0.11.2", "vllm-2025"), ("vllm==0.6.3", "vllm-2024"),
        ("vllm-1.0", "vllm-2026"), ("sglang-0.5.3", "sglang"), ("tensorrt-llm 1.0", "tensorrt-llm"),
        ("transformers", "hf-eager"), ("llamacpp", "llama.cpp"),
    ],
)  # fmt: skip
def test_a_name_alone_or_with_a_version_means_a_record(text: str, name: str) -> None:
    assert load_engine(text).name == name


@pytest.mark.parametrize("text", ["vllm-2027", "vllm-", "lmdeploy", "", "0.11"])
def test_names_that_mean_no_engine(text: str) -> None:
    with pytest.raises(sm.ProfileError, match="unknown engine"):
        load_engine(text)


@pytest.mark.parametrize("name", engine_names())
def test_an_engine_in_milliseconds_is_refused(name: str, mine: Path) -> None:
    shipped = load_engine(name)
    values = {host: 1e3 * getattr(shipped, host) for host in HOST}
    mine.write_text(engine_yaml(replace(shipped, **values)))
    if all(host in shipped.unknown for host in HOST):
        load_engine(mine)  # nothing is stated
        return
    with pytest.raises(sm.ProfileError, match="is it in milliseconds"):
        load_engine(mine)


@pytest.mark.parametrize("key", ["max_running", "max_running_speculating"])
def test_an_engine_runs_at_least_one_sequence(key: str, mine: Path) -> None:
    mine.write_text(MINE.replace("{captured_rows: 64}", f"{{{key}: 0}}"))
    with pytest.raises(sm.ProfileError, match=f"caps: {key}: must be >= 1; got 0"):
        load_engine(mine)
    with pytest.raises(sm.DomainError, match=f"{key} must be >= 1"):
        replace(load_engine("vllm-2025"), **{key: 0})
