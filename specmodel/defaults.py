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
    BLOCK_HEADS,
    KINDS,
    MTP,
    PEAGLE,
    BlockDiffusion,
    Drafter,
    DraftModel,
    Eagle,
    Eagle3,
    Lookahead,
    Medusa,
    NGram,
    Parallel,
    SelfSpeculative,
    SparseKV,
    checked_drafter,
)
from specmodel.errors import DomainError, brief, did_you_mean

MODEL = "llama-3.1-8b"
"""Target of a prediction that names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypicalAcceptance:
    """One published acceptance measurement of a drafter kind."""

    acceptance: Acceptance
    citation: str
    extras: Mapping[str, Any]
    of_workload: bool = False


def workloads() -> tuple[str, ...]:
    """Return the kinds of work that acceptance is published for."""
    return tuple(_data("workloads"))


@cache
def typical_acceptance(kind: str, workload: str | None = None) -> TypicalAcceptance:
    """Return the cited acceptance of a drafter kind, for a workload where there is any.

    Raises
    ------
    DomainError
        When the kind or the workload is unknown.
    """
    entries = _data("acceptance")
    if kind not in entries:
        raise DomainError(f"unknown drafter {brief(kind)}{did_you_mean(kind, KINDS)}")
    if workload is not None and workload not in workloads():
        hint = did_you_mean(workload, workloads())
        raise DomainError(
            f"workload must be one of {', '.join(workloads())}; got {brief(workload)}{hint}"
        )
    published = _data("workloads")[workload].get(kind) if workload else None
    entry = dict(published or entries[kind])
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
    return TypicalAcceptance(
        acceptance=acceptance,
        citation=citation,
        extras=entry,
        of_workload=published is not None,
    )


def workload_missing(workload: str | None) -> str:
    """Return what to say of a figure that was not measured on the workload asked for."""
    return "of no particular workload" if workload is None else f"none published for {workload}"


def default_kind(target: Architecture, draft: Architecture | None) -> str:
    """Return the kind to assume for a target.

    What `draft` is; else MTP where the target carries it, EAGLE-3 where a head can be derived,
    and n-gram, which needs nothing, for the rest.
    """
    if draft is not None:
        if draft.head_kind in BLOCK_HEADS:
            return BlockDiffusion.kind
        if draft.head_kind == PEAGLE:
            return Parallel.kind
        return draft.head_kind or DraftModel.kind
    if target.mtp_layers:
        return MTP.kind
    derivable = target.dense_width is not None and any(
        isinstance(layer.mixer, Attention) and not layer.mixer.cross for layer, _ in target.layers
    )
    return Eagle3.kind if derivable else NGram.kind


def draft_names(target: Architecture) -> tuple[str, ...]:
    """Return the names of siblings that can draft for a target, smallest first."""
    return tuple(_data("draft_models").get(target.name, ()))


def make_drafter(
    kind: str,
    target: Architecture,
    *,
    draft: Architecture | None = None,
    workload: str | None = None,
    **options: float | None,
) -> tuple[Drafter, dict[str, str]]:
    """Return a drafter by its kind, and what had to be assumed for it.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    target, draft : Architecture
        The draft model or head, for the kinds that take one.
    workload : str, optional
        One of `workloads`; it selects the cited value of an option that is not given.
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
            f"drafter must be one of {', '.join(KINDS)}; got "
            f"{brief(kind)}{did_you_mean(kind, KINDS)}"
        )
    for name, value in options.items():
        if value is not None and _OPTIONS.get(kind, ("", None))[0] != name:
            raise DomainError(f"{name} does not belong to drafter {kind}")
    if kind in _OPTIONS or kind in _ALONE:
        if draft is not None:
            raise DomainError(f"drafter {kind} takes no draft model; got {draft.name}")
        return _without_model(kind, options, workload)
    if kind == BlockDiffusion.kind:
        if draft is None:
            raise DomainError(f"drafter {kind} needs its head's config.json (--draft)")
        block = BlockDiffusion(draft)
        block.weights(target)
        return block, {}
    if kind in _HEADS:
        if draft is not None and kind == Eagle.kind and draft.head_kind is None:
            draft = eagle_head(target, draft)
        drafter: Drafter = _HEADS[kind](draft)
        drafter.weights(target)  # a head of another kind or target is refused here
        return drafter, {}
    assumed: dict[str, str] = {}
    if draft is None:
        siblings = draft_names(target)
        if not siblings:
            raise DomainError(f"drafter {kind} needs a draft model for {target.name} (--draft)")
        draft, assumed["draft"] = load_model(siblings[0]), siblings[0]
    if draft.head_kind is not None and (kind, draft.head_kind) != (Parallel.kind, PEAGLE):
        raise DomainError(f"{draft.name} is a head: it cannot be the draft of {kind}")
    drafter = _MODELS[kind](draft)
    drafter.weights(target)
    return drafter, assumed


def drafter_of(drafter: Drafter | str, target: Architecture) -> Drafter:
    """Return a drafter record, or the one that a kind's name means for a target.

    Raises
    ------
    DomainError
        When it is neither.
    """
    return (
        make_drafter(drafter, target)[0] if isinstance(drafter, str) else checked_drafter(drafter)
    )


def _without_model(
    kind: str, options: Mapping[str, float | None], workload: str | None
) -> tuple[Drafter, dict[str, str]]:
    """Return a drafter that keeps no model of its own."""
    if kind in _ALONE:
        return _ALONE[kind](), {}
    name, make = _OPTIONS[kind]
    if (value := options.get(name)) is not None:
        return make(value), {}
    value = typical_acceptance(kind, workload).extras[name]
    return make(value), {name: f"{value:g}"}


_OPTIONS: dict[str, tuple[str, Callable[[Any], Drafter]]] = {
    NGram.kind: ("hit_rate", NGram),
    SelfSpeculative.kind: ("layer_fraction", SelfSpeculative),
    SparseKV.kind: ("kv_budget", SparseKV),
}
_ALONE: dict[str, Callable[[], Drafter]] = {Medusa.kind: Medusa, Lookahead.kind: Lookahead}
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
