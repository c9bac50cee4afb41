r"""From a request to its job: the model with a price for every layer, traced or measured, on the devices at hand.

Measured on one device, for plans on many (`with_assumed_links`): layers cost what was measured, links what the cluster
says. Layers in shapes that one device cannot have (tp above 1) are traced and priced by the catalogue's rates, all
scaled by

$$r = \frac{\sum_k n_k\, t_k^\text{measured}}{\sum_k n_k\, t_k^\text{catalogue}}$$

over the $n_k$ layers of each type $k$ of the model, so that shapes compare as one kind of measurement. A device without
rates in the catalogue has its measured shape alone, and its plans no tp.

Not measured, and assumed: every collective and transfer (the links of the cluster), what the end of a step takes with
many devices beyond what it takes with one, compute and communication side by side (`Profile.overlap_slowdown`), and on
CPUs what sharding a layer adds and how processes of one host share its cores.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from steelyard.cost.compute import compute_time
from steelyard.cost.efficiency import Efficiency, efficiency_of
from steelyard.cost.job import DeviceGroup, Job
from steelyard.errors import InvalidProfileError
from steelyard.hardware import Cluster, Link, is_same_device, known_device
from steelyard.model.chain import ModelChain
from steelyard.plan.plan import Precision
from steelyard.plan.strategy import divisors
from steelyard.planning.request import MARGIN, MeasuredProfile, PlanRequest
from steelyard.profiles.profile import LayerProfile, Profile
from steelyard.tracer.cache import cached_trace


def with_assumed_links(job: Job, trace: Callable[[], Profile]) -> Job:
    """The job with all that its profile of one device lacks; ``trace`` counts the model's layers in other shapes."""
    device, network = job.cluster.device, job.cluster.inter_link
    if device.needs_profile:
        return job
    measured = job.profile.shapes
    others = (layer for layer in trace().layers if frozenset(layer.degrees.items()) not in measured)
    profile = job.profile.model_copy(update={"layers": (*job.profile.layers, *others)})
    rates = efficiency_of(device.name, network.name if network else "")
    return job.on(profile=profile, rates=slowed(rates, measured_over_catalogue(job)))


def measured_over_catalogue(job: Job) -> float:
    """What the layers of the model take together by the profile, over what the catalogue's rates say of them."""
    seconds = {True: 0.0, False: 0.0}
    for number in range(job.chain.num_layers):
        layer = job.layer(job.chain.type_of(number).name, {})
        if layer is not None and layer.times:
            samples = layer.times[-1].samples
            for is_measured, each in ((True, layer), (False, layer.model_copy(update={"times": ()}))):
                seconds[is_measured] += _both_ways_s(each, samples, job)
    return seconds[True] / seconds[False] if seconds[False] else 1.0


def _both_ways_s(layer: LayerProfile, samples: float, job: Job) -> float:
    found = compute_time(layer, samples, job)
    return float(max(found.forward_s, found.forward_launch_s) + max(found.backward_s, found.backward_launch_s))


def slowed(rates: Efficiency, factor: float) -> Efficiency:
    """The rates with which every kernel of a device takes ``factor`` times as long."""
    return replace(
        rates,
        matmul=rates.matmul / factor,
        operands=rates.operands * factor,
        attention=rates.attention / factor,
        memory=rates.memory / factor,
        ramp_s=rates.ramp_s * factor,
        launch_s=rates.launch_s * factor,
    )


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
        share = MARGIN if machines.device.is_gpu and request.memory_bytes is None else 0.0
        share = share if request.memory_margin is None else request.memory_margin
        margin = int(job.budget_bytes * share)
        job = job.within(job.budget_bytes - margin, margin_bytes=margin)
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
