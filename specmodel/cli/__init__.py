"""The command line: thin wrappers around the public functions."""

from specmodel.cli.main import main

__all__ = ["main"]
