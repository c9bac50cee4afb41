"""Tests of the order of passes on every stage against `torch.distributed.pipelining`."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from steelyard.errors import InvalidPlanError
from steelyard.schedules import SCHEDULES, Phase
from steelyard.schedules.interleaved import microbatches_per_round
from steelyard.schedules.pass_rows import received_ahead, with_transfers
from tests.schedules.examples import pipeline

Passes = list[tuple[str, int, int]]

INTERLEAVED = [
    (num_stages, num_chunks, num_microbatches)
    for num_stages in (2, 3, 4, 8)
    for num_chunks in (2, 3, 4)
    for num_microbatches in (1, 2, 3, 4, 6, 8, 10, 12, 16, 24)
] + [(num_stages, num_chunks, 16) for num_stages in (2, 8) for num_chunks in (5, 12, 20)]
OF_TORCH = {
    "interleaved-1f1b": (ScheduleInterleaved1F1B, "FB"),
    "interleaved-zero-bubble": (ScheduleInterleavedZeroBubble, "FI"),
}
"""The classes of schedules with chunks, and the passes that receive."""
IN_A_V = {"zb-v": ScheduleZBVZeroBubble, "dualpipe-v": ScheduleDualPipeV}


def ours(stage: int, num_stages: int, num_microbatches: int, schedule: str, num_chunks: int = 1) -> Passes:
    """Passes as kind, part of the model and microbatch."""
    where = pipeline(num_stages, num_microbatches, schedule, num_chunks)
    order, parts = where.passes(stage), where.parts_of(stage)
    passes = zip(order.phase.tolist(), order.chunk.tolist(), order.microbatch.tolist(), strict=True)
    words = "FIW" if SCHEDULES[schedule].splits_backward else "FB"
    return [(words[phase], parts[chunk], microbatch) for phase, chunk, microbatch in passes]


class RecordingStage:
    """Stands in for a pipeline stage of torch and keeps what its schedule asks of it."""

    def __init__(self, index: int, num_stages: int) -> None:
        self.stage_index, self.num_stages = index, num_stages
        self.is_last = index == num_stages - 1
        self.done: Passes = []

    def forward_one_chunk(self, microbatch: int, *_arguments: object, **_keywords: object) -> torch.Tensor:
        self.done.append(("F", self.stage_index, microbatch))
        return torch.zeros(())

    def backward_one_chunk(self, microbatch: int, **_keywords: object) -> None:
        self.done.append(("B", self.stage_index, microbatch))

    def perform_reduce_grad(self, _factor: int) -> None:
        pass

    def _nothing(self, _microbatch: int) -> list[object]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _nothing


def done_by_torch(schedule: str, stage: int, num_stages: int, num_microbatches: int) -> Passes:
    recorder = RecordingStage(stage, num_stages)
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
    played = kind(recorder, num_microbatches, loss_fn=lambda output, _target: output)
    played._initialize_stage = lambda *_: None
    played._step_microbatches([()] * num_microbatches, [{}] * num_microbatches, [None] * num_microbatches)
    return recorder.done


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (1, 5), (2, 2), (2, 7), (4, 4), (4, 9), (7, 16)])
def test_passes_are_done_in_the_order_in_which_torch_does_them(
    schedule: str, num_stages: int, num_microbatches: int
) -> None:
    for stage in range(num_stages):
        expected = done_by_torch(schedule, stage, num_stages, num_microbatches)
        assert ours(stage, num_stages, num_microbatches, schedule) == expected


@pytest.mark.slow
@pytest.mark.parametrize("schedule", OF_TORCH)
@pytest.mark.parametrize(("num_stages", "num_chunks", "num_microbatches"), INTERLEAVED)
def test_interleaved_passes_are_in_the_order_that_torch_plans_or_both_refuse(
    schedule: str, num_stages: int, num_chunks: int, num_microbatches: int
) -> None:
    try:
        planned = OF_TORCH[schedule][0](_parts(num_stages, num_chunks), num_microbatches).pipeline_order
    except ValueError:
        with pytest.raises(InvalidPlanError, match="num_microbatches"):
            pipeline(num_stages, num_microbatches, schedule, num_chunks).passes(0)
        return
    for stage, actions in planned.items():
        expected = [
            (action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in actions
            if action is not None
        ]
        assert ours(stage, num_stages, num_microbatches, schedule, num_chunks) == expected


def _parts(num_stages: int, num_chunks: int) -> list[SimpleNamespace]:
    whole = num_stages * num_chunks
    return [SimpleNamespace(group_size=num_stages, group_rank=0, num_stages=whole, submod=None)] * num_chunks


@pytest.mark.slow
@pytest.mark.parametrize("schedule", OF_TORCH)
@pytest.mark.parametrize(("num_stages", "num_chunks", "num_microbatches"), INTERLEAVED)
def test_no_more_is_received_ahead_than_the_schedule_says(
    schedule: str, num_stages: int, num_chunks: int, num_microbatches: int
) -> None:
    where = pipeline(num_stages, num_microbatches, schedule, num_chunks)
    if where.schedule.refusal(where) is not None:
        return
    kind, passes = OF_TORCH[schedule]
    planned = kind(_parts(num_stages, num_chunks), num_microbatches).pipeline_order_with_comms
    for stage, actions in planned.items():
        for most, passed, received_by in zip(where.schedule.received_ahead(where, stage), passes, "FB", strict=True):
            received: set[tuple[int, int]] = set()
            for action in actions:
                place = action.stage_index, action.microbatch_index
                if action.computation_type.value == f"RECV_{received_by}":
                    received.add(place)
                elif action.computation_type.value == passed:
                    received.discard(place)
                if action.computation_type.value in (*passes, "W"):
                    assert len(received) <= most


def played_in_a_v(schedule: str, num_stages: int, num_microbatches: int) -> Any:
    """Torch's schedule, or None if ours and torch's refuse the number of microbatches."""
    where = pipeline(num_stages, num_microbatches, schedule, 2)
    try:
        played = IN_A_V[schedule](_parts(num_stages, 2), num_microbatches)
    except ValueError:
        with pytest.raises(InvalidPlanError, match="num_microbatches"):
            where.passes(0)
        return None
    assert [where.stage_of(part) for part in range(2 * num_stages)] == [
        played.stage_index_to_group_rank[part] for part in range(2 * num_stages)
    ]
    return played


def alone(actions: Iterable[Any]) -> Iterator[tuple[str, int, int]]:
    """Each action of a rank of torch's schedule: the two of a pair, and I and W of a whole backward pass."""
    for action in actions:
        if action is not None and action.sub_actions:
            yield from alone(action.sub_actions)
        elif action is not None:
            kinds = {"B": "IW"}.get(action.computation_type.value, [action.computation_type.value])
            yield from ((kind, action.stage_index, action.microbatch_index) for kind in kinds)


MOST_IN_A_V = [(num_stages, m) for num_stages in (2, 3, 4, 5, 8) for m in (1, 2, 3, 4, 6, 7, 8, 9, 10, 16, 17, 31)]


@pytest.mark.parametrize("schedule", IN_A_V)
def test_passes_in_a_v_are_in_the_order_that_torch_plans_or_both_refuse(schedule: str) -> None:
    for num_stages, num_microbatches in MOST_IN_A_V:
        played = played_in_a_v(schedule, num_stages, num_microbatches)
        for stage, actions in (played.pipeline_order if played else {}).items():
            assert ours(stage, num_stages, num_microbatches, schedule, 2) == list(alone(actions))


@pytest.mark.parametrize("schedule", IN_A_V)
def test_no_more_is_received_ahead_in_a_v_than_the_schedule_says(schedule: str) -> None:
    for num_stages, num_microbatches in MOST_IN_A_V:
        played = played_in_a_v(schedule, num_stages, num_microbatches)
        where = pipeline(num_stages, num_microbatches, schedule, 2)
        for stage, row in enumerate(with_transfers(where) if played else ()):
            found, most = received_ahead(row), where.schedule.received_ahead(where, stage)
            assert all(count <= limit for count, limit in zip(found, most, strict=True))
        for stage, actions in (played.pipeline_order_with_comms if played else {}).items():
            held: dict[str, set[tuple[int, int]]] = {"F": set(), "B": set()}
            for kind, *place in alone(actions):
                if kind.startswith("RECV_"):
                    held[kind[-1]].add((place[0], place[1]))
                elif kind in "FIW":
                    held[{"F": "F"}.get(kind, "B")].discard((place[0], place[1]))
                    most = where.schedule.received_ahead(where, stage)
                    assert len(held["F"]) <= most[0]
                    assert len(held["B"]) <= most[1]


@pytest.mark.parametrize("schedule", IN_A_V)
def test_weight_passes_in_a_v_wait_in_place_of_passes_in_flight(schedule: str) -> None:
    for num_stages in (2, 4, 8):
        where = pipeline(num_stages, 2 * num_stages, schedule, 2)
        for stage in range(num_stages):
            order = where.passes(stage)
            alive = np.cumsum((order.phase == Phase.FORWARD) * 1 - (order.phase == Phase.BACKWARD))
            waiting = np.cumsum((order.phase == Phase.BACKWARD) * 1 - (order.phase == Phase.WEIGHT))
            assert where.schedule.unfinished(where, stage) == where.in_flight(stage) == (alive + waiting).max()
            assert where.in_flight(stage) == 2 * num_stages + (schedule == "dualpipe-v")


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("num_stages", [2, 3, 8])
def test_every_part_lies_in_its_chunk_on_one_stage(schedule: str, num_stages: int) -> None:
    where = pipeline(num_stages, 2 * num_stages, schedule, SCHEDULES[schedule].chunk_counts[0])
    found = {part: (stage, chunk) for stage in range(num_stages) for chunk, part in enumerate(where.parts_of(stage))}
    assert found == {part: (where.stage_of(part), part // num_stages) for part in range(where.num_parts)}
    assert where.is_v == (schedule in IN_A_V)


@pytest.mark.parametrize(("num_stages", "most"), [(2, 1), (4, 3), (8, 7)])
def test_what_the_last_stage_sends_to_the_first_waits_for_the_end_of_a_round(num_stages: int, most: int) -> None:
    where = pipeline(num_stages, 4 * num_stages, "interleaved-1f1b", 2)
    assert where.schedule.received_ahead(where, 0)[0] == most


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4), st.data())
def test_every_pass_of_every_chunk_is_done_once_and_forward_comes_first(
    num_stages: int, num_rounds: int, num_chunks: int, data: st.DataObject
) -> None:
    num_microbatches = num_rounds * num_stages
    stage = data.draw(st.integers(0, num_stages - 1))
    passes = ours(stage, num_stages, num_microbatches, "interleaved-1f1b", num_chunks)
    assert Counter(passes) == Counter(
        (kind, chunk * num_stages + stage, microbatch)
        for kind in "FB"
        for chunk in range(num_chunks)
        for microbatch in range(num_microbatches)
    )
    place = {each: index for index, each in enumerate(passes)}
    assert all(place["F", part, microbatch] < place["B", part, microbatch] for _, part, microbatch in passes)


@given(st.integers(1, 6), st.integers(1, 12))
def test_a_stage_holds_all_microbatches_under_gpipe_and_at_most_the_stages_behind_it_under_1f1b(
    num_stages: int, num_microbatches: int
) -> None:
    for stage in range(num_stages):
        assert pipeline(num_stages, num_microbatches, "gpipe").passes(stage).in_flight(0) == num_microbatches
        held = pipeline(num_stages, num_microbatches, "1f1b").passes(stage).in_flight(0)
        assert held == min(num_microbatches, num_stages - stage)


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 8), st.integers(1, 4), st.data())
def test_the_bound_of_the_search_is_what_the_passes_hold(
    schedule: str, num_stages: int, num_rounds: int, data: st.DataObject
) -> None:
    chunks = data.draw(st.sampled_from(SCHEDULES[schedule].chunk_counts))
    config = pipeline(num_stages, num_rounds * num_stages, schedule, chunks)
    assume(config.schedule.refusal(config) is None)
    for stage in range(num_stages):
        passes = ours(stage, num_stages, num_rounds * num_stages, schedule, chunks)
        alive = {"F": 1, "B": -1, "I": -1, "W": 0}
        assert config.in_flight(stage) == max(accumulate(alive[kind] for kind, _, _ in passes))
        waits = accumulate({"F": 0, "B": 0, "I": 1, "W": -1}[kind] for kind, _, _ in passes)
        behind_a_backward_pass = [count for count, (kind, _, _) in zip(waits, passes, strict=True) if kind == "I"]
        assert config.waiting(stage) == max(behind_a_backward_pass, default=1) - 1


@pytest.mark.parametrize(("num_microbatches", "per_round"), [(1, 1), (2, 2), (3, 3), (4, 2), (8, 2)])
def test_interleaved_rounds_have_as_many_microbatches_as_stages_or_all_of_few(
    num_microbatches: int, per_round: int
) -> None:
    assert microbatches_per_round(pipeline(2, num_microbatches, "interleaved-1f1b", 2)) == per_round
