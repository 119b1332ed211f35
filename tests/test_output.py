"""What a terminal shows: within its width, in its colours, and nothing that a name smuggles in."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len
from samples import MINIMAL_DEVICE
from test_fitting import table_file

from specmodel.cli import main
from specmodel.cli.output import Out, Table, prose, shown_width, styled, visible, write

ESCAPE = "\x1b"
NAMES = ("[/]", "[red]", ":smile:", f"{ESCAPE}[31m")
PREDICT = ("predict", "--gpu", "h100", "--model", "llama-3.1-8b", "--batch", "1,512")
COMMANDS = {
    "predict": (*PREDICT, "--alpha", "0.7"),
    "contexts": (*PREDICT, "--context", "2k,32k,128k"),
    "engine": (*PREDICT, "--engine", "vllm-2026", "--tp", "2", "--k", "3", "--price", "2"),
    "compare": ("compare", "--gpu", "h100", "--model", "qwen3-30b-a3b", "--context", "1k,8k"),
    "gpus": ("list", "gpus"),
    "models": ("list", "models"),
    "drafters": ("list", "drafters"),
    "engines": ("list", "engines"),
    "model": ("show", "deepseek-v3.2"),
    "device": ("show", "h100"),
    "explain": ("explain", "--gpu", "h100", "--model", "llama-3.1-8b"),
}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def beyond(text: str, width: int) -> list[str]:
    """Return the lines that are too wide and could have been broken."""
    wide = (line for line in text.splitlines() if cell_len(line) > width)
    return [line for line in wide if " " in line.strip().replace(" = ", "=")]


@pytest.mark.parametrize("command", COMMANDS)
def test_output_keeps_to_its_width(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = run(capsys, *COMMANDS[command])
    for width in (1, 40, 60, 80, 120, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        text = run(capsys, *COMMANDS[command])
        if width >= 60:
            assert beyond(text, width) == []
    monkeypatch.setenv("COLUMNS", "1000")
    assert run(capsys, *COMMANDS[command]) == full


def test_a_fit_and_the_accuracy_keep_to_their_width(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = str(table_file(tmp_path / "t.csv"))
    rates = tmp_path / "results.csv"
    rates.write_text("k,batch,tpot_ms,acceptance_length\n0,1,7,\n3,1,4.5,2.6\n", encoding="utf-8")
    of_rates = ("--gpu", "h100", "--model", "llama-3.1-8b")
    for width in (40, 60, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        text = run(capsys, "fit", table, "-o", str(tmp_path / "x.yaml"), "--overwrite")
        assert "shapes left out" in text
        text += run(
            capsys, "fit", str(rates), "-o", str(tmp_path / "e.yaml"), "--overwrite", *of_rates
        )
        assert width < 60 or beyond(text, width) == []


def test_the_important_columns_stay_and_the_others_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = run(capsys, *COMMANDS["contexts"]).splitlines()
    heads = next(line for line in lines if "batch  context" in line)
    assert heads.split()[:4] == ["batch", "context", "k", "S"]
    monkeypatch.setenv("COLUMNS", "80")
    text = run(capsys, "list", "models")
    heads = text.splitlines()[0]
    for name in ("name", "params (B)", "active (B)", "KV elem./token", "weights GB"):
        assert name in heads
    assert "not shown in 80 columns: layers (--format json or a wider terminal" in text


def test_columns_leave_in_their_order() -> None:
    table = Table("a", "text", "c", "b", order=("a", "b"), fold="text")
    table.add_row("1", "some words that fold where they must", "3", "2")
    assert table.fitted(None)[1] == []
    assert table.fitted(44)[1] == []  # two blanks between columns, and the text in two lines
    assert table.fitted(28)[1] == ["c"]
    assert table.fitted(25)[1] == ["text", "c"]
    assert table.fitted(1)[1] == ["text", "c", "b"]


@pytest.mark.parametrize("columns", ["", "0", "-5", "wide", "1e3", "9" * 5000, "\u0663"])
def test_other_values_of_columns_are_no_width(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert shown_width() is None


def test_prose_wraps_at_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prose("  a long line " * 9) == ("  a long line " * 9).strip("\n").rstrip()
    monkeypatch.setenv("COLUMNS", "16")
    assert prose("  the answer is S = 2.41 here") == "  the answer is\n    S = 2.41\n    here"
    assert prose("a https://example.org/long b") == "a\n  https://example.org/long\n  b"
    assert prose("\u4e2d\u6587\u4e2d\u6587 \u4e2d\u6587\u4e2d\u6587") == (
        "\u4e2d\u6587\u4e2d\u6587\n  \u4e2d\u6587\u4e2d\u6587"  # each takes two columns
    )
    assert prose("one\n\ntwo") == "one\n\ntwo"


@pytest.mark.parametrize("name", NAMES)
def test_names_are_shown_as_they_are(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Out()
    out.line(name)
    table = Table(name, order=(name,), fold=name)
    table.add_row(f"cell {name}")
    out.table(table)
    out.pairs([(name, name)], most=50)
    write(out.text())
    write(f"plain {name}")
    shown = capsys.readouterr().out
    assert shown.count(visible(name)) == 6
    assert ESCAPE not in shown

    for arguments in (("show", f"d{name}3"), ("predict", "--gpu", "h100", "--model", name)):
        assert main([*arguments]) == 2
        error = capsys.readouterr().err
        assert ESCAPE not in error
        assert error.count("\n") == 1
        assert visible(name) in error
    if "/" not in name:
        file = tmp_path / f"{name}.yaml"
        title = json.dumps(name.strip(ESCAPE))
        file.write_text(MINIMAL_DEVICE.replace("title: X", f"title: {title}"), encoding="utf-8")
        shown = run(capsys, "show", str(file)) + run(
            capsys, "predict", "--profile", str(file), "--model", "llama-3.1-8b"
        )
        assert shown.count(name.strip(ESCAPE)) >= 2


def test_control_characters_are_written_out() -> None:
    assert visible("a\tb\nc") == "a\tb\nc"
    assert visible("\x00\x07\x1b\r\x7f\x9b") == r"\x00\x07\x1b\x0d\x7f\x9b"


def test_no_colours_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    out = Out()
    out.line(styled("yes", "green"))
    assert out.text() == "yes"
    assert ESCAPE not in run(capsys, *COMMANDS["compare"])


def in_terminal(*arguments: str, width: int, **environment: str) -> str:
    """Return what the command writes to a terminal of a width."""
    import fcntl  # not on every system
    import pty
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    with subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "specmodel", *arguments],
        stdout=theirs,
        env={**kept, "TERM": "xterm", **environment},
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 65536):
                shown += part
        except OSError:  # the other end is closed
            pass
        os.close(ours)
    assert process.returncode == 0
    return shown.decode().replace("\r\n", "\n")


@pytest.mark.skipif(sys.platform == "win32", reason="has no pseudo-terminals")
def test_a_terminal_has_width_and_colour() -> None:
    predict = (*COMMANDS["predict"], "--context", "2k")
    coloured = in_terminal(*predict, width=80)
    plain = in_terminal(*predict, width=80, NO_COLOR="1")
    assert f"{ESCAPE}[32mspeculation pays up to batch" in coloured
    assert f"{ESCAPE}[31m*{ESCAPE}[0m" in coloured
    assert ESCAPE not in plain
    assert beyond(plain, 80) == []
    assert "not shown in 80 columns" in plain
    machine = in_terminal(*predict, "--format", "json", width=80)
    assert json.loads(machine)["points"][0]["batch"] == 1


@pytest.mark.parametrize(
    ("arguments", "headline"),
    [
        (("--alpha", "0.7"), f"{ESCAPE}[32mspeculation pays up to batch 227{ESCAPE}[0m:"),
        (("--alpha", "0.1", "--k", "4"), f"{ESCAPE}[31mleave speculation off{ESCAPE}[0m:"),
        (
            ("--alpha", "0.08", "--k", "1"),
            f"{ESCAPE}[33mspeculation pays up to batch 96{ESCAPE}[0m:",
        ),
        (("--alpha", "0.05", "--k", "1"), f"{ESCAPE}[33mleave speculation off{ESCAPE}[0m:"),
        (("--k", "0"), "\nspeculation is off, as asked (k = 0)\n"),
    ],
)
def test_verdicts_have_their_colours(
    arguments: tuple[str, ...],
    headline: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specmodel.cli.output._in_colour", lambda: True)
    shown = run(capsys, *PREDICT, *arguments)
    assert headline in shown
