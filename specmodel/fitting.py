"""Measurement table -> calibrated numbers: robust least squares on the logarithm of time.

Parameters are fitted as logarithms with weak priors; what the table cannot tell is pinned and
said so. Errors are those of whole shapes left out of the fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from specmodel._version import __version__
from specmodel.calibration import (
    OPERATORS,
    Calibration,
    Errors,
    FittedOperator,
    log_gradient,
    rounded,
)
from specmodel.errors import FitError
from specmodel.forms import (
    FORMS,
    GEMM_COLUMNS,
    Features,
    Floats,
    Form,
    Parameter,
    Rates,
    form_for,
    soft_roofline,
)
from specmodel.hardware import Device
from specmodel.tables import ANCHOR, Table, features, groups, noted, plain_format

FOLDS = 10
"""Parts that shapes are divided into for held-out errors; up to `FEW` are left out one by one."""

FEW = 20

MOST = 8
"""Numbers fitted for one operator and number format, at most."""

_FEWEST = 3  # rows
_TIE = 0.01  # held-out errors this close, as a share of them, are the same
_KNEE = 0.5  # residual, in standard deviations, from which the loss is linear
_UNKNOWN = 0.6  # of its prior's width: a parameter known no better than this is pinned
_UNMOVED = 0.1  # of its prior's width: the table did not move it
_ENOUGH = 2000  # rows to choose between sets of constants
_NORMAL_90 = 1.6448536269514722
_NOISE_FLOOR = 1e-4
_AT_UPPER = "this table pushes it to its upper bound"
_AT_LOWER = "this table pushes it to its lower bound"
_IQR = 1.349  # of a normal law, in standard deviations
_MOST_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measured:
    """Timed rows of one operator in one number format.

    Attributes
    ----------
    features : mapping of str to ndarray
        As the operator's form takes them.
    seconds : ndarray
        [s]
    groups : ndarray
        Which shape each row is of; shapes are left out whole.
    rates : Rates
        Of the device the rows were timed on.
    scatter : float
        Standard deviation of the logarithm of one row's time, from its repetitions. [-]
    judged : ndarray of bool or None
        Rows that errors are told of; the others only help the fit. None: all.
    """

    features: Mapping[str, Floats]
    seconds: Floats
    groups: NDArray[np.intp]
    rates: Rates
    scatter: float = _NOISE_FLOOR
    judged: NDArray[np.bool_] | None = None

    def part(self, rows: NDArray[np.bool_]) -> Measured:
        """Return some of the rows."""
        return Measured(
            features={key: value[rows] for key, value in self.features.items()},
            seconds=self.seconds[rows],
            groups=self.groups[rows],
            rates=self.rates,
            scatter=self.scatter,
            judged=None if self.judged is None else self.judged[rows],
        )

    def log_ratio(self, form: Form, values: Mapping[str, float]) -> Floats:
        """Return the logarithm of predicted over measured time."""
        return np.asarray(np.log(form.seconds(self.features, self.rates, values) / self.seconds))


@dataclass(slots=True)
class _State:
    """A fit in progress: every value, which are free, and why the others are not."""

    values: dict[str, float]
    free: list[str]
    pinned: dict[str, str]
    noise: float = 0.1


def fit_operator(
    form: Form, data: Measured, *, pin: Mapping[str, float] | None = None
) -> FittedOperator:
    r"""Fit a form to measurements.

    Minimises the soft-L1 loss of :math:`\log(T_{predicted} / T_{measured})` over its robust
    standard deviation, plus the priors. The covariance is that of an M-estimator, widened by the
    correlation of residuals within a shape. A parameter whose posterior is nearly as wide as its
    prior, or that the table pushes to a bound, is pinned.

    Parameters
    ----------
    form : Form
    data : Measured
    pin : mapping of str to float, optional
        Parameters to hold at a value, beside those of the form that are constants.

    Raises
    ------
    FitError
        When there are fewer rows than parameters would need, or the fit does not converge.

    References
    ----------
    .. [1] Huber, Ronchetti, Robust Statistics, 2nd ed., 2009, chapter 7.
    """
    n = data.seconds.size
    if n == 0:
        raise FitError(f"{form.operator}: no row to fit")
    state = _best_choice(form, data, pin or {})
    _settle(form, data, state)
    covariance = _identify(form, data, state)
    names = tuple(state.free)
    values = {name: rounded(value) for name, value in state.values.items()}
    spread = dict(zip(names, np.sqrt(np.diag(covariance)), strict=True))
    held = held_out(form, data, state.values, names, noise=state.noise)
    in_sample = data.log_ratio(form, values)
    judged = np.ones(n, bool) if data.judged is None else data.judged
    shapes, in_sample = data.groups[judged], in_sample[judged]
    held = None if held is None else held[judged]
    return FittedOperator(
        form=form.name,
        n=n,
        values=values,
        errors={name: rounded(values[name] * spread[name]) for name in names},
        pinned=state.pinned,
        names=names,
        covariance=tuple(tuple(rounded(x) for x in row) for row in covariance),
        residual=rounded(_wide_noise(data, in_sample if held is None else held, len(names))),
        shared=rounded(_intraclass(in_sample if held is None else held, shapes)),
        in_sample=Errors.of(in_sample),
        held_out=None if held is None else Errors.of(held),
        ranges={
            key: (rounded(float(np.min(x))), rounded(float(np.max(x))))
            for key, x in data.features.items()
        },
    )


def held_out(
    form: Form,
    data: Measured,
    values: Mapping[str, float],
    names: Sequence[str],
    *,
    noise: float,
) -> Floats | None:
    """Return the log ratio of predicted to measured time, each shape predicted without itself.

    Shapes are divided at random (one fixed draw) into `FOLDS` parts, or left out one by one where
    they are few; None where there is only one.
    """
    shapes = np.unique(data.groups)
    if shapes.size < 2:
        return None
    order = np.random.default_rng(0).permutation(shapes)
    part = np.empty(shapes.max() + 1, dtype=np.intp)
    parts = shapes.size if shapes.size <= FEW else FOLDS
    part[order] = np.arange(shapes.size) % parts
    fold = part[data.groups]
    ratio = np.empty(data.seconds.size)
    for number in range(fold.max() + 1):
        state = _State(values=dict(values), free=list(names), pinned={}, noise=noise)
        _solve(form, data.part(fold != number), state)
        ratio[fold == number] = data.part(fold == number).log_ratio(form, state.values)
    return ratio


def predictive_interval(
    fit: FittedOperator, features: Features, rates: Rates, *, level: float = 0.9
) -> tuple[Floats, Floats]:
    """Return the interval that holds a measured time with probability `level`. [s]

    The parameters' covariance and the spread of residuals about the form, both in log time.
    """
    from scipy.special import ndtri

    middle = fit.seconds(features, rates)
    spread = np.sqrt(fit.log_error(features, rates) ** 2 + fit.residual**2)
    reach = np.exp(float(ndtri(0.5 + level / 2)) * spread)
    return middle / reach, middle * reach


# -- inside --------------------------------------------------------------------------------------


def _start(form: Form, choice: Mapping[str, float], pin: Mapping[str, float]) -> _State:
    state = _State(values={}, free=[], pinned={})
    for parameter in form.parameters:
        name = parameter.name
        if name in pin:
            state.values[name], state.pinned[name] = pin[name], "held"
        elif name in choice:
            reason = f"the best of {len(form.choices)} tile shapes"
            state.values[name], state.pinned[name] = choice[name], reason
        elif parameter.prior == 0:
            state.values[name], state.pinned[name] = parameter.start, "a constant of the form"
        else:
            state.values[name] = parameter.start
            state.free.append(name)
    return state


def _best_choice(form: Form, data: Measured, pin: Mapping[str, float]) -> _State:
    """Return where to start, with the set of constants that fits a part of the rows best."""
    if not form.choices:
        return _start(form, {}, pin)
    some = data.part(np.arange(data.seconds.size) % (1 + data.seconds.size // _ENOUGH) == 0)
    states = [_start(form, choice, pin) for choice in form.choices]
    for state in states:
        _settle(form, some, state)
    return min(states, key=lambda s: float(np.mean(np.abs(some.log_ratio(form, s.values)))))


def _settle(form: Form, data: Measured, state: _State) -> None:
    """Solve, estimate the noise from what is left, and solve again."""
    for _ in range(3):
        _solve(form, data, state)
        noise = _core_noise(data, data.log_ratio(form, state.values), len(state.free))
        if abs(noise / state.noise - 1) < 0.02:
            break
        state.noise = noise


def _solve(form: Form, data: Measured, state: _State) -> None:
    """Minimise over the free parameters, in place."""
    if not state.free:
        return
    known = {parameter.name: parameter for parameter in form.parameters}
    free = [known[name] for name in state.free]
    centre = np.log([parameter.start for parameter in free])
    width = np.array([parameter.prior for parameter in free])
    low = np.log([parameter.low for parameter in free])
    high = np.log([parameter.high for parameter in free])

    def residuals(x: Floats) -> Floats:
        values = {**state.values, **dict(zip(state.free, np.exp(x), strict=True))}
        ratio = data.log_ratio(form, values) / state.noise
        return np.concatenate([ratio, (x - centre) / width])

    margin = 1e-6
    start = np.log([state.values[name] for name in state.free])
    found = least_squares(
        residuals,
        np.clip(start, low + margin, high - margin),
        bounds=(low, high),
        loss="soft_l1",
        f_scale=_KNEE,
        xtol=1e-8,
        ftol=1e-8,
        max_nfev=200,
    )
    if not np.all(np.isfinite(found.x)) or found.status < 0:
        raise FitError(f"{form.operator}: the fit of {form.name} did not converge")
    state.values.update(zip(state.free, (float(x) for x in np.exp(found.x)), strict=True))


def _identify(form: Form, data: Measured, state: _State) -> Floats:
    """Pin what the table cannot tell, one parameter at a time; return the free ones' covariance."""
    known = {parameter.name: parameter for parameter in form.parameters}
    while state.free:
        bound = _at_bound(known, state)
        if bound is not None:
            name, edge = bound
            if edge == "upper" or known[name].absent is None:
                state.pinned[name] = _AT_UPPER if edge == "upper" else _AT_LOWER
            else:
                state.values[name] = known[name].pinned
                state.pinned[name] = "this table shows none of it"
            state.free.remove(name)
            _settle(form, data, state)
            continue
        covariance = _covariance(form, data, state)
        spread = np.sqrt(np.diag(covariance))
        share = spread / [known[name].prior for name in state.free]
        worst = int(np.argmax(share))
        if share[worst] < _UNKNOWN and len(state.free) <= MOST:
            return covariance
        name = state.free.pop(worst)
        moved = abs(np.log(state.values[name] / known[name].start))
        if moved < _UNMOVED * known[name].prior:
            state.values[name] = known[name].pinned
            state.pinned[name] = "not identified by this table"
        else:
            factor = np.exp(spread[worst])
            state.pinned[name] = f"this table tells it only within a factor of {factor:.2g}"
        _settle(form, data, state)
    return np.zeros((0, 0))


def _at_bound(known: Mapping[str, Parameter], state: _State) -> tuple[str, str] | None:
    for name in state.free:
        parameter = known[name]
        value = state.values[name]
        if value < parameter.low * 1.01:
            return name, "lower"
        if value > parameter.high / 1.01:
            return name, "upper"
    return None


def _covariance(form: Form, data: Measured, state: _State) -> Floats:
    """Return the covariance of the free parameters' logarithms.

    Huber's for an M-estimator, K^2 n / (n - p) E[psi^2] / E[psi']^2 (J'J)^-1 with
    K = 1 + p / n Var[psi'] / E[psi']^2, times the design effect of residuals that go together
    within a shape, joined with the priors.
    """
    gradient = log_gradient(form, data.features, data.rates, state.values, tuple(state.free))
    z = data.log_ratio(form, state.values) / state.noise
    influence = z / np.sqrt(1 + (z / _KNEE) ** 2)
    slope = (1 + (z / _KNEE) ** 2) ** -1.5
    n, p = z.size, len(state.free)
    few = 1 + p / n * float(np.var(slope) / np.mean(slope) ** 2)
    scale = state.noise**2 * float(np.mean(influence**2) / np.mean(slope) ** 2)
    scale *= few**2 * n / max(n - p, 1)
    scale = max(scale * _design_effect(influence, data.groups), data.scatter**2)
    known = {parameter.name: parameter for parameter in form.parameters}
    prior = np.diag([known[name].prior ** -2.0 for name in state.free])
    return np.asarray(np.linalg.inv(gradient.T @ gradient / scale + prior))


def _design_effect(residual: Floats, groups: NDArray[np.intp]) -> float:
    """Return how much correlation within groups widens a mean's variance, at least 1."""
    _, size = np.unique(groups, return_counts=True)
    icc = _intraclass(residual, groups)
    return float(1 + (np.sum(size**2) / residual.size - 1) * icc)


def _intraclass(residual: Floats, groups: NDArray[np.intp]) -> float:
    """Return the correlation of residuals within a group, by one-way analysis of variance."""
    _, index, size = np.unique(groups, return_inverse=True, return_counts=True)
    n, k = residual.size, size.size
    if k < 2 or n <= k:
        return 0.0
    mean = np.bincount(index, residual) / size
    between = np.sum(size * (mean - residual.mean()) ** 2) / (k - 1)
    within = np.sum((residual - mean[index]) ** 2) / (n - k)
    typical = (n - np.sum(size**2) / n) / (k - 1)
    total = between + (typical - 1) * within
    return float(np.clip((between - within) / total, 0.0, 1.0)) if total > 0 else 0.0


def _core_noise(data: Measured, ratio: Floats, p: int) -> float:
    """Return the standard deviation of the core of residuals, from their median size."""
    n = ratio.size
    lost = np.sqrt(n / max(n - p, 1))
    return max(float(1.4826 * np.median(np.abs(ratio)) * lost), data.scatter)


def _wide_noise(data: Measured, ratio: Floats, p: int) -> float:
    """Return the standard deviation whose normal law holds the middle 90% of residuals."""
    n = ratio.size
    lost = np.sqrt(n / max(n - p, 1))
    return max(float(np.quantile(np.abs(ratio), 0.9) / _NORMAL_90 * lost), data.scatter)


# -- whole tables --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableFit:
    """A calibration, with the plain soft roofline fitted to the same rows beside it.

    Attributes
    ----------
    calibration : Calibration
    baseline : mapping of str to mapping of str to FittedOperator
        By operator and number format, as in the calibration.
    rows : mapping of (str, str) to Measured
        What was fitted, by operator and number format.
    """

    calibration: Calibration
    baseline: Mapping[str, Mapping[str, FittedOperator]]
    rows: Mapping[tuple[str, str], Measured]


def fit_table(table: Table, device: Device) -> TableFit:
    """Fit every operator of a table that has a form and enough rows.

    Parameters
    ----------
    table : Table
    device : Device
        Efficiencies are shares of its datasheet's rates.

    Raises
    ------
    FitError
        When nothing in the table can be fitted.
    """
    fits: dict[str, dict[str, FittedOperator]] = {}
    plain: dict[str, dict[str, FittedOperator]] = {}
    rows: dict[tuple[str, str], Measured] = {}
    notes: list[str] = [f"could not run: {failure}" for failure in table.failures]
    if table.unsteady is not None:
        notes.append(f"the run was too noisy to trust: {table.unsteady}")
    for operator in OPERATORS:
        for key in table.formats(operator):
            part = _of_decoding(_one_mode(table.in_format(operator, key), notes), operator, notes)
            dtype = plain_format(part.texts["dtype"][0])
            if dtype and dtype not in device.peak_flops:
                notes.append(f"{operator} {key}: {device.name} has no {dtype} peak: not fitted")
                continue
            if operator == "allreduce" and device.link is None:
                notes.append(f"{operator} {key}: {device.name} has no link: not fitted")
                continue
            form = form_for(operator, dtype, tiled=_tiled(device))
            data = Measured(
                features=features(part, operator),
                seconds=part.numbers["seconds"],
                groups=groups(part, operator),
                rates=device.rates(dtype or next(iter(device.peak_flops))),
                scatter=_scatter(part),
                judged=~noted(part, ANCHOR),
            )
            if len(part) < (1 if operator == "launch" else _FEWEST):
                notes.append(f"{operator} {key}: {len(part)} rows are too few: not fitted")
                continue
            fit = fit_operator(form, data)
            base = fit_operator(soft_roofline(operator), data)
            simple = base
            if operator == "gemm" and form is not GEMM_COLUMNS:
                simple = fit_operator(GEMM_COLUMNS, data)
            if simple.form in FORMS and _better(simple, fit):
                notes.append(
                    f"{operator} {key}: {simple.form} predicts left-out shapes better than "
                    f"{form.name} does: it is used"
                )
                fit = simple
            # rates that were estimated, or of some CPU, may be exceeded
            stated = device.vendor != "unknown" and _tiled(device)
            if stated and any(fit.pinned.get(name) == _AT_UPPER for name in ("eta_m", "eta_f")):
                notes.append(
                    f"{operator} {key}: {fit.form} would need more than the device's rates, so it "
                    "does not describe this kernel: not used"
                )
                continue
            fits.setdefault(operator, {})[key] = fit
            plain.setdefault(operator, {})[key] = base
            rows[operator, key] = data
    if not fits:
        raise FitError("; ".join(["nothing to fit in this table", *notes]))
    return TableFit(
        calibration=Calibration(
            operators=fits,
            uncalibrated=tuple(name for name in OPERATORS if name not in fits),
            source=table.source,
            notes=tuple(notes),
        ),
        baseline=plain,
        rows=rows,
    )


def _one_mode(part: Table, notes: list[str]) -> Table:
    """Return captured rows where there are some: launched ones include the host's time."""
    captured = part.texts["mode"] == "graph"
    if captured.all() or not captured.any():
        return part
    what = f"{part.texts['operator'][0]} {part.texts['dtype'][0]}"
    notes.append(f"{what}: not fitted outside CUDA graphs ({np.sum(~captured)} timed)")
    return part.where(captured)


def _of_decoding(part: Table, operator: str, notes: list[str]) -> Table:
    """Return the products that decoding and verification have; larger ones take other tiles."""
    large = part.numbers["m"] > _MOST_ROWS
    if operator != "gemm" or not large.any():
        return part
    notes.append(f"gemm: not fitted beyond {_MOST_ROWS:,} rows ({np.sum(large)} timed)")
    return part.where(~large)


def _scatter(part: Table) -> float:
    """Return the scatter of one time: the typical interquartile range as a standard deviation."""
    spread = part.numbers["spread"]
    known = spread[np.isfinite(spread)]
    return max(float(np.median(known)) / _IQR, _NOISE_FLOOR) if known.size else _NOISE_FLOOR


def _better(one: FittedOperator, other: FittedOperator) -> bool:
    """Whether a simpler form predicts better, with numbers that can be what they stand for."""
    if one.held_out is None or other.held_out is None or _AT_UPPER in one.pinned.values():
        return False
    return one.held_out.mean < (1 - _TIE) * other.held_out.mean


def calibrated_device(device: Device, fitted: TableFit, *, notes: tuple[str, ...] = ()) -> Device:
    """Return the record with what was fitted, when and by which version."""
    found = fitted.calibration
    source = {**found.source, "fitted": str(date.today()), "specmodel": __version__}
    calibration = replace(found, source=source, notes=(*found.notes, *notes))
    return replace(device, calibration=calibration)


def _tiled(device: Device) -> bool:
    return device.multiprocessors is not None and device.family != "cpu"
