"""Keys and values of a batch of sequences, preallocated, each sequence with its own length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from calibrate.bench import free_memory
from calibrate.engine.config import DecoderConfig
from specmodel.errors import DomainError


class Cache:
    """A KV cache in which the first `lengths[b]` slots of sequence b are committed.

    A pass writes behind the committed slots; what stood there before counts for nothing (its
    attention weight is exactly zero, and it is finite where logits were). So a length is all it
    takes to commit or to roll back.

    Parameters
    ----------
    config : DecoderConfig
    batch, capacity : int
        Sequences, and slots of each. [token]
    dtype, device : as torch takes them

    Attributes
    ----------
    keys, values : Tensor (layers, batch, kv_heads, capacity, head_dim)
        Of latent attention one vector a token is stored: values are a view of the keys' first
        ``kv_lora_rank`` columns.
    latent : int or None
        Of latent attention that number of columns.
    lengths : Tensor (batch,) of int64
        Changed in place, so that captured graphs see it.
    longest : int
        The largest of `lengths`, known without waiting for the device. [token]

    Raises
    ------
    DomainError
        When it needs more memory than is free.
    """

    def __init__(
        self,
        config: DecoderConfig,
        batch: int,
        capacity: int,
        *,
        dtype: Any = torch.float32,
        device: Any = "cpu",
    ) -> None:
        for name, value in (("batch", batch), ("capacity", capacity)):
            if value < 1:
                raise DomainError(f"{name} must be >= 1; got {value}")
        shape = (config.layers, batch, config.kv_heads, capacity, config.head_dim)
        self.latent = None if config.latent is None else config.latent.kv_lora_rank
        size = dtype.itemsize * torch.Size(shape).numel() * (2 if self.latent is None else 1)
        if size > (free := free_memory(torch.device(device))):
            raise DomainError(
                f"a cache of {batch} sequences of {capacity} tokens takes {size / 1e9:.3g} GB; "
                f"{free / 1e9:.3g} GB are free"
            )
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        if self.latent is None:
            self.values = torch.zeros_like(self.keys)
        else:
            self.values = self.keys[..., : self.latent]
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.longest = 0

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return int(self.keys.shape[1])

    @property
    def capacity(self) -> int:
        """Slots of each sequence. [token]"""
        return int(self.keys.shape[3])

    def advance(self, counts: Tensor | int) -> None:
        """Commit the first `counts` (batch,) of the positions that the last pass wrote."""
        self._set(self.lengths + counts)

    def rollback(self, lengths: Tensor | int) -> None:
        """Go back to `lengths` (batch,), none of them above the present ones."""
        new = self.lengths * 0 + lengths
        if bool((new > self.lengths).any()):
            raise DomainError(f"no rollback from {self.lengths.tolist()} to {new.tolist()} tokens")
        self._set(new)

    def keep(self, nodes: Tensor, counts: Tensor) -> None:
        """Commit a path of a tree: move its nodes together, then advance by their number.

        Parameters
        ----------
        nodes : Tensor (batch, n) of int64
            Columns of the last pass that the path takes, increasing from root to leaf.
        counts : Tensor (batch,) of int64
            How many of `nodes` count; the rest may be any column.
        """
        rows = torch.arange(self.batch, device=self.lengths.device)[:, None]
        old = self.lengths[:, None] + nodes
        new = self.lengths[:, None] + torch.arange(nodes.shape[1], device=nodes.device)
        for stored in (self.keys, self.values) if self.latent is None else (self.keys,):
            by_slot = stored.permute(1, 3, 0, 2, 4)  # a view: (batch, capacity, layers, ...)
            by_slot[rows, new] = by_slot[rows, old]
        self.advance(counts)

    def select(self, rows: Tensor) -> Cache:
        """Return a copy of some sequences (n,), in that order; a row may be taken twice."""
        return self._copy(lambda stored: stored[:, rows], self.lengths[rows])

    def clone(self) -> Cache:
        """Return a copy."""
        return self._copy(torch.clone, self.lengths.clone())

    def _set(self, lengths: Tensor) -> None:
        shortest, longest = torch.stack(lengths.aminmax()).tolist()  # the one wait
        if not 0 <= shortest <= longest <= self.capacity:
            raise DomainError(
                f"lengths must be in [0, {self.capacity}] (the capacity); got {lengths.tolist()}"
            )
        self.lengths.copy_(lengths)
        self.longest = longest

    def _copy(self, taken: Callable[[Tensor], Tensor], lengths: Tensor) -> Cache:
        result = Cache.__new__(Cache)
        result.keys, result.lengths, result.latent = taken(self.keys), lengths, self.latent
        if self.latent is None:
            result.values = taken(self.values)
        else:
            result.values = result.keys[..., : self.latent]
        result.longest = int(lengths.max())
        return result
