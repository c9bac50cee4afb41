"""One file per command: read, call one function, print."""

import gc

_OBJECTS_BETWEEN_COLLECTIONS = 200_000
"""Imports and searches make many that stay; going through them at every 700 takes a fifteenth of the time of a plan."""


def main() -> None:
    """Runs a command as `steelyard.cli.app.main` does, looking for garbage rarely from its first import on."""
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    from steelyard.cli.app import main as run

    try:
        run()
    finally:
        gc.freeze()  # the interpreter, as it ends, goes through none of what was made


__all__ = ["main"]
