"""Checkpoints of a `ParallelModel` in the user's own training loop, readable under any plan."""

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.optim import Optimizer

from steelyard.runtime.checkpoint import CheckpointReader
from steelyard.runtime.parallel_model import ParallelModel
from steelyard.runtime.state import RunState

_NUM_STEPS = "steelyard.num_steps"


def save_checkpoint(trainer: ParallelModel, optimizers: Iterable[Optimizer], folder: str | Path) -> None:
    """Writes parameters, optimizer states and the number of steps to a folder; a collective call.

    The folder holds a checkpoint of `torch.distributed.checkpoint` with the names of `steelyard.runtime.state`.
    """
    steps = {_NUM_STEPS: torch.tensor(trainer.num_steps)}
    dcp.save(RunState(trainer, optimizers).tensors() | steps, checkpoint_id=folder)


def load_checkpoint(trainer: ParallelModel, optimizers: Iterable[Optimizer], folder: str | Path) -> None:
    """Reads what `save_checkpoint` wrote under this or any other plan of the model, in place; a collective call."""
    state = RunState(trainer, optimizers)
    state.fill_optimizers()
    steps = {_NUM_STEPS: torch.tensor(0)}
    for copy in range(state.names.num_copies):
        dcp.load(state.tensors(copy=copy) | steps, storage_reader=CheckpointReader(Path(folder)))
    trainer.num_steps = int(steps[_NUM_STEPS])
