"""The life of one process of a run: its work, and how its end is reported.

Under `steelyard.processes.start` an error goes to the launcher, which shows the first one only. Under a torchrun that
was started by hand it goes to stderr: mistakes that all processes of a host see alike are printed by one of them.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from steelyard.errors import UserError
from steelyard.output import escape_unprintable
from steelyard.processes.failure import (
    Failure,
    begin_attempt,
    failures_folder,
    previous_failures,
    torchrun_rank,
    write_failure,
)
from steelyard.processes.parent import end_process, end_with_parent

FAILED = 1


def run_rank(work: Callable[[], None]) -> None:
    """Runs ``work`` as one rank, reports how it failed, and ends the process.

    Started again after an error that would come again, it ends at once with that error.
    """
    end_with_parent()
    escape_unprintable()
    begin_attempt()
    final = next((failure for failure in previous_failures() if failure.is_final), None)
    if final is not None:
        _report(final)
        end_process(final.exit_code)
    exit_code = 0
    try:
        work()
    except Exception as error:
        exit_code = error.exit_code if isinstance(error, UserError) else FAILED
        _report(Failure.of(error, rank=torchrun_rank(), exit_code=exit_code))
    end_process(exit_code)


def _report(failure: Failure) -> None:
    folder = failures_folder()
    if folder is not None:
        write_failure(failure, folder)
    elif dist.is_initialized():
        print(f"rank {failure.rank} failed:\n{failure.traceback}", file=sys.stderr)
    elif _speaks_first():
        print(failure.message, file=sys.stderr)


def _speaks_first() -> bool:
    """Whether no other process that this torchrun started has reported a mistake that all of them see."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return True
    try:
        (Path(error_file).parents[1] / "reported").touch(exist_ok=False)
    except OSError:
        return False
    return True
