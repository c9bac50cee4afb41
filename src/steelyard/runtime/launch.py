"""Starts training runs on this host: one run of a plan, or a few steps of several plans to find the fastest.

If a plan runs out of memory, the run continues with the plan's next fallback, from the newest checkpoint or, without
one, from the start. Imports no torch, so the command line that calls it starts immediately.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from steelyard.errors import InvalidPlanError, first_line
from steelyard.plan.file import parse_file, read_plan, write_plan
from steelyard.plan.plan import Plan
from steelyard.processes.failure import RankFailedError
from steelyard.processes.start import Elastic, run_processes
from steelyard.profiles.record import RunRecord
from steelyard.runtime.checkpoint_folder import (
    LATEST,
    changes,
    check_model,
    checkpoint_to_resume,
    lock_folder,
    newest_intact,
    read_info,
)
from steelyard.runtime.checks import check_builder, check_elastic, check_host, check_optimizer, check_outputs
from steelyard.runtime.data.prepare import prepare_data
from steelyard.runtime.options import TrainOptions
from steelyard.units import format_bytes, format_seconds

OUT_OF_MEMORY = "MemoryExceededError"
"""Error type that a rank reports when memory runs out."""


def launch(
    plan_path: str | Path,
    data: str | Path | None,
    options: TrainOptions,
    *,
    restarts: int = 0,
    elastic: Elastic | None = None,
    stdout_to_stderr: bool = False,
) -> RunRecord | None:
    """Train a plan on the devices of this host and return the run record.

    The first process prints a line per step, to stderr with ``stdout_to_stderr``. ``data`` is None if ``options`` name
    a data set. The result is None in an ``elastic`` run whose record is on another host.

    If a process fails, torchrun restarts all processes, up to ``restarts`` times. Raises `UserError` for a mistake in
    the plan, the data or the options, `RankFailedError` if a process failed, and `StoppedError` if a signal stopped
    the run and its checkpoint is complete. By then every process has ended.
    """
    plan = read_plan(plan_path)
    check_builder(plan, options.builder)
    check_outputs(options)
    check_elastic(options)
    source = options.source(data)
    check_optimizer(plan, options)
    for each in (source, options.eval_source):
        prepare_data(each, options.text, plan)
    is_alone = elastic is None or elastic.rendezvous is None
    if options.checkpoint_dir is not None and is_alone:
        lock_folder(options.checkpoint_dir).close()
    resumed = checkpoint_to_resume(options)
    if resumed is not None:
        info = read_info(resumed[0])
        check_model(info, resumed[0], plan)
        changes(info, resumed[0], options, source)
    with tempfile.TemporaryDirectory(prefix="steelyard-") as folder:
        options = replace(options, record=options.record or Path(folder) / "record.json")
        path = Path(plan_path)
        while True:
            try:
                return _run(path, plan, data, options, restarts, elastic, stdout_to_stderr)
            except RankFailedError as error:
                if error.failure is None or error.failure.error_type != OUT_OF_MEMORY:
                    raise
                if not plan.fallbacks:
                    hint = "the plan has no fallback; plan again with less --memory, or add fallbacks with --fallbacks"
                    raise RankFailedError(f"{first_line(error)}\n  to fix: {hint}", error.failure) from error
                plan = plan.fallback_plan(0)
                print(_notice(plan, error), file=sys.stderr, flush=True)
            path = Path(folder) / "fallback.json"
            write_plan(plan, path)
            if options.checkpoint_dir is not None and newest_intact(options.checkpoint_dir)[0] is not None:
                options = replace(options, resume=LATEST, no_resume=False)


def _run(
    path: Path,
    plan: Plan,
    data: str | Path | None,
    options: TrainOptions,
    restarts: int,
    elastic: Elastic | None,
    stdout_to_stderr: bool,
) -> RunRecord | None:
    ranks = _first_ranks(plan, options.pool, num_hosts=1 if elastic is None else elastic.hosts[1])
    check_host(plan, ranks, device=options.device)
    arguments = [str(path), *(() if data is None else ("--data", str(data))), *options.arguments()]
    run_processes(
        "steelyard.train",
        arguments,
        num_processes=len(ranks),
        restarts=restarts,
        elastic=elastic,
        stdout_to_stderr=stdout_to_stderr,
        stop_s=options.timeout_s if options.checkpoint_dir is not None else None,
    )
    assert options.record is not None, "set by the caller"
    if elastic is not None and elastic.hosts[1] > 1 and not options.record.exists():
        return None
    return parse_file(options.record, RunRecord, InvalidPlanError, what="record")


def _first_ranks(plan: Plan, pool: str | None, *, num_hosts: int) -> range:
    """Return the ranks of the first of ``num_hosts`` hosts, or of the first host of a device group."""
    if pool is None:
        return range(plan.num_devices // num_hosts)
    pools = plan.pools()
    place = [each.name for each in pools].index(pool)
    before = sum(each.num_devices for each in pools[:place])
    return range(before, before + pools[place].devices_per_node)


def _notice(plan: Plan, error: RankFailedError) -> str:
    expected = "no prediction"
    if plan.prediction is not None:
        most = max(stage.total_bytes for stage in plan.prediction.stages)
        expected = f"{format_seconds(plan.prediction.step_time_s)} per step, {format_bytes(most)} per device"
    left = len(plan.fallbacks)
    return f"{first_line(error)}\ncontinuing with the next fallback of the plan ({expected}; {left} more after it)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A trial run of a plan: its record, or the reason why it failed."""

    plan: Plan
    record: RunRecord | None
    failure: str = ""


def run_trials(
    plans: Sequence[Plan], data: str | Path, options: TrainOptions, *, folder: Path, stdout_to_stderr: bool = False
) -> tuple[Trial, ...]:
    """Train each plan from initial weights, and keep ``plan.N.json`` and ``record.N.json`` in the folder.

    A failed run does not stop the others. Raises `UserError` for a mistake in a plan, the data or the options.
    """
    trials = []
    for number, plan in enumerate(plans):
        path, record = folder / f"plan.{number}.json", folder / f"record.{number}.json"
        write_plan(plan, path)
        try:
            found = launch(path, data, replace(options, record=record), stdout_to_stderr=stdout_to_stderr)
        except RankFailedError as error:
            trials.append(Trial(plan=plan, record=None, failure=str(error).splitlines()[0]))
        else:
            trials.append(Trial(plan=plan, record=found))
    return tuple(trials)


def fastest(trials: Sequence[Trial]) -> Trial | None:
    """Return the trial with the lowest median step time, or None if all failed."""
    timed = [(trial.record.median_step_s, index) for index, trial in enumerate(trials) if trial.record is not None]
    return trials[min(timed)[1]] if timed else None
