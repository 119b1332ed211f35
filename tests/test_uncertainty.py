"""Calibrated answers: which fit an operator uses, how sure they are, and what they say of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import specmodel as sm
from specmodel.calibration import Departure
from specmodel.hardware import Link
from specmodel.report import Setup, predict
from specmodel.roofline import kernels_of, operators_of
from specmodel.speculation import plain_run, round_time, verify_runs
from specmodel.tables import NUMBERS, Table, features
from specmodel.uncertainty import (
    NORMAL_90,
    beyond_measured,
    intervals,
    log_error,
    ratio_errors,
    spread,
)

H100 = sm.load_device("h100")
LLAMA = sm.load_model("llama-3.1-8b")
MOE = sm.load_model("qwen3-30b-a3b")
V3 = sm.load_model("deepseek-v3")
HOW = sm.Execution()


def make(**fields: object) -> Setup:
    given = {
        "device": H100,
        "target": LLAMA,
        "drafter": sm.Eagle3(),
        "acceptance": sm.Geometric(0.7),
        "execution": HOW,
        "batches": (1, 64),
        "contexts": (2048,),
    }
    return Setup(**{**given, **fields})  # type: ignore[arg-type]


def bounds(drafter: object, **where: object) -> dict[str, tuple[float, float]]:
    given = {"B": 8.0, "k": 4.0, "L": 2048.0, "S": 2.0, "execution": HOW}
    found = intervals(H100, LLAMA, drafter, **{**given, **where})  # type: ignore[arg-type]
    return {name: (float(low), float(high)) for name, (low, high) in found.items()}


def test_every_operator_of_a_dense_model_was_measured() -> None:
    assert predict(make()).setup.basis == "calibrated"
    assert make(execution=sm.Execution(calibrated=False)).basis == "generic"
    assert make(execution=sm.Execution(level="ideal")).basis == "datasheet"
    two = make(execution=sm.Execution(tp=2)).basis
    assert two == "calibrated, generic for all-gather"


def test_a_format_uses_the_fit_it_was_measured_in() -> None:
    """Block-quantised and weight-only matrices are other kernels than those of one scale."""
    for model, wanted in (
        (LLAMA, {("gemm", "bfloat16")}),
        (LLAMA.with_dtypes(dtype="float16"), {("gemm", "bfloat16")}),
        (LLAMA.with_dtypes(weights="fp8"), {("gemm", "bfloat16"), ("gemm", "fp8")}),
        (LLAMA.with_dtypes(weights="int4"), {("gemm", "bfloat16")}),  # the LM head's
        (V3, {("gemm", "bfloat16"), ("experts", "fp8_block")}),
    ):
        kernels = kernels_of(H100, HOW)
        operators = operators_of(model, HOW, B=8)
        used = {kernels.fit_key(op) for op in operators if op.kind in ("gemm", "experts")}
        assert used - {None} == wanted, model.name
    reread = kernels_of(H100, sm.Execution(kv_reread=0.5))
    (op,) = (op for op in operators_of(LLAMA, HOW, B=8) if op.kind == "attention")
    assert reread.fit(op) is None  # as the user says it, not as it was measured


def test_predictions_and_tables_name_the_same_features() -> None:
    """The time of a kernel in a pass is that of its row in a table."""
    kernels = kernels_of(H100, HOW)
    rows = {
        "gemm": {"m": 16, "n": 4096, "k": 4096},
        "attention": {"batch": 16, "width": 1, "context": 4096, "heads": 32, "kv_heads": 8,
                      "head_dim": 128},
        "experts": {"m": 16, "n": 768, "k": 2048, "experts": 128, "top_k": 8},
    }  # fmt: skip
    for kind, shape in rows.items():
        numbers = {name: np.array([float(shape.get(name, np.nan))]) for name in NUMBERS}
        texts = {
            name: np.array([{"operator": kind, "dtype": "bfloat16"}.get(name, "")])
            for name in (
                "operator",
                "dtype",
                "mode",
                "kv_dtype",
                "model",
                "kernel",
                "device",
                "note",
            )
        }
        table = features(Table(texts=texts, numbers=numbers, lines=np.array([1])), kind)
        model = MOE if kind == "experts" else LLAMA
        for op in operators_of(model, HOW, B=16, L=4096):
            same = op.kind == kind
            if kind == "gemm":
                same &= (op.shape.get("n"), op.shape.get("k")) == (4096, 4096)
            if same:
                mine = kernels.features(op)
                for name, value in table.items():
                    if name in mine and not (kind == "experts" and name == "touched"):
                        assert float(np.asarray(mine[name])) == pytest.approx(float(value[0])), name
                break
        else:
            raise AssertionError(kind)


def test_intervals_hold_the_prediction_and_a_ratio_is_surer_than_its_parts() -> None:
    found = bounds(sm.Eagle3())
    times = round_time(H100, LLAMA, sm.Eagle3(), B=8, k=4, L=2048)
    for name in ("T_p", "T_v", "T_d"):
        low, high = found[name]
        assert low < float(getattr(times, name)) < high
    width = {name: np.log(high / low) for name, (low, high) in found.items()}
    assert width["S"] < width["T_p"] + width["T_v"]


def test_off_is_certain() -> None:
    low, high = bounds(sm.Eagle3(), k=0.0, S=1.0)["S"]
    assert (low, high) == (1.0, 1.0)


def test_host_and_link_time_are_known() -> None:
    """They move T_d and its bounds alike."""
    host = bounds(sm.NGram(hit=1.0, host_time=1e-3))["T_d"]
    assert host == pytest.approx((1e-3, 1e-3))
    link = Link(latency=5e-3, bandwidth=25e9)
    away = sm.DraftModel(sm.load_model("llama-3.2-1b"), device=H100, link=link)
    low, high = bounds(away)["T_d"]
    T_d = float(round_time(H100, LLAMA, away, B=8, k=4, L=2048).T_d)
    assert 1e-2 < low < T_d < high


def test_one_fit_that_several_operators_use_is_uncertain_once() -> None:
    run = plain_run(H100, LLAMA, B=8.0, L=2048.0, execution=HOW)
    found = spread([run])
    assert [key for key in found.gradients if key[1] == "elementwise"] == [
        (H100.name, "elementwise", "add")
    ]


def test_what_a_table_does_not_tell_widens_intervals() -> None:
    """On L40S nobody measured attention with several query positions."""
    l40s = sm.load_device("l40s")
    attention = l40s.calibration.operators["attention"]["bfloat16"]  # type: ignore[union-attr]
    assert {"r", "eta_w"} <= set(attention.unknown())

    def width(W: float) -> float:
        runs = verify_runs(l40s, LLAMA, sm.Eagle3(), B=128.0, k=W - 1, L=4096.0, execution=HOW)
        one = spread(runs)
        return float(log_error([(1 / one.T, one)]))

    assert width(4) > 1.5 * width(1)
    known = replace(attention, pinned=dict.fromkeys(attention.pinned, "as stated"))
    assert known.unknown() == {}


def test_passes_that_depart_widen_times_more_than_ratios() -> None:
    def widths(passes: Departure | None) -> tuple[float, float]:
        calibration = replace(H100.calibration, passes=passes)  # type: ignore[type-var]
        device = replace(H100, calibration=calibration)
        found = intervals(device, LLAMA, sm.Eagle3(), B=8.0, k=4.0, L=2048.0, S=2.0, execution=HOW)
        return tuple(float(np.log(high / low)) for low, high in (found["T_p"], found["S"]))  # type: ignore[return-value]

    none = widths(None)
    far = widths(Departure(n=9, bias=0.0, residual=0.3, shared=1.0))
    assert far[0] > 3 * none[0]
    assert far[1] == pytest.approx(none[1], rel=0.3)  # what two passes share cancels


def test_beyond_what_was_measured_is_said_and_less_sure() -> None:
    def relative(B: float) -> float:
        one = spread([plain_run(H100, LLAMA, B=B, L=512.0, execution=HOW)])
        return float(log_error([(1 / one.T, one)]))

    assert relative(50_000.0) > 1.5 * relative(256.0)
    told = beyond_measured([plain_run(H100, LLAMA, B=50_000.0, L=512.0, execution=HOW)])
    assert any(
        line.startswith("gemm bfloat16 outside what was measured: m 50,000") for line in told
    )
    result = predict(make(batches=(1, 5000)))
    assert any("outside what was measured" in line for line in result.warnings)
    assert not beyond_measured(
        [plain_run(H100, replace(LLAMA, head_vocab_size=32000), B=8.0, L=512.0, execution=HOW)]
    )


@pytest.mark.parametrize("drafter", [sm.Eagle3(), sm.NGram(hit=0.5), sm.Medusa()])
def test_the_error_of_a_ratio_to_off_is_that_of_the_speedup(drafter: sm.Drafter) -> None:
    B, k = np.array([8.0, 300.0]), np.array([0, 1, 4])
    found = ratio_errors(H100, LLAMA, drafter, B=B, k=k, L=2048, execution=HOW)
    assert found.shape == (2, 3, 3)
    np.testing.assert_allclose(found, found.transpose(0, 2, 1), rtol=1e-9)
    for i, batch in enumerate(B):
        low, high = bounds(drafter, B=batch)["S"]
        assert np.log(high / low) / 2 == pytest.approx(NORMAL_90 * found[i, 0, 2], rel=1e-9)
    # what both rounds share cancels
    run = spread(verify_runs(H100, LLAMA, drafter, B=8.0, k=4, L=2048.0, execution=HOW))
    assert found[0, 1, 2] < float(log_error([(1 / run.T, run)])) * 2
