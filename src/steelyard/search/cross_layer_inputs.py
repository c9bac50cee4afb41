r"""Exact search with cross-layer inputs, by conditions on the layers that make them.

A cross-layer input $v$ is made by layer $o_v$ and read by the layers $R_v$, each of which pays $d_v(s_{o_v}, s_l)$ for
it (see `CostTables`). If the strategy of $o_v$ is known to be in a set $A_v$, a reader pays at least

$$\underline d_v(s_l) = \min_{s \in A_v} d_v(s, s_l)$$

which is an ordinary time of this layer, so that the chain search applies: readers and sources become separate layer
types, and a source may take only the strategies of $A_v$. The result is a lower bound of every plan under the
condition. It is exact if all of $A_v$ cost the readers the same (FT's branch elimination: one search for each switch
class of the source) or if the plan found pays no more than $\underline d_v$. If it is not exact, the condition is split
into the class of the plan found and the rest, without classes that the best known plan beats by their times alone.
Conditions are searched in the order of their bounds until the best known plan is no slower than the lowest bound. An
optimal plan is therefore still proven optimal, and a search that reaches its deadline reports a gap.

| symbol            | name        | unit | meaning                                                            |
|-------------------|-------------|------|--------------------------------------------------------------------|
| $A_v$             | `Condition` | –    | strategies that a source may take, by the source's position        |
| $\underline d_v$  | –           | s    | minimum that a reader pays under the condition                     |

`partition_exact`, `assess` and `partition_with` extend those of `partition` and `balance` to tables with cross-layer
inputs. Memory is not affected: the same plans fit with cross-layer inputs as without.

Source: Cai et al. 2020 (TensorOpt, arXiv 2004.10856), section 4, for conditions on one layer; best-first branch and
bound over them is ours. Not modelled: readers that share one redistribution.
"""

import heapq
import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from steelyard.cost.tables import CostTables
from steelyard.plan.decisions import Partition
from steelyard.search import partition
from steelyard.search.balance import partition_by
from steelyard.search.evaluate import Solution, evaluate
from steelyard.search.kernels import IntArray
from steelyard.search.partition import NO_PLAN, PROOF, ConfigResult, Prospect, quick_bound_s
from steelyard.search.runs import AnyBudget

Condition = Mapping[int, IntArray]
"""Strategies that a layer may take, for each layer that makes a cross-layer input."""

TIES = 1 - 1e-12
"""Factor within which a bound ties with the best plan: sums of the same numbers differ by about 1e-13."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CrossLayerProspect:
    """A feasible configuration with cross-layer inputs before its search.

    In ``relaxed`` every reader has its cheapest source strategy.
    """

    tables: CostTables
    budget_bytes: int
    relaxed: Prospect
    fallback: Solution

    @property
    def lower_bound_s(self) -> float:
        """Lower bound of the step time of the configuration's plans."""
        return self.relaxed.lower_bound_s

    def settle(self, *, cutoff_s: float = np.inf, deadline: float | None = None) -> ConfigResult:
        """Return the result of the search; see `Prospect.settle`."""
        if self.lower_bound_s > cutoff_s:
            return ConfigResult(status="beaten", solution=None, lower_bound_s=self.lower_bound_s)
        return _search_conditions(self, cutoff_s, deadline)

    def sketch(self) -> ConfigResult:
        """Return a plan without a search; see `Prospect.sketch`."""
        found = self.relaxed.sketch().solution
        best = min(self.fallback, _priced(self.tables, found) if found else self.fallback, key=lambda plan: plan.step_s)
        return ConfigResult(status="beaten", solution=best.known, lower_bound_s=self.lower_bound_s)


def partition_exact(
    of: CostTables | AnyBudget, budget_bytes: int, *, cutoff_s: float = np.inf, deadline: float | None = None
) -> ConfigResult:
    """Return the fastest plan of this configuration within the budget per device, with its proof.

    A configuration that cannot be as fast as ``cutoff_s`` is returned as beaten. ``deadline`` is a `time.process_time`
    value. `AnyBudget` shares work between budgets.
    """
    found = assess(of, budget_bytes)
    return found if isinstance(found, ConfigResult) else found.settle(cutoff_s=cutoff_s, deadline=deadline)


def assess(of: CostTables | AnyBudget, budget_bytes: int) -> Prospect | CrossLayerProspect | ConfigResult:
    """Return a feasible configuration with a lower bound of its step time, or the proof that it is infeasible."""
    tables = of.tables if isinstance(of, AnyBudget) else of
    if not tables.cross_layer_inputs:
        return partition.assess_chain(of, budget_bytes)
    relaxed = partition.assess_chain(conditioned(tables, any_source(tables)), budget_bytes)
    if isinstance(relaxed, ConfigResult):
        return relaxed
    fallback = _priced(tables, relaxed.fallback) if relaxed.fallback.strategies else NO_PLAN
    return CrossLayerProspect(tables=tables, budget_bytes=budget_bytes, relaxed=relaxed, fallback=fallback)


def partition_with(method: Partition, tables: CostTables, budget_bytes: int) -> ConfigResult:
    """Return the plan that this method of cutting finds, or with cross-layer inputs its fastest over all conditions."""
    if not tables.cross_layer_inputs:
        return partition_by(method, tables, budget_bytes)
    found = assess(tables, budget_bytes)
    if isinstance(found, ConfigResult):
        return found
    results = [partition_by(method, conditioned(tables, each), budget_bytes) for each in all_conditions(tables)]
    plans = [_priced(tables, each.solution) for each in results if each.solution is not None]
    return ConfigResult(
        status="feasible" if plans else "infeasible",
        solution=min(plans, key=lambda plan: plan.step_s, default=None),
        lower_bound_s=found.lower_bound_s,
    )


def any_source(tables: CostTables) -> dict[int, IntArray]:
    """Return the condition that excludes nothing."""
    return {
        source: np.flatnonzero(tables.legal[tables.layers[source]])
        for source in sorted({side.source for side in tables.cross_layer_inputs})
    }


def source_classes(tables: CostTables, source: int) -> list[IntArray]:
    """Return the strategies of a source in classes within which every reader pays the same, whatever its own layout."""
    legal = any_source(tables)[source]
    if len(legal) == 0:
        return []
    columns = []
    for side in tables.cross_layer_inputs:
        if side.source == source:
            layer_types = [tables.layers[reader] for reader in side.readers]
            columns.append(side.seconds[legal][:, tables.legal[layer_types].any(axis=0)])
    rows = np.concatenate(columns, axis=1)
    classes: dict[bytes, list[int]] = {}
    for strategy, row in zip(legal.tolist(), rows, strict=True):
        classes.setdefault((row + 0.0).tobytes(), []).append(strategy)
    return [np.array(members) for members in classes.values()]


def all_conditions(tables: CostTables) -> Iterator[Condition]:
    """Yield every choice of one class for each source."""
    sources = list(any_source(tables))
    for chosen in itertools.product(*(source_classes(tables, source) for source in sources)):
        yield dict(zip(sources, chosen, strict=True))


def conditioned(tables: CostTables, condition: Condition) -> CostTables:
    """Return tables of the same layers without cross-layer inputs: sources restricted, readers paying their minimum.

    Plans take the same bytes as in the given tables and at most the same time. The time is equal if the strategies that
    a source may take are of one class.
    """
    reads: dict[int, list[int]] = {}
    for index, side in enumerate(tables.cross_layer_inputs):
        for reader in side.readers:
            reads.setdefault(reader, []).append(index)
    roles = [
        (layer_type, layer if layer in condition else None, tuple(reads.get(layer, ())))
        for layer, layer_type in enumerate(tables.layers)
    ]
    last_roles = {role: (tables.last_types[role[0]], *role[1:]) for role in roles} if tables.last_types else {}
    layer_types = list(dict.fromkeys([*roles, *last_roles.values()]))
    base = [layer_type for layer_type, _, _ in layer_types]
    chain = replace(tables, cross_layer_inputs=())
    chosen = chain.select(base, layers=[layer_types.index(role) for role in roles])
    last_types = tuple(layer_types.index(last_roles.get(role, role)) for role in layer_types) if last_roles else ()
    legal, time_s = chosen.legal, chosen.time_s
    for row, (_, source, sides) in enumerate(layer_types):
        if source is not None:
            legal[row] &= np.isin(np.arange(legal.shape[1]), condition[source])
        for side in (tables.cross_layer_inputs[index] for index in sides):
            allowed = side.seconds[condition[side.source]]
            time_s[row] += allowed.min(axis=0) if len(allowed) else 0.0
    return replace(chosen, last_types=last_types)


def _search_conditions(prospect: CrossLayerProspect, cutoff_s: float, deadline: float | None) -> ConfigResult:
    """Search conditions in the order of their bounds, split until the best plan is proven, beaten, or time is up."""
    tables, best = prospect.tables, prospect.fallback
    order = itertools.count()
    waiting: list[tuple[float, int, Condition, Prospect]] = [
        (prospect.lower_bound_s, next(order), any_source(tables), prospect.relaxed)
    ]
    lower, was_cut, timed_out = np.inf, False, False  # lower bound of the finished conditions
    while waiting and waiting[0][0] < best.step_s * TIES and waiting[0][0] <= cutoff_s and not timed_out:
        bound, _, condition, start = heapq.heappop(waiting)
        limit = min(cutoff_s, best.step_s) or best.step_s  # no plan is proven slower than zero by aiming at zero
        result = start.settle(cutoff_s=limit, deadline=deadline)
        bound = max(bound, result.lower_bound_s, limit if result.status == "beaten" else 0.0)
        plan = _priced(tables, result.solution) if result.solution is not None else None
        best = min(best, plan or best, key=lambda each: each.step_s)
        limit = min(cutoff_s, best.step_s * TIES)
        timed_out = deadline is not None and time.process_time() > deadline
        has_dropped = bound < limit * (1 - PROOF) and not timed_out  # states that may be faster
        may_split = result.status == "optimal" or has_dropped
        children = _split(tables, condition, plan, limit) if plan is not None and may_split else None
        for child in children or ():
            inner = partition.assess_chain(conditioned(tables, child), prospect.budget_bytes)
            if isinstance(inner, Prospect):
                heapq.heappush(waiting, (max(bound, inner.lower_bound_s), next(order), child, inner))
        lower = min(lower, bound if children is None else limit)
        was_cut = was_cut or result.status == "feasible"
    lower = min(lower, waiting[0][0] if waiting else np.inf)
    if not best.strategies and lower == np.inf:
        return ConfigResult(status="infeasible", solution=None, lower_bound_s=np.inf, miss=prospect.relaxed.miss)
    return _outcome(best, lower, cutoff_s, was_cut or timed_out)


def _outcome(best: Solution, lower_s: float, cutoff_s: float, was_cut: bool) -> ConfigResult:
    """Return the result of a finished search.

    Its best plan is proven or beaten unless a condition was not searched to the end and its bound is lower.
    """
    status: Literal["feasible", "beaten"]
    if not best.strategies:
        status = "feasible" if was_cut and lower_s <= cutoff_s else "beaten"
        return ConfigResult(status=status, solution=None, lower_bound_s=lower_s)
    if best.step_s <= cutoff_s and (not was_cut or lower_s >= best.step_s * TIES):
        return ConfigResult(status="optimal", solution=best, lower_bound_s=best.step_s)
    status = "feasible" if was_cut and lower_s <= cutoff_s else "beaten"
    return ConfigResult(status=status, solution=best, lower_bound_s=min(lower_s, best.step_s))


def _split(tables: CostTables, condition: Condition, plan: Solution, limit_s: float) -> list[Condition] | None:
    """Split the condition in two if the plan pays more for a cross-layer input than its minimum; else return None.

    Sources for which the plan's readers pay nearer to the minimum are told from those for which they pay nearer to what
    the plan pays, so that readers pay it in all plans of one half. Classes of the source without a plan faster than
    ``limit_s`` in unlimited memory are left out.
    """
    for side in tables.cross_layer_inputs:
        own, allowed = plan.strategies[side.source], condition[side.source]
        columns = np.array([plan.strategies[reader] for reader in side.readers])
        if np.any(side.seconds[own, columns] > side.seconds[np.ix_(allowed, columns)].min(axis=0)):
            shared = (np.intersect1d(allowed, each) for each in source_classes(tables, side.source))
            classes = [each for each in shared if len(each)]
            bounds_s = [quick_bound_s(conditioned(tables, {**condition, side.source: each})) for each in classes]
            hopeful = [each for each, bound_s in zip(classes, bounds_s, strict=True) if bound_s < limit_s]
            paid_s = [float(side.seconds[each[0], columns].sum()) for each in hopeful]
            own_s = float(side.seconds[own, columns].sum())
            least_s = min(paid_s, default=own_s)
            halves: tuple[list[IntArray], list[IntArray]] = [], []
            for each, each_s in zip(hopeful, paid_s, strict=True):
                is_near = each_s <= (least_s + own_s) / 2 if least_s < own_s else own in each
                halves[not is_near].append(each)
            return [{**condition, side.source: np.sort(np.concatenate(each))} for each in halves if each]
    return None


def _priced(tables: CostTables, plan: Solution) -> Solution:
    """Return the same choice with the true cost of its cross-layer inputs."""
    return evaluate(tables, plan.boundaries, plan.strategies)
