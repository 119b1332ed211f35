r"""What users measure: throughput over requests that differ, prefill in both arms.

Over kinds of requests with prompt P, output O, acceptance G and hit rate h of their own, at the
context :math:`P + O/2` of the middle of their output,

.. math:: S = \sum_i w_i \frac{\mathrm{prefill}_i + (O_i - 1)(T_p + T_h)}
   {\mathrm{prefill}_i + \mathrm{prefill}^d_i + (O_i - 1) R_i / G_i}, \qquad
   R = h (T_v + T_o) + (1 - h)(T_p + T_h) + T_d

with every time that of a batch of alike requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq

from specmodel.acceptance import alpha_for_tokens, expected_tokens
from specmodel.architectures import Architecture
from specmodel.drafters import Drafter, NGram
from specmodel.errors import (
    DomainError,
    UnknownNameError,
    brief,
    did_you_mean,
    real_array,
    unwrap,
    whole_array,
)
from specmodel.hardware import Device
from specmodel.overheads import Engine
from specmodel.roofline import Execution, pass_time
from specmodel.speculation import RoundParts, drafter_execution, round_parts
from specmodel.yaml_text import parse_yaml

Floats = NDArray[np.float64]

TYPICAL = "sharegpt"
"""Whose requests stand for those of an unknown dataset: mixed chat."""

_NOTHING = 1e-4
_FURTHEST = 12.0  # in log odds: from 0.5 to within 1e-5 of 0 and 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Requests:
    """Kinds of requests of a workload and how they are accepted; arrays run over kinds.

    Attributes
    ----------
    name : str
    weight : ndarray
        Share of the requests. [-]
    prompt, output : ndarray
        [token]; `output` infinite: decoding alone counts, at a context of `prompt`.
    hit : ndarray
        Share of rounds in which an n-gram lookup finds something. [-]
    k : ndarray
        Drafts at which acceptance is known. [token]
    head, lookup : ndarray
        Tokens per round of a draft head and of an n-gram lookup, kinds by `k`. [token]
    source : str
    """

    name: str
    weight: Floats
    prompt: Floats
    output: Floats
    hit: Floats
    k: Floats
    head: Floats
    lookup: Floats
    source: str = ""

    @classmethod
    def alike(cls, prompt: float, output: float = np.inf) -> Requests:
        """Return requests that are all of one length, their acceptance to be scaled.

        Raises
        ------
        DomainError
            When a length is out of range.
        """
        one = np.ones(1)
        return cls(
            name="alike",
            weight=one,
            prompt=real_array(prompt, "prompt", low=0, unit="token") * one,
            output=real_array(output, "output", low=1, unit="token", finite=False) * one,
            hit=0.3 * one,
            k=one,
            head=1.7 * one[:, None],
            lookup=1.2 * one[:, None],
        )

    @property
    def context(self) -> Floats:
        """Mean context while decoding, P + O/2. [token]"""
        return self.prompt + np.where(np.isfinite(self.output), self.output / 2, 0.0)

    def of_length(self, prompt: float | None, output: float | None) -> Requests:
        """Return the same requests stretched to a mean prompt and output. [token]

        Outputs that would be shorter than a token are of one.

        Raises
        ------
        DomainError
            When a length is out of range.
        """

        def stretched(values: Floats, mean: float | None, name: str, low: float) -> Floats:
            if mean is None:
                return values
            wanted = real_array(mean, name, low=low, unit="token")
            return np.maximum(values * (wanted / (self.weight @ values)), low)

        return replace(
            self,
            prompt=stretched(self.prompt, prompt, "prompt", 0.0),
            output=stretched(self.output, output, "output", 1.0),
        )

    def accepted(self, k: int, *, lookup: bool, scale: float = 0.0) -> Accepted:
        """Return how drafts are accepted at k; `scale` moves the log odds of every kind. [-]"""
        table = self.lookup if lookup else self.head
        G = np.array([np.interp(k, self.k, row) for row in table])
        if not lookup:
            alpha = np.asarray(alpha_for_tokens(np.minimum(G, k + 1.0), k))
            return Accepted(hit=np.ones_like(G), tokens=expected_tokens(_moved(alpha, scale), k))
        return Accepted(hit=_moved(self.hit, scale), tokens=self._found(G, k))

    def _found(self, G: Floats, k: ArrayLike) -> Floats:
        """Return tokens of a round in which a lookup finds something; G is of every round."""
        most = np.asarray(k, dtype=np.float64) + 1.0
        return np.asarray(np.minimum(1.0 + (G - 1.0) / np.maximum(self.hit, 1e-9), most))

    def accepted_alike(self, G: ArrayLike, k: ArrayLike, *, lookup: bool) -> Accepted:
        """Return how drafts are accepted where a round of every kind commits G tokens.

        Parameters
        ----------
        G : array_like
            Tokens per round, the bonus token included. [token], 1 to k + 1.
        k : array_like of int
            Drafts. [token], >= 1. Broadcasts with `G`; kinds come last in the result.
        lookup : bool
            Whether drafts come from an n-gram lookup: G decides in how many rounds it finds
            something and, beyond what that can give, how many tokens such a round commits.

        Raises
        ------
        DomainError
            When an argument is out of range.
        """
        drafts = whole_array(k, "k", low=1, unit="token")[..., None]
        wanted = real_array(G, "acceptance length", low=1, unit="token")[..., None]
        wanted, most = np.broadcast_arrays(wanted, drafts + 1.0)
        if (over := wanted > most).any():
            raise DomainError(
                f"acceptance length must be in [1, {most[over][0]:g}] token at "
                f"k = {most[over][0] - 1:g}; got {wanted[over][0]:g}"
            )
        if not lookup:
            return Accepted(hit=np.ones_like(wanted), tokens=wanted)
        table = [np.interp(drafts[..., 0], self.k, row) for row in self.lookup]
        usual = self._found(np.stack(table, axis=-1), drafts)
        hit = np.minimum((wanted - 1.0) / np.maximum(usual - 1.0, 1e-9), 1.0)
        return Accepted(hit=hit, tokens=np.where(hit < 1.0, usual, wanted))

    def accepted_to(self, G: float, k: int, *, lookup: bool) -> Accepted:
        """Return how drafts are accepted where tokens over rounds of all requests are G.

        Raises
        ------
        DomainError
            When no scale of acceptance gives G at k.
        """
        share = np.where(np.isfinite(self.output), self.output, 1.0) * self.weight

        def off(scale: float) -> float:
            each = self.accepted(k, lookup=lookup, scale=scale).G
            return float(share.sum() / (share @ (1 / each))) - G

        return self.accepted(k, lookup=lookup, scale=solved(off, f"G = {G:g} at k = {k}"))


def solved(off: Any, what: str) -> float:
    """Return the scale of acceptance at which a rising function crosses zero.

    Raises
    ------
    DomainError
        When it does not.
    """
    low, high = off(-_FURTHEST), off(_FURTHEST)
    if 0 < low < _NOTHING:  # asked for what accepting nothing gives
        return -_FURTHEST
    if -_NOTHING < high < 0:  # or everything
        return _FURTHEST
    if not low <= 0 <= high:
        side = "little" if low > 0 else "much"
        raise DomainError(f"{what}: no acceptance gives that {side}")
    return float(brentq(off, -_FURTHEST, _FURTHEST, xtol=1e-5))


def _moved(chance: Floats, scale: float) -> Floats:
    """Return chances with their log odds moved."""
    odds = chance / np.maximum(1.0 - chance, 1e-12) * np.exp(scale)
    return np.asarray(odds / (1.0 + odds))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Accepted:
    """Share of rounds with drafts, and tokens of a round that has them; arrays over kinds."""

    hit: Floats
    tokens: Floats

    @property
    def G(self) -> Floats:
        """Tokens per round. [token]"""
        return 1.0 + self.hit * (self.tokens - 1.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """Requests served plainly and with speculation; what is left to say is engine and acceptance.

    At one batch and k, or at several: those are rows, before the kinds of requests.

    Attributes
    ----------
    requests : Requests
    parts : RoundParts
        Passes of a round and of the plain step.
    prefill, prefill_draft : ndarray
        Of a batch, of each kind, on the device. [s]
    """

    requests: Requests
    parts: RoundParts
    prefill: Floats
    prefill_draft: Floats
    _lookup: bool = field(default=False)

    @property
    def k(self) -> int:
        """Drafts, where it is served with one number of them. [token]"""
        return int(self.parts.k)

    def accepted(self, scale: float = 0.0) -> Accepted:
        """Return the dataset's own acceptance, its log odds moved."""
        return self.requests.accepted(self.k, lookup=self._lookup, scale=scale)

    def accepted_to(self, G: float) -> Accepted:
        """Return acceptance scaled to G tokens per round."""
        return self.requests.accepted_to(G, self.k, lookup=self._lookup)

    def accepted_alike(self, G: ArrayLike) -> Accepted:
        """Return acceptance of which every kind of request commits G tokens per round; by row."""
        return self.requests.accepted_alike(G, _by_row(self.parts.k), lookup=self._lookup)

    def seconds(self, engine: Engine | None, accepted: Accepted) -> tuple[Floats, Floats]:
        """Return time of a batch of each kind, plainly and with speculation. [s]

        Where only decoding counts, time of one token of each sequence.
        """
        times = self.parts.times(engine)
        each, found = times.T_p + times.T_h, times.T_v + times.T_o
        cost = accepted.hit * found + (1.0 - accepted.hit) * each + times.T_d
        before, before_draft = self._prefills(engine)
        n = self._steps()
        return (
            np.asarray(before + n * each),
            np.asarray(before + before_draft + n * cost / accepted.G),
        )

    def _steps(self) -> Floats:
        """Return tokens after the first of each kind; 1 where only decoding counts."""
        many = np.isfinite(self.requests.output)
        return np.where(many, self.requests.output - 1.0, 1.0)

    def _prefills(self, engine: Engine | None) -> tuple[Floats, Floats]:
        kernels = 1.0 if engine is None else engine.kernels
        return kernels * self.prefill, kernels * self.prefill_draft

    def shares(self, engine: Engine | None, accepted: Accepted | None) -> dict[str, float]:
        """Return the shares of drafting, of verifying (or plain steps) with prefill, and the rest.

        Over all requests, each in a batch of its like; plainly without an acceptance.
        """
        times, n = self.parts.times(engine), self._steps()
        prefill, prefill_draft = self._prefills(engine)
        if accepted is None:
            each = {"draft": 0.0 * n, "verify": prefill + n * times.T_p, "rest": n * times.T_h}
        else:
            h, n = accepted.hit, n / accepted.G
            each = {
                "draft": prefill_draft + n * times.T_d,
                "verify": prefill + n * (h * times.T_v + (1.0 - h) * times.T_p),
                "rest": n * (h * times.T_o + (1.0 - h) * times.T_h),
            }
        taken = {name: float(self.requests.weight @ seconds) for name, seconds in each.items()}
        return {name: seconds / sum(taken.values()) for name, seconds in taken.items()}

    def speedup(self, engine: Engine | None, accepted: Accepted) -> float:
        """Return S, the mean over requests of how much sooner each is done. [-]"""
        plainly, drafted = self.seconds(engine, accepted)
        return float(self.requests.weight @ (plainly / drafted))

    def throughput(self, engine: Engine | None, accepted: Accepted | None = None) -> float:
        """Return tokens per second of the batch, plainly or with an acceptance. [token/s]"""
        return float(self.rates(engine, accepted))

    def rates(self, engine: Engine | None, accepted: Accepted | None = None) -> Floats:
        """Return tokens per second of each row's batch, plainly or with an acceptance. [token/s]"""
        if accepted is None:
            times = self.parts.times(engine)
            seconds = self._prefills(engine)[0] + self._steps() * (times.T_p + times.T_h)
        else:
            seconds = self.seconds(engine, accepted)[1]
        made = np.where(np.isfinite(self.requests.output), self.requests.output, 1.0)
        weight = self.requests.weight
        return unwrap(_by_row(self.parts.B) * (made @ weight) / (seconds @ weight))


def _by_row(values: Floats) -> Floats:
    """Return what `served` was given, without the axis of the kinds."""
    return values[..., 0] if values.ndim else values


def served(
    device: Device,
    target: Architecture,
    drafter: Drafter,
    requests: Requests,
    *,
    B: ArrayLike,
    k: ArrayLike,
    execution: Execution,
) -> Served:
    """Return requests served in batches of B, with k drafts and without.

    Parameters
    ----------
    device, target, drafter, requests
    B : array_like
        Concurrent requests. [-] One number, or one for each row.
    k : array_like of int
        Drafts. [token], >= 1. One number where `B` is one, or as many as it has.
    execution : Execution

    Raises
    ------
    DomainError
        When an argument is out of range.
    """
    batch, drafts = np.broadcast_arrays(
        real_array(B, "batch", low=0), whole_array(k, "k", low=1, unit="token")
    )
    if drafts.ndim:  # kinds of requests come last
        batch, drafts = batch[:, None], drafts[:, None]
    lookup = isinstance(drafter, NGram)
    if isinstance(drafter, NGram):  # priced for rounds that find something; others are plain steps
        drafter = replace(drafter, hit=1.0)
    execution = replace(execution, engine=None)

    def prefill(where: Device, model: Architecture, how: Execution) -> Floats:
        P = requests.prompt
        if not np.isfinite(requests.output).all():
            return np.zeros_like(P)
        return np.asarray(
            pass_time(where, model, B=batch, W=P, L=P / 2, head_rows=1.0, execution=how).T
        )

    draft = drafter.cache(target)
    own = drafter_execution(execution, drafter)
    nothing = np.zeros_like(requests.prompt)
    return Served(
        requests=requests,
        parts=round_parts(
            device, target, drafter, B=batch, k=drafts, L=requests.context, execution=execution
        ),
        prefill=prefill(device, target, execution),
        prefill_draft=nothing
        if draft is None or not draft.layers
        else prefill(drafter.device or device, draft, own),
        _lookup=lookup,
    )


# -- what ships ----------------------------------------------------------------------------------


def load_requests(dataset: str | None) -> Requests:
    """Return a dataset's requests by any of its names.

    Parameters
    ----------
    dataset : str or None
        A name; None: typical requests, mixed chat.

    Raises
    ------
    UnknownNameError
        When no requests of such a dataset ship.

    Examples
    --------
    >>> load_requests("CNN/DM").name, load_requests(None).name
    ('cnn', 'sharegpt')
    """
    known = _shipped()
    if dataset is None:
        return known[TYPICAL]
    if (name := dataset.strip().lower().split(" (")[0]) not in known:
        raise UnknownNameError(f"unknown dataset {brief(dataset)}{did_you_mean(name, known)}")
    return known[name]


def known_dataset(dataset: str | None) -> bool:
    """Return whether a dataset's own requests ship."""
    return (dataset or "").strip().lower().split(" (")[0] in _shipped()


@cache
def _shipped() -> dict[str, Requests]:
    record = parse_yaml((files("specmodel") / "data" / "requests.yaml").read_text(encoding="utf-8"))
    found: dict[str, Requests] = {}
    for name, one in record["datasets"].items():
        rows, ks = np.array(one["kinds"], dtype=np.float64), np.array(one["k"], dtype=np.float64)
        source = record["sources"][one["source"]]
        requests = Requests(
            name=name,
            weight=rows[:, 0] / rows[:, 0].sum(),
            prompt=rows[:, 1],
            output=rows[:, 2],
            hit=rows[:, 3],
            k=ks,
            head=rows[:, 4 : 4 + ks.size],
            lookup=rows[:, 4 + ks.size :],
            source=f"{source['title']}, {source['url']}, read {source['read']}",
        )
        found |= {alias: requests for alias in (name, *one["aliases"])}
    return found
