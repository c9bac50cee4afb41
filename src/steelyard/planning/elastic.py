"""Replanning for the devices that are left or have come back, and the cost of a slow rank.

**Replanning** (`replan`) repeats the search for the same job on other devices. The model, global batch, sequence
length, memory per device and the source of all costs stay. Hosts may have lost different numbers of devices, but a plan
needs equal nodes, so a candidate takes the same number of devices from each of several hosts. The fastest candidate
with at least half of the devices of the largest one that has a plan wins, because a plan on five devices is often
slower than one on four. The user's decisions are kept if any candidate can meet them. A search that a run waits for
does not go to the end. For a plan over pools of different devices, every host names its pool. A candidate then takes a
part of each pool that has hosts, and the search over pools decides which pools take part and in which order.

**A slow rank** (`slow_nodes`) delays its stage, so its factor scales the computation of the stage in every pass of the
simulated step. Three options are compared: continuing, the best plan without the rank's node, and a plan that is cut
for it. The cut treats the node as a separate pool that is as slow as the rank, because nobody measured which stages the
other ranks of the node could hold. The search also slows the node's collectives (one factor scales all times of a
pool), but the simulation of its result does not, so a better plan may exist.
"""

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from steelyard.cost.job import Job
from steelyard.cost.predict import predict
from steelyard.errors import InvalidProfileError, UserError
from steelyard.hardware import Cluster
from steelyard.plan.choices import Recut, Replanned, SlowNode
from steelyard.plan.decisions import FREE
from steelyard.plan.file import parse_file
from steelyard.plan.plan import Plan
from steelyard.planning.choose import NothingFitsError, PlanningResult, plan_job
from steelyard.planning.job import InvalidRunError, job_of
from steelyard.planning.price import describe, summarise
from steelyard.planning.request import PlanRequest, request_of_plan
from steelyard.planning.variants import Study, with_shape
from steelyard.profiles.record import SLOW_SHARE, OwnWork, RunRecord, SlowRank, slow_ranks
from steelyard.units import format_bytes, format_plural, format_seconds

MOST_S = 1.0
"""Seconds within which other candidates are searched once a plan is found. No time limit cuts a search short, because
its result would depend on the load of the machine."""
LEAST_SHARE = 0.5
"""Minimum size of a candidate, as a fraction of the devices of the largest candidate that has a plan."""
MOST_SHAPES = 4
"""Number of parts of a pool that are tried, largest first."""
Shape = tuple[int, int]
"""Number of nodes, and devices per node."""
Left = Mapping[str, Sequence[int]]
"""Devices of each host that is left, by the names of the pools of a plan."""


def replan(plan: Plan, hosts: Sequence[int], folder: Path, pools: Sequence[str] = ()) -> Replanned:
    """Return the plan for hosts with these numbers of processes, and the processes that take part.

    The result is the plan itself if all its devices are there, and otherwise a searched plan. ``folder`` is the folder
    of the plan's file, where its profile may be too. ``pools`` names the pool of each host for a plan over several
    pools. Raises `NothingFitsError` if no part of the devices has a plan, and another `UserError` if the plan's costs
    are not available or a host belongs to none of its pools.
    """
    for pool in pools or [""] * len(hosts):
        check_pool(plan, pool)
    own = pools or [plan.cluster] * len(hosts)
    left = {name: tuple(count for count, of in zip(hosts, own, strict=True) if of == name) for name in _sizes(plan)}
    given_up: tuple[str, ...] = ()
    if all(sum(left[name]) == size for name, size in _sizes(plan).items()):
        return Replanned(plan=plan, taken=tuple(hosts), order=_in_order(pools, list(left)))
    request = request_of_plan(plan, folder=folder, decisions=plan.asked or FREE)
    job = job_of(request)
    best = fastest_on(request, job, left, to_the_end=False)
    if best is None and plan.asked:
        given_up = tuple(plan.asked.one_by_one())
        best = fastest_on(replace(request, decisions=FREE), job, left, to_the_end=False)
    if best is None:
        raise NothingFitsError(
            field="--elastic",
            found=f"{format_plural(sum(hosts), 'device')} left, no part of which has a plan for a global batch of "
            f"{job.global_batch} within {format_bytes(job.budget_bytes)}",
            expected="devices enough for the model",
            hint="the last checkpoint is whole: start again when devices are back, or with a plan for fewer of them",
        )
    found, shapes = best
    has_hosts = {name: pool.num_nodes > 1 for name, pool in zip(_sizes(plan), plan.pools(), strict=True)}
    taken = {name: _taken(left[name], shape, has_hosts=has_hosts[name]) for name, shape in shapes.items()}
    counts = {name: iter(each) for name, each in taken.items()}
    return Replanned(
        plan=found,
        taken=tuple(next(counts[pool]) if pool in counts else 0 for pool in own),
        order=_in_order(pools, list(shapes)),
        notice=_notice(plan, found, given_up),
    )


def _sizes(plan: Plan) -> dict[str, int]:
    """Return the number of devices of each pool of a plan by name. A single pool has the name of the cluster."""
    return {pool.name: pool.num_devices for pool in plan.pools()} if plan.is_mixed else {plan.cluster: plan.num_devices}


def _in_order(pools: Sequence[str], names: Sequence[str]) -> tuple[int, ...]:
    """Return the indices of hosts, pool by pool in the order of ``names``, hosts of other pools last."""
    places = {name: place for place, name in enumerate(names)}
    return tuple(sorted(range(len(pools)), key=lambda host: places.get(pools[host], len(places))))


def fastest_on(
    request: PlanRequest, job: Job, left: Left, *, to_the_end: bool = True
) -> tuple[Plan, dict[str, Shape]] | None:
    """Return the fastest plan on parts of the devices ``left`` in each pool, and the shape of each part in plan order.

    Once there is a plan, other parts are searched if they have enough devices and a search as slow as the slowest so
    far would end within `MOST_S`. ``to_the_end`` is as in `plan_job`.
    """
    began_s, slowest_s, known_s = time.monotonic(), 0.0, math.inf
    groups = {name: job.only([name]) if job.is_mixed else job for name, hosts in left.items() if hosts}
    found: list[tuple[Plan, dict[str, Shape]]] = []
    unmeasured: InvalidProfileError | None = None
    for shapes in _joint_shapes(groups, left, is_mixed=job.is_mixed):
        started_s = time.monotonic()
        is_late = started_s + slowest_s > began_s + MOST_S
        if found and (_num_devices(shapes) < LEAST_SHARE * found[0][0].num_devices or is_late):
            break
        parts = {name: with_shape(groups[name].cluster, *shape) for name, shape in shapes.items()}
        part = Job.over([groups[name].on(cluster=cluster) for name, cluster in parts.items()])
        try:
            result = Study(request, part).plan(known_s=known_s, to_the_end=to_the_end)
        except InvalidProfileError as error:  # collectives of so many ranks were not measured
            unmeasured = error
            continue
        slowest_s = max(slowest_s, time.monotonic() - started_s)
        if isinstance(result, PlanningResult) and result.plan is not None:
            names = {cluster.name: name for name, cluster in parts.items()}
            used = [names[pool.name] for pool in result.plan.pools()]
            found.append((result.plan, {name: shapes[name] for name in used}))
            searched_s = max((each.score_s for each in result.search.ranked[:1]), default=0.0)
            known_s = min(known_s, max(searched_s, result.plan.step_s))  # the other candidates must beat it
    if unmeasured is not None and not found:
        raise unmeasured
    return min(found, key=lambda each: each[0].step_s) if found else None


def _num_devices(shapes: Mapping[str, Shape]) -> int:
    return sum(nodes * per_node for nodes, per_node in shapes.values())


def _joint_shapes(groups: Mapping[str, Job], left: Left, *, is_mixed: bool) -> list[dict[str, Shape]]:
    """Return the candidate shapes of every pool that has hosts, the most devices first."""
    if not is_mixed:
        return [{name: shape} for name, job in groups.items() for shape in _shapes(left[name], job)]
    shapes = [list(_parts(left[name], job))[:MOST_SHAPES] for name, job in groups.items()]
    joint = [dict(zip(groups, each, strict=True)) for each in itertools.product(*shapes)]
    return sorted(joint, key=lambda each: -_num_devices(each))


def _shapes(hosts: Sequence[int], job: Job) -> Iterator[Shape]:
    """Yield the shapes in which the first host takes part, the most devices first."""
    yield from _parts(hosts if job.cluster.num_nodes == 1 else [min(each, hosts[0]) for each in hosts], job)


def _parts(hosts: Sequence[int], job: Job) -> Iterator[Shape]:
    """Yield the shapes that these hosts can form, the most devices first.

    A cluster of one node has no link between nodes, so all its devices count as one node.
    """
    if job.cluster.num_nodes == 1:
        yield from ((1, count) for count in range(sum(hosts), 0, -1))
        return
    sizes = range(1, hosts[0] + 1) if len(hosts) == 1 else sorted(set(hosts))
    shapes = {(nodes, size) for size in sizes for nodes in range(1, sum(each >= size for each in hosts) + 1)}
    yield from sorted(shapes, key=lambda shape: (-shape[0] * shape[1], shape))


def _taken(hosts: Sequence[int], shape: Shape, *, has_hosts: bool) -> tuple[int, ...]:
    """Return the number of processes of each host that take part: equal numbers, or any for a pool of one node."""
    nodes, per_node = shape
    taken: list[int] = []
    for size in hosts:
        left = nodes * per_node - sum(taken)
        taken.append((per_node if size >= per_node and left else 0) if has_hosts else min(size, left))
    return tuple(taken)


def _notice(plan: Plan, found: Plan, given_up: Sequence[str]) -> str:
    """Describe the change from a plan to the new one, with its cost."""
    cost = ""
    if plan.prediction is not None:
        cost = f", predicted {format_seconds(plan.prediction.step_time_s)} → {format_seconds(found.step_s)} a step"
    dropped = f"; given up: {', '.join(given_up)}" if given_up else ""
    return (
        f"{plan.num_devices} → {format_plural(found.num_devices, 'device')}{cost} "
        f"({describe(found.pipeline)}; {summarise(found)}){dropped}"
    )


def left_without(job: Job, name: str) -> dict[str, tuple[int, ...]]:
    """Return the devices per node that are left in each pool of a job if the pool ``name`` loses a node.

    A pool of one node loses a device instead. Empty if nothing is left.
    """
    left = {}
    for cluster in (group.cluster for group in job.groups):
        nodes, per_node = cluster.num_nodes, cluster.devices_per_node
        if cluster.name == name:
            nodes, per_node = (nodes - 1, per_node) if nodes > 1 else (nodes, per_node - 1)
        left[cluster.name] = (per_node,) * nodes if per_node else ()
    return left if any(left.values()) else {}


def check_pool(plan: Plan, pool: str) -> None:
    """Raise `UserError` if a host of a plan over pools does not name one of them, or a plan without pools gets one."""
    names = plan.cluster.split("+") if plan.is_mixed else [""]
    if pool not in names:
        raise UserError(
            field="--pool",
            found=repr(pool) if pool else f"nothing, but a plan over {len(names)} device groups",
            expected=f"the device group of this host: {', '.join(names)}" if plan.is_mixed else "a plan over pools",
            hint="pass --pool on every host" if plan.is_mixed else "leave --pool out",
        )


def check_replannable(plan: Plan, folder: Path, pool: str = "") -> None:
    """Raise `UserError` if a plan cannot be replanned: its costs are not available, or it has no such ``pool``."""
    check_pool(plan, pool)
    try:
        job_of(request_of_plan(plan, folder=folder))
    except UserError as error:
        parts = error.parts() | {"field": f"--elastic: {error.field}"}
        if error.field.startswith("--"):
            parts["hint"] = f"plan again with {error.field}: `train` reads it from the plan"
        raise type(error)(**parts) from error


RECUT_S = 10.0
"""Time limit in seconds of the search for a plan with a slow node."""


def slow_nodes(plan: Plan, request: PlanRequest, job: Job, path: str | Path) -> tuple[SlowNode, ...]:
    """Return every slow rank of a recorded run of the plan, with the best plan without its node.

    Empty if no rank was slow. Raises `InvalidRunError` if the record cannot be read, is of another plan, or was written
    before the computation of each rank was measured.
    """
    record = parse_file(Path(path), RunRecord, InvalidRunError, what="record")
    return tuple(_slow_node(plan, request, job, slow) for slow in _slow_ranks(plan, record, Path(path)))


def _slow_ranks(plan: Plan, record: RunRecord, path: Path) -> tuple[SlowRank, ...]:
    ran = (record.config_hash, len(record.ranks), 1 + max(rank.stage for rank in record.ranks))
    wanted = (plan.chain().config_hash, plan.num_devices, plan.num_stages)
    if ran != wanted:
        placed = [f"on {format_plural(n, 'rank')} in {format_plural(p, 'stage')}" for _, n, p in (ran, wanted)]
        raise InvalidRunError(
            field=f"--record {path}",
            found=f"a run of {record.model_name} {placed[0]}",
            expected=f"one of this plan: {plan.model.name} {placed[1]}",
            hint="give the record that `train --record` wrote under this plan",
        )
    pools = [pool.name for pool in plan.stage_pools()] if plan.is_mixed else [""] * plan.num_stages
    work = [
        OwnWork(rank=each.rank, stage=each.stage, host=each.host, own_s=each.own_s, pool=pools[each.stage])
        for each in record.ranks
        if each.own_s is not None
    ]
    if len(work) < len(record.ranks):
        raise InvalidRunError(
            field=f"--record {path}",
            found="a record from before each rank's own computation was measured",
            expected="ranks with own_s",
            hint="train a few steps again with --record",
        )
    return slow_ranks(work, record.predicted_own_s, SLOW_SHARE)


def _slow_node(plan: Plan, request: PlanRequest, job: Job, slow: SlowRank) -> SlowNode:
    job = job.used_by(plan)
    slowed_s = predict(plan, job, slowed={slow.stage: slow.factor}).step_time_s
    request = replace(request, decisions=plan.asked or FREE)
    left = left_without(job, slow.pool or plan.cluster)
    best = fastest_on(request, job, left) if left else None
    without = None if best is None else best[0]
    recut = _cut_for(plan, request, job, slow)
    step_s = without.prediction.step_time_s if without is not None and without.prediction is not None else None
    return SlowNode(
        rank=str(slow),
        step_time_s=predict(plan, job).step_time_s,
        slowed_step_s=slowed_s,
        without_step_s=step_s,
        lost="node" if plan.stage_pools()[slow.stage].num_nodes > 1 else "device",
        cluster="" if without is None else without.cluster,
        setting="" if without is None else describe(without.pipeline),
        strategies="" if without is None else summarise(without),
        recut=recut,
    )


def _cut_for(plan: Plan, request: PlanRequest, job: Job, slow: SlowRank) -> Recut | None:
    """Return the best plan found with the node of a slow rank as a separate pool.

    In a cluster of one node, the pool has as many devices as the rank's stage, at most half. None if that pool would be
    the whole cluster, with a measured profile, pins or a partition, which several pools do not support, and if the best
    plan found omits that pool or uses it alone.
    """
    decisions = request.decisions
    own = job.only([slow.pool]) if slow.pool else job
    cluster = own.cluster
    if cluster.num_devices == 1 or own.profile.identity.is_measured or decisions.pins or decisions.partition:
        return None
    link = own.group.outer_link or cluster.inter_link or cluster.intra_link
    whole, part = (own.on(cluster=each, outer_link=link) for each in _parted(plan, cluster, slow))
    as_slow, others = (
        part.on(time_factor=own.time_factor * slow.factor),
        [each for each in job.by_group if each is not own],
    )
    found = plan_job(Job.over([whole, as_slow, *others]), decisions, time_limit_s=RECUT_S).plan
    slow_name = part.cluster.name
    if found is None or not found.is_mixed or slow_name not in found.cluster.split("+"):
        return None
    names = [pool.name for pool in found.stage_pools()]
    factors = {stage: slow.factor for stage, name in enumerate(names) if name == slow_name}
    return Recut(
        step_time_s=predict(found, Job.over([whole, part, *others]), slowed=factors).step_time_s,
        layers=tuple(len(part.layers) for part in found.parts),
        is_slow=tuple(stage in factors for stage in range(found.num_stages)),
        setting=describe(found.pipeline),
        strategies=summarise(found),
    )


def _parted(plan: Plan, cluster: Cluster, slow: SlowRank) -> tuple[Cluster, Cluster]:
    """Split a slow rank's pool into the rest and the rank's node, or some devices if the pool is one node."""
    if cluster.num_nodes > 1:
        shapes = (cluster.num_nodes - 1, cluster.devices_per_node), (1, cluster.devices_per_node)
    else:
        size = min(plan.stages[slow.stage].num_devices, cluster.num_devices // 2)
        shapes = (1, cluster.num_devices - size), (1, size)
    whole, part = (with_shape(cluster, *shape) for shape in shapes)
    return whole, part.on(name=f"{part.name} {slow.factor:.1f} × as slow")
