"""Measuring on the CPU with tiny shapes: what is written, what survives a kill, what is refused."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import specmodel as sm
from specmodel.cli import main
from specmodel.hardware import read_device, write_device
from specmodel.rates import device_of_table
from specmodel.tables import read_table, too_noisy

torch = pytest.importorskip("torch", reason="torch is not installed")

from calibrate import command, device_check, ranks  # noqa: E402
from calibrate import run as run_module  # noqa: E402
from calibrate.bench import Bench, OutOfMemory  # noqa: E402
from calibrate.cases import COLUMNS, Case, row_key  # noqa: E402
from calibrate.clock import Clock, noise, spread  # noqa: E402
from calibrate.models import Setting, layer_shape  # noqa: E402
from calibrate.peaks import peaks  # noqa: E402
from calibrate.plan import GEMM_ROWS, GEMM_SHAPES, make_plan  # noqa: E402
from calibrate.run import Settings, measure, out_of_memory  # noqa: E402
from calibrate.table import Table, check_row, read_rows, read_sidecar, write_sidecar  # noqa: E402

GPU = Setting(kind="cuda", dtypes=("bfloat16", "fp8"), cache=5e7, memory=1.2e11, devices=4)
CPU = Setting(kind="cpu", dtypes=("bfloat16",), cache=3e7, memory=2e10)


@pytest.fixture(autouse=True)
def _threads() -> Any:
    """Leave torch's threads as they were: a run sets them for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def settings(folder: Path, **changes: Any) -> Settings:
    given = {"device": "cpu", "table": folder / "t.csv", "budget": 30.0, "tiny": True}
    return Settings(**{**given, **changes})


class Looks:
    """A clock on which each look takes as long: a budget buys as much on a busy machine."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 0.01
        return self.seconds


@pytest.fixture(autouse=True, scope="module")
def looks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "now", Looks())
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """A tiny run whose time is over when the base is measured."""
    before = torch.get_num_threads()
    folder = tmp_path_factory.mktemp("run")
    given = settings(folder, only=("stream", "launch", "gemm", "elementwise", "experts", "passes"))
    record = measure(replace(given, budget=3.0))
    measure(replace(given, only=("attention",), budget=4.0))
    torch.set_num_threads(before)
    return read_rows(given.table), record


# -- the plan ------------------------------------------------------------------------------------


def test_plan_holds_the_least_that_calibrates_a_gpu() -> None:
    plan = make_plan(GPU)
    base = {section.name: section.base for section in plan.sections}
    for dtype in GPU.dtypes:
        rows = {(c.n, c.k, c.m) for c in base["gemm"] if c.dtype == dtype}
        pairs = zip(GEMM_SHAPES, 2 * GEMM_ROWS, strict=True)
        assert rows >= {(*shape, m) for shape, ms in pairs for m in ms}
    assert sum(case.width == 1 for case in base["attention"]) == 20
    assert {case.width for case in base["attention"]} == {1, 2, 4, 8, 16}
    assert {case.ranks for case in base["allreduce"]} == {2, 4}
    assert {case.mode for case in base["passes"]} == {"graph", "eager"}


@pytest.mark.parametrize("setting", [GPU, CPU, replace(CPU, tiny=True)])
def test_plan_is_the_same_again_and_has_no_case_twice(setting: Setting) -> None:
    plan = make_plan(setting, seed=1)
    assert plan == make_plan(setting, seed=1)
    cases = [c.key for section in plan.sections for c in (*section.base, *section.more)]
    assert len(cases) == len(set(cases))
    assert make_plan(setting, seed=2).sections != plan.sections


def test_cpu_passes_differ_in_depth_and_width_and_are_larger_than_the_cache() -> None:
    models = make_plan(CPU).models
    large = [s for s in models.values() if 2 * s.layers * s.layer_weights > 2 * CPU.cache]
    assert len({shape.hidden for shape in large}) >= 2
    assert len({shape.layers for shape in large}) >= 3


def test_a_models_own_shapes_come_first() -> None:
    model = sm.load_model("qwen3-30b-a3b")
    plan = make_plan(GPU, model=model)
    base = {section.name: section.base for section in plan.sections}
    assert base["experts"][0].experts == 128
    assert base["passes"][0].model == model.name
    assert (151936, 2048) in {(case.n, case.k) for case in base["gemm"]}
    assert layer_shape(sm.load_model("llama-3.1-8b")).layer_weights == 218_103_808
    with pytest.raises(sm.ArchitectureError, match="no layer of plain attention"):
        layer_shape(sm.load_model("deepseek-v3"))


# -- a whole run ---------------------------------------------------------------------------------


def test_every_section_yields_rows_of_the_schema(run: tuple[list[dict[str, str]], Any]) -> None:
    rows, _ = run
    kinds = Counter(row["operator"] for row in rows if row["seconds"])
    wanted = {"stream", "gemm", "attention", "experts", "elementwise", "launch", "pass"}
    assert set(kinds) == wanted | {"reference"}
    assert all(row["mode"] == "eager" and row["device"] for row in rows)
    assert not [row for row in rows if row["note"].startswith("error:")]
    for row in rows:
        if row["operator"] == "pass":
            assert int(row["batch"]) >= 1
            assert row["layers"]
            assert row["kernel"].startswith("sdpa")


def test_sidecar_says_what_ran(run: tuple[Any, dict[str, Any]]) -> None:
    _, record = run
    assert record["schema"] == 1
    assert record["torch"] == torch.__version__
    assert record["threads"] == 1
    assert record["device"]["kind"] == "cpu"
    assert record["models"]["moe-1x64"]["experts"] == 4
    assert record["noise"]["reference"] >= 0
    json.dumps(record, allow_nan=False)


def test_rates_of_a_device_without_a_datasheet(
    run: tuple[list[dict[str, str]], dict[str, Any]], tmp_path: Path
) -> None:
    rows, record = run
    path = tmp_path / "t.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    path.with_suffix(".json").write_text(json.dumps(record), encoding="utf-8")
    table = read_table(path)
    device = device_of_table(table, "Some CPU", {})
    write_device(device, tmp_path / "d.yaml")
    again = read_device(tmp_path / "d.yaml")
    assert again.memory_bandwidth == peaks(rows)["memory_bandwidth"] > 1e8
    assert again.peak_flops == peaks(rows)["flops"]
    with pytest.raises(sm.FitError, match="no copy"):
        device_of_table(table.of("launch"), "Some CPU", {})


def test_a_complete_run_measures_nothing_again(tmp_path: Path) -> None:
    given = settings(tmp_path, only=("stream", "launch"))
    measure(given)
    before = given.table.read_bytes()
    measure(given)
    assert given.table.read_bytes() == before
    with pytest.raises(sm.ProfileError, match="begun with another seed: give another --table"):
        measure(replace(given, seed=1))


def test_more_time_measures_more_shapes(tmp_path: Path) -> None:
    given = settings(tmp_path, only=("experts", "passes"), budget=0.01)
    first = measure(given)
    assert first["sections"]["passes"]["measured"] < first["sections"]["passes"]["planned"]
    before = given.table.read_bytes()
    again = measure(replace(given, budget=60.0))
    assert given.table.read_bytes().startswith(before)
    assert all(s["measured"] == s["planned"] for s in again["sections"].values())
    assert again["elapsed"] > first["elapsed"]


def test_sections_that_were_begun_can_be_left_out(tmp_path: Path) -> None:
    given = settings(tmp_path, only=("launch", "stream"))
    measure(given)
    file = tmp_path / "t.json"
    record = json.loads(file.read_text())
    record["sections"] = {"launch": {"planned": 1, "base": "started"}}
    file.write_text(json.dumps(record))
    sections = measure(given, skip_started=True)["sections"]
    assert sections["launch"] == {"planned": 1, "base": "started"}
    assert sections["stream"]["more"] == "done"


def test_a_short_budget_measures_less_and_says_so(tmp_path: Path) -> None:
    record = measure(settings(tmp_path, budget=0.05))
    assert any(s["measured"] < s["planned"] for s in record["sections"].values())
    assert "a larger --budget measures the rest" in command.summary(record)


def test_fp8_and_half_formats(tmp_path: Path) -> None:
    """What torch can multiply here is timed; what it cannot is recorded as an error."""
    given = settings(tmp_path, dtypes=("fp16", "fp8"), budget=1.0, only=("gemm",))
    measure(given)
    rows = [row for row in read_rows(given.table) if row["operator"] == "gemm"]
    assert {row["dtype"] for row in rows} == {"float16", "fp8"}


# -- kills ---------------------------------------------------------------------------------------

KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from calibrate.run import Settings, measure

table, kills = Path(sys.argv[1]), int(sys.argv[2])
sections = ("launch", "elementwise", "experts", "passes") + ("gemm",) * (kills > 3)
settings = Settings(device="cpu", table=table, budget=60.0, tiny=True, only=sections)
rng = random.Random(kills)
for _ in range(kills):
    before = table.read_bytes() if table.exists() else b""
    child = os.fork()
    if child == 0:
        measure(settings)
        os._exit(0)
    time.sleep(rng.uniform(0.02, 0.7))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    after = table.read_bytes() if table.exists() else b""
    assert after.startswith(before[: before.rfind(b"\\n") + 1]), "a row that was there is gone"
measure(settings)
"""


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_nothing_is_lost_or_measured_twice_when_killed(tmp_path: Path, kills: int) -> None:
    """One process that loads torch once and forks the runs that are killed."""
    table = tmp_path / "t.csv"
    subprocess.run(  # noqa: S603
        [sys.executable, "-W", "ignore", "-c", KILLED, str(table), str(kills)],
        check=True,
        capture_output=True,
        timeout=300,
        cwd=Path(__file__).parents[1],
    )
    rows = [row for row in read_rows(table) if row["operator"] != "reference"]
    keys = Counter(row_key(row) for row in rows)
    assert set(keys.values()) == {1}
    record = read_sidecar(table)
    assert all(s["measured"] == s["planned"] for s in record["sections"].values())
    assert all(s["more"] == "done" for s in record["sections"].values())


def test_a_line_cut_short_is_dropped(tmp_path: Path) -> None:
    case = Case(operator="launch", dtype="bfloat16", mode="eager", kernel="add")
    table = Table(tmp_path / "t.csv")
    table.append({**case.row(), "seconds": 1e-6, "spread": 0.0, "repeats": 3})
    whole = table.path.read_bytes()
    table.path.write_bytes(whole + b"gemm,bfloat16,ea")
    again = Table(table.path)
    assert again.path.read_bytes() == whole
    assert case in again
    again.path.write_bytes(b"operator,dty")
    assert Table(table.path).rows == []
    assert table.path.read_text(encoding="utf-8") == ",".join(COLUMNS) + "\n"


def test_files_that_are_not_tables(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(sm.ProfileError, match="not a measurement table"):
        Table(path)
    with pytest.raises(sm.ProfileError, match="not the JSON that belongs to it"):
        measure(settings(tmp_path))
    row = dict.fromkeys(COLUMNS, "")
    row |= {"operator": "gemm", "dtype": "bfloat16", "mode": "eager"}
    with pytest.raises(sm.ProfileError, match="seconds: cannot be ''"):
        check_row(row, "here")
    check_row({**row, "note": "error: out of memory"}, "here")
    with pytest.raises(sm.ProfileError, match="operator: cannot be 'gem'"):
        check_row({**row, "operator": "gem"}, "here")


# -- memory, noise -------------------------------------------------------------------------------


def test_a_case_that_does_not_fit_is_recorded_and_shrunk(tmp_path: Path) -> None:
    given = settings(tmp_path, memory_limit=2**20 + 2**19, only=("stream",))
    measure(given)
    rows = [row for row in read_rows(given.table) if row["operator"] == "stream"]
    found = {int(row["bytes"]): (row["note"], bool(row["seconds"])) for row in rows}
    assert found == {
        2**22: ("error: out of memory", False),
        2**21: ("error: out of memory", False),
        2**20: ("", True),
    }


def test_memory_errors_are_told_from_others() -> None:
    assert out_of_memory(OutOfMemory("so much"))
    assert out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    assert not out_of_memory(RuntimeError("no kernel"))
    with pytest.raises(OutOfMemory, match=r"1e\+03 GB needed"):
        Bench("cpu").allow(1e12)


def test_a_device_that_fails_for_good_stops_the_run_and_a_rerun_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = settings(tmp_path, only=("launch", "stream"))
    build = run_module.operators.build

    def broken(bench: Bench, case: Case) -> Any:
        if case.operator != "launch":
            return build(bench, case)
        monkeypatch.setattr(Clock, "synchronise", lambda _: fault())
        return fault()

    def fault() -> Any:
        raise RuntimeError("CUDA error: an illegal memory access")

    with monkeypatch.context() as patched:
        patched.setattr(run_module.operators, "build", broken)
        with pytest.raises(sm.SpecmodelError, match="cpu failed"):
            measure(given)
    monkeypatch.undo()
    record = measure(given, skip_started=True)
    assert set(record["sections"]) == {"launch", "stream"}
    rows = {row["operator"]: row for row in read_rows(given.table)}
    assert rows["launch"]["note"].startswith("error: RuntimeError: CUDA error")
    assert rows["stream"]["seconds"]


@pytest.mark.gpu
def test_every_section_on_a_gpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    given = settings(tmp_path, device="cuda:0", budget=40.0)
    record = measure(given)
    rows = read_rows(given.table)
    assert not [row for row in rows if row["note"].startswith("error:")]
    assert {row["mode"] for row in rows if row["operator"] == "gemm"} == {"graph"}
    assert record["device"]["multiprocessors"] > 0


def reference(seconds: float, spread: float = 0.01) -> dict[str, str]:
    row = dict.fromkeys(COLUMNS, "")
    return row | {"operator": "reference", "seconds": str(seconds), "spread": str(spread)}


def test_a_noisy_run_is_refused() -> None:
    assert spread([1.0, 1.0, 1.0, 1.0]) == 0
    quiet = noise([reference(1.0 + 0.01 * i) for i in range(9)])
    assert too_noisy(quiet) is None
    assert quiet["drift"] == pytest.approx(1.07 / 1.01 - 1)
    throttled = noise([reference(1.0 if i < 5 else 1.5) for i in range(9)])
    assert "reference point varied" in str(too_noisy(throttled))
    assert "one shape varied by 40%" in str(too_noisy(noise([reference(1.0, 0.4)] * 5)))


def test_no_profile_is_written_from_a_noisy_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: tuple[Any, dict[str, Any]]
) -> None:
    rows, record = run
    noisy = {**record, "arguments": {"tiny": False}, "rows": len(rows)}
    noisy["noise"] = {"reference": 0.5, "drift": 0.0, "rows": 0.0, "worst": 0.0}
    given = settings(tmp_path)
    table = Table(given.table)
    for row in rows:
        table.append(row)
    write_sidecar(given.table, noisy)
    monkeypatch.setattr(command, "measure", lambda _: noisy)
    output = tmp_path / "p.yaml"
    with pytest.raises(sm.FitError, match="too noisy to trust: the reference point varied by 50%"):
        command.calibrate(output, given)
    assert not output.exists()


def test_the_verdict_of_a_noisy_run_travels_with_its_table(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    run: tuple[list[dict[str, str]], dict[str, Any]],
) -> None:
    rows, record = run
    table = Table(tmp_path / "t.csv")
    for row in rows:
        table.append(row)
    noise = {"reference": 0.1, "drift": 0.0, "rows": 0.3, "worst": 0.9}
    later = {**record, "arguments": {"tiny": False}, "noise": noise, "rows": len(rows)}
    write_sidecar(table.path, later)
    output = tmp_path / "p.yaml"
    assert main(["fit", str(table.path), "-o", str(output)]) == 2
    assert "too noisy to trust: repeated timings of one shape" in capsys.readouterr().err
    assert not output.exists()
    assert main(["fit", str(table.path), "-o", str(output), "--accept-noise"]) == 0
    device = sm.load_device(output)
    assert device.calibration is not None
    assert any("too noisy to trust" in note for note in device.calibration.notes)


# -- several devices, the commands ---------------------------------------------------------------


def test_all_reduce_over_two_processes() -> None:
    case = Case(operator="allreduce", dtype="float32", mode="eager", bytes=4096, ranks=2)
    (row,) = ranks.measure([case], kind="cpu")
    assert row["kernel"] == "gloo"
    assert row["seconds"] > 0
    assert row["ranks"] == 2
    text = {column: str(row.get(column, "")) for column in COLUMNS}
    check_row(text, "all-reduce")


def test_calibrate_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "mine.yaml"
    arguments = ["calibrate", "--device", "cpu", "-o", str(output), "--budget", "6s", "--tiny"]
    assert main(arguments) == 0
    assert "holds the measurements" in capsys.readouterr().out
    assert read_device(output).memory_bandwidth > 0
    assert read_rows(tmp_path / "mine.csv")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "x.txt"], "output must end in .yaml, .yml; got 'x.txt'"),
        (["-o", "x.yaml", "--table", "x.tsv"], "table must end in .csv; got 'x.tsv'"),
        (["-o", "x.yaml", "--budget", "soon"], "budget must be a number"),
        (["-o", "x.yaml", "--budget", "-1s"], "budget must be > 0"),
        (["-o", "x.yaml", "--dtype", "int4"], "dtype must be one of"),
        (["-o", "x.yaml", "--dtype", "fp8"], "before fp8"),
        (["-o", "x.yaml", "--threads", "0"], "threads must be in [1, "),
        (["-o", "x.yaml", "--device", "cuda:99"], "is not there"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_without_torch_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["calibrate", "-o", "x.yaml"]) == 2
    assert "pip install 'specmodel[torch]'" in capsys.readouterr().err


def test_device_check_leaves_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def here(given: Any, phase: int) -> bool:
        given.phase = phase
        return device_check._measure(given) == 0

    monkeypatch.setattr(device_check, "_child", here)
    code = device_check.main(["--device", "cpu", "--out", str(tmp_path), "--budget", "4", "--tiny"])
    assert code == 0
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"table.csv", "table.json", "profile.yaml", "summary.txt"}
    assert "llama-2x128" in capsys.readouterr().out


@pytest.mark.slow
def test_device_check_needs_little_beside_torch(tmp_path: Path) -> None:
    """The command itself, its processes included, where packages of convenience are absent."""
    absent = "import sys\nfor name in 'rich click pandas tqdm xarray matplotlib sympy'.split():\n"
    (tmp_path / "sitecustomize.py").write_text(f"{absent}    sys.modules[name] = None\n")
    root = Path(__file__).parents[1]
    done = subprocess.run(  # noqa: S603
        [
            *(sys.executable, "-m", "calibrate.device_check", "--device", "cpu"),
            *("--out", str(tmp_path / "out"), "--budget", "6", "--tiny"),
        ],
        env={"PYTHONPATH": f"{tmp_path}:{root}", "PATH": "/usr/bin:/bin"},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "profile.yaml").exists()
