"""SymPy derives each formula from first principles; NumPy must agree to 1e-12, limits included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import sympy as sp

import specmodel as sm
from specmodel import symbolic as s
from specmodel import width
from specmodel.acceptance import expected_tokens
from specmodel.drafters import Drafter, DraftTree, DynamicTree
from specmodel.explanation import explain, latex
from specmodel.report import Setup
from specmodel.speculation import round_time

IDEAL = sm.Execution(level="ideal")


@pytest.mark.parametrize("k", range(9))
def test_mean_of_the_pmf_is_the_geometric_sum(k: int) -> None:
    derived = s.expected_tokens(k)
    assert sp.simplify(derived - s.expected_tokens_closed().subs(s.k, k)) == 0
    for alpha in (0.0, 0.1, 0.5, 0.97):
        numeric = float(derived.subs(s.alpha, alpha))
        assert float(expected_tokens(alpha, k)) == pytest.approx(numeric, rel=1e-12)
    assert sp.limit(s.expected_tokens_closed().subs(s.k, k), s.alpha, 1) == k + 1
    assert float(expected_tokens(1.0, k)) == k + 1


def _substitute(expression: sp.Expr, W: int, B: float, r: float, L: int) -> float:
    llama = sm.load_model("llama-3.1-8b")
    h100 = sm.load_device("h100")
    one = sm.pass_time(h100, llama, B=1, L=L, execution=IDEAL)
    kappa = float(one.rows) * h100.memory_bandwidth
    values = {
        s.kappa_pass: kappa * (1 + r * (W - 1)),
        s.kappa: kappa,
        s.W: W,
        s.B: B,
        s.s: 2,
        s.N: float(one.weights) * h100.memory_bandwidth / 2,
        s.M: h100.memory_bandwidth,
        s.F: h100.flops("bfloat16"),
        s.rho: h100.rho("bfloat16"),
        s.c: float(one.flops),
        s.r: r,
    }
    return float(expression.subs(values))


@pytest.mark.parametrize("W", [1, 2, 5, 9])
@pytest.mark.parametrize("r", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("L", [0, 100, 300])
def test_crossing_of_the_two_rooflines(W: int, r: float, L: int) -> None:
    h100, llama = sm.load_device("h100"), sm.load_model("llama-3.1-8b")
    numeric = float(sm.critical_batch(h100, llama, W=W, L=L, level="ideal", kv_reread=r))
    derived = _substitute(s.critical_batch_closed(), W, 1, r, L)
    assert (numeric if np.isfinite(numeric) else -1) == pytest.approx(
        derived if derived > 0 else -1, rel=1e-12
    )


def test_without_kv_the_ratio_of_critical_batches_is_W() -> None:
    decode = s.critical_batch_closed(sp.Integer(1), s.kappa)
    verify = s.critical_batch_closed(s.W, s.kappa_v())
    assert sp.simplify((decode / verify).subs(s.kappa, 0)) == s.W
    assert sp.simplify(decode.subs(s.kappa, 0) - s.rho * s.s * s.N / s.c) == 0


@pytest.mark.parametrize(("B", "name"), [(16, "I"), (128, "II"), (600, "III")])
@pytest.mark.parametrize("L", [0, 64])
def test_speedup_in_each_regime(B: int, name: str, L: int) -> None:
    h100, llama, k, alpha = sm.load_device("h100"), sm.load_model("llama-3.1-8b"), 4, 0.7
    times = round_time(h100, llama, sm.Eagle3(), B=B, k=k, L=L, execution=IDEAL)
    S = float(expected_tokens(alpha, k) / times.cost)
    form = s.speedup_by_regime()[name].subs(
        {s.G: float(expected_tokens(alpha, k)), s.T_p: float(times.T_p), s.T_d: float(times.T_d)}
    )
    assert pytest.approx(_substitute(form, k + 1, B, 0.0, L), rel=1e-12) == S


def test_textbook_limits() -> None:
    """Without KV: G / (1 + delta), G / (B / B_v* + delta), G / (W + delta)."""
    forms = s.speedup_by_regime()
    delta, B_v = sp.symbols("delta B_v", positive=True)
    no_kv = {s.kappa: 0, s.kappa_pass: 0, s.T_d: delta * s.T_p}
    assert sp.simplify(forms["I"].subs(no_kv) - s.G / (1 + delta)) == 0
    second = forms["II"].subs(no_kv).subs(s.N, B_v * s.W * s.c * s.M / (s.F * s.s))
    assert sp.simplify(second - s.G / (s.B / B_v + delta)) == 0
    assert sp.simplify(forms["III"].subs(no_kv) - s.G / (s.W + delta)) == 0


@pytest.mark.parametrize(("alpha", "A", "C"), [(0.8, 0.95, 0.05), (0.3, 0.7, 0.3), (0.95, 2, 0.1)])
def test_best_width_zeroes_the_derivative(alpha: float, A: float, C: float) -> None:
    at = {s.alpha: sp.Rational(str(alpha)), s.A: sp.Rational(str(A)), s.C: sp.Rational(str(C))}
    root = sp.re(s.stationary_width().subs(at).evalf(30))
    assert abs(sp.N(s.width_condition().subs(at).subs(s.W, root), 30)) < 1e-15
    assert width.width_closed_form(alpha, A, C) == pytest.approx(float(root), rel=1e-12)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b"])
@pytest.mark.parametrize(
    "acceptance", [sm.Geometric(0.7), sm.PerPosition([0.7, 0.5, 0.3]), sm.MeanLength(2.2, k=3)]
)
def test_explanation_holds_the_numbers_of_the_model(model: str, acceptance: object) -> None:
    setup = Setup(
        device=sm.load_device("h100"),
        target=sm.load_model(model),
        drafter=sm.Eagle3(),
        acceptance=acceptance,  # type: ignore[arg-type]
        execution=IDEAL,
        batches=(8,),
        contexts=(200,),
        k=3,
    )
    text = explain(setup)
    times = round_time(setup.device, setup.target, setup.drafter, B=8, k=3, L=200, execution=IDEAL)
    assert f"T_v = {float(times.T_v) * 1e3:.4g} ms" in text
    S = float(setup.acceptance.tokens(3) / times.cost)
    assert f"= {S:.4f}" in text
    (there,) = [line for line in text.splitlines() if line.startswith("   there at k = 3")]
    assert f"S = {S:.4f}" in there


def test_latex_is_well_formed_and_holds_the_numbers() -> None:
    from matplotlib.mathtext import MathTextParser

    setup = Setup(
        device=sm.load_device("h100"),
        target=sm.load_model("llama-3.1-8b"),
        drafter=sm.Eagle3(),
        acceptance=sm.Geometric(0.7),
        execution=IDEAL,
        batches=(8,),
        contexts=(200,),
        k=3,
    )
    first, *rows, last = latex(setup).splitlines()
    assert (first, last) == (r"\begin{align*}", r"\end{align*}")
    times = round_time(setup.device, setup.target, setup.drafter, B=8, k=3, L=200, execution=IDEAL)
    T_p = rf"= {float(times.T_p) * 1e3:.4g}\,\mathrm{{ms}}"
    assert any(row.startswith("  T_p &=") and T_p in row for row in rows)
    S = float(setup.acceptance.tokens(3) / times.cost)
    assert any(row.startswith(r"  S_{\mathrm{I}} &=") and f"= {S:.4f}" in row for row in rows)
    for row in rows:
        formula = row.strip().removesuffix(r" \\").replace("&", "")
        MathTextParser("path").parse(f"${formula}$")


def _block_head(target: sm.Architecture, kind: str, block: int) -> sm.Architecture:
    """Return a head that drafts blocks, of the width of a target."""
    head = sm.Eagle3().weights(target)
    return replace(head, head_kind=kind, block_size=block)


@pytest.mark.parametrize("k", [1, None])
@pytest.mark.parametrize(
    "drafter",
    [
        lambda target: sm.BlockDiffusion(_block_head(target, "dflash", 16)),
        lambda target: sm.BlockDiffusion(_block_head(target, "dflash", 2)),
        lambda target: sm.BlockDiffusion(_block_head(target, "dspark", 7)),
        lambda _: DraftTree(drafter=sm.Eagle3(), widths=(2, 2, 2)),
        lambda _: DraftTree(drafter=sm.Eagle3(), widths=(1, 1)),
        lambda target: DynamicTree(
            drafter=sm.BlockDiffusion(_block_head(target, "dflash", 4)), topk=2, nodes=6
        ),
    ],
)
def test_explanation_at_the_largest_k_of_a_drafter(
    drafter: Callable[[sm.Architecture], Drafter], k: int | None
) -> None:
    target = sm.load_model("llama-3.1-8b")
    drafts = drafter(target)
    assert drafts.max_k is not None
    setup = Setup(
        device=sm.load_device("h100"),
        target=target,
        drafter=drafts,
        acceptance=sm.Geometric(0.7),
        execution=sm.Execution(),
        batches=(1,),
        contexts=(200,),
        k=k or drafts.max_k,
    )
    text = explain(setup)
    assert f"shown for k = {setup.k}" in text
    assert r"\begin{align*}" in latex(setup)
    if drafts.max_k == 1:
        assert "this drafter drafts one token" in text
    elif isinstance(drafts, sm.BlockDiffusion):  # one pass, bound by memory whatever k
        low = min(setup.k or 0, drafts.max_k - 1)
        assert f"from k = {low} to {low + 1}: a round costs no more" in text
    off = replace(setup, k=0, acceptance=sm.Geometric(0.01))
    assert "k = 0 was asked for" in explain(off)
    assert "(off is better here)" in explain(off)
    assert "(off is better here)" in latex(off)


def test_the_slope_on_the_other_side_is_the_same_where_the_cost_is_affine() -> None:
    setup = Setup(
        device=sm.load_device("h100"),
        target=sm.load_model("llama-3.1-8b"),
        drafter=DraftTree(drafter=sm.DraftModel(sm.load_model("llama-3.2-1b")), widths=(1,) * 4),
        acceptance=sm.Geometric(0.7),
        execution=IDEAL,
        batches=(1,),
        contexts=(200,),
        k=4,
    )
    lines = [
        line.partition(": ")[2]
        for k in (2, 4)
        for line in explain(replace(setup, k=k)).splitlines()
        if line.startswith("   ideal level, from k")
    ]
    assert len(lines) == 2
    assert lines[0] == lines[1]
