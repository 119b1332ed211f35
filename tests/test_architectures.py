"""Counts against real models, and refusals of what is not understood."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import LLAMA, MLA, MOE

import specmodel as sm
from specmodel.architectures import (
    LatentAttention,
    MoE,
    eagle3_head,
    eagle_head,
    find_model,
    from_dict,
    mtp_head,
    read_config,
)
from specmodel.dtypes import QUANTISABLE
from specmodel.errors import UnknownNameError

PRESETS = Path(sm.__file__).parent / "data" / "models"


def read(**changes: Any) -> sm.Architecture:
    values = {k: v for k, v in {**LLAMA, **changes}.items() if v is not ...}
    return from_dict(values, name="test", where="config.json")


def test_counts_equal_the_reference_for_every_supported_file(model_configs: Path) -> None:
    reference = yaml.safe_load((model_configs / "PARAMS.yaml").read_text())
    checked = 0
    for name, row in reference.items():
        if name == "_README":
            continue
        model = read_config(model_configs / row["file"])
        kv = row["kv"]
        if "total_params" in row:
            assert model.total_params == row["total_params"], name
            active = row.get("active_params_per_token", row["total_params"])
            assert model.active_params == active, name
        if "kv_elems_per_token" in kv:
            assert model.kv_elements_per_token == kv["kv_elems_per_token"], name
        elif "kv_elems_per_token_full" in kv:
            split = model.kv_elements_by_window()
            assert split[None] == kv["kv_elems_per_token_full"], name
            windowed = split.get(kv["window"], 0) if kv["window"] else 0
            assert windowed == kv["kv_elems_per_token_windowed"], name
        size = row.get("checkpoint_index_total_size_bytes")
        if size is not None:
            assert model.weight_bytes == size, name
        checked += 1
    assert checked == 62


def test_every_file_is_read(model_configs: Path) -> None:
    """Models and draft heads; a file of quantisation alone belongs to the one beside it."""
    for file in [*model_configs.glob("*.json"), *model_configs.glob("drafts/*.json")]:
        if "hf_quant_config" not in file.name:
            assert read_config(file).total_params > 0, file.name


@pytest.mark.parametrize(
    ("name", "total", "active", "kv"),
    [
        # Llama 3 (arXiv:2407.21783), Qwen3 (arXiv:2505.09388), DeepSeek-V3 (arXiv:2412.19437):
        # exact totals of the published checkpoints, MTP left out
        ("llama-3.1-8b", 8_030_261_248, 8_030_261_248, 65_536),
        ("llama-3.1-70b", 70_553_706_496, 70_553_706_496, 163_840),
        ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704, 49_152),
        ("mixtral-8x7b-v0.1", 46_702_792_704, 12_879_925_248, 65_536),
        ("deepseek-v3", 671_026_404_352, 37_552_282_624, 35_136),
        ("qwen2-0.5b", 494_032_768, 494_032_768, 6_144),
        # the bf16 parameters of its checkpoint; 6.1B active (model card)
        ("ling-flash-2.0", 102_889_697_280, 6_152_269_824, 32_768),
    ],
)
def test_preset_counts(name: str, total: int, active: int, kv: int) -> None:
    model = sm.load_model(name)
    assert (model.total_params, model.active_params, model.kv_elements_per_token) == (
        total,
        active,
        kv,
    )


def test_counts_of_every_preset() -> None:
    lines = (Path(__file__).parent / "golden" / "parameter_counts.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    heads = {name for name in sm.model_names() if name.endswith("-eagle3")}
    assert {row["model"] for row in rows} == set(sm.model_names()) - heads
    for row in rows:
        model = sm.load_model(row["model"])
        for name in ("total_params", "active_params", "kv_elements_per_token"):
            if row[name]:
                assert getattr(model, name) == int(row[name]), (row["model"], name)


def test_every_preset_loads_and_names_its_source() -> None:
    for name in sm.model_names():
        model = sm.load_model(name)
        assert model.name == name
        assert "read 20" in model.source


@pytest.mark.parametrize(
    "spelling",
    ["llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "Meta-Llama-3.1-8B", "LLAMA-3.1-8B"],
)
def test_spellings_of_a_preset(spelling: str) -> None:
    assert sm.load_model(spelling).name == "llama-3.1-8b"


def test_a_size_that_reads_like_a_suffix() -> None:
    assert sm.load_model("t5-base").name == sm.load_model("google-t5/T5-Base").name == "t5-base"


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("LLaMA-3.3-70B-Instruct", "llama-3.1-70b"),
        ("LLaMA2-Chat-7B", "llama-2-7b"),
        ("Llama2-7B-chat", "llama-2-7b"),
        ("LLaMA-2-7B-32K", "llama-2-7b"),
        ("Llama2-70B-chat", "llama-2-70b"),
        ("LLaMA3-Instruct-8B", "llama-3.1-8b"),
        ("Llama3-8B-Instruct", "llama-3.1-8b"),
        ("LLaMA-Instruct 3.1 8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct (bf16)", "llama-3.1-8b"),
        ("DeepSeek-R1-Distill-LLaMA-8B", "llama-3.1-8b"),
        ("Llama3-70B", "llama-3.1-70b"),
        ("Llama-3.2-1B-Instruct", "llama-3.2-1b"),
        ("Llama-4-Scout-17B-16E-Instruct", "llama-4-scout-17b-16e"),
        ("Vicuna-7B v1.5", "vicuna-7b-v1.3"),
        ("Vicuna-33B", "vicuna-33b-v1.3"),
        ("JackFram/Llama-68m", "llama-68m"),
        ("princeton-nlp/Sheared-Llama-1.3B", "sheared-llama-1.3b"),
        ("TinyLlama-1.1B, StreamingLLM sparse KV", "tinyllama-1.1b"),
        ("Qwen2-0.5B-Instruct (single GPU)", "qwen2-0.5b"),
        ("Qwen3-0.6B", "qwen3-0.6b"),
        ("Qwen3-8B (thinking)", "qwen3-8b"),
        ("Qwen3-8B-Thinking", "qwen3-8b"),
        ("Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("Qwen3-Coder-30B-A3B-Instruct", "qwen3-30b-a3b"),
        ("Qwen3-Next-80B-A3B-Instruct-FP8", "qwen3-next-80b-a3b"),
        ("QwQ-32B", "qwq-32b"),
        ("Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b-v0.1"),
        ("DeepSeek-R1-0528", "deepseek-r1"),
        ("Kimi-K2-Instruct", "kimi-k2"),
        ("GLM-4.5-Air-106B", "glm-4.5-air"),
        ("T5-XXL v1.1 (11B, enc-dec)", "t5-v1.1-xxl"),
        ("T5-small (77M)", "t5-v1.1-small"),  # the size of the gated version
        ("T5-small", "t5-small"),
        ("T5-small (60M)", "t5-small"),
        ("google-t5/t5-base", "t5-base"),
    ],
)
def test_names_as_published_tables_spell_them(spelling: str, name: str) -> None:
    assert find_model(spelling).name == name


@pytest.mark.parametrize(
    ("spelling", "dtype", "weights"),
    [
        ("Qwen3-Next-80B-A3B-Instruct-FP8", "bfloat16", "fp8"),
        ("Llama-3.1-8B-Instruct (fp8)", "bfloat16", "fp8"),
        ("Qwen3-32B-FP8", "bfloat16", "fp8"),
        ("Vicuna-7B (bf16)", "bfloat16", "bfloat16"),
        ("DeepSeek-V3 (bf16)", "bfloat16", "bfloat16"),
        ("DeepSeek-V3", "bfloat16", "fp8"),
    ],
)
def test_a_number_format_in_a_name(spelling: str, dtype: str, weights: str) -> None:
    model = find_model(spelling)
    assert (model.dtype, model.weight_dtype) == (dtype, weights)


def test_a_checkpoint_in_fp8_is_found_before_the_suffix_is_read() -> None:
    assert find_model("Qwen/Qwen3-32B-FP8") == sm.load_model("qwen3-32b-fp8")


@pytest.mark.parametrize(
    "spelling",
    ["", "(8B)", "fp8", "Vicuna", "Llama-3.1", "Llama-2-34B", "Llama-3-9B", "Qwen3-14B", "OPT-13B",
     "Mistral-7B-v0.1", "Vicuna-33B v1.5", "llama-3.1-8b-q4", "GPT-4", "T5-small (11B)",
     "Llama-3.1-8B (70B)"],
)  # fmt: skip
def test_names_of_no_model_that_ships(spelling: str) -> None:
    with pytest.raises(UnknownNameError, match="unknown model"):
        find_model(spelling)


def test_a_name_nearly_right_gets_a_suggestion() -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean 'vicuna-13b-v1\.5'"):
        find_model("Vicuna-13B v1.6")


def test_aliases_name_models_that_ship_under_names_of_their_own() -> None:
    aliases = yaml.safe_load((PRESETS.parent / "model_aliases.yaml").read_text())
    assert set(aliases.values()) <= set(sm.model_names())
    assert not set(aliases) & set(sm.model_names())


def test_ling_of_the_first_version() -> None:
    """Ling-lite-1.5, as its ``config.json`` is quoted in public: 16.8B parameters, 2.75B active."""
    values = {
        "model_type": "bailing_moe", "architectures": ["BailingMoeForCausalLM"],
        "first_k_dense_replace": 0, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 1408, "moe_intermediate_size": 1408, "num_experts": 64,
        "num_shared_experts": 2, "num_attention_heads": 16, "num_experts_per_tok": 6,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "use_bias": False, "use_qkv_bias": False,
        "vocab_size": 126464, "embedding_dropout": 0.0, "norm_head": False,
        "norm_softmax": False, "output_dropout": 0.0,
    }  # fmt: skip
    model = from_dict(values, name="ling", where="config.json")
    assert (model.total_params, model.active_params) == (16_801_974_272, 2_753_153_024)


def test_unknown_preset_gets_a_suggestion() -> None:
    with pytest.raises(sm.ArchitectureError, match=r"did you mean 'llama-3\.1-8b'"):
        sm.load_model("llama-3.1-8bb")


def test_fp8_keeps_embeddings_router_and_head_in_the_activation_dtype() -> None:
    plain = sm.load_model("qwen3-32b")
    fp8 = sm.load_model("qwen3-32b-fp8")
    unquantised = 2 * plain.embedding_params + plain.vector_params
    blocks = 64 * sum(
        -(-n // 128) * -(-k // 128)
        for n, k in ((10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600))
    )
    expected = 2 * unquantised + (plain.total_params - unquantised) + 4 * blocks
    assert fp8.weight_bytes == expected
    assert fp8.total_params == plain.total_params


def packed(quantization: dict[str, Any], base: dict[str, Any] = LLAMA) -> sm.Architecture:
    return from_dict({**base, "quantization_config": quantization}, name="t", where="config.json")


def compressed(weights: dict[str, Any], **changes: Any) -> sm.Architecture:
    group = {"weights": weights, "targets": ["Linear"], "input_activations": {}, **changes}
    return packed({"quant_method": "compressed-tensors", "config_groups": {"group_0": group}})


def test_packed_size_of_gpt_oss() -> None:
    """The published checkpoint of the 20B takes 13,761,264,768 bytes."""
    assert sm.load_model("gpt-oss-20b").weight_bytes == 13_761_264_768


def test_group_quantised_sizes() -> None:
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    rest = 2 * (sm.load_model("llama-3.1-8b").total_params - weights)
    awq = packed({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True})
    assert awq.weight_bytes == rest + weights * (0.5 + 2.5 / 128)
    gptq = packed({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True})
    assert gptq.weight_bytes == rest + weights * (0.5 + 2.5 / 64)
    nvfp4 = packed({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16})
    assert nvfp4.weight_bytes == rest + weights * (0.5 + 1 / 16)
    group = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    int8 = packed(
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": group, "input_activations": {}}},
            "ignore": ["lm_head"],
        }
    )
    assert (int8.weight_dtype, int8.weight_bytes) == ("int8", rest + weights)
    assert compressed({**group, "group_size": 128}).weight_bytes == rest + weights * (1 + 2 / 128)
    four = {**group, "num_bits": 4}
    columns = 32 * (4096 * 2 + 1024 * 2 + 14336 * 2 + 4096)  # one scale for each output
    assert compressed({**four, "group_size": None}).weight_bytes == rest + weights / 2 + 2 * columns
    uneven = {**group, "group_size": 128, "symmetric": False}
    assert compressed(uneven).weight_bytes == rest + weights * (1 + 3 / 128)
    small = {"num_bits": 8, "type": "float", "scale_dtype": "torch.uint8", "group_size": 32}
    assert compressed(small).weight_bytes == rest + weights * (1 + 1 / 32)
    micro = {"num_bits": 4, "type": "float", "scale_dtype": "torch.uint8", "group_size": 32}
    assert compressed(micro).weight_dtype == "mxfp4"
    assert sm.load_model("llama-3.1-8b").with_dtypes(weights="int4").weight_bytes == (
        rest + weights * (0.5 + 2.0 / 128)
    )


def test_excluded_modules_stay_in_the_activation_format() -> None:
    def size(*names: str) -> float:
        return packed({"quant_method": "fp8", "modules_to_not_convert": [*names]}).weight_bytes

    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
    output, mlp = 4096 * 4096, 3 * 4096 * 14336
    assert size("lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate") == size()
    assert size("model.layers.*.self_attn") - size() == 32 * attention
    assert size("re:.*self_attn.*") - size() == 32 * attention
    assert size("model.layers.3.self_attn.o_proj") - size() == output
    assert size("model.layers.0.mlp.gate_proj", "model.layers.1.mlp.down_proj") - size() == 2 * mlp
    assert size("model.layers.7*") - size() == attention + mlp
    assert size("model.layers.32*") == size()  # an MTP block beyond the last layer


def test_excluded_modules_are_matched_to_each_layers_own() -> None:
    hybrid, moe, mla = (
        json.loads((PRESETS / f"{name}.json").read_text())
        for name in ("qwen3.5-27b", "qwen3-30b-a3b", "deepseek-v2-lite")
    )

    def kept(base: dict[str, Any], *names: str) -> dict[str, int]:
        """Return in how many layers each role is kept from quantisation."""
        model = packed({"quant_method": "fp8", "modules_to_not_convert": [*names]}, base)
        assert model.quantisation is not None
        count: dict[str, int] = {}
        for layer, run in model.layers:
            plain = replace(layer, unquantised=frozenset())
            held = {linear.role for linear in plain.linears(model.hidden_size)}
            held |= {"experts"} if isinstance(layer.mlp, MoE) else set()
            for role in held & QUANTISABLE:
                if role in layer.unquantised or role not in model.quantisation.roles:
                    count[role] = count.get(role, 0) + run
        return count

    # what is quantised of neither the text model nor anything else
    for name in ("visual", "model.visual.blocks.0.mlp.linear_fc1", "model.visual.blocks.0.attn.qkv",
                 "model.language_model.layers.0.linear_attn.in_proj_a", "in_proj_b",
                 "re:.*in_proj_ba$", "re:visual.*"):  # fmt: skip
        assert kept(hybrid, name) == {}
    for name in ("re:.*mlp.gate$", "gate", "re:.*mlp.shared_expert_gate$", "layers.*.mlp.gate"):
        assert kept(moe, name) == kept(mla, name) == {}
    # a recurrent layer's projections, or an attention layer's
    assert kept(hybrid, "re:.*self_attn.*") == {"attention": 16, "attention output": 16}
    assert kept(hybrid, "linear_attn") == {"attention": 48, "attention output": 48}
    # layers by number
    assert kept(hybrid, r"re:.*layers\.(56|57)\.mlp.*") == {"mlp": 2}
    assert kept(hybrid, r"re:.*layers\.[0-3]\.mlp.*") == {"mlp": 4}
    assert kept(hybrid, r"re:.*layers\.3\.mlp\..*") == {"mlp": 1}
    # experts, or the dense layers alone
    assert kept(moe, "re:.*mlp.*") == {"experts": 48}
    for name in ("model.layers.0.mlp", "model.layers.0.mlp.experts"):
        assert kept(moe, name) == {"experts": 1}
    assert kept(mla, r"re:.*mlp\.(gate|up|gate_up|down)_proj.*") == {"mlp": 1}
    assert kept(mla, "re:.*shared_experts.*") == {"shared": 26}


def test_modules_outside_the_layers_leave_them_alone() -> None:
    values = {
        name: json.loads((PRESETS / f"{name}.json").read_text())
        for name in (
            "deepseek-v3",
            "qwen3.5-35b-a3b",
            "gemma-3-1b",
            "gemma-4-26b-a4b",
            "qwen3-30b-a3b",
        )
    }

    def model(preset: str, *names: str) -> sm.Architecture:
        return packed({"quant_method": "fp8", "modules_to_not_convert": [*names]}, values[preset])

    # encoders have layers too
    tower = "vision_tower.vision_model.encoder.layers.0.self_attn.k_proj"
    assert model("gemma-3-1b", tower) == model("gemma-3-1b")
    assert model("deepseek-v3", "vision_tower.layers.61.fc").mtp_quantised
    # of a prediction block only its projections count
    for name in (
        "model.layers.61.eh_proj",
        "model.layers.61.mlp.gate",
        "mtp.fc",
        "mtp.layers.0.mlp.gate",
    ):
        assert model("deepseek-v3", name) == model("deepseek-v3")
        assert model("qwen3.5-35b-a3b", "mtp.fc").mtp_quantised
    for name in ("model.layers.61*", "mtp", "re:.*mtp.*", "mtp.layers.0.self_attn.o_proj",
                 "model.layers.61.self_attn.o_proj"):  # fmt: skip
        assert not model("deepseek-v3", name).mtp_quantised
    both = model("deepseek-v3", "re:.*(mtp|self_attn).*")
    assert not both.mtp_quantised
    assert both.quantisation is not None
    assert both.quantisation.roles == {"mlp", "experts", "shared"}
    # an expression covers what it matches: here layers 1 and 10 to 19
    dots = model("gemma-3-1b", "re:model.layers.1.*")
    assert sum(n for layer, n in dots.layers if layer.unquantised) == 11
    # a dense part beside experts, counted as shared
    for name, role in (("model.layers.0.mlp.gate_proj", "shared"), ("layers.0.experts", "experts")):
        assert model("gemma-4-26b-a4b", name).layers[0][0].unquantised == {role}
    # experts one by one: all of a layer's, or refused
    one = "model.layers.0.mlp.experts.{}.{}_proj"
    listed = [one.format(i, x) for i in range(128) for x in ("gate", "up", "down")]
    assert model("qwen3-30b-a3b", *listed) == model("qwen3-30b-a3b", "model.layers.0.mlp.experts")
    for names in ([one.format(0, "down")], listed[:9], [r"re:.*experts\.17\..*"]):
        with pytest.raises(sm.ArchitectureError, match="not supported"):
            model("qwen3-30b-a3b", *names)


def test_excluded_modules_of_published_checkpoints(model_configs: Path) -> None:
    kimi = read_config(model_configs / "nvidia--Kimi-K2.5-NVFP4.json")
    assert (kimi.weight_dtype, kimi.kv_dtype) == ("nvfp4", "fp8")
    assert kimi.quantisation is not None
    assert kimi.quantisation.roles == {"mlp", "experts", "shared"}
    int4 = read_config(model_configs / "moonshotai--Kimi-K2.5.json")
    assert int4.quantisation is not None
    assert (int4.quantisation.group, int4.quantisation.weight_only) == (32, True)
    assert int4.quantisation.roles == {"experts"}


@pytest.mark.parametrize(
    ("file", "bound"),
    [("DeepSeek-V3.1-NVFP4", 420e9), ("Qwen3-235B-A22B-NVFP4", 135e9),
     ("NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4", 22e9), ("Llama-3.1-70B-Instruct-FP8", 75e9)],
)  # fmt: skip
def test_modelopt_checkpoints(model_configs: Path, tmp_path: Path, file: str, bound: float) -> None:
    """With the two files in one folder, as they are published."""
    for name, suffix in (
        ("config.json", ".json"),
        ("hf_quant_config.json", ".hf_quant_config.json"),
    ):
        (tmp_path / name).write_text((model_configs / f"nvidia--{file}{suffix}").read_text())
    plain = read_config(model_configs / f"nvidia--{file}.json")
    quantised = sm.load_model(tmp_path)
    assert quantised.total_params == plain.total_params
    assert quantised.weight_bytes < bound < plain.weight_bytes
    assert quantised.kv_dtype == "fp8"


@pytest.mark.parametrize(
    ("weights", "changes", "message"),
    [
        ({"num_bits": 8, "type": "int", "wild": 3}, {}, "wild: unknown key"),
        ({"num_bits": 8, "type": "int", "symmetric": "no"}, {}, "symmetric: must be true or false"),
        ({"num_bits": 8, "type": "float", "block_structure": ["x"]}, {}, "must be two whole"),
        ({"num_bits": 8, "type": "int"}, {"targets": ["re:.*mlp.*"]}, "targets .* not supported"),
        ({"num_bits": 8, "type": "int"}, {"output_activations": {"num_bits": 8}}, "output_activ"),
        ({"num_bits": 3, "type": "int"}, {}, "3-bit int weights are not supported"),
    ],
)  # fmt: skip
def test_compressed_tensors_are_read_strictly(
    weights: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(sm.ArchitectureError, match=message):
        compressed(weights, **changes)


@pytest.mark.parametrize(
    ("preset", "changes", "message"),
    [
        ("deepseek-v3.2", {"index_topk": ...}, "index_topk: missing"),
        ("deepseek-v3", {"n_shared_experts": ...}, "n_shared_experts: missing"),
        ("gpt-oss-20b", {"attention_bias": ...}, "attention_bias: missing"),
        ("gpt-oss-20b", {"head_dim": ...}, "head_dim: missing"),
        ("mimo-v2-flash", {"swa_num_attention_heads": 65}, "must divide 65 heads"),
        ("gemma-4-26b-a4b", {"top_k_experts": 10**6}, "top_k_experts: must be at most 128"),
        ("llama-3.1-8b-eagle3", {"vocab_size": 3}, "draft_vocab_size: must be at most 3"),
        ("llama-3.1-8b-eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}},
         "must name three layers"),
    ],
)  # fmt: skip
def test_what_a_family_needs_is_not_guessed(
    preset: str, changes: dict[str, Any], message: str
) -> None:
    values = {**json.loads((PRESETS / f"{preset}.json").read_text()), **changes}
    with pytest.raises(sm.ArchitectureError, match=message):
        from_dict({k: v for k, v in values.items() if v is not ...}, name="t", where="config.json")


def test_opt_and_jamba_of_the_hub() -> None:
    """With the keys that their published files carry; counted by hand."""
    opt = {
        "activation_function": "relu", "model_type": "opt", "torch_dtype": "float16",
        "do_layer_norm_before": True, "ffn_dim": 3072, "hidden_size": 768, "init_std": 0.02,
        "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 50272,
        "max_position_embeddings": 2048, "word_embed_proj_dim": 768, "layerdrop": 0.0,
    }  # fmt: skip
    assert from_dict(opt, name="opt-125m", where="x").total_params == 125_239_296
    bare = from_dict({**opt, "_remove_final_layer_norm": True}, name="opt", where="x")
    assert bare.total_params == 125_239_296 - 2 * 768
    jamba = {
        "model_type": "jamba", "hidden_act": "silu", "hidden_size": 4096, "mamba_dt_rank": 256,
        "attn_layer_offset": 4, "attn_layer_period": 8, "expert_layer_offset": 1,
        "expert_layer_period": 2, "intermediate_size": 14336, "mamba_conv_bias": True,
        "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2, "mamba_proj_bias": False,
        "num_attention_heads": 32, "num_experts": 16, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_logits_to_keep": 1,
        "torch_dtype": "bfloat16", "vocab_size": 65536, "tie_word_embeddings": False,
    }  # fmt: skip
    assert from_dict(jamba, name="jamba-1.5-mini", where="x").total_params == 51_570_323_328
    with pytest.raises(sm.ArchitectureError, match="attn_layer_offset: must be below"):
        from_dict({**jamba, "attn_layer_offset": 9}, name="t", where="x")


def test_multimodal_gemma3_takes_its_classes_defaults() -> None:
    """As the Hub's 27B and 4B files leave them out; text part, embedding tied."""
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "mm_tokens_per_image": 256,
        "vision_config": {},
    }
    text = {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024}  # fmt: skip
    large = {**text, "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504,
             "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16,
             "query_pre_attn_scalar": 168, "sliding_window_pattern": 6}  # fmt: skip
    small = {**text, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}

    def read_text(values: dict[str, Any]) -> sm.Architecture:
        return from_dict({**outer, "text_config": values}, name="gemma-3", where="x")

    model = read_text(large)
    layer = 2 * 5376 * 4096 + 2 * 5376 * 2048 + 3 * 5376 * 21504 + 4 * 5376 + 2 * 128
    assert model.total_params == 62 * layer + 5376 + 262_208 * 5376 == 27_009_346_304
    assert "vocab_size 262208" in model.notes[0]
    assert "head_dim" not in model.notes[0]
    four = read_text(small)
    layer = 2 * 2560 * 2048 + 2 * 2560 * 1024 + 3 * 2560 * 10240 + 4 * 2560 + 2 * 256
    assert four.total_params == 34 * layer + 2560 + 262_208 * 2560 == 3_880_263_168
    assert sum(n for x, n in four.layers if x.mixer is not None and x.mixer.kind == "GQA") == 5
    with pytest.raises(sm.ArchitectureError, match="hidden_size: missing"):
        read_text(text)
    with pytest.raises(sm.ArchitectureError, match="vocab_size: missing"):  # not a part of another
        from_dict({**large, "torch_dtype": "bfloat16"}, name="t", where="x")


def test_falcon_of_the_hub() -> None:
    """Counted by hand from the matrices of both forms, LM head tied."""
    base = {
        "model_type": "falcon", "architectures": ["FalconForCausalLM"], "alibi": False,
        "apply_residual_connection_post_layernorm": False, "bias": False, "vocab_size": 65024,
        "layer_norm_epsilon": 1e-5, "multi_query": True, "parallel_attn": True,
        "torch_dtype": "bfloat16", "hidden_dropout": 0.0,
    }  # fmt: skip
    seven = {**base, "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32,
             "num_kv_heads": 71, "new_decoder_architecture": False}  # fmt: skip
    small = from_dict(seven, name="falcon-7b", where="x")
    layer = 4544 * (4544 + 2 * 64) + 4544**2 + 2 * 4 * 4544**2 + 2 * 4544
    assert small.total_params == 32 * layer + 2 * 4544 + 65024 * 4544 == 6_921_720_704
    assert small.kv_elements_per_token == 32 * 2 * 64
    forty = {**base, "hidden_size": 8192, "num_attention_heads": 128, "num_hidden_layers": 60,
             "num_kv_heads": 8, "new_decoder_architecture": True}  # fmt: skip
    large = from_dict(forty, name="falcon-40b", where="x")
    layer = 8192 * (8192 + 2 * 8 * 64) + 8192**2 + 2 * 4 * 8192**2 + 4 * 8192
    assert large.total_params == 60 * layer + 2 * 8192 + 65024 * 8192 == 41_303_293_952
    assert large.kv_elements_per_token == 60 * 2 * 8 * 64


def test_llama4_says_which_layers_attend_in_chunks() -> None:
    values = json.loads((PRESETS / "llama-4-scout-17b-16e.json").read_text())
    plain = from_dict(values, name="t", where="x")
    stated = [int((i + 1) % 4 != 0) for i in range(48)]
    for rope in ([], stated):
        assert from_dict({**values, "no_rope_layers": rope}, name="t", where="x") == plain
    every = from_dict({**values, "no_rope_layers": [0] * 48}, name="t", where="x")
    assert {kind.split(" +")[0] for kind in every.layers_by_kind()} == {"GQA"}


def test_hybrids_keep_a_state_for_every_candidate() -> None:
    from specmodel.memory import memory

    model = sm.load_model("qwen3.5-35b-a3b")
    heads, tail = 32 * 128 * 128 * 4, (2 * 16 * 128 + 32 * 128) * 3 * 2  # the tail in bf16
    assert model.state_bytes == 30 * (heads + tail)
    h100 = sm.load_device("h100")
    plain, four = memory(h100, model, L=0), memory(h100, model, sm.NGram(hit=1.0), k=3, L=0)
    per_token = model.kv_bytes_per_token
    assert four.target_kv - plain.target_kv == 3 * (model.state_bytes + per_token)
    # a pass reads the state once and writes it for every position
    one, wide = (sm.pass_time(h100, model, B=4, W=W, L=0, level="ideal") for W in (1, 3))
    states = [float(t.groups["state"]) for t in (one, wide)]
    assert states[1] / states[0] == pytest.approx(4 / 2)


def test_sparse_attention_reads_less_than_it_keeps() -> None:
    h100 = sm.load_device("h100")
    dense, sparse = sm.load_model("deepseek-v3"), sm.load_model("deepseek-v3.2")
    L = 100_000
    kept = 61 * 2 * L * (512 + 64)
    assert dense.kv_bytes(L) == kept
    assert sparse.kv_bytes(L) == kept + 61 * 2 * L * 128  # and an index key
    read = [
        float(sm.pass_time(h100, m, B=1, L=L, level="ideal").rows) * 3.35e12
        for m in (dense, sparse)
    ]
    assert read[0] == pytest.approx(kept)
    assert read[1] == pytest.approx(61 * 2 * (2048 * 576 + L * 128))


def test_windows_and_chunks_cap_what_is_read() -> None:
    h100 = sm.load_device("h100")
    gemma, scout = sm.load_model("gemma-3-1b"), sm.load_model("llama-4-scout-17b-16e")
    assert gemma.kv_bytes(2048) == 2 * (2048 * 2048 + 512 * 11264)
    read = sm.pass_time(h100, scout, B=1, L=100_000, level="ideal").rows
    per_layer = 2 * 2 * 8 * 128
    assert float(read) * 3.35e12 == pytest.approx(per_layer * (12 * 100_000 + 36 * 8192))


def test_size_of_the_checkpoint_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 16060522496}, "weight_map": {}}))
    model = sm.load_model(tmp_path)
    assert model.checkpoint_bytes == model.weight_bytes == 16060522496
    index.write_text("{}")
    with pytest.raises(sm.ArchitectureError, match="metadata: missing"):
        sm.load_model(tmp_path)


def test_directory_with_a_quantisation_file_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    quant = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quant}))
    model = sm.load_model(tmp_path)
    assert (model.weight_dtype, model.kv_dtype, model.dtype) == ("fp8", "fp8", "bfloat16")
    assert model.name == tmp_path.name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ...}, "hidden_size: missing"),
        ({"hidden_size": "4096"}, "hidden_size: must be a whole number"),
        ({"hidden_size": True}, "hidden_size: must be a whole number"),
        ({"hidden_size": float("nan")}, "hidden_size: must be a whole number"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: must be a whole number >= 1; got -1"),
        ({"num_attention_heads": 33}, "num_attention_heads: must divide hidden_size"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: must divide 32 heads"),
        ({"torch_dtype": "float17"}, "torch_dtype: .*float17.*did you mean"),
        ({"torch_dtype": "fp8"}, "torch_dtype: must be one of float32, float16, bfloat16"),
        ({"hidden_act": "relu"}, "hidden_act: must be one of"),
        ({"model_type": "llamma"}, "model_type: 'llamma' is not supported; did you mean 'llama'"),
        ({"model_type": ...}, "model_type: missing"),
        ({"num_experts": 8}, "num_experts: unknown key for model_type 'llama'"),
        ({"sliding_window": 4096}, "sliding_window: unknown key"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: must be true or false"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method: 'hqq' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: bits: missing"),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            "^config.json: mxfp4 quantises nothing",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "kv_cache_dtype": "int4"}},
            "kv_cache_dtype: must be one of",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": [1]}},
            "kv_cache_scheme: must be an object",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "modelopt",
                    "quant_algo": "NVFP4",
                    "group_size": 7,
                }
            },
            "group_size: must be 16",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "ignore": ["re:(.*"]}},
            "is no regular expression",
        ),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "is a draft head that is not supported"),
        ({"model_type": "qwen3"}, "head_dim: missing"),
        ({"model_type": "phi3", "attention_bias": True}, "attention_bias: must be false"),
        ({"num_key_value_heads": 64}, "num_key_value_heads: must divide 32 heads"),
        ({"vocab_size": 10**12}, "vocab_size: must be at most"),
        (
            {"model_type": "x", "tie_word_embeddings": True, "text_config": LLAMA},
            "tie_word_embeddings: True contradicts False of text_config",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            "weight_block_size: must be two",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "fp8",
                    "modules_to_not_convert": ["bottleneck"],
                }
            },
            "excluded modules: 'bottleneck' is not understood",
        ),
        ({"architectures": ["DFlashDraftModel"]}, "block_size: missing"),
        ({"architectures": ["DSparkDraftModel"]}, "block_size: missing"),
        ({"architectures": ["Qwen3MoEForCausalLMEagle3"]}, "num_hidden_layers: must be 1"),
        ({"model_type": "deepseek_v4"}, "num_key_value_heads: must be 1"),
        ({"model_type": "minimax_m3"}, "use_qk_norm: missing"),
        ({"model_type": "t5"}, "d_model: missing"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "it is no causal language model"),
        ({"dtype": "float16"}, "torch_dtype: 'bfloat16' contradicts dtype"),
        ({"num_dropout_experts": 4}, "num_dropout_experts: unknown key"),
        (
            {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": "lm_head"}},
            "modules_to_not_convert: must be a list",
        ),
        ({"architectures": 5}, "architectures: must be a list of class names"),
        ({"model_type": "mistral"}, "sliding_window: missing"),
        ({"model_type": "qwen2", "num_key_value_heads": ...}, "num_key_value_heads: missing"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: must be at most"),
        (
            {"quantization_config": {"quant_method": "fp8", "kv_cache_dtype": "fp9"}},
            "quantization_config: kv_cache_dtype: .*fp9",
        ),
        (
            {"model_type": "qwen3", "head_dim": 128, "layer_types": ["full_attention", "linear"]},
            "layer_types: must name",
        ),
    ],
)
def test_refusals_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(sm.ArchitectureError, match=message) as caught:
        read(**changes)
    assert str(caught.value).startswith("config.json: ")


def test_a_file_without_a_format_is_read_and_says_so() -> None:
    model = read(torch_dtype=...)
    assert model.dtype == "bfloat16"
    assert model.notes == ("no dtype in its file: bfloat16 assumed",)
    assert read().notes == ()
    assert read(dtype=None).notes == ()


def test_a_missing_q_lora_rank_is_not_guessed() -> None:
    values = {k: v for k, v in MLA.items() if k != "q_lora_rank"}
    with pytest.raises(sm.ArchitectureError, match="q_lora_rank: missing"):
        from_dict(values, name="test", where="config.json")
    full_rank = from_dict({**values, "q_lora_rank": None}, name="test", where="config.json")
    attention = full_rank.layers[0][0].attention
    assert isinstance(attention, LatentAttention)
    assert attention.q_lora_rank is None


def test_more_experts_per_token_than_experts() -> None:
    with pytest.raises(sm.ArchitectureError, match="num_experts_per_tok: must be at most 4"):
        from_dict({**MOE, "num_experts": 4}, name="test", where="config.json")


def test_windows_cap_the_cache() -> None:
    values = {**LLAMA, "model_type": "qwen2", "use_sliding_window": True}
    with pytest.raises(sm.ArchitectureError, match="max_window_layers: missing"):
        from_dict({**values, "sliding_window": 1024}, name="test", where="config.json")
    model = from_dict(
        {**values, "sliding_window": 1024, "max_window_layers": 8}, name="t", where="config.json"
    )
    per_token = model.kv_bytes_per_token / 32
    assert model.kv_bytes(4096) == per_token * (8 * 4096 + 24 * 1024)
    off = from_dict({**values, "sliding_window": 1024, "max_window_layers": 8,
                     "use_sliding_window": False}, name="t", where="config.json")  # fmt: skip
    assert off.kv_bytes(4096) == off.kv_bytes_per_token * 4096


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"model_type": "llama", "model_type": "qwen2"}',
        '{"model_type": "llama"',
        "[1, 2]",
        '"llama"',
        "\x00\x01",
        "[" * 100_000,
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(sm.ArchitectureError, match=r"config\.json: "):
        sm.load_model(file)


def test_missing_file_and_binary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(sm.ArchitectureError, match="no such file"):
        sm.load_model(tmp_path / "absent.json")
    with pytest.raises(sm.ArchitectureError, match="holds no config"):
        sm.load_model(tmp_path)
    assert sm.load_model("llama-3.1-8b").n_layers == 32
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-3.1-8b").mkdir()  # a folder of that name does not hide the model
    assert sm.load_model("llama-3.1-8b").n_layers == 32
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(sm.ArchitectureError, match="not a text file in UTF-16"):
        sm.load_model(tmp_path)


QUANT = st.fixed_dictionaries(
    {},
    optional={
        "quant_method": st.sampled_from(["fp8", "awq", 8]),
        "weight_block_size": st.one_of(st.none(), st.lists(st.integers(-1, 128), max_size=3)),
        "modules_to_not_convert": st.one_of(st.none(), st.lists(st.text(max_size=5), max_size=2)),
        "kv_cache_dtype": st.one_of(st.none(), st.text(max_size=4), st.integers()),
        "bits": st.integers(),
    },
)
JUNK = st.one_of(
    QUANT,
    st.none(), st.booleans(), st.integers(-10, 10**9), st.integers(10**400, 10**401),
    st.floats(), st.text(max_size=8), st.lists(st.integers(-3, 3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers()),
)  # fmt: skip


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(
    base=st.sampled_from([LLAMA, MOE, MLA]),
    changes=st.dictionaries(
        st.sampled_from(
            sorted({*LLAMA, *MOE, *MLA, "quantization_config", "sliding_window", "architectures"})
        ),
        JUNK,
        min_size=1,
        max_size=3,
    ),
)
def test_mutated_configurations_are_read_sensibly_or_refused(
    base: dict[str, Any], changes: dict[str, Any]
) -> None:
    try:
        model = from_dict({**base, **changes}, name="test", where="config.json")
    except sm.ArchitectureError:
        return
    assert model.n_layers > 0
    assert 0 < model.active_params <= model.total_params
    assert model.kv_elements_per_token > 0
    assert model.weight_bytes > 0


def test_eagle_heads_are_shaped_like_the_target(llama: sm.Architecture) -> None:
    H, I = 4096, 14336
    layer = 2 * H * H + 2 * H * 1024 + 3 * H * I
    # fusion with its bias, one layer, its one norm; embedding, LM head and final norm are shared
    assert eagle_head(llama).total_params == 2 * H * H + H + layer + H
    # fusion 3H to H, q/k/v on 2H, 32,000 rows of LM head, three norms and a final one
    wide = layer + H * H + 2 * H * 1024
    assert eagle3_head(llama).total_params == 3 * H * H + wide + 32_000 * H + 4 * H


def test_eagle3_configuration_equals_the_derived_head(llama: sm.Architecture) -> None:
    read_head = sm.load_model("llama-3.1-8b-eagle3")
    assert read_head.total_params == eagle3_head(llama).total_params
    assert read_head.fusion is not None
    assert not read_head.own_embedding


def test_mtp_block_repeats_the_last_layer() -> None:
    v3 = sm.load_model("deepseek-v3")
    head = mtp_head(v3)
    assert isinstance(head.layers[0][0].mlp, MoE)
    # DeepSeek-V3 report, section 2.2: 11.5B parameters besides the shared embedding and head
    assert head.total_params == pytest.approx(11.5e9, rel=0.02)


def test_heads_that_cannot_be_derived(llama: sm.Architecture) -> None:
    with pytest.raises(sm.ArchitectureError, match="carries no MTP block"):
        mtp_head(llama)
    with pytest.raises(sm.ArchitectureError, match="give the head's own config"):
        eagle3_head(sm.load_model("deepseek-v3"))


def test_first_layers_keep_the_order() -> None:
    v3 = sm.load_model("deepseek-v3")
    assert v3.first_layers(15).layers_by_kind() == {"MLA + dense": 3, "MLA + MoE 256 top-8": 12}
    assert v3.first_layers(61) == v3


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_shards_add_up(tp: int, llama: sm.Architecture, qwen_moe: sm.Architecture) -> None:
    share = llama.shard(tp)
    replicated = 2 * llama.vector_params  # every rank keeps the norms
    assert share.weight_bytes * tp == llama.weight_bytes + (tp - 1) * replicated
    assert share.kv_elements_per_token * tp == llama.kv_elements_per_token
    moe = qwen_moe.shard(tp)
    assert moe.routed_expert_params * tp == qwen_moe.routed_expert_params
    kv = qwen_moe.shard(tp).kv_elements_per_token
    assert kv == qwen_moe.kv_elements_per_token // min(tp, 4)  # four KV heads replicate at 8


def test_shards_that_do_not_divide(llama: sm.Architecture) -> None:
    with pytest.raises(sm.DomainError, match="tp must divide the 32 attention heads; got 3"):
        llama.shard(3)
    with pytest.raises(sm.DomainError, match="feed-forward width"):
        read(intermediate_size=14335).shard(2)
    v3 = sm.load_model("deepseek-v3").shard(8)
    assert v3.kv_elements_per_token == 35_136  # the latent cache is replicated


@pytest.mark.parametrize(
    ("key", "value"), [("first_k_dense_replace", 100), ("num_nextn_predict_layers", 10**6)]
)
def test_layers_beyond_the_depth_are_refused(key: str, value: int) -> None:
    with pytest.raises(sm.ArchitectureError, match=f"{key}: must be at most 61"):
        from_dict({**MLA, key: value}, name="x", where="x")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Llama-3.3-70B-Instruct", "llama-3.1-70b"), ("meta-llama/Llama-3-8B", "llama-3.1-8b"),
        ("Qwen2.5-7B-Instruct", "qwen2-7b"), ("R1-Distill-Llama-8B", "llama-3.1-8b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "llama-3.1-70b"),
    ],
)  # fmt: skip
def test_one_resolver_of_names(text: str, name: str) -> None:
    assert sm.load_model(text) == find_model(text) == sm.load_model(name)


def test_more_parameters_than_any_model_has() -> None:
    with pytest.raises(sm.ArchitectureError, match="parameters are more than any model has"):
        from_dict({**MLA, "moe_intermediate_size": 10**8}, name="x", where="x")
