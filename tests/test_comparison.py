"""Which drafter: candidates, picks, and orderings that users have reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import specmodel as sm
from specmodel import defaults
from specmodel.cli import main
from specmodel.comparison import candidates, compare, replace_in
from specmodel.drafters import KINDS
from specmodel.report import Setup, predict

H100 = sm.load_device("h100")
LLAMA = sm.load_model("llama-3.1-8b")


def make(**changes: object) -> Setup:
    fields: dict[str, object] = {
        "device": H100,
        "target": LLAMA,
        "drafter": sm.NGram(hit=0.3),
        "acceptance": sm.Geometric(0.7),
        "execution": sm.Execution(),
        "batches": (1, 32),
        "contexts": (1024,),
    }
    return Setup(**{**fields, **changes})  # type: ignore[arg-type]


def test_every_kind_is_a_candidate_or_left_out_with_the_reason() -> None:
    found, left_out = candidates(LLAMA)
    assert {one.drafter.kind for one in found} | set(left_out) == set(KINDS)
    assert "carries no MTP block" in left_out["mtp"]
    siblings = [one.label for one in found if one.drafter.kind == "draft-model"]
    assert siblings == ["draft-model llama-3.2-1b", "draft-model llama-3.2-3b"]


def test_rows_are_what_predict_says() -> None:
    setup = make()
    found, left_out = candidates(LLAMA, acceptance=sm.Geometric(0.7))
    result = compare(setup, found, left_out)
    for row in result.rows:
        one = predict(replace_in(setup, row.candidate))
        for point, expected in zip(row.points, one.points, strict=True):
            assert (point["k"], point["S"]) == (expected["k_star"], expected["S_star"])


def test_the_pick_is_the_cheapest_within_five_percent() -> None:
    found, _ = candidates(LLAMA, acceptance=sm.Geometric(0.7))
    result = compare(make(), found)
    for i, pick in enumerate(result.picks):
        here = {row.candidate.label: row.points[i] for row in result.rows if row.points[i]["fits"]}
        best = max(p["S"] for p in here.values())
        assert here[pick["best"]]["S"] == best
        near = {label: p for label, p in here.items() if p["k"] and p["S"] >= 0.95 * best}
        assert here[pick["cheapest"]]["memory_bytes"] == min(
            p["memory_bytes"] for p in near.values()
        )


def test_nothing_pays_and_nothing_fits() -> None:
    found, _ = candidates(LLAMA, acceptance=sm.Geometric(0.0))
    assert all(pick["best"] is None and pick["fits"] for pick in compare(make(), found).picks)
    found, _ = candidates(LLAMA, acceptance=sm.Geometric(0.9))
    crowded = compare(make(contexts=(131_072,), batches=(64,)), found)
    assert [(p["best"], p["fits"]) for p in crowded.picks] == [(None, False)]


def test_a_workload_brings_its_hit_rate_to_predict_as_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = ["--gpu", "h100", "--batch", "8", "--workload", "code", "--format", "json", "--k", "3"]
    assert main(["compare", *base, "--drafters", "ngram"]) == 0
    row = json.loads(capsys.readouterr().out)["drafters"][0]
    assert main(["predict", *base, "--drafter", "ngram"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert row["hit_rate"] == one["inputs"]["hit_rate"] == 0.478
    assert row["points"][0]["S"] == one["points"][0]["S"]


def test_draft_models_run_in_the_formats_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "--gpu h100 --model llama-3.1-70b --tp 4 --batch 64 --context 32k --kv-dtype fp8 --k 3 "
        "--alpha 0.7 --format json"
    )
    base = text.split()
    assert main(["compare", *base, "--drafters", "draft-model"]) == 0
    rows = json.loads(capsys.readouterr().out)["drafters"]
    for row in rows:
        draft = row["drafter"].removeprefix("draft-model ")
        assert main(["predict", *base, "--drafter", "draft-model", "--draft", draft]) == 0
        (point,) = json.loads(capsys.readouterr().out)["points"]
        assert row["points"][0]["S"] == max(1.0, point["S"])


def test_the_given_k_may_exceed_what_was_measured_with_a_note() -> None:
    found, _ = candidates(LLAMA, kinds=["eagle3", "eagle3"])
    assert len(found) == 1
    assert compare(make(k=3), found).notes == ()
    (note,) = compare(make(k=5), found).notes
    assert "asked for k = 5" in note


def test_placement_of_the_setup_applies_to_every_candidate() -> None:
    found, _ = candidates(LLAMA, kinds=["eagle3"], acceptance=sm.Geometric(0.7))
    four = sm.Execution(tp=4)
    alone, shared = (
        compare(make(drafter=sm.NGram(hit=1.0, tp=tp), execution=four, batches=(1,)), found).rows[0]
        for tp in (1, None)
    )
    assert alone.points[0]["memory_bytes"] > 2 * shared.points[0]["memory_bytes"]


def test_what_is_added_holds_the_states_of_candidates() -> None:
    hybrid = sm.load_model("qwen3.5-35b-a3b")
    found, _ = candidates(hybrid, kinds=["mtp"], acceptance=sm.Geometric(0.7))
    (point,) = compare(make(target=hybrid, k=3, batches=(4,), contexts=(0,)), found).rows[0].points
    assert point["memory_bytes"] > 4 * 3 * hybrid.state_bytes


def test_near_one_is_too_close_to_call_and_what_does_not_fit_is_said() -> None:
    found, _ = candidates(LLAMA, kinds=["ngram"], acceptance=sm.Geometric(0.05))
    (pick,) = compare(make(batches=(1,)), found).picks
    assert (pick["best"], pick["verdict"]) == ("ngram", "too close to call")
    siblings, _ = candidates(LLAMA, kinds=["draft-model"], acceptance=sm.Geometric(0.98))
    full = make().memory(0, 2048).max_batch
    (pick,) = compare(make(batches=(full,), contexts=(2048,)), siblings[:1]).picks
    assert pick["best"] is None
    assert pick["verdict"] == "the drafters that pay do not fit"


def test_published_acceptance_is_not_extrapolated() -> None:
    found, _ = candidates(LLAMA, workload="code")
    for row in compare(make(batches=(1,)), found).rows:
        measured = row.candidate.acceptance.measured_k
        assert measured is None or row.points[0]["k"] <= measured


@pytest.mark.parametrize("workload", defaults.workloads())
def test_workloads_are_cited_and_otherwise_marked(workload: str) -> None:
    found, _ = candidates(LLAMA, workload=workload)
    assert any(one.of_workload for one in found)
    assert all(one.citation for one in found)
    plain = {one.label: one.citation for one in candidates(LLAMA)[0]}
    for one in found:
        assert one.of_workload or one.citation == plain[one.label]


def test_a_draft_that_does_not_scale_with_the_target() -> None:
    """A small draft gains little from tensor parallelism, so its share of a round grows.

    Reported of vLLM: issue 4632 (draft tensor-parallel degree), a drafter on a device of its own.
    """
    big = sm.load_model("llama-3.1-70b")
    drafter = sm.DraftModel(sm.load_model("llama-3.2-1b"))
    shares = []
    for tp in (2, 4, 8):
        setup = make(target=big, drafter=drafter, k=4, batches=(1,), execution=sm.Execution(tp=tp))
        (point,) = predict(setup).points
        shares.append(point["T_d"] / point["T_p"])
    assert shares[0] < shares[1] < shares[2]


def test_an_moe_gains_less_than_a_dense_model_at_small_batches() -> None:
    """Verification reads more experts: reported of SGLang (14824) and SpecForge (339)."""
    moe, dense = sm.load_model("qwen3-30b-a3b"), sm.load_model("qwen3-8b")
    law = sm.Geometric(0.6)
    ratio = {}
    for name, model in (("moe", moe), ("dense", dense)):
        setup = make(target=model, drafter=sm.Eagle3(), acceptance=law, k=3, batches=(1, 4, 64))
        ratio[name] = [point["S"] for point in predict(setup).points]
    assert all(m < d for m, d in zip(ratio["moe"][:2], ratio["dense"][:2], strict=True))
    assert ratio["moe"][2] > ratio["dense"][2]


def test_break_even_acceptance_falls_with_context_where_kv_dominates() -> None:
    """With KV read once for all rows, long contexts make verification relatively cheap."""
    setup = make(drafter=sm.Eagle3(), k=4, batches=(128,), contexts=(256, 2048, 16_384))
    even = [point["alpha_break_even"] for point in predict(setup).points]
    assert even[0] > even[1] > even[2]


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figure = tmp_path / "figure.png"
    base = ["compare", "--gpu", "h100", "--batch", "1,64", "--workload", "chat"]
    assert main([*base, "--plot", str(figure)]) == 0
    out = capsys.readouterr().out
    assert "batch 1, context 2048: eagle3 (k = 3, S = " in out
    assert "left out, mtp: llama-3.1-8b carries no MTP block" in out
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert main([*base, "--format", "json", "--drafters", "eagle3,ngram"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["drafter"] for row in result["drafters"]] == ["eagle3", "ngram"]
    assert len(result["picks"]) == 2
    assert main([*base, "--format", "csv"]) == 0
    assert capsys.readouterr().out.startswith("drafter,context,batch,k,S,memory_bytes,fits")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "chess"], "workload must be one of chat, code, math"),
        (["--drafters", "eagle9"], "unknown drafter 'eagle9'; did you mean 'eagle"),
        (["--drafters", "mtp"], "no drafter to compare (mtp: llama-3.1-8b carries no MTP block"),
        (["--drafter", "eagle3"], "--drafter does not go with compare"),
        (["--alpha", "2"], "alpha must be in [0, 1]"),
        (["--k", "0"], "k = 0 leaves nothing to compare"),
        (["--alpha", "0.7", "--workload", "code"], "--workload selects published acceptance"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["compare", "--gpu", "h100", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
