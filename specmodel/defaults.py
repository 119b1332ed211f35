"""What is assumed where the user says nothing: drafter, draft model, acceptance, all cited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from specmodel.acceptance import Acceptance, Geometric, MeanLength, PerPosition
from specmodel.architectures import Architecture, load_model
from specmodel.drafters import (
    KINDS,
    MTP,
    Drafter,
    DraftModel,
    Eagle,
    Eagle3,
    Medusa,
    NGram,
    Parallel,
    SelfSpeculative,
    SparseKV,
)
from specmodel.errors import DomainError, did_you_mean

MODEL = "llama-3.1-8b"
"""Target of a prediction that names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypicalAcceptance:
    """One published acceptance measurement of a drafter kind."""

    acceptance: Acceptance
    citation: str
    extras: Mapping[str, Any]


@cache
def typical_acceptance(kind: str) -> TypicalAcceptance:
    """Return the cited acceptance of a drafter kind.

    Raises
    ------
    DomainError
        When the kind is unknown.
    """
    entries = _data("acceptance")
    if kind not in entries:
        raise DomainError(f"unknown drafter {kind!r}{did_you_mean(kind, KINDS)}")
    entry = dict(entries[kind])
    citation = f"{entry.pop('what')}; {entry.pop('source')}"
    acceptance: Acceptance
    if "acceptance_length" in entry:
        acceptance = MeanLength(**entry.pop("acceptance_length"))
    elif "acceptance_rates" in entry:
        acceptance = PerPosition(entry.pop("acceptance_rates"))
    elif "conditional_rates" in entry:
        acceptance = PerPosition(entry.pop("conditional_rates"), conditional=True)
    else:
        acceptance = Geometric(entry.pop("alpha"))
    return TypicalAcceptance(acceptance=acceptance, citation=citation, extras=entry)


def default_kind(target: Architecture, draft: Architecture | None) -> str:
    """Return the kind to assume: what `draft` is, MTP where the target has it, else EAGLE-3."""
    if draft is not None:
        return Eagle3.kind if draft.fusion is not None else DraftModel.kind
    return MTP.kind if target.mtp_layers else Eagle3.kind


def default_draft(target: Architecture) -> str | None:
    """Return the name of the sibling that drafts for a target, or None where none is known."""
    name: str | None = _data("draft_models").get(target.name)
    return name


def make_drafter(
    kind: str,
    target: Architecture,
    *,
    draft: Architecture | None = None,
    hit_rate: float | None = None,
    layer_fraction: float | None = None,
    kv_budget: int | None = None,
) -> tuple[Drafter, dict[str, str]]:
    """Return a drafter by its kind, and what had to be assumed for it.

    Raises
    ------
    DomainError
        When the kind is unknown, an option does not belong to it, or it needs a draft model.
    """
    if kind not in KINDS:
        raise DomainError(
            f"drafter must be one of {', '.join(KINDS)}; got {kind!r}{did_you_mean(kind, KINDS)}"
        )
    typical = typical_acceptance(kind).extras
    assumed: dict[str, str] = {}

    def option(name: str, given: Any, owner: type) -> Any:
        if given is not None and owner.kind != kind:  # type: ignore[attr-defined]
            flag = name.replace("_", "-")
            raise DomainError(f"--{flag} belongs to --drafter {owner.kind}; got {kind}")  # type: ignore[attr-defined]
        if given is None and owner.kind == kind:  # type: ignore[attr-defined]
            assumed[name] = f"{typical[name]:g}"
            return typical[name]
        return given

    hit = option("hit_rate", hit_rate, NGram)
    fraction = option("layer_fraction", layer_fraction, SelfSpeculative)
    budget = option("kv_budget", kv_budget, SparseKV)
    if draft is not None and kind in (NGram.kind, SelfSpeculative.kind, SparseKV.kind, Medusa.kind):
        raise DomainError(f"--drafter {kind} takes no draft model; got --draft {draft.name}")
    if draft is None and kind in (DraftModel.kind, Parallel.kind):
        name = default_draft(target)
        if name is None:
            raise DomainError(f"--drafter {kind} needs --draft MODEL for {target.name}")
        draft, assumed["draft"] = load_model(name), name
    if draft is not None and (draft.fusion is not None) != (kind in _HEADS):
        raise DomainError(f"{draft.name} cannot be the draft of --drafter {kind}")
    if kind in _HEADS:
        return _HEADS[kind](draft), assumed
    if kind == Medusa.kind:
        return Medusa(), assumed
    if kind == NGram.kind:
        return NGram(hit=hit), assumed
    if kind == SelfSpeculative.kind:
        return SelfSpeculative(layer_fraction=fraction), assumed
    if kind == SparseKV.kind:
        return SparseKV(budget=budget), assumed
    assert draft is not None  # noqa: S101 (for the type checker: the two kinds left need one)
    return (DraftModel(draft) if kind == DraftModel.kind else Parallel(draft)), assumed


_HEADS: dict[str, type[Eagle] | type[Eagle3] | type[MTP]] = {
    Eagle.kind: Eagle,
    Eagle3.kind: Eagle3,
    MTP.kind: MTP,
}


@cache
def _data(name: str) -> dict[str, Any]:
    text = (files("specmodel") / "data" / f"{name}.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    data: dict[str, Any] = yaml.load(text, Loader=loader)  # noqa: S506 (a safe loader)
    return data
