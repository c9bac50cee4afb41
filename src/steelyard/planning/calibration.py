r"""One factor on all predicted times from measured runs: the median of $f = t_\text{measured} / t_\text{predicted}$.

A catalogue knows what devices and links can do, not what a machine room, a driver or a framework's version makes of it.
Most of that is common to all plans of a model on a device, so that one run scales the prediction of every other plan.
Of several runs the median is taken (of an even number the geometric mean of the middle two), which one odd run does not
move: published runs scaled by the median of three others are nearer than those by one (`steelyard.cost.accuracy`).
The factor leaves the order of plans as it is, but for what it does to the time of an optimizer or a step's overhead.

A run is given as the record that `steelyard train` writes, or as a file of these lines (YAML or JSON):

    version: 1
    plan: plan.json       # as `steelyard plan` wrote it; a relative path starts where this file lies
    step_time_s: 12.4     # median of the steps after the first few

A record holds the prediction of its plan; a plan in a file is predicted again with today's catalogue and profile.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from steelyard.cost.job import Job
from steelyard.cost.predict import predict
from steelyard.errors import UserError
from steelyard.files import parse_json, parse_yaml, read_text
from steelyard.hardware import is_same_device
from steelyard.limits import PositiveSeconds
from steelyard.plan.file import parse_value, read_plan
from steelyard.plan.plan import Plan
from steelyard.planning.request import PlanRequest, request_of_plan
from steelyard.profiles.profile import Profile
from steelyard.profiles.record import RunRecord


class InvalidRunError(UserError):
    """A measured run that cannot be read, or that says nothing about this job."""


class MeasuredRun(BaseModel):
    """What a user measured of a plan."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    version: Literal[1] = 1
    plan: str
    step_time_s: PositiveSeconds


JobOf = Callable[[PlanRequest], Job]
"""`steelyard.planning.job.job_of`, which calls this module."""


def calibrate(job: Job, paths: Sequence[Path], job_of: JobOf) -> Job:
    """The job with all times multiplied by what the runs in files took over what was predicted of them, by the median.

    Raises `InvalidRunError` for a file that is neither kind of run, a run of another model or device, a record of a
    plan that had no prediction, or a file that is given twice; `InvalidPlanError` for a plan file that cannot be read.
    """
    factors = [factor for _, factor in time_factors(job, paths, job_of)]
    return job.on(time_factor=math.exp(median(map(math.log, factors))), num_calibrating=len(factors))


def time_factors(job: Job, paths: Sequence[Path], job_of: JobOf) -> tuple[tuple[Path, float], ...]:
    """What each run took over what is predicted of it for this job; raises as `calibrate`."""
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
            factors.append((path, _factor_of_plan(job, run, path, job_of)))
        else:
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


def _factor_of_plan(job: Job, run: MeasuredRun, path: Path, job_of: JobOf) -> float:
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
    """Whether a profile holds what a prediction of the plan needs; what was traced holds for any number of devices."""
    identity = profile.identity
    strategies, chain = plan.strategies, plan.chain()
    held = all(profile.layer(chain.type_of(n).name, each.shape) for n, each in enumerate(strategies))
    alike = (identity.seq_len, identity.precision) == (plan.seq_len, plan.precision)
    return held and alike and (same_size or not identity.is_measured)


def _factor_of_record(job: Job, record: RunRecord, path: Path) -> float:
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
