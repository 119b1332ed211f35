"""``validate``: errors by source, engine, drafter, architecture and batch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from specmodel._version import __version__
from specmodel.cli.output import Out, Table, to_json
from specmodel.cli.parsing import optional, parse_number
from specmodel.errors import DomainError, real_array
from specmodel.files import check_output, write_text
from specmodel.validation import Row, golden_rows, read_cases, read_results, validate
from specmodel.validation.scores import report


def run_validation(options: dict[str, Any], form: str, plot: str | None) -> tuple[str, bool]:
    """Return the text, and whether the medians are small enough."""
    most = optional(parse_number, options["max_median"], name="max_median")
    if most is not None:
        real_array(most, "max_median", low=0)
    if plot is not None:
        from specmodel.plots import check_file

        check_file(plot)
    if options["report"] is not None:
        from specmodel.validation.page import START

        check_output(options["report"], endings=(".md",), own_start=START, what="report")
    rows: list[Row] = [row for file in options["results"] for row in read_results(file)]
    rows += [row for file in options["cases"] for row in read_cases(file)]
    if not options["results"] and not options["cases"]:
        rows = golden_rows()
    if len({row.id for row in rows}) < len(rows):
        raise DomainError("two rows have the same id")
    result = validate(rows, each=options["each"])
    values = report(result)
    if plot is not None:
        from specmodel.plots import save, validation_figure

        save(validation_figure(values), plot)
    if options["report"] is not None:
        from specmodel.validation.page import page

        own = bool(options["results"] or options["cases"])
        text = page(values, command=_command(options, plot), figure=plot, explained=not own)
        write_text(options["report"], text)
    summary = values["summary"]
    medians = [summary[name]["median"] for name in ("shape", "given_acceptance")]
    stated = [median for median in medians if median is not None]
    passed = most is None or (bool(stated) and max(stated) <= most)
    if form == "json":
        return to_json({"specmodel_version": __version__, **values}), passed
    return _text(values), passed


def _command(options: Mapping[str, Any], plot: str | None) -> str:
    """Return the command that was given, without the way to its files."""
    words = ["specmodel validate"]
    for name in ("results", "cases"):
        words += [f"--{name} {Path(file).name}" for file in options[name]]
    if options["each"] != "study":
        words.append(f"--each {options['each']}")
    words += [f"--plot {Path(plot).name}"] if plot else []
    return " ".join([*words, f"--report {Path(options['report']).name}"])


_HEAD = ("", "n", "median", "mean", "p90", "bias")


def _text(values: Mapping[str, Any]) -> str:
    summary = values["summary"]
    given, shape = summary["given_acceptance"], summary["shape"]
    out = Out()
    out.line(f"specmodel {__version__} | {len(values['rows'])} rows")
    out.line("errors of S, |predicted / measured - 1|; bias is signed")
    table = Table(*_HEAD, order=_HEAD, left=_HEAD[:1], fold=_HEAD[0])
    lines = (
        ("shape, held out", shape),
        ("shape, in-study", shape["in_study"]),
        ("given acceptance, held out: engines that serve", given),
        ("  mixtures of experts", given["moe"]),
        ("  research implementations", given["research"]),
        ("given acceptance, in-study: engines that serve", given["in_study"]),
        ("  mixtures of experts", given["in_study"]["moe"]),
        ("  research implementations", given["in_study"]["research"]),
    )
    for name, errors in lines:
        table.add_row(name, *_cells(errors))
    out.table(table)
    alone = given["interval_only"]
    if alone["n"]:
        out.line(
            f"{alone['n']} rows of engines that nobody else measured have an interval only; it "
            f"holds {alone['held']:.0%}"
        )
    _decisions(out, summary["decisions"])
    if summary["time_shares"]["n"]:
        out.line(
            f"shares of time in {summary['time_shares']['n']} rows: "
            f"{summary['time_shares']['points']:.1f} points off on average "
            f"({summary['time_shares']['in_study']} in-study)"
        )
    for group, by in values["groups"].items():
        heads = (group, "shape n", "median", "p90", "given acceptance n", "median", "p90")
        important = (group, "given acceptance n", "shape n", "median")
        table = Table(*heads, order=important, left=heads[:1], fold=group)
        for key, both in by.items():
            cells = [_cells(both[name]) for name in ("shape", "given_acceptance")]
            table.add_row(
                shorten(key, 60, placeholder="..."), *(c[i] for c in cells for i in (0, 1, 3))
            )
        out.table(table)
    out.line("not predicted, or not counted")
    for why, count in values["excluded"].items():
        out.line(f"  {count}: {why}")
    return out.text()


def _decisions(out: Out, found: Mapping[str, Any]) -> None:
    if found["series"]:
        out.line(
            f"drafts or tree chosen: the best or within 3% in {found['best_or_near']:.1%} of "
            f"{found['series']} series; {found['lost']:.1%} lost on average{_longest(found)}"
        )
    if found["rows"]:
        caught = found["losses_caught"]
        losses = f", {caught:.1%} of {found['losses']} losses caught" if found["losses"] else ""
        out.line(
            f"on or off: right in {found['on_off_right']:.1%} of {found['rows']} rows (always on "
            f"{found['always_on_right']:.1%}){losses}; "
            f"{found['too_close_to_call']} too close to call"
        )


def _longest(found: Mapping[str, Any]) -> str:
    """Say what a rule without a model scores."""
    if not found["longest_series"]:
        return ""
    right, series = found["longest_best_or_near"], found["longest_series"]
    return f"; the most tokens per round would be right in {right:.1%} of {series}"


def _cells(errors: Mapping[str, Any]) -> list[str]:
    if not errors["n"]:
        return ["0", "-", "-", "-", "-"]
    sizes = (f"{errors[name]:.1%}" for name in ("median", "mean", "p90"))
    return [str(errors["n"]), *sizes, f"{errors['bias']:+.1%}"]
