"""The best plan that a framework of limited means can express, searched on the same costs as any other plan.

Every setting of the pipeline is searched with every strategy that all layers may share (`Capabilities`), cuts free.
Where a framework recomputes the first n blocks of every stage, the best plans with remat free per block are found
first; each is then given the least n with which it fits. That last step keeps their cuts, so it is exact for one stage
and a good answer, not a proven one, for more.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from steelyard.cost.build import build_tables
from steelyard.cost.setting import Job
from steelyard.cost.tables import CostTables
from steelyard.model.chain import LayerRole
from steelyard.plan.capabilities import Capabilities, block_layers, unsupported
from steelyard.plan.kinds import variants
from steelyard.plan.plan import LayerRun, Plan, StagePlan, fold_runs
from steelyard.plan.strategy import Remat, Strategy
from steelyard.planning.acceptance import Accepted, accept
from steelyard.planning.choose import NothingFitsError, device_bytes
from steelyard.planning.price import peak_bytes, with_price
from steelyard.planning.problem import PlanOptions, pipeline_settings, stage_strategies
from steelyard.units import format_bytes

NUM_RESCORED = 5
"""Plans whose step time the simulator decides in the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPlan:
    """A plan that a framework can run, beside the plan that was wanted."""

    plan: Plan
    reasons: tuple[str, ...]
    """What of the wanted plan the framework cannot express; empty where ``plan`` is the wanted one."""
    wanted_step_s: float | None
    """Predicted for the wanted plan, with the same costs; None where nothing was priced."""

    @property
    def slowdown(self) -> float | None:
        """Step time over that of the wanted plan, minus one; None where nothing was priced."""
        if self.wanted_step_s is None or self.plan.prediction is None:
            return None
        return self.plan.prediction.step_time_s / self.wanted_step_s - 1


def plan_for_framework(plan: Plan, job: Job, capabilities: Capabilities, *, framework: str) -> FittedPlan:
    """The fastest plan for the job within the means of a framework that fits; the plan itself where it is within them.

    Raises `NothingFitsError` naming the nearest miss where no plan of that form is legal or fits.
    """
    wanted = with_price(plan, job)
    wanted_step_s = _step_s(wanted)
    reasons = unsupported(plan, capabilities)
    if not reasons:
        return FittedPlan(plan=wanted, reasons=(), wanted_step_s=wanted_step_s)
    candidates = _best_plans(job, list(uniform_tables_of(job, capabilities)), framework)
    if capabilities.remats_first_blocks:
        relaxed = list(_free_remat_tables(job, capabilities))
        for accepted in _ranked(job, relaxed):
            fitting = with_first_blocks_recomputed(accepted.plan, job)
            candidates += [fitting] if fitting is not None else []
    priced = [with_price(candidate, job) for candidate in candidates]
    return FittedPlan(plan=min(priced, key=_step_s), reasons=reasons, wanted_step_s=wanted_step_s)


def uniform_tables_of(job: Job, capabilities: Capabilities) -> Iterator[CostTables]:
    """The cost tables of every setting and every strategy that all layers share, one remat choice for all blocks."""
    for full in _setting_tables(job, capabilities):
        for by_remat in _by_base(full.strategies).values():
            for remat, index in by_remat.items():
                kept = [by_remat[Remat.NONE]] if remat is Remat.NONE else [by_remat[Remat.NONE], index]
                narrowed = _narrowed(full, kept, job, blocks_at=len(kept) - 1)
                if narrowed is not None:
                    yield narrowed


def _free_remat_tables(job: Job, capabilities: Capabilities) -> Iterator[CostTables]:
    """As above, with full remat free for every block."""
    for full in _setting_tables(job, capabilities):
        for by_remat in _by_base(full.strategies).values():
            if Remat.FULL in by_remat:
                narrowed = _narrowed(full, [by_remat[Remat.NONE], by_remat[Remat.FULL]], job, blocks_at=None)
                if narrowed is not None:
                    yield narrowed


def _setting_tables(job: Job, capabilities: Capabilities) -> Iterator[CostTables]:
    """The cost tables of every setting within the capabilities, with every strategy within them."""
    options = PlanOptions(
        num_stages=1 if capabilities.pipeline == "none" else None,
        remats=tuple(remat for remat in Remat if remat in capabilities.remats),
        variants={
            key: tuple(each for each in v.texts if capabilities.offers(key, each)) for key, (_, v) in variants().items()
        },
    )
    for setting in pipeline_settings(job, options):
        if setting.pipeline.num_stages == 1 or setting.pipeline.schedule.name in capabilities.schedules:
            offered = stage_strategies(job, setting.devices_per_stage, options)
            kept = tuple(strategy for strategy in offered if capabilities.refusal(strategy) is None)
            if kept:
                yield build_tables(setting, kept)


def _by_base(strategies: Sequence[Strategy]) -> dict[Strategy, dict[Remat, int]]:
    """For every strategy without remat, where it and its variants with remat are."""
    found: dict[Strategy, dict[Remat, int]] = {}
    for index, strategy in enumerate(strategies):
        found.setdefault(strategy.without_remat(), {})[strategy.remat] = index
    return found


def _narrowed(full: CostTables, kept: list[int], job: Job, *, blocks_at: int | None) -> CostTables | None:
    """The tables with these strategies alone, the first for the ends, the one at ``blocks_at`` (or any) for blocks.

    None where a layer has no legal strategy left.
    """
    chosen = full.select(strategies=kept)
    legal = chosen.legal.copy()
    for row, kind in enumerate(job.chain.kinds):
        if kind.role is not LayerRole.BLOCK:
            legal[row, 1:] = False
        elif blocks_at is not None:
            legal[row, [index for index in range(len(kept)) if index != blocks_at]] = False
    if not all(legal[row].any() for row in set(full.layers)):
        return None
    return replace(chosen, legal=legal)


def _ranked(job: Job, tables: list[CostTables]) -> tuple[Accepted, ...]:
    if not tables:
        return ()
    return accept(job, tables, num_alternatives=NUM_RESCORED - 1).ranked[:NUM_RESCORED]


def _best_plans(job: Job, tables: list[CostTables], framework: str) -> list[Plan]:
    """The best plans of one strategy; raises `NothingFitsError` where there is none."""
    if not tables:
        raise _nothing(framework, "that is legal for every layer and this batch", "change the batch or the devices")
    found = accept(job, tables, num_alternatives=NUM_RESCORED - 1)
    if not found.ranked:
        miss = found.search.nearest_miss
        missing = device_bytes(job, miss.needed_bytes) - job.budget_bytes if miss else 0
        raise _nothing(
            framework,
            f"that fits into {format_bytes(job.budget_bytes)} per device: the nearest one misses "
            f"{format_bytes(missing)} ({missing} bytes)",
            "export for a target that mixes strategies (pytorch, torchrun), or plan with less memory per device",
        )
    return [accepted.plan for accepted in found.ranked[:NUM_RESCORED]]


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None, "just priced"
    return plan.prediction.step_time_s


def _nothing(framework: str, expected: str, hint: str) -> NothingFitsError:
    return NothingFitsError(
        field="--to",
        found=f"{framework}, which runs one strategy for all layers",
        expected=f"a plan of one strategy {expected}",
        hint=hint,
    )


def with_first_blocks_recomputed(plan: Plan, job: Job) -> Plan | None:
    """The plan with the first n blocks of every stage recomputed, n the least with which it fits; None where none."""
    blocks = set(block_layers(plan.chain()))
    most = max(sum(layer in blocks for layer in part.layers) for part in plan.stages)

    def fits(count: int) -> bool:
        return peak_bytes(with_price(_first_blocks(plan, count, blocks), job)) <= job.budget_bytes

    if not fits(most):
        return None
    least = bisect_left(range(most), True, key=fits)
    return _first_blocks(plan, least, blocks)


def _first_blocks(plan: Plan, count: int, blocks: set[int]) -> Plan:
    stages = []
    for part in plan.stages:
        seen = 0
        strategies: list[Strategy] = []
        for layer, strategy in enumerate(part.strategies, start=part.first_layer):
            recomputes = layer in blocks and seen < count
            seen += layer in blocks
            strategies.append(replace(strategy.without_remat(), remat=Remat.FULL if recomputes else Remat.NONE))
        runs: tuple[LayerRun, ...] = fold_runs(part.first_layer, tuple(strategies))
        stages.append(StagePlan(ranks=part.ranks, runs=runs))
    return plan.model_copy(update={"stages": tuple(stages), "prediction": None})
