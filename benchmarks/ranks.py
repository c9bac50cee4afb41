"""What the benchmarks of the runtime share: work on the ranks of a gloo group, and a step of training under a plan."""

import datetime
import os
import sys
import tempfile
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

from steelyard.modules.updates import LocalAdamW
from steelyard.plan.plan import Plan
from steelyard.processes.group import quiet_notices
from steelyard.runtime.parallel_model import parallelize_plan

Step = Callable[[torch.Tensor], None]
"""Trains on a global batch of token ids [N, S + 1]."""


def training_step(plan: Plan) -> Step:
    """Forward, backward, clipping and AdamW under a plan, on this rank."""
    model = parallelize_plan(plan)
    optimizers = model.make_optimizers(lambda parameters: LocalAdamW(parameters, lr=1e-3))

    def step(tokens: torch.Tensor) -> None:
        model.train_step(lambda samples: tokens[samples])
        model.clip_gradients(1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def on_ranks(num_ranks: int, work: Callable[[], None]) -> None:
    """Does the work in so many new processes, each a rank with one thread; exits if one of them failed."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_fork(rank, num_ranks, f"{folder}/store", work) for rank in range(num_ranks)]
        failed = [rank for rank, process in enumerate(ranks) if os.waitpid(process, 0)[1]]
    if failed:
        sys.exit(f"ranks {failed} failed")


def _fork(rank: int, num_ranks: int, store: str, work: Callable[[], None]) -> int:
    """The id of a new process that runs a rank."""
    process = os.fork()
    if process:
        return process
    try:
        _run_rank(rank, num_ranks, store, work)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _run_rank(rank: int, num_ranks: int, store: str, work: Callable[[], None]) -> None:
    quiet_notices()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=300),
    )
    work()
    dist.barrier()
    dist.destroy_process_group()
