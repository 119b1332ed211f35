"""What ``specmodel measure`` does: speculative decoding run, and predicted without its times."""

from __future__ import annotations

import inspect
import json
import statistics
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch

import specmodel.drafters as model
from calibrate.bench import default_dtypes
from calibrate.clock import Clock
from calibrate.engine.checkpoints import load
from calibrate.engine.config import to_architecture
from calibrate.engine.decoder import Decoder
from calibrate.engine.tokenizers import Tokenizer, check_same_vocabulary
from calibrate.environment import describe
from calibrate.profile import fit_and_write
from calibrate.run import Settings as CalibrationSettings
from calibrate.run import measure as calibrate
from calibrate.run import refuse_noise
from calibrate.speculate.drafters import (
    Drafter,
    DraftModel,
    NGram,
    SelfLayers,
    SparseCache,
    check_pair,
)
from calibrate.speculate.loop import Outcome, speculate
from calibrate.speculate.pair import corpus, held_out, load_pair, padded
from calibrate.speculate.summary import (
    Drafted,
    acceptance_record,
    seconds_per_token,
    speedup,
    times_record,
)
from specmodel.acceptance import PerPosition
from specmodel.dtypes import canonical_dtype
from specmodel.errors import DomainError, ExtrapolationWarning
from specmodel.hardware import Device, read_device
from specmodel.law import Transform, draw, verify_chain
from specmodel.report import Setup, predict
from specmodel.roofline import Execution

_TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SOURCES = ("textwrap", "heapq", "bisect", "fractions", "queue", "shlex", "string", "calendar")
_PROMPT = 128  # tokens of a default prompt
_CALIBRATION = 60.0  # seconds of measuring where no profile is given


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is decoded, and how.

    Attributes
    ----------
    target : str or None
        Folder of config.json and safetensors, or GGUF file; None: the project's own pair,
        trained once (`calibrate.speculate.pair`).
    draft : str or None
        Another one (None: the pair's); or ``ngram``, ``exit:N`` (the target's first N layers),
        ``layers:0,1,5``, ``sparse:SINK,WINDOW``.
    device, dtype : str
        As torch takes them; dtype empty: what the device is fast in.
    ks, batches : tuple of int
        Drafts of a round [token], sequences.
    temperatures : tuple of float
    prompts : str or None
        File of prompts, one a line, or .jsonl whose objects have ``prompt`` or ``tokens``; None:
        source text of Python's standard library, for the own pair what it was not trained on.
    requests : int
        Prompts to take, in the file's order; at least the largest batch.
    max_new_tokens : int
    profile : str or None
        Device file; None: calibrate for a minute.
    seed : int
    """

    target: str | None = None
    draft: str | None = None
    device: str = "cpu"
    dtype: str = ""
    ks: tuple[int, ...] = (4,)
    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    prompts: str | None = None
    requests: int = 8
    max_new_tokens: int = 64
    profile: str | None = None
    seed: int = 0


def run(settings: Settings) -> dict[str, Any]:
    """Decode plainly and speculatively, predict, and return the record that the command prints.

    Raises
    ------
    SpecmodelError
        When a checkpoint, a prompt, the profile or a setting cannot be used.
    """
    environment = describe(settings.device)  # refuses a device that is not there
    if settings.device.startswith("cpu"):
        torch.set_num_threads(1)  # timed by the thread's own time, as calibration does
    dtype = canonical_dtype(settings.dtype or default_dtypes(torch.device(settings.device))[0])
    if dtype not in _TORCH:
        raise DomainError(f"dtype must be one of {', '.join(_TORCH)}; got {settings.dtype!r}")
    where = {"dtype": _TORCH[dtype], "device": settings.device}
    given = None if settings.profile is None else read_device(Path(settings.profile))
    training: dict[str, Any] | None = None
    if settings.target is None:
        target, tokenizer, draft, training = _own_pair(settings, where)
        name = "own pair"
    else:
        if settings.draft is None:
            raise DomainError("a target of yours needs a draft: a checkpoint, ngram, exit:N, ...")
        target, tokenizer = load(settings.target, **where)
        name, draft = Path(settings.target).stem, None
    if draft is not None:
        drafter: Drafter = DraftModel(draft)
        record: Any = (draft.config, "own draft")
    else:
        drafter, record = make_drafter(settings.draft or "", target, tokenizer, where)
    prompts = read_prompts(settings, tokenizer)
    device = _calibrated(settings.device, dtype) if given is None else given
    shape = to_architecture(target.config, name=name, dtype=dtype)
    points = []
    for temperature, batch, k in product(settings.temperatures, settings.batches, settings.ks):
        transform = Transform(temperature=temperature)
        point = _decode(settings, target, drafter, prompts, batch, k, transform)
        sampling = _sampling(target, drafter, batch, k, transform)
        hit = point["acceptance"]["hit_rate"]
        priced = model.NGram(hit=hit) if record is None else _shape(record, dtype)
        point["predicted"] = _predicted(device, shape, priced, point, sampling)
        points.append({"temperature": temperature, **point})
    return {
        "target": settings.target or name,
        "draft": settings.draft or "own draft",
        "dtype": dtype,
        "device": environment.device,
        "torch": torch.__version__,
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
        "training": training,
        "points": points,
    }


class Bytes:
    """The tokenizer of the own pair."""

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())


def _own_pair(
    settings: Settings, where: dict[str, Any]
) -> tuple[Decoder, Any, Decoder | None, dict[str, Any]]:
    """Return the own target, its tokenizer, its draft model unless another draft is asked for."""
    small, draft, training = load_pair(say=partial(print, file=sys.stderr, flush=True))
    target = padded(small, hidden=1536, intermediate=4096, **where)
    own = padded(draft, hidden=512, intermediate=1024, **where) if settings.draft is None else None
    return target, Bytes(), own, training


def make_drafter(
    text: str, target: Decoder, tokenizer: Tokenizer | None, where: dict[str, Any]
) -> tuple[Drafter, Any]:
    """Return the drafter that a text names, and what it is to the model: None for n-gram.

    Raises
    ------
    SpecmodelError
        When it names none, or its vocabulary is not the target's.
    """
    kind, _, rest = text.partition(":")
    layers = target.config.layers
    try:
        numbers = [int(part) for part in rest.split(",")] if rest else []
    except ValueError:
        numbers = []
    if text == "ngram":
        return NGram(), None
    if kind in ("exit", "layers") and numbers:
        chosen = list(range(numbers[0])) if kind == "exit" else numbers
        return SelfLayers(target, chosen), model.SelfSpeculative(
            layer_fraction=len(chosen) / layers
        )
    if kind == "sparse" and len(numbers) == 2:
        sink, window = numbers
        return SparseCache(target, sink=sink, window=window), model.SparseKV(budget=sink + window)
    if kind in ("exit", "layers", "sparse"):
        raise DomainError(f"draft {text!r} is not exit:N, layers:N,N,... or sparse:SINK,WINDOW")
    decoder, other = load(text, **where)
    check_pair(target, decoder)
    if tokenizer is not None and other is not None:
        check_same_vocabulary(tokenizer, other)
    return DraftModel(decoder), (decoder.config, Path(text).stem)


def _shape(record: Any, dtype: str) -> model.Drafter:
    if isinstance(record, model.Drafter):
        return record
    config, name = record
    return model.DraftModel(architecture=to_architecture(config, name=name, dtype=dtype))


def read_prompts(settings: Settings, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Return the prompts' tokens.

    Raises
    ------
    DomainError
        When there are too few, a line is no prompt, or text is given to a target without
        tokenizer.
    """
    own = settings.prompts is None
    given = _lines(Path(settings.prompts)) if settings.prompts else _source_text(settings)
    found = []
    for i, prompt in enumerate(given):
        if isinstance(prompt, list):
            found.append(prompt)
        elif tokenizer is None:
            raise DomainError(
                f"{settings.target} has no tokenizer: give prompts as tokens (.jsonl)"
            )
        else:
            tokens = tokenizer.encode(prompt)
            found.append(tokens[:_PROMPT] if own else tokens)
        if len(found) == settings.requests:
            break
        if not found[-1]:
            raise DomainError(f"prompt {i} is empty")
    if len(found) < max(settings.batches):
        raise DomainError(
            f"a batch of {max(settings.batches)} needs as many prompts; there are {len(found)}: "
            "give more by --prompts"
        )
    return found


def _source_text(settings: Settings) -> list[Any]:
    """Return pieces of Python source, such as no own pair was trained on."""
    if settings.target is not None:
        return [inspect.getsource(import_module(name)) for name in _SOURCES]
    text = held_out(corpus())
    starts = range(0, len(text) - _PROMPT, (len(text) - _PROMPT) // settings.requests)
    return [list(text[start : start + _PROMPT]) for start in starts]


def _lines(file: Path) -> list[Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DomainError(f"{file}: cannot be read: {error}") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if file.suffix != ".jsonl":
        return list(lines)
    found = []
    for i, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            prompt = values["tokens"] if "tokens" in values else values["prompt"]
        except (ValueError, TypeError, KeyError):
            raise DomainError(f"{file}: line {i} is no object with prompt or tokens") from None
        whole = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not isinstance(prompt, str) and not whole:
            raise DomainError(f"{file}: line {i}: a prompt is text, tokens are whole numbers")
        found.append(prompt)
    return found


def _decode(
    settings: Settings,
    target: Decoder,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    batch: int,
    k: int,
    transform: Transform,
) -> dict[str, Any]:
    """Run batches of prompts plainly and speculatively in turn; return what was measured."""

    def decode(given: Sequence[list[int]], seed: int, k: int, new: int) -> Outcome:
        found: Outcome = speculate(
            target,
            drafter if k else None,
            given,
            k=k,
            max_new_tokens=new,
            transform=transform,
            seed=settings.seed + seed,
            eos=(),
        )
        return found

    decode(
        prompts[:batch], 0, k, min(4, settings.max_new_tokens)
    )  # what is loaded or allocated once
    plain: list[Outcome] = []
    fast: list[Outcome] = []
    starts = range(0, len(prompts) - batch + 1, batch)
    for start in starts:
        given = prompts[start : start + batch]
        plain.append(decode(given, start, 0, settings.max_new_tokens))
        fast.append(decode(given, start, k, settings.max_new_tokens))
    steps = [turn for outcome in plain for turn in outcome.rounds]
    rounds = [turn for outcome in fast for turn in outcome.rounds]
    ends = [[_end(tokens, target) for tokens in outcome.tokens] for outcome in fast]
    turns = [(outcome.rounds, end) for outcome, end in zip(fast, ends, strict=True)]
    found = acceptance_record(Drafted.of(turns))
    times = times_record(steps, rounds)
    longest = [max(map(len, prompts[start : start + batch])) for start in starts]
    each = [seconds_per_token(turns) for turns in (steps, rounds)]
    same = [
        a == b
        for p, f in zip(plain, fast, strict=True)
        for a, b in zip(p.tokens, f.tokens, strict=True)
    ]
    return {
        "batch": batch,
        "k": k,
        "context": round(statistics.fmean(longest) + settings.max_new_tokens / 2),
        **found,
        **times,
        "S": speedup(times, found["G"]),
        "S_total": each[0] / each[1] if each[0] and each[1] else None,
        "greedy_texts_equal": sum(same) if transform.greedy else None,
    }


def _end(tokens: list[int], target: Decoder) -> int:
    """Return how many new tokens a text has up to its first end token."""
    ends = (i for i, token in enumerate(tokens, start=1) if token in target.config.eos)
    return next(ends, len(tokens) + 1)


def _sampling(
    target: Decoder, drafter: Drafter, batch: int, k: int, transform: Transform
) -> dict[str, float]:
    """Time the sampler by itself, on random logits: of a step, a draft, a round. [s]"""
    clock = Clock(torch.device(target.device))
    shape = (batch, k + 1, target.config.vocab)
    logits = torch.randn(shape, dtype=target.dtype, device=target.device)
    u = torch.rand(batch, k + 1, dtype=torch.float64, device=target.device)
    drafts = logits[:, :k].argmax(-1)

    def once() -> tuple[float, float]:
        start = clock.now()
        law = transform.log_probabilities(logits[:, 0])
        draw(law, u[:, 0])
        middle = clock.now()
        laws = transform.log_probabilities(logits)
        verify_chain(laws, None if isinstance(drafter, NGram) else laws[:, :k], drafts, u)
        return middle - start, clock.now() - middle

    with torch.inference_mode():
        taken = [once() for _ in range(12)][2:]
    one, whole = (statistics.median(times) for times in zip(*taken, strict=True))
    return {"T_h": one, "draft": 0.0 if isinstance(drafter, NGram) else k * one, "T_o": whole}


def _predicted(
    device: Device,
    target: Any,
    drafter: model.Drafter,
    point: dict[str, Any],
    sampling: dict[str, float],
) -> dict[str, Any]:
    """Return what the model says of a point, under the names of what was measured."""
    setup = Setup(
        device=device,
        target=target,
        drafter=drafter,
        acceptance=PerPosition(point["acceptance"]["per_position"]),
        execution=Execution(),
        batches=(point["batch"],),
        contexts=(point["context"],),
        k=point["k"],
        k_max=point["k"],
        T_h=sampling["T_h"],
        T_o=sampling["T_o"] + sampling["draft"],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExtrapolationWarning)
        result = predict(setup)
    (found,) = result.points
    names = ("G", "T_p", "T_v", "T_h", "S", "S_low", "S_high")
    return {
        **{name: found[name] for name in names if name in found},
        "T_d": found["T_d"] + sampling["draft"],
        "T_o": sampling["T_o"],
        "basis": setup.basis,
    }


def _calibrated(device: str, dtype: str) -> Device:
    """Return the device as it measures itself now."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "device.csv")
        settings = CalibrationSettings(
            device=device, table=table, budget=_CALIBRATION, dtypes=(dtype,)
        )
        record = calibrate(settings)
        refuse_noise(record, table)
        found, *_ = fit_and_write(table, table.with_suffix(".yaml"))
    return found
