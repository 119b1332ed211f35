"""The way to the measuring code, which needs torch and is looked up by name only when asked for."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from specmodel.cli.parsing import optional, parse_seconds, parse_whole
from specmodel.errors import DomainError, SpecmodelError


def calibrate(options: dict[str, Any]) -> str:
    """Measure a device as the options of ``calibrate`` say (as text); return what to print.

    Raises
    ------
    SpecmodelError
        When torch is not installed, an option is out of range, or the measurement fails.
    """
    output = Path(options["output"])
    if output.suffix not in (".yaml", ".yml"):
        raise DomainError(f"output must end in .yaml; got {options['output']!r}")
    table = Path(options["table"]) if options["table"] else output.with_suffix(".csv")
    if table.suffix != ".csv":
        raise DomainError(f"table must end in .csv; got {options['table']!r}")
    if importlib.util.find_spec("torch") is None:
        raise SpecmodelError(
            "calibrate needs torch, which is not installed: pip install 'specmodel[torch]'"
        )
    settings = importlib.import_module("calibrate.run").Settings(
        device=options["device"],
        table=table,
        budget=parse_seconds(options["budget"], name="budget"),
        dtypes=tuple(options["dtype"].split(",")) if options["dtype"] else (),
        threads=optional(parse_whole, options["threads"], name="threads"),
        seed=parse_whole(options["seed"], name="seed"),
        model=options["model"],
        tiny=options["tiny"],
    )
    text: str = importlib.import_module("calibrate.command").calibrate(output, settings)
    return text
