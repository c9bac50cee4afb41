"""What a report shows around a plan: the frontier, then what binds, then baselines.

Where a limit of time is set, every search has a share of it (`SEARCH_SHARE`) and gives the best plan that it has found
by then, which for most models is the proven best. What there was no time for is named.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from steelyard.cost.build import slack_fraction, usable_bytes
from steelyard.cost.job import Job
from steelyard.cost.predict import PlanCost
from steelyard.plan.choices import Explanation, FrontierPoint, PlanStudy
from steelyard.plan.decisions import Decisions
from steelyard.plan.plan import Plan
from steelyard.planning.choose import device_bytes
from steelyard.planning.explain import pricing_notes, supposed_notes, what_was_searched
from steelyard.planning.frontier import SHOWN_BUDGETS, falling, frontier_point, priced_point
from steelyard.planning.plan_from_search import describe
from steelyard.planning.price import with_cost
from steelyard.planning.request import PlanRequest
from steelyard.planning.variants import Study, within
from steelyard.search.partition import least_plan

SEARCH_SHARE = 0.04
"""Of the time, for one search."""
FRONTIER_SHARE = 0.5
"""Of the time, for the frontier: it is what most readers look for first."""
MAX_POINTS = 16


def search_for_report(
    plan: Plan,
    request: PlanRequest,
    job: Job,
    cost: PlanCost,
    *,
    time_limit_s: float | None = None,
    everywhere: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> PlanStudy:
    """The frontier and the baselines of a plan of this cost in all pipeline configurations, or in its own (not
    ``everywhere``).

    Without a limit of time every machine finds the same. The limit is one of this process's computing time, so that a
    busy machine shows no less. Each search that was begun is ended, so it is overrun by up to one search; what was not
    begun is left out and named. A limit of 0 searches nothing.
    """
    priced = with_cost(plan, job, cost)
    changed = pricing_notes(plan, priced)
    notes = (*changed, *supposed_notes(job))
    if time_limit_s is not None and time_limit_s <= 0:
        return PlanStudy(scope="", explanation=Explanation(binds="", notes=notes))
    deadline = math.inf if time_limit_s is None else time.process_time() + time_limit_s
    progress("building cost tables")
    if not everywhere:
        own = Decisions(num_stages=plan.num_stages, num_microbatches=plan.num_microbatches)
        request = replace(request, decisions=request.decisions.with_also(own))
    share_s = None if time_limit_s is None else SEARCH_SHARE * time_limit_s
    study = Study(replace(request, time_limit_s=share_s), job)
    progress("searching memory budgets")
    proven = plan.prediction is not None and plan.prediction.certificate.is_optimal and not changed
    own_point = _own_point(priced, job, proven=proven)
    points = _points(study, own_point, time.process_time() + FRONTIER_SHARE * (deadline - time.process_time()))
    progress("searching the baselines of the plan")
    explanation, left_out = what_was_searched(study, priced, deadline)
    return PlanStudy(
        scope="all pipeline configurations" if everywhere else f"plans of {describe(plan.pipeline)}",
        explanation=explanation.model_copy(update={"notes": notes}),
        points=points,
        left_out=left_out,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What the search found within a budget; an infinite time where nothing fits."""

    budget_bytes: int
    peak_bytes: int
    step_s: float
    point: FrontierPoint | None


def _own_point(priced: Plan, job: Job, *, proven: bool) -> _Found | None:
    """The plan itself as a point, where it fits and the search has ``proven`` it: within the budget none is faster."""
    point = priced_point(priced, is_chosen=True)
    if not proven or point.memory_bytes > job.budget_bytes:
        return None
    peak = int(point.memory_bytes / (1 + slack_fraction(job)))
    return _Found(budget_bytes=usable_bytes(job), peak_bytes=peak, step_s=point.step_time_s, point=point)


def _points(study: Study, own: _Found | None, deadline: float) -> tuple[FrontierPoint, ...]:
    """Points of the frontier, fastest first: next is always the budget in the middle of the widest gap."""
    job = study.job
    smallest = (least_plan(each.tables) for each in study.tables)
    most = SHOWN_BUDGETS * usable_bytes(job)
    least = min((each.peak_bytes for each in smallest if each is not None), default=most)
    found = [own] if own is not None else []
    budgets = [each for each in (most, least) if least <= each]
    if own is None and least < usable_bytes(job):
        budgets.insert(0, usable_bytes(job))
    while budgets and len(found) < MAX_POINTS and time.process_time() < deadline:
        found.append(_within(study, budgets.pop(0)))
        if not budgets:
            budgets = _widest_gap(sorted(found, key=lambda each: each.budget_bytes))
    points = {each.peak_bytes: each.point for each in found if each.point is not None}
    if own is not None and own.point is not None:
        points[own.peak_bytes] = own.point
    return falling([points[peak] for peak in sorted(points, reverse=True)])


def _within(study: Study, budget_bytes: int) -> _Found:
    """The best plan within a budget."""
    found = study.answer(within("", device_bytes(study.job, budget_bytes)))
    if found.plan is None:
        return _Found(budget_bytes=budget_bytes, peak_bytes=budget_bytes, step_s=math.inf, point=None)
    point = frontier_point(study.job, found.plan)
    peak = int(point.memory_bytes / (1 + slack_fraction(study.job)))
    return _Found(budget_bytes=budget_bytes, peak_bytes=peak, step_s=point.step_time_s, point=point)


def _widest_gap(found: list[_Found]) -> list[int]:
    """The middle, on a logarithmic scale, between the two neighbours that leave most room; none where no gap does."""
    widest, middle = 0.0, 0
    for less, more in pairwise(found):
        reach = min(more.budget_bytes, more.peak_bytes) / max(less.budget_bytes, 1)
        gain = 1.0 if math.isinf(less.step_s) else less.step_s / more.step_s - 1
        room = 0.0 if math.isinf(more.step_s) else math.log(max(reach, 1.0)) * gain
        if room > widest:
            widest, middle = room, math.isqrt(less.budget_bytes * min(more.budget_bytes, more.peak_bytes))
    return [middle] if widest > 1e-3 else []
