"""Where weights and drafters live: offloading, a drafter on a device of its own, what it costs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import specmodel as sm
from specmodel.cli import main
from specmodel.drafters import DynamicTree
from specmodel.hardware import Link
from specmodel.memory import devices_needed, memory
from specmodel.report import Setup, headline, predict
from specmodel.speculation import context_where_kv_passes_weights, round_time
from specmodel.width import Interval

H100, L40S = sm.load_device("h100"), sm.load_device("l40s")
LLAMA, SMALL = sm.load_model("llama-3.1-8b"), sm.load_model("llama-3.2-1b")


def test_offloaded_weights_stream_over_pcie() -> None:
    streamed = 2 * 7_504_924_672
    half = sm.pass_time(H100, LLAMA, B=1, L=0, level="ideal", offload=0.5)
    expected = streamed * (0.5 / 3.35e12 + 0.5 / 64e9)
    assert float(half.T) == pytest.approx(expected, rel=1e-12)
    assert float(sum(half.groups.values())) == pytest.approx(float(half.T))
    real = sm.pass_time(H100, LLAMA, B=1, L=0, offload=0.5, calibrated=False).T
    assert float(real) == pytest.approx(expected / 0.85, rel=0.02)
    used = memory(H100, LLAMA, L=0, offload=0.75)
    assert used.target_weights == 0.25 * LLAMA.weight_bytes
    lonely = replace(H100, pcie_bandwidth=None)
    with pytest.raises(sm.DomainError, match="has no PCIe bandwidth: offload must be 0"):
        sm.pass_time(lonely, LLAMA, B=1, offload=0.5)


def test_offloading_makes_wide_verification_pay() -> None:
    """A pass bound by PCIe verifies many rows for the price of one (Sequoia, arXiv:2402.12374)."""
    drafter = sm.DraftModel(SMALL)
    best = {}
    for share in (0.0, 1.0):
        r = sm.best_width(
            H100, LLAMA, drafter, sm.Geometric(0.8), B=1, L=512, k_max=64, offload=share
        )
        best[share] = (int(r.k), float(r.S))
    assert best[1.0][0] > 3 * best[0.0][0]
    assert best[1.0][1] > best[0.0][1]
    # the drafter itself stays on the device
    on, off = (
        round_time(H100, LLAMA, drafter, B=1, k=4, L=512, offload=share).T_d for share in (0.0, 1.0)
    )
    assert float(on) == float(off)


def test_a_drafter_on_its_own_device() -> None:
    link = Link(latency=5e-6, bandwidth=25e9)
    away = sm.DraftModel(SMALL, device=L40S, link=link)
    k, B = 4, 8
    there = round_time(H100, LLAMA, away, B=B, k=k, L=1000, tp=4)
    alone = round_time(L40S, LLAMA, sm.DraftModel(SMALL), B=B, k=k, L=1000)
    ids = B * 4 * (k + 1 + k)  # W positions there, k drafts back
    assert float(there.T_d) == pytest.approx(float(alone.T_d) + 2 * 5e-6 + ids / 25e9, rel=1e-12)
    head = sm.Eagle3(device=L40S, link=link)
    features = head.message_bytes(LLAMA, 4)
    assert float(features) == 4 * 9 + 5 * 3 * 4096 * 2
    free = round_time(H100, LLAMA, away, B=B, k=[0, 1], L=1000)
    assert float(free.T_d[0]) == 0


def test_the_drafters_own_device_holds_its_weights_and_cache() -> None:
    link = Link(latency=5e-6, bandwidth=25e9)
    there = sm.DraftModel(SMALL, device=L40S, link=link)
    used = memory(H100, LLAMA, there, k=4, L=1000, layout=sm.Execution(tp=2, dp=2).layout)
    plain = memory(H100, LLAMA, None, k=4, L=1000, layout=sm.Execution(tp=2, dp=2).layout)
    assert used.draft_total(7) == SMALL.weight_bytes + 4 * float(SMALL.kv_bytes(1005))  # whole
    assert used.total(7) == plain.target_weights + 4 * used.target_kv
    assert used.draft_capacity == 48e9
    assert used.fits(7)
    halved = memory(H100, LLAMA, replace(there, tp=2), k=4, L=1000)
    assert halved.draft_weights < 0.51 * SMALL.weight_bytes
    # a drafter that shares the target's weights takes them along
    layers = memory(H100, LLAMA, sm.SparseKV(device=L40S, link=link), k=4, L=1000)
    assert layers.draft_weights == LLAMA.weight_bytes
    ngram = memory(H100, LLAMA, sm.NGram(hit=1.0, device=L40S, link=link), k=4, L=1000)
    assert ngram.draft_total(1000) == 0
    assert ngram.max_batch == memory(H100, LLAMA, sm.NGram(hit=1.0), k=4, L=1000).max_batch


def test_the_drafters_device_fills_before_the_targets() -> None:
    """Llama-3.1-8B drafts on 48 GB for a 70B on eight times 80 GB: its KV ends the batch."""
    away = sm.DraftModel(LLAMA, device=L40S, link=Link(latency=5e-6, bandwidth=25e9))
    big = sm.load_model("llama-3.1-70b")
    used = memory(H100, big, away, k=3, L=8192, layout=sm.Execution(tp=8).layout)
    most = int(used.max_batch)
    assert most == (48e9 - LLAMA.weight_bytes) // float(LLAMA.kv_bytes(8196))
    assert used.fits(most)
    assert used.target_fits(most + 1)
    assert not used.draft_fits(most + 1)
    assert devices_needed(H100, big, away, batch=most, k=3, L=8192) == 4
    assert devices_needed(H100, big, away, batch=most + 1, k=3, L=8192) is None
    r = sm.speculate(H100, big, away, sm.Geometric(0.7), B=[most, most + 1], k=[0, 3], L=8192, tp=8)
    assert r.fits.values.tolist() == [[True, True], [True, False]]
    assert r.max_batch.values.tolist()[1] == most


def test_overlapped_drafting_hides_behind_verification() -> None:
    link = Link(latency=5e-6, bandwidth=25e9)
    apart = sm.DraftModel(SMALL, device=L40S, link=link)
    hidden = sm.DraftModel(SMALL, device=L40S, link=link, overlapped=True)
    k = np.arange(1, 9)
    one, two = (round_time(H100, LLAMA, d, B=1, k=k, L=1000) for d in (apart, hidden))
    np.testing.assert_allclose(two.T_d, np.maximum(one.T_d - one.T_v, 0), rtol=1e-12)
    np.testing.assert_allclose(sum(two.T_d_groups.values()), two.T_d, rtol=1e-12, atol=1e-18)
    assert np.all(two.cost <= one.cost)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sm.NGram(hit=1.0, device=L40S), "needs a link, and only then"),
        (lambda: sm.Eagle3(link=Link(0, 1e9)), "needs a link, and only then"),
        (lambda: sm.Eagle3(overlapped=True), "only on a device of its own"),
        (lambda: Link(-1, 1e9), "link latency.*-1"),
        (lambda: Link(0, 0), "link bandwidth.* 0"),
        (lambda: sm.Execution(offload=2.0), "offload must be in"),
    ],
)
def test_out_of_range(make: object, message: str) -> None:
    with pytest.raises(sm.DomainError, match=message):
        make()  # type: ignore[operator]


def test_where_kv_passes_weights() -> None:
    L = context_where_kv_passes_weights(H100, LLAMA, B=64)
    assert pytest.approx(2 * 7_504_924_672 / (64 * 131_072), rel=1e-9) == L
    recurrent = replace(sm.load_model("nemotron-h-56b"), layers=())
    assert context_where_kv_passes_weights(H100, recurrent, B=64) == np.inf


def test_cost_of_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["predict", "--gpu", "h100", "--tp", "2", "--batch", "1", "--price", "2.5"]
    assert main([*base, "--format", "json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    for name in ("_without_drafter", "_with_drafter"):
        rate = answer[f"tokens_per_second_at_max_batch{name}"]
        cost = answer[f"cost_per_million_tokens{name}"]
        assert cost == pytest.approx(2 * 2.5 * 1e6 / rate / 3600)
        assert answer[f"joules_per_token{name}"] == pytest.approx(2 * 700 / rate)
    assert answer["context_where_kv_passes_weights"] > 0
    assert main(base) == 0
    assert "  a million tokens: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draft-gpu", "l40s"], "--draft-gpu needs --link"),
        (["--link", "5,25"], "--link belongs to --draft-gpu"),
        (["--overlap"], "--overlap belongs to --draft-gpu"),
        (["--draft-gpu", "l40s", "--link", "5"], "link must be LATENCY_US,BANDWIDTH_GB_PER_S"),
        (["--draft-gpu", "l41s", "--link", "5,25"], "unknown GPU 'l41s'"),
        (["--offload", "1.5"], "offload must be in [0, 1]; got 1.5"),
        (["--price", "-1"], "price must be in [0, 10000] USD an hour; got -1"),
        (["--price", "much"], "price must be a number"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["predict", "--gpu", "h100", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_cost_and_energy_count_the_devices_that_are_in_use() -> None:
    """Plain decoding does not need the draft device; the drafter's has its own power and price."""
    l40s = sm.load_device("l40s")
    drafter = sm.DraftModel(SMALL, device=l40s, link=Link(5e-6, 5e10), tp=2)
    fields = {"price": 2.0, "draft_price": 0.5, "execution": sm.Execution(tp=4)}
    setup = Setup(
        device=H100,
        target=LLAMA,
        drafter=drafter,
        acceptance=sm.Geometric(0.7),
        batches=(8,),
        contexts=(1024,),
        **fields,  # type: ignore[arg-type]
    )
    second = 1e6 / 3600  # of one device at one token a second
    assert setup.cost_per_million_tokens(1.0, drafting=False) == pytest.approx(4 * 2 * second)
    assert setup.cost_per_million_tokens(1.0, drafting=True) == pytest.approx(9 * second)
    assert setup.joules_per_token(1.0, drafting=False) == 4 * 700
    assert setup.joules_per_token(1.0, drafting=True) == 4 * 700 + 2 * 350


FULL = [
    "predict", "--gpu", "rubin-vr200", "--tp", "8", "--model", "llama-3.1-70b",
    "--drafter", "draft-model", "--draft", "llama-3.1-70b", "--draft-gpu", "groq-lpu",
    "--draft-tp", "1", "--link", "5,50", "--dtype", "fp16", "--alpha", ".8", "--batch", "1",
    "--context", "32k",
]  # fmt: skip


def test_a_drafter_that_its_own_device_cannot_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FULL, "--k", "1", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (point,), (answer,) = found["points"], found["answers"]
    big = sm.load_model("llama-3.1-70b").with_dtypes(dtype="float16")
    held = big.weight_bytes + float(big.kv_bytes(32_768 + 2))
    assert point["draft_memory_bytes"] == held
    assert point["draft_memory_capacity"] == 230e6
    assert (point["fits"], point["full"], point["max_batch"]) == (False, "drafter", 0)
    assert point["devices_needed"] is None  # more of the target's do not help
    assert point["memory_bytes"] < 20e9
    assert answer["max_batch_with_drafter"] == 0
    assert answer["schedule"] == [[1, 201, 0]]
    assert any("needs 152 of 0.23 GB at batch 1, context 32768" in n for n in found["warnings"])
    assert main([*FULL, "--format", "json"]) == 0  # off is best, and the drafter does not fit
    (point,) = json.loads(capsys.readouterr().out)["points"]
    assert (point["k"], point["fits"], point["drafter_fits"]) == (0, False, False)
    assert main(FULL) == 0
    out = capsys.readouterr().out
    assert "not one sequence fits: the drafter needs 152 GB on Groq LPU" in out


def test_a_drafter_that_would_pay_names_the_device_that_is_full() -> None:
    chip = sm.load_device("groq-lpu")
    small = SMALL.with_dtypes(dtype="float16")
    there = sm.DraftModel(small, device=chip, link=Link(latency=5e-6, bandwidth=50e9))
    setup = Setup(
        device=H100,
        target=sm.load_model("llama-3.1-70b").with_dtypes(dtype="float16"),
        drafter=there,
        acceptance=sm.Geometric(0.9),
        execution=sm.Execution(tp=8),
        batches=(1,),
        contexts=(1024,),
    )
    result = predict(setup)
    text = headline(result.answers[0], setup)
    assert text.startswith("leave speculation off: it would pay (S = ")
    assert text.endswith(f"the drafter needs 2.51 GB on {chip.label}, which holds 0.23 GB")


def test_above_the_last_batch_the_drafters_device_is_full() -> None:
    away = sm.DraftModel(LLAMA, device=L40S, link=Link(latency=5e-6, bandwidth=25e9), tp=1)
    setup = Setup(
        device=H100,
        target=sm.load_model("llama-3.1-70b"),
        drafter=away,
        acceptance=sm.Geometric(0.95),
        execution=sm.Execution(tp=4),
        batches=(1,),
        contexts=(16_384,),
    )
    # as on a target that is slow enough for it
    most = setup.max_batch(2, 16_384)
    runs = (Interval(1, most, 2), Interval(most + 1, 20, 0))
    answer = replace(predict(setup).answers[0], schedule=runs, memory_ends_it=True)
    assert headline(answer, setup).endswith("the drafter's own device, NVIDIA L40S 48 GB, is full")


def test_a_drafter_on_a_device_of_its_own_that_fits() -> None:
    link = Link(latency=5e-6, bandwidth=25e9)
    setup = Setup(
        device=H100,
        target=LLAMA,
        drafter=sm.DraftModel(SMALL, device=L40S, link=link),
        acceptance=sm.Geometric(0.7),
        execution=sm.Execution(),
        batches=(8,),
        contexts=(1024,),
        k=2,
    )
    (point,) = predict(setup).points
    assert (point["fits"], point["full"]) == (True, None)
    assert point["draft_memory_bytes"] < point["draft_memory_capacity"] == 48e9
    (shared,) = predict(replace(setup, drafter=sm.DraftModel(SMALL))).points
    assert (shared["draft_memory_bytes"], shared["draft_memory_capacity"]) == (None, None)
    assert shared["memory_bytes"] > point["memory_bytes"]


def test_a_tree_keeps_where_it_is_placed() -> None:
    """Its own placement, or that of what drafts it; both only where they agree."""
    assert DynamicTree(sm.Eagle3(), topk=4, nodes=10, tp=2).tp == 2
    assert DynamicTree(sm.Eagle3(tp=2), topk=4, nodes=10).tp == 2
    assert replace(DynamicTree(sm.Eagle3(tp=2), topk=4, nodes=10), topk=5).tp == 2
    with pytest.raises(sm.DomainError, match="tp is given twice: 4 of the tree, 2 of what drafts"):
        DynamicTree(sm.Eagle3(tp=2), topk=4, nodes=10, tp=4)
