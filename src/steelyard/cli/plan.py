"""``steelyard plan``: the fastest plan for a model on a cluster within a memory budget."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import typer
from rich.console import Console
from typing_extensions import TypedDict

from steelyard.cli import options
from steelyard.cli.levers import with_levers
from steelyard.cost.job import ASSUMED_IMBALANCE
from steelyard.engines.native import NATIVE
from steelyard.errors import UserError
from steelyard.limits import MOST_SAMPLES, MOST_TOKENS
from steelyard.output import command
from steelyard.plan.choices import ComparedBaseline
from steelyard.plan.decisions import Decisions, Partition, Space
from steelyard.plan.dimensions import modes
from steelyard.plan.file import write_plan
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Remat
from steelyard.planning.choose import PlanningResult
from steelyard.planning.complete import ENGINE_LIMIT_S, complete, engine_answers
from steelyard.planning.problem import problem_of
from steelyard.planning.request import (
    NUM_ALTERNATIVES,
    NUM_FALLBACKS,
    SIMPLIFY,
    Objective,
    PlanRequest,
    make_request,
    not_with_pools,
)
from steelyard.report.plan_table import engine_line, plan_view
from steelyard.schedules import SCHEDULES
from steelyard.search import TIME_LIMIT_S
from steelyard.units import format_bytes, parse_count

WORDS = {"allow_extra_args": True}
"""Further words behind the model are runs after --calibrate."""


class OverEngines(TypedDict):
    """A plan and the best one of every other engine: ``--engines``."""

    plan: Plan
    engines: tuple[ComparedBaseline, ...]


class Reason(TypedDict):
    """Why a pipeline configuration has no plan."""

    stages: int
    microbatches: int
    reason: str


class NothingFits(TypedDict):
    """The nearest miss, where no plan fits."""

    status: Literal["infeasible"]
    budget_bytes: int
    missing_bytes: int | None
    nearest_miss: str
    settings: list[Reason]


@options.prints(Plan | OverEngines | NothingFits)
@with_levers
def plan(
    context: typer.Context,
    model: options.Model,
    cluster: options.ClusterOption,
    global_batch: options.Batch = None,
    seq_len: options.Length = None,
    network: options.NetworkOption = None,
    output: options.Output = None,
    image_size: options.ImageSize = None,
    memory: options.Memory = None,
    memory_margin: options.MemoryMargin = None,
    precision: options.PrecisionOption = "bf16",
    engine: options.EngineOption = None,
    engines: options.AllEngines = False,
    profile: options.ProfileOption = None,
    calibrate_by: options.CalibrateBy = None,
    imbalance: options.Imbalance = ASSUMED_IMBALANCE,
    objective: options.Aim = "time",
    max_tp: options.MaxTp = None,
    stages: options.Stages = None,
    max_stages: options.MaxStages = None,
    microbatches: options.Microbatches = None,
    remat: options.Remats = None,
    schedule: options.Schedules = None,
    zero: options.ZeroStages = None,
    space: options.WhichSpace = "full",
    uniform: options.Uniform = False,
    simplify: options.Simplify = SIMPLIFY,
    pin: options.Pins = None,
    freeze: options.Freezes = None,
    partition: options.Cuts = "exact",
    time_limit: options.TimeLimit = TIME_LIMIT_S,
    top: options.Top = NUM_ALTERNATIVES,
    fallbacks: options.Fallbacks = NUM_FALLBACKS,
    tokens: options.Tokens = None,
    price: options.Price = None,
    problem: options.SaveProblem = None,
    as_json: options.AsJson = False,
    *,
    levers: Mapping[str, str | None],
) -> None:
    """Find the simplest plan at most 1 % slower than the fastest that fits. No GPU needed."""
    if context.args and not calibrate_by:
        raise UserError(
            field="plan",
            found=f"{' '.join(context.args)!r} behind the model",
            expected="one model, and options",
            hint="runs stand after --calibrate, as in --calibrate first.json second.json",
        )
    remats, schedules = {each.value: each for each in Remat}, {name: name for name in SCHEDULES}
    chosen_space = options.check_choice("--space", space, Space)
    chosen_partition = options.check_choice("--partition", partition, Partition)
    decisions = Decisions(
        pins=tuple(pin or ()),
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
    own = options.built_module(model)
    with options.progress("counting the model's layers", silent=as_json) as show:
        request = make_request(
            model,
            cluster,
            global_batch="devices"
            if global_batch is None
            else options.parse_size("--global-batch", global_batch, MOST_SAMPLES),
            seq_len=options.parse_size("--seq-len", seq_len, MOST_TOKENS) if seq_len else None,
            network=network,
            image_size=None if image_size is None else options.parse_image_size(image_size),
            memory=memory,
            profile=profile,
            own=own,
            freeze=freeze or (),
            engine=engine,
            levers=levers,
            precision=options.parse_precision(precision),
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
            tokens=None if tokens is None else parse_count(tokens, field="--tokens"),
            price=price,
        )
        if request.is_mixed:
            not_with_pools({"--save-problem": problem})
        result = complete(request, progress=show)
        others: tuple[ComparedBaseline, ...] = ()
        if engines:
            others = engine_answers(request, result, progress=show)
        elif not as_json and request.engine == NATIVE:
            others = engine_answers(request, result, limit_s=ENGINE_LIMIT_S, progress=show)
        if problem is not None:
            from steelyard.search.problem import save_problem

            save_problem(problem, problem_of(result.job, result.tables))
    assumed = f"global batch: {request.global_batch}, a sample for each device (--global-batch decides otherwise)"
    for note in (*([] if global_batch else [assumed]), *result.notes):
        Console(stderr=as_json or result.plan is None).print(note, style="dim", highlight=False)
    if result.plan is None:
        _print_nothing_fits(result, request, as_json)
        raise typer.Exit(1)
    if output is not None:
        write_plan(result.plan, output)
    if as_json:
        options.print_json(OverEngines(plan=result.plan, engines=others) if engines else result.plan)
    else:
        Console().print(plan_view(result.plan, num_alternatives=top, engines=others))
        _print_next(result.plan, output, builder=("--builder", model) if own else ())
        for other in others if engines else ():
            print(engine_line(other))


def _print_next(found: Plan, output: Path | None, *, builder: Sequence[str]) -> None:
    """The commands to run next."""
    if output is not None:
        print(f"written to {output}")
        print(f"  why this plan: {command('explain', output)}")
        print(f"  see it: {command('report', output, '-o', output.with_suffix('.html'))}")
        if found.engine is not None:
            print(f"  write it: {command('export', output, '--to', found.engine)}")
            return
        print(f"  run it: {command('train', output, *builder, '--data', 'PATH')}")
        if found.next_best:
            count = len(found.next_best) + 1
            print(f"  measure the best {count}: {command('measure', output, *builder, '--alternatives')}")
    else:
        print("  keep it: add -o plan.json")


def _print_nothing_fits(result: PlanningResult, request: PlanRequest, as_json: bool) -> None:
    budget, miss = result.job.budget_bytes, result.miss
    if not as_json:
        print(f"nothing fits in {format_bytes(budget)} per device", file=sys.stderr)
        print(f"  nearest miss: {result.miss_text}", file=sys.stderr)
        print(f"  to fix: {result.remedies}", file=sys.stderr)
        from steelyard.planning.advise import hints  # which a plan that fits does not need

        with options.progress("trying what would fit") as show:
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
