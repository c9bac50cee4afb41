"""Starts a training run on this host and returns what it measured.

Imports no torch: the command line that calls it starts at once.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

from steelyard.errors import InvalidPlanError
from steelyard.plan.file import parse_file, read_plan
from steelyard.processes.start import run_processes
from steelyard.profiles.record import RunRecord
from steelyard.runtime.options import TrainOptions


def launch(plan_path: str | Path, data: str | Path, options: TrainOptions) -> RunRecord:
    """Trains a plan on the devices of this host and returns the record; the first process's lines go to stdout.

    Raises a `UserError` for a mistake in the plan, the data or the options, and `RankFailedError` if a process failed;
    by then every process has ended.
    """
    plan = read_plan(plan_path)
    if not Path(data).exists():
        from steelyard.runtime.data import check_data_path

        check_data_path(data)
    with tempfile.TemporaryDirectory(prefix="steelyard-") as folder:
        record = options.record or Path(folder) / "record.json"
        arguments = [str(plan_path), "--data", str(data), *replace(options, record=record).arguments()]
        run_processes("steelyard.train", arguments, num_processes=plan.num_devices)
        return parse_file(record, RunRecord, InvalidPlanError, what="record")
