"""Whole decoder passes that no fit has seen: predicted beside measured.

A measurement table may hold ``pass`` rows, with the decoders' shapes in its sidecar. They tell
how far a sum of fitted operators is from the time of a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmodel.architectures import Architecture, Layer
from specmodel.architectures.parts import MLP, Attention, MoE
from specmodel.calibration import Departure, Errors, rounded
from specmodel.errors import FitError, brief
from specmodel.hardware import Device
from specmodel.roofline import Execution
from specmodel.speculation import Run
from specmodel.tables import Table
from specmodel.uncertainty import CONFIDENCE, NORMAL_90, interval, log_error, spread

Floats = NDArray[np.float64]

BASES: Mapping[str, Execution] = {
    "datasheet": Execution(level="ideal"),
    "generic": Execution(calibrated=False),
    "calibrated": Execution(),
}
"""What passes are predicted with: rates alone, generic efficiencies, what was fitted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Check:
    """Passes of a table, measured and predicted.

    Attributes
    ----------
    model : ndarray of str
        Which decoder.
    batch, width, context : ndarray
        Sequences [-], positions per sequence [token], cached tokens [token].
    seconds : ndarray
        Measured. [s]
    predicted : mapping of str to ndarray
        By basis. [s]
    log_error : ndarray
        Standard deviation of the logarithm of the calibrated prediction, departure of whole
        passes left out. [-]
    """

    model: NDArray[np.str_]
    batch: Floats
    width: Floats
    context: Floats
    seconds: Floats
    predicted: Mapping[str, Floats]
    log_error: Floats

    def errors(self, basis: str, *, width: int | None = None) -> Errors | None:
        """Return the errors of T; with `width` of those passes alone, None where there are none."""
        rows = np.ones(self.seconds.size, bool) if width is None else self.width == width
        return _errors(self.predicted[basis][rows], self.seconds[rows])

    def wide_errors(self, basis: str) -> Errors | None:
        """Return the errors of T_v."""
        rows = self.width > 1
        return _errors(self.predicted[basis][rows], self.seconds[rows])

    def ratio_errors(self, basis: str) -> Errors | None:
        """Return the errors of T_v / T_p, over wide passes with a decode step beside them."""
        wide, plain = np.array(self.pairs(), dtype=int).reshape(-1, 2).T
        predicted = self.predicted[basis]
        measured = self.seconds[wide] / self.seconds[plain]
        return _errors(predicted[wide] / predicted[plain], measured)

    def pairs(self) -> list[tuple[int, int]]:
        """Return the rows of wide passes, each with that of the decode step beside it."""
        found = (self._decode_of(row) for row in range(self.seconds.size))
        return [pair for pair in found if pair is not None]

    def _decode_of(self, row: int) -> tuple[int, int] | None:
        """Return a wide pass with the decode step of the same decoder, batch and context."""
        if self.width[row] == 1:
            return None
        same = (self.model == self.model[row]) & (self.width == 1)
        same &= (self.batch == self.batch[row]) & (self.context == self.context[row])
        return (row, int(np.argmax(same))) if same.any() else None


def _errors(predicted: Floats, measured: Floats) -> Errors | None:
    return Errors.of(np.log(predicted / measured)) if measured.size else None


def decoder(name: str, shape: Mapping[str, Any], dtype: str) -> Architecture:
    """Return a decoder of a sidecar as a model.

    Parameters
    ----------
    name : str
    shape : mapping
        layers, hidden, heads, kv_heads, head_dim, intermediate, vocab; experts and top_k, 0 for a
        dense one.
    dtype : str
        Of everything.

    Raises
    ------
    FitError
        When a key is missing or is no whole number.
    """
    keys = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
    for key in keys:
        if not isinstance(shape.get(key), int) or shape[key] < 1:
            raise FitError(f"decoder {name}: {key} must be a whole number >= 1")
    mlp: MLP | MoE = MLP(width=shape["intermediate"])
    if shape.get("experts"):
        mlp = MoE(
            experts=shape["experts"], top_k=shape.get("top_k", 1), width=shape["intermediate"]
        )
    mixer = Attention(heads=shape["heads"], kv_heads=shape["kv_heads"], head_dim=shape["head_dim"])
    return Architecture(
        name=name,
        model_type="llama",
        hidden_size=shape["hidden"],
        vocab_size=shape["vocab"],
        head_vocab_size=shape["vocab"],
        layers=((Layer(mixer=mixer, mlp=mlp), shape["layers"]),),
        dtype=dtype,
        kv_dtype=dtype,
    )


def check_passes(table: Table, device: Device) -> Check | None:
    """Predict the passes of a table; None where it has none.

    The KV that a pass reads is that of the context and of its own positions.

    Raises
    ------
    FitError
        When a pass is of a decoder whose shape the sidecar does not hold.
    """
    rows = table.of("pass")
    if not len(rows):
        return None
    captured = rows.texts["mode"] == "graph"
    rows = rows.where(captured) if captured.any() else rows  # eager copies are for comparison
    numbers, texts = rows.numbers, rows.texts
    times: dict[str, list[float]] = {basis: [] for basis in BASES}
    off: list[float] = []
    if device.calibration is not None:  # what is about to be judged
        device = replace(device, calibration=replace(device.calibration, passes=None))
    for i in range(len(rows)):
        name, dtype = str(texts["model"][i]), str(texts["dtype"][i])
        shape = table.record.get("models", {}).get(name)
        if not isinstance(shape, dict):
            raise FitError(
                f"line {rows.lines[i]}: the sidecar has no shape of decoder {brief(name)}"
            )
        run = Run(
            device=device,
            architecture=decoder(name, shape, dtype),
            execution=BASES["calibrated"],
            count=np.asarray(1.0),
            B=numbers["batch"][i],
            W=numbers["width"][i],
            L=numbers["context"][i] + numbers["width"][i],
        )
        for basis, execution in BASES.items():
            times[basis].append(float(replace(run, execution=execution).time().T))
        found = spread([run])
        off.append(float(log_error([(1 / found.T, found)])))
    return Check(
        model=texts["model"],
        batch=numbers["batch"],
        width=numbers["width"],
        context=numbers["context"],
        seconds=numbers["seconds"],
        predicted={basis: np.array(values) for basis, values in times.items()},
        log_error=np.array(off),
    )


def departure(check: Check, rows: NDArray[np.bool_] | None = None) -> Departure:
    """Return how passes depart from the calibrated prediction.

    Parameters
    ----------
    check : Check
    rows : ndarray of bool, optional
        The passes to judge by; all by default.
    """
    keep = np.ones(check.seconds.size, bool) if rows is None else rows
    off = np.log(check.seconds / check.predicted["calibrated"])
    pairs = [pair for pair in check.pairs() if keep[pair[0]] and keep[pair[1]]]
    wide = float(np.quantile(np.abs(off[keep]), 0.9) / NORMAL_90)
    apart = [off[a] - off[b] for a, b in pairs]
    ratio = float(np.quantile(np.abs(apart), 0.9) / NORMAL_90) if apart else wide
    shared = 1 - ratio**2 / (2 * wide**2) if wide > 0 else 0.0
    return Departure(
        n=int(keep.sum()),
        bias=rounded(float(np.median(off[keep]))),
        residual=rounded(wide),
        shared=rounded(float(np.clip(shared, 0.0, 1.0))),
    )


def coverage(check: Check) -> tuple[float, float]:
    """Return how often the intervals of a decoder's passes hold them, and how wide they are.

    The departure is that of the other decoders: each is left out in turn.

    Returns
    -------
    tuple of float
        Share between low and high [-]; median of high over low [-].
    """
    inside, widths = [], []
    for name in np.unique(check.model):
        mine = check.model == name
        if mine.all():
            continue
        off = np.sqrt(check.log_error[mine] ** 2 + departure(check, ~mine).residual ** 2)
        low, high = interval(check.predicted["calibrated"][mine], off)
        measured = check.seconds[mine]
        inside += list((low <= measured) & (measured <= high))
        widths += list(high / low)
    if not inside:
        return np.nan, np.nan
    return float(np.mean(inside)), float(np.median(widths))


def checked_device(table: Table, device: Device) -> tuple[Device, Check | None]:
    """Return a calibrated device with the departure of the table's passes, and their check."""
    check = check_passes(table, device)
    if check is None or device.calibration is None:
        return device, None
    calibration = replace(device.calibration, passes=departure(check))
    return replace(device, calibration=calibration), check


def check_text(check: Check) -> str:
    """Return the errors of passes by basis, for people."""
    lines = [
        f"check: {check.seconds.size} whole passes of {len(np.unique(check.model))} decoders, "
        "which the fit has not seen; median of |predicted / measured - 1|",
        f"{'basis':12}{'T_p':>8}{'T_v':>8}{'T_v/T_p':>9}",
    ]
    for basis in BASES:
        wide = check.ratio_errors(basis)
        shown = (check.errors(basis, width=1), check.wide_errors(basis), wide)
        texts = ["-" if one is None else f"{one.median:.1%}" for one in shown]
        lines.append(f"{basis:12}{texts[0]:>8}{texts[1]:>8}{texts[2]:>9}")
    bias = departure(check).bias
    longer = "longer" if bias > 0 else "shorter"
    lines.append(f"passes take {abs(np.expm1(bias)):.1%} {longer} than their operators (median)")
    share, width = coverage(check)
    if np.isfinite(share):
        lines.append(
            f"intervals of {CONFIDENCE:.0%} hold {share:.0%} of the passes of decoders left out; "
            f"high is {width:.2f} times low"
        )
    return "\n".join(lines)


def check_record(check: Check) -> dict[str, Any]:
    """Return the errors of passes by basis, for machines; fractions."""

    def record(errors: Errors | None) -> dict[str, Any] | None:
        return None if errors is None else errors.record()

    share, width = coverage(check)
    return {
        "n": int(check.seconds.size),
        "bases": {
            basis: {
                "T_p": record(check.errors(basis, width=1)),
                "T_v": record(check.wide_errors(basis)),
                "T_v_over_T_p": record(check.ratio_errors(basis)),
            }
            for basis in BASES
        },
        "coverage": share if np.isfinite(share) else None,
        "high_over_low": width if np.isfinite(width) else None,
    }
