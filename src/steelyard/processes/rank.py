"""Life cycle of one process of a run: its work, the report of its failure, and its end once its parent has ended.

Under `steelyard.processes.start` an error goes to the launcher, which shows only the first one. Under a torchrun that
was started by hand it goes to stderr; a mistake that all processes of a host see is printed by one of them.

On Linux the kernel kills a process once its parent has ended, whatever the process is doing. A polling thread does so
on other systems, and if the process needs a chance to clean up.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from steelyard.output import escape_unprintable
from steelyard.processes.failure import (
    Failure,
    begin_attempt,
    failures_folder,
    torchrun_rank,
    write_failure,
)

PARENT_VARIABLE = "STEELYARD_PARENT"
"""Environment variable with the ID of the process that starts others, which they expect as their parent."""
_CHECK_S = 0.5
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have this process killed once its parent has ended, even while it is stuck outside Python."""
    # the kernel then sends this process a signal when the thread that started it ends; Linux only
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    watch_parent(lambda: os.kill(os.getpid(), signal.SIGKILL))


def watch_parent(when_gone: Callable[[], None]) -> None:
    """Call ``when_gone`` from a thread once the parent of this process has ended, or at once if it already has."""
    parent = int(os.environ.get(PARENT_VARIABLE, "0")) or os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_CHECK_S)
        when_gone()

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def end_process(exit_code: int) -> NoReturn:
    """End this process without unloading it, so that threads of collectives neither block nor crash its exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


FAILED = 1


def run_rank(work: Callable[[], None]) -> None:
    """Run ``work`` as one rank, report its failure if it fails, and end the process."""
    end_with_parent()
    escape_unprintable()
    begin_attempt()
    exit_code = 0
    try:
        work()
    except Exception as error:
        exit_code = getattr(error, "exit_code", FAILED)
        _report(Failure.of(error, rank=torchrun_rank(), exit_code=exit_code))
    end_process(exit_code)


def _report(failure: Failure) -> None:
    folder = failures_folder()
    if folder is not None:
        write_failure(failure, folder)
        return
    import torch.distributed as dist  # not needed by the process that starts others

    if dist.is_initialized() and not failure.is_final:
        print(f"rank {failure.rank} failed:\n{failure.traceback}", file=sys.stderr)
    elif _speaks_first():
        print(failure.message, file=sys.stderr)


def _speaks_first() -> bool:
    """Return whether no other process of this torchrun has reported a mistake that all of them see."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return True
    try:
        (Path(error_file).parents[1] / "reported").touch(exist_ok=False)
    except OSError:
        return False
    return True
