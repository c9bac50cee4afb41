"""``steelyard measure``: run a few steps of a plan and of the next best plans, and keep the fastest."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typing_extensions import TypedDict

from steelyard.cli import options
from steelyard.engines.native import NATIVE
from steelyard.errors import UserError
from steelyard.installed import require_training
from steelyard.limits import MOST_STEPS
from steelyard.output import command, make_folder
from steelyard.plan.file import read_plan, write_plan
from steelyard.planning.price import describe, peak_bytes, summarise
from steelyard.report.run_table import trial_table
from steelyard.report.tables import console
from steelyard.runtime.options import DATA_HELP, TrainOptions

if TYPE_CHECKING:
    from steelyard.runtime.launch import Trial

STEPS = 8


class Tried(TypedDict):
    """A plan that was run for a few steps, or failed."""

    plan: str
    predicted_s: float | None
    measured_s: float | None
    failure: str | None


class Measured(TypedDict):
    """All plans that were run, the number of the fastest and its file; null where all failed."""

    trials: list[Tried]
    best: int | None
    written: str | None


_ALTERNATIVES = "Also run the next best plans in the file."
_STEPS = "Training steps per plan; the first 3 are not timed."
_OUTPUT = "Write the fastest plan to this file. Default: PLAN.best.json."
_FOLDER = "Folder for plans and records. Default: PLAN.measured."
_DEVICE = "gpu or cpu: run on it even if the plan is for the other."


@options.prints(Measured)
def measure(
    path: options.PlanFile,
    alternatives: Annotated[bool, options.option("--alternatives", None, _ALTERNATIVES)] = False,
    steps: Annotated[int, options.count("--steps", _STEPS, most=MOST_STEPS)] = STEPS,
    data: Annotated[Path, options.option("--data", "PATH", f"{DATA_HELP[0].upper()}{DATA_HELP[1:]}.")] = Path(
        "synthetic"
    ),
    output: Annotated[Path | None, options.written(_OUTPUT)] = None,
    folder: Annotated[Path | None, options.option("--folder", "FOLDER", _FOLDER)] = None,
    builder: options.Builder = None,
    device: Annotated[str | None, options.option("--device", "NAME", _DEVICE)] = None,
    engine: options.EngineOption = None,
    as_json: options.AsJson = False,
) -> None:
    """Run a few steps of a plan on this host, with --alternatives also of the next best plans, and keep the fastest."""
    plan = read_plan(path)
    if engine not in (None, NATIVE.name):
        raise UserError(
            field="--engine",
            found=str(engine),
            expected="none: `measure` trains with steelyard's own runtime, and its times do not carry over to other "
            "kernels",
            hint=f"run {command('export', path, '--to', str(engine).partition('+')[0])}, and compare its time with "
            f"{command('price')}",
        )
    contenders = plan.contenders() if alternatives else plan.contenders()[:1]
    if alternatives and len(contenders) == 1:
        raise UserError(
            field=str(path),
            found="no next best plans in the file",
            expected="a plan written with --top 2 or more",
            hint="plan again with --top 5 -o, or leave out --alternatives",
        )
    require_training("`steelyard measure` trains")
    from steelyard.runtime.launch import fastest, run_trials

    kept = folder or path.with_suffix(".measured")
    make_folder(kept, "--folder")
    given = TrainOptions(steps=steps, builder=builder, device=device)
    trials = run_trials(contenders, data, given, folder=kept, stdout_to_stderr=as_json)
    best = fastest(trials)
    target = output or path.with_suffix(".best.json")
    if best is not None:
        fallbacks = [plan.fallback_plan(index) for index in range(len(plan.fallbacks))]
        lower = [peak_bytes(each) < peak_bytes(best.plan) for each in fallbacks]  # than the fastest plan uses
        fitting = tuple(each for each, is_lower in zip(plan.fallbacks, lower, strict=True) if is_lower)
        write_plan(best.plan.model_copy(update={"fallbacks": fitting}), target)
    if as_json:
        tried_plans = [
            Tried(
                plan=str(kept / f"plan.{number}.json"),
                predicted_s=trial.plan.prediction.step_time_s if trial.plan.prediction else None,
                measured_s=None if trial.record is None else trial.record.median_step_s,
                failure=trial.failure,
            )
            for number, trial in enumerate(trials)
        ]
        number, written = (None, None) if best is None else (trials.index(best), str(target))
        options.print_json(Measured(trials=tried_plans, best=number, written=written))
    else:
        _print_trials(trials, best, kept, target, builder)
    if best is None:
        print("Every run failed.", file=sys.stderr)
        raise typer.Exit(1)


def _print_trials(
    trials: Sequence["Trial"], best: "Trial | None", kept: Path, target: Path, builder: str | None
) -> None:
    rows = [
        (trial.plan, trial.record, trial.failure or f"{describe(trial.plan.pipeline)}: {summarise(trial.plan)}")
        for trial in trials
    ]
    console().print(trial_table(rows))
    print(f"Plans and records are in {kept}/.")
    if best is None:
        return
    number, own = trials.index(best), ("--builder", builder) if builder else ()
    print(f"The fastest is plan {number}, written to {target}. Next:")
    print(f"  {command('train', target, *own, '--data', 'PATH')}")
    print(f"  plan again with measured times: add --calibrate {shlex.quote(str(kept / f'record.{number}.json'))}")
