"""Choose the plan: search all pipeline configurations of a job and let the simulator rank the best few.

`accept` searches cost tables within the memory of a device. It adds memory up as a plan is predicted
(`steelyard.cost.memory`), so what it finds fits as reported. `plan_job` makes the tables, searches, simulates the best
plans and says what is proven of the first and why the others lost.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

from steelyard.cost.build import usable_bytes
from steelyard.cost.job import Job, JobConfig
from steelyard.cost.layer_load import rank_samples, refusal, unmeasured_reason
from steelyard.cost.layer_memory import saved_in_matrices
from steelyard.cost.predict import PlanCost, predict
from steelyard.cost.tables import CostTables
from steelyard.engines.capabilities import unsupported
from steelyard.errors import UserError
from steelyard.plan.decisions import FREE, Decisions, Partition
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import Alternative, Certificate
from steelyard.plan.stages import StagePart, fold_runs
from steelyard.planning.price import assemble_plan, bare_plan, describe, prediction_of, summarise, warnings_of
from steelyard.planning.problem import is_uniform, make_tables, shared_cores_bound_s, shares_cores
from steelyard.planning.request import PlanRequest
from steelyard.planning.uniform import uniform_choices
from steelyard.search import TIME_LIMIT_S, ConfigOutcome, NearestMiss, OnDemand, SearchResult, search
from steelyard.search.evaluate import group_equal_strategies
from steelyard.units import format_bytes, format_plural

NEAR = 1.1
"""Where processes share cores: how many times the fastest step one may take for its cuts to be moved. Moving them
gained up to 2 % (24 random jobs)."""
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
    missed: Job | None = None
    """The job with the margin that no plan leaves free, where the plan takes of it."""
    bounded_tables: tuple[OnDemand, ...] = ()
    """The cost tables with their bounds, for further searches within the budget of the job or less."""
    notes: tuple[str, ...] = ()
    """What was assumed, tried or left out on the way."""

    @property
    def remedies(self) -> str:
        """What may help where nothing fits."""
        states = states_bytes(self.job) // sum(each.cluster.num_devices for each in self.job.groups)
        if states <= self.job.budget_bytes:
            return "more memory per device, more devices, or a shorter sequence"
        return (
            "more memory per device or more devices: parameters, gradients and optimizer states alone need "
            f"{format_bytes(states)} per device, and no shorter sequence changes that"
        )

    @property
    def has_margin(self) -> bool:
        """Whether the plan leaves the margin of its job free."""
        return self.missed is None


class NothingFitsError(UserError):
    """No plan fits the budget. Carries the nearest miss in bytes as its message."""

    exit_code = 1


class NoUniformPlanError(UserError):
    """No strategy that all layers of the model can have under what was decided."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Accepted:
    """A plan of a job that fits, its cost, and the outcome of the search that it comes from."""

    job: Job
    outcome: ConfigOutcome
    plan: Plan

    @cached_property
    def cost(self) -> PlanCost:
        """The cost of the plan by the simulator."""
        return predict(self.plan, self.job)

    @property
    def step_s(self) -> float:
        """Seconds of a step by the simulator: what plans compete on, and what is shown."""
        return self.cost.step_time_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Acceptance:
    """The best plans of the configurations, and what the search says of all configurations.

    Those asked for come first, the fastest by the simulator first, then others that were found on the way, as the
    search ranks them. Where there is none no plan takes less than ``floor_bytes``.
    """

    ranked: tuple[Accepted, ...]
    num_simulated: int
    search: SearchResult
    lower_bound_s: float
    """No plan of any configuration takes less."""
    bounded: tuple[OnDemand, ...]
    """The tables that were searched, each with what no plan of it that fits is faster than, for further searches within
    no more memory."""
    floor_bytes: int = 0


def accept(
    job: Job,
    tables: Sequence[CostTables | OnDemand],
    *,
    num_exact: int = 1,
    num_alternatives: int = 4,
    partition: Partition = "exact",
    time_limit_s: float | None = None,
    uniform: bool = False,
    remat_runs: bool = False,
    cutoff_s: float = math.inf,
    progress: Callable[[str], None] = lambda _: None,
) -> Acceptance:
    """The fastest plans of a job that fit, of all configurations whose cost tables are given; arguments as of
    `search`.

    The simulator ranks as many as are asked for. ``uniform`` searches those of one strategy alone, with ``remat_runs``
    also those that `uniform_choices` says, and raises `NoUniformPlanError` where none is legal. Where
    processes share cores, cuts of plans near the fastest are moved as long as that makes them faster.
    """
    room_bytes = usable_bytes(job)
    found = search(
        tables,
        room_bytes,
        num_exact=num_exact,
        num_alternatives=num_alternatives,
        partition=partition,
        time_limit_s=time_limit_s,
        choices=partial(uniform_choices, job, remat_runs=remat_runs) if uniform else None,
        cutoff_s=cutoff_s,
        progress=progress,
    )
    made = [] if found.ranked else [each.given.any_budget for each in found.configs if each.given.is_made]
    if uniform and not found.ranked and found.nearest_miss is None and cutoff_s == math.inf:
        raise _no_uniform_plan(job)
    group = (lambda _, solution: solution) if uniform else partial(group_equal_strategies, room_bytes=room_bytes)
    ranked = [
        Accepted(job=job, outcome=each, plan=bare_plan(job, each.tables, group(each.tables, each.solution)))
        for each in found.ranked
    ]
    count = min(num_exact + num_alternatives, len(ranked))
    if ranks_all(job) and partition == "exact":
        near_s = NEAR * min((each.step_s for each in ranked[:count]), default=0.0)
        ranked[:count] = [_with_cuts_moved(each) if each.step_s <= near_s else each for each in ranked[:count]]
    return Acceptance(
        ranked=(*sorted(ranked[:count], key=lambda each: each.step_s), *ranked[count:]),
        num_simulated=count,
        search=found,
        lower_bound_s=min(shared_cores_bound_s(job, each.given, each.result.lower_bound_s) for each in found.configs)
        if shares_cores(job)
        else found.lower_bound_s,
        bounded=tuple(each.given.bounded(each.result.lower_bound_s) for each in found.configs),
        floor_bytes=min((each.least_bytes for each in made if each.least_bytes is not None), default=0),
    )


def _with_cuts_moved(found: Accepted) -> Accepted:
    """A plan whose step no longer gets shorter, by the simulator, when one layer goes to a neighbouring stage.

    Layers keep their strategies. Plans in chunks stay as they are.
    """
    parts, job = found.plan.parts, found.job
    if found.plan.num_chunks > 1:
        return found
    best = found
    for place, (before, after) in enumerate(pairwise(parts)):
        layers = (*before.layers, *after.layers)
        for cut in (after.first_layer - 1, after.first_layer + 1):
            if not layers[0] < cut <= layers[-1]:
                continue
            moved = [
                StagePart(ranks=part.ranks, runs=fold_runs(first, found.plan.strategies[first:end]))
                for part, first, end in ((before, layers[0], cut), (after, cut, layers[-1] + 1))
            ]
            plan = assemble_plan(job, found.plan.pipeline, (*parts[:place], *moved, *parts[place + 2 :]))
            other = replace(found, plan=plan)
            is_allowed = other.cost.fits and not unsupported(plan, job.engine.capabilities)
            best = other if is_allowed and other.step_s < best.step_s else best
    return found if best is found else _with_cuts_moved(best)


def without_margin(job: Job) -> Job:
    """The job within all the memory that there is."""
    return Job.over([each.within(each.budget_bytes + each.margin_bytes) for each in job.by_group])


def plan_request(request: PlanRequest, job: Job, progress: Callable[[str], None] = lambda _: None) -> PlanningResult:
    """Return the plan of a request with this job, not compared with others yet."""
    top, limit_s = request.num_alternatives, request.time_limit_s
    return plan_job(job, request.decisions, top=top, time_limit_s=limit_s, progress=progress)


def plan_job(
    job: Job,
    decisions: Decisions = FREE,
    *,
    top: int = NUM_RESCORED,
    time_limit_s: float | None = TIME_LIMIT_S,
    tables: tuple[OnDemand, ...] | None = None,
    to_the_end: bool = True,
    progress: Callable[[str], None] = lambda _: None,
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
        progress=progress,
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
    return replace(found, plan=found.plan.model_copy(update={"prediction": prediction}), missed=job)


def _plan_within(
    job: Job,
    *,
    decisions: Decisions,
    top: int,
    time_limit_s: float | None,
    tables: tuple[OnDemand, ...],
    to_the_end: bool,
    progress: Callable[[str], None],
) -> PlanningResult:
    """As `plan_job`, within the budget of the job."""
    started = time.monotonic()
    uniform = is_uniform(job, decisions)
    if uniform and not tables:
        raise _no_uniform_plan(job)
    num_rescored = len(tables) if ranks_all(job) else max(top, NUM_RESCORED if to_the_end else 1)
    num_exact = num_rescored if job.is_mixed or ranks_all(job) else 1
    found = accept(
        job,
        tables,
        num_exact=num_exact,
        num_alternatives=num_rescored - num_exact,
        partition=decisions.stage_partition,
        time_limit_s=time_limit_s,
        uniform=uniform,
        progress=progress,
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
        bounded_tables=found.bounded,
    )
    if not found.ranked:
        configs, text = found.search.configs, _miss_text(job, found)
        if count := sum(each.result.status == "beaten" for each in configs):
            total = len(configs)
            text += f"; {count} of {total} pipeline configurations were not searched before the time was up"
        return replace(result, miss_text=text)
    best, *others = found.ranked[: found.num_simulated]
    plan, cost = best.plan, best.cost
    lower_s, was_cut = found.lower_bound_s, time_limit_s is not None and searched_s >= time_limit_s
    gap = found.search.gap
    if shares_cores(job):
        gap = max(0.0, 1 - lower_s / best.step_s)
    elif best.outcome is not found.search.best:
        gap = max(0.0, 1 - lower_s / best.outcome.score_s)
    if best.outcome is not found.search.best and not shares_cores(job):
        certificate = Certificate(status="simulated", gap=gap, num_simulated=found.num_simulated)
    elif found.search.status == "optimal" and not gap:
        certificate = Certificate(status="optimal", gap=gap)
    else:
        certificate = Certificate(status="gap", gap=gap, time_limit_s=time_limit_s if was_cut else None)
    lost = [_alternative(job, each, cost) for each in others]
    prediction = prediction_of(
        job,
        plan,
        cost,
        certificate,
        lower_bound_s=lower_s,
        alternatives=(*lost, *(() if job.is_mixed else _not_simulated(job, found))),
        found=[(each.plan, each.step_s) for each in found.ranked] if job.is_mixed else (),
    )
    return replace(
        result,
        plan=plan.model_copy(update={"prediction": prediction, "asked": None if decisions.is_free else decisions}),
        cost=cost,
        miss=None,
        others=tuple((each.plan, each.cost) for each in others),
    )


def _no_uniform_plan(job: Job) -> NoUniformPlanError:
    engine, is_free = job.engine, job.engine.capabilities.mixes_layers
    return NoUniformPlanError(
        field="--uniform" if is_free else "--engine",
        found=f"{'no strategy' if is_free else f'{engine.name}, which has no strategy'} that every layer of "
        f"{job.chain.name} can have with what else is asked",
        expected="decisions, a batch and devices that leave one strategy for all layers",
        hint=f"leave {'--uniform' if is_free else '--engine'} out, or what else is decided",
    )


def ranks_all(job: Job) -> bool:
    """Whether the simulator must rank the plans of all configurations: where processes share cores
    (`Profile.busy_speeds`).

    The closed form of the search takes all processes to be busy at all times, so that it ranks configurations of unlike
    numbers of stages wrongly there.
    """
    return not job.is_mixed and shares_cores(job)


def _alternative(job: Job, other: Accepted, best: PlanCost) -> Alternative:
    """A plan that was simulated and takes longer than the best one."""
    plan, cost, is_settled = other.plan, other.cost, other.outcome.result.status == "optimal"
    slower = f"{cost.step_time_s / best.step_time_s - 1:.1%} slower: {summarise(plan)}"
    pools = [pool.name for pool in plan.stage_pools()] if job.is_mixed else []
    stages = (f"{name} ({format_plural(pools.count(name), 'stage')})" for name in dict.fromkeys(pools))
    return Alternative(
        description=describe(plan.pipeline, stages=", ".join(stages) or None),
        step_time_s=cost.step_time_s,
        memory_bytes=max(stage.total_bytes for stage in cost.stages),
        is_bound=not is_settled,
        reason=slower if is_settled else f"at most {slower}",
    )


def _not_simulated(job: Job, found: Acceptance) -> list[Alternative]:
    """The configurations whose plans were not simulated, and those without a plan, with the reason of the search.

    Bytes that are missing are those of a device, the allocator's slack included.
    """
    chosen_s, told = found.ranked[0].outcome.score_s, []
    for each in found.ranked[found.num_simulated :]:
        slower = each.outcome.score_s / chosen_s - 1
        told.append((each.outcome, f"{slower:.1%} slower in the search, not simulated: {summarise(each.plan)}"))
    for outcome in (each for each in found.search.configs if each.result.solution is None):
        miss = outcome.result.miss
        if miss is None:
            why = _why_unmeasured(job, outcome) or outcome.reason
        else:
            missing = format_bytes(device_bytes(job, miss.needed_bytes) - job.budget_bytes)
            layer = job.chain.layer_name(miss.layer)
            why = f"does not fit: misses {missing} or more; bottleneck: {layer} on stage {miss.stage}"
        told.append((outcome, why))
    return [Alternative(description=describe(each.pipeline), reason=why) for each, why in told]


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


def states_bytes(job: Job) -> int:
    """Bytes of parameters, gradients and optimizer states of the whole model on devices, however they are divided."""
    if job.effects.parameters_on_host:
        return 0
    found, of_one, states = 0.0, job.by_group[0], job.execution.states
    if states is not None:
        of_trained = float(states.parameters + states.gradients + states.optimizer)
    else:
        of_trained = 2 * job.effects.weight_bytes + job.effects.state_bytes
    for number in range(job.chain.num_layers):
        layer = of_one.layer(job.chain.type_of(number).name, {})
        if layer is not None:
            trained = layer.num_params - layer.frozen_params
            found += trained * of_trained + layer.frozen_params * job.compute_bytes
            found -= saved_in_matrices(trained, job.chain.type_of(number), layer, job)
    return int(found)


def device_bytes(job: Job, tensor_bytes: int) -> int:
    """Bytes that a device needs to hold these bytes of tensors: with the allocator's slack."""
    return math.ceil(tensor_bytes * job.budget_bytes / usable_bytes(job))


def _miss_text(job: Job, found: Acceptance) -> str:
    miss, index = found.search.nearest_miss, found.search.nearest_index
    if job.is_mixed and miss is None:
        return "a batch that some pipeline over these pools can divide among its ranks"
    if miss is None or index is None:
        unmeasured = {_why_unmeasured(job, outcome): None for outcome in found.search.configs}
        if all(unmeasured):
            return f"a profile that reaches further: every pipeline configuration is {next(iter(unmeasured))}"
        return "a strategy for every layer, but some layer has no legal one (see the reasons)"
    bottleneck = f"the memory bottleneck is {job.chain.layer_name(miss.layer)} on stage {miss.stage}"
    if job.is_mixed:
        return f"{format_bytes(miss.miss_bytes)} more per device; in the nearest plan {bottleneck}"
    needed, least = device_bytes(job, miss.needed_bytes), device_bytes(job, found.floor_bytes)
    pipeline = found.search.configs[index].pipeline
    others = f"; no plan takes less than {format_bytes(least)}" if least < needed else ""
    return (
        f"{format_bytes(needed)} per device, {format_bytes(needed - job.budget_bytes)} "
        f"({needed - job.budget_bytes} bytes) more: the nearest plan has "
        f"{format_plural(pipeline.num_stages, 'stage')} and "
        f"{format_plural(pipeline.num_microbatches, 'microbatch', 'microbatches')}, and {bottleneck}{others}"
    )
