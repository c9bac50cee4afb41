"""Process of a real training run that fails on purpose: ``-m tests.runtime.faulty_train FAULTS PLAN …``.

FAULTS are ``ATTEMPT:FAULT:STEP`` separated by commas; all hit rank $BAD_RANK, or 1. Every process leaves its id in
$PIDS.
"""

import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

from steelyard.processes.failure import restart_count
from steelyard.processes.start import RETURN_SIGNAL
from steelyard.runtime.parallel_model import ParallelModel
from steelyard.runtime.stage import LayerLoop
from steelyard.train import main

BAD_RANK = os.environ.get("BAD_RANK", "1")
SMALL_FILE_BYTES = 20_000


SLOW_S = 0.5
"""Far above what these layers take on a loaded machine."""
WAIT_S = 1.5
"""The steps that are left after a loss take long enough for another host to start and be found."""


def end_now(*_arguments: Any, **_options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_now(*_arguments: Any, **_options: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die_in_forward(_step: int) -> None:
    """Die in the middle of the step, while peers wait in a collective."""
    LayerLoop.forward = end_now  # type: ignore[method-assign]


def stop_in_forward(_step: int) -> None:
    """Stop in the forward pass but stay alive, as a debugger, a suspended job or a machine out of memory leaves a
    process.
    """
    LayerLoop.forward = stop_now  # type: ignore[method-assign]


def die_while_saving(step: int) -> None:
    """Die with half of the file of the checkpoint after this step on the disk."""

    def half(writer: Any, write: Any) -> Any:
        result = write()
        for file in Path(writer.path).glob(f"__{BAD_RANK}_*"):
            os.truncate(file, file.stat().st_size // 2)
        end_now()
        return result

    while_saving(step, half)


def fill_disk(step: int) -> None:
    """Fill the disk: from the checkpoint after this step on, no file may grow beyond a few bytes."""

    def write_little(_writer: Any, write: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE_BYTES, SMALL_FILE_BYTES))
        return write()

    while_saving(step, write_little)


def while_saving(step: int, act: Any) -> None:
    write = dcp.FileSystemWriter.write_data

    def write_data(writer: Any, plan: Any, planner: Any) -> Any:
        if f"step-{step:08d}" in str(writer.path):
            return act(writer, lambda: write(writer, plan, planner))
        return write(writer, plan, planner)

    dcp.FileSystemWriter.write_data = write_data


def run_out_of_memory(_step: int) -> None:
    """The error that PyTorch raises when a device has no memory left."""

    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    LayerLoop.forward = refuse  # type: ignore[method-assign]


def shrink_data(_step: int) -> None:
    """The file of tokens loses nearly all of them."""
    os.truncate(sys.argv[sys.argv.index("--data") + 1], 200)


def bring_back(_step: int) -> None:
    """The user says that what was given up is back."""
    os.kill(int(os.environ["LAUNCHER"]), RETURN_SIGNAL)


def compute_slowly(_step: int) -> None:
    """Compute slowly from this step on, as a device that is too hot."""
    forward = LayerLoop.forward

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(SLOW_S)
        return forward(*arguments, **options)

    LayerLoop.forward = slow  # type: ignore[method-assign]


def kill_agent(_step: int) -> None:
    """Kill the agent and its processes, as a host that loses power."""
    os.kill(os.getppid(), signal.SIGKILL)


FAULTS = {
    "slow": compute_slowly,
    "kill-agent": kill_agent,
    "return": bring_back,
    "kill-step": die_in_forward,
    "stop-step": stop_in_forward,
    "kill-save": die_while_saving,
    "full-disk": fill_disk,
    "shrink": shrink_data,
    "memory": run_out_of_memory,
}


def slow_down() -> None:
    """Every step takes `WAIT_S` more in a world of fewer than $SLOW_BELOW processes."""
    train_step = ParallelModel.train_step

    def slow_step(model: ParallelModel, read: Any, **options: Any) -> Any:
        if int(os.environ["WORLD_SIZE"]) < int(os.environ["SLOW_BELOW"]):
            time.sleep(WAIT_S)
        return train_step(model, read, **options)

    mock.patch.object(ParallelModel, "train_step", slow_step).start()


def plant(faults: str) -> None:
    """Make the faults of this attempt happen at their step."""
    planned = [text.split(":") for text in faults.split(",") if text]
    mine = {int(step): FAULTS[fault] for attempt, fault, step in planned if int(attempt) == restart_count()}
    train_step = ParallelModel.train_step

    def faulty_step(model: ParallelModel, read: Any, **options: Any) -> Any:
        step = model.num_steps + 1
        if step in mine:
            mine.pop(step)(step)
        return train_step(model, read, **options)

    mock.patch.object(ParallelModel, "train_step", faulty_step).start()


if __name__ == "__main__":
    Path(os.environ["PIDS"], f"{os.getpid()}.pid").touch()
    if "SLOW_BELOW" in os.environ:
        slow_down()
    if os.environ["RANK"] == BAD_RANK:
        plant(sys.argv[1])
    main(sys.argv[2:])
