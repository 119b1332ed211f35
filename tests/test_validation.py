"""Validation: tables read, rows made into setups, predictions held out, errors and decisions."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specmodel as sm
from specmodel.drafters import DynamicTree, NGram
from specmodel.overheads import HOST, Engine, engine_names, fitted_to, load_engine
from specmodel.validation import (
    Judged,
    Row,
    golden_rows,
    plain_rate,
    prepared,
    read_cases,
    read_results,
    validate,
)
from specmodel.validation.scores import counted, decisions, errors, report
from specmodel.validation.setups import Unpredictable, setup
from specmodel.validation.shares import time_shares

HEADER = "id,hardware,engine,target_model,drafter_kind,batch,speedup,url"
GOOD = "a,H100,vLLM v0.10.1,Llama-3.1-8B,eagle3,1,1.9,u"
FAMILIES = set(
    "eagle eagle2 eagle3 draft_model tree ngram medusa lookahead mtp self_spec block_diffusion "
    "parallel_eagle".split()
)


# -- tables --------------------------------------------------------------------------------------


def table(folder: Path, *lines: str, header: str = HEADER) -> Path:
    file = folder / "rows.csv"
    file.write_text("\n".join((header, *lines)) + "\n", encoding="utf-8")
    return file


def test_rows_as_the_table_has_them(tmp_path: Path) -> None:
    file = table(tmp_path, f"{GOOD},  x ,3,nan", header=f"{HEADER},dataset,k,temperature")
    (row,) = read_results(file)
    assert (row.id, row.hardware, row.batch, row.speedup, row.k) == ("a", "H100", 1, 1.9, 3)
    assert (row.dataset, row.temperature, row.tree, row.tp) == ("x", None, "", None)


def test_a_byte_order_mark_and_quotes_and_further_columns(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    text = f'{HEADER},mine\nb,H100,"vLLM, main",Llama-3.1-8B,eagle3,1,1.9,"u\nv",x\n'
    file.write_text(text, encoding="utf-8-sig")
    (row,) = read_results(file)
    assert (row.id, row.engine, row.url) == ("b", "vLLM, main", "u\nv")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no rows"),
        ([GOOD, GOOD], ":3: id 'a' occurs twice"),
        ([GOOD, GOOD.replace("a,", ",", 1)], ":3: a row needs an id"),
        ([GOOD.replace(",1,1.9", ",one,1.9")], ":2: batch must be a number; got 'one'"),
        ([GOOD.replace(",1,1.9", ",0,1.9")], ":2: batch must be 1 to 1e+06; got '0'"),
        ([GOOD.replace("1.9", "-1.9")], ":2: speedup must be 1e-06 to 10000; got '-1.9'"),
        ([GOOD.replace("1.9", "inf")], ":2: speedup must be 1e-06 to 10000; got 'inf'"),
        ([GOOD.replace("1.9", "1,9")], ":2: more cells than columns"),
    ],
)
def test_bad_tables_name_file_and_line(tmp_path: Path, lines: list[str], message: str) -> None:
    file = table(tmp_path, *lines)
    with pytest.raises(sm.DomainError) as caught:
        read_results(file)
    assert str(caught.value).startswith(str(file))
    assert message in str(caught.value)


def test_bad_numbers_of_optional_columns_name_the_line(tmp_path: Path) -> None:
    for name, value, message in (
        ("k", "-1", "k must be 0 to 1000; got '-1'"),
        ("k", "2.5", "k must be a whole number; got '2.5'"),
        ("tp", "1.5", "tp must be a whole number; got '1.5'"),
        ("tokens_per_step_G", "0.9", "tokens_per_step_G must be 1 to 10000; got '0.9'"),
        ("year", "24", "year must be 1990 to 2100; got '24'"),
        ("temperature", "greedy", "temperature must be a number; got 'greedy'"),
    ):
        file = table(tmp_path, f"{GOOD},{value}", header=f"{HEADER},{name}")
        with pytest.raises(sm.DomainError, match=f":2: {message.replace('(', '.')}"):
            read_results(file)


@pytest.mark.parametrize("name", HEADER.split(","))
def test_missing_columns_are_named(tmp_path: Path, name: str) -> None:
    kept = [i for i, column in enumerate(HEADER.split(",")) if column != name]
    header, line = (",".join(text.split(",")[i] for i in kept) for text in (HEADER, GOOD))
    with pytest.raises(sm.DomainError, match=rf"no column {name} \(it has"):
        read_results(table(tmp_path, line, header=header))


def test_files_that_are_no_table(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\xd8")
    for name, message in (
        ("empty.csv", "no column id, hardware"),
        ("binary.csv", "not a text file in UTF-16"),
        ("absent.csv", "no such file"),
        (".", "is a folder"),
    ):
        with pytest.raises(sm.DomainError, match=message):
            read_results(tmp_path / name)


# -- the table that ships ------------------------------------------------------------------------


def test_the_table_that_ships() -> None:
    rows = golden_rows()
    with as_file(files("specmodel") / "data" / "results.csv") as file:
        assert read_results(file) == rows
    assert len(rows) >= 250
    assert len({row.url for row in rows}) >= 12
    assert {row.drafter_kind for row in rows} >= FAMILIES
    for row in rows:
        assert row.source, row.id
        assert row.url, row.id
    measured = [row for row in rows if row.speedup is not None]
    assert len(measured) >= 250
    assert len({row.url for row in measured}) >= 12
    assert {row.drafter_kind for row in measured} >= FAMILIES


def test_speedups_of_the_table_are_of_its_own_rates() -> None:
    for row in golden_rows():
        if row.speedup and row.baseline_throughput and row.sd_throughput:
            own = row.sd_throughput / row.baseline_throughput
            assert own == pytest.approx(row.speedup, rel=0.1), row.id


def test_no_row_of_the_table_occurs_in_the_code() -> None:
    package = Path(sm.__file__).parent
    code = "\n".join(file.read_text(encoding="utf-8") for file in package.rglob("*.py"))
    assert "def golden_rows" in code
    for row in golden_rows():
        for text in (row.id, row.url, row.source):
            assert text not in code


def test_most_rows_can_be_set_up() -> None:
    """All but those whose model, device or drafter nobody has described."""
    why: dict[str, int] = {}
    for row in golden_rows():
        try:
            setup(row)
        except Unpredictable as error:
            why[str(error)] = why.get(str(error), 0) + 1
    assert sum(why.values()) < 0.15 * len(golden_rows())


# -- setups --------------------------------------------------------------------------------------

ROW = Row(
    id="r",
    hardware="H100",
    engine="vLLM v0.10.1",
    target_model="Llama-3.1-8B",
    drafter_kind="eagle3",
    k=3.0,
    batch=8.0,
    tokens_per_step_G=2.5,
    speedup=1.8,
    speedup_baseline="no_spec_same_engine",
    context_len="1024",
    url="u",
    source="s",
    n_gpus=1.0,
)


def test_a_row_in_the_models_terms() -> None:
    made = setup(ROW)
    assert (made.device.name, made.target.name) == ("h100-sxm", "llama-3.1-8b")
    assert (made.drafter, made.k, made.engine) == (sm.Eagle3(), 3, "vllm-2025")
    assert made.execution == sm.Execution()
    assert made.requests.prompt.tolist() == [1024]
    assert made.requests.output.tolist() == [np.inf]
    assert made.assumed == ()
    served = made.at(8)
    assert (float(served.parts.B), served.k) == (8, 3)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hardware": ""}, "no hardware named"),
        ({"target_model": ""}, "no target named"),
        ({"hardware": "Mac mini"}, "hardware: unknown GPU 'Mac mini'"),
        ({"target_model": "Llama-9-1B"}, "target: unknown model 'Llama-9-1B'"),
        ({"drafter_kind": ""}, "drafter (none named) is not modelled"),
        ({"drafter_kind": "eagle4"}, "drafter eagle4 is not modelled"),
        ({"drafter_kind": "draft_model"}, "no draft model named"),
        ({"drafter_kind": "tree"}, "no draft model named"),
        ({"drafter_kind": "draft_model", "draft_model": "SpS"}, "draft model: unknown model 'SpS'"),
        (
            {"drafter_kind": "draft_model", "draft_model": "Qwen3-0.6B"},
            "draft model: qwen3-0.6b has a vocabulary of 151936",
        ),
        ({"drafter_kind": "mtp"}, "drafter: llama-3.1-8b carries no MTP block"),
        ({"target_model": "Kimi-K2.5"}, "drafter: an eagle3 head cannot be derived from kimi-k2.5"),
        ({"tree": "by wind", "drafter_kind": "ngram"}, "tree not understood: 'by wind'"),
        ({"tree": "8 nodes", "k": None}, "tree of unknown depth: '8 nodes'"),
        ({"drafter_kind": "self_spec", "k": None}, "no number of drafts"),
        ({"k": 0.0}, "no drafts"),
        ({"n_gpus": 16.0}, "16 devices over several nodes: their network is not stated"),
        ({"tp": 12.0}, "12 devices over several nodes: their network is not stated"),
    ],
)  # fmt: skip
def test_why_a_row_cannot_be_predicted(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(Unpredictable) as caught:
        setup(replace(ROW, **changes))
    assert str(caught.value).startswith(why)
    one = prepared(replace(ROW, **changes))
    assert (one.setup, one.why) == (None, str(caught.value))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"speedup": None}, "no speedup measured"),
        ({"speedup_baseline": ""}, "not against plain decoding"),
        ({"speedup_baseline": "other_method"}, "not against plain decoding"),
        ({"quality": "secondary, lossy"}, "lossy acceptance"),
        ({"quality": "suspect"}, "its table marks it suspect"),
        ({"batch": None}, "no batch"),
        ({"context_len": "4096", "output_len": "64"}, "prefill dominates"),
        ({"context_len": "-5"}, "prompt must be >= 0 token; got -5"),
        ({"context_len": "-5", "dataset": "gsm8k"}, "prompt must be >= 0 token; got -5"),
        ({"output_len": "0", "dataset": "gsm8k"}, "output must be >= 1 token; got 0"),
        ({"tree": "depth 3, 1 draft tokens (incl. root)"}, "nodes must be >= 1 token; got 0"),
    ],
)
def test_why_a_row_does_not_count(changes: dict[str, Any], why: str) -> None:
    one = prepared(replace(ROW, **changes))
    assert (one.setup, one.why) == (None, why)


def test_a_layout_that_does_not_divide_the_model_is_said() -> None:
    (one,) = validate([replace(ROW, tp=3.0)]).judged
    assert (one.setup, one.best) == (None, None)
    assert "32 attention heads; got 3" in one.why


# Every text of the table that ships: depth, nodes drafted on, nodes verified beside the root.
TREES = {
    "depth 3, branching 2, 6 draft tokens verified": (3, 2, 6),
    "depth 3, branching 4, 21 draft tokens verified": (3, 4, 21),
    "depth 7, topk 10, tree size 16": (7, 10, 16),
    "topk 4, 4 draft tokens (incl. root), 2 steps": (2, 4, 3),
    "topk 3, 4 draft tokens (incl. root), 3 steps": (3, 3, 3),
    "topk 3, 8 draft tokens (incl. root), 3 steps": (3, 3, 7),
    "topk 8, 64 draft tokens (incl. root), 8 steps": (8, 8, 63),
    "topk 8, 60 draft tokens (incl. root), 8 steps": (8, 8, 59),
    "topk 4, 12 draft tokens (incl. root), 6 steps": (6, 4, 11),
    "topk 4, 16 draft tokens (incl. root), 7 steps": (7, 4, 15),
    "2 sequences x depth 16 (32 tokens verified)": (16, 2, 32),
    "2 sequences x depth 4 (8 tokens verified)": (4, 2, 8),
    "2 sequences x depth 8 (16 tokens verified)": (8, 2, 16),
    "Sequoia tree size 128, depth 10": (10, 13, 128),
    "Sequoia tree size 128, depth 7": (7, 19, 128),
    "Sequoia tree size 64, depth 10": (10, 7, 64),
    "Sequoia tree size 64, depth 5": (5, 13, 64),
    "Sequoia tree size 64, depth 6": (6, 11, 64),
    "Sequoia tree size 64, depth 7": (7, 10, 64),
    "Sequoia tree size 64, depth 8": (8, 8, 64),
    "Sequoia tree size 64, depth 9": (9, 8, 64),
    "Sequoia tree size 768, depth 18": (18, 43, 768),
    "SpecInfer 16x48 independent sequences": (48, 16, 768),
    "SpecInfer 5x8 independent sequences": (8, 5, 40),
}
CHAINS = {  # drafts
    "1 sequences x depth 16 (16 tokens verified)": 16,
    "1 sequences x depth 32 (32 tokens verified)": 32,
    "1 sequences x depth 8 (8 tokens verified)": 8,
    "single block of 16 (15 drafts + anchor)": None,  # as the row's k says
    "3-token MTP window, topk=1": 2,
    "4-token MTP window, topk=1": 3,
}
USUAL = ("static EAGLE tree", "tree draft (method default)")


def test_every_text_of_a_tree_is_known_here() -> None:
    texts = {row.tree for row in golden_rows()} - {""}
    assert texts - set(TREES) - set(CHAINS) - set(USUAL) <= {
        "cost-model-sized tree",
    }


@pytest.mark.parametrize(("text", "shape"), TREES.items())
def test_trees_by_their_text(text: str, shape: tuple[int, int, int]) -> None:
    made = setup(replace(ROW, tree=text))
    drafter = made.drafter
    assert isinstance(drafter, DynamicTree)
    assert (made.k, drafter.topk, drafter.nodes) == shape
    assert drafter.drafter == sm.Eagle3()
    assert float(made.at(1).parts.verify[0][0].W) == shape[2] + 1  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "k"), CHAINS.items())
def test_chains_by_their_text(text: str, k: int | None) -> None:
    made = setup(replace(ROW, tree=text, k=float(k or 5)))
    assert (made.drafter, made.k) == (sm.Eagle3(), k or 5)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("eagle", (5, 8, 25)),
        ("eagle2", (6, 10, 60)),
        ("eagle3", (8, 10, 60)),
        ("medusa", (4, 10, 63)),
    ],
)
@pytest.mark.parametrize("text", ["", *USUAL])
def test_trees_that_a_method_usually_has(kind: str, text: str, shape: tuple[int, ...]) -> None:
    engine = "HF Transformers"
    made = setup(replace(ROW, drafter_kind=kind, tree=text, k=None, engine=engine))
    drafter = made.drafter
    assert isinstance(drafter, DynamicTree)
    assert (made.k, drafter.topk, drafter.nodes) == shape
    assert f"the tree {shape[2]} nodes, depth {shape[0]}" in made.assumed


@pytest.mark.parametrize(
    ("kind", "target", "drafts", "k"),
    [
        ("draft_model", "Llama-3.1-8B", "Llama-3.2-1B", 5),
        ("ngram", "Llama-3.1-8B", "", 10),
        ("lookahead", "Llama-3.1-8B", "", 5),
        ("mtp", "DeepSeek-V3", "", 1),
    ],
)
def test_drafts_that_a_method_usually_has(kind: str, target: str, drafts: str, k: int) -> None:
    changes = {"drafter_kind": kind, "target_model": target, "draft_model": drafts}
    made = setup(replace(ROW, **changes, k=None, hardware="H200", n_gpus=8.0))  # type: ignore[arg-type]
    assert made.k == k
    assert f"k = {k}" in made.assumed


@pytest.mark.parametrize(
    ("kind", "changes", "name"),
    [
        ("eagle", {}, "eagle"),
        ("draft_model", {"draft_model": "Llama-3.2-1B (bf16)"}, "draft-model"),
        ("ngram", {}, "ngram"),
        ("suffix", {}, "ngram"),
        ("lookahead", {}, "lookahead"),
        ("block_diffusion", {}, "block-diffusion"),
        ("parallel_eagle", {}, "parallel"),
        ("self_spec", {}, "sparse-kv"),
        ("EAGLE3", {}, "eagle3"),
    ],
)
def test_drafters_by_kind(kind: str, changes: dict[str, Any], name: str) -> None:
    made = setup(replace(ROW, drafter_kind=kind, **changes))
    assert (made.drafter.kind, made.k) == (name, 3)


def test_what_a_draft_model_is_said_to_be() -> None:
    base = {"drafter_kind": "draft_model", "n_gpus": 4.0}
    alone = setup(replace(ROW, **base, draft_model="Llama-3.2-1B (single GPU)"))  # type: ignore[arg-type]
    assert alone.drafter.tp == 1
    assert setup(replace(ROW, **base, draft_model="Llama-3.2-1B")).drafter.tp is None  # type: ignore[arg-type]
    sparse = setup(replace(ROW, drafter_kind="self_spec", draft_model="StreamingLLM, budget 1024"))
    assert sparse.drafter == sm.drafters.SparseKV(budget=1024)


FORMATS = [
    ("", "H100", "Llama-3.1-8B", ("bfloat16", "bfloat16", "bfloat16")),
    ("fp8", "H100", "Llama-3.1-8B", ("fp8", "bfloat16", "bfloat16")),
    ("fp8 (build instructions)", "H100", "Llama-3.1-8B", ("fp8", "bfloat16", "bfloat16")),
    ("fp8, fp8 KV", "H100", "Llama-3.1-8B", ("fp8", "fp8", "bfloat16")),
    ("checkpoint default, fp8 KV", "H100", "Llama-3.1-8B", ("bfloat16", "fp8", "bfloat16")),
    ("int4", "H100", "Llama-3.1-8B", ("int4", "bfloat16", "bfloat16")),
    ("Q4_K_M", "H100", "Llama-3.1-8B", ("int4", "bfloat16", "bfloat16")),
    ("Q8_0", "H100", "Llama-3.1-8B", ("int8", "bfloat16", "bfloat16")),
    ("4-bit", "H100", "Llama-3.1-8B", ("int4", "bfloat16", "bfloat16")),
    ("", "H100", "Qwen3-32B-FP8", ("fp8", "bfloat16", "bfloat16")),
    ("fp8 (checkpoint)", "H200", "DeepSeek-V3", ("fp8", "bfloat16", "bfloat16")),
    ("", "V100-32GB", "Llama-3.1-8B", ("float16", "float16", "float16")),
    ("int4", "V100-32GB", "Llama-3.1-8B", ("int4", "float16", "float16")),
]


@pytest.mark.parametrize(("text", "gpu", "name", "formats"), FORMATS)
def test_formats(text: str, gpu: str, name: str, formats: tuple[str, str, str]) -> None:
    row = replace(ROW, target_dtype=text, hardware=gpu, n_gpus=8.0, drafter_kind="ngram")
    target = setup(replace(row, target_model=name)).target
    assert (target.weight_dtype, target.kv_dtype, target.dtype) == formats


def test_formats_of_experts_alone() -> None:
    row = replace(ROW, n_gpus=8.0, hardware="B200", drafter_kind="mtp", k=1.0)
    target = setup(replace(row, target_model="DeepSeek-R1", target_dtype="nvfp4 experts")).target
    assert target.expert_quantisation is not None
    assert target.expert_quantisation.dtype == "nvfp4"
    assert target.expert_quantisation.roles == {"experts"}
    assert target.quantisation is not None
    assert target.quantisation.dtype == "fp8"
    own = setup(
        replace(row, target_model="gpt-oss-20b", target_dtype="mxfp4, fp8 KV", drafter_kind="ngram")
    ).target
    assert (own.weight_dtype, own.kv_dtype) == ("mxfp4", "fp8")


def test_devices_that_a_row_does_not_name() -> None:
    """As few as hold the target: a power of two."""
    few = replace(ROW, n_gpus=None, target_model="Llama-3.1-70B", drafter_kind="ngram")
    made = setup(few)
    assert (made.execution.tp, made.assumed) == (2, ("2 devices",))
    assert setup(replace(few, target_model="Llama-3.1-8B")).assumed == ("1 device",)
    assert setup(replace(few, tp=4.0)).execution.tp == 4
    off = setup(replace(few, hardware="RTX 4090 + CPU offload"))
    assert (off.device.name, off.execution.tp, off.execution.offload) == ("rtx-4090", 1, 1.0)


def test_requests_of_a_row() -> None:
    plain = replace(ROW, context_len="", output_len="")
    known = setup(replace(plain, dataset="CNN/DM (200 prompts)"))
    assert (known.requests.name, known.assumed) == ("cnn", ())
    unknown = setup(replace(plain, dataset="poems"))
    assert (unknown.requests.name, unknown.assumed) == ("poems", ("requests as in mixed chat",))
    long = setup(replace(ROW, dataset="gsm8k", context_len="3000", output_len="500")).requests
    assert float(long.weight @ long.prompt) == pytest.approx(3000)
    assert float(long.weight @ long.output) == pytest.approx(500)
    alike = setup(replace(ROW, output_len="128")).requests
    assert (alike.prompt.tolist(), alike.output.tolist()) == ([1024], [128])
    assert setup(replace(ROW, context_len="1k to 8k")).assumed == ("requests as in mixed chat",)


def test_rereads_are_the_engines() -> None:
    assert setup(replace(ROW, engine="vLLM v0.6.3")).execution.kv_reread == 1
    assert setup(ROW).execution.kv_reread == 0


def test_routing_overlaps_in_mixtures_of_experts_only() -> None:
    moe = setup(replace(ROW, target_model="Qwen3-30B-A3B", drafter_kind="ngram"))
    assert moe.execution.expert_overlap > 0
    assert setup(ROW).execution.expert_overlap == 0


# -- judging -------------------------------------------------------------------------------------

PLANTED = replace(load_engine("vllm-2025"), step=2.1e-3, round=6e-4, head_pass=1.3e-3)


def measured(engine: Engine, row: Row, *, rate: bool = False) -> Row:
    """Return a row with the speedup, and the plain rate, that the model gives under an engine."""
    assert row.batch is not None
    served = setup(row).at(row.batch)
    law = served.accepted() if row.tokens_per_step_G is None else None
    law = law or served.accepted_to(float(row.tokens_per_step_G or 0.0))
    row = replace(row, speedup=served.speedup(engine, law))
    if not rate:
        return row
    return replace(row, baseline_throughput=served.throughput(engine), throughput_unit="tok/s")


@cache
def study(engine: Engine, *, rate: bool = True, told: bool = True, **changes: Any) -> list[Row]:
    """Return a synthetic study: two numbers of drafts over four batches."""
    rows = [
        replace(
            ROW,
            id=f"{k}-{B}",
            k=float(k),
            batch=float(B),
            tokens_per_step_G=min(2.5, k + 0.8) if told else None,
            **changes,
        )
        for k in (3, 1)
        for B in (1, 4, 16, 64)
    ]
    return [measured(engine, row, rate=rate) for row in rows]


def off(one: Judged, what: str = "given") -> float:
    assert one.row.speedup is not None
    return abs(getattr(one, what) / one.row.speedup - 1)


def test_rows_of_the_engine_itself_have_no_error() -> None:
    rows = [row for row in study(load_engine("vllm-2025")) if row.batch != 1]
    result = validate([replace(row, baseline_throughput=None) for row in rows])
    assert [off(one) for one in result.judged] == pytest.approx([0.0] * len(rows), abs=1e-6)
    found = report(result)["summary"]["given_acceptance"]
    assert (found["n"], found["moe"]["n"], found["research"]["n"]) == (6, 0, 0)
    assert found["median"] == pytest.approx(0, abs=1e-6)


def test_two_rows_of_a_study_move_the_engine_towards_it() -> None:
    """A plain rate and a speculative row at batch 1; with neither the error is larger."""
    result = validate(study(PLANTED))
    blind = validate([row for row in study(PLANTED, rate=False) if row.batch != 1])
    by_id = {one.row.id: one for one in blind.judged}
    others = [one for one in result.judged if one.row.batch != 1]
    assert max(off(one) for one in others) < 0.035
    assert np.mean([off(by_id[one.row.id]) for one in others]) > 2 * np.mean(
        [off(one) for one in others]
    )
    anchors = [one for one in result.judged if "engine" in one.anchors]
    assert [one.row.id for one in anchors] == ["3-1"]
    assert counted(anchors[0], "given") is None
    assert report(result)["summary"]["given_acceptance"]["n"] == 7


def test_the_shape_of_a_series_is_predicted_from_its_smallest_batch() -> None:
    """Without any G: the first row tells acceptance, and does not count."""
    engine = load_engine("vllm-2025")
    rows = study(engine, rate=False, told=False, dataset="gsm8k", context_len="")
    result = validate(rows)
    for one in result.judged:
        first = one.row.batch == 1
        assert one.given is None
        assert ("shape" in one.anchors, one.shape is None) == (first, first)
        if first:
            assert counted(one, "shape") is None
        else:
            assert off(one, "shape") < 1e-4
            assert one.best == one.shape
    summary = report(result)["summary"]
    assert (summary["shape"]["n"], summary["given_acceptance"]["n"]) == (6, 0)


def test_a_shape_bends_with_what_the_first_row_says() -> None:
    """A first row that accepts more raises all others."""
    rows = study(load_engine("vllm-2025"), rate=False)[:4]
    high = [replace(rows[0], speedup=1.2 * float(rows[0].speedup or 0)), *rows[1:]]
    for low, up in zip(validate(rows).judged[1:], validate(high).judged[1:], strict=True):
        assert up.shape is not None
        assert low.shape is not None
        assert up.shape > 1.05 * low.shape


def test_a_first_row_that_no_acceptance_gives_is_said() -> None:
    rows = study(load_engine("vllm-2025"), rate=False, told=False)[:3]
    first, *others = validate([replace(rows[0], speedup=40.0), *rows[1:]]).judged
    assert "shape" in first.anchors
    for one in others:
        assert one.best is None
        assert one.why == "S = 40 at batch 1: no acceptance gives that much"


def test_a_row_alone_without_acceptance_is_not_predicted() -> None:
    (one,) = validate([replace(ROW, tokens_per_step_G=None)]).judged
    assert one.best is None
    assert one.why == "no acceptance, and no smaller batch beside"


def test_acceptance_that_cannot_be_is_said() -> None:
    (one,) = validate([replace(ROW, tokens_per_step_G=4.5)]).judged
    assert (one.given, one.why) == (None, "G = 4.5 at k = 3: no acceptance gives that much")


@pytest.mark.parametrize("name", ["vllm-2025", "sglang", "hf-eager"])
def test_a_studys_own_fit_is_not_used_for_its_headline(name: str) -> None:
    """`given` goes by the engine without the study's URL, `given_in_study` by the study's own."""
    engine = {"vllm-2025": "vLLM v0.10.1", "sglang": "SGLang v0.5.9", "hf-eager": "HF Transformers"}
    for url in sorted(fitted_to(name)):
        row = replace(ROW, url=url, engine=engine[name], year=2026.0)
        (one,) = validate([row]).judged
        assert one.setup is not None
        served = one.setup.at(8)
        law = served.accepted_to(2.5)
        without, whole = load_engine(name, without=url), load_engine(name, study=url)
        assert one.given == pytest.approx(served.speedup(without, law), rel=1e-12)
        assert one.given_in_study == pytest.approx(served.speedup(whole, law), rel=1e-12)
    foreign = validate([replace(ROW, engine=engine[name], year=2026.0)]).judged[0]
    assert foreign.given_in_study is None
    assert url not in load_engine(name, without=url).studies


@pytest.mark.parametrize("kind", ["eagle3", "lookahead"])
def test_an_engine_that_nobody_measured_has_an_interval(kind: str) -> None:
    """Which holds S without host time, and under every engine that ships, also twice as slow."""
    row = replace(ROW, engine="an engine of our own", drafter_kind=kind)
    (one,) = validate([row]).judged
    assert one.setup is not None
    assert one.interval is not None
    assert (one.given, one.shape, one.best) == (None, None, None)
    assert "an interval" in one.why
    low, high = one.interval
    served = one.setup.at(8)
    law = served.accepted_to(2.5)
    each = [None, *map(load_engine, engine_names())]
    each += [
        replace(engine, **{name: 2 * getattr(engine, name) for name in HOST})
        for engine in each
        if engine is not None
    ]
    for engine in each:
        assert low - 1e-12 <= served.speedup(engine, law) <= high + 1e-12
    assert served.speedup(None, law) == pytest.approx(high) or kind == "lookahead"
    for S, held in ((low, 1.0), (high, 1.0), (0.99 * low, 0.0), (1.01 * high, 0.0)):
        summary = report(validate([replace(row, speedup=S)]))["summary"]["given_acceptance"]
        assert summary["interval_only"] == {"n": 1, "held": held}
        assert summary["n"] == summary["research"]["n"] == 0


def test_an_engine_known_by_one_study_alone_is_unknown_to_it() -> None:
    name = next(n for n in engine_names() if len(fitted_to(n)) == 1 and n.startswith("tensor"))
    (url,) = fitted_to(name)
    mine, others = (
        validate([replace(ROW, url=u, engine="TensorRT-LLM")]).judged[0] for u in (url, "u")
    )
    assert (mine.given, others.interval) == (None, None)
    assert mine.interval is not None
    assert mine.given_in_study is not None
    assert others.given is not None


def test_a_row_at_batch_1_makes_its_engine_known() -> None:
    rows = [measured(PLANTED, replace(r, engine="ours")) for r in (replace(ROW, batch=1.0), ROW)]
    first, second = validate([replace(r, id=str(i)) for i, r in enumerate(rows)]).judged
    assert first.anchors == {"engine", "shape"}
    assert second.interval is None
    assert off(second) < 0.1


def test_rows_that_name_no_batch_are_judged_at_their_peak() -> None:
    row = replace(ROW, batch=None, speedup_def="peak over batch sizes")
    (one,) = validate([row]).judged
    assert one.setup is not None
    engine = load_engine("vllm-2025")
    each = [
        one.setup.at(B).speedup(engine, one.setup.at(B).accepted_to(2.5)) for B in (1.0, 8.0, 64.0)
    ]
    assert one.given is not None
    assert one.given >= max(each) - 1e-12


@pytest.mark.parametrize(
    ("unit", "rate"),
    [
        ("tok/s", 100.0),
        ("output tok/s", 100.0),
        ("tok/s/user", 800.0),
        ("tok/s/gpu", 200.0),
        ("total tok/s (with prompt)", None),
        ("tok/s/rank", None),
        ("ms", None),
        ("", None),
    ],
)
def test_plain_rates_by_their_unit(unit: str, rate: float | None) -> None:
    row = replace(ROW, baseline_throughput=100.0, throughput_unit=unit, n_gpus=2.0)
    assert plain_rate(row) == rate
    assert plain_rate(replace(row, batch=None)) is None


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ('{"T_p_ms": 20}', 0.02), ('{"T_p_ms": "20"}', None), ('{"T_p_ms": true}', None),
        ('{"T_p_ms": 0}', None), ('{"T_p_ms": Infinity}', None), ('{"T_p_ms": NaN}', None),
        ("[20]", None), ("20 ms", None), ("", None),
    ],
)  # fmt: skip
def test_a_plain_step_tells_a_plain_rate(text: str, step: float | None) -> None:
    row = replace(ROW, timing=text)
    assert row.plain_step == step
    assert plain_rate(row) == (None if step is None else 8 / step)
    stated = replace(row, baseline_throughput=100.0, throughput_unit="tok/s")
    assert plain_rate(stated) == 100
    if "Inf" in text:
        assert validate([row]).judged[0].given is not None


# -- shares of time ------------------------------------------------------------------------------


def timing(**shares: float) -> str:
    return json.dumps({"fraction_of_time": shares})


def test_shares_of_time() -> None:
    text = timing(draft=0.2, verify=0.7, sampling=0.04, overhead=0.06)
    (one,) = time_shares([replace(ROW, timing=text)])
    assert one.measured == pytest.approx({"draft": 0.2, "verify": 0.7, "rest": 0.1})
    assert sum(one.predicted.values()) == pytest.approx(1)
    served = setup(ROW).at(8)
    wanted = served.shares(load_engine("vllm-2025"), served.accepted_to(2.5))
    assert one.predicted == pytest.approx(wanted)
    assert not one.in_study
    gaps = [abs(one.predicted[name] - one.measured[name]) for name in ("draft", "verify", "rest")]
    assert one.points == pytest.approx(100 * sum(gaps) / 3)
    plain = replace(ROW, timing=text, drafter_kind="none (baseline)", k=None)
    (none,) = time_shares([plain])
    assert none.predicted["draft"] == 0


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", "3", "not JSON", timing(draft=1.0), '{"fraction_of_time": 2}']
)
def test_rows_that_state_no_shares(text: str) -> None:
    assert time_shares([replace(ROW, timing=text)]) == []


# -- scores --------------------------------------------------------------------------------------


def test_errors_by_hand() -> None:
    """Off by +10, -20, 0, +50, -5 per cent: sizes 0, 5, 10, 20, 50."""
    pairs = [(1.1, 1.0), (1.6, 2.0), (3.0, 3.0), (0.75, 0.5), (0.95, 1.0)]
    found = errors(pairs)
    assert found["n"] == 5
    wanted = {"median": 0.10, "mean": 0.17, "p90": 0.38, "bias": 0.07}
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-9), name
    assert errors([]) == {"n": 0, "median": None, "mean": None, "p90": None, "bias": None}


def judged(
    number: int, predicted: float | None, S: float, *, what: str = "given", **row: Any
) -> Judged:
    base = {"k": float(number), "batch": 1.0, "speedup_baseline": "no_spec_same_engine"}
    one = Judged(row=Row(id=str(number), speedup=S, url="u", **{**base, **row}))
    setattr(one, what, predicted)
    return one


def test_drafts_chosen_by_hand() -> None:
    """The first series takes its second best, 5% below; of the second, off, 1.1 would have paid."""
    first = [judged(1, 1.3, 1.2), judged(3, 1.6, 1.9), judged(5, 1.5, 2.0)]
    second = [judged(k, p, S, batch=8.0) for k, p, S in ((1, 0.9, 1.1), (3, 0.8, 0.9))]
    third = [judged(k, p, S, batch=64.0) for k, p, S in ((1, 1.2, 1.17), (3, 1.1, 1.2))]
    alone = [judged(2, 1.5, 1.5, batch=128.0)]
    found = decisions([*first, *second, *third, *alone])
    assert found["series"] == 3
    assert found["best_or_near"] == pytest.approx(1 / 3)  # 1.17 of 1.2 alone
    lost = (1 - 1.9 / 2.0, 1 - 1.0 / 1.1, 1 - 1.17 / 1.2)
    assert found["lost"] == pytest.approx(np.mean(lost))


def test_off_is_the_best_of_a_series_that_loses() -> None:
    found = decisions([judged(1, 0.9, 0.8), judged(3, 0.7, 0.6)])
    assert (found["series"], found["best_or_near"], found["lost"]) == (1, 1.0, 0.0)
    on = decisions([judged(1, 1.2, 0.8), judged(3, 0.7, 0.6)])
    assert (on["best_or_near"], on["lost"]) == (0.0, pytest.approx(0.2))


def test_on_or_off_by_hand() -> None:
    rows = [
        judged(1, 1.20, 1.5, batch=1.0),  # on, right
        judged(1, 1.20, 0.9, batch=2.0),  # on, wrong
        judged(1, 0.80, 0.7, batch=3.0),  # off, right
        judged(1, 0.80, 1.3, batch=4.0),  # off, wrong
        judged(1, 1.04, 0.97, batch=5.0),  # too close to call, and it is
        judged(1, 0.96, 1.2, batch=6.0),  # too close to call, and it is not
        judged(1, None, 1.2, batch=7.0),  # no prediction
    ]
    found = decisions(rows)
    assert (found["rows"], found["series"]) == (6, 0)
    assert found["on_off_right"] == pytest.approx(3 / 6)
    assert found["always_on_right"] == pytest.approx(3 / 6)
    assert found["too_close_to_call"] == 2
    assert (found["losses"], found["losses_caught"]) == (3, pytest.approx(2 / 3))


def test_anchors_do_not_count() -> None:
    anchor, shape = judged(1, 1.5, 1.5), judged(3, 1.5, 1.5, what="shape")
    anchor.anchors.add("engine")
    assert counted(anchor, "given") is None
    shape.anchors.add("engine")  # its shape is of another row
    assert counted(shape, "shape") == (1.5, 1.5)
    shape.anchors.add("shape")
    assert counted(shape, "shape") is None
    assert decisions([anchor, shape])["rows"] == 0


def test_no_decisions_of_no_rows() -> None:
    found = decisions([])
    assert (found["series"], found["rows"], found["lost"], found["on_off_right"]) == (
        0,
        0,
        None,
        None,
    )


def test_a_report_of_a_study() -> None:
    rows = study(PLANTED)
    moe = replace(ROW, id="moe", target_model="Qwen3-30B-A3B", n_gpus=1.0, source="m")
    none = replace(ROW, id="none", hardware="Mac mini")
    found = report(validate([*rows, moe, none]))
    assert found["excluded"]["hardware: unknown GPU 'Mac mini'"] == 1
    assert found["summary"]["given_acceptance"]["moe"]["n"] == 1
    groups = found["groups"]
    assert set(groups) == {"source", "engine", "drafter", "architecture", "batch", "quality"}
    assert groups["source"]["s"]["given_acceptance"]["n"] == 7
    assert groups["source"]["m"]["given_acceptance"]["n"] == 1
    assert set(groups["engine"]) == {"vllm-2025"}
    by_batch = {name: both["shape"]["n"] for name, both in groups["batch"].items()}
    assert by_batch == {"1": 0, "2 to 16": 4, "17 to 64": 2}
    assert [row["id"] for row in found["rows"]] == [row.id for row in [*rows, moe, none]]
    last = found["rows"][-1]
    assert (last["given_acceptance"], last["device"]) == (None, None)
    json.dumps(found, allow_nan=False)


def test_tables_of_other_people_cannot_stop_a_validation() -> None:
    """Whatever a row says, it is predicted or not, and the others are."""
    odd = [
        {"k": 100.0}, {"batch": 1e6}, {"context_len": "1e9"},
        {"context_len": "0", "output_len": "5"},
        {"tree": "0 nodes, depth 3"}, {"tree": "depth 0, 5 nodes"}, {"tree": "topk 0, 4 nodes"},
        {"drafter_kind": "block_diffusion", "draft_model": "0-L"},
        {"drafter_kind": "parallel_eagle", "draft_model": "0 layers"},
        {"drafter_kind": "self_spec", "draft_model": "budget 0"},
        {"tokens_per_step_G": 1.0}, {"tokens_per_step_G": 1e4}, {"speedup": 1e-6},
        {"dataset": "gsm8k", "context_len": "0"}, {"dataset": "gsm8k", "output_len": "-3"},
        {"timing": "{"}, {"hardware": "(H100)"}, {"target_model": "(8B)"}, {"tp": 7.0},
    ]  # fmt: skip
    rows = [replace(ROW, id=str(i), url=str(i), **changes) for i, changes in enumerate(odd)]  # type: ignore[arg-type]
    result = validate([*rows, replace(ROW, id="good", url="good")])
    assert len(result.judged) == len(rows) + 1
    for one in result.judged:
        assert one.best is not None or one.why, one.row
        assert one.best is None or np.isfinite(one.best)
    assert result.judged[-1].given is not None


# -- user reports --------------------------------------------------------------------------------

CASE = """\
- id: mine
  url: https://example.org/issue
  engine: vLLM
  version: v0.10.1
  gpu: H100, 80 GB
  n_gpus: 2
  parallel: TP2
  target: Llama-3.1-8B
  draft_method: EAGLE-3
  prompt_len: 1024
  output_len: not stated
  rows:
    - {k: 3, batch_or_concurrency: 8, mean_acceptance_length: 2.5, baseline: 800, sd: 1200,
       unit: tok/s}
    - {k: 3, batch_or_concurrency: 4, baseline: 10.0, sd: 8.0, unit: ms TPOT}
    - {k: 3, batch_or_concurrency: 4, baseline: 100, sd: 150, unit: tok/s/user}
    - {k: 3, speedup: 1.4, topk: 4, num_draft: 16, steps: 5, gpu: A100}
"""


@pytest.fixture
def case(tmp_path: Path) -> Path:
    file = tmp_path / "cases.yaml"
    file.write_text(CASE)
    return file


def test_rows_of_a_report(case: Path) -> None:
    total, tpot, user, tree = read_cases(case)
    assert (total.id, total.source, total.engine) == ("mine-1", "mine", "vLLM v0.10.1")
    assert (total.hardware, total.tp, total.n_gpus, total.batch) == ("H100", 2, 2, 8)
    assert (total.drafter_kind, total.tokens_per_step_G, total.k) == ("eagle3", 2.5, 3)
    assert (total.baseline_throughput, total.sd_throughput, total.speedup) == (800, 1200, 1.5)
    assert (total.context_len, total.output_len) == ("1024", "")
    assert (tpot.baseline_throughput, tpot.sd_throughput) == (400, 500)
    assert (user.baseline_throughput, user.sd_throughput, user.speedup) == (400, 600, 1.5)
    assert (tree.hardware, tree.speedup) == ("A100", 1.4)
    assert tree.tree == "topk 4, 16 draft tokens (incl. root), 5 steps"
    drafter = setup(tree).drafter
    assert isinstance(drafter, DynamicTree)
    assert (drafter.topk, drafter.nodes, setup(tree).k) == (4, 15, 5)
    assert validate([total]).judged[0].given is not None


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("EAGLE-3 head", "eagle3"), ("EAGLE2", "eagle2"), ("eagle", "eagle"), ("magic", ""),
        ("P-EAGLE", "parallel_eagle"), ("n-gram", "ngram"), ("prompt lookup", "ngram"),
        ("MTP (NextN)", "mtp"), ("Medusa", "medusa"), ("DFlash", "block_diffusion"),
        ("draft model Llama-3.2-1B", "draft_model"),
    ],
)  # fmt: skip
def test_kinds_by_how_reports_spell_them(case: Path, method: str, kind: str) -> None:
    case.write_text(CASE.replace("EAGLE-3", method))
    row = read_cases(case)[0]
    assert row.drafter_kind == kind
    assert row.draft_model == ("Llama-3.2-1B" if kind == "draft_model" else "")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("- id: mine", "- name: mine", "case 1: must be a mapping with an id"),
        ("- id: mine", "- 3\n- id: mine", "case 1: must be a mapping with an id"),
        ("  rows:\n", "  rows: 3\n  x:\n", "case 1: rows must be a list of mappings"),
        ("    - {k: 3, speedup: 1.4,", "    - 5\n    - {k: 3,", "rows must be a list of mappings"),
        (", steps: 5", "", "case 1: row 4: a tree needs steps"),
        ("- id: mine", "x: [", "not valid YAML"),
    ],
)
def test_bad_reports(case: Path, old: str, new: str, message: str) -> None:
    assert old in CASE
    case.write_text(CASE.replace(old, new, 1))
    with pytest.raises(sm.DomainError) as caught:
        read_cases(case)
    assert str(caught.value).startswith(str(case))
    assert message in str(caught.value)


def test_reports_that_are_none(tmp_path: Path, case: Path) -> None:
    case.write_text(CASE + CASE)
    with pytest.raises(sm.DomainError, match="two cases have the same id"):
        read_cases(case)
    for text in ("", "a: 1", "text"):
        case.write_text(text)
        with pytest.raises(sm.DomainError, match="must be a list of cases"):
            read_cases(case)
    with pytest.raises(sm.DomainError, match="no such file"):
        read_cases(tmp_path / "absent.yaml")


@pytest.mark.parametrize("value", [".inf", "-3", ".nan", "true", "about 3", "1" + "0" * 400])
def test_numbers_of_a_report_that_are_none(case: Path, value: str) -> None:
    case.write_text(
        CASE.replace("k: 3, batch_or_concurrency: 8", f"k: {value}, batch_or_concurrency: 8")
    )
    row = read_cases(case)[0]
    assert row.k is None
    assert prepared(row).why == "no number of drafts"


def test_lookups_take_the_dataset_hit_rate() -> None:
    made = setup(replace(ROW, drafter_kind="ngram", dataset="gsm8k"))
    assert made.drafter == NGram(hit=1.0)
    assert made.at(1).accepted().hit.max() < 1


# -- everything that ships -----------------------------------------------------------------------


@pytest.mark.slow
def test_everything_that_ships_is_predicted_or_said_why() -> None:
    result = validate(golden_rows())
    assert len(result.judged) == len(golden_rows())
    for one in result.judged:
        alone = {"shape", "engine"} & one.anchors
        assert one.best is not None or one.interval is not None or one.why or alone, one.row.id
    found = report(result)
    assert found["summary"]["shape"]["n"] > 100
    assert found["summary"]["given_acceptance"]["n"] > 20
    json.dumps(found, allow_nan=False)
