"""A target and a draft model of the project's own, for where no checkpoint is at hand.

Small Llama-style decoders over bytes, trained on the source of Python's standard library: real
acceptance without a download. A target so small is surer of itself than a large one, and bytes
are easier than words, so acceptance is high; what it is good for is to check times and speedups.
The target is then padded with zeros to a width that costs something: the same function, slower.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from calibrate.engine.config import DecoderConfig
from calibrate.engine.decoder import Decoder
from specmodel.errors import CheckpointError

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
_BATCH, _LENGTH, _RATE = 16, 128, 3e-3
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
    digest = hashlib.sha256(text)
    for source in (__file__, str(sys.modules[Decoder.__module__].__file__)):
        digest.update(Path(source).read_bytes())
    digest.update(str(seed).encode())
    folder = (cache or _cache()) / f"pair-{digest.hexdigest()[:16]}"
    found, record = [], {}
    for name, config in (("target", TARGET), ("draft", DRAFT)):
        file = folder / f"{name}.pt"
        if not file.is_file():
            decoder = Decoder(config).randomise(seed)
            record[name] = train(decoder, text, steps=_STEPS[name], seed=seed, say=say)
            _write(folder, name, decoder, record[name])
        decoder = Decoder(config)
        try:
            decoder.load_state_dict(torch.load(file, weights_only=True))
            record[name] = json.loads((folder / f"{name}.json").read_text())
        except (OSError, ValueError, RuntimeError, UnpicklingError) as error:
            kind = type(error).__name__
            raise CheckpointError(f"{folder}: cannot be read ({kind}); delete it") from None
        found.append(decoder)
    target, draft = found
    return target, draft, record


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "specmodel"


def _write(folder: Path, name: str, decoder: Decoder, record: dict[str, Any]) -> None:
    """Write weights and record so that a reader finds both whole, or none."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record))
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        torch.save(decoder.state_dict(), file)
    Path(file.name).replace(folder / f"{name}.pt")


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
    before = dict(decoder.named_parameters())
    for name, weight in wide.named_parameters():
        source, kept = before[name], before[name]
        weight.zero_()
        if name.endswith("norm"):
            kept = source * math.sqrt(ratio)
        if name.endswith("gate_up"):  # two matrices, one above the other
            for half, part in zip(weight.chunk(2), kept.chunk(2), strict=True):
                half[: part.shape[0], : part.shape[1]] = part
        else:
            weight[tuple(slice(n) for n in kept.shape)] = kept
    return wide
