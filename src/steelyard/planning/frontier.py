"""Trade-offs for choosing a plan or hardware: time against memory, time and money against parts of a cluster.

A part of a cluster has none, one, two, four, … or all nodes of each pool. If the best plan on a part leaves a pool out,
the part is no offer, because without that pool it trains as fast for less money. An offer is worth having if no other
trains at least as fast for at most the same cost per token.
"""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

from steelyard.arguments import checked
from steelyard.cost.build import usable_bytes
from steelyard.cost.context import slack_fraction
from steelyard.cost.job import Job
from steelyard.errors import UserError
from steelyard.hardware import Cluster, joined_pools
from steelyard.plan.choices import DevicePoint, FrontierPoint, TradeOffs
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import SECONDS_PER_HOUR
from steelyard.planning.choose import PlanningResult, device_bytes
from steelyard.planning.price import describe, peak_bytes, summarise, with_price
from steelyard.planning.request import PlanRequest
from steelyard.planning.simple import with_usual_stages
from steelyard.planning.variants import Progress, Study, on_cluster, on_devices, with_shape, within
from steelyard.search.runs import smallest_peak_bytes
from steelyard.units import format_bytes, format_plural

SHOWN_BUDGETS = 2
"""Upper end of the frontier in multiples of the budget, to show the value of more memory."""
BILLION = 10**9
MOST_OFFERS = 64
OFFER_LIMIT_S = 30.0
"""Time limit in seconds of the search of one offer, which is represented by the best plan found by then."""


@checked
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

    ``device_counts`` defaults to a few counts around the request's own, or to that alone if the profile was measured on
    it. Raises `InvalidClusterError` for a count that is neither whole nodes nor a divisor of one node.
    """
    study = Study(request, job)
    own = study.job
    if device_counts is None:
        measured = own.has_measured_links
        device_counts = (own.cluster.num_devices,) if measured else doubled_counts(own.cluster)
    variants = [on_devices(own, count) for count in sorted(set(device_counts))]
    progress("building cost tables")
    best = study.plan()
    plan = None if isinstance(best, str) else with_usual_stages(best, request)[0].plan
    chosen = None if plan is None else priced_point(plan, is_chosen=True)
    points, is_complete = memory_points(study, chosen, max_searches=max_searches, progress=progress)
    devices = []
    for each in variants:
        cluster = each.change(request).cluster
        progress(f"planning for {cluster.num_devices} devices")
        price = None if price_per_device_hour is None else price_per_device_hour * cluster.num_devices
        result = study.plan(each)
        usual = result if isinstance(result, str) else with_usual_stages(result, request)[0]
        bare = DevicePoint(num_devices=cluster.num_devices, cluster=cluster.name)
        devices.append(_filled(bare, usual, price))
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
    """Return device counts to compare with that of the cluster: a quarter to twice as many, by factors of two."""
    count, size = cluster.num_devices, cluster.devices_per_node
    tried = (count // 4, count // 2, count, 2 * count)
    return tuple(each for each in tried if each >= 1 and (size % each == 0 if each < size else each % size == 0))


def memory_points(
    study: Study,
    chosen: FrontierPoint | None,
    *,
    max_searches: int,
    deadline: float = math.inf,
    progress: Progress = lambda _: None,
) -> tuple[tuple[FrontierPoint, ...], bool]:
    """Return the frontier of time against memory, fastest first, and whether it is complete.

    It is complete if no plan between two points is worth having. Each point is the best plan within a budget, with its
    simulated time. A point that is no faster than one of less memory is left out. The next budget is always the middle
    of the widest gap. ``chosen`` is the best point within the budget of the job, if known. ``deadline`` is a
    `time.process_time` value.
    """
    job, usable = study.job, usable_bytes(study.job)
    most = SHOWN_BUDGETS * usable
    least = smallest_peak_bytes(each.any_budget for each in study.tables) or most
    found, budgets, was_cut = list[_Found](), [each for each in (most, least) if least <= each], False
    if chosen is not None and chosen.memory_bytes <= job.budget_bytes:
        found.append(_Found.of(job, usable, chosen))
    elif least < usable:
        budgets.insert(0, usable)
    while budgets and len(found) < max_searches and time.process_time() < deadline:
        progress(f"{len(found) + 1} of up to {max_searches}, within {format_bytes(budgets[0])}")
        answer = study.answer(within("", device_bytes(job, budgets[0])), of_usual_depth=True)
        budget = budgets.pop(0)
        was_cut |= answer.was_cut
        found.append(
            _Found.of(job, budget, None if answer.plan is None else priced_point(with_price(answer.plan, job)))
        )
        if not budgets:
            budgets = _widest_gap(sorted(found, key=lambda each: each.budget_bytes))
    points = {each.peak_bytes: each.point for each in reversed(found) if each.point is not None}
    return falling([*points.values(), *([chosen] if chosen is not None else [])]), not (budgets or was_cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Result of the search within a budget, with an infinite time if nothing fits."""

    budget_bytes: int
    peak_bytes: int
    step_s: float
    point: FrontierPoint | None

    @classmethod
    def of(cls, job: Job, budget_bytes: int, point: FrontierPoint | None) -> Self:
        """Return the result for the point that was found."""
        if point is None:
            return cls(budget_bytes=budget_bytes, peak_bytes=budget_bytes, step_s=math.inf, point=None)
        peak = int(point.memory_bytes / (1 + slack_fraction(job)))
        return cls(budget_bytes=budget_bytes, peak_bytes=peak, step_s=point.step_time_s, point=point)


def _widest_gap(found: list[_Found]) -> list[int]:
    """Return the logarithmic middle of the two neighbours with the widest gap; empty if there is no gap."""
    widest, middle = 0.0, 0
    for less, more in pairwise(found):
        reach = min(more.budget_bytes, more.peak_bytes) / max(less.budget_bytes, 1)
        gain = 1.0 if math.isinf(less.step_s) else less.step_s / more.step_s - 1
        room = 0.0 if math.isinf(more.step_s) else math.log(max(reach, 1.0)) * gain
        if room > widest:
            widest, middle = room, math.isqrt(less.budget_bytes * min(more.budget_bytes, more.peak_bytes))
    return [middle] if widest > 1e-3 else []


def falling(points: Sequence[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """Return the points, most memory first, that are faster in simulation than all of less memory.

    The chosen point always stays.
    """
    kept: list[FrontierPoint] = []
    for point in sorted(points, key=lambda point: (point.memory_bytes, point.step_time_s)):
        if point.is_chosen:
            kept = [other for other in kept if other.step_time_s > point.step_time_s]
        if not kept or point.step_time_s < kept[-1].step_time_s:
            kept.append(point)
    return tuple(reversed(kept))


def _filled(bare: DevicePoint, result: PlanningResult | str, price_per_hour: float | None) -> DevicePoint:
    """Return the point with the figures of its best plan, and the cost if an hour of all devices has a price; or with
    the reason why there is no plan."""
    if isinstance(result, str) or result.plan is None:
        reason = result if isinstance(result, str) else f"does not fit: {result.miss_text}"
        return bare.model_copy(update={"reason": reason})
    point = priced_point(result.plan)
    found = {name: getattr(point, name) for name in FrontierPoint.model_fields if name in DevicePoint.model_fields}
    if price_per_hour is not None:
        found["cost_per_billion_tokens"] = price_per_hour / SECONDS_PER_HOUR * BILLION / point.tokens_per_s
    return bare.model_copy(update=found)


def priced_point(plan: Plan, *, is_chosen: bool = False) -> FrontierPoint:
    """Return a plan with its prediction as a point of the frontier."""
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
    progress: Progress = lambda _: None,
) -> tuple[DevicePoint, ...]:
    """Return the best plan on every part of a request's cluster, the cheapest tokens first, parts without a plan last.

    ``prices`` are per device-hour, by the name of the device. Raises `UserError` for a device without a price, a price
    without a device, and too many parts.
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
            hint="use smaller or fewer device groups",
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
    """Return the parts of a cluster with none, 1, 2, 4, … or all nodes of each pool."""
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
    plan = None if isinstance(result, str) else result.plan
    if plan is not None and plan.prediction and any(use.num_stages == 0 for use in plan.prediction.pools or ()):
        return None
    return _filled(bare, result, price)


def _is_worth_having(offer: DevicePoint, figures: Sequence[tuple[float | None, float | None]]) -> bool:
    """Return whether no other offer is at least as fast for no more money, and better in one of the two."""
    cost, step_s = offer.cost_per_billion_tokens, offer.step_time_s
    if cost is None or step_s is None:
        return False
    others = ((c, s) for c, s in figures if c is not None and s is not None and (c, s) != (cost, step_s))
    return not any(other_cost <= cost and other_s <= step_s for other_cost, other_s in others)
