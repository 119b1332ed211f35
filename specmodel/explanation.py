"""The derivation from T_p to k* in words and symbols, with a setup's numbers substituted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import sympy as sp

from specmodel import symbolic as sy
from specmodel.acceptance import Geometric, MeanLength
from specmodel.errors import DomainError
from specmodel.report import Setup, extrapolations, predict
from specmodel.roofline import Execution
from specmodel.sensitivity import sensitivity
from specmodel.speculation import RoundTime, regime

_QUOTED = 4  # values of a list that an error quotes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbers:
    """What is substituted: one batch and context, at the ideal level."""

    setup: Setup  # at the ideal level, with the k shown
    times: RoundTime
    values: dict[sp.Symbol, float]

    @property
    def width(self) -> int:
        return int(self.setup.drafter.rows(self.k))

    @property
    def k(self) -> int:
        assert self.setup.k is not None  # noqa: S101 (set by `_numbers`)
        return self.setup.k


def explain(setup: Setup) -> str:
    """Return the derivation with the numbers of the setup's one batch and one context.

    It is shown for the k asked for, or for the best k. Where off wins, or k = 0 was asked for,
    the best k >= 1 is shown: k = 0 leaves nothing to derive.

    Raises
    ------
    DomainError
        When the setup has several batches or contexts, or no k >= 1.
    """
    with extrapolations() as notes:
        lines = _derivation(setup)
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def latex(setup: Setup) -> str:
    """Return the formulas of the derivation, with their values, as a LaTeX ``align*`` block.

    At the ideal level, for the k that `explain` shows.

    Raises
    ------
    DomainError
        When the setup has several batches or contexts, or no k >= 1.
    """
    with extrapolations():
        derived, point = _point(setup)
        number = _numbers(derived, _k_shown(point))
        tokens = number.setup.tokens(number.k)
    times, one = number.times, sp.Integer(1)
    split = setup.execution.dp * setup.execution.pp
    decode, verify = (star / split for star in _stars(number))  # of one device, as the forms are
    name = str(regime(number.setup.batches[0], verify * split, decode * split))
    rows = [(sp.latex(symbol), "", f"{value:.6g}") for symbol, value in number.values.items()]
    rows += [
        (r"\rho", sp.latex(sy.F / sy.M), f"{number.values[sy.F] / number.values[sy.M]:.6g}"),
        ("T_p", _either(sy.memory_time(sy.kappa), sy.compute_time(one)), _ms(float(times.T_p))),
        ("T_v", _either(sy.memory_time(), sy.compute_time(sy.W)), _ms(float(times.T_v))),
        ("T_d", "", _ms(float(times.T_d))),
        (r"\kappa_v", sp.latex(sy.kappa_v()), ""),
        ("B_v^*", sp.latex(sy.critical_batch_closed()), _number(verify)),
        ("B_p^*", sp.latex(sy.critical_batch_closed(one, sy.kappa)), _number(decode)),
        ("G", r"1 + \sum_{j=1}^{k} a_j", f"{tokens:.4f}"),
        (rf"S_{{\mathrm{{{name}}}}}", sp.latex(sy.speedup_by_regime()[name]),
         f"{tokens / float(times.cost):.4f}"),
        ("W^*", sp.latex(sy.stationary_width()), ""),
    ]  # fmt: skip
    departs = _departures(number)
    lines = []
    for left, form, value in rows:
        if departs and form and value and left[0] in "TBS" and left != "T_p":
            lines += [f"  {left} &= {form}", f"  &\\rightarrow {value}"]
        else:
            lines.append(f"  {left} &= " + " = ".join(part for part in (form, value) if part))
    notes = [f"shown for k = {number.k}{_remark(setup, point)}", *departs]
    lines += [rf"  &\text{{{note}}}" for note in notes]
    body = " \\\\\n".join(lines)
    return f"\\begin{{align*}}\n{body}\n\\end{{align*}}"


def _departures(number: _Numbers) -> list[str]:
    """Say where the values hold more than the forms, which are then marked with an arrow."""
    setup, notes = number.setup, []
    if setup.target.routed_expert_params:
        notes.append("N grows with the rows of a pass; the batches are roots")
    if setup.target.state_bytes:
        notes.append("a recurrent state is read once and written for each position")
    if setup.drafter.hit_rate < 1:
        notes.append(f"drafts are found in {setup.drafter.hit_rate:g} of rounds: means over them")
    return notes


def _either(memory: sp.Expr, compute: sp.Expr) -> str:
    return rf"\max\left({sp.latex(memory)}, {sp.latex(compute)}\right)"


def _ms(seconds: float) -> str:
    return rf"{seconds * 1e3:.4g}\,\mathrm{{ms}}"


def _number(value: float) -> str:
    return f"{value:.6g}" if np.isfinite(value) else r"\infty"


def _point(setup: Setup) -> tuple[Setup, Mapping[str, Any]]:
    """Return the setup that is derived, with a best k where k = 0 was asked for, and its point."""
    for name, values in (("batch", setup.batches), ("context", setup.contexts)):
        if len(values) > 1:
            more = ", ..." if len(values) > _QUOTED else ""
            quoted = ", ".join(str(value) for value in values[:_QUOTED]) + more
            raise DomainError(f"explain takes one {name} (--{name}); got {quoted}")
    if not setup.k and not setup.k_max:
        raise DomainError("explain needs k_max >= 1 token: k = 0 leaves nothing to derive; got 0")
    derived = replace(setup, k=setup.k or None)
    return derived, predict(derived).points[0]


def _k_shown(point: Mapping[str, Any]) -> int:
    """Return the k asked for, or the best k >= 1."""
    return int(point["k"] or point["break_even_k"])


def _remark(setup: Setup, point: Mapping[str, Any]) -> str:
    """Say what the k shown is, where it is not the best one or not the one asked for."""
    remark = ""
    if setup.k == 0:
        best = "the best k" if point["k_star"] else "the best k from 1 on"
        remark = f", {best}: k = 0 was asked for and leaves nothing to derive"
    return remark if point["k_star"] else f"{remark} (off is better here)"


def _derivation(setup: Setup) -> list[str]:
    derived, point = _point(setup)
    number = _numbers(derived, _k_shown(point))
    one = sp.Integer(1)
    return [
        f"{setup.target.name} on {setup.device.label}, batch {setup.batches[0]}, context "
        f"{setup.contexts[0]}, {setup.drafter.kind}, {setup.acceptance.label}",
        f"shown for k = {number.k}{_remark(setup, point)}",
        "",
        "Ideal level: datasheet rates, memory and arithmetic overlap perfectly.",
        "",
        "1. What a pass moves and computes (per device)",
        *_values(number),
        "",
        "2. A decode step takes the longer of streaming and arithmetic",
        f"   T_p = max( {sy.memory_time(sy.kappa)}, {sy.compute_time(one)} )",
        f"       = max( {_sides(number, verify=False)} ) ms",
        "",
        f"3. So does verifying W = {number.width} positions, with kappa_v = {sy.kappa_v()}",
        f"   T_v = max( {sy.memory_time()}, {sy.compute_time(sy.W)} )",
        f"       = max( {_sides(number, verify=True)} ) ms",
        *_states(number),
        "",
        "4. The two are equal at the critical batch",
        f"   B_v* = {sy.critical_batch_closed()}",
        f"   B_p* = {sy.critical_batch_closed(one, sy.kappa)}",
        *_critical(number),
        "",
        "5. A round commits G tokens: 1 + the chance that the first j drafts are all accepted",
        *_tokens(number),
        "",
        "6. Speedup, T_o = 0",
        *(f"   regime {name:3} S = {form}" for name, form in sy.speedup_by_regime().items()),
        *_speedup(number),
        "",
        "7. The best width: G / (A + C W) is stationary where its derivative vanishes",
        f"   W = {sy.stationary_width()}",
        *_width(number),
        f"   the exact scan of k = 0..{max(setup.k_max, number.k)} "
        f"({setup.execution.level} level, basis {setup.basis}): "
        + (
            f"k* = {point['k_star']}, S* = {point['S_star']:.4f}" if point["k_star"] else "off wins"
        ),
        f"   there at k = {point['k']}: "
        + ", ".join(f"{name} = {point[name] * 1e3:.4g} ms" for name in ("T_p", "T_v", "T_d"))
        + f", S = {point['S']:.4f}",
        "",
        *_hangs_on(derived, number.k),
    ]


def _hangs_on(setup: Setup, k: int) -> list[str]:
    found = sensitivity(setup, k)
    lines = [
        f"8. What S at k = {k} hangs on ({setup.execution.level} level): with 10% less and more of"
    ]
    lines += [f"   {name:19} S = {low:.4f} and {high:.4f}" for name, (low, high) in found.items()]
    return lines


def _numbers(setup: Setup, k: int) -> _Numbers:
    ideal: Execution = replace(setup.execution, level="ideal")
    shown = replace(setup, execution=ideal, k=k)
    batch, context = setup.batches[0], setup.contexts[0]
    times = shown.round(batch, context, k)
    decode, bandwidth = times.decode, setup.device.memory_bandwidth
    share = ideal.layout.shard(setup.target)
    here = float(ideal.layout.of_replica(batch))  # sequences that a device works on at a time
    stored = share.weight_bytes / share.total_params
    values = {
        sy.B: here,
        sy.W: float(setup.drafter.rows(k)),
        sy.s: stored,
        sy.N: float(decode.weights) * bandwidth / stored,
        sy.M: bandwidth,
        sy.F: float(decode.flops / decode.compute),
        sy.c: float(decode.flops) / here,
        sy.kappa: float(decode.rows) * bandwidth / here,
        sy.r: ideal.kv_reread,
    }
    return _Numbers(setup=shown, times=times, values=values)


def _values(number: _Numbers) -> list[str]:
    mixed = number.setup.target.weight_dtype != number.setup.target.dtype
    peak = "dense peak, of the formats in use together" if mixed else "dense peak"
    texts = {
        sy.N: "weights streamed by a decode step",
        sy.s: "bytes a weight",
        sy.c: "FLOP a token, attention over the context included",
        sy.kappa: "KV bytes read a sequence"
        + (", and recurrent states read and written" if number.setup.target.state_bytes else ""),
        sy.F: f"FLOP/s, {peak}",
        sy.M: "B/s, memory bandwidth",
    }
    lines = [f"   {symbol} = {number.values[symbol]:.6g} {text}" for symbol, text in texts.items()]
    how = number.setup.execution
    if how.dp * how.pp > 1:
        lines.append(
            f"   B = {number.values[sy.B]:g} sequences that a device works on at a time (dp "
            f"{how.dp}, pp {how.pp})"
        )
    ratio = number.values[sy.F] / number.values[sy.M]
    return [*lines, f"   rho = F / M = {ratio:.6g} FLOP/B"]


def _sides(number: _Numbers, *, verify: bool) -> str:
    """Return the two sides of a pass's maximum; an MoE's wider pass streams more weights."""
    one = number.times.verify if verify else number.times.decode
    return ", ".join(f"{float(t) * 1e3:.4g}" for t in (one.weights + one.rows, one.compute))


def _states(number: _Numbers) -> list[str]:
    """Say how recurrent states depart from the form of kappa_v."""
    if not number.setup.target.state_bytes:
        return []
    moved = float(number.times.verify.rows) * number.setup.device.memory_bandwidth
    return [
        "   (a recurrent state is read once and written for each of the W positions, so here",
        f"   kappa_v = {moved / number.values[sy.B]:.6g}: the numbers hold it, the form not)",
    ]


def _stars(number: _Numbers) -> tuple[float, float]:
    context = number.setup.contexts[0]
    decode, verify = (float(x) for x in number.setup.critical_batch(context, [1, number.width]))
    return decode, verify


def _critical(number: _Numbers) -> list[str]:
    decode, verify = _stars(number)
    what = "KV and states" if number.setup.target.state_bytes else "KV"
    never = f"infinite: the denominator is <= 0, reading {what} always takes longer"
    lines = [
        f"   {name} = " + (f"{star:.6g}" if np.isfinite(star) else never)
        for name, star in (("B_v*", verify), ("B_p*", decode))
    ]
    if (split := number.setup.execution.dp * number.setup.execution.pp) > 1:
        lines.append(f"   (of all sequences, {split} times what the form gives for one device)")
    if number.setup.target.routed_expert_params:
        lines.append("   (N depends on the rows of the pass for an MoE, so these are roots)")
    return lines


def _tokens(number: _Numbers) -> list[str]:
    alpha = _alpha(number.setup)
    if alpha is not None:
        lines = [f"   G = {sy.expected_tokens_closed()}, alpha = {alpha:.4g}"]
        if number.k <= 8:
            lines.append(f"     = {sy.expected_tokens(number.k)}")
    else:
        rates = np.asarray(number.setup.acceptance.rates(number.k))
        lines = ["   a_j = " + ", ".join(f"{a:.4g}" for a in rates)]
    hit = number.setup.drafter.hit_rate
    if hit < 1:
        lines.append(f"   drafts are found in {hit:g} of rounds; the others commit one token")
    return [*lines, f"     = {number.setup.tokens(number.k):.4f}"]


def _alpha(setup: Setup) -> float | None:
    """Return the alpha of a geometric law, None for any other."""
    law = setup.acceptance
    if isinstance(law, Geometric | MeanLength) and np.ndim(law.alpha) == 0:
        return float(np.asarray(law.alpha))
    return None


def _speedup(number: _Numbers) -> list[str]:
    t, G = number.times, number.setup.tokens(number.k)
    decode, verify = _stars(number)
    name = str(regime(number.setup.batches[0], verify, decode))
    T_p, T_v, T_d = (float(x) * 1e3 for x in (t.T_p, t.T_v, t.T_d))
    hit = number.setup.drafter.hit_rate
    lines = [f"   T_p = {T_p:.4g} ms, T_v = {T_v:.4g} ms, T_d = {T_d:.4g} ms"]
    if hit < 1:
        lines.append(f"   (T_v over all rounds: {hit:g} of them verify W rows, the others one)")
    lines.append(
        f"   here regime {name}: S = {G:.4f} x {T_p:.4g} / ({T_d:.4g} + {T_v:.4g}) = "
        f"{G / float(t.cost):.4f}"
    )
    if name == "III" and hit == 1:
        lines.append(f"   compute-bound: S <= G / W = {G / number.width:.4f} <= 1")
    return lines


def _width(number: _Numbers) -> list[str]:
    """Return the closed form on the affine piece around k, where the law is geometric."""
    alpha, drafter = _alpha(number.setup), number.setup.drafter
    if drafter.hit_rate < 1 or int(drafter.rows(number.k)) != number.k + 1:
        return ["   (the form is for drafters that verify W = k + 1 rows in every round)"]
    largest = drafter.max_k
    if largest == 1:
        return ["   (the form needs the cost of two k from 1 on; this drafter drafts one token)"]
    low = number.k if largest is None or number.k < largest else number.k - 1
    cost, following = (_cost(number.setup, k) for k in (low, low + 1))
    slope = following - cost
    fixed = cost - slope * (low + 1)
    if slope <= 0:
        span = f"from k = {low} to {low + 1}"
        return [f"   ideal level, {span}: a round costs no more, so no width is stationary"]
    if alpha is None or not 0 < alpha < 1 or fixed <= 0:
        return []
    at = {sy.alpha: alpha, sy.A: fixed, sy.C: slope}
    W = float(sp.re(sy.stationary_width().subs(at).evalf(30)))
    return [
        f"   ideal level, from k = {low} to {low + 1}: A = {fixed * 1e3:.4g} ms, "
        f"C = {slope * 1e3:.4g} ms, so W = {W:.4g} (k = {W - 1:.4g} before rounding)"
    ]


def _cost(setup: Setup, k: int) -> float:
    times = setup.round(setup.batches[0], setup.contexts[0], k)
    return float(times.T_d + times.T_v)
