"""What ``specmodel measure`` does: speculative decoding run, and predicted without its times."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch

from calibrate.bench import TORCH, default_dtypes
from calibrate.engine.decoder import Decoder
from calibrate.environment import describe
from calibrate.speculate.exactness import gaps
from calibrate.speculate.inputs import Chosen, Settings, choose
from calibrate.speculate.loop import Outcome, speculate
from calibrate.speculate.predicting import calibrated, loop_times, predicted
from calibrate.speculate.summary import (
    Drafted,
    acceptance_record,
    seconds_per_token,
    speedup,
    times_record,
    widths_record,
)
from calibrate.speculate.text import Stop
from calibrate.speculate.trees import Tree
from specmodel._version import __version__
from specmodel.dtypes import canonical_dtype
from specmodel.errors import DomainError
from specmodel.hardware import Device, read_device
from specmodel.law import Transform

DTYPES = ("bfloat16", "float16", "float32")


def run(settings: Settings) -> dict[str, Any]:
    """Decode plainly and speculatively, predict, and return the record that the command prints.

    Raises
    ------
    SpecmodelError
        When a checkpoint, a prompt, the profile or a setting cannot be used, or memory is short.
    """
    environment = describe(settings.device)  # refuses a device that is not there
    if settings.device.startswith("cpu"):
        torch.set_num_threads(1)  # timed by the thread's own time, as calibration does
    dtype = canonical_dtype(settings.dtype or default_dtypes(torch.device(settings.device))[0])
    if dtype not in DTYPES:
        raise DomainError(f"dtype must be one of {', '.join(DTYPES)}; got {settings.dtype!r}")
    given = None if settings.profile is None else read_device(Path(settings.profile))
    with memory_errors():
        chosen = choose(settings, dtype, TORCH[dtype])
    device = calibrated(settings.device, dtype) if given is None else given
    points = [
        measure_point(settings, chosen, device, batch, tree, transform)
        for transform, batch, tree in product(settings.transforms, settings.batches, settings.trees)
    ]
    return {
        "target": settings.target or chosen.name,
        "draft": settings.draft or "own draft",
        "dtype": dtype,
        "device": environment.device,
        "torch": torch.__version__,
        "specmodel": __version__,
        "profile": device.label,
        "transform": {
            name: value
            for name, value in asdict(settings.transforms[0]).items()
            if name != "temperature"
        },
        "imposed_acceptance": list(settings.accept) or None,
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
        "training": chosen.training,
        "points": points,
    }


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn torch's running out of memory into one line.

    Raises
    ------
    DomainError
        When memory ran out.
    """
    try:
        yield
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        raise DomainError(f"out of memory: {str(error).splitlines()[0]}") from None


def measure_point(
    settings: Settings,
    chosen: Chosen,
    device: Device,
    batch: int,
    tree: Tree,
    transform: Transform,
) -> dict[str, Any]:
    """Return one point of the record: measured, and under ``predicted`` what `device` says."""
    with memory_errors():
        point = _decode(settings, chosen, batch, tree, transform)
        hit = point["acceptance"]["hit_rate"]
        loop = loop_times(chosen, chosen.prompts[:batch], tree, transform, hit)
    point["predicted"] = predicted(device, chosen, point, tree, loop)
    return {"temperature": transform.temperature, **point}


def _decode(
    settings: Settings, chosen: Chosen, batch: int, tree: Tree, transform: Transform
) -> dict[str, Any]:
    """Run batches of prompts plainly and speculatively in turn; return what was measured."""
    prompts, target = chosen.prompts, chosen.target

    def decode(given: Sequence[list[int]], seed: int, tree: Tree, new: int) -> Outcome:
        found: Outcome = speculate(
            target,
            chosen.drafter,
            given,
            k=tree,
            max_new_tokens=new,
            transform=transform,
            seed=settings.seed + seed,
            eos=(),
            filled=chosen.filled,
        )
        return found

    _reset_peak(settings.device)
    # what is loaded or allocated once
    decode(prompts[:batch], 0, tree, min(4, settings.max_new_tokens))
    plain: list[Outcome] = []
    fast: list[Outcome] = []
    starts = range(0, len(prompts) - batch + 1, batch)
    for start in starts:
        given = prompts[start : start + batch]
        plain.append(decode(given, start, Tree.chain(0), settings.max_new_tokens))
        fast.append(decode(given, start, tree, settings.max_new_tokens))
    steps = [turn for outcome in plain for turn in outcome.rounds]
    rounds = [turn for outcome in fast for turn in outcome.rounds]
    ends = [[_end(tokens, target, chosen.stop) for tokens in outcome.tokens] for outcome in fast]
    turns = [(outcome.rounds, end) for outcome, end in zip(fast, ends, strict=True)]
    found = acceptance_record(Drafted.of(turns))
    times = times_record(steps, rounds)
    longest = [max(map(len, prompts[start : start + batch])) for start in starts]
    each = [seconds_per_token(turns) for turns in (steps, rounds)]
    greedy = None
    if transform.greedy and not settings.accept:
        texts = [[text for outcome in one for text in outcome.tokens] for one in (plain, fast)]
        apart = gaps(target, prompts[: len(texts[0])], *texts, transform)
        greedy = {"equal": len(texts[0]) - len(apart), "gaps": apart}
    return {
        "batch": batch,
        "k": tree.k,
        "tree": None if tree.is_chain else list(tree.parents),
        "context": round(statistics.fmean(longest) + settings.max_new_tokens / 2),
        **found,
        **times,
        "pass_widths": widths_record(rounds),
        "S": speedup(times, found["G"]),
        "S_total": each[0] / each[1] if each[0] and each[1] else None,
        "greedy": greedy,
        **_peak(settings.device),
    }


def _end(tokens: list[int], target: Decoder, stop: Stop | None) -> int:
    """Return how many new tokens a text has up to its first end."""
    ends = (i for i, token in enumerate(tokens, start=1) if token in target.config.eos)
    stopped = None if stop is None else stop(tokens)
    return min(next(ends, len(tokens) + 1), stopped or len(tokens) + 1)


def _reset_peak(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: str) -> dict[str, Any]:
    """Return the most memory so far: of the device for this point, of a CPU's whole process."""
    if device.startswith("cuda"):
        size, of = torch.cuda.max_memory_allocated(device), "tensors on the device"
    else:
        size, of = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "the whole process"
    return {"peak_memory_bytes": size, "peak_memory_of": of}
