"""Speculation with the own pair, measured and predicted, over drafters, k and batches.

    python benchmarks/rounds.py [PROFILE] [-o RECORD.json]

On this machine's CPU. Without PROFILE it calibrates for two minutes first; the pair and its heads
are trained on first use. For each drafter and batch: the best k measured and predicted (off where
none gains), and the median error of S, T_p, T_v and T_d over k = 1 to 8. About 20 minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from calibrate.profile import fit_and_write
from calibrate.run import Settings as Calibration
from calibrate.run import measure
from calibrate.speculate.inputs import Settings
from calibrate.speculate.measuring import run
from calibrate.speculate.trees import Tree

DRAFTERS = (None, "eagle", "mtp", "medusa", "ngram", "exit:1", "sparse:4,60")
BATCHES, KS, NEW = (1, 4, 16), range(1, 9), 32
TERMS = ("S", "T_p", "T_v", "T_d")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("profile", nargs="?")
    parser.add_argument("-o", "--output")
    options = parser.parse_args()
    profile = options.profile or calibrated()
    table = Table("drafter", "B", "best k: measured", "predicted", *(f"{x} error" for x in TERMS))
    errors: dict[tuple[int, str], list[float]] = {}
    kept = []
    for draft in DRAFTERS:
        for batch in BATCHES:
            settings = Settings(
                draft=draft,
                dtype="bfloat16",
                trees=tuple(map(Tree.chain, KS)),
                batches=(batch,),
                requests=max(8, batch),
                max_new_tokens=NEW,
                profile=profile,
            )
            record = run(settings)
            kept.append(record)
            points = record["points"]
            cells = []
            for name in TERMS:
                off = [p["predicted"][name] / p[name] - 1 for p in points]
                errors.setdefault((batch, name), []).extend(off)
                median, bias = statistics.median(map(abs, off)), statistics.median(off)
                cells.append(f"{median:.1%} ({bias:+.1%})")
            best = [best_k(points), best_k([p["predicted"] | {"k": p["k"]} for p in points])]
            table.add_row(draft or "draft model", str(batch), *map(str, best), *cells)
            print(draft, batch, *best, *cells, flush=True)
    Console(width=130).print(table)
    for batch in BATCHES:
        medians = ", ".join(
            f"{name} {statistics.median(map(abs, errors[batch, name])):.1%}" for name in TERMS
        )
        print(f"batch {batch}: median error over drafters and k: {medians}")
    if options.output:
        Path(options.output).write_text(json.dumps(kept))


def best_k(points: list[dict[str, float]]) -> str:
    best = max(points, key=lambda point: point["S"])
    return f"{best['k']} ({best['S']:.2f})" if best["S"] > 1 else f"off ({best['S']:.2f})"


def calibrated() -> str:
    folder = Path(tempfile.mkdtemp())
    table = folder / "cpu.csv"
    measure(Calibration(device="cpu", table=table, budget=120.0))
    fit_and_write(table, folder / "cpu.yaml")
    return str(folder / "cpu.yaml")


if __name__ == "__main__":
    main()
