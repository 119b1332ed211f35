"""``validate``, ``fit`` of an engine's rates and ``--engine`` as a person uses them."""

from __future__ import annotations

import json
import os
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
        (("--results", "{rows}", "--plot", "absent/figure.png"), "absent: no such folder"),
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
        found = run.json("fit", table, "-o", output, *FIT, "--engine", base, "--overwrite")
        before.append(found["rows"][0]["before"])
        assert load_engine(output).kv_reread == (name == "rereads")
    assert before[0] > 1.2 * before[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0,1,fast,", "rates.csv:2: tpot_ms must be a number; got 'fast'"),
        ("0,1,0,", "rates.csv:2: tpot_ms must be above 0; got 0"),
        ("0,1,-7,", "rates.csv:2: tpot_ms must be in [0, 1e+09]; got -7"),
        ("0,1,inf,", "rates.csv:2: tpot_ms must be in [0, 1e+09]; got inf"),
        ("0,1,nan,", "rates.csv:2: tpot_ms must be a number; got 'nan'"),
        ("0,1,,", "rates.csv:2: tpot_ms is missing"),
        ("3,1", "rates.csv:2: tpot_ms is missing"),
        ("0,0,8,", "rates.csv:2: batch must be in [1, 1e+06]; got 0"),
        ("0,2e6,8,", "rates.csv:2: batch must be in [1, 1e+06]; got 2e+06"),
        ("1.5,1,8,2", "rates.csv:2: k must be a whole number; got 1.5"),
        ("-1,1,8,2", "rates.csv:2: k must be in [0, 1000]; got -1"),
        ("1001,1,8,2", "rates.csv:2: k must be in [0, 1000]; got 1001"),
        ("3,1,8,", "rates.csv:2: acceptance_length is missing; rows with k > 0 need it"),
        ("3,1,8,x", "rates.csv:2: acceptance_length must be a number; got 'x'"),
        ("3,1,8,4.5", "rates.csv:2: acceptance_length must be in [1, 4] at k = 3, the bonus"),
        ("3,1,8,0.9", "rates.csv:2: acceptance_length must be in [1, 4] at k = 3, the bonus"),
        ("0,1,8,2", "rates.csv:2: acceptance_length must be 1 at k = 0; got 2"),
        ("3,1,4,29,2,29", "rates.csv:2: more cells than columns"),
        ('0,1,"7,07",', "rates.csv:2: tpot_ms must be a number; got '7,07' (a decimal comma is"),
        ("0,1," + "7" * 200_000, "rates.csv: line 2: a cell of more than 131,072 characters"),
        ("", "rates.csv: holds no rows"),
        ("0,1,8,\n\xff", "rates.csv: not a text file in UTF-8"),
    ],
)
def test_bad_rates_name_the_line(run: Run, tmp_path: Path, line: str, message: str) -> None:
    table, output = tmp_path / "rates.csv", tmp_path / "mine.yaml"
    table.write_bytes(f"{RATES}\n{line}\n".encode("latin-1"))
    status, out, err = run("fit", table, "-o", output, *FIT)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not output.exists()


MEASURED = f"{RATES}\n0,1,7.07,\n3,1,4.29,2.29\n"


@pytest.mark.parametrize(
    "data",
    [
        MEASURED.replace(",", ";").encode(),
        MEASURED.replace(",", "\t").encode(),
        MEASURED.encode("utf-16"),
        MEASURED.replace("\n", "\r\n").encode("utf-8-sig"),
        MEASURED.replace("0,1,7.07,", "0,1,7.07,1").encode(),
    ],
)
def test_rates_however_a_spreadsheet_writes_them(run: Run, tmp_path: Path, data: bytes) -> None:
    table = tmp_path / "rates.csv"
    table.write_bytes(data)
    rows = run.json("fit", table, "-o", tmp_path / "mine.yaml", *FIT)["rows"]
    assert [(row["k"], row["batch"], row["tpot"]) for row in rows] == [
        (0, 1, 7.07e-3),
        (3, 1, 4.29e-3),
    ]


@pytest.mark.parametrize("name", ["tpot_s", "tpot_us", "itl_ms", "latency", "TPOT_MS"])
def test_a_column_is_not_guessed(run: Run, tmp_path: Path, name: str) -> None:
    table = tmp_path / "rates.csv"
    table.write_text(f"k,batch,{name}\n0,1,7\n")
    status, _, err = run("fit", table, "-o", tmp_path / "mine.yaml", *FIT)
    assert status == 2
    assert f"rates.csv: no column tpot_ms (it has 'k, batch, {name}')" in err


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("/dev/zero", "specmodel: /dev/zero: is no regular file\n"),
        ("none.csv", "none.csv: no such file or folder"),
        ("empty.csv", "empty.csv: is empty"),
    ],
)
def test_what_is_no_table_is_named(run: Run, tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / "empty.csv").touch()
    status, _, err = run("fit", tmp_path / file, "-o", tmp_path / "mine.yaml", *FIT)
    assert (status, err.count("\n")) == (2, 1)
    assert message in err


def test_rates_through_a_pipe(run: Run, tmp_path: Path) -> None:
    """Read once: what a shell's ``<(...)`` gives cannot be read again."""
    reading, writing = os.pipe()
    os.write(writing, MEASURED.encode())
    os.close(writing)
    try:
        table = f"/dev/fd/{reading}"
        assert len(run.json("fit", table, "-o", tmp_path / "mine.yaml", *FIT)["rows"]) == 2
    finally:
        os.close(reading)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ("0,1,0.00707,", "3,1,0.00429,2.29"),
            "rates.csv:2: 0.00707 ms a token is less than an eighth of what one pass of "
            "llama-3.1-8b takes at least on h100-sxm (4.48 ms): tpot_ms seems to be in seconds\n",
        ),
        (
            ("3,1,0.00429,2.29",),
            "rates.csv:2: 0.00429 ms a token and 2.29 tokens a round are 0.00982 ms a round, less",
        ),
        (("0,1,7070,", "3,1,4290,2.29"), "tpot_ms seems to be in microseconds\n"),
        (("0,1,7070000,",), "tpot_ms seems to be in nanoseconds\n"),
        (("0,256,12800,",), "microseconds or tokens per second of the batch\n"),
        (("0,1,7.07,", "0,8,0.0075,"), "rates.csv:3: 0.0075 ms a token is less than"),
        (("0,1,7.07,", "0,8,0.0075,"), "tpot_ms seems to be in seconds in 1 of 2 rows\n"),
        (("0,1,0.5,",), "another unit does not explain it: check --model, --gpu and --tp"),
        (("0,1,0.3,", "0,8,7000,"), "another unit does not explain it"),
    ],
)
def test_times_in_another_unit_are_refused(
    run: Run, tmp_path: Path, lines: tuple[str, ...], message: str
) -> None:
    output = tmp_path / "mine.yaml"
    status, out, err = run("fit", rates(tmp_path, *lines), "-o", output, *FIT)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not output.exists()


@pytest.mark.parametrize(
    ("model", "lines"),
    [
        ("llama-3.1-8b", ("0,1,1.3,",)),  # 4-bit weights
        ("llama-3.1-8b", ("0,1,150,",)),
        ("llama-3.1-8b", ("0,256,20,", "5,256,22,2.5")),
        ("llama-3.2-1b", ("0,1,25,", "3,1,26,2")),  # an eager research implementation
    ],
)
def test_fast_and_slow_engines_are_fitted(
    run: Run, tmp_path: Path, model: str, lines: tuple[str, ...]
) -> None:
    how = ("--gpu", "h100", "--model", model, "--drafter", "eagle")
    table = rates(tmp_path, *lines)
    assert run("fit", table, "-o", tmp_path / "mine.yaml", *how)[0] == 0
    assert load_engine(tmp_path / "mine.yaml").name == "mine"


def test_a_file_is_replaced_only_when_told(run: Run, tmp_path: Path) -> None:
    table, output = rates(tmp_path, "0,1,8,"), tmp_path / "mine.yaml"
    output.write_text("mine")
    status, _, err = run("fit", table, "-o", output, *FIT)
    assert (status, output.read_text()) == (2, "mine")
    assert "mine.yaml: exists: choose another name, or --overwrite it" in err
    assert run("fit", table, "-o", output, *FIT, "--overwrite")[0] == 0
    assert load_engine(output).name == "mine"


@pytest.mark.parametrize("kind", ["rates", "operators"])
def test_outputs_are_checked_before_work(run: Run, tmp_path: Path, kind: str) -> None:
    table = rates(tmp_path, "0,1,8,")
    more: tuple[str, ...] = FIT
    if kind == "operators":
        table.write_text("operator,not,a,table\n")
        more = ("--gpu", "h100")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "link.yaml").symlink_to(table)
    for name, message in (
        ("mine.json", "output must end in .yaml, .yml"),
        ("none/mine.yaml", "none: no such folder"),
        ("folder.yaml", "folder.yaml: is no regular file"),
        ("link.yaml", "link.yaml: is no regular file"),
    ):
        status, _, err = run("fit", table, "-o", tmp_path / name, *more)
        assert (status, err.count("\n")) == (2, 1)
        assert message in err
    if kind == "operators":
        figure = tmp_path / "notes.png"
        figure.write_text("mine")
        _, _, err = run("fit", table, "-o", tmp_path / "mine.yaml", *more, "--plot", figure)
        assert "notes.png: holds no .png: choose another name" in err


def test_a_fit_says_what_its_rows_decide(run: Run, tmp_path: Path) -> None:
    _, out, _ = run("fit", rates(tmp_path, "0,1,8,"), "-o", tmp_path / "mine.yaml", *FIT)
    assert "decided by your rows" in out
    assert "0%: your rows do not determine this value" in " ".join(out.split())
    assert "100%: your rows alone determine it" in " ".join(out.split())


def test_a_thousand_rows_are_fitted_at_once(run: Run, tmp_path: Path) -> None:
    """Rows that repeat one another many times decide more, and change no prediction by much."""
    lines = ("0,1,7.07,", "0,8,7.6,", "3,1,4.29,2.29", "3,8,4.9,2.29")
    few, many = (
        run.json("fit", rates(tmp_path, *lines * n), "-o", tmp_path / f"{n}.yaml", *FIT)
        for n in (2, 250)
    )
    assert len(many["rows"]) == 1000
    assert many["values"]["step"]["told"] > few["values"]["step"]["told"]
    for one, other in zip(few["rows"][:4], many["rows"], strict=False):
        assert one["before"] == pytest.approx(other["before"], rel=1e-12)
        assert one["after"] == pytest.approx(other["after"], rel=0.05)


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
    assert (status, "output must end in .yaml, .yml; got" in err) == (2, True)


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


@pytest.mark.parametrize(
    ("lines", "doubt", "unit"),
    [
        (("0,1,141,", "3,1,233,2.29"), "head pass (128 ms) is 295 times the preset's", True),
        (("0,1,7.07,", "3,1,33,2.29"), "head pass (22.4 ms) is 51.4 times the preset's", False),
        (("0,1,20,",), "step (13.3 ms) is 35.5 times the preset's", False),
        (("0,1,1.3,",), "kernels is 0.231 times the preset's", False),
        (
            ("0,1,7,", "0,1,40,") * 3,
            "the fit misses 3 of 6 rows by more than 35% (line 3: 40",
            False,
        ),
    ],
)
def test_a_fit_that_is_hard_to_believe_says_so(
    run: Run, tmp_path: Path, lines: tuple[str, ...], doubt: str, unit: bool
) -> None:
    """And its file says so again in a prediction; a real fault is not called another unit."""
    table, output = rates(tmp_path, *lines), tmp_path / "mine.yaml"
    (warning,) = run.json("fit", table, "-o", output, *FIT)["warnings"]
    assert warning.startswith("WARNING: ")
    assert doubt in warning
    assert ("tpot_ms may hold tokens per second of a sequence: read so" in warning) == unit
    assert "--model, --gpu, --tp, --context and the column batch" in warning
    assert warning in " ".join(run("fit", table, "-o", output, *FIT, "--overwrite")[1].split())
    predict = ("predict", "--gpu", "h100", "--drafter", "eagle3", "--engine", output)
    assert warning in " ".join(run(*predict)[1].split())


def test_a_fit_that_is_easy_to_believe_warns_of_nothing(run: Run, tmp_path: Path) -> None:
    table, output = rates(tmp_path, "0,1,7.07,", "3,1,4.29,2.29"), tmp_path / "mine.yaml"
    assert run.json("fit", table, "-o", output, *FIT)["warnings"] == []
    assert load_engine(output).studies == {"rates.csv": "rates.csv, 2 rows"}


@pytest.mark.parametrize(
    ("line", "how", "unit"),
    [
        ("0,8,142,", FIT, "a sequence"),
        ("0,2,125,", ("--gpu", "h100", "--model", "llama-3.1-70b", "--tp", "4"), "the batch"),
    ],
)
def test_rates_per_second_are_told_from_slow_engines(
    run: Run, tmp_path: Path, line: str, how: tuple[str, ...], unit: str
) -> None:
    found = run.json("fit", rates(tmp_path, line), "-o", tmp_path / "mine.yaml", *how)
    assert f"tpot_ms may hold tokens per second of {unit}: read so" in found["warnings"][0]


def test_a_fit_writes_no_file_that_cannot_be_read(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "mine.yaml"
    status, out, err = run("fit", rates(tmp_path, "0,1,400,"), "-o", output, *FIT)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "rates.csv: step would be 388.6 ms, and an engine file takes 0 to 200 ms. Check" in err
    assert not output.exists()


@pytest.mark.parametrize(
    "above", ["sep=;\n", "# by hand, on Monday\n", "sep=;\n# note\n", '"# a, b"\n\n']
)
def test_what_is_above_the_header_is_left_out(run: Run, tmp_path: Path, above: str) -> None:
    table = tmp_path / "rates.csv"
    table.write_text(above + MEASURED.replace(",", ";"))
    rows = run.json("fit", table, "-o", tmp_path / "mine.yaml", *FIT)["rows"]
    assert [row["tpot"] for row in rows] == [7.07e-3, 4.29e-3]


def test_a_table_of_neither_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "x.csv"
    table.write_text("a,b\n1,2\n")
    assert main(["fit", str(table), "-o", str(tmp_path / "x.yaml"), "--gpu", "h100"]) == 2
    assert "has neither the columns of an engine's rates (k, batch, tpot_ms) nor those of a " in (
        capsys.readouterr().err
    )


def test_a_unit_is_not_suggested_for_one_of_rows_that_are_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "rates.csv"
    table.write_text("k,batch,tpot_ms,acceptance_length\n0,1,30000,\n3,1,29000,2.29\n")
    how = ["--gpu", "l4", "--model", "llama-3.1-70b", "--drafter", "eagle3"]
    assert main(["fit", str(table), "-o", str(tmp_path / "x.yaml"), *how]) == 2
    error = capsys.readouterr().err
    assert "rates.csv:3: 29,000 ms a token and 2.29 tokens a round are 66,410 ms" in error
    assert "another unit does not explain it" in error
