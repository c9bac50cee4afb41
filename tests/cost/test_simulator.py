"""Tests of the schedule simulator against its closed form and the laws of a pipeline."""

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.cost.build import build_tables
from steelyard.cost.simulator import StageTimes, Timeline
from steelyard.errors import InvalidPlanError, InvalidProblemError
from steelyard.plan.strategy import parse_strategy
from tests.cost.examples import config, simulated
from tests.oracles.closed_form import closed_form_s
from tests.schedules.examples import pipeline as pipeline_of

schedules = st.sampled_from(["gpipe", "1f1b"])
seconds = st.integers(0, 20).map(float)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[StageTimes], int, str]:
    times = st.builds(StageTimes, forward_s=seconds, backward_s=seconds, once_s=seconds, transfer_s=seconds)
    stages = draw(st.lists(times, min_size=1, max_size=5))
    schedule = draw(schedules)
    least = len(stages) if schedule == "1f1b" else 1
    return stages, draw(st.integers(least, least + 6)), schedule


def _without_transfers(stages: list[StageTimes]) -> list[StageTimes]:
    return [StageTimes(forward_s=s.forward_s, backward_s=s.backward_s) for s in stages]


@given(st.integers(1, 6), st.integers(1, 12), seconds, seconds, schedules)
def test_equal_stages_take_the_closed_form(
    num_stages: int, num_microbatches: int, forward_s: float, backward_s: float, schedule: str
) -> None:
    stages = [StageTimes(forward_s=forward_s, backward_s=backward_s)] * num_stages
    expected = closed_form_s([forward_s + backward_s] * num_stages, num_microbatches)
    assert simulated(stages, num_microbatches, schedule).step_time_s == expected


@given(pipelines())
def test_never_faster_than_the_work_of_any_stage_behind_the_first_and_before_the_last_passes(
    pipeline: tuple[list[StageTimes], int, str],
) -> None:
    stages, num_microbatches, schedule = pipeline
    stages = _without_transfers(stages)
    bounds = [
        sum(s.forward_s + s.backward_s for s in stages[:index])
        + num_microbatches * (stage.forward_s + stage.backward_s)
        for index, stage in enumerate(stages)
    ]
    assert simulated(stages, num_microbatches, schedule).step_time_s >= max(bounds)


@given(pipelines())
def test_gpipe_takes_the_closed_form_on_unequal_stages_whose_backward_is_twice_forward(
    pipeline: tuple[list[StageTimes], int, str],
) -> None:
    stages, num_microbatches, _ = pipeline
    stages = [StageTimes(forward_s=s.forward_s, backward_s=2 * s.forward_s) for s in stages]
    expected = closed_form_s([s.forward_s + s.backward_s for s in stages], num_microbatches)
    assert simulated(stages, num_microbatches, "gpipe").step_time_s == expected


@given(pipelines())
def test_1f1b_never_takes_longer_than_the_closed_form_where_backward_is_twice_forward(
    pipeline: tuple[list[StageTimes], int, str],
) -> None:
    stages, num_microbatches, _ = pipeline
    num_microbatches = max(num_microbatches, len(stages))
    stages = [StageTimes(forward_s=s.forward_s, backward_s=2 * s.forward_s) for s in stages]
    most = closed_form_s([s.forward_s + s.backward_s for s in stages], num_microbatches)
    assert simulated(stages, num_microbatches, "1f1b").step_time_s <= most


@given(pipelines())
def test_gpipe_never_beats_the_closed_form(pipeline: tuple[list[StageTimes], int, str]) -> None:
    stages, num_microbatches, _ = pipeline
    least = closed_form_s([s.forward_s + s.backward_s for s in stages], num_microbatches)
    assert simulated(stages, num_microbatches, "gpipe").step_time_s >= least


def test_a_slow_middle_stage_is_not_free() -> None:
    fast, slow = StageTimes(forward_s=1, backward_s=2), StageTimes(forward_s=4, backward_s=8)
    assert simulated([fast, slow, fast], 8, "1f1b").step_time_s >= 8 * 12


@given(pipelines())
def test_gpipe_takes_as_long_as_1f1b_on_equal_stages_without_transfers(
    pipeline: tuple[list[StageTimes], int, str],
) -> None:
    stages, num_microbatches, _ = pipeline
    equal = _without_transfers(stages)[:1] * len(stages)
    num_microbatches = max(num_microbatches, len(stages))
    gpipe = simulated(equal, num_microbatches, "gpipe").step_time_s
    assert gpipe == simulated(equal, num_microbatches, "1f1b").step_time_s


@given(pipelines())
def test_every_pass_happens_exactly_once(pipeline: tuple[list[StageTimes], int, str]) -> None:
    stages, num_microbatches, schedule = pipeline
    for events in simulated(stages, num_microbatches, schedule).stages:
        passes = [(event.work, event.microbatch) for event in events]
        expected = {(work, m) for work in ("forward", "backward") for m in range(num_microbatches)} | {("once", -1)}
        assert len(passes) == len(expected)
        assert set(passes) == expected


@given(pipelines())
def test_passes_of_a_stage_do_not_overlap(pipeline: tuple[list[StageTimes], int, str]) -> None:
    for events in simulated(*pipeline).stages:
        assert all(before.end_s <= after.start_s for before, after in pairwise(events))


@given(pipelines())
def test_a_pass_starts_after_what_it_needs_has_arrived(pipeline: tuple[list[StageTimes], int, str]) -> None:
    stages, num_microbatches, schedule = pipeline
    found = _by_pass(simulated(stages, num_microbatches, schedule))
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
    pipeline: tuple[list[StageTimes], int, str],
) -> None:
    stages, num_microbatches, schedule = pipeline
    config_of_it = pipeline_of(len(stages), num_microbatches, schedule)
    for index, events in enumerate(simulated(stages, num_microbatches, schedule).stages):
        changes = [{"forward": 1, "backward": -1, "once": 0}[event.work] for event in events]
        assert max(accumulate(changes)) == config_of_it.in_flight(index)


@given(pipelines())
def test_slower_transfers_never_speed_a_step_up(pipeline: tuple[list[StageTimes], int, str]) -> None:
    stages, num_microbatches, schedule = pipeline
    with_transfers = simulated(stages, num_microbatches, schedule).step_time_s
    without = [
        StageTimes(forward_s=s.forward_s, backward_s=s.backward_s, once_s=s.once_s, transfer_s=0) for s in stages
    ]
    assert simulated(without, num_microbatches, schedule).step_time_s <= with_transfers


def test_work_once_a_step_comes_after_the_last_backward_of_its_stage() -> None:
    timeline = simulated([StageTimes(forward_s=1, backward_s=2, once_s=5)], 2, "1f1b")
    assert timeline.step_time_s == pytest.approx(11)


@st.composite
def interleaved(draw: st.DrawFn) -> tuple[list[StageTimes], int, int]:
    """Parts, microbatches and chunks."""
    num_stages, num_chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    times = st.builds(
        StageTimes,
        forward_s=seconds,
        backward_s=seconds,
        once_s=seconds,
        transfer_s=seconds,
    )
    count = num_stages * num_chunks
    parts = draw(st.lists(times, min_size=count, max_size=count))
    return parts, num_stages * draw(st.integers(1, 3)), num_chunks


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), seconds, seconds)
def test_the_interleaved_bubble_of_equal_parts_is_that_of_the_paper(
    num_stages: int, num_chunks: int, num_rounds: int, forward_s: float, backward_s: float
) -> None:
    num_microbatches = num_rounds * num_stages
    parts = [StageTimes(forward_s=forward_s, backward_s=backward_s)] * (num_stages * num_chunks)
    found = simulated(parts, num_microbatches, "interleaved-1f1b", num_chunks=num_chunks)
    work_s = num_microbatches * num_chunks * (forward_s + backward_s)
    bubble = (num_stages - 1) / (num_chunks * num_microbatches)
    assert found.step_time_s == pytest.approx(work_s * (1 + bubble))
    assert found.bubble_share() == pytest.approx(bubble / (1 + bubble) if work_s else 0.0)


@pytest.mark.parametrize(("num_stages", "num_chunks", "num_rounds"), [(2, 2, 1), (3, 3, 2), (4, 2, 4), (8, 4, 2)])
@pytest.mark.parametrize("weight_s", [0.5, 0.8, 1.0])
def test_weight_passes_leave_a_bubble_of_a_pass_without_two_of_them_per_stage(
    num_stages: int, num_chunks: int, num_rounds: int, weight_s: float
) -> None:
    times = StageTimes(forward_s=1.0, backward_s=2.0, weight_s=weight_s)
    parts, num_microbatches = [times] * (num_stages * num_chunks), num_rounds * num_stages
    found = simulated(parts, num_microbatches, "interleaved-zero-bubble", num_chunks=num_chunks)
    bubble_s = (num_stages - 1) * (3.0 - 2 * weight_s)
    assert found.step_time_s == pytest.approx(3.0 * num_microbatches * num_chunks + bubble_s)


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
def test_in_a_v_of_equal_passes_stages_idle_only_while_the_first_chunk_fills(schedule: str, num_stages: int) -> None:
    parts = [StageTimes(forward_s=1.0, backward_s=2.0, weight_s=1.0)] * (2 * num_stages)
    for num_microbatches in (2 * num_stages, 3 * num_stages + 1):
        found = simulated(parts, num_microbatches, schedule, num_chunks=2)
        assert found.step_time_s == pytest.approx(6.0 * num_microbatches + num_stages - 1)


def test_the_last_stage_of_a_v_sends_nothing_to_itself() -> None:
    parts = [StageTimes(forward_s=1.0, backward_s=2.0, weight_s=1.0, transfer_s=0.25)] * 6
    found = simulated(parts, 6, "zb-v", num_chunks=2)
    sent = {(each.stage, each.receiver) for sends in found.sends for each in sends}
    assert sent == {(0, 1), (1, 2), (2, 1), (1, 0)}
    assert {stage: len(sends) for stage, sends in enumerate(found.sends)} == {0: 12, 1: 24, 2: 12}


def test_weight_passes_do_their_part_of_the_work_behind_their_backward_passes() -> None:
    parts = [StageTimes(forward_s=1.0, backward_s=2.0, weight_s=0.75)] * 6
    for events in simulated(parts, 6, "interleaved-zero-bubble", num_chunks=2).stages:
        ends = {(event.work, event.chunk, event.microbatch): event.end_s for event in events}
        spans = {event.work: event.end_s - event.start_s for event in events}
        assert (spans["forward"], spans["backward"], spans["weight"]) == pytest.approx((1.0, 1.25, 0.75))
        for (work, chunk, microbatch), end_s in ends.items():
            assert work != "weight" or ends["backward", chunk, microbatch] < end_s


@given(interleaved())
def test_an_interleaved_pass_starts_after_what_it_needs_has_arrived(
    pipeline: tuple[list[StageTimes], int, int],
) -> None:
    parts, num_microbatches, num_chunks = pipeline
    num_stages = len(parts) // num_chunks
    timeline = simulated(parts, num_microbatches, "interleaved-1f1b", num_chunks=num_chunks)
    found = {
        (event.chunk * num_stages + event.stage, event.work, event.microbatch): event
        for events in timeline.stages
        for event in events
    }
    for (part, work, microbatch), event in found.items():
        if work == "forward" and part:
            before = found[part - 1, "forward", microbatch]
            travel_s = parts[part].transfer_s if num_stages > 1 else 0.0
            assert event.start_s >= before.end_s + travel_s
        if work == "backward" and part < len(parts) - 1:
            before = found[part + 1, "backward", microbatch]
            travel_s = parts[part + 1].transfer_s if num_stages > 1 else 0.0
            assert event.start_s >= before.end_s + travel_s


@given(interleaved(), st.booleans())
def test_the_work_and_the_bubbles_of_a_stage_fill_the_step(
    pipeline: tuple[list[StageTimes], int, int], overlap_sends: bool
) -> None:
    parts, num_microbatches, num_chunks = pipeline
    timeline = simulated(
        parts,
        num_microbatches,
        "interleaved-1f1b",
        num_chunks=num_chunks,
        overlap_sends=overlap_sends,
    )
    for stage, events in enumerate(timeline.stages):
        spans = [(e.start_s, e.end_s) for e in (*events, *timeline.bubbles(stage))]
        spans = sorted(span for span in spans if span[1] > span[0])
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        assert sum(end - start for start, end in spans) == pytest.approx(timeline.step_time_s)


@pytest.mark.slow
@given(interleaved())
def test_overlap_of_sends_never_costs_time(pipeline: tuple[list[StageTimes], int, int]) -> None:
    parts, num_microbatches, num_chunks = pipeline
    apart, beside = (
        simulated(parts, num_microbatches, "interleaved-1f1b", num_chunks=num_chunks, overlap_sends=overlap)
        for overlap in (False, True)
    )
    assert beside.step_time_s <= apart.step_time_s


@given(interleaved())
def test_a_link_carries_one_transfer_at_a_time(pipeline: tuple[list[StageTimes], int, int]) -> None:
    parts, num_microbatches, num_chunks = pipeline
    timeline = simulated(parts, num_microbatches, "interleaved-1f1b", num_chunks=num_chunks)
    for sends in timeline.sends:
        for receiver in {send.receiver for send in sends}:
            spans = [(send.start_s, send.end_s) for send in sends if send.receiver == receiver]
            assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_the_chunks_of_one_stage_hand_over_without_a_transfer() -> None:
    parts = [StageTimes(forward_s=1, backward_s=2, transfer_s=50)] * 3
    timeline = simulated(parts, 2, "interleaved-1f1b", num_chunks=3)
    assert timeline.step_time_s == 18
    assert timeline.sends == ((),)


def test_a_slow_link_holds_transfers_back_one_behind_the_other() -> None:
    parts = [StageTimes(forward_s=1, backward_s=1, transfer_s=10)] * 2
    arrivals = [event.start_s for event in simulated(parts, 3, "gpipe").stages[1] if event.work == "forward"]
    assert arrivals == [11, 21, 31]


def test_a_stage_waits_for_sends_that_are_not_overlapped() -> None:
    parts = [StageTimes(forward_s=1, backward_s=1, transfer_s=10)] * 2
    events = simulated(parts, 2, "gpipe", overlap_sends=False).stages[0]
    assert [event.start_s for event in events if event.work == "forward"] == [0, 11]


def test_bubbles_are_named_by_what_the_stage_waits_for() -> None:
    timeline = simulated([StageTimes(forward_s=1, backward_s=2)] * 2, 2, "1f1b")
    assert [bubble.reason for bubble in timeline.bubbles(0)] == ["waits for gradient", "waits for gradient"]
    assert [bubble.reason for bubble in timeline.bubbles(1)] == ["pipeline fills", "step ends"]


def test_microbatches_that_cannot_be_interleaved_are_an_error() -> None:
    with pytest.raises(InvalidPlanError, match="a multiple of its 2 rounds"):
        simulated([StageTimes(forward_s=1, backward_s=2)] * 4, 5, "interleaved-1f1b", num_chunks=2)


def test_tables_of_the_search_refuse_an_interleaved_stage_of_one_chunk() -> None:
    with pytest.raises(InvalidProblemError, match="two or more chunks"):
        build_tables(config(num_stages=2, schedule="interleaved-1f1b"), (parse_strategy("fsdp4"),))


def _by_pass(timeline: Timeline) -> dict[tuple[int, str, int], tuple[float, float]]:
    return {
        (event.stage, event.work, event.microbatch): (event.start_s, event.end_s)
        for events in timeline.stages
        for event in events
    }
