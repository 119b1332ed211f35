"""Fit the calibrations that ship: python benchmarks/profiles.py KERNELS STEPS.

KERNELS is a folder of published kernel tables (aiconfigurator-core's layout), STEPS a CSV of whole
vLLM steps with the columns model, num_reqs, W, context, forward_ms, source. Writes one file a
device into hardware_profiles/calibrations.

Elementwise kernels are in no published table, nor is attention with several query positions. On
H100 the former's fixed time is what whole decode steps of Qwen3-1.7B at no context leave after the
fitted products and attention, without LM head (which the published forward times do not hold); its
bandwidth stays generic. The other steps, up to 8 query positions among them, tell how whole passes
depart from the sum of their kernels, and that wider attention reads the cache no more often.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import whole_steps
from scipy.optimize import brentq

import specmodel as sm
from specmodel.calibration import Calibration, Departure, Errors, FittedOperator, rounded
from specmodel.checking import decoder
from specmodel.fitting import calibrated_device, fit_table
from specmodel.hardware import Device
from specmodel.published import read_published
from specmodel.roofline import GENERIC
from specmodel.uncertainty import NORMAL_90
from specmodel.yaml_text import yaml_text

GPUS = ("a100_sxm", "h100_sxm", "b200_sxm", "l40s")
OUT = Path(__file__).parents[1] / "hardware_profiles" / "calibrations"


def main(kernels: str, steps: str) -> None:
    for gpu in GPUS:
        device = sm.load_device(gpu.removesuffix("_sxm"))
        fitted = fit_table(read_published(kernels, gpu=gpu, engine="vllm", device=device), device)
        found = calibrated_device(device, fitted)
        if gpu == "h100_sxm":
            found = with_passes(with_elementwise(found, steps), steps)
        record = calibration_of(found).record()
        text = yaml_text({"calibration": record}, leaves_on_one_line=True)
        path = OUT / f"{device.name}.yaml"
        path.write_text(text, encoding="utf-8")
        print(f"{path.name}: {', '.join(record['operators'])}")


def with_elementwise(device: Device, steps: str) -> Device:
    """Add the fixed time of elementwise kernels, fitted to whole decode steps."""
    with Path(steps).open(encoding="utf-8") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["model"].startswith("Qwen/Qwen3-1.7B") and row["context"] == "0"
        ]
    batch = np.array([float(row["num_reqs"]) for row in rows])
    measured = np.array([float(row["forward_ms"]) for row in rows]) / 1e3
    model = sm.load_model("qwen3-1.7b")

    def off(t0: float) -> np.ndarray:
        time = sm.pass_time(_with(device, fit(t0)), model, B=batch, L=1)
        return np.log((time.T - time.groups["LM head"]) / measured)

    def fit(t0: float, residual: float = 0.1, error: float = 0.0) -> FittedOperator:
        free = ("t0",) if error else ()
        known = {"eta_m": "no table has it: generic"} | ({} if error else {"t0": "trial"})
        spread = np.abs(np.expm1(off(t0))) if error else np.zeros(1)
        errors = Errors(
            n=len(rows),
            mean=float(f"{spread.mean():.4g}"),
            median=float(f"{np.median(spread):.4g}"),
            p90=float(f"{np.quantile(spread, 0.9):.4g}"),
        )
        return FittedOperator(
            form="elementwise",
            n=len(rows),
            values={"t0": t0, "eta_m": GENERIC.eta_m},
            errors={"t0": error} if error else {},
            pinned=known,
            names=free,
            covariance=(((error / t0) ** 2,),) if error else (),
            residual=residual,
            in_sample=errors,
        )

    t0 = brentq(lambda x: float(np.median(off(x))), 1e-7, 1e-5)
    groups = sm.pass_time(_with(device, fit(t0)), model, B=batch, L=1).groups
    share = float(np.mean(groups["elementwise"] / measured))
    residual = float(np.std(off(t0))) / share  # an error of the step is that of its small part
    error = t0 * residual / np.sqrt(len(rows))
    t0, residual, error = (float(f"{x:.3g}") for x in (t0, residual, error))
    found = _with(device, fit(t0, residual, error))
    source = rows[0]["source"].split(" results/")[0] + "@" + rows[0]["source"].split("@")[-1]
    note = (
        f"elementwise: fixed time from {len(rows)} whole decode steps of Qwen3-1.7B without "
        f"context, vLLM 0.28.0 ({source}), after the other kernels"
    )
    calibration = calibration_of(found)
    return replace(found, calibration=replace(calibration, notes=(*calibration.notes, note)))


def with_passes(device: Device, steps: str) -> Device:
    """Add how whole steps that nothing was fitted to depart from the sum of their kernels."""
    with Path(steps).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    models = {
        "Qwen/Qwen3-1.7B": sm.load_model("qwen3-1.7b"),
        "openbmb/MiniCPM5-2B": decoder("minicpm5-2b", whole_steps.MINICPM, "bfloat16"),
    }
    off: dict[tuple[str, str, str, str], float] = {}
    for name, model in models.items():
        for row in rows:
            if row["model"].startswith(name) and not (name[0] == "Q" and row["context"] == "0"):
                predicted = whole_steps.seconds(model, row, "calibrated", device)
                key = (name, row["num_reqs"], row["context"], row["W"])
                off[key] = float(np.log(float(row["forward_ms"]) / 1e3 / predicted))
    apart = [x - off[*key[:3], "1"] for key, x in off.items() if key[3] != "1"]
    every = np.array(list(off.values()))
    wide = float(np.quantile(np.abs(every), 0.9) / NORMAL_90)
    ratio = float(np.quantile(np.abs(apart), 0.9) / NORMAL_90)
    passes = Departure(
        n=every.size,
        bias=rounded(float(np.median(every))),
        residual=rounded(wide),
        shared=rounded(float(np.clip(1 - ratio**2 / (2 * wide**2), 0, 1))),
    )
    calibration = calibration_of(device)
    attention = calibration.operators["attention"]
    told = "as whole steps of up to 8 query positions have it (benchmarks/whole_steps.py)"
    pinned = {**attention["bfloat16"].pinned, "eta_w": told, "r": told}
    bf16 = replace(attention["bfloat16"], pinned=pinned)
    operators = {**calibration.operators, "attention": {**attention, "bfloat16": bf16}}
    note = f"passes: {every.size} whole steps of Qwen3-1.7B and MiniCPM5-2B (shape assumed)"
    return replace(
        device,
        calibration=replace(
            calibration, operators=operators, passes=passes, notes=(*calibration.notes, note)
        ),
    )


def calibration_of(device: Device) -> Calibration:
    """Return what was fitted for a device."""
    if device.calibration is None:
        raise SystemExit(f"{device.name} has no calibration")
    return device.calibration


def _with(device: Device, fit: FittedOperator) -> Device:
    """Return the device with a fit of elementwise kernels."""
    calibration = calibration_of(device)
    operators = {**calibration.operators, "elementwise": {"add": fit}}
    left = tuple(name for name in calibration.uncalibrated if name != "elementwise")
    return replace(device, calibration=replace(calibration, operators=operators, uncalibrated=left))


if __name__ == "__main__":
    main(*sys.argv[1:])
