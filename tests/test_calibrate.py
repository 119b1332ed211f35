"""What a measurement says of the device it ran on."""

from __future__ import annotations

import pytest

import specmodel as sm

torch = pytest.importorskip("torch", reason="torch is not installed")


def test_describe_the_cpu() -> None:
    from calibrate import describe

    found = describe("cpu")
    assert found.kind == "cpu"
    assert found.torch == torch.__version__
    assert found.threads >= 1
    assert found.device


@pytest.mark.parametrize(
    ("device", "message"), [("gpuu", "unknown to torch"), ("meta", "must be cpu or cuda:N")]
)
def test_devices_that_are_not_there(device: str, message: str) -> None:
    from calibrate import describe

    with pytest.raises(sm.DomainError, match=message):
        describe(device)


def test_a_cuda_device_beyond_the_last() -> None:
    from calibrate import describe

    with pytest.raises(sm.DomainError, match="is not there"):
        describe(f"cuda:{torch.cuda.device_count()}")
