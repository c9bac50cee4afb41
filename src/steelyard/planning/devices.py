"""Another number of devices of the same sort: divisors of a node on one node, beyond that whole nodes."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from steelyard.cost.job import Job
from steelyard.errors import InvalidClusterError, UserError
from steelyard.hardware import Cluster, is_as_named, parse_cluster
from steelyard.plan.strategy import divisors
from steelyard.planning.choose import PlanningResult, plan_job, plan_request
from steelyard.planning.problem import is_beaten, make_tables
from steelyard.planning.request import PlanRequest
from steelyard.units import format_plural, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class FewestDevices:
    """Device counts tried from the fewest upwards, and the plan on the first of them that holds one."""

    tried: tuple[tuple[int, str], ...]
    """A device count and why no plan was found on so many; empty for the one that was taken."""
    result: PlanningResult

    def lines(self) -> list[str]:
        """Return a line for each count that was tried: why it does not do, or that it does."""
        return [
            f"{format_plural(count, 'device')}: {f'does not fit: {reason}' if reason else 'fits'}"
            for count, reason in self.tried
        ]


def device_counts(cluster: Cluster) -> tuple[int, ...]:
    """Counts that a part of this cluster may have: the divisors of a node, then whole nodes; rising."""
    size = cluster.devices_per_node
    return (*divisors(size)[:-1], *(nodes * size for nodes in range(1, cluster.num_nodes + 1)))


def doubled_counts(cluster: Cluster) -> tuple[int, ...]:
    """A few counts around that of the cluster for comparison: from a quarter to twice as many, by factors of two."""
    count = cluster.num_devices
    return tuple(each for each in (count // 4, count // 2, count, 2 * count) if _is_possible(cluster, each))


def with_devices(cluster: Cluster, count: int) -> Cluster:
    """The same sort of cluster with ``count`` devices; raises `InvalidClusterError` where nodes cannot give so many."""
    size = cluster.devices_per_node
    if count == cluster.num_devices:
        return cluster
    if not _is_possible(cluster, count):
        parts = ", ".join(map(str, divisors(size)[:-1]))
        raise InvalidClusterError(
            field="devices",
            found=str(count),
            expected=f"a multiple of the {size} devices of a node" + (f", or {parts}" if parts else ""),
            hint="name counts such as --devices " + ",".join(str(nodes * size) for nodes in (1, 2, 4)),
        )
    return with_shape(cluster, *((1, count) if count < size else (count // size, size)))


def with_shape(cluster: Cluster, nodes: int, per_node: int) -> Cluster:
    """The same sort of cluster with so many nodes and devices of each."""
    size = cluster.devices_per_node
    if is_as_named(cluster):
        return parse_cluster(f"{nodes}x{per_node}x{cluster.device.name}").on(device=cluster.device)
    is_short = cluster.name == f"{cluster.num_nodes}x{size}x{cluster.device.name}"
    name = f"{nodes}x{per_node}x{cluster.device.name}" if is_short else f"{cluster.name} ({nodes}x{per_node})"
    return cluster.on(name=name, num_nodes=nodes, devices_per_node=per_node)


def job_on(job: Job, count: int) -> Job:
    """The same job on ``count`` devices; raises `UserError` where its profile was measured on another number."""
    if job.has_measured_links and count != job.cluster.num_devices:
        raise UserError(
            field="--devices",
            found=str(count),
            expected=f"{job.cluster.num_devices}, on which the profile was measured",
            hint="leave --profile out to have other device counts priced by the catalogue",
        )
    return job.on(cluster=with_devices(job.cluster, count))


def plan_fewest_devices(
    request: PlanRequest, job: Job, *, progress: Callable[[str], None] = lambda _: None
) -> FewestDevices:
    """Return the fastest plan on the fewest devices of a request's cluster that hold any, or that none does.

    ``job`` is that of the request.
    """
    tried: list[tuple[int, str]] = []
    counts = (job.cluster.num_devices,) if job.has_measured_links else device_counts(job.cluster)
    for count in counts:
        progress(f"planning for {format_plural(count, 'device')}")
        result = plan_or_reason(job_on(job, count), request)
        if isinstance(result, str):
            tried.append((count, result))
            continue
        tried.append((count, result.miss_text))
        if result.plan is not None:
            return FewestDevices(tried=tuple(tried), result=result)
    return FewestDevices(tried=tuple(tried), result=plan_request(request, job))


def plan_or_reason(
    job: Job, request: PlanRequest, *, known_s: float = math.inf, to_the_end: bool = True
) -> PlanningResult | str:
    """Return the plan of a request's job on other devices, or why its decisions or ``known_s`` leave none.

    No plan takes less than ``known_s`` seconds where that shows without a search.
    """
    decisions, limit_s = request.decisions, request.time_limit_s
    try:
        tables = make_tables(job, decisions)
        if known_s < math.inf and is_beaten(job, tables, known_s):
            return f"no plan takes less than {format_seconds(known_s)} a step"
        top = request.num_alternatives
        return plan_job(job, decisions, top=top, time_limit_s=limit_s, tables=tables, to_the_end=to_the_end)
    except UserError as error:
        if error.field not in ("num_stages", "num_microbatches"):
            raise
        return f"{error.field} is fixed at {error.found}, which is not {error.expected}"


def _is_possible(cluster: Cluster, count: int) -> bool:
    size = cluster.devices_per_node
    return count >= 1 and (size % count == 0 if count < size else count % size == 0)
