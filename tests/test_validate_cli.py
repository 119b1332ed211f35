"""``validate``, ``fit`` of an engine's rates and ``--engine`` as a person uses them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import specmodel as sm
from specmodel.cli import main
from specmodel.overheads import engine_names, engine_yaml, load_engine
from specmodel.requests import Requests, served

pytestmark = pytest.mark.slow  # seconds together

HEADER = (
    "id,hardware,engine,target_model,drafter_kind,k,batch,speedup,speedup_baseline,"
    "tokens_per_step_G,url,source,context_len"
)
ROWS = """\
a,H100,vLLM v0.10.1,Llama-3.1-8B,eagle3,3,1,1.9,no_spec_same_engine,2.5,u,Table 2 [v1] [/b],1024
b,H100,vLLM v0.10.1,Llama-3.1-8B,eagle3,3,8,1.8,no_spec_same_engine,2.5,u,Table 2 [v1] [/b],1024
c,H100,vLLM v0.10.1,Llama-3.1-8B,eagle3,3,64,1.3,no_spec_same_engine,2.5,u,Table 2 [v1] [/b],1024
d,H100,vLLM v0.10.1,Llama-3.1-8B,eagle9,3,64,1.3,no_spec_same_engine,2.5,u,Table 3,1024
"""
CASES = """\
- id: mine
  url: https://example.org/issue
  engine: vLLM
  version: v0.10.1
  gpu: H100
  n_gpus: 1
  target: Llama-3.1-8B
  draft_method: EAGLE-3
  prompt_len: 1024
  rows:
    - {k: 3, batch_or_concurrency: 8, mean_acceptance_length: 2.5, speedup: 1.6}
"""


class Run:
    """Runs the command and keeps what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> tuple[int, str, str]:
        status = main([str(one) for one in arguments])
        out, err = self._capsys.readouterr()
        return status, out, err

    def json(self, *arguments: str | Path) -> dict[str, Any]:
        status, out, err = self(*arguments, "--format", "json")
        assert (status, err) == (0, "")
        return dict(json.loads(out))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "rows.csv"
    file.write_text(f"{HEADER}\n{ROWS}")
    return file


# -- validate ------------------------------------------------------------------------------------


def test_a_report_for_people(run: Run, table: Path) -> None:
    status, out, err = run("validate", "--results", table)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"specmodel {sm.__version__} | 4 rows"
    assert "median    mean     p90     bias" in out
    assert "Table 2 [v1] [/b]" in out  # as it is, no markup
    assert "on or off: right in " in out
    assert lines[-1] == "  1: drafter eagle9 is not modelled"


def test_a_report_for_machines(run: Run, table: Path) -> None:
    found = run.json("validate", "--results", table)
    assert found["specmodel_version"] == sm.__version__
    summary = found["summary"]
    for errors, n in ((summary["shape"], 2), (summary["given_acceptance"], 2)):
        assert errors["n"] == n
        assert 0 < errors["median"] <= errors["p90"] < 1
        assert errors["mean"] < 1
        assert abs(errors["bias"]) <= errors["mean"] + 1e-12
    for part in ("moe", "research"):
        assert summary["given_acceptance"][part]["n"] == 0
        assert summary["given_acceptance"][part]["median"] is None
    assert summary["given_acceptance"]["interval_only"] == {"n": 0, "held": None}
    assert summary["shape"]["in_study"]["n"] == 0
    decided = summary["decisions"]
    assert (decided["rows"], decided["losses"], decided["always_on_right"]) == (2, 0, 1.0)
    assert set(found["groups"]) >= {"source", "engine", "drafter", "architecture", "batch"}
    for group in found["groups"].values():
        for both in group.values():
            assert set(both) == {"shape", "given_acceptance"}
    assert [row["id"] for row in found["rows"]] == ["a", "b", "c", "d"]
    first, second, _, last = found["rows"]
    assert first["anchors"] == ["engine", "shape"]
    assert (first["shape"], second["anchors"]) == (None, [])
    assert second["measured"] == 1.8
    off = [abs(r["given_acceptance"] / r["measured"] - 1) for r in found["rows"][1:3]]
    assert summary["given_acceptance"]["mean"] == pytest.approx(sum(off) / 2)
    assert (last["device"], last["why"]) == (None, "drafter eagle9 is not modelled")
    assert found["excluded"] == {"drafter eagle9 is not modelled": 1}


def test_the_status_says_whether_medians_are_small_enough(run: Run, table: Path) -> None:
    found = run.json("validate", "--results", table)["summary"]
    largest = max(found[name]["median"] for name in ("shape", "given_acceptance"))
    smallest = min(found[name]["median"] for name in ("shape", "given_acceptance"))
    for most, status in ((largest + 1e-9, 0), (largest - 1e-9, 1), (smallest / 2, 1)):
        code, out, err = run("validate", "--results", table, "--max-median", f"{most:.12g}")
        assert (code, err) == (status, "")
        assert out.startswith("specmodel ")


def test_rows_without_errors_do_not_pass(run: Run, table: Path) -> None:
    table.write_text("\n".join([HEADER, ROWS.splitlines()[3]]))
    assert run("validate", "--results", table, "--max-median", "0")[0] == 1


def test_user_reports(run: Run, tmp_path: Path, table: Path) -> None:
    file = tmp_path / "cases.yaml"
    file.write_text(CASES)
    found = run.json("validate", "--cases", file)
    (row,) = found["rows"]
    assert (row["id"], row["engine"], row["measured"]) == ("mine-1", "vllm-2025", 1.6)
    assert found["summary"]["given_acceptance"]["n"] == 1
    both = run.json("validate", "--cases", file, "--results", table)
    assert len(both["rows"]) == 5
    assert both["groups"]["source"]["mine"]["given_acceptance"]["n"] == 1


def test_each_deployment(run: Run, table: Path) -> None:
    other = ROWS.replace("eagle3", "eagle").replace("Table", "Figure")
    table.write_text(f"{HEADER}\n{ROWS}" + "".join(f"x{line}\n" for line in other.splitlines()))
    for each, n in (("study", 5), ("deployment", 4)):
        found = run.json("validate", "--results", table, "--each", each)
        assert found["summary"]["given_acceptance"]["n"] == n


def test_a_figure_and_a_page(run: Run, table: Path, tmp_path: Path) -> None:
    figure, page = tmp_path / "accuracy.png", tmp_path / "accuracy.md"
    status, _, err = run("validate", "--results", table, "--plot", figure, "--report", page)
    assert (status, err) == (0, "")
    assert figure.read_bytes().startswith(b"\x89PNG")
    text = page.read_text(encoding="utf-8")
    assert "specmodel validate --results rows.csv" in text
    assert "(accuracy.png)" in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--results", "absent.csv"), "absent.csv: no such file"),
        (("--cases", "absent.yaml"), "absent.yaml: no such file"),
        (("--results", "{rows}", "--results", "{rows}"), "two rows have the same id"),
        (("--results", "{rows}", "--max-median", "small"), "max_median must be a number"),
        (("--results", "{rows}", "--max-median", "nan"), "max_median must be >= 0; got nan"),
        (("--results", "{rows}", "--max-median", "-1"), "max_median must be >= 0; got -1"),
        (("--results", "{rows}", "--each", "row"), "row"),
        (("--results", "{rows}", "--format", "csv"), "csv"),
        (("--results", "{rows}", "--plot", "absent/figure.png"), "cannot write"),
        (("--results", "{rows}", "--report", "absent/page.md"), "absent"),
    ],
)
def test_mistakes_are_one_line_and_status_two(
    run: Run, table: Path, arguments: tuple[str, ...], message: str
) -> None:
    status, out, err = run("validate", *(one.format(rows=table) for one in arguments))
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert err.startswith("specmodel: ")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (",1.9,", ",fast,", "rows.csv:2: speedup must be a number; got 'fast'"),
        ("b,H100", "a,H100", "rows.csv:3: id 'a' occurs twice"),
        ("speedup,", "speed,", "rows.csv: no column speedup"),
    ],
)
def test_bad_tables_are_one_line(run: Run, table: Path, old: str, new: str, message: str) -> None:
    table.write_text(table.read_text().replace(old, new, 1))
    status, out, err = run("validate", "--results", table)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_what_ships_is_validated_by_default(run: Run) -> None:
    found = run.json("validate")
    assert len(found["rows"]) >= 250
    for name in ("shape", "given_acceptance"):
        errors = found["summary"][name]
        assert errors["n"] > 20
        assert errors["median"] < errors["p90"]
    assert found["summary"]["decisions"]["series"] > 10


# -- an engine of one's own ----------------------------------------------------------------------

TRUTH = load_engine("vllm-2026")
RATES = "k,batch,tpot_ms,acceptance_length"


def rates(folder: Path, *lines: str) -> Path:
    file = folder / "rates.csv"
    file.write_text("\n".join((RATES, *lines)) + "\n", encoding="utf-8-sig")
    return file


def slow_server(folder: Path, slower: float) -> Path:
    """Write what a server would measure whose step takes so many times as long."""
    engine = replace(TRUTH, step=slower * TRUTH.step)
    lines = []
    for k, B in ((0, 1), (0, 8), (3, 1), (3, 8)):
        one = served(
            sm.load_device("h100"),
            sm.load_model("llama-3.1-8b"),
            sm.Eagle3(),
            Requests.alike(2048),
            B=B,
            k=max(k, 1),
            execution=sm.Execution(),
        )
        law = one.accepted_to(2.4) if k else None
        lines.append(f"{k},{B},{1e3 * B / one.throughput(engine, law)},{2.4 if k else ''}")
    return rates(folder, *lines)


FIT = ("--gpu", "h100", "--model", "llama-3.1-8b", "--drafter", "eagle3")


def test_a_fitted_engine_predicts_its_own_rates(run: Run, tmp_path: Path) -> None:
    table, output = slow_server(tmp_path, 10.0), tmp_path / "mine.yaml"
    status, out, err = run("fit", table, "-o", output, *FIT)
    assert (status, err) == (0, "")
    assert "mine (from vLLM, 2026" in out
    engine = load_engine(output)
    assert engine.step == pytest.approx(10 * TRUTH.step, rel=0.3)
    assert (engine.captured_rows, engine.max_running) == (512, 1024)
    assert engine.unknown == frozenset()
    assert engine.studies == {"rates.csv": "rates.csv, 4 rows"}
    base = ("predict", "--gpu", "h100", "--drafter", "eagle3", "--batch", "8", "--k", "3",
            "--acceptance-length", "2.4", "--context", "2k")  # fmt: skip
    found = run.json(*base, "--engine", output)
    (point,), (without,) = found["points"], run.json(*base)["points"]
    assert found["inputs"]["engine"] == "mine"
    assert point["T_h"] == pytest.approx(engine.step + 8 * engine.step_sequence, rel=1e-12)
    assert point["T_o"] > point["T_h"]
    assert (without["T_h"], without["T_o"]) == (0, 0)
    measured = [float(line.split(",")[2]) for line in table.read_text().splitlines()[1:]]
    plain = 1e3 * (point["T_p"] + point["T_h"])
    assert plain == pytest.approx(measured[1], rel=0.02)
    assert plain / point["S"] == pytest.approx(measured[3], rel=0.02)
    _, text, _ = run(*base, "--engine", output)
    assert "host time of mine (from vLLM" in text
    assert "fitted to rates.csv, 4 rows" in text


def test_a_fit_for_machines(run: Run, tmp_path: Path) -> None:
    found = run.json("fit", slow_server(tmp_path, 10.0), "-o", tmp_path / "mine.yaml", *FIT)
    assert found["engine"] == "mine"
    assert found["values"]["step"]["told"] > 0.6
    assert found["values"]["lookup"]["told"] == pytest.approx(0, abs=1e-12)
    assert found["values"]["step"]["value"] == load_engine(tmp_path / "mine.yaml").step
    assert [(row["k"], row["batch"]) for row in found["rows"]] == [(0, 1), (0, 8), (3, 1), (3, 8)]
    for row in found["rows"]:
        assert row["before"] < row["tpot"]
        assert row["after"] == pytest.approx(row["tpot"], rel=0.02)


def test_a_fit_starts_where_asked(run: Run, tmp_path: Path) -> None:
    table, output = rates(tmp_path, "0,1,8,"), tmp_path / "mine.yaml"
    assert run("fit", table, "-o", output, *FIT, "--engine", "hf-eager")[0] == 0
    assert load_engine(output).captured_rows == 0
    assert "Hugging Face" in load_engine(output).title


def test_a_fit_verifies_as_its_engine_does(run: Run, tmp_path: Path) -> None:
    """An engine that rereads the KV cache for each draft takes longer before any row is seen."""
    table = rates(tmp_path, "3,64,20,2.4")
    before = []
    for name in ("rereads", "not"):
        base = tmp_path / f"{name}.yaml"
        base.write_text(engine_yaml(replace(TRUTH, kv_reread=float(name == "rereads"))))
        output = tmp_path / "mine.yaml"
        found = run.json("fit", table, "-o", output, *FIT, "--engine", base)
        before.append(found["rows"][0]["before"])
        assert load_engine(output).kv_reread == (name == "rereads")
    assert before[0] > 1.2 * before[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0,1,fast,", "rates.csv:2: tpot_ms must be a number; got 'fast'"),
        ("0,1,0,", "rates.csv:2: batch and tpot_ms must be above 0"),
        ("0,0,8,", "rates.csv:2: batch and tpot_ms must be above 0"),
        ("0,1,nan,", "rates.csv:2: tpot_ms must be from 0; got nan"),
        ("1.5,1,8,2", "rates.csv:2: k must be a whole number from 0; got 1.5"),
        ("-1,1,8,2", "rates.csv:2: k must be a whole number from 0; got -1"),
        ("3,1,8,", "rates.csv:2: a row with drafts needs acceptance_length"),
        ("3,1,8,x", "rates.csv:2: acceptance_length must be a number; got 'x'"),
        ("3,1,8,4.5", "rates.csv:2: acceptance_length: G = 4.5 at k = 3: no acceptance gives"),
        ("3,1", "rates.csv:2: tpot_ms must be a number; got None"),
        ("", "rates.csv: holds no rows"),
        ("0,1,8,\n\xff", "rates.csv: not a text file in UTF-8"),
    ],
)
def test_bad_rates_name_the_line(run: Run, tmp_path: Path, line: str, message: str) -> None:
    table, output = tmp_path / "rates.csv", tmp_path / "mine.yaml"
    padding = " " * 20_000 if "\xff" in line else ""  # beyond what the first look reads
    table.write_bytes(f"{RATES}\n{padding}{line}\n".encode("latin-1"))
    status, out, err = run("fit", table, "-o", output, *FIT)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not output.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "h100"), "an engine's rates need --model"),
        (("--model", "llama-3.1-8b"), "an engine's rates need --gpu"),
        ((*FIT, "--context", "1k,2k"), "an engine's rates have one context; got 1k,2k"),
        ((*FIT, "--context", "long"), "context must be a whole number"),
        ((*FIT, "--engine", "vllm-2052"), "unknown engine 'vllm-2052'"),
        ((*FIT, "--tp", "two"), "tp must be a whole number; got 'two'"),
        ((*FIT, "--plot", "x.png"), "--plot does not go with an engine's rates"),
        ((*FIT, "--link-bandwidth", "5"), "--link-bandwidth does not go with an engine's rates"),
        ((*FIT[:4], "--drafter", "eagle9"), "drafter must be one of"),
    ],
)
def test_mistakes_of_a_fit(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    table, output = rates(tmp_path, "0,1,8,"), tmp_path / "mine.yaml"
    status, out, err = run("fit", table, "-o", output, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not output.exists()


def test_an_engine_file_is_named_as_one(run: Run, tmp_path: Path) -> None:
    """`--engine` takes a name or a file, and tells them apart by its ending."""
    status, _, err = run("fit", rates(tmp_path, "0,1,8,"), "-o", tmp_path / "mine", *FIT)
    assert (status, "ends in .yaml" in err) == (2, True)


# -- list and --engine ---------------------------------------------------------------------------


def test_engines_are_listed(run: Run) -> None:
    _, table, _ = run("list", "engines")
    _, text, _ = run("list", "engines", "--format", "json")
    _, lines, _ = run("list", "engines", "--format", "csv")
    found = {row["name"]: row for row in json.loads(text)}
    assert tuple(found) == engine_names()
    assert len(lines.splitlines()) == len(found) + 1
    for name, row in found.items():
        assert name in table
        engine = load_engine(name)
        for value in ("step", "round", "round_row", "head_pass", "draft_layer", "eager_layer"):
            wanted = None if value in engine.unknown else getattr(engine, value)
            assert row[value] == wanted
        assert row["studies"] == len(engine.studies)
    assert found["hf-eager"]["captured_rows"] == 0
    assert found["sglang"]["captured_rows"] is None


@pytest.mark.parametrize("name", ["hf-eager", "vllm-2025", "sglang"])
def test_engines_by_name_predict(run: Run, name: str) -> None:
    base = ("predict", "--gpu", "h100", "--batch", "1,64", "--k", "3", "--alpha", "0.7")
    found = run.json(*base, "--engine", name)
    engine = load_engine(name)
    for point in found["points"]:
        B = point["batch"]
        T_h = engine.step + B * engine.step_sequence
        assert point["T_h"] == pytest.approx(T_h, rel=1e-12)
        T_o = T_h + engine.round + 3 * B * engine.round_row
        assert point["T_o"] == pytest.approx(T_o, rel=1e-12)
        cost = (point["T_d"] + point["T_v"] + point["T_o"]) / (point["T_p"] + point["T_h"])
        assert point["S"] == pytest.approx(point["G"] / cost, rel=1e-9)
        assert sum(point["time_shares"].values()) == pytest.approx(1)
    if name == "sglang":
        _, text, _ = run(*base, "--engine", name)
        assert f"host time of {engine.title}" in text
        assert "with speculation it runs 48 sequences at most" in " ".join(text.split())
        assert "T_h = T_o = 0" not in text


@pytest.mark.parametrize("command", ["predict", "compare", "explain"])
def test_engines_that_are_none(run: Run, command: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("schema: 1\nname: x\ntitle: X\nsources: {a: {title: t}}\nfits: {}\n")
    for engine, message in (
        ("vllm-2o25", "unknown engine 'vllm-2o25'; did you mean 'vllm-2025'?"),
        ("absent.yaml", "absent.yaml: no such file"),
        (str(bad), "bad.yaml: sources: a: url: missing"),
    ):
        status, out, err = run(command, "--gpu", "h100", "--engine", engine)
        assert (status, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1
