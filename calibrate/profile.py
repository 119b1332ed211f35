"""From a measured table to a profile."""

from __future__ import annotations

from pathlib import Path

from calibrate.table import read_sidecar
from specmodel.checking import Check, checked_device
from specmodel.errors import FitError, UnknownNameError
from specmodel.fitting import TableFit, calibrated_device, fit_table
from specmodel.hardware import Device, load_device, write_device
from specmodel.rates import device_of_table
from specmodel.tables import read_table, refuse_noise


def fit_and_write(
    table: Path, output: Path, *, overwrite: bool = False, accept_noise: bool = False
) -> tuple[Device, TableFit, Check | None]:
    """Fit a table, write the profile of its device, and check it on the table's whole passes.

    Efficiencies are shares of the datasheet's rates where a record has the device's name, and
    of the best rates in the table elsewhere. With `accept_noise` a run that was too noisy is fitted
    all the same, and a note of the profile says so.

    Raises
    ------
    FitError
        When the table is not sound, the run that made it was too noisy, or it lacks the rows that
        are needed; nothing is written then.
    """
    name = str(read_sidecar(table)["device"]["device"])
    notes: tuple[str, ...] = ()
    as_measured = read_table(table)
    if not accept_noise:
        refuse_noise(as_measured)
    try:
        device = load_device(name)
    except UnknownNameError:
        device = device_of_table(as_measured, name, {})
        notes = ("no datasheet: rates are those measured",)
    rows = read_table(table, device=device)
    fitted = fit_table(rows, device)
    if "gemm" not in fitted.calibration.operators:
        raise FitError(f"{table}: too few matrix products to fit: give a larger --budget")
    found, check = checked_device(rows, calibrated_device(device, fitted, notes=notes))
    write_device(found, output, overwrite=overwrite)
    return found, fitted, check
