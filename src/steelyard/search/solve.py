"""Search for the fastest plan of all pipeline configurations within a memory budget, with proof and alternatives.

Every `CostTables` is one configuration (stages, microbatches, schedule). Configurations are visited in order of their
lower bounds, and each is solved exactly unless it is proven slower than the plans already found. Tables are built on
first use (`OnDemand`): most configurations are beaten by the time of their computation alone. Ties are broken by the
order of the given tables, so equal inputs give equal results.

If ``samples`` (the global batch of each configuration) is given, configurations compete on seconds per sample instead
of seconds per step.
"""

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from steelyard.cost.tables import CostTables
from steelyard.errors import InvalidProblemError
from steelyard.plan.decisions import Partition
from steelyard.schedules import PipelineConfig
from steelyard.search.bounds import IMPOSSIBLE
from steelyard.search.cross_layer_inputs import CrossLayerProspect, assess, partition_exact, partition_with
from steelyard.search.cuts import Choice, ChoiceProspect, Leading
from steelyard.search.evaluate import Solution
from steelyard.search.partition import ConfigResult, NearestMiss, Prospect, bound_within_s
from steelyard.search.runs import AnyBudget
from steelyard.units import format_bytes, format_seconds


class OnDemand:
    """Cost tables of a pipeline configuration, built on first use.

    ``least_s`` is a lower bound of the step time in seconds, infinite if no plan can run. If tables are expensive, a
    sharper bound comes first: ``sharpen`` returns the configurations that replace this one, given a time in seconds
    above which bounds need not be exact. ``missing_bytes`` returns a lower bound of the memory that a configuration of
    infinite bound lacks, at most the given one.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        least_s: float,
        make: Callable[[], CostTables],
        *,
        sharpen: "Callable[[float], Sequence[OnDemand]] | None" = None,
        missing_bytes: Callable[[int], int] | None = None,
    ) -> None:
        self.pipeline, self.least_s, self._make = pipeline, least_s, make
        self.sharpen, self.missing_bytes = sharpen, missing_bytes
        self._known: AnyBudget | None = None

    @classmethod
    def of(cls, tables: "CostTables | OnDemand") -> "OnDemand":
        """Wrap tables that are already built, without a bound of their plans."""
        if isinstance(tables, OnDemand):
            return tables
        found = cls(tables.pipeline, 0.0, lambda: tables)
        found._known = AnyBudget(tables)
        return found

    @property
    def tables(self) -> CostTables:
        """Cost tables of the configuration."""
        return self.any_budget.tables

    @property
    def any_budget(self) -> AnyBudget:
        """Tables with the parts of their search that are independent of the budget."""
        if self._known is None:
            self._known = AnyBudget(self._make())
        return self._known

    @property
    def is_made(self) -> bool:
        """Whether the tables are built."""
        return self._known is not None

    def bounded(self, least_s: float) -> "OnDemand":
        """Return the same tables with ``least_s`` as a lower bound of the step time."""
        found = OnDemand(self.pipeline, max(least_s, self.least_s), lambda: self.tables)
        found._known = self._known
        return found

    def narrowed(self, narrow: Callable[[CostTables], CostTables]) -> "OnDemand":
        """Return the tables that ``narrow`` reduces to fewer choices."""
        return OnDemand(self.pipeline, self.least_s, lambda: narrow(self.tables))


Choices = Callable[[CostTables], Sequence[Choice]]
"""Function that returns the choices to which the plans of a configuration are restricted."""
TIME_LIMIT_S = 300.0
"""Default time limit of a search in seconds. Most searches take seconds."""
MOST_MISSES = 16
"""Maximum number of infeasible configurations whose miss is computed if plans are restricted to given choices."""
REFUSED = ConfigResult(status="infeasible", solution=None, lower_bound_s=np.inf)
"""Result of a configuration whose bounds show that no plan fits."""
SearchStatus = Literal["optimal", "feasible", "infeasible"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConfigOutcome:
    """One configuration with its search result and the reason why it won, lost or does not fit."""

    index: int
    """position in the tables given"""
    given: OnDemand
    result: ConfigResult
    reason: str
    samples: int = 1

    @property
    def tables(self) -> CostTables:
        """Tables of the configuration, built if they were not."""
        return self.given.tables

    @property
    def pipeline(self) -> PipelineConfig:
        """Stages, microbatches and schedule."""
        return self.given.pipeline

    @property
    def solution(self) -> Solution:
        """Plan found; only for outcomes that have one."""
        assert self.result.solution is not None, "asked for the solution of a configuration that has none"
        return self.result.solution

    @property
    def score_s(self) -> float:
        """Seconds per step, or per sample if samples were given; infinite without a plan."""
        return self.result.solution.step_s / self.samples if self.result.solution else np.inf


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchResult:
    """Result of a search.

    ``optimal``: `best` is proven. ``feasible``: time ran out, and `gap` bounds the possible gain. ``infeasible``:
    nothing fits, and `nearest_miss` (of the configuration ``nearest_index``) is the smallest amount missing.
    """

    status: SearchStatus
    budget_bytes: int
    ranked: tuple[ConfigOutcome, ...]
    """Configurations with a plan, best first; the first ones, in the number requested, are exact."""
    configs: tuple[ConfigOutcome, ...]
    """Every configuration, in the order given."""
    lower_bound_s: float
    """Lower bound over all configurations (seconds per step, or per sample)."""
    nearest_miss: NearestMiss | None = None
    nearest_index: int | None = None

    @property
    def best(self) -> ConfigOutcome | None:
        """Fastest plan and its configuration, or None if nothing fits."""
        return self.ranked[0] if self.ranked else None

    @property
    def alternatives(self) -> tuple[ConfigOutcome, ...]:
        """Best plans of the other configurations, fastest first."""
        return self.ranked[1:]

    @property
    def gap(self) -> float:
        """Fraction of the best time that is not proven necessary; 0 if optimal, 1 if there is no plan."""
        if self.best is None:
            return 1.0
        if self.status == "optimal" or self.best.score_s <= self.lower_bound_s:
            return 0.0
        return 1 - self.lower_bound_s / self.best.score_s


def search(
    tables: Iterable[CostTables | OnDemand],
    budget_bytes: int,
    *,
    num_exact: int = 1,
    num_alternatives: int = 4,
    samples: Sequence[int] | None = None,
    time_limit_s: float | None = None,
    partition: Partition = "exact",
    choices: Choices | None = None,
    cutoff_s: float = np.inf,
    progress: Callable[[str], None] = lambda _: None,
) -> SearchResult:
    """Return the fastest plan of these configurations within the budget per device.

    The best ``num_exact`` configurations are solved to proof; a configuration proven slower than those is left as
    beaten. The most promising ``num_alternatives`` of the beaten ones still get a good plan, not proven best of its
    configuration. A ``partition`` other than exact cuts every configuration that way, for comparison, and proves
    nothing. When the time is up, all remaining configurations count as beaten if there is a plan, and those without
    tables if there is none. ``choices`` restricts the plans of every configuration. Plans above ``cutoff_s`` are not
    searched for.

    Raises `InvalidProblemError` if there are no configurations, or not one entry of ``samples`` for each.
    """
    given = [OnDemand.of(each) for each in tables]
    weights = list(samples) if samples is not None else [1] * len(given)
    if not given or len(weights) != len(given) or min(weights) < 1:
        raise InvalidProblemError(
            field="tables, samples",
            found=f"{len(given)} configurations, {len(weights)} sample counts",
            expected="one or more configurations, each with a sample count of 1 or more",
        )
    budget_bytes = min(budget_bytes, IMPOSSIBLE - 1)  # a layer without a legal strategy fits into no budget
    deadline = None if time_limit_s is None else time.process_time() + time_limit_s
    if partition != "exact":
        results = [_cut_by(partition, each.tables, budget_bytes, choices) for each in given]
        return _summary(given, weights, results, budget_bytes)
    wanted = max(1, num_exact), num_alternatives
    results = _solve_in_order(given, weights, budget_bytes, wanted, deadline, choices, cutoff_s, progress)
    if cutoff_s == np.inf and all(each.solution is None for each in results):
        if choices is None:
            _find_nearest(given, results, budget_bytes)
        else:
            _find_nearest_choice(given, results, budget_bytes, choices)
    return _summary(given, weights, results, budget_bytes)


def _solve_in_order(
    given: list[OnDemand],
    samples: list[int],
    budget_bytes: int,
    wanted: tuple[int, int],
    deadline: float | None,
    choices: Choices | None,
    cutoff_s: float,
    progress: Callable[[str], None],
) -> list[ConfigResult]:
    """Return a result for each configuration.

    The configuration of the lowest bound is always next, first to sharpen its bound, then to solve it. Bounds are the
    given one, that of the tables, and that within the budget. The lists grow if sharpening replaces one configuration
    by several.
    """
    num_exact, num_alternatives = wanted
    results: dict[int, ConfigResult] = {}
    best: list[float] = []
    waiting: list[tuple[float, int, AnyBudget | Prospect | CrossLayerProspect | ChoiceProspect | None]] = [
        (each.least_s / count, index, None)
        for index, (each, count) in enumerate(zip(given, samples, strict=True))
        if each.missing_bytes is None
    ]
    heapq.heapify(waiting)
    num_begun = 0
    while waiting:
        bound, index, known = heapq.heappop(waiting)
        progress(f"{len(results) + 1} of up to {len(given)} pipeline configurations")
        cutoff = min(cutoff_s, -best[0] if len(best) == num_exact else np.inf)
        may_end = bool(best) or (num_begun > 0 and not given[index].is_made)
        is_late = may_end and deadline is not None and time.process_time() >= deadline
        if is_late or (bound > cutoff and num_alternatives <= 0):
            results[index] = ConfigResult(status="beaten", solution=None, lower_bound_s=bound * samples[index])
        elif known is None and given[index].sharpen is not None:
            for each in _sharpen(given, samples, index, cutoff):
                heapq.heappush(waiting, (max(bound, given[each].least_s / samples[each]), each, None))
        elif known is None:
            num_begun += 1
            any_budget = given[index].any_budget
            quick_s = bound_within_s(any_budget.tables, budget_bytes)
            heapq.heappush(waiting, (quick_s / samples[index], index, any_budget))
        elif isinstance(known, AnyBudget):
            assessed = _chosen(known.tables, choices, budget_bytes) if choices else assess(known, budget_bytes)
            if isinstance(assessed, ConfigResult):
                results[index] = assessed
            else:
                heapq.heappush(waiting, (max(bound, assessed.lower_bound_s / samples[index]), index, assessed))
        elif bound > cutoff:
            results[index] = known.sketch().at_least(bound * samples[index])
            num_alternatives -= 1
        else:
            result = known.settle(cutoff_s=cutoff * samples[index], deadline=deadline).at_least(bound * samples[index])
            results[index] = result
            if result.solution is not None:
                heapq.heappush(best, -result.solution.step_s / samples[index])
                if len(best) > num_exact:
                    heapq.heappop(best)
    return [results.get(index, REFUSED) for index in range(len(given))]


def _cut_by(partition: Partition, tables: CostTables, budget_bytes: int, choices: Choices | None) -> ConfigResult:
    """Return the plan of a configuration, or of its fastest choice without leading recomputed blocks, cut this way."""
    if choices is None:
        return partition_with(partition, tables, budget_bytes)
    best = REFUSED
    for choice in sorted(choices(tables), key=lambda each: each.least_s):
        if best.solution is not None and choice.least_s >= best.solution.step_s:
            break
        if choice.leading is Leading.NONE and choice.least_bytes <= budget_bytes:
            found = partition_with(partition, choice.of(tables), budget_bytes)
            known_s = np.inf if best.solution is None else best.solution.step_s
            best = found if found.solution is not None and found.solution.step_s < known_s else best
    return best


def _chosen(tables: CostTables, choices: Choices, budget_bytes: int) -> ChoiceProspect | ConfigResult:
    """Restrict a configuration to these choices."""
    ordered = tuple(sorted(choices(tables), key=lambda each: each.least_s))
    if not ordered:
        return REFUSED
    return ChoiceProspect(tables=tables, choices=ordered, budget_bytes=budget_bytes)


def _sharpen(given: list[OnDemand], samples: list[int], index: int, cutoff_s: float) -> list[int]:
    """Replace a configuration in the lists by its sharper ones; return the places of those that may have a plan."""
    sharpen = given[index].sharpen
    assert sharpen is not None, "asked of a configuration whose bound can be sharpened"
    given[index], *others = sharpen(cutoff_s * samples[index])
    added = range(len(given), len(given) + len(others))
    given += others
    samples += [samples[index]] * len(others)
    return [each for each in (index, *added) if given[each].missing_bytes is None]


def _find_nearest(given: Sequence[OnDemand], results: list[ConfigResult], budget_bytes: int) -> None:
    """Replace the results of configurations without tables, which do not fit, until none can miss by less than the
    nearest one."""
    least = min((each.miss.miss_bytes for each in results if each.miss is not None), default=IMPOSSIBLE)
    refused = [
        (each.missing_bytes(least), index)
        for index, each in enumerate(given)
        if each.missing_bytes is not None and not each.is_made
    ]
    for missing_bytes, index in sorted(refused):
        if missing_bytes >= least:
            break
        results[index] = partition_exact(given[index].any_budget, budget_bytes)
        miss = results[index].miss
        least = least if miss is None else min(least, miss.miss_bytes)


def _find_nearest_choice(
    given: Sequence[OnDemand],
    results: list[ConfigResult],
    budget_bytes: int,
    choices: Choices,
) -> None:
    """Replace the results of the configurations whose choices may need the least memory."""
    prospects = []
    for index, each in enumerate(given):
        found = _chosen(each.tables, choices, budget_bytes) if each.is_made else REFUSED
        if isinstance(found, ChoiceProspect):
            prospects.append((min(choice.least_bytes for choice in found.choices), index, found))
    for _, index, found in sorted(prospects, key=lambda each: each[:2])[:MOST_MISSES]:
        results[index] = found.with_miss()


def _summary(
    given: Sequence[OnDemand], samples: Sequence[int], results: Sequence[ConfigResult], budget_bytes: int
) -> SearchResult:
    scores = [
        result.solution.step_s / count if result.solution else np.inf
        for result, count in zip(results, samples, strict=True)
    ]
    bounds = [result.lower_bound_s / count for result, count in zip(results, samples, strict=True)]
    fastest = min(scores)
    outcomes = tuple(
        ConfigOutcome(
            index=index,
            given=each,
            result=result,
            reason=_reason(each, result, scores[index], fastest, budget_bytes),
            samples=count,
        )
        for index, (each, result, count) in enumerate(zip(given, results, samples, strict=True))
    )
    ranked = tuple(sorted((each for each in outcomes if each.result.solution), key=lambda each: each.score_s))
    if not ranked:
        misses = [(each.result.miss.miss_bytes, each.index) for each in outcomes if each.result.miss is not None]
        nearest = min(misses)[1] if misses else None
        return SearchResult(
            status="infeasible",
            budget_bytes=budget_bytes,
            ranked=(),
            configs=outcomes,
            lower_bound_s=np.inf,
            nearest_miss=None if nearest is None else outcomes[nearest].result.miss,
            nearest_index=nearest,
        )
    lower = min(*bounds, fastest)
    proven = all(bound >= fastest or result.status == "optimal" for bound, result in zip(bounds, results, strict=True))
    return SearchResult(
        status="optimal" if proven else "feasible",
        budget_bytes=budget_bytes,
        ranked=ranked,
        configs=outcomes,
        lower_bound_s=fastest if proven else lower,
    )


def _reason(given: OnDemand, result: ConfigResult, score_s: float, fastest_s: float, budget_bytes: int) -> str:
    """Return one sentence on why a configuration won, lost or does not fit."""
    if result.status == "infeasible" or result.lower_bound_s == np.inf:
        return _why_infeasible(given, result, budget_bytes)
    if result.status == "beaten" and result.solution is None:
        return f"pruned: every plan takes at least {format_seconds(result.lower_bound_s)} per step"
    unproven = "" if result.status == "optimal" else f", not proven best of its configuration (gap {result.gap:.1%})"
    if score_s <= fastest_s:
        return "fastest" + unproven
    slower = f"{score_s / fastest_s - 1:.2%} slower than the fastest" if fastest_s > 0 else "slower than the fastest"
    return slower + unproven


def _why_infeasible(given: OnDemand, result: ConfigResult, budget_bytes: int) -> str:
    if result.miss is None and not given.is_made:
        return ("" if given.missing_bytes is None else "does not fit, or ") + "has a layer without a legal strategy"
    tables = given.tables
    if len(tables.layers) < tables.pipeline.num_stages:
        return f"has {tables.pipeline.num_stages} stages for {len(tables.layers)} layers"
    if result.miss is None:
        fits_otherwise = result.lower_bound_s < np.inf
        return "does not fit with this pipeline split" if fits_otherwise else "has a layer without a legal strategy"
    layer = result.miss.layer
    return (
        f"does not fit: needs {format_bytes(result.miss.miss_bytes)} more than {format_bytes(budget_bytes)} "
        f"per device; the bottleneck is stage {result.miss.stage}, layer {layer} "
        f"({tables.layer_types[tables.layers[layer]]})"
    )
