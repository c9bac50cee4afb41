"""Tests of plans over heterogeneous device groups: stages of different sizes, and incompatible settings."""

import pytest

from steelyard.errors import InvalidPlanError
from steelyard.plan.file import parse_value
from steelyard.plan.plan import Plan

POOLS = "1x4xh100-80gb+1x2xa100-40gb"


def content(**changed):
    """A plan of the small model with a stage of four devices and one of two."""
    runs = [{"layers": [0, 10], "parallel": "fsdp4"}], [{"layers": [11, 23], "parallel": "dp2"}]
    plan = {
        "version": 1,
        "model": {"name": "tinyllama-1.1b"},
        "cluster": POOLS,
        "seq_len": 128,
        "global_batch": 8,
        "num_microbatches": 2,
        "precision": "bf16",
        "stages": [{"ranks": [0, 3], "runs": runs[0]}, {"ranks": [4, 5], "runs": runs[1]}],
    }
    return plan | changed


def read(**changed):
    return parse_value(content(**changed), Plan, InvalidPlanError, what="plan")


def test_a_stage_lies_in_the_pool_of_its_ranks():
    assert [pool.name for pool in read().stage_pools()] == ["1x4xh100-80gb", "1x2xa100-40gb"]


def test_stages_of_unlike_sizes_need_no_pools():
    assert [stage.num_devices for stage in read(cluster="1x6xh100-80gb").stages] == [4, 2]


def test_a_stage_over_two_pools_is_named():
    with pytest.raises(
        InvalidPlanError, match=r"^stages\[0\]\.ranks: found \[0, 3\].*\n.*one device group; .* ends with rank 1"
    ):
        read(cluster="1x2xa100-40gb+1x4xh100-80gb")


def test_pools_of_other_numbers_of_devices_are_named():
    with pytest.raises(InvalidPlanError, match=r"^stages: found 6 ranks\n.*14, the devices of 1x4x"):
        read(cluster="1x4xh100-80gb+1x2xa100-40gb+1x8xl4")


def test_chunks_over_several_pools_are_refused():
    stages = content()["stages"]
    stages[1]["ranks"] = [4, 7]
    runs = [[{"layers": [6 * index, 6 * index + 5], "parallel": "fsdp4"}] for index in range(4)]
    parts = [{"ranks": stages[place]["ranks"], "chunks": runs[place::2]} for place in range(2)]
    with pytest.raises(InvalidPlanError, match=r"^schedule: found interleaved-1f1b over 2 device groups"):
        read(cluster="1x4xh100-80gb+1x4xa100-40gb", schedule="interleaved-1f1b", stages=parts)


def test_one_device_type_is_asked_of_a_plan_over_several_pools_in_vain():
    with pytest.raises(InvalidPlanError, match=r"^cluster: found a plan over 2 device groups"):
        read().machines()
