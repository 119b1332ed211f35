"""From a measured table to a profile."""

from __future__ import annotations

from pathlib import Path

from calibrate.peaks import measured_device
from calibrate.table import read_rows, read_sidecar
from specmodel.hardware import device_yaml


def fit_and_write(table: Path, output: Path) -> None:
    """Write the profile that a table supports.

    For now it holds the measured rates alone, as the record of a device without a datasheet.

    Raises
    ------
    FitError
        When the table lacks the rows that are needed; nothing is written then.
    """
    # FIT: specmodel.fitting connects here and adds the calibrated operators to the record.
    device = measured_device(read_rows(table), read_sidecar(table), table)
    output.write_text(device_yaml(device), encoding="utf-8")
