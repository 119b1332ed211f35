"""Draft heads that sit on a target: EAGLE, EAGLE-3 and MTP (NextN), derived from it.

Each is an `Architecture` of its own, so that a draft pass is costed like any other pass.
The layer shapes follow the public implementations: EAGLE in SafeAILab/EAGLE
(``cnets1.py``), EAGLE-3 in vLLM (``llama_eagle3.py``), MTP in vLLM (``deepseek_mtp.py``),
read 2026-11-29.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specmodel.architectures.parts import MLP, Attention, MoE
from specmodel.architectures.records import Architecture, Fusion, Layer
from specmodel.errors import ArchitectureError

EAGLE3_DRAFT_VOCAB = 32_000
"""Reduced draft vocabulary of published EAGLE-3 heads (SpecForge configurations)."""


def eagle_head(target: Architecture, shape: Architecture | None = None) -> Architecture:
    """Return an EAGLE head: one layer, 2H to H fusion at every pass.

    Its embedding and LM head are the target's. The layer has no input norm and the head no
    final norm. The layer is shaped like the target's, or like the last of `shape`, the
    one-layer model that an EAGLE checkpoint's ``config.json`` describes.

    Raises
    ------
    ArchitectureError
        When the target does not say what a dense layer of it would look like.

    References
    ----------
    .. [1] Li et al., EAGLE, ICML 2024, arXiv:2401.15077.
    """
    attention, mlp = _dense_parts(shape or target, "eagle")
    return _head(
        target,
        "EAGLE",
        layers=((Layer(mixer=attention, mlp=mlp, norms=1), 1),),
        fusion=Fusion(inputs=2 * target.hidden_size, bias=True),
        final_norm=False,
        own_head=False,
    )


def eagle3_head(target: Architecture, *, draft_vocab: int = EAGLE3_DRAFT_VOCAB) -> Architecture:
    """Return an EAGLE-3 head shaped like the target, with its own LM head of `draft_vocab` rows.

    Raises
    ------
    ArchitectureError
        When the target does not say what a dense layer of it would look like.

    References
    ----------
    .. [1] Li et al., EAGLE-3, NeurIPS 2025, arXiv:2503.01840.
    """
    attention, mlp = _dense_parts(target, "eagle3")
    common = {
        "name": f"EAGLE-3 head for {target.name}",
        "source": f"derived from {target.name}",
        "model_type": "eagle3",
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "head_vocab_size": min(draft_vocab, target.vocab_size),
        "dtype": target.dtype,
        "kv_dtype": target.kv_dtype,
    }
    return eagle3_record(common, attention, mlp, target_hidden=target.hidden_size)


def eagle3_record(
    common: Mapping[str, Any],
    attention: Attention,
    mlp: MLP | MoE,
    *,
    target_hidden: int,
    layers: int = 1,
    **fusion: Any,
) -> Architecture:
    """Return an EAGLE-3 head.

    The first layer's queries, keys and values see the token embedding and the fused feature
    side by side (2H); three target features are fused (3H to H) once per round, in the first
    draft pass. Other fields of `fusion` are as given.
    """
    wide = replace(attention, input_width=2 * common["hidden_size"])
    first = Layer(mixer=wide, mlp=mlp, norms=3)
    rest = Layer(mixer=attention, mlp=mlp)
    return Architecture(
        **common,
        layers=((first, 1),) if layers == 1 else ((first, 1), (rest, layers - 1)),
        head_kind="eagle3",
        fusion=Fusion(inputs=3 * target_hidden, every_pass=False, **fusion),
        own_embedding=False,
    )


def peagle_head(target: Architecture, *, layers: int = 4) -> Architecture:
    """Return a P-EAGLE head: EAGLE-3's layers, and a learnt feature for positions without one.

    Raises
    ------
    ArchitectureError
        When the target does not say what a dense layer of it would look like.

    References
    ----------
    .. [1] P-EAGLE, vLLM blog, 2026-03-13; speculators ``peagle.py``, read 2026-11-29.
    """
    head = eagle3_head(target)
    assert head.fusion is not None  # noqa: S101 (of every EAGLE-3 head)
    ((first, _),) = head.layers
    attention, mlp = _dense_parts(target, "peagle")
    rest = ((Layer(mixer=attention, mlp=mlp), layers - 1),) if layers > 1 else ()
    masked = replace(first, extra_params=head.fusion.inputs)
    name = f"P-EAGLE head for {target.name}"
    return replace(head, name=name, head_kind="peagle", layers=((masked, 1), *rest))


def block_head(target: Architecture, *, layers: int = 5, block: int = 16) -> Architecture:
    """Return a DFlash head shaped like the target: layers over five fused features.

    Raises
    ------
    ArchitectureError
        When the target does not say what a dense layer of it would look like.

    References
    ----------
    .. [1] DFlash, arXiv:2602.06036; its configurations fuse five layers, read 2026-11-29.
    """
    attention, mlp = _dense_parts(target, "dflash")
    return _head(
        target,
        "DFlash",
        layers=((Layer(mixer=attention, mlp=mlp), layers),),
        block_size=block,
        fusion=Fusion(inputs=5 * target.hidden_size, norms=1),
        own_head=False,
    )


def mtp_head(target: Architecture) -> Architecture:
    """Return the target's multi-token-prediction block: one more layer of the target's last kind.

    Embedding and LM head are shared with the target.

    Raises
    ------
    ArchitectureError
        When the target carries no such block.

    References
    ----------
    .. [1] DeepSeek-AI, DeepSeek-V3 Technical Report, section 2.2, arXiv:2412.19437.
    """
    if not target.mtp_layers:
        raise ArchitectureError(f"{target.name} carries no MTP block (num_nextn_predict_layers)")
    return _head(
        target,
        "MTP",
        layers=((target.mtp_layer or target.layers[-1][0], 1),),
        fusion=Fusion(inputs=2 * target.hidden_size, norms=2),
        own_head=False,
        quantisation=target.quantisation if target.mtp_quantised else None,
        expert_quantisation=target.expert_quantisation if target.mtp_quantised else None,
    )


def _head(target: Architecture, kind: str, **fields: Any) -> Architecture:
    return replace(
        target,
        **{
            "name": f"{kind} head for {target.name}",
            "source": f"derived from {target.name}",
            "model_type": kind.lower(),
            "head_kind": kind.lower(),
            "own_embedding": False,
            "tied_embeddings": False,
            "quantisation": None,
            "expert_quantisation": None,
            "position_params": 0,
            "encoder_params": 0,
            "norm_size": 1,
            "mtp_layers": 0,
            "mtp_layer": None,
            **fields,
        },
    )


def _dense_parts(target: Architecture, kind: str) -> tuple[Attention, MLP]:
    """Return the target's attention (no window) and a dense MLP of its width, without biases."""
    attention = next(
        (x.mixer for x, _ in reversed(target.layers) if isinstance(x.mixer, Attention)), None
    )
    if attention is None or attention.cross:
        kinds = ", ".join(target.layers_by_kind())
        raise ArchitectureError(
            f"an {kind} head cannot be derived from {target.name} ({kinds}): give the head's own "
            "config.json (--draft)"
        )
    if target.dense_width is None:
        raise ArchitectureError(
            f"an {kind} head cannot be derived from {target.name} (no intermediate_size): "
            "give the head's own config.json (--draft)"
        )
    plain = Attention(
        heads=attention.heads, kv_heads=attention.kv_heads, head_dim=attention.head_dim
    )
    return plain, MLP(width=target.dense_width)
