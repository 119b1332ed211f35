"""The closed forms derived with SymPy from first principles, independent of the numeric code."""

from __future__ import annotations

import sympy as sp

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
