"""Predictions pinned before the code moves: the same command lines must print the same numbers.

    python tests/pins.py --write      # record them anew, where numbers were meant to move
    python tests/pins.py              # compare, and print what moved

Setups are drawn from a seeded generator over devices, models, drafters, engines, layouts, formats
and ways to state acceptance; one that is refused is pinned with its message.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specmodel.cli import main as run

FILE = Path(__file__).parent / "golden" / "pins.jsonl.gz"
SETUPS = 300
CLOSE = 1e-12  # processors differ in the last bit of an exponential

DEVICES = ("h100", "a100", "b200", "l40s", "rtx-4090", "mi300x", "h20", "cpu-generic", "gb10")
MODELS = (
    "llama-3.1-8b", "llama-3.1-70b", "qwen3-8b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b",
    "qwen3-next-80b-a3b", "gemma-2-9b", "llama-2-7b", "mixtral-8x7b-v0.1", "t5-base",
    "nemotron-h-56b", "glm-4.5-air", "llama-4-scout-17b-16e",
)  # fmt: skip
DRAFTERS: tuple[list[str], ...] = (
    [], ["--drafter", "eagle3"], ["--drafter", "eagle"], ["--drafter", "mtp"],
    ["--drafter", "medusa"], ["--drafter", "ngram"], ["--drafter", "ngram", "--hit-rate", "0.4"],
    ["--drafter", "lookahead"], ["--drafter", "self"],
    ["--drafter", "self", "--layer-fraction", "0.5"],
    ["--drafter", "sparse-kv", "--kv-budget", "512"], ["--drafter", "draft-model"],
    ["--drafter", "parallel"],
    ["--drafter", "draft-model", "--draft-gpu", "l40s", "--link", "5,50"],
    ["--drafter", "draft-model", "--draft-gpu", "l4", "--link", "10,25", "--overlap"],
    ["--drafter", "draft-model", "--draft-tp", "1"],
)  # fmt: skip
ENGINES = ("vllm-2024", "vllm-2025", "vllm-2026", "sglang", "tensorrt-llm", "hf-eager", "llama.cpp")
LAYOUTS: tuple[list[str], ...] = (
    ["--tp", "2"], ["--tp", "4"], ["--tp", "8"], ["--pp", "2"], ["--dp", "2"],
    ["--tp", "2", "--pp", "2"], ["--dp", "8", "--ep"], ["--dp", "4", "--tp", "2", "--ep"],
    ["--dp", "16", "--ep", "--network", "8,50"],
)  # fmt: skip
FORMATS: tuple[list[str], ...] = (
    ["--weights", "fp8"], ["--weights", "int4"], ["--kv-dtype", "fp8"], ["--dtype", "fp16"],
    ["--weights", "fp8", "--kv-dtype", "fp8"],
)  # fmt: skip
ACCEPTANCE: tuple[list[str], ...] = (
    ["--alpha", "0.7"], ["--alpha", "0.45"], ["--acceptance-rates", "0.7,0.45,0.3,0.2"],
    ["--acceptance-length", "2.6", "--acceptance-k", "4"], ["--workload", "code"],
    ["--workload", "math"],
)  # fmt: skip
OTHERS: tuple[list[str], ...] = (
    ["--k", "3"], ["--k", "0"], ["--k-max", "8"], ["--level", "ideal"], ["--basis", "generic"],
    ["--kv-reread", "0.5"], ["--expert-overlap", "0.3"], ["--offload", "0.5"], ["--price", "2.5"],
)  # fmt: skip
LEFT_OUT = ("specmodel_version",)


def setups() -> Iterator[list[str]]:
    """Yield the options of each pinned command."""
    rng = random.Random(20261201)  # noqa: S311 (a sample, no secret)
    yield []
    for number in range(SETUPS - 1):
        options = [
            "--gpu",
            rng.choice(DEVICES),
            "--model",
            rng.choice(MODELS),
            *rng.choice(DRAFTERS),
        ]
        for chance, choices in ((0.45, LAYOUTS), (0.3, FORMATS), (0.6, ACCEPTANCE), (0.35, OTHERS)):
            if rng.random() < chance:
                options += rng.choice(choices)
        if rng.random() < 0.5:
            options += ["--engine", rng.choice(ENGINES)]
        batches = rng.choice(("1", "1,64", "8,256", "1,16,128"))
        contexts = rng.choice(("0", "2k", "1k,16k", "128,32k"))
        command = "compare" if number % 30 == 0 and "--drafter" not in options else "predict"
        yield [command, *options, "--batch", batches, "--context", contexts]


def answer(options: list[str]) -> dict[str, Any]:
    """Return what a command prints as JSON, or its status and message."""
    command, *rest = options or ["predict", "--gpu", "h100"]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run([command, *rest, "--format", "json"])
    if status:
        return {"status": status, "error": err.getvalue().strip()}
    found: dict[str, Any] = json.loads(out.getvalue())
    return {key: value for key, value in found.items() if key not in LEFT_OUT}


def moved(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """Yield where two answers differ, numbers beyond the last bits."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            at = f"{where}.{key}" if where else key
            if key not in before or key not in now:
                yield f"{at}: {'new' if key not in before else 'gone'}"
            else:
                yield from moved(before[key], now[key], at)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for i, (a, b) in enumerate(zip(before, now, strict=True)):
            yield from moved(a, b, f"{where}[{i}]")
    elif isinstance(before, float) and isinstance(now, int | float):
        if not math.isclose(before, now, rel_tol=CLOSE, abs_tol=0.0):
            yield f"{where}: {before!r} to {now!r}"
    elif before != now:
        yield f"{where}: {str(before)[:90]} to {str(now)[:90]}"


def read() -> list[tuple[list[str], dict[str, Any]]]:
    """Return the pinned commands and answers."""
    with gzip.open(FILE, "rt", encoding="utf-8") as lines:
        return [(pin["options"], pin["answer"]) for pin in map(json.loads, lines)]


def main() -> int:
    """Run as a command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        pins = [json.dumps({"options": o, "answer": answer(o)}) for o in setups()]
        FILE.write_bytes(gzip.compress("\n".join(pins).encode() + b"\n", mtime=0))
        return 0
    changes = 0
    for options, before in read():
        for change in moved(before, answer(options)):
            changes += 1
            sys.stdout.write(f"{' '.join(options)}: {change}\n")
    sys.stdout.write(f"{changes} changes\n")
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main())
