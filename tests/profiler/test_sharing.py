"""Speeds of processes that share cores: the rule for noise, and what the cost model makes of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import InvalidProfileError
from steelyard.profiler.launch import progress_bar
from steelyard.profiler.overheads import non_rising
from steelyard.profiles.profile import Profile
from tests.profiler.examples import empty_trace


def sharing(*speeds: float, num_devices: int = 4) -> Profile:
    return Profile.model_validate(empty_trace(num_devices=num_devices).model_dump() | {"busy_speeds": speeds})


@given(st.lists(st.floats(0.5, 4.0), min_size=1))
def test_more_processes_are_never_faster(speeds: list[float]) -> None:
    found = non_rising(speeds)
    assert list(found) == sorted(found, reverse=True)
    assert found[-1] == speeds[-1]
    assert all(mine >= measured for mine, measured in zip(found, speeds, strict=True))


def test_stages_of_several_processes_compute_together() -> None:
    profile = sharing(2.0, 2.0, 1.3, 1.0)
    assert profile.stage_speeds(4) == (2.0, 2.0, 1.3, 1.0)
    assert profile.stage_speeds(2) == (2.0, 1.0)
    assert profile.stage_speeds(1) == ()
    assert sharing().stage_speeds(2) == ()


@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 2.0, 1.0, 1.0), (2.0, 2.0, 2.0, 2.0)])
def test_speeds_that_cannot_be_are_an_error(speeds: tuple[float, ...]) -> None:
    with pytest.raises(InvalidProfileError, match="busy_speeds"):
        sharing(*speeds)


@pytest.mark.parametrize(("done", "bar"), [(0.0, "[" + "." * 30 + "]   0%"), (1.0, "[" + "#" * 30 + "] 100%")])
def test_the_bar_of_progress_fills(done: float, bar: str) -> None:
    assert progress_bar(done) == bar
