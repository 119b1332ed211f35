"""What the README shows is what the commands print today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specmodel.cli import main
from specmodel.hardware import load_device

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))]


def block(start: str) -> str:
    return README.split(start, 1)[1].split("\n```", 1)[0].strip("\n")


def test_the_first_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--gpu", "h100"]) == 0
    assert capsys.readouterr().out.strip("\n") == block("$ specmodel predict --gpu h100\n")


def test_which_drafter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--gpu", "h100", "--workload", "code"]) == 0
    printed = capsys.readouterr().out.split("\n\nAcceptance is each")[0]
    assert printed == block("```console\n$ specmodel compare --gpu h100 --workload code\n")


def test_kernel_sums(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {"__name__": "benchmark"}
    code = (ROOT / "benchmarks" / "kernel_sums.py").read_text(encoding="utf-8")
    exec(compile(code, "kernel_sums.py", "exec"), namespace)  # noqa: S102
    namespace["main"]()  # type: ignore[operator]
    printed = re.findall(r"[-+]?\d+\.\d+", capsys.readouterr().out)
    shown = re.findall(
        r"[-+]?\d+\.\d+", block("was fitted to those tables, shape by shape:\n\n```")
    )
    assert shown == printed


def test_errors_of_kernels_are_those_of_the_calibrations_that_ship() -> None:
    kinds = {
        "matrix products, bf16": ("gemm", "bfloat16"),
        "matrix products, fp8": ("gemm", "fp8"),
        "decode attention": ("attention", "bfloat16"),
        "decode attention, fp8 cache": ("attention", "fp8"),
        "experts, bf16": ("experts", "bfloat16"),
        "experts, fp8": ("experts", "fp8"),
        "experts, fp8 in blocks": ("experts", "fp8_block"),
        "all-reduce": ("allreduce", "bfloat16"),
    }
    for line, (kind, dtype) in kinds.items():
        cells = block(f"| {line} |").splitlines()[0].split("|")
        for gpu, cell in zip(("a100", "h100", "b200", "l40s"), cells, strict=False):
            calibration = load_device(gpu).calibration
            assert calibration is not None
            fit = calibration.operators[kind].get(dtype)
            if fit is None:
                assert cell.strip() == "-"
            else:
                assert fit.held_out is not None
                means = (fit.held_out.mean, fit.in_sample.mean)
                assert cell.split()[0:3:2] == [f"{x:.1%}".rstrip("%") for x in means]


def test_notebook_example_runs() -> None:
    code = README.split("```python\n", 1)[1].split("```", 1)[0]
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102


@pytest.mark.parametrize(
    "line",
    [
        text.removeprefix("$ ").split("#")[0].strip()
        for page in (README, *PAGES)
        for text in page.replace("\\\n", " ").splitlines()
        if text.startswith("$ specmodel") and "|" not in text
    ],
)
def test_every_command_runs(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import json
    import shlex

    from samples import LLAMA

    monkeypatch.chdir(tmp_path)
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "config.json").write_text(json.dumps(LLAMA))
    assert main(shlex.split(line)[1:]) == 0
    assert capsys.readouterr().err == ""


def in_short(page: str, until: str) -> str:
    return page.split("| shape, held out")[1].split(until)[0].strip()


def test_how_far_to_trust_it_is_the_accuracy_page() -> None:
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert in_short(README, "\n\nOn SpecDecode-Bench") == in_short(page, "\n\n## By source")


@pytest.mark.slow
def test_the_accuracy_page_is_what_validate_writes(tmp_path: Path) -> None:
    page, figure = tmp_path / "accuracy.md", tmp_path / "accuracy.png"
    assert main(["validate", "--plot", str(figure), "--report", str(page)]) == 0
    shipped = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    number = re.compile(r"[-+]?\d+\.?\d*")
    ours, theirs = (page.read_text(encoding="utf-8"), shipped)
    assert number.sub("#", ours) == number.sub("#", theirs)
    for ours_number, theirs_number in zip(
        number.findall(ours), number.findall(theirs), strict=True
    ):
        assert float(ours_number) == pytest.approx(float(theirs_number), abs=0.2)


def test_host_time_prefill_and_comparison_with_measurements_do_not_contradict_the_tool() -> None:
    flat = " ".join(README.split())
    assert "not modelled yet" not in flat
    assert "not yet been compared" not in flat
    assert "`predict` leaves prefill out" in flat
    assert f"`validate` reads {page_rows()} published rows" in flat


def page_rows() -> str:
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    return page.rsplit(", ", 1)[1].removesuffix(" rows.\n")


def test_ci_runs_every_test_that_the_makefile_has() -> None:
    assert "make test VENV" in (run := (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    assert "make slow docs VENV" in run
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "\ntest: setup lint unit first-notebook\n" in makefile
    assert "\nslow: setup slow-tests notebooks\n" in makefile
