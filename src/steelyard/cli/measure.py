"""``steelyard measure``: a few steps of a plan and of the next best ones; the fastest goes on."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typing_extensions import TypedDict

from steelyard.cli.options import AsJson, EngineOption, print_json, prints, tried
from steelyard.engines.native import NATIVE
from steelyard.errors import UserError
from steelyard.installed import require_training
from steelyard.limits import MOST_STEPS
from steelyard.output import command, make_folder
from steelyard.plan.file import read_plan, write_plan
from steelyard.planning.price import describe, peak_bytes, summarise
from steelyard.report.run_table import trial_table
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


@prints(Measured)
def measure(
    path: Annotated[Path, typer.Argument(help="A plan file.", metavar="PLAN")],
    alternatives: Annotated[
        bool, typer.Option("--alternatives", help="Also run the next best plans that `plan` kept in the file.")
    ] = False,
    steps: Annotated[
        int, typer.Option("--steps", help="Training steps of each; the first 3 are not timed.", min=1, max=MOST_STEPS)
    ] = STEPS,
    data: Annotated[Path, typer.Option("--data", help=f"{DATA_HELP[0].upper()}{DATA_HELP[1:]}.")] = Path("synthetic"),
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", callback=tried, help="Where to write the fastest plan; default: PLAN.best.json."
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Where plans and records are kept; default: PLAN.measured.")
    ] = None,
    builder: Annotated[
        str | None, typer.Option("--builder", help="FILE.py:FUNCTION that builds your own module, as planned with.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="gpu or cpu: insist on it where the plan is for the other.")
    ] = None,
    engine: EngineOption = None,
    as_json: AsJson = False,
) -> None:
    """Run a few steps of a plan on this host, and of the next best ones: which is fastest?"""
    plan = read_plan(path)
    if engine not in (None, NATIVE.name):
        raise UserError(
            field="--engine",
            found=str(engine),
            expected="none: `measure` trains with steelyard's own runtime, and times of one engine say little of "
            "another's kernels",
            hint=f"`steelyard export {path} --to {engine}` starts it; hold its time against {command('price')}",
        )
    contenders = plan.contenders() if alternatives else plan.contenders()[:1]
    if alternatives and len(contenders) == 1:
        raise UserError(
            field=str(path),
            found="no next best plans in the file",
            expected="a plan that `steelyard plan --top 5 -o` wrote",
            hint="plan again, or leave out --alternatives",
        )
    require_training("`steelyard measure` trains")
    from steelyard.runtime.launch import fastest, run_trials

    kept = folder or path.with_suffix(".measured")
    make_folder(kept, "--folder")
    options = TrainOptions(steps=steps, builder=builder, device=device)
    trials = run_trials(contenders, data, options, folder=kept, stdout_to_stderr=as_json)
    best = fastest(trials)
    target = output or path.with_suffix(".best.json")
    if best is not None:
        fallbacks = [plan.fallback_plan(index) for index in range(len(plan.fallbacks))]
        lower = [peak_bytes(each) < peak_bytes(best.plan) for each in fallbacks]  # than what goes on takes
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
        print_json(Measured(trials=tried_plans, best=number, written=written))
    else:
        _print_trials(trials, best, kept, target, builder)
    if best is None:
        print("every run failed", file=sys.stderr)
        raise typer.Exit(1)


def _print_trials(
    trials: Sequence["Trial"], best: "Trial | None", kept: Path, target: Path, builder: str | None
) -> None:
    rows = [
        (trial.plan, trial.record, trial.failure or f"{describe(trial.plan.pipeline)}: {summarise(trial.plan)}")
        for trial in trials
    ]
    Console().print(trial_table(rows))
    print(f"plans and records are in {kept}/")
    if best is None:
        return
    number, own = trials.index(best), ("--builder", builder) if builder else ()
    print(f"the fastest is plan {number}, written to {target}")
    print(f"  run it: {command('train', target, *own, '--data', 'PATH')}")
    print(f"  plan again by what was measured: add --calibrate {shlex.quote(str(kept / f'record.{number}.json'))}")
