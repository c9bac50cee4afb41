"""How the processes of a run end: at once when they are done, and when the process that started them is gone."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

_CHECK_S = 0.5


def watch_parent(when_gone: Callable[[], None]) -> None:
    """Calls ``when_gone`` from a thread once the parent of this process has ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_CHECK_S)
        when_gone()

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def end_process(exit_code: int) -> NoReturn:
    """Ends this process without unloading it: threads of collectives neither hold it nor crash it on the way out."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
