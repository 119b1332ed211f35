"""The command line as a person uses it: answers, forms, and one line for every mistake."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from samples import LLAMA, MINIMAL_DEVICE

import specmodel as sm
from specmodel.cli import main
from specmodel.drafters import KINDS

FIELDS = """
batch context k W G T_p T_v T_d T_h T_o round_cost S regime B_p_star B_v_star gemm_turn_rows k_star
W_star S_star alpha_break_even tokens_per_second_per_sequence tokens_per_second mfu_decode
mbu_decode mfu_verify mbu_verify memory_bytes max_batch fits devices_needed
""".split()


class Run:
    """Runs the command and keeps what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        status = main(list(arguments))
        out, err = self._capsys.readouterr()
        return status, out, err

    def json(self, *arguments: str) -> dict[str, Any]:
        status, out, err = self(*arguments, "--format", "json")
        assert (status, err) == (0, "")
        return dict(json.loads(out))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


def test_the_first_command(run: Run) -> None:
    status, out, err = run("predict", "--gpu", "h100")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert "basis: calibrated" in lines[0]
    assert "NVIDIA H100 SXM5" in lines[0]
    assert lines[2].startswith("speculation pays up to batch ")
    assert lines[2].endswith("the drafter no longer fits")
    for text in (
        "drafter: eagle3",
        "acceptance: unconditional rates",
        "vLLM tests",
        "R = 0",
        "T_h = T_o = 0",
    ):
        assert text in out


def test_points_have_every_field(run: Run) -> None:
    result = run.json("predict", "--gpu", "h100", "--batch", "1,64", "--context", "1k,4k")
    assert set(result) >= {"inputs", "basis", "points"}
    assert [(p["context"], p["batch"]) for p in result["points"]] == [
        (1024, 1), (1024, 64), (4096, 1), (4096, 64),
    ]  # fmt: skip
    for point in result["points"]:
        assert set(point) >= set(FIELDS)
        assert point["regime"] in ("I", "II", "III")
        assert point["W"] == point["k"] + 1
        assert point["S"] == pytest.approx(point["G"] / point["round_cost"], rel=1e-12)
        cost = (point["T_d"] + point["T_v"] + point["T_o"]) / (point["T_p"] + point["T_h"])
        assert point["round_cost"] == pytest.approx(cost, rel=1e-12)
        each = point["tokens_per_second_per_sequence"]
        assert each == pytest.approx(point["S"] / (point["T_p"] + point["T_h"]), rel=1e-12)
        assert point["tokens_per_second"] == pytest.approx(each * point["batch"], rel=1e-12)
        assert sum(point["time_shares"].values()) == pytest.approx(1)
        assert point["fits"] is True
        assert point["devices_needed"] == 1


def test_ideal_level_reference_figures(run: Run) -> None:
    """H100 SXM, Llama-3.1-8B bf16, k = 4, alpha = 0.7, at the ideal level."""
    base = (
        "predict",
        "--gpu",
        "h100-sxm",
        "--level",
        "ideal",
        "--k",
        "4",
        "--alpha",
        "0.7",
        "--batch",
        "1",
    )
    empty = run.json(*base, "--context", "0")
    assert empty["basis"] == "datasheet"
    (p,) = empty["points"]
    assert p["gemm_turn_rows"] == pytest.approx(295.34, abs=0.01)
    assert p["B_p_star"] == pytest.approx(295.35, abs=0.01)
    assert p["B_v_star"] == pytest.approx(59.07, abs=0.005)
    assert p["B_p_star"] / p["B_v_star"] == pytest.approx(5, rel=1e-12)
    assert p["G"] == pytest.approx(2.7731, abs=5e-5)
    assert p["T_p"] == pytest.approx(4.4806e-3, abs=1e-7)
    (p,) = run.json(*base, "--context", "1k")["points"]
    assert p["B_p_star"] is None
    assert p["B_v_star"] == pytest.approx(116.4, abs=0.05)


def test_moe_reason_is_expert_coverage(run: Run) -> None:
    arguments = ("predict", "--gpu", "h100", "--model", "qwen3-30b-a3b", "--drafter", "eagle3",
                 "--k", "3", "--context", "1k", "--batch", "1", "--level", "ideal")  # fmt: skip
    _, out, _ = run(*arguments, "--alpha", "0.6")
    assert "expert coverage, 29 of 128 experts a layer are read instead of 8" in out
    assert "speculation pays in part: off for 1 to 6, k = 3 for 7 to " in out
    speeds = [run.json(*arguments, "--alpha", a)["points"][0]["S"] for a in ("0.6", "0.7", "0.8")]
    assert speeds == pytest.approx([0.81, 0.95, 1.10], abs=0.01)


def test_off_is_said_as_readily(run: Run) -> None:
    _, out, _ = run("predict", "--gpu", "h100", "--alpha", "0.05", "--drafter", "draft-model")
    assert "leave speculation off: no k pays" in out
    result = run.json("predict", "--gpu", "h100", "--alpha", "0.05", "--drafter", "draft-model")
    for point in result["points"]:
        assert (point["k"], point["S"], point["T_d"], point["round_cost"]) == (0, 1.0, 0.0, 1.0)
        assert point["T_v"] == point["T_p"]


def test_schedule_sentence(run: Run) -> None:
    arguments = ("predict", "--gpu", "a100", "--context", "256", "--alpha", "0.6")
    arguments = (*arguments, "--basis", "generic")  # fitted tiles let S rise and fall about 1
    (answer,) = run.json(*arguments)["answers"]
    runs = answer["schedule"]
    assert runs[0][0] == 1
    assert runs[-1][2] == 0
    last_on = runs[-2][1]
    assert answer["text"].startswith(f"speculation pays up to batch {last_on}: k = {runs[0][2]}")
    assert answer["text"].endswith(f"above {last_on} off")


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"block-diffusion"}))
def test_every_drafter_by_name(run: Run, kind: str) -> None:
    model = "deepseek-v3" if kind == "mtp" else "llama-3.1-8b"
    setup = ("predict", "--gpu", "h100", "--model", model, "--drafter", kind, "--batch", "1,32")
    result = run.json(*setup, "--k", "3")
    assert result["inputs"]["drafter"] == kind
    assert "acceptance" in result["inputs"]["assumed"]
    for point in result["points"]:
        assert point["W"] == (42 if kind == "lookahead" else 4)
        assert (point["T_d"] == 0) == (kind in ("ngram", "lookahead"))
        assert point["T_v"] > point["T_p"]
        assert point["S"] == pytest.approx(point["G"] / point["round_cost"], rel=1e-12)


def test_a_users_own_files(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "mine.yaml").write_text(MINIMAL_DEVICE)
    result = run.json("predict", "--profile", str(tmp_path / "mine.yaml"), "--model", str(tmp_path))
    assert result["inputs"]["gpu"] == "x"
    assert result["inputs"]["model"] == tmp_path.name
    assert not result["points"][0]["fits"]
    status, out, _ = run("show", str(tmp_path / "mine.yaml"))
    assert (status, "memory_bandwidth" in out) == (0, True)


def test_a_model_that_does_not_fit(run: Run) -> None:
    arguments = ("predict", "--gpu", "l4", "--model", "llama-3.1-70b", "--batch", "1")
    (point,) = run.json(*arguments)["points"]
    assert point["fits"] is False
    assert point["max_batch"] == 0
    assert point["devices_needed"] == 8
    _, out, _ = run(*arguments)
    assert "1 device(s) of 24 GB cannot hold it; 8 would (--tp 8)" in out
    fitting = run.json(*arguments, "--tp", "8")
    assert fitting["points"][0]["fits"] is True


def test_throughput_at_the_largest_batch_is_compared(run: Run) -> None:
    (answer,) = run.json("predict", "--gpu", "h100", "--drafter", "draft-model")["answers"]
    assert answer["max_batch_with_drafter"] < answer["max_batch_without_drafter"]
    assert answer["tokens_per_second_at_max_batch_without_drafter"] > 0


def test_dtypes_and_aliases(run: Run) -> None:
    base = ("predict", "--gpu", "h100", "--batch", "1")
    sixteen = run.json(*base)["points"][0]["T_p"]
    for alias in ("bf16", "bfloat16", "BF16", "fp16"):
        assert run.json(*base, "--dtype", alias)["points"][0]["T_p"] == pytest.approx(sixteen)
    wide = run.json(*base, "--dtype", "fp32")
    assert wide["inputs"]["weights"] == wide["inputs"]["kv_dtype"] == "float32"
    assert wide["points"][0]["T_p"] > 1.8 * sixteen
    fp8 = run.json(*base, "--weights", "fp8", "--kv-dtype", "fp8")
    assert fp8["inputs"]["dtype"] == "bfloat16"
    assert fp8["points"][0]["T_p"] < 0.75 * sixteen


def test_csv_has_a_row_a_point(run: Run) -> None:
    _, out, _ = run("predict", "--gpu", "h100", "--batch", "1-4", "--format", "csv")
    rows = list(csv.DictReader(out.splitlines()))
    assert [row["batch"] for row in rows] == ["1", "2", "3", "4"]
    assert set(rows[0]) >= set(FIELDS)


@pytest.mark.parametrize("what", ["gpus", "models", "drafters"])
def test_lists(run: Run, what: str) -> None:
    _, table, _ = run("list", what)
    _, text, _ = run("list", what, "--format", "json")
    names = [row["name"] for row in json.loads(text)]
    assert all(name in table for name in names)
    expected = {"gpus": sm.device_names(), "models": sm.model_names(), "drafters": tuple(KINDS)}
    assert tuple(names) == expected[what]


@pytest.mark.parametrize("name", [n for n in sm.model_names() if "eagle3" not in n])
def test_every_model_has_an_answer_by_default(run: Run, name: str) -> None:
    (point,) = run.json("predict", "--gpu", "b200", "--model", name, "--batch", "1")["points"]
    assert point["S"] >= 1


def test_every_device_has_an_answer(run: Run) -> None:
    for name in sm.device_names():
        flops = sm.load_device(name).peak_flops
        dtype = "bf16" if "bfloat16" in flops else "fp16"
        result = run.json("predict", "--gpu", name, "--batch", "1", "--dtype", dtype)
        assert result["points"][0]["T_p"] > 0


def test_a_device_without_bfloat16(run: Run, tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(MINIMAL_DEVICE.replace("bfloat16", "float16"))
    base = ("predict", "--profile", str(tmp_path / "old.yaml"), "--batch", "1")
    status, out, err = run(*base)
    assert (status, out) == (2, "")
    assert "x has no bfloat16 arithmetic (it has float16: use one)" in err
    for level in ("ideal", "operators"):
        result = run.json(*base, "--dtype", "fp16", "--drafter", "draft-model", "--level", level)
        assert result["points"][0]["T_p"] > 0


def test_the_draft_model_runs_in_the_format_asked_for(run: Run) -> None:
    base = ("predict", "--gpu", "h100", "--drafter", "draft-model", "--k", "3", "--batch", "1")
    sixteen, wide = (run.json(*base, "--dtype", d)["points"][0]["T_d"] for d in ("bf16", "fp32"))
    assert wide > 1.5 * sixteen


def test_extrapolated_acceptance_is_noted(run: Run) -> None:
    base = ("predict", "--gpu", "h100", "--basis", "generic", "--batch", "1", "--acceptance-rates")
    (note,) = run.json(*base, "0.9,0.8")["warnings"]
    assert "measured up to k = 2" in note
    (note,) = run.json(*base, "0.9,0.8", "--k", "2")["warnings"]  # the best k beside it
    assert "asked for k = " in note
    assert run.json(*base, "0.9,0.1,0.01")["warnings"] == []


def test_break_evens_of_an_off_point_are_of_its_best_k(run: Run) -> None:
    arguments = ("predict", "--gpu", "h100", "--alpha", "0.05", "--drafter", "draft-model")
    (point,) = run.json(*arguments, "--batch", "1")["points"]
    assert (point["k"], point["break_even_k"]) == (0, 1)
    assert point["alpha_break_even"] > 0.05
    assert 0 < point["T_d_break_even"] < point["T_p"]


def test_the_largest_batch_is_of_the_k_it_yields(run: Run) -> None:
    base = ("predict", "--gpu", "h100", "--drafter", "medusa")
    (answer,) = run.json(*base)["answers"]
    best = max(
        (run.json(*base, "--k", str(k))["answers"][0] for k in range(1, 9)),
        key=lambda a: a["tokens_per_second_at_max_batch_with_drafter"],
    )
    for name in ("max_batch_with_drafter", "tokens_per_second_at_max_batch_with_drafter"):
        assert answer[name] == best[name]


def test_show_model(run: Run) -> None:
    shown = run.json("show", "deepseek-v3")
    assert shown["total_params"] == 671_026_404_352
    assert shown["active_params"] == 37_552_282_624
    assert shown["kv_elements_per_token"] == 35_136
    assert shown["weight_bytes"] > 671e9
    assert shown["layers"] == {"MLA + dense": 3, "MLA + MoE 256 top-8": 58}
    assert run.json("show", "H100 SXM")["rho"]["bfloat16"] == pytest.approx(295.34, abs=0.01)


def test_plot_is_written(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "figure.png"
    status, _, _ = run("predict", "--gpu", "h100", "--context", "1k,8k", "--plot", str(file))
    assert status == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    for off in (("--alpha", "0.02"), ("--k", "0")):  # nothing to shade but off
        file.unlink()
        assert run("predict", "--gpu", "h100", *off, "--plot", str(file))[0] == 0
        assert file.read_bytes().startswith(b"\x89PNG")


def test_explain_prints_the_derivation(run: Run) -> None:
    status, out, err = run(
        "explain", "--gpu", "h100", "--alpha", "0.7", "--k", "4", "--context", "0"
    )
    assert (status, err) == (0, "")
    for text in ("B_p* = N*rho*s/(c - kappa*rho)", "B_p* = 295.354", "= 2.7731", "LambertW"):
        assert text in out


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--model", "deepseek-v3"),
        ("--drafter", "ngram", "--hit-rate", "0.3", "--batch", "256"),
        ("--alpha", "0.01"),
        ("--weights", "fp8", "--tp", "2"),
    ],
)
def test_explain_agrees_with_predict(run: Run, arguments: tuple[str, ...]) -> None:
    status, out, err = run("explain", "--gpu", "h100", *arguments)
    assert (status, err) == (0, "")
    (*_, line) = (x for x in out.splitlines() if x.startswith("   there at k"))
    first = run.json("predict", "--gpu", "h100", *arguments)["points"][0]
    assert f"k = {first['k']}: " in line
    assert line.endswith(f"S = {first['S']:.4f}")
    (shown,) = (x for x in out.splitlines() if x.startswith("   here regime"))
    k = int(out.splitlines()[1].split("k = ")[1].split()[0])
    ideal = run.json("predict", "--gpu", "h100", *arguments, "--level", "ideal", "--k", str(k))
    assert shown.endswith(f"= {ideal['points'][0]['S']:.4f}")
    assert ("off is better" in out) == (first["k_star"] == 0)


@pytest.mark.parametrize("form", [(), ("--latex",)])
def test_explain_of_k_0_shows_the_best_k(run: Run, form: tuple[str, ...]) -> None:
    reason = "k = 0 was asked for and leaves nothing to derive"
    best = run.json("predict", "--gpu", "h100", "--batch", "1")["points"][0]["k"]
    _, pays, _ = run("explain", "--gpu", "h100", "--k", "0", *form)
    assert f"shown for k = {best}, the best k: {reason}" in pays
    assert "off is better" not in pays
    _, loses, _ = run("explain", "--gpu", "h100", "--k", "0", "--alpha", "0.01", *form)
    assert f"shown for k = 1, the best k from 1 on: {reason} (off is better here)" in loses
    _, asked, _ = run("explain", "--gpu", "h100", "--k", "4", "--alpha", "0.01", *form)
    assert "shown for k = 4 (off is better here)" in asked


BASE = ("predict", "--gpu", "h100")
BAD = [
    ((*BASE, "--alpha", "1.3"), "alpha must be in [0, 1]; got 1.3"),
    ((*BASE, "--alpha", "-0.1"), "alpha must be in [0, 1]; got -0.1"),
    ((*BASE, "--alpha", "nan"), "alpha must be in [0, 1]; got nan"),
    ((*BASE, "--alpha", "high"), "alpha must be a number; got 'high'"),
    ((*BASE, "--k", "-1"), "k must be in [0, 1000] token; got -1"),
    ((*BASE, "--k", "2.5"), "k must be a whole number; got '2.5'"),
    ((*BASE, "--k", "many"), "k must be a whole number; got 'many'"),
    ((*BASE, "--k-max", "-3"), "k_max must be in"),
    ((*BASE, "--batch", "0"), "batch must be from 1 to 1,000,000,000; got 0"),
    ((*BASE, "--batch", "-4"), "batch must be a whole number (1k = 1,024); got '-4'"),
    ((*BASE, "--batch", "x"), "batch must be a whole number"),
    ((*BASE, "--batch", "1.5"), "batch must be a whole number"),
    ((*BASE, "--batch", ","), "batch must be a whole number"),
    ((*BASE, "--batch", "8-1"), "batch range must go up"),
    ((*BASE, "--context", "-1"), "context must be a whole number"),
    ((*BASE, "--context", "1q"), "context must be a whole number"),
    ((*BASE, "--acceptance-rates", "0.4,0.6"), "must not increase; got 0.4 then 0.6"),
    ((*BASE, "--acceptance-rates", "0.4,x"), "acceptance rates must be a number; got 'x'"),
    (
        (*BASE, "--acceptance-length", "5.5", "--k", "4"),
        "acceptance length must be in [1, 5] token",
    ),
    ((*BASE, "--acceptance-length", "2.5"), "needs the k it was measured at"),
    ((*BASE, "--alpha", "0.5", "--acceptance-length", "2"), "acceptance is given twice"),
    (("predict", "--gpu", "h1000"), "unknown GPU 'h1000'; did you mean 'h100'?"),
    (("predict",), "give --gpu NAME"),
    ((*BASE, "--model", "llama-3.1-9b"), "unknown model 'llama-3.1-9b'; did you mean"),
    ((*BASE, "--model", "absent/config.json"), "absent/config.json: no such file"),
    ((*BASE, "--drafter", "eagle4"), "drafter must be one of"),
    ((*BASE, "--drafter", "mtp"), "carries no MTP block"),
    ((*BASE, "--drafter", "block-diffusion"), "needs its head's config.json (--draft)"),
    ((*BASE, "--drafter", "ngram", "--draft", "llama-3.2-1b"), "takes no draft model"),
    ((*BASE, "--drafter", "eagle3", "--draft", "llama-3.2-1b"), "cannot be the draft of"),
    ((*BASE, "--drafter", "mtp", "--draft", "llama-3.1-8b-eagle3"), "an eagle3 head"),
    ((*BASE, "--draft", "qwen3-0.6b"), "shares the target's tokenizer"),
    ((*BASE, "--model", "llama-3.1-8b-eagle3"), "is a draft head: give it with --draft"),
    ((*BASE, "--batch", "1-100000"), "batch lists at most 10,000 values"),
    ((*BASE, "--batch", "1-1000", "--context", "1-1000"), "at most 2,000 points"),
    ((*BASE, "--batch", "9" * 30), "batch must be from 1 to 1,000,000,000; got 999"),
    ((*BASE, "--dtype", ""), "--dtype must not be empty"),
    ((*BASE, "--model", ""), "--model must not be empty"),
    ((*BASE, "--draft-tp", "0"), "the drafter's tp must be >= 1"),
    (
        (*BASE, "--model", "qwen2-7b", "--drafter", "draft-model", "--tp", "4"),
        "qwen2-0.5b: tp must",
    ),
    (("show", ""), "must be named"),
    ((*BASE, "--alpha", "inf"), "alpha must be in [0, 1]; got inf"),
    ((*BASE, "--model", "mistral-7b-v0.3", "--drafter", "parallel"), "needs a draft model for"),
    ((*BASE, "--hit-rate", "0.5"), "hit_rate does not belong to drafter eagle3"),
    ((*BASE, "--drafter", "ngram", "--hit-rate", "2"), "hit rate must be in [0, 1]; got 2"),
    ((*BASE, "--tp", "3"), "32 attention heads; got 3 (2, 4, 8, 16, 32 would)"),
    ((*BASE, "--tp", "0"), "tp must be >= 1; got 0"),
    ((*BASE, "--tp", "two"), "tp must be a whole number; got 'two'"),
    ((*BASE, "--dtype", "float17"), "dtype must be one of"),
    ((*BASE, "--dtype", "fp8"), "--weights quantises"),
    (("predict", "--gpu", "a100", "--weights", "fp8"), "a100-sxm-80gb has no fp8 arithmetic"),
    ((*BASE, "--kv-reread", "2"), "kv_reread must be in [0, 1]; got 2"),
    ((*BASE, "--level", "best"), "best"),
    ((*BASE, "--format", "xml"), "xml"),
    ((*BASE, "--nonsense"), "nonsense"),
    ((*BASE, "--profile", "x.yaml"), "give --gpu or --profile, not both"),
    (("predict", "--profile", "absent.yaml"), "absent.yaml: no such file"),
    (("show", "nothing"), "unknown GPU or model 'nothing'"),
    (("show", "absent.json"), "absent.json: no such file"),
    (("list", "everything"), "everything"),
    (("explain", "--gpu", "h100", "--alpha", "2"), "alpha must be in [0, 1]"),
    (("explain", "--gpu", "h100", "--batch", "1,8"), "takes one batch (--batch); got 1, 8"),
    (("explain", "--gpu", "h100", "--context", "1-9"), "(--context); got 1, 2, 3, 4, ..."),
    (("explain", "--gpu", "h100", "--k-max", "0"), "k_max >= 1 token"),
]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", '{"model_type": "llama"', "not valid JSON"),
        ("config.json", '{"model_type": "gpt9"}', "'gpt9' is not supported"),
        ("config.json", "", "not valid JSON"),
        ("config.json", "1" * 5000, "not valid JSON"),
        ("x.yaml", MINIMAL_DEVICE.replace("1.0e+12", "!!python/name:os.system"), "not valid YAML"),
        ("x.yaml", MINIMAL_DEVICE.replace("value: 1.0e+12", "value: '1'"), "must be a number"),
        ("x.yaml", MINIMAL_DEVICE.replace("source: s}", "source: [s]}"), "must be a string"),
        ("x.yaml", MINIMAL_DEVICE.replace("1.0e+12", "9" * 400), "must be a number; got 999"),
    ],
)
def test_bad_files_are_one_line(
    run: Run, tmp_path: Path, name: str, text: str, message: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    flag = "--model" if name == "config.json" else "--profile"
    gpu = ("--gpu", "h100") if flag == "--model" else ()
    for arguments in (("predict", *gpu, flag, str(file)), ("show", str(file))):
        status, out, err = run(*arguments)
        assert (status, out) == (2, "")
        assert message in err
        assert str(file) in err
        assert err.count("\n") == 1


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda x: " ".join(x)[:60])
def test_mistakes_are_one_line_and_status_two(
    run: Run, arguments: tuple[str, ...], message: str
) -> None:
    status, out, err = run(*arguments)
    assert status == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert err.startswith("specmodel: ")


def test_a_figure_that_cannot_be_written_prints_nothing(run: Run, tmp_path: Path) -> None:
    for name, message in (
        ("absent/a.png", "absent: no such folder"),
        ("a.xyz", "must end in .png"),
    ):
        status, out, err = run(*BASE, "--plot", str(tmp_path / name))
        assert (status, out) == (2, "")
        assert err.count("\n") == 1
        assert message in err
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_on_a_mistake(run: Run, tmp_path: Path) -> None:
    status, _, _ = run(*BASE, "--alpha", "7", "--plot", str(tmp_path / "figure.png"))
    assert status == 2
    assert not list(tmp_path.iterdir())


def test_a_shown_device_can_be_edited_and_given_back(run: Run, tmp_path: Path) -> None:
    status, out, _ = run("show", "h100", "--format", "yaml")
    assert status == 0
    file = tmp_path / "mine.yaml"
    file.write_text(out.replace("name: h100-sxm", "name: mine"), encoding="utf-8")
    mine = run.json("predict", "--profile", str(file), "--batch", "8")
    shipped = run.json("predict", "--gpu", "h100", "--batch", "8")
    assert mine["inputs"]["gpu"] == "mine"
    assert mine["points"] == shipped["points"]


def test_an_interrupt_while_the_command_loads_is_silent() -> None:
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'specmodel.cli.main':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from specmodel.__main__ import run\n"
        "assert 'numpy' not in sys.modules\n"
        "run()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)  # noqa: S603
    assert (done.returncode, done.stderr) == (130, "")


def test_an_argument_that_is_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--gpu", "h100", "--model", "x\udcff.json"]) == 2
    assert "holds bytes that are no UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["Llama-3", "Qwen2.5", "llama-2"])
def test_a_family_names_its_models(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--gpu", "h100", "--model", name]) == 2
    assert f"unknown model '{name}' is a family: say which, such as" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "file", "message"),
    [
        ("--profile", "hardware_profiles/engines/vllm-2025.yaml", "is an engine's file, for"),
        ("--engine", "hardware_profiles/h100-sxm.yaml", "is a device's file, for --profile or"),
        ("--model", "hardware_profiles/h100-sxm.yaml", "is a device's file, for --profile"),
        ("--profile", "specmodel/data/models/llama-3.1-8b.json", "is a model's description, for"),
    ],
)
def test_a_file_of_another_kind_is_named(
    option: str, file: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = [] if option == "--profile" else ["--gpu", "h100"]
    assert main(["predict", *gpu, option, str(Path(__file__).parents[1] / file)]) == 2
    assert message in capsys.readouterr().err
