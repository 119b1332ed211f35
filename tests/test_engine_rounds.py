"""Rounds under a serving engine: its host times by hand, and what they leave as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specmodel as sm
from specmodel.drafters import Drafter, DynamicTree, Eagle, NGram
from specmodel.overheads import HOST, Engine, load_engine
from specmodel.roofline import pass_time
from specmodel.speculation import round_parts, round_time
from specmodel.sweeping import Case, Sweep, sweep
from specmodel.width import scan, schedule

ENGINE = Engine(
    name="x",
    title="X",
    step=1e-3,
    step_sequence=1e-5,
    round=2e-4,
    round_row=3e-6,
    head_pass=7e-4,
    draft_pass=4e-4,
    draft_layer=5e-5,
    pass_sequence=2e-6,
    lookup=1e-4,
    lookup_sequence=4e-6,
    eager_layer=6e-5,
    captured_rows=64,
)
"""Values of which no two sums are alike."""
NOTHING = Engine(name="nothing", title="Nothing")
H100, LLAMA = sm.load_device("h100"), sm.load_model("llama-3.1-8b")
SMALL = sm.load_model("llama-3.2-1b")
DRAFTERS: tuple[Drafter, ...] = (
    Eagle(),
    sm.Eagle3(),
    sm.DraftModel(SMALL),
    NGram(hit=0.4),
    sm.Lookahead(),
    sm.Medusa(),
    DynamicTree(sm.Eagle3(), topk=4, nodes=20),
)


def times(drafter: Drafter, *, B: Any = 8, k: Any = 3, **how: Any) -> Any:
    how = {"engine": ENGINE, **how}
    return round_time(H100, LLAMA, drafter, B=B, k=k, L=1024, **how)


def norm(device: Any, launch: float) -> Any:
    """Return the longer of the two, nearly: their norm with exponent 3, in longhand."""
    return np.cbrt(np.asarray(device) ** 3 + launch**3)


# -- by hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda d: d.kind)
def test_host_time_of_a_step_and_of_a_round(drafter: Drafter) -> None:
    """T_h = step + B a sequence's; T_o = T_h + round + rows beyond the first."""
    found = times(drafter)
    W = {"ngram": 1 + 0.4 * 3, "lookahead": 14 * 3, "dynamic-tree": 21}.get(drafter.kind, 4)
    assert float(found.T_h) == pytest.approx(1.08e-3, rel=1e-12)
    assert float(found.T_o) == pytest.approx(1.08e-3 + 2e-4 + 8 * (W - 1) * 3e-6, rel=1e-12)


def test_draft_passes_of_a_head() -> None:
    """k passes, each the norm of its device time and 0.7 ms and 2 us a sequence."""
    alone = round_parts(H100, LLAMA, Eagle(), B=8, k=3, L=1024, execution=sm.Execution())
    (_, first), (_, rest) = alone.drafts
    launch = 7e-4 + 8 * 2e-6
    by_hand = norm(first.T, launch) + 2 * norm(rest.T, launch)
    found = times(Eagle())
    assert float(found.T_d) == pytest.approx(float(by_hand), rel=1e-12)
    assert found.T_d > 3 * launch
    assert sum(found.T_d_groups.values()) == pytest.approx(float(found.T_d), rel=1e-12)


def test_draft_passes_of_a_small_model() -> None:
    """0.4 ms, 50 us for each of 16 layers, 2 us a sequence; the first pass takes two rows."""
    launch = 4e-4 + 16 * 5e-5 + 8 * 2e-6
    first, rest = (pass_time(H100, SMALL, B=8, W=w, L=1024, head_rows=1).T for w in (2, 1))
    by_hand = norm(first, launch) + 2 * norm(rest, launch)
    assert float(times(sm.DraftModel(SMALL)).T_d) == pytest.approx(float(by_hand), rel=1e-9)


@pytest.mark.parametrize("drafter", [NGram(hit=0.4), sm.Lookahead()])
def test_a_drafter_without_passes_looks_up(drafter: Drafter) -> None:
    found = times(drafter, B=[1, 8])
    assert found.T_d.tolist() == pytest.approx([1.04e-4, 1.32e-4], rel=1e-12)
    assert found.T_d_groups["host"].tolist() == found.T_d.tolist()


def test_the_drafters_own_host_time_comes_on_top() -> None:
    for drafter in (NGram(hit=0.4), Eagle()):
        more = times(replace(drafter, host_time=3e-3)).T_d - times(drafter).T_d
        assert more == pytest.approx(3e-3, rel=1e-9)


def test_times_given_come_on_top() -> None:
    found, own = times(Eagle()), times(Eagle(), k=[0, 3])
    execution = sm.Execution(engine=ENGINE)
    more = round_time(
        H100, LLAMA, Eagle(), B=8, k=3, L=1024, T_h=1e-3, T_o=4e-3, execution=execution
    )
    assert float(more.T_h - found.T_h) == pytest.approx(1e-3)
    assert float(more.T_o - found.T_o) == pytest.approx(4e-3)
    assert own.T_o[0] == own.T_h


def test_cost_is_of_these_times() -> None:
    found = times(Eagle(), B=[1.0, 8.0, 64.0])
    by_hand = (found.T_d + found.T_v + found.T_o) / (found.T_p + found.T_h)
    assert found.cost.tolist() == pytest.approx(by_hand.tolist(), rel=1e-12)


def test_an_engines_kernels_scale_passes() -> None:
    slow = times(Eagle(), engine=replace(NOTHING, kernels=1.5))
    plain = times(Eagle(), engine=None)
    for name in ("T_p", "T_v", "T_d"):
        assert float(getattr(slow, name)) == pytest.approx(1.5 * float(getattr(plain, name)))
    assert (slow.T_h, slow.T_o) == (0.0, 0.0)
    for group, seconds in plain.verify.groups.items():
        assert slow.verify.groups[group] == pytest.approx(1.5 * seconds)


# -- captured passes -----------------------------------------------------------------------------


def test_what_is_not_captured_is_launched_layer_by_layer() -> None:
    """Plain passes of 64 rows are captured, verification of 4 x 17 no more."""
    B = np.array([16.0, 17.0, 64.0, 65.0])
    found, plain = times(Eagle(), B=B), times(Eagle(), B=B, engine=None)
    launch = 32 * 6e-5
    wanted = [*plain.T_p[:3], norm(plain.T_p[3], launch)]
    assert found.T_p.tolist() == pytest.approx(wanted, rel=1e-12)
    wanted = [plain.T_v[0], *norm(plain.T_v[1:], launch)]
    assert found.T_v.tolist() == pytest.approx(wanted, rel=1e-12)
    assert found.verify.groups["launch"][0] == pytest.approx(0.0, abs=1e-15)
    for one in (found.decode, found.verify):
        assert sum(one.groups.values()).tolist() == pytest.approx(one.T.tolist(), rel=1e-12)


def test_each_replica_launches_its_own_rows() -> None:
    """Of 64 sequences on two replicas each has 32; in two stages as well."""
    for how in ({"dp": 2}, {"pp": 2}):
        at = [{"engine": replace(ENGINE, captured_rows=c), **how} for c in (32, 31)]
        captured, eager = (times(Eagle(), B=64, k=1, **one).T_p for one in at)
        alone = times(Eagle(), B=64, k=1, **{**at[0], "engine": None})
        assert float(captured) == pytest.approx(float(alone.T_p), rel=1e-12)
        assert float(eager) == pytest.approx(float(norm(alone.T_p, 32 * 6e-5)), rel=1e-12)
        found = times(Eagle(), B=64, k=1, **at[0])
        assert float(found.T_h) == pytest.approx(1e-3 + 32 * 1e-5, rel=1e-12)
    execution = sm.Execution(dp=2)
    (_, head), *_ = round_parts(H100, LLAMA, Eagle(), B=64, k=1, L=1024, execution=execution).drafts
    found = times(Eagle(), B=64, k=1, dp=2)
    assert float(found.T_d) == pytest.approx(float(norm(head.T, 7e-4 + 32 * 2e-6)), rel=1e-12)


# -- what stays ----------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda d: d.kind)
@pytest.mark.parametrize("name", ["x", "vllm-2025", "hf-eager"])
def test_no_drafts_cost_one_plain_step_exactly(drafter: Drafter, name: str) -> None:
    engine = ENGINE if name == "x" else load_engine(name)
    found = times(drafter, k=[0, 2], B=[[1.0], [48.0]], engine=engine)
    assert (found.cost[:, 0] == 1.0).all()
    assert (found.T_d[:, 0] == 0.0).all()
    assert (found.T_v[:, 0] == found.T_p[:, 0]).all()
    assert (found.T_o[:, 0] == found.T_h[:, 0]).all()
    r = sm.speculate(
        H100, LLAMA, drafter, sm.Geometric(0.7), B=[1, 48], k=[0, 2], L=1024, engine=engine
    )
    assert (r.S.sel(k=0) == 1.0).all()


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda d: d.kind)
def test_no_engine_is_the_round_without_one(drafter: Drafter) -> None:
    """`RoundParts.times(None)` to the bit, an engine that takes no time nearly."""
    B, k = np.array([[1.0], [32.0]]), [0, 1, 4]
    plain = round_time(H100, LLAMA, drafter, B=B, k=k, L=1024)
    parts = round_parts(H100, LLAMA, drafter, B=B, k=k, L=1024, execution=sm.Execution())
    for name in ("T_p", "T_v", "T_d", "T_h", "T_o", "cost"):
        value = np.asarray(getattr(plain, name))
        assert np.array_equal(value, np.asarray(getattr(parts.times(None), name))), name
        free = np.asarray(getattr(parts.times(NOTHING), name))
        assert np.broadcast_to(value, free.shape) == pytest.approx(free, rel=1e-12), name
    assert parts.times(None).T_d_groups.keys() == plain.T_d_groups.keys()
    assert parts.times(None).basis == plain.basis
    assert parts.times(ENGINE).cost.tolist() == times(drafter, B=B, k=k).cost.tolist()


@given(
    name=st.sampled_from(HOST),
    drafter=st.sampled_from(DRAFTERS),
    B=st.sampled_from([1, 8, 100]),
    k=st.integers(1, 6),
)
@settings(max_examples=30)
def test_more_host_time_never_makes_a_round_shorter(
    name: str, drafter: Drafter, B: int, k: int
) -> None:
    more = replace(ENGINE, **{name: 2 * getattr(ENGINE, name)})
    before, after = times(drafter, B=B, k=k), times(drafter, B=B, k=k, engine=more)
    for each in ("T_p", "T_v", "T_d", "T_h", "T_o"):
        assert getattr(after, each) >= getattr(before, each)


def test_pass_time_is_without_the_engine() -> None:
    with_, without = (pass_time(H100, LLAMA, B=8, L=1024, engine=e).T for e in (ENGINE, None))
    assert with_ == without


# -- who takes it --------------------------------------------------------------------------------


def test_scan_and_schedule_take_an_engine() -> None:
    how = {"B": np.array([1.0, 64.0]), "L": 1024, "k_max": 4}
    S, k = scan(H100, LLAMA, Eagle(), sm.Geometric(0.7), engine=ENGINE, **how)  # type: ignore[arg-type]
    cost = times(Eagle(), B=np.array([[1.0], [64.0]]), k=k).cost
    G = np.asarray(sm.Geometric(0.7).tokens(k))
    assert S.tolist() == np.where(k > 0, G / cost, 1.0).tolist()
    base = (H100, LLAMA, Eagle(), sm.Geometric(0.7))
    with_ = schedule(*base, max_batch=64, L=1024, k_max=4, engine=replace(ENGINE, round=1.0))
    without = schedule(*base, max_batch=64, L=1024, k_max=4)
    assert [one.k for one in with_] == [0]
    assert without[0].k > 0


def test_speculate_labels_host_time() -> None:
    r = sm.speculate(
        H100, LLAMA, Eagle(), sm.Geometric(0.7), B=[1, 8], k=[0, 3], L=1024, engine=ENGINE
    )
    found = times(Eagle(), B=np.array([[1.0], [8.0]]), k=[0, 3])
    for name in ("T_p", "T_v", "T_d", "T_h", "T_o"):
        wanted = np.broadcast_to(np.asarray(getattr(found, name)).reshape(2, -1), (2, 2))
        assert np.broadcast_to(r[name].values.reshape(2, -1), (2, 2)).tolist() == wanted.tolist()
    rate = r.B * r.S / (r.T_p + r.T_h)
    assert r.tokens_per_second.values.ravel().tolist() == pytest.approx(
        rate.transpose("B", "k").values.ravel().tolist()
    )


def test_sweep_takes_an_engine(tmp_path: Path) -> None:
    pytest.importorskip("zarr", reason="the extra `sweep` is not installed")
    xr = pytest.importorskip("xarray")
    wanted = Sweep(
        axes={"engine": ("none", "x")},
        cases={
            (name,): Case(
                device=H100,
                target=LLAMA,
                drafter=Eagle(),
                acceptance=sm.Geometric(0.7),
                execution=sm.Execution(engine=engine),
            )
            for name, engine in (("none", None), ("x", ENGINE))
        },
        B=np.array([1.0, 8.0]),
        k=np.arange(3.0),
        L=np.array([1024.0]),
        variables=("S", "T_h"),
    )
    other = replace(wanted, cases={**wanted.cases, ("x",): replace(wanted.cases["x",], T_h=1e-9)})
    slower = replace(
        wanted,
        cases={
            **wanted.cases,
            ("x",): replace(
                wanted.cases["x",], execution=sm.Execution(engine=replace(ENGINE, step=2e-3))
            ),
        },
    )
    assert len({one.key for one in (wanted, other, slower)}) == 3
    path = tmp_path / "out.nc"
    assert not sweep(wanted, path)
    found = xr.open_dataset(path).load()
    assert found.T_h.sel(engine="none").max() == 0
    assert float(found.T_h.sel(engine="x", B=8)) == pytest.approx(1.08e-3)
    direct = sm.speculate(
        H100, LLAMA, Eagle(), sm.Geometric(0.7), B=[1, 8], k=range(3), L=1024, engine=ENGINE
    )
    assert found.S.sel(engine="x").values.ravel().tolist() == direct.S.values.ravel().tolist()


# -- dynamic trees -------------------------------------------------------------------------------


def test_a_dynamic_tree_drafts_its_best_nodes_on() -> None:
    """Depth d: a first pass as the head's own, then d - 1 over topk rows; nodes + 1 verified."""
    tree, k = DynamicTree(sm.Eagle3(), topk=4, nodes=20), [0, 1, 3]
    assert tree.rows(k).tolist() == [1, 21, 21]
    first, *others = tree.passes(LLAMA, k)
    own = sm.Eagle3().passes(LLAMA, k)[0]
    assert (first.count.tolist(), first.W.tolist()) == ([0, 1, 1], own.W.tolist())
    assert [one.count.tolist() for one in others] == [[0, 0, 1], [0, 0, 1]]
    assert {float(w) for one in others for w in one.W} == {4.0}
    assert {float(w) for one in others for w in one.head_rows} == {4.0}


def test_a_dynamic_tree_runs_where_its_drafter_does() -> None:
    drafter = replace(sm.DraftModel(SMALL), tp=1, host_time=1e-3)
    tree = DynamicTree(drafter, topk=2, nodes=6)
    assert (tree.tp, tree.host_time) == (1, 1e-3)
    assert tree.weights(LLAMA) == SMALL
    assert tree.cache(LLAMA) == SMALL
    assert DynamicTree(NGram(hit=0.3), topk=2, nodes=6).hit_rate == 0.3
    chain = DynamicTree(sm.Eagle3(), topk=1, nodes=3)
    assert [float(times(d).T_v) for d in (chain, sm.Eagle3())] == pytest.approx(
        [float(times(sm.Eagle3()).T_v)] * 2, rel=1e-12
    )


@pytest.mark.parametrize(("topk", "nodes"), [(0, 5), (5, 0), (1.5, 5), (4, -1)])
def test_trees_have_nodes(topk: float, nodes: int) -> None:
    with pytest.raises(sm.DomainError, match=r"topk must be|nodes must be"):
        DynamicTree(Eagle(), topk=topk, nodes=nodes)  # type: ignore[arg-type]
