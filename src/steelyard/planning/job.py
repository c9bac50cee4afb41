"""From a request to its job: the model with a price for every layer, traced or measured, on the devices at hand."""

from functools import partial

from steelyard.cost.job import DeviceGroup, Job
from steelyard.errors import InvalidProfileError
from steelyard.hardware import Cluster, Link, is_same_device, known_device
from steelyard.model.chain import ModelChain
from steelyard.plan.plan import Precision
from steelyard.plan.strategy import divisors
from steelyard.planning.assumed_links import with_assumed_links
from steelyard.planning.margin import with_margin
from steelyard.planning.request import MeasuredProfile, PlanRequest
from steelyard.profiles.profile import Profile
from steelyard.tracer.cache import cached_trace


def job_of(request: PlanRequest) -> Job:
    """Return the job of a request on its device groups. Traces the model unless a profile is given.

    Raises `InvalidProfileError` for a profile of another job.
    """
    pairs = zip(request.cluster.pools, request.cluster.links, strict=True)
    job = Job.over([_job_on(request, *pair) for pair in pairs])
    if not request.calibration:
        return job
    from steelyard.planning.calibration import calibrate

    return calibrate(job, request.calibration, job_of)


def _job_on(request: PlanRequest, machines: Cluster, outer_link: Link | None) -> Job:
    """The job on one group of devices alone."""
    chain, seq_len, batch = request.chain, request.seq_len, request.global_batch
    assert seq_len is not None and batch is not None, "what is as large as fits is tried size by size"  # noqa: PT018
    budgeted = machines if request.memory_bytes is None else machines.with_memory(request.memory_bytes)
    budget = request.budgets.get(machines.name)
    traced = partial(
        cached_trace,
        chain,
        seq_len=seq_len,
        precision=request.precision,
        degrees=divisors(machines.devices_per_node),
        own=request.own,
    )
    given = request.profiles.get(machines.name)
    if given is not None:
        _check_profile(given.profile, chain, machines, seq_len, request.precision)
    known = given or MeasuredProfile(traced())
    group = DeviceGroup(
        cluster=machines,
        profile=known.profile,
        budget_bytes=budget.num_bytes if budget else budgeted.device.known_memory_bytes(),
        margin_bytes=budget.margin_bytes if budget else 0,
        time_factor=request.time_factor,
        num_calibrating=request.num_calibrating,
        profile_file=known.file,
        outer_link=outer_link,
    )
    job = Job(
        chain=chain,
        groups=(group,),
        seq_len=seq_len,
        global_batch=batch,
        precision=request.precision,
        imbalance=request.imbalance,
    )
    if budget is None:
        job = with_margin(job, request.memory_margin, is_asked=request.memory_bytes is not None)
    return with_assumed_links(job, traced) if job.assumes_links else job


def _check_profile(profile: Profile, chain: ModelChain, cluster: Cluster, seq_len: int, precision: Precision) -> None:
    identity = profile.identity
    wanted: list[tuple[str, object, object]] = [
        ("config_hash", identity.config_hash, chain.config_hash),
        ("seq_len", identity.seq_len, seq_len),
        ("precision", identity.precision, precision),
    ]
    if identity.device_kind is not None:
        wanted.append(("device_kind", identity.device_kind, cluster.device.type))
    if identity.is_measured and identity.num_devices > 1:
        wanted.append(("num_devices", identity.num_devices, cluster.num_devices))
    is_named = known_device(cluster.device.name) is not None
    if identity.is_measured and is_named and not is_same_device(identity.device, cluster.device):
        wanted.append(("device", identity.device, cluster.device.name))
    missing = [
        layer_type.name
        for layer_type in chain.layer_types
        if layer_type.likeness and profile.layer(layer_type.name, {}) is None
    ]
    if missing:
        raise InvalidProfileError(
            field="layers",
            found=f"none of the {missing[0]}: the profile was measured with everything trained",
            expected=f"a job that trains all of {chain.name}",
            hint="freeze nothing, or leave the profile out",
        )
    for field, found, expected in wanted:
        if found != expected:
            raise InvalidProfileError(
                field=f"identity.{field}",
                found=str(found),
                expected=f"{expected}, as in this job",
                hint="profile again for this model, length, precision and device type, on as many devices or on one",
            )
