"""Trade-offs for choosing a plan or hardware: time against memory, time and money against devices and their parts.

A part of a cluster has of each pool no node, one, two, four, … or all of its nodes; one whose best plan leaves a pool
out is no offer, since the part without that pool trains as fast for less. Offers are worth having where no other trains
at least as fast for no more money a token.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from steelyard.cost.build import usable_bytes
from steelyard.cost.job import Job
from steelyard.errors import UserError
from steelyard.hardware import Cluster, joined_pools
from steelyard.plan.choices import DevicePoint, FrontierPoint, TradeOffs
from steelyard.plan.plan import Plan
from steelyard.plan.training import SECONDS_PER_HOUR
from steelyard.planning.choose import device_bytes
from steelyard.planning.price import bare_plan, describe, grouped_plan, peak_bytes, summarise, with_price
from steelyard.planning.problem import is_uniform
from steelyard.planning.request import PlanRequest
from steelyard.planning.uniform import uniform_choices
from steelyard.planning.variants import Study, Variant, on_cluster, on_devices, with_shape
from steelyard.search.tradeoff import sampled_frontier
from steelyard.units import format_plural

SHOWN_BUDGETS = 2
"""The frontier reaches up to this many times the budget, to show what more memory would buy."""
BILLION = 10**9
MOST_OFFERS = 64
OFFER_LIMIT_S = 30.0
"""What the search of one offer may take; the best found by then stands for it."""

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
    study = Study(request, job)
    own = study.job
    if device_counts is None:
        measured = own.has_measured_links
        device_counts = (own.cluster.num_devices,) if measured else doubled_counts(own.cluster)
    variants = [on_devices(own, count) for count in sorted(set(device_counts))]
    points, is_complete = memory_points(study, max_searches=max_searches, progress=progress)
    devices = []
    for each in variants:
        progress(f"planning for {each.change(request).cluster.num_devices} devices")
        devices.append(device_point(study, each, price_per_device_hour))
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


def doubled_counts(cluster: Cluster) -> tuple[int, ...]:
    """A few counts around that of the cluster for comparison: from a quarter to twice as many, by factors of two."""
    count, size = cluster.num_devices, cluster.devices_per_node
    tried = (count // 4, count // 2, count, 2 * count)
    return tuple(each for each in tried if each >= 1 and (size % each == 0 if each < size else each % size == 0))


def memory_points(
    study: Study, *, max_searches: int, progress: Progress = lambda _: None
) -> tuple[tuple[FrontierPoint, ...], bool]:
    """Points of the frontier of time against memory, fastest first, and whether none between them is missing.

    The point within the budget is what the request gets. The others are the fastest within their memory, with the time
    of the simulator; one that is no faster than a point of less memory is left out.
    """
    progress("building cost tables")
    job, budget = study.job, usable_bytes(study.job)
    tables = [each.tables for each in study.tables]
    is_one, roomy = is_uniform(job, study.request.decisions), job.within(device_bytes(job, SHOWN_BUDGETS * budget))
    progress(f"searching {max_searches} memory budgets")
    frontier = sampled_frontier(
        tables,
        most_bytes=SHOWN_BUDGETS * budget,
        budgets=(budget,),
        max_searches=max_searches,
        time_limit_s=study.request.time_limit_s,
        choices=partial(uniform_choices, roomy) if is_one else None,
    )
    outcomes = [step.outcome for step in frontier.steps]
    plans = [bare_plan(job, each.tables, each.solution) if is_one else grouped_plan(job, each) for each in outcomes]
    points = [frontier_point(job, plan) for plan in plans]
    chosen = study.plan()
    if not isinstance(chosen, str) and chosen.plan is not None:
        points.append(frontier_point(job, chosen.plan, is_chosen=True))
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


def device_point(study: Study, variant: Variant, price_per_device_hour: float | None) -> DevicePoint:
    """The best plan on a number of devices as a point of time and money against devices."""
    result, cluster = study.plan(variant), variant.change(study.request).cluster
    bare = DevicePoint(num_devices=cluster.num_devices, cluster=cluster.name)
    if isinstance(result, str) or result.plan is None:
        reason = result if isinstance(result, str) else f"does not fit: {result.miss_text}"
        return bare.model_copy(update={"reason": reason})
    point = priced_point(result.plan)
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


def find_offers(
    request: PlanRequest,
    *,
    prices: Mapping[str, float],
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[DevicePoint, ...]:
    """Return the best plan on every part of a request's cluster, the cheapest tokens first; those without a plan last.

    ``prices`` are of a device-hour, by the name of the device. Raises `UserError`
    for a device without a price, a price without a device, and for too many parts.
    """
    machines = request.cluster
    names = sorted({pool.device.name for pool in machines.pools})
    if sorted(prices) != names:
        raise UserError(
            field="--price",
            found=", ".join(sorted(prices)) or "nothing",
            expected="a price for each of " + ", ".join(names),
            hint="write for example --price " + ",".join(f"{name}=2.5" for name in names),
        )
    parts = parts_of(machines)
    if len(parts) > MOST_OFFERS:
        raise UserError(
            field="--cluster",
            found=f"{machines.name}, which has {len(parts)} parts of 0, 1, 2, 4, … nodes of each pool",
            expected=f"at most {MOST_OFFERS}",
            hint="name smaller pools, or fewer",
        )
    limit_s = OFFER_LIMIT_S if request.time_limit_s is None else min(OFFER_LIMIT_S, request.time_limit_s)
    study, offers = Study(replace(request, time_limit_s=limit_s)), []
    for index, part in enumerate(parts):
        progress(f"planning for {part.name} ({index + 1} of {format_plural(len(parts), 'offer')})")
        offers.append(_offer(study, part, prices))
    found = [each for each in offers if each is not None]
    figures = [(each.cost_per_billion_tokens, each.step_time_s) for each in found if each.step_time_s is not None]
    worth = [each.model_copy(update={"is_worth_having": _is_worth_having(each, figures)}) for each in found]
    return tuple(sorted(worth, key=lambda each: (each.cost_per_billion_tokens is None, each.cost_per_billion_tokens)))


def parts_of(machines: Cluster) -> list[Cluster]:
    """The machines with none, 1, 2, 4, … or all nodes of each pool."""
    found: list[Cluster] = []
    counts = [
        [0, *(2**power for power in range((pool.num_nodes - 1).bit_length())), pool.num_nodes]
        for pool in machines.pools
    ]
    for nodes in itertools.product(*counts):
        taken = [
            (with_shape(pool, count, pool.devices_per_node), link)
            for pool, link, count in zip(machines.pools, machines.links, nodes, strict=True)
            if count
        ]
        if taken:
            found.append(joined_pools(*zip(*taken, strict=True)))
    return found


def _offer(study: Study, part: Cluster, prices: Mapping[str, float]) -> DevicePoint | None:
    price = sum(prices[pool.device.name] * pool.num_devices for pool in part.pools)
    bare = DevicePoint(num_devices=part.num_devices, cluster=part.name, price_per_hour=price)
    result = study.plan(on_cluster(part))
    if isinstance(result, str) or result.plan is None or result.plan.prediction is None:
        reason = result if isinstance(result, str) else f"does not fit: {result.miss_text}"
        return bare.model_copy(update={"reason": reason})
    if any(use.num_stages == 0 for use in result.plan.prediction.pools or ()):
        return None
    tokens_per_s = result.plan.global_batch * result.plan.seq_len / result.plan.prediction.step_time_s
    return filled(bare, priced_point(result.plan), tokens_per_s=tokens_per_s, price_per_hour=price)


def _is_worth_having(offer: DevicePoint, figures: Sequence[tuple[float | None, float | None]]) -> bool:
    """Whether no other offer of these costs and times is at least as fast for no more money, and better in one."""
    cost, step_s = offer.cost_per_billion_tokens, offer.step_time_s
    if cost is None or step_s is None:
        return False
    others = ((c, s) for c, s in figures if c is not None and s is not None and (c, s) != (cost, step_s))
    return not any(other_cost <= cost and other_s <= step_s for other_cost, other_s in others)
