"""Tests of stages that share processor cores: no effect without sharing, no idle time with one core for all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.cost.simulator import StageTimes, Timeline
from tests.cost.examples import simulated

seconds = st.integers(1, 20).map(float)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[StageTimes], int, str, int]:
    """Parts, microbatches, schedule and chunks."""
    num_stages, schedule = draw(st.integers(2, 4)), draw(st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b"]))
    num_chunks = 2 if schedule == "interleaved-1f1b" else 1
    size = num_stages * num_chunks
    times = st.builds(StageTimes, forward_s=seconds, backward_s=seconds, once_s=seconds, transfer_s=seconds)
    parts = draw(st.lists(times, min_size=size, max_size=size))
    return parts, num_stages * draw(st.integers(1, 3)), schedule, num_chunks


def run(pipeline: tuple[list[StageTimes], int, str, int], speeds: list[float]) -> Timeline:
    parts, num_microbatches, schedule, num_chunks = pipeline
    return simulated(parts, num_microbatches, schedule, num_chunks=num_chunks, speeds=in_one_pool(speeds))


def in_one_pool(speeds: list[float]) -> list[tuple[int, list[float]]]:
    """The speeds of so many stages that share all their cores."""
    return [(0, speeds)] * len(speeds)


def num_stages_of(pipeline: tuple[list[StageTimes], int, str, int]) -> int:
    return len(pipeline[0]) // pipeline[3]


def with_transfers(parts: list[StageTimes]) -> list[StageTimes]:
    """Parts without transfers, whose passes take longer by the time of handing over their inputs and outputs."""
    handed_s = [0.0, *(part.transfer_s for part in parts[1:]), 0.0]
    return [
        StageTimes(
            forward_s=part.forward_s + handed_s[index] + handed_s[index + 1],
            backward_s=part.backward_s + handed_s[index] + handed_s[index + 1],
            once_s=part.once_s,
        )
        for index, part in enumerate(parts)
    ]


@given(pipelines())
def test_stages_that_do_not_slow_each_other_down_take_the_time_of_stages_of_their_own_that_work_on_transfers(
    pipeline: tuple[list[StageTimes], int, str, int],
) -> None:
    parts, *rest = pipeline
    shared = run(pipeline, [1.0] * num_stages_of(pipeline))
    alone = run((with_transfers(parts), *rest), [])
    for mine, theirs in zip(shared.stages, alone.stages, strict=True):
        assert [(event.work, event.chunk, event.microbatch) for event in mine] == [
            (event.work, event.chunk, event.microbatch) for event in theirs
        ]
        assert [event.end_s for event in mine] == pytest.approx([event.end_s for event in theirs])


@given(pipelines())
def test_one_core_takes_the_sum_of_all_work_and_no_bubble(
    pipeline: tuple[list[StageTimes], int, str, int],
) -> None:
    """The core is P times as fast for one stage as for all P, and always has one to work for."""
    parts, num_microbatches, _, _ = pipeline
    count = num_stages_of(pipeline)
    timeline = run(pipeline, [count / busy for busy in range(1, count + 1)])
    passes_s = num_microbatches * sum(part.forward_s + part.backward_s for part in with_transfers(parts))
    work_s = (passes_s + sum(part.once_s for part in parts)) / count
    assert timeline.step_time_s == pytest.approx(work_s)


@given(pipelines())
def test_faster_cores_never_lengthen_the_step(pipeline: tuple[list[StageTimes], int, str, int]) -> None:
    count = num_stages_of(pipeline)
    slowest = run(pipeline, [1.0] * count)
    assert run(pipeline, [2.0] * count).step_time_s <= slowest.step_time_s


@given(pipelines())
def test_a_stage_does_one_pass_at_a_time(pipeline: tuple[list[StageTimes], int, str, int]) -> None:
    count = num_stages_of(pipeline)
    for events in run(pipeline, [count / busy for busy in range(1, count + 1)]).stages:
        ends = [event.end_s for event in events]
        starts = [event.start_s for event in events]
        assert all(end <= start + 1e-9 for end, start in zip(ends[:-1], starts[1:], strict=True))


def test_two_stages_on_one_core_by_hand() -> None:
    """Passes of 2 and 4 s while both work, so 1 and 2 s alone: forward, forward, backward, backward one by one."""
    timeline = simulated([StageTimes(forward_s=2, backward_s=4)] * 2, 1, "gpipe", speeds=[(0, (2.0, 1.0))] * 2)
    assert [(event.start_s, event.end_s) for event in timeline.stages[0][:2]] == [(0, 1), (4, 6)]
    assert [(event.start_s, event.end_s) for event in timeline.stages[1][:2]] == [(1, 2), (2, 4)]


def test_stages_of_two_pools_slow_only_those_of_their_own_pool_down_by_hand() -> None:
    """The stages of the first pool share one core; the third has its own and takes its 2 and 4 s at all times."""
    parts = [StageTimes(forward_s=2, backward_s=4)] * 3
    shared: tuple[int, tuple[float, ...]] = (0, (2.0, 1.0))
    timeline = simulated(parts, 3, "gpipe", speeds=[shared, shared, (1, ())])
    last = [(event.start_s, event.end_s) for event in timeline.stages[2] if event.work != "once"]
    assert [end - start for start, end in last] == [2, 2, 2, 4, 4, 4]
    first = [(event.start_s, event.end_s) for event in timeline.stages[0] if event.work != "once"]
    assert first[:2] == [(0, 1), (1, 3)]
