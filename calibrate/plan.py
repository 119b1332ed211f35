"""Which cases are measured, in the order of their worth, and what share of the time they get."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from calibrate.cases import Case, distinct
from calibrate.models import ModelShape, Setting, default_models, layer_shape
from specmodel.architectures import Architecture
from specmodel.architectures.parts import Linear
from specmodel.dtypes import BYTES

GEMM_SHAPES = (
    *((4096, 4096), (1024, 8192), (16384, 4096), (4096, 1024), (4096, 16384), (2048, 2048)),
    *((10240, 8192), (1536, 5120), (7168, 2560), (3072, 12288), (65536, 4096), (12288, 1536)),
)
"""(N, K) of the weight matrices: many shapes with few M tell more than few with many."""

GEMM_ROWS = ((1, 128), (16, 256), (64, 512), (32, 192), (8, 256), (48, 512))
"""M of the shapes in rotation: 24 rows."""

_MORE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 3, 6, 12, 24, 48, 96, 192, 256, 384, 512)
_HEADS = ((32, 8, 128), (64, 8, 128), (32, 4, 128), (16, 8, 128), (32, 8, 64))
_WIDTHS = (2, 4, 8, 16, 3, 6, 12)
_ELEMENTWISE = (("add-norm", 4), ("silu-mul", 3), ("kv-write", 3), ("add", 3))
"""Kernels, and values that each reads and writes for an element of a row."""
_SHARES = {
    "stream": 0.03,
    "launch": 0.02,
    "gemm": 0.27,
    "attention": 0.18,
    "elementwise": 0.05,
    "experts": 0.10,
    "passes": 0.30,
    "allreduce": 0.05,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Cases of one kind: `base` is the least that a fit needs, `more` is taken while time lasts."""

    name: str
    share: float
    base: tuple[Case, ...]
    more: tuple[Case, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sections in order, the shapes of the models among their cases, the reference point."""

    sections: tuple[Section, ...]
    models: Mapping[str, ModelShape]
    reference: Case


def make_plan(setting: Setting, *, seed: int = 0, model: Architecture | None = None) -> Plan:
    """Return what to measure, the same for the same arguments.

    Parameters
    ----------
    setting : Setting
    seed : int
        Order of the cases in each section.
    model : Architecture, optional
        Also measure this model's own operators and one of its layers.
    """
    models = default_models(setting)
    own: list[Case] = []
    if model is not None:
        shape = layer_shape(model)
        models = {model.name: shape, **models}
        own = list(_own_operators(setting, model, shape))
    cases: dict[str, tuple[Iterable[Case], Iterable[Case]]] = {
        "stream": (_streams(setting), ()),
        "launch": (_launches(setting), ()),
        "gemm": _gemms(setting),
        "attention": _attentions(setting),
        "elementwise": (_elementwise(setting), ()),
        "experts": _experts(setting),
        "passes": _passes(setting, models),
        "allreduce": (_allreduces(setting), ()),
    }
    by_section = {"gemm": "gemm", "attention": "attention", "experts": "experts"}
    sections = []
    for name, (first, second) in cases.items():
        extra = [case for case in own if by_section[case.operator] == name]
        base = distinct([*extra, *first])
        more = [case for case in distinct(second) if case not in set(base)]
        rng = random.Random(f"{seed} {name}")  # noqa: S311 (an order, not a secret)
        rng.shuffle(base)
        rng.shuffle(more)
        # verifying is told relative to decoding, so that comes first
        more.sort(key=lambda case: case.operator == "pass" and case.width != 1)
        if model is not None:  # its own shapes first
            ours = set(extra)
            base.sort(key=lambda case: case not in ours and case.model != model.name)
        if base:
            section = Section(name=name, share=_SHARES[name], base=tuple(base), more=tuple(more))
            sections.append(section)
    return Plan(sections=tuple(sections), models=models, reference=_reference(setting))


def _reference(setting: Setting) -> Case:
    size = 256 if setting.tiny else 4096 // setting.scale
    m = 64 if setting.kind == "cuda" else 8
    return replace(setting.case("reference"), m=m, n=size, k=size)


def _streams(setting: Setting) -> Iterator[Case]:
    largest = min(2**33 if setting.kind == "cuda" else 2**29, setting.memory / 8)
    size = 2**22 if setting.tiny else int(max(largest, 8 * setting.cache)) // 64 * 64
    for part in (1, 2):
        yield replace(setting.case("stream"), bytes=size // part)


def _launches(setting: Setting) -> Iterator[Case]:
    launch = setting.case("launch")
    yield replace(launch, mode="eager", kernel="add")
    if setting.kind == "cuda":
        yield replace(launch, kernel="add")
        yield replace(launch, kernel="graph replay")


def _gemms(setting: Setting) -> tuple[list[Case], list[Case]]:
    """24 rows in each format and one that only arithmetic bounds; then all shapes at all M."""
    base: list[Case] = []
    more: list[Case] = []
    for dtype in setting.dtypes:
        gemm = replace(setting.case("gemm"), dtype=dtype)
        for (N, K), rows in zip(GEMM_SHAPES, 2 * GEMM_ROWS, strict=True):
            matrix = replace(gemm, n=N // setting.scale, k=K // setting.scale)
            base += [replace(matrix, m=m) for m in rows]
            more += [replace(matrix, m=m) for m in _MORE_ROWS]
        top = 128 if setting.tiny else 8192 if setting.kind == "cuda" else 2048
        base.append(replace(gemm, m=top, n=top, k=top))
    return base, more


def _attentions(setting: Setting) -> tuple[list[Case], list[Case]]:
    """Twenty spread shapes of decoding, and the same at larger widths; then all combinations."""
    small = setting.kind == "cpu"
    batches = [1, 4, 16] if small else [1, 4, 16, 64]
    contexts = [128, 512, 2048] if small else [512, 2048, 8192, 32768]
    heads = [(h // 2, k // 2, d) for h, k, d in _HEADS] if small else list(_HEADS)
    most = 2**15 if small else 2**20  # tokens in the cache
    if setting.tiny:
        contexts, heads = [32, 64], [(4, 1, 32), (4, 2, 16)]
    grid = [p for p in product(heads, contexts, batches) if p[1] * p[2] <= most]
    count = min(20, len(grid))
    spread = [grid[i * len(grid) // count] for i in range(count)]

    def case(point: tuple[tuple[int, int, int], int, int], width: int) -> Case:
        (q, kv, dim), context, batch = point
        shape = replace(setting.case("attention"), heads=q, kv_heads=kv, head_dim=dim)
        kv_dtype = setting.dtypes[0]
        return replace(shape, batch=batch, width=width, context=context, kv_dtype=kv_dtype)

    wide = [case(point, _WIDTHS[i % 4]) for i, point in enumerate(spread)]
    more = [case(point, W) for point in grid for W in (1, *_WIDTHS)]
    return [case(point, 1) for point in spread] + wide, more


def _elementwise(setting: Setting) -> Iterator[Case]:
    each = BYTES[setting.dtypes[0]]
    widths = [n // setting.scale for n in (4096, 14336)]
    for (kernel, moved), n, m in product(_ELEMENTWISE, widths, (1, 16, 64, 512)):
        size = int(moved * m * n * each)
        yield replace(setting.case("elementwise"), m=m, n=n, bytes=size, kernel=kernel)


def _experts(setting: Setting) -> tuple[list[Case], list[Case]]:
    """(experts, top-k, width, hidden) of models that exist, smaller on a CPU."""
    shapes = [(128, 8, 768, 2048), (8, 2, 14336, 4096), (64, 6, 1408, 2048), (32, 4, 2880, 2880)]
    if setting.kind == "cpu":
        shapes = [(32, 4, 384, 1024), (8, 2, 1024, 1024), (16, 2, 512, 768)]
    if setting.tiny:
        shapes = [(4, 2, 64, 64)]
    layers = [
        replace(setting.case("experts"), experts=experts, top_k=top_k, n=n, k=k)
        for experts, top_k, n, k in shapes
    ]
    base = [replace(layer, m=m) for layer in layers for m in (1, 4, 16, 64, 256)]
    return base, [replace(layer, m=m) for layer in layers for m in (2, 8, 32, 128, 512)]


def _allreduces(setting: Setting) -> Iterator[Case]:
    for ranks in (2, 4, 8) if setting.kind == "cuda" else ():
        if ranks <= setting.devices:
            for size in (2**13, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26):
                yield replace(setting.case("allreduce"), bytes=size, ranks=ranks)


def _passes(setting: Setting, models: Mapping[str, ModelShape]) -> tuple[list[Case], list[Case]]:
    batches, contexts, widths = [1, 4, 16, 64], [1024, 8192], [1, 2, 3, 4, 5, 6, 8, 12, 16]
    if setting.kind == "cpu":
        batches, contexts, widths = [1, 4, 16], [128, 1024], [1, 2, 3, 4, 6, 8, 16]
    if setting.tiny:
        batches, contexts, widths = [1, 2], [16], [1, 2]
    base: list[Case] = []
    more: list[Case] = []
    for (name, shape), L, B, W in product(models.items(), contexts, batches, widths):
        case = replace(
            setting.case("pass"),
            batch=B,
            width=W,
            context=L,
            layers=shape.layers,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            kv_dtype=setting.dtypes[0],
            model=name,
        )
        few = contexts[0] == L and W in (1, 2, 4, 8) and B * W <= 64
        (base if few else more).append(case)
    if setting.kind == "cuda":  # what launching every kernel by itself costs instead
        base += [replace(c, mode="eager") for c in base if c.batch == 1 and c.width in (1, 4)]
    return base, more


# -- a model's own operators ---------------------------------------------------------------------


def _own_operators(setting: Setting, model: Architecture, shape: ModelShape) -> Iterator[Case]:
    """Yield its matrices, attention and experts at the rows that decoding and verifying take."""
    rows = (1, 4, 8, 16, 32) if setting.kind == "cpu" else (1, 4, 8, 16, 32, 64, 128, 256)
    for linear, m in product(_matrices(model), rows):
        yield replace(setting.case("gemm"), m=m, n=linear.outputs, k=linear.inputs)
    attention = replace(
        setting.case("attention"),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        kv_dtype=setting.dtypes[0],
    )
    for batch, width, context in product((1, 16), (1, 4, 8), (1024, 4096)):
        yield replace(attention, batch=batch, width=width, context=context)
    if shape.experts:
        experts = replace(setting.case("experts"), experts=shape.experts, top_k=shape.top_k)
        for m in rows:
            yield replace(experts, m=m, n=shape.intermediate, k=shape.hidden)


def _matrices(model: Architecture) -> list[Linear]:
    found = {}
    for layer, _ in model.layers:
        for linear in layer.linears(model.hidden_size):
            if linear.copies == 1:
                found[linear.outputs, linear.inputs] = linear
    found[model.lm_head.outputs, model.lm_head.inputs] = model.lm_head
    return list(found.values())
