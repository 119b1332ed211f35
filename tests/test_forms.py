"""Operator forms: limits, monotonicity, and the plain roofline beside them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import specmodel as sm
from specmodel.errors import DomainError, FitError
from specmodel.forms import (
    ATTENTION,
    FORMS,
    GEMM_COLUMNS,
    GEMM_SERIAL_K,
    GEMM_SPLIT_K,
    Form,
    Rates,
    form_for,
    form_named,
    soft_roofline,
    traffic,
)

H100 = sm.load_device("h100").rates("bfloat16")
SHAPES = {
    "gemm": {
        "m": 16.0,
        "n": 4096.0,
        "k": 4096.0,
        "weight_bytes": 2 * 4096.0**2,
        "activation_bytes_each": 2.0,
    },
    "attention": {
        "batch": 8.0,
        "kv_heads": 8.0,
        "width": 1.0,
        "kv_bytes": 8 * 8 * 4096.0 * 128 * 4,
        "flops": 8 * 4.0 * 32 * 4096 * 128,
        "query_bytes": 8 * 32.0 * 128 * 4,
        "context": 4096.0,
    },
    "mla": {"kv_bytes": 1e8, "flops": 1e10, "query_bytes": 1e6},
    "experts": {
        "m": 16.0,
        "top_k": 8.0,
        "experts": 128.0,
        "touched": 80.0,
        "hidden": 2048.0,
        "width": 768.0,
        "weight_bytes": 3 * 2048.0 * 768 * 2,
        "flops": 6 * 16 * 8 * 2048.0 * 768,
    },
    "elementwise": {"bytes": 1e6},
    "launch": {"bytes": 0.0},
    "allreduce": {"bytes": 1e6, "ranks": 4.0},
}


def typical(form: Form) -> dict[str, float]:
    return {parameter.name: parameter.start for parameter in form.parameters}


@pytest.mark.parametrize("name", sorted(FORMS))
def test_every_form_is_positive_and_broadcasts(name: str) -> None:
    form = FORMS[name]
    shape = SHAPES[form.operator]
    one = form.seconds(shape, H100, typical(form))
    many = form.seconds({k: np.full(3, v) for k, v in shape.items()}, H100, typical(form))
    assert 1e-7 < float(one) < 1e-2
    np.testing.assert_allclose(many, np.full(3, one), rtol=1e-12)


@pytest.mark.parametrize("name", sorted(FORMS))
def test_every_number_is_a_quantity_within_bounds(name: str) -> None:
    form = FORMS[name]
    fitted = [p for p in form.parameters if p.prior > 0]
    assert 1 <= len(fitted) <= 10  # of which a fit frees at most 8
    for parameter in form.parameters:
        assert parameter.low <= parameter.start <= parameter.high
        assert parameter.unit
        assert parameter.meaning


@pytest.mark.parametrize("name", sorted(set(FORMS) - {"launch"}))
def test_twice_the_rates_and_no_overheads_is_half_the_time(name: str) -> None:
    form = FORMS[name]
    bare = {p.name: 1e-30 if p.unit == "s" else p.start for p in form.parameters}
    fast = replace(H100, bandwidth=2 * H100.bandwidth, flops=2 * H100.flops, link=2 * H100.link)
    shape = SHAPES[form.operator]
    one, two = (float(form.seconds(shape, rates, bare)) for rates in (H100, fast))
    assert two == pytest.approx(one / 2, rel=1e-9)


@given(m=st.integers(1, 2048), k=st.integers(64, 20000))
def test_a_product_takes_longer_with_more_k(m: int, k: int) -> None:
    for form in (GEMM_SPLIT_K, GEMM_SERIAL_K, GEMM_COLUMNS):
        one, two = (
            float(
                form.seconds(
                    {**SHAPES["gemm"], "m": m, "k": x, "weight_bytes": 8192.0 * x},
                    H100,
                    typical(form),
                )
            )
            for x in (k, 2 * k)
        )
        assert two > one


def test_a_full_wave_and_one_tile_more() -> None:
    """132 tiles of 64 x 128 fill an H100; with s = 1 the 133rd costs a second wave."""
    values = {**typical(GEMM_SPLIT_K), "s": 1.0, "eta_f": 0.01}
    shape = {**SHAPES["gemm"], "m": 64.0}
    full, more = (
        float(GEMM_SPLIT_K.seconds({**shape, "n": n}, H100, values)) for n in (132 * 128, 133 * 128)
    )
    assert more / full == pytest.approx(2.0, rel=0.01)


def test_copies_are_more_tiles() -> None:
    two = {**SHAPES["gemm"], "copies": 2.0, "weight_bytes": 4 * 4096.0**2}
    one = float(GEMM_SPLIT_K.seconds(SHAPES["gemm"], H100, typical(GEMM_SPLIT_K)))
    assert one < float(GEMM_SPLIT_K.seconds(two, H100, typical(GEMM_SPLIT_K))) < 2 * one


def test_attention_without_a_cache_is_its_fixed_cost() -> None:
    empty = {**SHAPES["attention"], "context": 0.0, "kv_bytes": 0.0, "flops": 0.0}
    values = typical(ATTENTION)
    cost = values["t0"] + values["c"] * 64
    cost += empty["query_bytes"] / values["eta_m"] / H100.bandwidth
    assert float(ATTENTION.seconds(empty, H100, values)) == pytest.approx(cost, rel=1e-12)


def test_wide_queries_read_the_cache_again_by_r() -> None:
    values = {**typical(ATTENTION), "t0": 1e-30, "c": 1e-30, "s": 1e-30, "r": 1.0, "ramp": 0}
    bare = {**SHAPES["attention"], "query_bytes": 0.0, "flops": 0.0}
    one, four = (float(ATTENTION.seconds({**bare, "width": w}, H100, values)) for w in (1.0, 4.0))
    assert four == pytest.approx(4 * one, rel=1e-9)


def test_a_kernel_that_does_not_split_leaves_bandwidth_idle() -> None:
    values = typical(ATTENTION)
    one = {**SHAPES["attention"], "batch": 1.0, "kv_heads": 1.0}
    split, whole = (float(ATTENTION.seconds({**one, "split": x}, H100, values)) for x in (1.0, 0.0))
    assert whole > 10 * split


def test_the_plain_roofline_knows_bytes_and_flops() -> None:
    for operator, shape in SHAPES.items():
        moved, flops = traffic(operator, shape)
        form = soft_roofline(operator)
        values = {"t0": 1e-6, "eta_m": 1.0, "eta_f": 1.0, "p": 20.0}
        rate = H100.link if operator == "allreduce" else H100.bandwidth
        ideal = 1e-6 + max(float(moved) / rate, float(flops) / H100.flops)
        assert float(form.seconds(shape, H100, values)) == pytest.approx(ideal, rel=0.05)


def test_forms_by_name_and_kind() -> None:
    assert form_for("gemm", "bfloat16") is GEMM_SPLIT_K
    assert form_for("gemm", "fp8") is GEMM_SERIAL_K
    assert form_for("gemm", "bfloat16", tiled=False) is GEMM_COLUMNS
    assert form_named("mla-latent").operator == "mla"
    with pytest.raises(DomainError, match="did you mean 'gemm-"):
        form_named("gem-columns")
    with pytest.raises(DomainError, match="no form"):
        form_for("pass", "bfloat16")


def test_what_a_form_needs_of_the_device() -> None:
    bare = Rates(bandwidth=1e12, flops=1e14)
    with pytest.raises(FitError, match="multiprocessors"):
        GEMM_SPLIT_K.seconds(SHAPES["gemm"], bare, typical(GEMM_SPLIT_K))
    with pytest.raises(FitError, match="link"):
        FORMS["all-reduce"].seconds(SHAPES["allreduce"], bare, typical(FORMS["all-reduce"]))
    with pytest.raises(DomainError, match="bandwidth must be > 0"):
        Rates(bandwidth=0, flops=1e14)
