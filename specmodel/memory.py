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
        Of the target's device. [B]
    draft_capacity : float or None
        Of the drafter's own device, which then holds `draft_weights` and `draft_kv`; None where
        target and drafter share a device. [B]
    replicas : int
        Among which the sequences of a batch are split.
    """

    target_weights: Floats
    draft_weights: Floats
    target_kv: Floats
    draft_kv: Floats
    capacity: float
    draft_capacity: float | None = None
    replicas: int = 1

    def total(self, batch: ArrayLike) -> Floats:
        """Return the bytes in use at a batch, on the target's device with most sequences. [B]"""
        weights, kv = self._beside_the_target()
        return unwrap(weights + self._sequences(batch) * kv)

    def draft_total(self, batch: ArrayLike) -> Floats:
        """Return the bytes in use on the drafter's own device; 0 where it has none. [B]"""
        if self.draft_capacity is None:
            return np.zeros_like(self.total(batch))
        return unwrap(self.draft_weights + self._sequences(batch) * self.draft_kv)

    @property
    def max_batch(self) -> NDArray[np.int_]:
        """Largest batch that fits on every device; 0 where no sequence does."""
        weights, kv = self._beside_the_target()
        own = _most(self.capacity, weights, kv)
        if self.draft_capacity is not None:
            own = np.minimum(own, _most(self.draft_capacity, self.draft_weights, self.draft_kv))
        return np.asarray(own * self.replicas).astype(int)

    def target_fits(self, batch: ArrayLike) -> NDArray[np.bool_]:
        """Return whether a batch fits on the target's device."""
        return np.asarray(self.total(batch) <= self.capacity)

    def draft_fits(self, batch: ArrayLike) -> NDArray[np.bool_]:
        """Return whether a batch fits on the drafter's own device; True where it has none."""
        room = np.inf if self.draft_capacity is None else self.draft_capacity
        return np.asarray(self.draft_total(batch) <= room)

    def fits(self, batch: ArrayLike) -> NDArray[np.bool_]:
        """Return whether a batch fits on every device."""
        return self.target_fits(batch) & self.draft_fits(batch)

    def _sequences(self, batch: ArrayLike) -> Floats:
        return np.ceil(np.asarray(batch, dtype=np.float64) / self.replicas)

    def _beside_the_target(self) -> tuple[Floats, Floats]:
        """Return the weights on the target's device, and the KV of a sequence there. [B]"""
        if self.draft_capacity is not None:
            return self.target_weights, self.target_kv
        return self.target_weights + self.draft_weights, self.target_kv + self.draft_kv


def _most(capacity: float, weights: Floats, kv: Floats) -> Floats:
    """Return the sequences that fit beside some weights; infinite where they take no memory."""
    free = capacity - weights
    with np.errstate(divide="ignore", invalid="ignore"):
        sequences = np.floor(np.maximum(free, 0.0) / kv)
    return np.where(free < 0, 0.0, np.where(kv > 0, sequences, np.inf))


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
    """Return what a deployment takes on its fullest device, and on the drafter's own.

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
        Division over devices, of the target, and of the drafter unless it has its own tp or its
        own device (tp 1 there unless it says so). One device by default.
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
    draft_weights, draft_kv = _drafting(drafter, target, drafts, longest, layout)
    weights = max(_weights(one, i, len(stages)) for i, one in enumerate(stages))
    return Memory(
        target_weights=np.asarray((1 - offload) * weights),
        draft_weights=draft_weights,
        target_kv=np.asarray(np.max(np.broadcast_arrays(*target_kv), axis=0)),
        draft_kv=draft_kv,
        capacity=device.memory_capacity,
        draft_capacity=drafter.device.memory_capacity if drafter and drafter.device else None,
        replicas=layout.dp,
    )


def _drafting(
    drafter: Drafter | None, target: Architecture, drafts: Floats, longest: Floats, layout: Layout
) -> tuple[Floats, Floats]:
    """Return a drafter's weights and the KV of one sequence, on a device that holds it. [B]"""
    weights = kv = np.asarray(0.0)
    if drafter is None:
        return weights, kv
    held, cached = drafter.weights(target), drafter.cache(target)
    if drafter.device is not None and held is None:  # what it shares with the target is not there
        held = next((one.architecture for one in drafter.passes(target, 1)), None)
        cached = cached or held
    degree = drafter.tp or (layout.tp if drafter.device is None else 1)
    own = replace(layout, tp=degree, pp=1)  # on the last stage, whole
    if held is not None:
        share = own.where_spread(held).shard(held).weight_bytes
        weights = np.asarray(drafter.copies(drafts) * share)
    if cached is not None:
        kept = own.where_spread(cached).shard(cached)
        kv = np.asarray(kept.kv_bytes(longest) + drafter.rows(drafts) * kept.state_bytes)
    return weights, kv


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
    target and drafter count; None when none of them fits. The drafter's own device is not among
    them: None too where the batch does not fit there, as no more of the target's would help.
    """
    layout = layout or Layout()
    for tp in range(1, _most_heads(target) + 1):
        wanted = replace(layout, tp=tp)
        try:
            need = memory(device, target, drafter, k=k, L=L, layout=wanted, offload=offload)
        except DomainError:  # it does not divide
            continue
        if not need.draft_fits(batch):
            return None
        if need.fits(batch):
            return wanted.devices
    return None


def _most_heads(target: Architecture) -> int:
    heads = [layer.mixer.heads for layer, _ in target.layers if layer.mixer is not None]
    return max(heads, default=1)
