"""A few steps of each of some plans, one after another, each in processes of its own, to see which is fastest."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from steelyard.plan.file import write_plan
from steelyard.plan.plan import Plan
from steelyard.processes.failure import RankFailedError
from steelyard.profiles.record import RunRecord
from steelyard.runtime.launch import launch
from steelyard.runtime.options import TrainOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A plan that was run: what it measured, or why it failed."""

    plan: Plan
    record: RunRecord | None
    failure: str = ""


def run_trials(
    plans: Sequence[Plan], data: str | Path, options: TrainOptions, *, folder: Path, stdout_to_stderr: bool = False
) -> tuple[Trial, ...]:
    """Trains each plan from first weights, as ``options`` say, and keeps ``plan.N.json`` and ``record.N.json`` in the
    folder.

    A run that fails does not stop the others. Raises a `UserError` for a mistake in a plan, the data or the options.
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
    """The trial of least measured time; None where all failed."""
    timed = [(trial.record.median_step_s, index) for index, trial in enumerate(trials) if trial.record is not None]
    return trials[min(timed)[1]] if timed else None
