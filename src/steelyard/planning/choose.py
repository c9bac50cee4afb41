"""Chooses the plan: searches all pipeline configurations and lets the simulator rank the best few."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from steelyard.cost.build import usable_bytes
from steelyard.cost.job import Job, JobConfig
from steelyard.cost.layer_load import rank_samples, refusal, unmeasured_reason
from steelyard.cost.predict import PlanCost, predict
from steelyard.errors import UserError
from steelyard.plan.decisions import FREE, Decisions
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import Alternative, Certificate
from steelyard.planning.job import job_of
from steelyard.planning.margin import warnings_of, without_margin
from steelyard.planning.plan_from_search import Acceptance, Accepted, accept, describe, summarise
from steelyard.planning.price import prediction_of
from steelyard.planning.problem import make_tables
from steelyard.planning.request import PlanRequest
from steelyard.planning.uniform import uniform_tables
from steelyard.search import TIME_LIMIT_S, ConfigOutcome, NearestMiss, OnDemand, SearchResult
from steelyard.units import format_bytes, format_plural

NUM_RESCORED = 5
"""Configurations whose best plans the simulator ranks in the end, or more where more alternatives are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningResult:
    """Outcome of planning: a plan with its cost, or the nearest miss where nothing fits."""

    job: Job
    tables: tuple[OnDemand, ...]
    """What was searched."""
    search: SearchResult
    plan: Plan | None
    cost: PlanCost | None
    miss: NearestMiss | None
    miss_text: str
    others: tuple[tuple[Plan, PlanCost], ...] = ()
    """The best plans of other pipeline configurations that the simulator priced, without their predictions, fastest
    first."""
    has_margin: bool = True
    """False for a plan that takes of the margin of the job, since none leaves it free."""
    bounded_tables: tuple[OnDemand, ...] = ()
    """The cost tables with their bounds, for further searches within the budget of the job or less."""
    notes: tuple[str, ...] = ()
    """What was assumed, tried or left out on the way."""


class NothingFitsError(UserError):
    """No plan fits the budget. Carries the nearest miss in bytes as its message."""

    exit_code = 1


def plan_request(request: PlanRequest, job: Job | None = None) -> PlanningResult:
    """Return the plan of a request, not compared with others yet; ``job`` saves pricing the request."""
    return plan_job(
        job or job_of(request),
        request.decisions,
        top=request.num_alternatives,
        time_limit_s=request.time_limit_s,
    )


def plan_job(
    job: Job,
    decisions: Decisions = FREE,
    *,
    top: int = NUM_RESCORED,
    time_limit_s: float | None = TIME_LIMIT_S,
    tables: tuple[OnDemand, ...] | None = None,
    to_the_end: bool = True,
) -> PlanningResult:
    """Searches every pipeline configuration of a job and turns the best into a plan.

    ``top`` plans and more are priced by the simulator, the best and the alternatives kept with it. ``tables`` saves
    making the cost tables again where `make_tables` was asked for those of this job and these decisions. Not
    ``to_the_end`` prices no more than ``top``.

    The simulator ranks every configuration where `ranks_all` says so. Over several groups it ranks plans that are the
    best of their configurations: the sums of the search are a few percent off where stages are not alike.

    The time limit is that of tables and search together. Of configurations without tables by then no more is known than
    what computing takes.

    Where no plan leaves the margin of the job free, the fastest within all the memory that there is.
    """
    tables = tables or make_tables(job, decisions)
    plan_within = partial(
        _plan_within,
        decisions=decisions,
        top=top,
        time_limit_s=time_limit_s,
        to_the_end=to_the_end,
    )
    found = plan_within(job, tables=tables)
    if found.plan is not None or not any(each.margin_bytes for each in job.groups):
        return found
    whole = without_margin(job)
    found = plan_within(whole, tables=make_tables(whole, decisions) if job.is_mixed else tables)
    if found.plan is None or found.plan.prediction is None:
        return found
    told = warnings_of(whole, found.plan, found.plan.prediction.stages, missed=job)
    prediction = found.plan.prediction.model_copy(update={"warnings": told})
    return replace(found, plan=found.plan.model_copy(update={"prediction": prediction}), has_margin=False)


def _plan_within(
    job: Job,
    *,
    decisions: Decisions,
    top: int,
    time_limit_s: float | None,
    tables: tuple[OnDemand, ...],
    to_the_end: bool,
) -> PlanningResult:
    """As `plan_job`, within the budget of the job."""
    started, given = time.monotonic(), tables
    if decisions.uniform:
        tables = _uniform(job, tables)
    num_rescored = len(tables) if ranks_all(job) else max(top, NUM_RESCORED if to_the_end else 1)
    num_exact = num_rescored if job.is_mixed or ranks_all(job) else 1
    found = accept(
        job,
        tables,
        num_exact=num_exact,
        num_alternatives=num_rescored - num_exact,
        partition=decisions.stage_partition,
        time_limit_s=time_limit_s,
    )
    searched_s = time.monotonic() - started
    result = PlanningResult(
        job=job,
        tables=tables,
        search=found.search,
        plan=None,
        cost=None,
        miss=found.search.nearest_miss,
        miss_text="",
        bounded_tables=found.bounded() if tables is given else given,
    )
    if not found.ranked:
        return replace(result, miss_text=_miss_text(job, found) + _not_searched_text(found.search.configs))
    candidates = found.ranked[:num_rescored]
    costs = [predict(each.plan, job) for each in candidates]
    first, *others = sorted(range(len(costs)), key=lambda index: (costs[index].step_time_s, index))
    plan, cost = candidates[first].plan, costs[first]
    was_cut = time_limit_s is not None and searched_s >= time_limit_s
    lost = [_alternative(job, candidates[index], costs[index], cost) for index in others]
    prediction = prediction_of(
        job,
        plan,
        cost,
        _certificate(found.search, first, len(candidates), time_limit_s if was_cut else None),
        lower_bound_s=found.search.lower_bound_s,
        alternatives=(*lost, *(() if job.is_mixed else _not_simulated(job, found, first, len(candidates)))),
        found=found.ranked,
    )
    return replace(
        result,
        plan=plan.model_copy(update={"prediction": prediction, "asked": None if decisions.is_free else decisions}),
        cost=cost,
        miss=None,
        others=tuple((candidates[index].plan, costs[index]) for index in others),
    )


def _uniform(job: Job, tables: tuple[OnDemand, ...]) -> tuple[OnDemand, ...]:
    """The tables of the uniform plans within the budget of a job; raises `UserError` where no strategy is legal."""
    found = uniform_tables(job, tables)
    if not found:
        raise UserError(
            field="--uniform",
            found=f"no strategy that every layer of {job.chain.name} can have with what else is asked",
            expected="decisions that leave one strategy for all layers",
            hint="leave --uniform out, or what else is decided",
        )
    return tuple(map(OnDemand.of, found))


def ranks_all(job: Job) -> bool:
    """Whether the simulator must rank the plans of all configurations: where processes share cores
    (`Profile.busy_speeds`).

    The closed form of the search takes all processes to be busy at all times, so that it ranks configurations of unlike
    numbers of stages wrongly there.
    """
    return not job.is_mixed and bool(job.profile.busy_speeds)


def _not_searched_text(configs: Sequence[ConfigOutcome]) -> str:
    """Of how many configurations it is not known whether one fits."""
    count = sum(each.result.status == "beaten" for each in configs)
    return (
        f"; {count} of {len(configs)} pipeline configurations were not searched before the time was up" if count else ""
    )


def _alternative(job: Job, other: Accepted, cost: PlanCost, best: PlanCost) -> Alternative:
    """A plan that was simulated and takes longer than the best one."""
    slower = f"{cost.step_time_s / best.step_time_s - 1:.1%} slower: {summarise(other.plan)}"
    return Alternative(
        description=describe(other.plan.pipeline, stages=_in_pools(other.plan) if job.is_mixed else None),
        step_time_s=cost.step_time_s,
        memory_bytes=max(stage.total_bytes for stage in cost.stages),
        is_bound=not other.is_settled,
        reason=slower if other.is_settled else f"at most {slower}",
    )


def _not_simulated(job: Job, found: Acceptance, best: int, num_simulated: int) -> list[Alternative]:
    """The configurations whose plans were not simulated, and those without a plan, with the reason of the search."""
    chosen_s = found.ranked[best].outcome.score_s
    reasons = [
        (
            each.outcome,
            f"{each.outcome.score_s / chosen_s - 1:.1%} slower in the search, not simulated: {summarise(each.plan)}",
        )
        for each in found.ranked[num_simulated:]
    ]
    reasons += [(each, _why_lost(job, each)) for each in found.search.configs if each.result.solution is None]
    return [Alternative(description=describe(each.pipeline), reason=why) for each, why in reasons]


def _in_pools(plan: Plan) -> str:
    """The pools of a plan with their stages: ``4x8xh100-80gb (4 stages), 8x8xa100-40gb (2 stages)``."""
    names = [pool.name for pool in plan.stage_pools()]
    return ", ".join(f"{name} ({format_plural(names.count(name), 'stage')})" for name in dict.fromkeys(names))


def _certificate(found: SearchResult, best: int, num_simulated: int, time_limit_s: float | None) -> Certificate:
    """What is proven of the plan at place ``best`` of the search's ranking, which the simulator took."""
    if best > 0:
        gap = max(0.0, 1 - found.lower_bound_s / found.ranked[best].score_s)
        return Certificate(status="simulated", gap=gap, num_simulated=num_simulated)
    if found.status == "optimal":
        return Certificate(status="optimal", gap=found.gap)
    return Certificate(status="gap", gap=found.gap, time_limit_s=time_limit_s)


def _why_lost(job: Job, outcome: ConfigOutcome) -> str:
    """The reason of the search; bytes that are missing are those of a device, the allocator's slack included."""
    miss = outcome.result.miss
    if miss is None:
        return _why_unmeasured(job, outcome) or outcome.reason
    missing = device_bytes(job, miss.needed_bytes) - job.budget_bytes
    layer = job.chain.layer_name(miss.layer)
    return f"does not fit: misses {format_bytes(missing)} or more; {layer} on stage {miss.stage} binds"


def _why_unmeasured(job: Job, outcome: ConfigOutcome) -> str:
    """Why some layer has no strategy in a configuration though its type allows some: the profile's times do not
    reach."""
    config = JobConfig(job=job, pipeline=outcome.pipeline)
    for layer_type in job.chain.layer_types if job.profile.identity.is_measured else ():
        if all(refusal(layer_type, each, config) for each in outcome.tables.strategies):
            samples = config.microbatch_samples
            nearest_first = sorted(outcome.tables.strategies, key=lambda each: rank_samples(each, samples))
            reasons = (unmeasured_reason(layer_type, each, config) for each in nearest_first)
            return next((f"left out, {reason}" for reason in reasons if reason is not None), "")
    return ""


def device_bytes(job: Job, tensor_bytes: int) -> int:
    """Bytes that a device needs to hold these bytes of tensors: with the allocator's slack."""
    return math.ceil(tensor_bytes * job.budget_bytes / usable_bytes(job))


def _miss_text(job: Job, found: Acceptance) -> str:
    miss, index = found.search.nearest_miss, found.search.nearest_index
    if job.is_mixed:
        return _pooled_miss_text(job, miss)
    if miss is None or index is None:
        unmeasured = {_why_unmeasured(job, outcome): None for outcome in found.search.configs}
        if all(unmeasured):
            return f"a profile that reaches further: every pipeline configuration is {next(iter(unmeasured))}"
        return "a strategy for every layer, but some layer has no legal one (see the reasons)"
    needed, least = device_bytes(job, miss.needed_bytes), device_bytes(job, found.floor_bytes)
    pipeline = found.search.configs[index].pipeline
    stages = format_plural(pipeline.num_stages, "stage")
    microbatches = format_plural(pipeline.num_microbatches, "microbatch", "microbatches")
    others = f"; no plan takes less than {format_bytes(least)}" if least < needed else ""
    return (
        f"{format_bytes(needed)} per device, {format_bytes(needed - job.budget_bytes)} "
        f"({needed - job.budget_bytes} bytes) more: the nearest plan has {stages} and {microbatches}, "
        f"and {job.chain.layer_name(miss.layer)} on stage {miss.stage} binds{others}"
    )


def _pooled_miss_text(job: Job, miss: NearestMiss | None) -> str:
    if miss is None:
        return "a batch that some pipeline over these pools can divide among its ranks"
    return (
        f"{format_bytes(miss.miss_bytes)} more per device: {job.chain.layer_name(miss.layer)} on stage {miss.stage} "
        "binds in the nearest plan found"
    )
