"""Plans of less memory for a run to go on with where the chosen one runs out of it."""

import math
from dataclasses import replace

from steelyard.cost.setting import Job
from steelyard.plan.plan import Fallback, Plan
from steelyard.planning.choose import plan_job
from steelyard.planning.price import peak_bytes
from steelyard.planning.problem import PlanOptions, make_problem
from steelyard.search import Problem

MEMORY_SHARES = (0.9, 0.75, 0.6, 0.5)
"""Of the predicted memory of the plan: what each fallback may take at most."""


def with_fallbacks(
    plan: Plan, job: Job, options: PlanOptions, *, num_fallbacks: int, problem: Problem | None = None
) -> Plan:
    """The plan with up to ``num_fallbacks`` others in it, each the fastest within a share of the memory of the plan.

    Shares in which nothing fits are left out, and those that give the same plan again. Tables of the costs are built
    anew unless ``problem`` holds those of this job and these options.
    """
    if num_fallbacks < 1 or plan.prediction is None:
        return plan
    most_bytes = peak_bytes(plan)
    tables = problem or make_problem(job, options)
    found: list[Fallback] = []
    for share in MEMORY_SHARES:
        tight = replace(job, budget_bytes=math.floor(share * most_bytes))
        less = plan_job(tight, options, top=1, problem=tables).plan
        if less is None:
            break
        fallback = _as_fallback(less)
        if not found or fallback.stages != found[-1].stages:
            found.append(fallback)
        if len(found) == num_fallbacks:
            break
    return plan.model_copy(update={"fallbacks": tuple(found)})


def _as_fallback(plan: Plan) -> Fallback:
    prediction = plan.prediction.model_copy(update={"alternatives": ()}) if plan.prediction else None
    return Fallback(
        num_microbatches=plan.num_microbatches, schedule=plan.schedule, stages=plan.stages, prediction=prediction
    )
