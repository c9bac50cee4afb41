"""Tests of the order of passes and its lower bound against an integer program, and of their laws."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.cost.pass_order import StageLimit, best_order, order_bound_s
from steelyard.cost.simulator import StageTimes, simulate
from steelyard.schedules import SCHEDULES, PipelineConfig
from tests.oracles.pass_order_milp import best_order_s
from tests.schedules.examples import pipeline as pipeline_of

NAME = next(each.name for each in SCHEDULES.values() if each.orders_by_time)
ROUNDING = 1e-6
"""Of the solver and of sums, relative."""

Case = tuple[list[StageTimes], PipelineConfig, list[StageLimit]]


@st.composite
def cases(draw: st.DrawFn, most_stages: int, most_chunks: int, most_microbatches: int, least_s: int = 0) -> Case:
    stages, chunks = draw(st.integers(2, most_stages)), draw(st.integers(1, most_chunks))
    seconds, lags = st.integers(least_s, 5), st.sampled_from([0, 0, 1, 3])
    parts = []
    for _ in range(stages * chunks):
        weight_s = draw(seconds)
        parts.append(
            StageTimes(
                forward_s=draw(seconds),
                backward_s=weight_s + draw(seconds),
                weight_s=weight_s,
                once_s=draw(lags),
                transfer_s=draw(lags),
                gives_back=draw(st.booleans()),
            )
        )
    counts = [m for m in range(1, most_microbatches + 1) if m % max(1, m // stages) == 0]
    pipeline = pipeline_of(stages, draw(st.sampled_from(counts)), NAME, chunks)
    more = st.tuples(st.integers(0, 3), st.integers(0, 3))
    limits = [
        StageLimit(in_flight=pipeline.in_flight(stage) + ahead, waiting=pipeline.waiting(stage) + waiting)
        for stage, (ahead, waiting) in enumerate(draw(st.tuples(*[more] * stages)))
    ]
    return parts, pipeline, limits


def ordered(case: Case) -> tuple[PipelineConfig, float]:
    """The pipeline in the order found, and its step time in seconds."""
    parts, pipeline, limits = case
    found = replace(pipeline, pass_order=best_order(parts, pipeline, limits))
    return found, simulate(parts, found).step_time_s


@settings(max_examples=15, deadline=None)
@given(cases(most_stages=3, most_chunks=1, most_microbatches=4, least_s=1))
def test_the_best_order_of_an_integer_program_lies_between_bound_and_order(case: Case) -> None:
    proven_s, best_s = best_order_s(*case, time_limit_s=20)
    assert order_bound_s(*case) <= best_s * (1 + ROUNDING)
    assert proven_s <= ordered(case)[1] * (1 + ROUNDING)


@settings(max_examples=10, deadline=None)
@given(cases(most_stages=2, most_chunks=2, most_microbatches=2, least_s=1))
def test_so_it_does_over_several_chunks(case: Case) -> None:
    proven_s, best_s = best_order_s(*case, time_limit_s=20)
    assert order_bound_s(*case) <= best_s * (1 + ROUNDING)
    assert proven_s <= ordered(case)[1] * (1 + ROUNDING)


@settings(max_examples=40, deadline=None)
@given(cases(most_stages=6, most_chunks=3, most_microbatches=12))
def test_an_order_runs_stays_within_the_limits_and_is_not_below_the_bound(case: Case) -> None:
    parts, pipeline, limits = case
    found, step_s = ordered(case)
    found.check()
    assert order_bound_s(parts, pipeline, limits) <= step_s * (1 + ROUNDING)
    for stage, limit in enumerate(limits):
        assert found.in_flight(stage) <= limit.in_flight
        assert found.waiting(stage) <= limit.waiting


@settings(max_examples=40, deadline=None)
@given(cases(most_stages=6, most_chunks=3, most_microbatches=12))
def test_no_schedule_within_the_limits_is_faster(case: Case) -> None:
    parts, pipeline, limits = case
    step_s = ordered(case)[1]
    for schedule in SCHEDULES.values():
        other = replace(pipeline, schedule=schedule)
        takes_chunks = schedule.takes_chunks and not other.is_v
        if schedule.refusal(other) is not None or (pipeline.num_chunks > 1) != takes_chunks:
            continue
        fits = all(
            other.in_flight(stage) <= limit.in_flight and other.waiting(stage) <= limit.waiting
            for stage, limit in enumerate(limits)
        )
        if fits:
            assert step_s <= simulate(parts, other).step_time_s * (1 + ROUNDING)


@given(cases(most_stages=5, most_chunks=2, most_microbatches=8))
def test_more_memory_never_raises_the_bound(case: Case) -> None:
    parts, pipeline, limits = case
    more = [StageLimit(in_flight=each.in_flight + 1, waiting=each.waiting + 1) for each in limits]
    assert order_bound_s(parts, pipeline, more) <= order_bound_s(parts, pipeline, limits)


def test_slow_transfers_are_filled_where_there_is_memory() -> None:
    part = StageTimes(forward_s=1, backward_s=3, weight_s=1, transfer_s=1)
    pipeline = pipeline_of(4, 8, NAME, 2)
    limits = [StageLimit(in_flight=pipeline.in_flight(each) + 4, waiting=4) for each in range(4)]
    case = [part] * 8, pipeline, limits
    assert ordered(case)[1] < 0.95 * simulate([part] * 8, pipeline).step_time_s
    assert ordered(case)[1] < 1.06 * order_bound_s(*case)
