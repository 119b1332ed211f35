"""This CPU, calibrated for real: structure is asserted, errors are printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specmodel.cli import main

pytest.importorskip("torch", reason="torch is not installed")

BUDGET = 40


@pytest.mark.slow
def test_this_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "cpu.yaml"
    status = main(["calibrate", "--device", "cpu", "-o", str(profile), "--budget", f"{BUDGET}s"])
    out, err = capsys.readouterr()
    if status == 2 and "nois" in err:
        assert not profile.exists()
        pytest.skip(f"refused, as it should: {err.strip()}")
    assert status == 0, err
    assert (tmp_path / "cpu.csv").exists()
    with capsys.disabled():
        sys.stdout.write(f"\n{out}\n")
    assert (
        main(
            [
                "fit",
                str(tmp_path / "cpu.csv"),
                "-o",
                str(profile),
                "--overwrite",
                "--format",
                "json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    passes = found["passes"]
    assert passes["n"] >= 20
    assert set(passes["bases"]) == {"datasheet", "generic", "calibrated"}
    for kind in ("gemm", "attention"):
        assert found["operators"][kind]
    arguments = ["predict", "--profile", str(profile), "--model", "qwen2-0.5b", "--batch", "1,8"]
    dtype = "bfloat16" if "bfloat16" in found["operators"]["gemm"] else "float32"
    assert main([*arguments, "--dtype", dtype, "--drafter", "ngram", "--format", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["basis"].startswith("calibrated")
    for point in answer["points"]:
        assert point["T_p_low"] < point["T_p"] < point["T_p_high"]
        assert point["S_low"] <= point["S"] <= point["S_high"]


def test_the_device_script_needs_torch_and_the_core_alone() -> None:
    """On a borrowed GPU there may be nothing else: no rich, click, pandas or matplotlib."""
    absent = ("rich", "click", "pandas", "pyarrow", "matplotlib", "sympy", "xarray", "tqdm")
    code = f"import sys\nfor name in {absent}: sys.modules[name] = None\n"
    code += "import calibrate.device_check, specmodel.fitting, specmodel.checking\n"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603
