"""What it costs to insist on something that a plan does not do, or what forbids it."""

from collections.abc import Collection
from dataclasses import replace

from steelyard.cost.job import Job, JobConfig
from steelyard.cost.layer_load import refusal
from steelyard.errors import UserError
from steelyard.plan.choices import WhyNot
from steelyard.plan.decisions import Decisions
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import shortfall
from steelyard.plan.strategy import Strategy
from steelyard.planning.impossible import SHOWN_REASONS, impossible, reasons_of, unmet
from steelyard.planning.not_searched import not_offered, widened, widened_text
from steelyard.planning.pins import Pin, pins_of
from steelyard.planning.price import peak_bytes, with_price
from steelyard.planning.problem import pipeline_configs, stage_strategies
from steelyard.planning.request import PlanRequest
from steelyard.planning.variants import Study, insisting


def why_not(request: PlanRequest, job: Job, pin: Pin) -> WhyNot:
    """Return the best plan that does what is asked for, or by how much it misses, or what forbids it.

    ``job`` is that of the request.
    """
    pinned = insisting(pin.text).change(request)
    if not pipeline_configs(job, pinned.decisions):
        return WhyNot(asked=pin.text, reasons=(_no_config(job, request.decisions),))
    result = Study(request, job).plan(insisting(pin.text))
    if isinstance(result, str):
        return WhyNot(asked=pin.text, reasons=(result,))
    if result.plan is not None:
        beyond = widened_text(widened(job, request.decisions, pinned.decisions))
        return WhyNot(asked=pin.text, plan=result.plan, beyond=beyond)
    if result.miss is not None:
        return WhyNot(asked=pin.text, reasons=(f"does not fit: {result.miss_text}",))
    return WhyNot(asked=pin.text, reasons=_forbidding(request, job, pin))


def why_not_plan(job: Job, plan: Plan, *, asked: str) -> WhyNot:
    """A plan of the user's own with its prediction for this job, and by how much it misses where it does not fit.

    Raises `InvalidPlanError` for a plan of another model, batch or number of devices.
    """
    priced = with_price(plan, job)
    missed = shortfall(peak_bytes(priced), job.budget_bytes, job.margin_bytes)
    return WhyNot(asked=asked, plan=priced, reasons=(missed,) if missed else ())


def pin_error(request: PlanRequest, job: Job) -> UserError:
    """Return what to tell the user where some layer has no legal strategy with all that the request's pins ask for."""
    alone = replace(request, decisions=request.decisions.model_copy(update={"pins": ()}))
    for pin in pins_of(request.decisions, request.chain):
        if not _can_be_met(alone, job, pin):
            return unmet(pin, _forbidding(alone, job, pin))
    return UserError(
        field="--pin",
        found=", ".join(map(repr, request.decisions.pins)),
        expected="pins that some strategy of every layer meets together",
        hint="leave one out: each alone can be met",
    )


def _can_be_met(request: PlanRequest, job: Job, pin: Pin) -> bool:
    layer_types = [job.chain.layers[layer] for layer in range(job.chain.num_layers) if pin.covers(layer)]
    asking = insisting(pin.text).change(request).decisions
    return any(
        pin.allows(strategy) and not _reasons(config, strategy, layer_types)
        for config in pipeline_configs(job, request.decisions)
        for strategy in stage_strategies(job, config.devices_per_stage, asking)
    )


def _no_config(job: Job, decisions: Decisions) -> str:
    configs = pipeline_configs(job, decisions)
    stages = ", ".join(str(count) for count in sorted({config.pipeline.num_stages for config in configs}))
    counts = ", ".join(str(count) for count in sorted({config.pipeline.num_microbatches for config in configs}))
    return f"no such pipeline configuration is searched: stages are {stages}, microbatches {counts}"


def _forbidding(request: PlanRequest, job: Job, pin: Pin) -> tuple[str, ...]:
    """Why no strategy that has what is asked for may be used: the reasons that stand in the way of most of them.

    Of strategies that come nearest: those that were offered, with the fewest reasons against them; before them what no
    strategy could have.
    """
    if never := impossible(request, pin):
        return never[:SHOWN_REASONS]
    layer_types = dict.fromkeys(job.chain.layers[layer] for layer in range(job.chain.num_layers) if pin.covers(layer))
    asking = insisting(pin.text).change(request).decisions
    configs = pipeline_configs(job, asking)
    against: list[tuple[Strategy, frozenset[str]]] = []
    for config in configs:
        for strategy in stage_strategies(job, config.devices_per_stage, asking):
            if pin.allows(strategy):
                against.append((strategy, frozenset(_reasons(config, strategy, layer_types))))
    for size in sorted({config.devices_per_stage for config in configs}) if not against else ():
        for strategy, reason in not_offered(job, size, asking):
            if pin.allows(strategy):
                against.append((strategy, frozenset({reason})))
    if not against:
        return (f"no strategy of the tree for {job.cluster.num_devices} devices or fewer has it",)
    fewest = min(len(reasons) for _, reasons in against)
    stopped: dict[str, set[Strategy]] = {}
    for strategy, reasons in against:
        for reason in reasons if len(reasons) == fewest else ():
            stopped.setdefault(reason, set()).add(strategy)
    return tuple(sorted(stopped, key=lambda reason: -len(stopped[reason]))[:SHOWN_REASONS])


def _reasons(config: JobConfig, strategy: Strategy, layer_types: Collection[int]) -> set[str]:
    """What forbids a strategy in a configuration."""
    layers = [config.job.chain.layer_types[layer_type] for layer_type in layer_types]
    return {*reasons_of(layers, lambda layer: refusal(layer, strategy, config))}
