import pytest

from steelyard.errors import InvalidProfileError
from steelyard.profiler.clock import fast_half_columns, fast_half_mean, num_repetitions
from steelyard.profiler.collectives import GroupShape, group_shapes
from steelyard.profiler.launch import launch_profiler
from steelyard.profiler.overheads import slowdown
from tests.profiler.examples import empty_trace, tiny_chain


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"method": "measured"}, "method"), ({"config_hash": "other"}, "config_hash")],
)
def test_a_trace_of_something_else_is_refused_before_any_process_starts(changes, field):
    with pytest.raises(InvalidProfileError, match=f"trace.identity.{field}"):
        launch_profiler(tiny_chain(), empty_trace(**changes), num_processes=2, samples=[1])


@pytest.mark.parametrize("samples", [[], [0], [1, -1]])
def test_samples_below_one_are_refused(samples):
    with pytest.raises(InvalidProfileError, match="samples"):
        launch_profiler(tiny_chain(), empty_trace(), num_processes=2, samples=samples)


def test_a_trace_without_a_degree_for_these_processes_is_refused():
    with pytest.raises(InvalidProfileError, match="a degree that divides the 2 processes"):
        launch_profiler(tiny_chain(), empty_trace(((4, False),)), num_processes=2, samples=[1])


def test_groups_of_every_divisor_neighbouring_and_as_far_apart_as_possible():
    assert group_shapes(1) == ()
    assert group_shapes(2) == (GroupShape(size=2, stride=1),)
    assert [(shape.size, shape.stride) for shape in group_shapes(3)] == [(3, 1)]
    assert [(shape.size, shape.stride) for shape in group_shapes(8)] == [(2, 1), (2, 4), (4, 1), (4, 2), (8, 1)]


def test_repetitions_follow_the_budget_within_their_limits():
    assert num_repetitions(0.1, 1.0) == 10
    assert num_repetitions(10.0, 1.0) == 3
    assert num_repetitions(0.0, 1.0) == 20


def test_what_only_the_slower_half_suffers_is_left_out():
    assert fast_half_mean([1.0, 3.0, 99.0]) == 2.0
    assert fast_half_columns([[1.0, 2.0], [3.0, 4.0], [9.0, 0.0]], [3.0, 7.0, 9.0]) == [2.0, 3.0]


@pytest.mark.parametrize(("both_s", "expected"), [(3.0, 1.0), (2.0, 1.0), (4.0, 2.0), (3.3, 1.3), (9.0, 2.0)])
def test_the_slowdown_is_that_of_the_shorter_part_between_hidden_and_one_after_the_other(both_s, expected):
    assert slowdown(compute_s=3.0, communication_s=1.0, both_s=both_s) == pytest.approx(expected)
