"""The plan for what is left of a cluster, or has come back: the same search for the same job on other devices.

Model, global batch, sequence length, memory per device and the source of all costs stay. Hosts may have lost devices
unequally while a plan is for equal nodes, so a candidate takes as many devices from each of as many hosts as have them.
The fastest candidate is taken of those with at least half of the devices of the largest that has a plan: five devices
often have a plan that is slower than that of four. What was asked of the plan is kept where any candidate can have it.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from steelyard.cost.setting import Job
from steelyard.errors import UserError
from steelyard.hardware import Cluster
from steelyard.plan.plan import Plan, Spare
from steelyard.plan.replanned import Replanned
from steelyard.planning.choose import NUM_RESCORED, NothingFitsError
from steelyard.planning.demands import Demand, demands_of, narrowed
from steelyard.planning.devices import plan_or_reason, with_shape
from steelyard.planning.plan_from_search import describe, summarise
from steelyard.planning.price import job_of
from steelyard.planning.problem import PlanOptions
from steelyard.units import format_bytes, format_plural, format_seconds

MOST_S = 1.0
"""Seconds after which no other candidate is searched once a plan is found. A search itself is not cut short: for a
second less before the run goes on, every step after it might take longer."""
LEAST_SHARE = 0.5
"""Of the devices of the largest candidate that has a plan, what a candidate must have."""


def replan(plan: Plan, hosts: Sequence[int], folder: Path) -> Replanned:
    """The plan for hosts with so many processes each, and which of them take part.

    ``folder`` is that of the plan's file, beside which its profile may lie. The plan itself where it has its devices, a
    plan that it holds for this loss, or else one that is searched. Raises `NothingFitsError` where no part of the
    devices has a plan, and another `UserError` where the plan's costs are not at hand or its devices are in pools.
    """
    _check_one_pool(plan)
    if sum(hosts) == plan.num_devices:
        return Replanned(plan=plan, taken=tuple(hosts))
    made = _made_before(plan, hosts)
    if made is not None:
        return made
    job = job_of(plan, folder=folder)
    demands = demands_of(plan.asked, num_layers=job.chain.num_layers)
    best, given_up = fastest_plan(job, hosts, demands), ()
    if best is None and demands:
        best, given_up = fastest_plan(job, hosts, ()), demands
    if best is None:
        raise NothingFitsError(
            field="--elastic",
            found=f"{format_plural(sum(hosts), 'device')} left, no part of which has a plan for a global batch of "
            f"{job.global_batch} within {format_bytes(job.budget_bytes)}",
            expected="devices enough for the model",
            hint="the last checkpoint is whole: start again when devices are back, or with a plan for fewer of them",
        )
    found, shape = best
    return Replanned(
        plan=found,
        taken=_taken(hosts, shape, has_hosts=job.cluster.num_nodes > 1),
        notice=_notice(plan, found, given_up),
    )


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


def fastest_plan(job: Job, hosts: Sequence[int], demands: Sequence[Demand]) -> tuple[Plan, tuple[int, int]] | None:
    """The fastest plan on a part of these hosts, with the nodes and the devices of each that it takes."""
    options = narrowed(PlanOptions(), demands)
    began_s, known_s = time.monotonic(), math.inf
    found: list[tuple[Plan, tuple[int, int]]] = []
    for nodes, per_node in _shapes(hosts, job):
        if found and (nodes * per_node < LEAST_SHARE * found[0][0].num_devices or time.monotonic() > began_s + MOST_S):
            break
        result = plan_or_reason(
            replace(job, cluster=with_shape(job.cluster, nodes, per_node)), options, top=NUM_RESCORED, known_s=known_s
        )
        if not isinstance(result, str) and result.plan is not None:
            found.append((result.plan, (nodes, per_node)))
            searched_s = result.search.ranked[0].score_s  # by the sums that the others are held against
            known_s = min(known_s, max(searched_s, _step_s(result.plan)))
    return min(found, key=lambda each: _step_s(each[0])) if found else None


def _shapes(hosts: Sequence[int], job: Job) -> Iterator[tuple[int, int]]:
    """Nodes and devices of each, the most devices first, where the first host takes part: it holds the store.

    A cluster of one node has no link between nodes, so that all devices count as those of one.
    """
    if job.cluster.num_nodes == 1:
        yield from ((1, count) for count in range(sum(hosts), 0, -1))
        return
    sizes = range(1, hosts[0] + 1) if len(hosts) == 1 else sorted({min(each, hosts[0]) for each in hosts})
    shapes = {(nodes, size) for size in sizes for nodes in range(1, sum(each >= size for each in hosts) + 1)}
    yield from sorted(shapes, key=lambda shape: (-shape[0] * shape[1], shape))


def _taken(hosts: Sequence[int], shape: tuple[int, int], *, has_hosts: bool) -> tuple[int, ...]:
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
    """The plan with those among its spares for one device less on a host, and for one host less.

    Where what was asked of the plan would have to be given up there is none: what is given up is said when it is.
    ``hosts`` and ``folder`` as in `replan`, which raises the same errors.
    """
    _check_one_pool(plan)
    job = job_of(plan, folder=folder)
    demands = demands_of(plan.asked, num_layers=job.chain.num_layers)
    for left in _likely_losses(hosts):
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


def _check_one_pool(plan: Plan) -> None:
    """Raises `UserError` for a plan over unlike pools: which host is of which pool, no rendezvous tells."""
    if plan.is_mixed:
        raise UserError(
            field="--elastic",
            found=f"a plan over {len(plan.pools())} pools of unlike devices ({plan.cluster})",
            expected="a plan for one kind of device: of a lost host nobody tells of which pool it was",
            hint="train without --elastic, with --restarts; where a host is lost for good, plan for the pools that are "
            "left and resume from the checkpoints under that plan",
        )


def _as_spare(plan: Plan, *, num_left: int) -> Spare:
    prediction = plan.prediction.model_copy(update={"alternatives": ()}) if plan.prediction else None
    own = {name: getattr(plan, name) for name in Spare.model_fields if name in Plan.model_fields}
    return Spare(**own | {"prediction": prediction, "num_left": num_left})


def check_replannable(plan: Plan, folder: Path) -> None:
    """Raises `UserError` for a plan for which none could be found for what is left: its costs are not at hand, or its
    devices are in several pools."""
    _check_one_pool(plan)
    try:
        job_of(plan, folder=folder)
    except UserError as error:
        raise type(error)(
            field=f"--elastic: {error.field}", found=error.found, expected=error.expected, hint=error.hint
        ) from error
