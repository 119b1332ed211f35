"""What a measurement is told: settings, and the models, drafters and prompts that they name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import specmodel.drafters as model
from calibrate.engine.checkpoints import load
from calibrate.engine.config import from_architecture, to_architecture
from calibrate.engine.decoder import Decoder
from calibrate.engine.generate import check_prompts
from calibrate.engine.tokenizers import check_same_vocabulary
from calibrate.speculate.drafters import (
    DraftModel,
    Forced,
    NGram,
    SelfLayers,
    SparseCache,
    check_pair,
)
from calibrate.speculate.head_training import HEADS, build, drafter, load_head
from calibrate.speculate.lookahead import Lookahead
from calibrate.speculate.padding import padded, padded_head
from calibrate.speculate.pair import corpus, held_out, load_pair
from calibrate.speculate.proposals import Drafter
from calibrate.speculate.text import Stop, stop_strings
from calibrate.speculate.trees import Tree
from specmodel.architectures import Architecture, load_model, mtp_head
from specmodel.errors import DomainError, SpecmodelError
from specmodel.files import parse_json, read_text
from specmodel.law import Transform

_KINDS = ("ngram", "lookahead", "exit", "layers", "sparse")  # beside heads and draft models
_MOST_TEXT = 4_000_000  # characters that a head is trained on
_LINES = 64  # of it that are made tokens at a time
_BYTES_A_TOKEN = 6  # at most, of source text
_MOST_NOISE = 100_000_000  # tokens of random prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is decoded, and how.

    Attributes
    ----------
    target : str or None
        Folder of config.json and safetensors, or GGUF file; with `accept` also a model's name or
        its config.json, run with random weights over caches of noise; None: the project's own
        pair, trained once.
    draft : str or None
        Another one (None: the pair's); or ``ngram``, ``lookahead``, ``eagle``, ``mtp``,
        ``medusa`` (a head trained for the target), ``exit:N`` (the target's first N layers),
        ``layers:0,1,5``, ``sparse:SINK,WINDOW``.
    device, dtype : str
        As torch takes them; dtype empty: what the device is fast in.
    trees : tuple of Tree
        Drafts of a round, one measurement each.
    batches : tuple of int
        Sequences.
    transforms : tuple of Transform
    accept : tuple of float
        Conditional acceptance to impose by position; empty: verify.
    prompts : str or None
        File of prompts, one a line, or .jsonl whose objects have ``prompt`` or ``tokens``; None:
        source text of Python's standard library, for the own pair what it was not trained on.
    context : int
        Most tokens of such a prompt.
    requests : int
        Prompts to take, in the file's order; at least the largest batch.
    max_new_tokens : int
    stop : tuple of str
        What ends a text, for acceptance, besides the target's end tokens.
    profile : str or None
        Device file; None: calibrate for a minute.
    seed : int
    """

    target: str | None = None
    draft: str | None = None
    device: str = "cpu"
    dtype: str = ""
    trees: tuple[Tree, ...] = (Tree.chain(4),)
    batches: tuple[int, ...] = (1,)
    transforms: tuple[Transform, ...] = (Transform(temperature=0),)
    accept: tuple[float, ...] = ()
    prompts: str | None = None
    context: int = 128
    requests: int = 8
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    profile: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What settings name, ready to run.

    Attributes
    ----------
    name : str
    target : Decoder
    drafter : Drafter
    shape : Architecture
        Of the target, for the prediction.
    price : callable
        Given the measured share of rounds with drafts, the drafter for the prediction.
    prompts : list of list of int
    filled : bool
        Whether they are noise, so that caches need not be read into.
    stop : Stop or None
    training : dict or None
        How what was trained here came to be.
    """

    name: str
    target: Decoder
    drafter: Drafter
    shape: Architecture
    price: Callable[[float], model.Drafter]
    prompts: list[list[int]]
    filled: bool
    stop: Stop | None
    training: dict[str, Any] | None

    def with_prompts(self, settings: Settings) -> Chosen:
        """Return the same with the prompts of noise of other settings."""
        return replace(self, prompts=_random_prompts(settings, self.target))


class Bytes:
    """The tokenizer of the own pair."""

    def encode(self, text: str, *, around: bool = True) -> list[int]:
        """Return the bytes of a text; nothing is put around it."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes."""
        return bytes(tokens).decode(errors="replace")


def choose(settings: Settings, dtype: str, kind: Any, *, target: Any = None) -> Chosen:
    """Load, train or draw what settings name.

    Parameters
    ----------
    settings : Settings
    dtype : str
        As specmodel spells it.
    kind : torch.dtype
    target : Decoder, optional
        Of random weights, drawn before for the same settings.

    Raises
    ------
    SpecmodelError
        When a checkpoint, a prompt or a drafter cannot be used.
    """
    where = {"dtype": kind, "device": settings.device}
    found = _Loading(settings, dtype, where, target=target).load()
    for tree in settings.trees:
        found.drafter.rows(tree)  # refuses what it cannot draft
    if settings.accept:
        found = replace(found, drafter=Forced(found.drafter, settings.accept))
    return found


@dataclass(slots=True)
class _Loading:
    """The steps of `choose`, which share what they have loaded."""

    settings: Settings
    dtype: str
    where: dict[str, Any]
    name: str = "own pair"
    target: Any = None
    tokenizer: Any = None
    shape: Any = None
    training: Any = None
    text: Callable[[], Any] = list  # what a head is trained on
    small: Any = None  # the own target before padding

    def load(self) -> Chosen:
        if self.settings.target is None:
            kind = (self.settings.draft or HEADS[0]).partition(":")[0]
            if kind not in (*HEADS, *_KINDS):
                raise DomainError(
                    f"{self.settings.draft}: the own pair's tokens are bytes, no draft model of "
                    "yours has them: give --target"
                )
            draft = self._own_pair()
        else:
            if self.settings.draft is None:
                raise DomainError(
                    "a target of yours needs a draft: a checkpoint, ngram, exit:N, ..."
                )
            draft = None
            if self.random:
                self.target, self.shape = self._drawn(self.settings.target)
                self.name = self.shape.name
            else:
                self.target, self.tokenizer = load(self.settings.target, **self.where)
                self.name = Path(self.settings.target).stem
                self.text = self._source
        if self.shape is None:
            self.shape = to_architecture(self.target.config, name=self.name, dtype=self.dtype)
        if draft is None:
            made, price = self._drafter(self.settings.draft or "")
        else:
            shape = to_architecture(draft.config, name="own draft", dtype=self.dtype)
            made, price = DraftModel(draft), _always(model.DraftModel(architecture=shape))
        prompts = read_prompts(self.settings, self.tokenizer, self.target)
        for decoder, whose in ((self.target, "target"), (getattr(made, "decoder", None), "draft")):
            if decoder is not None:
                try:
                    check_prompts(decoder, prompts, self.settings.max_new_tokens)
                except DomainError as error:
                    raise DomainError(f"{whose}: {error}") from None
        return Chosen(
            name=self.name,
            target=self.target,
            drafter=made,
            shape=self.shape,
            price=price,
            prompts=prompts,
            filled=self.tokenizer is None and self.settings.prompts is None,
            stop=self._stop(),
            training=self.training,
        )

    @property
    def random(self) -> bool:
        """Whether the target is a model without weights.

        Raises
        ------
        DomainError
            When it is, and acceptance is not imposed.
        """
        text = str(self.settings.target)
        if text.endswith(".gguf") or Path(text).is_dir():
            return False
        if not text.endswith(".json"):
            if Path(text).exists() or "/" in text:
                return False
            try:
                load_model(text)
            except SpecmodelError:
                return False  # the reader of checkpoints says what is wrong
        if not self.settings.accept:
            raise DomainError(
                f"{text} has no weights: impose acceptance (--accept 0.8,0.7) to time it with "
                "random ones"
            )
        return True

    def _own_pair(self) -> Decoder | None:
        """Load the own target; return its draft model, unless another draft is asked for."""
        self.small, draft, self.training = load_pair()
        self.target = padded(self.small, hidden=1536, intermediate=4096, **self.where)
        self.tokenizer, self.text = Bytes(), lambda: np.frombuffer(corpus(), np.uint8)
        if self.settings.draft is not None:
            return None
        own: Decoder = padded(draft, hidden=512, intermediate=1024, **self.where)
        return own

    def _drawn(self, text: str) -> tuple[Decoder, Architecture]:
        """Return a model with random weights, and its record."""
        record = load_model(text)
        config = from_architecture(record)
        decoder = self.target
        if decoder is None or decoder.config != config:
            decoder = Decoder(config, **self.where).randomise(self.settings.seed)
        return decoder, to_architecture(config, name=record.name, dtype=self.dtype)

    def _source(self) -> list[int]:
        """Return the standard library's source as the target's tokens."""
        if self.tokenizer is None:
            raise DomainError(
                f"{self.settings.target} has no tokenizer: a head cannot be trained for it"
            )
        lines = corpus().decode(errors="replace")[:_MOST_TEXT].splitlines(keepends=True)
        pieces = ["".join(lines[i : i + _LINES]) for i in range(0, len(lines), _LINES)]
        return [token for one in pieces for token in self.tokenizer.encode(one, around=False)]

    def _drafter(self, text: str) -> tuple[Drafter, Callable[[float], model.Drafter]]:
        """Return the drafter that a text names, and what it is to the model.

        Raises
        ------
        SpecmodelError
            When it names none, or its vocabulary is not the target's.
        """
        kind, _, rest = text.partition(":")
        try:
            numbers = [int(part) for part in rest.split(",")] if rest else []
        except ValueError:
            numbers = []
        if text in HEADS:
            return self._head(text)
        if text in ("ngram", "lookahead"):
            if self.settings.accept:
                raise DomainError(f"acceptance cannot be imposed on {text}: it may find nothing")
            if text == "ngram":
                return NGram(), lambda hit: model.NGram(hit=hit)
            ahead = Lookahead()
            return ahead, _always(model.Lookahead(window=ahead.window, guesses=ahead.guesses))
        if kind in ("exit", "layers") and numbers:
            chosen = list(range(numbers[0])) if kind == "exit" else numbers
            share = len(chosen) / self.target.config.layers
            made = SelfLayers(self.target, chosen)
            return made, _always(model.SelfSpeculative(layer_fraction=share))
        if kind == "sparse" and len(numbers) == 2:
            sink, window = numbers
            part = SparseCache(self.target, sink=sink, window=window)
            return part, _always(model.SparseKV(budget=sink + window))
        if kind in ("exit", "layers", "sparse"):
            raise DomainError(f"draft {text!r} is not exit:N, layers:N,N,... or sparse:SINK,WINDOW")
        if self.small is None and self.shape is not None and self.random:
            decoder, record = self._drawn(text)
        else:
            decoder, other = load(text, **self.where)
            if self.tokenizer is not None and other is not None:
                check_same_vocabulary(self.tokenizer, other)
            record = to_architecture(decoder.config, name=Path(text).stem, dtype=self.dtype)
        check_pair(self.target, decoder)
        return DraftModel(decoder), _always(model.DraftModel(architecture=record))

    def _head(self, kind: str) -> tuple[Drafter, Callable[[float], model.Drafter]]:
        """Return a head trained for the target, or one of random weights for a random target."""
        if self.settings.target is not None and self.random:
            head = build(kind, self.target).to(self.target.dtype)
        else:
            trained_for = self.small or self.target
            head, record = load_head(kind, trained_for, self.text(), say=_say)
            self.training = {**(self.training or {}), "head": record}
            if self.small is None:
                head = head.to(self.target.dtype)
            else:
                head = padded_head(head, self.small, self.target)
        priced: dict[str, Callable[[], model.Drafter]] = {
            "eagle": model.Eagle,
            "medusa": model.Medusa,
            "mtp": lambda: model.MTP(architecture=mtp_head(replace(self.shape, mtp_layers=1))),
        }
        return drafter(self.target, head), _always(priced[kind]())

    def _stop(self) -> Stop | None:
        if not self.settings.stop:
            return None
        if self.tokenizer is None:
            raise DomainError(f"{self.settings.target} has no tokenizer: stop strings need one")
        return stop_strings(self.tokenizer.decode, self.settings.stop)


def _always(drafter: model.Drafter) -> Callable[[float], model.Drafter]:
    return lambda hit: drafter


_say = partial(print, file=sys.stderr, flush=True)


def read_prompts(settings: Settings, tokenizer: Any, target: Decoder) -> list[list[int]]:
    """Return the prompts' tokens.

    Raises
    ------
    DomainError
        When there are too few, a line is no prompt, or text is given to a target without
        tokenizer.
    """
    if settings.prompts is not None:
        given = _lines(Path(settings.prompts))
    elif tokenizer is None and settings.accept:
        given = _random_prompts(settings, target)
    else:
        given = _source_text(settings)
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
            found.append(tokens if settings.prompts else tokens[: settings.context])
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


def _random_prompts(settings: Settings, target: Decoder) -> list[Any]:
    tokens = settings.requests * settings.context
    if tokens > _MOST_NOISE:
        raise DomainError(f"{tokens:,} tokens of prompts; at most {_MOST_NOISE:,} are drawn")
    generator = torch.Generator().manual_seed(settings.seed)
    shape = (settings.requests, settings.context)
    found: list[Any] = torch.randint(0, target.config.vocab, shape, generator=generator).tolist()
    return found


def _source_text(settings: Settings) -> list[Any]:
    """Return pieces of Python source that nothing here was trained on."""
    text, own = held_out(corpus()), settings.target is None
    size = settings.context if own else settings.context * _BYTES_A_TOKEN
    if size >= len(text) // settings.requests:
        raise DomainError(
            f"{settings.requests} prompts of {settings.context} tokens are more than the "
            f"{len(text):,} bytes held out: give --prompts"
        )
    starts = range(0, len(text) - size, (len(text) - size) // settings.requests)
    pieces = [text[start : start + size] for start in starts]
    return [list(piece) if own else piece.decode(errors="ignore") for piece in pieces]


def _lines(file: Path) -> list[Any]:
    text = read_text(file)
    lines = [line for line in text.splitlines() if line.strip()]
    if file.suffix != ".jsonl":
        return list(lines)
    found = []
    for i, line in enumerate(lines, start=1):
        try:
            values = parse_json(line, f"line {i}")
            prompt = values["tokens"] if "tokens" in values else values["prompt"]
        except (ValueError, TypeError, KeyError):
            raise DomainError(f"{file}: line {i} is no object with prompt or tokens") from None
        whole = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if isinstance(prompt, str) and any("\ud800" <= char <= "\udfff" for char in prompt):
            raise DomainError(f"{file}: line {i}: holds half of a surrogate pair, which is no text")
        if not isinstance(prompt, str) and not whole:
            raise DomainError(f"{file}: line {i}: a prompt is text, tokens are whole numbers")
        found.append(prompt)
    return found
