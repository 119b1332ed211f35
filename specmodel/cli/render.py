"""A prediction as a table for people, or as JSON or CSV for machines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.text import Text

from specmodel._version import __version__
from specmodel.cli.output import STYLES, Out, Table, styled, to_csv, to_json
from specmodel.cli.setup import Request
from specmodel.report import Answer, Prediction, Setup, does_not_fit, headline
from specmodel.uncertainty import CONFIDENCE

_MOST_REASONS = 12


def prediction_text(request: Request, result: Prediction, form: str) -> str:
    """Return a prediction in the form asked for."""
    if form == "json":
        return to_json(_prediction_json(request, result))
    if form == "csv":
        names = ("gpu", "model", "drafter", "acceptance", "tp", "weights", "kv_dtype", "level")
        echo = {name: request.inputs[name] for name in names}
        echo |= {"basis": request.setup.basis, "specmodel_version": __version__}
        return to_csv([{**point, **echo} for point in result.points])
    return _prediction_table(request, result)


def _prediction_json(request: Request, result: Prediction) -> dict[str, Any]:
    return {
        "inputs": {**request.inputs, "assumed": request.assumed},
        "basis": request.setup.basis,
        "specmodel_version": __version__,
        "warnings": list(result.warnings),
        "answers": [
            {
                "context": answer.context,
                "text": headline(answer, request.setup),
                "schedule": [[run.first, run.last, run.k] for run in answer.schedule],
                "gaps": list(answer.gaps),
                "max_batch_without_drafter": answer.plain.batch,
                "tokens_per_second_at_max_batch_without_drafter": answer.plain.tokens_per_second,
                "max_batch_with_drafter": answer.with_drafter.batch,
                "tokens_per_second_at_max_batch_with_drafter": (
                    answer.with_drafter.tokens_per_second
                ),
                **_worth(request.setup, answer),
                "context_where_kv_passes_weights": answer.kv_passes_weights,
            }
            for answer in result.answers
        ],
        "context_where_speedup_rises": result.speedup_rises_from,
        "points": [dict(point) for point in result.points],
    }


def _worth(setup: Setup, answer: Answer) -> dict[str, float | None]:
    """Return cost and energy of a token at the largest batch, without and with the drafter."""
    rates = {
        "_without_drafter": answer.plain.tokens_per_second,
        "_with_drafter": answer.with_drafter.tokens_per_second,
    }
    found: dict[str, float | None] = {}
    for name, rate in rates.items():
        drafting = name == "_with_drafter"
        cost = setup.cost_per_million_tokens(rate, drafting=drafting)
        found[f"cost_per_million_tokens{name}"] = cost
        found[f"joules_per_token{name}"] = setup.joules_per_token(rate, drafting=drafting)
    return found


def _prediction_table(request: Request, result: Prediction) -> str:
    setup, inputs = request.setup, request.inputs
    out = Out()
    draft = f" ({inputs['draft']})" if inputs["draft"] else ""
    out.line(
        f"specmodel {__version__} | {setup.device.label} | {setup.target.name} "
        f"{inputs['weights']} | {inputs['drafter']}{draft} | level {inputs['level']}, "
        f"basis: {setup.basis}"
    )
    out.line()
    for answer in result.answers:
        where = f"context {answer.context}: " if len(result.answers) > 1 else ""
        where += "" if answer.plain.batch else "does not fit; if it did, "
        out.line(where, *_coloured(headline(answer, setup), _verdict(answer, result, setup)))
        for gap in answer.gaps:
            out.line(f"  {gap}")
        out.line(f"  {_capacity(request, answer)}")
        worth = _worth(setup, answer)
        plain, spec = (
            worth[f"cost_per_million_tokens{x}"] for x in ("_without_drafter", "_with_drafter")
        )
        if plain is not None and spec is not None:
            out.line(f"  a million tokens: {plain:.3g} USD plain, {spec:.3g} with the drafter")
    close = [p for p in result.points if p["verdict"] == "too close to call"]
    if close:
        at = ", ".join(f"batch {p['batch']} context {p['context']}" for p in close[:6])
        out.line(f"  within 5% of S = 1, too close to call: {at}")
    out.line()
    out.table(_points_table(result.points, k=setup.k))
    out.line("cost: a round over a plain step; S: speedup; alpha even: acceptance at which S = 1")
    out.line()
    out.table(_use_table(result.points))
    out.line("shares of a round: verification by kind of operator, then drafting")
    out.line("MBU, MFU: bandwidth and peak FLOP/s used by decode/verify")
    out.line("GB: memory a device; *: does not fit")
    out.line()
    _critical(out, result.points)
    if result.speedup_rises_from is not None:
        start, batches = result.speedup_rises_from, setup.batches
        where = f"from context {start:.0f} on" if start else "at every context"
        out.line(
            f"{where}, batch {max(batches)} speeds up as much as batch {min(batches)} (if both fit)"
        )
    out.line()
    out.line("Why")
    for index in _chosen(len(result.points)):
        point = result.points[index]
        out.line(f"  batch {point['batch']}, context {point['context']}: {result.why[index]}")
    out.line()
    _assumptions(out, request, result)
    return out.text()


def _verdict(answer: Answer, result: Prediction, setup: Setup) -> str | None:
    """Return the verdict of a headline, None where speculation is off as asked."""
    if setup.k == 0:
        return None
    here = {p["verdict"] for p in result.points if p["context"] == answer.context}
    pays = any(run.k for run in answer.schedule)
    sure = "on" in here if pays else answer.best_loss > 1  # it would pay, but does not fit
    if "too close to call" in here and not sure:
        return "too close to call"
    return "on" if pays else "off"


def _coloured(sentence: str, verdict: str | None) -> tuple[Text, str]:
    """Return a headline whose first clause has its verdict's colour, and the rest."""
    clause, colon, rest = sentence.partition(":")
    return styled(clause, verdict and STYLES[verdict]), colon + rest


_POINTS = (
    "batch", "context", "k", "S", "S 90%", "best k", "best S", "tok/s", "cost", "G", "regime",
    "tok/s/seq", "T_p ms", "T_v ms", "T_d ms", "alpha even",
)  # fmt: skip
"""Columns of the answer, the most important first."""
_USE = ("batch", "context", "k", "GB", "MBU", "MFU", "draft", "weight GEMMs", "attention")
"""Columns of what a round uses, the most important first."""


def _points_table(points: Sequence[Mapping[str, Any]], *, k: int | None) -> Table:
    """The answer: times, cost, speedup. With a k of the user's, the best one beside it."""
    fixed, asked = k is not None, k != 0
    best = ("best k", "best S") if fixed else ()
    sure = ("S 90%",) if points[0]["S_low"] is not None else ()
    table = Table(
        "batch", "context", "k", "G", "T_p ms", "T_v ms", "T_d ms", "cost", "S", *sure, *best,
        "regime", "alpha even", "tok/s/seq", "tok/s", order=_POINTS,
    )  # fmt: skip
    for p in points:
        even = p["alpha_break_even"]
        table.add_row(
            str(p["batch"]),
            str(p["context"]),
            _drafts(p["k"]),
            f"{p['G']:.2f}",
            *(_ms(p[name]) for name in ("T_p", "T_v", "T_d")),
            f"{p['round_cost']:.2f}",
            styled(f"{p['S']:.2f}", STYLES[p["verdict"]] if asked else None),
            *([f"{p['S_low']:.2f}-{p['S_high']:.2f}"] if sure else []),
            *((_drafts(p["k_star"]), f"{p['S_star']:.2f}") if fixed else ()),
            p["regime"],
            "-" if not p["k"] else "none" if even is None else f"{even:.2f}",
            f"{p['tokens_per_second_per_sequence']:.0f}",
            f"{p['tokens_per_second']:.0f}",
        )
    return table


def _use_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """Where a round's time goes, and how much of the device it uses."""
    groups = list(
        dict.fromkeys(g for p in points for g, share in p["time_shares"].items() if share)
    )
    shown = (group.removeprefix("verify ") for group in groups)
    table = Table("batch", "context", "k", *shown, "MBU", "MFU", "GB", order=_USE)
    for p in points:
        table.add_row(
            str(p["batch"]),
            str(p["context"]),
            _drafts(p["k"]),
            *(f"{p['time_shares'].get(group, 0.0):.0%}" for group in groups),
            f"{p['mbu_decode']:.0%}/{p['mbu_verify']:.0%}",
            f"{p['mfu_decode']:.0%}/{p['mfu_verify']:.0%}",
            styled(f"{p['memory_bytes'] / 1e9:.1f}", None) + unfit(p["fits"]),
        )
    return table


def unfit(fits: bool) -> Text:
    """Return the mark of what does not fit."""
    return styled("" if fits else "*", STYLES["off"])


def _drafts(k: int) -> str:
    return str(k) if k else "off"


def _capacity(request: Request, answer: Answer) -> str:
    """Return what fits, and whether the drafter's memory costs more than it brings."""
    plain, spec = answer.plain, answer.with_drafter
    if not plain.batch:
        setup = request.setup
        need = answer.devices_needed
        layout = setup.execution.layout
        tp = need and need * layout.tp // layout.devices
        more = f"{need} would (--tp {tp})" if need else "no --tp that divides it would"
        size = f"{setup.device.memory_capacity / 1e9:.0f} GB"
        return f"{setup.execution.layout.devices} device(s) of {size} cannot hold it; {more}"
    text = f"largest batch that fits: {plain.batch} plain ({plain.tokens_per_second:.0f} tok/s)"
    if request.setup.k == 0:
        return text
    if not spec.batch:
        why = "" if answer.best_loss > 1 else f": {does_not_fit(request.setup, answer)}"
        return f"{text}; with the drafter not one sequence fits{why}"
    yields = f"{spec.tokens_per_second:.0f} tok/s at k = {spec.k}"
    return f"{text}, {spec.batch} with the drafter ({yields})"


def _critical(out: Out, points: Sequence[Mapping[str, Any]]) -> None:
    """Print the critical batches, a line for each context."""
    for context in dict.fromkeys(p["context"] for p in points):
        here = [p for p in points if p["context"] == context]
        verify = {p["W"]: _batch(p["B_v_star"]) for p in here if p["k"]}
        if len(verify) > 1 and set(verify.values()) == {"never"}:
            text = f"; verifying {min(verify)} to {max(verify)} rows: never"
        else:
            text = "".join(f"; verifying {W} rows: {star}" for W, star in verify.items())
        out.line(
            f"turns compute-bound at batch (context {context}): decoding: "
            f"{_batch(here[0]['B_p_star'])}{text}"
        )
    out.line(
        f"weight GEMMs turn compute-bound at {points[0]['gemm_turn_rows']:.0f} rows (batch x W)"
    )


def _assumptions(out: Out, request: Request, result: Prediction) -> None:
    inputs = request.inputs
    out.line("Assumed, as you did not say")
    for name, value in request.assumed.items():
        out.line(f"  {name}: {value}")
    out.line("Settings")
    hit = f", hit rate {inputs['hit_rate']:g}" if inputs["hit_rate"] < 1 else ""
    out.line(
        f"  acceptance {inputs['acceptance']}{hit}; k {inputs['k']} (up to {inputs['k_max']}); "
        f"{_layout(inputs)}; dtype {inputs['dtype']}, weights {inputs['weights']}, "
        f"KV {inputs['kv_dtype']}; KV reread R = {inputs['kv_reread']:g}; "
        f"expert overlap {inputs['expert_overlap']:g}"
    )
    link = request.setup.device.link
    if inputs["devices"] > 1 and link is not None:
        if inputs["level"] == "ideal":
            out.line("  collectives left out at the ideal level")
        else:
            e, network = request.setup.execution.effective, inputs["network"]
            away = f"; between nodes {network} us, GB/s" if network else ""
            out.line(
                f"  collectives over {link[0]}, {e.eta_link:g} of {link[1] / 1e9:.0f} GB/s a "
                f"direction and {e.t_link * 1e6:g} us a step{away}"
            )
    for text in engine_lines(request.setup):
        out.line(f"  {text}")
    if request.setup.execution.level == "operators":
        for text in _efficiencies(request.setup):
            out.line(f"  {text}")
    for text in result.warnings:
        out.line(f"  note: {text}")


def engine_lines(setup: Setup) -> list[str]:
    """Say whose host time the numbers hold, and what of it nobody measured."""
    engine = setup.execution.engine
    if engine is None:
        return ["T_h = T_o = 0: no serving engine chosen, its host time is not in these numbers"]
    lines = [
        f"host time of {engine.title}: {engine.step * 1e3:.2f} ms a step and "
        f"{engine.step_sequence * 1e6:.1f} us a sequence; a round {engine.round * 1e3:.2f} ms and "
        f"{engine.round_row * 1e6:.1f} us a row more"
    ]
    lines += [f"  fitted to {title}" for title in engine.studies.values()]
    others = [name for name in engine.unknown if getattr(engine, name) > 0]
    if others:
        lines.append(f"  taken from other engines, as nobody measured it: {_words(others)}")
    most = max(setup.batches)
    if most > engine.max_running:
        lines.append(f"  note: it runs {engine.max_running:g} sequences at most by default")
    if most > engine.max_running_speculating:
        lines.append(
            f"  note: with speculation it runs {engine.max_running_speculating:g} sequences at "
            "most by default"
        )
    return lines


def _words(names: Iterable[str]) -> str:
    return ", ".join(sorted(name.replace("_", " ") for name in names))


def _efficiencies(setup: Setup) -> list[str]:
    """Say what the times of operators rest on."""
    e = setup.execution.effective
    assumed = (
        f"{e.t_op * 1e6:g} us an operator, {e.eta_m:g} of bandwidth, {e.eta_f:g} of peak FLOP/s, "
        f"p = {e.p:g}"
    )
    found = setup.device.calibration
    if not setup.calibrated or found is None:
        return [f"{e.basis} efficiencies, nothing measured on this device: {assumed}"]
    source = found.source
    made = f"{source.get('table', 'a table')}, {source.get('engine', 'engine not stated')}"
    lines = [f"operators fitted to measurements ({made}); intervals hold {CONFIDENCE:.0%}"]
    if (others := setup.basis.partition(" for ")[2]) != "":
        lines.append(f"not measured, {e.basis}: {others}: {assumed}")
    if any("r" in f.unknown() for f in found.operators.get("attention", {}).values()):
        lines.append("attention was measured with one query position: wider ones are taken as it")
    return lines


def _layout(inputs: Mapping[str, Any]) -> str:
    """Return the degrees of parallelism that are in use."""
    degrees = [f"{name} {inputs[name]}" for name in ("dp", "pp") if inputs[name] > 1]
    return ", ".join([f"tp {inputs['tp']}", *degrees, *(["ep"] if inputs["ep"] else [])])


def _chosen(count: int) -> Iterable[int]:
    return range(count) if count <= _MOST_REASONS else (0, count // 2, count - 1)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _batch(value: float | None) -> str:
    return "never" if value is None else f"{value:.0f}"
