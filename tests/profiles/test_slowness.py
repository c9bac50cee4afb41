"""Tests of which ranks are slow relative to the others."""

import pytest

from steelyard.profiles.record import OwnWork, slow_ranks


def work(*own_s: float, stages: tuple[int, ...] | None = None) -> list[OwnWork]:
    places = stages or (0,) * len(own_s)
    return [
        OwnWork(rank=rank, stage=stage, host=f"node{rank}", own_s=each)
        for rank, (each, stage) in enumerate(zip(own_s, places, strict=True))
    ]


def test_equal_ranks_are_not_slow_however_far_off_the_prediction() -> None:
    assert slow_ranks(work(5.0, 5.0, 5.0), (1.0,), 0.3) == ()


def test_a_rank_is_slow_only_beyond_the_share() -> None:
    assert slow_ranks(work(1.0, 1.0, 1.3), (1.0,), 0.3) == ()
    (slow,) = slow_ranks(work(1.0, 1.0, 1.4), (1.0,), 0.3)
    assert (slow.rank, slow.factor) == (2, pytest.approx(1.4))


def test_of_two_ranks_the_faster_one_is_the_measure() -> None:
    (slow,) = slow_ranks(work(3.0, 1.0), (1.0,), 0.3)
    assert slow.rank == 0


def test_a_stage_that_has_more_to_do_is_not_slow() -> None:
    uneven = work(1.0, 2.0, 1.1, stages=(0, 1, 2))
    assert slow_ranks(uneven, (1.0, 2.0, 1.0), 0.3) == ()
    (slow,) = slow_ranks(uneven, (1.0, 1.0, 1.0), 0.3)
    assert slow.stage == 1


def test_without_a_prediction_ranks_are_compared_with_those_of_their_stage() -> None:
    (slow,) = slow_ranks(work(1.0, 1.0, 9.0, 9.0, 18.0, stages=(0, 0, 1, 1, 1)), None, 0.3)
    assert slow.rank == 4


def test_the_slowest_comes_first() -> None:
    assert [each.rank for each in slow_ranks(work(2.0, 1.0, 3.0, 1.0, 1.0), (1.0,), 0.3)] == [2, 0]


def test_a_share_of_zero_names_nobody() -> None:
    assert slow_ranks(work(1.0, 9.0), (1.0,), 0.0) == ()
