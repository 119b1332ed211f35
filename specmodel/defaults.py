"""What is assumed where the user says nothing: drafter, draft model, acceptance, all cited."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from specmodel.acceptance import Acceptance, Geometric, MeanLength, PerPosition
from specmodel.architectures import Architecture, Attention, eagle_head, load_model
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
    """Return the kind to assume for a target.

    What `draft` is; else MTP where the target carries it, EAGLE-3 where a head can be derived,
    and n-gram, which needs nothing, for the rest.
    """
    if draft is not None:
        return draft.head_kind or DraftModel.kind
    if target.mtp_layers:
        return MTP.kind
    derivable = target.dense_width is not None and any(
        isinstance(layer.mixer, Attention) for layer, _ in target.layers
    )
    return Eagle3.kind if derivable else NGram.kind


def default_draft(target: Architecture) -> str | None:
    """Return the name of the sibling that drafts for a target, or None where none is known."""
    name: str | None = _data("draft_models").get(target.name)
    return name


def make_drafter(
    kind: str,
    target: Architecture,
    *,
    draft: Architecture | None = None,
    **options: float | None,
) -> tuple[Drafter, dict[str, str]]:
    """Return a drafter by its kind, and what had to be assumed for it.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    target, draft : Architecture
        The draft model or head, for the kinds that take one.
    **options
        ``hit_rate`` (n-gram), ``layer_fraction`` (self), ``kv_budget`` (sparse-kv); None: the
        value that goes with the kind's cited acceptance.

    Raises
    ------
    DomainError
        When the kind is unknown, an option does not belong to it, or it needs a draft model.
    """
    if kind not in KINDS:
        raise DomainError(
            f"drafter must be one of {', '.join(KINDS)}; got {kind!r}{did_you_mean(kind, KINDS)}"
        )
    for name, value in options.items():
        if value is not None and _OPTIONS.get(kind, ("", None))[0] != name:
            raise DomainError(f"{name} does not belong to drafter {kind}")
    if kind in _OPTIONS or kind == Medusa.kind:
        if draft is not None:
            raise DomainError(f"drafter {kind} takes no draft model; got {draft.name}")
        return _without_model(kind, options)
    if kind in _HEADS:
        if draft is not None and kind == Eagle.kind and draft.head_kind is None:
            draft = eagle_head(target, draft)
        drafter: Drafter = _HEADS[kind](draft)
        drafter.weights(target)  # a head of another kind or target is refused here
        return drafter, {}
    assumed: dict[str, str] = {}
    if draft is None:
        sibling = default_draft(target)
        if sibling is None:
            raise DomainError(f"drafter {kind} needs a draft model for {target.name} (--draft)")
        draft, assumed["draft"] = load_model(sibling), sibling
    if draft.head_kind is not None:
        raise DomainError(f"{draft.name} is a head: it cannot be the draft of {kind}")
    return _MODELS[kind](draft), assumed


def _without_model(
    kind: str, options: Mapping[str, float | None]
) -> tuple[Drafter, dict[str, str]]:
    """Return a drafter that keeps no model of its own."""
    if kind == Medusa.kind:
        return Medusa(), {}
    name, make = _OPTIONS[kind]
    if (value := options.get(name)) is not None:
        return make(value), {}
    value = typical_acceptance(kind).extras[name]
    return make(value), {name: f"{value:g}"}


_OPTIONS: dict[str, tuple[str, Callable[[Any], Drafter]]] = {
    NGram.kind: ("hit_rate", NGram),
    SelfSpeculative.kind: ("layer_fraction", SelfSpeculative),
    SparseKV.kind: ("kv_budget", SparseKV),
}
_HEADS: dict[str, type[Eagle] | type[Eagle3] | type[MTP]] = {
    Eagle.kind: Eagle,
    Eagle3.kind: Eagle3,
    MTP.kind: MTP,
}
_MODELS: dict[str, type[DraftModel] | type[Parallel]] = {
    DraftModel.kind: DraftModel,
    Parallel.kind: Parallel,
}


@cache
def _data(name: str) -> dict[str, Any]:
    text = (files("specmodel") / "data" / f"{name}.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    data: dict[str, Any] = yaml.load(text, Loader=loader)  # noqa: S506 (a safe loader)
    return data
