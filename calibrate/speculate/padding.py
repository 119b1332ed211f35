"""The same function, wider: zeros where a decoder or a head is narrower than wanted.

A target that can be trained in minutes costs next to nothing to run; padded, it costs what its
new sizes cost, with the acceptance of what was trained.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from calibrate.engine.decoder import Decoder
from calibrate.speculate.heads import FeatureHead, MedusaHeads


@torch.no_grad()  # type: ignore[untyped-decorator]
def padded(
    decoder: Decoder,
    *,
    hidden: int,
    intermediate: int,
    dtype: Any = torch.float32,
    device: Any = "cpu",
) -> Decoder:
    """Return a wider decoder that computes the same, with zeros where it is wider.

    The mean square over more positions is smaller by the ratio of the widths, which weights of
    the norms and their epsilon make up for.

    Parameters
    ----------
    decoder : Decoder
        Of grouped attention without q and k norms.
    hidden, intermediate : int
        At least the decoder's.
    dtype, device : as torch takes them
    """
    old = decoder.config
    ratio = old.hidden / hidden
    wide = Decoder(
        replace(old, hidden=hidden, intermediate=intermediate, norm_eps=old.norm_eps * ratio),
        dtype=dtype,
        device=device,
    )
    _fill(wide, decoder, ratio)
    return wide


@torch.no_grad()  # type: ignore[untyped-decorator]
def padded_head(head: Any, small: Decoder, target: Decoder) -> Any:
    """Return a head of the small target's as one of the padded target's: the same function.

    Parameters
    ----------
    head : FeatureHead or MedusaHeads
    small, target : Decoder
        The one that it was trained with, and that one `padded`.
    """
    kind = {"dtype": target.dtype, "device": target.device}
    wide: Any
    if isinstance(head, MedusaHeads):
        wide = MedusaHeads(target.config.hidden, target.config.vocab, head.count, **kind)
    else:
        wide = FeatureHead(target.config, norms=head.norm is not None, **kind)
    _fill(wide, head, small.config.hidden / target.config.hidden)
    return wide


def _fill(wide: Any, narrow: Any, ratio: float) -> None:
    """Write weights into wider ones, zeros where they are wider; norms scaled for `ratio`."""
    before = dict(narrow.named_parameters())
    for name, weight in wide.named_parameters():
        source = before[name]
        weight.zero_()
        if name.endswith("norm"):
            source = source * math.sqrt(ratio)
        # gate and up are one matrix, one above the other; fused inputs stand side by side
        halves = {"gate_up": 0, "fuse": 1}.get(name.rpartition(".")[2])
        pairs = [(weight, source)]
        if halves is not None:
            pairs = list(zip(weight.chunk(2, halves), source.chunk(2, halves), strict=True))
        for part, kept in pairs:
            part[tuple(slice(n) for n in kept.shape)] = kept
