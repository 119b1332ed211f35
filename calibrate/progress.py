"""What is being measured and how long it will take: a bar on a terminal, or plain lines."""

from __future__ import annotations

import importlib.util
import sys
import time
from typing import Any, Protocol


class Progress(Protocol):
    """Told what happens; `done` of `total` seconds have passed."""

    def __enter__(self) -> Progress: ...
    def __exit__(self, *error: object) -> None: ...
    def show(self, text: str, done: float) -> None:
        """Say what is being measured."""


class Silent:
    """Says nothing."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def show(self, text: str, done: float) -> None:
        """Say nothing."""


class Lines(Silent):
    """A line on stderr, at most every few seconds."""

    def __init__(self, total: float, every: float = 5.0) -> None:
        self.total, self.every, self._last = total, every, float("-inf")

    def show(self, text: str, done: float) -> None:
        """Print, unless something was printed just now."""
        if time.monotonic() - self._last >= self.every:
            self._last = time.monotonic()
            left = max(0.0, self.total - done)
            print(f"{text} ({left:.0f} s left)", file=sys.stderr, flush=True)


class Bar:
    """A bar of rich on stderr."""

    def __init__(self, total: float) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Rich

        self.total = total
        self._bar: Any = Rich(
            BarColumn(bar_width=24),
            TextColumn("{task.fields[left]} left"),
            TextColumn("{task.description}", markup=False),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("", total=total, left="")

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self, text: str, done: float) -> None:
        """Move the bar."""
        left = f"{max(0.0, self.total - done):3.0f} s"
        self._bar.update(self._task, completed=min(done, self.total), description=text, left=left)


def progress(total: float, *, lines: bool = False) -> Progress:
    """Return a bar on a terminal where there is rich, lines where asked for, or nothing."""
    terminal = sys.stderr is not None and sys.stderr.isatty()
    if terminal and importlib.util.find_spec("rich") is not None:
        return Bar(total)
    return Lines(total) if terminal or lines else Silent()
