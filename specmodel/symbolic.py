"""The closed forms derived with SymPy from first principles, independent of the numeric code.

`explain` prints the derivation with a setup's numbers substituted.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
import sympy as sp

from specmodel.acceptance import Geometric, MeanLength
from specmodel.errors import ExtrapolationWarning
from specmodel.report import Setup, predict
from specmodel.roofline import Execution, critical_batch, pass_time
from specmodel.speculation import draft_time, tokens_per_round

B, W, s, N, M, F, c, kappa, r = sp.symbols("B W s N M F c kappa r", positive=True)
kappa_pass = sp.Symbol("kappa_v", positive=True)
rho = sp.Symbol("rho", positive=True)
alpha, A, C = sp.symbols("alpha A C", positive=True)
T_p, T_v, T_d, G = sp.symbols("T_p T_v T_d G", positive=True)
k = sp.Symbol("k", integer=True, nonnegative=True)


def expected_tokens(drafts: int) -> sp.Expr:
    """Return G as the mean of the number of committed tokens Z, for a whole k.

    A round commits z <= k tokens when z - 1 drafts are accepted and the next is not, and k + 1
    when all are.
    """
    stops = sum(z * alpha ** (z - 1) * (1 - alpha) for z in range(1, drafts + 1))
    return sp.expand(stops + (drafts + 1) * alpha**drafts)


def expected_tokens_closed() -> sp.Expr:
    """Return G for a symbolic k: the sum of the survival probabilities alpha^j."""
    j = sp.Symbol("j", integer=True)
    generic = sp.summation(alpha**j, (j, 0, k))
    return sp.simplify(generic.args[1][0] if isinstance(generic, sp.Piecewise) else generic)


def kappa_v() -> sp.Expr:
    """Return the KV bytes a verification pass reads: once, and r times more for each extra row."""
    return kappa * (1 + r * (W - 1))


def memory_time(kv: sp.Expr = kappa_pass) -> sp.Expr:
    """Return the time to stream the weights and `kv` bytes of KV a sequence."""
    return (s * N + B * kv) / M


def compute_time(width: sp.Expr) -> sp.Expr:
    """Return the time of the pass's arithmetic."""
    return width * B * c / F


def critical_batch_closed(width: sp.Expr = W, kv: sp.Expr = kappa_pass) -> sp.Expr:
    """Return the batch at which arithmetic and memory take equally long.

    Decoding is ``width`` 1 with ``kv`` kappa.
    """
    (root,) = sp.solve(sp.Eq(memory_time(kv), compute_time(width)), B)
    return sp.cancel(root.subs(F, rho * M))


def speedup_by_regime() -> dict[str, sp.Expr]:
    """Return S with T_o = 0: verification memory-bound (I), only decoding (II), neither (III)."""
    decode = memory_time(kappa)
    return {
        "I": G / (T_d / T_p + sp.cancel(memory_time() / decode)),
        "II": G / (T_d / T_p + sp.cancel(compute_time(W) / decode)),
        "III": G / (T_d / T_p + sp.cancel(compute_time(W) / compute_time(sp.Integer(1)))),
    }


def stationary_width() -> sp.Expr:
    """Return the W at which G / (A + C W) is stationary, in terms of Lambert's lower branch."""
    a = -sp.log(alpha)
    u = -sp.LambertW(-sp.exp(-1 - a * A / C), -1)
    return sp.log(u) / a


def width_condition() -> sp.Expr:
    """Return the derivative of (1 - alpha^W)/(1 - alpha)/(A + C W); zero at the best width."""
    return sp.diff((1 - alpha**W) / (1 - alpha) / (A + C * W), W)


class _Numbers(NamedTuple):
    """The symbols' values at one (batch, context) of a setup, at the ideal level."""

    values: dict[sp.Symbol, float]
    drafts: int
    tokens: float
    times: dict[str, float]


def explain(setup: Setup) -> str:
    """Return the derivation from T_p to k* with the numbers of the first batch and context."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ExtrapolationWarning)
        lines = _derivation(setup)
    notes = dict.fromkeys(f"note: {warning.message}" for warning in caught)
    return "\n".join([*lines, *notes])


def _derivation(setup: Setup) -> list[str]:
    number = _numbers(setup)
    batch, context = setup.batches[0], setup.contexts[0]
    width = number.drafts + 1
    return [
        f"{setup.target.name} on {setup.device.title}, batch {batch}, context {context}, "
        f"{setup.drafter.kind} with k = {number.drafts}, {setup.acceptance.label}",
        "",
        "Ideal level: datasheet rates, memory and arithmetic overlap perfectly.",
        "",
        "1. What a pass moves and computes (per device)",
        *_values(number.values),
        "   rho = F / M = " + _g(number.values[F] / number.values[M]) + " FLOP/B",
        "",
        "2. A decode step takes the longer of streaming and arithmetic",
        f"   T_p = max( {memory_time(kappa)}, {compute_time(sp.Integer(1))} )",
        f"       = max( {_ms(memory_time(kappa), number)}, "
        f"{_ms(compute_time(sp.Integer(1)), number)} ) ms",
        "",
        f"3. So does verifying W = k + 1 = {width} positions, with kappa_v = {kappa_v()}",
        f"   T_v = max( {memory_time()}, {compute_time(W)} )",
        f"       = max( {_ms(memory_time(), number)}, {_ms(compute_time(W), number)} ) ms",
        "",
        "4. The two are equal at the critical batch",
        f"   B_v* = {critical_batch_closed()}",
        f"   B_p* = {critical_batch_closed(sp.Integer(1), kappa)}",
        *_critical(setup, number),
        "",
        "5. A round commits G tokens: 1 + the chance that the first j drafts are all accepted",
        *_tokens(setup, number),
        "",
        "6. Speedup, T_o = 0",
        *(f"   regime {name:3} S = {form}" for name, form in speedup_by_regime().items()),
        *_speedup(number),
        "",
        "7. The best width: G / (A + C W) is stationary where its derivative vanishes",
        f"   W = {stationary_width()}",
        *_best(setup, number),
    ]


def _numbers(setup: Setup) -> _Numbers:
    ideal = Execution(
        level="ideal",
        tp=setup.execution.tp,
        kv_reread=setup.execution.kv_reread,
        expert_overlap=setup.execution.expert_overlap,
    )
    batch, context = setup.batches[0], setup.contexts[0]
    drafts = setup.k if setup.k is not None else int(predict(setup).points[0]["k_star"])
    shown = drafts or 1
    one = pass_time(setup.device, setup.target, B=batch, L=context, execution=ideal)
    many = pass_time(setup.device, setup.target, B=batch, W=shown + 1, L=context, execution=ideal)
    draft = draft_time(
        setup.device, setup.target, setup.drafter, B=batch, k=shown, L=context, execution=ideal
    )
    next_cost, cost = (
        sum(
            float(x)
            for x in (
                pass_time(
                    setup.device, setup.target, B=batch, W=n + 1, L=context, execution=ideal
                ).T,
                *draft_time(
                    setup.device,
                    setup.target,
                    setup.drafter,
                    B=batch,
                    k=n,
                    L=context,
                    execution=ideal,
                ).values(),
            )
        )
        for n in (shown + 1, shown)
    )
    bandwidth = setup.device.memory_bandwidth
    streamed = float(one.weights) * bandwidth
    stored = setup.target.shard(ideal.tp).weight_bytes / setup.target.shard(ideal.tp).total_params
    values = {
        B: float(batch),
        W: float(shown + 1),
        s: stored,
        N: streamed / stored,
        M: bandwidth,
        F: float(one.flops / one.compute),
        c: float(one.flops) / batch,
        kappa: float(one.rows) * bandwidth / batch,
        r: ideal.kv_reread,
    }
    times = {
        "T_p": float(one.T),
        "T_v": float(many.T),
        "T_d": float(sum(float(x) for x in draft.values())),
        "slope": next_cost - cost,
        "fixed": cost - (next_cost - cost) * (shown + 1),
        "streamed": streamed,
        "streamed_verify": float(many.weights) * bandwidth,
        "B_p_star": float(critical_batch(setup.device, setup.target, L=context, execution=ideal)),
        "B_v_star": float(
            critical_batch(setup.device, setup.target, W=shown + 1, L=context, execution=ideal)
        ),
    }
    tokens = float(tokens_per_round(setup.acceptance, setup.drafter, shown))
    return _Numbers(values=values, drafts=shown, tokens=tokens, times=times)


def _values(values: dict[sp.Symbol, float]) -> list[str]:
    units = {
        N: "weights streamed by a decode step",
        s: "bytes a weight",
        c: "FLOP a token, attention over the context included",
        kappa: "KV bytes read a sequence",
        F: "FLOP/s, dense peak",
        M: "B/s, memory bandwidth",
    }
    return [f"   {symbol} = {_g(values[symbol])} {text}" for symbol, text in units.items()]


def _ms(expression: sp.Expr, number: _Numbers) -> str:
    value = float(expression.subs(kappa_pass, kappa_v()).subs(number.values))
    if kappa_pass in expression.free_symbols:
        # an MoE streams more experts for more rows: N is that of the wider pass
        value += (number.times["streamed_verify"] - number.times["streamed"]) / number.values[M]
    return f"{value * 1e3:.4g}"


def _critical(setup: Setup, number: _Numbers) -> list[str]:
    stars = {"B_v*": number.times["B_v_star"], "B_p*": number.times["B_p_star"]}
    lines = [
        f"   {name} = "
        + (
            _g(value)
            if np.isfinite(value)
            else "infinite: the denominator is <= 0, KV reading always takes longer"
        )
        for name, value in stars.items()
    ]
    if setup.target.routed_expert_params:
        lines.append("   (N depends on the rows of the pass for an MoE, so these are roots)")
    return lines


def _tokens(setup: Setup, number: _Numbers) -> list[str]:
    lines = []
    value = _alpha(setup)
    if value is not None:
        lines.append(f"   G = {expected_tokens_closed()}, alpha = {value:.4g}")
        lines.append(f"     = {expected_tokens(number.drafts)}" if number.drafts <= 8 else "")
    else:
        rates = ", ".join(f"{a:.4g}" for a in np.asarray(setup.acceptance.rates(number.drafts)))
        lines.append(f"   a_j = {rates}")
    if setup.drafter.hit_rate < 1:
        lines.append(
            f"   drafts are found in {setup.drafter.hit_rate:g} of rounds; the others commit 1"
        )
    return [*(line for line in lines if line), f"     = {number.tokens:.4f}"]


def _alpha(setup: Setup) -> float | None:
    """Return the alpha of a geometric law, None for any other."""
    if (
        isinstance(setup.acceptance, Geometric | MeanLength)
        and np.ndim(setup.acceptance.alpha) == 0
    ):
        return float(np.asarray(setup.acceptance.alpha))
    return None


def _speedup(number: _Numbers) -> list[str]:
    t = number.times
    batch = number.values[B]
    name = "I" if batch < t["B_v_star"] else "II" if batch < t["B_p_star"] else "III"
    speed = number.tokens * t["T_p"] / (t["T_d"] + t["T_v"])
    bound = number.tokens / (number.drafts + 1)
    lines = [
        "   " + ", ".join(f"{n} = {t[n] * 1e3:.4g} ms" for n in ("T_p", "T_v", "T_d")),
        f"   here regime {name}: S = {number.tokens:.4f} x {t['T_p'] * 1e3:.4g} / "
        f"({t['T_d'] * 1e3:.4g} + {t['T_v'] * 1e3:.4g}) = {speed:.4f}",
    ]
    if name == "III":
        lines.append(f"   compute-bound: S <= G / W = {bound:.4f} <= 1")
    return lines


def _best(setup: Setup, number: _Numbers) -> list[str]:
    lines = []
    value = _alpha(setup)
    slope, fixed = number.times["slope"], number.times["fixed"]
    if value is not None and 0 < value < 1 and min(slope, fixed) > 0:
        at = {alpha: value, A: fixed, C: slope}
        width = float(sp.re(stationary_width().subs(at).evalf(30)))
        lines.append(
            f"   ideal level, around k = {number.drafts}: A = {fixed * 1e3:.4g} ms, "
            f"C = {slope * 1e3:.4g} ms, so W = {width:.4g} (k = {width - 1:.4g} before rounding)"
        )
    point = predict(setup).points[0]
    where = f"{setup.execution.level} level, basis {setup.execution.basis}"
    best = f"k* = {point['k_star']}, S* = {point['S_star']:.4f}" if point["k_star"] else "off wins"
    times = ", ".join(f"{name} = {point[name] * 1e3:.4g} ms" for name in ("T_p", "T_v", "T_d"))
    return [
        *lines,
        f"   the exact scan of k = 0..{setup.k_max} ({where}): {best}",
        f"   there at k = {point['k']}: {times}, S = {point['S']:.4f}",
    ]


def _g(value: float) -> str:
    return f"{value:.6g}"
