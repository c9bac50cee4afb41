"""Runner of functions as the ranks of a world of a few gloo processes, or of this process alone.

``python -m tests.runtime.processes MODULE:FUNCTION NUM RESULT.json`` runs a function of no arguments on every rank of a
world of forks, and writes the result of rank 0 as JSON. If the module has ``before_ranks``, that runs first; forks
inherit its imports.
"""

import datetime
import gc
import json
import os
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from steelyard.processes.group import quiet_notices
from steelyard.processes.rank import end_process, end_with_parent
from tests.processes.warm import HANG_LIMIT_S, run_warm

_SHOWN_CHARACTERS = 6000
_groups: dict[Any, Any] = {}
"""Process groups of this process's cases, by ranks, options and how many like it one case asked for."""


def run_ranks(function: str, num_processes: int, folder: Path) -> Any:
    """Return the result of ``module:function`` on the first of several ranks."""
    return run_module("tests.runtime.processes", function, num_processes, result=folder / "result.json")


def run_parity(cases: str, result: Path, names: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Return the results of `tests.runtime.worker` for a module of cases, all of them or those of these names."""
    found: dict[str, dict[str, Any]] = run_module("tests.runtime.worker", cases, json.dumps(names), result=result)
    return found


def run_module(module: str, *arguments: object, result: Path) -> Any:
    """Return the JSON that ``python -m MODULE … RESULT.json`` writes."""
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


def run_world(num_processes: int, work: Callable[[int], None]) -> None:
    """Run ``work`` of a rank on every rank of a world of forks; exit if one of them failed.

    A world of which a rank ended by SIGSEGV starts again once, because gloo's own thread was seen to end like that
    (docs/explanation/log/runtime.md).
    """
    torch.set_num_threads(1)
    for is_last in (False, True):
        with tempfile.TemporaryDirectory() as folder:

            def run_rank(rank: int, store: str = f"{folder}/store") -> None:
                with joined(rank, num_processes, store):
                    work(rank)

            ranks = [fork(run_rank, rank) for rank in range(num_processes)]
            codes = {rank: os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for rank, process in enumerate(ranks)}
        if -signal.SIGSEGV not in codes.values() or is_last:
            break
        print(f"ranks ended so: {codes}; the world begins again", file=sys.stderr, flush=True)
    if failed := [rank for rank, code in codes.items() if code]:
        sys.exit(f"ranks {failed} failed: {codes}")


@contextmanager
def one_of_many_cases() -> Iterator[None]:
    """Give a case the process groups that earlier cases made, as many of the same ranks as it asks for.

    Without reuse they pile up, each with its threads. DTensor's results for a mesh are found again under an equal one.
    """
    asked: Counter[Any] = Counter()
    make = distributed_c10d._new_group_with_tag

    def group_of(ranks: Any = None, *options: Any, **more: Any) -> Any:
        like = (ranks and tuple(ranks), options, tuple(sorted(more.items())))
        asked[like] += 1
        if (like, asked[like]) not in _groups:
            _groups[like, asked[like]] = make(ranks, *options, **more)
        return _groups[like, asked[like]]

    with mock.patch.object(distributed_c10d, "_new_group_with_tag", group_of):
        yield


@contextmanager
def joined(rank: int, num_processes: int, store: str) -> Iterator[None]:
    """A world of gloo processes that meet in a file, of which this process is a rank."""
    quiet_notices()
    meeting, timeout = dist.FileStore(store, num_processes), datetime.timedelta(seconds=HANG_LIMIT_S)
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
    getattr(import_module(module), "before_ranks", lambda: None)()

    def run_rank(rank: int) -> None:
        found = work()
        if rank == 0:
            result.write_text(json.dumps(found))

    run_world(num_processes, run_rank)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
