"""One command that measures a device and leaves table, profile and a summary in a folder.

    python -m calibrate.device_check --device cuda:0 --out DIR --budget 420

Operators first, then whole passes of decoders with random weights (8B and 1B shapes on a GPU), on
a GPU at last a pass of the decoder engine, replayed from a graph and launched from Python.
The measuring runs in a process of its own: where a device fault kills it, another one goes on
behind the case that failed, or with the sections that were not begun. Needs torch, numpy, scipy
and PyYAML.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from calibrate.clock import Clock
from calibrate.command import summary
from calibrate.engine.config import from_architecture
from calibrate.engine.decoder import Decoder
from calibrate.engine.graphs import capture
from calibrate.profile import fit_and_write
from calibrate.run import Settings, measure
from calibrate.table import Row, measured, read_rows, read_sidecar
from specmodel.architectures import Architecture, load_model
from specmodel.checking import check_text
from specmodel.errors import SpecmodelError

OPERATORS = ("stream", "launch", "gemm", "attention", "elementwise", "experts", "allreduce")
PHASES = ((OPERATORS, 0.55), (("passes",), 1.0), (("graphs",), 1.0))
"""Sections of each process, and the part of the budget that is spent when it ends."""

_TRIES = 4
_GRACE = 20.0  # seconds past its budget that a process may take: starting, the last block


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, fit, summarise; 0 when all went well, 1 when something was lost on the way."""
    parser = argparse.ArgumentParser(description="Measure a device into a folder.")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=420.0, help="seconds of measuring")
    parser.add_argument("--tiny", action="store_true", help="small shapes: checks the code")
    parser.add_argument("--phase", type=int, help="measure this one in this process")
    parser.add_argument("--skip-started", action="store_true", help="leave out what was begun")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.phase is not None:
        return _measure(given)
    whole = True
    for phase in range(len(PHASES) if given.device.startswith("cuda") else len(PHASES) - 1):
        whole &= _child(given, phase)
    return max(_conclude(given.out), 0 if whole else 1)


def _measure(given: argparse.Namespace) -> int:
    sections, until = PHASES[given.phase]
    if sections == ("graphs",):
        text = graph_check(load_model("llama-3.2-1b"), given.device)
        (given.out / "graphs.txt").write_text(text, encoding="utf-8")
        return 0
    settings = Settings(
        device=given.device,
        table=given.out / "table.csv",
        budget=given.budget * until,
        tiny=given.tiny,
        only=sections,
    )
    measure(settings, skip_started=given.skip_started, lines=True)
    return 0


def _child(given: argparse.Namespace, phase: int) -> bool:
    """Run a phase in a process of its own, again after a fault; return whether it was whole."""
    before = PHASES[phase - 1][1] if phase else 0.0
    end = time.monotonic() + given.budget * (PHASES[phase][1] - before) + _GRACE
    command = [sys.executable, "-m", "calibrate.device_check", "--device", given.device]
    command += ["--out", str(given.out), "--budget", str(given.budget), "--phase", str(phase)]
    command += ["--tiny"] * given.tiny
    for attempt in range(_TRIES):
        # a failed case is on record and is not tried again; what died without a word is left out
        again = ["--skip-started"] * (attempt > 1)
        try:
            left = max(1.0, end - time.monotonic())
            code: int | str = subprocess.run([*command, *again], timeout=left).returncode  # noqa: S603
        except subprocess.TimeoutExpired:
            code = "stopped, it was over its time"
        if code == 0:
            return attempt == 0
        print(f"phase {phase}, try {attempt + 1}: exit {code}", file=sys.stderr, flush=True)
        if time.monotonic() > end - _GRACE / 2:
            break
    return False


def _conclude(out: Path) -> int:
    table = out / "table.csv"
    if not table.exists():
        print("nothing was measured", file=sys.stderr)
        return 1
    rows, record = read_rows(table), read_sidecar(table)
    text = f"{summary(record)}\n\n{pass_summary(rows)}\n"
    if (graphs := out / "graphs.txt").exists():
        text += f"\n{graphs.read_text(encoding='utf-8')}\n"
    code = 0
    try:
        *_, check = fit_and_write(table, out / "profile.yaml", overwrite=True)
        text += f"\n{check_text(check)}\n" if check is not None else ""
    except SpecmodelError as error:
        text += f"\nno profile: {error}\n"
        code = 1
    (out / "summary.txt").write_text(text, encoding="utf-8")
    print(text)
    return code


def pass_summary(rows: Sequence[Row]) -> str:
    """Return the time of each pass, and how much longer verifying takes than decoding."""
    plain: dict[tuple[str, ...], float] = {}
    found = sorted(
        measured(rows, "pass"),
        key=lambda r: (r["model"], r["mode"], *(int(r[c]) for c in ("batch", "context", "width"))),
    )
    lines = [f"{'model':16} {'mode':6} {'B':>4} {'L':>6} {'W':>3} {'time ms':>9} {'T_v/T_p':>8}"]
    for row in found:
        point = tuple(row[column] for column in ("model", "mode", "batch", "context"))
        seconds = float(row["seconds"])
        if row["width"] == "1":
            plain[point] = seconds
        ratio = f"{seconds / plain[point]:8.3f}" if point in plain else f"{'-':>8}"
        lines.append(
            f"{row['model']:16} {row['mode']:6} {row['batch']:>4} {row['context']:>6} "
            f"{row['width']:>3} {seconds * 1e3:9.3f} {ratio}"
        )
    lost = [row for row in rows if row["note"].startswith("error:")]
    lines += [f"failed: {row['operator']} {row['model']}: {row['note']}" for row in lost]
    return "\n".join(lines)


def graph_check(model: Architecture, device: str) -> str:
    """Return the time of the engine's pass, launched and replayed, and how far they differ."""
    decoder = Decoder(from_architecture(model), dtype=torch.bfloat16, device=device).randomise()
    capture(decoder)
    cache, clock = decoder.cache(1, 1024), Clock(torch.device(device))
    cache.advance(1000)  # over zeros: their values do not matter here
    lines = []
    with torch.inference_mode():
        for width in (1, 5):
            tokens = torch.arange(width, device=device)[None]
            found, times = {}, {}
            for eager in (True, False):
                taken = []
                for _ in range(30):
                    start = clock.now()
                    found[eager] = decoder.hidden(tokens, cache, eager=eager, span=1024)
                    taken.append(clock.now() - start)
                times[eager] = statistics.median(taken)
            apart = float((found[True] - found[False]).abs().max())
            lines.append(
                f"{model.name}, B = 1, W = {width}: launched {times[True] * 1e3:.3f} ms, replayed "
                f"{times[False] * 1e3:.3f} ms, at most {apart:.2g} apart"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
