"""Speculative decoding that runs: what is committed is what the target alone would say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import samples
from scipy.stats import chisquare

from specmodel.errors import DomainError
from specmodel.law import Transform

torch = pytest.importorskip("torch", reason="decoding needs torch")

from calibrate.engine.cache import Cache  # noqa: E402
from calibrate.engine.config import DecoderConfig  # noqa: E402
from calibrate.engine.decoder import Decoder  # noqa: E402
from calibrate.engine.generate import generate  # noqa: E402
from calibrate.speculate import drafters, loop, proposals  # noqa: E402
from calibrate.speculate.drafters import (  # noqa: E402
    DraftModel,
    Forced,
    NGram,
    SelfLayers,
    SparseCache,
    check_pair,
)
from calibrate.speculate.head_drafters import FeatureDrafter, Medusa  # noqa: E402
from calibrate.speculate.heads import FeatureHead, MedusaHeads  # noqa: E402
from calibrate.speculate.lookahead import Lookahead  # noqa: E402
from calibrate.speculate.loop import speculate  # noqa: E402
from calibrate.speculate.text import Text, stop_strings  # noqa: E402
from calibrate.speculate.trees import Tree  # noqa: E402

SMALL = DecoderConfig(**samples.DECODER, context=512)


def decoder(config: DecoderConfig = SMALL, seed: int = 0, scale: float = 1.0) -> Decoder:
    found = Decoder(config).randomise(seed)
    with torch.no_grad():
        found.head.mul_(scale)
    return found


def near(target: Decoder, seed: int = 1, noise: float = 0.3) -> Decoder:
    """Return a draft model that often agrees: the target with its weights disturbed."""
    found = Decoder(target.config)
    found.load_state_dict(target.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in found.parameters():
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return found


def feature_head(target: Decoder, *, norms: bool, seed: int = 3) -> FeatureDrafter:
    """A random head that passes the token's embedding on, so that its drafts have some chance."""
    head = FeatureHead(target.config, norms=norms).randomise(seed)
    return FeatureDrafter(target, head)


def medusa(target: Decoder, seed: int = 4) -> Medusa:
    heads = MedusaHeads(target.config.hidden, target.config.vocab, 8)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
    return Medusa(heads)


DRAFTERS: dict[str, Callable[[Decoder], Any]] = {
    "EAGLE head": lambda target: feature_head(target, norms=False),
    "MTP block": lambda target: feature_head(target, norms=True),
    "Medusa heads": medusa,
    "lookahead": lambda target: Lookahead(window=4, guesses=3),
    "same model": DraftModel,
    "near model": lambda target: DraftModel(near(target)),
    "other model": lambda target: DraftModel(decoder(seed=5)),
    "n-gram": lambda target: NGram(),
    "early exit": lambda target: SelfLayers(target, [0, 1]),
    "layers left out": lambda target: SelfLayers(target, [0, 2]),
    "sparse cache": lambda target: SparseCache(target, sink=2, window=5),
}


def prompts(count: int, *, longest: int = 20, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 23, random.integers(1, longest)).tolist() for _ in range(count)]


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_text_is_the_text_of_plain_decoding(name: str) -> None:
    target = decoder()
    given = prompts(16)
    plain = generate(target, given, max_new_tokens=24)
    for k in (1, 2, 5):
        found = speculate(target, DRAFTERS[name](target), given, k=k, max_new_tokens=24)
        assert found.tokens == plain
        for turn in found.rounds:
            assert (turn.accepted <= turn.drafted).all()
        assert (turn.drafted <= k).all()


TREES = {
    "wide": Tree.of([3, 2, 1]),
    "one level": Tree.of([4]),
    "uneven": Tree((-1, -1, -1, 0, 0, 1, 3, 6)),
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", [name for name in DRAFTERS if name not in ("n-gram", "lookahead")])
def test_greedy_text_of_a_tree_is_the_text_of_plain_decoding(name: str, tree: str) -> None:
    target = decoder()
    given = prompts(12)
    plain = generate(target, given, max_new_tokens=20, eos=(3,))
    found = speculate(
        target, DRAFTERS[name](target), given, k=TREES[tree], max_new_tokens=20, eos=(3,)
    )
    assert found.tokens == plain
    if name == "same model":  # its first choice is the target's
        assert all((turn.accepted == TREES[tree].k).all() for turn in found.rounds)


@pytest.mark.parametrize("name", ["n-gram", "lookahead"])
def test_what_drafts_chains_refuses_trees(name: str) -> None:
    target = decoder()
    with pytest.raises(DomainError, match="chains, no trees"):
        speculate(target, DRAFTERS[name](target), [[1, 2]], k=Tree.of([2]), max_new_tokens=9)


@pytest.mark.parametrize(
    "name", ["near model", "n-gram", "early exit", "sparse cache", "EAGLE head", "lookahead"]
)
def test_end_tokens_within_an_accepted_block(name: str) -> None:
    target, given = decoder(), prompts(24, seed=3)
    ends = (3, 7)
    plain = generate(target, given, max_new_tokens=30, eos=ends)
    assert len({len(tokens) for tokens in plain}) > 2  # some end early
    found = speculate(target, DRAFTERS[name](target), given, k=4, max_new_tokens=30, eos=ends)
    assert found.tokens == plain


class KnownNGrams(Lookahead):
    """Lookahead that knows n-grams from the start, so that the first rounds draft."""

    def start(self, text: Text, cache: Cache) -> None:
        super().start(text, cache)
        grams = {a: [(b, (a + b) % 5, b) for b in (0, 1, 3)] for a in range(5)}
        self._known = [dict(grams) for _ in text.lengths]


def test_known_n_grams_are_drafted() -> None:
    config = replace(SMALL, vocab=5, layers=2, hidden=16, heads=2, kv_heads=1)
    target, how = decoder(config, scale=1.5), Transform(temperature=0.9)
    found = speculate(
        target, KnownNGrams(), [[1, 2]] * 500, k=3, max_new_tokens=3, transform=how, eos=()
    )
    assert found.rounds[0].accepted.mean() > 0.5


@pytest.mark.parametrize("name", DRAFTERS)
def test_committed_tokens_follow_the_target(name: str) -> None:
    """Chi-square of the joint law of two tokens on 20,000 draws, given a first one."""
    config = replace(SMALL, vocab=5, layers=2, hidden=16, heads=2, kv_heads=1)
    target = decoder(config, scale=1.5)
    make = {
        "EAGLE head": lambda: feature_head(target, norms=False),
        "MTP block": lambda: feature_head(target, norms=True),
        "Medusa heads": lambda: medusa(target),
        "lookahead": lambda: KnownNGrams(window=1, guesses=3),
        "same model": lambda: DraftModel(target),
        "near model": lambda: DraftModel(near(target)),
        "other model": lambda: DraftModel(decoder(config, seed=5, scale=2.0)),
        "n-gram": NGram,
        "early exit": lambda: SelfLayers(target, [0]),
        "layers left out": lambda: SelfLayers(target, [1]),
        "sparse cache": lambda: SparseCache(target, sink=0, window=1),
    }[name]
    assert _p_value(target, make(), seed=2) > 1e-3


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("other model", Tree.of([3, 2])),
        ("other model", Tree((-1, -1, -1, 0, 0, 1))),
        ("EAGLE head", Tree((-1, -1, -1, 0, 0, 1))),
        ("Medusa heads", Tree.of([3, 2])),
        ("layers left out", Tree((-1, -1, -1, 0, 0, 1))),
    ],
)
def test_committed_tokens_of_a_tree_follow_the_target(name: str, tree: Tree) -> None:
    config = replace(SMALL, vocab=5, layers=2, hidden=16, heads=2, kv_heads=1)
    target = decoder(config, scale=1.5)
    make = {
        "other model": lambda: DraftModel(decoder(config, seed=5, scale=2.0)),
        "EAGLE head": lambda: feature_head(target, norms=False),
        "Medusa heads": lambda: medusa(target),
        "layers left out": lambda: SelfLayers(target, [1]),
    }[name]
    assert _p_value(target, make(), seed=2, k=tree) > 1e-3


def _p_value(
    target: Decoder, drafter: Any, *, seed: int, k: int | Tree = 3, draws: int = 20_000
) -> float:
    """Return the p-value of tokens 2 and 3 given the prompt and token 1, over all token 1."""
    size, prompt = target.config.vocab, [1, 2, 1, 2]
    how = Transform(temperature=0.9, top_p=0.97)
    found = speculate(
        target, drafter, [prompt] * draws, k=k, max_new_tokens=3, transform=how, seed=seed, eos=()
    )
    seen = np.zeros((size, size, size))
    np.add.at(seen, tuple(np.array(found.tokens).T), 1)
    words = torch.cartesian_prod(*[torch.arange(size)] * 3)
    text = torch.cat((torch.tensor(prompt).expand(len(words), 4), words), 1)
    with torch.inference_mode():
        law = how.log_probabilities(target(text).double())[:, 3:6]
    expected = draws * law.gather(2, words[:, :, None])[..., 0].sum(1).exp().numpy()
    possible = expected > 0
    if seen.reshape(-1)[~possible].any():
        return 0.0
    rare = possible & (expected < 5)
    counts = np.append(seen.reshape(-1)[possible & ~rare], seen.reshape(-1)[rare].sum())
    means = np.append(expected[possible & ~rare], expected[rare].sum())
    keep = means > 0
    return float(
        chisquare(counts[keep], means[keep] * counts[keep].sum() / means[keep].sum()).pvalue
    )


def _keep_rejected(monkeypatch: pytest.MonkeyPatch, target: Decoder) -> None:
    class Kept(Cache):
        def advance(self, counts: Any) -> None:
            counts = torch.as_tensor(counts)
            rejected = (self.lengths >= 4) & (counts > 0) & (counts < 3)
            super().advance(counts + rejected.long())

    monkeypatch.setattr(target, "cache", lambda batch, size: Kept(target.config, batch, size + 1))


def _tell_another_q(monkeypatch: pytest.MonkeyPatch, target: Decoder) -> None:
    real = drafters.draft

    def told(*arguments: Any) -> Any:
        found = real(*arguments)
        return found._replace(log_q=torch.log_softmax(found.log_q.clamp(min=-8) / 2, -1))

    monkeypatch.setattr(drafters, "draft", told)


def _correct_from_p(monkeypatch: pytest.MonkeyPatch, target: Decoder) -> None:
    monkeypatch.setattr("specmodel.law.rules.residual", lambda log_p, log_q: log_p)


@pytest.mark.parametrize("plant", [_keep_rejected, _tell_another_q, _correct_from_p])
def test_planted_bugs_are_caught(
    plant: Callable[[pytest.MonkeyPatch, Decoder], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(SMALL, vocab=5, layers=2, hidden=16, heads=2, kv_heads=1)
    target = decoder(config, scale=1.5)
    drafter = DraftModel(decoder(config, seed=5, scale=2.0))
    plant(monkeypatch, target)
    assert _p_value(target, drafter, seed=2) < 1e-6


def test_siblings_drawn_as_if_independent_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(SMALL, vocab=5, layers=2, hidden=16, heads=2, kv_heads=1)
    target, tree = decoder(config, scale=1.5), Tree.of([3, 2])
    drafter = DraftModel(decoder(config, seed=5, scale=2.0))
    real = proposals.draw_siblings
    monkeypatch.setattr(
        proposals, "draw_siblings", lambda law, u, replacement: real(law, u, replacement=True)
    )
    assert _p_value(target, drafter, seed=2, k=tree) < 1e-6


def test_a_missing_bonus_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text still follows the target, but takes more rounds."""
    target = decoder()

    def rounds() -> int:
        found = speculate(target, DraftModel(target), prompts(6), k=3, max_new_tokens=25, eos=())
        return len(found.rounds)

    assert rounds() == 6  # one token of the prompts' pass, four of each round
    commit = loop._Batch.commit

    def without_bonus(self: Any, block: Any, counts: Any = None) -> Any:
        return commit(self, block, None if counts is None else counts.clamp(max=3))

    monkeypatch.setattr(loop._Batch, "commit", without_bonus)
    assert rounds() == 8


def test_what_is_rejected_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every first draft rejected, committed keys and values stay bitwise what they were, and
    the next logits are those of plain decoding.
    """
    target, given = decoder(), prompts(5)
    seen: list[Cache] = []

    class Watched(Cache):
        def advance(self, counts: Any) -> None:
            super().advance(counts)
            seen.append(self.clone())

    def cache(batch: int, capacity: int) -> Cache:
        return Watched(target.config, batch, capacity)

    logits: list[Any] = []
    law = loop._Batch.law

    def watched(self: Any, found: Any, *rest: Any) -> Any:
        logits.append(found if found.dim() == 2 else found[:, 0])
        return law(self, found, *rest)

    monkeypatch.setattr(target, "cache", cache)
    monkeypatch.setattr(loop._Batch, "law", watched)
    for drafter in (Forced(NGram(), [0.0]), Forced(DraftModel(near(target)), [0.0])):
        found = speculate(target, drafter, given, k=4, max_new_tokens=12, eos=())
        assert all((turn.accepted == 0).all() for turn in found.rounds)
        forced, caches = list(logits), list(seen)
        logits.clear()
        seen.clear()
        plain = speculate(target, None, given, k=0, max_new_tokens=12, eos=())
        assert found.tokens == plain.tokens
        for one, other in zip(forced, logits, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
        logits.clear()
        seen.clear()
        for before, after in pairwise(caches):
            for row, n in enumerate(before.lengths.tolist()):
                assert torch.equal(before.keys[:, row, :, :n], after.keys[:, row, :, :n])
                assert torch.equal(before.values[:, row, :, :n], after.values[:, row, :, :n])


@pytest.mark.parametrize("tree", [Tree.chain(3), Tree.of([2, 2, 1])])
@pytest.mark.parametrize(
    "name",
    ["near model", "EAGLE head", "MTP block", "Medusa heads", "layers left out", "sparse cache"],
)
def test_drafts_are_those_of_a_drafter_that_reads_the_text_anew(name: str, tree: Tree) -> None:
    """Round after round: what was rejected left no trace in the drafter, and features stand where
    they belong.
    """
    target, given = decoder(), prompts(5)
    real, fresh = DRAFTERS[name](target), DRAFTERS[name](target)
    propose, seen = real.propose, []

    def watched(tree: Tree, transform: Transform, uniform: Any) -> Any:
        text, lengths = real.text, real.text.lengths.tolist()
        rows = [row[:n].tolist() for row, n in zip(text.tokens, lengths, strict=True)]
        other = Text(rows, text.tokens.shape[1], vocab=23, hidden=text.features.shape[2])
        cache = target.cache(5, text.tokens.shape[1])
        features = other.features if real.reads_features else None
        drafters.prefill(target, [row[:-1] for row in rows], cache, features)
        for row, n in enumerate(lengths):
            if real.reads_features:
                torch.testing.assert_close(
                    text.features[row, : n - 1], other.features[row, : n - 1], rtol=0, atol=1e-5
                )
        fresh.start(other, cache)
        found, anew = (
            one(tree, transform, lambda *shape: torch.full(shape, 0.37, dtype=torch.float64))
            for one in (propose, fresh.propose)
        )
        assert torch.equal(found.tokens, anew.tokens)
        torch.testing.assert_close(found.log_q, anew.log_q, rtol=0, atol=1e-4)
        seen.append(lengths)
        return found

    real.propose = watched
    speculate(
        target, real, given, k=tree, max_new_tokens=16, transform=Transform(), seed=1, eos=(3,)
    )
    steps = np.diff(np.array(seen), axis=0)
    assert len(set(steps.flatten().tolist())) > 2  # some accepted more than others, some ended


def test_a_text_ends_after_its_stop_string() -> None:
    target, given = decoder(), prompts(16)
    plain = speculate(target, None, given, k=0, max_new_tokens=30, eos=())
    stop = stop_strings(lambda tokens: "".join(map(chr, (97 + token for token in tokens))), ["h"])
    found = speculate(
        target, DraftModel(near(target)), given, k=4, max_new_tokens=30, eos=(), stop=stop
    )
    for tokens, whole in zip(found.tokens, plain.tokens, strict=True):
        end = whole.index(7) + 1 if 7 in whole else len(whole)
        assert tokens == whole[:end]
    assert len({len(tokens) for tokens in found.tokens}) > 1


def test_a_draft_model_that_is_the_target_is_always_right() -> None:
    target, how = decoder(), Transform(temperature=0.8, top_k=9, repetition_penalty=1.2)
    found = speculate(
        target, DraftModel(target), prompts(6), k=4, max_new_tokens=26, transform=how, eos=()
    )
    assert len(found.rounds) == 5  # one token of the prompts' pass, five of each round
    for turn in found.rounds:
        assert (turn.accepted == 4).all()
        assert (turn.committed == 5).all()
        np.testing.assert_allclose(turn.overlap, 1, atol=1e-5)


def test_a_window_over_everything_is_the_target() -> None:
    target = decoder()
    found = speculate(
        target, SparseCache(target, sink=3, window=400), prompts(6), k=4, max_new_tokens=26, eos=()
    )
    assert all((turn.accepted == 4).all() for turn in found.rounds)


def test_a_pass_is_as_wide_as_the_longest_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    target, widths = decoder(), []
    given = [[1, 2, 3, 4, 5], [6, 7, 8, 9]]  # nothing stands twice

    def hidden(self: Decoder, tokens: Any, *rest: Any, **more: Any) -> Any:
        widths.append(tokens.shape[1])
        return real(self, tokens, *rest, **more)

    real = Decoder.hidden
    monkeypatch.setattr(Decoder, "hidden", hidden)
    found = speculate(target, NGram(shortest=3), given, k=4, max_new_tokens=12)
    assert widths[1:] == [1 + turn.drafted.max() for turn in found.rounds]
    assert 1 in widths
    assert all(turn.overlap.shape == (2, 4) for turn in found.rounds)


@pytest.mark.parametrize("name", DRAFTERS)
def test_rounds_add_up(name: str) -> None:
    target, k = decoder(), 3
    given = prompts(12, seed=7)
    found = speculate(
        target,
        DRAFTERS[name](target),
        given,
        k=k,
        max_new_tokens=20,
        transform=Transform(temperature=0.7),
        eos=(3,),
    )
    lengths = np.ones(12, int)
    for turn in found.rounds:
        lengths += np.where(turn.active, turn.committed, 0)
        whole = turn.active & (turn.committed <= turn.accepted)
        assert (turn.committed[turn.active] >= 1).all()
        assert (turn.committed[turn.active] <= turn.accepted[turn.active] + 1).all()
        assert turn.overlap.shape == (12, k)
        unknown = k if name == "lookahead" else k - turn.drafted  # its drafts are a tree
        assert (np.isnan(turn.overlap).sum(1) == unknown).all()
        known = np.arange(k + 1) < turn.committed[:, None]
        assert (np.isfinite(turn.surprisal) == known).all()
        assert (np.isfinite(turn.entropy) == known).all()
        assert min(turn.T_d, turn.T_v, turn.T_o) >= 0
        assert all(
            len(tokens) == 20 or tokens[-1] == 3
            for tokens, cut in zip(found.tokens, whole, strict=True)
            if cut
        )
    assert lengths.tolist() == [len(tokens) for tokens in found.tokens]


def test_acceptance_is_the_overlap_of_the_laws() -> None:
    """Of the first draft; the mean of sum min(p, q) is what its rate is drawn around."""
    target = decoder()
    found = speculate(
        target,
        DraftModel(near(target, noise=0.5)),
        prompts(400),
        k=1,
        max_new_tokens=20,
        transform=Transform(),
        eos=(),
    )
    accepted = np.concatenate([turn.accepted[turn.active] for turn in found.rounds])
    overlap = np.concatenate([turn.overlap[turn.active, 0] for turn in found.rounds])
    error = np.sqrt((overlap * (1 - overlap)).sum()) / len(overlap)
    assert 0.2 < overlap.mean() < 0.95
    assert abs(accepted.mean() - overlap.mean()) < 4 * error


def test_drafting_leaves_the_target_cache_as_it_was() -> None:
    target = decoder()
    for drafter in (SelfLayers(target, [0, 2]), SparseCache(target, sink=1, window=4)):
        text = Text(prompts(5), 60, vocab=23)
        cache = target.cache(5, 60)
        with torch.inference_mode():
            drafters.prefill(
                target,
                [row[: n - 1] for row, n in zip(text.tokens, text.lengths, strict=True)],
                cache,
            )
            before = cache.clone()
            drafter.start(text, cache)
            drafter.propose(Tree.chain(4), Transform(), lambda *shape: torch.rand(shape))
        assert torch.equal(cache.lengths, before.lengths)
        for i, n in enumerate(cache.lengths.tolist()):
            assert torch.equal(cache.keys[:, i, :, :n], before.keys[:, i, :, :n])
            assert torch.equal(cache.values[:, i, :, :n], before.values[:, i, :, :n])


def test_which_candidate_was_accepted() -> None:
    """Of a draft model that is the target the first one; the tree's siblings are counted."""
    target, tree = decoder(), Tree((-1, -1, -1, 0, 0, 1, 3))
    found = speculate(target, DraftModel(target), prompts(4), k=tree, max_new_tokens=13, eos=())
    for turn in found.rounds:
        assert turn.candidates.tolist() == [[3, 2, 1]] * 4
        assert turn.ranks.tolist() == [[0, 0, 0]] * 4
    found = speculate(target, medusa(target), prompts(40), k=tree, max_new_tokens=13, eos=())
    ranks = np.concatenate([turn.ranks for turn in found.rounds])
    accepted = np.concatenate([turn.accepted for turn in found.rounds])
    assert ((ranks >= 0).sum(1) == accepted).all()
    assert (ranks[:, 0] == 2).any()
    lookahead = speculate(target, Lookahead(), prompts(4), k=2, max_new_tokens=24, eos=())
    for turn in lookahead.rounds:
        assert ((turn.ranks >= 0).sum(1) == turn.accepted).all()
        assert ((turn.candidates[:, 0] > 0) == (turn.drafted > 0)).all()


def test_forced_acceptance_goes_down_to_the_deepest_node() -> None:
    target, tree = decoder(), Tree((-1, -1, 1))
    found = speculate(
        target, Forced(DraftModel(target), [1.0]), prompts(4), k=tree, max_new_tokens=10, eos=()
    )
    assert all((turn.accepted == 2).all() for turn in found.rounds)
    assert all(np.isnan(turn.overlap).all() for turn in found.rounds)


def test_forced_acceptance_is_what_was_asked_for() -> None:
    target = decoder()
    drafter = Forced(DraftModel(decoder(seed=5)), [0.8, 0.5])
    found = speculate(target, drafter, prompts(200), k=3, max_new_tokens=40, eos=())
    accepted = np.concatenate([turn.accepted[turn.active] for turn in found.rounds])
    for j, rate in enumerate((0.8, 0.4, 0.2), start=1):
        assert abs((accepted >= j).mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / len(accepted))
    assert len({len(tokens) for tokens in found.tokens}) == 1


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([5, 6, 7, 5, 6], [7, 5, 6]),  # as far as the text goes
        ([1, 2, 8, 1, 2, 9, 1, 2], [9, 1, 2]),  # the latest place
        ([3, 1, 2, 4, 5, 2, 6, 7, 1, 2], [4, 5, 2]),  # the longest match, not the latest
        ([1, 1, 1, 1], [1]),
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_prompt_lookup(tokens: list[int], drafts: list[int]) -> None:
    drafter = NGram()
    text = Text([tokens, [1, 2, 3, 4, 5, 1]], 12, vocab=23)
    drafter.start(text, Any)
    found = drafter.propose(Tree.chain(3), Transform(), torch.rand)
    assert found.tokens[0, : found.lengths[0]].tolist() == drafts
    assert found.tokens[1, : found.lengths[1]].tolist() == [2, 3, 4]


@pytest.mark.parametrize("size", [22, 23 + 1])
def test_tables_that_are_padded_otherwise(size: int) -> None:
    """Of a vocabulary that differs by less than 1%, which here is scaled up."""
    target = decoder(replace(SMALL, vocab=230))
    draft = decoder(replace(SMALL, vocab=230 + size - 23), seed=0)
    check_pair(target, draft)
    given = prompts(8)
    plain = generate(target, given, max_new_tokens=20)
    for tree in (3, Tree.of([2, 2])):
        found = speculate(target, DraftModel(draft), given, k=tree, max_new_tokens=20)
        assert found.tokens == plain
    with pytest.raises(DomainError, match="is not the target's of 230"):
        check_pair(target, decoder(replace(SMALL, vocab=235)))


def test_what_cannot_be_decoded_is_refused() -> None:
    target = decoder()
    with pytest.raises(DomainError, match="prompt 1 is empty"):
        speculate(target, None, [[1], []], k=0, max_new_tokens=2)
    with pytest.raises(DomainError, match="24 candidates"):
        speculate(target, DraftModel(target), [[1]], k=Tree.of([24]), max_new_tokens=4)
    with pytest.raises(DomainError, match="8 Medusa heads do not draft 9"):
        speculate(target, medusa(target), [[1]], k=9, max_new_tokens=4)
    with pytest.raises(DomainError, match="cannot be imposed"):
        speculate(target, Forced(Lookahead(), [0.5]), [[1]], k=2, max_new_tokens=4)
    head = FeatureHead(replace(SMALL, hidden=16, heads=2, kv_heads=1), norms=False)
    with pytest.raises(DomainError, match="features of width 16, the target has 32"):
        FeatureDrafter(target, head)
    with pytest.raises(DomainError, match="window and guesses"):
        Lookahead(window=0)
    for parents in ((0,), (-1, 1), (-1, 0, -1)):
        with pytest.raises(DomainError, match="lists nodes by depth"):
            Tree(parents)
    with pytest.raises(DomainError, match="branching must be"):
        Tree.of([2, 0])
    with pytest.raises(DomainError, match="k must be"):
        speculate(target, None, [[1]], k=-1, max_new_tokens=2)
    with pytest.raises(DomainError, match="more than the model's 512"):
        speculate(target, None, [[1] * 510], k=0, max_new_tokens=3)
    with pytest.raises(DomainError, match="vocabulary of 5 tokens is not the target's of 23"):
        check_pair(target, decoder(replace(SMALL, vocab=5)))
    for layers in ([], [0, 1, 2], [1, 0], [0, 0], [0, 3], [-1, 0]):
        with pytest.raises(DomainError, match="layers must"):
            SelfLayers(target, layers)
    with pytest.raises(DomainError, match="must not be empty"):
        stop_strings(str, [""])
    for rates in ([], [1.1], [-0.1], [float("nan")]):
        with pytest.raises(DomainError, match="rates must be"):
            Forced(NGram(), rates)
    with pytest.raises(DomainError, match="sink must be"):
        SparseCache(target, window=0)
    with pytest.raises(DomainError, match="without sliding window"):
        SparseCache(decoder(replace(SMALL, window=64)))
    with pytest.raises(DomainError, match="shortest"):
        NGram(longest=1, shortest=2)
    with torch.no_grad():
        target.norm.fill_(torch.nan)
    with pytest.raises(DomainError, match="not finite"):
        speculate(target, NGram(), [[1, 2, 1]], k=2, max_new_tokens=3)
