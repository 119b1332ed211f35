"""Routed experts in place of a layer's MLP: only those that a row chose are read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specmodel.architectures import MoE


class Experts(nn.Module):  # type: ignore[misc]
    """A router, gated experts of which each row takes `top_k`, and an optional shared expert.

    A row's experts are those of its highest scores, weighted by the softmax over them. Models
    that score by a sigmoid, add a correction or choose among groups differ in the choice, not in
    what is read and multiplied.

    Rows are sorted by expert, so that each chosen expert's weights are read once a pass, by one
    grouped product; nothing waits for the device.

    Parameters
    ----------
    sizes : MoE
    hidden : int
    **kind
        `dtype` and `device`, as torch takes them.
    """

    def __init__(self, sizes: MoE, hidden: int, **kind: Any) -> None:
        super().__init__()
        self.sizes = sizes

        def weight(*shape: int) -> Any:
            return nn.Parameter(torch.empty(*shape, **kind))

        self.router = weight(sizes.experts, hidden)
        self.gate_up = weight(sizes.experts, 2 * sizes.width, hidden)
        self.down = weight(sizes.experts, hidden, sizes.width)
        shared = sizes.shared_width
        self.shared_gate_up = weight(2 * shared, hidden) if shared else None
        self.shared_down = weight(hidden, shared) if shared else None
        self.shared_gate = weight(1, hidden) if sizes.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """Return what the experts make of x (batch, width, hidden)."""
        found = self._routed(x.flatten(0, -2)).view_as(x)
        if self.shared_gate_up is None:
            return found
        gate, up = F.linear(x, self.shared_gate_up).chunk(2, -1)
        shared = F.linear(F.silu(gate) * up, self.shared_down)
        if self.shared_gate is not None:
            shared = shared * F.linear(x, self.shared_gate).sigmoid()
        return found + shared

    def _routed(self, x: Tensor) -> Tensor:
        top_k = self.sizes.top_k
        scores, chosen = F.linear(x, self.router).topk(top_k)
        ranked, order = chosen.flatten().sort()
        experts = torch.arange(self.sizes.experts, device=x.device)
        ends = torch.searchsorted(ranked, experts, right=True, out_int32=True)
        gate, up = _grouped(x[order // top_k], self.gate_up, ends).chunk(2, -1)
        found = _grouped(F.silu(gate) * up, self.down, ends)
        found = torch.empty_like(found).index_copy(0, order, found)  # back in the rows' order
        return (scores.softmax(-1)[:, None] @ found.view(len(x), top_k, -1))[:, 0]


def _grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows with its matrix.

    Parameters
    ----------
    x : Tensor (rows, inputs)
        Sorted by expert.
    weights : Tensor (experts, outputs, inputs)
    ends : Tensor (experts,) of int32
        Where each expert's rows end.
    """
    if x.device.type != "cpu":
        return F.grouped_mm(x, weights.transpose(1, 2), offs=ends)
    parts, start = [], 0  # there grouped_mm runs a product for each expert, idle ones too
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            parts.append(F.linear(x[start:end], weights[expert]))
        start = end
    return torch.cat(parts)
