r"""Partition as a mixed-integer linear program for HiGHS, which shares no idea with our search.

A plan is a path through the layers: at layer $l$ it is at a node (stage $i$, strategy $s$), and goes on to the same or
the next stage. One binary per node and one continuous flow per arc; stage times, their maximum, the transient peak
and the memory of each stage are linear in them.
"""

import itertools
from dataclasses import dataclass, field

import highspy
import numpy as np

from steelyard.cost.tables import CostTables

Node = tuple[int, int, int]


@dataclass
class Rows:
    """Sparse rows ``low <= a x <= high``, collected one at a time."""

    start: list[int] = field(default_factory=lambda: [0])
    index: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, terms: dict[int, float], low: float, high: float) -> None:
        self.index.extend(terms)
        self.value.extend(terms.values())
        self.start.append(len(self.index))
        self.low.append(low)
        self.high.append(high)


def nodes_of(tables: CostTables) -> list[list[Node]]:
    """Nodes (layer, stage, strategy) of each layer that a plan can pass."""
    layers, stages = len(tables.layers), tables.pipeline.num_stages
    return [
        [
            (layer, stage, strategy)
            for stage in range(max(0, stages - layers + layer), min(layer, stages - 1) + 1)
            for strategy in np.flatnonzero(tables.legal[layer_type]).tolist()
        ]
        for layer, layer_type in enumerate(tables.layers)
    ]


def solve(tables: CostTables, budget_bytes: int, time_limit_s: float = 120.0) -> tuple[float, float]:
    """Lower and upper bound of the least step time; both infinite if nothing fits, equal when HiGHS has its proof."""
    nodes = nodes_of(tables)
    flat = [node for layer in nodes for node in layer]
    column = {node: index for index, node in enumerate(flat)}
    arcs = [
        (a, b) for before, after in itertools.pairwise(nodes) for a in before for b in after if b[1] - a[1] in (0, 1)
    ]
    first_arc, stages = len(flat), tables.pipeline.num_stages
    first_time = first_arc + len(arcs)
    slowest, first_peak = first_time + stages, first_time + stages + 1
    rows = Rows()
    rows.add({column[node]: 1.0 for node in nodes[0]}, 1, 1)
    leaving: dict[Node, dict[int, float]] = {node: {} for node in flat}
    arriving: dict[Node, dict[int, float]] = {node: {} for node in flat}
    seconds: list[dict[int, float]] = [{first_time + stage: -1.0} for stage in range(stages)]
    layout = tables.layout_of
    for index, (a, b) in enumerate(arcs):
        leaving[a][first_arc + index] = 1.0
        arriving[b][first_arc + index] = 1.0
        seconds[b[1]][first_arc + index] = float(tables.switch_s[tables.layers[b[0]], layout[a[2]], layout[b[2]]])
    gib = 1024.0**3
    held: list[dict[int, float]] = [{first_peak + stage: 1.0} for stage in range(stages)]
    for node in flat:
        layer, stage, strategy = node
        pair = (tables.layers[layer], strategy)
        seconds[stage][column[node]] = float(tables.time_s[pair])
        size = tables.static_bytes[pair] + tables.pipeline.in_flight(stage) * tables.activation_bytes[pair]
        held[stage][column[node]] = float(size) / gib
        if layer < len(tables.layers) - 1:
            rows.add({column[node]: -1.0, **leaving[node]}, 0, 0)
        if layer > 0:
            rows.add({column[node]: -1.0, **arriving[node]}, 0, 0)
    for stage in range(stages):
        transfer = tables.transfer_s if stage else 0.0
        rows.add(seconds[stage], -transfer, -transfer)
        rows.add({slowest: 1.0, first_time + stage: -1.0}, 0, highspy.kHighsInf)
        rows.add(held[stage], -highspy.kHighsInf, (budget_bytes - tables.overhead_bytes) / gib)
        for layer in nodes:
            peaks = {
                column[n]: -tables.transient_bytes[tables.layers[n[0]], n[2]] / gib for n in layer if n[1] == stage
            }
            rows.add({first_peak + stage: 1.0, **peaks}, 0, highspy.kHighsInf)
    num_columns = first_peak + stages
    cost = np.zeros(num_columns)
    cost[first_time : first_time + stages] = 1.0
    cost[slowest] = tables.pipeline.num_microbatches - 1
    return solve_rows(rows, cost, len(flat), first_arc + len(arcs), time_limit_s)


def solve_rows(
    rows: Rows, cost: np.ndarray, num_binary: int, num_unit: int, time_limit_s: float
) -> tuple[float, float]:
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(cost), len(rows.low)
    lp.col_cost_, lp.col_lower_ = cost, np.zeros(len(cost))
    lp.col_upper_ = np.where(np.arange(len(cost)) < num_unit, 1.0, highspy.kHighsInf)
    lp.row_lower_, lp.row_upper_ = np.array(rows.low), np.array(rows.high)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.array(rows.start)
    lp.a_matrix_.index_, lp.a_matrix_.value_ = np.array(rows.index), np.array(rows.value)
    kinds = highspy.HighsVarType
    lp.integrality_ = [kinds.kInteger if index < num_binary else kinds.kContinuous for index in range(len(cost))]
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("mip_rel_gap", 1e-9)
    highs.setOptionValue("mip_abs_gap", 1e-9)
    highs.setOptionValue("time_limit", time_limit_s)
    highs.passModel(lp)
    highs.run()
    if highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        return np.inf, np.inf
    info = highs.getInfo()
    return float(info.mip_dual_bound), float(info.objective_function_value)
