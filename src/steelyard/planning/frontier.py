"""Time against memory, and time and money against the number of devices, for choosing a plan or hardware."""

from collections.abc import Callable, Sequence

from steelyard.cost.build import usable_bytes
from steelyard.cost.job import Job
from steelyard.plan.choices import DevicePoint, FrontierPoint, TradeOffs
from steelyard.plan.plan import Plan
from steelyard.plan.training import SECONDS_PER_HOUR
from steelyard.planning.choose import plan_job
from steelyard.planning.devices import doubled_counts, job_on, plan_or_reason
from steelyard.planning.job import job_of
from steelyard.planning.plan_from_search import describe, grouped_plan, summarise
from steelyard.planning.price import peak_bytes, with_price
from steelyard.planning.problem import make_tables
from steelyard.planning.request import PlanRequest
from steelyard.search.tradeoff import sampled_frontier

SHOWN_BUDGETS = 2
"""The frontier reaches up to this many times the budget, to show what more memory would buy."""
BILLION = 10**9

Progress = Callable[[str], None]


def find_trade_offs(
    request: PlanRequest,
    job: Job | None = None,
    *,
    max_searches: int,
    device_counts: Sequence[int] | None = None,
    price_per_device_hour: float | None = None,
    progress: Progress = lambda _: None,
) -> TradeOffs:
    """Return the frontier of a request on one pool, and its best plan on other numbers of devices.

    ``device_counts`` defaults to a few around that of the request, or to its own alone where the profile was measured
    on this number. Raises `InvalidClusterError` for a count that whole nodes, or divisors of one, cannot give.
    """
    own = job or job_of(request)
    if device_counts is None:
        measured = own.has_measured_links
        device_counts = (own.cluster.num_devices,) if measured else doubled_counts(own.cluster)
    jobs = [job_on(own, count) for count in sorted(set(device_counts))]
    points, is_complete = memory_points(request, own, max_searches=max_searches, progress=progress)
    devices = []
    for each in jobs:
        progress(f"planning for {each.cluster.num_devices} devices")
        devices.append(device_point(each, request, price_per_device_hour))
    return TradeOffs(
        model=own.chain.name,
        cluster=own.cluster.name,
        seq_len=own.seq_len,
        global_batch=own.global_batch,
        precision=own.precision,
        budget_bytes=own.budget_bytes,
        margin_bytes=own.margin_bytes,
        price_per_device_hour=price_per_device_hour,
        points=points,
        is_complete=is_complete,
        devices=tuple(devices),
        profile=own.cost_source(),
    )


def memory_points(
    request: PlanRequest, job: Job, *, max_searches: int, progress: Progress = lambda _: None
) -> tuple[tuple[FrontierPoint, ...], bool]:
    """Points of the frontier of time against memory, fastest first, and whether none between them is missing.

    The point within the budget is what `plan_job` chooses. The others are the fastest within their memory, with the
    time of the simulator; one that is no faster than a point of less memory is left out.
    """
    progress("building cost tables")
    tables = make_tables(job, request.decisions)
    budget = usable_bytes(job)
    progress(f"searching {max_searches} memory budgets")
    frontier = sampled_frontier(
        [each.tables for each in tables],
        most_bytes=SHOWN_BUDGETS * budget,
        budgets=(budget,),
        max_searches=max_searches,
        time_limit_s=request.time_limit_s,
    )
    plans = [grouped_plan(job, step.outcome) for step in frontier.steps]
    points = [frontier_point(job, plan) for plan in plans]
    chosen = plan_job(job, request.decisions, time_limit_s=request.time_limit_s, tables=tables).plan
    if chosen is not None:
        points.append(frontier_point(job, chosen, is_chosen=True))
    return falling(points), frontier.is_complete


def falling(points: Sequence[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """Those points, most memory first, that are faster in simulation than all of less memory; the chosen one stays."""
    kept: list[FrontierPoint] = []
    for point in sorted(points, key=lambda point: (point.memory_bytes, point.step_time_s)):
        if point.is_chosen:
            kept = [other for other in kept if other.step_time_s > point.step_time_s]
        if not kept or point.step_time_s < kept[-1].step_time_s:
            kept.append(point)
    return tuple(reversed(kept))


def device_point(job: Job, request: PlanRequest, price_per_device_hour: float | None) -> DevicePoint:
    """The best plan of a job as a point of time and money against devices."""
    result = plan_or_reason(job, request)
    bare = DevicePoint(num_devices=job.cluster.num_devices, cluster=job.cluster.name)
    if isinstance(result, str) or result.plan is None:
        reason = result if isinstance(result, str) else f"does not fit: {result.miss_text}"
        return bare.model_copy(update={"reason": reason})
    point = frontier_point(job, result.plan)
    price = None if price_per_device_hour is None else price_per_device_hour * bare.num_devices
    return filled(bare, point, tokens_per_s=point.tokens_per_s, price_per_hour=price)


def filled(
    bare: DevicePoint, point: FrontierPoint, *, tokens_per_s: float, price_per_hour: float | None
) -> DevicePoint:
    """The point of devices with what their best plan takes, and costs where an hour of all of them has a price."""
    names = [name for name in FrontierPoint.model_fields if name in DevicePoint.model_fields]
    found = {name: getattr(point, name) for name in names} | {"tokens_per_s": tokens_per_s}
    if price_per_hour is not None:
        found["cost_per_billion_tokens"] = price_per_hour / SECONDS_PER_HOUR * BILLION / tokens_per_s
    return bare.model_copy(update=found)


def frontier_point(job: Job, plan: Plan, *, is_chosen: bool = False) -> FrontierPoint:
    """What a plan costs, as a point of the frontier."""
    return priced_point(with_price(plan, job), is_chosen=is_chosen)


def priced_point(plan: Plan, *, is_chosen: bool = False) -> FrontierPoint:
    """What a plan says of itself, as a point of the frontier."""
    prediction = plan.prediction
    assert prediction is not None, "only a plan with its prediction is a point"
    return FrontierPoint(
        memory_bytes=peak_bytes(plan),
        step_time_s=prediction.step_time_s,
        tokens_per_s=prediction.tokens_per_s_per_device * plan.num_devices,
        num_stages=plan.num_stages,
        num_microbatches=plan.num_microbatches,
        setting=describe(plan.pipeline),
        strategies=summarise(plan),
        is_chosen=is_chosen,
    )
