"""Heads on the target's own features.

What the target computed at a token, its feature, says more of what follows than the token: one
layer over it (EAGLE, MTP) or one matrix for each position (Medusa) drafts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calibrate.engine.cache import Cache
from calibrate.engine.config import DecoderConfig
from calibrate.engine.decoder import Decoder, Stack


class FeatureHead(Stack):
    """One layer over a token's embedding and the feature before it: the next feature.

    EAGLE [1]_ takes both as they are and returns a feature for the target's LM head; an MTP
    block [2]_ normalises both, and its output before the LM head. Embedding and LM head are the
    target's.

    Parameters
    ----------
    config : DecoderConfig
        The target's: the layer is like the target's own.
    norms : bool
        Whether it normalises, as MTP does.
    dtype, device : as torch takes them

    References
    ----------
    .. [1] Li et al., EAGLE, ICML 2024, arXiv:2401.15077.
    .. [2] DeepSeek-AI, DeepSeek-V3 Technical Report, section 2.2, arXiv:2412.19437.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        norms: bool,
        dtype: Any = torch.float32,
        device: Any = "cpu",
    ) -> None:
        # an MTP block is like the target's last layer, an EAGLE head's layer has no experts
        like = replace(config, layers=1, window=None, dense_layers=0 if norms else 1)
        super().__init__(like, norm=norms, dtype=dtype, device=device)
        kind = {"dtype": dtype, "device": device}
        self.fuse = nn.Parameter(torch.empty(config.hidden, 2 * config.hidden, **kind))
        for name in ("embedding_norm", "feature_norm"):
            weight = nn.Parameter(torch.ones(config.hidden, **kind)) if norms else None
            self.register_parameter(name, weight)

    def forward(
        self, embedding: Tensor, feature: Tensor, cache: Cache | None = None, **where: Any
    ) -> Tensor:
        """Return the next features (batch, width, hidden), replayed as `Decoder.hidden` is.

        Parameters
        ----------
        embedding, feature : Tensor (batch, width, hidden)
            Of each token, and the feature at the token before it.
        cache, **where
            As of `Stack.replayed` and `Stack.run`.
        """
        return self.replayed(self._next, (embedding, feature), cache, **where)

    def _next(
        self, embedding: Tensor, feature: Tensor, cache: Cache | None, **where: Any
    ) -> Tensor:
        if self.embedding_norm is not None:
            eps = self.config.norm_eps
            embedding = F.rms_norm(embedding, embedding.shape[-1:], self.embedding_norm, eps)
            feature = F.rms_norm(feature, feature.shape[-1:], self.feature_norm, eps)
        return self.run(F.linear(torch.cat((embedding, feature), -1), self.fuse), cache, **where)

    def logits(self, features: Tensor, target: Decoder) -> Tensor:
        """Return logits (..., vocab) of the features that it returned."""
        return target.logits(features if self.norm is None else self.normalise(features))


class MedusaHeads(nn.Module):  # type: ignore[misc]
    """A residual block and an LM head for each position ahead of the next [1]_.

    Parameters
    ----------
    hidden, vocab, count : int
        Width of the features, tokens, heads.
    dtype, device : as torch takes them

    References
    ----------
    .. [1] Cai et al., Medusa, ICML 2024, arXiv:2401.10774.
    """

    def __init__(
        self,
        hidden: int,
        vocab: int,
        count: int,
        *,
        dtype: Any = torch.float32,
        device: Any = "cpu",
    ) -> None:
        super().__init__()
        kind = {"dtype": dtype, "device": device}
        self.block = nn.Parameter(torch.zeros(count, hidden, hidden, **kind))
        self.bias = nn.Parameter(torch.zeros(count, hidden, **kind))
        self.head = nn.Parameter(torch.empty(count, vocab, hidden, **kind))

    @property
    def count(self) -> int:
        """Positions that it drafts for."""
        return len(self.block)

    def forward(self, features: Tensor, count: int) -> Tensor:
        """Return logits (count, n, vocab) of features (n, hidden) for the first positions."""
        found = []
        for block, bias, head in zip(
            self.block[:count], self.bias[:count], self.head[:count], strict=True
        ):
            x = features + F.silu(F.linear(features, block, bias))
            found.append(F.linear(x, head))
        return torch.stack(found)
