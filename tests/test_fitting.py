"""Fits: known numbers come back within their intervals, and what a table cannot tell is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from numpy.typing import NDArray

import specmodel as sm
from specmodel.calibration import Calibration, FittedOperator, calibration
from specmodel.cli.main import cli, main
from specmodel.errors import FitError, ProfileError
from specmodel.fields import Fields
from specmodel.fitting import Measured, fit_operator, fit_table, predictive_interval
from specmodel.forms import (
    ALL_REDUCE,
    ATTENTION,
    ELEMENTWISE,
    EXPERTS,
    GEMM_SERIAL_K,
    GEMM_SPLIT_K,
    LAUNCH,
    Form,
)
from specmodel.hardware import device_yaml, read_device
from specmodel.tables import COLUMNS, read_table

H100 = sm.load_device("h100")
RATES = H100.rates("bfloat16")
NOISE = 0.05
TRUE = {
    "gemm-split-k": {"t0": 2e-6, "eta_m": 0.9, "eta_f": 0.8, "s": 0.5, "t_k": 5e-6},
    "attention-split-kv": {
        "t0": 1.2e-5, "c": 2e-8, "eta_m": 0.9, "kv_tile": 128.0, "s": 0.5,
        "streams": 64.0, "eta_w": 0.8, "r": 0.1, "eta_f": 0.4,
        "ramp": 4e-6,
    },
    "elementwise": {"t0": 4e-6, "eta_m": 0.7},
}  # fmt: skip
SHAPES = (
    (4096, 4096), (1024, 8192), (16384, 4096), (4096, 1024), (4096, 16384), (2048, 2048),
    (10240, 8192), (1536, 5120), (7168, 2560), (3072, 12288), (65536, 4096), (12288, 1536),
)  # fmt: skip


def gemm_features(rows: tuple[int, ...]) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.intp]]:
    m, shape = np.meshgrid(np.array(rows, dtype=float), np.arange(len(SHAPES)), indexing="ij")
    n, k = np.array(SHAPES, dtype=float)[shape.ravel()].T
    features = {
        "m": m.ravel(),
        "n": n,
        "k": k,
        "weight_bytes": 2 * n * k,
        "activation_bytes_each": np.full(n.size, 2.0),
    }
    return features, shape.ravel()


def attention_features() -> tuple[dict[str, NDArray[np.float64]], NDArray[np.intp]]:
    batch, width, context, heads = (
        x.ravel()
        for x in np.meshgrid(
            [1.0, 8, 64, 256], [1.0, 2, 4, 8, 16], [64.0, 1024, 8192, 65536], [1.0, 4, 8]
        )
    )
    features = {
        "batch": batch,
        "kv_heads": heads,
        "width": width,
        "context": context,
        "kv_bytes": batch * heads * context * 512,
        "flops": 4.0 * batch * width * context * 4 * heads * 128,
        "query_bytes": 4.0 * batch * width * 4 * heads * 128,
    }
    return features, np.unique(heads, return_inverse=True)[1]


def synthetic(
    form: Form, seed: int, *, outliers: float = 0.02
) -> tuple[Measured, dict[str, float]]:
    """Rows with known numbers, multiplicative noise and a few rows far too slow."""
    rng = np.random.default_rng(seed)
    if form is ELEMENTWISE:
        features = {"bytes": np.repeat(2.0 ** np.arange(12, 28), 3)}
        groups = np.repeat(np.arange(16), 3)
    else:
        features, groups = (
            attention_features() if form is ATTENTION else gemm_features((1, 8, 32, 64, 128, 512))
        )
    truth = {p.name: p.start for p in form.parameters} | TRUE[form.name]
    seconds = np.asarray(form.seconds(features, RATES, truth))
    seconds = seconds * np.exp(NOISE * rng.standard_normal(seconds.size))
    slow = rng.random(seconds.size) < outliers
    seconds = np.where(slow, seconds * rng.uniform(1.5, 4, seconds.size), seconds)
    return Measured(features=features, seconds=seconds, groups=groups, rates=RATES), truth


def inside(fit: FittedOperator, truth: dict[str, float]) -> list[bool]:
    """Whether each fitted number's 90% interval, in its logarithm, holds the truth."""
    spread = np.sqrt(np.diag(np.asarray(fit.covariance)))
    return [
        abs(np.log(fit.values[name] / truth[name])) < 1.645 * sd
        for name, sd in zip(fit.names, spread, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("form", [GEMM_SPLIT_K, ATTENTION, ELEMENTWISE], ids=lambda f: f.operator)
def test_true_numbers_are_inside_their_intervals(form: Form) -> None:
    """Over many draws, 90% intervals hold the truth 86 to 94% of the time."""
    draws = 60 if form is ATTENTION else 120
    found: list[bool] = []
    for seed in range(draws):
        data, truth = synthetic(form, seed)
        found += inside(fit_operator(form, data), truth)
    assert 0.86 <= np.mean(found) <= 0.94


@pytest.mark.slow
@pytest.mark.parametrize("form", [GEMM_SPLIT_K, ATTENTION], ids=lambda f: f.operator)
def test_predictive_intervals_hold_new_rows(form: Form) -> None:
    held = []
    for seed in range(40):
        fit = fit_operator(form, synthetic(form, seed)[0])
        new, _ = synthetic(form, 1000 + seed)
        low, high = predictive_interval(fit, new.features, RATES)
        held.append(np.mean((low <= new.seconds) & (new.seconds <= high)))
    assert 0.85 <= np.mean(held) <= 0.95


def test_known_numbers_come_back() -> None:
    data, truth = synthetic(GEMM_SPLIT_K, 1)
    fit = fit_operator(GEMM_SPLIT_K, data)
    for name in fit.names:
        assert fit.values[name] == pytest.approx(truth[name], rel=0.5)
    assert fit.values["eta_m"] == pytest.approx(0.9, abs=0.02)
    assert fit.in_sample.median == pytest.approx(0.67 * NOISE, rel=0.4)
    assert fit.held_out is not None
    assert fit.held_out.mean < 0.1
    assert fit.residual == pytest.approx(NOISE, rel=0.4)
    assert fit.ranges["m"] == (1, 512)


def test_noise_free_rows_are_met() -> None:
    data, truth = synthetic(GEMM_SPLIT_K, 0, outliers=0.0)
    exact = np.asarray(GEMM_SPLIT_K.seconds(data.features, RATES, truth))
    fit = fit_operator(GEMM_SPLIT_K, replace(data, seconds=exact))
    assert fit.in_sample.p90 < 1e-4
    assert fit.values["s"] == pytest.approx(truth["s"], rel=1e-2)


def test_few_rows_are_pulled_towards_typical_numbers() -> None:
    """24 rows, 12 shapes with 2 M each, are enough for useful errors."""
    features, groups = gemm_features((1, 128))
    truth = {p.name: p.start for p in GEMM_SPLIT_K.parameters} | TRUE["gemm-split-k"]
    seconds = np.asarray(GEMM_SPLIT_K.seconds(features, RATES, truth))
    seconds = seconds * np.exp(NOISE * np.random.default_rng(0).standard_normal(seconds.size))
    fit = fit_operator(
        GEMM_SPLIT_K, Measured(features=features, seconds=seconds, groups=groups, rates=RATES)
    )
    more, _ = gemm_features((1, 2, 8, 24, 64, 256))
    off = fit.seconds(more, RATES) / GEMM_SPLIT_K.seconds(more, RATES, truth) - 1
    assert np.mean(np.abs(off)) < 0.06


def test_what_a_table_cannot_tell_is_pinned() -> None:
    """Plain decoding says nothing of wide queries; one row each says nothing of compute."""
    data, _ = synthetic(ATTENTION, 3)
    plain = data.part(data.features["width"] == 1)
    fit = fit_operator(ATTENTION, plain)
    assert {"eta_w", "r", "streams"} <= set(fit.pinned)
    assert fit.values["r"] == 0
    assert fit.values["eta_w"] == 1
    assert fit.pinned["eta_w"] == "not identified by this table"
    assert not set(fit.names) & set(fit.pinned)
    one_row = synthetic(GEMM_SPLIT_K, 0)[0]
    one_row = one_row.part(one_row.features["m"] == 1)
    assert "s" in fit_operator(GEMM_SPLIT_K, one_row).pinned


def test_a_number_can_be_held() -> None:
    data, _ = synthetic(GEMM_SPLIT_K, 0)
    fit = fit_operator(GEMM_SPLIT_K, data, pin={"t0": 1e-6})
    assert fit.values["t0"] == 1e-6
    assert fit.pinned["t0"] == "held"


def test_at_most_eight_numbers() -> None:
    data, _ = synthetic(ATTENTION, 0)
    whole = np.where(data.features["kv_heads"] == 1, 0.0, 1.0)
    features = {**data.features, "split": whole}
    truth = TRUE["attention-split-kv"]
    seconds = np.asarray(ATTENTION.seconds(features, RATES, truth))
    fit = fit_operator(ATTENTION, replace(data, features=features, seconds=seconds))
    assert len(fit.names) == 8


def test_correlated_residuals_widen_errors() -> None:
    """A shape that is off as a whole counts once, not once for each of its rows."""
    data, _ = synthetic(GEMM_SPLIT_K, 0, outliers=0.0)
    shift = np.exp(0.1 * np.random.default_rng(5).standard_normal(len(SHAPES)))
    together = replace(data, seconds=data.seconds * shift[data.groups])
    alone = replace(together, groups=np.arange(data.seconds.size))
    one, other = (fit_operator(GEMM_SPLIT_K, x).errors["eta_m"] for x in (together, alone))
    assert one > 1.5 * other


def test_too_few_rows() -> None:
    data, _ = synthetic(ELEMENTWISE, 0)
    with pytest.raises(FitError, match="no row to fit"):
        fit_operator(ELEMENTWISE, data.part(data.seconds < 0))


def test_one_row_is_known_as_well_as_it_was_timed() -> None:
    one = Measured(
        features={"bytes": np.zeros(1)},
        seconds=np.array([5e-6]),
        groups=np.zeros(1, dtype=np.intp),
        rates=RATES,
        scatter=0.03,
    )
    fit = fit_operator(LAUNCH, one)
    assert fit.values["t0"] == pytest.approx(5e-6, rel=0.01)
    assert fit.errors["t0"] == pytest.approx(0.03 * 5e-6, rel=0.05)
    assert fit.held_out is None
    assert fit.residual == 0.03


# -- tables and files ----------------------------------------------------------------------------


def table_file(path: Path, *, seed: int = 0) -> Path:
    """A table of products, an elementwise kernel and launches, as a calibration writes it."""
    data, _ = synthetic(GEMM_SPLIT_K, seed, outliers=0.0)
    moved, _ = synthetic(ELEMENTWISE, seed, outliers=0.0)
    common = {"device": "NVIDIA H100 80GB HBM3", "mode": "graph", "repeats": 30}
    rows = [
        {"operator": "gemm", "dtype": "bfloat16", "m": m, "n": n, "k": k, "seconds": s}
        for m, n, k, s in zip(*(data.features[x] for x in "mnk"), data.seconds, strict=True)
    ]
    rows += [
        {
            "operator": "elementwise",
            "dtype": "bfloat16",
            "m": i + 1,
            "n": 64,
            "bytes": b,
            "seconds": s,
        }
        for i, (b, s) in enumerate(zip(moved.features["bytes"], moved.seconds, strict=True))
    ]
    rows += [
        {"operator": "launch", "mode": mode, "m": i, "seconds": s}
        for mode, s in (("eager", 5e-6), ("graph", 1e-6))
        for i in range(1, 5)
    ]
    rows += [
        {"operator": "gemm", "dtype": "fp8", "m": 1, "n": 64, "k": 64, "note": "error: none here"}
    ]
    text = [",".join(str((common | row).get(name, "")) for name in COLUMNS) for row in rows]
    path.write_text("\n".join([",".join(COLUMNS), *text]) + "\n")
    return path


def test_a_whole_table(tmp_path: Path) -> None:
    fitted = fit_table(read_table(table_file(tmp_path / "t.csv"), device=H100), H100)
    found = fitted.calibration
    assert set(found.operators) == {"gemm", "elementwise", "launch"}
    assert set(found.uncalibrated) == {"attention", "mla", "experts", "allreduce"}
    assert found.operators["launch"]["eager"].values["t0"] == pytest.approx(5e-6, rel=1e-3)
    assert any("none here" in note for note in found.notes)
    assert fitted.baseline["gemm"]["bfloat16"].form == "gemm-plain"


def test_rows_that_are_left_out_are_said(tmp_path: Path) -> None:
    path = table_file(tmp_path / "t.csv")
    lines = path.read_text().splitlines()
    names = dict.fromkeys(COLUMNS, "") | {"device": "NVIDIA H100 80GB HBM3", "repeats": "9"}
    product = names | {"operator": "gemm", "n": "4096", "k": "4096", "dtype": "bfloat16"}
    more = (
        product | {"mode": "eager", "m": "8", "seconds": "3e-5"},
        product | {"mode": "graph", "m": "8192", "seconds": "5e-4"},
        product | {"mode": "graph", "m": "8", "seconds": "2e-5", "dtype": "int4"},
        product | {"mode": "graph", "m": "8", "seconds": "2e-5", "dtype": "fp8"},
        names
        | {"operator": "launch", "mode": "eager", "kernel": "graph replay", "seconds": "9e-6"},
    )
    path.write_text("\n".join([*lines, *(",".join(row.values()) for row in more)]) + "\n")
    found = fit_table(read_table(path), H100).calibration
    notes = " / ".join(found.notes)
    assert "gemm bfloat16: not fitted outside CUDA graphs (1 timed)" in notes
    assert "gemm: not fitted beyond 1,024 rows (1 timed)" in notes
    assert "gemm int4: h100-sxm has no int4 peak: not fitted" in notes
    assert "gemm fp8: 1 rows are too few: not fitted" in notes
    assert set(found.operators["gemm"]) == {"bfloat16"}
    assert found.operators["gemm"]["bfloat16"].n == 72
    assert set(found.operators["launch"]) == {"eager", "graph", "replay"}


def test_a_cpu_has_no_tiles(tmp_path: Path) -> None:
    table = read_table(table_file(tmp_path / "t.csv"))
    cpu = sm.load_device("cpu-generic")
    assert fit_table(table, cpu).calibration.operators["gemm"]["bfloat16"].form == "gemm-columns"


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    fitted = fit_table(read_table(table_file(tmp_path / "t.csv")), H100)
    device = replace(H100, calibration=fitted.calibration)
    path = tmp_path / "d.yaml"
    path.write_text(device_yaml(device))
    again = read_device(path)
    assert again == device
    assert again.calibration is not None
    fit = again.calibration.operators["gemm"]["bfloat16"]
    features, _ = gemm_features((16,))
    np.testing.assert_array_equal(
        fit.seconds(features, RATES),
        fitted.calibration.operators["gemm"]["bfloat16"].seconds(features, RATES),
    )
    assert np.all(fit.log_error(features, RATES) < 0.05)


def record() -> dict[str, object]:
    data, _ = synthetic(ELEMENTWISE, 0)
    found = Calibration(operators={"elementwise": {"bfloat16": fit_operator(ELEMENTWISE, data)}})
    result: dict[str, object] = yaml.safe_load(yaml.safe_dump(found.record()))
    return result


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["schema"], 2, "schema: must be 1"),
        (["operators", "gem"], {}, "gem: unknown key; did you mean 'gemm'"),
        (["operators", "elementwise"], {}, "must be a mapping by dtype"),
        (["operators", "elementwise", "bfloat16", "form"], "none", "form: unknown form"),
        (["operators", "elementwise", "bfloat16", "form"], "all-reduce", "form: all-reduce is of"),
        (["operators", "elementwise", "bfloat16", "n"], 0, "n: must be a whole number >= 1"),
        (["operators", "elementwise", "bfloat16", "residual"], -1.0, "residual: must be >= 0"),
        (["operators", "elementwise", "bfloat16", "extra"], 1, "extra: unknown key"),
        (
            ["operators", "elementwise", "bfloat16", "parameters", "t0"],
            {"value": "4e-6", "error": 1.0},
            "t0: value: must be a number",
        ),
        (
            ["operators", "elementwise", "bfloat16", "parameters", "t0"],
            {"value": 4e-6, "unit": "us", "error": 1.0},
            "t0: unit: must be s",
        ),
        (
            ["operators", "elementwise", "bfloat16", "parameters", "t0"],
            {"value": 4e-6},
            "either an error or the reason",
        ),
        (
            ["operators", "elementwise", "bfloat16", "parameters", "t0"],
            {"value": 4e-6, "pinned": "x"},
            "names: must be those of the fitted",
        ),
        (
            ["operators", "elementwise", "bfloat16", "covariance", "log"],
            [[1.0, 2.0], [2.0, 1.0]],
            "positive semidefinite",
        ),
        (["operators", "elementwise", "bfloat16", "covariance", "log"], [[1.0]], "square matrix"),
        (["operators", "elementwise", "bfloat16", "in_sample", "mean"], "x", "mean: must be"),
        (["operators", "elementwise", "bfloat16", "ranges", "bytes"], [1], "must be two numbers"),
        (["uncalibrated"], "gemm", "uncalibrated: must be a list of text"),
        (["source"], [], "source: must be a mapping"),
    ],
)
def test_bad_blocks_are_named(path: list[str], value: object, message: str) -> None:
    block = record()
    inner = block
    for key in path[:-1]:
        inner = inner[key]  # type: ignore[assignment]
    inner[path[-1]] = value
    with pytest.raises(ProfileError, match=message) as caught:
        calibration(Fields(block, "file: calibration", fault=ProfileError))
    assert str(caught.value).startswith("file: calibration")


def test_the_command(tmp_path: Path) -> None:
    table, output = table_file(tmp_path / "t.csv"), tmp_path / "h.yaml"
    run = CliRunner().invoke(cli, ["fit", str(table), "-o", str(output)])
    assert run.exit_code == 0, run.output
    assert "plain soft roofline" in run.output
    assert "not calibrated, generic numbers: attention" in run.output
    device = sm.load_device(output)
    assert device.name == "h100-sxm"
    assert device.calibration is not None
    assert device.calibration.source["table"] == "t.csv"
    arguments = ["fit", str(table), "-o", str(output), "--gpu", "h100", "--format", "json"]
    assert CliRunner().invoke(cli, arguments).exit_code == 1  # it is there
    arguments.append("--overwrite")
    run = CliRunner().invoke(cli, [*arguments, "--plot", str(tmp_path / "r.png")])
    assert run.exit_code == 0, run.output
    product = json.loads(run.output)["operators"]["gemm"]["bfloat16"]
    for part in (product, product["soft_roofline"]):
        for errors in (part["in_sample"], part["held_out"]):
            assert 0 < errors["median"] <= errors["p90"] < 1
            assert 0 < errors["mean"] < 1
    assert (tmp_path / "r.png").stat().st_size > 1000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["h.yaml", "r.png", "t.csv"]


def test_a_device_without_a_record(tmp_path: Path) -> None:
    table = table_file(tmp_path / "t.csv")
    table.write_text(table.read_text().replace("NVIDIA H100 80GB HBM3", "Some Chip 9"))
    output = tmp_path / "x.yaml"
    arguments = ["fit", str(table), "-o", str(output)]
    assert main(arguments) == 2
    assert not output.exists()
    assert main([*arguments, "--memory", "80"]) == 0
    device = sm.load_device(output)
    assert device.memory_bandwidth == pytest.approx(0.9 * H100.memory_bandwidth, rel=0.2)
    arguments += ["--memory", "80", "--overwrite"]
    assert main([*arguments, "--bandwidth", "3350", "--flops", "989"]) == 0
    assert sm.load_device(output).memory_bandwidth == 3.35e12


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = table_file(tmp_path / "t.csv")
    for arguments, message in (
        (["fit", str(table), "-o", str(tmp_path / "no" / "x.yaml")], "no such folder"),
        (["fit", str(tmp_path), "-o", "x.yaml"], "say --gpu and --engine"),
        (["fit", str(tmp_path), "-o", "x.yaml", "--gpu", "a", "--engine", "vllm"], "has none of"),
        (["fit", str(table), "-o", "x.yaml", "--engine", "vllm"], "--engine goes with a folder"),
        (["fit", str(table), "-o", "x.yaml", "--gpu", "a100"], "not of NVIDIA A100"),
    ):
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.err.count("\n") == 1


def test_all_reduce_and_experts_and_serial_k_recover() -> None:
    rng = np.random.default_rng(0)
    size, ranks = (x.ravel() for x in np.meshgrid(2.0 ** np.arange(8, 25), [2.0, 4, 8]))
    m, shape = (x.ravel() for x in np.meshgrid(2.0 ** np.arange(10), np.arange(4)))
    e, k, h, i = np.array(
        [(8, 2, 4096, 14336), (128, 8, 2048, 768), (256, 8, 7168, 2048), (64, 6, 2048, 1408)],
        dtype=float,
    )[shape.astype(int)].T
    cases: list[tuple[Form, dict[str, NDArray[np.float64]], dict[str, float]]] = [
        (
            ALL_REDUCE,
            {"bytes": size, "ranks": ranks},
            {"t0": 4e-6, "eta_m": 0.6, "a": 2e-7, "t1": 3e-6, "q": 0.8, "t2": 4e-5},
        ),
        (
            EXPERTS,
            {
                "m": m, "top_k": k, "experts": e, "touched": e * (1 - (1 - k / e) ** m),
                "hidden": h, "width": i, "weight_bytes": 6 * h * i, "flops": 6 * m * k * h * i,
            },
            {"t0": 3e-5, "eta_m": 0.9, "eta_f": 0.6, "c": 40.0, "r": 3.0, "b": 40.0},
        ),
        (
            GEMM_SERIAL_K,
            gemm_features((1, 8, 32, 64, 65, 128, 129, 256, 512))[0],
            {
                "t0": 5e-6, "eta_m": 0.85, "eta_f": 0.6, "s": 0.8, "tau": 2e-7, "r": 3.0,
                "tile_m_min": 64.0, "tile_m_max": 256.0, "tile_n": 64.0,
            },
        ),
    ]  # fmt: skip
    for form, features, truth in cases:
        seconds = np.asarray(form.seconds(features, RATES, truth))
        seconds = seconds * np.exp(0.01 * rng.standard_normal(seconds.size))
        groups = np.arange(seconds.size) % 7
        fit = fit_operator(
            form, Measured(features=features, seconds=seconds, groups=groups, rates=RATES)
        )
        assert fit.held_out is not None
        assert fit.held_out.mean < 0.02
        for name in fit.names:
            assert fit.values[name] == pytest.approx(truth[name], rel=0.3)
