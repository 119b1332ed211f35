"""Predictions of specmodel beside those of others, over the same rows and in one run.

    python benchmarks/peers.py RESULTS.csv [--steps STEPS.csv]

RESULTS.csv is a table of published results (`specmodel.validation.read_results`), STEPS.csv one of
whole steps (`whole_steps.py`). Printed are the number of rows and the median and 90th percentile
of |predicted / measured - 1|, of

- S, over Figure 1 of SpecDecode-Bench (Llama-3.1-8B, H100, vLLM 0.10.1; arXiv:2601.11580): given
  the acceptance that was measured, and at larger batches from the acceptance that the smallest
  batch of a series implies (EAGLE's, whose acceptance nobody states, among them);
- tokens per second of plain decoding, of the rows that state it. Output lengths of Qwen3-8B, which
  thinks first, are not stated: those of its datasets are taken for everyone;
- the pass alone: of STEPS.csv, and beside the fit that the authors of SpecDecode-Bench made to
  what they measured. Of Llama-3-70B they state shares of the time and no time.

Everyone gets the same requests (kinds of prompt and output lengths, from the same authors'
profile) and the same acceptance of each kind; S is the mean over requests of the time without over
the time with speculation. Rows that moved specmodel's engine are left out for everyone.

specmodel
    "held out": its engine without this study, moved by two of its rows, S at batch 1 of GSM8K with
    n-gram and with EAGLE-3. "nothing of it": not moved. "in study": fitted to the shares of time
    of Figure 4 of the same study too. "passes alone": no host time, as aiconfigurator has none.
    Its H100 was fitted to the kernel tables that aiconfigurator reads, and the fixed time of
    elementwise kernels to the steps of Qwen3-1.7B at context 0.
linear fit of the authors
    SpecDecode-Bench/simulator, ``predictor.py``, class ``Llama8BH100``, read 2026-11-30. In study
    by nature: fitted to runs of InstructCoder at batches 1 to 64. Prefill is a pass over all
    prompts, the same in both arms. It does not know where computation takes over from memory, nor
    other models and devices; EAGLE and EAGLE-3 take the same time, for any k but for 0.8 us a
    draft.
textbook
    G / (k c + 1), Leviathan et al., arXiv:2211.17192, with c the head's share of the target's
    parameters, or of its pass at batch 1 at datasheet rates; 0 for n-gram. It has no batch,
    requests, prefill or host time, and verification takes as long as a plain step.
aiconfigurator-core (optional: ``pip install specmodel[tables]``; Apache-2.0)
    What ``aiconfigurator cli estimate --estimate-mode static`` prints: a batch that starts and ends
    together, prefill the same in both arms. A step with ``nextn`` drafts is one of
    (nextn + 1) B sequences, each of which reads a KV cache of its own, times
    (layers + nextn) / layers for drafting, and 1 + ``nextn_accepted`` tokens come of it. It has no
    n-gram, no draft model, no draft passes of their own width and no host time; its kernels are
    those of vLLM 0.24.

AISimulate, which carries aiconfigurator's estimates on from 0.12, is not compared: the package
index holds no wheel of it.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import logging
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import whole_steps
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import specmodel as sm
from specmodel.checking import decoder
from specmodel.errors import SpecmodelError
from specmodel.overheads import Engine, fitted_to, load_engine
from specmodel.requests import (
    Accepted,
    Requests,
    Served,
    known_dataset,
    load_requests,
    solved,
)
from specmodel.roofline import Execution
from specmodel.speculation import round_parts
from specmodel.validation import Judged, Row, plain_rate, prepared, read_results, validate
from specmodel.validation.scores import counted, errors
from specmodel.validation.setups import Setup

try:
    from aiconfigurator_core.sdk.engine import EngineHandle
except ImportError:
    EngineHandle = None

Floats = NDArray[np.float64]
Speed = Callable[[Accepted], float]
"""S of an acceptance. [-]"""

FIGURE = "specdecodebench-fig1-Llama-3.1-8B"
IDEAL = Execution(level="ideal")
CONFIGS = {
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",  # of Llama-3-70B's shape
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
}
"""Models by the names that aiconfigurator ships configs of."""


class Peer(Protocol):
    """Who predicts S, and what of the study's times it has seen."""

    name: str
    seen: str

    def speed(self, setup: Setup, at: Served) -> Speed | None:
        """Return S by acceptance; None where it is not modelled."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Times of a batch of each kind of requests: prefill, then of one step or round. [s]"""

    prefill: Floats
    step: Floats
    found: Floats  # a round that has drafts, drafting included
    missed: Floats  # a round for which nothing was found

    def speedup(self, requests: Requests, accepted: Accepted) -> float:
        n = requests.output - 1.0
        cost = accepted.hit * self.found + (1.0 - accepted.hit) * self.missed
        plainly = self.prefill + n * self.step
        return float(requests.weight @ (plainly / (self.prefill + n * cost / accepted.G)))


# -- peers ---------------------------------------------------------------------------------------


@dataclass
class Specmodel:
    """specmodel, its engine as it ships with or without the study, or none."""

    name: str
    seen: str
    engine: Callable[[Setup], Engine | None]

    def speed(self, setup: Setup, at: Served) -> Speed:
        return partial(at.speedup, self.engine(setup))


def without_study(setup: Setup) -> Engine:
    return load_engine(setup.engine or "", without=setup.row.url)


def with_study(setup: Setup) -> Engine:
    return load_engine(setup.engine or "", study=setup.row.url)


class Linear:
    """The authors' fit to their own pass times of Llama-3.1-8B on H100."""

    name, seen = "linear fit of the authors", "times of passes"

    FIXED, TOKEN, KV = 5.88590713e-03, 2.10103129e-05, 3.92645679e-08
    DRAFT_FIXED, DRAFT_TOKEN, DRAFT_KV = 2.13526175e-03, 8.41429603e-07, 2.37768493e-09
    LOOKUP = 0.005875  # of verification
    STEP = 1.20683946e-03

    def forward(self, kv: Any, rows: Any) -> Any:
        return self.KV * kv + self.TOKEN * rows + self.FIXED

    def speed(self, setup: Setup, at: Served) -> Speed:
        requests, B, W = at.requests, float(at.parts.B), at.k + 1
        kv = B * requests.context
        step = self.forward(kv, B) + self.STEP
        verify = self.forward(kv, B * W)
        draft = self.DRAFT_KV * kv + self.DRAFT_TOKEN * W + self.DRAFT_FIXED
        if lookup(setup):
            draft = self.LOOKUP * verify
        costs = Costs(
            prefill=self.forward(0.0, B * requests.prompt) + self.STEP,
            step=step,
            found=verify + draft + self.STEP,
            missed=step,
        )
        return partial(costs.speedup, requests)


@dataclass
class Textbook:
    """G / (k c + 1)."""

    name: str
    ratio: Callable[[Setup, Served], float]
    seen: str = "nothing"

    def speed(self, setup: Setup, at: Served) -> Speed:
        c = 0.0 if lookup(setup) else self.ratio(setup, at)
        return lambda accepted: tokens(at.requests, accepted) / (at.k * c + 1.0)


def parameters(setup: Setup, at: Served) -> float:
    head = setup.drafter.weights(setup.target)
    return 0.0 if head is None else head.total_params / setup.target.total_params


def passes(setup: Setup, at: Served) -> float:
    one = round_parts(
        setup.device,
        setup.target,
        setup.drafter,
        B=1,
        k=at.k,
        L=float(at.requests.weight @ at.requests.context),
        execution=IDEAL,
    ).times()
    return float(one.T_d / one.T_p) / at.k


def tokens(requests: Requests, accepted: Accepted) -> float:
    """Return tokens per round over the rounds of all requests."""
    share = requests.output * requests.weight
    return float(share.sum() / (share @ (1 / accepted.G)))


class AIConfigurator:
    """aiconfigurator-core, static mode, on kernel times of H100."""

    name, seen = "aiconfigurator-core", "nothing"

    def speed(self, setup: Setup, at: Served) -> Speed | None:
        if lookup(setup) or setup.drafter.weights(setup.target) is None:
            return None
        tp, requests = setup.execution.tp, at.requests
        prefill, step = self.served(setup.target.name, requests, float(at.parts.B), tp=tp)
        _, found = self.served(setup.target.name, requests, float(at.parts.B), tp=tp, nextn=at.k)
        costs = Costs(prefill=prefill, step=step, found=found, missed=step)
        return partial(costs.speedup, requests)

    def served(
        self,
        model: str,
        requests: Requests,
        B: float,
        *,
        tp: int = 1,
        nextn: int = 0,
        backend: str = "vllm",
    ) -> tuple[Floats, Floats]:
        """Return prefill, and the mean step, of a batch of each kind of requests. [s]"""
        engine, found = handle(model, backend, tp, nextn), []
        for prompt, output in zip(requests.prompt, requests.output, strict=True):
            P, O = round(float(prompt)), max(round(float(output)), 2)
            prefill, decoding, _ = engine.run_static(batch_size=int(B), isl=P, osl=O)
            found.append((prefill / 1e3, decoding / 1e3 / (O - 1)))
        both = np.array(found)
        return both[:, 0], both[:, 1]

    def step(self, model: str, B: int, L: int, *, tp: int = 1, head: bool = True) -> float:
        """Return the pass of a decode step at a context of L tokens. [s]"""
        parts = handle(model, "vllm", tp, 0).decode_step_per_op(B, L - 1, 1)
        return sum(ms for name, ms, *_ in parts if head or "logits" not in name) / 1e3


@cache
def handle(model: str, backend: str, tp: int, nextn: int) -> Any:
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    if model in CONFIGS:
        return EngineHandle.compile(CONFIGS[model], "h100_sxm", backend, tp_size=tp, nextn=nextn)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(minicpm()), encoding="utf-8")
        return EngineHandle.compile(folder, "h100_sxm", backend, tp_size=tp, nextn=nextn)


def minicpm() -> dict[str, Any]:
    """Return the config that `whole_steps` takes MiniCPM5-2B to have."""
    shape = whole_steps.MINICPM
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 32768,
        "num_hidden_layers": shape["layers"],
        "hidden_size": shape["hidden"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["head_dim"],
        "intermediate_size": shape["intermediate"],
        "vocab_size": shape["vocab"],
    }


def lookup(setup: Setup) -> bool:
    return setup.row.drafter_kind == "ngram"


# -- S -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A row, its passes, and what specmodel predicted of it."""

    judged: Judged
    setup: Setup
    at: Served

    @property
    def row(self) -> Row:
        return self.judged.row


Predicted = dict[str, float]
"""Predictions of S by row."""


def given(peer: Peer, cases: Sequence[Case]) -> Predicted:
    """Return S from the acceptance that each row states."""
    found = {}
    for case in cases:
        speed, G = peer.speed(case.setup, case.at), case.row.tokens_per_step_G
        if speed is not None and G is not None:
            found[case.row.id] = speed(case.at.accepted_to(G))
    return found


def shape(peer: Peer, cases: Sequence[Case]) -> Predicted:
    """Return S at larger batches from the acceptance that the smallest of a series implies."""
    series: dict[Any, list[Case]] = defaultdict(list)
    for case in sorted(cases, key=lambda case: case.row.batch or 0.0):
        series[case.row.series].append(case)
    found = {}
    for first, *rest in series.values():
        speed = peer.speed(first.setup, first.at)
        if speed is None:
            continue
        wanted = first.row.speedup or 0.0
        try:
            scale = solved(
                lambda x, f=speed, at=first.at, S=wanted: f(at.accepted(x)) - S, first.row.id
            )
        except SpecmodelError as error:
            print(f"{peer.name}: {error}")
            continue
        for case in rest:
            other = peer.speed(case.setup, case.at)
            if other is not None:
                found[case.row.id] = other(case.at.accepted(scale))
    return found


SETS: dict[str, Callable[[Case], bool]] = {
    "all": lambda case: True,
    "n-gram": lambda case: lookup(case.setup),
    "EAGLE, EAGLE-3": lambda case: not lookup(case.setup),
}


def speedups(path: str, others: Sequence[Peer]) -> tuple[Table, Table]:
    """Return the tables of S given acceptance and of S at larger batches."""
    rows = [row for row in read_results(path) if row.id.startswith(FIGURE)]
    cases = [
        Case(one, one.setup, one.setup.at(one.row.batch))
        for one in validate(rows).judged
        if one.setup is not None and one.row.batch is not None
    ]
    both = []
    for what, title, predict in (
        ("given", "S given acceptance", given),
        ("shape", "S at larger batches, from the smallest", shape),
    ):
        judged = [case for case in cases if counted(case.judged, what) is not None]
        attributes = {"held out": what, "in study": f"{what}_in_study"}
        found = [
            (
                f"specmodel, {label}",
                "2 rows at batch 1" if label == "held out" else "shares of time",
                {case.row.id: getattr(case.judged, attribute) for case in judged},
            )
            for label, attribute in attributes.items()
        ]
        found += [(peer.name, peer.seen, predict(peer, cases)) for peer in others]
        table = Table("S", "seen of the study", *columns(SETS), title=title)
        for name, seen, predicted in found:
            cells: list[str] = []
            for keep in SETS.values():
                pairs = [
                    (predicted[case.row.id], case.row.speedup or 0.0)
                    for case in judged
                    if keep(case) and case.row.id in predicted
                ]
                cells += scored(pairs)
            table.add_row(name, seen, *cells)
        both.append(table)
    return both[0], both[1]


def columns(names: Any) -> list[str]:
    return [text for name in names for text in (f"{name}: n", "median", "p90")]


def scored(pairs: Sequence[tuple[float, float]]) -> list[str]:
    """Return count, median and 90th percentile of the errors as cells."""
    off = errors(pairs)
    if not off["n"]:
        return ["0", "-", "-"]
    return [str(off["n"]), f"{off['median']:.1%}", f"{off['p90']:.1%}"]


# -- plain decoding ------------------------------------------------------------------------------


def rates(path: str, peer: AIConfigurator | None) -> Table:
    """Return the table of plain tokens per second, each baseline once.

    Of datasets whose lengths are not known only batch 1 is taken, where they matter little.
    """
    table = Table(
        "tokens/s without speculation", "predicted by", "n", "median", "p90",
        title="plain decoding as served, prefill and host time included",
    )  # fmt: skip
    once: dict[Any, tuple[Setup, float]] = {}
    for row in read_results(path):
        known = known_dataset(row.dataset) or row.batch == 1
        if not (known and "H100" in row.hardware and (rate := plain_rate(row))):
            continue
        setup = prepared(row).setup
        if setup is not None and setup.engine and setup.target.name in CONFIGS:
            key = (row.url, row.engine, setup.target.name, row.dataset, row.batch)
            once.setdefault(key, (setup, rate))
    groups: dict[str, list[tuple[Setup, float]]] = defaultdict(list)
    for setup, rate in once.values():
        groups[f"{setup.target.name}, {setup.row.engine}"].append((setup, rate))
    for name, some in groups.items():
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for setup, rate in some:
            B = float(setup.row.batch or 1.0)
            at = setup.at(B)
            found["specmodel, nothing of it"].append((at.throughput(without_study(setup)), rate))
            if setup.row.url in fitted_to(setup.engine or ""):
                found["specmodel, in study"].append((at.throughput(with_study(setup)), rate))
            found["specmodel, passes alone"].append((at.throughput(None), rate))
            if peer is not None:
                how = {"tp": setup.execution.tp, "backend": setup.row.engine.split()[0].lower()}
                requests = at.requests
                prefill, step = peer.served(setup.target.name, requests, B, **how)
                taken = prefill + (requests.output - 1.0) * step
                predicted = (requests.weight @ requests.output) / (requests.weight @ taken)
                found[peer.name].append((B * float(predicted), rate))
        for who, pairs in found.items():
            table.add_row(name, who, *scored(pairs))
    return table


def forwards(path: str, peer: AIConfigurator | None) -> Table:
    """Return the table of passes of whole steps, without LM head."""
    with Path(path).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    models = {
        "Qwen/Qwen3-1.7B": sm.load_model("qwen3-1.7b"),
        "openbmb/MiniCPM5-2B": decoder("minicpm5-2b", whole_steps.MINICPM, "bfloat16"),
    }
    table = Table(
        "pass without LM head, vLLM 0.28", "predicted by", "n", "median", "p90",
        title="measured passes",
    )  # fmt: skip
    for name, model in models.items():
        mine = [row for row in rows if row["model"].startswith(name)]
        for label, keep in PARTS.items():
            part = [row for row in mine if keep(int(row["W"]), int(row["context"]))]
            if not part:
                continue
            measured = [float(row["forward_ms"]) / 1e3 for row in part]
            fitted = " (fitted)" if name.startswith("Qwen") and label.endswith(" 0") else ""
            by = {f"specmodel{fitted}": [whole_steps.seconds(model, r, "calibrated") for r in part]}
            if peer is not None:
                by[peer.name] = [
                    peer.step(
                        model.name,
                        int(r["num_reqs"]) * int(r["W"]),  # as nextn counts verified positions
                        int(r["context"]) + int(r["W"]),
                        head=False,
                    )
                    for r in part
                ]
            for who, predicted in by.items():
                pairs = list(zip(predicted, measured, strict=True))
                table.add_row(f"{name}, {label}", who, *scored(pairs))
    return table


PARTS: dict[str, Callable[[int, int], bool]] = {
    "W 1, context 0": lambda W, L: W == 1 and L == 0,
    "W 1, context 1k to 8k": lambda W, L: W == 1 and L > 0,
    "W 2 to 8": lambda W, L: W > 1,
}


def passes_beside(peer: AIConfigurator | None) -> Table:
    """Return passes of the models of the study, beside the authors' fit of what they measured."""
    requests = load_requests("InstructCoder")
    L = round(float(requests.weight @ requests.context))
    table = Table(
        "pass [ms]", "batch", "specmodel", "aiconfigurator-core", "fit of the authors",
        "specmodel / fit", "aiconfigurator / fit", "specmodel / aiconfigurator",
        title=f"decode passes on H100 at a context of {L}",
    )  # fmt: skip
    device, linear = sm.load_device("h100"), Linear()
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, tp in (("llama-3.1-8b", 1), ("llama-3.1-70b", 4)):
        for B in (1, 8, 16, 32, 64, 128):
            how = Execution(tp=tp)
            mine = float(sm.pass_time(device, sm.load_model(name), B=B, L=L, execution=how).T)
            other = peer.step(name, B, L, tp=tp) if peer is not None else None
            fit = float(linear.forward(B * L, B)) if tp == 1 else None
            label = f"{name}, TP {tp}"
            if fit is not None and B <= 64:
                pairs["specmodel"].append((mine, fit))
                if other is not None:
                    pairs["aiconfigurator-core"].append((other, fit))
            elif fit is not None:
                label += " (fit extended)"
            table.add_row(
                label,
                str(B),
                *(f"{t * 1e3:.2f}" if t else "-" for t in (mine, other, fit)),
                *(f"{a / b:.3f}" if a and b else "-" for a, b in ((mine, fit), (other, fit))),
                f"{mine / other:.3f}" if other else "-",
            )
    table.caption = "against the fit where it was made: " + "; ".join(
        "{}: n {}, median {}, p90 {}".format(who, *scored(some)) for who, some in pairs.items()
    )
    return table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("results")
    parser.add_argument("--steps")
    options = parser.parse_args()
    console = Console(width=150)
    print(f"specmodel {sm.__version__}")
    peer = None
    if EngineHandle is None:
        print("aiconfigurator-core is not installed (pip install specmodel[tables]): left out")
    else:
        peer = AIConfigurator()
        print(f"aiconfigurator-core {importlib.metadata.version('aiconfigurator-core')}")
    others: list[Peer] = [
        Specmodel("specmodel, nothing of it", "nothing", without_study),
        Specmodel("specmodel, passes alone", "nothing", lambda setup: None),
        Linear(),
        Textbook("textbook, c by parameters", parameters),
        Textbook("textbook, c by roofline", passes),
    ]
    if peer is not None:
        others.append(peer)
    for table in speedups(options.results, others):
        console.print(table)
    console.print(rates(options.results, peer))
    if options.steps is not None:
        console.print(forwards(options.steps, peer))
    console.print(passes_beside(peer))


if __name__ == "__main__":
    main()
