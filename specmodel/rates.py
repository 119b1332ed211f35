"""A device known only by its measurements: rates estimated from a table, or given by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date

import numpy as np

from specmodel.errors import FitError
from specmodel.forms import traffic
from specmodel.hardware import Device
from specmodel.tables import Table, features

_TOP = 0.99  # quantile of what rows reach, taken as the rate: one row may be a mistake
_OPERATORS = ("stream", "gemm", "attention", "mla", "experts", "elementwise")


def device_of_table(table: Table, name: str, stated: Mapping[str, float]) -> Device:
    """Return the record of a device without a datasheet.

    From its own measurements where a calibration run made the table, or else the best rates
    that the table reaches, or those stated.

    Parameters
    ----------
    table : Table
    name : str
        As people write it.
    stated : mapping of str to float
        Any of bandwidth [B/s], flops [FLOP/s], link_bandwidth [B/s], memory [B].

    Raises
    ------
    FitError
        When a rate is neither stated nor in the table.
    """
    if "memory_capacity" in table.record and not stated:
        return _measured_device(table, name)
    return _estimated_device(table, name, stated)


def _measured_device(table: Table, name: str) -> Device:
    """Return a record from the fastest copy and the fastest matrix product in each format."""
    copies, products = table.of("stream"), table.of("gemm")
    if not len(copies) or not len(products):
        raise FitError(f"{name}: the table has no copy or no matrix product to take rates from")
    bandwidth = float(np.max(copies.numbers["bytes"] / copies.numbers["seconds"]))
    c = products.numbers
    work = 2.0 * c["m"] * c["n"] * c["k"] / c["seconds"]
    formats = {
        str(x): float(work[products.texts["dtype"] == x].max())
        for x in np.unique(products.texts["dtype"])
    }
    record, machine = table.record, table.record.get("device", {})
    try:
        capacity, cache = float(record["memory_capacity"]), float(record["cache"])
        units = int(machine.get("multiprocessors") or record["threads"])
    except (KeyError, TypeError, ValueError) as error:
        raise FitError(f"{name}: the sidecar lacks a number: {error}") from None
    by = (
        f"(measured by specmodel calibrate with torch {record.get('torch')}, "
        f"{table.source['table']}, read {str(record.get('date'))[:10]})"
    )
    return Device(
        name=_name(name),
        title=f"{name} (measured)",
        vendor="unknown",
        family=str(machine.get("kind", "unknown")),
        peak_flops=formats,
        memory_bandwidth=bandwidth,
        memory_capacity=capacity,
        l2_cache=cache,
        multiprocessors=units,
        sources={
            **{f"peak_flops.{x}": f"{r / 1e12:.4g} TFLOP/s {by}" for x, r in formats.items()},
            "memory_bandwidth": f"{bandwidth / 1e9:.4g} GB/s {by}",
            "memory_capacity": f"{capacity / 1e9:.4g} GB {by}",
            "l2_cache": f"{cache:g} B {by}",
            "multiprocessors": f"{units} {by}",
        },
    )


def _name(title: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", title.lower()).strip("-")


def _estimated_device(table: Table, name: str, stated: Mapping[str, float]) -> Device:
    """Return a record whose rates are the best that a table reaches, or those stated."""
    found = {"bandwidth": [0.0], "flops": [0.0]}
    formats = set()
    for operator in _OPERATORS:
        rows = table.of(operator)
        if not len(rows):
            continue
        formats |= {str(dtype) for dtype in rows.texts["dtype"] if dtype}
        moved, flops = traffic(operator, features(rows, operator))
        seconds = rows.numbers["seconds"]
        found["bandwidth"].append(float(np.quantile(moved / seconds, _TOP)))
        found["flops"].append(float(np.quantile(flops / seconds, _TOP)))
    rates = {key: max(values) for key, values in found.items()} | dict(stated)
    for key, flag in (("bandwidth", "--bandwidth"), ("flops", "--flops")):
        if rates[key] <= 0:
            raise FitError(f"{name}: no row tells its {key}: give {flag}")
    if "memory" not in stated:
        raise FitError(f"{name} has no record: give its memory with --memory GB")
    today = date.today()
    file = str(table.source.get("table", "table"))

    def cite(key: str) -> str:
        how = "given by hand" if key in stated else "best of the table"
        return f"{rates[key]:.4g} {how} (measurement table, {file}, read {today})"

    return Device(
        name=_name(name),
        title=name,
        vendor="unknown",
        family="unknown",
        peak_flops=dict.fromkeys(sorted(formats), rates["flops"]),
        memory_bandwidth=rates["bandwidth"],
        memory_capacity=rates["memory"],
        interconnect_bandwidth=rates.get("link_bandwidth"),
        sources={
            **{f"peak_flops.{dtype}": cite("flops") for dtype in formats},
            "memory_bandwidth": cite("bandwidth"),
            "memory_capacity": cite("memory"),
            **(
                {"interconnect_bandwidth": cite("link_bandwidth")}
                if "link_bandwidth" in rates
                else {}
            ),
        },
    )
