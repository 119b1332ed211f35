"""Text to tokens and back, and whether two vocabularies are one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmodel.errors import CheckpointError, DomainError
from specmodel.files import read_text

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITTING: dict[str, tuple[bool, str]] = {
    "gpt-2": (False, _GPT2),
    "smollm": (True, _GPT2),
    "llama-bpe": (False, _LLAMA3),
    "qwen2": (False, _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")),
}
"""How text is split before merging, by the name in GGUF files: digits one by one first, and a
pattern (llama.cpp's llama-vocab.cpp, read 2026-11-30)."""
_SHOWN = 3  # differences in one error


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer of the package `tokenizers`.

    Attributes
    ----------
    pieces : tuple of str or None
        What each token stands for, in the vocabulary's own spelling; None where a number is
        not used.
    eos : tuple of int
        Tokens that end a text.
    """

    model: Any
    pieces: tuple[str | None, ...]
    eos: tuple[int, ...]

    def encode(self, text: str, *, around: bool = True) -> list[int]:
        """Return the tokens of a text, with those that the tokenizer puts around it or without."""
        return list(self.model.encode(text, add_special_tokens=around).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out."""
        return str(self.model.decode(list(tokens), skip_special_tokens=True))


def read_tokenizer(file: Path, *, eos: tuple[int, ...] = ()) -> Tokenizer:
    """Read a ``tokenizer.json``.

    Raises
    ------
    CheckpointError
        When it cannot be read, or the package `tokenizers` is missing.
    """
    library = _library(str(file))
    text = read_text(file, fault=CheckpointError)
    try:
        model = library.Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 (the package raises nothing narrower)
        raise CheckpointError(f"{file}: not a tokenizer: {error}") from None
    return _finished(model, eos)


def byte_level_bpe(
    tokens: Sequence[str],
    merges: Sequence[str],
    *,
    special: Sequence[str],
    splitting: str,
    bos: int | None = None,
    eos: tuple[int, ...] = (),
    where: str = "tokenizer",
) -> Tokenizer:
    """Return the byte-level BPE tokenizer of a GGUF file's vocabulary.

    Parameters
    ----------
    tokens, merges : sequence of str
        In the spelling of GPT-2; a merge is two tokens with a space between.
    special : sequence of str
        Tokens that text is split at first.
    splitting : str
        ``tokenizer.ggml.pre``.
    bos : int, optional
        Token put before every text.

    Raises
    ------
    CheckpointError
        When the splitting is not known or the merges do not fit the tokens.
    """
    library = _library(where)
    if splitting not in _SPLITTING:
        known = ", ".join(_SPLITTING)
        raise CheckpointError(
            f"{where}: tokenizer.ggml.pre: {splitting!r} is not built (known: {known}); load "
            "with tokenizer=False"
        )
    digits, pattern = _SPLITTING[splitting]
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    numbers = {token: i for i, token in enumerate(tokens)}
    try:
        model = library.Tokenizer(
            library.models.BPE(numbers, pairs, ignore_merges=splitting == "llama-bpe")
        )
    except Exception as error:  # noqa: BLE001 (the package raises nothing narrower)
        raise CheckpointError(f"{where}: tokenizer: {error}") from None
    split = library.pre_tokenizers
    steps = [split.Digits(individual_digits=True)] if digits else []
    steps += [split.Split(library.Regex(pattern), "isolated")]
    model.pre_tokenizer = split.Sequence(
        [*steps, split.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    model.decoder = library.decoders.ByteLevel()
    model.add_special_tokens([library.AddedToken(t, normalized=False) for t in special])
    if bos is not None:
        model.post_processor = library.processors.TemplateProcessing(
            single="$B $A".replace("$B", tokens[bos]), special_tokens=[(tokens[bos], bos)]
        )
    return _finished(model, eos)


def check_same_vocabulary(
    target: Tokenizer, draft: Tokenizer, *, names: tuple[str, str] = ("target", "draft")
) -> None:
    """Refuse two tokenizers whose tokens do not mean the same.

    Raises
    ------
    DomainError
        With the first tokens at which they differ, and how many differ.
    """
    one, two = target.pieces, draft.pieces
    length = max(len(one), len(two))
    padded = [pieces + (None,) * (length - len(pieces)) for pieces in (one, two)]
    differ = [i for i, (a, b) in enumerate(zip(*padded, strict=True)) if a != b]
    if not differ:
        return
    shown = "; ".join(
        f"token {i}: {padded[0][i]!r} in {names[0]}, {padded[1][i]!r} in {names[1]}"
        for i in differ[:_SHOWN]
    )
    raise DomainError(
        f"vocabularies of {names[0]} ({len(one):,} tokens) and {names[1]} ({len(two):,}) differ "
        f"at {len(differ):,} tokens: {shown}"
    )


def _finished(model: Any, eos: tuple[int, ...]) -> Tokenizer:
    numbers = model.get_vocab(with_added_tokens=True)
    pieces: list[str | None] = [None] * (max(numbers.values(), default=-1) + 1)
    for piece, number in numbers.items():
        pieces[number] = piece
    return Tokenizer(model=model, pieces=tuple(pieces), eos=eos)


def _library(where: str) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise CheckpointError(f"{where}: needs tokenizers: pip install specmodel[engine]") from None
    return tokenizers
