"""Runs functions as the ranks of a world of a few gloo processes, or of this process alone.

``python -m tests.runtime.processes MODULE:FUNCTION NUM RESULT.json`` runs a function of no arguments on every rank of a
world of forks, so that the imports, which take seconds, happen once; what rank 0 returns is written as JSON.
"""

import datetime
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from steelyard.processes.parent import end_with_parent

ROOT = Path(__file__).parents[2]
HANG_LIMIT_S = 900
"""Far above what a loaded host takes: a hang, not a measure."""
PARITY_LIMIT_S = 1200


def run_ranks(function: str, num_processes: int, folder: Path) -> Any:
    """What ``module:function`` returns on the first of several ranks."""
    result = folder / "result.json"
    command = [sys.executable, "-m", "tests.runtime.processes", function, str(num_processes), str(result)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False)
    assert finished.returncode == 0, f"{finished.stderr[:4000]}\n…\n{finished.stderr[-4000:]}"
    return json.loads(result.read_text())


def run_parity(cases: str, result: Path) -> dict[str, dict[str, Any]]:
    """What `tests.runtime.worker` finds for a module of cases, by the name of the case."""
    command = [sys.executable, "-m", "tests.runtime.worker", str(result), cases]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PARITY_LIMIT_S, check=False)
    assert finished.returncode == 0, f"{finished.stderr[:6000]}\n…\n{finished.stderr[-6000:]}"
    return json.loads(result.read_text())


@contextmanager
def one_process() -> Iterator[None]:
    """A world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _run_rank(function: str, rank: int, num_processes: int, store: str, result: Path) -> None:
    from steelyard.processes.group import quiet_notices

    quiet_notices()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, num_processes),
        rank=rank,
        world_size=num_processes,
        timeout=datetime.timedelta(seconds=300),
    )
    module, name = function.split(":")
    found = getattr(import_module(module), name)()
    if rank == 0:
        result.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _fork(*arguments: Any) -> int:
    process = os.fork()
    if process:
        return process
    end_with_parent()
    try:
        _run_rank(*arguments)
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def main(function: str, num_processes: int, result: Path) -> None:
    torch.set_num_threads(1)
    import_module(function.split(":", maxsplit=1)[0])
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        ranks = [_fork(function, rank, num_processes, store, result) for rank in range(num_processes)]
        failed = [rank for rank, process in enumerate(ranks) if os.waitpid(process, 0)[1]]
    if failed:
        sys.exit(f"ranks {failed} failed")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
