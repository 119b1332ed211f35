"""Shared fixtures: a device and models that many tests use, and the optional measurement folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

import specmodel as sm

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run in several processes: one thread each
os.environ.pop("COLUMNS", None)  # output is as wide as it needs, whatever the shell exports
settings.register_profile("machines differ in speed", deadline=None)
settings.load_profile("machines differ in speed")

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def h100() -> sm.Device:
    return sm.load_device("h100")


@pytest.fixture(scope="session")
def llama() -> sm.Architecture:
    return sm.load_model("llama-3.1-8b")


@pytest.fixture(scope="session")
def qwen_moe() -> sm.Architecture:
    return sm.load_model("qwen3-30b-a3b")


@pytest.fixture(scope="session")
def model_configs() -> Path:
    """Folder of Hugging Face configurations that are not part of the project."""
    folder = SHARED / "models"
    if not folder.is_dir():
        pytest.skip("the folder of model configurations is not on this machine")
    return folder


@pytest.fixture(scope="session")
def kernel_tables() -> Path:
    """Folder of published kernel tables that are not part of the project."""
    pytest.importorskip("pyarrow", reason="parquet files need pyarrow")
    folder = SHARED / "kernels"
    if not folder.is_dir():
        pytest.skip("the folder of published kernel tables is not on this machine")
    return folder
