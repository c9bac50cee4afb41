"""How the processes of a run end: at once when they are done, and when the process that started them is gone.

On Linux the kernel ends a process when its parent has ended, whatever it is doing; a thread that looks now and then
does elsewhere, and where the parent must be given a chance to clean up.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

PARENT_VARIABLE = "STEELYARD_PARENT"
"""Environment variable with the id of the process that starts others, which they expect as their parent."""
_CHECK_S = 0.5
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Has this process killed once its parent has ended, even while it is stuck outside Python."""
    ask_kernel_for(signal.SIGKILL)
    watch_parent(lambda: os.kill(os.getpid(), signal.SIGKILL))


def watch_parent(when_gone: Callable[[], None]) -> None:
    """Calls ``when_gone`` from a thread once the parent of this process has ended, or at once if it has already."""
    parent = int(os.environ.get(PARENT_VARIABLE, "0")) or os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_CHECK_S)
        when_gone()

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def ask_kernel_for(signal_number: int) -> None:
    """Has the kernel send this process a signal when the thread that started it ends; does nothing but on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)


def end_process(exit_code: int) -> NoReturn:
    """Ends this process without unloading it: threads of collectives neither hold it nor crash it on the way out."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
