"""What target and drafter take in device memory, and the largest batch that fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, repeat

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.architectures import Architecture
from specmodel.costs import Layout
from specmodel.drafters import Drafter
from specmodel.dtypes import BYTES
from specmodel.errors import DomainError, real_array, unwrap, whole_array
from specmodel.hardware import Device

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """Bytes on the fullest device. Arrays broadcast over k and L.

    Attributes
    ----------
    target_weights, draft_weights : float or ndarray
        [B]
    target_kv, draft_kv : float or ndarray
        KV cache of one sequence at its longest, candidate positions included; a recurrent
        state is kept for each of them. [B]
    capacity : float
        [B]
    replicas : int
        Among which the sequences of a batch are split.
    """

    target_weights: Floats
    draft_weights: Floats
    target_kv: Floats
    draft_kv: Floats
    capacity: float
    replicas: int = 1

    def total(self, batch: ArrayLike) -> Floats:
        """Return the bytes in use at a batch, on the device with most sequences. [B]"""
        own = np.ceil(np.asarray(batch, dtype=np.float64) / self.replicas)
        weights = self.target_weights + self.draft_weights
        return unwrap(weights + own * (self.target_kv + self.draft_kv))

    @property
    def max_batch(self) -> NDArray[np.int_]:
        """Largest batch that fits; 0 where no sequence does."""
        free = self.capacity - self.target_weights - self.draft_weights
        own = np.floor(np.maximum(free, 0.0) / (self.target_kv + self.draft_kv))
        return np.asarray(own * self.replicas).astype(int)

    def fits(self, batch: ArrayLike) -> NDArray[np.bool_]:
        """Return whether a batch fits."""
        return np.asarray(self.total(batch) <= self.capacity)


def memory(
    device: Device,
    target: Architecture,
    drafter: Drafter | None = None,
    *,
    k: ArrayLike = 0,
    L: ArrayLike = 0,
    layout: Layout | None = None,
    offload: float = 0.0,
) -> Memory:
    """Return what a deployment takes on its fullest device.

    Nothing is set aside for activations, graphs or the allocator; a serving engine keeps
    some of the capacity for those. In a pipeline the first stages have a layer more where
    layers do not divide evenly, the first has the embedding, the last LM head and drafter; the
    most weights and the most KV of any stage are taken together.

    Parameters
    ----------
    device, target
    drafter : Drafter, optional
        None: plain decoding. At k = 0 it takes memory too.
    k : array_like
        Draft tokens per round; the W candidate positions are held. [token]
    L : array_like
        Context. [token]
    layout : Layout, optional
        Division over devices, of the target, and of the drafter unless it has its own tp. One
        device by default.
    offload : float
        Share of the target's weights that stay in host memory. [-]

    Raises
    ------
    DomainError
        When an argument is out of range, or the layout does not divide a model.
    """
    layout = layout or Layout()
    context = real_array(L, "context", low=0, unit="token")
    drafts = whole_array(k, "k", unit="token")
    candidates = drafts + 1 if drafter is None else drafter.rows(drafts)
    longest = context + candidates
    stages = _stages(layout.shard(target), layout.pp)
    target_kv = [one.kv_bytes(longest) + candidates * one.state_bytes for one in stages]
    draft_weights = draft_kv = np.asarray(0.0)
    if drafter is not None and drafter.device is None:
        own = replace(layout, tp=drafter.tp or layout.tp, pp=1)  # on the last stage, whole
        held = drafter.weights(target)
        if held is not None:
            share = own.where_spread(held).shard(held).weight_bytes
            draft_weights = np.asarray(drafter.copies(drafts) * share)
        cached = drafter.cache(target)
        if cached is not None:
            kept = own.where_spread(cached).shard(cached)
            draft_kv = np.asarray(kept.kv_bytes(longest) + candidates * kept.state_bytes)
    weights = max(_weights(one, i, len(stages)) for i, one in enumerate(stages))
    return Memory(
        target_weights=np.asarray((1 - offload) * weights),
        draft_weights=draft_weights,
        target_kv=np.asarray(np.max(np.broadcast_arrays(*target_kv), axis=0)),
        draft_kv=draft_kv,
        capacity=device.memory_capacity,
        replicas=layout.dp,
    )


def _stages(share: Architecture, pp: int) -> list[Architecture]:
    """Return the pipeline's stages as models of their layers."""
    if pp == 1:
        return [share]
    layers = list(chain.from_iterable(repeat(layer, n) for layer, n in share.layers))
    sizes = [len(layers) // pp + (i < len(layers) % pp) for i in range(pp)]
    ends = np.cumsum(sizes)
    return [
        replace(share, layers=tuple((layer, 1) for layer in layers[end - size : end]))
        for size, end in zip(sizes, ends, strict=True)
    ]


def _weights(stage: Architecture, index: int, stages: int) -> float:
    """Return the bytes of a stage's weights: embedding in the first, LM head in the last."""
    if stages == 1:
        return stage.weight_bytes
    ends = replace(stage, layers=()).weight_bytes  # embedding and LM head, tied ones once
    embedding = stage.embedding_params * BYTES[stage.dtype] if index == 0 else 0.0
    head = stage.linear_bytes(stage.lm_head) if index == stages - 1 else 0.0
    return stage.weight_bytes - ends + embedding + head


def devices_needed(
    device: Device,
    target: Architecture,
    drafter: Drafter | None = None,
    *,
    batch: int,
    k: int = 0,
    L: float = 0,
    layout: Layout | None = None,
    offload: float = 0.0,
) -> int | None:
    """Return the devices of the smallest tensor-parallel degree at which the deployment fits.

    The rest of the layout stays as it is. Only degrees that divide the heads and widths of
    target and drafter count; None when none of them fits.
    """
    layout = layout or Layout()
    for tp in range(1, _most_heads(target) + 1):
        wanted = replace(layout, tp=tp)
        try:
            need = memory(device, target, drafter, k=k, L=L, layout=wanted, offload=offload)
        except DomainError:  # it does not divide
            continue
        if need.fits(batch):
            return wanted.devices
    return None


def _most_heads(target: Architecture) -> int:
    heads = [layer.mixer.heads for layer, _ in target.layers if layer.mixer is not None]
    return max(heads, default=1)
