"""One command that times speculative rounds of random weights on a device, beside the prediction.

    python -m calibrate.device_rounds --device cuda:0 --profile PROFILE.yaml --out DIR --budget 300

An 8B-shaped target with a 1B-shaped draft model and with an EAGLE head (small shapes elsewhere than
on a GPU), acceptance imposed, over contexts, batches and k. Each point is written as soon as it is
measured, the ones that say most first; what the budget has no room for is left out. Needs torch,
numpy, scipy and PyYAML.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from calibrate.bench import TORCH
from calibrate.environment import describe
from calibrate.speculate.inputs import Chosen, Settings, choose
from calibrate.speculate.measuring import measure_point, memory_errors
from calibrate.speculate.trees import Tree
from specmodel.errors import SpecmodelError
from specmodel.hardware import Device, read_device

TARGET, DRAFTS = "llama-3.1-8b", ("llama-3.2-1b", "eagle")
TINY, TINY_DRAFTS = "smollm2-135m", ("smollm2-135m", "eagle")
CONTEXTS, BATCHES = (1024, 8192), (1, 8, 64, 4, 16, 2, 32)
KS = (3, 1, 7, 5, 2, 4, 6)
ACCEPT = (0.75, 0.7, 0.68)
NEW = 24
TERMS = ("G", "T_p", "T_v", "T_d", "T_h", "T_o", "S")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the budget has room for; 0 when a point was measured, else 1."""
    parser = argparse.ArgumentParser(description="Time speculative rounds into a folder.")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds")
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    end, device = time.monotonic() + given.budget, read_device(given.profile)
    rows: list[dict[str, Any]] = []
    for found in _points(given, device):
        rows.append(found)
        _write(given.out, rows, describe(given.device).device)
        line = ", ".join(
            f"{name} {found[name]:.4g} / {found[f'{name}_model']:.4g}" for name in TERMS
        )
        place = f"{found['draft']}, L {found['context']}, B {found['batch']}, k {found['k']}"
        print(f"{place}: {line}", flush=True)
        if time.monotonic() > end:
            break
    return 0 if rows else 1


def _points(given: argparse.Namespace, device: Device) -> Iterator[dict[str, Any]]:
    """Measure point after point; one that cannot be is named and left out."""
    on_gpu = given.device.startswith("cuda")
    target, drafts = (TARGET, DRAFTS) if on_gpu else (TINY, TINY_DRAFTS)
    contexts = CONTEXTS if on_gpu else (128, 256)
    loaded: dict[str, Chosen] = {}
    kind, shared = TORCH[given.dtype], None
    if not on_gpu:
        torch.set_num_threads(1)  # as the profile was measured
    for k in KS:
        for batch in BATCHES:
            for context in contexts:
                for draft in drafts:
                    settings = Settings(
                        target=target,
                        draft=draft,
                        device=given.device,
                        batches=(batch,),
                        trees=(Tree.chain(k),),
                        accept=ACCEPT,
                        context=context,
                        requests=batch,
                        max_new_tokens=NEW,
                    )
                    try:
                        if draft not in loaded:
                            with memory_errors():
                                loaded[draft] = choose(settings, given.dtype, kind, target=shared)
                            shared = loaded[draft].target
                        chosen = loaded[draft].with_prompts(settings)
                        point = measure_point(settings, chosen, device, *_only(settings))
                    except SpecmodelError as error:  # no room for it, say
                        print(f"{draft}, L {context}, B {batch}, k {k}: {error}", file=sys.stderr)
                        continue
                    model = {f"{name}_model": point["predicted"][name] for name in TERMS}
                    yield {"target": target, "draft": draft, **point, **model}


def _only(settings: Settings) -> tuple[Any, ...]:
    """Return batch, tree and transform of settings that have one of each."""
    return settings.batches[0], settings.trees[0], settings.transforms[0]


def _write(out: Path, rows: Sequence[dict[str, Any]], device: str) -> None:
    """Write the table and the whole records."""
    names = ["target", "draft", "context", "batch", "k"]
    names += [name for term in TERMS for name in (term, f"{term}_model")]
    with (out / "rounds.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    (out / "rounds.json").write_text(json.dumps({"device": device, "points": rows}))


if __name__ == "__main__":
    sys.exit(main())
