"""Tests of strategies: their text, their axes, the layouts that they produce, and their contradictions."""

import math
import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import InvalidPlanError
from steelyard.plan.dimensions import DP, FSDP, TP, level_dimensions
from steelyard.plan.dimensions.dimension import Level, Placed
from steelyard.plan.strategy import Remat, Strategy, mesh_axes, parse_parallel, parse_strategy
from steelyard.search import SpaceOptions, enumerate_strategies

DP_OUTSIDE = "dp outside fsdp in a layer with both: states sharded over near ranks and replicated over far ones"
ALL_DIMENSIONS = (DP, FSDP, TP)
EVERYTHING = SpaceOptions(modes={"zero": (3, 2)}, aligned_only=False)
COUNTS = (1, 2, 3, 4, 6, 7, 8, 12, 16, 30)
STRATEGIES = tuple(strategy for count in COUNTS for strategy in enumerate_strategies(count, EVERYTHING))
ALIGNED = tuple(strategy for strategy in STRATEGIES if strategy.is_aligned)

every_strategy = st.sampled_from(STRATEGIES)
aligned_strategy = st.sampled_from(ALIGNED)


@pytest.mark.parametrize("num_devices", COUNTS)
def test_every_strategy_reads_back_from_its_text(num_devices):
    for strategy in enumerate_strategies(num_devices, EVERYTHING):
        assert parse_strategy(str(strategy)) == strategy


@pytest.mark.parametrize("num_devices", COUNTS)
def test_no_two_strategies_print_alike(num_devices):
    strategies = enumerate_strategies(num_devices, EVERYTHING)
    assert len({str(strategy) for strategy in strategies}) == len(strategies)


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("single", Strategy()),
        ("dp2", Strategy(levels=(Level(dimension=DP, degree=2),))),
        ("single remat=full", Strategy(remat=Remat.FULL)),
        (
            "fsdp4-tp2+sp zero2 remat=selective",
            Strategy.of(
                sp=True,
                zero=2,
                levels=(Level(dimension=FSDP, degree=4), Level(dimension=TP, degree=2)),
                remat=Remat.SELECTIVE,
            ),
        ),
    ],
)
def test_a_text_is_one_strategy(text, strategy):
    assert parse_strategy(text) == strategy
    assert str(strategy) == text


def test_remat_none_may_be_written():
    assert parse_strategy("dp2 remat=none") == parse_strategy("dp2")


@given(every_strategy)
def test_degrees_multiply_to_the_devices(strategy):
    assert math.prod(strategy.degree(dimension) for dimension in level_dimensions()) == strategy.num_devices
    assert strategy.data_degree * strategy.tensor_degree == strategy.num_devices


@given(every_strategy)
def test_one_of_dp_and_fsdp_is_unused(strategy):
    assert strategy.data_degree == max(strategy.degree(DP), strategy.degree(FSDP))


@given(st.integers(1, 100_000))
def test_mesh_axes_multiply_to_the_devices(num_devices):
    assert math.prod(mesh_axes(num_devices)) == num_devices


@given(st.integers(1, 100_000))
def test_mesh_axes_are_primes_largest_first(num_devices):
    axes = mesh_axes(num_devices)
    assert list(axes) == sorted(axes, reverse=True)
    assert all(size > 1 and all(size % divisor for divisor in range(2, math.isqrt(size) + 1)) for size in axes)


@pytest.mark.parametrize(("num_devices", "axes"), [(1, ()), (7, (7,)), (8, (2, 2, 2)), (12, (3, 2, 2))])
def test_mesh_axes_of_small_counts(num_devices, axes):
    assert mesh_axes(num_devices) == axes


def test_mesh_axes_of_a_large_prime_are_found_at_once():
    assert mesh_axes(2_147_483_647) == (2_147_483_647,)


@given(aligned_strategy)
def test_all_dimensions_together_take_every_axis_in_order(strategy):
    assert strategy.axes_of(*ALL_DIMENSIONS) == tuple(range(len(mesh_axes(strategy.num_devices))))


@given(aligned_strategy)
def test_no_axis_belongs_to_two_dimensions(strategy):
    taken = [axis for dimension in ALL_DIMENSIONS for axis in strategy.axes_of(dimension)]
    assert len(set(taken)) == len(taken)


@given(aligned_strategy, st.sampled_from(ALL_DIMENSIONS))
def test_the_axes_of_a_dimension_multiply_to_its_degree(strategy, dimension):
    sizes = mesh_axes(strategy.num_devices)
    assert math.prod(sizes[axis] for axis in strategy.axes_of(dimension)) == strategy.degree(dimension)


@given(aligned_strategy, st.sampled_from(ALL_DIMENSIONS))
def test_the_axes_of_a_dimension_are_neighbours(strategy, dimension):
    axes = strategy.axes_of(dimension)
    assert axes == tuple(range(axes[0], axes[0] + len(axes))) if axes else strategy.degree(dimension) == 1


@pytest.mark.parametrize(
    ("text", "dp", "tp"),
    [("dp4-tp2", (0, 1), (2,)), ("tp2-dp4", (1, 2), (0,)), ("dp8", (0, 1, 2), ()), ("single", (), ())],
)
def test_the_outermost_level_takes_the_first_axes(text, dp, tp):
    strategy = parse_strategy(text)
    assert (strategy.axes_of(DP), strategy.axes_of(TP)) == (dp, tp)


@pytest.mark.parametrize("text", ["dp2-tp6", "tp2-fsdp3", "dp4-tp3", "fsdp2-tp3+sp", "dp10-tp3"])
def test_a_level_that_cuts_through_an_axis_is_not_aligned(text):
    strategy = parse_strategy(text)
    assert not strategy.is_aligned
    with pytest.raises(InvalidPlanError, match=r"^parallel: .*\n.*consecutive axes of the stage mesh"):
        strategy.axes_of(TP)


@pytest.mark.parametrize("text", ["dp3-tp2", "tp3-fsdp4", "dp6-tp2", "dp12", "tp5-dp6", "single"])
def test_a_level_of_whole_axes_is_aligned(text):
    assert parse_strategy(text).is_aligned


@given(st.sampled_from([s for s in STRATEGIES if s.num_devices in (1, 2, 4, 8, 16)]))
def test_powers_of_two_are_always_aligned(strategy):
    assert strategy.is_aligned


@given(every_strategy)
def test_a_layout_divides_samples_as_the_strategy_does(strategy):
    divided = [degree for placed, degree in strategy.hidden.axes if placed is Placed.BATCH]
    assert math.prod(divided) == strategy.sample_degree


@given(every_strategy)
def test_a_layout_divides_the_sequence_only_under_sp(strategy):
    assert strategy.hidden.sequence_degree == (strategy.degree(TP) if strategy.mode("sp") else 1)


@given(every_strategy, st.sampled_from(Remat))
def test_remat_does_not_change_the_layout(strategy, remat):
    other = replace(strategy, remat=remat)
    assert other.hidden == strategy.hidden


@given(every_strategy)
def test_dp_and_fsdp_leave_the_same_layout(strategy):
    swap = {DP: FSDP, FSDP: DP, TP: TP}
    levels = tuple(Level(dimension=swap[level.dimension], degree=level.degree) for level in strategy.levels)
    assert Strategy.of(levels=levels, sp=strategy.mode("sp")).hidden == strategy.hidden


@pytest.mark.parametrize(
    ("one", "other"), [("dp2-tp2", "tp2-dp2"), ("tp2", "tp2+sp"), ("dp4", "dp2-tp2"), ("tp4", "dp4")]
)
def test_unlike_placements_are_unlike_layouts(one, other):
    assert parse_strategy(one).hidden != parse_strategy(other).hidden


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("tp8+sp", "fsdp8"),
        ("dp4-tp2 remat=full", "dp8 remat=full"),
        ("fsdp4-tp2 zero2", "fsdp8 zero2"),
        ("tp2-fsdp4", "fsdp8"),
        ("dp2-fsdp2-tp2", "dp2-fsdp4"),
        ("cp4-tp2", "fsdp2-cp4"),
        ("dp8", "dp8"),
    ],
)
def test_ranks_that_divide_tensors_take_samples_where_these_are_whole(text, whole):
    assert str(parse_strategy(text).with_whole_tensors()) == whole


def test_a_shard_level_of_one_shards_over_the_ranks_of_cp_and_moves_no_activation():
    alone, hybrid = parse_strategy("fsdp1-cp8 zero2"), parse_strategy("dp2-fsdp1-cp4")
    assert (alone.num_devices, alone.state_shards, alone.sample_degree, alone.replicas) == (8, 8, 1, 1)
    assert (hybrid.state_shards, hybrid.sample_degree, hybrid.replicas) == (4, 2, 2)
    assert alone.hidden == parse_strategy("cp8").hidden
    assert (alone.shard_axes, alone.sample_axes) == ((0, 1, 2), ())
    assert parse_strategy(str(alone)) == alone


@pytest.mark.parametrize(
    ("text", "field", "found", "expected"),
    [
        ("dp2-dp2", "parallel", "dp2-dp2", "each parallelism dimension on one level only"),
        ("tp2-dp2-tp2", "parallel", "tp2-dp2-tp2", "each parallelism dimension on one level only"),
        ("fsdp2-dp2", "parallel", "fsdp2-dp2", DP_OUTSIDE),
        ("fsdp2-tp2-dp2", "parallel", "fsdp2-tp2-dp2", DP_OUTSIDE),
        ("dp1", "parallel", "dp1", "a degree of 2 or more"),
        ("fsdp1-tp2", "parallel", "fsdp1", "a degree of 2 or more"),
        ("dp1-cp2", "parallel", "dp1", "a degree of 2 or more"),
        ("dp2-tp0", "parallel", "tp0", "a degree of 2 or more"),
        ("dp2+sp", "sp", "dp2+sp", "+sp only together with tp"),
        ("single+sp", "sp", "single+sp", "+sp only together with tp"),
        ("dp2 zero2", "zero", "dp2 zero2", "zero2 only together with fsdp"),
        ("tp2+sp zero2", "zero", "tp2+sp zero2", "zero2 only together with fsdp"),
    ],
)
def test_a_contradiction_names_the_field(text, field, found, expected):
    with pytest.raises(InvalidPlanError) as caught:
        parse_strategy(text)
    assert (caught.value.field, caught.value.found, caught.value.expected) == (field, found, expected)


@pytest.mark.parametrize(
    "text", ["", "dp", "2", "DP2", "pp2", "dp2-", "-dp2", "dp2tp2", "dp-2", "dp2.5", "dp2_tp2", "dp²"]
)
def test_levels_that_cannot_be_read_show_the_form(text):
    with pytest.raises(
        InvalidPlanError, match=r"^parallel: .*\n.*fsdp4-tp2 with dimensions dp, fsdp, tp, cp, or single"
    ):
        parse_parallel(text)


def test_an_unknown_dimension_is_named():
    with pytest.raises(InvalidPlanError, match="correct the level 'xp2'"):
        parse_parallel("dp2-xp2")


def test_a_dimension_without_a_degree_is_shown_with_one():
    with pytest.raises(InvalidPlanError, match="write its degree, as in fsdp2"):
        parse_parallel("fsdp-tp2")


@pytest.mark.parametrize(
    "text", ["", "   ", "dp2  cp2", "dp2+cp", "dp2+", "tp2+sp+sp", "dp2 remat=some", "dp2 zero3", "dp" + "9" * 5000]
)
def test_a_text_that_is_no_strategy_is_an_error(text):
    with pytest.raises(InvalidPlanError, match=r"^(parallel|strategy): found "):
        parse_strategy(text)


TOKENS = ["dp", "fsdp", "tp", "single", "cp", "-", "+sp", "+", "0", "1", "2", "4", " ", "zero2", "remat=", "full", "é"]


@given(st.lists(st.sampled_from(TOKENS), max_size=8).map("".join))
def test_any_text_is_a_strategy_or_one_invalid_plan_error(text):
    try:
        strategy = parse_strategy(text)
    except InvalidPlanError:
        return
    assert parse_strategy(str(strategy)) == strategy


def test_a_strategy_of_another_process_is_found_among_equal_ones() -> None:
    """Hashes of text differ between processes."""
    text = "fsdp2-tp2+sp remat=full"
    code = (
        "import pickle, sys; from steelyard.plan.strategy import parse_strategy; "
        f"sys.stdout.buffer.write(pickle.dumps(parse_strategy({text!r})))"
    )
    env = os.environ | {"PYTHONHASHSEED": "7"}
    sent = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True).stdout
    assert pickle.loads(sent) in {parse_strategy(text)}


def test_an_unknown_dimension_names_the_nearest():
    with pytest.raises(InvalidPlanError, match="correct the level 'fdsp8': did you mean fsdp"):
        parse_parallel("fdsp8")
