"""From command-line options to a `Setup`, remembering every default that was taken."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specmodel import defaults
from specmodel.acceptance import Acceptance, Geometric, MeanLength, PerPosition
from specmodel.acceptance_files import Measured, read_measured
from specmodel.architectures import NO_DTYPE, Architecture, load_model, normalise
from specmodel.cli.parsing import (
    optional,
    parse_counts,
    parse_link,
    parse_number,
    parse_rates,
    parse_whole,
)
from specmodel.drafters import Drafter, DraftModel, Parallel
from specmodel.dtypes import ACTIVATION_DTYPES, canonical_dtype
from specmodel.errors import DomainError, whole_array
from specmodel.hardware import Device, load_device, read_device
from specmodel.overheads import load_engine
from specmodel.report import Setup
from specmodel.roofline import Execution
from specmodel.speculation import drafter_execution

ACCEPTANCE_OPTIONS = ("alpha", "acceptance", "acceptance_rates", "acceptance_length")
"""Ways to state acceptance; at most one of them is given."""

MOST_DRAFTS = 1000
_MOST_POINTS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A setup, what to echo of it, and which of that was assumed (with its citation)."""

    setup: Setup
    inputs: dict[str, Any]
    assumed: dict[str, str]


def build(options: dict[str, Any]) -> Request:
    """Turn the options of ``predict`` (as text) into a `Request`.

    Raises
    ------
    SpecmodelError
        When an option is out of range, contradicts another, or names something unknown.
    """
    for name, text in options.items():
        if isinstance(text, str) and not text.strip():
            raise DomainError(f"--{name.replace('_', '-')} must not be empty")
    assumed: dict[str, str] = {}
    device = _device(options)
    if options["model"] is None:
        assumed["model"] = defaults.MODEL
    model = load_model(options["model"] or defaults.MODEL)
    if notes := [n for n in model.notes if not (n == NO_DTYPE and options["dtype"])]:
        assumed["architecture"] = f"{model.name}: {'; '.join(notes)}"
    if options["model"] and _is_other(options["model"], model.name):
        assumed["model"] = f"{options['model']} has the layers of {model.name}: its record is used"
    target = _dtypes(model, options)
    if target.head_kind is not None:
        raise DomainError(f"{target.name} is a draft head: give it with --draft")
    draft = load_model(options["draft"]) if options["draft"] else None
    kind = options["drafter"]
    if kind is None:
        kind = defaults.default_kind(target, draft)
        assumed["drafter"] = kind
    measured = read_measured(options["acceptance"]) if options["acceptance"] else None
    drafter, taken = defaults.make_drafter(
        kind,
        target,
        draft=draft,
        workload=options["workload"],
        hit_rate=_hit_rate(options, kind, measured),
        layer_fraction=optional(parse_number, options["layer_fraction"], name="layer fraction"),
        kv_budget=optional(parse_whole, options["kv_budget"], name="kv budget"),
    )
    assumed |= taken
    drafter = same_formats(drafter, options)
    if options["draft_tp"] is not None:
        drafter = replace(drafter, tp=parse_whole(options["draft_tp"], name="draft_tp"))
    drafter = _placed(drafter, options)
    k = None if options["k"] == "auto" else parse_whole(options["k"], name="k")
    k_max = parse_whole(options["k_max"], name="k_max")
    for name, value in (("k", k), ("k_max", k_max)):
        if value is not None:
            whole_array(value, name, low=0, high=MOST_DRAFTS, unit="token")
    acceptance = _acceptance(options, kind, k, measured, assumed)
    engine = load_engine(options["engine"]) if options["engine"] else None
    if engine is not None and _is_other(options["engine"], engine.name):
        assumed["engine"] = f"{options['engine']} means {engine.name}, {engine.title}"
    reread = optional(parse_number, options["kv_reread"], name="kv_reread")
    if reread is None:
        reread = 0.0 if engine is None else engine.kv_reread
    execution = Execution(
        level=options["level"],
        tp=parse_whole(options["tp"], name="tp"),
        dp=parse_whole(options["dp"], name="dp"),
        pp=parse_whole(options["pp"], name="pp"),
        devices_per_node=parse_whole(options["devices_per_node"], name="devices_per_node"),
        ep=options["ep"],
        network=optional(parse_link, options["network"], name="network"),
        kv_reread=reread,
        expert_overlap=parse_number(options["expert_overlap"], name="expert_overlap"),
        offload=parse_number(options["offload"], name="offload"),
        calibrated=options["basis"] == "calibrated",
        engine=engine,
    )
    price = optional(parse_number, options["price"], name="price")
    draft_price = optional(parse_number, options["draft_price"], name="draft_price")
    if draft_price is not None and (price is None or drafter.device is None):
        raise DomainError("--draft-price needs --price and --draft-gpu")
    batches, contexts = _grid(options)
    setup = Setup(
        device=device,
        target=target,
        drafter=drafter,
        acceptance=acceptance,
        execution=execution,
        batches=batches,
        contexts=contexts,
        k=k,
        k_max=k_max,
        price=price,
        draft_price=draft_price,
    )
    held = drafter.weights(target)
    inputs = {
        "gpu": device.name,
        "model": target.name,
        "drafter": kind,
        "draft": held.name if held is not None else None,
        "workload": options["workload"],
        "acceptance": acceptance.label,
        "hit_rate": drafter.hit_rate,
        "k": "auto" if k is None else k,
        "k_max": setup.k_max,
        "batch": list(setup.batches),
        "context": list(setup.contexts),
        "tp": execution.tp,
        "dp": execution.dp,
        "pp": execution.pp,
        "ep": execution.ep,
        "devices": execution.layout.devices,
        "network": options["network"],
        "devices_per_node": execution.devices_per_node,
        "draft_tp": drafter_execution(execution, drafter).tp,
        "dtype": target.dtype,
        "weights": target.weight_dtype,
        "kv_dtype": target.kv_dtype,
        "kv_reread": execution.kv_reread,
        "expert_overlap": execution.expert_overlap,
        "level": execution.level,
        "engine": execution.engine.name if execution.engine else None,
        "offload": execution.offload,
        "draft_gpu": drafter.device.name if drafter.device else None,
        "price": price,
        "draft_price": draft_price,
        "basis": options["basis"],
    }
    return Request(setup=setup, inputs=inputs, assumed=assumed)


def _is_other(text: str, name: str) -> bool:
    """Return whether a name (not a file) is that of another record than its own."""
    if Path(text).exists() or text.endswith((".yaml", ".yml", ".json")):
        return False
    return normalise(text) != name


def _grid(options: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    batches = parse_counts(options["batch"], name="batch", low=1)
    contexts = parse_counts(options["context"], name="context", low=0)
    points = len(batches) * len(contexts)
    if points > _MOST_POINTS:
        raise DomainError(
            f"at most {_MOST_POINTS:,} points (batches x contexts); got {points:,}: "
            "a notebook takes more (specmodel.speculate)"
        )
    return batches, contexts


def _device(options: dict[str, Any]) -> Device:
    if options["profile"]:
        if options["gpu"]:
            raise DomainError("give --gpu or --profile, not both")
        return read_device(Path(options["profile"]))
    if not options["gpu"]:
        raise DomainError("give --gpu NAME (see `specmodel list gpus`) or --profile FILE")
    return load_device(options["gpu"])


def same_formats(drafter: Drafter, options: dict[str, Any]) -> Drafter:
    """Run a draft model in the activation and KV formats asked for, its weights as they are."""
    if not isinstance(drafter, DraftModel | Parallel):
        return drafter
    formats = {**options, "weights": None}
    return replace(drafter, architecture=_dtypes(drafter.architecture, formats))


def _placed(drafter: Drafter, options: dict[str, Any]) -> Drafter:
    """Put the drafter on a device of its own where one was named."""
    if options["draft_gpu"] is None:
        for name in ("link", "overlap"):
            if options[name]:
                raise DomainError(f"--{name} belongs to --draft-gpu")
        return drafter
    if options["link"] is None:
        raise DomainError("--draft-gpu needs --link LATENCY_US,BANDWIDTH_GB_PER_S")
    return replace(
        drafter,
        device=load_device(options["draft_gpu"]),
        link=parse_link(options["link"], name="link"),
        overlapped=options["overlap"],
    )


def _dtypes(target: Architecture, options: dict[str, Any]) -> Architecture:
    dtype = options["dtype"] and canonical_dtype(options["dtype"])
    if dtype and dtype not in ACTIVATION_DTYPES:
        raise DomainError(
            f"dtype must be one of {', '.join(ACTIVATION_DTYPES)} (--weights quantises); "
            f"got {dtype}"
        )
    return target.with_dtypes(
        dtype=dtype,
        weights=options["weights"] and canonical_dtype(options["weights"], what="weights"),
        kv=options["kv_dtype"] and canonical_dtype(options["kv_dtype"], what="kv_dtype"),
    )


def _hit_rate(options: dict[str, Any], kind: str, measured: Measured | None) -> float | None:
    """Return the share given, or what was measured beside the acceptance."""
    if options["hit_rate"] is None and measured is not None and kind == "ngram":
        return measured.hit_rate
    return optional(parse_number, options["hit_rate"], name="hit rate")


def _acceptance(
    options: dict[str, Any],
    kind: str,
    k: int | None,
    measured: Measured | None,
    assumed: dict[str, str],
) -> Acceptance:
    given = [name for name in ACCEPTANCE_OPTIONS if options[name] is not None]
    if len(given) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in given)
        raise DomainError(f"acceptance is given twice: {flags}")
    if options["acceptance_k"] is not None and given != ["acceptance_length"]:
        raise DomainError("--acceptance-k belongs to --acceptance-length")
    workload = options["workload"]
    if given and workload is not None:
        raise DomainError("--workload selects published acceptance; yours is given as well")
    if not given:
        typical = defaults.typical_acceptance(kind, workload)
        other = workload and not typical.of_workload
        note = f"; {defaults.workload_missing(workload)}" if other else ""
        assumed["acceptance"] = f"{typical.acceptance.label} ({typical.citation}{note})"
        return typical.acceptance
    if given == ["alpha"]:
        return Geometric(parse_number(options["alpha"], name="alpha"))
    if measured is not None:
        assumed["acceptance"] = (
            f"{options['acceptance']}: temperature {measured.temperature:g}, batch "
            f"{measured.batch}, k {measured.k}"
        )
        share = 1.0 if kind == "ngram" else measured.hit_rate  # the drafter's own for n-gram
        return PerPosition([rate * share for rate in measured.acceptance.values])
    if given == ["acceptance_rates"]:
        return PerPosition(parse_rates(options["acceptance_rates"]))
    measured_k = (
        k
        if options["acceptance_k"] is None
        else parse_whole(options["acceptance_k"], name="acceptance_k")
    )
    if measured_k is None:
        raise DomainError("--acceptance-length needs the k it was measured at: --acceptance-k N")
    return MeanLength(
        parse_number(options["acceptance_length"], name="acceptance length"), k=measured_k
    )
