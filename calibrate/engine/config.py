"""What a decoder is made of: from a Hugging Face ``config.json``, strictly, or a model record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

from specmodel.architectures import MLP, Architecture, Attention, LatentAttention, Layer, MoE
from specmodel.architectures.keys import Keys
from specmodel.errors import ArchitectureError, did_you_mean

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of ``model_type`` that the engine runs."""

_CONTEXT = 1 << 17  # of a random decoder whose model states none [token]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and constants of a decoder: grouped or latent attention, gated MLPs or experts.

    Parameters
    ----------
    model_type : str
        One of `MODEL_TYPES`; of random decoders with experts or latent attention, the model's own.
    layers, hidden, heads, kv_heads, head_dim, intermediate, vocab : int
        Latent attention has one KV head, as wide as what it caches of a token.
    context : int
        Most positions that the model was made for. [token]
    rope_theta : float
        Base of the rotary embedding.
    rope_factors : tuple of float, optional
        What each of the ``head_dim / 2`` rotary frequencies is divided by (long contexts).
    norm_eps : float
    window : int, optional
        Positions that attention sees, the query's own included. [token]
    qkv_bias, qk_norm, tied : bool
        Biases of the query, key and value projections; norms of each query and key head; one
        table for the embedding and the LM head.
    eos : tuple of int
        Tokens that end a text.
    experts : MoE, optional
        What layers have in place of the MLP (random weights only).
    dense_layers : int
        Of a decoder with experts, first layers that keep the MLP.
    latent : LatentAttention, optional
        What layers have in place of grouped attention (random weights only).
    """

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    rope_theta: float = 10_000.0
    rope_factors: tuple[float, ...] | None = None
    norm_eps: float
    window: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    eos: tuple[int, ...] = ()
    experts: MoE | None = None
    dense_layers: int = 0
    latent: LatentAttention | None = None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ArchitectureError(
                f"{self.heads} heads do not divide into {self.kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise ArchitectureError(f"head_dim must be even (rotary pairs); got {self.head_dim}")
        if self.rope_factors is not None and len(self.rope_factors) != self.head_dim // 2:
            raise ArchitectureError(
                f"{len(self.rope_factors)} rotary factors for head_dim {self.head_dim}"
            )
        for token in self.eos:
            if not 0 <= token < self.vocab:
                raise ArchitectureError(
                    f"end token {token} is outside a vocabulary of {self.vocab}"
                )

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return to_architecture(self, name=self.model_type, dtype="float32").total_params

    @property
    def rotary_dim(self) -> int:
        """Elements of a query or key head that are rotated by their position."""
        return self.head_dim if self.latent is None else self.latent.rope_dim


def from_dict(values: Mapping[str, Any], *, where: str = "config") -> DecoderConfig:
    """Return the decoder that the keys of a ``config.json`` describe.

    Raises
    ------
    ArchitectureError
        Naming the key that is missing, unknown, impossible, or asks for what is not built.

    Examples
    --------
    >>> sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    >>> sizes |= dict(num_attention_heads=4, vocab_size=256, max_position_embeddings=512)
    >>> from_dict({"model_type": "llama", "rms_norm_eps": 1e-5, **sizes}).head_dim
    16
    """
    keys = Keys(values, where)
    kind = keys.text("model_type")
    if kind not in MODEL_TYPES:
        raise keys.error("model_type", f"{kind!r} is not run{did_you_mean(kind, MODEL_TYPES)}")
    _refuse(keys, kind)
    heads, hidden = keys.whole("num_attention_heads"), keys.whole("hidden_size")
    if (head_dim := keys.whole_or_none("head_dim", None)) is None:
        if kind == "qwen3":
            head_dim = 128  # its class's default
        elif hidden % heads:
            raise keys.error("head_dim", f"missing, and {heads} heads do not divide {hidden}")
        else:
            head_dim = hidden // heads
    theta, factors = _rotary(keys, head_dim)
    try:
        config = DecoderConfig(
            model_type=kind,
            layers=keys.whole("num_hidden_layers", high=10_000),
            hidden=hidden,
            heads=heads,
            kv_heads=keys.whole("num_key_value_heads", *([heads] if kind == "llama" else [])),
            head_dim=head_dim,
            intermediate=keys.whole("intermediate_size"),
            vocab=keys.whole("vocab_size"),
            context=keys.whole("max_position_embeddings"),
            rope_theta=theta,
            rope_factors=factors,
            norm_eps=_number(keys, "rms_norm_eps"),
            window=_window(keys, kind),
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
            tied=keys.flag("tie_word_embeddings", False),
            eos=end_tokens(keys),
        )
    except ArchitectureError as error:
        if str(error).startswith(where):
            raise
        raise ArchitectureError(f"{where}: {error}") from None
    keys.refuse_unread()
    return config


def to_dict(config: DecoderConfig) -> dict[str, Any]:
    """Return the ``config.json`` of a decoder, without `rope_factors`, which it has no key for.

    Raises
    ------
    ArchitectureError
        When it has experts or latent attention, which are run with random weights only.
    """
    if config.experts is not None or config.latent is not None:
        raise ArchitectureError(
            f"{config.model_type}: experts and latent attention run with random weights only"
        )
    window = {"sliding_window": config.window} if config.model_type == "mistral" else {}
    return {
        "architectures": [config.model_type.capitalize() + "ForCausalLM"],
        "model_type": config.model_type,
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied,
        "eos_token_id": list(config.eos) or None,
        **window,
    }


def to_architecture(config: DecoderConfig, *, name: str, dtype: str) -> Architecture:
    """Return the record that the performance model predicts with.

    Of a random decoder it is the record that `from_architecture` read, but for what its passes
    do not have: quantisation, multi-token-prediction blocks, notes.

    Parameters
    ----------
    config : DecoderConfig
    name : str
    dtype : str
        Number format of weights, activations and cache.
    """
    mixer = config.latent or Attention(
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        window=config.window,
        qkv_bias=config.qkv_bias,
        qk_norm="head" if config.qk_norm else None,
    )
    dense = Layer(mixer=mixer, mlp=MLP(width=config.intermediate))
    last = replace(dense, mlp=config.experts or dense.mlp)
    first = min(config.dense_layers, config.layers)
    return Architecture(
        name=name,
        model_type=config.model_type,
        hidden_size=config.hidden,
        vocab_size=config.vocab,
        head_vocab_size=config.vocab,
        layers=tuple(run for run in ((dense, first), (last, config.layers - first)) if run[1]),
        dense_width=config.intermediate,
        tied_embeddings=config.tied,
        dtype=dtype,
        kv_dtype=dtype,
        max_positions=config.context,
    )


def from_architecture(model: Architecture) -> DecoderConfig:
    """Return a decoder of a model's sizes, to run with random weights.

    Raises
    ------
    ArchitectureError
        When its attention differs between layers, its experts do too, or it has parts that are
        not built.
    """
    runs = [kind for kind, _ in groupby((layer.mixer, layer.mlp) for layer, _ in model.layers)]
    (mixer, first), (_, last) = runs[0], runs[-1]
    if len({found for found, _ in runs}) > 1 or not isinstance(mixer, Attention | LatentAttention):
        raise ArchitectureError(f"{model.name}: the engine runs layers of one kind of attention")
    order = [type(mlp) for _, mlp in runs]
    if not isinstance(last, MLP | MoE) or order not in ([MLP], [MoE], [MLP, MoE]):
        raise ArchitectureError(
            f"{model.name}: the engine runs equal MLPs, equal experts, or MLPs first, then experts"
        )
    for part in (mixer, first, last):
        if besides := _not_built(part):
            raise ArchitectureError(f"{model.name}: the engine does not run {besides}")
    experts = last if isinstance(last, MoE) else None
    dense = first if isinstance(first, MLP) else None
    config = DecoderConfig(
        model_type=_model_type(model, mixer, last),
        layers=model.n_layers,
        hidden=model.hidden_size,
        intermediate=dense.width if dense else model.dense_width or last.width,
        vocab=model.vocab_size,
        context=model.max_positions or _CONTEXT,
        norm_eps=1e-5,
        tied=model.tied_embeddings,
        experts=experts,
        dense_layers=sum(n for layer, n in model.layers if layer.mlp == dense) if experts else 0,
        **_attention(mixer),
    )
    if config.parameters != model.total_params:
        raise ArchitectureError(
            f"{model.name}: the engine does not run its norms, tables or draft head: it would have "
            f"{config.parameters} weights, the model has {model.total_params}"
        )
    return config


def end_tokens(keys: Keys) -> tuple[int, ...]:
    """Return ``eos_token_id``: a number, a list of them, or nothing."""
    value = keys.raw("eos_token_id", None)
    found = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in found):
        raise keys.error("eos_token_id", f"must be a token or a list of tokens; got {value!r}")
    return tuple(found)


def _not_built(part: Any) -> str:
    """Return what a part of a layer has that the engine does not build, empty for nothing."""
    match part:
        case Attention():
            built: Any = Attention(
                heads=part.heads,
                kv_heads=part.kv_heads,
                head_dim=part.head_dim,
                window=part.window,
                qkv_bias=part.qkv_bias,
                qk_norm="head" if part.qk_norm and not part.qkv_bias else None,
            )
        case LatentAttention():
            built = replace(part, bias=False, index_heads=0, index_dim=0, index_topk=None)
        case MLP():
            built = MLP(width=part.width)
        case _:
            built = replace(part, gated=True, bias=False, extra_params=0, ranks=1)
    values = ((field.name, getattr(part, field.name)) for field in fields(part))
    found = [f"{name}={value!r}" for name, value in values if value != getattr(built, name)]
    return f"{part.kind} with {', '.join(found)}" if found else ""


def _attention(mixer: Attention | LatentAttention) -> dict[str, Any]:
    """Return the fields of a `DecoderConfig` that attention decides."""
    if isinstance(mixer, LatentAttention):
        one = {"kv_heads": 1, "head_dim": mixer.kv_elements}
        return {"heads": mixer.heads, **one, "latent": mixer}
    return {
        "heads": mixer.heads,
        "kv_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
        "window": mixer.window,
        "qkv_bias": mixer.qkv_bias,
        "qk_norm": mixer.qk_norm is not None,
    }


def _model_type(model: Architecture, mixer: Attention | LatentAttention, mlp: MLP | MoE) -> str:
    """Return the type of `MODEL_TYPES` that has these parts, the model's own where none has."""
    if isinstance(mixer, LatentAttention) or isinstance(mlp, MoE):
        return model.model_type
    if mixer.window is not None:
        return "mistral"
    return "qwen2" if mixer.qkv_bias else "qwen3" if mixer.qk_norm else "llama"


def _refuse(keys: Keys, kind: str) -> None:
    """Refuse keys that ask for something other than the decoder that is built."""
    wanted: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", "swish"),
        "attention_bias": (kind == "qwen2", False),
        "mlp_bias": (False,),
        "use_sliding_window": (False,),
        "partial_rotary_factor": (1.0,),
        "pretraining_tp": (1,),
        "rope_interleaved": (False,),
        "is_encoder_decoder": (False,),
        "quantization_config": (),
        "auto_map": (),
    }
    why = {
        "auto_map": "names code of its own, which is never run",
        "quantization_config": "quantised weights are read from GGUF files only",
    }
    for key, allowed in wanted.items():
        value = keys.raw(key, None)
        if value is not None and value not in allowed:
            raise keys.error(key, why.get(key, f"{value!r} is not built for {kind!r}"))
    if keys.values.get("model_type") != "mistral":
        keys.raw("sliding_window", None)  # read, without effect: use_sliding_window is false
    keys.raw("max_window_layers", None)
    kinds = keys.raw("layer_types", None)
    if kinds is not None and set(map(str, kinds)) != {"full_attention"}:
        raise keys.error("layer_types", f"only full attention is built; got {kinds!r}")


def _window(keys: Keys, kind: str) -> int | None:
    if kind != "mistral":
        return None
    return keys.whole_or_none("sliding_window", 4096)  # the class's default where it is absent


def _number(keys: Keys, key: str, *default: float) -> float:
    value = keys.raw(key, *default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise keys.error(key, f"must be a number; got {value!r}")
    if not 0 < value < math.inf:
        raise keys.error(key, f"must be above 0 and finite; got {value}")
    return float(value)


def _rotary(keys: Keys, head_dim: int) -> tuple[float, tuple[float, ...] | None]:
    """Return the rotary base and what each frequency is divided by.

    Files of transformers 5 keep both in ``rope_parameters``, older ones in ``rope_theta`` and
    ``rope_scaling``.
    """
    theta = keys.raw("rope_theta", None)
    outer = {"rope_theta": 10_000.0 if theta is None else theta}  # the classes' default
    for name in ("rope_scaling", "rope_parameters"):
        inner = keys.raw(name, None) or {}
        if not isinstance(inner, dict):
            raise keys.error(name, f"must be an object; got {inner!r}")
        outer |= inner
    rope = Keys(outer, f"{keys.where}: rope")
    theta = _number(rope, "rope_theta")
    kind = rope.raw("rope_type", None) or rope.raw("type", None) or "default"
    if kind == "default":
        return theta, None
    factor = _number(rope, "factor")
    if kind == "linear":
        return theta, (factor,) * (head_dim // 2)
    if kind != "llama3":
        raise rope.error("rope_type", f"{kind!r} is not built (default, linear, llama3)")
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    if low >= high:
        raise rope.error("low_freq_factor", f"must be below high_freq_factor {high}; got {low}")
    original = _number(rope, "original_max_position_embeddings")
    factors = []
    for i in range(head_dim // 2):
        turns = original * theta ** (-2 * i / head_dim) / (2 * math.pi)  # in the original context
        share = min(1.0, max(0.0, (turns - low) / (high - low)))  # 1: fast enough to stay
        factors.append(1 / (share + (1 - share) / factor))
    return theta, tuple(factors)
