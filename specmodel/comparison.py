"""Which drafter? One setup across drafters: best k, speedup over batch, memory, the cheapest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specmodel import defaults
from specmodel.acceptance import Acceptance, warn_beyond
from specmodel.architectures import Architecture, load_model
from specmodel.drafters import KINDS, BlockDiffusion, Drafter, DraftModel, Parallel
from specmodel.errors import SpecmodelError
from specmodel.report import CLOSE, Setup, extrapolations
from specmodel.width import best_of

CLOSE_ENOUGH = 0.05
"""A drafter within this of the best is as good, if it is cheaper."""

AS_GIVEN = "as given"
"""Citation of acceptance that the caller gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A drafter with the acceptance assumed of it."""

    label: str
    drafter: Drafter
    acceptance: Acceptance
    citation: str
    of_workload: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one candidate does at each (context, batch).

    `points` hold ``context batch k S memory_bytes fits``: the best k and its speedup, and what
    speculation adds to each device's memory: the drafter, its cache and the target's candidate
    positions. [B]
    """

    candidate: Candidate
    points: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Rows, candidates that cannot be had and why, and the pick at each point."""

    setup: Setup
    rows: tuple[Row, ...]
    left_out: Mapping[str, str]
    picks: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]


def candidates(
    target: Architecture,
    *,
    workload: str | None = None,
    kinds: Sequence[str] | None = None,
    acceptance: Acceptance | None = None,
) -> tuple[list[Candidate], dict[str, str]]:
    """Return the drafters that a target can have, and why it cannot have the others.

    Parameters
    ----------
    target : Architecture
    workload : str, optional
        One of `specmodel.defaults.workloads`; acceptance published for it is taken where
        there is any.
    kinds : sequence of str, optional
        Drafter kinds to look at; all by default.
    acceptance : Acceptance, optional
        Assumed of every drafter in place of published figures.

    Raises
    ------
    DomainError
        When the workload or a kind is unknown.
    """
    found: list[Candidate] = []
    left_out: dict[str, str] = {}
    for kind in dict.fromkeys(kinds or KINDS):
        typical = defaults.typical_acceptance(kind, workload)
        drafts: Sequence[Architecture | None] = [None]
        if kind in (DraftModel.kind, Parallel.kind):
            names = defaults.draft_names(target)
            drafts = [load_model(name) for name in names] or [None]
        elif kind == BlockDiffusion.kind:
            left_out[kind] = "needs its head's config.json"
            continue
        for draft in drafts:
            try:
                drafter, _ = defaults.make_drafter(kind, target, draft=draft, workload=workload)
                drafter.passes(target, 1)
            except SpecmodelError as error:
                left_out[kind] = str(error)
                continue
            found.append(
                Candidate(
                    label=kind if draft is None else f"{kind} {draft.name}",
                    drafter=drafter,
                    acceptance=acceptance or typical.acceptance,
                    citation=AS_GIVEN if acceptance else typical.citation,
                    of_workload=typical.of_workload or acceptance is not None,
                )
            )
    return found, left_out


def compare(
    setup: Setup, among: Sequence[Candidate], left_out: Mapping[str, str] | None = None
) -> Comparison:
    """Evaluate every candidate at every (context, batch) of a setup.

    The setup's own acceptance is not used, and of its drafter only where and how it is placed
    (`tp`, `device`, `link`, `overlapped`). The best draft length goes no further than the
    acceptance was measured: an extrapolated figure would win by being extrapolated. A k that
    the setup asks for may, with a note. The pick at a point is the candidate that adds the
    least memory among those within 5% of the best speedup; none where nothing beats plain
    decoding, or where even that does not fit.
    """
    with extrapolations() as notes:
        rows = [Row(candidate=one, points=tuple(_points(replace_in(setup, one)))) for one in among]
    picks = tuple(_pick(setup, rows, i) for i in range(len(rows[0].points))) if rows else ()
    return Comparison(
        setup=setup, rows=tuple(rows), left_out=left_out or {}, picks=picks, notes=tuple(notes)
    )


def replace_in(setup: Setup, candidate: Candidate) -> Setup:
    """Return the setup with a candidate's drafter, placed as its own was, and acceptance."""
    own = setup.drafter
    placed = replace(
        candidate.drafter, tp=own.tp, device=own.device, link=own.link, overlapped=own.overlapped
    )
    return replace(setup, drafter=placed, acceptance=candidate.acceptance)


def _points(setup: Setup) -> list[Mapping[str, Any]]:
    points: list[Mapping[str, Any]] = []
    measured = setup.acceptance.measured_k
    if setup.k is not None:
        warn_beyond(setup.acceptance, setup.k)
    most = setup.k_max if measured is None else min(setup.k_max, measured)
    for context in setup.contexts:
        S, drafts = setup.scan(list(setup.batches), context, max(most, setup.k or 0))
        if setup.k is not None:
            S, drafts = S[:, [0, setup.k]], drafts[[0, setup.k]]
        best = best_of(S, drafts)
        for batch, k, speed in zip(setup.batches, best.k, best.S, strict=True):
            # what it takes is shown for the k it would use, or for one draft where it is off
            used = setup.memory(max(int(k), 1), context)
            added = float(used.total(batch) - setup.memory(0, context).total(batch))
            points.append(
                {
                    "context": context,
                    "batch": batch,
                    "k": int(k),
                    "S": float(speed),
                    "memory_bytes": added,
                    "fits": bool(used.fits(batch)),
                }
            )
    return points


def _pick(setup: Setup, rows: Sequence[Row], index: int) -> Mapping[str, Any]:
    here = [(row, row.points[index]) for row in rows]
    point = here[0][1]
    pays = [(row, p) for row, p in here if p["k"] and p["fits"]]
    plain = setup.memory(0, point["context"])
    pick = {
        "context": point["context"],
        "batch": point["batch"],
        "fits": bool(plain.fits(point["batch"])),
    }
    if not pays:
        unfit = [p for _, p in here if p["k"]]
        verdict = "off" if not unfit or not pick["fits"] else "the drafters that pay do not fit"
        return {**pick, "verdict": verdict, "best": None, "S": 1.0, "cheapest": None}
    best_row, best = max(pays, key=lambda pair: pair[1]["S"])
    near = [(row, p) for row, p in pays if p["S"] >= best["S"] * (1 - CLOSE_ENOUGH)]
    cheapest, other = min(near, key=lambda pair: (pair[1]["memory_bytes"], -pair[1]["S"]))
    return {
        **pick,
        "verdict": "on" if best["S"] > 1 + CLOSE else "too close to call",
        "best": best_row.candidate.label,
        "k": best["k"],
        "S": best["S"],
        "cheapest": cheapest.candidate.label,
        "cheapest_k": other["k"],
        "cheapest_S": other["S"],
    }
