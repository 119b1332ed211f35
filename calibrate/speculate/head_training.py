"""Heads trained on a frozen target's features and law."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from calibrate.engine.decoder import Decoder
from calibrate.speculate.drafters import NGram
from calibrate.speculate.head_drafters import FeatureDrafter, Medusa
from calibrate.speculate.heads import FeatureHead, MedusaHeads
from calibrate.speculate.keeping import cache_folder, digest, kept
from calibrate.speculate.loop import speculate
from calibrate.speculate.proposals import Drafter

HEADS = ("eagle", "mtp", "medusa")
"""Kinds of heads that are trained here."""

MEDUSA_HEADS = 8
_STEPS = 300
_BATCH, _LENGTH, _RATE = 8, 256, 2e-3
_UNROLL = 3  # passes over its own features that a head is trained for
_DECAY = 0.8  # weight of each further position
_HELD_OUT = 0.05  # of the text, at its end
_PROMPTS, _PROMPT, _NEW, _K = 12, 96, 48, 3  # of the comparison with prompt lookup


def build(kind: str, target: Decoder, *, seed: int = 0) -> Any:
    """Return an untrained head of a kind for a target, float32."""
    c = target.config
    if kind == "medusa":
        heads = MedusaHeads(c.hidden, c.vocab, MEDUSA_HEADS, device=target.device)
        with torch.no_grad():  # at first each is the target's own LM head, as published
            heads.head.copy_(target.head)
        return heads
    return FeatureHead(c, norms=kind == "mtp", device=target.device).randomise(seed)


def drafter(target: Decoder, head: Any) -> Drafter:
    """Return the drafter that a head makes with its target."""
    return Medusa(head) if isinstance(head, MedusaHeads) else FeatureDrafter(target, head)


def load_head(
    kind: str,
    target: Decoder,
    text: Sequence[int] | NDArray[np.uint8],
    *,
    seed: int = 0,
    cache: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Any, dict[str, Any]]:
    """Return a head, float32, and how it was trained: once for a target, a text and this code.

    Parameters
    ----------
    kind : str
        One of `HEADS`.
    target : Decoder
    text : sequence of int
        Tokens; their last twentieth is held out.
    seed : int
    cache : Path, optional
        Where heads are kept.
    say : callable
        Told how training goes.

    Raises
    ------
    CheckpointError
        When the cache holds something else under its name.
    """
    tokens = torch.from_numpy(np.asarray(text, dtype=np.int64))
    modules = (FeatureHead.__module__, Decoder.__module__)
    sources = (__file__, *(str(sys.modules[name].__file__) for name in modules))
    parts = [Path(source).read_bytes() for source in sources]
    parts += [tokens.numpy().tobytes(), f"{target.config} {seed}".encode()]
    parts += [
        weight.detach().cpu().view(torch.uint8).numpy().tobytes() for weight in target.parameters()
    ]
    folder = (cache or cache_folder()) / f"head-{digest(parts)}"

    def trained() -> tuple[Any, dict[str, Any]]:
        head = build(kind, target, seed=seed)
        return head, train(kind, head, target, tokens, seed=seed, say=say)

    return kept(folder, kind, lambda: build(kind, target), trained)


def train(
    kind: str,
    head: Any,
    target: Decoder,
    text: Tensor,
    *,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train a head by AdamW to the target's own law, rate falling to zero; return what came of it.

    EAGLE and MTP heads see the target's features first and then, for the positions that they
    will draft without them, their own.

    Returns
    -------
    dict
        ``kind``, ``parameters``, ``steps``, ``seconds``, ``bits`` (cross-entropy of the first
        draft's law, last tenth of the steps) and ``held_out``: ``G`` of greedy rounds of `k`
        drafts on text that was not trained on, ``G_ngram`` of prompt lookup on the same, and
        ``beats_ngram``.
    """
    end = len(text) - int(len(text) * _HELD_OUT)
    learnt = text[:end].to(target.device)
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(head.parameters(), lr=_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    lm_head = target.head.detach().float()
    start, window = time.perf_counter(), torch.arange(_LENGTH + 1, device=target.device)
    bits = []
    for step in range(_STEPS):
        warm = min(1.0, (step + 1) / 30)
        for group in optimiser.param_groups:
            group["lr"] = _RATE * warm * 0.5 * (1 + math.cos(math.pi * step / _STEPS))
        first = torch.randint(0, len(learnt) - _LENGTH - 1, (_BATCH, 1), generator=generator)
        losses = list(_losses(head, target, lm_head, learnt[first.to(window.device) + window]))
        loss = sum(_DECAY**j * one for j, (one, _) in enumerate(losses))
        optimiser.zero_grad(set_to_none=True)
        torch.as_tensor(loss).backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimiser.step()
        bits.append(float(losses[0][1].detach()) / math.log(2))
        if step % 50 == 0:
            say(f"training the {kind} head: {step} of {_STEPS} steps")
    late = bits[-max(1, _STEPS // 10) :]
    return {
        "kind": kind,
        "parameters": sum(weight.numel() for weight in head.parameters()),
        "steps": _STEPS,
        "seconds": time.perf_counter() - start,
        "bits": sum(late) / len(late),
        "held_out": _held_out(target, head, text[end:]),
    }


def _losses(
    head: Any, target: Decoder, lm_head: Tensor, tokens: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return loss and cross-entropy of each position ahead on tokens (batch, n)."""
    with torch.no_grad():
        logits, features = target(tokens, features=True)
        law, features = torch.softmax(logits.float(), -1), features.float()
    if isinstance(head, MedusaHeads):
        flat = head(features.flatten(0, 1), head.count)
        for j, found in enumerate(flat.view(-1, *tokens.shape, flat.shape[-1]), start=1):
            entropy = _cross_entropy(law[:, j:], found[:, :-j])
            yield entropy, entropy
        return
    embedding = F.embedding(tokens, target.embedding).float()
    feature = features[:, :-1]
    for j in range(1, _UNROLL + 1):
        found = head(embedding[:, j:], feature)
        normed = found if head.norm is None else head.normalise(found)
        entropy = _cross_entropy(law[:, j:], F.linear(normed, lm_head))
        near = F.smooth_l1_loss(found, features[:, j:]) if head.norm is None else 0.0
        yield entropy + near, entropy
        feature = found[:, :-1]


def _cross_entropy(law: Tensor, logits: Tensor) -> Tensor:
    return -(law * torch.log_softmax(logits, -1)).sum(-1).mean()


def _held_out(target: Decoder, head: Any, text: Tensor) -> dict[str, Any]:
    """Return G of greedy rounds on unseen text, of the head and of prompt lookup."""
    starts = range(0, len(text) - _PROMPT, max(1, (len(text) - _PROMPT) // _PROMPTS))
    prompts = [text[start : start + _PROMPT].tolist() for start in starts][:_PROMPTS]

    def tokens(made: Drafter) -> float:
        found = speculate(target, made, prompts, k=_K, max_new_tokens=_NEW, eos=())
        committed = sum(int(turn.accepted[turn.active].sum()) for turn in found.rounds)
        return 1 + committed / sum(int(turn.active.sum()) for turn in found.rounds)

    own = drafter(target, head.to(target.dtype))
    G, G_ngram = tokens(own), tokens(NGram())
    head.float()
    return {"k": _K, "G": G, "G_ngram": G_ngram, "beats_ngram": G_ngram < G}
