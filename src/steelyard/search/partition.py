r"""Cuts and strategies chosen together: the provably fastest plan of one pipeline configuration.

The objective $T = \sum_i t_i + (m-1) \max_i t_i$ depends on the layers only through the stage times, and rises with
each of them. A run of layers $l..l'-1$ on stage $i$, entered from switch class $e$ and left in class $x$, is therefore
described by one number, its minimum time $w_i(l, l', e, x)$ within the memory of the stage. The search has a target
$\hat T$:

1. *Windows*: find where stage $i$ can begin if every stage fits and none is too slow (`runs.possible_runs`).
2. *Runs*: find the minimum times of the runs that a plan of $T \le \hat T$ may hold (`runs.solve_runs`).
3. *Joining*: join them into the fastest pipeline (`pipeline_dp.join_runs`), and solve its runs further until all of
   them are known well enough.

If a plan is found it is optimal, because everything dropped is slower than the target. If not, the target is a proven
lower bound, and the next target is higher. The search ends because a first plan, found greedily, bounds the targets.

| symbol   | name       | unit | meaning                              |
|----------|------------|------|--------------------------------------|
| $\hat T$ | `target_s` | s    | target of the step time              |
| $m$      | –          | –    | microbatches                         |

Not modelled: anything that `CostTables` leaves out; the exact time of the schedule comes from the simulator in `cost`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from steelyard.cost.tables import CostTables
from steelyard.search.bounds import furthest_boundaries, least_memory_strategies
from steelyard.search.evaluate import Solution, evaluate
from steelyard.search.layers import ROUNDING, Pruning, TimeIsUpError, chain_frontier
from steelyard.search.pipeline_dp import Pipeline, join_runs
from steelyard.search.runs import (
    AnyBudget,
    PreparedTables,
    StageRuns,
    filled_boundaries,
    possible_runs,
    runs_between,
    solve_further,
    solve_runs,
    time_limits,
)
from steelyard.search.step_bounds import PricedLayers, least_step_s, least_within_s

Status = Literal["optimal", "feasible", "infeasible", "beaten"]

FIRST_AIM = 0.0005
"""Relative distance of the first target above the lower bound."""

AIM_GROWTH = 2.0
"""Factor by which this relative distance grows from one target to the next."""

PROOF = 0.01
"""Gap above which targets between bound and plan are tried if runs have dropped states."""

MOST_PROOFS = 2
"""Maximum number of these targets, each halfway between the two."""

PRECISION = 0.001
"""Relative precision of the minimum time of the slowest stage."""

FIRST_PLAN_WIDTH = 32
"""States kept per layer in the search for a first plan."""


NO_PLAN = Solution(boundaries=(), strategies=(), stages=(), step_s=np.inf)
"""Placeholder if no plan that fits is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestMiss:
    """Distance of the budget from the smallest one that holds a plan, and the bottleneck.

    ``layer`` is the largest layer of the bottleneck stage when that stage needs as few bytes as possible.
    """

    needed_bytes: int
    miss_bytes: int
    stage: int
    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigResult:
    """Result of one pipeline configuration.

    ``optimal``: ``solution`` is proven best. ``feasible``: best so far when time ran out. ``infeasible``: see
    ``miss`` (None if no budget helps). ``beaten``: proven slower than the cutoff and therefore not searched to the end,
    or time ran out before its search; ``solution`` may then be missing. ``lower_bound_s`` holds for every plan of the
    configuration.
    """

    status: Status
    solution: Solution | None
    lower_bound_s: float
    miss: NearestMiss | None = None

    def at_least(self, bound_s: float) -> "ConfigResult":
        """Return the result with a lower bound of at least ``bound_s``."""
        return replace(self, lower_bound_s=max(self.lower_bound_s, bound_s))

    @property
    def gap(self) -> float:
        """Fraction of the step time that is not proven necessary; 0 if optimal."""
        if self.solution is None or self.solution.step_s <= self.lower_bound_s or self.status == "optimal":
            return 0.0
        return 1 - self.lower_bound_s / self.solution.step_s


@dataclass(frozen=True, kw_only=True, eq=False)
class Prospect:
    """A feasible configuration before its search, with bounds and boundaries that are cheap to compute."""

    prepared: PreparedTables
    lower_bound_s: float
    fitting: tuple[int, ...]
    """boundaries of stages as long as their minimum memory allows"""
    filled: tuple[int, ...]
    """boundaries of stages filled up to about the minimum time of the slowest stage"""

    @cached_property
    def least(self) -> Solution:
        """Plan of little memory; it always fits if no layer frees memory."""
        tables, memories = self.prepared.tables, self.prepared.memories
        return evaluate(tables, self.fitting, least_memory_strategies(tables, memories, self.fitting))

    @property
    def fallback(self) -> Solution:
        """Plan of little memory; `NO_PLAN` if it does not fit either."""
        return self.least if self.least.peak_bytes <= self.prepared.budget_bytes else NO_PLAN

    @property
    def miss(self) -> NearestMiss:
        """Miss of the plan of little memory."""
        return miss_of(self.prepared.tables, self.least, self.prepared.budget_bytes)

    def settle(self, *, cutoff_s: float = np.inf, deadline: float | None = None) -> ConfigResult:
        """Return the fastest plan, or the proof that it is slower than the cutoff."""
        if self.lower_bound_s > cutoff_s:
            return ConfigResult(status="beaten", solution=None, lower_bound_s=self.lower_bound_s)
        found = _search_upwards(self.prepared, self._first, self.lower_bound_s, cutoff_s, deadline)
        return replace(found, miss=self.miss) if found.status == "infeasible" else found

    def sketch(self) -> ConfigResult:
        """Return a good plan of a beaten configuration, without an attempt to prove it best."""
        return ConfigResult(status="beaten", solution=self._first.known, lower_bound_s=self.lower_bound_s)

    @property
    def _first(self) -> Solution:
        return first_plan(self.prepared, self.filled) or self.fallback


def assess_chain(of: CostTables | AnyBudget, budget_bytes: int) -> Prospect | ConfigResult:
    """Return a feasible configuration with a lower bound of its step time, or the proof that it is infeasible."""
    known = of if isinstance(of, AnyBudget) else AnyBudget(of)
    tables = known.tables
    assert not tables.cross_layer_inputs, "`cross_layer_inputs` resolves them first"
    memories = known.memories
    fitting = furthest_boundaries(tables, memories, budget_bytes)
    if fitting is None:
        smallest = known.least_plan
        miss = None if smallest is None else miss_of(tables, smallest, budget_bytes)
        return ConfigResult(status="infeasible", solution=None, lower_bound_s=np.inf, miss=miss)
    prepared = known.within(budget_bytes)
    low, high = prepared.fastest_total_s / tables.pipeline.num_stages, _slowest_total_s(tables)
    while high - low > PRECISION * high:  # the minimum bound of the slowest stage lies between them
        middle = (low + high) / 2
        low, high = (low, middle) if filled_boundaries(prepared, middle) else (middle, high)
    even_s = (max(prepared.fastest_total_s, low) + (tables.num_passes - 1) * low) * (1 - ROUNDING)
    return Prospect(
        prepared=prepared,
        lower_bound_s=max(quick_bound_s(tables), even_s),
        fitting=fitting,
        filled=filled_boundaries(prepared, high) or fitting,
    )


def miss_of(tables: CostTables, least: Solution, budget_bytes: int) -> NearestMiss:
    """Return the miss of a plan of little memory."""
    sizes = [stage.total_bytes for stage in least.stages]
    stage = int(np.argmax(sizes))
    start, end = least.boundaries[stage], least.boundaries[stage + 1]
    held = tables.held_bytes(least.stages[stage].in_flight) + tables.transient_bytes
    alone = [
        held[layer_type, least.strategies[start + place]]
        for place, layer_type in enumerate(tables.run_types(range(start, end)))
    ]
    return NearestMiss(
        needed_bytes=sizes[stage],
        miss_bytes=sizes[stage] - budget_bytes,
        stage=stage,
        layer=start + int(np.argmax(alone)),
    )


def quick_bound_s(tables: CostTables) -> float:
    """Lower bound of the step time without memory and resharding: perfectly even stages of fastest strategies.

    Infinite if a layer has no legal strategy.
    """
    if tables.pools is not None:
        counts = np.bincount(tables.layers, minlength=len(tables.layer_types)).tolist()
        alone = [
            PricedLayers.unpriced(np.where(tables.legal_on(stage), tables.time_s, np.inf).min(axis=1), counts)
            for stage in map(tables.pools.of_stages.index, range(max(tables.pools.of_stages) + 1))
        ]
        stages = [alone[pool] for pool in tables.pools.of_stages]
        return least_step_s(stages, counts, tables.pools.transfer_s, tables.num_passes) * (1 - ROUNDING)
    fastest = np.where(tables.legal, tables.time_s, np.inf).min(axis=1)[list(tables.layers)]
    if not np.isfinite(fastest).all():
        return np.inf
    total = float(fastest.sum()) + tables.all_received_s
    worst = max(total / tables.pipeline.num_stages, float(fastest.max()))
    return (total + (tables.num_passes - 1) * worst) * (1 - ROUNDING)


def bound_within_s(tables: CostTables, budget_bytes: int) -> float:
    """Lower bound of the step time: `quick_bound_s`, and in one pool whose layers all take time `least_within_s`."""
    quick_s, takes_time = quick_bound_s(tables), tables.time_s[tables.legal].min(initial=np.inf) > 0
    if tables.pools is not None or quick_s == np.inf or not takes_time:
        return quick_s
    return max(quick_s, least_within_s(tables, budget_bytes) * (1 - ROUNDING))


def first_plan(prepared: PreparedTables, boundaries: Sequence[int]) -> Solution | None:
    """Return a good plan with these boundaries, built greedily stage by stage with few states; None if stuck."""
    strategies: list[int] = []
    entries = None
    for stage, (start, end) in enumerate(itertools.pairwise(boundaries)):
        bounds = prepared.bounds[stage]
        pruning = Pruning(
            budget_bytes=prepared.rooms[stage],
            limit_s=np.inf,
            prices=bounds.good_prices(start, end),
            width=FIRST_PLAN_WIDTH,
        )
        layer_types = prepared.tables.run_types(range(start, end))
        received = prepared.received(stage)
        chain = chain_frontier(bounds.costs, layer_types, entries=entries, pruning=pruning, received=received)
        if len(chain.last) == 0:
            return None
        best = int(np.argmin(chain.last.seconds))
        strategies.extend(chain.strategies(best))
        entries = chain.last.group[best : best + 1]
    return evaluate(prepared.tables, boundaries, strategies)


def _search_upwards(
    prepared: PreparedTables,
    best: Solution,
    lower: float,
    cutoff_s: float,
    deadline: float | None,
    boundaries: Sequence[int] | None = None,
) -> ConfigResult:
    """Raise the target from the lower bound until a plan is found, the best known one is reached or time is up.

    The plan is proven optimal if no run has dropped states that may be faster.
    """
    aim = FIRST_AIM
    slowest_s = _slowest_total_s(prepared.tables) * prepared.tables.num_passes * (1 + FIRST_AIM)
    while lower <= cutoff_s and lower < best.step_s:
        target = min(lower + aim * (lower or min(best.step_s, slowest_s)), cutoff_s, best.step_s)
        try:
            best, lower = improve(prepared, best, lower, target, boundaries, deadline)
        except TimeIsUpError:
            return ConfigResult(status="feasible", solution=best.known, lower_bound_s=lower)
        if target > slowest_s and not best.strategies:
            return ConfigResult(status="infeasible", solution=None, lower_bound_s=np.inf)
        if target >= min(best.step_s, cutoff_s):
            break
        aim *= AIM_GROWTH
    for _ in range(MOST_PROOFS):
        least_s, before = min(best.step_s, cutoff_s), lower
        if lower >= least_s * (1 - PROOF) or not prepared.forget_dropped():
            break
        try:
            best, lower = improve(prepared, best, lower, (lower + least_s) / 2, boundaries, deadline)
        except TimeIsUpError:
            break
        if lower == before:
            break
    lower = min(lower, best.step_s)
    if lower < min(best.step_s, cutoff_s):
        return ConfigResult(status="feasible", solution=best.known, lower_bound_s=lower)
    if best.step_s > cutoff_s or not best.strategies:
        return ConfigResult(status="beaten", solution=best.known, lower_bound_s=lower)
    return ConfigResult(status="optimal", solution=best, lower_bound_s=best.step_s)


def _slowest_total_s(tables: CostTables) -> float:
    """Upper bound of the sum of the stage times of any plan, in seconds."""
    layer_types = list(tables.layers)
    slowest = np.where(tables.legal, tables.time_s, 0.0).max(axis=1)[layer_types].sum()
    return float(slowest + tables.switch_s.max(axis=(1, 2))[layer_types].sum()) + tables.all_received_s


def improve(
    prepared: PreparedTables,
    best: Solution,
    lower: float,
    target_s: float,
    boundaries: Sequence[int] | None = None,
    deadline: float | None = None,
) -> tuple[Solution, float]:
    """Return a better plan, the best one if it is within the target, and a better lower bound of all plans.

    With ``boundaries`` only plans with these count. If runs have dropped states, a plan may be faster than the best
    one, but not than the bound. Raises `TimeIsUpError` after the deadline.
    """
    aim = target_s * (1 + ROUNDING)
    stages = possible_runs(prepared, aim) if boundaries is None else runs_between(prepared, boundaries)
    if stages is None:
        return best, max(lower, aim)
    least_s = lower
    while True:
        solve_runs(prepared, stages, aim, deadline)
        pipeline = join_runs(prepared, stages, aim)
        if pipeline is None:
            return best, max(lower, _proven_s(prepared, stages, aim))
        least_s = max(least_s, pipeline.step_s * (1 - ROUNDING))
        best = min(best, _plan_of(prepared, stages, pipeline) or best, key=lambda plan: plan.step_s)
        if best.step_s <= least_s * (1 + 2 * ROUNDING) or not pipeline.hopeful:
            return best, max(lower, _proven_s(prepared, stages, best.step_s))
        limits = time_limits(prepared, stages, aim)
        for stage in pipeline.hopeful:
            runs, leg = stages[stage], pipeline.legs[stage]
            place = (leg.start - int(runs.starts[0]), leg.end - int(runs.ends[0]))
            solve_further(prepared, stage, runs, place, float(limits[stage][place]), deadline)


def _proven_s(prepared: PreparedTables, stages: Sequence[StageRuns], most_s: float) -> float:
    """Lower bound, of at most ``most_s``, of the step time of all plans, from the lower bounds of all runs.

    ``most_s`` is one if no run has dropped states.
    """
    if not prepared.has_dropped:
        return most_s
    hopeful = [replace(runs, level_s=runs.bound_s, found={}) for runs in stages]
    fastest = join_runs(prepared, hopeful, most_s)
    return most_s if fastest is None else fastest.step_s * (1 - ROUNDING)


def _plan_of(prepared: PreparedTables, stages: Sequence[StageRuns], pipeline: Pipeline) -> Solution | None:
    """Return the plan of a pipeline, with the best known states of its hopeful runs.

    None if no state is known of a run, or if the plan is too large because a run was solved after a different layer.
    """
    strategies: list[int] = []
    for runs, leg in zip(stages, pipeline.legs, strict=True):
        known = runs.found.get((leg.start - int(runs.starts[0]), leg.end - int(runs.ends[0])))
        if known is None or len(known.seconds) == 0:
            return None
        strategies.extend(known.chain.strategies(leg.state) if leg.state >= 0 else known.best())
    plan = evaluate(prepared.tables, (0, *(leg.end for leg in pipeline.legs)), strategies)
    return plan if plan.peak_bytes <= prepared.budget_bytes else None


def best_for_boundaries(prepared: PreparedTables, boundaries: Sequence[int]) -> Solution | None:
    """Return the fastest plan with exactly these boundaries, or None if some stage cannot fit."""
    spans = itertools.pairwise(boundaries)
    for memory, room_bytes, (start, end) in zip(prepared.memories, prepared.rooms, spans, strict=True):
        if memory.least_bytes(start, end) > room_bytes:
            return None
    least = evaluate(
        prepared.tables, boundaries, least_memory_strategies(prepared.tables, prepared.memories, boundaries)
    )
    known = [first_plan(prepared, boundaries) or NO_PLAN]
    known += [least] if least.peak_bytes <= prepared.budget_bytes else []
    best = min(known, key=lambda plan: plan.step_s)
    return _search_upwards(prepared, best, prepared.fastest_total_s, np.inf, None, boundaries).solution
