"""Sweeps: the file equals the model, interrupted ones go on, workers may be anywhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specmodel as sm
from specmodel.cli.main import main
from specmodel.sweeping import DEFAULT_VARIABLES, Case, Sweep, evaluate, sweep
from specmodel.sweeping.forms import _texts

for package in ("zarr", "h5netcdf", "pyarrow"):
    pytest.importorskip(package, reason="the extra `sweep` is not installed")
xr = pytest.importorskip("xarray")
pd = pytest.importorskip("pandas")

ALPHAS = (0.5, 0.7, 0.9)


def case(gpu: str = "h100", drafter: Any = None, **how: Any) -> Case:
    return Case(
        device=sm.load_device(gpu),
        target=sm.load_model("llama-3.1-8b"),
        drafter=drafter or sm.Eagle3(),
        acceptance=sm.Geometric(ALPHAS),
        execution=sm.Execution(**how),
    )


def plan(**changes: Any) -> Sweep:
    """Return 2 x 2 cases, one of them refused, over a grid cut into 3 blocks a case."""
    fields: dict[str, Any] = {
        "axes": {"gpu": ("h100", "l40s"), "tp": (1, 2)},
        "cases": {
            ("h100", 1): case(),
            ("h100", 2): case(tp=2),
            ("l40s", 1): case("l40s"),
            ("l40s", 2): "not to be had",
        },
        "B": np.array([1.0, 2, 3, 8, 64]),
        "k": np.arange(5.0),
        "L": np.array([0.0, 2048]),
        "variables": (*DEFAULT_VARIABLES, "regime", "T_h", "B_p_star"),
        "block_points": 60,
    }
    return Sweep(**{**fields, **changes})


def read(path: Path) -> Any:
    return (xr.open_zarr if path.suffix == ".zarr" else xr.open_dataset)(path).load()


@pytest.mark.parametrize("ending", [".zarr", ".nc"])
def test_file_holds_what_speculate_returns(tmp_path: Path, ending: str) -> None:
    wanted, path = plan(), tmp_path / f"out{ending}"
    refused = sweep(wanted, path)
    assert refused == {("l40s", 2): "not to be had"}
    found = read(path)
    assert len(list(wanted.blocks())) == 3 * 3
    for where, one in wanted.cases.items():
        here = found.sel(dict(zip(wanted.axes, where, strict=True)))
        if isinstance(one, str):
            assert str(here.refused.values) == one
            assert np.isnan(here.S).all()
            continue
        direct = sm.speculate(
            one.device,
            one.target,
            one.drafter,
            one.acceptance,
            B=wanted.B,
            k=wanted.k,
            L=wanted.L,
            execution=one.execution,
        )
        for name in DEFAULT_VARIABLES:
            assert here[name].dims == direct[name].dims
            np.testing.assert_array_equal(here[name], direct[name])
            assert here[name].attrs["units"] == direct[name].attrs["units"]
        regimes = np.array(["", "I", "II", "III"])[here.regime.values]
        np.testing.assert_array_equal(regimes, direct.regime)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("ending", [".parquet", ".csv"])
def test_rows_hold_the_same_numbers(tmp_path: Path, ending: str) -> None:
    rows, store = tmp_path / f"rows{ending}", tmp_path / "out.zarr"
    sweep(plan(), rows)
    sweep(plan(), store)
    frame = (pd.read_csv if ending == ".csv" else pd.read_parquet)(rows)
    assert len(frame) == 3 * 5 * 5 * 2 * 3
    assert list(frame.columns[:6]) == ["gpu", "tp", "B", "k", "L", "alpha"]
    data = read(store)
    for row in frame.sample(40, random_state=1).itertuples():
        at = {name: getattr(row, name) for name in ("gpu", "tp", "B", "k", "L", "alpha")}
        assert float(data.S.sel(at)) == pytest.approx(row.S, rel=1e-12)
        assert float(data.T_p.sel({d: at[d] for d in data.T_p.dims})) == row.T_p


class Stop(Exception):
    pass


@pytest.mark.parametrize("after", [0, 4])
def test_interrupted_sweep_goes_on_without_repeating(
    tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, done = tmp_path / "out.nc", []

    def until(points: int) -> None:
        done.append(points)
        if len(done) > after:
            raise Stop

    with pytest.raises(Stop):
        sweep(plan(), path, progress=until)
    assert not path.exists()
    folder = path.with_name("out.nc.partial")
    assert len(list(folder.glob("*.npz"))) == after + 1
    (folder / "writing").write_bytes(b"PK")  # the block that was being written
    calls: list[str] = []

    def counted(block: Any) -> Any:
        calls.append(block.name)
        return evaluate(block)

    monkeypatch.setattr("specmodel.sweeping.running.evaluate", counted)
    points: list[int] = []
    sweep(plan(), path, progress=points.append)
    assert len(calls) == 9 - (after + 1)
    assert sum(points) == 3 * 5 * 5 * 2 * 3
    whole = tmp_path / "whole.nc"
    sweep(plan(), whole)
    assert read(path).equals(read(whole))


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_killed_process_goes_on(tmp_path: Path, workers: str) -> None:
    if int(workers) > (os.cpu_count() or 1):
        pytest.skip("needs two processors")
    path = tmp_path / "out.csv"
    command = [sys.executable, "-m", "specmodel", "sweep", "--gpu", "h100,l40s,a100", "--batch"]
    command += ["1-2000", "--context", "0:16k:256", "--k-max", "4", "-o", str(path)]
    command += ["--workers", workers]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)  # noqa: S603
    folder = path.with_name("out.csv.partial")
    while process.poll() is None and not list(folder.glob("*.npz")):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not path.exists()
    assert list(folder.glob("*.npz"))
    arguments = command[3:]
    assert main([*arguments[:1], "--gpu", "h100", *arguments[3:]]) == 2  # another sweep
    assert main(arguments) == 0
    with path.open() as file:
        assert sum(1 for _ in file) == 1 + 3 * 2000 * 65 * 5
    assert list(tmp_path.iterdir()) == [path]


def test_another_sweep_or_a_finished_file_is_in_the_way(tmp_path: Path) -> None:
    path = tmp_path / "out.nc"
    with pytest.raises(Stop):
        sweep(plan(), path, progress=lambda _: (_ for _ in ()).throw(Stop))
    with pytest.raises(sm.DomainError, match="belongs to another sweep"):
        sweep(plan(L=np.array([1.0])), path)
    sweep(plan(), path)
    with pytest.raises(sm.DomainError, match="exists: choose another name, or --overwrite it"):
        sweep(plan(), path)
    sweep(plan(L=np.array([1.0])), path, overwrite=True)
    assert read(path).L.values.tolist() == [1.0]


def test_plan_has_the_same_key_in_every_process() -> None:
    """Sets of text are ordered differently from process to process."""
    code = (
        "import sys; sys.path[:0] = ['tests']\n"
        "import numpy as np, specmodel as sm\n"
        "from specmodel.sweeping import Case, Sweep\n"
        "m = sm.load_model('gpt-oss-20b')\n"
        "c = Case(device=sm.load_device('h100'), target=m, drafter=sm.NGram(0.5),"
        " acceptance=sm.Geometric(0.5), execution=sm.Execution())\n"
        "one = np.array([1.0])\n"
        "print(Sweep(axes={'a': ('x',)}, cases={('x',): c}, B=one, k=one, L=one).key())"
    )
    keys = {
        subprocess.run(  # noqa: S603
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(keys) == 1


@pytest.fixture(scope="module")
def cluster() -> Iterator[Executor]:
    distributed = pytest.importorskip("distributed")
    options = {"n_workers": 1, "threads_per_worker": 1, "processes": False}
    with (
        distributed.LocalCluster(dashboard_address=None, **options) as local,
        distributed.Client(local) as client,
    ):
        yield client.get_executor()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_dask_cluster_gives_the_same_file(tmp_path: Path, cluster: Executor) -> None:
    there, here = tmp_path / "there.nc", tmp_path / "here.nc"
    sweep(plan(), there, executor=cluster, workers=2)
    sweep(plan(), here)
    assert read(there).equals(read(here))


def test_command_over_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.nc"
    arguments = ["sweep", "--gpu", "h100,m4-max", "--drafter", "eagle3,block-diffusion"]
    arguments += ["--batch", "1,8", "--context", "1k", "--alpha", "0.5:0.7:0.1", "-o", str(path)]
    assert main([*arguments, "--workers", "2", "--variables", "S"]) == 0
    said = capsys.readouterr().out
    assert "3 of 4 cases refused" in said
    assert "m4-max has no bfloat16 arithmetic" in said
    data = read(path)
    assert data.alpha.values.tolist() == [0.5, 0.6, 0.7]
    assert data.k.values.tolist() == list(range(17))
    assert "needs its head" in str(data.refused.sel(gpu="h100", drafter="block-diffusion").values)
    request = ["predict", "--gpu", "h100", "--alpha", "0.6", "--batch", "8", "--context", "1k"]
    assert main([*request, "--k", "3", "--format", "json"]) == 0
    (point,) = json.loads(capsys.readouterr().out)["points"]
    at = {"gpu": "h100", "drafter": "eagle3", "B": 8, "L": 1024, "k": 3}
    assert float(data.S.sel(at).sel(alpha=0.6, method="nearest")) == pytest.approx(point["S"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h100", "-o", "out.txt"], "must end in .zarr, .nc, .parquet, .csv"),
        (["--gpu", "h100", "-o", "nowhere/out.nc"], "no such folder"),
        (["--gpu", "g100,g200", "-o", "out.nc"], "no case of the sweep is possible: unknown GPU"),
        (["--gpu", "h100", "-o", "out.nc", "--variables", "speed"], "unknown variable 'speed'"),
        (["--gpu", "h100", "-o", "out.nc", "--alpha", "0.9:0.5:0.1"], "FIRST:LAST:STEP"),
        (["--gpu", "h100", "-o", "out.nc", "--workers", "0"], "workers must be in [1, "),
        (["--gpu", "m4-max", "-o", "out.csv"], "no case of the sweep could be computed"),
        pytest.param(
            ["--gpu", "h100", "-o", "out.nc", "--cluster", "tcp://127.0.0.1:9"],
            "no Dask scheduler",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.filterwarnings("default")
def test_what_cannot_be_swept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_alphas_are_the_same_in_all_cases() -> None:
    other = Case(
        **{f: getattr(case(), f) for f in Case.__slots__} | {"acceptance": sm.Geometric(0.5)}
    )
    with pytest.raises(sm.DomainError, match="same axis of alphas"):
        plan(cases={**plan().cases, ("l40s", 2): other})
    with pytest.raises(sm.DomainError, match="no case for gpu l40s, tp 2"):
        plan(cases={("h100", 1): case(), ("h100", 2): case(), ("l40s", 1): case()})
    with pytest.raises(sm.DomainError, match="without repeats"):
        plan(B=np.array([1.0, 1.0]))


def test_two_sweeps_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.nc"

    def second(_: int) -> None:
        with pytest.raises(sm.DomainError, match="another sweep is writing"):
            sweep(plan(), path)

    sweep(plan(), path, progress=second)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_forked_worker_does_not_hold_the_lock(tmp_path: Path) -> None:
    """Its parent is killed, it lives on, and the sweep can be gone on with."""
    path = tmp_path / "out.csv"
    code = (
        "import os, signal, sys, time; sys.path[:0] = ['tests']\n"
        "from test_sweeping import plan, sweep\n"
        "def progress(_):\n"
        "    if os.fork() == 0:\n"
        "        print(os.getpid(), flush=True)\n"
        "        time.sleep(60)\n"
        "        os._exit(0)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "sweep(plan(), sys.argv[1], progress=progress)\n"
    )
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.wait()
    try:
        sweep(plan(), path)
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()
    assert list(tmp_path.iterdir()) == [path]


def test_file_says_what_was_set_and_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.nc"
    kept = "S,fits,max_batch,memory_bytes,tokens_per_second"
    arguments = ["sweep", "--gpu", "h100,l40s", "--batch", "1,500", "--variables", kept]
    assert main([*arguments, "-o", str(path)]) == 0
    said = capsys.readouterr().out
    assert "acceptance was measured up to k = 3" in said
    data = read(path)
    assert data.attrs["model"] == "llama-3.1-8b"
    assert "vLLM" in data.attrs["assumed_acceptance"]
    assert "gpu" not in data.attrs
    at = {"gpu": "l40s", "L": 2048, "k": 4}
    assert not bool(data.fits.sel(at).sel(B=500))
    assert bool(data.fits.sel(at).sel(B=1))
    assert main(["predict", "--gpu", "l40s", "--batch", "1", "--k", "4", "--format", "json"]) == 0
    (point,) = json.loads(capsys.readouterr().out)["points"]
    assert int(data.max_batch.sel(at)) == point["max_batch"]
    assert float(data.memory_bytes.sel(at).sel(B=1)) == point["memory_bytes"]
    rate = float(data.tokens_per_second.sel(at).sel(B=1))
    assert rate == pytest.approx(point["tokens_per_second"])


def test_where_no_case_can_be_computed_nothing_is_left(tmp_path: Path) -> None:
    for ending in ("nc", "csv"):
        path = tmp_path / f"out.{ending}"
        assert main(["sweep", "--gpu", "h100", "--ep", "-o", str(path)]) == 2
    assert list(tmp_path.iterdir()) == []


# -- nothing is lost: what may be replaced --------------------------------------------------------

ENDINGS = (".zarr", ".nc", ".parquet", ".csv")
COMMAND = ["sweep", "--gpu", "h100", "--batch", "1-4", "--alpha", "0.7"]


def refused(capsys: pytest.CaptureFixture[str], path: Path) -> str:
    """Return the error of a sweep that may overwrite its file."""
    assert main([*COMMAND, "-o", str(path), "--overwrite"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_folder_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    path = tmp_path / f"x{ending}"
    path.mkdir()
    (path / "k").write_text("keep")
    assert str(path) in refused(capsys, path)
    (path / "zarr.json").write_text('{"attributes": {"title": "mine"}}')
    assert str(path) in refused(capsys, path)
    assert (path / "k").read_text() == "keep"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_link_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    kept, path = tmp_path / f"kept{ending}", tmp_path / f"x{ending}"
    sweep(plan(), kept)
    path.symlink_to(kept)
    assert f"{path}: is no regular file" in refused(capsys, path)
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    assert f"{path}: is no regular file" in refused(capsys, path)
    path.unlink()
    os.mkfifo(path)
    assert f"{path}: is no regular file" in refused(capsys, path)
    assert sorted(tmp_path.iterdir()) == [kept, path]


@pytest.mark.parametrize("ending", ENDINGS)
def test_own_file_is_overwritten(tmp_path: Path, ending: str) -> None:
    path, arguments = tmp_path / f"x{ending}", [*COMMAND, "--variables", "S"]
    assert main([*arguments, "-o", str(path)]) == 0
    assert main([*arguments, "-o", str(path)]) == 2
    assert main([*arguments, "-o", str(path), "--k", "3", "--overwrite"]) == 0
    if ending in (".zarr", ".nc"):
        assert read(path).k.values.tolist() == [3]
    else:
        rows = (pd.read_csv if ending == ".csv" else pd.read_parquet)(path)
        assert rows.k.unique().tolist() == [3]
    assert list(tmp_path.iterdir()) == [path]


def test_store_without_the_mark_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.zarr"
    sweep(plan(), path)
    root = json.loads((path / "zarr.json").read_text())
    del root["attributes"]["contents_sha256"]
    (path / "zarr.json").write_text(json.dumps(root))
    assert f"{path}: is a folder that no sweep wrote" in refused(capsys, path)
    assert read(path).S.size


@pytest.mark.parametrize("name", ["precious.txt", "photos/", "S/notes", "S/c/0/x", "T_v/c/link"])
def test_a_stranger_in_a_store_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = tmp_path / "x.zarr"
    sweep(plan(), path)
    stranger = path / name
    if name.endswith("/"):
        stranger.mkdir()
    elif name.endswith("link"):
        stranger = stranger.with_name("99")
        stranger.symlink_to(tmp_path)
    else:
        stranger.write_text("keep")
    assert f"{stranger}: no sweep wrote it" in refused(capsys, path)
    assert os.path.lexists(stranger)
    (stranger.rmdir if name.endswith("/") else stranger.unlink)()
    assert main([*COMMAND, "-o", str(path), "--overwrite"]) == 0


@pytest.mark.parametrize("change", ["variable", "value", "attribute", "chunk"])
@pytest.mark.filterwarnings("ignore:The data type", "ignore:Consolidated metadata")
def test_data_derived_from_a_store_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    """A program that writes a changed copy copies the attributes, and the mark with them."""
    own, path = tmp_path / "own.zarr", tmp_path / "x.zarr"
    sweep(plan(), own)
    data = read(own)
    if change == "variable":
        data = data.assign(mine=1.0)
    elif change == "value":
        data["S"].values[:] *= 2
    elif change == "attribute":
        data.attrs["note"] = "mine"
    data.to_zarr(path)
    if change == "chunk":
        (path / "S" / "c" / "99").write_text("mine")
    assert read(path).attrs["contents_sha256"] == read(own).attrs["contents_sha256"]
    assert f"{path}: holds other data than a sweep wrote there" in refused(capsys, path)
    assert read(path).identical(data)


def failing(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let the renaming of files of these names fail."""
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if path.name in names:
            raise PermissionError(13, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)


def test_a_store_that_cannot_be_replaced_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.zarr"
    sweep(plan(), path)
    before = read(path)
    with monkeypatch.context() as patch:
        failing(patch, "finished")
        with pytest.raises(sm.DomainError, match=f"{path}: cannot be replaced: Permission denied$"):
            sweep(plan(B=np.array([7.0])), path, overwrite=True)
    assert read(path).identical(before)
    sweep(plan(B=np.array([7.0])), path, overwrite=True)
    assert read(path).B.values.tolist() == [7]
    assert list(tmp_path.iterdir()) == [path]


def test_a_store_that_cannot_be_put_back_is_named_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "x.zarr", plan(B=np.array([7.0]))
    aside = tmp_path / "x.zarr.partial" / "replaced"
    sweep(plan(), path)
    before = read(path)
    with monkeypatch.context() as patch:
        failing(patch, "finished", "replaced")
        with pytest.raises(sm.DomainError, match=f"What was there is now {aside} and cannot be"):
            sweep(other, path, overwrite=True)
    assert not path.exists()
    path.mkdir()
    (path / "k").write_text("keep")
    with pytest.raises(sm.DomainError, match=f"{path}: is a folder that no sweep wrote"):
        sweep(other, path, overwrite=True)
    (path / "k").unlink()
    path.rmdir()
    path.write_text("new")
    with pytest.raises(sm.DomainError, match=f"{aside}: was at {path} before: move it"):
        sweep(other, path, overwrite=True)
    path.unlink()
    with pytest.raises(sm.DomainError, match=f"{path}: exists"):
        sweep(other, path)
    assert read(path).identical(before)  # put back, as a run that was killed should have


def test_what_a_finished_run_had_set_aside_is_removed(tmp_path: Path) -> None:
    """A run was killed after it had put its file in place, before it removed the folder."""
    path, done = tmp_path / "x.zarr", tmp_path / "done.zarr"
    with pytest.raises(Stop):
        sweep(plan(), path, progress=lambda _: (_ for _ in ()).throw(Stop))
    sweep(plan(), done)
    done.rename(path)
    (tmp_path / "x.zarr.partial" / "replaced").mkdir()
    sweep(plan(), path, overwrite=True)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("ending", ENDINGS)
def test_texts_that_are_no_utf8_are_refused_before_any_work(tmp_path: Path, ending: str) -> None:
    name = os.fsdecode(b"x\xff")
    with pytest.raises(sm.DomainError, match=r"^output must be UTF-8 text; got '.*x\\udcff"):
        sweep(plan(), tmp_path / f"{name}{ending}")
    axes = {"model": (name, "y")}
    cases: dict[Any, Any] = {(name,): "no such file", ("y",): case()}
    with pytest.raises(sm.DomainError, match=r"^model must be UTF-8 text; got 'x\\udcff'$"):
        plan(axes=axes, cases=cases)
    with pytest.raises(sm.DomainError, match=r"^drafter must be UTF-8 text"):
        plan(attrs={"drafter": name})
    with pytest.raises(sm.DomainError, match=r"^reason of gpu l40s, tp 2 must be UTF-8 text"):
        plan(cases={**plan().cases, ("l40s", 2): f"{name}: no such file"})
    assert list(tmp_path.iterdir()) == []


def test_command_prints_lines_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    arguments = ["--gpu", "h100,m4-max", "--drafter", "eagle3,block-diffusion", "--batch", "1"]
    assert main(["sweep", *arguments, "-o", "x.csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert "3 of 4 cases refused, such as" in lines
    assert "vLLM tests" in "\n".join(lines)


@pytest.mark.parametrize("name", ["partial.zarr", "tmp", "journal", "lock"])
def test_files_with_similar_names_are_left_alone(tmp_path: Path, name: str) -> None:
    folder = tmp_path / f"x.csv.{name}"
    folder.mkdir()
    (folder / "k").write_text("keep")
    sweep(plan(), tmp_path / "x.csv")
    assert (folder / "k").read_text() == "keep"


@pytest.mark.parametrize("kind", ["file", "empty folder", "folder", "its plan", "link"])
def test_what_is_at_the_name_of_the_blocks_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path, folder = tmp_path / "x.csv", tmp_path / "x.csv.partial"
    if kind == "file":
        folder.write_text("keep")
    elif kind == "link":
        (tmp_path / "there").mkdir()
        folder.symlink_to(tmp_path / "there")
    else:
        folder.mkdir()
    if kind in ("folder", "its plan"):
        (folder / ("k" if kind == "folder" else "plan.json")).write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    assert f"{folder}: is not the folder of an unfinished sweep" in refused(capsys, path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["k", "0-0-0-9.npz", "finished"])
def test_a_stranger_among_the_blocks_is_kept(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.csv"
    with pytest.raises(Stop):
        sweep(plan(), path, progress=lambda _: (_ for _ in ()).throw(Stop))
    stranger = tmp_path / "x.csv.partial" / name
    if name == "k":
        stranger.write_text("keep")
    else:
        stranger.symlink_to(tmp_path)
    with pytest.raises(sm.DomainError, match=f"{stranger}: no sweep wrote it"):
        sweep(plan(), path)
    assert os.path.lexists(stranger)
    stranger.unlink()
    sweep(plan(), path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_output_is_checked_again_before_it_is_put_in_place(
    tmp_path: Path, ending: str, overwrite: bool
) -> None:
    path = tmp_path / f"x{ending}"

    def meanwhile(_: int) -> None:
        path.mkdir(exist_ok=True)
        (path / "k").write_text("keep")

    with pytest.raises(sm.DomainError, match=str(path)):
        sweep(plan(), path, overwrite=overwrite, progress=meanwhile)
    assert (path / "k").read_text() == "keep"
    path.rename(tmp_path / "kept")
    points: list[int] = []
    sweep(plan(), path, progress=points.append)
    assert len(points) == 1  # all blocks were kept
    assert sorted(tmp_path.iterdir()) == [tmp_path / "kept", path]


def test_a_damaged_block_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    with pytest.raises(Stop):
        sweep(plan(), path, progress=lambda _: (_ for _ in ()).throw(Stop))
    (block,) = path.with_name("x.csv.partial").glob("*.npz")
    block.write_bytes(block.read_bytes()[:-100])
    with pytest.raises(sm.DomainError, match=f"{block}: is damaged: remove it"):
        sweep(plan(), path)
    block.unlink()
    sweep(plan(), path)
    assert list(tmp_path.iterdir()) == [path]


# -- only what the form needs ---------------------------------------------------------------------

EXTRAS = ("dask", "distributed", "filelock", "h5netcdf", "h5py", "pyarrow", "zarr")


@pytest.mark.parametrize(
    ("ending", "kept"),
    [
        (".csv", ()),
        (".parquet", ("pyarrow",)),
        (".nc", ("h5netcdf", "h5py")),
        (".zarr", ("zarr",)),
    ],
)
def test_form_needs_only_its_own_packages(
    tmp_path: Path, ending: str, kept: tuple[str, ...]
) -> None:
    hidden = sorted({*EXTRAS} - {*kept})
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden}))\n"
        f"from specmodel.cli.main import main; sys.exit(main({COMMAND} + ['-o', sys.argv[1]]))"
    )
    there, here = tmp_path / f"there{ending}", tmp_path / f"here{ending}"
    subprocess.run([sys.executable, "-c", code, str(there)], check=True)  # noqa: S603
    assert main([*COMMAND, "-o", str(here)]) == 0
    if here.is_dir():
        assert read(there).identical(read(here))
    else:
        assert there.read_bytes() == here.read_bytes()


@pytest.mark.parametrize(
    ("ending", "named"), [(".zarr", "zarr"), (".nc", "h5netcdf, h5py"), (".parquet", "pyarrow")]
)
def test_missing_packages_are_named_before_any_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ending: str,
    named: str,
) -> None:
    for name in EXTRAS:
        monkeypatch.setitem(sys.modules, name, None)
    assert main([*COMMAND, "-o", str(tmp_path / f"x{ending}")]) == 2
    error = capsys.readouterr().err
    assert f"a sweep to {ending} needs {named}: pip install 'specmodel[sweep]'" in error
    assert list(tmp_path.iterdir()) == []


def test_cells_of_a_csv(tmp_path: Path) -> None:
    """Labels are quoted, whole numbers have no point, and NaN is an empty cell."""
    path = tmp_path / "x.csv"
    small = plan(
        axes={"name": ('a "b", c', "d"), "share": (0.5, 2.0)},
        cases={(name, share): case() for name in ('a "b", c', "d") for share in (0.5, 2.0)},
        B=np.array([1.0, 2.5]),
        k=np.array([3.0]),
        L=np.array([2048.0]),
        variables=("S", "k_star", "B_p_star"),
        block_points=1,
    )
    sweep(small, path)
    lines = path.read_text().splitlines()
    assert lines[0] == '"name","share","B","k","L","alpha","S","k_star","B_p_star"'
    assert len(lines) == 1 + 2 * 2 * 2 * 3
    assert lines[1].startswith('"a ""b"", c",0.5,1,3,2048,0.5,')
    assert lines[6].startswith('"a ""b"", c",0.5,2.5,3,2048,0.9,')
    assert lines[-1].startswith('"d",2,2.5,3,2048,0.9,')
    assert _texts(np.array([[np.nan, 1.0], [np.inf, 1e-7]])).tolist() == [
        ["", "1"],
        ["inf", "1e-07"],
    ]
    assert _texts(np.array([0.1, -10.0, np.nan])).tolist() == ["0.1", "-10", ""]
