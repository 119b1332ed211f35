"""What target and drafter take in device memory, and the largest batch that fits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from specmodel.architectures import Architecture
from specmodel.costs import Layout
from specmodel.drafters import Drafter
from specmodel.errors import DomainError, real_array, whole_array
from specmodel.hardware import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes per device.

    Attributes
    ----------
    target_weights, draft_weights : float
        [B]
    target_kv, draft_kv : float
        KV cache that one sequence adds at its longest, candidate positions included; a
        recurrent state is kept for each of them. Of `dp` replicas: the mean, so that the total
        holds for a batch of sequences split over them. [B]
    capacity : float
        [B]
    """

    target_weights: float
    draft_weights: float
    target_kv: float
    draft_kv: float
    capacity: float

    def total(self, batch: float) -> float:
        """Return the bytes in use at a batch. [B]"""
        weights = self.target_weights + self.draft_weights
        return weights + batch * (self.target_kv + self.draft_kv)

    @property
    def max_batch(self) -> int:
        """Largest batch that fits; 0 when the weights alone do not."""
        free = self.capacity - self.target_weights - self.draft_weights
        return max(0, math.floor(free / (self.target_kv + self.draft_kv))) if free > 0 else 0


def memory(
    device: Device,
    target: Architecture,
    drafter: Drafter | None = None,
    *,
    k: int = 0,
    L: float = 0,
    layout: Layout | None = None,
    offload: float = 0.0,
) -> Memory:
    """Return what a deployment takes on its fullest device.

    Nothing is set aside for activations, graphs or the allocator; a serving engine keeps
    some of the capacity for those.

    Parameters
    ----------
    device, target
    drafter : Drafter, optional
        None: plain decoding.
    k : int
        Draft tokens per round; the W candidate positions are held. [token]
    L : float
        Context. [token]
    layout : Layout, optional
        Division over devices, of the target, and of the drafter unless it has its own tp (a
        pipeline's last stage holds it whole). One device by default.
    offload : float
        Share of the target's weights that stay in host memory. [-]
    """
    layout = layout or Layout()
    real_array(L, "context", low=0, unit="token")
    whole_array(k, "k", unit="token")
    share = layout.shard(target)
    stage = -(-target.n_layers // layout.pp) / target.n_layers  # of the layers, on the fullest
    each = stage / layout.dp  # of what all sequences keep: a replica has its own
    candidates = k + 1 if drafter is None else float(drafter.rows(k))
    longest = L + candidates
    draft_weights = draft_kv = 0.0
    if drafter is not None and drafter.device is None:
        own = replace(layout, tp=drafter.tp or layout.tp, pp=1)
        held = drafter.weights(target)
        if held is not None:
            draft_weights = drafter.copies(k) * own.where_spread(held).shard(held).weight_bytes
        cached = drafter.cache(target)
        if cached is not None:
            kept = own.where_spread(cached).shard(cached)
            draft_kv = (kept.kv_bytes(longest) + candidates * kept.state_bytes) / layout.dp
    return Memory(
        target_weights=(1 - offload) * stage * share.weight_bytes,
        draft_weights=draft_weights,
        target_kv=each * (share.kv_bytes(longest) + candidates * share.state_bytes),
        draft_kv=draft_kv,
        capacity=device.memory_capacity,
    )


def devices_needed(
    device: Device,
    target: Architecture,
    drafter: Drafter | None = None,
    *,
    batch: int,
    k: int = 0,
    L: float = 0,
    offload: float = 0.0,
) -> int | None:
    """Return the smallest tensor-parallel degree at which the deployment fits.

    Only degrees that divide the heads and widths of target and drafter count; None when none
    of them fits.
    """
    for tp in range(1, _most_heads(target) + 1):
        if not _divides(tp, target, drafter):
            continue
        need = memory(device, target, drafter, k=k, L=L, layout=Layout(tp=tp), offload=offload)
        if need.total(batch) <= need.capacity:
            return tp
    return None


def _divides(tp: int, target: Architecture, drafter: Drafter | None) -> bool:
    """Return whether target and drafter can be sharded to this degree."""
    parts = [target]
    if drafter is not None and drafter.tp is None and drafter.device is None:
        parts += [a for a in (drafter.weights(target), drafter.cache(target)) if a is not None]
    try:
        for part in parts:
            part.shard(tp)
    except DomainError:
        return False
    return True


def _most_heads(target: Architecture) -> int:
    heads = [layer.mixer.heads for layer, _ in target.layers if layer.mixer is not None]
    return max(heads, default=1)
