"""What ``measure`` prints, read as acceptance: values that cannot be are refused with their key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import specmodel as sm
from specmodel.acceptance_files import read_measured

FOUND = {"hit_rate": 0.9, "per_position": [0.7, 0.5, 0.3]}
POINT = {"k": 3, "batch": 4, "temperature": 0.5, "tree": None, "acceptance": FOUND}


def write(folder: Path, *points: dict[str, Any], text: str | None = None) -> Path:
    file = folder / "acceptance.json"
    file.write_text(text or json.dumps({"imposed_acceptance": None, "points": points}))
    return file


def test_the_point_with_the_most_drafts(tmp_path: Path) -> None:
    short = {**POINT, "k": 1, "acceptance": {**FOUND, "per_position": [0.6]}}
    found = read_measured(write(tmp_path, short, POINT, {**POINT, "batch": 8}))
    assert (found.k, found.batch, found.temperature, found.hit_rate) == (3, 4, 0.5, 0.9)
    assert found.acceptance.values == (0.7, 0.5, 0.3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": -1}, "points 1: k: must be a whole number >= 1; got -1"),
        ({"k": float("inf")}, "points 1: k: must be a whole number >= 1; got inf"),
        ({"k": 2}, "per_position: must hold 1 to 2 rates, k being 2"),
        ({"batch": float("inf")}, "points 1: batch: must be a whole number >= 1; got inf"),
        ({"batch": 0}, "points 1: batch: must be a whole number >= 1; got 0"),
        ({"temperature": float("nan")}, "points 1: temperature: must be a number; got nan"),
        ({"acceptance": {**FOUND, "hit_rate": 5}}, "hit_rate: must be in [0, 1]; got 5"),
        (
            {"acceptance": {**FOUND, "per_position": [1.5, 0.5, 0.3]}},
            "per_position: must be a list of numbers in [0, 1]; got [1.5, 0.5, 0.3]",
        ),
        (
            {"acceptance": {**FOUND, "per_position": [0.5, 0.7, 0.3]}},
            "unconditional acceptance rates must not increase",
        ),
        ({"acceptance": [1]}, "points 1: acceptance: must be a mapping; got [1]"),
    ],
)
def test_values_that_cannot_be(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(sm.DomainError) as caught:
        read_measured(write(tmp_path, {**POINT, **change}))
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}")


@pytest.mark.parametrize("text", ["NaN", "[]", '"x"', "{}", "null", '{"points": {}}'])
def test_files_that_are_no_record(text: str, tmp_path: Path) -> None:
    with pytest.raises(sm.DomainError, match="acceptance is read from what"):
        read_measured(write(tmp_path, text=text))
