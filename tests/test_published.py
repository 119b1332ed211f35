"""Published kernel tables: labels, versions, kernels and the rows that are kept."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import specmodel as sm
from specmodel.cli.main import cli
from specmodel.errors import FitError
from specmodel.fitting import fit_table
from specmodel.published import PACKAGE, _version, device_of, labels, read_published
from specmodel.tables import features

pytest.importorskip("pyarrow", reason="parquet files need pyarrow")
import pandas as pd

TARGETS = {
    ("a100_sxm", "gemm", "bfloat16"): 0.075,
    ("h100_sxm", "gemm", "bfloat16"): 0.057,
    ("b200_sxm", "gemm", "bfloat16"): 0.067,
    ("l40s", "gemm", "bfloat16"): 0.065,
    ("h100_sxm", "gemm", "fp8"): 0.061,
    ("b200_sxm", "gemm", "fp8"): 0.050,
    ("l40s", "gemm", "fp8"): 0.073,
    ("a100_sxm", "attention", "bfloat16"): 0.07,
    ("h100_sxm", "attention", "bfloat16"): 0.035,
    ("b200_sxm", "attention", "bfloat16"): 0.021,
    ("l40s", "attention", "bfloat16"): 0.057,
    ("a100_sxm", "experts", "bfloat16"): 0.123,
    ("h100_sxm", "experts", "bfloat16"): 0.094,
    ("b200_sxm", "experts", "bfloat16"): 0.087,
    ("l40s", "experts", "bfloat16"): 0.061,
    ("a100_sxm", "allreduce", "bfloat16"): 0.081,
    ("h100_sxm", "allreduce", "bfloat16"): 0.047,
    ("b200_sxm", "allreduce", "bfloat16"): 0.111,
}
"""Largest mean error with shapes left out."""


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["a100_sxm", "h100_sxm", "b200_sxm", "l40s"])
def test_published_tables(kernel_tables: Path, gpu: str, tmp_path: Path) -> None:
    output = tmp_path / "x.yaml"
    arguments = ["fit", str(kernel_tables), "-o", str(output), "--gpu", gpu, "--engine", "vllm"]
    run = CliRunner().invoke(cli, [*arguments, "--format", "json"])
    assert run.exit_code == 0, run.output
    found = json.loads(run.output)["operators"]
    for (label, operator, dtype), most in TARGETS.items():
        if label == gpu:
            assert found[operator][dtype]["held_out"]["mean"] <= most
    assert sm.load_device(output).calibration is not None


def test_newest_version() -> None:
    ordered = ["0.5.6.post2", "0.5.9", "0.5.14", "1.0.0", "1.3.0rc5", "1.3.0rc20", "1.3.0"]
    assert sorted(reversed(ordered), key=_version) == ordered


def test_labels_name_records() -> None:
    for label, name in (
        ("a100_sxm", "a100-sxm-80gb"), ("h100_sxm", "h100-sxm"), ("h200_sxm", "h200-sxm"),
        ("b200_sxm", "b200"), ("l40s", "l40s"),
    ):  # fmt: skip
        device = device_of(label)
        assert device is not None
        assert device.name == name
    assert device_of("mystery_sxm") is None


def products(gpu: str, **columns: Any) -> dict[str, Any]:
    base = {"gpu": gpu, "fw": "vllm", "ver": "0.24.0", "kernel": "linear", "dtype": "bfloat16"}
    return {**base, "m": 8, "n": 4096, "k": 4096, "seconds": 2e-5, **columns}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        products("h100_sxm", m=m, n=n) for m in (1, 8, 64, 512, 1024) for n in (512, 1024, 4096)
    ]
    rows += [products("h100_sxm", ver="0.5.0", seconds=1.0)]
    rows += [products("h100_sxm", kernel="other", seconds=1.0)]
    rows += [products("h100_sxm", dtype="int4_wo"), products("h100_sxm", fw="sglang")]
    rows += [products("mystery", m=m) for m in range(1, 9)]
    rows += [
        products("b200_sxm", dtype="fp8", m=m, seconds=2e-5 if m == 5 else 1e-5)
        for m in range(1, 10)
    ]
    rows += [products("l40s", n=n) for n in (1024, 8192)]
    pd.DataFrame(rows).to_parquet(tmp_path / "gemm.parquet")
    base = {"gpu": "h100_sxm", "fw": "vllm", "ver": "0.24.0", "kernel": "fa3"}
    attention = [
        {
            **base, "kv_dtype": kv, "batch": batch, "num_heads": 32, "num_kv_heads": heads,
            "head_dim": dim, "kv_len": length, "seconds": 1e-4,
        }
        for kv in ("bfloat16", "fp8")
        for batch in (1, 64, 1024)
        for heads in (8, 32)
        for dim in (64, 128)
        for length in (64, 8192)
    ]  # fmt: skip
    pd.DataFrame(attention).to_parquet(tmp_path / "decode_attention.parquet")
    moe = [
        {
            "gpu": "h100_sxm", "fw": "vllm", "ver": "0.24.0", "kernel_source": "triton",
            "moe_dtype": "bfloat16", "num_tokens": m, "hidden_size": h, "inter_size": i,
            "topk": 8, "num_experts": 128, "moe_tp_size": tp, "moe_ep_size": ep,
            "distribution": routing, "seconds": 1e-3,
        }
        for m in (1, 256, 1024)
        for h, i in ((2688, 1856), (4096, 1536))
        for tp, ep in ((1, 1), (2, 1), (1, 4))
        for routing in ("balanced", "power_law_1.2")
    ]  # fmt: skip
    pd.DataFrame(moe).to_parquet(tmp_path / "moe.parquet")
    reduce = [
        {
            "gpu": "h100_sxm", "fw": "vllm", "ver": "0.24.0", "kernel": f"custom_{mode}",
            "num_gpus": n, "bytes": size, "seconds": 1e-5,
        }
        for mode in ("graph", "eager")
        for n in (2, 4, 8)
        for size in (1024, 2**24, 2**26)
    ]  # fmt: skip
    pd.DataFrame(reduce).to_parquet(tmp_path / "allreduce.parquet")
    return tmp_path


def test_rows_that_are_kept(folder: Path) -> None:
    table = read_published(folder, gpu="h100_sxm", engine="vllm")
    assert table.source["engine"] == "vllm 0.24.0"
    assert len(table.source["sha256"]) == 64
    product = table.of("gemm")
    assert len(product) == 8  # four m up to 512, two n from 1,024
    assert set(product.numbers["seconds"]) == {2e-5}
    attention = table.in_format("attention", "bfloat16")
    assert set(attention.numbers["batch"]) == {64}  # a cache beyond 65 MB, batch up to 512
    assert set(attention.numbers["context"]) == {8192}
    assert set(attention.numbers["kv_heads"]) == {8}
    assert set(attention.numbers["head_dim"]) == {64, 128}
    assert set(table.in_format("attention", "fp8").numbers["head_dim"]) == {128}
    experts = table.of("experts")
    assert set(experts.numbers["m"]) == {1, 256}
    assert set(experts.numbers["n"]) == {1856, 928, 1536, 768}
    shape = features(experts, "experts")
    assert set(shape["weight_bytes"] / (2 * shape["hidden"] * shape["width"])) == {2.0, 3.0}
    assert set(table.of("allreduce").numbers["bytes"]) == {1024, 2**24}
    assert set(table.of("allreduce").texts["kernel"]) == {"custom_graph"}


def test_known_oddities_are_dropped(folder: Path) -> None:
    fp8 = read_published(folder, gpu="b200_sxm", engine="vllm").of("gemm")
    assert sorted(fp8.numbers["m"]) == [2, 3, 4, 6, 7, 8, 9]
    small = read_published(folder, gpu="l40s", engine="vllm").of("gemm")
    assert set(small.numbers["n"]) == {8192}


def test_what_a_folder_lacks(folder: Path, tmp_path: Path) -> None:
    assert ("h100_sxm", "vllm") in labels(folder)
    with pytest.raises(FitError, match=r"no row of gpu 'h100_sx'.*did you mean 'h100_sxm'"):
        read_published(folder, gpu="h100_sx", engine="vllm")
    with pytest.raises(FitError, match=r"engine 'vlm' \(engines: sglang, vllm\)"):
        read_published(folder, gpu="h100_sxm", engine="vlm")
    (tmp_path / "gemm.parquet").write_text("not a table")
    with pytest.raises(FitError, match=r"gemm.parquet: cannot be read"):
        read_published(tmp_path, gpu="h100_sxm", engine="vllm")


def test_a_label_without_a_record(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "m.yaml"
    arguments = ["fit", str(folder), "-o", str(output), "--gpu", "mystery", "--engine", "vllm"]
    run = CliRunner().invoke(cli, [*arguments, "--memory", "24", "--format", "json"])
    assert run.exit_code == 0, run.output
    assert any("no datasheet" in note for note in json.loads(run.output)["notes"])
    device = sm.load_device(output)
    fastest = (2 * 4096**2 + 8 * 4096 * 2 * 2) / 2e-5
    assert device.memory_bandwidth == pytest.approx(fastest, rel=0.01)


def test_the_package_has_the_same_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "systems" / "data" / "h100_sxm" / "gemm" / "vllm" / "0.24.0"
    place.mkdir(parents=True)
    rows = [
        {
            "kernel_source": "linear", "gemm_dtype": "bfloat16", "m": m, "n": n, "k": 4096,
            "latency": 0.02 + m * 1e-4,
        }
        for m in (1, 8, 64)
        for n in (2048, 4096)
    ]  # fmt: skip
    pd.DataFrame(rows).to_parquet(place / "gemm_perf.parquet")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    table = read_published(PACKAGE, gpu="h100_sxm", engine="vllm")
    np.testing.assert_allclose(sorted(set(table.numbers["seconds"])), [2.01e-5, 2.08e-5, 2.64e-5])
    assert fit_table(table, sm.load_device("h100")).calibration.source["table"] == PACKAGE
    with pytest.raises(FitError, match=r"no gpu 'h100'.*did you mean 'h100_sxm'"):
        read_published(PACKAGE, gpu="h100", engine="vllm")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FitError, match="not installed"):
        read_published(PACKAGE, gpu="h100_sxm", engine="vllm")
