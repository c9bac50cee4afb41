"""Several training runs in one launch: ``python -m tests.runtime.run_worker JOBS.json RESULT.json``.

A job is the arguments of `steelyard train` and the number of processes. Jobs run one after another, so a later job can
resume an earlier one.
"""

import json
import sys
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from steelyard.integrations.run import train
from steelyard.plan.file import read_plan
from tests.runtime.arguments import options_from
from tests.runtime.processes import one_of_many_cases, run_world


def run_rank(rank: int, jobs: list[dict[str, Any]], result: Path) -> None:
    """All jobs on one rank; rank 0 writes the losses of each and how uneven routing was."""
    found = json.loads(result.read_text()) if result.exists() else {}
    for job in jobs:
        with one_of_many_cases():
            record = train(read_plan(job["plan"]), job["data"], options_from(job["arguments"]))
        found[job["name"]] = [[step.step, step.loss] for step in record.steps]
        found[f"{job['name']}: imbalance"] = [each.imbalance for each in record.ranks]
    if rank == 0:
        result.write_text(json.dumps(found))


def main(jobs_path: Path, result: Path) -> None:
    for num_processes, jobs in groupby(json.loads(jobs_path.read_text()), key=lambda job: job["processes"]):
        run_world(num_processes, partial(run_rank, jobs=list(jobs), result=result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
