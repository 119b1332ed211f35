"""Where a server's time goes: shares of drafting, verifying, the rest, measured and predicted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from specmodel.errors import SpecmodelError
from specmodel.overheads import fitted_to, load_engine
from specmodel.validation.rows import Row
from specmodel.validation.setups import Unpredictable, setup

PARTS = ("draft", "verify", "rest")
_PLAIN = "none (baseline)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of a row's time; each mapping over `PARTS`, and they sum to 1. [-]"""

    row: Row
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    in_study: bool

    @property
    def points(self) -> float:
        """Mean difference over the parts, in percentage points."""
        off = (abs(self.predicted[name] - self.measured[name]) for name in PARTS)
        return 100 * sum(off) / len(PARTS)


def time_shares(rows: Iterable[Row]) -> list[Shares]:
    """Return the shares of every row that states them and can be predicted.

    Prefill counts as verifying, sampling as the rest. Acceptance is the dataset's own where the
    row states none; the engine's host times are those fitted to the row's study, where there are.
    """
    found = []
    for row in rows:
        measured = _measured(row)
        if measured is None or row.batch is None:
            continue
        plain = row.drafter_kind == _PLAIN
        try:
            made = setup(replace(row, drafter_kind="ngram", k=1.0) if plain else row)
            served = made.at(row.batch)
            G = row.tokens_per_step_G
            law = None if plain else served.accepted() if G is None else served.accepted_to(G)
        except (Unpredictable, SpecmodelError):
            continue
        if made.engine is None:
            continue
        engine = load_engine(made.engine, study=row.study)
        predicted = served.shares(engine, law)
        in_study = row.study in fitted_to(made.engine)
        found.append(Shares(row=row, measured=measured, predicted=predicted, in_study=in_study))
    return found


def _measured(row: Row) -> dict[str, float] | None:
    shares: Any = row.timed.get("fraction_of_time")
    try:
        values = {name: float(shares[name]) for name in ("draft", "verify", "sampling", "overhead")}
    except (ValueError, TypeError, KeyError):
        return None
    rest = values["sampling"] + values["overhead"]
    return {"draft": values["draft"], "verify": values["verify"], "rest": rest}
