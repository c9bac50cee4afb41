"""What a plan over unlike pools of devices is held against: the best plan on each pool alone, and that of even cuts."""

import heapq
import itertools
import math

import numpy as np

from steelyard.cost.pools import AnyJob, PooledJob
from steelyard.cost.predict import predict
from steelyard.plan.choices import Explanation, Rival
from steelyard.plan.decisions import Decisions
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import divisors
from steelyard.planning.acceptance import Accepted, accept
from steelyard.planning.choose import plan_job
from steelyard.planning.pool_space import SAME, PooledSetting, PooledSpace
from steelyard.planning.variants import Answer
from steelyard.search.balance import even_boundaries


def explain_pools(plan: Plan, job: PooledJob, decisions: Decisions) -> Explanation:
    """Return what a plan over several pools gains over each of them alone, and over even cuts."""
    return Explanation(binds="", rivals=pool_rivals(job, decisions, predict(plan, job).step_time_s))


def pool_rivals(job: PooledJob, decisions: Decisions, step_s: float) -> tuple[Rival, ...]:
    """Return the best plan on each pool alone, not searched to the end, and that which cuts all devices into equal
    stages of equal layers; each next to a plan whose step takes ``step_s``."""
    answers, free = [], decisions.model_copy(update={"num_stages": None})
    for pool in job.pools:
        result = plan_job(pool, free, to_the_end=False)
        missing = result.miss.miss_bytes if result.miss else None
        answers.append(_answer(f"{pool.cluster.name} alone", result.plan, result.job, missing))
    answers.append(_answer("even cuts over all pools", even_plan(job, decisions), job))
    return tuple(each.beside(step_s) for each in answers)


def _answer(name: str, plan: Plan | None, job: AnyJob, missing_bytes: int | None = None) -> Answer:
    if plan is None:
        return Answer(name=name, missing_bytes=missing_bytes)
    return Answer(name=name, plan=plan, step_s=predict(plan, job).step_time_s)


def even_plan(job: PooledJob, decisions: Decisions) -> Plan | None:
    """The best plan of stages that all have as many devices and as many layers, in the order that the pools are in.

    None where no such plan fits. Its strategies are the best ones for these cuts.
    """
    space, counts = PooledSpace(job, decisions), [pool.cluster.num_devices for pool in job.pools]
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
