"""Pinned predictions: a command prints what it printed, unless a number was meant to move."""

from __future__ import annotations

import pytest
from pins import answer, moved, read

PINS = read()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_what_was_predicted_is_predicted(part: int) -> None:
    changes = [
        f"{' '.join(options)}: {change}"
        for options, before in PINS[part::10]
        for change in moved(before, answer(options))
    ]
    assert changes == []


def test_a_moved_number_is_seen() -> None:
    before = {"points": [{"S": 1.5, "k": 3, "verdict": "on"}], "text": "a"}
    assert list(moved(before, before)) == []
    for now, where in (
        ({**before, "points": [{"S": 1.5 + 1e-9, "k": 3, "verdict": "on"}]}, "points[0].S: 1.5 to"),
        ({**before, "points": [{"S": 1.5, "verdict": "on"}]}, "points[0].k: gone"),
        ({**before, "points": []}, "points: "),
        ({**before, "text": "b"}, "text: a to b"),
    ):
        (change,) = moved(before, now)
        assert change.startswith(where)
