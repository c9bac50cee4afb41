r"""Time against memory for layers that form a graph and not a chain: FT's eliminations.

A node $v$ takes one of its choices $c_v$; an edge costs what redistribution between the choices of its two ends takes.
What comes out is the frontier of

$$\Big(\sum_v b_v(c_v) + \sum_{(v,w)} b_{vw}(c_v, c_w),\;\; \sum_v t_v(c_v) + \sum_{(v,w)} r_{vw}(c_v, c_w)\Big)$$

over all joint choices. Every node keeps a frontier $N_v(c)$ for each of its choices, every edge a frontier
$E_{vw}(c, d)$ for each pair, and the graph shrinks, with the product and the union of `search.frontier`, by

| elimination   | where                          | what replaces it                                                  |
|---------------|--------------------------------|-------------------------------------------------------------------|
| `edge`        | two edges $E, E'$ of one pair  | $E(c, d) \times E'(c, d)$                                         |
| `branch`      | $v$ has one neighbour $w$      | $N_w(d) \times \bigcup_c N_v(c) \times E_{vw}(c, d)$              |
| `node`        | $v$ has two neighbours $u, w$  | $\bigcup_e E_{uv}(c, e) \times N_v(e) \times E_{vw}(e, d)$, an edge |
| `enumeration` | none of these applies          | one smaller graph for every choice of a node, and their union     |
| `heuristic`   | as above, but too many choices | the same for those choices only that cost least by themselves     |

All but the last lose nothing, so chains, trees, series-parallel graphs, and a value read by every layer of a chain
come out exactly without enumeration. Where the last was needed the answer says so and carries a lower bound: the
frontier of a relaxation in which each reader of the fixed node may see the choice that is best for this reader
(choices split into as many groups as may be enumerated, the relaxation being within each group).

| symbol | name      | unit  | meaning                                               |
|--------|-----------|-------|-------------------------------------------------------|
| $b$    | `bytes`   | bytes | memory, which adds up                                 |
| $t, r$ | `seconds` | s     | time, which adds up; infinite where it is not allowed |

Source: Cai et al. 2020 (TensorOpt, arXiv 2004.10856), section 4; enumeration and bound are ours, and the order of the
ends of an edge plays no part in what may be eliminated. Not modelled: memory that is a maximum over nodes and not a
sum (see `cost_graph`), and pipelines (`search` solves these, side inputs included).
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from steelyard.cost.tables import CostTables
from steelyard.errors import InvalidProblemError
from steelyard.search.frontier import FloatArray, Frontier, IntArray, frontier, reduce_groups

EliminationKind = Literal["edge", "branch", "node", "enumeration", "heuristic"]

UNLIMITED_BYTES = 2**62
"""A budget that never binds."""

MAX_GRAPHS = 256
"""Graphs that enumeration may branch into before the heuristic takes over."""

MAX_PAIRS = 2**22
"""Points formed at once before they are reduced: bounds the memory of a product."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphNode:
    """A layer and its choices; ``seconds`` is infinite for a choice that is not allowed."""

    bytes: IntArray
    """[C]"""
    seconds: FloatArray
    """[C]"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphEdge:
    """What it costs that ``target`` reads ``source``, by the choices of both; infinite seconds where not allowed."""

    source: int
    target: int
    seconds: FloatArray
    """[C_source, C_target]"""
    bytes: IntArray | None = None
    """[C_source, C_target]; None where reading takes no memory"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostGraph:
    """Nodes in an order in which every edge goes forwards; a pair of nodes may have several edges."""

    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]

    def __post_init__(self) -> None:
        if not self.nodes:
            raise InvalidProblemError(field="nodes", found="none", expected="one or more")
        for index, node in enumerate(self.nodes):
            _check_costs(f"nodes.{index}", node.bytes, node.seconds, (len(node.seconds),))
        for index, edge in enumerate(self.edges):
            if not 0 <= edge.source < edge.target < len(self.nodes):
                raise InvalidProblemError(
                    field=f"edges.{index}",
                    found=f"{edge.source} to {edge.target}",
                    expected=f"a node and a later one, of {len(self.nodes)} counted from 0",
                )
            shape = (len(self.nodes[edge.source].seconds), len(self.nodes[edge.target].seconds))
            _check_costs(f"edges.{index}", edge.bytes, edge.seconds, shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elimination:
    """One step of the reduction: the node that went, then its neighbours; of an edge, its two ends."""

    kind: EliminationKind
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphResult:
    """Frontier of a graph, with the choices behind every point and the proof or bound that goes with it."""

    frontier: Frontier
    choices: IntArray
    """[points, nodes]"""
    exact: bool
    """False where the heuristic was used, and so points may be missing or better than those found"""
    eliminations: tuple[Elimination, ...]
    """in their order; of graphs that differ in an enumerated choice one is told, if any with the heuristic that one"""
    lower_bound: Frontier
    """no joint choice beats it; equal to ``frontier`` where that is exact"""

    def gap(self, budget_bytes: int) -> float:
        """The fraction of the time found within the budget that is not proven necessary; 1 where nothing was found."""
        point, bound = self.frontier.at(budget_bytes), self.lower_bound.at(budget_bytes)
        if self.exact or bound is None:
            return 0.0
        if point is None:
            return 1.0
        found, least = float(self.frontier.seconds[point]), float(self.lower_bound.seconds[bound])
        return 1 - least / found if found > least else 0.0


def graph_frontier(
    graph: CostGraph, *, budget_bytes: int = UNLIMITED_BYTES, max_graphs: int = MAX_GRAPHS
) -> GraphResult:
    """The frontier of (bytes, seconds) over all joint choices, as far as it lies within the budget.

    Exact unless the graph needs more than ``max_graphs`` enumerated choices; with 1 the heuristic fixes one choice at
    a time, as the paper does. Raises `InvalidProblemError` if ``max_graphs`` is below 1.
    """
    if max_graphs < 1:
        raise InvalidProblemError(field="max_graphs", found=str(max_graphs), expected="1 or more")
    start = _start(graph, budget_bytes)
    answers = _solve(start, max_graphs)
    kept = frontier(answers.bytes, answers.seconds)
    bound = kept if answers.exact else _bound(start, max_graphs)
    return GraphResult(
        frontier=kept,
        choices=answers.choices[kept.origin],
        exact=answers.exact,
        eliminations=answers.log,
        lower_bound=bound,
    )


def cost_graph(tables: CostTables, *, transient_bytes: int) -> CostGraph:
    """The graph of a single stage: its layers, their switches and its side inputs, in seconds of one microbatch.

    Transient memory is a maximum: choices that need more than ``transient_bytes`` are not allowed, and whoever reads
    the frontier adds these and the tables' overhead to its bytes. Raises `InvalidProblemError` for more stages.
    """
    if tables.pipeline.num_stages != 1:
        raise InvalidProblemError(
            field="num_stages", found=str(tables.pipeline.num_stages), expected="1: stages have memories of their own"
        )
    allowed = tables.legal & (tables.transient_bytes <= transient_bytes)
    seconds = np.where(allowed, tables.time_s, np.inf)
    num_bytes = tables.held_bytes(tables.pipeline.in_flight(0))
    switches = [
        GraphEdge(source=layer - 1, target=layer, seconds=tables.switch_s[kind])
        for layer, kind in enumerate(tables.layers)
        if layer > 0
    ]
    sides = [
        GraphEdge(source=side.source, target=reader, seconds=side.seconds)
        for side in tables.side_inputs
        for reader in side.readers
    ]
    nodes = tuple(GraphNode(bytes=num_bytes[kind], seconds=seconds[kind]) for kind in tables.layers)
    return CostGraph(nodes=nodes, edges=(*switches, *sides))


def _check_costs(place: str, num_bytes: IntArray | None, seconds: FloatArray, shape: tuple[int, ...]) -> None:
    for name, table in (("bytes", num_bytes), ("seconds", seconds)):
        if table is None:
            continue
        if table.shape != shape or 0 in shape:
            expected = f"shape {shape}, one or more choices"
            raise InvalidProblemError(field=f"{place}.{name}", found=f"shape {table.shape}", expected=expected)
        if np.any(np.isnan(table)) or np.any(table < 0):
            raise InvalidProblemError(
                field=f"{place}.{name}", found="a negative entry or one that is no number", expected="zero or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Cells:
    """A frontier for every cell (a choice of a node, or a pair of choices of an edge's ends), all in flat arrays.

    A point comes from point ``first`` of the first parent and ``second`` of the second. Without parents it is given:
    the choice ``cell`` of ``node``, or of an edge where ``node`` is None.
    """

    cell: IntArray
    bytes: IntArray
    seconds: FloatArray
    first: IntArray
    second: IntArray
    parents: "tuple[_Cells, _Cells] | None" = None
    node: int | None = None

    def select(self, index: IntArray) -> "_Cells":
        """Only these points, in this order."""
        return replace(
            self,
            cell=self.cell[index],
            bytes=self.bytes[index],
            seconds=self.seconds[index],
            first=self.first[index],
            second=self.second[index],
        )

    def reduced(self) -> "_Cells":
        """Without the points that another of their cell beats."""
        return self.select(reduce_groups(self.cell, self.bytes, np.zeros_like(self.bytes), self.seconds))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Reduction:
    """What is left of a graph, what has gone into ``done`` (all in cell 0), and how it went."""

    sizes: tuple[int, ...]
    nodes: Mapping[int, _Cells]
    edges: Mapping[tuple[int, int], _Cells]
    done: _Cells
    log: tuple[Elimination, ...]
    budget_bytes: int

    def join(
        self, left: _Cells, right: _Cells, keys: tuple[IntArray, IntArray], cells: tuple[IntArray, IntArray]
    ) -> _Cells:
        """Product of all points of equal keys, union in the cell that is the sum of theirs; what fits of it."""
        return _join(left, right, keys, cells, self.budget_bytes)

    def edges_of(self, node: int) -> list[tuple[int, int]]:
        """Its edges, in the order of the neighbours."""
        return sorted((pair for pair in self.edges if node in pair), key=sum)

    def ends(self, pair: tuple[int, int], node: int) -> tuple[IntArray, IntArray]:
        """For every point of an edge the choice of ``node``, and that of its other end."""
        source, target = np.divmod(self.edges[pair].cell, self.sizes[pair[1]])
        return (source, target) if pair[0] == node else (target, source)

    def with_edge(self, pair: tuple[int, int], added: _Cells) -> "_Reduction":
        """With one edge more, merged with the one that the pair has already (edge elimination)."""
        before = self.edges.get(pair)
        if before is None:
            return replace(self, edges={**self.edges, pair: added})
        merged = self.join(before, added, (before.cell, added.cell), (before.cell, np.zeros_like(added.cell)))
        step = Elimination(kind="edge", nodes=pair)
        return replace(self, edges={**self.edges, pair: merged}, log=(*self.log, step))

    def without(self, node: int, kind: EliminationKind | None) -> "_Reduction":
        """Without this node and its edges; ``kind`` is what eliminated it, None where it stood alone."""
        gone = self.edges_of(node)
        neighbours = tuple(sum(pair) - node for pair in gone)
        return replace(
            self,
            nodes={index: cells for index, cells in self.nodes.items() if index != node},
            edges={pair: cells for pair, cells in self.edges.items() if pair not in gone},
            log=self.log if kind is None else (*self.log, Elimination(kind=kind, nodes=(node, *neighbours))),
        )


def _start(graph: CostGraph, budget_bytes: int) -> _Reduction:
    reduction = _Reduction(
        sizes=tuple(len(node.seconds) for node in graph.nodes),
        nodes={index: _given(node.bytes, node.seconds, index) for index, node in enumerate(graph.nodes)},
        edges={},
        done=_given(np.zeros(1, dtype=np.int64), np.zeros(1)),
        log=(),
        budget_bytes=budget_bytes,
    )
    for edge in graph.edges:
        num_bytes = np.zeros(edge.seconds.shape, dtype=np.int64) if edge.bytes is None else edge.bytes
        reduction = reduction.with_edge((edge.source, edge.target), _given(num_bytes, edge.seconds))
    return reduction


def _given(num_bytes: IntArray, seconds: FloatArray, node: int | None = None) -> _Cells:
    """One point for every allowed choice or pair of choices."""
    flat_bytes, flat_seconds = num_bytes.ravel().astype(np.int64), seconds.ravel().astype(np.float64)
    cell = np.flatnonzero(np.isfinite(flat_seconds))
    return _Cells(
        cell=cell, bytes=flat_bytes[cell], seconds=flat_seconds[cell], first=cell, second=cell, parents=None, node=node
    )


def _join(
    left: _Cells,
    right: _Cells,
    keys: tuple[IntArray, IntArray],
    cells: tuple[IntArray, IntArray],
    budget_bytes: int,
) -> _Cells:
    order = np.argsort(keys[1], kind="stable")
    low = np.searchsorted(keys[1][order], keys[0], side="left")
    counts = np.searchsorted(keys[1][order], keys[0], side="right") - low
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.searchsorted(ends, np.arange(MAX_PAIRS, total, MAX_PAIRS))
    parts = []
    for block in np.split(np.arange(len(counts)), cuts):
        first = np.repeat(block, counts[block])
        place = np.arange(len(first)) - np.repeat(ends[block] - counts[block] - _offset(ends, block), counts[block])
        second = order[low[first] + place]
        fits = left.bytes[first] + right.bytes[second] <= budget_bytes
        first, second = first[fits], second[fits]
        points = _Cells(
            cell=cells[0][first] + cells[1][second],
            bytes=left.bytes[first] + right.bytes[second],
            seconds=left.seconds[first] + right.seconds[second],
            first=first,
            second=second,
            parents=(left, right),
        )
        parts.append(points.reduced())
    return parts[0] if len(parts) == 1 else _concatenate(parts).reduced()


def _offset(ends: IntArray, block: IntArray) -> int:
    """How many pairs come before the block."""
    return int(ends[block[0] - 1]) if len(block) and block[0] > 0 else 0


def _concatenate(parts: Sequence[_Cells]) -> _Cells:
    """The points of all parts, which have the same parents."""
    return replace(
        parts[0],
        cell=np.concatenate([part.cell for part in parts]),
        bytes=np.concatenate([part.bytes for part in parts]),
        seconds=np.concatenate([part.seconds for part in parts]),
        first=np.concatenate([part.first for part in parts]),
        second=np.concatenate([part.second for part in parts]),
    )


def _eliminate_exactly(graph: _Reduction) -> _Reduction:
    """The graph after all eliminations that lose nothing; nodes that stand alone go into ``done``.

    A branch costs less than a node, as it leaves no table of pairs behind, so branches go first.
    """
    while graph.nodes:
        degrees = dict.fromkeys(graph.nodes, 0)
        points = {node: len(cells.cell) for node, cells in graph.nodes.items()}
        for pair, cells in graph.edges.items():
            for node in pair:
                degrees[node] += 1
                points[node] += len(cells.cell)
        node = min(graph.nodes, key=lambda each: (degrees[each], points[each], each))
        if degrees[node] == 0:
            graph = _detach(graph, node, np.arange(graph.sizes[node]), None)
        elif degrees[node] == 1:
            graph = _eliminate_branch(graph, node)
        elif degrees[node] == 2:
            graph = _eliminate_node(graph, node)
        else:
            break
    return graph


def _eliminate_branch(graph: _Reduction, node: int) -> _Reduction:
    """A node with one neighbour goes into the frontiers of that neighbour."""
    (pair,) = graph.edges_of(node)
    neighbour, leaf = sum(pair) - node, graph.nodes[node]
    own, other = graph.ends(pair, node)
    best = graph.join(graph.edges[pair], leaf, (own, leaf.cell), (other, np.zeros_like(leaf.cell)))
    kept = graph.nodes[neighbour]
    joined = graph.join(kept, best, (kept.cell, best.cell), (kept.cell, np.zeros_like(best.cell)))
    rest = graph.without(node, "branch")
    return replace(rest, nodes={**rest.nodes, neighbour: joined})


def _eliminate_node(graph: _Reduction, node: int) -> _Reduction:
    """A node with two neighbours becomes an edge between them."""
    into, out = graph.edges_of(node)
    before, after, middle = sum(into) - node, sum(out) - node, graph.nodes[node]
    own, other = graph.ends(into, node)
    half = graph.join(
        graph.edges[into], middle, (own, middle.cell), (graph.edges[into].cell, np.zeros_like(middle.cell))
    )
    own, other = replace(graph, edges={into: half}).ends(into, node)
    onward, last = graph.ends(out, node)
    whole = graph.join(half, graph.edges[out], (own, onward), (other * graph.sizes[after], last))
    return graph.without(node, "node").with_edge((before, after), whole)


def _detach(graph: _Reduction, node: int, choices: IntArray, kind: EliminationKind | None) -> _Reduction:
    """The graph without a node that takes one of these choices, where every reader may see another one of them.

    With one choice, or without readers, this is exact; else it is a relaxation.
    """
    alone = graph.nodes[node].select(np.flatnonzero(np.isin(graph.nodes[node].cell, choices)))
    done = graph.join(graph.done, alone, (graph.done.cell, np.zeros_like(alone.cell)), _zeros(graph.done, alone))
    nodes = dict(graph.nodes)
    for pair in graph.edges_of(node):
        own, other = graph.ends(pair, node)
        kept = np.flatnonzero(np.isin(own, choices))
        edge, reader = graph.edges[pair].select(kept), sum(pair) - node
        cells = (nodes[reader].cell, np.zeros_like(edge.cell))
        nodes[reader] = graph.join(nodes[reader], edge, (nodes[reader].cell, other[kept]), cells)
    return replace(graph, nodes=nodes, done=done).without(node, kind)


def _zeros(left: _Cells, right: _Cells) -> tuple[IntArray, IntArray]:
    return np.zeros_like(left.cell), np.zeros_like(right.cell)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Answers:
    """Points with the choices behind them."""

    bytes: IntArray
    seconds: FloatArray
    choices: IntArray
    exact: bool
    log: tuple[Elimination, ...]


def _solve(graph: _Reduction, max_graphs: int) -> _Answers:
    """Joint choices that are not beaten by others looked at; exact if there are no others."""
    graph = _eliminate_exactly(graph)
    if not graph.nodes:
        done = graph.done
        choices = _choices(done, len(graph.sizes))
        return _Answers(bytes=done.bytes, seconds=done.seconds, choices=choices, exact=True, log=graph.log)
    node = _node_to_fix(graph)
    possible = _by_own_cost(graph, node)
    tried = possible[:max_graphs]
    kind: EliminationKind = "enumeration" if len(tried) == len(possible) else "heuristic"
    if len(tried) == 0:
        nothing = graph.done.select(tried)
        choices = _choices(nothing, len(graph.sizes))
        return _Answers(bytes=nothing.bytes, seconds=nothing.seconds, choices=choices, exact=True, log=graph.log)
    below = max_graphs // len(tried)
    answers = [_solve(_detach(graph, node, choice, kind), below) for choice in np.split(tried, len(tried))]
    num_bytes = np.concatenate([each.bytes for each in answers])
    seconds = np.concatenate([each.seconds for each in answers])
    kept = frontier(num_bytes, seconds).origin
    return _Answers(
        bytes=num_bytes[kept],
        seconds=seconds[kept],
        choices=np.concatenate([each.choices for each in answers])[kept],
        exact=kind == "enumeration" and all(each.exact for each in answers),
        log=next((each.log for each in answers if not each.exact), answers[0].log),
    )


def _bound(graph: _Reduction, max_graphs: int) -> Frontier:
    """A frontier that no joint choice beats: choices in groups, within which every reader may see another one."""
    graph = _eliminate_exactly(graph)
    if not graph.nodes:
        return frontier(graph.done.bytes, graph.done.seconds)
    node = _node_to_fix(graph)
    possible = np.sort(_by_own_cost(graph, node))
    count = min(max_graphs, len(possible))
    bounds = [
        _bound(_detach(graph, node, group, "heuristic"), max_graphs // count)
        for group in (np.array_split(possible, count) if count else [])
    ]
    return frontier(
        np.concatenate([np.zeros(0, dtype=np.int64), *(each.bytes for each in bounds)]),
        np.concatenate([np.zeros(0), *(each.seconds for each in bounds)]),
    )


def _node_to_fix(graph: _Reduction) -> int:
    """The node of most neighbours, whose loss makes most others eliminable; of several that of fewest choices."""
    return min(graph.nodes, key=lambda node: (-len(graph.edges_of(node)), graph.sizes[node], node))


def _by_own_cost(graph: _Reduction, node: int) -> IntArray:
    """Its possible choices: the one that is fastest by itself, then the smallest, then the others by their time.

    By itself means with each neighbour as this choice would like it best.
    """
    size = graph.sizes[node]
    seconds, num_bytes = _least(graph.nodes[node], graph.nodes[node].cell, size)
    for pair in graph.edges_of(node):
        edge_seconds, edge_bytes = _least(graph.edges[pair], graph.ends(pair, node)[0], size)
        seconds, num_bytes = seconds + edge_seconds, num_bytes + edge_bytes
    by_time = np.lexsort((num_bytes, seconds)).tolist()
    by_size = np.lexsort((seconds, num_bytes)).tolist()
    order = dict.fromkeys(itertools.chain(by_time[:1], by_size[:1], by_time))
    return np.array([choice for choice in order if np.isfinite(seconds[choice])], dtype=np.int64)


def _least(cells: _Cells, choice: IntArray, size: int) -> tuple[FloatArray, FloatArray]:
    """For each of the choices the least seconds and the least bytes; infinite where there is no point."""
    seconds, num_bytes = np.full(size, np.inf), np.full(size, np.inf)
    np.minimum.at(seconds, choice, cells.seconds)
    np.minimum.at(num_bytes, choice, cells.bytes.astype(np.float64))
    return seconds, num_bytes


def _choices(cells: _Cells, num_nodes: int) -> IntArray:
    """[points, nodes] the choices that led to every point."""
    chosen = np.full((len(cells.cell), num_nodes), -1, dtype=np.int64)
    waiting = [(cells, np.arange(len(cells.cell)))]
    while waiting:
        source, point = waiting.pop()
        if source.parents is not None:
            waiting.append((source.parents[0], source.first[point]))
            waiting.append((source.parents[1], source.second[point]))
        elif source.node is not None:
            chosen[:, source.node] = source.cell[point]
    return chosen
