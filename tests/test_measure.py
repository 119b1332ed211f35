"""The `measure` command: real rounds of small checkpoints, and their summary."""

from __future__ import annotations

import csv
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples

import specmodel as sm
from specmodel.cli.main import main
from specmodel.errors import CheckpointError, DomainError

torch = pytest.importorskip("torch", reason="decoding needs torch")
pytest.importorskip("safetensors", reason="checkpoints need safetensors")

from calibrate import device_rounds  # noqa: E402
from calibrate.engine.checkpoints import save  # noqa: E402
from calibrate.engine.config import DecoderConfig, to_architecture  # noqa: E402
from calibrate.engine.decoder import Decoder  # noqa: E402
from calibrate.speculate import head_training, inputs, padding, pair  # noqa: E402
from calibrate.speculate.loop import Round  # noqa: E402
from calibrate.speculate.measuring import memory_errors  # noqa: E402
from calibrate.speculate.padding import padded  # noqa: E402
from calibrate.speculate.summary import (  # noqa: E402
    Drafted,
    acceptance_record,
    seconds_per_token,
    speedup,
    times_record,
    widths_record,
)


def config(**changes: Any) -> DecoderConfig:
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16}
    kind = {"model_type": "llama", "rope_theta": 10_000.0, "norm_eps": 1e-5}
    return DecoderConfig(
        **{**sizes, **kind, "intermediate": 96, "vocab": 50, "context": 256, **changes}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a target, a draft model and one of another vocabulary, and prompts."""
    where = tmp_path_factory.mktemp("pair")
    for name, shape in (
        ("target", config()),
        ("draft", config(layers=1)),
        ("other", config(vocab=40)),
        ("short", config(context=40)),
    ):
        save(where / name, Decoder(shape).randomise(1))
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 50, n).tolist() for n in (12, 30, 7, 21)]
    lines = [json.dumps({"tokens": tokens}) for tokens in prompts]
    (where / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return where


def arguments(folder: Path, profile: str, *more: str) -> list[str]:
    return [
        *("measure", "--device", "cpu", "--target", str(folder / "target")),
        *("--prompts", str(folder / "prompts.jsonl"), "--profile", profile),
        *("--dtype", "fp32", "--max-new-tokens", "12", *more),
    ]


@pytest.fixture
def profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """A device file; which one does not matter here."""
    assert main(["show", "h100", "--format", "yaml"]) == 0
    file = tmp_path / "device.yaml"
    file.write_text(capsys.readouterr().out)
    return str(file)


@pytest.mark.parametrize("draft", ["draft", "ngram", "exit:1", "layers:1", "sparse:1,4"])
def test_measured_beside_predicted(
    draft: str, folder: Path, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = str(folder / draft) if draft == "draft" else draft
    more = ("--draft", given, "--k", "1,3", "--batch", "1,2", "--requests", "4")
    assert main(arguments(folder, profile, *more, "--format", "json")) == 0
    record, device = json.loads(capsys.readouterr().out), sm.load_device(profile)
    assert record["profile"] == device.label
    assert [(point["batch"], point["k"]) for point in record["points"]] == [
        *((1, 1), (1, 3), (2, 1), (2, 3)),
    ]
    for point in record["points"]:
        found = point["acceptance"]
        a, k = found["per_position"], point["k"]
        assert len(a) == k
        assert point["G"] == pytest.approx(1 + found["hit_rate"] * sum(a), rel=1e-12)
        assert point["G_low"] <= point["G"] <= point["G_high"]
        assert sum(found["histogram"]) <= point["sequence_rounds"]
        assert point["greedy"] == {"equal": 4, "gaps": []}
        assert point["requests"] == 4
        spent = point["T_d"] + point["T_v"] + point["T_o"]
        plain = point["T_p"] + point["T_h"]
        assert point["S"] == pytest.approx(point["G"] * plain / spent, rel=1e-12)
        assert sum(point["pass_widths"].values()) == pytest.approx(1)
        predicted = point["predicted"]
        assert predicted["G"] == pytest.approx(point["G"])
        assert {"T_p", "T_v", "T_d", "T_o", "T_h", "S"} <= set(predicted)
        assert predicted["T_d"] > 0
        T = {name: predicted[name] for name in ("T_p", "T_h", "T_d", "T_v", "T_o")}
        spent = T["T_d"] + T["T_v"] + T["T_o"]
        assert predicted["S"] == pytest.approx(predicted["G"] * (T["T_p"] + T["T_h"]) / spent)
        width = sum(share * (1 + int(n)) for n, share in point["pass_widths"].items())
        shape = to_architecture(config(), name="x", dtype="float32")
        how = {"B": point["batch"], "L": point["context"]}
        assert T["T_p"] == pytest.approx(sm.pass_time(device, shape, W=1, **how).T)
        if draft != "ngram":
            assert width == 1 + k
            assert T["T_v"] == pytest.approx(sm.pass_time(device, shape, W=width, **how).T)


@pytest.mark.parametrize("draft", ["draft", "exit:1", "sparse:1,4", "eagle", "mtp", "medusa"])
def test_acceptance_can_be_imposed(
    draft: str, folder: Path, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a model without weights, and a draft model without."""
    given = str(folder / "draft" / "config.json") if draft == "draft" else draft
    model = ("--target", str(folder / "target" / "config.json"), "--draft", given)
    more = ("--profile", profile, "--device", "cpu", "--dtype", "fp32", "--k", "2")
    size = ("--context", "40", "--max-new-tokens", "40", "--requests", "8", "--batch", "2,8")
    run = ("measure", *model, *more, *size, "--accept", "1,0", "--format", "json")
    assert main([*run]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["imposed_acceptance"] == [1, 0]
    for point in record["points"]:
        assert point["acceptance"]["per_position"] == [1, 0]
        assert point["G"] == 2
        assert point["greedy"] is None
        assert point["context"] == 60
    assert main([part for part in run if part not in ("--accept", "1,0")]) == 2
    assert "has no weights: impose acceptance" in capsys.readouterr().err


def test_rounds_of_a_device_into_a_folder(
    profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    for name, value in {
        "TINY": str(folder / "target" / "config.json"),
        "TINY_DRAFTS": (str(folder / "draft" / "config.json"), "eagle", "nothing"),
        "BATCHES": (1, 2),
        "KS": (2,),
    }.items():
        monkeypatch.setattr(device_rounds, name, value)
    how = ["--device", "cpu", "--dtype", "float32", "--profile", profile, "--out", str(tmp_path)]
    assert device_rounds.main(how) == 0
    with (tmp_path / "rounds.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4  # a context of 256 leaves no room, a third draft is not there
    assert {(row["draft"][-5:], row["batch"]) for row in rows} == {
        *(("eagle", "1"), ("eagle", "2"), (".json", "1"), (".json", "2"))
    }
    for row in rows:
        assert float(row["T_v"]) > 0
        assert float(row["S_model"]) > 0
    record = json.loads((tmp_path / "rounds.json").read_text())
    assert record["points"][0]["predicted"]["S"] == float(rows[0]["S_model"])
    monkeypatch.setattr(device_rounds, "TINY_DRAFTS", ("nothing",))
    assert device_rounds.main(how) == 1


def test_experts_and_latent_attention_can_be_timed(
    profile: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "torch_dtype": "float32",
    }
    experts = {**samples.MOE, **small, "num_key_value_heads": 2, "head_dim": 16}
    experts |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    latent = {**samples.MLA, **small, "kv_lora_rank": 32, "q_lora_rank": 16, "n_routed_experts": 8}
    latent |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 96}
    latent |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    latent |= {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
    for i, (values, draft) in enumerate(((experts, "eagle"), (latent, "mtp"))):
        file = tmp_path / f"{i}.json"
        file.write_text(json.dumps(values))
        more = ("--profile", profile, "--device", "cpu", "--dtype", "fp32", "--k", "2")
        size = ("--context", "20", "--max-new-tokens", "12", "--requests", "2", "--batch", "2")
        run = ("measure", "--target", str(file), "--draft", draft, *more, *size)
        assert main([*run, "--accept", "0.5", "--format", "json"]) == 0
        point = json.loads(capsys.readouterr().out)["points"][0]
        assert point["predicted"]["T_d"] > 0


def test_trees_transforms_and_stops(
    folder: Path, profile: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    more = ("--draft", str(folder / "draft"), "--tree", "2,2,1", "--requests", "4")
    figure = tmp_path / "m.png"
    chance = ("--temperature", "0,0.7", "--top-k", "9", "--top-p", "0.9", "--min-p", "0.01")
    run = arguments(folder, profile, *more, *chance, "--repetition-penalty", "1.1")
    assert main([*run, "--plot", str(figure), "--format", "json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["transform"]["top_k"] == 9
    assert figure.stat().st_size > 10_000
    greedy, drawn = record["points"]
    assert greedy["tree"] == [-1, -1, 0, 0, 1, 1, 2, 3, 4, 5]
    assert greedy["k"] == 3
    assert greedy["greedy"]["equal"] == 4
    assert drawn["greedy"] is None
    for point in record["points"]:
        by_rank = point["acceptance"]["by_rank"]
        assert len(by_rank) == 2
        assert sum(by_rank) <= 1
        assert point["acceptance"]["alpha"] is None
        assert len(point["entropy"]) == len(point["surprisal"]) == 4
        assert point["peak_memory_bytes"] > 1e7
    assert main([*run, "--stop", "x"]) == 2
    assert "stop strings need one" in capsys.readouterr().err


def test_a_head_is_priced_and_padded_as_what_it_is() -> None:
    small = Decoder(config()).randomise(3)
    wide = padded(small, hidden=112, intermediate=200)
    tokens = torch.randint(0, 50, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        narrow, broad = (one(tokens, features=True)[1] for one in (small, wide))
        for kind in head_training.HEADS:
            head = head_training.build(kind, small, seed=2)
            if kind == "medusa":
                for weight in head.parameters():
                    weight.normal_(0, 0.1)
                one = head(narrow.flatten(0, 1), 3)
                two = padding.padded_head(head, small, wide)(broad.flatten(0, 1), 3)
            else:
                found = [
                    module.logits(
                        module(torch.nn.functional.embedding(tokens, target.embedding), features),
                        target,
                    )
                    for module, target, features in (
                        (head, small, narrow),
                        (padding.padded_head(head, small, wide), wide, broad),
                    )
                ]
                one, two = found
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)


def test_the_record_feeds_predict(
    folder: Path, profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--draft", str(folder / "draft"), "--k", "2,4", "--format", "json")
    assert main(arguments(folder, profile, *more)) == 0
    file = tmp_path / "found.json"
    file.write_text(capsys.readouterr().out)
    point = json.loads(file.read_text())["points"][1]
    model = ["predict", "--gpu", "h100", "--model", "llama-3.1-8b", "--k", "3"]
    assert main([*model, "--acceptance", str(file), "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["points"][0]["G"] == pytest.approx(
        1 + sum(point["acceptance"]["per_position"][:3])
    )
    other = json.loads(file.read_text())  # as of n-gram: the share of rounds is the drafter's
    other["points"][1]["acceptance"]["hit_rate"] = 0.5
    file.write_text(json.dumps(other))
    for more in ([], ["--drafter", "ngram"]):
        assert main([*model, *more, "--acceptance", str(file), "--format", "json"]) == 0
        half = json.loads(capsys.readouterr().out)["points"][0]["G"]
        assert half == pytest.approx(1 + sum(point["acceptance"]["per_position"][:3]) / 2)
    other["imposed_acceptance"] = [0.5]
    file.write_text(json.dumps(other))
    assert main([*model, "--acceptance", str(file)]) == 2
    assert "imposed, not measured" in capsys.readouterr().err
    other["imposed_acceptance"] = None
    other["points"] = [{**other["points"][0], "tree": [-1, -1]}]
    file.write_text(json.dumps(other))
    assert main([*model, "--acceptance", str(file)]) == 2
    assert "of trees" in capsys.readouterr().err
    file.write_text('{"points": []}')
    assert main([*model, "--acceptance", str(file)]) == 2
    error = capsys.readouterr().err
    assert "points: is empty (acceptance is read from what `specmodel measure" in error
    assert main([*model, "--acceptance", str(tmp_path / "none.json")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_a_table_for_people(folder: Path, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--draft", "ngram", "--temperature", "0,0.5", "--requests", "2")
    assert main(arguments(folder, profile, *more)) == 0
    text = capsys.readouterr().out
    assert text.count("measured") == 2
    assert text.count("predicted") == 3  # and by what
    assert "accepted by position" in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--draft", "exit:2"), "leave some of the 2 out"),
        (("--draft", "exit:9"), "within [0, 1]"),
        (("--draft", "exit:x"), "is not exit:N"),
        (("--draft", "sparse:4"), "is not exit:N"),
        (("--draft", "nothing"), "no such file"),
        (("--draft", "OTHER"), "vocabulary of 40 tokens is not the target's of 50"),
        (("--draft", "ngram", "--batch", "5"), "needs as many prompts; there are 4"),
        (("--draft", "ngram", "--k", "0"), "k must be from 1"),
        (("--draft", "ngram", "--temperature", "-1"), "temperature must be >= 0"),
        (("--draft", "ngram", "--temperature", "x"), "temperature must be a number"),
        (("--draft", "ngram", "--dtype", "int4"), "dtype must be one of"),
        (("--draft", "ngram", "--max-new-tokens", "250"), "more than the model's 256"),
        (("--draft", "ngram", "--prompts", "nowhere"), "nowhere: no such file"),
        (("--draft", "ngram", "--prompts", "TEXT"), "has no tokenizer"),
        (("--draft", "ngram", "--prompts", "BAD"), "line 2 is no object"),
        (("--draft", "ngram", "--prompts", "FLOATS"), "line 1: a prompt is text"),
        (("--draft", "ngram", "--prompts", "EMPTY"), "prompt 0 is empty"),
        (("--draft", "ngram", "--prompts", "HIGH"), "outside [0, 49]"),
        (("--draft", "ngram", "--profile", "nowhere.yaml"), "no such file"),
        (("--draft", "ngram", "--device", "cuda:7"), "cuda:7"),
        (("--draft", "ngram", "--max-new-tokens", "1"), "max_new_tokens must be >= 2"),
        (("--draft", "ngram", "--seed", "9" * 20), "seed must be"),
        (("--draft", "ngram", "--k", "5000"), "k must be"),
        (("--draft", "ngram", "--tree", "2"), "chains, no trees"),
        (("--draft", "exit:1", "--tree", "0"), "children of a node of the tree must be in"),
        (("--draft", "exit:1", "--tree", "9,9,9,9,9"), "a tree has at most 1,000 drafts"),
        (("--draft", "exit:1", "--tree", "2,,1"), "tree must be a whole number"),
        (("--draft", "exit:1", "--tree", "2", "--k", "3"), "--k is given as well"),
        (("--draft", "exit:1", "--tree", "4294967296,4294967296"), "children of a node"),
        (("--draft", "ngram", "--requests", "-5"), "requests must be >= 1"),
        (("--draft", "ngram", "--plot", "nowhere/x.png"), "nowhere: no such folder"),
        (("--draft", "ngram", "--plot", "x.xyz"), "output must end in .png, .pdf, .svg"),
        (("--draft", "ngram", "--stop", ""), "stop strings need one"),
        (("--draft", "ngram", "--accept", "0.5"), "cannot be imposed on ngram"),
        (("--draft", "exit:1", "--accept", "2"), "rates must be"),
        (("--draft", "eagle"), "a head cannot be trained for it"),
        (("--draft", "ngram", "--top-p", "0"), "top_p must be > 0"),
        (("--draft", "SHORT"), "draft: prompt 1: 30 tokens and 12 new ones are more than"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    more: tuple[str, ...],
    message: str,
    folder: Path,
    profile: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = {
        "TEXT": ("p.txt", "a prompt\n"),
        "BAD": ("b.jsonl", '{"tokens": [1]}\n[2]\n'),
        "FLOATS": ("f.jsonl", '{"tokens": [1.5]}\n'),
        "EMPTY": ("e.jsonl", '{"tokens": []}\n'),
        "HIGH": ("h.jsonl", '{"tokens": [50]}\n'),
    }
    for name, content in files.values():
        (tmp_path / name).write_text(content)
    names = {key: str(tmp_path / name) for key, (name, _) in files.items()}
    names |= {"OTHER": str(folder / "other"), "SHORT": str(folder / "short")}
    assert main(arguments(folder, profile, *(names.get(part, part) for part in more))) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def turn(active: list[bool], drafted: list[int], accepted: list[int], **times: float) -> Round:
    return Round(
        active=np.array(active),
        drafted=np.array(drafted),
        accepted=np.array(accepted),
        committed=np.array(accepted) + 1,
        overlap=np.full((len(active), 2), 0.5),
        candidates=np.array(
            [[d > 0, d > 1 and a > 0] for d, a in zip(drafted, accepted, strict=True)], int
        ),
        ranks=np.array([[-(a < 1), -(a < 2)] for a in accepted]),
        surprisal=np.full((len(active), 3), 1.0),
        entropy=np.full((len(active), 3), 2.0),
        **{"T_d": 1.0, "T_v": 2.0, "T_o": 0.5, **times},
    )


def test_rates_are_of_rounds_that_drafted() -> None:
    rounds = [turn([True, True], [2, 0], [1, 0]), turn([True, False], [2, 2], [2, 2])]
    batches = [(rounds, [9, 9]), ([turn([True, True], [1, 2], [1, 0])], [9, 9])]
    found = acceptance_record(Drafted.of(batches))
    # rows: (2, 1), (0, 0), (2, 2), (1, 1), (2, 0); the one that had ended does not count
    assert found["sequence_rounds"] == 5
    assert found["requests"] == 4
    acceptance = found["acceptance"]
    assert acceptance["hit_rate"] == 0.8
    assert acceptance["per_position"] == [0.75, 0.25]
    assert acceptance["conditional"] == [0.75, pytest.approx(1 / 3)]
    assert acceptance["histogram"] == [1, 2, 1]
    assert acceptance["by_rank"] == [pytest.approx(4 / 6)]
    assert found["G"] == pytest.approx(1 + 4 / 5)
    assert acceptance["alpha"] == 0.5
    assert acceptance["alpha_empirical"] == pytest.approx(4 / 6)  # tried: 2, 0, 2, 1, 1


def test_what_follows_an_end_token_does_not_count() -> None:
    rounds = [turn([True, True], [2, 2], [2, 0]) for _ in range(3)]  # to 4, 7, 10 and 2, 3, 4
    found = Drafted.of([(rounds, [4, 2]), (rounds, [5, 9])])
    assert found.request.tolist() == [0, 1, 2, 3, 2, 3, 3]
    assert found.accepted.tolist() == [2, 0, 2, 0, 2, 0, 0]
    assert found.committed.tolist() == [3, 1, 3, 1, 1, 1, 1]
    assert np.isnan(found.entropy).sum(1).tolist() == [0, 2, 0, 0, 2, 0, 0]


def test_times_of_passes_of_two_widths() -> None:
    """The mean of each width's median: three rounds of 1.0 and one of 5.0."""
    narrow = [turn([True], [0], [0], T_v=v) for v in (1.0, 0.9, 1.1)]
    rounds = [*narrow, turn([True], [2], [1], T_v=5.0)]
    assert times_record(narrow, rounds)["T_v"] == pytest.approx((3 * 1.0 + 5.0) / 4)
    assert widths_record(rounds) == {0: 0.75, 2: 0.25}


def test_no_round_at_all_is_refused() -> None:
    with pytest.raises(DomainError, match="ended with its first token"):
        acceptance_record(Drafted.of([([turn([True], [2], [1])], [1])]))


def test_a_draft_model_needs_its_target(
    folder: Path, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said before the own pair is trained."""
    given = ("--draft", str(folder / "draft"), "--profile", profile, "--device", "cpu")
    assert main(["measure", *given]) == 2
    assert "give --target" in capsys.readouterr().err


def test_running_out_of_memory_is_one_line() -> None:
    with pytest.raises(DomainError, match="out of memory: CUDA out of memory"), memory_errors():
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
    with pytest.raises(RuntimeError, match="shape"), memory_errors():
        raise RuntimeError("a shape is wrong")


def test_one_request_has_no_interval() -> None:
    found = acceptance_record(Drafted.of([([turn([True], [2], [1])] * 3, [99])]))
    assert found["G_low"] is found["G_high"] is None
    assert found["acceptance"]["per_position_low"] == [None, None]


def test_one_alpha_is_not_the_positions() -> None:
    """Of two requests, one of which always accepts and the other never."""
    rounds = [turn([True, True], [2, 2], [2, 0]) for _ in range(6)]
    found = acceptance_record(Drafted.of([(rounds, [99, 99])]))
    alpha = 2 / 3  # tried: 2 and 1 a round; accepted 2 of 3
    assert found["G"] == 2
    assert found["G_iid"] == pytest.approx(1 + alpha + alpha**2)
    assert found["G_iid_by_request"] == pytest.approx(2)
    assert found["entropy"] == [2, 2, 2]
    assert found["surprisal"] == [1, 1, 1]


def test_no_draft_at_all_is_no_rate() -> None:
    found = acceptance_record(Drafted.of([([turn([True], [0], [0])], [9])]))
    assert found["acceptance"]["hit_rate"] == 0
    assert found["acceptance"]["per_position"] == [0, 0]
    assert found["acceptance"]["per_position_low"] == [None, None]
    assert found["acceptance"]["alpha"] is None
    assert found["G"] == 1


def test_times_are_of_rounds_with_everyone() -> None:
    rounds = [turn([True, True], [2, 2], [0, 0], T_v=v) for v in (1.0, 3.0, 9.0)]
    rounds.append(turn([True, False], [2, 2], [0, 0], T_v=100.0))
    times = times_record(rounds[:1], rounds)
    assert times == {"T_p": 1.0, "T_h": 0.5, "T_d": 1.0, "T_v": 3.0, "T_o": 0.5}
    assert seconds_per_token(rounds) == pytest.approx((3 * 1.5 + 13) / 6)
    assert speedup(times, 3.0) == pytest.approx(3.0 * 1.5 / 4.5)


def test_a_padded_decoder_is_the_same_function() -> None:
    small = Decoder(config()).randomise(3)
    wide = padded(small, hidden=112, intermediate=200)
    tokens = torch.randint(0, 50, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(wide(tokens), small(tokens), rtol=1e-4, atol=1e-4)
    assert wide.config.parameters > 2 * small.config.parameters


def test_the_pair_that_ships_is_what_its_record_says() -> None:
    target, draft, record = pair.load_pair()
    assert (target.config, draft.config) == (pair.TARGET, pair.DRAFT)
    sizes = [file.stat().st_size for file in pair.SHIPPED.iterdir()]
    assert sum(sizes) < 5e6
    text = pair.held_out(pair.corpus())
    same = hashlib.sha256(pair.corpus()).hexdigest() == record["text_sha256"]
    for name, decoder, most in (("target", target, 3.0), ("draft", draft, 3.5)):
        bits = pair.bits_per_byte(decoder, text, windows=64)
        stated = record[name]["bits_per_byte"]
        assert bits == pytest.approx(stated, rel=1e-3) if same else bits < most


def test_training_learns_and_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"".join(b"def f%d(x): return x + %d\n" % (i, i) for i in range(2000))
    monkeypatch.setattr(pair, "corpus", lambda: text)
    monkeypatch.setattr(pair, "_STEPS", {"target": 120, "draft": 20})
    monkeypatch.setattr(pair, "_BATCH", 4)
    monkeypatch.setattr(pair, "_LENGTH", 48)
    monkeypatch.setattr(pair, "TARGET", config(vocab=256, layers=1))
    monkeypatch.setattr(pair, "DRAFT", config(vocab=256, layers=1, hidden=32))
    torch.set_num_threads(1)
    said: list[str] = []
    record = pair.train_pair(tmp_path, say=said.append)
    assert record["target"]["bits_per_byte"] < 6  # 8 for one that knows nothing
    assert record["draft"]["steps"] == 20
    assert said
    target, draft, kept = pair.load_pair(tmp_path)
    assert kept == json.loads(json.dumps(record))
    held = pair.held_out(text)
    assert pair.bits_per_byte(target, held) == pytest.approx(record["target"]["bits_per_byte"])
    assert draft.config.hidden == 32
    other = pair.train_pair(tmp_path / "other", seed=1)
    assert other["target"]["bits_per_byte"] != record["target"]["bits_per_byte"]
    (tmp_path / "target.safetensors").write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match=r"is not the file that record.json was written for"):
        pair.load_pair(tmp_path)
    with pytest.raises(CheckpointError, match="no such file"):
        pair.load_pair(tmp_path / "none")


@pytest.mark.slow
def test_the_own_pair_speculates(
    tmp_path: Path,
    profile: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = Decoder(replace(pair.TARGET, layers=1, hidden=64)).randomise(1)
    monkeypatch.setattr(inputs, "load_pair", lambda: (small, small, {"steps": 0}))
    own = ("measure", "--device", "cpu", "--profile", profile, "--dtype", "fp32")
    more = ("--requests", "2", "--max-new-tokens", "6", "--k", "2", "--format", "json")
    assert main([*own, *more]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["draft"] == "own draft"
    assert record["training"] == {"steps": 0}
    assert record["points"][0]["acceptance"]["per_position"] == [1, 1]
    monkeypatch.setattr(head_training, "_STEPS", 2)
    monkeypatch.setattr(head_training, "_NEW", 8)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for kind in head_training.HEADS:
        assert main([*own, *more, "--draft", kind, "--stop", "e"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["training"]["head"]["kind"] == kind
        assert main([*own, *more[:-2], "--draft", kind]) == 0
        said = capsys.readouterr()
        assert "prompt lookup on text it was not trained on" in said.out
        assert "training" not in said.err  # kept
    file = tmp_path / "p.txt"
    file.write_text("import os\nimport sys\n")
    assert main([*own, *more, "--prompts", str(file), "--draft", "ngram"]) == 0
    assert json.loads(capsys.readouterr().out)["draft"] == "ngram"
    assert main([*own, *more, "--target", str(tmp_path)]) == 2
    assert "needs a draft" in capsys.readouterr().err
