"""One file per command: read, call one function, print."""

import gc

_OBJECTS_BETWEEN_COLLECTIONS = 200_000
"""Objects between two garbage collections: imports and searches make many that stay, and the default threshold of
700 costs a fifteenth of the time of a plan."""


def main() -> None:
    """Run a command as `steelyard.cli.app.main` does, with rare garbage collection from the first import on."""
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    from steelyard.cli.app import main as run

    try:
        run()
    finally:
        gc.freeze()  # spares the interpreter a collection when it ends


__all__ = ["main"]
