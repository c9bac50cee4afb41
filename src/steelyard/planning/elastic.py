"""The plan for what is left of a cluster, or has come back: the same search for the same job on other devices.

Model, global batch, sequence length, memory per device and the source of all costs stay. Hosts may have lost devices
unequally while a plan is for equal nodes, so a candidate takes as many devices from each of as many hosts as have them.
The fastest candidate is taken of those with at least half of the devices of the largest that has a plan: five devices
often have a plan that is slower than that of four. What was asked of the plan is kept where any candidate can have it.
A search that a run waits for is not taken to the end (`steelyard.planning.acceptance.accept`).

Of a plan over pools of unlike devices every host says of which pool it is. A candidate takes so much of each pool that
has hosts, and the search over pools decides which of these take part and in which order.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from steelyard.cost.pools import AnyJob, PooledJob
from steelyard.cost.setting import Job
from steelyard.errors import UserError
from steelyard.hardware import Cluster, MixedCluster
from steelyard.plan.plan import Plan
from steelyard.plan.replanned import Replanned
from steelyard.planning.choose import NUM_RESCORED, NothingFitsError, PlanningResult, plan_job
from steelyard.planning.demands import Demand, demands_of, narrowed
from steelyard.planning.devices import plan_or_reason, with_shape
from steelyard.planning.plan_from_search import describe, summarise
from steelyard.planning.price import any_job_of
from steelyard.planning.problem import PlanOptions
from steelyard.units import format_bytes, format_plural, format_seconds

MOST_S = 1.0
"""Seconds within which other candidates are searched once a plan is found. No time limit cuts a search short: what it
finds would depend on what else the machine does."""
LEAST_SHARE = 0.5
"""Of the devices of the largest candidate that has a plan, what a candidate must have."""
MOST_SHAPES = 4
"""Parts of a pool that are tried, the largest ones."""
Shape = tuple[int, int]
"""Nodes, and the devices of each."""
Left = Mapping[str, Sequence[int]]
"""The devices of each host that is left, by the names of the pools of a plan."""
Part = TypeVar("Part")


def replan(plan: Plan, hosts: Sequence[int], folder: Path, pools: Sequence[str] = ()) -> Replanned:
    """The plan for hosts with so many processes each, and which of them take part.

    ``folder`` is that of the plan's file, beside which its profile may lie; ``pools`` names the pool of each host for a
    plan over several. The plan itself where it has its devices, or else one that is searched. Raises
    `NothingFitsError` where no part of the devices has a plan, and another `UserError` where the plan's costs are not
    at hand or a host is of none of its pools.
    """
    for pool in pools or [""] * len(hosts):
        check_pool(plan, pool)
    left = _left_of(plan, hosts, pools)
    given_up: Sequence[Demand] = ()
    if all(sum(left[name]) == size for name, size in _sizes(plan).items()):
        return Replanned(plan=plan, taken=tuple(hosts), order=_in_order(pools, list(left)))
    job = any_job_of(plan, folder=folder)
    demands = demands_of(plan.asked, num_layers=job.chain.num_layers)
    best = fastest_on(job, left, demands, to_the_end=False)
    if best is None and demands:
        best, given_up = fastest_on(job, left, (), to_the_end=False), demands
    if best is None:
        raise _nothing_fits(hosts, job)
    found, shapes = best
    counts = {name: iter(each) for name, each in _taken_of(plan, left, shapes).items()}
    return Replanned(
        plan=found,
        taken=tuple(next(counts[pool]) if pool in counts else 0 for pool in pools or [plan.cluster] * len(hosts)),
        order=_in_order(pools, list(shapes)),
        notice=_notice(plan, found, given_up),
    )


def _sizes(plan: Plan) -> dict[str, int]:
    """The devices of each pool of a plan by its name: of the cluster, where there is one pool."""
    return {pool.name: pool.num_devices for pool in plan.pools()} if plan.is_mixed else {plan.cluster: plan.num_devices}


def _left_of(plan: Plan, hosts: Sequence[int], pools: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """What is left of each pool of a plan, host by host."""
    own = pools or [plan.cluster] * len(hosts)
    return {name: tuple(count for count, of in zip(hosts, own, strict=True) if of == name) for name in _sizes(plan)}


def _taken_of(plan: Plan, left: Left, shapes: Mapping[str, Shape]) -> dict[str, tuple[int, ...]]:
    """Of each pool that has such a part, how many processes of each host take part."""
    has_hosts = {name: pool.num_nodes > 1 for name, pool in zip(_sizes(plan), plan.pools(), strict=True)}
    return {name: _taken(left[name], shape, has_hosts=has_hosts[name]) for name, shape in shapes.items()}


def _nothing_fits(hosts: Sequence[int], job: AnyJob) -> NothingFitsError:
    return NothingFitsError(
        field="--elastic",
        found=f"{format_plural(sum(hosts), 'device')} left, no part of which has a plan for a global batch of "
        f"{job.global_batch} within {format_bytes(job.budget_bytes)}",
        expected="devices enough for the model",
        hint="the last checkpoint is whole: start again when devices are back, or with a plan for fewer of them",
    )


def _in_order(pools: Sequence[str], names: Sequence[str]) -> tuple[int, ...]:
    """The places of hosts of these pools, pool by pool as they are named, those of others last."""
    places = {name: place for place, name in enumerate(names)}
    return tuple(sorted(range(len(pools)), key=lambda host: places.get(pools[host], len(places))))


def fastest_on(
    job: AnyJob, left: Left, demands: Sequence[Demand], *, to_the_end: bool = True
) -> tuple[Plan, dict[str, Shape]] | None:
    """The fastest plan on a part of what is ``left`` of each pool of a job, and what it takes of each in their order.

    ``to_the_end`` as in `fastest_plan`.
    """
    if isinstance(job, PooledJob):
        return _fastest_over_pools(job, left, demands, to_the_end=to_the_end)
    ((name, hosts),) = left.items()
    best = fastest_plan(job, hosts, demands, to_the_end=to_the_end)
    return None if best is None else (best[0], {name: best[1]})


def _fastest_over_pools(
    job: PooledJob, left: Left, demands: Sequence[Demand], *, to_the_end: bool
) -> tuple[Plan, dict[str, Shape]] | None:
    """As `fastest_on`."""
    options = narrowed(PlanOptions(), demands)

    def on(shapes: dict[str, Shape], _known_s: float) -> PlanningResult | None:
        return _plan_on(job, _parts_of(job, shapes), options, to_the_end=to_the_end)

    candidates = ((_num_devices(*each.values()), each) for each in _joint_shapes(job, left))
    best = _fastest(candidates, on)
    if best is None:
        return None
    found, shapes = best
    names = {part.name: name for name, part in _parts_of(job, shapes).items()}
    return found, {names[part]: shapes[names[part]] for part in found.cluster.split("+")}


def _joint_shapes(job: PooledJob, left: Left) -> list[dict[str, Shape]]:
    """What may be taken of every pool that has hosts, the most devices first."""
    there = [name for name, hosts in left.items() if hosts]
    shapes = [list(_parts(left[name], _pool(job, name)))[:MOST_SHAPES] for name in there]
    joint = [dict(zip(there, each, strict=True)) for each in itertools.product(*shapes)]
    return sorted(joint, key=lambda each: -_num_devices(*each.values()))


def _pool(job: PooledJob, name: str) -> Job:
    return next(pool for pool in job.pools if pool.cluster.name == name)


def _parts_of(job: PooledJob, shapes: Mapping[str, Shape]) -> dict[str, Cluster]:
    """The parts of pools of these shapes, by the names of the pools."""
    return {name: with_shape(_pool(job, name).cluster, *shape) for name, shape in shapes.items()}


def _plan_on(
    job: PooledJob, parts: Mapping[str, Cluster], options: PlanOptions, *, to_the_end: bool
) -> PlanningResult | None:
    """What is planned over these parts of pools; None where nothing can be."""
    own = of_pools(job, list(parts))
    if isinstance(own, Job):
        (part,) = parts.values()
        alone = replace(own, cluster=part)
        result = plan_or_reason(alone, options, top=NUM_RESCORED, to_the_end=to_the_end)
        return None if isinstance(result, str) else result
    pools = tuple(replace(each, cluster=part) for each, part in zip(own.pools, parts.values(), strict=True))
    cluster = MixedCluster(pools=tuple(parts.values()), links=own.cluster.links)
    try:
        return plan_job(PooledJob(pools=pools, cluster=cluster), options, to_the_end=to_the_end)
    except UserError as error:
        if error.field != "global_batch":  # that no pipeline over them can divide
            raise
        return None


def of_pools(job: PooledJob, names: Sequence[str]) -> AnyJob:
    """The job on those of its pools alone that have these names."""
    known = [pool.cluster.name for pool in job.pools]
    cluster, pools = job.cluster.only([known.index(name) for name in names]), [_pool(job, name) for name in names]
    return PooledJob(pools=tuple(pools), cluster=cluster) if isinstance(cluster, MixedCluster) else pools[0]


def fastest_plan(
    job: Job, hosts: Sequence[int], demands: Sequence[Demand], *, to_the_end: bool = True
) -> tuple[Plan, Shape] | None:
    """The fastest plan on a part of these hosts, with the nodes and the devices of each that it takes.

    ``to_the_end`` as in `steelyard.planning.acceptance.accept`.
    """
    options = narrowed(PlanOptions(), demands)

    def on(shape: Shape, known_s: float) -> PlanningResult | None:
        part = replace(job, cluster=with_shape(job.cluster, *shape))
        result = plan_or_reason(part, options, top=NUM_RESCORED, known_s=known_s, to_the_end=to_the_end)
        return None if isinstance(result, str) else result

    return _fastest(((_num_devices(shape), shape) for shape in _shapes(hosts, job)), on)


def _num_devices(*shapes: Shape) -> int:
    return sum(nodes * per_node for nodes, per_node in shapes)


def _fastest(
    candidates: Iterable[tuple[int, Part]], plan_on: Callable[[Part, float], PlanningResult | None]
) -> tuple[Plan, Part] | None:
    """The fastest plan on one of these parts of what is left, each with its number of devices, the most first.

    ``plan_on`` gets a part and what the best plan so far takes. Once there is a plan a part is searched that has
    devices enough, as long as a search like those before ends within `MOST_S`.
    """
    began_s, slowest_s, known_s = time.monotonic(), 0.0, math.inf
    found: list[tuple[Plan, Part]] = []
    for count, part in candidates:
        started_s = time.monotonic()
        is_late = started_s + slowest_s > began_s + MOST_S
        if found and (count < LEAST_SHARE * found[0][0].num_devices or is_late):
            break
        result = plan_on(part, known_s)
        slowest_s = max(slowest_s, time.monotonic() - started_s)
        if result is not None and result.plan is not None:
            found.append((result.plan, part))
            searched_s = max((each.score_s for each in result.search.ranked[:1]), default=0.0)
            known_s = min(known_s, max(searched_s, _step_s(result.plan)))  # the others are held against these sums
    return min(found, key=lambda each: _step_s(each[0])) if found else None


def _shapes(hosts: Sequence[int], job: Job) -> Iterator[Shape]:
    """Nodes and devices of each, the most devices first, where the first host takes part."""
    yield from _parts(hosts if job.cluster.num_nodes == 1 else [min(each, hosts[0]) for each in hosts], job)


def _parts(hosts: Sequence[int], job: Job) -> Iterator[Shape]:
    """Nodes and devices of each, the most devices first.

    A cluster of one node has no link between nodes, so that all devices count as those of one.
    """
    if job.cluster.num_nodes == 1:
        yield from ((1, count) for count in range(sum(hosts), 0, -1))
        return
    sizes = range(1, hosts[0] + 1) if len(hosts) == 1 else sorted(set(hosts))
    shapes = {(nodes, size) for size in sizes for nodes in range(1, sum(each >= size for each in hosts) + 1)}
    yield from sorted(shapes, key=lambda shape: (-shape[0] * shape[1], shape))


def _taken(hosts: Sequence[int], shape: Shape, *, has_hosts: bool) -> tuple[int, ...]:
    """Of each host the processes that take part: of one node's devices as many as there are, else equal parts."""
    nodes, per_node = shape
    taken: list[int] = []
    for size in hosts:
        left = nodes * per_node - sum(taken)
        taken.append((per_node if size >= per_node and left else 0) if has_hosts else min(size, left))
    return tuple(taken)


def _notice(plan: Plan, found: Plan, given_up: Sequence[Demand]) -> str:
    """What the new plan costs."""
    cost = ""
    if plan.prediction is not None:
        cost = f", predicted {format_seconds(plan.prediction.step_time_s)} → {format_seconds(_step_s(found))} a step"
    dropped = f"; given up: {', '.join(demand.text for demand in given_up)}" if given_up else ""
    return (
        f"{plan.num_devices} → {format_plural(found.num_devices, 'device')}{cost} "
        f"({describe(found.pipeline)}; {summarise(found)}){dropped}"
    )


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None, "what was searched is priced"
    return plan.prediction.step_time_s


def left_without(job: AnyJob, name: str, lost: int) -> dict[str, tuple[int, ...]]:
    """What is left of each pool of a job when so many nodes of one are lost, as in `hosts_without`; empty where nothing
    is."""
    clusters = [pool.cluster for pool in job.pools]
    left = {each.name: hosts_without(each, lost if each.name == name else 0) for each in clusters}
    return left if any(left.values()) else {}


def hosts_without(cluster: Cluster, lost: int) -> tuple[int, ...]:
    """The devices of each node that is left when so many nodes are lost, or devices where there is one node."""
    nodes, per_node = cluster.num_nodes, cluster.devices_per_node
    if nodes == 1:
        return (per_node - lost,) if per_node > lost else ()
    return (per_node,) * (nodes - lost)


def check_pool(plan: Plan, pool: str) -> None:
    """Raises `UserError` where a host does not say of which pool of a plan it is, or a plan has no pools to name."""
    names = plan.cluster.split("+") if plan.is_mixed else [""]
    if pool not in names:
        raise UserError(
            field="--pool",
            found=repr(pool) if pool else f"nothing, and a plan over {len(names)} pools of unlike devices",
            expected=f"the pool that this host is of: {', '.join(names)}" if plan.is_mixed else "a plan over pools",
            hint="name on every host the pool of its devices" if plan.is_mixed else "leave --pool out",
        )


def check_replannable(plan: Plan, folder: Path, pool: str = "") -> None:
    """Raises `UserError` for a plan for which none could be found for what is left: its costs are not at hand, or this
    host is not of its ``pool``."""
    check_pool(plan, pool)
    try:
        any_job_of(plan, folder=folder)
    except UserError as error:
        raise type(error)(**error.parts() | {"field": f"--elastic: {error.field}"}) from error
