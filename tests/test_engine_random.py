"""Decoders with experts and latent attention, run with random weights from a model's record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from samples import RECORDS

import specmodel as sm
from specmodel.architectures import MLP, LatentAttention, MoE

torch = pytest.importorskip("torch", reason="the engine needs torch")

from torch.nn import functional as F  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from calibrate.engine import experts  # noqa: E402
from calibrate.engine.checkpoints import save  # noqa: E402
from calibrate.engine.config import from_architecture, from_dict, to_architecture  # noqa: E402
from calibrate.engine.decoder import Decoder, Layer  # noqa: E402
from calibrate.engine.generate import generate  # noqa: E402
from calibrate.speculate.drafters import DraftModel, Forced, NGram, SelfLayers, SparseCache  # noqa: E402
from calibrate.speculate.loop import speculate  # noqa: E402
from calibrate.speculate.trees import Tree  # noqa: E402

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def tiny(name: str, seed: int = 1, **kind: Any) -> Decoder:
    return Decoder(from_architecture(RECORDS[name]), **kind).randomise(seed)


def random_tokens(*shape: int, seed: int = 0) -> Any:
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(seed))


def cut(name: str, *, layers: int, routed: int) -> sm.Architecture:
    """Return a named model with fewer layers, experts and tokens, of its own widths."""
    model = sm.load_model(name).first_layers(layers)
    smaller = tuple(
        (replace(x, mlp=replace(x.mlp, experts=routed)) if isinstance(x.mlp, MoE) else x, n)
        for x, n in model.layers
    )
    return replace(model, layers=smaller, vocab_size=128, head_vocab_size=128)


# -- another implementation ----------------------------------------------------------------------


def norm(x: Any, weight: Any, eps: float) -> Any:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotated(x: Any, position: int, theta: float) -> Any:
    """Return one head's vector (dim,) turned by its position."""
    half = len(x) // 2
    angles = position * theta ** (-torch.arange(half) / half)
    one, two = x[:half], x[half:]
    return torch.cat(
        (one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin())
    )


def gated(x: Any, gate_up: Any, down: Any) -> Any:
    gate, up = (gate_up @ x).chunk(2)
    return down @ (gate / (1 + (-gate).exp()) * up)


def softmax_attention(q: Any, k: Any, v: Any, scale: float) -> Any:
    """Return the heads' results side by side; q, k, v (tokens, heads, dim), causal."""
    found = []
    for t in range(len(q)):
        weights = torch.softmax(torch.einsum("hd,shd->hs", q[t], k[: t + 1]) * scale, -1)
        found.append(torch.einsum("hs,shd->hd", weights, v[: t + 1]).flatten())
    return torch.stack(found)


def latent_attention(layer: Layer, x: Any) -> Any:
    """Return MLA as the paper trains it: keys and values of every head are expanded."""
    c, m, own = layer.config, layer.config.latent, layer.latent
    q, k, v = [], [], []
    for t, row in enumerate(x):
        down = own.project @ row
        latent = norm(down[-m.rope_dim - m.kv_lora_rank : -m.rope_dim], own.kv_norm, c.norm_eps)
        queries = down[: -m.rope_dim - m.kv_lora_rank]
        if m.q_lora_rank:
            queries = own.q_up @ norm(queries, own.q_norm, c.norm_eps)
        shared_key = rotated(down[-m.rope_dim :], t, c.rope_theta)
        for into in (q, k, v):
            into.append([])
        for head, query in enumerate(queries.view(m.heads, -1)):
            turned = rotated(query[m.nope_dim :], t, c.rope_theta)
            q[t].append(torch.cat((query[: m.nope_dim], turned)))
            k[t].append(torch.cat((own.k_up[head].T @ latent, shared_key)))
            v[t].append(own.v_up[head] @ latent)
    stacked = (torch.stack([torch.stack(heads) for heads in rows]) for rows in (q, k, v))
    return softmax_attention(*stacked, (m.nope_dim + m.rope_dim) ** -0.5)


def grouped_attention(layer: Layer, x: Any) -> Any:
    c = layer.config
    qkv = x @ layer.qkv.T + (0 if layer.qkv_bias is None else layer.qkv_bias)
    heads = qkv.view(len(x), -1, c.head_dim)
    q, k, v = heads.split((c.heads, c.kv_heads, c.kv_heads), 1)
    if c.qk_norm:
        q, k = norm(q, layer.q_norm, c.norm_eps), norm(k, layer.k_norm, c.norm_eps)
    q, k = (
        torch.stack([torch.stack([rotated(h, t, c.rope_theta) for h in row]) for t, row in at])
        for at in (enumerate(q), enumerate(k))
    )
    group = c.heads // c.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return softmax_attention(q, k, v, c.head_dim**-0.5)


def mixture(layer: Layer, row: Any) -> Any:
    """Return the experts' result for one token, each expert in turn."""
    own, moe = layer.experts, layer.config.experts
    chances = torch.softmax(own.router @ row, -1)
    chosen = sorted(range(moe.experts), key=lambda e: -float(chances[e]))[: moe.top_k]
    total = sum(chances[e] for e in chosen)
    found = sum(chances[e] / total * gated(row, own.gate_up[e], own.down[e]) for e in chosen)
    if moe.shared_width:
        shared = gated(row, own.shared_gate_up, own.shared_down)
        found = found + shared * (torch.sigmoid(own.shared_gate @ row) if moe.shared_gate else 1)
    return found


def reference(decoder: Decoder, tokens: Any) -> Any:
    """Return logits (tokens, vocab) of one sequence."""
    eps = decoder.config.norm_eps
    x = decoder.embedding[tokens]
    for layer in decoder.layers:
        y = norm(x, layer.attention_norm, eps)
        attend = grouped_attention if layer.latent is None else latent_attention
        x = x + attend(layer, y) @ layer.out.T
        y = norm(x, layer.mlp_norm, eps)
        if layer.experts is None:
            x = x + torch.stack([gated(row, layer.gate_up, layer.down) for row in y])
        else:
            x = x + torch.stack([mixture(layer, row) for row in y])
    return norm(x, decoder.norm, eps) @ decoder.head.T


@pytest.mark.parametrize("name", RECORDS)
def test_logits_are_those_of_loops_over_tokens_heads_and_experts(name: str) -> None:
    decoder = tiny(name)
    tokens = random_tokens(2, 11)
    logits = decoder(tokens)
    assert 0.3 < logits.std() < 10
    for row, found in zip(tokens, logits, strict=True):
        torch.testing.assert_close(found, reference(decoder, row), **CLOSE)


# -- what a pass takes ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["latent", "deepseek"])
def test_the_latent_cache_is_stored_once(name: str) -> None:
    decoder = tiny(name)
    cache = decoder.cache(2, 20)
    decoder(random_tokens(2, 9), cache)
    cache.advance(9)
    for each in (cache, cache.clone(), cache.select(torch.tensor([1, 0, 1]))):
        assert each.keys.shape[2:] == (1, 20, 28)
        assert each.values.untyped_storage().data_ptr() == each.keys.untyped_storage().data_ptr()
        assert torch.equal(each.values, each.keys[..., :20])
    assert cache.clone().keys.data_ptr() != cache.keys.data_ptr()


def test_idle_experts_are_not_read() -> None:
    decoder = tiny("deepseek")
    tokens = random_tokens(1, 2)
    taken: dict[Any, set[int]] = {}

    def watch(module: Any, given: tuple[Any]) -> None:
        taken[module] = set((given[0] @ module.router.T).topk(3).indices.flatten().tolist())

    for layer in decoder.layers[1:]:
        layer.experts.register_forward_pre_hook(watch)
    before = decoder(tokens)
    for module, busy in dict(taken).items():
        assert 3 <= len(busy) <= 6  # of eight
        for expert in set(range(8)) - busy:
            module.gate_up[expert] = module.down[expert] = torch.nan
    assert torch.equal(decoder(tokens), before)


def test_the_grouped_kernel_multiplies_as_the_loop_does() -> None:
    """The one of accelerators, which torch has on a CPU too."""
    x, weights = torch.randn(10, 48), torch.randn(5, 32, 48)
    ends = torch.tensor([0, 4, 4, 9, 10], dtype=torch.int32)
    found = experts._grouped(x, weights, ends)
    torch.testing.assert_close(found, F.grouped_mm(x, weights.transpose(1, 2), offs=ends), **CLOSE)


@pytest.mark.parametrize("name", ["latent", "deepseek"])
@pytest.mark.parametrize("width", [1, 5])
def test_the_arithmetic_of_a_pass_is_what_the_model_counts(name: str, width: int) -> None:
    model, decoder = RECORDS[name], tiny(name)
    cache = decoder.cache(2, 40)
    cache.advance(30)
    with FlopCounterMode(display=False) as counter:
        decoder(random_tokens(2, width), cache, span=40)
    pairs = sum(n * layer.attention.flops_per_pair for layer, n in model.layers) * 2 * width * 40
    weighted = (
        2
        * 2
        * width
        * sum(  # a row's weighted sum of its experts' results
            n * layer.mlp.top_k * 48 for layer, n in model.layers if isinstance(layer.mlp, MoE)
        )
    )
    assert counter.get_total_flops() == 2 * 2 * width * model.matmul_params + pairs + weighted


# -- decoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORDS)
def test_speculative_text_is_the_plain_one(name: str) -> None:
    target, near = tiny(name), tiny(name)
    near.head.add_(0.1 * torch.randn(near.head.shape, generator=torch.Generator().manual_seed(0)))
    prompts = [random_tokens(n, seed=n).tolist() for n in (5, 1, 9)]
    plain = generate(target, prompts, max_new_tokens=16, eos=())
    tree = Tree(parents=(-1, -1, 0, 0, 1))
    parts = SelfLayers(target, [0, 1]), SparseCache(target, sink=1, window=6)
    for drafter, k in (
        (DraftModel(near), 3),
        (DraftModel(near), tree),
        (NGram(), 3),
        *((part, 3) for part in parts),
    ):
        found = speculate(target, drafter, prompts, k=k, max_new_tokens=16, eos=())
        assert found.tokens == plain
        if isinstance(drafter, DraftModel):  # some drafts are accepted, others rolled back
            accepted = sum(int(turn.accepted[turn.active].sum()) for turn in found.rounds)
            assert 0 < accepted < 2 * sum(int(turn.active.sum()) for turn in found.rounds)


def test_acceptance_is_imposed_on_models_that_cannot_be_downloaded() -> None:
    target, drafter = tiny("deepseek"), tiny("mixtral")
    forced = Forced(DraftModel(drafter), [1.0])
    found = speculate(target, forced, [[1, 2, 3]], k=3, max_new_tokens=12, eos=())
    assert [len(tokens) for tokens in found.tokens] == [12]
    assert len(found.rounds) == 3  # and the prompt's own token


# -- records -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "mixtral-8x7b-v0.1",
        "qwen3-30b-a3b",
        "qwen1.5-moe-a2.7b",
        "deepseek-v2-lite",
        "deepseek-v3",
        "kimi-k2",
    ],
)
def test_named_models_are_of_their_size(name: str) -> None:
    """Counted on tensors without memory."""
    model = sm.load_model(name)
    config = from_architecture(model)
    record = to_architecture(config, name=name, dtype=model.dtype)
    assert [(layer.mixer, layer.mlp, n) for layer, n in record.layers] == [
        (layer.mixer, layer.mlp, n) for layer, n in model.layers
    ]
    assert config.parameters == record.total_params == model.total_params
    assert record.active_params == model.active_params
    assert record.kv_bytes_per_token == model.kv_bytes_per_token
    kinds = [Layer(config, i, device="meta") for i in (0, config.layers - 1)]
    sizes = [sum(w.numel() for w in layer.parameters()) for layer in kinds]
    tables = 2 * config.vocab * config.hidden + config.hidden
    dense = config.dense_layers
    assert dense * sizes[0] + (config.layers - dense) * sizes[1] + tables == model.total_params


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layers"), [("qwen3-30b-a3b", 1), ("deepseek-v2-lite", 2)])
def test_named_models_cut_down_decode_as_in_one_pass(name: str, layers: int) -> None:
    decoder = Decoder(from_architecture(cut(name, layers=layers, routed=12))).randomise()
    tokens = random_tokens(2, 6)
    cache = decoder.cache(2, 6)
    found = []
    for part in tokens.split([4, 1, 1], 1):
        found.append(decoder(part, cache))
        cache.advance(part.shape[1])
    torch.testing.assert_close(torch.cat(found, 1), decoder(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gemma-2-2b", "layers of one kind of attention"),
        ("qwen3.5-35b-a3b", "layers of one kind of attention"),
        ("gpt-oss-20b", "layers of one kind of attention"),
        ("deepseek-v3.2", r"MLA, best 2048 with index_heads=64, index_dim=128, index_topk=2048"),
        ("minimax-m2.5", "GQA with qk_norm='full'"),
        ("llama-3.1-8b-eagle3", "GQA with input_width=8192"),
    ],
)
def test_named_models_that_are_not_built(name: str, message: str) -> None:
    with pytest.raises(sm.ArchitectureError, match=f"{name}: the engine .*{message}"):
        from_architecture(sm.load_model(name))


def changed(name: str, **parts: Any) -> sm.Architecture:
    model = RECORDS[name]
    return replace(model, layers=tuple((replace(layer, **parts), n) for layer, n in model.layers))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (changed("mixtral", mlp=MoE(experts=8, top_k=2, width=20, bias=True)), "with bias=True"),
        (changed("mixtral", mlp=MoE(experts=8, top_k=2, width=20, gated=False)), "gated=False"),
        (changed("mixtral", mlp=MLP(width=80, gated=False)), "dense with gated=False"),
        (changed("mixtral", norms=4), "does not run its norms, tables or draft head"),
        (
            replace(RECORDS["glm"], layers=RECORDS["glm"].layers[::-1]),
            "equal MLPs, equal experts, or MLPs first, then experts",
        ),
        (
            changed(
                "latent",
                mixer=LatentAttention(
                    heads=4,
                    q_lora_rank=8,
                    kv_lora_rank=8,
                    nope_dim=8,
                    rope_dim=8,
                    v_dim=8,
                    bias=True,
                ),
            ),
            "MLA with bias=True",
        ),
    ],
)
def test_records_that_are_not_built(model: sm.Architecture, message: str) -> None:
    with pytest.raises(sm.ArchitectureError, match=message):
        from_architecture(model)


def test_checkpoints_of_such_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(sm.ArchitectureError, match="deepseek: experts and latent attention run"):
        save(tmp_path, tiny("deepseek"))
    with pytest.raises(sm.ArchitectureError, match="model_type: 'qwen3_moe' is not run"):
        from_dict({"model_type": "qwen3_moe"})
