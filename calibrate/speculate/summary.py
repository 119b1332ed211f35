"""Acceptance from rounds that were run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmodel.acceptance import expected_tokens
from specmodel.errors import DomainError

_RESAMPLES = 1000
_QUANTILES = (0.05, 0.95)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drafted:
    """What became of the drafts of every sequence in every round.

    Attributes
    ----------
    request : ndarray of int (n,)
        Which prompt.
    drafted, accepted, committed : ndarray of int (n,)
        See `calibrate.speculate.loop.Round`.
    overlap : ndarray of float (n, k)
        Sum of min(p, q) at each draft, NaN where there was none. [-]
    candidates, ranks : ndarray of int (n, k)
        Of each position, see `calibrate.speculate.loop.Round`.
    surprisal, entropy : ndarray of float (n, k + 1)
        Of what was committed and of its law, NaN beyond. [bit]
    """

    request: NDArray[np.int64]
    drafted: NDArray[np.int64]
    accepted: NDArray[np.int64]
    committed: NDArray[np.int64]
    overlap: Floats
    candidates: NDArray[np.int64]
    ranks: NDArray[np.int64]
    surprisal: Floats
    entropy: Floats

    @classmethod
    def of(cls, batches: Sequence[tuple[Sequence[Any], Sequence[int]]]) -> Drafted:
        """Collect the rounds of batches of prompts, counting requests through all of them.

        Parameters
        ----------
        batches : sequence of (rounds, ends)
            `ends` (batch,) are new tokens after which a sequence counts no more, though it was
            decoded further: what follows an end token repeats itself and drafts too well.
        """
        found: dict[str, list[Any]] = {name: [] for name in cls.__slots__}
        first = 0
        for rounds, ends in batches:
            length = np.ones(len(ends), dtype=np.int64)  # the prompts' pass gave one
            for turn in rounds:
                counts = turn.active & (length < np.asarray(ends))
                found["request"].append(first + np.flatnonzero(counts))
                room = (np.asarray(ends) - length)[counts]  # tokens up to the end
                for name in ("drafted", "accepted", "overlap", "candidates", "ranks"):
                    found[name].append(getattr(turn, name)[counts])
                found["committed"].append(np.minimum(turn.committed[counts], room))
                for name in ("surprisal", "entropy"):
                    values = getattr(turn, name)[counts]
                    beyond = np.arange(values.shape[1]) >= room[:, None]
                    found[name].append(np.where(beyond, np.nan, values))
                length += np.where(turn.active, turn.committed, 0)
            first += length.size
        return cls(**{name: np.concatenate(rows) for name, rows in found.items()})


def acceptance_record(found: Drafted) -> dict[str, Any]:
    """Return acceptance by position, G, and alpha, with 90% intervals over requests.

    Intervals are null where there is one request.

    Rates are of rounds that drafted anything, whose share is ``hit_rate``, so that
    G = 1 + hit_rate * sum of a_j exactly.

    Returns
    -------
    dict
        ``acceptance`` (``per_position``: unconditional a_j; ``conditional``: a_j / a_(j-1),
        null where no draft came so far; ``histogram``: rounds with 0 to k accepted; ``alpha``:
        mean of sum min(p, q) over drafts whose predecessors were accepted, and
        ``alpha_empirical``, the share of them accepted; ``by_rank``: how often the first, second,
        ... candidate for a position was the accepted one, as `specmodel.trees` takes it), ``G``
        and ``committed_per_round``;
        ``G_iid``, what one alpha for all drafts would give the same drafts, and
        ``G_iid_by_request`` with each request's own: what is missing to G is the positions';
        ``entropy`` and ``surprisal`` of
        committed tokens by their place in the round under the target's own law [bit].

    Raises
    ------
    DomainError
        When there is no round.
    """
    if not found.request.size:
        raise DomainError("every text ended with its first token: there is no round to count")
    k = found.overlap.shape[1]
    positions = np.arange(1, k + 1)
    tried = positions <= np.minimum(found.accepted + 1, found.drafted)[:, None]
    passed = positions <= found.accepted[:, None]
    some = found.drafted > 0

    def rates(rows: NDArray[np.int64]) -> Floats:
        hits = np.asarray(rows[some[rows]])
        return passed[hits].mean(0) if hits.size else np.full(k, np.nan)

    def tokens(rows: NDArray[np.int64]) -> float:
        return float(1 + found.accepted[rows].mean())

    every = np.arange(found.request.size)
    a = rates(every) if some.any() else np.zeros(k)
    before = np.concatenate([[1.0], a[:-1]])
    low, high = _interval(found.request, rates)
    G_low, G_high = _interval(found.request, tokens)
    reached = int(tried.sum())
    known = not np.isnan(found.overlap[tried]).any()  # of trees it is not
    return {
        "acceptance": {
            "per_position": a.tolist(),
            "per_position_low": _known(low),
            "per_position_high": _known(high),
            "conditional": [float(x / y) if y else None for x, y in zip(a, before, strict=True)],
            "histogram": np.bincount(found.accepted[some], minlength=k + 1).tolist(),
            "hit_rate": float(some.mean()),
            "alpha": float(found.overlap[tried].mean()) if reached and known else None,
            "alpha_empirical": float(passed.sum() / reached) if reached else None,
            "by_rank": _by_rank(found),
        },
        **_independent(found, tried, passed),
        "entropy": _mean_by_place(found.entropy),
        "surprisal": _mean_by_place(found.surprisal),
        "G": tokens(every),
        "G_low": _known(G_low[None])[0],
        "G_high": _known(G_high[None])[0],
        "committed_per_round": float(found.committed.mean()),
        "requests": int(np.unique(found.request).size),
        "sequence_rounds": int(found.request.size),
    }


def _independent(
    found: Drafted, tried: NDArray[np.bool_], passed: NDArray[np.bool_]
) -> dict[str, float]:
    """Return G if every draft were accepted with one chance, and with one for each request."""

    def tokens(rows: NDArray[np.bool_]) -> float:
        """Return G of some rows, summed."""
        reached = tried[rows].sum()
        alpha = passed[rows].sum() / reached if reached else 0.0
        return float(expected_tokens(alpha, found.drafted[rows]).sum())

    n = found.request.size
    own = [found.request == one for one in np.unique(found.request)]
    return {
        "G_iid": tokens(np.ones(n, dtype=bool)) / n,
        "G_iid_by_request": sum(map(tokens, own)) / n,
    }


def _by_rank(found: Drafted) -> list[float]:
    """Return the share of positions whose r-th candidate was accepted, where there was one."""
    ranks = range(int(found.candidates.max(initial=0)))
    return [float((found.ranks[found.candidates > r] == r).mean()) for r in ranks]


def _mean_by_place(values: Floats) -> list[float | None]:
    """Return the mean of each column (n, k + 1), of what is not NaN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a place that no round reached
        return _known(np.nanmean(values, axis=0))


def _interval(
    request: NDArray[np.int64], statistic: Callable[[NDArray[np.int64]], Any]
) -> tuple[Floats, Floats]:
    """Return the 5% and 95% quantiles of a statistic of rows, requests drawn with replacement."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a rate that no sample has
        return _quantiles(request, statistic)


def _known(values: Floats) -> list[float | None]:
    """Return values for JSON, null where there is none."""
    return [None if np.isnan(value) else float(value) for value in values]


def _quantiles(
    request: NDArray[np.int64], statistic: Callable[[NDArray[np.int64]], Any]
) -> tuple[Floats, Floats]:
    order = np.argsort(request, kind="stable")
    if request[order[0]] == request[order[-1]]:
        unknown = np.full_like(np.asarray(statistic(order), dtype=np.float64), np.nan)
        return unknown, unknown
    groups = np.split(order, np.flatnonzero(np.diff(request[order])) + 1)
    random = np.random.default_rng(0)
    drawn = [
        statistic(np.concatenate([groups[i] for i in random.integers(0, len(groups), len(groups))]))
        for _ in range(_RESAMPLES)
    ]
    low, high = np.nanquantile(np.array(drawn), _QUANTILES, axis=0)
    return low, high


def times_record(plain: Sequence[Any], rounds: Sequence[Any]) -> dict[str, float]:
    """Return medians of T_p and T_h of plain steps, T_d, T_v and T_o of rounds. [s]

    Of rounds in which no sequence had ended; where there are none, of all. Where passes differ in
    width (a drafter that may find nothing), the mean of each width's median.
    """

    def median(turns: Sequence[Any], name: str) -> float:
        groups: dict[int, list[float]] = {}
        for turn in [turn for turn in turns if turn.active.all()] or turns:
            groups.setdefault(int(turn.drafted.max()), []).append(getattr(turn, name))
        sizes = [len(group) for group in groups.values()]
        return float(np.average([np.median(group) for group in groups.values()], weights=sizes))

    return {
        "T_p": median(plain, "T_v"),
        "T_h": median(plain, "T_o"),
        **{name: median(rounds, name) for name in ("T_d", "T_v", "T_o")},
    }


def widths_record(rounds: Sequence[Any]) -> dict[int, float]:
    """Return the share of passes with so many drafts in the sequence that has most. [-]"""
    whole = [turn for turn in rounds if turn.active.all()] or list(rounds)
    found, counts = np.unique([turn.drafted.max() for turn in whole], return_counts=True)
    return {int(one): n / len(whole) for one, n in zip(found, counts.tolist(), strict=True)}


def seconds_per_token(rounds: Sequence[Any]) -> float | None:
    """Return the time of rounds over the tokens they committed, all sequences active. [s]"""
    whole = [turn for turn in rounds if turn.active.all()]
    tokens = sum(int(turn.committed.sum()) for turn in whole)
    return sum(turn.T_d + turn.T_v + turn.T_o for turn in whole) / tokens if tokens else None


def speedup(times: Mapping[str, float], G: float) -> float:
    """Return G tokens a round against one a plain step."""
    return G * (times["T_p"] + times["T_h"]) / (times["T_d"] + times["T_v"] + times["T_o"])
