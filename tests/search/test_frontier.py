"""The laws of the frontier algebra."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from steelyard.search.frontier import EMPTY, Frontier, frontier, product, reduce, reduce_groups, union

# Whole seconds below 2**40 add without rounding, so that every law holds exactly.
POINTS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12).map(float)), max_size=12)


@st.composite
def frontiers(draw: st.DrawFn) -> Frontier:
    points = draw(POINTS)
    return frontier([num_bytes for num_bytes, _ in points], [seconds for _, seconds in points])


def beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and one != other


@given(POINTS)
def test_reduce_keeps_exactly_the_points_that_none_beats(points: list[tuple[int, float]]) -> None:
    kept = reduce(np.array([p[0] for p in points], dtype=np.int64), np.array([p[1] for p in points]))
    expected = {point for point in points if not any(beats(other, point) for other in points)}
    assert {points[index] for index in kept} == expected
    assert len(kept) == len(expected)


@given(frontiers())
def test_bytes_rise_and_seconds_fall(points: Frontier) -> None:
    assert np.all(np.diff(points.bytes) > 0)
    assert np.all(np.diff(points.seconds) < 0)


@given(frontiers())
def test_union_is_idempotent(a: Frontier) -> None:
    assert union(a, a) == a


@given(frontiers(), frontiers())
def test_union_and_product_are_commutative(a: Frontier, b: Frontier) -> None:
    assert union(a, b) == union(b, a)
    assert product(a, b) == product(b, a)


@given(frontiers(), frontiers(), frontiers())
def test_union_and_product_are_associative(a: Frontier, b: Frontier, c: Frontier) -> None:
    assert union(union(a, b), c) == union(a, union(b, c)) == union(a, b, c)
    assert product(product(a, b), c) == product(a, product(b, c))


@given(frontiers(), frontiers(), frontiers())
def test_product_distributes_over_union(a: Frontier, b: Frontier, c: Frontier) -> None:
    assert product(a, union(b, c)) == union(product(a, b), product(a, c))


@given(frontiers())
def test_units(a: Frontier) -> None:
    assert union(a, EMPTY) == union(a) == a
    assert product(a, frontier([0], [0.0])) == a
    assert product(a, EMPTY) == EMPTY == union()


@given(frontiers(), frontiers())
def test_origins_lead_back_to_the_operands(a: Frontier, b: Frontier) -> None:
    both = product(a, b)
    left, right = both.origin // max(len(b), 1), both.origin % max(len(b), 1)
    assert np.array_equal(both.bytes, a.bytes[left] + b.bytes[right])
    assert np.array_equal(both.seconds, a.seconds[left] + b.seconds[right])
    either = union(a, b)
    assert np.array_equal(either.bytes, np.concatenate([a.bytes, b.bytes])[either.origin])


@given(frontiers(), st.integers(-1, 13))
def test_the_point_at_a_budget_is_the_fastest_that_fits(a: Frontier, budget: int) -> None:
    fitting = [(seconds, i) for i, (size, seconds) in enumerate(zip(a.bytes, a.seconds, strict=True)) if size <= budget]
    assert a.at(budget) == (min(fitting)[1] if fitting else None)


GROUPED = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(0, 3), st.integers(0, 6).map(float)), max_size=24
)


@given(GROUPED)
def test_grouped_reduce_keeps_what_none_of_its_own_group_beats(points: list[tuple[int, int, int, float]]) -> None:
    columns = [np.array([point[axis] for point in points], dtype=np.int64) for axis in range(3)]
    kept = reduce_groups(*columns, np.array([point[3] for point in points], dtype=np.float64))
    expected = {p for p in points if not any(q[0] == p[0] and beats(q[1:], p[1:]) for q in points)}
    found = [points[index] for index in kept]
    assert set(found) == expected
    assert len(found) == len(expected)
    assert [point[0] for point in found] == sorted(point[0] for point in found)


def test_one_transient_makes_the_grouped_reduce_the_plain_one() -> None:
    rng = np.random.default_rng(1)
    sizes, seconds = rng.integers(0, 50, 200), rng.random(200)
    zero = np.zeros(200, dtype=np.int64)
    assert np.array_equal(reduce_groups(zero, sizes, zero, seconds), reduce(sizes, seconds))
