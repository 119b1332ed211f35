"""Encoder-decoder models: T5."""

from __future__ import annotations

from typing import Any

from specmodel.architectures.keys import Keys
from specmodel.architectures.parts import MLP, Attention
from specmodel.architectures.records import Architecture, Layer
from specmodel.errors import brief

_MOST_LAYERS = 10_000
_FEED_FORWARD = {"relu": False, "gated-gelu": True}


def t5(keys: Keys, fields: dict[str, Any]) -> Architecture:
    """T5 and its successors of the same form (v1.1, FLAN-T5), as they decode.

    The context is the prompt and what was generated after it. In each decoder layer a token of
    the prompt is kept by cross-attention and a generated one by self-attention, in tensors of
    the same size, so that what is kept and read follows from their sum. The encoder, and the
    projections of its output, stay in memory and are not read. Biases of relative positions
    count as parameters of the first layer.

    Layout after transformers 5.24.0 (``models/t5/modeling_t5.py``), read 2026-11-29.
    """
    for key in ("dropout_rate", "initializer_factor", "n_positions", "output_past",
                "relative_attention_max_distance", "is_gated_act", "dense_act_fn"):  # fmt: skip
        keys.raw(key, None)
    if not keys.flag("is_encoder_decoder", True):
        raise keys.error("is_encoder_decoder", "must be true: an encoder alone drafts nothing")
    kind = keys.text("feed_forward_proj", "relu")
    if kind not in _FEED_FORWARD:
        raise keys.error(
            "feed_forward_proj", f"must be one of {', '.join(_FEED_FORWARD)}; got {brief(kind)}"
        )
    gated, hidden = _FEED_FORWARD[kind], fields["hidden_size"]
    width, heads, head_dim = (keys.whole(key) for key in ("d_ff", "num_heads", "d_kv"))
    encoders = keys.whole("num_layers", high=_MOST_LAYERS)
    decoders = keys.whole("num_decoder_layers", encoders, high=_MOST_LAYERS)
    positions = keys.whole("relative_attention_num_buckets", 32) * heads
    projection = hidden * heads * head_dim
    encoder = 4 * projection + (3 if gated else 2) * hidden * width + 2 * hidden
    layer = Layer(
        mixer=Attention(heads=heads, kv_heads=heads, head_dim=head_dim, cross=True),
        mlp=MLP(width=width, gated=gated),
        norms=3,
    )
    first = Layer(mixer=layer.mixer, mlp=layer.mlp, norms=3, extra_params=positions)
    return Architecture(
        **{
            **fields,
            "tied_embeddings": keys.flag("tie_word_embeddings", True),
            "dense_width": width,
            "encoder_params": encoders * encoder + positions + hidden + decoders * 2 * projection,
        },
        layers=((first, 1),) if decoders == 1 else ((first, 1), (layer, decoders - 1)),
    )
