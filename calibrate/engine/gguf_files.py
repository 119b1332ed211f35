"""Read a GGUF file: its decoder's sizes, its tensors under Hugging Face names, its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from calibrate.engine.config import MODEL_TYPES, DecoderConfig
from calibrate.engine.tokenizers import Tokenizer, byte_level_bpe
from specmodel.errors import ArchitectureError, CheckpointError
from specmodel.files import check_input

_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_FACTORS = "rope_freqs.weight"
_SPECIAL = 3  # token type of control tokens
_MALFORMED = (ValueError, KeyError, IndexError, TypeError, OverflowError, OSError)


@dataclass(frozen=True, kw_only=True)
class GGUFModel:
    """What a GGUF file holds.

    Attributes
    ----------
    config : DecoderConfig
    tensors : dict
        (shape, reader) by Hugging Face name; readers dequantise to float32.
    tokenizer : callable
        Builds the file's tokenizer, or raises where its kind is not built.
    """

    config: DecoderConfig
    tensors: dict[str, tuple[tuple[int, ...], Callable[[], Tensor]]]
    tokenizer: Callable[[], Tokenizer]


def read(file: Path) -> GGUFModel:
    """Read a GGUF file; its tensors stay on disk until they are asked for.

    Raises
    ------
    CheckpointError
        When the file is malformed or of a model type that is not run.
    """
    try:
        import gguf
    except ImportError:
        raise CheckpointError(f"{file}: needs gguf: pip install specmodel[engine]") from None
    check_input(file, fault=CheckpointError)
    try:
        reader = gguf.GGUFReader(file)
        stored = {tensor.name: tensor for tensor in reader.tensors}
    except _MALFORMED as error:
        raise CheckpointError(f"{file}: not a GGUF file that can be read: {error}") from None
    values = _Values(reader, file)
    config = _config(values, stored)
    tensors: dict[str, tuple[tuple[int, ...], Callable[[], Tensor]]] = {}
    for name, tensor in stored.items():
        if name == _FACTORS:
            continue
        shape = tuple(int(n) for n in reversed(tensor.shape))  # stored innermost first
        tensors[_renamed(name)] = (shape, partial(_read, tensor, shape, config, file))
    return GGUFModel(config=config, tensors=tensors, tokenizer=partial(_tokenizer, values, config))


class _Values:
    """The metadata of a GGUF file."""

    def __init__(self, reader: Any, file: Path) -> None:
        self.reader, self.file = reader, file

    def get(self, key: str, kind: type | tuple[type, ...], *default: Any) -> Any:
        """Return a value of a Python type; without a default it must be there."""
        field = self.reader.fields.get(key)
        if field is None:
            if default:
                return default[0]
            raise CheckpointError(f"{self.file}: {key}: missing")
        try:
            value = field.contents()
        except _MALFORMED as error:
            raise CheckpointError(f"{self.file}: {key}: cannot be read: {error}") from None
        if not isinstance(value, kind):
            raise CheckpointError(f"{self.file}: {key}: not what is expected; got {value!r}")
        return value


def _config(values: _Values, stored: dict[str, Any]) -> DecoderConfig:
    kind = values.get("general.architecture", str)
    if kind not in MODEL_TYPES:
        raise CheckpointError(f"{values.file}: general.architecture: {kind!r} is not run")
    if "token_embd.weight" not in stored:
        raise CheckpointError(f"{values.file}: missing tensors: token_embd.weight")
    scaling = values.get(f"{kind}.rope.scaling.type", str, "none")
    if scaling not in ("none", "llama3"):  # llama 3's is written as factors
        raise CheckpointError(f"{values.file}: rope.scaling.type: {scaling!r} is not built")

    def whole(key: str, *default: int) -> int:
        value = values.get(f"{kind}.{key}", int, *default)
        if value < 1:
            raise CheckpointError(f"{values.file}: {kind}.{key}: must be >= 1; got {value}")
        return int(value)

    hidden, heads = whole("embedding_length"), whole("attention.head_count")
    head_dim = whole("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if whole(key, head_dim) != head_dim:
            raise CheckpointError(f"{values.file}: {kind}.{key}: must be head_dim {head_dim}")
    ends = [values.get(f"tokenizer.ggml.{k}_token_id", int, None) for k in ("eos", "eot")]
    factors = None
    if (tensor := stored.get(_FACTORS)) is not None:
        factors = tuple(np.asarray(tensor.data, np.float64).ravel().tolist())
    try:
        return DecoderConfig(
            model_type=kind,
            layers=whole("block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=whole("attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate=whole("feed_forward_length"),
            vocab=int(stored["token_embd.weight"].shape[-1]),
            context=whole("context_length"),
            rope_theta=float(values.get(f"{kind}.rope.freq_base", float, 10_000.0)),
            rope_factors=factors,
            norm_eps=float(values.get(f"{kind}.attention.layer_norm_rms_epsilon", float)),
            window=values.get(f"{kind}.attention.sliding_window", int, None),
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
            tied="output.weight" not in stored,
            eos=tuple(dict.fromkeys(end for end in ends if end is not None)),
        )
    except ArchitectureError as error:
        raise CheckpointError(f"{values.file}: {error}") from None


def _renamed(name: str) -> str:
    """Return the Hugging Face name of a tensor, or its own where it has none."""
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    block, _, rest = stem.partition(".")
    index, _, part = rest.partition(".")
    if block == "blk" and part in _PARTS:
        return f"model.layers.{index}.{_PARTS[part]}.{kind}"
    return name


def _read(tensor: Any, shape: tuple[int, ...], config: DecoderConfig, file: Path) -> Tensor:
    """Return a tensor in float32, its rotary rows in the order of halves."""
    from gguf.quants import dequantize

    try:
        data = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)
    except (*_MALFORMED, NotImplementedError) as error:
        raise CheckpointError(f"{file}: {tensor.name}: cannot be read: {error}") from None
    if config.model_type in ("llama", "mistral") and ".attn_q." in tensor.name:
        data = _halves(data, config.heads)
    if config.model_type in ("llama", "mistral") and ".attn_k." in tensor.name:
        data = _halves(data, config.kv_heads)
    return torch.from_numpy(data)


def _halves(data: Any, heads: int) -> Any:
    """Undo the interleaving of rotary pairs that llama files are written with."""
    pairs = data.reshape(heads, -1, 2, *data.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(data.shape)


def _tokenizer(values: _Values, config: DecoderConfig) -> Tokenizer:
    kind = values.get("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise CheckpointError(
            f"{values.file}: tokenizer.ggml.model: {kind!r} is not built, only byte-level BPE; "
            "load with tokenizer=False"
        )
    tokens = values.get("tokenizer.ggml.tokens", list)
    types = values.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    bos = values.get("tokenizer.ggml.bos_token_id", int, None)
    return byte_level_bpe(
        tokens,
        values.get("tokenizer.ggml.merges", list),
        special=[token for token, t in zip(tokens, types, strict=True) if t == _SPECIAL],
        splitting=values.get("tokenizer.ggml.pre", str, "default"),
        bos=bos if values.get("tokenizer.ggml.add_bos_token", bool, False) else None,
        eos=config.eos,
        where=str(values.file),
    )
