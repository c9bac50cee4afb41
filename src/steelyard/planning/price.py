"""What a given plan costs: for one written by hand, or to compare a chosen one with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from steelyard.cost.accuracy import interval_of
from steelyard.cost.job import Job
from steelyard.cost.predict import PlanCost, predict
from steelyard.errors import InvalidClusterError, InvalidProfileError, UserError
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import Alternative, Certificate, PoolUse, Prediction
from steelyard.plan.stages import StagePart, fold_runs
from steelyard.plan.strategy import parse_strategy
from steelyard.planning.job import job_of
from steelyard.planning.margin import warnings_of
from steelyard.planning.plan_from_search import assemble_plan
from steelyard.planning.problem import microbatch_counts
from steelyard.planning.request import Elsewhere, PlanRequest, request_of_plan
from steelyard.schedules import USUAL, PipelineConfig
from steelyard.units import format_seconds


def priced_or_reason(plan: Plan, path: Path, **given: Unpack[Elsewhere]) -> tuple[PlanRequest, Job] | str:
    """Return the request of the plan in a file and its job, or why its costs are not at hand.

    The reason is for a prediction that stands without them: raises `UserError` where there is none, or where
    ``cluster``, ``network`` or ``profile`` is what was wrong.
    """
    try:
        request = request_of_plan(plan, folder=path.parent, **given)
        job = job_of(request)
    except (InvalidClusterError, InvalidProfileError) as error:
        if plan.prediction is None or any(given.get(name) for name in ("cluster", "network", "profile")):
            raise
        if isinstance(error, InvalidProfileError):
            return f"{error.found}; {error.hint}"
        return (
            f"the plan is for the cluster {plan.cluster!r}, which is not known here ({error.found}); add --cluster "
            "with the file or name of the cluster"
        )
    job.used_by(plan)
    return request, job


def with_price(plan: Plan, job: Job) -> Plan:
    """The plan with its prediction for a job of the same model and batch, which claims nothing of other plans."""
    return with_cost(plan, job, predict(plan, job))


def with_cost(plan: Plan, job: Job, cost: PlanCost) -> Plan:
    """The plan with a prediction of this cost, and its whole training, if it has one, at this speed."""
    priced = plan.model_copy(update={"prediction": prediction_of(job, plan, cost, Certificate(status="priced"))})
    training = plan.training
    return priced if training is None else priced.with_training(training.tokens, price=training.price_per_device_hour)


def prediction_of(
    job: Job,
    plan: Plan,
    cost: PlanCost,
    certificate: Certificate,
    *,
    lower_bound_s: float = 0.0,
    alternatives: tuple[Alternative, ...] = (),
    found: Sequence[tuple[Plan, float]] = (),
) -> Prediction:
    """What is predicted of a plan that has this cost, and what is proven of it.

    No measured runs are like those over several pools. A pool that the plan leaves out is said to cost what the plans
    ``found`` with it take, each given with the seconds of its step.
    """
    first, is_mixed = job.jobs(plan)[0], job.is_mixed
    return Prediction(
        step_time_s=cost.step_time_s,
        tokens_per_s_per_device=cost.tokens_per_s_per_device,
        mfu=cost.mfu,
        mfu_attention=cost.mfu_attention,
        warnings=warnings_of(job, plan, cost.stages),
        budget_bytes=job.budget_bytes,
        margin_bytes=0 if is_mixed else first.margin_bytes,
        stages=cost.stages,
        certificate=certificate,
        lower_bound_s=lower_bound_s,
        profile=first.cost_source(),
        backend=first.cluster.device.backend,
        interval=None if is_mixed else interval_of(first.cost_source(), plan.strategies, cost.step_time_s),
        alternatives=alternatives,
        pools=_pool_uses(job, plan, cost.step_time_s, found) if is_mixed else None,
    )


def _pool_uses(job: Job, plan: Plan, step_time_s: float, found: Sequence[tuple[Plan, float]]) -> tuple[PoolUse, ...]:
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
        for pool in sorted(job.by_group, key=lambda pool: places.get(pool.cluster.name, len(places)))
    )


def _why_left_out(name: str, step_time_s: float, found: Sequence[tuple[Plan, float]]) -> str:
    using = [step_s for plan, step_s in found if name in plan.cluster.split("+")]
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
