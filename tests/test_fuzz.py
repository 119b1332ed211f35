"""Damaged files, put through every reader (`tests/fuzzing.py` runs more of them)."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzzing import READERS, fuzz

import specmodel as sm
from specmodel.acceptance_files import read_measured
from specmodel.cli import main
from specmodel.overheads import load_engine
from specmodel.tables import read_table
from specmodel.validation import read_cases, read_results

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)
)
BY_PATH: dict[str, Callable[[str], object]] = {
    "device": sm.load_device,
    "engine": load_engine,
    "model": sm.load_model,
    "table": read_table,
    "acceptance": read_measured,
    "results": read_results,
    "cases": read_cases,
}
SUFFIX = {"device": ".yaml", "engine": ".yaml", "model": ".json", "cases": ".yaml"}


@pytest.mark.parametrize("inputs", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damaged_files_are_refused_or_possible(
    inputs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = fuzz(inputs, seed=inputs)
    assert outcome.failures == []
    assert all(outcome.read[name] for name in READERS), outcome.read
    assert all(outcome.refused[name] for name in READERS), outcome.refused
    assert len(outcome.longest_error) <= 500
    with capsys.disabled():
        longest = max(outcome.longest.values())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        sys.stdout.write(f"\n{inputs} inputs: longest {longest:.2f} s, peak {peak:.2f} GB\n")


@pytest.mark.parametrize("kind", BY_PATH)
def test_only_regular_files_and_pipes_are_read(kind: str, tmp_path: Path) -> None:
    link = tmp_path / f"zero{SUFFIX.get(kind, '.csv')}"
    link.symlink_to("/dev/zero")
    folder = tmp_path / f"folder{SUFFIX.get(kind, '.csv')}"
    folder.mkdir()
    with pytest.raises(sm.SpecmodelError, match="is no regular file"):
        BY_PATH[kind](str(link))
    with pytest.raises(sm.SpecmodelError, match=r"is a folder|no such file|holds no config"):
        BY_PATH[kind](str(folder))


@pytest.mark.parametrize("kind", ["device", "engine", "cases"])
def test_aliases_are_refused(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "laughs.yaml"
    file.write_text(LAUGHS)
    with pytest.raises(sm.SpecmodelError, match=r"alias '\*a': write out what it repeats"):
        BY_PATH[kind](str(file))


@pytest.mark.parametrize("text", ["[" * 20_000, '{"a":' * 20_000])
def test_deep_nesting_is_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "deep.json"
    file.write_text(text)
    assert main(["predict", "--gpu", "h100", "--acceptance", str(file)]) == 2
    error = capsys.readouterr().err
    assert "nested too deeply" in error
    assert len(error) < 300


def test_a_long_file_is_not_echoed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "long.yaml"
    file.write_text("x" * 5_000_000)
    assert main(["predict", "--profile", str(file)]) == 2
    error = capsys.readouterr().err
    assert "must be a mapping; got 'xxx" in error
    assert len(error) < 300


def test_a_pipe_is_read(tmp_path: Path) -> None:
    config = Path(sm.__file__).parent / "data" / "models" / "llama-3.1-8b.json"
    command = [sys.executable, "-m", "specmodel", "show", "/dev/stdin"]
    done = subprocess.run(command, input=config.read_text(), capture_output=True, text=True)  # noqa: S603
    assert "8,030,261,248" in done.stdout, done.stderr


def test_a_cell_that_is_too_long_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    head = "id,hardware,engine,target_model,drafter_kind,batch,speedup,url"
    file.write_text(f"{head}\n1,{'9' * 140_000}\n")
    with pytest.raises(sm.SpecmodelError, match=r"rows.csv: line 2: a cell of more than 131,072"):
        read_results(file)
