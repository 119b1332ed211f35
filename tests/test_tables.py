"""Measurement tables: what is read, and every way they are refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specmodel as sm
from specmodel.errors import FitError
from specmodel.rates import device_of_table
from specmodel.tables import COLUMNS, features, groups, read_table

H100 = sm.load_device("h100")
NAME = "NVIDIA H100 80GB HBM3"


def line(**fields: object) -> str:
    row = {"mode": "graph", "repeats": 30, "spread": 0.01, "device": NAME, **fields}
    assert set(row) <= set(COLUMNS)
    return ",".join(str(row.get(name, "")) for name in COLUMNS)


def gemm(m: float = 16, seconds: object = 1.6e-5, **fields: object) -> str:
    shape = {"operator": "gemm", "dtype": "bfloat16", "m": m, "n": 4096, "k": 4096}
    return line(**{**shape, "seconds": seconds, **fields})


def attention(**fields: object) -> str:
    shape = {"batch": 8, "width": 1, "context": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128}
    shape |= {"operator": "attention", "dtype": "bfloat16", "kv_dtype": "bfloat16"}
    return line(**{**shape, "seconds": 7e-5, **fields})


def experts(**fields: object) -> str:
    shape = {"operator": "experts", "dtype": "bfloat16", "m": 16, "n": 768, "k": 2048}
    return line(**{**shape, "experts": 128, "top_k": 8, "seconds": 4e-4, **fields})


HEADER = ",".join(COLUMNS)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def make(*lines: str, header: str = HEADER, end: str = "\n") -> Path:
        path = tmp_path / "table.csv"
        path.write_text("\n".join((header, *lines)) + end, encoding="utf-8")
        return path

    return make


def test_rows_and_what_forms_take(write: Callable[..., Path]) -> None:
    path = write(
        gemm(),
        gemm(32, 1.7e-5),
        attention(width=4),
        attention(kv_dtype="fp8"),
        experts(note="balanced"),
        experts(note="power_law_1.2"),
        experts(),
        experts(m=32, note='"uniform routing, 77 experts touched"'),
        line(operator="elementwise", dtype="bfloat16", m=1, n=8, bytes=48, seconds=5e-6),
        line(operator="launch", seconds=5e-6, mode="eager"),
        line(operator="reference", dtype="bfloat16", seconds=5e-6),
        line(operator="reference", dtype="bfloat16", seconds=5.1e-6),
        gemm(8192, "", note="error: out of memory"),
    )
    path.with_suffix(".json").write_text(
        json.dumps({"schema": 1, "torch": "2.13.0", "date": "2026-11-29", "threads": 4})
    )
    table = read_table(path, device=H100)
    assert len(table) == 12
    assert table.failures == ("gemm: out of memory",)
    assert table.source["engine"] == "torch 2.13.0"
    assert len(table.source["sha256"]) == 64
    assert table.formats("attention") == ("bfloat16", "fp8")
    assert table.formats("launch") == ("eager",)
    product = features(table.of("gemm"), "gemm")
    assert product["weight_bytes"].tolist() == [2 * 4096**2] * 2
    assert np.unique(groups(table.of("gemm"), "gemm")).size == 1
    wide = features(table.in_format("attention", "bfloat16"), "attention")
    assert wide["kv_bytes"].tolist() == [8 * 4096 * 8 * 128 * 2 * 2]
    # 4 positions see 4096 tokens each, 4 FLOP an element
    assert wide["flops"].tolist() == [8 * 4 * 32 * 128 * 4096 * 4]
    half = features(table.in_format("attention", "fp8"), "attention")
    assert half["kv_bytes"].tolist() == [8 * 4096 * 8 * 128 * 2]
    touched = features(table.of("experts"), "experts")["touched"]
    assert touched[0] == 128
    assert touched[1] == pytest.approx(8 + 120 * (15 / 16) / (31 / 16))
    assert touched[2] == pytest.approx(128 * (1 - (1 - 1 / 16) ** 16))
    assert touched[3] == 77
    assert features(table.of("elementwise"), "elementwise")["bytes"].tolist() == [48]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "no timed row"),
        ((gemm(), "gemm,bfloat16,graph,1"), "line 3: 4 of 25 fields"),
        ((gemm(seconds="nan"),), "line 2: seconds: must be finite"),
        ((gemm(seconds="inf"),), "line 2: seconds: must be finite"),
        ((gemm(seconds=-1e-5),), "line 2: seconds: must be > 0"),
        ((gemm(seconds=0),), "line 2: seconds: must be > 0"),
        ((gemm(seconds="fast"),), "line 2: seconds: must be a number"),
        ((gemm(seconds=""),), "line 2: seconds: missing"),
        ((gemm(m=1.5),), "line 2: m: must be a whole number"),
        ((gemm(k=""),), "line 2: k: missing in a row of gemm"),
        ((gemm(operator="gem"),), "line 2: unknown operator 'gem'; did you mean 'gemm'"),
        ((gemm(dtype="bfloat"),), "line 2: unknown dtype 'bfloat'; did you mean 'bfloat16'"),
        ((attention(kv_dtype="fp9"),), "line 2: unknown kv_dtype 'fp9'"),
        ((gemm(mode="fast"),), "line 2: mode must be graph or eager"),
        ((gemm(), gemm(seconds=2e-5)), "line 3: the same shape as line 2"),
        ((gemm(), gemm(32, device="NVIDIA A100-SXM4-80GB")), "line 3: device 'NVIDIA A100"),
        ((gemm(device="NVIDIA A100-SXM4-80GB"),), "line 2: a table of 'NVIDIA A100"),
        ((gemm(seconds=1.6e-2),), "line 2: 0.016 s for this gemm is 1.5e.03 times"),
        ((gemm(), gemm(32, 16.0)), "line 3: 16 s for this gemm"),
        ((gemm(512, 1e-6),), "line 2: 1e-06 s for this gemm would be .* cannot do"),
        ((attention(seconds=1e-8, context=65536),), "line 2: 1e-08 s for this attention would be"),
    ],
)
def test_bad_rows_are_named(
    write: Callable[..., Path], lines: tuple[str, ...], message: str
) -> None:
    path = write(*lines)
    with pytest.raises(FitError, match=message) as caught:
        read_table(path, device=H100)
    assert str(caught.value).startswith(str(path))


def test_bad_files_are_named(write: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(FitError, match="no such file"):
        read_table(tmp_path / "none.csv")
    with pytest.raises(FitError, match="line 3: cut short"):
        read_table(write(gemm(), gemm(32), end=""))
    with pytest.raises(FitError, match="line 1: column 'seconds' is missing"):
        read_table(write(gemm(), header=HEADER.replace("seconds", "second")))
    with pytest.raises(FitError, match="line 1: columns must be"):
        read_table(write(gemm(), header=HEADER + ",more"))
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    with pytest.raises(FitError, match="empty"):
        read_table(empty)
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FitError, match="not a text file in UTF-16"):
        read_table(binary)
    path = write(gemm())
    path.with_suffix(".json").write_text("{")
    with pytest.raises(FitError, match="not valid JSON"):
        read_table(path)


def own_table(folder: Path, seconds: Callable[[int, float], float], **record: Any) -> Path:
    """Write a table as a calibration run does, its times changed, and what belongs to it."""
    rows = [
        {"operator": "stream", "dtype": "bfloat16", "mode": "eager", "bytes": 1e9, "seconds": 0.04}
    ]
    for n, m in product((1024, 2048, 4096), (1, 16, 64, 256)):
        time = 1e-4 + 2 * n * n / 2e10 + 2 * m * n * n / 2e11
        shape = {"m": m, "n": n, "k": n, "seconds": time}
        rows.append({"operator": "gemm", "dtype": "bfloat16", "mode": "eager", **shape})
    path = folder / "cpu.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for i, row in enumerate(rows):
            time = seconds(i, row["seconds"])
            writer.writerow({"device": "A CPU", "repeats": 3, **row, "seconds": f"{time:.9g}"})
    peak = {"memory_bandwidth": 2.5e10, "flops": {"bfloat16": 1.9e11}}
    whole = {
        "device": {"device": "A CPU", "kind": "cpu"},
        "memory_capacity": 1e10,
        "cache": 3e7,
        "threads": 1,
        "torch": "2",
        "peak": peak,
        "noise": {"reference": 0.01, "drift": 0.0, "rows": 0.02, "worst": 0.3},
        "rows": len(rows),
    }
    path.with_suffix(".json").write_text(json.dumps({**whole, **record}), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("seconds", "record", "message"),
    [
        (lambda i, s: 1e3 * s, {}, "where the run that made it found"),
        (lambda i, s: s / 1e3, {}, "where the run that made it found"),
        (lambda i, s: 1e3 * s, {"peak": {}}, "are seconds in another unit"),
        (lambda i, s: s / 1e3 if i == 7 else s, {}, "line 9: .* times the next"),
        (lambda i, s: s, {"rows": 99}, "line 14: cut short, the run wrote 99 rows and 13 are here"),
        (lambda i, s: s, {"cache": None}, "cache: must be a number; got None"),
    ],
)
def test_a_table_that_is_not_what_the_run_wrote(
    tmp_path: Path, seconds: Callable[[int, float], float], record: dict[str, Any], message: str
) -> None:
    path = own_table(tmp_path, seconds, **record)
    with pytest.raises(FitError, match=message):
        device_of_table(read_table(path), "A CPU", {})


def test_a_device_from_its_own_table_and_what_is_stated(tmp_path: Path) -> None:
    table = read_table(own_table(tmp_path, lambda i, s: s))
    device = device_of_table(table, "A CPU", {})
    assert device.memory_bandwidth == 2.5e10
    assert (device.multiprocessors, device.l2_cache, device.family) == (1, 3e7, "cpu")
    mine = device_of_table(table, "A CPU", {"bandwidth": 3e10, "multiprocessors": 4.0})
    assert (mine.memory_bandwidth, mine.multiprocessors, mine.l2_cache) == (3e10, 4, 3e7)
    assert mine.peak_flops == device.peak_flops
    assert "given by hand" in mine.sources["memory_bandwidth"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"noise": None}, "noise: must be a mapping"), ({"noise": {}}, "noise: reference: missing"),
        ({"noise": {"reference": -5, "rows": 0}}, "noise: reference: must be >= 0; got -5"),
        ({"threads": None}, "threads: must be a whole number"), ({"threads": "x"}, "threads: must"),
        ({"peak": {"flops": 1}}, "peak: flops: must be a mapping; got 1"),
        ({"peak": {"memory_bandwidth": [1]}}, "memory_bandwidth: must be a number; got [1]"),
        ({"device": {"multiprocessors": "x"}}, "multiprocessors: must be a whole number"),
        ({"models": {"a": 3}}, "models: a: must be a mapping; got 3"),
        ({"rows": 1.5}, "rows: must be a whole number"),
    ],
)  # fmt: skip
def test_a_sidecar_is_read_strictly(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    table = own_table(tmp_path, lambda _, s: s, **record)
    with pytest.raises(FitError) as caught:
        device_of_table(read_table(table), "A CPU", {})
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ['"x"', "NaN", "[]", "null", "[" * 20_000])
def test_a_sidecar_that_is_no_record(text: str, tmp_path: Path) -> None:
    table = own_table(tmp_path, lambda _, s: s)
    table.with_suffix(".json").write_text(text)
    with pytest.raises(FitError, match=r"cpu.json: (must be a mapping|not valid JSON)"):
        read_table(table)
