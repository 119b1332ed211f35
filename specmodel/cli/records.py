"""``list`` and ``show``: the records that ship, and files like them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from specmodel.architectures import Architecture, is_record, load_model, model_names, to_yaml
from specmodel.cli.output import Out, Table, cell, to_csv, to_json
from specmodel.drafters import KINDS
from specmodel.errors import DomainError, UnknownNameError, did_you_mean
from specmodel.hardware import Device, device_names, device_yaml, load_device
from specmodel.overheads import Engine, engine_names, load_engine


def listing_text(what: str, form: str) -> str:
    """Return the devices, models, drafters or engines that ship."""
    rows: list[dict[str, Any]]
    if what == "gpus":
        rows = [_device_row(load_device(name)) for name in device_names()]
    elif what == "models":
        rows = [_model_row(load_model(name)) for name in model_names()]
    elif what == "engines":
        rows = [_engine_row(load_engine(name)) for name in engine_names()]
    else:
        rows = [{"name": kind, "what": text} for kind, text in KINDS.items()]
    if form == "json":
        return to_json(rows)
    if form == "csv":
        return to_csv(rows)
    out = Out()
    heads = _HEADINGS[what]
    table = Table(
        *heads,
        order=_IMPORTANT[what],
        left=[title for title, unit in heads.items() if unit is None],
        fold=_FOLDED[what],
    )
    for row in rows:
        scaled = zip(row.values(), heads.values(), strict=True)
        table.add_row(*(_scaled(value, unit) for value, unit in scaled))
    out.table(table)
    return out.text()


_HEADINGS: dict[str, dict[str, float | None]] = {
    "gpus": {
        "name": None,
        "title": None,
        "bf16 TFLOP/s": 1e12,
        "TB/s": 1e12,
        "GB": 1e9,
        "rho FLOP/B": 1.0,
    },
    "models": {
        "name": None,
        "params (B)": 1e9,
        "active (B)": 1e9,
        "KV elem./token": 1.0,
        "weights GB": 1e9,
        "layers": None,
    },
    "drafters": {"name": None, "what": None},
    "engines": {
        "name": None,
        "title": None,
        "step (ms)": 1e-3,
        "round (ms)": 1e-3,
        "row (us)": 1e-6,
        "head pass (ms)": 1e-3,
        "draft layer (us)": 1e-6,
        "eager layer (us)": 1e-6,
        "captured rows": 1,
        "studies": None,
    },
}
"""Columns of a listing for people and what their values are divided by; None is text."""

_IMPORTANT: dict[str, tuple[str, ...]] = {
    "gpus": ("name", "bf16 TFLOP/s", "TB/s", "GB", "title", "rho FLOP/B"),
    "models": ("name", "params (B)", "active (B)", "KV elem./token", "weights GB", "layers"),
    "drafters": ("name", "what"),
    "engines": ("name", "step (ms)", "round (ms)", "row (us)", "title", "studies"),
}
"""Columns of a listing, the most important first."""
_FOLDED = {"gpus": "title", "models": "layers", "drafters": "what", "engines": "title"}
"""Column of a listing whose texts may take several lines."""


def _scaled(value: Any, unit: float | None) -> str:
    if value is None or unit is None:
        return cell(value)
    return f"{value:,.0f}" if isinstance(value, int) and unit == 1 else f"{value / unit:.4g}"


def _engine_row(engine: Engine) -> dict[str, Any]:
    """Return what an engine takes; None where nobody measured it."""

    def known(name: str) -> float | None:
        return None if name in engine.unknown else getattr(engine, name)

    captured = engine.captured_rows
    return {
        "name": engine.name,
        "title": engine.title,
        "step": known("step"),
        "round": known("round"),
        "round_row": known("round_row"),
        "head_pass": known("head_pass"),
        "draft_layer": known("draft_layer"),
        "eager_layer": known("eager_layer"),
        "captured_rows": int(captured) if np.isfinite(captured) else None,
        "studies": len(engine.studies),
    }


def _device_row(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "title": device.label,
        "bfloat16_flops": device.peak_flops.get("bfloat16"),
        "memory_bandwidth": device.memory_bandwidth,
        "memory_capacity": device.memory_capacity,
        "rho_bfloat16": device.rho("bfloat16") if "bfloat16" in device.peak_flops else None,
    }


def _model_row(model: Architecture) -> dict[str, Any]:
    return {
        "name": model.name,
        "total_params": model.total_params,
        "active_params": model.active_params,
        "kv_elements_per_token": model.kv_elements_per_token,
        "weight_bytes": model.weight_bytes,
        "layers": _layers(model),
    }


def show_text(name: str, form: str) -> str:
    """Return the record of one device or model.

    Raises
    ------
    SpecmodelError
        When the name is unknown or the file is not understood.
    """
    record = _find(name)
    if form == "yaml":
        text = device_yaml(record) if isinstance(record, Device) else to_yaml(record)
        return text.rstrip()
    values = _device_values(record) if isinstance(record, Device) else _model_values(record)
    if form == "json":
        return to_json(values)
    if form == "csv":
        return to_csv([{k: v for k, v in values.items() if not isinstance(v, dict | list)}])
    out = Out()
    out.pairs(_pairs(values), most=_VALUE_WIDTH)
    return out.text()


_VALUE_WIDTH = 100


def _pairs(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", cell(entry)) for inner, entry in value.items())
        else:
            yield key, ", ".join(value) if isinstance(value, list) else cell(value)


def _find(name: str) -> Device | Architecture:
    if not name.strip():
        raise DomainError("a GPU, a model or a file must be named")
    if name.endswith((".yaml", ".yml")):
        return load_model(name) if is_record(name) else load_device(name)
    for load in (load_model, load_device):  # paths first: only models have names that are paths
        try:
            return load(name)
        except UnknownNameError:
            continue
    hint = did_you_mean(name, [*device_names(), *model_names()])
    raise DomainError(f"unknown GPU or model {name!r}{hint}")


def _device_values(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "title": device.label,
        "vendor": device.vendor,
        "family": device.family,
        "status": device.status,
        "aliases": list(device.aliases),
        "peak_flops": dict(device.peak_flops),
        "memory_bandwidth": device.memory_bandwidth,
        "memory_capacity": device.memory_capacity,
        "l2_cache": device.l2_cache,
        "multiprocessors": device.multiprocessors,
        "interconnect_bandwidth": device.interconnect_bandwidth,
        "pcie_bandwidth": device.pcie_bandwidth,
        "board_power": device.board_power,
        "rho": {dtype: device.rho(dtype) for dtype in device.peak_flops},
        "sources": dict(device.sources),
    }


def _model_values(model: Architecture) -> dict[str, Any]:
    return {
        "name": model.name,
        "model_type": model.model_type,
        "total_params": model.total_params,
        "active_params": model.active_params,
        "kv_elements_per_token": model.kv_elements_per_token,
        **_kv_split(model),
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "state_bytes": model.state_bytes,
        "weight_bytes": model.weight_bytes,
        "checkpoint_bytes": model.checkpoint_bytes,
        "n_layers": model.n_layers,
        "layers": model.layers_by_kind(),
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "tied_embeddings": model.tied_embeddings,
        "dtype": model.dtype,
        "weights": model.weight_dtype,
        "kv_dtype": model.kv_dtype,
        "mtp_layers": model.mtp_layers,
        "notes": list(model.notes),
        "source": model.source,
    }


def _kv_split(model: Architecture) -> dict[str, Any]:
    """Return the cached elements of layers without and with a window, and the window."""
    split = model.kv_elements_by_window()
    windows = [window for window in split if window is not None]
    return {
        "kv_elements_per_token_full": split.get(None, 0),
        "kv_elements_per_token_windowed": sum(split[window] for window in windows),
        "window": windows[0] if len(windows) == 1 else windows or None,
    }


def _layers(model: Architecture) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in model.layers_by_kind().items())
