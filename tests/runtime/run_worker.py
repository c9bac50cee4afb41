"""Several training runs in one launch: ``python -m tests.runtime.run_worker JOBS.json RESULT.json``.

A job is what `steelyard train` is given, with the number of processes; jobs run one after another, so a later one can
resume what an earlier one wrote. The imports, which take seconds, happen once: the processes are forks.
"""

import datetime
import json
import os
import sys
import tempfile
import traceback
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from steelyard.plan.file import read_plan
from steelyard.processes.group import quiet_notices
from steelyard.processes.parent import end_process, end_with_parent
from steelyard.runtime.train import train
from tests.runtime.arguments import options_from

TIMEOUT_S = 100


def run_rank(rank: int, jobs: list[dict[str, Any]], folder: Path, result: Path) -> None:
    """All jobs on one rank; rank 0 writes the losses of each, or the error that ended it."""
    torch.set_num_threads(1)
    quiet_notices()
    num_processes = jobs[0]["processes"]
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), num_processes),
        rank=rank,
        world_size=num_processes,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    found = json.loads(result.read_text()) if result.exists() else {}
    for job in jobs:
        try:
            record = train(read_plan(job["plan"]), job["data"], options_from(job["arguments"]))
            found[job["name"]] = [[step.step, step.loss] for step in record.steps]
        except Exception as error:
            if not job.get("fails"):
                raise
            found[job["name"]] = str(error)
    if rank == 0:
        result.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def fork(work: Any, *arguments: Any) -> int:
    """The id of a new process that does ``work`` and ends with code 0, or 1 if that raised."""
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


def main(jobs_path: Path, result: Path) -> None:
    for num_processes, jobs in groupby(json.loads(jobs_path.read_text()), key=lambda job: job["processes"]):
        with tempfile.TemporaryDirectory() as folder:
            group = list(jobs)
            ranks = [fork(run_rank, rank, group, Path(folder), result) for rank in range(num_processes)]
            failed = [rank for rank, process in enumerate(ranks) if os.waitpid(process, 0)[1]]
            if failed:
                sys.exit(f"ranks {failed} failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
