"""Plans as values: built from a search result or a named strategy, priced by the simulator, described in words.

A prediction carries warnings: those of the model, and one if a device is so full that its allocator may slow steps.
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Unpack

from steelyard.cost.accuracy import interval_of
from steelyard.cost.fold import unfold_layers, unfold_parts
from steelyard.cost.job import Job
from steelyard.cost.predict import PlanCost, predict
from steelyard.cost.tables import CostTables
from steelyard.engines.native import NATIVE
from steelyard.errors import InvalidClusterError, InvalidProfileError, UserError
from steelyard.hardware import hardware_file
from steelyard.plan.plan import Plan, PlanModel
from steelyard.plan.prediction import Alternative, Certificate, HostUse, PoolUse, Prediction, StagePrediction
from steelyard.plan.stages import StagePart, fold_runs, stages_of
from steelyard.plan.strategy import parse_strategy
from steelyard.planning.job import job_of
from steelyard.planning.problem import microbatch_counts
from steelyard.planning.request import MARGIN, Elsewhere, PlanRequest, request_of_plan
from steelyard.schedules import USUAL, PipelineConfig
from steelyard.search.evaluate import Solution
from steelyard.units import format_bytes, format_plural, format_seconds


def bare_plan(job: Job, tables: CostTables, solution: Solution) -> Plan:
    """Return the plan of a solution of these tables, without its prediction."""
    pipeline, num_layers = tables.pipeline, job.chain.num_layers
    folded = [tables.strategies[index] for index in solution.strategies]
    strategies = unfold_layers(folded, pipeline.num_chunks, num_layers, is_v=pipeline.is_v)
    cuts = list(unfold_parts(solution.boundaries, pipeline.num_chunks, num_layers, is_v=pipeline.is_v))
    ends = list(accumulate(strategies[first].num_devices for _, first, _ in cuts[: pipeline.num_stages]))
    parts = tuple(
        StagePart(
            ranks=(ends[stage - 1] if stage else 0, ends[stage] - 1), runs=fold_runs(first, strategies[first:end])
        )
        for stage, first, end in cuts
    )
    used = job if tables.pools is None else Job.over([job.by_group[place] for place in tables.pools.order])
    return assemble_plan(used, pipeline, parts)


def assemble_plan(job: Job, pipeline: PipelineConfig, parts: Sequence[StagePart]) -> Plan:
    """Return the plan of a job on all its devices with these pipeline parts, without its prediction."""
    chain, cluster = job.chain, job.hardware
    return Plan(
        model=PlanModel(
            name=chain.name,
            config=dict(chain.config) or None,
            config_hash=chain.config_hash,
            split=chain.split,
            frozen=chain.freeze,
        ),
        cluster=cluster.name,
        hardware=hardware_file(cluster),
        seq_len=job.seq_len,
        global_batch=job.global_batch,
        num_microbatches=pipeline.num_microbatches,
        precision=job.precision,
        schedule=pipeline.schedule.name,
        engine=engine_name(job),
        levers=job.levers.texts,
        stages=stages_of(parts),
    )


def engine_name(job: Job) -> str | None:
    """Return the name of a job's engine in a plan; None for our own."""
    return None if job.engine == NATIVE else job.engine.name


def describe(pipeline: PipelineConfig, *, stages: str | None = None) -> str:
    """Describe a pipeline configuration, as in ``2 stages, 16 microbatches``, with the schedule if there are several
    stages.

    ``stages`` replaces the number of stages by a longer text.
    """
    if stages is None:
        chunks = f" of {pipeline.num_chunks} chunks" if pipeline.num_chunks > 1 else ""
        stages = format_plural(pipeline.num_stages, "stage") + chunks
    microbatches = format_plural(pipeline.num_microbatches, "microbatch", "microbatches")
    words = pipeline.schedule.words if pipeline.num_stages > 1 else ""
    return f"{stages}, {microbatches}" + (f", {words}" if words else "")


def summarise(plan: Plan) -> str:
    """Describe the two most common strategies of a plan, and the number of layers with another one."""
    counts: dict[str, int] = {}
    for strategy in plan.strategies:
        counts[str(strategy)] = counts.get(str(strategy), 0) + 1
    most = sorted(counts.items(), key=lambda item: -item[1])[:2]
    others = len(plan.strategies) - sum(count for _, count in most)
    named = [f"{text} ×{count}" for text, count in most]
    return ", ".join([*named, format_plural(others, "other")] if others else named)


def priced_or_reason(plan: Plan, path: Path, **given: Unpack[Elsewhere]) -> tuple[PlanRequest, Job] | str:
    """Return the request of the plan in a file and its job, or the reason why its costs are not available.

    A reason is returned only if the plan has a prediction that can be used without them. Raises `UserError` if it has
    none, or if ``cluster``, ``network`` or ``profile`` was given.
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
    """Return the plan with its prediction for a job of the same model and batch, without claims about other plans."""
    return with_cost(plan, job, predict(plan, job))


def with_cost(plan: Plan, job: Job, cost: PlanCost) -> Plan:
    """Return the plan with a prediction of this cost, for the cluster and engine of the job.

    Figures of its whole training are updated.
    """
    prediction, cluster = prediction_of(job, plan, cost, Certificate(status="priced")), job.used_by(plan).hardware
    runs_on = {"cluster": cluster.name, "hardware": hardware_file(cluster), "engine": engine_name(job)}
    priced = plan.model_copy(update={**runs_on, "prediction": prediction})
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
    """Return the prediction of a plan with this cost and certificate.

    Plans over several pools have no interval, because no measured runs resemble them. For a pool that the plan leaves
    out, the prediction names the cost of the plans ``found`` with it, each given with its step time in seconds.
    """
    first, is_mixed = job.jobs(plan)[0], job.is_mixed
    return Prediction(
        step_time_s=cost.step_time_s,
        tokens_per_s_per_device=cost.tokens_per_s_per_device,
        mfu=cost.mfu,
        model_flop_per_s=cost.model_flop_per_s,
        rank_samples=plan.rank_samples,
        mfu_attention=cost.mfu_attention,
        warnings=warnings_of(job, plan, cost.stages),
        budget_bytes=job.budget_bytes,
        margin_bytes=0 if is_mixed else first.margin_bytes,
        stages=cost.stages,
        certificate=certificate,
        lower_bound_s=lower_bound_s,
        order_bound_s=cost.order_bound_s,
        profile=first.cost_source(),
        backend=first.cluster.device.backend,
        interval=None if is_mixed else interval_of(first, plan.strategies, cost.step_time_s),
        host=_host_use(job, plan, cost.stages),
        alternatives=alternatives,
        pools=_pool_uses(job, plan, cost.step_time_s, found) if is_mixed else None,
    )


def _host_use(job: Job, plan: Plan, stages: Sequence[StagePrediction]) -> HostUse | None:
    """Return the host memory use of the node with the least left; None if no node uses any."""
    of_rank = [
        held.host_bytes for stage, held in zip(plan.stages, stages, strict=True) for _ in range(stage.num_devices)
    ]
    if not any(of_rank):
        return None
    nodes = [group for group in job.used_by(plan).hardware.groups for _ in range(group.num_nodes)]
    firsts = accumulate((group.devices_per_node for group in nodes), initial=0)
    uses = [
        HostUse(node_bytes=sum(of_rank[first : first + group.devices_per_node]), memory_bytes=group.host_memory_bytes)
        for first, group in zip(firsts, nodes, strict=False)
    ]
    return max(uses, key=lambda use: (use.node_bytes - (use.memory_bytes or 0), use.memory_bytes is not None))


def refuse_host(plan: Plan) -> Plan:
    """Return the plan. Raises `UserError` if it needs more host memory than there is."""
    use = plan.prediction.host if plan.prediction else None
    if use is not None and not use.fits:
        raise UserError(
            field="host_memory_GiB",
            found=f"{use}, with {plan.chosen_levers}",
            expected="as much as the host has, of which the cluster file says what a node's processes may take",
            hint="shard states over more ranks, as with --pin fsdp, put less into host memory, or use more nodes",
        )
    return plan


def _pool_uses(job: Job, plan: Plan, step_time_s: float, found: Sequence[tuple[Plan, float]]) -> tuple[PoolUse, ...]:
    """Return a plan's use of each pool of a job, with the cost of the pools it leaves out by the plans ``found``."""
    names, own = plan.cluster.split("+"), job.jobs(plan)
    places, uses = {name: place for place, name in enumerate(names)}, []
    for pool in sorted(job.by_group, key=lambda pool: places.get(pool.cluster.name, len(places))):
        name, reason = pool.cluster.name, None
        using = [step_s for each, step_s in found if name in each.cluster.split("+")]
        if name not in places and using:
            more = min(using) / step_time_s - 1
            reason = f"the fastest plan found with it takes {format_seconds(min(using))} a step, {more:.1%} more"
        elif name not in places and found:
            below = format_seconds(step_time_s)
            reason = f"no plan with it that fits is known; none with it was found below {below} a step"
        uses.append(
            PoolUse(
                name=name,
                num_devices=pool.cluster.num_devices,
                num_stages=sum(each is pool for each in own),
                budget_bytes=pool.budget_bytes,
                margin_bytes=pool.margin_bytes,
                profile=pool.cost_source(),
                reason=reason,
            )
        )
    return tuple(uses)


def uniform_plan(job: Job, strategy_text: str) -> Plan:
    """Return the plan of one stage and one strategy everywhere with the microbatch count of minimum memory."""
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
    """Peak memory of the fullest device in bytes; 0 for a plan without prediction."""
    return max(stage.total_bytes for stage in plan.prediction.stages) if plan.prediction else 0


def warnings_of(
    job: Job, plan: Plan, stages: Sequence[StagePrediction], *, missed: Job | None = None
) -> tuple[str, ...]:
    """Return the warnings for a plan: model caveats, memory pressure and misfits of the profile per pool.

    ``missed`` is the job with the reserved memory that no plan was found to leave free, which is a warning as well.
    """
    kernels, own = job.execution.kernels, job.jobs(plan)
    found = list(job.chain.warnings(job.seq_len, has_flash=kernels is not None and kernels.attention == "flash"))
    for place, pool in enumerate(job.by_group):
        fullest = max((stage.total_bytes for stage, each in zip(stages, own, strict=True) if each is pool), default=0)
        missed_bytes = missed.groups[place].margin_bytes if missed and fullest else 0
        device, has = pool.cluster.device, pool.cluster.device.memory_bytes
        told = [f"no plan was found that leaves {format_bytes(missed_bytes)} per device free"] if missed_bytes else []
        if has is not None and fullest > has:
            told.append(
                f"the fullest device needs {format_bytes(fullest)}, more than the {format_bytes(has)} of "
                f"{device.name}: it runs out of memory unless the device has more"
            )
        elif device.is_gpu and has is not None and fullest > has * (1 - MARGIN):
            told.append(
                f"the fullest device holds {format_bytes(fullest)}, {fullest / has:.1%} of what it has; an allocator "
                "so full may free and allocate again in every step, which has slowed published runs"
            )
            if not missed_bytes:
                told.append(f"a plan with --memory-margin {MARGIN:g} leaves more free, where one fits")
        if fullest and (packages := pool.profile.identity.packages):
            told.append(
                f"priced with the kernels of {', '.join(packages)}; where one of these is not installed, transformers "
                "runs slower code that needs more memory"
            )
        if fullest and pool.cluster.num_devices > 1 and (misfits := pool.profile.misfits):
            told.append(
                f"fitted latency and rate of collectives differ from measurements by up to: {', '.join(misfits)}; "
                "profile again on an idle machine, or with a larger --budget"
            )
        if told:
            found.append((f"{pool.cluster.name}: " if job.is_mixed else "") + "; ".join(told))
    return tuple(found)
