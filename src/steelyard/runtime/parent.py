"""Notices when the process that started this one is gone, however it ended, so that nothing is left behind."""

import os
import threading
import time
from collections.abc import Callable

_CHECK_S = 0.5


def watch_parent(when_gone: Callable[[], None]) -> None:
    """Calls ``when_gone`` from a thread once the parent of this process has ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_CHECK_S)
        when_gone()

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()
