"""What to buy or rent: the best plan on every part of a cluster, by time and by money.

A part has of each pool no node, one, two, four, … or all of its nodes; one whose best plan leaves a pool out is none,
since the part without that pool trains as fast for less. Offers are worth having where no other trains at least as fast
for no more money a token.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from steelyard.errors import UserError
from steelyard.hardware import Cluster, joined_pools
from steelyard.plan.choices import DevicePoint
from steelyard.planning.choose import plan_request
from steelyard.planning.devices import with_shape
from steelyard.planning.frontier import filled, priced_point
from steelyard.planning.request import PlanRequest
from steelyard.units import format_plural

MOST_OFFERS = 64
OFFER_LIMIT_S = 30.0
"""What the search of one offer may take; the best found by then stands for it."""


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
    _check_prices(machines, prices)
    parts = parts_of(machines)
    if len(parts) > MOST_OFFERS:
        raise UserError(
            field="--cluster",
            found=f"{machines.name}, which has {len(parts)} parts of 0, 1, 2, 4, … nodes of each pool",
            expected=f"at most {MOST_OFFERS}",
            hint="name smaller pools, or fewer",
        )
    limit_s = OFFER_LIMIT_S if request.time_limit_s is None else min(OFFER_LIMIT_S, request.time_limit_s)
    offers = []
    for index, part in enumerate(parts):
        progress(f"planning for {part.name} ({index + 1} of {format_plural(len(parts), 'offer')})")
        offers.append(_offer(replace(request, cluster=part, time_limit_s=limit_s), prices))
    found = [each for each in offers if each is not None]
    worth = [each.model_copy(update={"is_worth_having": _is_worth_having(each, found)}) for each in found]
    return tuple(sorted(worth, key=lambda each: (each.cost_per_billion_tokens is None, each.cost_per_billion_tokens)))


def parts_of(machines: Cluster) -> list[Cluster]:
    """The machines with none, 1, 2, 4, … or all nodes of each pool."""
    found: list[Cluster] = []
    for nodes in itertools.product(*(_node_counts(pool) for pool in machines.pools)):
        taken = [
            (with_shape(pool, count, pool.devices_per_node), link)
            for pool, link, count in zip(machines.pools, machines.links, nodes, strict=True)
            if count
        ]
        if taken:
            found.append(joined_pools(*zip(*taken, strict=True)))
    return found


def _node_counts(pool: Cluster) -> list[int]:
    doubled = itertools.takewhile(lambda count: count < pool.num_nodes, (2**power for power in itertools.count()))
    return [0, *doubled, pool.num_nodes]


def _check_prices(machines: Cluster, prices: Mapping[str, float]) -> None:
    names = sorted({pool.device.name for pool in machines.pools})
    if sorted(prices) != names:
        raise UserError(
            field="--price",
            found=", ".join(sorted(prices)) or "nothing",
            expected="a price for each of " + ", ".join(names),
            hint="write for example --price " + ",".join(f"{name}=2.5" for name in names),
        )


def _offer(request: PlanRequest, prices: Mapping[str, float]) -> DevicePoint | None:
    part = request.cluster
    price = sum(prices[pool.device.name] * pool.num_devices for pool in part.pools)
    bare = DevicePoint(num_devices=part.num_devices, cluster=part.name, price_per_hour=price)
    result = plan_request(request)
    if result.plan is None or result.plan.prediction is None:
        return bare.model_copy(update={"reason": f"does not fit: {result.miss_text}"})
    if any(use.num_stages == 0 for use in result.plan.prediction.pools or ()):
        return None
    tokens_per_s = result.plan.global_batch * result.plan.seq_len / result.plan.prediction.step_time_s
    return filled(bare, priced_point(result.plan), tokens_per_s=tokens_per_s, price_per_hour=price)


def _is_worth_having(offer: DevicePoint, offers: Sequence[DevicePoint]) -> bool:
    """Whether no other offer is at least as fast for no more money, and better in one."""
    mine = _figures(offer)
    if mine is None:
        return False
    others = [each for each in map(_figures, offers) if each is not None]
    return not any(cost <= mine[0] and slow <= mine[1] and (cost, slow) != mine for cost, slow in others)


def _figures(offer: DevicePoint) -> tuple[float, float] | None:
    if offer.step_time_s is None or offer.cost_per_billion_tokens is None:
        return None
    return offer.cost_per_billion_tokens, offer.step_time_s
