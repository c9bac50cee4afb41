"""One file per command: read, call one function, print."""

from steelyard.cli.app import main

__all__ = ["main"]
