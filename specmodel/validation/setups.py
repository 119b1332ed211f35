"""From a row to what can be predicted of it, or why it cannot."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import numpy as np

from specmodel.architectures import Architecture, block_head, find_model, peagle_head
from specmodel.drafters import (
    MTP,
    BlockDiffusion,
    Drafter,
    DraftModel,
    DynamicTree,
    Eagle,
    Eagle3,
    Lookahead,
    Medusa,
    NGram,
    Parallel,
    SparseKV,
)
from specmodel.dtypes import default_quantisation
from specmodel.errors import SpecmodelError, brief
from specmodel.hardware import Device, load_device
from specmodel.memory import memory
from specmodel.overheads import engine_for, load_engine, serves
from specmodel.requests import Requests, Served, known_dataset, load_requests, served
from specmodel.roofline import Execution
from specmodel.validation.rows import Row


class Unpredictable(Exception):
    """Why a row cannot be predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a row measured, in the model's terms.

    Attributes
    ----------
    row : Row
    device, target, drafter
    execution : Execution
    k : int
        Drafts, or depth of a tree. [token]
    requests : Requests
    engine : str or None
        Name of the engine's record; None: nobody measured it.
    assumed : tuple of str
        What the row does not say.
    """

    row: Row
    device: Device
    target: Architecture
    drafter: Drafter
    execution: Execution
    k: int
    requests: Requests
    engine: str | None
    assumed: tuple[str, ...]

    def at(self, batch: float) -> Served:
        """Return its requests served at a batch."""
        return served(
            self.device,
            self.target,
            self.drafter,
            self.requests,
            B=batch,
            k=self.k,
            execution=self.execution,
        )


def setup(row: Row) -> Setup:
    """Return what a row measured.

    Raises
    ------
    Unpredictable
        With the reason.
    """
    assumed: list[str] = []
    if not row.hardware:
        raise Unpredictable("no hardware named")
    if not row.target_model:
        raise Unpredictable("no target named")
    device = _known(load_device, _bare(row.hardware), "hardware")
    target = _target(row, device)
    kind = row.drafter_kind.lower()
    if kind not in _DRAFTERS:
        raise Unpredictable(f"drafter {row.drafter_kind or '(none named)'} is not modelled")
    engine = engine_for(row.engine, row.year)
    serving = engine is not None and serves(engine)
    drafter, k = _drafter(row, target, assumed, serving=serving)
    execution = _execution(row, device, target, assumed)
    if engine is not None:
        execution = replace(execution, kv_reread=load_engine(engine).kv_reread)
    return Setup(
        row=row,
        device=device,
        target=target,
        drafter=drafter,
        execution=execution,
        k=k,
        requests=_requests(row, assumed),
        engine=engine,
        assumed=tuple(assumed),
    )


T = TypeVar("T")


def _known(load: Callable[[str], T], name: str, what: str) -> T:
    try:
        return load(name)
    except SpecmodelError as error:
        raise Unpredictable(f"{what}: {error}") from None


def _bare(text: str) -> str:
    """Return a name without what is said of it in brackets or after a plus sign."""
    return re.sub(r"\s*\(.*?\)", "", text.split(" + ")[0]).strip()


@cache
def _model(name: str) -> Architecture:
    return find_model(name)


_FORMATS = re.compile(r"(?<![a-z])(mxfp4|nvfp4|fp8|int4|int8|4-bit|q4|q8)", re.IGNORECASE)
_FP8_KV = re.compile("fp8 kv", re.IGNORECASE)
_WEIGHTS = {"4-bit": "int4", "q4": "int4", "q8": "int8"}
_EXPERTS_ONLY = ("mxfp4", "nvfp4")


def _target(row: Row, device: Device) -> Architecture:
    """Return the target in the formats that the row states."""
    target = _known(_model, row.target_model, "target")
    if "bfloat16" not in device.peak_flops:
        dtypes = [d for d in ("float16", "float32") if d in device.peak_flops]
        target = target.with_dtypes(dtype=dtypes[0] if dtypes else None)
    text, others = _FP8_KV.subn("", row.target_dtype)
    kv = "fp8" if others else None
    found = _FORMATS.search(text or row.target_model)
    if found is None:
        return target.with_dtypes(kv=kv)
    name = found[1].lower()
    if any(target.moe_layers()) and name in _EXPERTS_ONLY:
        if target.expert_quantisation is not None:
            return target.with_dtypes(kv=kv)
        experts = replace(default_quantisation(name), roles=frozenset({"experts"}))
        return replace(target, expert_quantisation=experts).with_dtypes(kv=kv)
    if target.quantisation is not None:
        return target.with_dtypes(kv=kv)
    weights = _WEIGHTS.get(name, name)
    return _known(lambda _: target.with_dtypes(weights=weights, kv=kv), "", f"{name} weights")


# -- drafters ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Usual:
    """What a method's authors ship as its tree: depth, nodes of a depth drafted on, verified."""

    depth: int
    topk: int
    nodes: int


_TREES = {
    "eagle": _Usual(5, 8, 25),
    "eagle2": _Usual(6, 10, 60),
    "eagle3": _Usual(8, 10, 60),
    "medusa": _Usual(4, 10, 63),
}
"""Trees of the reference implementations: EAGLE ``choices.py`` (25 nodes, depth 5), EAGLE-2 and -3
``ea_model.py`` (60 nodes, top 10, depths 5 and 7 after the first), Medusa ``medusa_choices.py``
(63 nodes, 4 heads)."""

_ALWAYS_TREES = ("eagle2", "medusa")
_CHAINS = {
    "block_diffusion": 15,
    "draft_model": 5,
    "ngram": 10,
    "suffix": 10,
    "lookahead": 5,
    "mtp": 1,
}
"""Drafts where a row names none: Spec-Bench's settings of SpS, PLD and lookahead."""


def _plain(drafter: Drafter) -> Callable[[Row, Architecture], Drafter]:
    return lambda row, target: drafter


def _small(row: Row, target: Architecture) -> Drafter:
    if not row.draft_model:
        raise Unpredictable("no draft model named")
    draft = _known(_model, _bare(re.split(r",| MTP", row.draft_model)[0]), "draft model")
    draft = draft.with_dtypes(dtype=target.dtype)
    alone = 1 if "single gpu" in row.draft_model.lower() else None
    budget = re.search(r"sparse kv|streamingllm", row.draft_model.lower())
    model = DraftModel(draft.with_kv_budget(512) if budget else draft, tp=alone)
    _known(model.weights, target, "draft model")  # type: ignore[arg-type]
    return model


def _block(row: Row, target: Architecture) -> Drafter:
    layers = re.search(r"([1-9]\d*)-?L", row.draft_model) or re.search(
        r"([1-9]\d*)-layer", row.draft_model
    )
    k = int(row.k or 15)
    head = _known(
        lambda _: block_head(target, layers=int(layers[1]) if layers else 5, block=k + 1),
        "",
        "block head",
    )
    return BlockDiffusion(head)


def _parallel(row: Row, target: Architecture) -> Drafter:
    layers = re.search(r"([1-9]\d*) layers", row.draft_model)
    return Parallel(
        _known(lambda _: peagle_head(target, layers=int(layers[1]) if layers else 4), "", "head")
    )


def _sparse(row: Row, target: Architecture) -> Drafter:
    budget = re.search(r"budget (\d+)", row.draft_model)
    return SparseKV(budget=int(budget[1]) if budget else 512)


_DRAFTERS: dict[str, Callable[[Row, Architecture], Drafter]] = {
    "eagle": _plain(Eagle()),
    "eagle2": _plain(Eagle()),
    "eagle3": _plain(Eagle3()),
    "mtp": _plain(MTP()),
    "medusa": _plain(Medusa()),
    "ngram": _plain(NGram(hit=1.0)),
    "suffix": _plain(NGram(hit=1.0)),
    "lookahead": _plain(Lookahead()),
    "draft_model": _small,
    "tree": _small,
    "block_diffusion": _block,
    "parallel_eagle": _parallel,
    "self_spec": _sparse,
}
"""Drafters by the kinds that tables name."""


def _drafter(
    row: Row, target: Architecture, assumed: list[str], *, serving: bool
) -> tuple[Drafter, int]:
    """Return the drafter and its drafts, or depth."""
    kind = row.drafter_kind.lower()
    drafter = _DRAFTERS[kind](row, target)
    try:
        drafter.passes(target, 1)
    except SpecmodelError as error:
        raise Unpredictable(f"drafter: {error}") from None
    shape = _shape(row.tree)
    k = None if row.k is None else int(row.k)
    text = "" if _NO_TREE.search(row.tree.lower()) else row.tree
    usually = kind in _ALWAYS_TREES or (k is None and kind in _TREES and not serving)
    if shape is None and (text or usually):
        usual = _TREES.get(kind)
        if usual is None:
            raise Unpredictable(f"tree not understood: {brief(row.tree)}")
        assumed.append(f"the tree {usual.nodes} nodes, depth {usual.depth}")
        shape = usual
    if shape is None:
        if k is None:
            k = _CHAINS.get(kind)
            if k is None:
                raise Unpredictable("no number of drafts")
            assumed.append(f"k = {k}")
        if k == 0:
            raise Unpredictable("no drafts")
        return drafter, k
    depth = shape.depth or k
    if not depth:
        raise Unpredictable(f"tree of unknown depth: {brief(row.tree)}")
    if shape.topk <= 1 and shape.nodes == depth:
        return drafter, depth
    return DynamicTree(drafter, topk=max(shape.topk, 1), nodes=shape.nodes), depth


_NUMBER = r"(\d+)"
_NO_TREE = re.compile("single block|adaptive")


def _shape(text: str) -> _Usual | None:
    """Return depth, nodes drafted on and nodes beside the root; depth 0: as many as drafts."""
    tree = text.lower()
    if _NO_TREE.search(tree):
        return None

    def number(*patterns: str) -> int | None:
        found = next((m for p in patterns if (m := re.search(p, tree))), None)
        return int(found[1]) if found else None

    lanes = re.search(rf"{_NUMBER}\s*x\s*{_NUMBER} independent", tree) or re.search(
        rf"{_NUMBER} sequences x depth {_NUMBER}", tree
    )
    if lanes:
        wide, deep = int(lanes[1]), int(lanes[2])
        return _Usual(deep, wide, wide * deep)
    depth = number(rf"depth {_NUMBER}", rf"{_NUMBER} steps") or 0
    nodes = number(
        rf"tree size {_NUMBER}",
        rf"{_NUMBER}(?:/\d+)* draft tokens",
        rf"{_NUMBER} nodes",
        rf"{_NUMBER}-token mtp window",
    )
    if nodes is None:
        return None
    if "incl. root" in tree or "mtp window" in tree:
        nodes -= 1
    topk = number(rf"topk[ =]*{_NUMBER}", rf"top-{_NUMBER}", rf"branching {_NUMBER}")
    if topk is None:
        topk = -(-nodes // max(depth, 1))
    return _Usual(depth, topk, nodes)


# -- how it ran ----------------------------------------------------------------------------------

_OVERLAP = 0.1
"""Overlap of the routing of a sequence's positions that published width curves of mixtures of
experts show (0 to 0.2). [-]"""


def _execution(row: Row, device: Device, target: Architecture, assumed: list[str]) -> Execution:
    if re.search(r"\b[pd]p ?([2-9]|\d\d)", row.parallel.lower()):
        raise Unpredictable(f"parallelism other than tensor parallel: {row.parallel}")
    devices = row.tp or row.n_gpus
    offload = 1.0 if "offload" in row.hardware.lower() else 0.0
    if devices is None:
        devices = 1
        while devices < 8 and not offload and not _fits(device, target, int(devices)):
            devices *= 2
        assumed.append(f"{devices:g} device" + "s" * (devices > 1))
    tp = int(devices)
    if tp > 8:
        raise Unpredictable(f"{tp} devices over several nodes: their network is not stated")
    moe = any(target.moe_layers())
    return Execution(tp=tp, offload=offload, expert_overlap=_OVERLAP if moe else 0.0)


def _fits(device: Device, target: Architecture, tp: int) -> bool:
    how = Execution(tp=tp)
    held = memory(device, target, None, k=0, L=2048, layout=how.layout, offload=0.0)
    return bool(held.max_batch >= 1)


def _length(text: str) -> float | None:
    found = re.fullmatch(r"(-?[\d.]+)(k?)", text.replace(",", "").strip().lower())
    try:
        return float(found[1]) * (1024 if found[2] else 1) if found else None
    except ValueError:
        return None


def _requests(row: Row, assumed: list[str]) -> Requests:
    prompt, output = _length(row.context_len), _length(row.output_len)
    if known_dataset(row.dataset):
        return load_requests(row.dataset).of_length(prompt, output)
    if prompt is not None:
        return Requests.alike(prompt, output if output and output > 1 else np.inf)
    assumed.append("requests as in mixed chat")
    if output is not None:
        return load_requests(None).of_length(None, output)
    return replace(load_requests(None), name=row.dataset or "unknown")
