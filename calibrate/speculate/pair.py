"""A target and a draft model of the project's own, for where no checkpoint is at hand.

Small Llama-style decoders over bytes, trained on the source of Python's standard library: real
acceptance without a download. A target so small is surer of itself than a large one, and bytes
are easier than words, so acceptance is high; what it is good for is to check times and speedups.
`padding` then widens the target to one that costs something: the same function, slower.
"""

from __future__ import annotations

import math
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from calibrate.engine.config import DecoderConfig
from calibrate.engine.decoder import Decoder
from calibrate.speculate.keeping import cache_folder, digest, kept

TARGET = DecoderConfig(
    model_type="llama",
    layers=4,
    hidden=192,
    heads=3,
    kv_heads=3,
    head_dim=64,
    intermediate=512,
    vocab=256,
    context=4096,
    rope_theta=10_000.0,
    norm_eps=1e-5,
)
DRAFT = replace(TARGET, layers=1, hidden=128, heads=2, kv_heads=2, intermediate=256)
_STEPS = {"target": 700, "draft": 600}
_BATCH, _LENGTH, _RATE = 8, 256, 3e-3
_HELD_OUT = 0.05  # of the corpus, at its end: prompts come from there


def corpus() -> bytes:
    """Return the source of the standard library's top-level modules, in order of name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return b"\n".join(file.read_bytes() for file in sorted(folder.glob("*.py")))


def held_out(text: bytes) -> bytes:
    """Return the part of a corpus that no model is trained on."""
    return text[int(len(text) * (1 - _HELD_OUT)) :]


def load_pair(
    *, seed: int = 0, cache: Path | None = None, say: Callable[[str], None] = lambda text: None
) -> tuple[Decoder, Decoder, dict[str, Any]]:
    """Return target, draft model (float32, CPU), and how they were trained.

    Trained once for a corpus, a seed and this file, then read from `cache`.

    Raises
    ------
    CheckpointError
        When the cache holds something else under their name.
    """
    text = corpus()
    sources = (__file__, str(sys.modules[Decoder.__module__].__file__))
    code = [Path(source).read_bytes() for source in sources]
    folder = (cache or cache_folder()) / f"pair-{digest([text, *code, str(seed).encode()])}"

    def one(name: str, config: DecoderConfig) -> tuple[Decoder, dict[str, Any]]:
        def trained() -> tuple[Decoder, dict[str, Any]]:
            decoder = Decoder(config).randomise(seed)
            return decoder, train(decoder, text, steps=_STEPS[name], seed=seed, say=say)

        return kept(folder, name, lambda: Decoder(config), trained)

    target, draft = one("target", TARGET), one("draft", DRAFT)
    return target[0], draft[0], {"target": target[1], "draft": draft[1]}


def train(
    decoder: Decoder,
    text: bytes,
    *,
    steps: int,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train a decoder over bytes by AdamW, rate falling to zero; return what came of it.

    Returns
    -------
    dict
        ``config``, ``parameters``, ``steps``, ``seconds`` and ``bits_per_byte`` on held-out text.
    """
    data = np.frombuffer(text, np.uint8)
    learnt = torch.from_numpy(data[: len(data) - len(held_out(text))].astype(np.int64))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # logits near zero at first
        decoder.head.mul_(0.1)
        decoder.embedding.mul_(0.3)
    optimiser = torch.optim.AdamW(
        decoder.parameters(), lr=_RATE, betas=(0.9, 0.98), weight_decay=0.05
    )
    start, window = time.perf_counter(), torch.arange(_LENGTH + 1)
    for step in range(steps):
        warm = min(1.0, (step + 1) / 50)
        for group in optimiser.param_groups:
            group["lr"] = _RATE * warm * 0.5 * (1 + math.cos(math.pi * step / steps))
        first = torch.randint(0, len(learnt) - _LENGTH - 1, (_BATCH, 1), generator=generator)
        tokens = learnt[first + window]
        loss = F.cross_entropy(decoder(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimiser.step()
        if step % 50 == 0:
            say(
                f"training {decoder.config.parameters / 1e6:.1f} M weights: {step} of {steps} steps"
            )
    return {
        "config": asdict(decoder.config),
        "parameters": decoder.config.parameters,
        "steps": steps,
        "seconds": time.perf_counter() - start,
        "bits_per_byte": bits_per_byte(decoder, held_out(text)),
    }


@torch.no_grad()  # type: ignore[untyped-decorator]
def bits_per_byte(decoder: Decoder, text: bytes, *, windows: int = 64) -> float:
    """Return the cross-entropy on windows spread over a text. [bit]"""
    data = torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))
    first = torch.linspace(0, len(data) - _LENGTH - 1, windows).long()[:, None]
    tokens = data[first + torch.arange(_LENGTH + 1)]
    loss = F.cross_entropy(decoder(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    return float(loss) / math.log(2)
