"""Model records as text: every one comes back equal, and damaged ones are refused by their key."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import specmodel as sm
from specmodel.architectures import (
    eagle3_head,
    eagle_head,
    from_json,
    from_yaml,
    mtp_head,
    read_config,
    to_json,
    to_yaml,
)
from specmodel.cli import main

KINDS = ("llama-3.1-8b", "deepseek-v3.2", "deepseek-v4-flash", "qwen3.5-35b-a3b", "gpt-oss-20b",
         "t5-small", "llama-3.1-8b-eagle3", "gemma-4-26b-a4b", "minimax-m3")  # fmt: skip


def same(model: sm.Architecture) -> bool:
    return from_json(to_json(model)) == model and from_yaml(to_yaml(model)) == model


@pytest.mark.parametrize("name", sm.model_names())
def test_every_preset_comes_back_equal(name: str) -> None:
    assert same(sm.load_model(name))


def test_derived_and_divided_models_come_back_equal(llama: sm.Architecture) -> None:
    v4 = sm.load_model("deepseek-v4-flash")
    derived = (eagle_head(llama), eagle3_head(llama), mtp_head(v4))
    changed = (llama.with_dtypes(weights="int4", kv="fp8"), llama.with_kv_budget(512))
    for model in (*derived, *changed, v4.shard(4, expert_ranks=8)):
        assert same(model)


def test_every_configuration_comes_back_equal(model_configs: Path) -> None:
    for file in [*model_configs.glob("*.json"), *model_configs.glob("drafts/*.json")]:
        if "hf_quant_config" not in file.name:
            assert same(read_config(file)), file.name


def test_a_record_is_a_model_by_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = sm.load_model("qwen3-30b-a3b-fp8")
    (tmp_path / "mine.json").write_text(to_json(model))
    assert sm.load_model(tmp_path / "mine.json") == model
    assert main(["show", "qwen3-30b-a3b-fp8", "--format", "yaml"]) == 0
    file = tmp_path / "mine.yaml"
    file.write_text(capsys.readouterr().out)
    assert sm.load_model(file) == model
    assert main(["show", str(file), "--format", "yaml"]) == 0
    assert capsys.readouterr().out == file.read_text()
    asked = ["predict", "--gpu", "h100", "--batch", "1", "--k", "3", "--model"]
    assert main([*asked, str(file)]) == main([*asked, "qwen3-30b-a3b-fp8"]) == 0
    by_file, _, by_name = capsys.readouterr().out.partition("specmodel ")[2].partition("specmodel ")
    assert by_file == by_name


def test_a_changed_record_changes_the_model() -> None:
    values = json.loads(to_json(sm.load_model("llama-3.1-8b")))
    values["layers"][0]["mixer"]["window"] = 1024
    values["layers"][0]["count"] = 16
    model = from_json(json.dumps(values))
    assert model.kv_bytes(4096) == 16 * 1024 * 2 * 2 * 8 * 128


def edited(name: str, path: tuple[Any, ...], value: Any) -> str:
    values = json.loads(to_json(sm.load_model(name)))
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return json.dumps(values)


MIXER = ("layers", 0, "mixer")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("hidden_size",), ..., "hidden_size: missing"),
        (("hidden_size",), 0, "hidden_size: must be a whole number from 1"),
        (("hidden_size",), True, "hidden_size: must be a whole number"),
        (("hiden_size",), 1, "hiden_size: unknown field of Architecture; did you mean 'hidden_si"),
        (("specmodel_architecture",), ..., "specmodel_architecture: missing"),
        (("specmodel_architecture",), 2, "specmodel_architecture: must be 1"),
        (("specmodel_architecture",), True, "specmodel_architecture: must be 1"),
        (("layers",), [], "layers: must hold a layer"),
        (("layers", 0, "count"), 10**9, r"layers\[0\]\.count: must be a whole number from 1"),
        (("layers", 0), "x", r"layers\[0\]: must be a mapping"),
        ((*MIXER, "part"), "Attn", r"layers\[0\]\.mixer\.part: must be one of Attention"),
        ((*MIXER, "heads"), 0, r"layers\[0\]\.mixer\.heads: must be a whole number"),
        ((*MIXER, "kv_heads"), 5, r"layers\[0\]\.mixer: 5 heads of keys and values must divide"),
        ((*MIXER, "qk_norm"), "all", r"layers\[0\]\.mixer\.qk_norm: must be one of head, full"),
        ((*MIXER, "sinks"), 1, r"mixer\.sinks: must be true or false"),
        (MIXER, [1], r"layers\[0\]\.mixer: must be a mapping"),
        (("dtype",), "fp8", "dtype: must be one of float32, float16, bfloat16"),
        (("kv_dtype",), "int4", "kv_dtype: must be one of"),
        (("head_kind",), "hydra", "head_kind: must be one of eagle"),
        (("head_vocab_size",), 10**9, "head_vocab_size: must be at most"),
        (("notes",), "none", "notes: must be a list"),
        (("quantisation",), {"dtype": "fp9"}, r"quantisation\.dtype: must be one of"),
        (("quantisation",), {"dtype": "fp8", "roles": ["all"]}, r"quantisation\.roles: must be"),
        (("quantisation",), {"dtype": "fp8", "block": [128]}, r"block: must hold 2 values"),
        (("quantisation",), {"dtype": "int4", "scale_bytes": float("nan")}, "scale_bytes: must be"),
    ],
)
def test_refusals_name_the_key(path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(sm.ArchitectureError, match=message) as caught:
        from_json(edited("llama-3.1-8b", path, value), where="mine.json")
    assert str(caught.value).startswith("mine.json: ")


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "null", '{"a": 1, "a": 2}', "a: 1\na: 2", "!!python/name:os.system x"]
)
def test_texts_that_are_no_record(tmp_path: Path, text: str) -> None:
    for name in ("x.yaml", "x.json"):
        (tmp_path / name).write_text(text)
        with pytest.raises(sm.ArchitectureError, match=rf"{name}: "):
            sm.load_model(tmp_path / name)
    with pytest.raises(sm.ArchitectureError, match="no such file"):
        sm.load_model(tmp_path / "absent.yaml")


RECORDS = [json.loads(to_json(sm.load_model(name))) for name in KINDS]
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**16), st.floats(), st.text(max_size=5),
    st.lists(st.integers(-3, 3), max_size=3), st.just({}), st.just({"part": "MoE"}),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


def places(values: Any) -> list[tuple[Any, Any]]:
    """Return every container with every key or index of it."""
    keys = list(values) if isinstance(values, dict) else range(len(values))
    found: list[tuple[Any, Any]] = [(values, key) for key in keys]
    for key in keys:
        if isinstance(values[key], dict | list):
            found += places(values[key])
    return found


@settings(max_examples=500, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_records_are_refused_or_possible(data: st.DataObject) -> None:
    values = copy.deepcopy(data.draw(st.sampled_from(RECORDS)))
    for _ in range(data.draw(st.integers(1, 3))):
        where = places(values)
        inner, key = where[data.draw(st.integers(0, len(where) - 1))]
        if data.draw(st.integers(0, 3)) == 0:
            del inner[key]
        else:
            inner[key] = copy.deepcopy(data.draw(JUNK))
        if not values:
            break
    model, refusal = None, ""
    try:
        model = from_json(json.dumps(values), where="x")
    except sm.ArchitectureError as error:
        refusal = str(error)
    if model is None:
        assert refusal.startswith("x: ")
        return
    assert same(model)
    assert 0 < model.active_params <= model.total_params
    assert model.weight_bytes > 0
    assert model.kv_bytes(4096) >= 0
