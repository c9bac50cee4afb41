"""What a command shows while it works: a line on standard error that goes away, and nothing with ``--json``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def progress(first: str, *, silent: bool = False) -> Iterator[Callable[[str], None]]:
    """A function that shows what is being done now; shows nothing if ``silent`` or if nobody watches."""
    console = Console(stderr=True)
    if silent or not console.is_terminal:
        yield lambda _: None
        return
    with console.status(first) as status:
        yield status.update
