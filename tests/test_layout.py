"""Deployments of several devices: tensor, data, pipeline and expert parallelism, and nodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import specmodel as sm
from specmodel.collectives import Fabric, collective_time
from specmodel.costs import Layout, experts_touched, pass_operators
from specmodel.hardware import Link
from specmodel.memory import memory
from specmodel.speculation import round_time

H100 = sm.load_device("h100")
LLAMA = sm.load_model("llama-3.1-8b")
V3 = sm.load_model("deepseek-v3")
MOE = sm.load_model("qwen3-30b-a3b")
NVLINK = Link(latency=5e-6, bandwidth=225e9)
INFINIBAND = Link(latency=10e-6, bandwidth=50e9)
NODE = Fabric(link=NVLINK)
POD = Fabric(link=NVLINK, network=INFINIBAND)


# -- collectives ---------------------------------------------------------------------------------


def test_small_all_reduce_takes_one_step_and_a_large_one_two() -> None:
    small, large = 8192.0, 1e9
    assert float(collective_time("all-reduce", small, 8, NODE)) == 5e-6 + 7 * small / 225e9
    two = 2 * 5e-6 + 2 * 7 / 8 * large / 225e9
    assert float(collective_time("all-reduce", large, 8, NODE)) == pytest.approx(two, rel=1e-12)


def test_all_reduce_over_two_nodes() -> None:
    """Inside the nodes, then an eighth of the bytes between them, each device its share."""
    size = 1e8
    inside = 2 * (5e-6 + 7 / 8 * size / 225e9)
    between = min(10e-6 + size / 8 / 50e9, 2 * (10e-6 + size / 8 / 2 / 50e9))
    found = float(collective_time("all-reduce", size, 16, POD))
    assert found == pytest.approx(inside + between, rel=1e-12)
    tiny = float(collective_time("all-reduce", 8192.0, 16, POD))  # two steps inside even so
    assert tiny == pytest.approx(2 * (5e-6 + 7168 / 225e9) + 10e-6 + 1024 / 50e9, rel=1e-12)


def test_all_to_all_uses_both_fabrics_at_once() -> None:
    size = 1e8  # of 32 shares 7 go over NVLink and 24 over the network, which takes longer
    found = float(collective_time("all-to-all", size, 32, POD))
    assert found == pytest.approx(10e-6 + 24 / 32 * size / 50e9, rel=1e-12)
    inside = float(collective_time("all-to-all", size, 8, POD))
    assert inside == pytest.approx(5e-6 + 7 / 8 * size / 225e9, rel=1e-12)


@given(size=st.floats(0, 1e10), ranks=st.sampled_from([2, 4, 8, 16, 64]))
def test_collectives_grow_with_their_bytes(size: float, ranks: int) -> None:
    for kind in ("all-reduce", "all-gather", "all-to-all"):
        one, two = (float(collective_time(kind, s, ranks, POD)) for s in (size, 2 * size))
        assert 5e-6 <= one <= two <= 2 * one
        assert float(collective_time(kind, size, 1, POD)) == 0


def test_a_group_fills_its_nodes() -> None:
    with pytest.raises(sm.DomainError, match="a group of 12 devices must fill its nodes of 8"):
        collective_time("all-reduce", 1.0, 12, POD)


# -- layouts -------------------------------------------------------------------------------------


def test_replicas_are_copies_with_their_share_of_the_batch() -> None:
    whole = sm.pass_time(H100, LLAMA, B=64, L=1024, dp=4)
    one = sm.pass_time(H100, LLAMA, B=16, L=1024)
    assert float(whole.T) == float(one.T)
    assert float(sm.pass_time(H100, LLAMA, B=1, dp=4).T) == float(sm.pass_time(H100, LLAMA, B=1).T)
    used = memory(H100, LLAMA, L=1024, layout=Layout(dp=4))
    alone = memory(H100, LLAMA, L=1024)
    assert used.target_weights == alone.target_weights
    assert used.max_batch == 4 * alone.max_batch
    assert used.total(5) == alone.total(2)  # the replica with most sequences


def test_no_replica_holds_part_of_a_sequence() -> None:
    """7 GB free beside the weights, 43 GB for one sequence."""
    big = sm.load_model("llama-3.1-70b").with_dtypes(weights="fp8")
    assert memory(H100, big, L=131_072, layout=Layout(dp=8)).max_batch == 0


def test_experts_spread_over_replicas() -> None:
    """Each device holds 16 of 128 experts, and reads those that the rows of all 8 reach."""
    B, W, dp = 32, 3, 8
    operators = pass_operators(MOE, B=B, W=W, layout=Layout(dp=dp, ep=True))
    by_name = {op.name: op for op in operators}
    routed = by_name["routed experts"]
    touched = float(experts_touched(128, 8, B * W)) / dp
    assert float(routed.weight_bytes) == pytest.approx(touched * 3 * 2048 * 768 * 2, rel=1e-12)
    assert float(routed.flops) == pytest.approx(2 * B * W * 8 / dp * 3 * 2048 * 768, rel=1e-12)
    copies = 8 * (1 - (7 / 8) ** 8)  # of 8 devices, those that have any of 8 experts
    for part in ("dispatch", "combine"):
        exchange = by_name[f"all-to-all {part}"]
        assert (exchange.count, exchange.ranks) == (48, 8)
        assert float(exchange.link_bytes) == pytest.approx(B / dp * W * 2048 * 2 * copies)
    assert "all-reduce" not in by_name
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    held = Layout(dp=dp, ep=True).shard(MOE).weight_bytes
    assert MOE.weight_bytes - held == pytest.approx(experts * 7 / 8)


def test_dispatch_of_fp8_experts_is_in_fp8() -> None:
    layout = Layout(dp=8, ep=True)
    by_name = {op.name: op for op in pass_operators(V3, B=8, layout=layout)}
    sent, back = (float(by_name[f"all-to-all {x}"].link_bytes) for x in ("dispatch", "combine"))
    assert back == 2 * sent


def test_a_pass_waits_for_a_device_that_reads_an_expert() -> None:
    (op,) = (
        op for op in pass_operators(MOE, B=1, layout=Layout(dp=32, ep=True)) if op.kind == "experts"
    )
    assert float(op.shape["touched"]) == 1  # of 8 over 32 devices


def test_experts_spread_over_one_replica_need_no_exchange() -> None:
    """All ranks have all rows, so the all-reduce that ends a layer is enough."""
    sliced, spread = (Layout(tp=4, ep=ep) for ep in (False, True))
    names = {op.name for op in pass_operators(MOE, B=8, layout=spread)}
    assert "all-to-all" not in names
    assert sliced.shard(MOE).weight_bytes == spread.shard(MOE).weight_bytes
    for name in ("flops", "weight_bytes"):
        totals = [
            sum(float(np.sum(op.count * getattr(op, name))) for op in operators)
            for operators in (pass_operators(MOE, B=8, layout=x) for x in (sliced, spread))
        ]
        assert totals[0] == pytest.approx(totals[1], rel=1e-12)


def test_pipeline_reads_every_stage_in_turn() -> None:
    """One sequence goes through all layers; many are split into micro-batches."""
    one = float(sm.pass_time(H100, LLAMA, B=1, pp=4, level="ideal").T)
    assert one == float(sm.pass_time(H100, LLAMA, B=1, level="ideal").T)
    many = sm.pass_time(H100, LLAMA, B=64, L=1024, pp=4)
    micro = sm.pass_time(H100, LLAMA, B=16, L=1024)
    sends = 3 * (5e-6 + 16 * 4096 * 2 / 225e9) + 5e-6 + 4 * 16 / 225e9
    assert float(many.T - micro.T) == pytest.approx(sends, rel=1e-9)
    used = memory(H100, LLAMA, L=1024, layout=Layout(pp=4))
    table = 128_256 * 4096
    layer = (LLAMA.total_params - 2 * table - 4096) / 32
    assert used.target_weights == 2 * (8 * layer + table)  # the last has the LM head
    assert used.target_kv == memory(H100, LLAMA, L=1024).target_kv / 4
    uneven = memory(H100, LLAMA, L=1024, layout=Layout(pp=5))  # 7, 7, 6, 6, 6 layers
    assert uneven.target_weights == 2 * (7 * layer + table)
    tied = sm.load_model("gemma-2-2b")
    parts = memory(H100, tied, layout=Layout(pp=2))  # a copy of the table on either end
    assert parts.target_weights > tied.weight_bytes / 2


def test_stages_in_other_nodes_send_over_the_network() -> None:
    assert Layout(tp=8, pp=4).hops_between_nodes == 3
    assert Layout(tp=4, pp=4).hops_between_nodes == 1
    assert Layout(tp=2, pp=4).hops_between_nodes == 0
    far = sm.pass_time(H100, V3, B=1, tp=8, pp=2, network=INFINIBAND)
    near = sm.pass_time(H100, V3, B=1, tp=8, pp=2, network=NVLINK)
    assert float(far.T) > float(near.T)


def test_tensor_parallelism_over_two_nodes_costs_more_than_pipelining_them() -> None:
    times = [
        float(sm.pass_time(H100, V3, B=16, L=1024, network=INFINIBAND, **how).groups["collectives"])
        for how in ({"tp": 16}, {"tp": 8, "pp": 2})
    ]
    assert times[0] > 1.5 * times[1]


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 4}, {"pp": 4}, {"dp": 2, "pp": 2}])
def test_critical_batch_is_where_compute_meets_memory(layout: dict[str, int]) -> None:
    star = float(sm.critical_batch(H100, LLAMA, L=200, W=5, **layout))
    at = sm.pass_time(H100, LLAMA, B=star, W=5, L=200, **layout)
    assert float(at.compute) == pytest.approx(float(at.weights + at.rows), rel=1e-9)


def test_drafter_works_for_one_micro_batch_of_a_replica() -> None:
    drafter = sm.Eagle3()
    alone = round_time(H100, LLAMA, drafter, B=8, k=3, L=1024)
    split = round_time(H100, LLAMA, drafter, B=16, k=3, L=1024, dp=2)
    assert float(split.T_d) == float(alone.T_d)
    mtp = round_time(H100, V3, sm.MTP(), B=64, k=2, L=1024, tp=1, dp=8, ep=True)
    sliced = round_time(H100, V3, sm.MTP(), B=64, k=2, L=1024, tp=8)
    assert 0 < float(mtp.T_d) < 3 * float(sliced.T_d)
    dense = round_time(H100, MOE, sm.Eagle3(), B=64, k=2, L=1024, dp=8, ep=True)  # a dense head
    assert float(dense.T_d) > 0


def test_drafter_on_the_last_stage_holds_the_pipeline_up() -> None:
    """It drafts for 4 micro-batches in turn, so that speculation gains less with every stage."""
    times = {
        pp: round_time(H100, LLAMA, sm.Eagle3(), B=64, k=4, L=2048, pp=pp) for pp in (1, 2, 4, 8)
    }
    alone = round_time(H100, LLAMA, sm.Eagle3(), B=16, k=4, L=2048)
    assert float(times[4].T_d) == pytest.approx(4 * float(alone.T_d), rel=1e-9)
    costs = [float(times[pp].cost) for pp in (1, 2, 4, 8)]
    assert costs == sorted(costs)
    few = round_time(H100, LLAMA, sm.Eagle3(), B=1, k=4, L=2048, pp=4)  # nobody waits
    assert float(few.T_d) == float(round_time(H100, LLAMA, sm.Eagle3(), B=1, k=4, L=2048).T_d)
    own = sm.Eagle3(device=H100, link=Link(0.0, 1e15))
    apart = round_time(H100, LLAMA, own, B=64, k=4, L=2048, pp=4)
    assert float(apart.T_d) < float(times[4].T_d)
    whole = round_time(H100, LLAMA, sm.SparseKV(512), B=64, k=4, L=2048, pp=4)  # all stages draft
    assert float(whole.T_d) < 4 * float(whole.T_p)


def test_memory_of_a_large_deployment() -> None:
    """DeepSeek-V3 in fp8 on 32 devices: 8 experts a layer on each of 32."""
    layout = Layout(dp=32, ep=True)
    used = memory(H100, V3, sm.MTP(), k=1, L=4096, layout=layout)
    experts = 58 * 256 * 3 * 7168 * 2048
    others = V3.weight_bytes - experts  # fp8: a byte each, and block scales
    assert used.target_weights == pytest.approx(others + experts / 32, rel=0.01)
    assert used.max_batch > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sm.Execution(tp=0), "tp must be >= 1"),
        (lambda: sm.Execution(pp=1.5), "pp must be a whole number"),
        (lambda: sm.Execution(tp=16), "16 devices are more than a node of 8"),
        (lambda: sm.Execution(tp=6, dp=2, network=NVLINK), "tp must divide a node's 8 devices"),
        (lambda: sm.pass_time(H100, LLAMA, B=1, ep=True), "has no experts: ep must be off"),
        (lambda: sm.pass_time(H100, LLAMA, B=1, pp=33, network=NVLINK), "at most its 32 layers"),
        (lambda: sm.pass_time(H100, MOE, B=1, dp=7, ep=True), "tp x dp must divide the 128 exp"),
        (
            lambda: sm.pass_time(
                replace(H100, interconnect_bandwidth=None, pcie_bandwidth=None), LLAMA, B=1, pp=2
            ),
            "has no interconnect",
        ),
    ],
)
def test_layouts_that_cannot_be(make: object, message: str) -> None:
    with pytest.raises(sm.DomainError, match=message):
        make()  # type: ignore[operator]
