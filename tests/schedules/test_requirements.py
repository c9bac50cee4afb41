"""Tests of what each schedule requires of a configuration, and where the search tries it."""

import pytest

from steelyard.errors import InvalidPlanError, UserError
from steelyard.schedules import SCHEDULES, PipelineConfig, find_schedule, names_of
from tests.schedules.examples import pipeline

INTERLEAVED = ("interleaved-1f1b", "interleaved-zero-bubble", "zero-bubble-auto")
CHUNKED = (*INTERLEAVED, "zb-v", "dualpipe-v")


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "schedule", "num_chunks", "message"),
    [
        (4, 3, "1f1b", 1, "3 for 4 stages\n.*at least as many microbatches as stages under 1f1b"),
        (2, 5, "interleaved-1f1b", 2, "5 for 2 stages under interleaved-1f1b\n.*a multiple of its 2 rounds"),
        (4, 7, "dualpipe-v", 2, "7 for 4 stages under dualpipe-v\n.*8 or more, twice the number of stages"),
        (4, 8, "zb-v", 3, "num_chunks: found 3 under zb-v\n.*2 chunks on every stage, which make a V"),
    ],
)
def test_microbatches_that_do_not_suit_are_an_error(
    num_stages: int, num_microbatches: int, schedule: str, num_chunks: int, message: str
) -> None:
    with pytest.raises(InvalidPlanError, match=message):
        pipeline(num_stages, num_microbatches, schedule, num_chunks).check()


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_a_multiple_of_the_stages_suits_every_schedule(schedule: str) -> None:
    pipeline(4, 8, schedule, SCHEDULES[schedule].chunk_counts[0]).check()


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "tried"),
    [
        (1, 1, {"1f1b"}),
        (4, 3, {"gpipe"}),
        (4, 4, {"1f1b", *INTERLEAVED, "zb-v"}),
        (4, 6, {"1f1b", *INTERLEAVED, "zb-v"}),
        (4, 8, {"1f1b", *CHUNKED}),
        (4, 9, {"1f1b", "zb-v", "dualpipe-v"}),
    ],
)
def test_the_search_tries_a_schedule_where_it_is_worth_it(
    num_stages: int, num_microbatches: int, tried: set[str]
) -> None:
    found = {
        name
        for name, schedule in SCHEDULES.items()
        if schedule.is_tried(pipeline(num_stages, num_microbatches, name, schedule.chunk_counts[0]))
    }
    assert found == tried


def test_schedules_are_known_by_whether_they_take_chunks() -> None:
    assert names_of(with_chunks=False) == ("gpipe", "1f1b")
    assert names_of(with_chunks=True) == CHUNKED


@pytest.mark.parametrize("counts", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_config_has_one_or_more_of_everything(counts: tuple[int, int, int]) -> None:
    stages, chunks, microbatches = counts
    with pytest.raises(UserError, match="1 or more of each"):
        PipelineConfig(
            num_stages=stages, num_chunks=chunks, num_microbatches=microbatches, schedule=find_schedule("1f1b")
        )


def test_configs_of_the_same_schedule_are_equal_by_value() -> None:
    assert pipeline(2, 4, "gpipe") == pipeline(2, 4, "gpipe")
    assert pipeline(2, 4, "gpipe") != pipeline(2, 4, "1f1b")
