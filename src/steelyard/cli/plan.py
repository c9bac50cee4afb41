"""``steelyard plan``: the fastest plan for a model on a cluster within a memory budget."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from steelyard.cli.options import (
    AsJson,
    ClusterOption,
    Imbalance,
    MaxTp,
    Memory,
    MemoryMargin,
    Model,
    NetworkOption,
    PrecisionOption,
    ProfileOption,
    TimeLimit,
    built_module,
    most_tp,
    pools_with,
    print_json,
    tried,
)
from steelyard.cli.progress import progress
from steelyard.cli.words import all_of, check_choice, check_choices, check_precision, parse_image_size, parse_size
from steelyard.cost.pools import AnyJob, PooledJob
from steelyard.cost.setting import ASSUMED_IMBALANCE, Job
from steelyard.errors import UserError
from steelyard.hardware import Cluster, MixedCluster
from steelyard.limits import MOST_LAYERS, MOST_MICROBATCHES, MOST_PRICE, MOST_SAMPLES, MOST_TOKENS
from steelyard.model.chain import ModelChain
from steelyard.model.own import BUILDER
from steelyard.model.read import load_config, load_model
from steelyard.output import command
from steelyard.plan.file import write_plan
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Remat
from steelyard.planning.choose import PlanningResult, plan_job
from steelyard.planning.fallbacks import with_fallbacks, with_next_best
from steelyard.planning.impossible import refuse_impossible
from steelyard.planning.job import make_any_job, planned_chain
from steelyard.planning.not_searched import samples_not_measured
from steelyard.planning.pins import Pin, parse_pin
from steelyard.planning.pool_space import not_with_pools
from steelyard.planning.problem import PlanOptions, Space, problem_of
from steelyard.planning.profile_file import read_profile
from steelyard.planning.rivals import with_baselines
from steelyard.report.plan_table import missing_spare_lines, plan_view
from steelyard.schedules import SCHEDULES
from steelyard.search import TIME_LIMIT_S, Partition
from steelyard.units import format_bytes, format_count, format_plural, parse_bytes, parse_count

if TYPE_CHECKING:
    from steelyard.planning.trial import Trial, Trials

Objective = Literal["time", "devices"]

TOP = 5
FALLBACKS = 2


WORDS = {"allow_extra_args": True}
"""Further words behind the model are runs after --calibrate."""

Batch = Annotated[
    str | None,
    typer.Option(
        "--global-batch",
        help="Samples of a step over all devices; max: doubled while throughput grows and it fits; default: one "
        "for each device.",
        metavar="INTEGER|max",
    ),
]
Length = Annotated[
    str | None,
    typer.Option(
        "--seq-len",
        help="Tokens of a sample; max: the most that fit; default: what an image or your own module's sample has.",
        metavar="INTEGER|max",
    ),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", callback=tried, help="Where to write the plan.")]
ImageSize = Annotated[
    str | None,
    typer.Option(
        "--image-size",
        help="Pixels of a side of all images, or HEIGHTxWIDTH, of a model that reads them in any size (qwen2_vl); "
        "default: vision_config.image_size of its config.",
    ),
]
CalibrateBy = Annotated[
    list[Path] | None,
    typer.Option(
        "--calibrate",
        help="Measured runs whose median scales all predicted times: records of `train` or `measure`, or files "
        "that name plan and step_time_s. Several after one --calibrate, behind MODEL.",
        metavar="RUN...",
    ),
]
Aim = Annotated[
    str, typer.Option("--objective", help="time: the fastest plan; devices: the fewest devices, then the fastest.")
]
Stages = Annotated[
    int | None, typer.Option("--stages", help="Fix the number of pipeline stages.", min=1, max=MOST_LAYERS)
]
Microbatches = Annotated[
    int | None, typer.Option("--microbatches", help="Fix the number of microbatches.", min=1, max=MOST_MICROBATCHES)
]
Remats = Annotated[
    str | None, typer.Option("--remat", help="Choices of activation checkpointing, as in none,selective,full.")
]
Schedules = Annotated[
    str | None, typer.Option("--schedule", help=f"Pipeline schedules to search, as in {','.join(SCHEDULES)}.")
]
ZeroStages = Annotated[str | None, typer.Option("--zero", help="ZeRO stages that fsdp may use, as in 2,3.")]
WhichSpace = Annotated[
    str, typer.Option("--space", help="full: all kinds of parallelism; paper: those of Galvatron, never mixed.")
]
Pins = Annotated[
    list[str] | None,
    typer.Option("--pin", help="Decide beforehand, as in 'layers 0-3: tp=4, remat=full'; may be repeated."),
]
Freezes = Annotated[
    list[str] | None,
    typer.Option(
        "--freeze",
        help="What is not trained: a module or parameter by its path in the model, as in model.vision_tower, "
        "with * as in a shell; may be repeated.",
    ),
]
Cuts = Annotated[
    str, typer.Option("--partition", help="How stages are cut: exact, or for comparison bmw, memory-balanced, even.")
]
Top = Annotated[
    int,
    typer.Option(
        "--top",
        help="How many of the plans that lost to show; the best so many are kept for `measure`.",
        min=0,
        max=1000,
    ),
]
Fallbacks = Annotated[
    int,
    typer.Option(
        "--fallbacks",
        help="Plans of less memory to keep in the file, for `train` to go on with when memory runs out.",
        min=0,
        max=100,
    ),
]
Spares = Annotated[
    int,
    typer.Option(
        "--spares",
        help="Plan ahead for so many lost nodes (devices, of one node) of each pool: what they cost, and for "
        "`train --elastic`.",
        min=0,
        max=100,
    ),
]
Tokens = Annotated[
    str | None, typer.Option("--tokens", help="Tokens of the whole training, as in 15T: how many days it takes.")
]
Price = Annotated[
    float | None,
    typer.Option("--price", help="Dollars for a device-hour: what the --tokens cost.", min=0, max=MOST_PRICE),
]
SaveProblem = Annotated[
    Path | None, typer.Option("--save-problem", callback=tried, help="Write the cost tables for `steelyard solve`.")
]


def plan(
    context: typer.Context,
    model: Model,
    cluster: ClusterOption,
    global_batch: Batch = None,
    seq_len: Length = None,
    network: NetworkOption = None,
    output: Output = None,
    image_size: ImageSize = None,
    memory: Memory = None,
    memory_margin: MemoryMargin = None,
    precision: PrecisionOption = "bf16",
    profile: ProfileOption = None,
    calibrate_by: CalibrateBy = None,
    imbalance: Imbalance = ASSUMED_IMBALANCE,
    objective: Aim = "time",
    max_tp: MaxTp = None,
    stages: Stages = None,
    microbatches: Microbatches = None,
    remat: Remats = None,
    schedule: Schedules = None,
    zero: ZeroStages = None,
    space: WhichSpace = "full",
    pin: Pins = None,
    freeze: Freezes = None,
    partition: Cuts = "exact",
    time_limit: TimeLimit = TIME_LIMIT_S,
    top: Top = TOP,
    fallbacks: Fallbacks = FALLBACKS,
    spares: Spares = 0,
    tokens: Tokens = None,
    price: Price = None,
    problem: SaveProblem = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest plan that fits. No GPU needed."""
    runs = _runs(calibrate_by, context.args)
    whole = _parse_training(tokens, price)
    machines = _named_machines(model, cluster, network, memory, profile)
    own = built_module(model)
    aim: Objective = check_choice("--objective", objective, Objective)
    batch = machines.num_devices if global_batch is None else parse_size("--global-batch", global_batch, MOST_SAMPLES)
    length = None if seq_len is None else parse_size("--seq-len", seq_len, MOST_TOKENS)
    is_longest, image = seq_len is not None and length is None, parse_image_size(image_size)
    _check_one_is_free(is_longest, batch, aim, profile)
    options = PlanOptions(
        max_degrees=most_tp(max_tp),
        space=check_choice("--space", space, Space),
        num_stages=stages,
        num_microbatches=microbatches,
        partition=check_choice("--partition", partition, Partition),
        time_limit_s=time_limit,
    )
    options = _narrowed(options, remat=remat, zero=zero, schedule=schedule)
    for_one_pool = {
        "--seq-len max": is_longest,
        "--global-batch max": batch is None,
        "--pin": bool(pin),
        "--objective devices": aim == "devices",
        "--calibrate": calibrate_by is not None,
        "--save-problem": problem is not None,
        "--partition": partition != "exact",
    }
    _check_not_with_pools(machines, for_one_pool)
    asked: dict[str, Any] = {"global_batch": batch or 1, "precision": check_precision(precision), "own": own}
    asked |= {"memory": memory, "memory_margin": memory_margin, "profile": profile, "imbalance": imbalance}
    with progress("counting the model's layers", silent=as_json) as show:
        chain = planned_chain(_chain(model, own, image), freeze=freeze or (), own=own)
        options = replace(options, pins=_parse_pins(pin, chain))
        refuse = partial(refuse_impossible, options.pins, chain, None if aim == "devices" else machines, batch)
        job_of_length = _job_maker(chain, machines, runs, asked, refuse)
        if is_longest:
            from steelyard.planning.length import longest_sequence

            longest = longest_sequence(job_of_length, chain, options, top=top, progress=show)
            result, notes = longest.result, trial_lines(longest, "{} tokens")
        else:
            result, notes = _search(
                job_of_length(chain.known_seq_len(length)), options, aim=aim, grows=batch is None, top=top, show=show
            )
        notes = [*_assumed_batch(global_batch, batch), *notes, *_factors(result.job, runs)]
        if result.plan is not None:
            num_others = (top - 1, fallbacks) if output is not None else (0, 0)
            kept = _completed(result, options, num_others=num_others, num_spares=spares, show=show)
            notes += missing_spare_lines(kept, spares)
            result = replace(result, plan=kept if whole is None else kept.with_training(whole, price=price))
        if problem is not None and isinstance(result.job, Job):
            from steelyard.search.problem import save_problem

            save_problem(problem, problem_of(result.job, result.tables))
    _show_notes(notes, on_error=as_json or result.plan is None)
    if result.plan is None:
        raise _nothing_fits(result, options, as_json)
    if output is not None:
        write_plan(result.plan, output)
    if as_json:
        print_json(result.plan)
    else:
        _print_plan(result.plan, output, top, builder=("--builder", model) if own else ())


def _named_machines(
    model: str, cluster: str, network: str | None, memory: str | None, profile: str | None
) -> Cluster | MixedCluster:
    """The devices; raises one error for all that is misspelt of what is named, before anything is counted."""
    named: list[Callable[[], Any]] = []
    if BUILDER.fullmatch(model) is None:
        named.append(partial(load_config, model))
    if memory is not None:
        named.append(partial(parse_bytes, memory))
    if profile is not None and "=" not in profile and "+" not in cluster:  # of several pools each has one
        named.append(partial(read_profile, profile))
    machines, *_ = all_of(partial(pools_with, cluster, network), *named)
    return machines


def _chain(model: str, own: Any, image: tuple[int, int] | None) -> ModelChain:
    """The model, or the user's own module, for which raises `UserError` where it is given a size of images."""
    if own is None:
        return load_model(model, image_size=image)
    if image is not None:
        raise UserError(
            field="--image-size",
            found=f"one for {own.split.module}, a module of your own",
            expected="the images of its sample",
            hint="leave the option out",
        )
    return own.chain


def _parse_pins(texts: Sequence[str] | None, chain: ModelChain) -> tuple[Pin, ...]:
    return tuple(parse_pin(text, option="--pin", num_layers=chain.num_layers) for text in texts or ())


def _runs(named: Sequence[Path] | None, words: Sequence[str]) -> tuple[Path, ...]:
    """The runs of ``--calibrate a b c``; raises `UserError` for words that belong to nothing."""
    if words and not named:
        raise UserError(
            field="plan",
            found=f"{' '.join(words)!r} behind the model",
            expected="one model, and options",
            hint="runs stand after --calibrate, as in --calibrate first.json second.json",
        )
    return (*(named or ()), *map(Path, words))


def _assumed_batch(asked: str | None, batch: int | None) -> list[str]:
    """A line for a global batch that nobody named."""
    return [] if asked else [f"global batch: {batch}, a sample for each device (--global-batch decides otherwise)"]


def _factors(job: AnyJob, runs: Sequence[Path]) -> list[str]:
    """A line for what several runs calibrate by."""
    if len(runs) < 2 or not isinstance(job, Job):
        return []
    from steelyard.planning.calibration import time_factors

    factors = ", ".join(f"{path.name} × {factor:.3f}" for path, factor in time_factors(job, runs))
    return [f"calibrated by the median of {factors}"]


def _narrowed(options: PlanOptions, *, remat: str | None, zero: str | None, schedule: str | None) -> PlanOptions:
    """The options with only those choices that are named; raises `UserError` for an unknown one."""
    if remat is not None:
        options = replace(options, remats=check_choices("--remat", remat, {each.value: each for each in Remat}))
    if zero is not None:
        options = replace(options, variants={"zero": check_choices("--zero", zero, {"2": 2, "3": 3})})
    if schedule is not None:
        names = {name: name for name in SCHEDULES}
        options = replace(options, schedules=check_choices("--schedule", schedule, names))
    return options


def _completed(
    result: PlanningResult,
    options: PlanOptions,
    *,
    num_others: tuple[int, int],
    num_spares: int,
    show: Callable[[str], None],
) -> Plan:
    """The plan that was found with what it is compared with, and with other plans: the next best, of less memory, and
    for what is left after a loss.
    """
    assert result.plan is not None, "asked for a plan that is there"
    if isinstance(result.job, PooledJob):
        from steelyard.planning.pool_rivals import with_pool_baselines

        show("searching each pool alone, and even cuts, to compare with")
        plan = with_pool_baselines(result.plan, result.job, options)
        return _with_spares(plan, result.job, num_spares, show)
    num_next_best, num_fallbacks = num_others
    show("searching the best plans of other pipeline settings")
    result = with_next_best(result, num_plans=num_next_best)
    assert result.plan is not None, "as before"
    assert isinstance(result.job, Job), "one pool or several"
    show("searching the plain plans to compare with")
    limit_s, tables = options.time_limit_s, result.bounded_tables
    plan = with_baselines(result.plan, result.job, tables, time_limit_s=limit_s, floors=result.floors)
    if num_fallbacks:
        show("searching plans of less memory")
    plan = with_fallbacks(plan, result.job, options, num_fallbacks=num_fallbacks, tables=tables, floors=result.floors)
    return _with_spares(plan, result.job, num_spares, show)


def _with_spares(plan: Plan, job: AnyJob, num_spares: int, show: Callable[[str], None]) -> Plan:
    if not num_spares:
        return plan
    from steelyard.planning.elastic import with_spares

    show("searching plans for what is left after a loss")
    return with_spares(plan, job, num_spares=num_spares)


def _print_plan(found: Plan, output: Path | None, top: int, *, builder: Sequence[str]) -> None:
    """The plan as tables, and the commands to run next."""
    Console().print(plan_view(found, num_alternatives=top))
    if output is not None:
        print(f"written to {output}")
        print(f"  why this plan: {command('explain', output)}")
        print(f"  see it: {command('report', output, '-o', output.with_suffix('.html'))}")
        print(f"  run it: {command('train', output, *builder, '--data', 'PATH')}")
        if found.next_best:
            count = len(found.next_best) + 1
            print(f"  measure the best {count}: {command('measure', output, *builder, '--alternatives')}")
    else:
        print("  keep it: add -o plan.json")


def _show_notes(notes: Sequence[str], *, on_error: bool) -> None:
    console = Console(stderr=on_error)
    for note in notes:
        console.print(note, style="dim", highlight=False)


def _check_not_with_pools(machines: Cluster | MixedCluster, asked: Mapping[str, bool]) -> None:
    """Raises `UserError` for the first option of these that was asked for on several pools, with which none goes."""
    option = next((option for option, is_asked in asked.items() if is_asked), None)
    if option is not None and isinstance(machines, MixedCluster):
        raise not_with_pools(option)


def _search(
    job: AnyJob, options: PlanOptions, *, aim: Objective, grows: bool, top: int, show: Callable[[str], None]
) -> tuple[PlanningResult, list[str]]:
    """The result under the objective, and lines that say what was tried on the way."""
    show(f"searching plans for {job.chain.name} on {job.cluster.name}")
    if isinstance(job, PooledJob):
        return plan_job(job, options, top=top), []
    if grows:
        from steelyard.planning.batch import grow_batch

        growth = grow_batch(job, options, top=top, progress=show)
        return growth.result, trial_lines(growth, "global batch {}")
    if aim == "devices":
        from steelyard.planning.devices import plan_fewest_devices

        fewest = plan_fewest_devices(job, options, top=top, progress=show)
        return fewest.result, device_lines(fewest.tried)
    unmeasured = samples_not_measured(job, options)
    notes = [] if unmeasured is None else [f"left out: {unmeasured.values} {unmeasured.what} ({unmeasured.reason})"]
    return plan_job(job, options, top=top), notes


def trial_lines(trials: "Trials", words: str) -> list[str]:
    """What each size that was tried gives, named by ``words``, and why no other was tried."""
    lines = []
    for trial in trials.tried:
        taken = " (taken)" if trial is trials.taken and trial.tokens_per_s is not None else ""
        lines.append(f"{words.format(trial.size)}: {_trial_text(trial)}{taken}")
    return [*lines, f"stopped: {trials.stopped}"]


def device_lines(tried: Sequence[tuple[int, str]]) -> list[str]:
    """Why each device count that was tried does not do, and which one does."""
    return [
        f"{format_plural(count, 'device')}: {f'does not fit: {reason}' if reason else 'fits'}"
        for count, reason in tried
    ]


def _trial_text(trial: "Trial") -> str:
    if trial.tokens_per_s is None:
        return f"does not fit: {trial.reason}"
    return f"{format_count(trial.tokens_per_s)} tokens/s" + ("" if trial.has_margin else ", under pressure")


def _job_maker(
    chain: ModelChain,
    cluster: Cluster | MixedCluster,
    runs: Sequence[Path],
    asked: Mapping[str, Any],
    refuse: Callable[[int], None],
) -> Callable[[int], Any]:
    """The job of a number of tokens, on one pool or several, unless what is asked for is to ``refuse`` at it."""

    def make(seq_len: int) -> AnyJob:
        refuse(seq_len)
        job = make_any_job(chain, cluster, seq_len=seq_len, **asked)
        if not runs or not isinstance(job, Job):
            return job
        from steelyard.planning.calibration import calibrate

        return calibrate(job, *runs)

    return make


def _check_one_is_free(is_longest: bool, batch: int | None, aim: Objective, profile: str | None) -> None:
    """Raises `UserError` where more than one of length, batch and devices is free, or a length that is measured."""
    if not is_longest:
        if batch is None and aim == "devices":
            raise UserError(
                field="--global-batch",
                found="max with --objective devices",
                expected="a number: with a free batch the fewest devices are those that hold a single sample",
                hint="write for example --global-batch 64",
            )
        return
    beside = {
        "--global-batch max": batch is None,
        "--objective devices": aim == "devices",
        "--profile": profile is not None,
    }
    option = next((option for option, is_given in beside.items() if is_given), None)
    if option is not None:
        raise UserError(
            field="--seq-len",
            found=f"max with {option}",
            expected="a number: one thing at a time can be as large as fits, and a profile is of one length",
            hint="write for example --seq-len 8192",
        )


def _parse_training(tokens: str | None, price: float | None) -> int | None:
    """The tokens of the whole training, if any; raises `UserError` for another text, or for a price without them."""
    if tokens is not None:
        return parse_count(tokens, field="--tokens")
    if price is not None:
        raise UserError(
            field="--price",
            found="a price without tokens",
            expected="--tokens beside it: their device-hours are what is paid",
            hint="write for example --tokens 15T --price 2.5",
        )
    return None


def _nothing_fits(result: PlanningResult, options: PlanOptions, as_json: bool) -> Exception:
    """What ends the command where no plan fits, or none that is pinned is legal, after it is printed."""
    if result.miss is None and options.pins:
        assert isinstance(result.job, Job), "pins are refused for several pools"
        from steelyard.planning.why_not import pin_error

        return pin_error(result.job, options)
    budget = result.job.budget_bytes
    if as_json:
        miss = result.miss
        reasons = [
            {
                "stages": each.pipeline.num_stages,
                "microbatches": each.pipeline.num_microbatches,
                "reason": each.reason,
            }
            for each in result.search.settings
        ]
        print_json(
            {
                "status": "infeasible",
                "budget_bytes": budget,
                "missing_bytes": None if miss is None else miss.miss_bytes,
                "nearest_miss": result.miss_text,
                "settings": reasons,
            }
        )
    else:
        print(f"nothing fits in {format_bytes(budget)} per device", file=sys.stderr)
        print(f"  nearest miss: {result.miss_text}", file=sys.stderr)
        print("  to fix: more memory per device, more devices, or a shorter sequence", file=sys.stderr)
    return typer.Exit(1)
