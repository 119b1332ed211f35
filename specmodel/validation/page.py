"""A validation as a page of Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specmodel._version import __version__

_MISSES = 12
_LONGEST = 100

START = "# Accuracy\n\nHow far `specmodel` is off"
"""How a page of this module begins."""

_ABOUT = """\
# Accuracy

How far `specmodel` is off from measurements that others have published. This page is written by

```console
{command}
```

Errors are of S, |predicted / measured - 1|: number of rows, median, mean, 90th percentile, and
bias, which is signed.

**Given acceptance** takes the row's own tokens per round, G, so that what is tested is the cost
of a round. **Shape** takes the speedup at a series' smallest batch instead, which tells the
acceptance, and predicts the others; that first row does not count.

**Held out**: the engine's host times are those of other studies, moved by two rows of the study
itself on that engine and device: its first plain rate, which is never judged, and its first
speculative row at batch 1, which does not count. Where nobody else measured an engine's host
time and the study has no such row, a row has an interval only. **In-study**: with the host times
that `hardware_profiles/engines` holds of the study, not moved by any row, nor its kernels' speed.

Prompts, outputs and hit rates by dataset are those of one public profile (SpecDecode-Bench's
simulator, `specmodel/data/requests.yaml`); its authors' figures are among the rows.
"""

_KNOWN = """\
The table that ships holds the first three rows of each table, target, drafter and device of a
study, the figures of SpecDecode-Bench and users' reports whole.

What is known to be behind many of them:

- Two studies of one engine differ in its host time: an EAGLE pass of vLLM takes 0.70 ms by one,
  0.96 ms by another. What a study leaves unsaid (versions, CPUs, flags) is in there. Two rows
  of your own (`specmodel fit`) settle it.
- Trees on SGLang ran on another attention backend than chains; from batch 64 to 128 its speeds
  stand still, as under a cap on running sequences, which is not stated.
- One row's two host times do not carry over to every draft model of its study: with
  Sheared-LLaMA-1.3B for Vicuna-33B drafting seems to take longer than a 68M draft's layers
  tell.
- MagicDec's passes launch for longer than the two gpt-fast rows of another paper tell.
- T5 (Leviathan et al.) was compared with another code base; token recycling is a tree that is
  taken for a lookup; 32 drafts of an EAGLE head are priced as a chain; GLM-4.5-Air's MTP
  block costs more at batch 4 than its experts and passes do.
- Depths, trees and lengths of requests that a row does not state are the method's usual ones.
- Devices without a calibration are predicted with generic efficiencies.
- A draft model's KV cache is read at every draft pass; at large batches Qwen3-0.6B spent less
  time than that takes.
- Lookups in caches that requests share (TensorRT-LLM) find more than the acceptance that was
  measured elsewhere.
"""


def page(
    values: Mapping[str, Any], *, command: str, figure: str | None = None, explained: bool = False
) -> str:
    """Return the page.

    Parameters
    ----------
    values : mapping
        As `specmodel.validation.scores.report` returns it.
    command : str
        What writes the page.
    figure : str, optional
        Path of the figure, as seen from the page.
    explained : bool
        Whether the rows are those that ship, whose misses are explained.
    """
    summary = values["summary"]
    given, shape, decided = (summary[n] for n in ("given_acceptance", "shape", "decisions"))
    parts = [_ABOUT.format(command=command)]
    if figure is not None:
        parts.append(f"![Predicted against measured speedup]({Path(figure).name})\n")
    parts.append("## In short\n")
    parts.append(
        _errors_table(
            [
                ("shape, held out", shape),
                ("shape, in-study", shape["in_study"]),
                ("given acceptance, held out: engines that serve", given),
                ("given acceptance, held out: mixtures of experts", given["moe"]),
                ("given acceptance, held out: research implementations", given["research"]),
                ("given acceptance, in-study: engines that serve", given["in_study"]),
                ("given acceptance, in-study: mixtures of experts", given["in_study"]["moe"]),
                (
                    "given acceptance, in-study: research implementations",
                    given["in_study"]["research"],
                ),
            ]
        )
    )
    parts.append(_decisions(decided, summary["time_shares"], given["interval_only"]))
    for name, groups in values["groups"].items():
        parts.append(f"## By {name}\n")
        rows = [
            (
                key[:_LONGEST],
                *_cells(both["shape"]),
                *_cells(both["shape"]["in_study"])[:2],
                *_cells(both["given_acceptance"]),
            )
            for key, both in groups.items()
        ]
        head = (name, "shape n", "median", "p90", "in-study n", "median")
        parts.append(_table((*head, "given acceptance n", "median", "p90"), rows))
    parts.append("## Largest misses\n")
    parts.append(_misses(values["rows"]))
    if explained:
        parts.append(_KNOWN)
    parts.append("## Not predicted, or not counted\n")
    parts.append(_table(("rows", "why"), [(n, why) for why, n in values["excluded"].items()]))
    parts.append(f"specmodel {__version__}, {len(values['rows'])} rows.\n")
    return "\n".join(parts)


def _cells(errors: Mapping[str, Any]) -> tuple[str, str, str]:
    if not errors["n"]:
        return "0", "-", "-"
    return str(errors["n"]), f"{errors['median']:.1%}", f"{errors['p90']:.1%}"


def _errors_table(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    lines = [
        (name, e["n"], *(f"{e[x]:.1%}" for x in ("median", "mean", "p90")), f"{e['bias']:+.1%}")
        for name, e in rows
        if e["n"]
    ]
    return _table(("", "n", "median", "mean", "p90", "bias"), lines)


def _decisions(
    found: Mapping[str, Any], shares: Mapping[str, Any], interval: Mapping[str, Any]
) -> str:
    lines = []
    if found["series"]:
        lines.append(
            f"- The number of drafts (or tree) chosen is the measured best or within 3% of its "
            f"speed in {found['best_or_near']:.1%} of {found['series']} series; "
            f"{found['lost']:.1%} of speed is lost on average."
        )
    if found["rows"]:
        caught = found["losses_caught"]
        losses = f"; {caught:.1%} of {found['losses']} losses are caught" if found["losses"] else ""
        lines.append(
            f"- On or off is right in {found['on_off_right']:.1%} of {found['rows']} rows (always "
            f"on: "
            f"{found['always_on_right']:.1%}){losses}. {found['too_close_to_call']} are too close "
            "to call (within 5% of 1), which is right where the measurement is within 5% of 1."
        )
    if shares["n"]:
        lines.append(
            f"- Shares of time (drafting, verifying, the rest) in {shares['n']} rows are "
            f"{shares['points']:.1f} points off on average ({shares['in_study']} in-study)."
        )
    if interval["n"]:
        lines.append(
            f"- {interval['n']} rows have an interval only, which holds "
            f"{interval['held']:.0%} of the measurements."
        )
    return "\n".join(lines) + "\n"


def _misses(rows: Sequence[Mapping[str, Any]]) -> str:
    found = []
    for row in rows:
        for test, anchor in (("given_acceptance", "engine"), ("shape", "shape")):
            if row[test] is not None and anchor not in row["anchors"]:
                found.append((row[test] / row["measured"] - 1, test, row))
    found.sort(key=lambda one: -abs(one[0]))
    lines = [
        (
            f"`{row['id']}`",
            test.replace("_", " "),
            f"{row['measured']:.2f}",
            f"{row[test]:.2f}",
            f"{off:+.0%}",
            "; ".join([row["basis"], *row["assumed"]]),
        )
        for off, test, row in found[:_MISSES]
    ]
    return _table(("row", "test", "measured", "predicted", "off", "rests on"), lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell).replace("|", "/") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
