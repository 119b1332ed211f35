"""A target and a draft model of the project's own, for where no checkpoint is at hand.

Small Llama-style decoders over bytes, trained on the source of Python's standard library: real
acceptance without a download. The pair ships; ``python -m calibrate.speculate.pair --out FOLDER``
trains it anew, in some minutes. A target so small is surer of itself than a large one, and bytes
are easier than words, so acceptance is high; what it is good for is to check times and speedups.
`padding` then widens the target to one that costs something: the same function, slower.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from calibrate.engine.config import DecoderConfig
from calibrate.engine.decoder import Decoder
from specmodel.errors import CheckpointError
from specmodel.files import parse_json, read_bytes, read_text, write_text

SHIPPED = Path(__file__).parents[1] / "data" / "pair"
"""Folder of the pair that ships."""

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
_RECORD = "record.json"
_HELD_OUT = 0.05  # of the corpus, at its end: prompts come from there


def corpus() -> bytes:
    """Return the source of the standard library's top-level modules, in order of name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return b"\n".join(file.read_bytes() for file in sorted(folder.glob("*.py")))


def held_out(text: bytes) -> bytes:
    """Return the part of a corpus that no model is trained on."""
    return text[int(len(text) * (1 - _HELD_OUT)) :]


def load_pair(folder: Path = SHIPPED) -> tuple[Decoder, Decoder, dict[str, Any]]:
    """Return target, draft model (float32, CPU), and how they were trained.

    Parameters
    ----------
    folder : Path
        As `train_pair` leaves it; by default the one that ships.

    Raises
    ------
    CheckpointError
        When a file is missing, is not the one that the record was written for, or does not fit.
    """
    where = folder / _RECORD
    record: dict[str, Any] = parse_json(
        read_text(where, fault=CheckpointError), str(where), fault=CheckpointError
    )
    decoders = []
    for name, config in (("target", TARGET), ("draft", DRAFT)):
        file = folder / f"{name}.safetensors"
        if sha256(read_bytes(file, fault=CheckpointError)).hexdigest() != record[name]["sha256"]:
            raise CheckpointError(f"{file}: is not the file that {_RECORD} was written for")
        decoder, library = Decoder(config), _safetensors(file)
        try:
            decoder.load_state_dict(library.load_file(file))
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from None
        decoders.append(decoder)
    return decoders[0], decoders[1], record


def train_pair(
    folder: Path, *, seed: int = 0, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Train target and draft model, write their weights in bfloat16, and return the record.

    The record holds for each its configuration, steps, seconds, ``bits_per_byte`` of what was
    written on held-out text, and the file's ``sha256``; and what the text was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = corpus()
    record: dict[str, Any] = {
        "text": f"top-level modules of the standard library of Python {platform.python_version()}",
        "text_sha256": sha256(text).hexdigest(),
        "seed": seed,
    }
    for name, config in (("target", TARGET), ("draft", DRAFT)):
        decoder = Decoder(config).randomise(seed)
        how = train(decoder, text, steps=_STEPS[name], seed=seed, say=say)
        record[name] = {**how, **save(decoder, folder / f"{name}.safetensors", text)}
    write_text(folder / _RECORD, json.dumps(record, indent=1) + "\n")
    return record


def save(decoder: Decoder, file: Path, text: bytes) -> dict[str, Any]:
    """Write weights in bfloat16; return what they are worth on held-out text, and their hash."""
    stored = {name: value.to(torch.bfloat16) for name, value in decoder.state_dict().items()}
    _safetensors(file).save_file(stored, file)
    decoder.load_state_dict(stored)
    return {
        "bits_per_byte": bits_per_byte(decoder, held_out(text)),
        "sha256": sha256(file.read_bytes()).hexdigest(),
    }


def _safetensors(file: Path) -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise CheckpointError(
            f"{file}: needs safetensors: pip install 'specmodel[engine]'"
        ) from None
    return safetensors.torch


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


def main() -> None:
    """Train the pair into a folder, as a command."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=SHIPPED)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    record = train_pair(given.out, seed=given.seed, say=print)
    for name in ("target", "draft"):
        print(f"{name}: {record[name]['bits_per_byte']:.3f} bits a byte, {record[name]['sha256']}")


if __name__ == "__main__":
    main()
