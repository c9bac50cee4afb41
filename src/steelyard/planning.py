"""From a model, a cluster and a budget to a plan: the planner's parts in their order, one after another.

config → chain; cluster → strategies; chain → profile (traced, or given as measured); profile and strategies → cost
tables, one for every pipeline setting; tables → search; the best few re-scored by the simulator → plan.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.cost.build import build_tables, usable_bytes
from steelyard.cost.predict import PlanCost, predict
from steelyard.cost.setting import Job, Setting
from steelyard.errors import InvalidProfileError, UserError
from steelyard.hardware import Cluster, parse_cluster
from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config, load_model
from steelyard.plan.file import parse_file
from steelyard.plan.plan import Alternative, Plan, PlanModel, Precision, Prediction, Schedule, StagePlan, fold_runs
from steelyard.plan.strategy import Remat, Strategy, ZeroStage, parse_strategy
from steelyard.profiles.profile import Profile
from steelyard.search import (
    NearestMiss,
    Partition,
    Problem,
    SearchResult,
    SettingOutcome,
    SpaceOptions,
    enumerate_strategies,
    search,
)
from steelyard.search.tidy import group_equal_strategies
from steelyard.tracer.cache import cached_trace
from steelyard.units import format_bytes, format_plural, parse_bytes

NUM_RESCORED = 5
"""Settings whose best plans the simulator ranks in the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the search may choose from; everything that is not set is searched."""

    max_tp: int | None = None
    num_stages: int | None = None
    num_microbatches: int | None = None
    remats: tuple[Remat, ...] = (Remat.NONE, Remat.FULL)
    zero_stages: tuple[ZeroStage, ...] = (3, 2)
    partition: Partition = "exact"
    time_limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningResult:
    """Outcome of planning: a plan with its cost, or the nearest miss where nothing fits."""

    job: Job
    search: SearchResult
    plan: Plan | None
    cost: PlanCost | None
    miss: NearestMiss | None
    miss_text: str


class NothingFitsError(UserError):
    """No plan fits the budget. Carries the nearest miss in bytes as its message."""

    exit_code = 1


def find_plan(
    config: str | Path | Mapping[str, Any],
    cluster: str | Cluster,
    *,
    global_batch: int,
    seq_len: int,
    precision: Precision = "bf16",
    memory: str | int | None = None,
    profile: str | Path | Profile | None = None,
    options: PlanOptions | None = None,
) -> Plan:
    """The fastest plan to train a model on a cluster within the memory of its devices.

    ``config`` is a packaged model's name, the path of a ``config.json``, or its content; ``cluster`` as in
    ``8x8xh100-80gb`` or a YAML file's path; ``memory`` per device as in ``20GiB`` or in bytes, else all it has;
    ``profile`` a measured profile (its path or value), else the model is traced and the catalogue's rates are used.
    Raises `NothingFitsError` naming the nearest miss where no plan fits, and another `UserError` for a wrong argument.
    """
    job = make_job(
        config,
        cluster,
        global_batch=global_batch,
        seq_len=seq_len,
        precision=precision,
        memory=memory,
        profile=profile,
    )
    result = plan_job(job, options or PlanOptions())
    if result.plan is None:
        raise NothingFitsError(
            field="memory",
            found=f"{format_bytes(job.budget_bytes)} per device, in which no plan fits",
            expected=result.miss_text,
            hint="more memory per device, more devices, or a smaller sequence length",
        )
    return result.plan


def make_job(
    config: str | Path | Mapping[str, Any],
    cluster: str | Cluster,
    *,
    global_batch: int,
    seq_len: int,
    precision: Precision,
    memory: str | int | None,
    profile: str | Path | Profile | None,
) -> Job:
    """The job that these arguments describe; see `find_plan`. Traces the model unless a profile is given."""
    chain = chain_from_config(config, name="model") if isinstance(config, Mapping) else load_model(config)
    machines = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    if memory is not None:
        machines = machines.with_memory(parse_bytes(memory) if isinstance(memory, str) else memory)
    for field, value in (("global_batch", global_batch), ("seq_len", seq_len)):
        if value < 1:
            raise UserError(
                field=field, found=str(value), expected="1 or more", hint=f"give --{field.replace('_', '-')}"
            )
    if isinstance(profile, str | Path):
        profile = parse_file(Path(profile), Profile, InvalidProfileError, what="profile")
    if profile is None:
        degrees = tuple(d for d in range(1, machines.devices_per_node + 1) if machines.devices_per_node % d == 0)
        profile = cached_trace(chain, seq_len=seq_len, precision=precision, tp_degrees=degrees)
    else:
        _check_profile(profile, chain, machines, seq_len, precision)
    return Job(
        chain=chain,
        profile=profile,
        cluster=machines,
        seq_len=seq_len,
        global_batch=global_batch,
        precision=precision,
        budget_bytes=machines.device.known_memory_bytes(),
    )


def plan_job(job: Job, options: PlanOptions) -> PlanningResult:
    """Searches every pipeline setting of a job and turns the best into a plan."""
    settings = pipeline_settings(job, options)
    found = search(
        make_problem(job, options).settings,
        usable_bytes(job),
        num_alternatives=NUM_RESCORED - 1,
        partition=options.partition,
        time_limit_s=options.time_limit_s,
    )
    if found.best is None:
        miss = found.nearest_miss
        return PlanningResult(
            job=job, search=found, plan=None, cost=None, miss=miss, miss_text=_miss_text(job, found, settings)
        )
    candidates = [_bare_plan(job, outcome) for outcome in found.ranked[:NUM_RESCORED]]
    costs = [predict(plan, job) for plan in candidates]
    best = min(range(len(costs)), key=lambda index: (costs[index].timeline.step_time_s, index))
    prediction = _prediction(job, found, candidates, costs, best)
    plan = candidates[best].model_copy(update={"prediction": prediction})
    return PlanningResult(job=job, search=found, plan=plan, cost=costs[best], miss=None, miss_text="")


def make_problem(job: Job, options: PlanOptions) -> Problem:
    """The cost tables of every pipeline setting of a job, as `search` takes them and a problem file holds them."""
    tables = tuple(
        build_tables(setting, stage_strategies(job, setting.devices_per_stage, options))
        for setting in pipeline_settings(job, options)
    )
    return Problem(
        name=f"{job.chain.name} on {job.cluster.name}",
        budget_bytes=usable_bytes(job),
        settings=tables,
        samples=(job.global_batch,) * len(tables),
    )


def price_plan(
    plan: Plan, *, cluster: str | None = None, memory: str | None = None, profile: str | Path | Profile | None = None
) -> Plan:
    """The plan with its predictions filled in, as for one written by hand.

    The prediction makes no claim about other plans. Raises `UserError` where the cluster's rates are not known and no
    profile is given.
    """
    job = make_job(
        plan.chain().config,
        cluster or plan.cluster,
        global_batch=plan.global_batch,
        seq_len=plan.seq_len,
        precision=plan.precision,
        memory=memory,
        profile=profile,
    )
    return _with_price(plan, job)


def _with_price(plan: Plan, job: Job) -> Plan:
    cost = predict(plan, job)
    step_s = cost.timeline.step_time_s + job.profile.step_overhead_s
    prediction = Prediction(
        step_time_s=step_s,
        tokens_per_s_per_device=cost.tokens_per_s_per_device,
        mfu=cost.mfu,
        budget_bytes=job.budget_bytes,
        stages=cost.stages,
        certificate="priced as given, not searched",
        lower_bound_s=0.0,
        profile=job.profile.identity.summary(),
    )
    return plan.model_copy(update={"prediction": prediction})


def uniform_plan(job: Job, strategy_text: str) -> Plan:
    """The plan of one stage that uses one strategy everywhere and, of all microbatch counts, takes the least memory."""
    strategy = parse_strategy(strategy_text)
    layers = job.chain.num_layers
    stage = StagePlan(ranks=(0, job.cluster.num_devices - 1), runs=fold_runs(0, (strategy,) * layers))
    best: Plan | None = None
    for count in range(1, job.global_batch + 1):
        if job.global_batch % count or (job.global_batch // count) % strategy.data_degree:
            continue
        plan = _with_price(_make_plan(job, count, "1f1b", (stage,)), job)
        if best is None or _peak_bytes(plan) < _peak_bytes(best):
            best = plan
    if best is None:
        raise UserError(
            field="parallel",
            found=strategy_text,
            expected=f"a data degree that divides the batch of {job.global_batch}",
            hint="change the strategy or the batch",
        )
    return best


def pipeline_settings(job: Job, options: PlanOptions) -> list[Setting]:
    """Every number of stages that divides the devices with every number of microbatches that divides the batch.

    1F1B wherever there are as many microbatches as stages; GPipe, which holds more activations, only where not.
    """
    devices, layers = job.cluster.num_devices, job.chain.num_layers
    stages = [p for p in range(1, min(devices, layers) + 1) if devices % p == 0]
    counts = [m for m in range(1, job.global_batch + 1) if job.global_batch % m == 0]
    if options.num_stages is not None:
        stages = _pinned("num_stages", options.num_stages, stages, f"the {devices} devices")
    if options.num_microbatches is not None:
        counts = _pinned("num_microbatches", options.num_microbatches, counts, f"the batch of {job.global_batch}")
    return [
        Setting(job=job, num_stages=p, num_microbatches=m, schedule="1f1b" if m >= p else "gpipe")
        for p in stages
        for m in counts
    ]


def stage_strategies(job: Job, devices_per_stage: int, options: PlanOptions) -> tuple[Strategy, ...]:
    """The leaves of the decision tree for a stage, as far as the profile has their tensor-parallel degrees."""
    degrees = {layer.tp for layer in job.profile.layers}
    space = SpaceOptions(
        remats=options.remats,
        zero_stages=options.zero_stages,
        max_tp=options.max_tp,
        devices_per_node=job.cluster.devices_per_node,
    )
    return tuple(s for s in enumerate_strategies(devices_per_stage, space) if s.tp in degrees)


def _pinned(field: str, value: int, allowed: list[int], of_what: str) -> list[int]:
    if value not in allowed:
        raise UserError(
            field=field,
            found=str(value),
            expected=f"a divisor of {of_what}: " + ", ".join(map(str, allowed)),
            hint="leave it out to have it searched",
        )
    return [value]


def _check_profile(profile: Profile, chain: ModelChain, cluster: Cluster, seq_len: int, precision: Precision) -> None:
    identity = profile.identity
    wanted: list[tuple[str, object, object]] = [
        ("config_hash", identity.config_hash, chain.config_hash),
        ("seq_len", identity.seq_len, seq_len),
        ("precision", identity.precision, precision),
    ]
    if identity.method == "measured":
        wanted.append(("num_devices", identity.num_devices, cluster.num_devices))
    for field, found, expected in wanted:
        if found != expected:
            raise InvalidProfileError(
                field=f"identity.{field}",
                found=str(found),
                expected=f"{expected}, as in this job",
                hint="profile again for this model, length, precision and number of devices",
            )


def _bare_plan(job: Job, outcome: SettingOutcome) -> Plan:
    """The plan of a search outcome, without its prediction."""
    tables = outcome.tables
    solution = group_equal_strategies(tables, outcome.solution)
    chosen = tuple(tables.strategies[index] for index in solution.strategies)
    size = job.cluster.num_devices // tables.num_stages
    stages = tuple(
        StagePlan(ranks=(index * size, index * size + size - 1), runs=fold_runs(first, chosen[first:end]))
        for index, (first, end) in enumerate(zip(solution.boundaries, solution.boundaries[1:], strict=False))
    )
    return _make_plan(job, tables.num_microbatches, tables.schedule, stages)


def _make_plan(job: Job, num_microbatches: int, schedule: Schedule, stages: tuple[StagePlan, ...]) -> Plan:
    chain = job.chain
    return Plan(
        model=PlanModel(name=chain.name, config=dict(chain.config), config_hash=chain.config_hash),
        cluster=job.cluster.name,
        seq_len=job.seq_len,
        global_batch=job.global_batch,
        num_microbatches=num_microbatches,
        precision=job.precision,
        schedule=schedule,
        stages=stages,
    )


def _peak_bytes(plan: Plan) -> int:
    return max(stage.total_bytes for stage in plan.prediction.stages) if plan.prediction else 0


def _prediction(job: Job, found: SearchResult, candidates: list[Plan], costs: list[PlanCost], best: int) -> Prediction:
    cost = costs[best]
    best_s = cost.timeline.step_time_s
    rescored = {outcome.index: index for index, outcome in enumerate(found.ranked[:NUM_RESCORED])}
    alternatives = []
    for outcome in (*found.ranked, *(each for each in found.settings if each.result.solution is None)):
        index = rescored.get(outcome.index)
        if index == best:
            continue
        if index is None:
            step_s, reason = None, outcome.reason
        else:
            step_s = costs[index].timeline.step_time_s
            reason = f"{step_s / best_s - 1:.1%} slower: {_summary(candidates[index])}"
        alternatives.append(Alternative(description=_describe(outcome), step_time_s=step_s, reason=reason))
    status = "optimal for the cost tables" if found.status == "optimal" else f"best so far, gap {found.gap:.2%}"
    if best > 0:
        status = f"fastest in simulation among the search's best {len(candidates)}; in its closed form another is"
    return Prediction(
        step_time_s=best_s + job.profile.step_overhead_s,
        tokens_per_s_per_device=cost.tokens_per_s_per_device,
        mfu=cost.mfu,
        budget_bytes=job.budget_bytes,
        stages=cost.stages,
        certificate=status,
        lower_bound_s=found.lower_bound_s,
        profile=job.profile.identity.summary(),
        alternatives=tuple(alternatives),
    )


def _describe(outcome: SettingOutcome) -> str:
    tables = outcome.tables
    stages = format_plural(tables.num_stages, "stage")
    microbatches = format_plural(tables.num_microbatches, "microbatch", "microbatches")
    return f"{stages}, {microbatches}" + (", gpipe" if tables.schedule == "gpipe" else "")


def _summary(plan: Plan) -> str:
    """The strategies of a plan, the most used first."""
    counts: dict[str, int] = {}
    for strategy in plan.strategies:
        counts[str(strategy)] = counts.get(str(strategy), 0) + 1
    most = sorted(counts.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{text} ×{count}" for text, count in most)


def _miss_text(job: Job, found: SearchResult, settings: list[Setting]) -> str:
    miss, index = found.nearest_miss, found.nearest_index
    if miss is None or index is None:
        return "a strategy for every layer, but some layer has no legal one (see the reasons)"
    needed = math.ceil(miss.needed_bytes * job.budget_bytes / usable_bytes(job))
    setting = settings[index]
    stages = format_plural(setting.num_stages, "stage")
    microbatches = format_plural(setting.num_microbatches, "microbatch", "microbatches")
    return (
        f"at least {format_bytes(needed)} per device, {format_bytes(needed - job.budget_bytes)} "
        f"({needed - job.budget_bytes} bytes) more: the nearest plan has {stages} and {microbatches}, "
        f"and {job.chain.layer_name(miss.layer)} on stage {miss.stage} binds"
    )
