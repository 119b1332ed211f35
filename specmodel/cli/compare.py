"""``compare``: from options to a comparison, and the comparison as text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.text import Text

from specmodel._version import __version__
from specmodel.cli.output import STYLES, Out, Table, styled, to_csv, to_json
from specmodel.cli.render import engine_lines, unfit
from specmodel.cli.setup import ACCEPTANCE_OPTIONS, Request, build, same_formats
from specmodel.comparison import AS_GIVEN, Comparison, candidates, compare
from specmodel.defaults import workload_missing
from specmodel.errors import DomainError
from specmodel.report import CLOSE


def run_comparison(options: dict[str, Any], kinds: str | None) -> tuple[Request, Comparison]:
    """Return the setup that was asked for, and its comparison across drafters."""
    for name in ("drafter", "draft", "hit_rate", "layer_fraction", "kv_budget"):
        if options[name] is not None:
            raise DomainError(f"--{name.replace('_', '-')} does not go with compare")
    if options["k"] == "0":
        raise DomainError("k = 0 leaves nothing to compare")
    given = any(options[name] is not None for name in ACCEPTANCE_OPTIONS)
    request = build({**options, "drafter": "ngram"})  # any: each candidate takes its place
    found, left_out = candidates(
        request.setup.target,
        workload=options["workload"],
        kinds=None if kinds is None else [kind.strip() for kind in kinds.split(",")],
        acceptance=request.setup.acceptance if given else None,
    )
    if not found:
        reasons = "; ".join(f"{kind}: {why}" for kind, why in left_out.items())
        raise DomainError(f"no drafter to compare ({reasons})")
    found = [replace(one, drafter=same_formats(one.drafter, options)) for one in found]
    return request, compare(request.setup, found, left_out)


def comparison_text(request: Request, result: Comparison, form: str) -> str:
    """Return a comparison in the form asked for."""
    if form == "json":
        return to_json(_json(request, result))
    if form == "csv":
        return to_csv(
            [{"drafter": row.candidate.label, **p} for row in result.rows for p in row.points]
        )
    return _table(request, result)


def _json(request: Request, result: Comparison) -> dict[str, Any]:
    left = ("drafter", "draft", "acceptance", "hit_rate")
    return {
        "inputs": {k: v for k, v in request.inputs.items() if k not in left},
        "basis": request.setup.basis,
        "specmodel_version": __version__,
        "picks": [dict(pick) for pick in result.picks],
        "drafters": [
            {
                "drafter": row.candidate.label,
                "acceptance": row.candidate.acceptance.label,
                "hit_rate": row.candidate.drafter.hit_rate,
                "citation": row.candidate.citation,
                "of_workload": row.candidate.of_workload,
                "points": [dict(p) for p in row.points],
            }
            for row in result.rows
        ],
        "left_out": dict(result.left_out),
        "warnings": list(result.notes),
    }


def _table(request: Request, result: Comparison) -> str:
    setup, out = request.setup, Out()
    out.line(
        f"specmodel {__version__} | {setup.device.label} | {setup.target.name} "
        f"{setup.target.weight_dtype} | level {setup.execution.level}, "
        f"basis: {setup.basis}"
    )
    out.line()
    for pick in result.picks:
        out.line(f"batch {pick['batch']}, context {pick['context']}: ", *_pick(pick))
    for context in setup.contexts:
        out.line()
        out.line(f"speedup at the best k (k), context {context}")
        heads = ("drafter", *(f"batch {batch}" for batch in setup.batches), "adds GB")
        table = Table(*heads, order=heads, left=heads[:1], fold="drafter")
        for row in result.rows:
            points = [p for p in row.points if p["context"] == context]
            table.add_row(
                row.candidate.label,
                *(_speedup(p) + unfit(p["fits"]) for p in points),
                f"{points[-1]['memory_bytes'] / 1e9:.2f}",
            )
        out.table(table)
    out.line(
        f"off: no k pays; *: does not fit; adds GB: drafter, its cache and the target's candidate "
        f"positions at batch {setup.batches[-1]}"
    )
    _sources(out, request, result)
    return out.text()


def _pick(pick: Any) -> tuple[Text, str]:
    """Return what to use, in the colour of its verdict, and what else is as good."""
    if not pick["fits"]:
        return styled("does not fit, with or without a drafter", STYLES["off"]), ""
    if pick["best"] is None:
        reason = "" if pick["verdict"] == "off" else f": {pick['verdict']}"
        return styled(f"leave speculation off{reason}", STYLES["off"]), ""
    text = f"{pick['best']} (k = {pick['k']}, S = {pick['S']:.2f})"
    if pick["verdict"] != "on":
        text = f"{pick['verdict']}: {text}"
    more = ""
    if pick["cheapest"] != pick["best"]:
        more = (
            f"; within 5% of it and cheaper in memory: {pick['cheapest']} "
            f"(k = {pick['cheapest_k']}, S = {pick['cheapest_S']:.2f})"
        )
    return styled(text, STYLES[pick["verdict"]]), more


def _speedup(point: Any) -> Text:
    """Return a speedup with its k, in the colour of what it says of speculation."""
    if not point["k"]:
        return styled("off", STYLES["off"])
    verdict = "on" if point["S"] > 1 + CLOSE else "too close to call"
    return styled(f"{point['S']:.2f} ({point['k']})", STYLES[verdict])


def _assumed(label: str, hit_rate: float) -> str:
    return label if hit_rate == 1 else f"{label}, hit rate {hit_rate:g}"


def _sources(out: Out, request: Request, result: Comparison) -> None:
    out.line()
    if all(row.candidate.citation == AS_GIVEN for row in result.rows):
        out.line(
            f"Acceptance as given, of every drafter: {result.rows[0].candidate.acceptance.label}"
        )
        out.line("so this compares what they cost, not how well they guess")
    else:
        out.line(
            "Acceptance is each drafter's own figure, measured on its own target, and the best k "
            "goes no further than it was measured; yours: --alpha and others. Assumed"
        )
    for row in result.rows:
        one = row.candidate
        other = "" if one.of_workload else f" ({workload_missing(request.inputs['workload'])})"
        assumed = _assumed(one.acceptance.label, one.drafter.hit_rate)
        if one.citation != AS_GIVEN:
            out.line(f"  {one.label}: {assumed}: {one.citation}{other}")
        elif one.drafter.hit_rate < 1:
            out.line(f"  {one.label}: drafts are found in {one.drafter.hit_rate:g} of rounds")
    for kind, why in result.left_out.items():
        out.line(f"  left out, {kind}: {why}")
    if "architecture" in request.assumed:
        out.line(f"  {request.assumed['architecture']}")
    for note in result.notes:
        out.line(f"  note: {note}")
    for text in engine_lines(request.setup):
        out.line(f"  {text}")
