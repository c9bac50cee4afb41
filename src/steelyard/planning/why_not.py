"""Counterfactuals of a plan: what was never searched, the cost of a pin, and the reasons that forbid it.

Requirements that no strategy can meet, whatever the stages, are found by the dimensions that a pin names: each
requirement is tried alone, then all together, with the smallest strategy that meets them.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from math import prod

from steelyard.cost.job import Job, JobConfig
from steelyard.cost.layer_load import rank_samples, refusal, unmeasured_reason
from steelyard.errors import InvalidPlanError, UserError
from steelyard.limits import MOST_MICROBATCHES
from steelyard.model.chain import LayerRole, LayerType
from steelyard.plan.choices import NotSearched, StrategyVerdict, WhyNot
from steelyard.plan.decisions import Decisions, pin_option
from steelyard.plan.dimensions import DIMENSIONS, Dimension, dimension_named, level_dimensions, modes
from steelyard.plan.dimensions.dimension import Batch, Divides, Level
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import shortfall
from steelyard.plan.stages import illegal_reason
from steelyard.plan.strategy import Remat, Strategy, parse_parallel
from steelyard.planning.pins import OR_MORE, Pin, pins_of
from steelyard.planning.price import peak_bytes, with_price
from steelyard.planning.problem import no_pipeline, pipeline_configs, shares_cores, space_options, stage_strategies
from steelyard.planning.request import PlanRequest
from steelyard.planning.variants import Study, insisting
from steelyard.schedules import SCHEDULES
from steelyard.search import SpaceOptions, enumerate_levels, enumerate_strategies, mixing
from steelyard.search import refusal as space_refusal
from steelyard.units import format_plural, format_ranges

SHOWN_REASONS = 3
Wanted = tuple[tuple[str, str], ...]
_MOST_TRIED = 64
"""Largest degree that is tried to find out whether a dimension can divide a layer."""


def refuse_impossible(request: PlanRequest) -> None:
    """Raise `UserError` for the first decision that no plan of the engine meets, or pin that no strategy can have."""
    for option, decision in request.decisions.one_by_one().items():
        expected = _engine_has(request, decision)
        if expected is not None:
            raise UserError(
                field=option.partition(" ")[0],
                found=f"{option} with the engine {request.engine.name}",
                expected=expected,
                hint="change it, leave it out, or plan for another engine",
            )
    for pin in pins_of(request.decisions, request.chain):
        if reasons := impossible(request, pin):
            raise unmet(pin, reasons)


def _engine_has(request: PlanRequest, decision: Decisions) -> str | None:
    """Return what the engine has instead of a decision; None if it has plans with it."""
    means = request.engine.capabilities
    if means.mixes_layers:
        return None
    if decision.num_stages not in (None, 1) and not means.schedules:
        return "one stage: this engine runs no pipelines"
    if decision.remats and not means.remats.intersection(decision.remats):
        return "one of " + ", ".join(remat for remat in Remat if remat in means.remats)
    known, execution = frozenset[Dimension]().union(*means.dimensions), request.engine.execution
    chosen = {key: values for key, values in (decision.modes or {}).items() if not execution.has_always(key, values)}
    wanted = [modes()[key][0] for key in chosen]
    for pin in pins_of(decision, request.chain):
        wanted += [DIMENSIONS[key] for key, value in pin.wanted if key in DIMENSIONS and value != "1"]
    for dimension in wanted:
        if dimension not in known:
            reason = means.why_not.get(dimension.name, "which this engine does not run")
            return f"dimensions among {', '.join(sorted(each.name for each in known))}, not {dimension.name}, {reason}"
    for key, values in chosen.items():
        offered = [str(each) for each in modes()[key][1].texts if means.offers(key, each)]
        if not {*map(str, values)}.intersection(offered):
            return f"{key} among {', '.join(offered)}"
    return None


def unmet(pin: Pin, reasons: Sequence[str]) -> UserError:
    """Build the error for a pin that no strategy meets."""
    option, _, found = pin_option(pin.text).partition(" ")
    return UserError(
        field=option,
        found=found,
        expected=f"what some strategy of these layers may have ({'; '.join(reasons[:SHOWN_REASONS])})",
        hint="ask for something else, or leave these layers to the search",
    )


def impossible(request: PlanRequest, pin: Pin) -> tuple[str, ...]:
    """Return the reasons why no strategy can meet the pin; empty if no such strategy is illegal by itself."""
    named = {dimension for key, value in pin.wanted if value != "1" and (dimension := _dimension_of(key)) is not None}
    serves = tuple(
        f"{dimension}: {reason}"
        for dimension in sorted(named, key=lambda dimension: dimension.name)
        if (reason := dimension.serves(request.chain))
    )
    if serves:
        return serves
    parts = [*((pair,) for pair in pin.wanted), pin.wanted]
    return next((reasons for wanted in parts if (reasons := _never(request, pin, wanted))), ())


def reasons_of(layers: Sequence[LayerType], reason_of: Callable[[LayerType], str | None]) -> tuple[str, ...]:
    """Return the reasons that forbid a strategy, with the layers' names if a reason does not hold for all."""
    found: dict[str, list[str]] = {}
    for layer in layers:
        if (reason := reason_of(layer)) is not None:
            found.setdefault(reason, []).append(layer.name)
    return tuple(
        reason if len(names) == len(layers) else f"for the {', '.join(names)} layers: {reason}"
        for reason, names in found.items()
    )


def _never(request: PlanRequest, pin: Pin, wanted: Wanted) -> tuple[str, ...]:
    strategy = _smallest(wanted)
    if strategy is None or not strategy.levels:
        return ()
    chain = request.chain
    covered = [layer_type for layer, layer_type in enumerate(chain.layers) if pin.covers(layer)]
    layers = [chain.layer_types[layer_type] for layer_type in dict.fromkeys(covered)]
    if pin.first is None and not all(dimension.is_level for dimension in strategy.dimensions):
        layers = [layer for layer in layers if _is_divisible(layer, wanted, request)] or layers
    if found := reasons_of(layers, lambda layer: _illegal(layer, strategy, wanted, request)):
        return found
    count = request.cluster.num_devices if request.objective == "time" else 0
    if count % strategy.num_devices:
        return (f"{strategy} takes {strategy.num_devices} ranks, which do not divide the {count} devices",)
    return ()


def _dimension_of(key: str) -> Dimension | None:
    """Return the parallelism dimension of a pin's key; None if it has none."""
    if key in modes():
        return modes()[key][0]
    return next((dimension for dimension in level_dimensions() if dimension.name == key), None)


def _smallest(wanted: Wanted) -> Strategy | None:
    """Return the strategy with the fewest devices that meets all requirements; None if they are contradictory."""
    wanted = tuple((key, value.removesuffix(OR_MORE)) for key, value in wanted)
    levels = [
        Level(dimension=dimension_named(key), degree=int(value))
        for key, value in wanted
        if value != "1" and any(dimension.name == key for dimension in level_dimensions())
    ]
    levels += [level for key, value in wanted if key == "parallel" for level in parse_parallel(value)]
    chosen = {key: modes()[key][1].pin[value] for key, value in wanted if key in modes()}
    for key, value in chosen.items():
        dimension, mode = modes()[key]
        if value == mode.default:
            continue
        if dimension.is_level and all(level.dimension is not dimension for level in levels):
            levels.append(Level(dimension=dimension, degree=2))
        if not dimension.is_level and not any(level.dimension.divides_data for level in levels):
            samples = next(each for each in level_dimensions() if each.divides is Divides.SAMPLES)
            levels.append(Level(dimension=samples, degree=int(value)))
    for order in permutations(levels):
        try:
            return Strategy.of(order, Remat.NONE, **chosen)
        except InvalidPlanError:
            continue
    return None


def _illegal(layer: LayerType, strategy: Strategy, wanted: Wanted, request: PlanRequest) -> str | None:
    """Return the reason why a strategy cannot divide a layer.

    The whole batch is assumed if the requirements divide samples.
    """
    divides_samples = any(
        (dimension := _dimension_of(key)) and dimension.divides is Divides.SAMPLES for key, _ in wanted
    )
    samples = request.global_batch if divides_samples and request.global_batch else strategy.sample_degree
    assert request.seq_len is not None, "lengths are tried one by one"
    return illegal_reason(layer, strategy, Batch(microbatch_samples=samples, seq_len=request.seq_len))


def _is_divisible(layer: LayerType, wanted: Wanted, request: PlanRequest) -> bool:
    """Return whether the dimensions that use ranks of other levels could divide the layer at some degree."""
    beside = [key for key, _ in wanted if (dimension := _dimension_of(key)) and not dimension.is_level]
    tried = (_smallest(((key, str(degree)),)) for key in beside for degree in range(2, _MOST_TRIED + 1))
    return any(each is not None and _illegal(layer, each, (), request) is None for each in tried)


def configs_not_searched(job: Job, decisions: Decisions) -> tuple[NotSearched, ...]:
    """Return the numbers of stages and microbatches, and the schedules, that were not searched, with reasons."""
    configs = pipeline_configs(job, decisions)
    devices, layers, batch = job.cluster.num_devices, job.chain.num_layers, job.global_batch
    searched = {config.pipeline.num_stages for config in configs}
    why_not_stages = {
        count: f"fixed at {decisions.num_stages}"
        if decisions.num_stages is not None
        else f"more than {decisions.most_stages}, as decided"
        if count > (decisions.most_stages or count)
        else f"does not divide the {devices} devices"
        if devices % count
        else f"more stages than the {layers} layers"
        for count in range(1, devices + 1)
        if count not in searched
    }
    searched = {config.pipeline.num_microbatches for config in configs}
    why_not_counts = {
        count: f"fixed at {decisions.num_microbatches}"
        if decisions.num_microbatches is not None
        else f"does not divide the global batch of {batch}"
        for count in range(1, batch + 1)
        if count not in searched
    }
    used = {config.pipeline.schedule for config in configs}
    unmeasured = samples_not_measured(job, decisions)
    return (
        *(() if unmeasured is None else (unmeasured,)),
        *_by_reason("stages", why_not_stages),
        NotSearched(what="stages", values=f"above {devices}", reason="every stage needs at least one device"),
        *_by_reason("microbatches", why_not_counts),
        NotSearched(what="microbatches", values=f"above {batch}", reason="a microbatch needs a sample"),
        *(
            NotSearched(
                what="schedule",
                values=each.name,
                reason=each.why_not_everywhere or each.why_nowhere
                if each.name in decisions.allowed_schedules
                else "left out by --schedule",
            )
            for each in SCHEDULES.values()
            if each not in used or (each.why_not_everywhere and not shares_cores(job))
        ),
    )


def left_out(job: Job, decisions: Decisions) -> tuple[str, ...]:
    """Return the strategies, schedules, chunks and microbatches that could run but are not searched, with reasons.

    Choices that the user excluded and dimensions that divide nothing are not listed.
    """
    limits = replace(space_options(job, decisions), remats=tuple(Remat))
    whole = replace(limits, remats=(Remat.NONE,), insists=lambda _strategy: True)
    configs = pipeline_configs(job, decisions)
    batch = Batch(microbatch_samples=job.global_batch, seq_len=job.seq_len)
    blocks = [layer for layer in job.chain.layer_types if layer.role is LayerRole.BLOCK]
    found: dict[str, Strategy] = {}
    sizes = sorted({config.devices_per_stage for config in configs})
    # reasons are about groups in a node and over several: larger stages repeat them
    for size in sizes[: bisect_right(sizes, 4 * job.cluster.devices_per_node) + 1]:
        for strategy in enumerate_strategies(size, whole):
            reason = space_refusal(strategy, limits)
            if not reason or reason in found or job.engine.capabilities.refusal(strategy) is not None:
                continue
            if any(illegal_reason(each, strategy, batch) is None for each in blocks):
                found[reason] = strategy
    said = [f"strategies such as {strategy}: {reason}" for reason, strategy in found.items()]
    said += _left_by_ends(job, batch)
    for schedule in SCHEDULES.values() if any(config.pipeline.num_stages > 1 for config in configs) else ():
        if schedule.name in decisions.allowed_schedules and job.engine.capabilities.runs(schedule.name):
            is_everywhere = not schedule.why_not_everywhere or shares_cores(job)
            said += [] if is_everywhere else [f"{schedule.name}: {schedule.why_not_everywhere}"]
            beyond = f"{schedule.name} in more than {max(schedule.chunk_counts)} chunks a stage"
            said += [beyond] if schedule.takes_chunks and not schedule.why_not_everywhere else []
    if job.global_batch > MOST_MICROBATCHES:
        said.append(f"more than {MOST_MICROBATCHES} microbatches")
    return tuple(said)


def _left_by_ends(job: Job, batch: Batch) -> Iterator[str]:
    """Yield the dimensions that every block allows but an engine of one strategy cannot use, because the embedding or
    the head does not allow them."""
    capabilities = job.engine.capabilities
    for dimension in () if capabilities.mixes_layers else DIMENSIONS.values():
        strategy = Strategy.of((Level(dimension=dimension, degree=2),), Remat.NONE) if dimension.is_level else None
        if strategy is None or capabilities.refusal(strategy) is not None:
            continue
        reasons = {each: illegal_reason(each, strategy, batch) for each in job.chain.layer_types}
        found = {each.role is LayerRole.BLOCK: reason for each, reason in reasons.items() if reason}
        if [*found] == [False]:
            yield f"{dimension.name}, which {job.engine.name} gives to all layers: {found[False]}"


def samples_not_measured(job: Job, decisions: Decisions) -> NotSearched | None:
    """Return the micro-batch sizes that were left out because the profile's times do not cover them, if any."""
    beyond: dict[float, str] = {}
    configs = {(each.devices_per_stage, each.microbatch_samples): each for each in pipeline_configs(job, decisions)}
    for config in configs.values() if job.profile.identity.is_measured else ():
        for strategy in stage_strategies(job, config.devices_per_stage, decisions):
            for layer_type in job.chain.layer_types:
                reason = unmeasured_reason(layer_type, strategy, config)
                if reason is not None and illegal_reason(layer_type, strategy, config.batch) is None:
                    beyond[rank_samples(strategy, config.microbatch_samples)] = reason.partition(": ")[2]
    if not beyond:
        return None
    return NotSearched(
        what="samples per rank",
        values=", ".join(f"{count:g}" for count in sorted(beyond)),
        reason=f"{beyond[max(beyond)]}; steelyard profile --global-batch {job.global_batch} measures all",
    )


def strategies_not_searched(job: Job, devices_per_stage: int, decisions: Decisions) -> tuple[StrategyVerdict, ...]:
    """Return every leaf of the whole tree for a stage that was not offered to the search, with the reason."""
    limits = space_options(job, decisions)
    whole = SpaceOptions(dimensions=level_dimensions(), devices_per_node=job.cluster.devices_per_node)
    never = (
        ("-".join(str(level) for level in levels), mixing(levels, limits))
        for levels in enumerate_levels(devices_per_stage, whole.dimensions)
    )
    told = [(str(strategy), reason) for strategy, reason in not_offered(job, devices_per_stage, decisions)]
    told += [(text, reason) for text, reason in never if reason is not None]
    return tuple(StrategyVerdict(kind="", strategy=text, verdict="not offered", reason=reason) for text, reason in told)


def not_offered(job: Job, devices_per_stage: int, decisions: Decisions) -> list[tuple[Strategy, str]]:
    """Return the strategies that the rules of the tree allow but that were not offered, with reasons."""
    offered = set(stage_strategies(job, devices_per_stage, decisions))
    limits = space_options(job, decisions)
    whole = SpaceOptions(
        dimensions=tuple(DIMENSIONS.values()),
        modes={},
        mixes_samples=True,
        aligned_only=False,
        insists=lambda _strategy: True,
    )
    found = []
    for strategy in enumerate_strategies(devices_per_stage, whole):
        if strategy not in offered:
            serves = (reason for dimension in strategy.dimensions if (reason := dimension.serves(job.chain)))
            shape = " ".join(f"{name} {degree}" for name, degree in strategy.shape.items())
            reason = next(serves, None) or space_refusal(strategy, limits) or f"the profile has no {shape}"
            found.append((strategy, reason))
    return found


def widened(job: Job, free: Decisions, decisions: Decisions) -> dict[Strategy, str]:
    """Return the strategies that ``decisions`` offer and ``free`` ones leave out, with the reasons of the latter."""
    limits = space_options(job, free)
    sizes = sorted({config.devices_per_stage for config in pipeline_configs(job, decisions)})
    offered = dict.fromkeys(each for size in sizes for each in stage_strategies(job, size, decisions))
    return {each: reason for each in offered if (reason := space_refusal(each, limits))}


def widened_text(found: dict[Strategy, str]) -> str:
    """Return a sentence about a search that went beyond the free one; empty if it did not."""
    if not found:
        return ""
    examples = {reason: str(strategy) for strategy, reason in reversed(found.items())}
    said = "; ".join(f"{strategy}: {reason}" for reason, strategy in reversed(examples.items()))
    return f"also searched {format_plural(len(found), 'strategy', 'strategies')} that are left out otherwise ({said})"


def _by_reason(what: str, reasons: dict[int, str]) -> list[NotSearched]:
    return [
        NotSearched(
            what=what, values=format_ranges(value for value, why in reasons.items() if why == reason), reason=reason
        )
        for reason in dict.fromkeys(reasons.values())
    ]


def why_not(request: PlanRequest, job: Job, pin: Pin) -> WhyNot:
    """Return the best plan that meets a pin, or the bytes that it misses, or the reasons that forbid it.

    ``job`` is that of the request.
    """
    pinned = insisting(pin.text).change(request)
    if not pipeline_configs(job, pinned.decisions):
        return WhyNot(
            asked=pin.text, reasons=(f"only these are searched: {no_pipeline(job, pinned.decisions).expected}",)
        )
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
    """Return the user's own plan with its prediction for this job, and the bytes that it misses if it does not fit.

    Raises `InvalidPlanError` for a plan of another model, batch or number of devices.
    """
    priced = with_price(plan, job)
    missed = shortfall(peak_bytes(priced), job.budget_bytes, job.margin_bytes)
    return WhyNot(asked=asked, plan=priced, reasons=(missed,) if missed else ())


def pin_error(request: PlanRequest, job: Job) -> UserError:
    """Build the error for pins of a request that leave some layer without a legal strategy."""
    alone = replace(request, decisions=request.decisions.model_copy(update={"pins": ()}))
    for pin in pins_of(request.decisions, request.chain):
        if not _can_be_met(alone, job, pin):
            return unmet(pin, _forbidding(alone, job, pin))
    return UserError(
        field="--pin",
        found=", ".join(map(repr, request.decisions.pins)),
        expected="pins that some strategy of every layer meets together",
        hint="leave one out: each of them is possible alone",
    )


def _can_be_met(request: PlanRequest, job: Job, pin: Pin) -> bool:
    """Return whether a strategy has the pin on all of its layers, or on some block if it names no layers."""
    inside = range(1, job.chain.num_layers - 1) if pin.is_lax else range(job.chain.num_layers)
    layer_types = [job.chain.layers[layer] for layer in inside if pin.covers(layer)]
    together = [[each] for each in dict.fromkeys(layer_types)] if pin.is_lax else [layer_types]
    asking = insisting(pin.text).change(request).decisions
    return any(
        pin.allows(strategy) and not all(_reasons(config, strategy, each) for each in together)
        for config in pipeline_configs(job, request.decisions)
        for strategy in stage_strategies(job, config.devices_per_stage, asking)
    )


def _forbidding(request: PlanRequest, job: Job, pin: Pin) -> tuple[str, ...]:
    """Return the most common reasons why no strategy that meets a pin is legal.

    Requirements that no strategy can meet come first. Otherwise the reasons are those of the nearest strategies: the
    offered ones with the fewest reasons against them.
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
        return _of_other_size(pin, sorted({config.devices_per_stage for config in configs}))
    fewest = min(len(reasons) for _, reasons in against)
    stopped: dict[str, set[Strategy]] = {}
    for strategy, reasons in against:
        for reason in reasons if len(reasons) == fewest else ():
            stopped.setdefault(reason, set()).add(strategy)
    return tuple(sorted(stopped, key=lambda reason: -len(stopped[reason]))[:SHOWN_REASONS])


def _of_other_size(pin: Pin, sizes: Sequence[int]) -> tuple[str, ...]:
    """Return the reason why no strategy of a stage of these sizes meets a pin, and the fix if only the size differs."""
    stages = f"a stage has {' or '.join(map(str, sizes))}"
    for key, value in pin.wanted:
        levels = parse_parallel(value) if key == "parallel" else ()
        count = prod(level.degree for level in levels)
        if levels and count not in sizes:
            asked = ", ".join(f"{level.dimension}={level.degree}" for level in levels)
            return (f"{value} is for {count} devices, and {stages}; write {asked}",)
    return (f"no strategy of {' or '.join(map(str, sizes))} devices has it all at once",)


def _reasons(config: JobConfig, strategy: Strategy, layer_types: Collection[int]) -> set[str]:
    """Return the reasons that forbid a strategy in a configuration."""
    layers = [config.job.chain.layer_types[layer_type] for layer_type in layer_types]
    return {*reasons_of(layers, lambda layer: refusal(layer, strategy, config))}
