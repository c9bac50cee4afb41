"""Chooses a plan over unlike pools of devices: their order along the pipeline, the stages of each, and all the rest.

The best plan of the search (`steelyard.planning.pool_search`), its price, what each pool that it leaves out would have
cost, and its rivals: the best plan on each pool alone and the best one of even cuts.

Not searched: a part of a pool, stages of unlike sizes within one, and chunks over several.
"""

import heapq
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from steelyard.cost.pools import AnyJob, PooledJob
from steelyard.cost.predict import PlanCost, predict
from steelyard.errors import UserError
from steelyard.hardware import MixedCluster, parse_pools, with_network
from steelyard.plan.certificate import Certificate
from steelyard.plan.choices import Explanation, Rival
from steelyard.plan.plan import Alternative, Baseline, Plan, PoolUse, Precision, Prediction
from steelyard.plan.strategy import divisors
from steelyard.planning.acceptance import Accepted, accept
from steelyard.planning.choose import NUM_RESCORED, PlanningResult, plan_job
from steelyard.planning.demands import asked_in
from steelyard.planning.job import make_job
from steelyard.planning.margin import pressure, without_margin
from steelyard.planning.plan_from_search import describe, summarise
from steelyard.planning.pool_search import PooledSearch, search_pools
from steelyard.planning.pool_space import SAME, PooledSetting, PooledSpace
from steelyard.planning.price import asked_by, job_of, prediction_of, repriced
from steelyard.planning.problem import PlanOptions
from steelyard.planning.profile_file import GivenProfiles, pool_profiles, recorded_profile
from steelyard.search import NearestMiss
from steelyard.search.balance import even_boundaries
from steelyard.units import format_bytes, format_plural, format_seconds


def make_pooled_job(
    config: Any,
    cluster: MixedCluster,
    *,
    global_batch: int,
    seq_len: int,
    precision: Precision,
    memory: str | int | None = None,
    profile: GivenProfiles | None = None,
    **more: Any,
) -> PooledJob:
    """The job that these arguments describe on several pools; as `make_job` for each.

    ``profile`` has the measured profiles of pools by name, see `pool_profiles`; the others are traced.
    """
    pools, profiles = [], pool_profiles(profile, [pool.name for pool in cluster.pools])
    for pool, link in zip(cluster.pools, cluster.links, strict=True):
        job = make_job(
            config,
            pool,
            global_batch=global_batch,
            seq_len=seq_len,
            precision=precision,
            memory=memory,
            profile=profiles.get(pool.name),
            **more,
        )
        pools.append(replace(job, outer_link=link))
    return PooledJob(pools=tuple(pools), cluster=cluster)


def plan_pools(job: PooledJob, options: PlanOptions, *, top: int = NUM_RESCORED) -> PlanningResult:
    """Searches every setting of a job on several pools and turns the best into a plan; as `plan_job` for one."""
    found = _plan_within(job, options, top, missed=())
    if found.plan is not None or not any(pool.margin_bytes for pool in job.pools):
        return found
    whole = replace(job, pools=tuple(map(without_margin, job.pools)))
    found = _plan_within(whole, options, top, missed=tuple(pool.margin_bytes for pool in job.pools))
    return replace(found, has_margin=found.plan is None)


def _plan_within(job: PooledJob, options: PlanOptions, top: int, *, missed: tuple[int, ...]) -> PlanningResult:
    """As `plan_pools`, within the budgets of the pools; ``missed`` are margins that no plan was found to leave free."""
    found = search_pools(
        job,
        PooledSpace(job, options),
        time_limit_s=options.time_limit_s,
        least_gain=options.least_gain,
    )
    search = found.acceptance.search
    result = PlanningResult(
        job=job,
        tables=(),
        search=search,
        plan=None,
        cost=None,
        miss=search.nearest_miss,
        miss_text="",
    )
    if not found.accepted:
        return replace(result, miss_text=_miss_text(job, found))
    candidates = found.accepted[: max(top, NUM_RESCORED)]
    costs = [predict(each.plan, job) for each in candidates]
    best = min(range(len(costs)), key=lambda index: (costs[index].step_time_s, index))
    plan, cost = candidates[best].plan, costs[best]
    alternatives = [
        Alternative(
            description=describe(each.plan.pipeline, stages=_described(each.plan)),
            step_time_s=other.step_time_s,
            memory_bytes=max(stage.total_bytes for stage in other.stages),
            is_bound=not each.is_settled,
            reason=("" if each.is_settled else "at most ")
            + f"{other.step_time_s / cost.step_time_s - 1:.1%} slower: {summarise(each.plan)}",
        )
        for each, other in sorted(zip(candidates, costs, strict=True), key=lambda pair: pair[1].step_time_s)
        if each is not candidates[best]
    ]
    prediction = _prediction(
        job,
        plan,
        cost,
        _certificate(found, best, len(candidates), options.time_limit_s),
        missed=missed,
        pools=pool_uses(job, plan, cost.step_time_s, found),
        lower_bound_s=found.lower_bound_s,
        alternatives=tuple(alternatives),
    )
    plan = plan.model_copy(update={"prediction": prediction, "asked": asked_in(options)})
    return replace(result, plan=plan, cost=cost, miss=None)


def _prediction(
    job: PooledJob, plan: Plan, cost: PlanCost, certificate: Certificate, *, missed: tuple[int, ...] = (), **more: Any
) -> Prediction:
    """What is predicted of a plan over several pools, which no measured runs are like; ``more`` is of the search."""
    first = job.jobs(plan)[0]
    return prediction_of(first, plan, cost, certificate).model_copy(
        update={
            "warnings": (*job.chain.warnings(job.seq_len), *_pressures(job, plan, cost, missed)),
            "budget_bytes": job.budget_bytes,
            "margin_bytes": 0,
            "interval": None,
            **more,
        }
    )


def _pressures(job: PooledJob, plan: Plan, cost: PlanCost, missed: tuple[int, ...] = ()) -> tuple[str, ...]:
    """The warnings of `pressure`, for each pool that a plan uses."""
    own, found = job.jobs(plan), []
    for place, pool in enumerate(job.pools):
        stages = [stage for stage, each in zip(cost.stages, own, strict=True) if each is pool]
        told = pressure(pool, stages, missed_bytes=missed[place] if missed else 0) if stages else ()
        found += [f"{pool.cluster.name}: {warning}" for warning in told]
    return tuple(found)


def pool_uses(job: PooledJob, plan: Plan, step_time_s: float, found: PooledSearch | None = None) -> tuple[PoolUse, ...]:
    """The pools of a job as a plan uses them; ``found`` says what those it leaves out would have cost."""
    names = plan.cluster.split("+")
    own = job.jobs(plan)
    uses = []
    for name, pool in sorted(
        ((pool.cluster.name, pool) for pool in job.pools),
        key=lambda pair: names.index(pair[0]) if pair[0] in names else len(names),
    ):
        uses.append(
            PoolUse(
                name=name,
                num_devices=pool.cluster.num_devices,
                num_stages=sum(each is pool for each in own),
                budget_bytes=pool.budget_bytes,
                margin_bytes=pool.margin_bytes,
                profile=pool.cost_source(),
                reason=None if name in names or found is None else _why_left_out(name, step_time_s, found),
            )
        )
    return tuple(uses)


def _why_left_out(name: str, step_time_s: float, found: PooledSearch) -> str:
    using = [each.outcome.score_s for each in found.accepted if name in each.plan.cluster.split("+")]
    if not using:
        return f"no plan with it that fits is known; none with it was found below {format_seconds(step_time_s)} a step"
    more = min(using) / step_time_s - 1
    return f"the fastest plan found with it takes {format_seconds(min(using))} a step, {more:.1%} more"


def _described(plan: Plan) -> str:
    """The pools of a plan with their stages: ``4x8xh100-80gb (4 stages), 8x8xa100-40gb (2 stages)``."""
    names = [pool.name for pool in plan.stage_pools()]
    return ", ".join(f"{name} ({format_plural(names.count(name), 'stage')})" for name in dict.fromkeys(names))


def _certificate(found: PooledSearch, best: int, num_simulated: int, time_limit_s: float | None) -> Certificate:
    gap = max(0.0, 1 - found.lower_bound_s / found.accepted[best].outcome.score_s)
    if best > 0:
        return Certificate(status="simulated", gap=gap, num_simulated=num_simulated)
    if found.is_optimal:
        return Certificate(status="optimal", gap=0.0)
    return Certificate(status="gap", gap=gap, time_limit_s=time_limit_s if found.was_cut else None)


def _miss_text(job: PooledJob, found: PooledSearch) -> str:
    miss = found.acceptance.search.nearest_miss
    if miss is None:
        return "a strategy for every layer, but some layer has no legal one"
    return (
        f"{format_bytes(miss.miss_bytes)} more per device: {job.chain.layer_name(miss.layer)} on stage {miss.stage} "
        "binds in the nearest plan found"
    )


def pooled_job_of(
    plan: Plan,
    *,
    cluster: str | None = None,
    network: str | None = None,
    memory: str | None = None,
    profile: GivenProfiles | None = None,
    folder: Path | None = None,
) -> PooledJob:
    """The job that a plan over several pools is for, as `job_of` makes that of one pool.

    Raises `InvalidPlanError` where a pool of the plan is not one of the ``cluster``, and `UserError` where that has one
    pool alone.
    """
    machines = plan.hardware_value() if cluster is None else parse_pools(cluster)
    if not isinstance(machines, MixedCluster):
        raise UserError(
            field="--cluster",
            found=f"{machines.name} for a plan over {plan.cluster}",
            expected="the pools of the plan, or others of the same names",
            hint="leave --cluster out, or plan for this cluster",
        )
    known = {use.name: use for use in (plan.prediction and plan.prediction.pools) or ()}
    if profile is None and cluster is None:
        measured = {name: use.profile for name, use in known.items() if use.profile.is_measured}
        profile = {name: recorded_profile(each, folder=folder) for name, each in measured.items()}
    job = make_pooled_job(
        plan.chain(),
        machines if network is None else with_network(machines, network),
        memory=memory,
        profile=profile,
        **asked_by(plan),
    )
    if cluster is None and memory is None:
        uses = [(pool, known.get(pool.cluster.name)) for pool in job.pools]
        pools = [
            replace(pool, budget_bytes=use.budget_bytes, margin_bytes=use.margin_bytes) if use else pool
            for pool, use in uses
        ]
        job = replace(job, pools=tuple(pools))
    job.jobs(plan)
    return job


def any_job_of(plan: Plan, *, profile: str | None = None, folder: Path | None = None, **given: str | None) -> AnyJob:
    """The job that a plan is for, of one pool or several; as `job_of` and `pooled_job_of`."""
    if not plan.is_mixed:
        return job_of(plan, profile=profile, folder=folder, **given)
    return pooled_job_of(plan, profile=profile, folder=folder, **given)


def price_pools(plan: Plan, job: PooledJob) -> Plan:
    """The plan with its prediction on several pools, which makes no claim about other plans."""
    cost = predict(plan, job)
    uses = pool_uses(job, plan, cost.step_time_s)
    return repriced(plan, _prediction(job, plan, cost, Certificate(status="priced"), pools=uses))


def with_pool_baselines(plan: Plan, job: PooledJob, options: PlanOptions) -> Plan:
    """The plan with what each pool alone does, and even cuts over all of them, in its prediction."""
    assert plan.prediction is not None, "compared by its prediction"
    rivals = pool_rivals(job, options, plan.prediction.step_time_s)
    found = tuple(Baseline(**{name: getattr(each, name) for name in Baseline.model_fields}) for each in rivals)
    return plan.model_copy(update={"prediction": plan.prediction.model_copy(update={"baselines": found})})


def explain_pools(plan: Plan, job: PooledJob, options: PlanOptions) -> Explanation:
    """What a plan over several pools gains over each of them alone, and over even cuts."""
    step_s = price_pools(plan, job).prediction
    assert step_s is not None, "just priced"
    return Explanation(binds="", rivals=pool_rivals(job, options, step_s.step_time_s))


def pool_rivals(job: PooledJob, options: PlanOptions, step_s: float) -> tuple[Rival, ...]:
    """The best plan on each pool alone, not searched to the end, and that which cuts all devices into equal stages of
    equal layers."""
    rivals = []
    for pool in job.pools:
        result = plan_job(pool, replace(options, num_stages=None), top=0, to_the_end=False)
        rivals.append(_rival(f"{pool.cluster.name} alone", result.plan, result.cost, step_s, result.miss))
    even = even_plan(job, options)
    cost = None if even is None else predict(even, job)
    return (*rivals, _rival("even cuts over all pools", even, cost, step_s, None))


def _rival(name: str, plan: Plan | None, cost: PlanCost | None, step_s: float, miss: NearestMiss | None) -> Rival:
    if plan is None or cost is None:
        return Rival(name=name, missing_bytes=None if miss is None else miss.miss_bytes)
    return Rival(
        name=name,
        step_time_s=cost.step_time_s,
        slowdown=cost.step_time_s / step_s - 1,
        setting=describe(plan.pipeline),
        strategies=summarise(plan),
    )


def even_plan(job: PooledJob, options: PlanOptions) -> Plan | None:
    """The best plan of stages that all have as many devices and as many layers, in the order that the pools are in.

    None where no such plan fits. Its strategies are the best ones for these cuts.
    """
    space, counts = PooledSpace(job, options), [pool.cluster.num_devices for pool in job.pools]
    chosen = range(len(counts))
    even = {tuple(count // size for count in counts) for size in divisors(math.gcd(*counts))}
    settings = [
        each for each in space.settings() if each.placement.pools == tuple(chosen) and each.placement.stages in even
    ]
    waiting = [(setting.bound_s, place, False) for place, setting in enumerate(settings)]
    heapq.heapify(waiting)
    best: Accepted | None = None
    while waiting and (best is None or waiting[0][0] < best.outcome.score_s):
        _, place, is_sharp = heapq.heappop(waiting)
        if not is_sharp:
            heapq.heappush(waiting, (_even_bound_s(space, settings[place]), place, True))
            continue
        found = accept(job, [space.tables(settings[place])], partition="even").ranked
        if found and (best is None or found[0].outcome.score_s < best.outcome.score_s):
            best = found[0]
    return None if best is None else best.plan


def _even_bound_s(space: PooledSpace, setting: PooledSetting) -> float:
    """What no plan of even cuts of a setting is faster than, by the times of its layers."""
    tables = space.tables(setting)
    cuts = even_boundaries(tables)
    times = [
        np.where(tables.legal_on(stage), tables.time_s, np.inf).min(axis=1)[list(tables.layers[first:end])].sum()
        for stage, (first, end) in enumerate(itertools.pairwise(cuts))
    ]
    if math.isinf(max(times)):
        return math.inf
    return float(sum(times) + (setting.pipeline.num_passes - 1) * max(times)) * (1 - SAME)
