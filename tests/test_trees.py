"""Trees: the dynamic programme against search and greed, sizes on devices, candidate rules."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specmodel as sm
from specmodel.drafters import DraftTree
from specmodel.law import output_law_tree
from specmodel.speculation import round_time
from specmodel.trees import (
    best_tree,
    best_trees,
    candidate_acceptance,
    tree_tokens,
    tree_widths,
)


def every_tree(nodes: int, depth: int, ranks: int) -> Iterator[tuple[int, ...]]:
    """All trees of so many nodes: each new node hangs below an earlier one or the root."""

    def grow(parents: tuple[int, ...], depths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(parents) == nodes:
            yield parents
            return
        for parent in range(parents[-1] if parents else -1, len(parents)):
            level = 1 if parent < 0 else depths[parent] + 1
            if level <= depth and parents.count(parent) < ranks:
                yield from grow((*parents, parent), (*depths, level))

    return grow((), ())


rates = st.lists(st.floats(0, 1), min_size=1, max_size=3).map(
    lambda values: [value / max(1.0, sum(values)) for value in values]
)


@given(rates=rates, nodes=st.integers(0, 6), depth=st.integers(1, 4))
@settings(max_examples=40)
def test_no_tree_of_the_size_commits_more(rates: list[float], nodes: int, depth: int) -> None:
    found = best_trees(rates, nodes, depth)[nodes]
    assert len(found) <= nodes
    assert len(tree_widths(found)) <= depth
    G = tree_tokens(found, rates)
    others = [
        tree_tokens(parents, rates)
        for size in range(nodes + 1)
        for parents in every_tree(size, depth, len(rates))
    ]
    assert max(others) == pytest.approx(G, rel=1e-12)


@given(
    rates=rates.map(lambda values: sorted(values, reverse=True)),
    nodes=st.integers(1, 60),
    depth=st.integers(1, 9),
)
@settings(max_examples=40)
def test_greed_finds_the_same_where_rates_fall(rates: list[float], nodes: int, depth: int) -> None:
    """Nodes by their chance of being reached: with falling rates each comes after its parent."""
    heap, G = [(-rates[0], 1, 0, 1.0)], 1.0
    for _ in range(nodes):
        if not heap:
            break
        value, level, rank, above = heapq.heappop(heap)
        G -= value
        if rank + 1 < len(rates):
            heapq.heappush(heap, (-above * rates[rank + 1], level, rank + 1, above))
        if level < depth:
            heapq.heappush(heap, (value * rates[0], level + 1, 0, -value))
    assert tree_tokens(best_trees(rates, nodes, depth)[nodes], rates) == pytest.approx(G, rel=1e-9)


def test_one_rank_is_a_chain() -> None:
    assert best_trees([0.7], 5, 9)[5] == (-1, 0, 1, 2, 3)
    assert tree_tokens((-1, 0, 1), [0.7]) == pytest.approx(
        float(sm.Geometric(0.7).tokens(3)), rel=1e-12
    )


def test_trees_grow_with_what_a_pass_leaves_idle(h100: sm.Device, llama: sm.Architecture) -> None:
    """Memory-bound passes carry wide trees, compute-bound ones none; offloading carries wider."""
    by_rank, drafter = [0.6, 0.15, 0.07, 0.04, 0.02], sm.Eagle3()
    sizes = [
        len(best_tree(h100, llama, drafter, by_rank, B=B, L=1024, nodes=48, depth=6).parents)
        for B in (1, 16, 256)
    ]
    assert sizes[0] > sizes[1] > sizes[2]
    slow = sm.Execution(offload=0.9)
    wide = best_tree(h100, llama, drafter, by_rank, B=1, L=1024, nodes=48, depth=6, execution=slow)
    assert len(wide.parents) == 48
    times = round_time(
        h100,
        llama,
        DraftTree(drafter=drafter, widths=tree_widths(wide.parents)),
        B=1,
        k=len(tree_widths(wide.parents)),
        L=1024,
        execution=slow,
    )
    assert pytest.approx(tree_tokens(wide.parents, by_rank) / times.cost) == wide.S


@pytest.mark.parametrize("drafter", [sm.Eagle3(), sm.Medusa(), sm.NGram(hit=0.6)])
def test_the_best_of_every_size_and_depth(
    h100: sm.Device, llama: sm.Architecture, drafter: sm.Drafter
) -> None:
    """Deep trees cost more drafts: of a size, the one of the largest G need not gain most."""
    by_rank, B, L = [0.7, 0.1, 0.05], 4, 512
    S = 1.0
    for depth in range(1, 8):
        for tree in best_trees(by_rank, 20, depth)[1:]:
            alone = DraftTree(drafter=drafter, widths=tree_widths(tree))
            times = round_time(h100, llama, alone, B=B, k=len(alone.widths), L=L, T_o=1e-4)
            tokens = 1 + drafter.hit_rate * (tree_tokens(tree, by_rank) - 1)
            S = max(S, tokens / float(times.cost))
    found = best_tree(h100, llama, drafter, by_rank, B=B, L=L, nodes=20, depth=7, T_o=1e-4)
    assert pytest.approx(S, rel=1e-12) == found.S
    accepted = tree_tokens(found.parents, by_rank) - 1
    assert pytest.approx(1 + drafter.hit_rate * accepted, rel=1e-12) == found.G


def test_nothing_is_an_answer(h100: sm.Device, llama: sm.Architecture) -> None:
    found = best_tree(h100, llama, sm.Eagle3(), [0.01], B=256, L=64)
    assert (found.parents, found.G, found.S) == ((), 1.0, 1.0)


@pytest.mark.parametrize("distinct", [False, True])
def test_candidates_are_accepted_as_the_sampler_does(distinct: bool) -> None:
    random = np.random.default_rng(4)
    for n in (1, 2, 3):
        p, q = random.dirichlet(np.ones(4), 2)
        law = output_law_tree(
            lambda _, p=p: np.log(p), lambda _, q=q: np.log(q), [-1] * n, replacement=not distinct
        )
        rule = "distinct" if distinct else "independent"
        assert candidate_acceptance(p, q, n, rule=rule) == pytest.approx(law.G - 1, rel=1e-12)


@given(st.integers(0, 10_000), st.integers(1, 3))
@settings(max_examples=25)
def test_no_rule_for_independent_candidates_beats_the_programme(seed: int, n: int) -> None:
    p, q = np.random.default_rng(seed).dirichlet(np.ones(3), 2)
    best = candidate_acceptance(p, q, n, rule="optimal")
    for rule in ("independent", "k-seq"):
        assert candidate_acceptance(p, q, n, rule=rule) <= best + 1e-9
    alpha = np.minimum(p, q).sum()
    assert candidate_acceptance(p, q, n, rule="k-seq") >= alpha - 1e-12
    assert (best == pytest.approx(alpha)) == (n == 1 or abs(best - alpha) < 1e-9)


def test_what_is_no_tree_is_refused() -> None:
    for parents in ([0], [-1, 1], [-2]):
        with pytest.raises(sm.DomainError, match="earlier node"):
            tree_tokens(parents, [0.5])
    for wrong in ([0.6, 0.6], [], [[0.1]], [-0.1], [1.2]):
        with pytest.raises(sm.DomainError, match="acceptance by rank"):
            tree_tokens([-1], wrong)
    with pytest.raises(sm.DomainError, match="one size"):
        candidate_acceptance([1.0], [0.5, 0.5], 2)
    with pytest.raises(sm.DomainError, match="rule must be"):
        candidate_acceptance([1.0], [1.0], 2, rule="best")  # type: ignore[arg-type]
