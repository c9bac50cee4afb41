"""Tests of the decision tree: the design's counts, its rules, and its options."""

import math

import pytest

from steelyard.plan.dimensions import CP, DP, FSDP, TP
from steelyard.plan.strategy import Remat
from steelyard.search.space import SpaceOptions, enumerate_levels, enumerate_strategies

# devices -> (per pipeline degree: unpruned, pruned); Galvatron's published decision tree (VLDB 2023, PKU-DAIR/Hetu)
PUBLISHED_COUNTS = {
    2: {1: (3, 3), 2: (1, 1)},
    4: {1: (9, 7), 2: (3, 3), 4: (1, 1)},
    8: {1: (21, 11), 2: (9, 7), 4: (3, 3), 8: (1, 1)},
    16: {1: (39, 15), 2: (21, 11), 4: (9, 7), 8: (3, 3), 16: (1, 1)},
    32: {1: (63, 19), 2: (39, 15), 4: (21, 11), 8: (9, 7), 16: (3, 3), 32: (1, 1)},
    64: {1: (93, 23), 2: (63, 19), 4: (39, 15), 8: (21, 11), 16: (9, 7), 32: (3, 3), 64: (1, 1)},
}
DESIGN_TOTALS = {4: (13, 11, 22), 8: (34, 22, 44), 16: (73, 37, 74), 32: (136, 56, 112), 64: (229, 79, 158)}

PAPER = SpaceOptions(modes={"zero": (3,), "sp": (False,)}, remats=(Remat.NONE,))
PAPER_WITH_REMAT = SpaceOptions(modes={"zero": (3,), "sp": (False,)}, remats=(Remat.NONE, Remat.FULL))


@pytest.mark.parametrize("devices", PUBLISHED_COUNTS)
def test_counts_per_pipeline_degree_are_the_published_ones(devices: int) -> None:
    for stages, (unpruned, pruned) in PUBLISHED_COUNTS[devices].items():
        assert len(enumerate_levels(devices // stages, PAPER.dimensions)) == unpruned
        assert len(enumerate_strategies(devices // stages, PAPER)) == pruned


@pytest.mark.parametrize("devices", DESIGN_TOTALS)
def test_total_counts_are_those_of_the_design(devices: int) -> None:
    unpruned, pruned, with_remat = DESIGN_TOTALS[devices]
    degrees = [2**power for power in range(int(math.log2(devices)) + 1)]
    assert sum(len(enumerate_levels(degree, PAPER.dimensions)) for degree in degrees) == unpruned
    assert sum(len(enumerate_strategies(degree, PAPER)) for degree in degrees) == pruned
    assert sum(len(enumerate_strategies(degree, PAPER_WITH_REMAT)) for degree in degrees) == with_remat


@pytest.mark.parametrize("devices", [1, 2, 3, 6, 7, 12, 15, 24, 30])
def test_any_device_count_gives_distinct_strategies_that_span_it(devices: int) -> None:
    options = SpaceOptions(modes={"zero": (3, 2)}, aligned_only=False)
    strategies = enumerate_strategies(devices, options)
    assert len(set(strategies)) == len(strategies) > 0
    assert all(strategy.num_devices == devices for strategy in strategies)
    assert strategies == enumerate_strategies(devices, options)


def test_order_within_the_tree_is_fixed() -> None:
    assert [str(strategy) for strategy in enumerate_strategies(4, PAPER)] == [
        "dp4",
        "fsdp4",
        "tp4",
        "dp2-tp2",
        "fsdp2-tp2",
        "tp2-dp2",
        "tp2-fsdp2",
    ]


def test_one_device_has_only_the_choice_of_remat() -> None:
    assert [str(strategy) for strategy in enumerate_strategies(1)] == [
        "single",
        "single remat=selective",
        "single remat=full",
    ]


def test_modes_multiply_the_leaves_that_have_them() -> None:
    assert len(enumerate_strategies(2, SpaceOptions())) == 3 * (1 + 1 + 2)
    assert len(enumerate_strategies(2, SpaceOptions(modes={"zero": (2, 3)}))) == 3 * (1 + 2 + 2)
    assert len(enumerate_strategies(2, SpaceOptions(modes={}))) == 3 * (1 + 3 + 2)


def test_max_tp_bounds_the_degree() -> None:
    assert (
        max(strategy.tensor_degree for strategy in enumerate_strategies(16, SpaceOptions(max_degrees={"tp": 4}))) == 4
    )


def test_devices_per_node_keeps_strided_tensor_parallelism_inside_a_node() -> None:
    parallel = {strategy.parallel for strategy in enumerate_strategies(16, SpaceOptions(devices_per_node=8))}
    assert "dp2-tp8" in parallel
    assert "tp4-dp4" not in parallel


def test_unaligned_leaves_are_left_out_unless_asked_for() -> None:
    aligned = enumerate_strategies(12)
    everything = enumerate_strategies(12, SpaceOptions(aligned_only=False))
    assert all(strategy.is_aligned for strategy in aligned)
    assert set(aligned) < set(everything)


def test_fewer_dimensions_give_a_subset() -> None:
    options = SpaceOptions(dimensions=(FSDP, TP))
    few = enumerate_strategies(8, options)
    assert set(few) < set(enumerate_strategies(8))
    assert all(strategy.level(DP) is None for strategy in few)


def test_states_are_sharded_over_the_ranks_of_cp_alone_but_not_searched_beside_tp() -> None:
    options = SpaceOptions(dimensions=(DP, FSDP, TP, CP), mixes_samples=True, devices_per_node=8)
    found = {strategy.parallel for strategy in enumerate_strategies(8, options)}
    assert {"cp8", "fsdp1-cp8", "fsdp2-cp4", "dp2-cp4", "cp4-tp2"} <= found
    assert "fsdp1-cp4-tp2" not in found
    assert "fsdp1-cp8" not in {each.parallel for each in enumerate_strategies(8, SpaceOptions(dimensions=(CP, DP)))}
