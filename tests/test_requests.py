"""Requests that differ: the module's formula by hand, acceptance scaled to G, what ships."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specmodel as sm
from specmodel.drafters import Drafter, NGram
from specmodel.overheads import Engine
from specmodel.requests import (
    TYPICAL,
    Accepted,
    Requests,
    Served,
    known_dataset,
    load_requests,
    served,
    solved,
)
from specmodel.roofline import pass_time
from specmodel.speculation import round_time
from specmodel.yaml_text import parse_yaml

H100, LLAMA = sm.load_device("h100"), sm.load_model("llama-3.1-8b")
SMALL = sm.load_model("llama-3.2-1b")
RECORD = parse_yaml((files("specmodel") / "data" / "requests.yaml").read_text(encoding="utf-8"))
ENGINE = Engine(
    name="x",
    title="X",
    step=2e-3,
    step_sequence=1e-5,
    round=5e-4,
    round_row=3e-6,
    head_pass=7e-4,
    draft_pass=4e-4,
    lookup=1e-4,
    kernels=1.1,
)
TWO = Requests(
    name="two",
    weight=np.array([0.25, 0.75]),
    prompt=np.array([100.0, 900.0]),
    output=np.array([50.0, 400.0]),
    hit=np.array([0.2, 0.6]),
    k=np.array([1.0, 3.0]),
    head=np.array([[1.5, 2.0], [1.8, 3.0]]),
    lookup=np.array([[1.1, 1.2], [1.5, 1.9]]),
)


def at(drafter: Drafter, requests: Requests = TWO, *, B: float = 8, k: int = 3, **how: Any) -> Any:
    execution = sm.Execution(**how)
    return served(H100, LLAMA, drafter, requests, B=B, k=k, execution=execution)


# -- the formula ---------------------------------------------------------------------------------


def by_hand(drafter: Drafter, requests: Requests, accepted: Accepted, *, B: float, k: int) -> Any:
    """Return S, and tokens per second plainly and drafted, from passes and rounds one by one."""
    S, plainly, drafted = 0.0, 0.0, 0.0
    for i, (w, P, O) in enumerate(
        zip(requests.weight, requests.prompt, requests.output, strict=True)
    ):
        one = replace(drafter, hit=1.0) if isinstance(drafter, NGram) else drafter
        r = round_time(H100, LLAMA, one, B=B, k=k, L=P + O / 2, engine=ENGINE)
        h, G = accepted.hit[i], accepted.G[i]
        plain, found = float(r.T_p + r.T_h), float(r.T_v + r.T_o)
        R = h * found + (1 - h) * plain + float(r.T_d)
        first = 1.1 * float(pass_time(H100, LLAMA, B=B, W=P, L=P / 2, head_rows=1).T)
        draft = drafter.weights(LLAMA)
        own = (
            0.0
            if draft is None
            else 1.1 * float(pass_time(H100, draft, B=B, W=P, L=P / 2, head_rows=1).T)
        )
        before, after = first + (O - 1) * plain, first + own + (O - 1) * R / G
        S += w * before / after
        plainly, drafted = plainly + w * before, drafted + w * after
    made = B * float(requests.weight @ requests.output)
    return S, made / plainly, made / drafted


@pytest.mark.parametrize("drafter", [sm.Eagle(), sm.DraftModel(SMALL), NGram(hit=0.9)])
@pytest.mark.parametrize("kinds", [1, 2])
def test_speedup_and_rates_are_the_formula(drafter: Drafter, kinds: int) -> None:
    requests = TWO if kinds == 2 else Requests.alike(500, 200)
    found = at(drafter, requests)
    law = found.accepted(0.3)
    S, plainly, drafted = by_hand(drafter, requests, law, B=8, k=3)
    assert found.speedup(ENGINE, law) == pytest.approx(S, rel=1e-9)
    assert found.throughput(ENGINE) == pytest.approx(plainly, rel=1e-9)
    assert found.throughput(ENGINE, law) == pytest.approx(drafted, rel=1e-9)


def test_decoding_alone_is_the_round() -> None:
    """Infinite output: no prefill, a context of the prompt, S = G over the round's cost."""
    found = at(sm.Eagle(), Requests.alike(700))
    law = found.accepted_to(2.5)
    r = round_time(H100, LLAMA, sm.Eagle(), B=8, k=3, L=700, engine=ENGINE)
    assert found.requests.context.tolist() == [700]
    assert (found.prefill, found.prefill_draft) == (0.0, 0.0)
    assert found.speedup(ENGINE, law) == pytest.approx(2.5 / float(r.cost), rel=1e-4)
    assert law.G.tolist() == pytest.approx([2.5], rel=1e-4)
    assert found.throughput(ENGINE) == pytest.approx(8 / float(r.T_p + r.T_h), rel=1e-12)


def test_one_token_of_output_is_prefill_alone() -> None:
    found = at(sm.Eagle(), Requests.alike(700, 1.0))
    S = found.speedup(ENGINE, found.accepted(0.0))
    prefills = found.prefill / (found.prefill + found.prefill_draft)
    assert pytest.approx(float(prefills[0]), rel=1e-12) == S
    assert S < 1


@pytest.mark.parametrize("drafter", [sm.Medusa(), NGram(hit=0.3), sm.Lookahead()])
def test_what_has_no_cache_prefills_nothing(drafter: Drafter) -> None:
    assert at(drafter).prefill_draft.tolist() == [0, 0]
    assert (at(drafter).prefill > 0).all()


def test_the_executions_engine_does_not_count_twice() -> None:
    """The engine is said when predicting; one that the execution carries is left out."""
    law = at(sm.Eagle()).accepted(0.0)
    for engine in (None, ENGINE):
        speeds = {at(sm.Eagle(), engine=e).speedup(engine, law) for e in (None, ENGINE)}
        assert len(speeds) == 1


def test_shares_sum_to_one_and_are_of_the_formula() -> None:
    found = at(sm.Eagle())
    law = found.accepted(0.0)
    plain, drafted = found.shares(ENGINE, None), found.shares(ENGINE, law)
    for each in (plain, drafted):
        assert sum(each.values()) == pytest.approx(1, rel=1e-12)
    assert plain["draft"] == 0
    times = found.parts.times(ENGINE)
    drafting = 1.1 * found.prefill_draft + (TWO.output - 1) * times.T_d / law.G
    whole = TWO.weight @ found.seconds(ENGINE, law)[1]
    assert drafted["draft"] == pytest.approx(float(TWO.weight @ drafting / whole), rel=1e-12)
    waiting = (TWO.output - 1) * times.T_h
    whole = TWO.weight @ found.seconds(ENGINE, law)[0]
    assert plain["rest"] == pytest.approx(float(TWO.weight @ waiting / whole), rel=1e-12)


# -- acceptance ----------------------------------------------------------------------------------


def mean_G(requests: Requests, law: Accepted) -> float:
    """Return all tokens over all rounds."""
    tokens = requests.weight * requests.output
    return float(tokens.sum() / (tokens / law.G).sum())


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("dataset", ["two", "gsm8k", "cnn", "sharegpt", "instructcoder"])
@pytest.mark.parametrize("G", [1.2, 1.6])
def test_acceptance_is_scaled_to_tokens_over_rounds(dataset: str, lookup: bool, G: float) -> None:
    requests = TWO if dataset == "two" else load_requests(dataset)
    try:
        law = requests.accepted_to(G, 4, lookup=lookup)
    except sm.DomainError:
        assert lookup  # even where every lookup finds something
        assert mean_G(requests, requests.accepted(4, lookup=True, scale=12.0)) < G
        return
    assert mean_G(requests, law) == pytest.approx(G, rel=1e-4)
    assert (law.G >= 1).all()
    assert (law.G <= 5).all()


@settings(max_examples=30)
@given(scale=st.floats(-6, 6), k=st.integers(1, 12), lookup=st.booleans())
def test_a_higher_scale_accepts_more(scale: float, k: int, lookup: bool) -> None:
    low, high = (TWO.accepted(k, lookup=lookup, scale=s) for s in (scale, scale + 0.5))
    assert (low.G < high.G + 1e-12).all()
    assert (low.G >= 1).all()
    assert high.G.max() <= k + 1


def test_a_head_finds_something_in_every_round() -> None:
    """At the k of the table the G of the table, by one alpha for each kind."""
    law = TWO.accepted(3, lookup=False)
    assert law.hit.tolist() == [1, 1]
    assert law.G.tolist() == pytest.approx([2.0, 3.0], rel=1e-9)
    between = TWO.accepted(2, lookup=False)
    assert between.G.tolist() == pytest.approx([1.75, 2.4], rel=1e-9)


def test_a_lookup_finds_something_in_some() -> None:
    """G = 1 + h (tokens - 1): a round that finds nothing commits one token; the scale moves h."""
    law = TWO.accepted(3, lookup=True)
    assert law.hit.tolist() == pytest.approx([0.2, 0.6])
    assert law.tokens.tolist() == pytest.approx([2.0, 2.5])
    assert law.G.tolist() == pytest.approx([1.2, 1.9])
    odds = TWO.accepted(3, lookup=True, scale=float(np.log(2)))
    assert odds.hit.tolist() == pytest.approx([1 / 3, 0.75])
    assert odds.tokens.tolist() == law.tokens.tolist()
    never = replace(TWO, hit=np.zeros(2), lookup=np.ones((2, 2))).accepted(3, lookup=True, scale=5)
    assert never.G.tolist() == [1, 1]


def test_no_more_tokens_than_positions() -> None:
    most = replace(TWO, hit=np.array([0.01, 0.01])).accepted(2, lookup=True)
    assert most.tokens.tolist() == [3, 3]


def test_the_drafters_hit_rate_does_not_matter() -> None:
    """The dataset says in how many rounds a lookup finds something."""
    law = at(NGram(hit=1.0)).accepted()
    assert at(NGram(hit=0.1)).speedup(ENGINE, law) == at(NGram(hit=1.0)).speedup(ENGINE, law)
    assert law.hit.tolist() == pytest.approx([0.2, 0.6])
    assert at(sm.Eagle()).accepted().hit.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("G", "k", "lookup", "side"),
    [(0.5, 3, False, "little"), (4.1, 3, False, "much"), (2.6, 3, True, "much")],
)  # fmt: skip
def test_tokens_that_no_acceptance_gives(G: float, k: int, lookup: bool, side: str) -> None:
    with pytest.raises(
        sm.DomainError, match=rf"G = {G:g} at k = {k}: no acceptance gives that {side}"
    ):
        TWO.accepted_to(G, k, lookup=lookup)


@pytest.mark.parametrize("lookup", [False, True])
def test_a_token_a_round_is_nothing_accepted(lookup: bool) -> None:
    assert TWO.accepted_to(1.0, 3, lookup=lookup).G.tolist() == pytest.approx([1, 1], abs=1e-4)


@pytest.mark.parametrize("lookup", [False, True])
def test_every_kind_commits_the_same(lookup: bool) -> None:
    """Rows by kinds; of one kind it is what scaling acceptance gives."""
    G, k = [1.0, 1.3, 2.4, 4.0], [1, 3, 3, 3]
    law = TWO.accepted_alike(G, k, lookup=lookup)
    assert pytest.approx(np.array(G)[:, None] * np.ones(2 if lookup else 1), rel=1e-12) == law.G
    assert ((law.hit >= 0) & (law.hit <= 1)).all()
    one = Requests.alike(700)
    exact, found = one.accepted_alike(1.3, 3, lookup=lookup), one.accepted_to(1.3, 3, lookup=lookup)
    assert exact.hit == pytest.approx(found.hit, rel=1e-4)
    assert exact.tokens == pytest.approx(found.tokens, rel=1e-4)


@pytest.mark.parametrize(
    ("G", "k", "message"),
    [
        (0.9, 3, "acceptance length must be >= 1 token; got 0.9"),
        (np.nan, 3, "acceptance length must be"),
        ([2.0, 4.5], [3, 3], r"acceptance length must be in \[1, 4\] token at k = 3; got 4.5"),
        (1.0, 0, "k must be >= 1"),
    ],
)
def test_tokens_that_no_round_commits(G: Any, k: Any, message: str) -> None:
    with pytest.raises(sm.DomainError, match=message):
        TWO.accepted_alike(G, k, lookup=False)


def test_solved_finds_where_a_rising_function_crosses_zero() -> None:
    assert solved(lambda x: x - 3, "x") == pytest.approx(3, abs=1e-4)
    with pytest.raises(sm.DomainError, match="here: no acceptance gives that much"):
        solved(lambda x: x - 13, "here")


# -- lengths -------------------------------------------------------------------------------------


def test_of_length_stretches_to_the_means() -> None:
    found = TWO.of_length(350, 625)
    assert float(found.weight @ found.prompt) == pytest.approx(350)
    assert float(found.weight @ found.output) == pytest.approx(625)
    assert (found.prompt[1] / found.prompt[0], found.output[1] / found.output[0]) == (9, 8)
    same = TWO.of_length(None, None)
    assert same.prompt.tolist() == TWO.prompt.tolist()
    assert same.context.tolist() == [125, 1100]


@pytest.mark.parametrize(("prompt", "output"), [(-5, None), (None, 0.5), (np.nan, 5), (5, np.inf)])
def test_of_length_refuses_what_is_no_length(prompt: Any, output: Any) -> None:
    with pytest.raises(sm.DomainError, match=r"prompt must be|output must be"):
        TWO.of_length(prompt, output)


@pytest.mark.parametrize("output", [1, 2, 16])
def test_no_request_is_shorter_than_a_token(output: float) -> None:
    """Stretched to short outputs, the shortest kinds keep one token, and no time is negative."""
    found = at(sm.Eagle(), load_requests("sharegpt").of_length(None, output))
    assert found.requests.output.min() >= 1
    for seconds in found.seconds(None, found.accepted()):
        assert (seconds >= found.prefill).all()


@pytest.mark.parametrize(
    ("prompt", "output"), [(-1, 5), (np.nan, 5), (np.inf, 5), (5, 0), (5, -np.inf)]
)
def test_alike_refuses_what_is_no_length(prompt: float, output: float) -> None:
    with pytest.raises(sm.DomainError, match=r"prompt must be|output must be"):
        Requests.alike(prompt, output)


@pytest.mark.parametrize("k", [0, 1.5, -1])
def test_served_needs_drafts(k: float) -> None:
    with pytest.raises(sm.DomainError, match="k must be"):
        at(sm.Eagle(), k=k)  # type: ignore[arg-type]


def test_served_at_arrays_of_its_kinds() -> None:
    found = at(sm.Eagle())
    assert isinstance(found, Served)
    assert found.k == 3
    assert found.prefill.shape == found.seconds(None, found.accepted())[0].shape == (2,)


@pytest.mark.parametrize(
    "drafter", [sm.Eagle(), sm.DraftModel(SMALL), NGram(hit=0.9), sm.Medusa(), sm.Lookahead()]
)
@pytest.mark.parametrize("requests", [TWO, Requests.alike(700)])
def test_rows_served_together_are_those_served_alone(drafter: Drafter, requests: Requests) -> None:
    B, k, G = [1, 8, 8, 256], [1, 3, 7, 3], [1.2, 1.5, 2.4, 1.5]
    together = at(drafter, requests, B=B, k=k)  # type: ignore[arg-type]
    plain, drafted = together.rates(ENGINE), together.rates(ENGINE, together.accepted_alike(G))
    for i in range(4):
        alone = at(drafter, requests, B=B[i], k=k[i])
        assert plain[i] == pytest.approx(alone.throughput(ENGINE), rel=1e-12)
        law = alone.accepted_alike(G[i])
        assert drafted[i] == pytest.approx(alone.throughput(ENGINE, law), rel=1e-12)


# -- what ships ----------------------------------------------------------------------------------

ALIASES = [
    (alias, name) for name, one in RECORD["datasets"].items() for alias in (name, *one["aliases"])
]


@pytest.mark.parametrize(("alias", "name"), ALIASES)
def test_datasets_by_every_alias(alias: str, name: str) -> None:
    for text in (alias, alias.upper(), f"  {alias} ", f"{alias} (80 requests)"):
        assert known_dataset(text)
        assert load_requests(text).name == name


def test_no_dataset_is_typical_and_known_to_be() -> None:
    for text in (None, "", "somebody's prompts"):
        assert not known_dataset(text)
    assert load_requests(None) is load_requests(TYPICAL)


@pytest.mark.parametrize("name", list(RECORD["datasets"]))
def test_requests_that_ship(name: str) -> None:
    one = load_requests(name)
    assert one.weight.sum() == pytest.approx(1, rel=1e-12)
    assert (one.weight > 0).all()
    assert (one.prompt > 0).all()
    assert (one.output >= 1).all()
    assert ((one.hit >= 0) & (one.hit <= 1)).all()
    assert (np.diff(one.k) > 0).all()
    kinds, ks = one.weight.size, one.k.size
    for table in (one.head, one.lookup):
        assert table.shape == (kinds, ks)
        assert (table >= 1).all()
        assert (table <= one.k + 1).all()
        assert (np.diff(table, axis=1) > -0.1).all()  # more drafts, no fewer tokens but for noise
    assert "read 20" in one.source
    assert "http" in one.source
    row = RECORD["datasets"][name]["kinds"][0]
    assert one.head[0].tolist() == row[4 : 4 + ks]
    assert one.lookup[0].tolist() == row[4 + ks :]


@pytest.mark.parametrize("dataset", ["HumanEval", "", "gsm9k"])
def test_an_unknown_dataset_is_not_answered_with_another(dataset: str) -> None:
    with pytest.raises(sm.ProfileError, match=f"unknown dataset '{dataset}'"):
        load_requests(dataset)
