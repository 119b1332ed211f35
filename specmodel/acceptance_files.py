"""Acceptance that ``specmodel measure --format json`` found, read strictly."""

from __future__ import annotations

import os
from dataclasses import dataclass

from specmodel.acceptance import PerPosition
from specmodel.errors import DomainError
from specmodel.fields import Fields
from specmodel.files import parse_json, read_text

_MOST_DRAFTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Acceptance at one measured point.

    Attributes
    ----------
    acceptance : PerPosition
        Of rounds in which the drafter proposed something.
    hit_rate : float
        Share of rounds in which it did. [-]
    k, batch : int
        Drafts of a round [token], sequences [-].
    temperature : float
        [-]
    """

    acceptance: PerPosition
    hit_rate: float
    k: int
    batch: int
    temperature: float


def read_measured(path: str | os.PathLike[str]) -> Measured:
    """Return the measured point that has the most drafts, the first of equals.

    Raises
    ------
    DomainError
        Naming the file and the key, when it is not what ``measure`` prints or a value cannot be;
        when acceptance was imposed, or is of trees alone.
    """
    where = os.fspath(path)
    try:
        keys = Fields(parse_json(read_text(path), where), where)
        if keys.raw("imposed_acceptance", None):
            raise DomainError(f"{where}: its acceptance is imposed, not measured")
        points = keys.mappings("points")
        chains = [point for point in points if point.raw("tree", None) is None]
        if points and not chains:
            raise DomainError(f"{where}: its acceptance is of trees")
        if not points:
            raise keys.error("points", "is empty")
        found = [_point(point) for point in chains]
    except DomainError as error:
        if str(error).startswith(f"{where}: its acceptance"):
            raise
        raise DomainError(
            f"{error} (acceptance is read from what `specmodel measure --format json` prints)"
        ) from None
    return max(found, key=lambda point: point.k)


def _point(keys: Fields) -> Measured:
    k = keys.whole("k", high=_MOST_DRAFTS)
    found = keys.mapping("acceptance")
    rates = found.number_list("per_position", low=0.0, high=1.0)
    if not 1 <= len(rates) <= k:
        raise found.error("per_position", f"must hold 1 to {k} rates, k being {k}")
    try:
        acceptance = PerPosition(rates)
    except DomainError as error:
        raise found.error("per_position", str(error)) from None
    return Measured(
        acceptance=acceptance,
        hit_rate=found.number("hit_rate", low=0.0, high=1.0),
        k=k,
        batch=keys.whole("batch"),
        temperature=keys.number("temperature", low=0.0),
    )
