"""Counts of every configuration in a folder, or why it is not read.

    python benchmarks/counts.py FOLDER [PARAMS.yaml]

With a YAML file of reference counts each count is compared with it. It maps any name to ``file``,
``total_params``, ``active_params_per_token`` and ``kv`` (of it ``kv_elems_per_token``, or
``kv_elems_per_token_full`` and ``kv_elems_per_token_windowed``).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

import specmodel as sm


def reference_counts(file: Path | None) -> dict[str, dict[str, Any]]:
    rows = yaml.safe_load(file.read_text()) if file else {}
    return {row["file"]: row for row in rows.values() if "file" in row}


def verdict(model: sm.Architecture, row: dict[str, Any] | None) -> str:
    if not row or "total_params" not in row:
        return "no reference"
    kv = row["kv"]
    expected = [row["total_params"], row.get("active_params_per_token", row["total_params"])]
    found = [model.total_params, model.active_params]
    cached = [value for key, value in kv.items() if key.startswith("kv_elems_per_token")]
    if cached:
        expected.append(sum(cached))
        found.append(model.kv_elements_per_token)
    return "exact" if found == expected else f"differs: {expected}"


def main() -> None:
    folder = Path(sys.argv[1])
    reference = reference_counts(Path(sys.argv[2]) if len(sys.argv) > 2 else None)
    table = Table("file", "total", "active", "KV elements", "weights GB", "reference")
    for file in sorted(folder.rglob("*.json")):
        if "hf_quant_config" in file.name:
            continue
        try:
            model = sm.load_model(file)
        except sm.SpecmodelError as error:
            table.add_row(file.name, "-", "-", "-", "-", str(error).removeprefix(f"{file}: "))
            continue
        counts = (model.total_params, model.active_params, model.kv_elements_per_token)
        cells = [f"{count:,}" for count in counts]
        size = f"{model.weight_bytes / 1e9:.2f}"
        table.add_row(file.name, *cells, size, verdict(model, reference.get(file.name)))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
