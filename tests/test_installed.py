"""What an import costs and loads, and that an installed wheel is complete."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "sympy", "matplotlib", "xarray", "pandas", "click", "rich", "scipy.optimize")


def modules_after(code: str) -> set[str]:
    script = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    out = subprocess.run(  # noqa: S603
        [sys.executable, "-I", "-c", script], check=True, capture_output=True, text=True
    )
    return set(json.loads(out.stdout.splitlines()[-1]))


def test_import_loads_nothing_heavy() -> None:
    assert not modules_after("import specmodel") & set(HEAVY)


def test_predicting_needs_neither_sympy_nor_matplotlib() -> None:
    code = "from specmodel.cli import main; main(['predict', '--gpu', 'h100'])"
    assert not modules_after(code) & {"torch", "sympy", "matplotlib", "xarray", "pandas"}


def test_core_imports_only_numpy_scipy_and_yaml() -> None:
    before = modules_after("import numpy, scipy, yaml")
    core = "import specmodel.width, specmodel.memory, specmodel.hardware, specmodel.architectures"
    third_party = {name.partition(".")[0] for name in modules_after(core) - before} - set(
        sys.stdlib_module_names
    )
    assert {name for name in third_party if not name.startswith("_")} <= {
        "specmodel", "numpy", "scipy", "yaml", "cython_runtime",
    }  # fmt: skip


@pytest.mark.slow
def test_a_wheel_holds_profiles_and_presets(tmp_path: Path) -> None:
    """Built, installed beside this environment's dependencies, and run away from the checkout."""
    subprocess.run(  # noqa: S603
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)],
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    subprocess.run(  # noqa: S603
        [str(python), "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True
    )
    here = [p for p in sys.path if p.endswith("site-packages")]
    # the dependencies of this environment, but not its (possibly editable) specmodel
    (site / "dependencies.pth").write_text("\n".join(here) + "\n")
    found = subprocess.run(  # noqa: S603
        [str(python), "-c", "import specmodel; print(specmodel.__file__)"],
        check=True, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert Path(found.stdout.strip()).is_relative_to(site)
    command = tmp_path / "env" / "bin" / "specmodel"
    for arguments in (
        ["predict", "--gpu", "h100", "--format", "json"],
        ["list", "gpus", "--format", "json"],
        ["list", "models", "--format", "json"],
    ):
        out = subprocess.run(  # noqa: S603
            [str(command), *arguments], check=True, capture_output=True, text=True, cwd=tmp_path
        )
        assert json.loads(out.stdout)
