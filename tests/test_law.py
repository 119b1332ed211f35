"""The sampler preserves the target's law: by enumeration, by simulation, and bugs are seen."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import linprog
from scipy.stats import chisquare

from specmodel.errors import DomainError
from specmodel.law import (
    OutputLaw,
    Transform,
    accept_chance,
    draw,
    draw_siblings,
    enumeration,
    output_law_chain,
    output_law_tree,
    residual,
    rules,
    seen_along,
    trees,
    verify_chain,
    verify_tree,
    without,
)

Model = Callable[[tuple[int, ...]], np.ndarray]
KINDS = ("random", "zeros", "equal", "close", "disjoint", "greedy")
CHAIN, FORK, BUSH = [-1, 0, 1], [-1, -1, -1], [-1, 0, 0, -1]


def log(p: Any) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(p, dtype=float))


def table(rng: np.random.Generator, size: int, shape: Callable[[np.ndarray], np.ndarray]) -> Model:
    """Return a model with another random law after every prefix."""
    known: dict[tuple[int, ...], np.ndarray] = {}

    def model(prefix: tuple[int, ...]) -> np.ndarray:
        if prefix not in known:
            p = shape(rng.dirichlet(np.ones(size)))
            known[prefix] = log(p / p.sum())
        return known[prefix]

    return model


def pair(kind: str, size: int, seed: int = 0) -> tuple[Model, Model]:
    """Return a target and a drafter on `size` tokens."""
    rng, index = np.random.default_rng([seed, size, KINDS.index(kind)]), np.arange(size)

    def some(p: np.ndarray) -> np.ndarray:
        return p * (index != rng.integers(size))

    def one(p: np.ndarray) -> np.ndarray:
        return (index == rng.integers(size)).astype(float)

    target = table(rng, size, {"zeros": some, "greedy": one}.get(kind, np.copy))
    if kind == "equal":
        return target, target
    if kind == "close":
        return target, lambda prefix: rules.normalise(target(prefix) + 1e-9 * index)
    if kind == "disjoint":
        split = index % 2 == 0
        return table(rng, size, lambda p: p * split), table(rng, size, lambda p: p * ~split)
    return target, table(rng, size, {"zeros": some, "greedy": one}.get(kind, np.copy))


# -- the law, by enumeration ---------------------------------------------------------------------


def expect_exact(found: OutputLaw) -> None:
    assert abs(found.law - found.target).max() < 1e-12
    assert abs(sum(found.blocks.values()) - 1) < 1e-12


def chain_tokens(target: Model, drafter: Model, size: int, k: int, deterministic: bool) -> float:
    """Return 1 + sum of a_j, each worked out from the laws alone."""

    def ahead(prefix: tuple[int, ...]) -> float:
        if len(prefix) == k:
            return 0.0
        p, q = np.exp(target(prefix)), np.exp(drafter(prefix))
        q = np.arange(size) == np.argmax(q) if deterministic else q
        taken = np.minimum(p, q)
        return sum(c * (1 + ahead((*prefix, t))) for t, c in enumerate(taken) if c)

    return 1 + ahead(())


def check_chain(
    models: tuple[Model, Model],
    size: int,
    k: int,
    *,
    length: int | None = None,
    deterministic: bool = False,
    claimed: Model | None = None,
) -> None:
    """Committed tokens follow the target, and G is one more than the accepted drafts."""
    found = output_law_chain(
        *models, k, length=length, deterministic=deterministic, claimed=claimed
    )
    expect_exact(found)
    real = k if length is None else length
    assert pytest.approx(chain_tokens(*models, size, real, deterministic), abs=1e-12) == found.G
    assert max(len(block) for block in found.blocks) <= real + 1


def check_tree(
    models: tuple[Model, Model],
    parents: list[int],
    *,
    replacement: bool = True,
    deterministic: bool = False,
    claimed: Model | None = None,
) -> OutputLaw:
    found = output_law_tree(
        *models, parents, replacement=replacement, deterministic=deterministic, claimed=claimed
    )
    expect_exact(found)
    return found


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_chain_output_is_the_target(size: int, kind: str, deterministic: bool) -> None:
    for k in range(4):
        check_chain(pair(kind, size, seed=k), size, k, deterministic=deterministic)


@pytest.mark.parametrize("length", [0, 1, 2])
def test_ragged_chain_output_is_the_target(length: int) -> None:
    check_chain(pair("random", 3), 3, 3, length=length)
    check_chain(pair("zeros", 3), 3, 3, length=length, deterministic=True)


def test_drafting_may_stop_on_what_was_drafted_but_not_drop_it() -> None:
    target, drafter = pair("random", 3)

    def sure(drafts: tuple[int, ...]) -> int:
        """Return how many drafts come before the first that was unlikely."""
        chances = [np.exp(drafter(drafts[:i])[t]) for i, t in enumerate(drafts)]
        return next((i for i, q in enumerate(chances) if q < 0.3), len(drafts))

    def stop(drafts: tuple[int, ...]) -> int:
        return min(sure(drafts) + 1, len(drafts))

    expect_exact(output_law_chain(target, drafter, 3, length=stop))
    assert output_law_chain(target, drafter, 3, length=sure).total_variation > 0.01


@pytest.mark.parametrize("how", ["independent", "distinct", "deterministic"])
@pytest.mark.parametrize("kind", KINDS)
def test_tree_output_is_the_target(kind: str, how: str) -> None:
    options = {"replacement": how != "distinct", "deterministic": how == "deterministic"}
    for parents in ([], [-1, -1], FORK, [-1, -1, 0, 0], BUSH):
        check_tree(pair(kind, 3, seed=len(parents)), parents, **options)
    check_tree(pair(kind, 2), [-1, -1, 0, 0, 1], **options)
    check_tree(pair(kind, 4), FORK, **options)


def test_a_chain_is_a_tree_without_siblings() -> None:
    models = pair("random", 3)
    chain = output_law_chain(*models, 3).blocks
    for replacement in (True, False):
        tree = check_tree(models, CHAIN, replacement=replacement).blocks
        assert tree.keys() == chain.keys()
        assert all(abs(tree[block] - chain[block]) < 1e-12 for block in chain)


def test_the_blocks_of_one_draft_by_hand() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    after = np.array([0.1, 0.2, 0.7])
    found = output_law_chain(lambda s: log(after if s else p), lambda s: log(q), 1)
    expected = {(0,): 0.3}  # the excess of p over q is all on token 0
    for x, y in itertools.product(range(3), repeat=2):
        expected[x, y] = min(p[x], q[x]) * after[y]
    assert found.blocks == pytest.approx(expected, abs=1e-15)


def test_independent_siblings_accept_as_their_residuals_say() -> None:
    target, drafter = pair("random", 4, seed=5)
    p, q, missed = np.exp(target(())), np.exp(drafter(())), 1.0
    for _ in range(3):
        alpha = np.minimum(p, q).sum()
        missed *= 1 - alpha
        p = np.maximum(p - q, 0) / (1 - alpha)
    assert pytest.approx(2 - missed, abs=1e-12) == check_tree((target, drafter), FORK).G


def test_distinct_siblings_that_cover_the_vocabulary_never_miss() -> None:
    found = check_tree(pair("random", 3), FORK, replacement=False)
    assert pytest.approx(2, abs=1e-12) == found.G


def test_more_siblings_than_tokens() -> None:
    check_tree(pair("zeros", 2), FORK, replacement=False)
    check_tree(pair("random", 2), FORK, deterministic=True)
    check_tree(pair("greedy", 3), BUSH, replacement=False)


def test_greedy_commits_the_drafts_that_agree() -> None:
    target = log(np.eye(3)[[0, 1, 2, 0]])[None]
    accepted, token = verify_chain(target, None, np.array([[0, 1, 0]]), np.full((1, 4), 0.999))
    assert (accepted.tolist(), token.tolist()) == ([2], [2])
    accepted, token = verify_chain(target, None, np.array([[0, 1, 2]]), np.zeros((1, 4)))
    assert (accepted.tolist(), token.tolist()) == ([3], [0])


TRANSFORMS = (
    Transform(temperature=0),
    Transform(temperature=1e-3),
    Transform(temperature=0.5, top_k=2),
    Transform(temperature=1.5, top_p=0.7),
    Transform(min_p=0.4, repetition_penalty=1.7),
)


def transformed(transform: Transform, size: int, seed: int) -> Model:
    """Return a model of random logits after `transform`, token 0 being in the prompt."""
    logits = table(np.random.default_rng(seed), size, np.copy)

    def model(prefix: tuple[int, ...]) -> np.ndarray:
        seen = np.isin(np.arange(size), (0, *prefix))
        return transform.log_probabilities(3 * logits(prefix) + 4, seen)

    return model


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_output_is_the_transformed_target(transform: Transform) -> None:
    models = transformed(transform, 3, seed=1), transformed(transform, 3, seed=2)
    check_chain(models, 3, 2)
    check_chain(models, 3, 2, deterministic=True)
    check_tree(models, [-1, -1, 0, 0], replacement=False)
    target = models[0]
    check_chain((target, transformed(Transform(), 3, seed=3)), 3, 2)  # q may be transformed less


# -- planted bugs --------------------------------------------------------------------------------


def plant(monkeypatch: pytest.MonkeyPatch, name: str, bug: Any) -> None:
    for module in (rules, trees, enumeration):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, bug)


def check_chains() -> None:
    for kind in ("random", "zeros"):
        check_chain(pair(kind, 3), 3, 2)
        check_chain(pair(kind, 3), 3, 2, deterministic=True)


def check_trees() -> None:
    for replacement in (True, False):
        check_tree(pair("random", 3), BUSH, replacement=replacement)
    check_tree(pair("random", 3), BUSH, deterministic=True)


def raw_p(log_p: Any, log_q: Any, token: Any) -> Any:
    return np.exp(rules.at(log_p, token))


def unnormalised(log_p: Any, log_q: Any) -> Any:
    return log(np.maximum(np.exp(log_p) - np.exp(log_q), 0))


def last_row_again(log_p: Any, log_q: Any, drafts: Any, accepted: Any, lengths: Any) -> Any:
    """Draw the bonus from the law of the last draft instead of the law after it."""
    k = drafts.shape[-1]
    rows = np.arange(len(drafts))
    target, first = log_p[rows, np.minimum(accepted, k - 1)], np.minimum(accepted, k - 1)
    drafted = None if log_q is None else log_q[rows, first]
    corrected = rules.correction(target, drafted, drafts[rows, first])
    return np.where((accepted < lengths)[:, None], corrected, target)


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("accept_chance", raw_p),
        ("residual", unnormalised),
        ("residual", lambda log_p, log_q: log_p),  # corrected from p
        ("_following", last_row_again),
    ],
)
def test_planted_bugs_in_chains_are_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, bug: Any
) -> None:
    check_chains()
    plant(monkeypatch, name, bug)
    with pytest.raises((AssertionError, DomainError)):
        check_chains()


def test_a_missing_bonus_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The law stays right, one token a round is lost: only the count shows it."""

    def no_bonus(p: Any, q: Any, drafts: Any, u: Any, lengths: Any) -> Any:
        accepted, token = verify_chain(p, q, drafts, u, lengths)
        full = accepted == lengths
        return np.where(full, accepted - 1, accepted), np.where(full, drafts[:, -1], token)

    plant(monkeypatch, "verify_chain", no_bonus)
    expect_exact(output_law_chain(*pair("random", 3), 2))
    with pytest.raises(AssertionError):
        check_chains()


def test_untransformed_q_is_seen() -> None:
    sharp, raw = (transformed(Transform(temperature=t), 3, seed=2) for t in (0.5, 1.0))
    target = transformed(Transform(temperature=0.5), 3, seed=1)
    check_chain((target, sharp), 3, 2)
    with pytest.raises(AssertionError):
        check_chain((target, sharp), 3, 2, claimed=raw)
    with pytest.raises(AssertionError):
        check_tree((target, sharp), BUSH, claimed=raw)


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("accept_chance", raw_p),
        ("residual", unnormalised),
        ("without", lambda log_q, token: log_q),  # drawn without replacement, verified as with
    ],
)
def test_planted_bugs_in_trees_are_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, bug: Any
) -> None:
    check_trees()
    plant(monkeypatch, name, bug)
    with pytest.raises((AssertionError, DomainError)):
        check_trees()


def test_siblings_drawn_with_replacement_verified_as_without_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def independent(log_q: Any, earlier: list[int], tree: Any) -> dict[int, float]:
        return dict(enumerate(np.exp(log_q).tolist()))

    plant(monkeypatch, "_candidate", independent)
    check_tree(pair("random", 4), FORK)
    with pytest.raises(AssertionError):  # of three tokens the residual is often a single one
        check_tree(pair("random", 4), FORK, replacement=False)


# -- no scheme does better -----------------------------------------------------------------------


def best_hits(p: np.ndarray, candidates: dict[tuple[int, ...], float]) -> float:
    """Return the most often that a token from p can be one of the candidates: optimal transport."""
    sets, size = list(candidates), len(p)
    cost = [-float(y in drawn) for drawn in sets for y in range(size)]
    rows = [np.kron(np.eye(len(sets))[i], np.ones(size)) for i in range(len(sets))]
    rows += [np.tile(np.eye(size)[y], len(sets)) for y in range(size)]
    found = linprog(cost, A_eq=np.array(rows), b_eq=[*candidates.values(), *p])
    assert found.success
    return -float(found.fun)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_no_acceptance_of_one_draft_beats_the_overlap(size: int, kind: str) -> None:
    target, drafter = pair(kind, size, seed=9)
    p, q = np.exp(target(())), np.exp(drafter(()))
    best = best_hits(p, {(x,): q[x] for x in range(size)})
    assert best == pytest.approx(np.minimum(p, q).sum(), abs=1e-8)
    assert pytest.approx(best, abs=1e-8) == output_law_chain(target, drafter, 1).G - 1


@pytest.mark.parametrize("replacement", [True, False])
def test_two_siblings_stay_below_optimal_transport(replacement: bool) -> None:
    for seed in range(5):
        target, drafter = pair("random", 3, seed=seed)
        p, q = np.exp(target(())), np.exp(drafter(()))
        pairs = {
            (x, y): q[x] * (q[y] if replacement else (x != y) * q[y] / (1 - q[x]))
            for x, y in itertools.product(range(3), repeat=2)
        }
        hits = check_tree((target, drafter), [-1, -1], replacement=replacement).G - 1
        assert np.minimum(p, q).sum() - 1e-9 <= hits <= best_hits(p, pairs) + 1e-9


# -- simulation ----------------------------------------------------------------------------------


def fits(tokens: list[np.ndarray], law: np.ndarray) -> float:
    """Return the chance of a worse fit of the joint draws."""
    counts = np.zeros(law.shape)
    np.add.at(counts, tuple(tokens), 1)
    assert (counts[law == 0] == 0).all()
    return float(chisquare(counts[law > 0], law[law > 0] * counts.sum()).pvalue)


def simulate_chain(claimed: Transform) -> float:
    """Two tokens of 40 000 sequences with one draft each, the rest from the target."""
    rng, n, transform = np.random.default_rng(3), 40_000, Transform(temperature=0.7)
    p, q = log([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8]]), log([0.2, 0.5, 0.3])
    after, log_q = transform.log_probabilities(p), transform.log_probabilities(q)
    before, told = np.tile(after[0], (n, 1)), np.tile(claimed.log_probabilities(q), (n, 1, 1))
    drafts = draw(np.tile(log_q, (n, 1)), rng.random(n))
    rows = np.stack([before, after[drafts]], axis=1)
    accepted, token = verify_chain(rows, told, drafts[:, None], rng.random((n, 2)))
    first = np.where(accepted == 1, drafts, token)
    second = np.where(accepted == 1, token, draw(after[token], rng.random(n)))
    return fits([first, second], np.exp(after[0])[:, None] * np.exp(after))


def test_simulated_chains_fit_the_target() -> None:
    assert simulate_chain(Transform(temperature=0.7)) > 1e-3
    assert simulate_chain(Transform()) < 1e-6  # raw q


@pytest.mark.parametrize("replacement", [True, False])
def test_simulated_siblings_fit_the_target(replacement: bool) -> None:
    rng, n = np.random.default_rng(4), 40_000
    p, q = rng.dirichlet(np.ones(4)), rng.dirichlet(np.ones(4))
    log_p, log_q = (np.tile(log(x), (n, 4, 1)) for x in (p, q))
    tokens = draw_siblings(log_q[:, 0], rng.random((n, 3)), replacement=replacement)
    u = rng.random((n, 4))
    for told, fit in ((replacement, True), (not replacement, False)):
        accepted, last = verify_tree(log_p, log_q, tokens, FORK, u, replacement=told)
        hit = accepted.any(axis=1)
        first = np.where(hit, np.where(accepted, tokens, 0).sum(axis=1), last)
        assert (fits([first], p) > 1e-3) is fit
    if not replacement:
        assert all(len(set(row)) == 3 for row in tokens[:1000].tolist())


# -- the same in a batch -------------------------------------------------------------------------


def batch(seed: int, B: int = 64, n: int = 3, size: int = 5) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    log_p, log_q = (log(rng.dirichlet(np.ones(size), size=(B, n + 1))) for _ in range(2))
    log_p[rng.random(log_p.shape) < 0.2] = -np.inf
    log_p = rules.normalise(np.where(np.isinf(log_p).all(axis=-1, keepdims=True), 0.0, log_p))
    return log_p, log_q, rng.integers(0, size, (B, n)), rng.random((B, n + 1))


def test_a_ragged_batch_equals_each_sequence_by_itself() -> None:
    log_p, log_q, drafts, u = batch(0)
    lengths = np.random.default_rng(1).integers(0, 4, len(drafts))
    drafts[np.arange(3) >= lengths[:, None]] = -1
    for told in (log_q[:, :3], None):
        accepted, token = verify_chain(log_p, told, drafts, u, lengths)
        for b, n in enumerate(lengths):
            alone = verify_chain(
                log_p[b : b + 1, : n + 1],
                None if told is None else told[b : b + 1, :n],
                drafts[b : b + 1, :n],
                np.append(u[b, :n], u[b, 3])[None],
            )
            assert (accepted[b], token[b]) == (alone[0][0], alone[1][0])


def test_a_chain_verified_as_a_tree_commits_the_same() -> None:
    log_p, log_q, drafts, u = batch(1)
    for told in (log_q, None):
        accepted, token = verify_chain(log_p, None if told is None else told[:, :3], drafts, u)
        nodes, last = verify_tree(log_p, told, drafts, CHAIN, u)
        assert (nodes == (np.arange(3) < accepted[:, None])).all()
        assert (token == last).all()


def test_each_sequence_may_have_its_own_tree() -> None:
    log_p, log_q, drafts, u = batch(2)
    shapes = [CHAIN, FORK, [-1, -1, 0], [-1, 0, 0]]
    parents = np.array([shapes[b % 4] for b in range(len(drafts))])
    nodes, last = verify_tree(log_p, log_q, drafts, parents, u)
    for i, shape in enumerate(shapes):
        one = (x[i::4] for x in (log_p, log_q, drafts))
        alone = verify_tree(*one, shape, u[i::4])
        assert (nodes[i::4] == alone[0]).all()
        assert (last[i::4] == alone[1]).all()


def test_trees_of_a_batch_equal_each_by_itself() -> None:
    log_p, log_q, drafts, u = batch(4, n=4)
    nodes, last = verify_tree(log_p, log_q, drafts, BUSH, u, replacement=False)
    for b in range(len(drafts)):
        row = (x[b : b + 1] for x in (log_p, log_q, drafts))
        alone = verify_tree(*row, BUSH, u[b : b + 1], replacement=False)
        assert (alone[0][0] == nodes[b]).all()
        assert alone[1][0] == last[b]
    assert nodes.any(axis=0).all()


def test_an_empty_batch_and_no_drafts() -> None:
    log_p, log_q, drafts, u = batch(3, B=0)
    assert [x.shape for x in verify_chain(log_p, log_q[:, :3], drafts, u)] == [(0,), (0,)]
    assert [x.shape for x in verify_tree(log_p, log_q, drafts, FORK, u)] == [(0, 3), (0,)]
    log_p, _, drafts, u = batch(3, n=0)
    accepted, token = verify_chain(log_p, None, drafts, u)
    assert not accepted.any()
    assert (token == draw(log_p[:, 0], u[:, 0])).all()


def test_tokens_seen_along_a_tree() -> None:
    seen = np.array([[True, False, False, False], [False, True, False, False]])
    drafts = np.array([[1, 2, 3], [0, -1, 3]])
    found = seen_along(seen, drafts, [-1, 0, -1])
    assert [np.flatnonzero(row).tolist() for row in found[0]] == [[0], [0, 1], [0, 1, 2], [0, 3]]
    assert [np.flatnonzero(row).tolist() for row in found[1]] == [[1], [0, 1], [0, 1], [1, 3]]
    assert not seen[0, 1]
    assert (seen_along(seen, drafts) == seen_along(seen, drafts, CHAIN)).all()


# -- torch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_torch_agrees_given_the_same_uniforms(seed: int) -> None:
    torch = pytest.importorskip("torch")
    log_p, log_q, drafts, u = batch(seed)
    tensors = [torch.tensor(x) for x in (log_p, log_q, drafts, u)]
    lengths = np.arange(len(drafts)) % 4
    for told in (1, None):
        ours = verify_chain(log_p, told and log_q[:, :3], drafts, u, lengths)
        p, q, d, v = tensors
        theirs = verify_chain(p, told and q[:, :3], d, v, torch.tensor(lengths))
        assert all(isinstance(x, torch.Tensor) for x in theirs)
        assert all((a == b.numpy()).all() for a, b in zip(ours, theirs, strict=True))
        for replacement in (True, False):
            ours = verify_tree(
                log_p, told and log_q, drafts, [-1, -1, 0], u, replacement=replacement
            )
            theirs = verify_tree(p, told and q, d, [-1, -1, 0], v, replacement=replacement)
            assert all((a == b.numpy()).all() for a, b in zip(ours, theirs, strict=True))
    siblings = draw_siblings(log_q, u[..., None].repeat(3, -1), replacement=False)
    theirs = draw_siblings(q, v[..., None].repeat(1, 1, 3), replacement=False)
    assert (siblings == theirs.numpy()).all()
    assert (seen_along(log_p[:, 0] > -2, drafts) == seen_along(p[:, 0] > -2, d).numpy()).all()


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_in_torch(transform: Transform) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(5)
    logits, seen = rng.normal(size=(6, 2, 9)), rng.random((6, 2, 9)) < 0.3
    logits[0, 0, :4] = -np.inf
    logits[1] = logits[1].round()  # ties
    ours = transform.log_probabilities(logits, seen)
    theirs = transform.log_probabilities(torch.tensor(logits), torch.tensor(seen))
    assert theirs.dtype == torch.float64
    np.testing.assert_allclose(theirs.numpy(), ours, rtol=1e-12, atol=1e-12)
    equal = Transform(top_k=3).log_probabilities(torch.zeros(1000))
    assert torch.isfinite(equal).nonzero().flatten().tolist() == [0, 1, 2]
    half = transform.log_probabilities(torch.tensor(logits).to(torch.bfloat16), torch.tensor(seen))
    assert half.dtype == torch.float32
    np.testing.assert_allclose(torch.logsumexp(half, -1).numpy(), 0, atol=1e-6)


def test_single_precision_stays_finite() -> None:
    torch = pytest.importorskip("torch")
    logits = torch.tensor([[0.0, 60.0, -90.0, 1e30], [0.0, 1e-3, -1e-3, -3e38]])
    for temperature in (0.0, 1e-300, 1e-3, 1.0, 1e30):
        p = Transform(temperature=temperature).log_probabilities(logits)
        q = Transform(temperature=temperature).log_probabilities(logits.flip(0))
        assert p.dtype == torch.float32
        for law in (residual(p, q), residual(q, p), residual(p, p)):
            assert not law.isnan().any()
            np.testing.assert_allclose(torch.logsumexp(law, -1).numpy(), 0, atol=1e-5)
        last = torch.tensor([1 - 2**-53, 0.0], dtype=torch.float64)
        assert torch.isfinite(p[torch.arange(2), draw(p, last)]).all()


# -- the parts -----------------------------------------------------------------------------------


def test_accept_chance_at_the_edges() -> None:
    p, q = log([0.5, 0.5, 0.0, 0.0]), log([1.0, 0.0, 0.0, 0.0])
    chances = [float(accept_chance(p, q, np.array(t))) for t in range(4)]
    assert chances == [0.5, 1.0, 0.0, 0.0]
    assert float(accept_chance(p, None, np.array(1))) == 0.5
    tiny = np.array([-800.0, 0.0])  # e to the -800 underflows; the ratio does not
    assert float(accept_chance(tiny, tiny + np.array([1.0, 0]), np.array(0))) == pytest.approx(
        np.exp(-1)
    )


def test_residual_at_the_edges() -> None:
    p, q = log([0.5, 0.5, 0.0]), log([0.0, 0.0, 1.0])
    assert np.exp(residual(p, q)) == pytest.approx([0.5, 0.5, 0])
    assert (residual(p, p) == p).all()
    half = log([0.5, 0.25, 0.25])
    near = half + np.array([2.0**-40, 2.0**-41, -(2.0**-40)])  # no small difference is lost
    assert np.exp(residual(near, half)) == pytest.approx([0.8, 0.2, 0], abs=1e-11)
    small = np.array([-800.0, -801.0, 0.0])
    assert np.exp(residual(small, log([0, 0, 1]))).sum() == pytest.approx(1, abs=1e-12)


def test_a_draft_without_chance_is_a_law_all_on_it() -> None:
    p = log([[0.5, 0.3, 0.2], [0.0, 0.4, 0.6], [1.0, 0.0, 0.0]])
    token, hot = np.zeros(3, dtype=int), log([[1.0, 0.0, 0.0]] * 3)
    assert accept_chance(p, None, token) == pytest.approx(accept_chance(p, hot, token))
    one, other = rules.correction(p, None, token), rules.correction(p, hot, token)
    assert np.exp(one) == pytest.approx(np.exp(other))


def test_without_takes_tokens_out_until_none_is_left() -> None:
    q = log([[0.5, 0.25, 0.25]])
    rest = without(without(q, np.array([0])), np.array([2]))
    assert np.exp(rest).tolist() == [[0, 1, 0]]
    assert np.isinf(without(rest, np.array([1]))).all()


def test_draw_survives_a_parallel_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a running sum is not monotone to the last bit: impossible tokens stay so."""

    class Wobbly:
        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        def cumsum(self, p: np.ndarray, axis: int) -> np.ndarray:
            return np.cumsum(p, axis=axis) + 1e-7 * (p == 0)

    assert int(draw(log([0.5, 0.5]), np.array(0.5))) == 1
    monkeypatch.setattr(rules, "namespace", lambda array: Wobbly())
    assert int(draw(log([0.5, 0.0, 0.5]), np.array(0.5 + 5e-8))) == 2
    assert int(draw(log([0.5, 0.5, 0.0]), np.array(1 - 1e-12))) == 1


weights = arrays(np.float64, 6, elements=st.one_of(st.just(0.0), st.floats(1e-12, 1.0)))


@given(p=weights, u=st.floats(0, 1, exclude_max=True))
def test_draw_inverts_the_cumulative_law(p: np.ndarray, u: float) -> None:
    assume(p.sum() > 0)
    p = p / p.sum()
    token = int(draw(log(p), np.array(u)))
    assert p[token] > 0
    ends = np.cumsum(p)
    assert ends[token] - p[token] - 1e-12 <= u <= ends[token] + 1e-12


@given(p=weights, q=weights)
def test_residual_completes_the_overlap(p: np.ndarray, q: np.ndarray) -> None:
    assume(p.sum() > 0 and q.sum() > 0)
    p, q = p / p.sum(), q / q.sum()
    overlap = np.minimum(p, q)
    whole = overlap + (1 - overlap.sum()) * np.exp(residual(log(p), log(q)))
    np.testing.assert_allclose(whole, p, atol=1e-12)


logits = arrays(np.float64, st.integers(1, 9), elements=st.integers(-30, 30).map(lambda n: n / 4))
some = {
    "temperature": st.sampled_from([1e-320, 1e-3, 0.5, 1.0, 3.0]),
    "top_k": st.none() | st.integers(1, 12),
    "top_p": st.none() | st.floats(1e-6, 1.0),
    "min_p": st.none() | st.floats(0.0, 1.0),
}


@given(x=logits, transform=st.builds(Transform, **some))
def test_transforms_normalise_and_keep_the_order(x: np.ndarray, transform: Transform) -> None:
    p = np.exp(transform.log_probabilities(x))
    assert p.sum() == pytest.approx(1, abs=1e-12)
    order = np.argsort(-x, kind="stable")
    assert (np.diff(p[order]) <= 0).all()
    assert p[np.argmax(x)] == p.max()
    np.testing.assert_allclose(np.exp(transform.log_probabilities(x + 8)), p, atol=1e-12)


@given(x=logits, k=st.integers(1, 12))
def test_top_k_keeps_k(x: np.ndarray, k: int) -> None:
    p = np.exp(Transform(top_k=k).log_probabilities(x))
    assert (p > 0).sum() == min(k, len(x))
    whole = np.exp(Transform().log_probabilities(x))
    kept = np.where(p > 0, whole, 0)
    np.testing.assert_allclose(p, kept / kept.sum(), rtol=1e-12)


@given(x=logits, top_p=st.floats(1e-3, 0.999))
def test_top_p_keeps_the_fewest_that_reach_it(x: np.ndarray, top_p: float) -> None:
    whole = np.exp(Transform().log_probabilities(x))
    kept = whole[np.isfinite(Transform(top_p=top_p).log_probabilities(x))]
    assert kept.sum() >= top_p - 1e-12
    assert kept.sum() - kept.min() < top_p + 1e-12


@given(x=logits, min_p=st.floats(1e-3, 1.0))
def test_min_p_keeps_what_is_likely_enough(x: np.ndarray, min_p: float) -> None:
    whole = np.exp(Transform().log_probabilities(x))
    ratio = whole / whole.max()
    assume((abs(ratio - min_p) > 1e-9).all())
    kept = np.isfinite(Transform(min_p=min_p).log_probabilities(x))
    assert (kept == (ratio > min_p)).all()


@given(x=logits, penalty=st.floats(1.0, 3.0), token=st.integers(0, 8))
def test_repetition_penalty_never_favours_a_seen_token(
    x: np.ndarray, penalty: float, token: int
) -> None:
    seen = np.arange(len(x)) == token
    found = Transform(repetition_penalty=penalty).log_probabilities(x, seen)
    plain = Transform().log_probabilities(x)
    assert (found[seen] <= plain[seen] + 1e-12).all()
    assert (found[~seen] >= plain[~seen] - 1e-12).all()


@given(x=logits)
def test_greedy_is_the_first_of_the_likeliest(x: np.ndarray) -> None:
    for transform in (Transform(temperature=0), Transform(top_k=1), Transform(top_k=1, top_p=0.5)):
        assert transform.greedy
        assert (
            np.exp(transform.log_probabilities(x)).tolist() == np.eye(len(x))[x.argmax()].tolist()
        )


def test_top_p_counts_what_top_k_left() -> None:
    x = log([0.4, 0.3, 0.2, 0.1])  # of the first three, the first two have 7/9
    kept = np.exp(Transform(top_k=3, top_p=0.75).log_probabilities(x))
    assert kept == pytest.approx([4 / 7, 3 / 7, 0, 0])
    tied = Transform(min_p=1).log_probabilities(np.array([1.0, 1.0, 0.0]))
    assert np.exp(tied) == pytest.approx([0.5, 0.5, 0])
    penalised = Transform(repetition_penalty=2).log_probabilities(
        np.array([2.0, -1.0, 1.0]), np.array([True, True, False])
    )
    assert np.exp(penalised) == pytest.approx(np.exp([1, -2, 1]) / np.exp([1, -2, 1]).sum())


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 0),
        ("top_k", 1.5),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
    ],
)
def test_transforms_out_of_range(field: str, value: float) -> None:
    with pytest.raises(DomainError, match=field):
        Transform(**{field: value})


@pytest.mark.parametrize("bad", [[np.nan, 1.0], [np.inf, 1.0], [-np.inf, -np.inf], "text", [], 1.0])
def test_logits_that_give_no_law(bad: Any) -> None:
    for transform in (Transform(), Transform(temperature=0), Transform(top_p=0.5)):
        with pytest.raises(DomainError, match="logits"):
            transform.log_probabilities(bad)


def test_a_penalty_needs_the_tokens_before() -> None:
    transform = Transform(repetition_penalty=1.2)
    for seen in (None, np.array([True])):
        with pytest.raises(DomainError, match="seen"):
            transform.log_probabilities(np.zeros(3), seen)


def test_verification_names_what_does_not_fit() -> None:
    log_p, log_q, drafts, u = batch(0)
    q = log_q[:, :3]
    nan = np.where(np.arange(5) == 2, np.nan, log_p)
    chains = [
        ("drafts", (log_p, q, drafts[:, :2], u)),
        ("drafts", (log_p, q, drafts + 5, u)),
        ("drafts", (log_p, q, drafts * 1.0, u)),
        ("drafts", (log_p, q, -1 - 0 * drafts, u)),
        ("log_q", (log_p, q[..., :4], drafts, u)),
        ("log_q", (log_p, log_q, drafts, u)),
        ("log_p", (log_p[0], q, drafts, u)),
        ("u must", (log_p, q, drafts, u[:, :3])),
        ("u must", (log_p, q, drafts, u + 1)),
        ("u must", (log_p, q, drafts, u * np.nan)),
        ("lengths", (log_p, q, drafts, u, np.full(64, 4))),
        ("lengths", (log_p, q, drafts, u, np.full(64, -1))),
        ("lengths", (log_p, q, drafts, u, np.full(63, 1))),
        ("normalised", (nan, q, drafts, u)),
        ("normalised", (log_p, q * np.nan, drafts, u)),
        ("normalised", (log_p + 1, None, drafts, u)),
    ]
    for name, arguments in chains:
        with pytest.raises(DomainError, match=name):
            verify_chain(*arguments)
    for parents in ([-1, 1, 0], [-2, 0, 0], [-1, 0], [[-1, 0, 1]], [-1.0, 0.0, 1.0]):
        with pytest.raises(DomainError, match="parents"):
            verify_tree(log_p, log_q, drafts, parents, u)
    with pytest.raises(DomainError, match="log_q"):
        verify_tree(log_p, q, drafts, CHAIN, u)
    with pytest.raises(DomainError, match="tokens"):
        verify_tree(log_p, log_q, drafts - 2, CHAIN, u)
    with pytest.raises(DomainError, match="parents"):
        output_law_tree(*pair("random", 2), [0])
    with pytest.raises(DomainError, match="k must"):
        output_law_chain(*pair("random", 2), -1)
