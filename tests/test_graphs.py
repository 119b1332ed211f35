"""Passes replayed from graphs: nothing but their time differs from eager ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import samples

import specmodel as sm

torch = pytest.importorskip("torch", reason="graphs need torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from calibrate import device_check  # noqa: E402
from calibrate.clock import Clock  # noqa: E402
from calibrate.engine.config import DecoderConfig, to_architecture  # noqa: E402
from calibrate.engine.decoder import Decoder, Stack  # noqa: E402
from calibrate.engine.generate import generate  # noqa: E402
from calibrate.engine.graphs import Graphs, capture  # noqa: E402
from calibrate.speculate.drafters import (  # noqa: E402
    DraftModel,
    Forced,
    NGram,
    SelfLayers,
    SparseCache,
)
from calibrate.speculate.head_drafters import FeatureDrafter  # noqa: E402
from calibrate.speculate.heads import FeatureHead  # noqa: E402
from calibrate.speculate.lookahead import Lookahead  # noqa: E402
from calibrate.speculate.loop import speculate  # noqa: E402
from calibrate.speculate.trees import Tree  # noqa: E402

SMALL = DecoderConfig(**samples.DECODER, context=1024)


class NoWaits(TorchDispatchMode):  # type: ignore[misc]
    """Refuses what a capture on CUDA would: reading a value, copying one to the device."""

    REFUSED = (
        *("item", "_local_scalar_dense", "is_nonzero", "resolve_conj"),  # int(), bool(), tolist()
        *("nonzero", "masked_select", "_unique2"),
        "lift_fresh",  # torch.tensor(), an index that is a list
    )

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        index = args[1] if name in ("index", "index_put_", "index_put") else ()
        if name in self.REFUSED or any(i is not None and i.dtype == torch.bool for i in index):
            raise AssertionError(f"{function} in a captured pass")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: int(x.sum()),
        lambda x: bool((x > 0).any()),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: x[[0, 1]],
        lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
        lambda x: x.nonzero(),
    ],
)
def test_what_waits_is_noticed(wait: Callable[[Any], Any]) -> None:
    with NoWaits(), pytest.raises(AssertionError, match="in a captured pass"):
        wait(torch.zeros(3))


class StandIn:
    """Captures as CUDA does, in all but speed: a replay reads the buffers that were there when
    it was captured, and spoils what other graphs of its pool returned.
    """

    def __init__(self) -> None:
        self.captures = 0

    def __call__(self) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
        outputs: list[Any] = []

        def record(run: Callable[[], Any]) -> Callable[[], Any]:
            with NoWaits():
                output = run().clone()
            outputs.append(output)
            self.captures += 1

            def replay() -> Any:
                for other in outputs:
                    other.fill_(torch.nan)
                with NoWaits():
                    return output.copy_(run())

            return replay

        return record


def captured(stack: Stack) -> StandIn:
    """Let a stack on a CPU replay its passes."""
    found = StandIn()
    stack.graphs = Graphs(torch.device("cpu"), found)
    return found


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def decoder(seed: int = 0, device: str = "cpu") -> Decoder:
    return Decoder(SMALL, device=device).randomise(seed)


def near(target: Decoder) -> Decoder:
    """Return a draft model that often agrees."""
    found = decoder(device=target.device)
    generator = torch.Generator(target.device).manual_seed(1)
    with torch.no_grad():
        for name, weight in found.named_parameters():
            weight.copy_(target.get_parameter(name))
            noise = torch.randn(weight.shape, generator=generator, device=target.device)
            weight += 0.3 * weight.std() * noise
    return found


def head(target: Decoder, *, norms: bool) -> FeatureHead:
    return FeatureHead(target.config, norms=norms, device=target.device).randomise(3)


def random_tokens(*shape: int, seed: int = 0) -> Any:
    return torch.randint(0, 23, shape, generator=torch.Generator().manual_seed(seed))


def stacks(target: Decoder, drafter: Any) -> list[Stack]:
    """Return what runs passes: the target, and what the drafter has of its own."""
    own = [] if drafter is None else [drafter.__dict__.get(name) for name in ("decoder", "head")]
    return [target, *(part for part in own if part is not None)]


DRAFTERS: dict[str, Callable[[Decoder], Any]] = {
    "none": lambda target: None,
    "draft model": lambda target: DraftModel(near(target)),
    "early exit": lambda target: SelfLayers(target, [0, 1]),
    "layers left out": lambda target: SelfLayers(target, [0, 2]),
    "sparse cache": lambda target: SparseCache(target, sink=2, window=5),
    "n-gram": lambda target: NGram(),
    "lookahead": lambda target: Lookahead(window=4, guesses=3),
    "EAGLE head": lambda target: FeatureDrafter(target, head(target, norms=False)),
    "MTP block": lambda target: FeatureDrafter(target, head(target, norms=True)),
}
PROMPTS = [random_tokens(length, seed=length).tolist() for length in (250, 3, 244, 249)]


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("k", [3, Tree.of([3, 2])], ids=["chain", "tree"])
def test_texts_are_those_of_eager_passes(name: str, k: int | Tree) -> None:
    if isinstance(k, Tree) and name in ("n-gram", "lookahead"):
        pytest.skip("drafts chains only")
    target = decoder()
    drafter = DRAFTERS[name](target)
    eager = speculate(target, drafter, PROMPTS, k=k, max_new_tokens=24, eos=())
    used = [captured(part) for part in stacks(target, drafter)]
    found = speculate(target, drafter, PROMPTS, k=k, max_new_tokens=24, eos=())
    assert all(part.captures for part in used)
    assert found.tokens == eager.tokens
    for one, two in zip(found.rounds, eager.rounds, strict=True):
        assert (one.accepted == two.accepted).all()
        assert min(one.T_d, one.T_v, one.T_o) >= 0


def test_plain_decoding_captures_once_for_each_span() -> None:
    target = decoder()
    eager = generate(target, PROMPTS, max_new_tokens=20, eos=())
    used = captured(target)
    assert generate(target, PROMPTS, max_new_tokens=20, eos=()) == eager
    assert used.captures == 2  # up to 256 slots, and the 270 that there are
    generate(target, [[1, 2, 3]], max_new_tokens=20, eos=())
    assert used.captures == 3


def test_rounds_capture_once_for_each_shape() -> None:
    target, draft = decoder(), decoder()
    drafter = Forced(DraftModel(draft), [0.5])
    used = captured(target), captured(draft)
    given = [prompt[:100] for prompt in PROMPTS]
    speculate(target, drafter, given, k=3, max_new_tokens=40, eos=())
    assert used[0].captures == 1
    assert used[1].captures == 4  # one token or two first, then a second and a third draft


def test_a_sparse_cache_stays_for_a_batch() -> None:
    target = decoder()
    used = captured(target)
    drafter = SparseCache(target, sink=2, window=5)
    speculate(target, drafter, [[1, 2, 3]] * 2, k=3, max_new_tokens=40, eos=())
    assert used.captures == 4  # three drafts over the part, one verification


def test_no_input_leaks_into_the_next_replay() -> None:
    """Tokens, positions, mask and lengths change between passes of one shape."""
    target = decoder()
    used = captured(target)
    cache = target.cache(2, 64)
    target.hidden(random_tokens(2, 9), cache, eager=True)
    for turn in range(4):
        cache.advance(torch.tensor([turn, 3 - turn]))
        see = torch.ones(3, 3, dtype=torch.bool).tril()
        see[2, 1] = bool(turn % 2)
        where = {
            "mask": see.expand(2, -1, -1),
            "positions": cache.lengths[:, None] + torch.tensor([0, 1, 1 + turn % 2]),
        }
        tokens = random_tokens(2, 3, seed=turn)
        found = target.hidden(tokens, cache, **where).clone()
        torch.testing.assert_close(
            found, target.hidden(tokens, cache, eager=True, **where), rtol=1e-5, atol=1e-5
        )
        plain = target.hidden(tokens, cache).clone()
        torch.testing.assert_close(
            plain, target.hidden(tokens, cache, eager=True), rtol=1e-5, atol=1e-5
        )
    assert used.captures == 2


def test_what_a_graph_belongs_to() -> None:
    target = decoder()
    used = captured(target)
    cache, other = target.cache(2, 600), target.cache(2, 600)
    one, two = random_tokens(2, 1), random_tokens(2, 2)
    calls: list[dict[str, Any]] = [
        {},
        {"layers": [0, 2]},
        {"written": 1},
        {"span": 40},
        {"positions": torch.zeros(2, 1, dtype=torch.int64)},
        {"mask": torch.ones(2, 1, 1, dtype=torch.bool)},
    ]
    for _ in range(2):
        for options in calls:
            target.hidden(one, cache, **options)
        target.hidden(two, cache)
        target.hidden(one, other)
    assert used.captures == len(target.graphs) == len(calls) + 2
    target.hidden(one, cache, layers=(0, 2), mask=None)
    assert used.captures == len(calls) + 2
    cache.advance(256)
    target.hidden(one, cache)
    assert used.captures == len(calls) + 3


def test_graphs_go_with_their_cache() -> None:
    target = decoder()

    def record(run: Callable[[], Any]) -> Callable[[], Any]:
        output = run()
        return lambda: output

    target.graphs = Graphs(torch.device("cpu"), lambda: record)
    cache = target.cache(2, 16)
    target.hidden(random_tokens(2, 1), cache)
    assert len(target.graphs) == 1
    del cache
    assert len(target.graphs) == 0


def test_what_is_not_captured() -> None:
    target = decoder()
    capture(target)
    assert target.graphs is None  # on a CPU nothing is
    used = captured(target)
    cache, tokens = target.cache(1, 16), random_tokens(1, 2)
    target.hidden(tokens)
    target.hidden(tokens, cache, eager=True)
    with torch.inference_mode(False):
        target.hidden(tokens.clone(), target.cache(1, 16))  # gradients are on
    target.capturable = False
    target.hidden(tokens, cache)
    assert used.captures == 0


def test_a_pass_that_does_not_fit_is_refused() -> None:
    target = decoder()
    captured(target)
    cache = target.cache(2, 8)
    for _ in range(2):
        with pytest.raises(sm.DomainError, match="9 positions that reads 9 slots does not fit"):
            target.hidden(random_tokens(2, 9), cache)
        with pytest.raises(sm.DomainError, match="3 sequences for a cache of 2"):
            target.hidden(random_tokens(3, 1), cache)
    assert len(target.graphs) == 0


def test_the_longest_of_a_cache_is_known() -> None:
    cache = decoder().cache(3, 20)
    cache.advance(torch.tensor([3, 9, 5]))
    assert cache.longest == cache.clone().longest == 9
    assert cache.select(torch.tensor([2, 0])).longest == 5
    cache.rollback(torch.tensor([3, 1, 4]))
    assert cache.longest == 4
    cache.keep(torch.tensor([[0, 2]] * 3), torch.tensor([2, 1, 2]))
    assert cache.longest == 6
    with pytest.raises(sm.DomainError, match=r"lengths must be in \[0, 20\]"):
        cache.advance(-6)
    assert cache.longest == int(cache.lengths.max()) == 6


@pytest.mark.gpu
@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_on_a_gpu_are_those_of_eager_passes(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    target = decoder(device="cuda")
    drafter = DRAFTERS[name](target)
    parts = stacks(target, drafter)
    for part in parts:
        part.capturable = False
    eager = speculate(target, drafter, PROMPTS, k=3, max_new_tokens=24, eos=())
    for part in parts:
        part.capturable = True
    for _ in range(2):  # the first batch's graphs are gone with their caches
        found = speculate(target, drafter, PROMPTS, k=3, max_new_tokens=24, eos=())
        assert found.tokens == eager.tokens


@pytest.mark.gpu
def test_a_replayed_pass_on_a_gpu_is_the_eager_one_and_faster() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    target = decoder(device="cuda")
    capture(target)
    cache, tokens = target.cache(4, 300), random_tokens(4, 5).cuda()
    target.hidden(random_tokens(4, 200).cuda(), cache, eager=True)
    cache.advance(200)
    clock, times = Clock(torch.device("cuda")), {True: [], False: []}
    for turn in range(20):
        tokens = random_tokens(4, 5, seed=turn).cuda()
        found = {}
        for eager, taken in times.items():
            start = clock.now() - Graphs.spent
            found[eager] = target.hidden(tokens, cache, eager=eager, span=256)
            taken.append(clock.now() - Graphs.spent - start)
        torch.testing.assert_close(found[True], found[False], rtol=1e-4, atol=1e-4)
        cache.advance(1)
    assert len(target.graphs) == 1
    assert min(times[False]) < min(times[True])


def test_device_check_compares_a_replayed_pass() -> None:
    """On a CPU both are eager."""
    text = device_check.graph_check(to_architecture(SMALL, name="small", dtype="bfloat16"), "cpu")
    assert [line.split(":")[0] for line in text.splitlines()] == [
        "small, B = 1, W = 1",
        "small, B = 1, W = 5",
    ]
    assert text.count("at most 0 apart") == 2
