"""From command-line options to a `Setup`, remembering every default that was taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specmodel import defaults
from specmodel.acceptance import Acceptance, Geometric, MeanLength, PerPosition
from specmodel.architectures import Architecture, load_model
from specmodel.cli.parsing import parse_counts, parse_number, parse_rates, parse_whole
from specmodel.dtypes import ACTIVATION_DTYPES, canonical_dtype
from specmodel.errors import DomainError, real_array, whole_array
from specmodel.hardware import Device, load_device, read_device
from specmodel.report import Setup
from specmodel.roofline import Execution


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
    assumed: dict[str, str] = {}
    device = _device(options)
    if not options["model"]:
        assumed["model"] = defaults.MODEL
    target = _dtypes(load_model(options["model"] or defaults.MODEL), options)
    draft = load_model(options["draft"]) if options["draft"] else None
    kind = options["drafter"]
    if kind is None:
        kind = defaults.default_kind(target, draft)
        assumed["drafter"] = kind
    drafter, taken = defaults.make_drafter(
        kind,
        target,
        draft=draft,
        hit_rate=parse_number(options["hit_rate"], name="hit rate"),
        layer_fraction=parse_number(options["layer_fraction"], name="layer fraction"),
        kv_budget=parse_whole(options["kv_budget"], name="kv budget"),
    )
    assumed |= taken
    k = None if options["k"] == "auto" else parse_whole(options["k"], name="k")
    k_max = parse_whole(options["k_max"], name="k_max")
    for name, value in (("k", k), ("k_max", k_max)):
        if value is not None:
            whole_array(value, name, low=0, high=1000, unit="token")
    acceptance = _acceptance(options, kind, k, assumed)
    tp = parse_whole(options["tp"], name="tp")
    whole_array(1 if tp is None else tp, "tp", low=1)
    reread = parse_number(options["kv_reread"], name="kv_reread")
    overlap = parse_number(options["expert_overlap"], name="expert_overlap")
    execution = Execution(
        level=options["level"],
        tp=tp or 1,
        kv_reread=float(real_array(reread or 0.0, "kv_reread", low=0, high=1)),
        expert_overlap=float(real_array(overlap or 0.0, "expert_overlap", low=0, high=1)),
    )
    setup = Setup(
        device=device,
        target=target,
        drafter=drafter,
        acceptance=acceptance,
        execution=execution,
        batches=parse_counts(options["batch"], name="batch", low=1),
        contexts=parse_counts(options["context"], name="context", low=0),
        k=k,
        k_max=16 if k_max is None else k_max,
    )
    held = drafter.weights(target)
    inputs = {
        "gpu": device.name,
        "model": target.name,
        "drafter": kind,
        "draft": held.name if held is not None else None,
        "acceptance": acceptance.label,
        "hit_rate": drafter.hit_rate,
        "k": "auto" if k is None else k,
        "k_max": setup.k_max,
        "batch": list(setup.batches),
        "context": list(setup.contexts),
        "tp": execution.tp,
        "dtype": target.dtype,
        "weights": target.weight_dtype,
        "kv_dtype": target.kv_dtype,
        "kv_reread": execution.kv_reread,
        "expert_overlap": execution.expert_overlap,
        "level": execution.level,
    }
    return Request(setup=setup, inputs=inputs, assumed=assumed)


def _device(options: dict[str, Any]) -> Device:
    if options["profile"]:
        if options["gpu"]:
            raise DomainError("give --gpu or --profile, not both")
        from pathlib import Path

        return read_device(Path(options["profile"]))
    if not options["gpu"]:
        raise DomainError("give --gpu NAME (see `specmodel list gpus`) or --profile FILE")
    return load_device(options["gpu"])


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


def _acceptance(
    options: dict[str, Any], kind: str, k: int | None, assumed: dict[str, str]
) -> Acceptance:
    given = [
        name
        for name in ("alpha", "acceptance_rates", "acceptance_length")
        if options[name] is not None
    ]
    if len(given) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in given)
        raise DomainError(f"acceptance is given twice: {flags}")
    if options["acceptance_k"] is not None and given != ["acceptance_length"]:
        raise DomainError("--acceptance-k belongs to --acceptance-length")
    if not given:
        typical = defaults.typical_acceptance(kind)
        assumed["acceptance"] = f"{typical.acceptance.label} ({typical.citation})"
        return typical.acceptance
    if given == ["alpha"]:
        return Geometric(float(parse_number(options["alpha"], name="alpha") or 0.0))
    if given == ["acceptance_rates"]:
        return PerPosition(parse_rates(options["acceptance_rates"]))
    measured = parse_whole(options["acceptance_k"], name="acceptance_k")
    measured = k if measured is None else measured
    if measured is None:
        raise DomainError("--acceptance-length needs the k it was measured at: --acceptance-k N")
    length = parse_number(options["acceptance_length"], name="acceptance length")
    return MeanLength(float(length or 0.0), k=measured)
