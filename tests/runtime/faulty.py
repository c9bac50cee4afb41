"""Process of a run that fails on purpose: ``-m tests.runtime.faulty FAULT FOLDER``."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from steelyard.errors import UserError
from steelyard.processes.group import process_group
from steelyard.processes.rank import run_rank


def work() -> None:
    fault, folder = sys.argv[1], Path(sys.argv[2])
    (folder / f"{os.getpid()}.pid").touch()
    with process_group(timeout_s=3600):
        dist.barrier()
        if dist.get_rank() == 1:
            (folder / "misbehaves").touch()
            misbehave(fault)
        dist.all_reduce(torch.ones(1))


def misbehave(fault: str) -> None:
    if fault == "raise":
        raise ValueError("the planted error")
    if fault == "mistake":
        raise UserError(field="--option", found="this", expected="that")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "exit":
        os.write(2, b"the library gives up\n")
        os._exit(3)
    if fault == "stuck":
        ctypes.PyDLL(None).sleep(7200)  # holds the interpreter's lock: no thread of Python's runs
    time.sleep(7200)


if __name__ == "__main__":
    run_rank(work)
