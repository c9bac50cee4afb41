"""The order of passes of a plan whose schedule takes it from their times.

The search and the ranking of plans use the usual order of the schedule. The order of the plan that they choose is
found here, with more microbatches in flight where memory is left.
"""

from steelyard.cost.job import Job
from steelyard.cost.pass_order import StageLimit, best_order
from steelyard.cost.predict import PlanCost, pass_times, predict
from steelyard.plan.plan import Plan

MOST_PASSES = 8192
"""Maximum number of forward passes of all stages: with more, bubbles are small, and the order fills the plan."""


def in_best_order(plan: Plan, job: Job, cost: PlanCost) -> tuple[Plan, PlanCost]:
    """Return a plan of this cost with the fastest order of passes found that fits, and its cost then.

    Nothing changes under a schedule that does not take its order from times.

    Each stage may hold one more pass per stage than usual, and a quarter of that as long as it does not fit.
    """
    pipeline, budgets = plan.pipeline, [each.budget_bytes for each in job.jobs(plan)]
    if not pipeline.schedule.orders_by_time or pipeline.num_stages * pipeline.num_passes > MOST_PASSES:
        return plan, cost
    times = pass_times(plan, job)
    spare = [pipeline.num_stages] * pipeline.num_stages
    while True:
        limits = [
            StageLimit(
                in_flight=min(pipeline.num_passes, pipeline.in_flight(stage) + more),
                waiting=min(pipeline.num_passes, pipeline.waiting(stage) + more),
            )
            for stage, more in enumerate(spare)
        ]
        rows = best_order(times.parts, pipeline, limits, **times.options)
        ordered = plan.model_copy(update={"pass_order": rows})
        found = predict(ordered, job)
        over = [held.total_bytes > budget for held, budget in zip(found.stages, budgets, strict=True)]
        if not any(over):
            return (ordered, found) if found.step_time_s < cost.step_time_s else (plan, cost)
        if not any(more for more, is_over in zip(spare, over, strict=True) if is_over):
            return plan, cost
        spare = [more // 4 if is_over else more for more, is_over in zip(spare, over, strict=True)]
