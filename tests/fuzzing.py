"""Damaged files for every reader: each is refused in one line, or read as something possible.

    python tests/fuzzing.py --inputs 100000 --seed 1

prints the share that was read, the longest time and the peak memory; exit status 1 where a reader
raised anything but the package's own errors.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import specmodel as sm
from calibrate.table import read_rows, read_sidecar
from specmodel.acceptance_files import read_measured
from specmodel.cli.engines import rates_text, read_rates
from specmodel.fitting import fit_table
from specmodel.overheads import load_engine
from specmodel.rates import device_of_table
from specmodel.tables import COLUMNS, read_table
from specmodel.validation import read_cases, read_results

DATA = Path(sm.__file__).parent / "data"
JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 5, 0.5, 1e-9, 1e300, -0.0, float("nan"), float("inf"), 10**6,
    10**30, 10**400, "", "x", "[/]", "\x1b[31m", "\ud800", "1e3", "9" * 500, "x" * 200_000, [], [1],
    ["x"], [[[]]], {}, {"a": 1}, {"": None},
)  # fmt: skip
"""What a value of a file is replaced by."""

TEXTS: tuple[str, ...] = (
    "[" * 20_000, "{" * 20_000, '{"a":' * 20_000, "- " * 20_000, "x" * 200_000, "NaN", "Infinity",
    '"x"', "{}", "[]", "null", "", "\n", "\x00", "\x1b[2J", "[/]", "*a",
    "!!python/object:os.system", "!!timestamp abc", "!!bool abc", "!!int ''", "!!float ''",
    "!!map [a]",
    "!!set {a}", "!!binary ''", "2026-13-45",
    "<<: *a", "&a [*a]", "1_000", "0x10", "1:30:00", "=1+1", '"', "'", "\\", "\r", ";", "\t",
    "\u2028", "\ufeff",
    "a: &a [x, x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]\n"
    "c: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b]\nd: [*c, *c, *c, *c, *c, *c, *c, *c, *c]\n",
)  # fmt: skip
"""What is put into a text, or stands for all of it."""

ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1")


# -- what is damaged -----------------------------------------------------------------------------


def _table() -> tuple[str, dict[str, Any]]:
    """Return a measurement table and the record of its run, of a device without a datasheet."""
    common = {"mode": "eager", "repeats": "9", "spread": "0.01", "device": "Some CPU"}
    rows = [
        {"operator": "gemm", "dtype": "float32", "m": str(m), "n": str(n), "k": "512",
         "seconds": f"{1e-5 + m * n * 1e-9:g}"}
        for m in (1, 2, 4, 8, 16) for n in (256, 512, 1024, 2048)
    ]  # fmt: skip
    rows += [
        {"operator": "stream", "dtype": "float32", "bytes": str(b), "seconds": f"{b / 1e10:g}"}
        for b in (10**6, 10**7, 10**8)
    ]
    rows.append({"operator": "gemm", "dtype": "float32", "m": "64", "note": "error: no memory"})
    lines = [",".join(COLUMNS)]
    lines += [",".join({**common, **row}.get(name, "") for name in COLUMNS) for row in rows]
    record = {
        "schema": 1, "torch": "2.13.0", "driver": None, "threads": 1, "date": "2026-12-01",
        "command": "specmodel calibrate", "device": {"device": "Some CPU", "kind": "cpu",
        "multiprocessors": None}, "arguments": {"tiny": False}, "budget": 60.0, "elapsed": 9.0,
        "kernels": {}, "memory_capacity": 2.4e10,
        "cache": 3.2e7, "noise": {"reference": 0.01, "drift": 0.0, "rows": 0.01, "worst": 0.1},
        "peak": {"memory_bandwidth": 1e10, "flops": {"float32": 9e11}}, "models": {},
        "sections": {},
    }  # fmt: skip
    return "\n".join(lines) + "\n", record


def _acceptance() -> dict[str, Any]:
    point = {"temperature": 0.0, "batch": 1, "tree": None}
    found = {"hit_rate": 0.9, "alpha": 0.7}
    return {
        "imposed_acceptance": None,
        "points": [
            {**point, "k": 1, "acceptance": {**found, "per_position": [0.7]}},
            {**point, "k": 3, "acceptance": {**found, "per_position": [0.7, 0.5, 0.3]}},
        ],
    }


_RATES = """k,batch,tpot_ms,acceptance_length
0,1,7.07,
3,1,4.29,2.29
0,64,11.2,
3,64,9.1,2.3
"""
_CASES = """- id: a
  url: https://example.org/1
  engine: vLLM
  version: 0.11.0
  gpu: H100
  n_gpus: 1
  target: Llama-3.1-8B-Instruct
  draft_method: eagle3
  rows:
    - {k: 3, batch_or_concurrency: 1, mean_acceptance_length: 2.3, baseline: 140,
       sd: 230, unit: tok/s}
    - {k: 3, batch_or_concurrency: 64, speedup: 1.1}
"""


def _profiles() -> Path:
    installed = DATA.parent / "hardware_profiles"
    return installed if installed.is_dir() else DATA.parents[1] / "hardware_profiles"


def seeds(name: str) -> list[Any]:
    """Return right files of a kind: trees that JSON or YAML is made of, or texts."""
    folder = _profiles()
    if name == "device":
        files = [folder / "h100-sxm.yaml", folder / "groq-lpu.yaml"]
        found = [yaml.safe_load(file.read_text()) for file in files]
        apart = yaml.safe_load((folder / "calibrations" / "l40s.yaml").read_text())
        return [*found, {**found[0], **apart}]
    if name == "engine":
        files = [folder / "engines" / f"{engine}.yaml" for engine in ("vllm-2025", "sglang")]
        return [yaml.safe_load(file.read_text()) for file in files]
    if name == "model":
        chosen = ("llama-3.1-8b", "deepseek-v3", "qwen3-next-80b-a3b", "gpt-oss-20b", "t5-base")
        return [json.loads((DATA / "models" / f"{n}.json").read_text()) for n in chosen]
    if name == "record":
        from specmodel.architectures import to_json

        return [json.loads(to_json(sm.load_model(n))) for n in ("qwen3-30b-a3b", "qwen3-8b-eagle3")]
    return {
        "acceptance": [_acceptance()],
        "run": [_table()[1]],
        "rows": [_table()[0]],
        "sidecar": [_table()[1]],
        "table": [_table()[0]],
        "rates": [_RATES],
        "results": ["\n".join((DATA / "results.csv").read_text().splitlines()[:9]) + "\n"],
        "cases": [yaml.safe_load(_CASES)],
    }[name]


# -- damage --------------------------------------------------------------------------------------


def _places(tree: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found: list[tuple[Any, ...]] = []
    for key, value in items:
        found.append((*above, key))
        if isinstance(value, dict | list):
            found += _places(value, (*above, key))
    return found


def damaged_tree(tree: Any, rng: random.Random) -> Any:
    """Return a tree with a few values replaced, left out, moved or added."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = _places(tree)
        if not places:
            return tree
        *above, last = rng.choice(places)
        inner = tree
        for key in above:
            inner = inner[key]
        how = rng.random()
        if how < 0.55:
            value = inner[last]
            number = isinstance(value, int | float) and abs(value) < 1e200
            near = [value * 1e3, value / 1e3, -value] if number else []
            inner[last] = copy.deepcopy(rng.choice([*JUNK, *near]))
        elif how < 0.75:
            del inner[last]
        elif isinstance(inner, dict):
            inner[rng.choice(("x", "[/]", "", str(last).upper()))] = copy.deepcopy(rng.choice(JUNK))
        else:
            inner.append(copy.deepcopy(rng.choice(JUNK)))
    return tree


def damaged_text(text: str, rng: random.Random) -> str:
    """Return a text that is cut, doubled, swapped in places, or has something put into it."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        how = rng.randrange(8)
        if how == 0:
            text = text[:at]
        elif how == 1:
            text = text[:at] + text[end:]
        elif how == 2:
            text = text[:at] + rng.choice(TEXTS) + text[at:]
        elif how == 3:
            text = text[:at] + text[at:end] * 2 + text[end:]
        elif how == 4:
            lines = text.splitlines(keepends=True)
            rng.shuffle(lines)
            text = "".join(lines)
        elif how == 5:
            cells = text.split(",")
            cells[rng.randrange(len(cells))] = str(rng.choice(JUNK))[:200_000]
            text = ",".join(cells)
        elif how == 6:
            text = text.replace(",", rng.choice((";", "\t", "|", ", ")))
        else:
            text = rng.choice(TEXTS) if rng.random() < 0.3 else text[::-1]
    return text


def damaged(name: str, rng: random.Random) -> bytes:
    """Return the bytes of a damaged file of a kind."""
    seed = rng.choice(seeds_of(name))
    if isinstance(seed, str):
        text = damaged_text(seed, rng)
    else:
        tree = damaged_tree(seed, rng) if rng.random() < 0.8 else seed
        if name in ("device", "engine", "cases"):
            text = yaml.safe_dump(_plain(tree), sort_keys=False, allow_unicode=True)
        else:
            text = json.dumps(tree)
        if tree is seed:
            text = damaged_text(text, rng)
    encoding = rng.choice(ENCODINGS) if rng.random() < 0.1 else "utf-8"
    return text.encode(encoding, "replace")


def _plain(tree: Any) -> Any:
    """Return a tree without surrogates, which no YAML holds."""
    if isinstance(tree, dict):
        return {_plain(key): _plain(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_plain(value) for value in tree]
    return "?" if tree == "\ud800" else tree


_SEEDS: dict[str, list[Any]] = {}


def seeds_of(name: str) -> list[Any]:
    if name not in _SEEDS:
        _SEEDS[name] = seeds(name)
    return _SEEDS[name]


# -- the readers ---------------------------------------------------------------------------------


def _possible(value: Any) -> None:
    array = np.asarray(value, dtype=float)
    if np.isnan(array).any() or (array < 0).any():
        raise AssertionError(f"an answer of {value}")


def _read_device(path: Path) -> None:
    device = sm.load_device(path)
    for dtype in ("bfloat16", "fp8"):
        if dtype in device.peak_flops:
            model = sm.load_model("llama-3.2-1b").with_dtypes(weights=dtype)
            _possible(sm.pass_time(device, model, B=[1, 64], W=4, L=1024).T)


def _read_engine(path: Path) -> None:
    engine = load_engine(path)
    for value in (engine.plain(8), engine.rounds(8, 4), engine.draft_launch(1, 8, head=True)):
        _possible(value)


def _read_model(path: Path) -> None:
    model = sm.load_model(path)
    _possible([model.total_params, model.active_params, model.kv_bytes_per_token])
    if model.head_kind is None and model.total_params < 1e13:
        _possible(sm.pass_time("h100", model, B=1, L=100, level="ideal").T)


def _read_table(path: Path) -> None:
    table = read_table(path)
    stated = {} if "memory_capacity" in table.record else {"memory": 8e10}
    device = device_of_table(table, "Some CPU", stated)
    fit_table(table, device)


def _read_acceptance(path: Path) -> None:
    found = read_measured(path)
    _possible(found.acceptance.tokens(np.arange(found.k + 1)))


def _read_rates(path: Path) -> None:
    text = rates_text(str(path))
    if text is not None:
        read_rates(text, str(path))


def _read_results(path: Path) -> None:
    for row in read_results(path):
        _possible([row.plain_step or 0.0, len(row.study), len(row.series)])


READERS: Mapping[str, tuple[str, Callable[[Path], object]]] = {
    "device": ("x.yaml", _read_device),
    "engine": ("x.yaml", _read_engine),
    "model": ("config.json", _read_model),
    "record": ("record.json", _read_model),
    "table": ("table.csv", _read_table),
    "run": ("table.json", lambda path: read_sidecar(path.with_suffix(".csv"))),
    "rows": ("table.csv", read_rows),
    "sidecar": ("table.json", lambda path: _read_table(path.with_suffix(".csv"))),
    "acceptance": ("acceptance.json", _read_acceptance),
    "rates": ("rates.csv", _read_rates),
    "results": ("results.csv", _read_results),
    "cases": ("cases.yaml", read_cases),
}
"""Kinds of files: what a file is called, and what reads it and asks something of the result."""


@dataclass(slots=True)
class Outcome:
    """What became of the inputs."""

    read: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    longest: dict[str, float] = field(default_factory=dict)
    longest_error: str = ""


def fuzz(inputs: int, seed: int, *, only: str | None = None) -> Outcome:
    """Put so many damaged files through the readers in turn."""
    rng, outcome = random.Random(seed), Outcome()  # noqa: S311 (reproducible damage, no secret)
    names = [only] if only else list(READERS)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", sm.ExtrapolationWarning)
        for number in range(inputs):
            name = names[number % len(names)]
            file, read = READERS[name]
            path = Path(folder, name, file)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(damaged(name, rng))
            if name == "sidecar":
                path.with_suffix(".csv").write_text(_table()[0])
            start = time.perf_counter()
            try:
                read(path)
                outcome.read[name] += 1
            except sm.SpecmodelError as error:
                outcome.refused[name] += 1
                outcome.longest_error = max(outcome.longest_error, str(error), key=len)
            except BaseException as error:  # noqa: BLE001 (what is looked for)
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(last.filename).name}:{last.lineno}"
                kept = Path(tempfile.gettempdir(), f"fuzz-{name}-{number}{path.suffix}")
                kept.write_bytes(path.read_bytes())
                outcome.failures.append(
                    f"{name}: {type(error).__name__}: {str(error)[:200]} ({where}); {kept}"
                )
            taken = time.perf_counter() - start
            outcome.longest[name] = max(outcome.longest.get(name, 0.0), taken)
    return outcome


def main() -> int:
    """Run as a command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=READERS)
    given = parser.parse_args()
    outcome = fuzz(given.inputs, given.seed, only=given.only)
    for name in READERS:
        if name in outcome.longest:
            sys.stdout.write(
                f"{name:11} {outcome.read[name]:6} read, {outcome.refused[name]:6} refused, "
                f"longest {outcome.longest[name]:.2f} s\n"
            )
    for text, count in Counter(outcome.failures).most_common(40):
        sys.stdout.write(f"{count} x {text}\n")
    sys.stdout.write(f"{outcome.longest_error[:300]}\n")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    sys.stdout.write(
        f"{given.inputs} inputs, {len(outcome.failures)} failures, longest error "
        f"{len(outcome.longest_error)} characters, peak memory {peak:.2f} GB\n"
    )
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
