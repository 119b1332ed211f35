"""Read a Hugging Face ``config.json`` into an `Architecture`; refuse what is not understood."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specmodel.architectures.heads import eagle3_record
from specmodel.architectures.keys import Keys
from specmodel.architectures.parts import MLP, Attention, LatentAttention, MoE
from specmodel.architectures.records import Architecture, Layer
from specmodel.dtypes import ACTIVATION_DTYPES, Quantisation, canonical_dtype
from specmodel.errors import ArchitectureError, DomainError, did_you_mean

_ACTIVATIONS = {"silu", "swish", "swiglu"}
_MOST_LAYERS = 10_000  # no model has as many; a typo must not be built layer by layer
_ALWAYS_UNQUANTISED = re.compile(
    r"(.*\.)?(lm_head|embed_tokens|\w*norm|mlp\.gate|mlp\.shared_expert_gate)(\.weight)?"
)
_MOST_BYTES = 64 * 2**20


def read_config(path: str | os.PathLike[str], *, name: str | None = None) -> Architecture:
    """Read a ``config.json``, or the one in a directory.

    Parameters
    ----------
    path : path
        The file, or a directory that holds ``config.json``. A ``hf_quant_config.json`` beside
        a file of that name is read with it.
    name : str, optional
        Name of the result; by default the file's or directory's.

    Raises
    ------
    ArchitectureError
        Naming the file and the missing, unknown or impossible key.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    values = _load(file)
    if name is None:
        name = file.resolve().parent.name if file.name == "config.json" else file.stem
    beside = file.with_name("hf_quant_config.json")
    if "quantization_config" not in values and file.name == "config.json" and beside.exists():
        values["quantization_config"] = _from_modelopt(Keys(_load(beside), str(beside)))
    return from_dict(values, name=name, where=str(path))


def from_dict(values: Mapping[str, Any], *, name: str, where: str) -> Architecture:
    """Build an `Architecture` from the parsed keys of a ``config.json``.

    Raises
    ------
    ArchitectureError
        Naming the missing, unknown or impossible key.
    """
    keys = Keys(values, where)
    classes = keys.raw("architectures", None) or []
    if not isinstance(classes, list) or not all(isinstance(c, str) for c in classes):
        raise keys.error("architectures", f"must be a list of class names; got {classes!r}")
    model_type = keys.text("model_type")
    if "LlamaForCausalLMEagle3" in classes:
        family: _Family = _eagle3
    elif any(not c.endswith("ForCausalLM") for c in classes) and model_type in _FAMILIES:
        raise keys.error(
            "architectures", f"{classes[0]!r} is not supported (it is no causal language model)"
        )
    elif model_type in _FAMILIES:
        family = _FAMILIES[model_type]
    else:
        raise keys.error(
            "model_type", f"{model_type!r} is not supported{did_you_mean(model_type, _FAMILIES)}"
        )
    try:
        result = _with_quantisation(family(keys, _common(keys, name, where)), keys)
    except (TypeError, OverflowError) as error:  # a value of a shape no family expects
        raise ArchitectureError(f"{where}: {error}") from error
    keys.refuse_unread()
    return result


def _load(file: Path) -> dict[str, Any]:
    try:
        if file.exists() and not (file.is_file() and file.stat().st_size <= _MOST_BYTES):
            raise ArchitectureError(f"{file}: not a file of at most {_MOST_BYTES:,} bytes")
        text = file.read_text(encoding="utf-8")
        values = json.loads(text, object_pairs_hook=_no_duplicates)
    except FileNotFoundError:
        raise ArchitectureError(f"{file}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ArchitectureError(f"{file}: cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ArchitectureError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ArchitectureError(f"{file}: must hold a JSON object; got {type(values).__name__}")
    return values


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} occurs twice")
    return values


# -- families ------------------------------------------------------------------------------------

_Family = Callable[[Keys, dict[str, Any]], Architecture]


def _common(keys: Keys, name: str, where: str) -> dict[str, Any]:
    """Fields that every family has."""
    activation = keys.text("hidden_act")
    if activation not in _ACTIVATIONS:
        raise keys.error("hidden_act", f"must be one of {sorted(_ACTIVATIONS)}; got {activation!r}")
    key = "dtype" if "dtype" in keys.values else "torch_dtype"
    dtype = _dtype(keys, key, keys.text(key))
    if "torch_dtype" in keys.values and keys.values["torch_dtype"] != keys.values[key]:
        raise keys.error("torch_dtype", f"{keys.values['torch_dtype']!r} contradicts {key}")
    if dtype not in ACTIVATION_DTYPES:
        raise keys.error(key, f"must be one of {', '.join(ACTIVATION_DTYPES)}; got {dtype!r}")
    vocab = keys.whole("vocab_size")
    return {
        "name": name,
        "source": where,
        "model_type": keys.text("model_type"),
        "hidden_size": keys.whole("hidden_size"),
        "vocab_size": vocab,
        "dense_width": keys.whole("intermediate_size"),
        "head_vocab_size": vocab,
        "tied_embeddings": keys.flag("tie_word_embeddings", False),
        "dtype": dtype,
        "kv_dtype": dtype,
        "max_positions": keys.whole("max_position_embeddings", None)
        if keys.values.get("max_position_embeddings") is not None
        else None,
    }


def _dtype(keys: Keys, key: str, value: object) -> str:
    try:
        return canonical_dtype(str(value), what=key)
    except DomainError as error:
        raise keys.error(key, str(error)) from None


def _attention(keys: Keys, common: dict[str, Any], **kwargs: Any) -> Attention:
    heads = keys.whole("num_attention_heads")
    if keys.values["model_type"] == "llama":  # the one family whose default is one for each head
        kv_heads = keys.whole("num_key_value_heads", heads)
    else:
        kv_heads = keys.whole("num_key_value_heads")
    head_dim = keys.whole_or_none("head_dim", None)
    if head_dim is None:
        if common["hidden_size"] % heads:
            raise keys.error(
                "num_attention_heads",
                f"must divide hidden_size {common['hidden_size']}; got {heads}",
            )
        head_dim = common["hidden_size"] // heads
    if heads % kv_heads:
        raise keys.error("num_key_value_heads", f"must divide {heads} heads; got {kv_heads}")
    return Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, **kwargs)


def _depth(keys: Keys) -> int:
    return keys.whole("num_hidden_layers", high=_MOST_LAYERS)


def _runs(layers: Iterable[Layer]) -> tuple[tuple[Layer, int], ...]:
    runs: list[tuple[Layer, int]] = []
    for layer in layers:
        if runs and runs[-1][0] == layer:
            runs[-1] = (layer, runs[-1][1] + 1)
        else:
            runs.append((layer, 1))
    return tuple(runs)


def _llama(keys: Keys, common: dict[str, Any]) -> Architecture:
    bias = keys.flag("attention_bias", False)
    attention = _attention(keys, common, qkv_bias=bias, output_bias=bias)
    mlp = MLP(width=keys.whole("intermediate_size"), bias=keys.flag("mlp_bias", False))
    layer = Layer(mixer=attention, mlp=mlp)
    return Architecture(**common, layers=((layer, _depth(keys)),))


def _mistral(keys: Keys, common: dict[str, Any]) -> Architecture:
    window = keys.whole_or_none("sliding_window")
    layer = Layer(
        mixer=_attention(keys, common, window=window),
        mlp=MLP(width=keys.whole("intermediate_size")),
    )
    return Architecture(**common, layers=((layer, _depth(keys)),))


def _mixtral(keys: Keys, common: dict[str, Any]) -> Architecture:
    window = keys.whole_or_none("sliding_window", None)
    moe = _routed(keys, experts="num_local_experts", width="intermediate_size")
    layer = Layer(mixer=_attention(keys, common, window=window), mlp=moe)
    return Architecture(**common, layers=((layer, _depth(keys)),))


def _routed(keys: Keys, *, experts: str, width: str, **kwargs: Any) -> MoE:
    moe = MoE(
        experts=keys.whole(experts),
        top_k=keys.whole("num_experts_per_tok"),
        width=keys.whole(width),
        **kwargs,
    )
    if moe.top_k > moe.experts:
        raise keys.error("num_experts_per_tok", f"must be at most {moe.experts}; got {moe.top_k}")
    return moe


def _qwen_windows(keys: Keys, layers: int) -> list[int | None]:
    """Return each layer's window: as ``layer_types`` says, else from ``max_window_layers`` on."""
    window = keys.whole_or_none("sliding_window", None)
    kinds = keys.raw("layer_types", None)
    first = keys.whole_or_none("max_window_layers", None, low=0)
    slides = keys.flag("use_sliding_window", False) and window is not None
    if not slides and (kinds is None or set(map(str, kinds)) == {"full_attention"}):
        return [None] * layers
    if kinds is not None:
        known = {"full_attention": None, "sliding_attention": window}
        if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= set(known):
            raise keys.error("layer_types", f"must name {' or '.join(known)} for each layer")
        return [known[kind] for kind in kinds]
    if first is None:
        raise keys.error("max_window_layers", "missing")
    return [window if i >= first else None for i in range(layers)]


def _qwen_dense(keys: Keys, common: dict[str, Any], **attention: Any) -> Architecture:
    mlp = MLP(width=keys.whole("intermediate_size"))
    base = _attention(keys, common, **attention)
    windows = _qwen_windows(keys, _depth(keys))
    layers = (Layer(mixer=replace(base, window=w), mlp=mlp) for w in windows)
    return Architecture(**common, layers=_runs(layers))


def _qwen2(keys: Keys, common: dict[str, Any]) -> Architecture:
    return _qwen_dense(keys, common, qkv_bias=True)


def _qwen3(keys: Keys, common: dict[str, Any]) -> Architecture:
    bias = keys.flag("attention_bias", False)
    return _qwen_dense(keys, common, qk_norm="head", qkv_bias=bias, output_bias=bias)


def _qwen_moe(keys: Keys, common: dict[str, Any], moe: MoE, base: Attention) -> Architecture:
    count = _depth(keys)
    step = keys.whole("decoder_sparse_step")
    dense_layers = keys.whole_list("mlp_only_layers")
    dense = MLP(width=keys.whole("intermediate_size"))
    layers = (
        Layer(
            mixer=replace(base, window=window),
            mlp=moe if i not in dense_layers and (i + 1) % step == 0 else dense,
        )
        for i, window in enumerate(_qwen_windows(keys, count))
    )
    return Architecture(**common, layers=_runs(layers))


def _qwen2_moe(keys: Keys, common: dict[str, Any]) -> Architecture:
    moe = _routed(
        keys,
        experts="num_experts",
        width="moe_intermediate_size",
        shared_width=keys.whole("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return _qwen_moe(keys, common, moe, _attention(keys, common, qkv_bias=True))


def _qwen3_moe(keys: Keys, common: dict[str, Any]) -> Architecture:
    moe = _routed(keys, experts="num_experts", width="moe_intermediate_size")
    bias = keys.flag("attention_bias", False)
    attention = _attention(keys, common, qk_norm="head", qkv_bias=bias, output_bias=bias)
    return _qwen_moe(keys, common, moe, attention)


def _deepseek(keys: Keys, common: dict[str, Any]) -> Architecture:
    heads = keys.whole("num_attention_heads")
    keys.whole("num_key_value_heads", heads)  # unused by MLA; checked for sense only
    attention = LatentAttention(
        heads=heads,
        q_lora_rank=keys.whole_or_none("q_lora_rank"),
        kv_lora_rank=keys.whole("kv_lora_rank"),
        nope_dim=keys.whole("qk_nope_head_dim"),
        rope_dim=keys.whole("qk_rope_head_dim"),
        v_dim=keys.whole("v_head_dim"),
        bias=keys.flag("attention_bias", False),
    )
    width = keys.whole("moe_intermediate_size")
    shared = keys.whole("n_shared_experts", 0, low=0)
    moe = _routed(
        keys, experts="n_routed_experts", width="moe_intermediate_size", shared_width=shared * width
    )
    dense = MLP(width=keys.whole("intermediate_size"))
    first = keys.whole("first_k_dense_replace", low=0)
    step = keys.whole("moe_layer_freq", 1)
    layers = (
        Layer(mixer=attention, mlp=moe if i >= first and i % step == 0 else dense)
        for i in range(_depth(keys))
    )
    mtp = keys.whole("num_nextn_predict_layers", 0, low=0)
    return Architecture(**common, layers=_runs(layers), mtp_layers=mtp)


def _eagle3(keys: Keys, common: dict[str, Any]) -> Architecture:
    """An EAGLE-3 head, in the layout that SpecForge trains and vLLM and SGLang serve."""
    keys.raw("eagle_config", None)  # which target layers feed it: no effect on cost
    for key in ("num_experts", "decoder_sparse_step", "moe_intermediate_size"):
        keys.raw(key, None)  # left behind by the target's file
    hidden = common["hidden_size"]
    target_hidden = keys.whole("target_hidden_size", hidden)
    layers = _depth(keys)
    bias = keys.flag("attention_bias", False)
    base = _attention(
        keys, common, qkv_bias=bias, output_bias=bias, window=_qwen_windows(keys, layers)[0]
    )
    common["head_vocab_size"] = keys.whole("draft_vocab_size", common["vocab_size"])
    return eagle3_record(
        common,
        base,
        MLP(width=keys.whole("intermediate_size"), bias=keys.flag("mlp_bias", False)),
        target_hidden=target_hidden,
        layers=layers,
    )


_FAMILIES: dict[str, _Family] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
}


# -- quantisation --------------------------------------------------------------------------------


def _with_quantisation(architecture: Architecture, keys: Keys) -> Architecture:
    config = keys.raw("quantization_config", None)
    if config is None:
        return architecture
    where = f"{keys.where}: quantization_config"
    if not isinstance(config, dict):
        raise ArchitectureError(f"{where}: must be an object; got {config!r}")
    quant = Keys(config, where)
    if (method := quant.text("quant_method")) != "fp8":
        raise quant.error("quant_method", f"{method!r} is not supported; fp8 is")
    quant.raw("activation_scheme", None)
    quant.raw("fmt", None)
    excluded = quant.raw("modules_to_not_convert", None) or []
    if not isinstance(excluded, list):
        raise quant.error("modules_to_not_convert", f"must be a list; got {excluded!r}")
    for module in excluded:
        if not _ALWAYS_UNQUANTISED.fullmatch(str(module)):
            raise quant.error("modules_to_not_convert", f"excluding {module!r} is not supported")
    block = quant.raw("weight_block_size", None)
    if block is not None:
        if not (
            isinstance(block, list)
            and len(block) == 2
            and all(isinstance(b, int) and not isinstance(b, bool) and b > 0 for b in block)
        ):
            raise quant.error("weight_block_size", f"must be two whole numbers; got {block!r}")
        block = (block[0], block[1])
    kv = quant.raw("kv_cache_dtype", None)
    quant.refuse_unread()
    return replace(
        architecture,
        quantisation=Quantisation(dtype="fp8", block=block),
        kv_dtype=_dtype(quant, "kv_cache_dtype", kv) if kv else architecture.kv_dtype,
    )


def _from_modelopt(keys: Keys) -> dict[str, Any]:
    """Translate a ``hf_quant_config.json`` (ModelOpt) into a ``quantization_config``."""
    keys.raw("producer", None)
    inner = keys.raw("quantization")
    if not isinstance(inner, dict):
        raise keys.error("quantization", f"must be an object; got {inner!r}")
    quant = Keys(inner, f"{keys.where}: quantization")
    if (algorithm := quant.text("quant_algo")) != "FP8":
        raise quant.error("quant_algo", f"{algorithm!r} is not supported; FP8 is")
    kv = quant.raw("kv_cache_quant_algo", None)
    if kv not in (None, "FP8"):
        raise quant.error("kv_cache_quant_algo", f"{kv!r} is not supported; FP8 is")
    excluded = quant.raw("exclude_modules", None) or []
    quant.refuse_unread()
    keys.refuse_unread()
    return {
        "quant_method": "fp8",
        "modules_to_not_convert": excluded,
        "kv_cache_dtype": "fp8" if kv else None,
    }
