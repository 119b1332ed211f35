"""The trained pair: greedy texts and sampled tokens on real text, by every kind of drafter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from specmodel.law import Transform

torch = pytest.importorskip("torch", reason="decoding needs torch")

from calibrate.engine.decoder import Decoder  # noqa: E402
from calibrate.speculate.drafters import DraftModel, NGram, SelfLayers  # noqa: E402
from calibrate.speculate.exactness import gaps  # noqa: E402
from calibrate.speculate.lookahead import Lookahead  # noqa: E402
from calibrate.speculate.loop import speculate  # noqa: E402
from calibrate.speculate.pair import corpus, held_out, load_pair  # noqa: E402
from calibrate.speculate.trees import Tree  # noqa: E402

pytestmark = pytest.mark.slow

CHAIN, TREE = Tree.chain(4), Tree.of([2, 2, 1])
DRAFTERS: dict[str, tuple[Callable[[Decoder, Decoder], Any], Tree]] = {
    "draft model": (lambda target, draft: DraftModel(draft), CHAIN),
    "draft model, tree": (lambda target, draft: DraftModel(draft), TREE),
    "n-gram": (lambda target, draft: NGram(), CHAIN),
    "lookahead": (lambda target, draft: Lookahead(window=4, guesses=4), CHAIN),
    "early exit, tree": (lambda target, draft: SelfLayers(target, [0, 1]), TREE),
}
PROMPTS, LENGTH, NEW, BATCH = 200, 48, 32, 50


@pytest.fixture(scope="module")
def trained() -> tuple[Decoder, Decoder]:
    torch.set_num_threads(1)
    target, draft, _ = load_pair()
    return target, draft


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    text = held_out(corpus())
    step = (len(text) - LENGTH) // PROMPTS
    return [list(text[i * step : i * step + LENGTH]) for i in range(PROMPTS)]


def decode(
    target: Decoder, drafter: Any, tree: Tree, prompts: list[list[int]]
) -> tuple[list[list[int]], float]:
    """Return the texts and the mean of drafts accepted."""
    texts, accepted = [], []
    for start in range(0, len(prompts), BATCH):
        found = speculate(
            target, drafter, prompts[start : start + BATCH], k=tree, max_new_tokens=NEW, eos=()
        )
        texts += found.tokens
        accepted += [turn.accepted[turn.active] for turn in found.rounds]
    return texts, float(np.concatenate(accepted).mean())


@pytest.fixture(scope="module")
def plain(trained: tuple[Decoder, Decoder], prompts: list[list[int]]) -> list[list[int]]:
    return decode(trained[0], None, Tree.chain(0), prompts)[0]


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_texts_of_two_hundred_prompts(
    name: str,
    trained: tuple[Decoder, Decoder],
    prompts: list[list[int]],
    plain: list[list[int]],
) -> None:
    """In float32 the same, but where two logits are equal to rounding (`benchmarks/greedy.py`
    prints how many).
    """
    make, tree = DRAFTERS[name]
    texts, accepted = decode(trained[0], make(*trained), tree, prompts)
    apart = gaps(trained[0], prompts, plain, texts)
    assert len(apart) <= 0.02 * PROMPTS
    assert max(map(abs, apart), default=0) < 1e-4
    assert accepted > 0.1


@pytest.mark.parametrize("name", ["draft model", "draft model, tree", "n-gram"])
def test_sampled_tokens_follow_the_target(
    name: str, trained: tuple[Decoder, Decoder], prompts: list[list[int]]
) -> None:
    """Chi-square of the second token, and jointly of the second and third, on 20,000 draws."""
    make, tree = DRAFTERS[name]
    target, draws, prompt = trained[0], 20_000, prompts[3][:12]
    how = Transform(temperature=0.8, top_k=6)
    found = []
    for seed in range(draws // 2000):
        outcome = speculate(
            target,
            make(*trained),
            [prompt] * 2000,
            k=tree,
            max_new_tokens=3,
            transform=how,
            seed=seed,
            eos=(),
        )
        found += outcome.tokens
    tokens = np.array(found)
    law = joint(target, prompt, how)
    for columns in ([1], [1, 2]):
        expected = law.sum(0) if len(columns) == 2 else law.sum((0, 2))
        seen = np.zeros(expected.shape)
        np.add.at(seen, tuple(tokens[:, columns].T), 1)
        assert not seen[expected == 0].any()
        assert p_value(seen[expected > 0], draws * expected[expected > 0]) > 1e-3


@torch.inference_mode()  # type: ignore[untyped-decorator]
def joint(target: Decoder, prompt: list[int], how: Transform) -> np.ndarray:
    """Return the target's joint law of three tokens after a prompt, by plain passes."""
    size = target.config.vocab

    def after(texts: list[list[int]]) -> np.ndarray:
        logits = target(torch.tensor(texts))[:, -1].double()
        return how.log_probabilities(logits).exp().numpy()

    law = np.zeros((size,) * 3)
    (first,) = after([prompt])
    for a in np.flatnonzero(first):
        (second,) = after([[*prompt, a]])
        possible = np.flatnonzero(second)
        third = after([[*prompt, a, b] for b in possible])
        law[a, possible] = first[a] * second[possible, None] * third
    return law


def p_value(seen: np.ndarray, expected: np.ndarray) -> float:
    rare = expected < 5
    counts = np.append(seen[~rare], seen[rare].sum())
    means = np.append(expected[~rare], expected[rare].sum())
    if means[-1] == 0:
        counts, means = counts[:-1], means[:-1]
    return float(chisquare(counts, means * counts.sum() / means.sum()).pvalue)
