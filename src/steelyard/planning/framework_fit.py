"""The best plan that a framework of limited means can express, searched on the costs of running it there.

Every configuration of the pipeline is searched with every strategy that all layers may share (`Capabilities`), cuts
free, within what the user asked of the plan. Costs are those of the framework's own way of working (`Execution`), so a
plan that it could run as it is is searched again where that way is another one. Where a framework recomputes the first
n blocks of every stage, the best plans with remat free per block are found first; each is then given the least n with
which it fits. That last step keeps their cuts, so it is exact for one stage and a good answer, not a proven one, for
more.

What the user asked for is given up last, one demand if that is enough, and named with the reason: the framework has
nothing of the kind, or nothing fits with it.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from steelyard.cost.build import build_tables
from steelyard.cost.execution import OURS, Execution
from steelyard.cost.framework_kernels import job_under
from steelyard.cost.job import Job
from steelyard.cost.tables import CostTables
from steelyard.model.chain import LayerRole, LayerType
from steelyard.plan.capabilities import Capabilities, block_layers, unsupported
from steelyard.plan.decisions import Decisions
from steelyard.plan.dimensions import modes
from steelyard.plan.plan import Plan
from steelyard.plan.stages import StagePart, fold_runs, stages_of
from steelyard.plan.strategy import Remat, Strategy
from steelyard.planning.choose import Acceptance, NothingFitsError, accept, device_bytes, without_margin
from steelyard.planning.pins import Pin, pins_of
from steelyard.planning.price import peak_bytes, with_price
from steelyard.planning.problem import pipeline_configs, stage_strategies
from steelyard.units import format_bytes

NUM_RESCORED = 5
"""Plans whose step time the simulator decides in the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPlan:
    """A plan that a framework can run, beside the plan that was wanted."""

    plan: Plan
    """Priced as the framework runs it."""
    reasons: tuple[str, ...]
    """What of the wanted plan the framework cannot express; empty where it can express all of it."""
    wanted_step_s: float | None
    """Predicted for the wanted plan in this project's runtime; None where nothing was priced."""
    kept: tuple[str, ...] = ()
    """What the user asked for and gets."""
    given_up: tuple[str, ...] = ()
    """What the user asked for and does not get, each with the reason."""
    is_wanted: bool = False
    """Whether ``plan`` is the wanted plan."""

    @property
    def slowdown(self) -> float | None:
        """Step time over that of the wanted plan, minus one; None where nothing was priced."""
        if self.wanted_step_s is None or self.plan.prediction is None:
            return None
        return self.plan.prediction.step_time_s / self.wanted_step_s - 1


def plan_for_framework(
    plan: Plan, job: Job, capabilities: Capabilities, *, framework: str, execution: Execution = OURS
) -> FittedPlan:
    """The fastest plan for the job within the means of a framework that fits, as that framework runs it.

    The plan itself where nothing better is within them: one written by hand always. Raises `NothingFitsError` naming
    the nearest miss where no plan of that form is legal or fits.
    """
    wanted_step_s, theirs = _step_s(with_price(plan, job)), job_under(job, execution)
    reasons = unsupported(plan, capabilities)
    means = _Means(job=theirs, capabilities=capabilities, framework=framework)
    demands = plan.asked.one_by_one() if plan.asked else {}
    itself = None if reasons else with_price(plan, theirs)
    is_settled = itself is not None and (execution == OURS or plan.prediction is None)
    if itself is not None and is_settled:
        kept, given_up, priced = tuple(demands), tuple[str, ...](), [itself]
    else:
        kept, given_up, priced = _best_under(means, demands)
        if itself is not None and peak_bytes(itself) <= job.budget_bytes:
            priced.append(itself)
    best = min(priced, key=_step_s)
    return FittedPlan(
        plan=best.model_copy(update={"asked": plan.asked}),
        reasons=reasons,
        wanted_step_s=wanted_step_s,
        kept=kept,
        given_up=given_up,
        is_wanted=best is itself,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Means:
    """A framework, and the job as it runs it."""

    job: Job
    capabilities: Capabilities
    framework: str


Kept = tuple[tuple[str, ...], tuple[str, ...], list[Plan]]
"""The texts of the decisions that are kept, what was given up with the reasons, and the best plans, priced."""


def _best_under(means: _Means, demands: Mapping[str, Decisions]) -> Kept:
    """The best plans under as many decisions as can be kept; raises `NothingFitsError` where there is none at all."""
    try:
        return tuple(demands), (), _best_plans(means, demands.values())
    except NothingFitsError as error:
        if not demands:
            raise
        miss = error.expected
    tables = partial(uniform_tables_of, means.job, means.capabilities)
    possible = {
        text: each
        for text, each in demands.items()
        if any(True for frees_remat in (False, True) for _ in tables([each], frees_remat=frees_remat))
    }
    if len(possible) < len(demands):
        why = f"nothing that {means.framework} can run of this model, batch and number of devices has it"
        refused = tuple(f"{text}: {why}" for text in demands if text not in possible)
        kept, given_up, plans = _best_under(means, possible)
        return kept, refused + given_up, plans
    found: list[Kept] = []
    for text in demands:
        rest = {other: each for other, each in demands.items() if other != text}
        try:
            plans = _best_plans(means, rest.values())
        except NothingFitsError:
            continue
        found.append((tuple(rest), (f"{text}: with all that was asked there is not {miss}",), plans))
    if found:
        return min(found, key=lambda each: min(_step_s(plan) for plan in each[2]))
    given_up = tuple(f"{text}: with what was asked there is not {miss}" for text in demands)
    return (), given_up, _best_plans(means, ())


def _best_plans(means: _Means, demands: Iterable[Decisions]) -> list[Plan]:
    """The best plans under all these decisions, priced; raises `NothingFitsError` where there is none.

    They leave the margin of the job free if any does.
    """
    job, demands = means.job, tuple(demands)
    pins = pins_of(_decisions(means.capabilities, demands), job.chain)
    tables = list(uniform_tables_of(job, means.capabilities, demands))
    found = accept(job, tables, num_alternatives=NUM_RESCORED - 1) if tables else None
    candidates = [accepted.plan for accepted in found.ranked[:NUM_RESCORED]] if found else []
    free = list(uniform_tables_of(job, means.capabilities, demands, frees_remat=True))
    for accepted in accept(job, free, num_alternatives=NUM_RESCORED - 1).ranked[:NUM_RESCORED] if free else ():
        fitting = with_first_blocks_recomputed(accepted.plan, job, pins)
        candidates += [fitting] if fitting is not None else []
    if not candidates and job.margin_bytes:
        return _best_plans(replace(means, job=without_margin(job)), demands)
    if not candidates:
        raise _nothing(means, found)
    return [with_price(candidate, job) for candidate in candidates]


def uniform_tables_of(
    job: Job, capabilities: Capabilities, demands: Sequence[Decisions] = (), *, frees_remat: bool = False
) -> Iterator[CostTables]:
    """The cost tables of every configuration and every strategy within the capabilities that all layers share.

    Each has one remat choice for all blocks. With ``frees_remat`` full remat is free for every block, and pins of remat
    are for the plan that comes of it: nothing for a framework that has one remat choice for all blocks.
    """
    decisions = _decisions(capabilities, demands)
    pins = pins_of(decisions, job.chain)
    pins = tuple(pin.without("remat") for pin in pins) if frees_remat else pins
    others = (each for each in decisions.allowed_remats if each is not Remat.NONE)
    offering = decisions.model_copy(update={"remats": (Remat.NONE, *others)})
    for config in pipeline_configs(job, decisions) if capabilities.remats_first_blocks or not frees_remat else ():
        if config.pipeline.num_stages > 1 and config.pipeline.schedule.name not in capabilities.schedules:
            continue
        offered = stage_strategies(job, config.devices_per_stage, offering)
        kept = tuple(strategy for strategy in offered if capabilities.refusal(strategy) is None)
        by_base: dict[Strategy, list[Remat]] = {}
        for strategy in kept:
            by_base.setdefault(strategy.without_remat(), []).append(strategy.remat)
        if not kept:
            continue
        full = build_tables(config, kept)
        for base, remats in by_base.items():
            allowed = [each for each in remats if each in decisions.allowed_remats]
            free = (Remat.NONE, Remat.FULL)
            choices = [(each,) for each in allowed] if not frees_remat else [free] if {*free} <= {*allowed} else []
            for each in choices:
                yield from _narrowed(full, base, each, job, pins)


def _decisions(capabilities: Capabilities, demands: Sequence[Decisions]) -> Decisions:
    """What the framework can do of what is asked for."""
    able = Decisions(
        remats=tuple(remat for remat in Remat if remat in capabilities.remats),
        modes={
            key: tuple(each for each in v.texts if capabilities.offers(key, each)) for key, (_, v) in modes().items()
        },
    )
    return able.with_also(*demands)


def _narrowed(
    full: CostTables, base: Strategy, remats: tuple[Remat, ...], job: Job, pins: Sequence[Pin]
) -> Iterator[CostTables]:
    """The tables with one strategy for all layers and these remat choices for blocks, none for the ends.

    Layers without experts take it with whole ones. Nothing where a layer has no legal strategy left that its pins meet.
    """
    whole, places = base.with_whole_experts(), {strategy: index for index, strategy in enumerate(full.strategies)}
    allowed = {
        (is_block, has_experts): {
            places.get(replace(base if has_experts else whole, remat=remat))
            for remat in (remats if is_block else (Remat.NONE,))
        }
        for is_block in (False, True)
        for has_experts in (False, True)
    }
    kept = sorted({place for each in allowed.values() for place in each if place is not None})
    chosen = full.select(strategies=kept)
    legal = np.zeros_like(chosen.legal)
    for row, layer_type in enumerate(job.chain.layer_types):
        mine = allowed[layer_type.role is LayerRole.BLOCK, layer_type.num_experts > 0]
        asked = [
            pin for pin in pins if any(pin.covers(layer) for layer, each in enumerate(job.chain.layers) if each == row)
        ]
        for column, place in enumerate(kept):
            is_met = place in mine and all(_meets(full.strategies[place], layer_type, pin) for pin in asked)
            legal[row, column] = is_met and chosen.legal[row, column]
    if chosen.last_types:
        legal[list(chosen.last_types)] |= legal[np.arange(len(legal)) % len(job.chain.layer_types)]
    if all(legal[row].any() for row in set(full.layers)):
        yield replace(chosen, legal=legal)


def _meets(strategy: Strategy, layer_type: LayerType, pin: Pin) -> bool:
    """Whether a layer's strategy has what a pin asks for: of all layers, what layers of its type can have."""
    if pin.first is None:
        pin = pin if layer_type.num_experts else pin.of_levels()
        pin = pin if layer_type.role is LayerRole.BLOCK else pin.without("remat")
    return pin.allows(strategy)


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None, "just priced"
    return plan.prediction.step_time_s


def _nothing(means: _Means, found: Acceptance | None) -> NothingFitsError:
    """That no plan is legal, or by how much the nearest one misses."""
    expected, hint = "that is legal for every layer and this batch", "change the batch or the devices"
    miss = found.search.nearest_miss if found else None
    if miss is not None:
        missing = device_bytes(means.job, miss.needed_bytes) - means.job.budget_bytes
        expected = (
            f"that fits into {format_bytes(means.job.budget_bytes)} per device: the nearest one misses "
            f"{format_bytes(missing)} ({missing} bytes)"
        )
        hint = "export for a target that mixes strategies (pytorch, torchrun), or plan with less memory per device"
    return NothingFitsError(
        field="--to",
        found=f"{means.framework}, which runs one strategy for all layers",
        expected=f"a plan of one strategy {expected}",
        hint=hint,
    )


def with_first_blocks_recomputed(plan: Plan, job: Job, pins: Sequence[Pin] = ()) -> Plan | None:
    """The plan with the first n blocks of every stage recomputed, n the least with which it fits; None where none.

    The least that the pins of its layers leave.
    """
    blocks = set(block_layers(plan.chain()))
    most = max(sum(layer in blocks for layer in part.layers) for part in plan.parts)

    def fits(count: int) -> bool:
        return peak_bytes(with_price(_first_blocks(plan, count, blocks), job)) <= job.budget_bytes

    if not fits(most):
        return None
    least = bisect_left(range(most), True, key=fits)
    types = [plan.chain().type_of(layer) for layer in range(len(plan.strategies))]
    for count in range(least, most + 1):
        found = _first_blocks(plan, count, blocks)
        layers = list(enumerate(zip(found.strategies, types, strict=True)))
        if all(_meets(*each, pin) for pin in pins for layer, each in layers if pin.covers(layer)):
            return found
    return None


def _first_blocks(plan: Plan, count: int, blocks: set[int]) -> Plan:
    parts = []
    for part in plan.parts:
        seen = 0
        strategies: list[Strategy] = []
        for layer, strategy in enumerate(part.strategies, start=part.first_layer):
            recomputes = layer in blocks and seen < count
            seen += layer in blocks
            strategies.append(replace(strategy.without_remat(), remat=Remat.FULL if recomputes else Remat.NONE))
        parts.append(StagePart(ranks=part.ranks, runs=fold_runs(part.first_layer, tuple(strategies))))
    return plan.model_copy(update={"stages": stages_of(parts), "prediction": None})
