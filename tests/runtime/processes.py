"""Runs functions as the ranks of a world of a few gloo processes, or of this process alone.

``python -m tests.runtime.processes MODULE:FUNCTION NUM RESULT.json`` runs a function of no arguments on every rank of a
world of forks; what rank 0 returns is written as JSON.
"""

import datetime
import gc
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from steelyard.processes.group import quiet_notices
from steelyard.processes.rank import end_process, end_with_parent
from tests.processes.warm import HANG_LIMIT_S, run_warm

_SHOWN_CHARACTERS = 6000


def run_ranks(function: str, num_processes: int, folder: Path) -> Any:
    """What ``module:function`` returns on the first of several ranks."""
    return run_module("tests.runtime.processes", function, num_processes, result=folder / "result.json")


def run_parity(cases: str, result: Path, names: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """What `tests.runtime.worker` finds for a module of cases, all of them or those of these names."""
    found: dict[str, dict[str, Any]] = run_module("tests.runtime.worker", cases, json.dumps(names), result=result)
    return found


def run_module(module: str, *arguments: object, result: Path) -> Any:
    """What ``python -m MODULE … RESULT.json`` writes there."""
    finished = run_warm(module, *arguments, result, timeout_s=HANG_LIMIT_S)
    said = finished.stderr
    assert finished.returncode == 0, f"{said[:_SHOWN_CHARACTERS]}\n…\n{said[-_SHOWN_CHARACTERS:]}"
    return json.loads(result.read_text())


@contextmanager
def one_process() -> Iterator[None]:
    """A world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_world(num_processes: int, work: Callable[[int], None], *, timeout_s: float = 300.0) -> None:
    """Does ``work`` of a rank on every rank of a world of forks; exits if one of them failed."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:

        def run_rank(rank: int) -> None:
            with joined(rank, num_processes, f"{folder}/store", timeout_s):
                work(rank)

        ranks = [fork(run_rank, rank) for rank in range(num_processes)]
        failed = [rank for rank, process in enumerate(ranks) if os.waitpid(process, 0)[1]]
    if failed:
        sys.exit(f"ranks {failed} failed")


@contextmanager
def joined(rank: int, num_processes: int, store: str, timeout_s: float = 300.0) -> Iterator[None]:
    """A world of gloo processes that meet in a file, of which this process is a rank."""
    quiet_notices()
    meeting, timeout = dist.FileStore(store, num_processes), datetime.timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=num_processes, timeout=timeout)
    yield
    dist.barrier()
    dist.destroy_process_group()


def fork(work: Callable[..., None], *arguments: Any) -> int:
    """The id of a new process that does ``work`` and ends with code 0, or 1 if that raised.

    What this process has imported and built is no garbage: a collection in a fork that looked at all of it took 0.3 s
    of CPU, and copied the pages.
    """
    gc.freeze()
    process = os.fork()
    if process:
        return process
    end_with_parent()
    exit_code = 0
    try:
        work(*arguments)
    except BaseException:
        traceback.print_exc()
        exit_code = 1
    return end_process(exit_code)


def main(function: str, num_processes: int, result: Path) -> None:
    torch.set_num_threads(1)
    module, name = function.split(":")
    work = getattr(import_module(module), name)

    def run_rank(rank: int) -> None:
        found = work()
        if rank == 0:
            result.write_text(json.dumps(found))

    run_world(num_processes, run_rank)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
