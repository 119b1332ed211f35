"""What S hangs on: signs, and that speed as a whole cancels."""

from __future__ import annotations

from dataclasses import replace

import pytest

import specmodel as sm
from specmodel.report import Setup
from specmodel.sensitivity import sensitivity

H100, LLAMA = sm.load_device("h100"), sm.load_model("llama-3.1-8b")


def make(level: str = "operators", batch: int = 16) -> Setup:
    return Setup(
        device=H100,
        target=LLAMA,
        drafter=sm.Eagle3(),
        acceptance=sm.PerPosition([0.73, 0.52, 0.35]),
        execution=sm.Execution(level=level),  # type: ignore[arg-type]
        batches=(batch,),
        contexts=(2048,),
    )


@pytest.mark.parametrize("batch", [1, 16, 128])
def test_a_device_that_is_faster_in_everything_changes_nothing(batch: int) -> None:
    """Every time is homogeneous of degree one in t_op, 1/M and 1/F, so the effects cancel."""
    found = sensitivity(make(batch=batch), 3, step=1e-4)
    slope = {name: (high - low) / (high + low) * 1e4 for name, (low, high) in found.items()}
    speed = slope["memory bandwidth"] + slope["peak FLOP/s"] - slope["time of an operator"]
    assert speed == pytest.approx(0, abs=1e-6)
    assert abs(slope["memory bandwidth"]) > 1e-3


def test_signs_and_the_drafting_of_a_compute_bound_batch() -> None:
    found = sensitivity(make(batch=128), 3)
    assert found["acceptance"][0] < found["acceptance"][1]
    assert found["peak FLOP/s"][0] < found["peak FLOP/s"][1]  # verification is what computes
    assert found["batch"][0] > found["batch"][1]


def test_one_sequence_and_offloading() -> None:
    low, high = sensitivity(make(batch=1), 3)["batch"]
    assert low != high
    offloaded = replace(make(), execution=sm.Execution(offload=0.5))
    low, high = sensitivity(offloaded, 3)["PCIe bandwidth"]
    assert low > high  # T_d is not offloaded: slower PCIe makes drafting relatively cheap
    assert "PCIe bandwidth" not in sensitivity(make(), 3)


def test_ideal_level_has_no_operator_time() -> None:
    assert "time of an operator" not in sensitivity(make("ideal"), 3)


def test_certain_acceptance_rises_no_further() -> None:
    setup = replace(make(), acceptance=sm.Geometric(1.0))
    low, high = sensitivity(setup, 3)["acceptance"]
    assert high == pytest.approx(4 / float(setup.round(16, 2048, 3).cost))
    assert low < high


@pytest.mark.parametrize(("k", "step"), [(0, 0.1), (3, 0.0), (3, 1.0)])
def test_nonsense_is_refused(k: int, step: float) -> None:
    with pytest.raises(sm.DomainError, match="needs k >= 1"):
        sensitivity(make(), k, step)
