"""One process of a real training run that goes wrong on purpose: ``-m tests.runtime.faulty_train FAULTS PLAN …``.

FAULTS are ``ATTEMPT:FAULT:STEP`` separated by commas; all befall rank 1. Every process leaves its id in $PIDS.
"""

import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

from steelyard.processes.failure import restart_count
from steelyard.runtime import train
from steelyard.runtime.parallel_model import ParallelModel
from steelyard.runtime.process import main
from steelyard.runtime.stage import LayerLoop

BAD_RANK = "1"
SMALL_FILE_BYTES = 20_000


def end_now(*_arguments: Any, **_options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_forward() -> None:
    """In the middle of the step: its peers wait for it in a collective."""
    LayerLoop.forward = end_now  # type: ignore[method-assign]


def die_while_saving() -> None:
    """With half of its file on the disk."""
    write = dcp.FileSystemWriter.write_data

    def half(writer: Any, plan: Any, planner: Any) -> Any:
        result = write(writer, plan, planner)
        for file in Path(writer.path).glob(f"__{BAD_RANK}_*"):
            os.truncate(file, file.stat().st_size // 2)
        end_now()
        return result

    dcp.FileSystemWriter.write_data = half


def fill_disk() -> None:
    """No file may grow beyond a few bytes: what a full disk looks like to a process."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE_BYTES, SMALL_FILE_BYTES))


def spoil_loss() -> None:
    """Weights that are not finite, as a diverged run has them."""
    SPOILED.append(True)


def run_out_of_memory() -> None:
    """The error that PyTorch raises when a device has no memory left."""

    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    LayerLoop.forward = refuse  # type: ignore[method-assign]


def shrink_data() -> None:
    """The file of tokens loses all of them."""
    os.truncate(sys.argv[sys.argv.index("--data") + 1], 200)


SPOILED: list[bool] = []
FAULTS = {
    "kill-step": die_in_forward,
    "kill-save": die_while_saving,
    "full-disk": fill_disk,
    "nan": spoil_loss,
    "shrink": shrink_data,
    "memory": run_out_of_memory,
}


def plant(faults: str) -> None:
    """Has the faults of this attempt happen at their step."""
    planned = [text.split(":") for text in faults.split(",") if text]
    mine = {int(step): FAULTS[fault] for attempt, fault, step in planned if int(attempt) == restart_count()}
    train_step = ParallelModel.train_step

    def faulty_step(model: ParallelModel, read: Any) -> Any:
        fault = mine.pop(model.num_steps + 1, None)
        if fault is not None:
            fault()
        loss = train_step(model, read)
        return loss * float("nan") if SPOILED else loss

    mock.patch.object(train.ParallelModel, "train_step", faulty_step).start()


if __name__ == "__main__":
    Path(os.environ["PIDS"], f"{os.getpid()}.pid").touch()
    if os.environ["RANK"] == BAD_RANK:
        plant(sys.argv[1])
    main(sys.argv[2:])
