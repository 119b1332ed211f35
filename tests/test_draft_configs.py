"""Draft heads read from their files: parameters by hand, and what a round runs of each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import specmodel as sm
from specmodel.architectures import MoE, from_dict
from specmodel.cli import main
from specmodel.costs import pass_operators
from specmodel.defaults import default_kind, make_drafter

PRESETS = Path(sm.__file__).parent / "data" / "models"
H, I, V, R = 4096, 12288, 151_936, 256  # Qwen3-8B's sizes; rank of a bigram correction
QKV, OUT = 32 * 128 + 2 * 8 * 128, 32 * 128
HEAD = {
    "hidden_act": "silu", "hidden_size": H, "intermediate_size": I, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": V, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
PEAGLE = {**HEAD, "architectures": ["PEagleDraftModel"], "model_type": "llama",
          "num_hidden_layers": 4, "draft_vocab_size": 32_000}  # fmt: skip
BLOCK = {**HEAD, "model_type": "qwen3", "num_hidden_layers": 5, "num_target_layers": 36}
FEATURES = {"mask_token_id": 1, "target_layer_ids": [1, 9, 17, 25, 33]}
DFLASH = {**BLOCK, "architectures": ["DFlashDraftModel"], "block_size": 16,
          "dflash_config": FEATURES}  # fmt: skip
DSPARK = {**BLOCK, "architectures": ["DSparkDraftModel"], "block_size": 7,
          "dflash_config": {**FEATURES, "projector_type": "dspark",
                            "attention_mode": "gqa", "markov_rank": R,
                            "markov_head_type": "vanilla", "enable_confidence_head": True,
                            "confidence_head_alpha": 1.0,
                            "confidence_head_with_markov": True}}  # fmt: skip
MOE = {**HEAD, "architectures": ["Qwen3MoEForCausalLMEagle3"], "model_type": "qwen3_moe",
       "num_hidden_layers": 1, "num_experts": 8, "num_experts_per_tok": 2,
       "moe_intermediate_size": 768, "draft_vocab_size": 32_000}  # fmt: skip


def read(values: dict[str, Any], **changes: Any) -> sm.Architecture:
    return from_dict({**values, **changes}, name="head", where="config.json")


@pytest.fixture(scope="module")
def target() -> sm.Architecture:
    return sm.load_model("qwen3-8b")


def test_peagle_is_counted_by_hand() -> None:
    head = read(PEAGLE)
    layer = H * QKV + OUT * H + 3 * H * I
    first = layer + H * QKV + 3 * H  # queries, keys and values see embedding and feature
    masked = 3 * H
    assert head.total_params == 3 * H * H + masked + first + 3 * (layer + 2 * H) + H + 32_000 * H
    assert head.kv_elements_per_token == 4 * 2 * 8 * 128


def test_peagle_drafts_in_one_pass(target: sm.Architecture) -> None:
    head = read(PEAGLE)
    assert default_kind(target, head) == "parallel"
    drafter, _ = make_drafter("parallel", target, draft=head)
    (one,) = drafter.passes(target, [0, 1, 4])
    assert one.count.tolist() == [0, 1, 1]
    assert one.W.tolist() == [0, 2, 8]  # k + 1 verified positions and k - 1 masks
    assert one.head_rows.tolist() == [0, 1, 4]
    for kind in ("eagle3", "draft-model", "block-diffusion"):
        with pytest.raises(sm.SpecmodelError, match=r"cannot be the draft of|is an? peagle head"):
            make_drafter(kind, target, draft=head)
    with pytest.raises(sm.ArchitectureError, match="features of width 4096"):
        make_drafter("parallel", sm.load_model("qwen3-32b"), draft=head)


def test_dspark_is_dflash_with_two_heads_more() -> None:
    dflash, dspark = read(DFLASH), read(DSPARK)
    layer = H * QKV + OUT * H + 3 * H * I + 2 * H + 2 * 128
    assert dflash.total_params == 5 * H * H + H + 5 * layer + H
    more = 2 * V * R + (H + R + 1)  # a bigram's two tables, a row that guesses acceptance
    assert dspark.total_params == dflash.total_params + more
    assert dspark.weight_bytes == 2 * dspark.total_params
    bare = {**DSPARK["dflash_config"], "enable_confidence_head": False, "markov_rank": 0}
    assert read(DSPARK, dflash_config=bare).total_params == dflash.total_params


def test_dspark_corrects_drafts_one_by_one(target: sm.Architecture) -> None:
    dspark, dflash = sm.BlockDiffusion(read(DSPARK)), sm.BlockDiffusion(read(DFLASH))
    assert (dspark.max_k, dflash.max_k) == (7, 15)
    assert default_kind(target, dspark.architecture) == "block-diffusion"
    block, corrections = dspark.passes(target, [0, 7])
    assert block.W.tolist() == block.head_rows.tolist() == [0, 7]
    assert corrections.count.tolist() == [0, 7]
    (only,) = dflash.passes(target, [7])
    assert only.W.tolist() == [8]
    (linear,) = [op for op in pass_operators(corrections.architecture, B=1) if op.name == "LM head"]
    assert linear.weight_bytes == 2 * R * V
    h100 = sm.load_device("h100")
    without = replace(dspark, architecture=replace(dspark.architecture, bigram_rank=0))
    with_, none = (
        sm.speculate(h100, target, d, sm.Geometric(0.7), B=1, k=7, L=0, level="ideal").T_d
        for d in (dspark, without)
    )
    assert float(with_) - float(none) == pytest.approx(7 * 2 * R * V / 3.35e12)
    with pytest.raises(sm.DomainError, match="k must be"):
        dspark.passes(target, [8])


def test_a_head_of_experts_has_norms_on_queries_and_keys() -> None:
    head = read(MOE)
    experts = 8 * 3 * H * 768 + 8 * H
    layer = 2 * H * QKV + OUT * H + experts + 3 * H + 2 * 128
    assert head.total_params == 3 * H * H + layer + H + 32_000 * H
    assert isinstance(head.layers[0][0].mlp, MoE)
    with pytest.raises(sm.ArchitectureError, match="num_hidden_layers: must be 1"):
        read(MOE, num_hidden_layers=2)


@pytest.mark.parametrize(
    ("changes", "norms"),
    [
        ({}, 0),
        ({"fc_norm": True, "norm_output": True}, 1),
        ({"norm_before_fc": True}, 1),
        ({"eagle_config": {"norm_before_fc": True}}, 1),
        ({"fc_norm": True, "norm_before_fc": True}, 2),
    ],
)
def test_norms_before_the_fusion_are_counted_and_timed(changes: dict[str, Any], norms: int) -> None:
    values = json.loads((PRESETS / "llama-3.1-8b-eagle3.json").read_text())
    plain, head = read(values), read(values, **changes)
    assert head.total_params == plain.total_params + norms * 3 * 4096
    moved = [
        sum(float(op.count * op.weight_bytes) for op in pass_operators(h, B=1, fuse=fuse))
        for h in (plain, head)
        for fuse in (True, False)
    ]
    assert moved[2] - moved[0] == norms * 3 * 4096 * 2
    assert moved[3] == moved[1]  # later passes of a round fuse nothing


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (PEAGLE, {"num_aux_hidden_states": 4}, "num_aux_hidden_states: must be 3"),
        (PEAGLE, {"fc_norm": 1}, "fc_norm: must be true or false"),
        (PEAGLE, {"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config: use_aux"),
        (PEAGLE, {"eagle_config": {"wild": 3}}, "eagle_config: wild: unknown key"),
        (PEAGLE, {"eagle_config": [1]}, "eagle_config: must be an object"),
        (MOE, {"attention_bias": True}, "attention_bias: must be false"),
        (DSPARK, {"dflash_config": {"target_layer_ids": [1]}}, "markov_rank: missing"),
        (DFLASH, {"dflash_config": {"target_layer_ids": [1], "markov_rank": 8}}, "rank: unk"),
        (DFLASH, {"dflash_config": {"target_layer_ids": [1], "attention_mode": "mla"}}, "'mla' is"),
        (DFLASH, {"dflash_config": {"target_layer_ids": [1], "projector_type": "x"}}, "must be df"),
        (DSPARK, {"dflash_config": {"target_layer_ids": [1], "markov_rank": 8,
                                    "markov_head_type": "rnn"}}, "'rnn' is not supported"),
    ],
)  # fmt: skip
def test_heads_are_read_strictly(
    base: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(sm.ArchitectureError, match=message) as caught:
        read(base, **changes)
    assert str(caught.value).startswith("config.json: ")


def test_the_search_for_k_ends_with_the_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "head.json"
    for values, most in ((DSPARK, 7), (DFLASH, 15)):
        file.write_text(json.dumps(values))
        asked = ["--gpu", "h100", "--model", "qwen3-8b", "--draft", str(file), "--batch", "1"]
        assert main(["predict", *asked]) == 0
        assert f"k auto (up to {most})" in capsys.readouterr().out


def test_a_bigram_has_no_experts_to_spread() -> None:
    target = sm.load_model("qwen3-30b-a3b")
    head = sm.BlockDiffusion(read(DSPARK, hidden_size=2048))
    h100, alpha = sm.load_device("h100"), sm.Geometric(0.7)
    r = sm.speculate(h100, target, head, alpha, B=8, k=3, L=0, tp=2, ep=True)
    assert float(r.T_d) > 0
