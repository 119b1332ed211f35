"""What a calibration found: the fitted numbers of each operator, and their block in a device file.

The block ``calibration:`` stands beside the datasheet and never changes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specmodel.errors import DomainError, brief
from specmodel.fields import Fields, is_number
from specmodel.forms import Features, Floats, Form, Rates, form_named

SCHEMA = 1
UNTOLD = ("not identified", "this table tells it only")
"""How reasons begin why a parameter was pinned that the table does not tell."""

OPERATORS = ("gemm", "attention", "mla", "experts", "elementwise", "launch", "allreduce")
"""Kinds of operators a calibration may hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How far predictions are from measurements, as ``|predicted / measured - 1|``.

    Attributes
    ----------
    n : int
        Rows.
    mean, median, p90 : float
        [-]
    """

    n: int
    mean: float
    median: float
    p90: float

    @classmethod
    def of(cls, log_ratio: Floats) -> Errors:
        """Return the errors of logarithms of predicted over measured."""
        off = np.abs(np.expm1(log_ratio))
        mean, median, p90 = np.mean(off), np.median(off), np.quantile(off, 0.9)
        return cls(
            n=off.size,
            mean=rounded(float(mean)),
            median=rounded(float(median)),
            p90=rounded(float(p90)),
        )

    def record(self) -> dict[str, Any]:
        """Return plain numbers for a file."""
        return {"n": self.n, **{key: getattr(self, key) for key in _FRACTIONS}}


_FRACTIONS = ("mean", "median", "p90")


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedOperator:
    """The numbers of one operator in one number format.

    Attributes
    ----------
    form : str
        Name of the form (`specmodel.forms.FORMS`).
    n : int
        Rows fitted.
    values : mapping of str to float
        Every parameter of the form.
    errors : mapping of str to float
        Standard error of each fitted parameter, in its unit.
    pinned : mapping of str to str
        Why each other parameter was not fitted.
    names : tuple of str
        Fitted parameters, in the order of `covariance`.
    covariance : tuple of tuple of float
        Of the logarithms of the fitted parameters. [-]
    residual : float
        Standard deviation of the logarithm of measured over predicted, robust. [-]
    shared : float
        Share of that variance that is the same for all rows of one shape. [-]
    in_sample, held_out : Errors
        On the fitted rows; on shapes left out whole. `held_out` is None where there were too few.
    ranges : mapping of str to (float, float)
        Least and largest value of each feature in the fitted rows.
    """

    form: str
    n: int
    values: Mapping[str, float]
    errors: Mapping[str, float]
    pinned: Mapping[str, str]
    names: tuple[str, ...]
    covariance: tuple[tuple[float, ...], ...]
    residual: float
    in_sample: Errors
    held_out: Errors | None = None
    shared: float = 0.0
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def seconds(self, features: Features, rates: Rates) -> Floats:
        """Return predicted times. [s]"""
        return np.asarray(form_named(self.form).seconds(features, rates, self.values))

    def log_gradient(self, features: Features, rates: Rates) -> Floats:
        """Return d log T / d log parameter; the last axis runs over `names`. [-]"""
        return log_gradient(form_named(self.form), features, rates, self.values, self.names)

    def log_error(self, features: Features, rates: Rates) -> Floats:
        """Return the standard error of log T that the parameters' uncertainty gives. [-]"""
        if not self.names:
            return np.zeros(self.seconds(features, rates).shape)
        gradient = self.log_gradient(features, rates)
        variance = np.einsum("...i,ij,...j->...", gradient, np.asarray(self.covariance), gradient)
        return np.asarray(np.sqrt(np.maximum(variance, 0.0)))

    def unknown(self) -> dict[str, float]:
        """Return what pinned parameters might be as well, one prior's width away.

        Those that the table does not tell; constants and what was set for a reason are not
        among them.
        """
        found: dict[str, float] = {}
        for parameter in form_named(self.form).parameters:
            if not self.pinned.get(parameter.name, "").startswith(UNTOLD):
                continue
            value = self.values[parameter.name]
            found[parameter.name] = value * np.exp(parameter.prior) if value else parameter.start
        return found

    def record(self) -> dict[str, Any]:
        """Return plain values for a file; `fitted_operator` reads them back."""
        units = {p.name: p.unit for p in form_named(self.form).parameters}
        parameters: dict[str, Any] = {}
        for name, value in self.values.items():
            entry: dict[str, Any] = {"value": value, "unit": units[name]}
            if name in self.errors:
                entry["error"] = self.errors[name]
            else:
                entry["pinned"] = self.pinned[name]
            parameters[name] = entry
        return {
            "form": self.form,
            "n": self.n,
            "parameters": parameters,
            "covariance": {
                "names": list(self.names),
                "log": [list(row) for row in self.covariance],
            },
            "residual": self.residual,
            "shared": self.shared,
            "in_sample": self.in_sample.record(),
            **({"held_out": self.held_out.record()} if self.held_out else {}),
            **({"ranges": {k: list(v) for k, v in self.ranges.items()}} if self.ranges else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """How whole passes depart from the sum of their operators; it widens intervals only.

    Attributes
    ----------
    n : int
        Passes measured.
    bias : float
        Median of the logarithm of measured over predicted. [-]
    residual : float
        Standard deviation of that logarithm about 0, robust. [-]
    shared : float
        Share of that variance that a decode step and a wide pass have in common.
    """

    n: int
    bias: float
    residual: float
    shared: float

    def record(self) -> dict[str, Any]:
        """Return plain values for a file."""
        return {key: getattr(self, key) for key in ("n", "bias", "residual", "shared")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Everything measured on one device with one engine.

    Attributes
    ----------
    operators : mapping of str to mapping of str to FittedOperator
        By kind of operator, then by number format (attention: that of the KV cache; launch: by
        execution mode).
    uncalibrated : tuple of str
        Kinds that nobody measured: they keep their generic numbers.
    passes : Departure or None
        Of whole passes, where they were measured.
    source : mapping of str to str
        Table, checksum, engine, date, command, licence.
    notes : tuple of str
    """

    operators: Mapping[str, Mapping[str, FittedOperator]]
    uncalibrated: tuple[str, ...] = ()
    passes: Departure | None = None
    source: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """Return plain values for a file; `calibration` reads them back."""
        return {
            "schema": SCHEMA,
            "source": dict(self.source),
            "operators": {
                kind: {dtype: fit.record() for dtype, fit in by_dtype.items()}
                for kind, by_dtype in self.operators.items()
            },
            "uncalibrated": list(self.uncalibrated),
            **({"passes": self.passes.record()} if self.passes else {}),
            "notes": list(self.notes),
        }


def rounded(value: float) -> float:
    """Return a number with 6 significant digits, enough for a file people read."""
    return float(f"{value:.6g}")


def log_gradient(
    form: Form,
    features: Features,
    rates: Rates,
    values: Mapping[str, float],
    names: tuple[str, ...],
) -> Floats:
    """Return d log T / d log parameter by central differences; the last axis runs over names."""
    step, columns = 1e-4, []
    for name in names:
        high, low = (
            np.log(form.seconds(features, rates, {**values, name: values[name] * factor}))
            for factor in (np.exp(step), np.exp(-step))
        )
        columns.append((high - low) / (2 * step))
    return np.stack(columns, axis=-1)


# -- reading -------------------------------------------------------------------------------------


def calibration(keys: Fields) -> Calibration:
    """Return the calibration in a device file's block.

    Raises
    ------
    ProfileError
        As ``path: key``, when the block is not as `Calibration.record` writes it.
    """
    keys.refuse_unknown(("schema", "source", "operators", "uncalibrated", "passes", "notes"))
    keys.version(SCHEMA)
    blocks = keys.mapping("operators")
    blocks.refuse_unknown(OPERATORS)
    operators: dict[str, dict[str, FittedOperator]] = {}
    for kind in blocks.values:
        by_dtype = blocks.mapping(kind)
        if not by_dtype.values:
            raise blocks.error(kind, "must be a mapping by dtype; got {}")
        operators[kind] = {
            dtype: _fitted(by_dtype.mapping(dtype), kind) for dtype in by_dtype.values
        }
    source = keys.mapping("source", {})
    return Calibration(
        operators=operators,
        uncalibrated=keys.text_list("uncalibrated"),
        passes=_departure(keys.mapping("passes")) if "passes" in keys.values else None,
        source={key: str(value) for key, value in source.values.items()},
        notes=keys.text_list("notes"),
    )


def _departure(keys: Fields) -> Departure:
    keys.refuse_unknown(("n", "bias", "residual", "shared"))
    return Departure(
        n=keys.whole("n", high=_MOST),
        bias=keys.number("bias"),
        residual=keys.number("residual", low=0.0),
        shared=keys.number("shared", low=0.0, high=1.0),
    )


def _fitted(keys: Fields, kind: str) -> FittedOperator:
    """Return one operator's fit from its block."""
    keys.refuse_unknown(_FITTED)
    for key in _FITTED[:-2]:
        keys.raw(key)
    try:
        form = form_named(keys.text("form"))
    except DomainError as error:
        raise keys.error("form", str(error)) from None
    if form.operator != kind:
        raise keys.error("form", f"{form.name} is of {form.operator}")
    values, errors, pinned = _parameters(form, keys.mapping("parameters"))
    names, matrix = _covariance(keys.mapping("covariance"))
    if set(names) != set(errors):
        raise keys.error("covariance", "names: must be those of the fitted parameters")
    ranges = keys.mapping("ranges", {})
    return FittedOperator(
        form=form.name,
        n=keys.whole("n", high=_MOST),
        values=values,
        errors=errors,
        pinned=pinned,
        names=names,
        covariance=matrix,
        residual=keys.number("residual", low=0.0),
        shared=keys.number("shared", low=0.0),
        in_sample=_errors(keys.mapping("in_sample")),
        held_out=_errors(keys.mapping("held_out")) if "held_out" in keys.values else None,
        ranges={key: _pair(ranges, key) for key in ranges.values},
    )


_FITTED = (
    "form", "n", "parameters", "covariance", "residual", "shared", "in_sample", "held_out",
    "ranges",
)  # fmt: skip
"""Keys of a fit; the last two may be absent."""

_MOST = 10**12  # rows or passes


def _parameters(
    form: Form, keys: Fields
) -> tuple[dict[str, float], dict[str, float], dict[str, str]]:
    keys.refuse_unknown(form.names)
    values: dict[str, float] = {}
    errors: dict[str, float] = {}
    pinned: dict[str, str] = {}
    for parameter in form.parameters:
        name = parameter.name
        entry = keys.mapping(name)
        entry.refuse_unknown(("value", "unit", "error", "pinned"))
        if (unit := entry.raw("unit", parameter.unit)) != parameter.unit:
            raise entry.error("unit", f"must be {parameter.unit}; got {brief(unit)}")
        values[name] = entry.number("value", low=0.0)
        if ("error" in entry.values) == ("pinned" in entry.values):
            raise keys.error(name, "must have either an error or the reason it is pinned")
        if "error" in entry.values:
            if values[name] == 0:
                raise entry.error("value", "a fitted parameter must be > 0; got 0")
            errors[name] = entry.number("error", low=0.0)
        else:
            pinned[name] = str(entry.raw("pinned"))
    return values, errors, pinned


def _covariance(keys: Fields) -> tuple[tuple[str, ...], tuple[tuple[float, ...], ...]]:
    keys.refuse_unknown(("names", "log"))
    names, rows = keys.text_list("names"), keys.raw("log")
    if not isinstance(rows, list) or len(rows) != len(names):
        raise keys.error("log", "must be a square matrix over names")
    for row in rows:
        if not isinstance(row, list) or len(row) != len(names):
            raise keys.error("log", "must be a square matrix over names")
        for value in row:
            if not is_number(value):
                raise keys.error("log", f"must be a number; got {brief(value)}")
    if names:
        c = np.asarray(rows, dtype=np.float64)
        slack = 1e-4 * np.abs(c).max()
        if not np.allclose(c, c.T, atol=slack) or np.linalg.eigvalsh(c).min() < -slack:
            raise keys.error("log", "must be symmetric and positive semidefinite")
    return names, tuple(tuple(map(float, row)) for row in rows)


def _errors(keys: Fields) -> Errors:
    keys.refuse_unknown(("n", *_FRACTIONS))
    fractions = {key: keys.number(key, low=0.0) for key in _FRACTIONS}
    return Errors(n=keys.whole("n", high=_MOST), **fractions)


def _pair(keys: Fields, key: str) -> tuple[float, float]:
    values = keys.number_list(key)
    if len(values) != 2:
        raise keys.error(key, f"must be two numbers; got {brief(keys.raw(key))}")
    return values[0], values[1]
