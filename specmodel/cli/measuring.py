"""The way to the measuring code, which needs torch and is looked up by name only when asked for."""

from __future__ import annotations

import importlib
import importlib.util
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from specmodel.cli.output import Out, Table, cell, prose, to_json
from specmodel.cli.parsing import (
    optional,
    parse_counts,
    parse_number,
    parse_seconds,
    parse_whole,
)
from specmodel.cli.setup import MOST_DRAFTS
from specmodel.errors import DomainError, SpecmodelError, whole_array
from specmodel.files import check_output
from specmodel.hardware import YAML
from specmodel.law import Transform
from specmodel.units import parse_count


def calibrate(options: dict[str, Any]) -> str:
    """Measure a device as the options of ``calibrate`` say (as text); return what to print.

    Raises
    ------
    SpecmodelError
        When torch is not installed, an option is out of range, or the measurement fails.
    """
    output = check_output(options["output"], endings=YAML, overwrite=options["overwrite"])
    table = Path(options["table"]) if options["table"] else output.with_suffix(".csv")
    # a run is taken up, and nothing else
    check_output(table, endings=(".csv",), overwrite=True, what="table")
    check_output(table.with_suffix(".json"), endings=(".json",), overwrite=True)
    _need_torch("calibrate")
    settings = importlib.import_module("calibrate.run").Settings(
        device=options["device"],
        table=table,
        budget=parse_seconds(options["budget"], name="budget"),
        dtypes=tuple(options["dtype"].split(",")) if options["dtype"] else (),
        threads=optional(parse_whole, options["threads"], name="threads"),
        seed=parse_whole(options["seed"], name="seed"),
        model=options["model"],
        tiny=options["tiny"],
    )
    command = importlib.import_module("calibrate.command")
    return prose(command.calibrate(output, settings, overwrite=options["overwrite"]))


def measure(options: dict[str, Any], form: str) -> str:
    """Decode speculatively as the options of ``measure`` say (as text); return what to print.

    Raises
    ------
    SpecmodelError
        When torch is not installed, an option is out of range, or a file cannot be used.
    """
    batches = parse_counts(options["batch"], name="batch", low=1)
    requests = parse_whole(options["requests"], name="requests")
    whole_array(requests, "requests", low=1)
    requests = max(*batches, requests)
    ks = parse_counts(options["k"] or "4", name="k", low=1)
    whole_array(max(ks), "k", low=1, high=MOST_DRAFTS, unit="token")
    branching = _branching(options)
    if options["plot"] is not None:
        from specmodel.plots import check_file

        check_file(options["plot"])
    context = parse_count(options["context"], name="context")
    whole_array(context, "context", low=1, unit="token")
    new = parse_whole(options["max_new_tokens"], name="max_new_tokens")
    whole_array(new, "max_new_tokens", low=2, unit="token")
    seed = parse_whole(options["seed"], name="seed")
    whole_array(seed, "seed", low=0, high=2**31)
    temperatures = [
        parse_number(part, name="temperature") for part in options["temperature"].split(",")
    ]
    shared: dict[str, Any] = {
        "top_k": optional(parse_whole, options["top_k"], name="top_k"),
        "top_p": optional(parse_number, options["top_p"], name="top_p"),
        "min_p": optional(parse_number, options["min_p"], name="min_p"),
        "repetition_penalty": parse_number(
            options["repetition_penalty"], name="repetition_penalty"
        ),
    }
    transforms = [Transform(temperature=one, **shared) for one in temperatures]
    accept = options["accept"].split(",") if options["accept"] else ()
    _need_torch("measure")
    trees = importlib.import_module("calibrate.speculate.trees").Tree
    measuring = importlib.import_module("calibrate.speculate.measuring")
    settings = measuring.Settings(
        target=options["target"],
        draft=options["draft"],
        device=options["device"],
        dtype=options["dtype"] or "",
        trees=(trees.of(branching),) if branching else tuple(map(trees.chain, ks)),
        batches=batches,
        transforms=tuple(transforms),
        accept=tuple(parse_number(rate, name="accept") for rate in accept),
        prompts=options["prompts"],
        context=context,
        requests=requests,
        max_new_tokens=new,
        stop=tuple(options["stop"]),
        profile=options["profile"],
        seed=seed,
    )
    record: dict[str, Any] = measuring.run(settings)
    if options["plot"] is not None:
        from specmodel.plots import measured_figure, save

        save(measured_figure(record), options["plot"])
    return to_json(record) if form == "json" else _measured_table(record)


def _branching(options: dict[str, Any]) -> list[int]:
    """Return the children of a node at each depth, none for a chain.

    Raises
    ------
    DomainError
        When they are not whole numbers from 1, or too many, or k is given too.
    """
    if options["tree"] is None:
        return []
    if options["k"] is not None:
        raise DomainError("--tree says what is drafted; --k is given as well")
    found = [parse_whole(n, name="tree") for n in options["tree"].split(",")]
    whole_array(found, "children of a node of the tree", low=1, high=MOST_DRAFTS)
    nodes = sum(accumulate(found, mul))
    if nodes > MOST_DRAFTS:
        raise DomainError(f"a tree has at most {MOST_DRAFTS:,} drafts; got {nodes:,}")
    return found


def _measured_table(record: dict[str, Any]) -> str:
    """Return each point on a line with the prediction below it, times in ms."""
    out = Out()
    out.line(f"{record['target']}, drafts by {record['draft']}, {record['dtype']}")
    out.line(f"{record['device']}, torch {record['torch']}; times in ms")
    basis = record["points"][0]["predicted"]["basis"]
    out.line(f"predicted by specmodel {record['specmodel']}, {record['profile']}, basis {basis}")
    if record["imposed_acceptance"]:
        out.line("acceptance is imposed: the text does not follow the target")
    if (head := (record["training"] or {}).get("head")) is not None:
        held = head["held_out"]
        verdict = "beats" if held["beats_ngram"] else "DOES NOT BEAT"
        out.line(
            f"the {head['kind']} head {verdict} prompt lookup on text it was not trained on: "
            f"G {held['G']:.2f} against {held['G_ngram']:.2f} at k = {held['k']}"
        )
    columns = ("temperature", "B", "k", "L", "", "hit", "alpha", "G")
    table = Table(*columns, *_TIMES, "S", order=_IMPORTANT)
    for point in record["points"]:
        found = point["acceptance"]
        place = [point["temperature"], point["batch"], point["k"], point["context"]]
        rates = [found["hit_rate"], found["alpha_empirical"], point["G"]]
        table.add_row(*map(cell, place), "measured", *map(cell, rates), *_row(point))
        table.add_row(*[""] * 4, "predicted", "", "", "", *_row(point["predicted"]))
    out.table(table)
    for point in record["points"]:
        listed = ", ".join(f"{rate:.3f}" for rate in point["acceptance"]["per_position"])
        out.line(
            f"temperature {point['temperature']:g}, B {point['batch']}, k {point['k']}"
            f"{_nodes(point)}: "
            f"accepted by position {listed}; "
            f"G {point['G']:.3f} {_interval(point)} of {point['requests']} requests{_same(point)}"
        )
    for text in dict.fromkeys(
        w for point in record["points"] for w in point["predicted"]["warnings"]
    ):
        out.line(f"note: {text}")
    return out.text()


def _interval(point: dict[str, Any]) -> str:
    if point["G_low"] is None:
        return "(no interval)"
    return f"[{point['G_low']:.3f}-{point['G_high']:.3f}, 90%]"


def _nodes(point: dict[str, Any]) -> str:
    return "" if point["tree"] is None else f" (a tree of {len(point['tree'])} drafts)"


def _same(point: dict[str, Any]) -> str:
    """Say how many greedy texts are those of plain decoding, and how little the others miss it."""
    if point["greedy"] is None:
        return ""
    same, apart = point["greedy"]["equal"], point["greedy"]["gaps"]
    text = f"; {same} of {same + len(apart)} texts as plain decoding's"
    if apart:
        text += f", others part where two logits are up to {max(map(abs, apart)):.2g} apart"
    return text


_TIMES = ("T_p", "T_h", "T_d", "T_v", "T_o")
_IMPORTANT = ("", "B", "k", "L", "S", "G", "T_p", "T_v", "T_d", "alpha", "temperature", "hit")
"""Columns of the table, the most important first."""


def _row(values: dict[str, Any]) -> list[str]:
    return [f"{values[name] * 1e3:.4g}" for name in _TIMES] + [f"{values['S']:.3f}"]


def _need_torch(command: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise SpecmodelError(
            f"{command} needs torch, which is not installed: pip install 'specmodel[torch]'"
        )
