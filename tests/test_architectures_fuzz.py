"""Ten thousand damaged configurations: each is refused by name, or read as something possible."""

from __future__ import annotations

import copy
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import specmodel as sm
from specmodel.architectures import Attention, MoE, from_dict

PRESETS = Path(sm.__file__).parent / "data" / "models"
CASES = 10_000
QUANTISED: tuple[dict[str, Any], ...] = (
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    {"quant_method": "fp8", "weight_block_size": [128, 128],
     "modules_to_not_convert": ["lm_head", "re:.*mlp.gate$"]},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
     "exclude_modules": ["model.layers.0*"]},
    {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": {"g": {
        "weights": {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None},
        "input_activations": None, "targets": ["Linear"]}}},
)  # fmt: skip
JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, -5, 1.0, 0.5, -0.0, math.nan, math.inf, -math.inf,
    10**9, 10**12, 10**30, 10**400, 1e308, "", "abc", "64", "auto", "bfloat16", "\ud800", [], [1],
    [None], ["x"], [[1]], {}, {"a": 1}, {"quant_method": "fp8"},
)  # fmt: skip


def paths(values: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


def near(value: Any) -> list[Any]:
    """Return values that differ little from one that is right."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**15:
        return [value + 1, value - 1, value * 2, -value, value / 2, str(value), [value]]
    if isinstance(value, list):
        return [value[:-1], value * 2, value[::-1]]
    return [[value]]


def damage(values: dict[str, Any], rng: random.Random) -> None:
    for _ in range(rng.choice([1, 1, 1, 2, 3, 5])):
        *above, last = rng.choice(list(paths(values)))
        inner = values
        for key in above:
            inner = inner[key]
        if rng.random() < 0.25:
            del inner[last]
        else:
            inner[last] = rng.choice([*JUNK, *near(inner[last])])
        if not values:
            return


def impossible(model: sm.Architecture) -> list[str]:
    """Return what no model can be."""
    found = {
        "active > total": model.active_params > model.total_params,
        "no parameters": model.total_params <= 0,
        "absurd": model.total_params > 10**17,
        "bytes": not 0 < model.weight_bytes < 4.6 * model.total_params,
        "vocabulary": model.head_vocab_size > model.vocab_size,
        "KV": not 0 <= model.kv_bytes(4096) < math.inf,
        "state": not 0 <= model.state_bytes < math.inf,
    }
    for layer, _ in model.layers:
        if isinstance(layer.mixer, Attention):
            found["heads"] = layer.mixer.heads % layer.mixer.kv_heads != 0
        if isinstance(layer.mlp, MoE):
            found["experts"] = not 1 <= layer.mlp.top_k <= layer.mlp.experts
    return [name for name, wrong in found.items() if wrong]


@pytest.mark.slow
def test_damaged_configurations() -> None:
    rng = random.Random(7)  # noqa: S311 (no secret)
    seeds = [json.loads(file.read_text()) for file in sorted(PRESETS.glob("*.json"))]
    results: Counter[str] = Counter()
    for i in range(CASES):
        values = copy.deepcopy(seeds[i % len(seeds)])
        if i % 3 == 0:
            values["quantization_config"] = copy.deepcopy(rng.choice(QUANTISED))
        damage(values, rng)
        shown = f"case {i}: {values}"
        try:
            model = from_dict(values, name="damaged", where="config.json")
        except sm.ArchitectureError as error:
            results["refused" if str(error).startswith("config.json") else str(error)] += 1
            continue
        assert not impossible(model), shown
        results["read"] += 1
    assert set(results) == {"refused", "read"}
    assert min(results["refused"], results["read"]) > CASES // 10, results
