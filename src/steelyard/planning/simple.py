"""The simplest plan within a fraction of the fastest, no deeper than usual, with the reason of every group of layers.

No published run tests the predictions for pipelines deeper than any that was run. So a plan has no more stages than
plans of models of its size, unless more stages gain `DEPTH_GAIN`: `USUAL_STAGES`, or one for every `STAGE_PARAMS`
parameters. In published_runs and expert_plans the maximum is 8 stages for LLaMA-65B and Llama-3-70B, 12 for BLOOM-176B,
16 for Megatron's 310B, Llama-3-405B and DeepSeek-V3, 35 for MT-NLG-530B and 64 for Megatron's 1,008B. Only BigScience's
search (181B, 24 stages), Qwen3-235B on 256 H100 (32, once) and studies of schedules have more; without these, models of
13B to 39B have 4.

Prediction errors are larger than the gain of most mixes of strategies, and a plan of few groups of layers is easier to
read, to check and to hand to another engine. Two families are searched, the second if the first has no plan within the
fraction:

| family       | blocks                                                        | embedding, head                   |
|--------------|---------------------------------------------------------------|-----------------------------------|
| leading runs | one sharding, any; the first of a stage recompute more        | as the blocks, not recomputed     |
| free remat   | one sharding of the fastest plan's blocks; each its own remat | as the blocks, or as in that plan |

Each pipeline configuration contributes the fastest plan of the family. The plan with the fewest groups wins
(`Plan.num_groups`: a rule that holds for every stage counts once), and among those the one with the fewest shardings,
then with the fewest parts of a pipeline. Equally simple plans that differ by less than `TIE` are ranked by the memory
that they leave free. At last, layers that may as well have another strategy of the plan get it, the fewest
first, and blocks that recompute more come first in a stage: within the fraction, and if the plan fits.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import numpy as np

from steelyard.cost.job import Job
from steelyard.cost.predict import PlanCost, predict
from steelyard.cost.tables import CostTables
from steelyard.engines.capabilities import block_layers
from steelyard.model.chain import LayerRole, LayerType, ModelChain
from steelyard.plan.decisions import Decisions
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import Certificate, FastestPlan, layers_text
from steelyard.plan.stages import StagePart, count_groups, fold_runs, illegal_reason
from steelyard.plan.strategy import Remat, Strategy
from steelyard.planning.choose import NUM_RESCORED, PlanningResult, accept
from steelyard.planning.pass_order import in_best_order
from steelyard.planning.price import assemble_plan, describe, peak_bytes, prediction_of, summarise, warnings_of
from steelyard.planning.problem import is_uniform
from steelyard.planning.request import PlanRequest
from steelyard.units import format_bytes, format_seconds

TIE = 0.003
"""Fraction of the step time below which two plans are equally fast."""
SAME = 5e-4
"""Fraction below which two step times are reported as equal."""
USUAL_STAGES = 8
STAGE_PARAMS = 15_000_000_000
"""Parameters per stage of large models: MT-NLG has 15.1 billion, Megatron's largest 15.8, BLOOM 14.7."""
DEPTH_GAIN = 0.07
_MOST_RANGES = 4
"""Ranges of layers of one strategy that are named; more are counted."""
_ORDER = (Remat.FULL, Remat.SELECTIVE, Remat.NONE)


def num_params(job: Job) -> int:
    """Number of parameters of a job's model."""
    layers = [job.layer(each.name, {}) for each in map(job.chain.type_of, range(job.chain.num_layers))]
    return sum(each.num_params for each in layers if each is not None)


def usual_stages(job: Job) -> Decisions:
    """Return the usual maximum number of stages for models of the job's size, as a decision."""
    return Decisions(most_stages=max(USUAL_STAGES, num_params(job) // STAGE_PARAMS))


def with_usual_stages(result: PlanningResult, request: PlanRequest) -> tuple[PlanningResult, Decisions]:
    """Return the result with the fastest plan of no more stages than usual, and this limit as a decision.

    The result is unchanged, without a decision, if its plan has no more stages, or if all others are slower by more
    than `DEPTH_GAIN`. The prediction of the plan states the slowdown. A request that allows no slowdown for simpler
    plans is not changed.
    """
    plan, job, free = result.plan, result.job, Decisions()
    if plan is None or job.is_mixed or not request.simplify_share:
        return result, free
    limit = usual_stages(job)
    tables = [each for each in result.bounded_tables if limit.allows_stages(each.pipeline.num_stages)]
    if limit.allows_stages(plan.num_stages) or not tables:
        return result, free
    longest = 1 + DEPTH_GAIN
    found = accept(
        job,
        tables,
        num_alternatives=NUM_RESCORED - 1,
        time_limit_s=request.time_limit_s,
        uniform=is_uniform(job, request.decisions),
        cutoff_s=longest * max(plan.step_s, *(each.score_s for each in result.search.ranked[:1])),
    )
    if not found.ranked or found.ranked[0].step_s > longest * plan.step_s:
        return result, free
    best = found.ranked[0]
    proven_s, lower_s = best.step_s * (1 - found.gap), min(found.lower_bound_s, best.step_s)
    chosen = _in_place_of(plan, best.plan, best.cost, result, proven_s=proven_s, lower_bound_s=lower_s)
    return replace(result, plan=chosen, cost=best.cost, search=found.search, bounded_tables=found.bounded), limit


def simplest(plan: Plan, result: PlanningResult, known: Sequence[Plan], request: PlanRequest) -> Plan:
    """Return the simplest plan that is slower by at most `PlanRequest.simplify_share`, or the plan itself.

    The share is one of the proven lower bound if the fastest plan is within it, so that the gap of the plan is too.
    ``known`` are other plans that fit, none faster. The prediction of the simpler plan states the slowdown. With
    `PlanRequest.num_next_best` the fastest plan is kept alongside it.
    """
    assert plan.prediction is not None, "what was searched is priced"
    job, best_s = result.job, plan.step_s
    proven_s = best_s * (1 - (plan.prediction.certificate.gap or 0.0))
    most_s = best_s if proven_s * (1 + request.simplify_share) < best_s else proven_s
    most_s *= 1 + request.simplify_share
    searched_s = max(best_s, *(each.score_s for each in result.search.ranked[:1])) * (1 + request.simplify_share)
    allowed = [each for each in known if predict(each, job).step_time_s <= most_s]
    shardings = Counter(plan.strategies[layer].without_remat() for layer in block_layers(job.chain)).most_common()
    narrow = [partial(_of_one_sharding, plan=plan, sharding=sharding) for sharding, _ in shardings]
    for narrowed in (None, *narrow):
        of_runs = narrowed is None
        found = accept(
            job,
            result.bounded_tables if narrowed is None else [each.narrowed(narrowed) for each in result.bounded_tables],
            num_exact=len(result.bounded_tables),
            num_alternatives=0,
            time_limit_s=request.time_limit_s,
            uniform=of_runs,
            remat_runs=of_runs,
            cutoff_s=searched_s,
        )
        allowed += [each.plan for each in found.ranked if each.step_s <= most_s]
        if allowed:
            break
    fewest = min(map(mixture, [plan, *allowed]))
    costs = [(predict(each, job), each) for each in [plan, *allowed] if mixture(each) == fewest]
    tied_s = min(cost.step_time_s for cost, _ in costs) * (1 + TIE)
    tied = [pair for pair in costs if pair[0].step_time_s <= tied_s]
    cost, simple = min(tied, key=lambda pair: max(stage.total_bytes for stage in pair[0].stages))
    if not (job.is_mixed or job.effects.uses_host or request.decisions.pins):  # which `_merged` does not heed
        cost, simple = _merged(cost, simple, job, most_s)
    if mixture(simple) >= mixture(plan):
        return plan
    chosen = _in_place_of(plan, simple, cost, result, proven_s=proven_s, lower_bound_s=plan.prediction.lower_bound_s)
    kept = (plan.as_fallback(), *plan.next_best)[: request.num_next_best]
    return chosen.model_copy(update={"next_best": kept})


def _of_one_sharding(tables: CostTables, plan: Plan, sharding: Strategy) -> CostTables:
    """Return the tables with blocks of one sharding, with any remat, and ends like the blocks or as in the plan."""
    chain, kept = plan.chain(), np.zeros_like(tables.legal)
    types = {each.name: each for each in chain.layer_types}
    ends = {0, chain.num_layers - 1} - {*block_layers(chain)}
    for row, name in enumerate(tables.type_names):
        own = _as_usual(plan, sharding, types[name])
        remats = Remat if types[name].role is LayerRole.BLOCK else (Remat.NONE,)
        of_plan = {plan.strategies[place] for place in ends if chain.type_of(place).name == name}
        offered = {*of_plan, *(own.with_remat(remat) for remat in remats)}
        kept[row] = [each in offered for each in tables.strategies]
    return replace(tables, legal=tables.legal & kept)


def _merged(cost: PlanCost, plan: Plan, job: Job, most_s: float) -> tuple[PlanCost, Plan]:
    """Return a plan with its cost after layers that do not need their own strategy have another one of the plan.

    The result takes at most ``most_s`` and fits. Each attempt costs one simulation.
    """
    refused: set[tuple[Strategy, ...]] = set()
    is_simpler = True
    while is_simpler:
        is_simpler = False
        for other in _simpler(plan, job):
            if other.strategies in refused:
                continue
            found = predict(other, job)
            if found.step_time_s <= most_s and max(stage.total_bytes for stage in found.stages) <= job.budget_bytes:
                cost, plan, is_simpler = found, other, True
                break
            refused.add(other.strategies)
    return cost, plan


def _simpler(plan: Plan, job: Job) -> Iterator[Plan]:
    """Yield plans of fewer groups that differ in a group or run of layers, the smallest first.

    These have another strategy of the plan, or blocks that recompute more come first in their part of the pipeline.
    """
    own, usual, now = plan.strategies, _usual(plan), mixture(plan)
    offered = sorted({own[layer] for layer in block_layers(job.chain)}, key=str)
    changed = [(layers, usual) for layers in _unusual(plan).values()]
    runs = [range(run.layers[0], run.layers[1] + 1) for part in plan.parts for run in part.runs]
    changed += [([*run], strategy) for run in runs for strategy in offered if strategy != own[run[0]]]
    for layers, strategy in [([], usual), *sorted(changed, key=lambda each: len(each[0]))]:
        strategies = _changed(plan, own, job.chain, layers, strategy)
        for other in (strategies, _in_order(plan, strategies)):
            if other is not None and _mixture(parts := _parts(plan, other)) < now:
                yield _with_parts(plan, job, parts)


def _in_order(plan: Plan, strategies: Sequence[Strategy] | None) -> list[Strategy] | None:
    """Return the strategies with neighbouring blocks of one type and sharding in the order of `_ORDER`."""
    if strategies is None:
        return None
    chain, found = plan.chain(), list[Strategy]()
    blocks = {*block_layers(chain)}
    for part in plan.parts:
        for _, alike in groupby(
            part.layers,
            key=lambda layer: (layer in blocks, chain.type_of(layer).name, strategies[layer].without_remat()),
        ):
            found += sorted((strategies[layer] for layer in alike), key=lambda each: _ORDER.index(each.remat))
    return found


def mixture(plan: Plan) -> tuple[int, int, int]:
    """Count the groups of layers, the shardings and the parts of the pipeline of a plan, a measure of its distance from
    one strategy for all layers."""
    return _mixture(plan.parts)


def _mixture(parts: Sequence[StagePart]) -> tuple[int, int, int]:
    shardings = {run.strategy.without_remat() for part in parts for run in part.runs}
    return count_groups(parts), len(shardings), len(parts)


def _in_place_of(
    plan: Plan, chosen: Plan, cost: PlanCost, result: PlanningResult, *, proven_s: float, lower_bound_s: float
) -> Plan:
    """Return a plan that replaces a faster one, with the slowdown in its prediction.

    No plan of the search space is proven to be faster than ``proven_s``, nor than ``lower_bound_s`` by the cost tables.
    """
    assert plan.prediction is not None, "what was searched is priced"
    job, best_s = result.job, plan.step_s
    chosen, cost = in_best_order(chosen, job, cost)
    warnings = warnings_of(job, chosen, cost.stages, missed=result.missed)
    prediction = prediction_of(
        job,
        chosen,
        cost,
        Certificate(status="simplified", gap=max(0.0, 1 - proven_s / cost.step_time_s)),
        lower_bound_s=lower_bound_s,
        alternatives=plan.prediction.alternatives,
    )
    fastest = plan.prediction.fastest or FastestPlan(
        step_time_s=best_s,
        memory_bytes=peak_bytes(plan),
        num_groups=plan.num_groups,
        num_stages=plan.num_stages,
        setting=describe(plan.pipeline),
        strategies=summarise(plan),
    )
    kept = {"asked": plan.asked, "next_best": plan.next_best}
    changes = {"prediction": prediction.model_copy(update={"fastest": fastest, "warnings": warnings})}
    return chosen.model_copy(update=kept | changes)


def with_reasons(plan: Plan, job: Job) -> Plan:
    """Return the plan with a reason, in its prediction, for every strategy that is not that of most blocks.

    The reason is the cost of the plan if these layers had the strategy of most blocks. The largest groups of layers
    come first. Plans over several device groups have no reasons.
    """
    if job.is_mixed or plan.prediction is None:
        return plan
    step_s, held = predict(plan, job).step_time_s, peak_bytes(plan)
    reasons = []
    for strategy, layers in sorted(_unusual(plan).items(), key=lambda group: -len(group[1])):
        own, other = _told_apart(strategy, _as_usual(plan, _usual(plan), job.chain.type_of(layers[0])))
        cost = _cost(_with_usual(plan, job, layers), job, step_s, held)
        reasons.append(f"{_names(job, layers)}: {own}; {other} {cost}")
    return plan.model_copy(update={"prediction": plan.prediction.model_copy(update={"reasons": tuple(reasons)})})


def has_one_strategy(plan: Plan) -> bool:
    """Return whether all blocks of a plan have one strategy and its ends the nearest legal one."""
    return not _unusual(plan)


def _usual(plan: Plan) -> Strategy:
    """Return the strategy of most blocks."""
    strategies = plan.strategies
    return Counter(strategies[layer] for layer in block_layers(plan.chain())).most_common(1)[0][0]


def _unusual(plan: Plan) -> dict[Strategy, list[int]]:
    """Return the layers that do not have the strategy of most blocks, by their strategy."""
    usual, chain, groups = _usual(plan), plan.chain(), dict[Strategy, list[int]]()
    for layer, strategy in enumerate(plan.strategies):
        if strategy != _as_usual(plan, usual, chain.type_of(layer)):
            groups.setdefault(strategy, []).append(layer)
    return groups


def _with_usual(plan: Plan, job: Job, layers: Sequence[int]) -> Plan | None:
    """Return the plan with the strategy of most blocks for some layers, or None if it cannot divide them."""
    strategies = _changed(plan, plan.strategies, job.chain, layers, _usual(plan))
    return None if strategies is None else _with_parts(plan, job, _parts(plan, strategies))


def _changed(
    plan: Plan, own: Sequence[Strategy], chain: ModelChain, layers: Sequence[int], strategy: Strategy
) -> list[Strategy] | None:
    """Return the strategies of a plan with another one for some layers, or None if it cannot divide them."""
    strategies = list(own)
    for layer in layers:
        strategies[layer] = _as_usual(plan, strategy, chain.type_of(layer))
        if illegal_reason(chain.type_of(layer), strategies[layer], plan.batch):
            return None
    return strategies


def _parts(plan: Plan, strategies: Sequence[Strategy]) -> tuple[StagePart, ...]:
    return tuple(
        StagePart(
            ranks=part.ranks,
            runs=fold_runs(part.first_layer, tuple(strategies[part.first_layer : part.last_layer + 1])),
        )
        for part in plan.parts
    )


def _with_parts(plan: Plan, job: Job, parts: Sequence[StagePart]) -> Plan:
    return assemble_plan(job, plan.pipeline, parts).model_copy(update={"pass_order": plan.pass_order})


def _told_apart(strategy: Strategy, other: Strategy) -> tuple[str, str]:
    """Describe two strategies by their difference: by remat alone if they have the same sharding."""
    if strategy.without_remat() != other.without_remat():
        return str(strategy), str(other)
    first, second = ("no remat" if each.remat is Remat.NONE else f"{each.remat} remat" for each in (strategy, other))
    return first, second


def _as_usual(plan: Plan, usual: Strategy, layer_type: LayerType) -> Strategy:
    """Return the strategy of most blocks, or the nearest one that is legal for a layer type."""
    own = usual if layer_type.num_experts else usual.with_whole_experts()
    own = own if layer_type.role is LayerRole.BLOCK else own.without_remat()
    return own if illegal_reason(layer_type, own, plan.batch) is None else own.with_whole_tensors()


def _cost(other: Plan | None, job: Job, step_s: float, held: int) -> str:
    """Describe the cost of a plan with the strategy of most blocks for other layers, beside the plan's."""
    if other is None:
        return "cannot divide them"
    cost = predict(other, job)
    takes = max(stage.total_bytes for stage in cost.stages)
    if takes > max(job.budget_bytes, held):
        return f"would need {format_bytes(takes)} of {format_bytes(job.budget_bytes)}"
    slower = cost.step_time_s / step_s - 1
    if slower > SAME:
        return f"would take {format_seconds(cost.step_time_s)} per step ({slower:.1%} slower)"
    return f"would need {format_bytes(takes)} and be as fast"


def _names(job: Job, layers: Sequence[int]) -> str:
    """Return the names of layers, with neighbours joined into ranges, or the numbers of blocks of many ranges."""
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])]
    if len(runs) <= _MOST_RANGES:
        return ", ".join(layers_text(job.chain, run[0], run[-1]) for run in runs)
    words = {layer: job.chain.layer_name(layer).rpartition(" ")[0] for layer in block_layers(job.chain)}
    totals, own = Counter(words.values()), Counter(words.get(layer, job.chain.layer_name(layer)) for layer in layers)
    return ", ".join(f"{count} of {totals[word]} {word}s" if totals[word] else word for word, count in own.items())
