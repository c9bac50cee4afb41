"""What a slow rank of a run costs, and what planning without its node would gain.

A rank holds up its stage, so its factor scales what the stage computes in every pass of the simulated step.
"""

from pathlib import Path

from steelyard.cost.predict import predict
from steelyard.cost.setting import Job
from steelyard.plan.choices import SlowNode
from steelyard.plan.file import parse_file
from steelyard.plan.plan import Plan
from steelyard.planning.calibration import InvalidRunError
from steelyard.planning.demands import demands_of
from steelyard.planning.elastic import fastest_plan, hosts_without
from steelyard.planning.plan_from_search import describe, summarise
from steelyard.profiles.record import RunRecord
from steelyard.profiles.slowness import SLOW_SHARE, OwnWork, SlowRank, slow_ranks


def slow_nodes(plan: Plan, job: Job, path: str | Path) -> tuple[SlowNode, ...]:
    """Every rank that was slow in a recorded run of the plan, and the best plan without its node; none of an even run.

    Raises `InvalidRunError` for a record that cannot be read, is of another plan, or was written before ranks' own
    computation was measured.
    """
    record = parse_file(Path(path), RunRecord, InvalidRunError, what="record")
    return tuple(_slow_node(plan, job, slow) for slow in _slow_ranks(plan, record, Path(path)))


def _slow_ranks(plan: Plan, record: RunRecord, path: Path) -> tuple[SlowRank, ...]:
    ran = (record.config_hash, len(record.ranks), 1 + max(rank.stage for rank in record.ranks))
    if ran != (plan.chain().config_hash, plan.num_devices, plan.num_stages):
        raise InvalidRunError(
            field=f"--record {path}",
            found=f"a run of {record.model_name} on {ran[1]} ranks in {ran[2]} stages",
            expected=f"one of this plan: {plan.model.name} on {plan.num_devices} ranks in {plan.num_stages} stages",
            hint="give the record that `train --record` wrote under this plan",
        )
    work = [
        OwnWork(rank=each.rank, stage=each.stage, host=each.host, own_s=each.own_s)
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


def _slow_node(plan: Plan, job: Job, slow: SlowRank) -> SlowNode:
    slowed_s = predict(plan, job, slowed={slow.stage: slow.factor}).step_time_s
    demands = demands_of(plan.asked, num_layers=job.chain.num_layers)
    hosts = hosts_without(job.cluster, 1)
    best = fastest_plan(job, hosts, demands) if hosts else None
    without = None if best is None else best[0]
    step_s = without.prediction.step_time_s if without is not None and without.prediction is not None else None
    return SlowNode(
        rank=str(slow),
        step_time_s=predict(plan, job).step_time_s,
        slowed_step_s=slowed_s,
        without_step_s=step_s,
        cluster="" if without is None else without.cluster,
        setting="" if without is None else describe(without.pipeline),
        strategies="" if without is None else summarise(without),
    )
