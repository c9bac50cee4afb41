"""Process group of a run: joined from torchrun's environment and destroyed at the end.

NCCL with one GPU per process if there are GPUs, else gloo with one thread per process (unless OMP_NUM_THREADS is set),
so that several processes on one machine do not compete for its cores.
"""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from steelyard.errors import UserError


@contextmanager
def process_group(timeout_s: float, *, store: dist.Store | None = None) -> Iterator[None]:
    """Join the processes that torchrun started, over ``store`` if it is given, and leave them at the end.

    A collective that waits longer than ``timeout_s`` seconds for a peer raises. After an error the group is not
    destroyed, because that would wait for the peers: the process is expected to end. Raises `UserError` outside
    torchrun, or if a host has more processes than GPUs.
    """
    init_process_group(timeout_s, store=store)
    yield
    dist.barrier()
    dist.destroy_process_group()


def init_process_group(timeout_s: float, *, store: dist.Store | None = None) -> None:
    """Join the processes that torchrun started."""
    _check_environment()
    quiet_notices()
    timeout = timedelta(seconds=timeout_s)
    place: dict[str, Any] = {}
    if store is not None:
        place = {"store": store, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    if torch.cuda.is_available():
        on_host, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if on_host > gpus:
            raise UserError(
                field="nproc-per-node",
                found=f"{on_host} processes on a host with {gpus} GPUs",
                expected="at most one process per GPU",
                hint=f"start {gpus} processes on this host, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to use the CPU",
            )
        local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", timeout=timeout, device_id=torch.device("cuda", local_rank), **place)
        return
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timeout, **place)


@contextmanager
def fake_group(rank: int, size: int) -> Iterator[None]:
    """Make this process one rank of a fake world: collectives return the right shapes and have no effect.

    An existing process group, which would be destroyed with the fake one, is set aside and restored at the end.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # not needed by a run

    quiet_notices()
    own, excepthook = dist.distributed_c10d._world if dist.is_initialized() else None, sys.excepthook
    if own is not None:
        from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

        dist.distributed_c10d._world = ThreadLocalWorld()
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()
    finally:
        sys.excepthook = excepthook  # of torch, which puts this rank before every line of a traceback
        if own is not None:
            torch._C._distributed_c10d._set_thread_isolation_mode(False)
            dist.distributed_c10d._world = own


def quiet_notices() -> None:
    """Suppress notices of PyTorch that a user cannot act on.

    DTensor logs how it redistributes (by all-gather on gloo, or axis by axis). FSDP warns of a layer that returns a
    view, which would matter only if the next layer changed it in place, and none does. Fake tensors log the traceback
    of a failing operation before it raises. torch.compile warns that torchao's states have no stable hash for caching.
    """
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    for name in ("_collective_utils", "_redistribute"):
        logging.getLogger(f"torch.distributed.tensor.{name}").addFilter(_is_not_about_redistribution)
    for message in (".*returned a view tensor.*", ".*_stable_hash_for_caching.*"):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)


def _is_not_about_redistribution(entry: logging.LogRecord) -> bool:
    message = entry.getMessage()
    return "alltoall" not in message and "While redistributing" not in message


def world_size() -> int:
    """Number of processes that torchrun started on all hosts, known before they have joined."""
    _check_environment()
    return int(os.environ["WORLD_SIZE"])


def local_rank() -> int:
    """Index of this process among those that torchrun started on its host."""
    _check_environment()
    return int(os.environ.get("LOCAL_RANK", "0"))


def host_ranks() -> range:
    """Ranks that torchrun started on this host."""
    first = int(os.environ["RANK"]) - local_rank()
    return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _check_environment() -> None:
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise UserError(
            field="RANK",
            found="no torchrun environment",
            expected="a process started by torchrun",
            hint="use `steelyard train` or `steelyard profile`, or torchrun --nproc-per-node N -m steelyard.train …",
        )


def current_device() -> torch.device:
    """Return the device of this process: its current GPU if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
