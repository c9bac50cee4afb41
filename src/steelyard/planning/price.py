"""What a given plan costs: for one written by hand, or to compare a chosen one with."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from steelyard.cost.accuracy import interval_of
from steelyard.cost.pools import AnyJob, PooledJob
from steelyard.cost.predict import PlanCost, predict
from steelyard.cost.setting import Job
from steelyard.errors import InvalidClusterError, InvalidProfileError, UserError
from steelyard.hardware import Cluster, MixedCluster, parse_cluster, parse_pools, with_network
from steelyard.hardware.parse import ClusterT
from steelyard.plan.certificate import Certificate
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import Alternative, PoolUse, Prediction
from steelyard.plan.stages import StagePart, fold_runs
from steelyard.plan.strategy import parse_strategy
from steelyard.planning.job import make_job, make_pooled_job
from steelyard.planning.margin import warnings_of
from steelyard.planning.plan_from_search import assemble_plan
from steelyard.planning.problem import microbatch_counts
from steelyard.planning.profile_file import recorded_profile
from steelyard.planning.walked_settings import Accepted
from steelyard.schedules import USUAL, PipelineConfig
from steelyard.units import format_seconds


class Elsewhere(TypedDict, total=False):
    """What takes the place of what a plan was made for; what is None or missing is as the plan has it."""

    cluster: str | Cluster | None
    network: str | None
    memory: str | int | None
    profile: Any
    """As `GivenProfiles`."""


def job_of(plan: Plan, *, folder: Path | None = None, **given: Unpack[Elsewhere]) -> Job:
    """The job that a plan is for: on its cluster within its budget, or on another one with the memory of that one.

    ``network`` takes the place of the link between nodes, ``memory`` of either budget. Times are scaled, and experts as
    uneven, as they were for the plan's prediction. On its own cluster a plan made from a measured profile has that
    profile, whose file is also looked for in the plan's ``folder``; raises `InvalidProfileError` where it is not there
    as it was.
    """
    cluster, memory, profile = given.get("cluster"), given.get("memory"), given.get("profile")
    machines = parse_cluster(cluster) if isinstance(cluster, str) else cluster or plan.machines()
    source = plan.prediction.profile if plan.prediction else None
    if profile is None and cluster is None and source is not None and source.is_measured:
        profile = recorded_profile(source, folder=folder)
    if memory is None and cluster is None and plan.prediction is not None:
        memory = plan.prediction.budget_bytes
    job = make_job(plan.chain(), _joined_by(machines, given), memory=memory, profile=profile, **_asked_by(plan))
    if plan.prediction is None:
        return job
    if job.budget_bytes == plan.prediction.budget_bytes:
        job = replace(job, margin_bytes=plan.prediction.margin_bytes)
    source = plan.prediction.profile
    return replace(job, time_factor=source.time_factor, num_calibrating=source.num_calibrating)


def pooled_job_of(plan: Plan, *, folder: Path | None = None, **given: Unpack[Elsewhere]) -> PooledJob:
    """The job that a plan over several pools is for, as `job_of` makes that of one pool.

    Raises `InvalidPlanError` where a pool of the plan is not one of the ``cluster``, and `UserError` where that has one
    pool alone.
    """
    cluster, memory, profile = given.get("cluster"), given.get("memory"), given.get("profile")
    machines = parse_pools(cluster) if isinstance(cluster, str) else cluster or plan.hardware_value()
    if not isinstance(machines, MixedCluster):
        raise UserError(
            field="--cluster",
            found=f"{machines.name} for a plan over {plan.cluster}",
            expected="the pools of the plan, or others of the same names",
            hint="leave --cluster out, or plan for this cluster",
        )
    known = {use.name: use for use in (plan.prediction and plan.prediction.pools) or ()}
    if profile is None and cluster is None:
        measured = {name: use.profile for name, use in known.items() if use.profile.is_measured}
        profile = {name: recorded_profile(each, folder=folder) for name, each in measured.items()}
    job = make_pooled_job(plan.chain(), _joined_by(machines, given), memory=memory, profile=profile, **_asked_by(plan))
    if cluster is None and memory is None:
        uses = [(pool, known.get(pool.cluster.name)) for pool in job.pools]
        pools = [
            replace(pool, budget_bytes=use.budget_bytes, margin_bytes=use.margin_bytes) if use else pool
            for pool, use in uses
        ]
        job = replace(job, pools=tuple(pools))
    job.jobs(plan)
    return job


def any_job_of(plan: Plan, *, folder: Path | None = None, **given: Unpack[Elsewhere]) -> AnyJob:
    """The job that a plan is for, of one pool or several; as `job_of` and `pooled_job_of`."""
    return (pooled_job_of if plan.is_mixed else job_of)(plan, folder=folder, **given)


def _joined_by(machines: ClusterT, given: Elsewhere) -> ClusterT:
    """The machines with the network between them that is given."""
    network = given.get("network")
    return machines if network is None else with_network(machines, network)


def _asked_by(plan: Plan) -> dict[str, Any]:
    """What a plan asks of `make_job`, on whatever cluster: its batch and length, and experts as uneven as predicted."""
    asked: dict[str, Any] = {"global_batch": plan.global_batch, "seq_len": plan.seq_len, "precision": plan.precision}
    imbalance = plan.prediction.profile.imbalance if plan.prediction else None
    return asked | {"memory_margin": 0} | ({} if imbalance is None else {"imbalance": imbalance})


def job_or_reason(plan: Plan, path: Path, **given: Unpack[Elsewhere]) -> AnyJob | str:
    """The job of the plan in a file, as `any_job_of` makes it, or why its costs are not at hand.

    The reason is for a prediction that stands without them: raises `UserError` where there is none, or where
    ``cluster``, ``network`` or ``profile`` is what was wrong.
    """
    try:
        return any_job_of(plan, folder=path.parent, **given)
    except (InvalidClusterError, InvalidProfileError) as error:
        if plan.prediction is None or any(given.get(name) for name in ("cluster", "network", "profile")):
            raise
        if isinstance(error, InvalidProfileError):
            return f"{error.found}; {error.hint}"
        return (
            f"the plan is for the cluster {plan.cluster!r}, which is not known here ({error.found}); add --cluster "
            "with the file or name of the cluster"
        )


def with_price(plan: Plan, job: AnyJob) -> Plan:
    """The plan with its prediction for a job of the same model and batch, which claims nothing of other plans."""
    return with_cost(plan, job, predict(plan, job))


def with_cost(plan: Plan, job: AnyJob, cost: PlanCost) -> Plan:
    """The plan with a prediction of this cost, and its whole training, if it has one, at this speed."""
    priced = plan.model_copy(update={"prediction": prediction_of(job, plan, cost, Certificate(status="priced"))})
    training = plan.training
    return priced if training is None else priced.with_training(training.tokens, price=training.price_per_device_hour)


def prediction_of(
    job: AnyJob,
    plan: Plan,
    cost: PlanCost,
    certificate: Certificate,
    *,
    lower_bound_s: float = 0.0,
    alternatives: tuple[Alternative, ...] = (),
    found: Sequence[Accepted] = (),
) -> Prediction:
    """What is predicted of a plan that has this cost, and what is proven of it.

    No measured runs are like those over several pools. Of a pool that the plan leaves out is said what the plans that
    were ``found`` with it take.
    """
    first, is_pooled = job.jobs(plan)[0], isinstance(job, PooledJob)
    return Prediction(
        step_time_s=cost.step_time_s,
        tokens_per_s_per_device=cost.tokens_per_s_per_device,
        mfu=cost.mfu,
        mfu_attention=cost.mfu_attention,
        warnings=warnings_of(job, plan, cost.stages),
        budget_bytes=job.budget_bytes,
        margin_bytes=0 if is_pooled else first.margin_bytes,
        stages=cost.stages,
        certificate=certificate,
        lower_bound_s=lower_bound_s,
        profile=first.cost_source(),
        backend=first.cluster.device.backend,
        interval=None if is_pooled else interval_of(first.cost_source(), plan.strategies, cost.step_time_s),
        alternatives=alternatives,
        pools=_pool_uses(job, plan, cost.step_time_s, found) if is_pooled else None,
    )


def _pool_uses(job: AnyJob, plan: Plan, step_time_s: float, found: Sequence[Accepted]) -> tuple[PoolUse, ...]:
    """The pools of a job as a plan uses them; the plans ``found`` say what those it leaves out would have cost."""
    names, own = plan.cluster.split("+"), job.jobs(plan)
    places = {name: place for place, name in enumerate(names)}
    return tuple(
        PoolUse(
            name=pool.cluster.name,
            num_devices=pool.cluster.num_devices,
            num_stages=sum(each is pool for each in own),
            budget_bytes=pool.budget_bytes,
            margin_bytes=pool.margin_bytes,
            profile=pool.cost_source(),
            reason=_why_left_out(pool.cluster.name, step_time_s, found)
            if found and pool.cluster.name not in places
            else None,
        )
        for pool in sorted(job.pools, key=lambda pool: places.get(pool.cluster.name, len(places)))
    )


def _why_left_out(name: str, step_time_s: float, found: Sequence[Accepted]) -> str:
    using = [each.outcome.score_s for each in found if name in each.plan.cluster.split("+")]
    if not using:
        return f"no plan with it that fits is known; none with it was found below {format_seconds(step_time_s)} a step"
    more = min(using) / step_time_s - 1
    return f"the fastest plan found with it takes {format_seconds(min(using))} a step, {more:.1%} more"


def uniform_plan(job: Job, strategy_text: str) -> Plan:
    """The plan of one stage that uses one strategy everywhere and, of all microbatch counts, takes the least memory."""
    strategy = parse_strategy(strategy_text)
    layers = job.chain.num_layers
    part = StagePart(ranks=(0, job.cluster.num_devices - 1), runs=fold_runs(0, (strategy,) * layers))
    best: Plan | None = None
    for count in microbatch_counts(job.global_batch):
        if (job.global_batch // count) % strategy.sample_degree:
            continue
        pipeline = PipelineConfig(num_stages=1, num_microbatches=count, schedule=USUAL)
        plan = with_price(assemble_plan(job, pipeline, (part,)), job)
        if best is None or peak_bytes(plan) < peak_bytes(best):
            best = plan
    if best is None:
        raise UserError(
            field="parallel",
            found=strategy_text,
            expected=f"a degree of samples that divides the batch of {job.global_batch}",
            hint="change the strategy or the batch",
        )
    return best


def peak_bytes(plan: Plan) -> int:
    """Bytes of the fullest device; 0 for a plan without prediction."""
    return max(stage.total_bytes for stage in plan.prediction.stages) if plan.prediction else 0
