"""Tests of speeds of processes that share cores: the noise rule, and the effect on the cost model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import InvalidProfileError
from steelyard.profiler.launch import progress_bar
from steelyard.profiler.overheads import non_rising
from steelyard.profiles.profile import CollectiveProfile, MeasuredTime, Profile, ShardingTime
from steelyard.report.run_table import machine_lines
from tests.profiler.examples import empty_layer, empty_trace


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


def measured_by_four() -> Profile:
    """A profile of four processes, of which one alone is twice as fast as all together."""
    time = MeasuredTime(samples=1, forward_s=1.0, backward_s=2.0, full_s=0.5)
    layers = [empty_layer("block", tp=tp, times=(time,)) for tp in (1, 2, 4)]
    collectives = [
        CollectiveProfile(
            kind="all_reduce",
            group_size=size,
            strided=strided,
            latency_s=1e-3,
            bytes_per_s=1e9,
            max_relative_error=error,
        )
        for size, strided, error in ((2, False, 0.1), (2, True, 0.62), (4, False, 0.31))
    ]
    found = sharing(2.0, 1.6, 1.25, 1.0)
    changes = {
        "identity": found.identity.model_copy(update={"method": "measured"}),
        "layers": tuple(layers),
        "collectives": tuple(collectives),
        "optimizer_s_per_param": 1e-9,
        "optimizers": {"sgd": 2e-9},
        "bf16_flop_per_s": 1e9,
        "sharding": (ShardingTime(group_size=2, seconds=1.0), ShardingTime(group_size=4, seconds=1.0)),
    }
    return Profile.model_validate(found.model_copy(update=changes).model_dump())


def test_fewer_processes_than_were_measured_are_as_fast_as_so_few_of_them() -> None:
    two = measured_by_four().for_devices(2)
    assert Profile.model_validate(two.model_dump()) == two
    assert two.identity.num_devices == 2
    assert [layer.degrees.get("tp", 1) for layer in two.layers] == [1, 2]
    (time,) = two.layers[0].times
    assert (time.samples, time.forward_s, time.full_s, time.selective_s) == (1, 1 / 1.6, 0.5 / 1.6, None)
    assert two.busy_speeds == (2.0 / 1.6, 1.0)
    assert [(each.group_size, each.strided) for each in two.collectives] == [(2, False)]
    assert [each.group_size for each in two.sharding] == [2]
    assert (two.optimizer_s_per_param, two.optimizers) == (1e-9 / 1.6, {"sgd": 2e-9 / 1.6})
    assert two.bf16_flop_per_s == 1.6e9


def test_one_process_has_no_collectives_and_shares_no_cores() -> None:
    one = measured_by_four().for_devices(1)
    assert Profile.model_validate(one.model_dump()) == one
    assert (one.collectives, one.sharding, one.busy_speeds) == ((), (), ())
    assert [layer.times[0].backward_s for layer in one.layers] == [1.0]


@pytest.mark.parametrize("count", [3, 4, 8])
def test_a_profile_serves_no_number_of_processes_that_does_not_divide_its_own(count: int) -> None:
    assert measured_by_four().for_devices(count) == measured_by_four()


def test_collectives_that_a_rate_misses_by_far_are_named_with_how_far() -> None:
    said = "all_reduce over 2 strided ranks 62%, all_reduce over 4 ranks 31%"
    assert ", ".join(measured_by_four().misfits) == said
    assert any(said in line for line in machine_lines(measured_by_four()))
    assert measured_by_four().for_devices(2).misfits == ()
    assert not any("miss" in line for line in machine_lines(measured_by_four().for_devices(2)))


@pytest.mark.parametrize(("done", "bar"), [(0.0, "[" + "." * 30 + "]   0%"), (1.0, "[" + "#" * 30 + "] 100%")])
def test_the_bar_of_progress_fills(done: float, bar: str) -> None:
    assert progress_bar(done) == bar
