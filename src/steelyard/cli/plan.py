"""``steelyard plan``: the fastest plan for a model on a cluster within a memory budget."""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from steelyard.cli import options
from steelyard.cli.job_options import OpenJobOptions
from steelyard.cost.job import ASSUMED_IMBALANCE
from steelyard.engines import target_of
from steelyard.engines.native import NATIVE
from steelyard.engines.writing import Request, export_plan
from steelyard.errors import UserError
from steelyard.output import command
from steelyard.plan.choices import ComparedBaseline, NothingFits, OverEngines, Reason
from steelyard.plan.decisions import Decisions, Partition, Space
from steelyard.plan.dimensions import modes
from steelyard.plan.file import write_plan
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Remat
from steelyard.planning.choose import PlanningResult
from steelyard.planning.complete import complete, engine_answers, engine_limit_s
from steelyard.planning.pins import MICRO_BATCH
from steelyard.planning.problem import problem_of
from steelyard.planning.request import (
    NUM_ALTERNATIVES,
    NUM_FALLBACKS,
    SIMPLIFY,
    Objective,
    PlanRequest,
    not_with_pools,
)
from steelyard.report.plan_table import answer_view, engine_line
from steelyard.report.tables import console
from steelyard.schedules import SCHEDULES
from steelyard.search import TIME_LIMIT_S
from steelyard.units import format_bytes

WORDS = {"allow_extra_args": True}
"""Further words after the model are runs of --calibrate."""


@options.prints(Plan | OverEngines | NothingFits)
@options.with_levers
def plan(
    context: typer.Context,
    job: OpenJobOptions,
    output: options.Output = None,
    verbose: options.Verbose = False,
    freeze: options.Freezes = None,
    imbalance: options.Imbalance = ASSUMED_IMBALANCE,
    profile: options.ProfileOption = None,
    calibrate_by: options.CalibrateBy = None,
    memory_margin: options.MemoryMargin = None,
    objective: options.Aim = "time",
    tokens: options.Tokens = None,
    price: options.Price = None,
    engines: options.AllEngines = False,
    stages: options.Stages = None,
    micro_batch: options.MicroBatch = None,
    microbatches: options.Microbatches = None,
    schedule: options.Schedules = None,
    zero: options.ZeroStages = None,
    remat: options.Remats = None,
    uniform: options.Uniform = False,
    pin: options.Pins = None,
    max_tp: options.MaxTp = None,
    max_stages: options.MaxStages = None,
    simplify: options.Simplify = SIMPLIFY,
    space: options.WhichSpace = "full",
    partition: options.Cuts = "exact",
    time_limit: options.TimeLimit = TIME_LIMIT_S,
    top: options.Top = NUM_ALTERNATIVES,
    fallbacks: options.Fallbacks = NUM_FALLBACKS,
    problem: options.SaveProblem = None,
    as_json: options.AsJson = False,
    *,
    degrees: Mapping[str, int | None],
) -> None:
    """Find the fastest plan that fits, or a simpler one at most 1 % slower. No GPU needed."""
    if context.args and not calibrate_by:
        raise UserError(
            field="plan",
            found=f"{' '.join(context.args)!r} after the model",
            expected="one model and options; only --calibrate takes several words",
            hint="write for example --calibrate first.json second.json",
        )
    remats, schedules = {each.value: each for each in Remat}, {name: name for name in SCHEDULES}
    chosen_space = options.check_choice("--space", space, Space)
    chosen_partition = options.check_choice("--partition", partition, Partition)
    fixed = (f"{name}={degree}" for name, degree in degrees.items() if degree is not None)
    samples = [] if micro_batch is None else [f"blocks: {MICRO_BATCH}={micro_batch}"]
    decisions = Decisions(
        pins=(*(pin or ()), *fixed, *samples),
        num_stages=stages,
        most_stages=max_stages,
        num_microbatches=microbatches,
        schedules=None if schedule is None else options.check_choices("--schedule", schedule, schedules),
        remats=None if remat is None else options.check_choices("--remat", remat, remats),
        modes=None if zero is None else {"zero": options.check_choices("--zero", zero, modes()["zero"][1].pin)},
        max_degrees=None if max_tp is None else {"tp": max_tp},
        uniform=True if uniform else None,
        space=None if chosen_space == "full" else chosen_space,
        partition=None if chosen_partition == "exact" else chosen_partition,
    )
    own = options.built_module(job.model)
    with options.progress("counting the model's layers", silent=as_json) as show:
        request = job.request(
            global_batch=job.global_batch or "devices",
            profile=profile,
            own=own,
            freeze=freeze or (),
            memory_margin=memory_margin,
            calibration=(*(calibrate_by or ()), *map(Path, context.args)),
            imbalance=imbalance,
            decisions=decisions,
            simplify=simplify,
            objective=options.check_choice("--objective", objective, Objective),
            time_limit_s=time_limit,
            num_alternatives=top,
            num_next_best=max(0, top - 1) if output is not None else 0,
            num_fallbacks=fallbacks if output is not None else 0,
            tokens=tokens,
            price=price,
        )
        if request.is_mixed:
            not_with_pools({"--save-problem": problem})
        started = time.process_time()
        result = complete(request, progress=show)
        others: tuple[ComparedBaseline, ...] = ()
        if engines:
            others = engine_answers(request, result, progress=show)
        elif not as_json and request.engine == NATIVE:
            limit_s = engine_limit_s(time.process_time() - started)
            others = engine_answers(request, result, limit_s=limit_s, progress=show)
        if problem is not None:
            from steelyard.search.problem import save_problem

            save_problem(problem, problem_of(result.job, result.tables))
    refused = _refusal_of_export(result.plan)
    assumed = f"global batch {request.global_batch}: one sample per device (change it with --global-batch)"
    for note in (*([] if job.global_batch else [assumed]), *result.notes, *([refused] if refused else [])):
        console(stderr=as_json or result.plan is None).print(note, style="dim")
    if result.plan is None:
        _print_nothing_fits(result, request, as_json)
        raise typer.Exit(1)
    if output is not None:
        write_plan(result.plan, output)
    if as_json:
        options.print_json(OverEngines(plan=result.plan, engines=others) if engines else result.plan)
    else:
        fastest, lost = () if engines else others, top if verbose else None
        console().print(answer_view(result.plan, engines=fastest, file=output, lost=lost))
        for other in others if engines else ():
            print(engine_line(other))
        builder = ("--builder", job.model) if own else ()
        _print_next(result.plan, output, builder, is_exported=not refused, is_verbose=verbose)


def _refusal_of_export(found: Plan | None) -> str:
    """Return a note with the reason why the files of the plan's engine cannot be written; empty if they can."""
    if found is None or found.engine is None:
        return ""
    try:
        export_plan(target_of(found.engine.partition("+")[0]), Request(plan=found, headline="", unsupported=()))
    except UserError as error:
        return f"export is not possible: {error.found}; to fix: {error.hint}"
    return ""


def _print_next(
    found: Plan, output: Path | None, builder: Sequence[str], *, is_exported: bool, is_verbose: bool
) -> None:
    if output is None:
        print("Next: add -o plan.json to keep the plan" + ("" if is_verbose else ", -v to see all tables"))
        return
    print(f"Written to {output}. Next:")
    commands = [("explain", output), ("report", output, "-o", output.with_suffix(".html"))]
    if found.engine is None:
        commands.append(("train", output, *builder, "--data", "PATH"))
    elif is_exported:
        commands.append(("export", output, "--to", found.engine.partition("+")[0]))
    if found.next_best and found.engine is None:
        commands.append(("measure", output, *builder, "--alternatives"))
    for words in commands:
        print(f"  {command(*words)}")


def _print_nothing_fits(result: PlanningResult, request: PlanRequest, as_json: bool) -> None:
    budget, miss = result.job.budget_bytes, result.miss
    if not as_json:
        print(f"Nothing fits in {format_bytes(budget)} per device.", file=sys.stderr)
        print(f"  nearest miss: {result.miss_text}", file=sys.stderr)
        print(f"  to fix: {result.remedies}", file=sys.stderr)
        from steelyard.planning.advise import hints  # not needed for a plan that fits

        with options.progress("searching for changes that fit") as show:
            found = list(hints(request, progress=show))
        for hint in found:
            print(f"  or: {hint}", file=sys.stderr)
        return
    reasons = [
        Reason(stages=each.pipeline.num_stages, microbatches=each.pipeline.num_microbatches, reason=each.reason)
        for each in result.search.configs
    ]
    options.print_json(
        NothingFits(
            status="infeasible",
            budget_bytes=budget,
            missing_bytes=None if miss is None else miss.miss_bytes,
            nearest_miss=result.miss_text,
            settings=reasons,
        )
    )
