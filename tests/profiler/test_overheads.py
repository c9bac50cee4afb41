"""Tests of measured step overheads besides the layers, from given times; no process runs."""

from dataclasses import replace

import pytest

from steelyard.profiler.overheads import AddedBySharding
from steelyard.profiles.profile import CollectiveProfile

SLOWER = {"all_gather": 1.0, "reduce_scatter": 10.0}


def _collectives(group_size: int, *, strided: bool, latency_s: float) -> list[CollectiveProfile]:
    """A gathering takes ``latency_s`` and 1 s for 100 bytes, a reduction ten times as long."""
    return [
        CollectiveProfile(
            kind=collective,
            group_size=group_size,
            strided=strided,
            latency_s=slower * latency_s,
            bytes_per_s=100 / slower,
            max_relative_error=0.0,
        )
        for collective, slower in SLOWER.items()
    ]


COLLECTIVES = [
    *_collectives(2, strided=True, latency_s=50.0),
    *_collectives(4, strided=False, latency_s=70.0),
    *_collectives(2, strided=False, latency_s=1.0),
]


def test_sharding_and_the_collectives_together_take_what_was_measured() -> None:
    added = AddedBySharding(
        group_size=2, seconds=100.0, params_of_layers=(25, 50), trained_of_layers=(25, 50), gathered_bytes=4
    )
    gathers_s, reductions_s = 2 * (1 + 1 + 1 + 2), 10 * (1 + 1 + 1 + 2)
    beside = added.beside(COLLECTIVES)
    assert beside.group_size == 2
    assert beside.seconds * 2 + gathers_s + reductions_s == pytest.approx(100.0)


def test_parameters_are_gathered_at_their_precision_and_reduced_in_fp32() -> None:
    half, whole = (
        AddedBySharding(
            group_size=2, seconds=100.0, params_of_layers=(50,), trained_of_layers=(50,), gathered_bytes=count
        ).beside(COLLECTIVES)
        for count in (2, 4)
    )
    assert half.seconds - whole.seconds == pytest.approx(2 * 50 * (4 - 2) / 100)


def test_what_is_not_trained_is_gathered_and_not_reduced() -> None:
    added = AddedBySharding(
        group_size=2, seconds=100.0, params_of_layers=(50,), trained_of_layers=(0,), gathered_bytes=4
    )
    frozen = replace(added, trained_of_layers=(25,))
    assert added.beside(COLLECTIVES).seconds > frozen.beside(COLLECTIVES).seconds


def test_sharding_takes_nothing_beside_collectives_that_come_out_slower() -> None:
    added = AddedBySharding(
        group_size=4, seconds=100.0, params_of_layers=(25,), trained_of_layers=(25,), gathered_bytes=4
    )
    assert added.beside(COLLECTIVES).seconds == 0.0
