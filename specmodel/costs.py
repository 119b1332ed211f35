"""FLOPs and bytes of one forward pass, operator by operator. Knows no hardware.

One multiply-add is 2 FLOP. A pass evaluates W positions of each of B sequences that hold L
tokens of context; the new tokens are left out of the context. Everything is per device:
tensor parallelism is applied to the architecture first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.architectures import Architecture, LatentAttention, Layer, Linear, MoE
from specmodel.dtypes import BYTES
from specmodel.errors import DomainError, real_array, unwrap, whole_array

Kind = Literal["gemm", "attention", "experts", "elementwise", "collective"]
Floats = NDArray[np.float64]
Numbers = float | Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operator:
    """One kernel of a pass, run `count` times. Array fields broadcast over B, W and L.

    Attributes
    ----------
    name, kind : str
        Which operator; which family of kernels it belongs to.
    count : float or ndarray
        How often it runs in the pass. [-]
    flops : float or ndarray
        FLOPs of one run; elementwise work is not counted. [FLOP]
    weight_bytes, kv_bytes, activation_bytes, link_bytes : float or ndarray
        Bytes of one run: weights streamed, KV cache read, activations moved, and bytes that
        cross the interconnect. [B]
    compute_dtype : str or None
        Format the multiplications run in; None where there are none.
    group : str
        The heading it is reported under.
    """

    name: str
    kind: Kind
    group: str
    count: Numbers = 1.0
    flops: Numbers = 0.0
    weight_bytes: Numbers = 0.0
    kv_bytes: Numbers = 0.0
    activation_bytes: Numbers = 0.0
    link_bytes: Numbers = 0.0
    compute_dtype: str | None = None


def experts_touched(experts: ArrayLike, top_k: ArrayLike, tokens: ArrayLike) -> Floats:
    r"""Return the expected number of distinct experts that `tokens` tokens are routed to.

    .. math:: E \left(1 - (1 - k/E)^T\right)

    Parameters
    ----------
    experts, top_k : array_like
        Experts of a layer, E, and experts that one token uses, k. [-]
    tokens : array_like
        Tokens routed uniformly and independently, T; may be fractional. [token]

    Returns
    -------
    float or ndarray
        [-], 0 to experts.

    Raises
    ------
    DomainError
        When an argument is out of range.

    Examples
    --------
    >>> float(experts_touched(4, 2, 3))
    3.5
    """
    e = real_array(experts, "experts", low=1)
    t = real_array(tokens, "tokens", low=0)
    k = real_array(top_k, "top_k", low=0)
    if np.any(k > e):
        raise DomainError(f"top_k must be at most the {e.max():g} experts; got {k.max():g}")
    every = np.where(t > 0, e, 0.0)
    share = np.where(k < e, k / e, 0.5)  # top_k = E touches all: its logarithm is not needed
    spread = -e * np.expm1(t * np.log1p(-share))
    return unwrap(np.where(k == e, every, np.where(t == 1, k, spread)))


def pass_operators(
    architecture: Architecture,
    *,
    B: ArrayLike,
    W: ArrayLike = 1,
    L: ArrayLike = 0,
    tp: int = 1,
    kv_reread: float = 0.0,
    expert_overlap: float = 0.0,
    head_rows: ArrayLike | None = None,
    fuse: bool = True,
) -> tuple[Operator, ...]:
    """Return the operators of one pass on one device.

    Parameters
    ----------
    architecture : Architecture
        The whole model; it is sharded here.
    B, W, L : array_like
        Sequences [-], positions per sequence [token], context [token]. Broadcast.
    tp : int
        Tensor-parallel degree; adds all-reduces when above 1.
    kv_reread : float
        r: 0, the KV cache is read once for all W positions; 1, once per position.
    expert_overlap : float
        Share of routing choices that extra positions of a sequence have in common with its
        first: 0 independent, 1 identical. B W rows route like B (1 + (W - 1)(1 - overlap)).
    head_rows : array_like, optional
        Rows per sequence that go through the LM head; W by default. [token]
    fuse : bool
        Whether the input fusion of a draft head runs in this pass.

    Raises
    ------
    DomainError
        When an argument is out of range or `tp` does not divide the model.
    """
    sharded = architecture.shard(int(whole_array(tp, "tp", low=1)))
    batch = real_array(B, "batch", low=0)
    width = real_array(W, "W", low=0, unit="token")
    context = real_array(L, "context", low=0, unit="token")
    reread = real_array(kv_reread, "kv_reread", low=0, high=1)
    overlap = real_array(expert_overlap, "expert_overlap", low=0, high=1)
    rows = batch * width
    routed = batch * (1 + np.maximum(width - 1, 0) * (1 - overlap))
    operators: list[Operator] = []
    for layer, count in sharded.distinct_layers().items():
        operators += _attention_operators(sharded, layer, count, batch, width, context, reread)
        operators += _mlp_operators(sharded, layer, count, rows, routed)
    fusion = sharded.fusion_linear if fuse else None
    if fusion is not None:
        operators.append(_gemm(sharded, fusion, 1, rows, "weight GEMMs"))
    hidden = architecture.hidden_size * BYTES[architecture.dtype]
    extra_norms = int(sharded.final_norm) + (
        sharded.fusion.norms if fusion is not None and sharded.fusion is not None else 0
    )
    operators.append(_norm(sharded, extra_norms, rows))
    if sharded.layers:  # a Medusa head starts from the target's feature, not from a token
        operators.append(
            Operator(
                name="embedding",
                kind="elementwise",
                group="elementwise",
                activation_bytes=2 * rows * hidden,
            )
        )
    head = rows if head_rows is None else batch * real_array(head_rows, "head_rows", low=0)
    operators.append(_gemm(sharded, sharded.lm_head, 1, head, "LM head"))
    if tp > 1:
        operators += _collectives(architecture, tp, rows, head)
    return tuple(operators)


def _gemm(a: Architecture, linear: Linear, count: float, rows: Floats, group: str) -> Operator:
    """A matrix product of `rows` rows: weights once, activations in and out."""
    inputs, outputs = linear.inputs * linear.copies, linear.outputs * linear.copies
    return Operator(
        name=linear.name,
        kind="gemm",
        group=group,
        count=count,
        flops=2.0 * rows * linear.weights,
        weight_bytes=a.linear_bytes(linear),
        activation_bytes=rows * (inputs + outputs) * BYTES[a.dtype],
        compute_dtype=a.weight_dtype if linear.quantised else a.dtype,
    )


def _norm(a: Architecture, count: float, rows: Floats) -> Operator:
    """A norm with its residual addition: two vectors read, two written."""
    elements = a.hidden_size
    return Operator(
        name="norm",
        kind="elementwise",
        group="elementwise",
        count=count,
        weight_bytes=elements * BYTES[a.dtype],
        activation_bytes=4.0 * rows * elements * BYTES[a.dtype],
    )


def _attention_operators(
    a: Architecture,
    layer: Layer,
    count: int,
    batch: Floats,
    width: Floats,
    context: Floats,
    reread: Floats,
) -> list[Operator]:
    attention = layer.attention
    rows = batch * width
    value = BYTES[a.dtype]
    linears = list(attention.linears(a.hidden_size))
    operators = [_gemm(a, linear, count, rows, "weight GEMMs") for linear in linears]
    operators.append(_norm(a, count * layer.norms, rows))
    if attention.norm_params:
        operators.append(
            Operator(  # read and write what is normalised
                name="inner norm",
                kind="elementwise",
                group="elementwise",
                count=count,
                weight_bytes=attention.norm_params * value,
                activation_bytes=2.0 * rows * attention.normed_elements * value,
            )
        )
    kept = np.minimum(context, attention.window) if attention.window else context
    cached = attention.kv_elements * BYTES[a.kv_dtype]
    if isinstance(attention, LatentAttention):
        q_width = attention.heads * (attention.kv_lora_rank + attention.rope_dim)
        out_width = attention.heads * attention.kv_lora_rank
    else:
        q_width = out_width = attention.heads * attention.head_dim
    operators.append(
        Operator(  # rotary embedding in place, new keys and values into the cache
            name="rotary and KV write",
            kind="elementwise",
            group="elementwise",
            count=count,
            activation_bytes=rows * (2 * q_width * value + attention.kv_elements * value + cached),
        )
    )
    operators.append(
        Operator(
            name="attention",
            kind="attention",
            group="attention",
            count=count,
            flops=rows * kept * attention.flops_per_pair,
            kv_bytes=batch * kept * cached * (1 + reread * np.maximum(width - 1, 0)),
            activation_bytes=rows * (q_width + out_width) * value,
            compute_dtype=a.dtype,
        )
    )
    return operators


def _mlp_operators(
    a: Architecture, layer: Layer, count: int, rows: Floats, routed: Floats
) -> list[Operator]:
    mlp = layer.mlp
    value = BYTES[a.dtype]
    operators = [
        _gemm(a, linear, count, rows, "weight GEMMs") for linear in mlp.linears(a.hidden_size)
    ]
    width = mlp.shared_width if isinstance(mlp, MoE) else mlp.width
    if width:
        operators.append(_activation(count, rows, width, value))
    if not isinstance(mlp, MoE):
        return operators
    touched = experts_touched(mlp.experts, mlp.top_k, routed)
    hidden, pairs = a.hidden_size, rows * mlp.top_k
    up = 2 * a.matrix_bytes(hidden, mlp.width, quantised=True)
    down = a.matrix_bytes(mlp.width, hidden, quantised=True)
    for name, weights, elements, activations in (
        ("experts gate and up", up, 2 * hidden * mlp.width, hidden + 2 * mlp.width),
        ("experts down", down, hidden * mlp.width, mlp.width + hidden),
    ):
        operators.append(
            Operator(
                name=name,
                kind="experts",
                group="experts",
                count=count,
                flops=2.0 * pairs * elements,
                weight_bytes=touched * weights,
                activation_bytes=pairs * activations * value,
                compute_dtype=a.weight_dtype,
            )
        )
    operators.append(_activation(count, pairs, mlp.width, value))
    for name, moved in (("top-k", rows * mlp.experts), ("combine", (pairs + rows) * hidden)):
        operators.append(
            Operator(
                name=name,
                kind="elementwise",
                group="elementwise",
                count=count,
                activation_bytes=moved * value,
            )
        )
    return operators


def _activation(count: float, rows: Floats, width: int, value: float) -> Operator:
    """SiLU times gate: two vectors read, one written."""
    return Operator(
        name="activation",
        kind="elementwise",
        group="elementwise",
        count=count,
        activation_bytes=3.0 * rows * width * value,
    )


def _collectives(a: Architecture, tp: int, rows: Floats, head: Floats) -> list[Operator]:
    """Two all-reduces a layer, one after the embedding, and an all-gather of the logits."""
    value = BYTES[a.dtype]
    reduced = 2.0 * (tp - 1) / tp * rows * a.hidden_size * value
    gathered = (tp - 1) / tp * head * a.head_vocab_size * value
    return [
        Operator(
            name="all-reduce",
            kind="collective",
            group="collectives",
            count=2 * a.n_layers + (1 if a.layers else 0),
            link_bytes=reduced,
        ),
        Operator(
            name="all-gather logits", kind="collective", group="collectives", link_bytes=gathered
        ),
    ]
