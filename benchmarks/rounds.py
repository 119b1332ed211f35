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

from calibrate.speculate.inputs import Settings
from calibrate.speculate.measuring import run
from calibrate.speculate.predicting import calibrated
from calibrate.speculate.trees import Tree
from specmodel.hardware import write_device

DRAFTERS = ("own", "eagle", "mtp", "medusa", "ngram", "exit:1", "sparse:4-60")
BATCHES, KS, NEW = (1, 4, 16), range(1, 9), 32
TERMS = ("S", "T_p", "T_v", "T_d")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("profile", nargs="?")
    parser.add_argument("-o", "--output")
    parser.add_argument("--drafters", default=",".join(DRAFTERS), help="'own' is the draft model")
    options = parser.parse_args()
    profile = options.profile
    if profile is None:
        profile = str(Path(tempfile.mkdtemp(), "cpu.yaml"))
        write_device(calibrated("cpu", "bfloat16", 120.0), profile)
    table = Table("drafter", "B", "best k: measured", "predicted", *(f"{x} error" for x in TERMS))
    errors: dict[tuple[int, str], list[float]] = {}
    kept = []
    for draft in options.drafters.split(","):
        for batch in BATCHES:
            settings = Settings(
                draft=None if draft == "own" else draft.replace("-", ","),
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
            table.add_row(draft, str(batch), *map(str, best), *cells)
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


if __name__ == "__main__":
    main()
