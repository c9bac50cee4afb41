"""The plan for what is left of a cluster, or has come back, and what a slow rank of a run costs.

**Left of a cluster** (`replan`): the same search for the same job on other devices. Model, global batch, sequence
length, memory per device and the source of all costs stay. Hosts may have lost devices unequally while a plan is for
equal nodes, so a candidate takes as many devices from each of as many hosts as have them. The fastest candidate wins
of those with at least half of the devices of the largest that has a plan: five devices often have a plan that is slower
than that of four. What was asked of the plan is kept where any candidate can have it. A search that a run waits for is
not taken to the end. Of a plan over pools of unlike devices every host says of which pool it is; a candidate takes so
much of each pool that has hosts, and the search over pools decides which of these take part and in which order.

**A slow rank** (`slow_nodes`) holds up its stage, so its factor scales what the stage computes in every pass of the
simulated step. Compared are going on, the best plan without its node, and a plan that is cut for it: its node as a pool
of its own, all of which is taken to be as slow as the rank, because nobody measured which stages the other ranks of the
node could have had. The search takes the node's collectives to be as slow as well (one factor scales all times of a
pool), the price of what it finds does not, so that a plan that is better still may exist.
"""

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from steelyard.cost.job import Job
from steelyard.cost.predict import predict
from steelyard.errors import UserError
from steelyard.hardware import Cluster
from steelyard.plan.choices import Recut, SlowNode
from steelyard.plan.decisions import FREE
from steelyard.plan.file import parse_file
from steelyard.plan.plan import Plan
from steelyard.plan.replanned import Replanned
from steelyard.planning.choose import NothingFitsError, PlanningResult, plan_job
from steelyard.planning.job import InvalidRunError, job_of
from steelyard.planning.price import describe, summarise
from steelyard.planning.request import PlanRequest, request_of_plan
from steelyard.planning.variants import Study, with_shape
from steelyard.profiles.record import SLOW_SHARE, OwnWork, RunRecord, SlowRank, slow_ranks
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


def replan(plan: Plan, hosts: Sequence[int], folder: Path, pools: Sequence[str] = ()) -> Replanned:
    """The plan for hosts with so many processes each, and which of them take part.

    ``folder`` is that of the plan's file, beside which its profile may lie; ``pools`` names the pool of each host for a
    plan over several. The plan itself where it has its devices, or else one that is searched. Raises
    `NothingFitsError` where no part of the devices has a plan, and another `UserError` where the plan's costs are not
    at hand or a host is of none of its pools.
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
    """The devices of each pool of a plan by its name: of the cluster, where there is one pool."""
    return {pool.name: pool.num_devices for pool in plan.pools()} if plan.is_mixed else {plan.cluster: plan.num_devices}


def _in_order(pools: Sequence[str], names: Sequence[str]) -> tuple[int, ...]:
    """The places of hosts of these pools, pool by pool as they are named, those of others last."""
    places = {name: place for place, name in enumerate(names)}
    return tuple(sorted(range(len(pools)), key=lambda host: places.get(pools[host], len(places))))


def fastest_on(
    request: PlanRequest, job: Job, left: Left, *, to_the_end: bool = True
) -> tuple[Plan, dict[str, Shape]] | None:
    """The fastest plan on a part of what is ``left`` of each pool of a job, and what it takes of each in their order.

    Once there is a plan a part is searched that has devices enough, as long as a search like those before ends within
    `MOST_S`. ``to_the_end`` as in `plan_job`.
    """
    began_s, slowest_s, known_s = time.monotonic(), 0.0, math.inf
    groups = {name: job.only([name]) if job.is_mixed else job for name, hosts in left.items() if hosts}
    found: list[tuple[Plan, dict[str, Shape]]] = []
    for shapes in _joint_shapes(groups, left, is_mixed=job.is_mixed):
        started_s = time.monotonic()
        is_late = started_s + slowest_s > began_s + MOST_S
        if found and (_num_devices(shapes) < LEAST_SHARE * found[0][0].num_devices or is_late):
            break
        parts = {name: with_shape(groups[name].cluster, *shape) for name, shape in shapes.items()}
        part = Job.over([groups[name].on(cluster=cluster) for name, cluster in parts.items()])
        result = Study(request, part).plan(known_s=known_s, to_the_end=to_the_end)
        slowest_s = max(slowest_s, time.monotonic() - started_s)
        if isinstance(result, PlanningResult) and result.plan is not None:
            names = {cluster.name: name for name, cluster in parts.items()}
            used = [names[pool.name] for pool in result.plan.pools()]
            found.append((result.plan, {name: shapes[name] for name in used}))
            searched_s = max((each.score_s for each in result.search.ranked[:1]), default=0.0)
            known_s = min(known_s, max(searched_s, result.plan.step_s))  # the others are held against these sums
    return min(found, key=lambda each: each[0].step_s) if found else None


def _num_devices(shapes: Mapping[str, Shape]) -> int:
    return sum(nodes * per_node for nodes, per_node in shapes.values())


def _joint_shapes(groups: Mapping[str, Job], left: Left, *, is_mixed: bool) -> list[dict[str, Shape]]:
    """What may be taken of every pool that has hosts, the most devices first."""
    if not is_mixed:
        return [{name: shape} for name, job in groups.items() for shape in _shapes(left[name], job)]
    shapes = [list(_parts(left[name], job))[:MOST_SHAPES] for name, job in groups.items()]
    joint = [dict(zip(groups, each, strict=True)) for each in itertools.product(*shapes)]
    return sorted(joint, key=lambda each: -_num_devices(each))


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


def _notice(plan: Plan, found: Plan, given_up: Sequence[str]) -> str:
    """What the new plan costs."""
    cost = ""
    if plan.prediction is not None:
        cost = f", predicted {format_seconds(plan.prediction.step_time_s)} → {format_seconds(found.step_s)} a step"
    dropped = f"; given up: {', '.join(given_up)}" if given_up else ""
    return (
        f"{plan.num_devices} → {format_plural(found.num_devices, 'device')}{cost} "
        f"({describe(found.pipeline)}; {summarise(found)}){dropped}"
    )


def left_without(job: Job, name: str) -> dict[str, tuple[int, ...]]:
    """The devices of each node that is left of each pool of a job when one of a pool loses a node.

    Where that pool is one node, it loses a device. Empty where nothing is left.
    """
    left = {}
    for cluster in (group.cluster for group in job.groups):
        nodes, per_node = cluster.num_nodes, cluster.devices_per_node
        if cluster.name == name:
            nodes, per_node = (nodes - 1, per_node) if nodes > 1 else (nodes, per_node - 1)
        left[cluster.name] = (per_node,) * nodes if per_node else ()
    return left if any(left.values()) else {}


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
        job_of(request_of_plan(plan, folder=folder))
    except UserError as error:
        raise type(error)(**error.parts() | {"field": f"--elastic: {error.field}"}) from error


RECUT_S = 10.0
"""Seconds that the search of a plan with a slow node may take."""


def slow_nodes(plan: Plan, request: PlanRequest, job: Job, path: str | Path) -> tuple[SlowNode, ...]:
    """Every rank that was slow in a recorded run of the plan, and the best plan without its node; none of an even run.

    Raises `InvalidRunError` for a record that cannot be read, is of another plan, or was written before ranks' own
    computation was measured.
    """
    record = parse_file(Path(path), RunRecord, InvalidRunError, what="record")
    return tuple(_slow_node(plan, request, job, slow) for slow in _slow_ranks(plan, record, Path(path)))


def _slow_ranks(plan: Plan, record: RunRecord, path: Path) -> tuple[SlowRank, ...]:
    ran = (record.config_hash, len(record.ranks), 1 + max(rank.stage for rank in record.ranks))
    if ran != (plan.chain().config_hash, plan.num_devices, plan.num_stages):
        raise InvalidRunError(
            field=f"--record {path}",
            found=f"a run of {record.model_name} on {ran[1]} ranks in {ran[2]} stages",
            expected=f"one of this plan: {plan.model.name} on {plan.num_devices} ranks in {plan.num_stages} stages",
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
    """The best plan found with the node of a slow rank as a pool of its own; of one node the devices of its stage.

    None where that pool would be all there is, with a measured profile and with pins, which several pools do not take,
    and where the best plan found leaves that pool out or takes it alone.
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
    """A slow rank's pool without its node, and that node; of one node its devices."""
    if cluster.num_nodes > 1:
        shapes = (cluster.num_nodes - 1, cluster.devices_per_node), (1, cluster.devices_per_node)
    else:
        size = min(plan.stages[slow.stage].num_devices, cluster.num_devices // 2)
        shapes = (1, cluster.num_devices - size), (1, size)
    whole, part = (with_shape(cluster, *shape) for shape in shapes)
    return whole, part.on(name=f"{part.name} {slow.factor:.1f} × as slow")
