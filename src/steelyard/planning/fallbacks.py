"""Other plans that a plan carries along: of less memory, to go on with, and the next best, to measure beside it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from steelyard.cost.job import Job
from steelyard.cost.predict import predict
from steelyard.plan.decisions import Decisions
from steelyard.plan.plan import Fallback, Plan
from steelyard.planning.acceptance import accept
from steelyard.planning.choose import PlanningResult, device_bytes, plan_job
from steelyard.planning.price import peak_bytes, with_cost
from steelyard.search import OnDemand

MEMORY_SHARES = (0.9, 0.75, 0.6, 0.5)
"""Of the predicted memory of the plan: what each fallback may take at most."""
CONFIG_LIMIT_S = 5.0
"""Seconds for the best plan of one configuration more."""
ROUNDING_BYTES = 2
"""What is lost where the bytes of a device become those that tensors may fill."""


def with_fallbacks(
    plan: Plan,
    job: Job,
    decisions: Decisions,
    *,
    num_fallbacks: int,
    tables: Sequence[OnDemand],
) -> Plan:
    """The plan with up to ``num_fallbacks`` others in it, each a fast one within a share of the memory of the plan.

    Where nothing fits into a share, the last is the plan of least memory. ``tables`` are the cost tables of this job
    and these decisions, bounded or not.
    """
    if num_fallbacks < 1 or plan.prediction is None:
        return plan
    found: list[Plan] = []
    for share in MEMORY_SHARES:
        budget = math.floor(share * peak_bytes(plan))
        result = _fastest_within(budget, job, decisions, tuple(tables))
        less, job, tables = result.plan, result.job, result.bounded_tables
        if less is None or peak_bytes(less) >= peak_bytes(found[-1] if found else plan):
            break
        found.append(less)
        if len(found) == num_fallbacks or peak_bytes(less) > budget:
            break
    return plan.model_copy(update={"fallbacks": tuple(_as_fallback(each) for each in found)})


def with_next_best(result: PlanningResult, *, num_plans: int) -> PlanningResult:
    """The result whose plan has up to ``num_plans`` others in it, each the best found of its configuration, fastest
    first.

    Those that the search found, then of the configurations that it left unsolved the most promising.
    """
    if result.plan is None:
        return result
    job, found = result.job, list(result.others[: max(0, num_plans)])
    for tables in _most_promising(result)[: 2 * num_plans]:
        if len(found) >= num_plans:
            break
        limit_s = CONFIG_LIMIT_S
        one = accept(job, [tables], num_alternatives=0, time_limit_s=limit_s)
        found += [(each.plan, predict(each.plan, job)) for each in one.ranked[:1]]
    found.sort(key=lambda each: each[1].step_time_s)
    kept = tuple(_as_fallback(with_cost(plan, job, cost)) for plan, cost in found)
    return replace(result, plan=result.plan.model_copy(update={"next_best": kept}))


def _most_promising(result: PlanningResult) -> list[OnDemand]:
    """The configurations of which no plan was priced, by what no plan of theirs is faster than."""
    assert result.plan is not None, "a result without a plan has no other"
    taken = {plan.pipeline for plan in (result.plan, *(plan for plan, _ in result.others))}
    left = [each for each in result.search.configs if each.pipeline not in taken]
    left.sort(key=lambda each: each.result.lower_bound_s)
    return [each.given for each in left]


def _fastest_within(budget_bytes: int, job: Job, decisions: Decisions, tables: tuple[OnDemand, ...]) -> PlanningResult:
    """A fast plan within a budget, or where none fits the one that misses it least within that of the job.

    One that saves a run from ending, not the plan to train with: the search does not go to the end.
    """
    tight = job.within(budget_bytes)
    search = partial(plan_job, decisions=decisions, top=1, tables=tables, to_the_end=False)
    result = search(tight)
    if result.plan is not None or result.miss is None:
        return result
    least_bytes = device_bytes(tight, result.miss.needed_bytes) + ROUNDING_BYTES
    return search(job.within(least_bytes)) if least_bytes <= job.budget_bytes else result


def _as_fallback(plan: Plan) -> Fallback:
    prediction = plan.prediction.model_copy(update={"alternatives": ()}) if plan.prediction else None
    return Fallback(
        num_microbatches=plan.num_microbatches, schedule=plan.schedule, stages=plan.stages, prediction=prediction
    )
