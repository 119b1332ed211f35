"""``python -m specmodel``, and the installed command."""

import os
import signal


def run() -> None:
    """Load and run the command line; Ctrl-C ends it without a traceback, while it loads too."""
    before = signal.signal(signal.SIGINT, _stop)
    from specmodel.cli.main import run as command

    signal.signal(signal.SIGINT, before)
    command()


def _stop(*_: object) -> None:
    os._exit(130)  # nothing is open yet


if __name__ == "__main__":
    run()
