r"""Job of a request: the model with a price for every layer, traced, measured or calibrated, on its devices.

**Profiles of one device, for plans on many** (`with_assumed_links`): layers have their measured costs, and links those
of the cluster. Layers in shapes that one device cannot have (tp above 1) are traced and priced by the catalogue's
rates, all scaled by

$$r = \frac{\sum_k n_k\, t_k^\text{measured}}{\sum_k n_k\, t_k^\text{catalogue}}$$

over the $n_k$ layers of each type $k$ of the model, so that all shapes are on one scale. A device without rates in the
catalogue has only its measured shape, so its plans have no tp. The following are assumed, not measured: all collectives
and transfers (the links of the cluster), the additional time at the end of a step with many devices, the slowdown of
overlapping compute and communication (`Profile.overlap_slowdown`), and on CPUs the cost of sharding a layer and the
sharing of a host's cores among processes.

**Calibration** (`calibrate`): one factor on all predicted times, the median of $f = t_\text{measured} /
t_\text{predicted}$ of measured runs. A catalogue knows the capabilities of devices and links, but not the effects of a
machine room, a driver or a framework's version. Most of these are common to all plans of a model on a device, so one
run scales the prediction of every other plan. Several runs give their median (for an even number, the geometric mean of
the middle two), which one odd run does not move: published runs scaled by the median of three others are predicted
better than with one (`steelyard.cost.accuracy`). The factor does not change the order of plans, except through an
optimizer's time or a step's overhead.

A run is given as the record that `steelyard train` writes, or as a file of these lines (YAML or JSON):

    version: 1
    plan: plan.json       # as `steelyard plan` wrote it; a relative path starts in the folder of this file
    step_time_s: 12.4     # median of the steps after the first few

A record contains the prediction of its plan. A plan in a file is predicted again with today's catalogue and profile.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from steelyard.cost.compute import compute_time
from steelyard.cost.efficiency import Efficiency, efficiency_of
from steelyard.cost.job import DeviceGroup, Job, layer_precision
from steelyard.cost.kernels import job_under
from steelyard.cost.predict import predict
from steelyard.engines.native import NATIVE
from steelyard.errors import InvalidProfileError, UserError
from steelyard.files import parse_json, parse_yaml, read_text
from steelyard.hardware import Cluster, Link, is_same_device, known_device
from steelyard.levers import LEVERS
from steelyard.levers.lever import AUTO
from steelyard.limits import PositiveSeconds
from steelyard.model.chain import ModelChain
from steelyard.plan.file import parse_value, read_plan
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import divisors
from steelyard.planning.request import MARGIN, MeasuredProfile, PlanRequest, request_of_plan
from steelyard.precision import Precision
from steelyard.profiles.profile import Profile
from steelyard.tracer.cache import cached_trace

if TYPE_CHECKING:
    from steelyard.profiles.record import RunRecord


class InvalidRunError(UserError):
    """Raised if a measured run cannot be read or says nothing about this job."""


class MeasuredRun(BaseModel):
    """A plan's step time as a user measured it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    version: Literal[1] = 1
    plan: str
    step_time_s: PositiveSeconds


def calibrate(job: Job, paths: Sequence[Path]) -> Job:
    """Return the job with all times scaled by the median ratio of measured to predicted time of the runs in files.

    Raises `InvalidRunError` for a file that is neither kind of run, a run of another model or device, a record of a
    plan that had no prediction, or a file that is given twice, and `InvalidPlanError` for a plan file that cannot be
    read.
    """
    factors = [factor for _, factor in time_factors(job, paths)]
    return job.on(time_factor=math.exp(median(map(math.log, factors))), num_calibrating=len(factors))


def time_factors(job: Job, paths: Sequence[Path]) -> tuple[tuple[Path, float], ...]:
    """Return the ratio of measured to predicted time of each run for this job. Raises as `calibrate`."""
    found: dict[Path, Path] = {}
    for path in paths:
        if path.resolve() in found:
            raise InvalidRunError(
                field="--calibrate",
                found=f"{path} twice",
                expected="each run once",
                hint="leave one out: a run counts no more for being named again",
            )
        found[path.resolve()] = path
    factors = []
    for path in found.values():
        content = _content(path)
        if isinstance(content, dict) and "plan" in content:
            run = parse_value(content, MeasuredRun, InvalidRunError, what="run")
            factors.append((path, _factor_of_plan(job, run, path)))
        else:
            from steelyard.profiles.record import RunRecord  # not needed without measured runs

            record = parse_value(content, RunRecord, InvalidRunError, what="run record")
            factors.append((path, _factor_of_record(job, record, path)))
    return tuple(factors)


def _content(path: Path) -> Any:
    try:
        text = read_text(path)
        return parse_json(text) if text.lstrip().startswith("{") else parse_yaml(text)
    except (OSError, ValueError) as error:
        raise InvalidRunError(
            field="--calibrate",
            found=f"{path}: {error}",
            expected="a run record of `steelyard train`, or a file with version, plan and step_time_s",
            hint="check the path",
        ) from error


def _factor_of_plan(job: Job, run: MeasuredRun, path: Path) -> float:
    plan = read_plan(path.parent / run.plan)
    _check_model(job, plan.chain().config_hash, path)
    same_size = plan.num_devices == job.cluster.num_devices
    only_named = plan.hardware is None and plan.cluster == job.cluster.name
    cluster = job.cluster if same_size and only_named else None
    profile = job.profile if _serves(job.profile, plan, same_size=same_size) else None
    folder = (path.parent / run.plan).parent
    ran = job_of(request_of_plan(plan, cluster=cluster, profile=profile, folder=folder))
    if ran.cluster.device.name != job.cluster.device.name:
        raise _other_device(job, ran.cluster.device.name, path)
    return run.step_time_s / predict(plan, ran.on(time_factor=1.0)).step_time_s


def _serves(profile: Profile, plan: Plan, *, same_size: bool) -> bool:
    """Return whether a profile suffices to predict the plan. A traced profile holds for any number of devices."""
    identity = profile.identity
    strategies, chain = plan.strategies, plan.chain()
    held = all(profile.layer(chain.type_of(n).name, each.shape) for n, each in enumerate(strategies))
    alike = (identity.seq_len, identity.precision) == (plan.seq_len, plan.precision)
    return held and alike and (same_size or not identity.is_measured)


def _factor_of_record(job: Job, record: "RunRecord", path: Path) -> float:
    _check_model(job, record.config_hash, path)
    if not is_same_device(record.device, job.cluster.device):
        raise _other_device(job, record.device, path)
    if record.predicted_step_s is None:
        raise InvalidRunError(
            field=f"{path}: predicted_step_s",
            found="nothing: the plan of this run had no prediction",
            expected="the record of a plan that `steelyard plan` wrote",
            hint="write a file with version, plan and step_time_s instead",
        )
    return record.median_step_s / (record.predicted_step_s / record.predicted_time_factor)


def _check_model(job: Job, config_hash: str, path: Path) -> None:
    if config_hash != job.chain.config_hash:
        raise InvalidRunError(
            field=f"{path}: model",
            found=f"a run of another model (config {config_hash[:12]})",
            expected=f"a run of {job.chain.name} (config {job.chain.config_hash[:12]})",
            hint="measure one run of this model, of any plan and length",
        )


def _other_device(job: Job, found: str, path: Path) -> InvalidRunError:
    return InvalidRunError(
        field=f"{path}: device",
        found=found,
        expected=f"a run on {job.cluster.device.name}, as in this job",
        hint="measure one run on such a device; another number of them will do",
    )


def with_assumed_links(job: Job, trace: Callable[[], Profile]) -> Job:
    """Return the job with everything that its profile of one device lacks. ``trace`` traces the model's layers in other
    shapes."""
    device, network = job.cluster.device, job.cluster.inter_link
    if device.needs_profile:
        return job
    measured = job.profile.shapes
    others = (layer for layer in trace().layers if frozenset(layer.degrees.items()) not in measured)
    profile = job.profile.model_copy(update={"layers": (*job.profile.layers, *others)})
    rates = efficiency_of(device.name, network.name if network else "")
    return job.on(profile=profile, rates=slowed(rates, measured_over_catalogue(job)))


def measured_over_catalogue(job: Job) -> float:
    """Ratio of the model's total layer time by the profile to that by the catalogue's rates."""
    seconds = {True: 0.0, False: 0.0}
    for number in range(job.chain.num_layers):
        layer = job.layer(job.chain.type_of(number).name, {})
        if layer is not None and layer.times:
            samples = layer.times[-1].samples
            for is_measured, each in ((True, layer), (False, layer.model_copy(update={"times": ()}))):
                found = compute_time(each, samples, job)
                backward_s = max(found.backward_s, found.backward_launch_s)
                seconds[is_measured] += float(max(found.forward_s, found.forward_launch_s) + backward_s)
    return seconds[True] / seconds[False] if seconds[False] else 1.0


def slowed(rates: Efficiency, factor: float) -> Efficiency:
    """Return the rates of a device on which every kernel takes ``factor`` times as long."""
    return replace(
        rates,
        matmul=rates.matmul / factor,
        operands=rates.operands * factor,
        attention=rates.attention / factor,
        memory=rates.memory / factor,
        ramp_s=rates.ramp_s * factor,
        launch_s=rates.launch_s * factor,
        traced_launch_s=rates.traced_launch_s * factor,
        traced_backward_launch_s=rates.traced_backward_launch_s * factor,
    )


def job_of(request: PlanRequest, degrees: Collection[int] | None = None) -> Job:
    """Return the job of a request on its device groups. Traces the model unless a profile is given.

    ``degrees`` are those that may divide layers; by default all that divide a node.

    Raises `InvalidProfileError` for a profile of another job, and `UserError` if levers are left to a search.
    """
    for name in request.searched:
        raise UserError(
            field=f"--{name}",
            found=AUTO,
            expected=f"one of {', '.join(LEVERS[name].values)} for what is priced",
            hint="see `steelyard plan` for what it chooses",
        )
    pairs = zip(request.cluster.pools, request.cluster.links, strict=True)
    job = Job.over([_job_on(request, degrees, *pair) for pair in pairs])
    return calibrate(job, request.calibration) if request.calibration else job


def _job_on(request: PlanRequest, degrees: Collection[int] | None, machines: Cluster, outer_link: Link | None) -> Job:
    """Return the job on one device group alone."""
    chain, seq_len, batch = request.chain, request.seq_len, request.global_batch
    assert seq_len is not None and batch is not None, "what is as large as fits is tried size by size"  # noqa: PT018
    budgeted = machines if request.memory_bytes is None else machines.with_memory(request.memory_bytes)
    budget = request.budgets.get(machines.name)
    traced = partial(
        cached_trace,
        chain,
        seq_len=seq_len,
        precision=layer_precision(request.precision),
        degrees=tuple(each for each in divisors(machines.devices_per_node) if degrees is None or each in degrees),
        own=request.own,
        with_products=request.levers.effects.matrices is not None,
        fp32_adapters=request.engine.running(request.levers, request.precision).execution.adapters == "fp32",
        gpu_kernels=machines.device.is_gpu,
    )
    given = request.profiles.get(machines.name)
    if given is not None:
        given = given._replace(profile=given.profile.for_devices(machines.num_devices))
        _check_profile(given.profile, chain, machines, seq_len, request.precision)
    known = given or MeasuredProfile(traced())
    has_shapes = given is None or request.levers.effects.matrices is None
    group = DeviceGroup(
        cluster=machines,
        profile=known.profile if has_shapes else _with_products(known.profile, traced()),
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
        levers=request.levers,
    )
    if budget is None:
        share = MARGIN if machines.device.is_gpu and request.memory_bytes is None else 0.0
        share = share if request.memory_margin is None else request.memory_margin
        margin = int(job.budget_bytes * share)
        job = job.within(job.budget_bytes - margin, margin_bytes=margin)
    job = with_assumed_links(job, traced) if job.assumes_links else job
    return job if request.engine == NATIVE else job_under(job, request.engine)


def _with_products(profile: Profile, traced: Profile) -> Profile:
    """Return a profile with the matrix product shapes of a trace, from which the profile has its operation counts.

    Measured profiles of packaged models have no such shapes.
    """
    layers = []
    for each in profile.layers:
        found = traced.layer(each.kind, each.degrees)
        shapes = {"products": found.forward.products} if found else {}
        layers.append(each.model_copy(update={"forward": each.forward.model_copy(update=shapes)}))
    return profile.model_copy(update={"layers": tuple(layers)})


def _check_profile(profile: Profile, chain: ModelChain, cluster: Cluster, seq_len: int, precision: Precision) -> None:
    identity = profile.identity
    wanted: list[tuple[str, object, object]] = [
        ("config_hash", identity.config_hash, chain.config_hash),
        ("differences", _in_words(identity.differences or ()), _in_words(chain.differences)),
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
    for field, found, expected in wanted:
        if found != expected:
            raise InvalidProfileError(
                field=f"identity.{field}",
                found=str(found),
                expected=f"{expected}, as in this job",
                hint="profile again for this model, its levers and what is frozen of it, this length, precision and "
                "device type, on as many devices, a multiple of them, or one",
            )


def _in_words(differences: Sequence[str]) -> str:
    return ", ".join(differences) or "all of the model trained"
