"""Tests of which placed stages are kept."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from steelyard.search.layers import distinct
from steelyard.search.pipeline_dp import reduce_groups


def beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and one != other


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(0, 6)), max_size=24))
def test_grouped_reduce_keeps_what_none_of_its_own_group_beats(points: list[tuple[int, int, int]]) -> None:
    group, *columns = np.array(points, dtype=np.int64).reshape(-1, 3).T
    kept = reduce_groups(group, *(column.astype(np.float64) for column in columns))
    expected = {p for p in points if not any(q[0] == p[0] and beats(q[1:], p[1:]) for q in points)}
    found = [points[index] for index in kept]
    assert set(found) == expected
    assert len(found) == len(expected)
    assert [point[0] for point in found] == sorted(point[0] for point in found)


@given(st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), max_size=4))
def test_different_values_are_those_that_numpy_finds(rows: list[list[int]]) -> None:
    values = np.array(rows, dtype=np.int64)
    assert distinct(values).tolist() == np.unique(values).tolist()
