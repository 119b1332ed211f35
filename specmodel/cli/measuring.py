"""The way to the measuring code, which needs torch and is looked up by name only when asked for."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from specmodel.cli.output import Out, cell, plain_table, to_json
from specmodel.cli.parsing import (
    optional,
    parse_counts,
    parse_number,
    parse_seconds,
    parse_whole,
)
from specmodel.cli.setup import MOST_DRAFTS
from specmodel.errors import DomainError, SpecmodelError, whole_array


def calibrate(options: dict[str, Any]) -> str:
    """Measure a device as the options of ``calibrate`` say (as text); return what to print.

    Raises
    ------
    SpecmodelError
        When torch is not installed, an option is out of range, or the measurement fails.
    """
    output = Path(options["output"])
    if output.suffix not in (".yaml", ".yml"):
        raise DomainError(f"output must end in .yaml; got {options['output']!r}")
    table = Path(options["table"]) if options["table"] else output.with_suffix(".csv")
    if table.suffix != ".csv":
        raise DomainError(f"table must end in .csv; got {options['table']!r}")
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
    text: str = importlib.import_module("calibrate.command").calibrate(output, settings)
    return text


def measure(options: dict[str, Any], form: str) -> str:
    """Decode speculatively as the options of ``measure`` say (as text); return what to print.

    Raises
    ------
    SpecmodelError
        When torch is not installed, an option is out of range, or a file cannot be used.
    """
    batches = parse_counts(options["batch"], name="batch", low=1)
    requests = max(max(batches), parse_whole(options["requests"], name="requests"))
    ks = parse_counts(options["k"], name="k", low=1)
    whole_array(max(ks), "k", low=1, high=MOST_DRAFTS, unit="token")
    new = parse_whole(options["max_new_tokens"], name="max_new_tokens")
    whole_array(new, "max_new_tokens", low=2, unit="token")
    seed = parse_whole(options["seed"], name="seed")
    whole_array(seed, "seed", low=0, high=2**31)
    temperatures = [
        parse_number(part, name="temperature") for part in options["temperature"].split(",")
    ]
    _need_torch("measure")
    measuring = importlib.import_module("calibrate.speculate.measuring")
    settings = measuring.Settings(
        target=options["target"],
        draft=options["draft"],
        device=options["device"],
        dtype=options["dtype"] or "",
        ks=ks,
        batches=batches,
        temperatures=tuple(temperatures),
        prompts=options["prompts"],
        requests=requests,
        max_new_tokens=new,
        profile=options["profile"],
        seed=seed,
    )
    record = measuring.run(settings)
    return to_json(record) if form == "json" else _measured_table(record)


def _measured_table(record: dict[str, Any]) -> str:
    """Return each point on a line with the prediction below it, times in ms."""
    out = Out()
    out.line(f"{record['target']}, drafts by {record['draft']}, {record['dtype']}")
    out.line(f"{record['device']}, torch {record['torch']}; times in ms")
    columns = ("temperature", "B", "k", "L", "", "hit", "alpha", "G")
    table = plain_table(*columns, *_TIMES, "S")
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
            f"temperature {point['temperature']:g}, B {point['batch']}, k {point['k']}: "
            f"accepted by position {listed}; "
            f"G {point['G']:.3f} [{point['G_low']:.3f}-{point['G_high']:.3f}, 90%]{_same(point)}"
        )
    return out.text()


def _same(point: dict[str, Any]) -> str:
    """Say how many greedy texts are those of plain decoding; the rest differ from a tie on."""
    same, requests = point["greedy_texts_equal"], point["requests"]
    return "" if same is None else f"; {same} of {requests} texts as plain decoding's"


_TIMES = ("T_p", "T_h", "T_d", "T_v", "T_o")


def _row(values: dict[str, Any]) -> list[str]:
    return [f"{values[name] * 1e3:.4g}" for name in _TIMES] + [f"{values['S']:.3f}"]


def _need_torch(command: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise SpecmodelError(
            f"{command} needs torch, which is not installed: pip install 'specmodel[torch]'"
        )
