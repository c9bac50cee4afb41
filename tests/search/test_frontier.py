"""What frontiers keep."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from steelyard.search.frontier import distinct, reduce, reduce_groups

POINTS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12).map(float)), max_size=12)


def beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and one != other


@given(POINTS)
def test_reduce_keeps_exactly_the_points_that_none_beats(points: list[tuple[int, float]]) -> None:
    kept = reduce(np.array([p[0] for p in points], dtype=np.int64), np.array([p[1] for p in points]))
    expected = {point for point in points if not any(beats(other, point) for other in points)}
    assert {points[index] for index in kept} == expected
    assert len(kept) == len(expected)


@given(POINTS)
def test_bytes_rise_and_seconds_fall(points: list[tuple[int, float]]) -> None:
    num_bytes, seconds = np.array([p[0] for p in points], dtype=np.int64), np.array([p[1] for p in points])
    kept = reduce(num_bytes, seconds)
    assert np.all(np.diff(num_bytes[kept]) > 0)
    assert np.all(np.diff(seconds[kept]) < 0)


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


@given(st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), max_size=4))
def test_different_values_are_those_that_numpy_finds(rows: list[list[int]]) -> None:
    values = np.array(rows, dtype=np.int64)
    assert distinct(values).tolist() == np.unique(values).tolist()
