"""The schedule simulator against its closed form and the laws of a pipeline."""

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.cost.build import build_tables
from steelyard.cost.simulator import StageTimes, Timeline, closed_form_s, simulate
from steelyard.plan.plan import Schedule
from steelyard.plan.strategy import parse_strategy
from tests.cost.examples import cluster, job, setting

schedules = st.sampled_from(["gpipe", "1f1b"])
seconds = st.integers(0, 20).map(float)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[StageTimes], int, Schedule]:
    times = st.builds(StageTimes, forward_s=seconds, backward_s=seconds, once_s=seconds, transfer_s=seconds)
    stages = draw(st.lists(times, min_size=1, max_size=5))
    schedule = draw(schedules)
    least = len(stages) if schedule == "1f1b" else 1
    return stages, draw(st.integers(least, least + 6)), schedule


def _without_transfers(stages: list[StageTimes]) -> list[StageTimes]:
    return [StageTimes(forward_s=s.forward_s, backward_s=s.backward_s) for s in stages]


@given(st.integers(1, 6), st.integers(1, 12), seconds, seconds, schedules)
def test_equal_stages_take_the_closed_form(
    num_stages: int, num_microbatches: int, forward_s: float, backward_s: float, schedule: Schedule
) -> None:
    stages = [StageTimes(forward_s=forward_s, backward_s=backward_s)] * num_stages
    expected = closed_form_s([forward_s + backward_s] * num_stages, num_microbatches)
    assert simulate(stages, num_microbatches, schedule).step_time_s == expected


@given(pipelines())
def test_never_faster_than_the_work_of_any_stage_behind_the_first_and_before_the_last_passes(
    pipeline: tuple[list[StageTimes], int, Schedule],
) -> None:
    stages, num_microbatches, schedule = pipeline
    stages = _without_transfers(stages)
    bounds = [
        sum(s.forward_s + s.backward_s for s in stages[:index])
        + num_microbatches * (stage.forward_s + stage.backward_s)
        for index, stage in enumerate(stages)
    ]
    assert simulate(stages, num_microbatches, schedule).step_time_s >= max(bounds)


@given(pipelines())
def test_gpipe_takes_the_closed_form_on_unequal_stages_whose_backward_is_twice_forward(
    pipeline: tuple[list[StageTimes], int, Schedule],
) -> None:
    stages, num_microbatches, _ = pipeline
    stages = [StageTimes(forward_s=s.forward_s, backward_s=2 * s.forward_s) for s in stages]
    expected = closed_form_s([s.forward_s + s.backward_s for s in stages], num_microbatches)
    assert simulate(stages, num_microbatches, "gpipe").step_time_s == expected


@given(pipelines())
def test_1f1b_never_takes_longer_than_the_closed_form_where_backward_is_twice_forward(
    pipeline: tuple[list[StageTimes], int, Schedule],
) -> None:
    stages, num_microbatches, _ = pipeline
    num_microbatches = max(num_microbatches, len(stages))
    stages = [StageTimes(forward_s=s.forward_s, backward_s=2 * s.forward_s) for s in stages]
    most = closed_form_s([s.forward_s + s.backward_s for s in stages], num_microbatches)
    assert simulate(stages, num_microbatches, "1f1b").step_time_s <= most


@given(pipelines())
def test_gpipe_never_beats_the_closed_form(pipeline: tuple[list[StageTimes], int, Schedule]) -> None:
    stages, num_microbatches, _ = pipeline
    least = closed_form_s([s.forward_s + s.backward_s for s in stages], num_microbatches)
    assert simulate(stages, num_microbatches, "gpipe").step_time_s >= least


def test_a_slow_middle_stage_is_not_free() -> None:
    fast, slow = StageTimes(forward_s=1, backward_s=2), StageTimes(forward_s=4, backward_s=8)
    assert simulate([fast, slow, fast], 8, "1f1b").step_time_s >= 8 * 12


@given(pipelines())
def test_gpipe_takes_as_long_as_1f1b_on_equal_stages_without_transfers(
    pipeline: tuple[list[StageTimes], int, Schedule],
) -> None:
    stages, num_microbatches, _ = pipeline
    equal = _without_transfers(stages)[:1] * len(stages)
    num_microbatches = max(num_microbatches, len(stages))
    gpipe = simulate(equal, num_microbatches, "gpipe").step_time_s
    assert gpipe == simulate(equal, num_microbatches, "1f1b").step_time_s


@given(pipelines())
def test_every_pass_happens_exactly_once(pipeline: tuple[list[StageTimes], int, Schedule]) -> None:
    stages, num_microbatches, schedule = pipeline
    for events in simulate(stages, num_microbatches, schedule).stages:
        passes = [(event.kind, event.microbatch) for event in events]
        expected = {(kind, m) for kind in ("forward", "backward") for m in range(num_microbatches)} | {("once", -1)}
        assert len(passes) == len(expected)
        assert set(passes) == expected


@given(pipelines())
def test_passes_of_a_stage_do_not_overlap(pipeline: tuple[list[StageTimes], int, Schedule]) -> None:
    for events in simulate(*pipeline).stages:
        assert all(before.end_s <= after.start_s for before, after in pairwise(events))


@given(pipelines())
def test_a_pass_starts_after_what_it_needs_has_arrived(pipeline: tuple[list[StageTimes], int, Schedule]) -> None:
    stages, num_microbatches, schedule = pipeline
    found = _by_pass(simulate(stages, num_microbatches, schedule))
    last = len(stages) - 1
    for microbatch in range(num_microbatches):
        for index, stage in enumerate(stages):
            assert found[index, "backward", microbatch][0] >= found[index, "forward", microbatch][1]
            if index:
                arrival = found[index - 1, "forward", microbatch][1] + stage.transfer_s
                assert found[index, "forward", microbatch][0] >= arrival
            if index < last:
                arrival = found[index + 1, "backward", microbatch][1] + stages[index + 1].transfer_s
                assert found[index, "backward", microbatch][0] >= arrival


@given(pipelines())
def test_no_stage_holds_more_microbatches_than_the_tables_say(
    pipeline: tuple[list[StageTimes], int, Schedule],
) -> None:
    stages, num_microbatches, schedule = pipeline
    one_device = setting(job(cluster(1, 1)), num_microbatches=1)
    tables = build_tables(one_device, (parse_strategy("single"),))
    tables = replace(tables, num_stages=len(stages), num_microbatches=num_microbatches, schedule=schedule)
    for index, events in enumerate(simulate(stages, num_microbatches, schedule).stages):
        changes = [{"forward": 1, "backward": -1, "once": 0}[event.kind] for event in events]
        assert max(accumulate(changes)) == tables.in_flight(index)


@given(pipelines())
def test_slower_transfers_never_speed_a_step_up(pipeline: tuple[list[StageTimes], int, Schedule]) -> None:
    stages, num_microbatches, schedule = pipeline
    with_transfers = simulate(stages, num_microbatches, schedule).step_time_s
    without = [
        StageTimes(forward_s=s.forward_s, backward_s=s.backward_s, once_s=s.once_s, transfer_s=0) for s in stages
    ]
    assert simulate(without, num_microbatches, schedule).step_time_s <= with_transfers


def test_work_once_a_step_comes_after_the_last_backward_of_its_stage() -> None:
    timeline = simulate([StageTimes(forward_s=1, backward_s=2, once_s=5)], 2, "1f1b")
    assert timeline.step_time_s == pytest.approx(11)


def _by_pass(timeline: Timeline) -> dict[tuple[int, str, int], tuple[float, float]]:
    return {
        (event.stage, event.kind, event.microbatch): (event.start_s, event.end_s)
        for events in timeline.stages
        for event in events
    }
