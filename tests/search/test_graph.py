"""Frontiers of graphs against brute force over all joint choices."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import InvalidProblemError
from steelyard.search.frontier import Frontier, frontier
from steelyard.search.graph import CostGraph, GraphEdge, GraphNode, cost_graph, graph_frontier
from tests.oracles import exhaustive
from tests.problems.random_tables import random_tables

Pairs = list[tuple[int, int]]


def every_choice(graph: CostGraph) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(len(node.seconds)) for node in graph.nodes)))


def cost_of(graph: CostGraph, choices: tuple[int, ...]) -> tuple[int, float]:
    """Bytes and seconds of a joint choice, straight from the definition."""
    size = sum(int(node.bytes[c]) for node, c in zip(graph.nodes, choices, strict=True))
    seconds = sum(float(node.seconds[c]) for node, c in zip(graph.nodes, choices, strict=True))
    for edge in graph.edges:
        pair = (choices[edge.source], choices[edge.target])
        size += 0 if edge.bytes is None else int(edge.bytes[pair])
        seconds += float(edge.seconds[pair])
    return size, seconds


def brute_force(graph: CostGraph) -> Frontier:
    costs = [cost_of(graph, choices) for choices in every_choice(graph)]
    possible = [cost for cost in costs if np.isfinite(cost[1])]
    return frontier([size for size, _ in possible], [seconds for _, seconds in possible])


def covers(better: Frontier, other: Frontier) -> bool:
    """Whether for every point of the other one is no worse in bytes and seconds."""
    return all(
        any((better.bytes <= size) & (better.seconds <= seconds))
        for size, seconds in zip(other.bytes, other.seconds, strict=True)
    )


def random_graph(rng: np.random.Generator, sizes: list[int], pairs: Pairs) -> CostGraph:
    """Whole seconds (so that sums are exact) with many zeros and ties, and some choices that are not allowed."""
    forbidden = rng.choice([0.0, 0.15])

    def seconds(shape: tuple[int, ...]) -> np.ndarray:
        return np.where(rng.random(shape) < forbidden, np.inf, rng.integers(0, 5, shape))

    return CostGraph(
        nodes=tuple(GraphNode(bytes=rng.integers(0, 6, n), seconds=seconds((n,))) for n in sizes),
        edges=tuple(
            GraphEdge(
                source=a,
                target=b,
                seconds=seconds((sizes[a], sizes[b])),
                bytes=rng.integers(0, 3, (sizes[a], sizes[b])) if rng.random() < 0.5 else None,
            )
            for a, b in pairs
        ),
    )


@st.composite
def graphs(draw: st.DrawFn) -> CostGraph:
    """Any graph of up to six nodes, parallel edges and parts that hang together with nothing included."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    possible = list(itertools.combinations(range(len(sizes)), 2))
    pairs = draw(st.lists(st.sampled_from(possible), max_size=12)) if possible else []
    return random_graph(rng, sizes, pairs)


@st.composite
def series_parallel(draw: st.DrawFn) -> CostGraph:
    """Grown from one edge by putting a node into an edge, doubling an edge, and hanging on a leaf."""
    pairs: Pairs = [(0, 1)]
    for node in range(2, draw(st.integers(2, 6))):
        a, b = draw(st.sampled_from(pairs))
        kept = draw(st.booleans())  # the edge stays beside the way through the new node
        hung = draw(st.booleans())
        pairs = [*(pairs if kept or hung else [p for p in pairs if p != (a, b)]), (a, node)]
        pairs += [] if hung else [(b, node)]
        pairs += draw(st.sampled_from([[], [pairs[0]]]))
    sizes = [draw(st.integers(1, 3)) for _ in range(max(max(pair) for pair in pairs) + 1)]
    return random_graph(np.random.default_rng(draw(st.integers(0, 2**32))), sizes, pairs)


@given(graphs())
@settings(max_examples=200, deadline=None)
def test_agrees_with_brute_force(graph: CostGraph) -> None:
    result = graph_frontier(graph)
    assert result.exact
    assert result.frontier == result.lower_bound == brute_force(graph)


@given(graphs())
@settings(max_examples=50, deadline=None)
def test_the_choices_of_every_point_cost_what_it_says(graph: CostGraph) -> None:
    result = graph_frontier(graph, max_graphs=2)
    found = [cost_of(graph, tuple(choices)) for choices in result.choices.tolist()]
    assert found == list(zip(result.frontier.bytes.tolist(), result.frontier.seconds.tolist(), strict=True))


@given(series_parallel())
@settings(max_examples=50, deadline=None)
def test_series_parallel_graphs_are_exact_without_enumeration(graph: CostGraph) -> None:
    result = graph_frontier(graph, max_graphs=1)
    assert result.exact
    assert {step.kind for step in result.eliminations} <= {"edge", "branch", "node"}
    assert result.frontier == brute_force(graph)


@given(st.integers(0, 2**32), st.integers(4, 5), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_the_truth_lies_between_the_bound_and_what_the_heuristic_finds(seed: int, size: int, max_graphs: int) -> None:
    rng = np.random.default_rng(seed)
    complete = list(itertools.combinations(range(size), 2))
    graph = random_graph(rng, rng.integers(2, 4, size).tolist(), complete)
    result, truth = graph_frontier(graph, max_graphs=max_graphs), brute_force(graph)
    kinds = [step.kind for step in result.eliminations]
    assert result.exact == ("heuristic" not in kinds)
    assert covers(result.lower_bound, truth)
    assert covers(truth, result.frontier)
    if result.exact:
        assert result.frontier == truth
    for budget in range(0, 30, 5):
        best, found = truth.at(budget), result.frontier.at(budget)
        if best is not None and found is not None and truth.seconds[best] > 0:
            needed = 1 - truth.seconds[best] / result.frontier.seconds[found]
            assert needed <= result.gap(budget) + 1e-12 <= 1 + 1e-12


def test_a_complete_graph_needs_the_heuristic_and_says_so() -> None:
    graph = random_graph(np.random.default_rng(2), [3] * 5, list(itertools.combinations(range(5), 2)))
    poor, good = graph_frontier(graph, max_graphs=1), graph_frontier(graph, max_graphs=9)
    assert [step.kind for step in poor.eliminations[:2]] == ["heuristic", "heuristic"]
    assert [step.kind for step in good.eliminations[:2]] == ["enumeration", "enumeration"]
    assert not poor.exact
    assert good.exact
    assert covers(good.frontier, poor.frontier)


@given(graphs(), st.integers(0, 12))
@settings(max_examples=50, deadline=None)
def test_a_budget_keeps_the_points_within_it(graph: CostGraph, budget: int) -> None:
    every, some = brute_force(graph), graph_frontier(graph, budget_bytes=budget)
    fits = every.bytes <= budget
    assert np.array_equal(some.frontier.bytes, every.bytes[fits])
    assert np.array_equal(some.frontier.seconds, every.seconds[fits])
    point = every.at(budget)
    found = some.frontier.at(budget)
    assert (point is None) == (found is None)
    if found is not None and point is not None:
        assert cost_of(graph, tuple(some.choices[found].tolist())) == (every.bytes[point], every.seconds[point])


def test_an_output_that_every_layer_of_a_chain_reads_is_eliminated_exactly() -> None:
    readers = list(range(1, 12))
    pairs = [(0, reader) for reader in readers] + list(itertools.pairwise(readers))
    graph = random_graph(np.random.default_rng(1), [3] * 12, pairs)
    result = graph_frontier(graph, max_graphs=1)
    assert result.exact
    assert {step.kind for step in result.eliminations} == {"edge", "branch", "node"}


def test_blocks_of_pairs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(np.random.default_rng(4), [3] * 6, list(itertools.combinations(range(6), 2)))
    whole = graph_frontier(graph)
    monkeypatch.setattr("steelyard.search.graph.MAX_PAIRS", 7)
    blocks = graph_frontier(graph)
    assert blocks.frontier == whole.frontier
    assert np.array_equal(blocks.choices, whole.choices)


def test_two_runs_give_the_same_choices() -> None:
    graph = random_graph(np.random.default_rng(3), [3] * 6, list(itertools.combinations(range(6), 2)))
    assert np.array_equal(graph_frontier(graph).choices, graph_frontier(graph).choices)


def test_the_graph_of_a_stage_has_the_frontier_of_its_plans() -> None:
    for seed in range(30):
        tables = random_tables(np.random.default_rng(seed), num_stages=1, max_plans=200)
        found: list[tuple[int, float]] = []
        for transient in np.unique(tables.transient_bytes).tolist():
            points = graph_frontier(cost_graph(tables, transient_bytes=transient)).frontier
            sizes = points.bytes + transient + tables.overhead_bytes
            found += zip(sizes.tolist(), (points.seconds * tables.pipeline.num_microbatches).tolist(), strict=True)
        plans = [(size, seconds) for seconds, size in exhaustive.all_plans(tables)]
        expected = frontier([size for size, _ in plans], [seconds for _, seconds in plans])
        ours = frontier([size for size, _ in found], [seconds for _, seconds in found])
        for size in expected.bytes.tolist():
            here, there = ours.at(size), expected.at(size)
            assert here is not None, seed
            assert there is not None, seed
            assert ours.seconds[here] == pytest.approx(expected.seconds[there], rel=1e-12, abs=1e-12), seed


def two_nodes() -> tuple[GraphNode, GraphNode]:
    return tuple(GraphNode(bytes=np.zeros(2, dtype=np.int64), seconds=np.ones(2)) for _ in range(2))


@pytest.mark.parametrize(
    ("source", "target", "seconds", "message"),
    [
        (1, 0, np.zeros((2, 2)), "1 to 0"),
        (0, 2, np.zeros((2, 2)), "a later one, of 2"),
        (0, 1, np.zeros((2, 3)), r"edges.0.seconds: found shape \(2, 3\)"),
        (0, 1, np.full((2, 2), -1.0), "negative"),
        (0, 1, np.full((2, 2), np.nan), "no number"),
    ],
)
def test_a_wrong_edge_is_an_error(source: int, target: int, seconds: np.ndarray, message: str) -> None:
    with pytest.raises(InvalidProblemError, match=message):
        CostGraph(nodes=two_nodes(), edges=(GraphEdge(source=source, target=target, seconds=seconds),))


def test_no_nodes_no_choices_and_no_graphs_are_errors() -> None:
    with pytest.raises(InvalidProblemError, match="one or more"):
        CostGraph(nodes=(), edges=())
    with pytest.raises(InvalidProblemError, match="one or more choices"):
        CostGraph(nodes=(GraphNode(bytes=np.zeros(0, dtype=np.int64), seconds=np.zeros(0)),), edges=())
    with pytest.raises(InvalidProblemError, match="max_graphs"):
        graph_frontier(CostGraph(nodes=two_nodes(), edges=()), max_graphs=0)


def test_a_pipeline_is_not_one_graph() -> None:
    with pytest.raises(InvalidProblemError, match="num_stages"):
        cost_graph(random_tables(np.random.default_rng(0), num_stages=2), transient_bytes=9)
