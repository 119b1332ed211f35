"""What a calibration found: the fitted numbers of each operator, and their block in a device file.

The block ``calibration:`` stands beside the datasheet and never changes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specmodel.errors import DomainError, ProfileError, brief, did_you_mean
from specmodel.fields import is_number
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


def calibration(record: Any, where: str) -> Calibration:
    """Return the calibration in a device file's block.

    Raises
    ------
    ProfileError
        As ``where: key``, when the block is not as `Calibration.record` writes it.
    """
    keys = {"schema", "source", "operators", "uncalibrated", "passes", "notes"}
    _check_keys(record, keys, where, required={"schema", "operators"})
    if record["schema"] != SCHEMA or isinstance(record["schema"], bool):
        raise ProfileError(f"{where}: schema: must be {SCHEMA}; got {brief(record['schema'])}")
    operators: dict[str, dict[str, FittedOperator]] = {}
    _check_keys(record["operators"], set(OPERATORS), f"{where}: operators")
    for kind, by_dtype in record["operators"].items():
        at = f"{where}: operators: {kind}"
        if not isinstance(by_dtype, dict) or not by_dtype:
            raise ProfileError(f"{at}: must be a mapping by dtype; got {brief(by_dtype)}")
        operators[kind] = {
            dtype: fitted_operator(fit, f"{at}: {dtype}", kind) for dtype, fit in by_dtype.items()
        }
    source = record.get("source", {})
    if not isinstance(source, dict):
        raise ProfileError(f"{where}: source: must be a mapping; got {brief(source)}")
    return Calibration(
        operators=operators,
        uncalibrated=_texts(record, "uncalibrated", where),
        passes=_departure(record["passes"], f"{where}: passes") if "passes" in record else None,
        source={key: str(value) for key, value in source.items()},
        notes=_texts(record, "notes", where),
    )


def _departure(record: Any, where: str) -> Departure:
    keys = {"n", "bias", "residual", "shared"}
    _check_keys(record, keys, where, required=keys)
    shared = _number(record["shared"], f"{where}: shared", low=0.0)
    if shared > 1:
        raise ProfileError(f"{where}: shared: must be at most 1; got {shared:g}")
    return Departure(
        n=_count(record["n"], f"{where}: n"),
        bias=_number(record["bias"], f"{where}: bias"),
        residual=_number(record["residual"], f"{where}: residual", low=0.0),
        shared=shared,
    )


def fitted_operator(record: Any, where: str, kind: str) -> FittedOperator:
    """Return one operator's fit from its block.

    Raises
    ------
    ProfileError
        As ``where: key``.
    """
    required = {"form", "n", "parameters", "covariance", "residual", "shared", "in_sample"}
    _check_keys(record, required | {"held_out", "ranges"}, where, required=required)
    try:
        form = form_named(record["form"])
    except (DomainError, TypeError) as error:
        raise ProfileError(f"{where}: form: {error}") from None
    if form.operator != kind:
        raise ProfileError(f"{where}: form: {form.name} is of {form.operator}")
    values, errors, pinned = _parameters(form, record["parameters"], f"{where}: parameters")
    names, matrix = _covariance(record["covariance"], f"{where}: covariance")
    if set(names) != set(errors):
        raise ProfileError(f"{where}: covariance: names: must be those of the fitted parameters")
    ranges = record.get("ranges", {})
    _check_keys(ranges, set(ranges) if isinstance(ranges, dict) else set(), f"{where}: ranges")
    held = record.get("held_out")
    return FittedOperator(
        form=form.name,
        n=_count(record["n"], f"{where}: n"),
        values=values,
        errors=errors,
        pinned=pinned,
        names=names,
        covariance=matrix,
        residual=_number(record["residual"], f"{where}: residual", low=0.0),
        shared=_number(record["shared"], f"{where}: shared", low=0.0),
        in_sample=_errors(record["in_sample"], f"{where}: in_sample"),
        held_out=None if held is None else _errors(held, f"{where}: held_out"),
        ranges={key: _pair(pair, f"{where}: ranges: {key}") for key, pair in ranges.items()},
    )


def _parameters(
    form: Form, record: Any, where: str
) -> tuple[dict[str, float], dict[str, float], dict[str, str]]:
    _check_keys(record, set(form.names), where, required=set(form.names))
    values: dict[str, float] = {}
    errors: dict[str, float] = {}
    pinned: dict[str, str] = {}
    for parameter in form.parameters:
        name, at = parameter.name, f"{where}: {parameter.name}"
        entry = record[name]
        _check_keys(entry, {"value", "unit", "error", "pinned"}, at, required={"value"})
        if entry.get("unit", parameter.unit) != parameter.unit:
            raise ProfileError(f"{at}: unit: must be {parameter.unit}; got {brief(entry['unit'])}")
        values[name] = _number(entry["value"], f"{at}: value", low=0.0)
        if ("error" in entry) == ("pinned" in entry):
            raise ProfileError(f"{at}: must have either an error or the reason it is pinned")
        if "error" in entry:
            if values[name] == 0:
                raise ProfileError(f"{at}: value: a fitted parameter must be > 0; got 0")
            errors[name] = _number(entry["error"], f"{at}: error", low=0.0)
        else:
            pinned[name] = str(entry["pinned"])
    return values, errors, pinned


def _covariance(record: Any, where: str) -> tuple[tuple[str, ...], tuple[tuple[float, ...], ...]]:
    _check_keys(record, {"names", "log"}, where, required={"names", "log"})
    names, rows = record["names"], record["log"]
    if not isinstance(names, list) or not isinstance(rows, list) or len(rows) != len(names):
        raise ProfileError(f"{where}: log: must be a square matrix over names")
    matrix = []
    for row in rows:
        if not isinstance(row, list) or len(row) != len(names):
            raise ProfileError(f"{where}: log: must be a square matrix over names")
        matrix.append(tuple(_number(x, f"{where}: log") for x in row))
    if names:
        c = np.asarray(matrix)
        slack = 1e-4 * np.abs(c).max()
        if not np.allclose(c, c.T, atol=slack) or np.linalg.eigvalsh(c).min() < -slack:
            raise ProfileError(f"{where}: log: must be symmetric and positive semidefinite")
    return tuple(str(name) for name in names), tuple(matrix)


def _errors(record: Any, where: str) -> Errors:
    keys = {"n", *_FRACTIONS}
    _check_keys(record, keys, where, required=keys)
    fractions = {key: _number(record[key], f"{where}: {key}", low=0.0) for key in _FRACTIONS}
    return Errors(n=_count(record["n"], f"{where}: n"), **fractions)


def _pair(value: Any, where: str) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ProfileError(f"{where}: must be two numbers; got {brief(value)}")
    return _number(value[0], where), _number(value[1], where)


def _texts(record: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = record.get(key, [])
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ProfileError(f"{where}: {key}: must be a list of text; got {brief(value)}")
    return tuple(value)


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ProfileError(f"{where}: must be a whole number >= 1; got {brief(value)}")
    return value


def _number(value: Any, where: str, *, low: float = -np.inf) -> float:
    if not is_number(value):
        raise ProfileError(f"{where}: must be a number (as in 1.0e-06); got {brief(value)}")
    if value < low:
        raise ProfileError(f"{where}: must be >= {low:g}; got {value:g}")
    return float(value)


def _check_keys(
    mapping: Any, known: set[str], where: str, *, required: set[str] | None = None
) -> None:
    if not isinstance(mapping, dict):
        raise ProfileError(f"{where}: must be a mapping; got {brief(mapping)}")
    for key in mapping:
        if key not in known:
            raise ProfileError(
                f"{where}: {brief(key)[1:-1]}: unknown key{did_you_mean(key, known)}"
            )
    for key in sorted(required or ()):
        if key not in mapping:
            raise ProfileError(f"{where}: {key}: missing")
