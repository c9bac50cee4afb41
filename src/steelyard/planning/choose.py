"""Choose the plan: search all pipeline configurations of a job and let the simulator rank the best few.

`accept` searches cost tables within the memory of a device. It computes memory as predictions do
(`steelyard.cost.memory`), so the plans that it finds fit as reported. `plan_job` builds the tables, searches, simulates
the best plans, and reports the certificate of the first one and the reasons against the others.
"""

import math
import time
from collections.abc import Callable, Container, Sequence
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
from steelyard.planning.pass_order import in_best_order
from steelyard.planning.pins import pins_of
from steelyard.planning.price import assemble_plan, bare_plan, describe, prediction_of, summarise, warnings_of
from steelyard.planning.problem import (
    is_uniform,
    make_tables,
    proves_apart,
    shares_cores,
    simulated_bound_s,
    space_options,
)
from steelyard.planning.request import PlanRequest
from steelyard.planning.uniform import uniform_choices
from steelyard.schedules import PipelineConfig
from steelyard.search import TIME_LIMIT_S, ConfigOutcome, NearestMiss, OnDemand, SearchResult, search
from steelyard.search.evaluate import group_equal_strategies
from steelyard.search.space import enumerate_strategies
from steelyard.units import format_bytes, format_plural

NEAR = 1.1
"""Largest step time, relative to the fastest, of plans whose cuts are moved if processes share cores. Moving them
gained up to 2 % (24 random jobs)."""
WORTH_A_SEARCH = 0.03
"""Fraction of the fastest simulated step that a configuration may gain, by its bound, to be searched after it."""
MOST_AGAIN = 3
"""Number of configurations that are searched after simulation, because they may be faster than its best plan."""
MOST_REASONS = 3
"""Number of missing combinations that an error names."""
NUM_RESCORED = 5
"""Number of configurations re-ranked by simulation (more if more alternatives are requested)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningResult:
    """Result of planning: a plan and its cost, or the nearest miss if nothing fits."""

    job: Job
    tables: tuple[OnDemand, ...]
    """Cost tables that were searched."""
    search: SearchResult
    plan: Plan | None
    cost: PlanCost | None
    miss: NearestMiss | None
    miss_text: str
    others: tuple[tuple[Plan, PlanCost], ...] = ()
    """Simulated best plans of other pipeline configurations, without their predictions, fastest first."""
    missed: Job | None = None
    """The job with the reserved memory fraction that no plan leaves free, if the plan uses some of it."""
    bounded_tables: tuple[OnDemand, ...] = ()
    """Cost tables with their bounds, for further searches within the budget of the job or less."""
    notes: tuple[str, ...] = ()
    """Notes on what was assumed, tried or left out."""

    @property
    def remedies(self) -> str:
        """Remedies to try if nothing fits."""
        states = states_bytes(self.job) // sum(each.cluster.num_devices for each in self.job.groups)
        if states <= self.job.budget_bytes:
            return "more memory per device, more devices, or a shorter sequence"
        return (
            "more memory per device or more devices: parameters, gradients and optimizer states alone need "
            f"{format_bytes(states)} per device, and no shorter sequence changes that"
        )

    @property
    def has_margin(self) -> bool:
        """Whether the plan leaves the reserved memory fraction of its job free."""
        return self.missed is None


class NothingFitsError(UserError):
    """Raised if no plan fits the budget. The message is the nearest miss in bytes."""

    exit_code = 1


class NoUniformPlanError(UserError):
    """Raised if no strategy is legal for all layers of the model under the decisions."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Accepted:
    """A plan that fits, with its job, its cost and the search outcome that it comes from."""

    job: Job
    outcome: ConfigOutcome
    plan: Plan

    @cached_property
    def cost(self) -> PlanCost:
        """Simulated cost of the plan."""
        return predict(self.plan, self.job)

    @property
    def step_s(self) -> float:
        """Simulated step time in seconds, by which plans are ranked and which is shown."""
        return self.cost.step_time_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Acceptance:
    """The best plans of the configurations, and the search's result for every configuration.

    The simulated plans come first, fastest first, then the other plans that were found, in the order of the search. If
    there are none, no plan needs less than ``floor_bytes``.
    """

    ranked: tuple[Accepted, ...]
    num_simulated: int
    search: SearchResult
    lower_bound_s: float
    """Lower bound of the step time over all configurations."""
    bounded: tuple[OnDemand, ...]
    """Tables that were searched, each with the lower bound of its plans that fit, for further searches within no more
    memory."""
    floor_bytes: int = 0

    @property
    def gap(self) -> float:
        """Fraction of the time of the first plan that is not proven necessary, by the cost tables or as simulated."""
        best = self.ranked[0]
        if best.outcome is self.search.best and not self.is_proven_apart:
            return self.search.gap
        shown_s = best.step_s if self.is_proven_apart else best.outcome.score_s
        return max(0.0, 1 - self.lower_bound_s / shown_s)

    @property
    def is_proven_apart(self) -> bool:
        """Whether the lower bound is one of simulated times (`proves_apart`)."""
        return proves_apart(self.ranked[0].job, [each.given for each in self.search.configs])


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
    """Return the fastest plans of a job that fit, over all configurations whose cost tables are given.

    Other arguments are as in `search`. The simulator ranks the requested number of plans, and with alternatives up to
    `MOST_AGAIN` more, of configurations that may be faster than the fastest of them. ``uniform`` searches only
    plans of one strategy, with ``remat_runs`` also those that `uniform_choices` adds. If processes share cores, the
    cuts of plans near the fastest are moved as long as this makes them faster.
    """
    room_bytes, started = usable_bytes(job), time.process_time()
    searched = partial(
        search,
        budget_bytes=room_bytes,
        choices=partial(uniform_choices, job, remat_runs=remat_runs) if uniform else None,
        progress=progress,
    )
    found = searched(
        tables,
        num_exact=num_exact,
        num_alternatives=num_alternatives,
        partition=partition,
        time_limit_s=time_limit_s,
        cutoff_s=cutoff_s,
    )
    made = [] if found.ranked else [each.given.any_budget for each in found.configs if each.given.is_made]
    group = (lambda _, solution: solution) if uniform else partial(group_equal_strategies, room_bytes=room_bytes)

    def accepted(outcome: ConfigOutcome) -> Accepted:
        plan = bare_plan(job, outcome.tables, group(outcome.tables, outcome.solution))
        return Accepted(job=job, outcome=outcome, plan=plan)

    ranked = list(map(accepted, found.ranked))
    count = min(num_exact + num_alternatives, len(ranked))
    searches_again = num_alternatives > 0 and count > 0 and partition == "exact" and not ranks_all(job)
    known = {each.plan.pipeline for each in ranked[:count]}
    for _ in range(MOST_AGAIN if searches_again else 0):
        fastest_s = min(each.step_s for each in ranked[:count])
        given = _left_unsolved(found, known, fastest_s)
        left_s = None if time_limit_s is None else started + time_limit_s - time.process_time()
        if given is None or (left_s is not None and left_s <= 0):
            break
        known.add(given.pipeline)
        cutoff_s = fastest_s + _handed_s(given)
        for more in searched([given], num_alternatives=0, time_limit_s=left_s, cutoff_s=cutoff_s).ranked:
            ranked.insert(count, accepted(more))
            count += 1
    if ranks_all(job) and partition == "exact":
        near_s = NEAR * min((each.step_s for each in ranked[:count]), default=0.0)
        ranked[:count] = [_with_cuts_moved(each) if each.step_s <= near_s else each for each in ranked[:count]]
    return Acceptance(
        ranked=(*sorted(ranked[:count], key=lambda each: each.step_s), *ranked[count:]),
        num_simulated=count,
        search=found,
        lower_bound_s=min(simulated_bound_s(job, each.given, each.result.lower_bound_s) for each in found.configs)
        if proves_apart(job, [each.given for each in found.configs])
        else found.lower_bound_s,
        bounded=tuple(
            each.given if each.given.pipeline.is_v else each.given.bounded(each.result.lower_bound_s)
            for each in found.configs
        ),
        floor_bytes=min((each.least_bytes for each in made if each.least_bytes is not None), default=0),
    )


def _left_unsolved(found: SearchResult, known: Container[PipelineConfig], fastest_s: float) -> OnDemand | None:
    """Return the most promising of the other configurations, if one may clearly be faster than ``fastest_s`` simulated.

    The search left it because its closed form is faster than the simulation of the best plan, or counts transfers that
    the simulation hides.
    """
    left = (each for each in found.configs if each.pipeline not in known and each.result.status != "infeasible")
    most_s = fastest_s * (1 - WORTH_A_SEARCH)
    some = [each for each in left if each.result.lower_bound_s - _handed_s(each.given) < most_s]
    return min(some, key=lambda each: each.result.lower_bound_s).given if some else None


def _handed_s(given: OnDemand) -> float:
    """Seconds of transfers that the closed form counts in every pass, and other passes hide in the simulation."""
    if not given.is_made:
        return 0.0
    tables = given.tables
    return (tables.num_passes - 1) * max(map(tables.received_s, range(given.pipeline.num_stages)))


def _with_cuts_moved(found: Accepted) -> Accepted:
    """Move layers to neighbouring stages, one at a time, until no move shortens the simulated step.

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
    """Return the job with its reserved memory added to its budget."""
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
    """Search every pipeline configuration of a job and turn the best into a plan.

    The simulator prices ``top`` plans or more: the best one and the alternatives kept with it. If ``to_the_end`` is
    false, it prices no more than ``top``. ``tables`` are the cost tables of `make_tables` for this job and these
    decisions, if they were already built.

    The simulator ranks every configuration if `ranks_all` says so. Over several groups it ranks the optimal plans of
    their configurations, because the search's step times are a few percent off if stages differ.

    The time limit covers tables and search together. For configurations without tables by then, only the bound by
    computing time is known.

    If no plan leaves the reserved memory fraction of the job free, the result is the fastest plan within all memory.
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
    """Do the work of `plan_job` within the budget of the job."""
    started = time.process_time()
    uniform = is_uniform(job, decisions)
    if uniform and not tables:
        raise _no_uniform_plan(job, decisions)
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
    searched_s = time.process_time() - started
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
        if uniform and found.search.nearest_miss is None:
            raise _no_uniform_plan(job, decisions)
        configs, text = found.search.configs, _miss_text(job, found)
        if count := sum(each.result.status == "beaten" for each in configs):
            total = len(configs)
            text += f"; {count} of {total} pipeline configurations were not searched before the time was up"
        return replace(result, miss_text=text)
    best, *others = found.ranked[: found.num_simulated]
    plan, cost = in_best_order(best.plan, job, best.cost)
    lower_s, was_cut = found.lower_bound_s, time_limit_s is not None and searched_s >= time_limit_s
    gap, is_apart = found.gap, found.is_proven_apart
    if best.outcome is not found.search.best and not is_apart:
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
        lower_bound_s=min(lower_s, cost.step_time_s),
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


def _no_uniform_plan(job: Job, decisions: Decisions) -> NoUniformPlanError:
    engine, is_free = job.engine, job.engine.capabilities.mixes_layers
    option, devices = "--uniform" if is_free else "--engine", job.cluster.num_devices
    pins = pins_of(decisions, job.chain)
    offered = enumerate_strategies(devices, space_options(job, decisions)) if pins else ()
    asked = (each for each in offered if all(pin.allows(each) for pin in pins))
    means = engine.capabilities
    lacking = {means.refusal_of(job.chain, each) or means.refusal(each) or "" for each in asked}
    simplest = sorted(sorted(lacking), key=len)[:MOST_REASONS]
    why = f": it has no {', no '.join(simplest)}" if all(simplest) and simplest else ""
    levers = f" with {job.levers}" if job.levers else ""
    batches = f", or give a --global-batch that {devices} divides" if job.global_batch % devices else ""
    return NoUniformPlanError(
        field=option,
        found=f"{('no strategy' if is_free else f'{engine.name}, which has no strategy')} that every layer of "
        f"{job.chain.name}{levers} can use within the other restrictions{why}",
        expected="decisions, a batch and devices that leave one strategy for all layers",
        hint=f"leave {option} out, or another restriction{batches}",
    )


def ranks_all(job: Job) -> bool:
    """Return whether the simulator must rank the plans of all configurations.

    It must if processes share cores (`Profile.busy_speeds`), because the closed form of the search assumes that all
    processes are always busy and then misranks configurations with different numbers of stages.
    """
    return not job.is_mixed and shares_cores(job)


def _alternative(job: Job, other: Accepted, best: PlanCost) -> Alternative:
    """Return the alternative for a simulated plan that is slower than the best one."""
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
    """Return the configurations whose plans were not simulated, and those without a plan, with the search's reason.

    Missing bytes are per device, including the allocator's slack.
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
    """Return the reason why the profile's times leave some layer type without a strategy in a configuration.

    Empty if the profile is not the cause.
    """
    config = JobConfig(job=job, pipeline=outcome.pipeline)
    for layer_type in job.chain.layer_types if job.profile.identity.is_measured else ():
        if all(refusal(layer_type, each, config) for each in outcome.tables.strategies):
            samples = config.microbatch_samples
            nearest_first = sorted(outcome.tables.strategies, key=lambda each: rank_samples(each, samples))
            reasons = (unmeasured_reason(layer_type, each, config) for each in nearest_first)
            return next((f"left out, {reason}" for reason in reasons if reason is not None), "")
    return ""


def states_bytes(job: Job) -> int:
    """Total bytes of parameters, gradients and optimizer states on devices, however they are sharded."""
    if job.effects.parameters_on_host:
        return 0
    found, of_one, states = 0.0, job.by_group[0], job.execution.states
    if states is not None:
        of_trained = float(states.parameters + states.gradients + states.optimizer)
    elif job.effects.steps_on_host:
        of_trained = float(job.compute_bytes)
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
    """Device memory in bytes that these bytes of tensors need, including the allocator's slack."""
    return math.ceil(tensor_bytes * job.budget_bytes / usable_bytes(job))


def _miss_text(job: Job, found: Acceptance) -> str:
    miss, index = found.search.nearest_miss, found.search.nearest_index
    if job.is_mixed and miss is None:
        return "a batch that some pipeline over these device groups can divide among its ranks"
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
