"""What a slow rank of a run costs, and what planning around it would gain: with its node slower, or without it.

A rank holds up its stage, so its factor scales what the stage computes in every pass of the simulated step. A plan that
is cut for it has its node as a pool of its own, all of which is taken to be as slow as the rank: nobody measured which
stages the other ranks of the node could have had. The search takes the node's collectives to be as slow as well (one
factor scales all times of a pool), the price of what it finds does not, so that a plan that is better still may exist.
"""

from dataclasses import replace
from pathlib import Path

from steelyard.cost.job import Job
from steelyard.cost.predict import predict
from steelyard.hardware import Cluster
from steelyard.plan.choices import Recut, SlowNode
from steelyard.plan.decisions import FREE
from steelyard.plan.file import parse_file
from steelyard.plan.plan import Plan
from steelyard.planning.calibration import InvalidRunError
from steelyard.planning.choose import plan_job
from steelyard.planning.devices import with_shape
from steelyard.planning.elastic import fastest_on, left_without
from steelyard.planning.plan_from_search import describe, summarise
from steelyard.planning.request import PlanRequest
from steelyard.profiles.record import SLOW_SHARE, OwnWork, RunRecord, SlowRank, slow_ranks

MOST_S = 10.0
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
    left = left_without(job, slow.pool or plan.cluster, 1)
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
    found = plan_job(Job.over([whole, as_slow, *others]), decisions, time_limit_s=MOST_S).plan
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
