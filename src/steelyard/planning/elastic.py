"""The plan for what is left of a cluster, or has come back: the same search for the same job on other devices.

Model, global batch, sequence length, memory per device and the source of all costs stay. Hosts may have lost devices
unequally while a plan is for equal nodes, so a candidate takes as many devices from each of as many hosts as have them.
The fastest candidate is taken of those with at least half of the devices of the largest that has a plan: five devices
often have a plan that is slower than that of four. What was asked of the plan is kept where any candidate can have it.
A search that a run waits for is not taken to the end (`steelyard.planning.acceptance.accept`); what is made ahead is.

Of a plan over pools of unlike devices every host says of which pool it is. A candidate takes so much of each pool that
has hosts, and the search over pools decides which of these take part and in which order.
"""

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from steelyard.cost.pools import PooledJob
from steelyard.cost.setting import Job
from steelyard.errors import UserError
from steelyard.hardware import Cluster, MixedCluster
from steelyard.plan.plan import Plan, Spare
from steelyard.plan.replanned import Replanned
from steelyard.planning.choose import NUM_RESCORED, NothingFitsError
from steelyard.planning.demands import Demand, demands_of, narrowed
from steelyard.planning.devices import plan_or_reason, with_shape
from steelyard.planning.plan_from_search import describe, summarise
from steelyard.planning.pools import any_job_of, plan_pools, pooled_job_of
from steelyard.planning.price import job_of
from steelyard.planning.problem import PlanOptions
from steelyard.units import format_bytes, format_plural, format_seconds

MOST_S = 1.0
"""Seconds after which no other candidate is searched once a plan is found. No time limit cuts a search short: what it
finds would depend on what else the machine does."""
LEAST_SHARE = 0.5
"""Of the devices of the largest candidate that has a plan, what a candidate must have."""
MOST_SHAPES = 4
"""Parts of a pool that are tried, the largest ones."""
Shape = tuple[int, int]
"""Nodes, and the devices of each."""


def replan(plan: Plan, hosts: Sequence[int], folder: Path, pools: Sequence[str] = ()) -> Replanned:
    """The plan for hosts with so many processes each, and which of them take part.

    ``folder`` is that of the plan's file, beside which its profile may lie; ``pools`` names the pool of each host for a
    plan over several. The plan itself where it has its devices, a plan that it holds for this loss, or else one that is
    searched. Raises `NothingFitsError` where no part of the devices has a plan, and another `UserError` where the
    plan's costs are not at hand or a host is of none of its pools.
    """
    for pool in pools or [""] * len(hosts):
        check_pool(plan, pool)
    if plan.is_mixed:
        return _replan_pools(plan, hosts, folder, pools)
    if sum(hosts) == plan.num_devices:
        return Replanned(plan=plan, taken=tuple(hosts))
    made = _made_before(plan, hosts)
    if made is not None:
        return made
    job = job_of(plan, folder=folder)
    demands = demands_of(plan.asked, num_layers=job.chain.num_layers)
    best, given_up = fastest_plan(job, hosts, demands, to_the_end=False), ()
    if best is None and demands:
        best, given_up = fastest_plan(job, hosts, (), to_the_end=False), demands
    if best is None:
        raise _nothing_fits(hosts, job)
    found, shape = best
    return Replanned(
        plan=found,
        taken=_taken(hosts, shape, has_hosts=job.cluster.num_nodes > 1),
        notice=_notice(plan, found, given_up),
    )


def _nothing_fits(hosts: Sequence[int], job: Job | PooledJob) -> NothingFitsError:
    return NothingFitsError(
        field="--elastic",
        found=f"{format_plural(sum(hosts), 'device')} left, no part of which has a plan for a global batch of "
        f"{job.global_batch} within {format_bytes(job.budget_bytes)}",
        expected="devices enough for the model",
        hint="the last checkpoint is whole: start again when devices are back, or with a plan for fewer of them",
    )


def _replan_pools(plan: Plan, hosts: Sequence[int], folder: Path, pools: Sequence[str]) -> Replanned:
    """As `replan` for a plan over several pools."""
    names = plan.cluster.split("+")
    left = {name: tuple(count for count, of in zip(hosts, pools, strict=True) if of == name) for name in names}
    if all(sum(left[pool.name]) == pool.num_devices for pool in plan.pools()):
        return Replanned(plan=plan, taken=tuple(hosts), order=_in_order(pools, names))
    job = pooled_job_of(plan, folder=folder)
    demands = demands_of(plan.asked, num_layers=job.chain.num_layers)
    best, given_up = _fastest_over_pools(job, left, demands), ()
    if best is None and demands:
        best, given_up = _fastest_over_pools(job, left, ()), demands
    if best is None:
        raise _nothing_fits(hosts, job)
    found, shapes = best
    counts = {
        name: iter(_taken(left[name], shape, has_hosts=_pool(job, name).cluster.num_nodes > 1))
        for name, shape in shapes.items()
    }
    return Replanned(
        plan=found,
        taken=tuple(next(counts[pool]) if pool in counts else 0 for pool in pools),
        order=_in_order(pools, list(shapes)),
        notice=_notice(plan, found, given_up),
    )


def _in_order(pools: Sequence[str], names: Sequence[str]) -> tuple[int, ...]:
    """The places of hosts of these pools, pool by pool as they are named, those of others last."""
    places = {name: place for place, name in enumerate(names)}
    return tuple(sorted(range(len(pools)), key=lambda host: places.get(pools[host], len(places))))


def _fastest_over_pools(
    job: PooledJob, left: Mapping[str, Sequence[int]], demands: Sequence[Demand]
) -> tuple[Plan, dict[str, Shape]] | None:
    """The fastest plan on a part of what is ``left`` of each pool, and what it takes of each in their order."""
    options, began_s = narrowed(PlanOptions(), demands), time.monotonic()
    found: list[tuple[Plan, dict[str, Shape]]] = []
    for shapes in _joint_shapes(job, left):
        count = sum(nodes * per_node for nodes, per_node in shapes.values())
        if found and (count < LEAST_SHARE * found[0][0].num_devices or time.monotonic() > began_s + MOST_S):
            break
        parts = {name: with_shape(_pool(job, name).cluster, *shape) for name, shape in shapes.items()}
        plan = _plan_on(job, parts, options)
        if plan is not None:
            names = {part.name: name for name, part in parts.items()}
            used = [names[part] for part in plan.cluster.split("+")]
            found.append((plan, {name: shapes[name] for name in used}))
    return min(found, key=lambda each: _step_s(each[0])) if found else None


def _joint_shapes(job: PooledJob, left: Mapping[str, Sequence[int]]) -> list[dict[str, Shape]]:
    """What may be taken of every pool that has hosts, the most devices first."""
    there = [name for name, hosts in left.items() if hosts]
    shapes = [list(_parts(left[name], _pool(job, name)))[:MOST_SHAPES] for name in there]
    joint = [dict(zip(there, each, strict=True)) for each in itertools.product(*shapes)]
    return sorted(joint, key=lambda each: -sum(nodes * per_node for nodes, per_node in each.values()))


def _pool(job: PooledJob, name: str) -> Job:
    return next(pool for pool in job.pools if pool.cluster.name == name)


def _plan_on(job: PooledJob, parts: Mapping[str, Cluster], options: PlanOptions) -> Plan | None:
    """The plan over these parts of pools; None where there is none."""
    pools = tuple(replace(_pool(job, name), cluster=part) for name, part in parts.items())
    if len(pools) == 1:
        result = plan_or_reason(pools[0], options, top=NUM_RESCORED)
        return None if isinstance(result, str) else result.plan
    links = {pool.name: link for pool, link in zip(job.cluster.pools, job.cluster.links, strict=True)}
    cluster = MixedCluster(pools=tuple(parts.values()), links=tuple(links[name] for name in parts))
    try:
        return plan_pools(PooledJob(pools=pools, cluster=cluster), options).plan
    except UserError as error:
        if error.field != "global_batch":  # that no pipeline over them can divide
            raise
        return None


def _made_before(plan: Plan, hosts: Sequence[int]) -> Replanned | None:
    """What the plan holds for hosts with so many processes each, where it does and the first host takes part."""
    for spare in plan.spares:
        if spare.num_left != sum(hosts):
            continue
        found = plan.spare_plan(spare)
        machines = found.machines()
        taken = _taken(hosts, (machines.num_nodes, machines.devices_per_node), has_hosts=plan.machines().num_nodes > 1)
        if taken[0] and sum(taken) == found.num_devices:
            return Replanned(plan=found, taken=taken, notice=_notice(plan, found, ()))
    return None


def fastest_plan(
    job: Job, hosts: Sequence[int], demands: Sequence[Demand], *, to_the_end: bool = True
) -> tuple[Plan, Shape] | None:
    """The fastest plan on a part of these hosts, with the nodes and the devices of each that it takes.

    ``to_the_end`` as in `steelyard.planning.acceptance.accept`.
    """
    options = narrowed(PlanOptions(), demands)
    began_s, known_s = time.monotonic(), math.inf
    found: list[tuple[Plan, Shape]] = []
    for nodes, per_node in _shapes(hosts, job):
        if found and (nodes * per_node < LEAST_SHARE * found[0][0].num_devices or time.monotonic() > began_s + MOST_S):
            break
        result = plan_or_reason(
            replace(job, cluster=with_shape(job.cluster, nodes, per_node)),
            options,
            top=NUM_RESCORED,
            known_s=known_s,
            to_the_end=to_the_end,
        )
        if not isinstance(result, str) and result.plan is not None:
            found.append((result.plan, (nodes, per_node)))
            searched_s = result.search.ranked[0].score_s  # by the sums that the others are held against
            known_s = min(known_s, max(searched_s, _step_s(result.plan)))
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


def with_spares(plan: Plan, job: Job, *, num_spares: int) -> Plan:
    """The plan with those for one and more lost nodes in it, up to ``num_spares``; devices where it has one node.

    Fewer where what is left has no plan.
    """
    demands = demands_of(plan.asked, num_layers=job.chain.num_layers)
    spares = []
    for lost in range(1, num_spares + 1):
        hosts = hosts_without(job.cluster, lost)
        best = (fastest_plan(job, hosts, demands) or fastest_plan(job, hosts, ())) if hosts else None
        if best is None:
            break
        spares.append(_as_spare(best[0], num_left=sum(hosts)))
    return plan.model_copy(update={"spares": tuple(spares)})


def with_likely_losses(plan: Plan, hosts: Sequence[int], folder: Path) -> Plan:
    """The plan with those among its spares for one device less on a host, for one host less, and for the hosts as they
    are where some are lost already: it is taken when the run begins again.

    Where what was asked of the plan would have to be given up there is none: what is given up is said when it is.
    ``hosts`` and ``folder`` as in `replan`, which raises the same errors. Nothing is made for a plan over pools.
    """
    if plan.is_mixed:
        return plan
    job = job_of(plan, folder=folder)
    demands = demands_of(plan.asked, num_layers=job.chain.num_layers)
    lost_before = [tuple(hosts)] if sum(hosts) < plan.num_devices else []
    for left in (*_likely_losses(hosts), *lost_before):
        best = None if _made_before(plan, left) else fastest_plan(job, left, demands)
        if best is not None:
            plan = plan.model_copy(update={"spares": (*plan.spares, _as_spare(best[0], num_left=sum(left)))})
    return plan


def _likely_losses(hosts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """What is left when a device of the last host is lost, and when the host is."""
    if hosts[-1] > 1:
        yield (*hosts[:-1], hosts[-1] - 1)
    if len(hosts) > 1:
        yield tuple(hosts[:-1])


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


def _as_spare(plan: Plan, *, num_left: int) -> Spare:
    prediction = plan.prediction.model_copy(update={"alternatives": ()}) if plan.prediction else None
    own = {name: getattr(plan, name) for name in Spare.model_fields if name in Plan.model_fields}
    return Spare(**own | {"prediction": prediction, "num_left": num_left})


def check_replannable(plan: Plan, folder: Path, pool: str = "") -> None:
    """Raises `UserError` for a plan for which none could be found for what is left: its costs are not at hand, or this
    host is not of its ``pool``."""
    check_pool(plan, pool)
    try:
        any_job_of(plan, folder=folder)
    except UserError as error:
        raise type(error)(
            field=f"--elastic: {error.field}", found=error.found, expected=error.expected, hint=error.hint
        ) from error
