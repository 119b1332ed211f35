"""Multi-head latent attention (MLA) over a cache of one latent vector a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specmodel.architectures import LatentAttention

if TYPE_CHECKING:
    from calibrate.engine.decoder import Pass


class Latent(nn.Module):  # type: ignore[misc]
    """Latent attention in the absorbed form that engines decode with [1]_.

    The up-projection of keys is applied to the queries and that of values to the result, so that
    all heads attend to the latent vectors as they are cached. Two matrix products read them, one
    for the scores and one for the values; a fused kernel would read them once.

    Parameters
    ----------
    sizes : LatentAttention
    hidden : int
    eps : float
        Of the norms.
    **kind
        `dtype` and `device`, as torch takes them.

    References
    ----------
    .. [1] DeepSeek-AI, DeepSeek-V2, section 2.1 and appendix C, arXiv:2405.04434.
    """

    def __init__(self, sizes: LatentAttention, hidden: int, eps: float, **kind: Any) -> None:
        super().__init__()
        self.eps = eps
        s = self.sizes = sizes

        def weight(*shape: int) -> Any:
            return nn.Parameter(torch.empty(*shape, **kind))

        queries = s.heads * (s.nope_dim + s.rope_dim)
        rank = s.q_lora_rank
        self.project = weight((rank or queries) + s.kv_lora_rank + s.rope_dim, hidden)
        self.q_norm = weight(rank) if rank else None
        self.q_up = weight(queries, rank) if rank else None
        self.kv_norm = weight(s.kv_lora_rank)
        self.k_up = weight(s.heads, s.kv_lora_rank, s.nope_dim)
        self.v_up = weight(s.heads, s.v_dim, s.kv_lora_rank)

    def forward(self, x: Tensor, index: int, shared: Pass) -> Tensor:
        """Return what the heads found (batch, width, heads * v_dim), before the output matrix."""
        s = self.sizes
        q, key = self._project(x, shared)
        if shared.cache is None:
            keys = key[:, :, 0]
        else:
            stored = shared.cache.keys[index]
            stored.index_put_(shared.where, key)
            keys = stored[:, 0, : shared.mask.shape[-1]]
        scale = (s.nope_dim + s.rope_dim) ** -0.5
        scores = torch.baddbmm(shared.mask[:, 0], q, keys.transpose(1, 2), alpha=scale)
        found = scores.softmax(-1) @ keys[..., : s.kv_lora_rank]
        found = found.view(len(x), s.heads, -1, s.kv_lora_rank)
        return torch.einsum("bhwr,hvr->bwhv", found, self.v_up).flatten(2)

    def _project(self, x: Tensor, shared: Pass) -> tuple[Tensor, Tensor]:
        """Return queries (batch, heads * width, dim) and the new keys (batch, width, 1, dim).

        `dim` is ``kv_lora_rank + rope_dim``, the width of what is cached.
        """
        s = self.sizes
        q, latent, k_rope = F.linear(x, self.project).split(
            (self.project.shape[0] - s.kv_elements, s.kv_lora_rank, s.rope_dim), -1
        )
        if self.q_up is not None:
            q = F.linear(F.rms_norm(q, q.shape[-1:], self.q_norm, self.eps), self.q_up)
        q, q_rope = q.unflatten(-1, (s.heads, -1)).split((s.nope_dim, s.rope_dim), -1)
        latent = F.rms_norm(latent, latent.shape[-1:], self.kv_norm, self.eps)
        rope = shared.rotate(torch.cat((q_rope, k_rope[:, :, None]), 2))
        absorbed = torch.einsum("bwhn,hrn->bhwr", q, self.k_up)
        query = torch.cat((absorbed, rope[:, :, :-1].transpose(1, 2)), -1).flatten(1, 2)
        return query, torch.cat((latent[:, :, None], rope[:, :, -1:]), -1)
