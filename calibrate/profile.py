"""From a measured table to a profile."""

from __future__ import annotations

from pathlib import Path

from calibrate.peaks import measured_device
from calibrate.table import read_rows, read_sidecar
from specmodel.errors import UnknownNameError
from specmodel.fitting import TableFit, calibrated_device, fit_table
from specmodel.hardware import Device, load_device, write_device
from specmodel.tables import read_table


def fit_and_write(table: Path, output: Path) -> tuple[Device, TableFit]:
    """Fit a table, and write the profile of the device it was measured on.

    Efficiencies are shares of the datasheet's rates where a record has the device's name, and
    of the best rates in the table elsewhere.

    Raises
    ------
    FitError
        When the table is not sound, or lacks the rows that are needed; nothing is written then.
    """
    record = read_sidecar(table)
    try:
        device = load_device(str(record["device"]["device"]))
    except UnknownNameError:
        device = measured_device(read_rows(table), record, table)
    fitted = fit_table(read_table(table, device=device), device)
    found = calibrated_device(device, fitted)
    write_device(found, output)
    return found, fitted
