"""Tests that devices, links and clusters are always valid, and of the link that a group of ranks uses."""

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import InvalidClusterError
from steelyard.hardware import Backend, Cluster, Device, Link
from steelyard.hardware.values import NodeGroup

FAST = Link(name="fast", bytes_per_s=100e9, latency_s=1e-6, source="test")
SLOW = Link(name="slow", bytes_per_s=10e9, latency_s=1e-5, source="test")
DEVICE = Device(
    name="toy",
    type="gpu",
    backend=Backend.NCCL,
    memory_bytes=2**30,
    peak_flop_per_s={"bf16": 1e12},
    memory_bytes_per_s=1e11,
    source="test",
)


def cluster(num_nodes: int, devices_per_node: int) -> Cluster:
    return Cluster(
        groups=(
            NodeGroup(
                name="toy",
                num_nodes=num_nodes,
                devices_per_node=devices_per_node,
                device=DEVICE,
                intra_link=FAST,
                inter_link=SLOW,
            ),
        )
    )


def test_num_devices_is_the_product():
    assert cluster(3, 2).num_devices == 6


@pytest.mark.parametrize(("num_nodes", "devices_per_node"), [(0, 8), (1, 0), (-1, 8)])
def test_counts_below_one_are_an_error(num_nodes, devices_per_node):
    with pytest.raises(InvalidClusterError, match=r"num_nodes|devices_per_node"):
        cluster(num_nodes, devices_per_node)


def test_several_nodes_need_a_link_between_them():
    with pytest.raises(InvalidClusterError, match="inter_link"):
        cluster(2, 4).on(inter_link=None)


def test_one_node_needs_no_link_to_others():
    assert cluster(1, 4).on(inter_link=None).inter_link is None


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_link_rate_must_be_positive_and_finite(rate):
    with pytest.raises(InvalidClusterError, match="bytes_per_s"):
        replace(FAST, bytes_per_s=rate)


@pytest.mark.parametrize("latency", [-1e-9, float("nan"), float("inf")])
def test_a_latency_must_not_be_negative(latency):
    with pytest.raises(InvalidClusterError, match="latency_s"):
        replace(FAST, latency_s=latency)


def test_a_latency_may_be_zero():
    assert replace(FAST, latency_s=0.0).latency_s == 0.0


@pytest.mark.parametrize(
    "change", [{"memory_bytes": 0}, {"memory_bytes_per_s": -1.0}, {"peak_flop_per_s": {"bf16": 0}}]
)
def test_a_device_has_no_zero_rates(change):
    with pytest.raises(InvalidClusterError, match="above zero"):
        replace(DEVICE, **change)


def test_an_unknown_dtype_is_an_error_and_never_zero():
    with pytest.raises(InvalidClusterError, match="one of bf16"):
        DEVICE.peak("fp64")


def test_shared_ports_divide_the_rate():
    assert SLOW.shared(num_ports=4, num_devices=8).bytes_per_s == pytest.approx(5e9)


def test_one_port_per_device_is_the_link_itself():
    assert SLOW.shared(num_ports=8, num_devices=8) is SLOW


@given(st.integers(1, 64), st.integers(1, 64))
def test_more_ports_are_never_slower(num_ports, num_devices):
    fewer = SLOW.shared(num_ports=num_ports, num_devices=num_devices)
    assert fewer.bytes_per_s < SLOW.shared(num_ports=num_ports + 1, num_devices=num_devices).bytes_per_s


def test_zero_ports_are_an_error():
    with pytest.raises(InvalidClusterError, match="num_ports"):
        SLOW.shared(num_ports=0, num_devices=8)


def test_memory_can_be_set_from_the_command_line():
    assert cluster(2, 4).with_memory(123).device.known_memory_bytes() == 123


def test_memory_of_zero_is_an_error():
    with pytest.raises(InvalidClusterError, match="memory_bytes"):
        cluster(2, 4).with_memory(0)


def test_values_are_frozen():
    with pytest.raises(FrozenInstanceError):
        DEVICE.name = "other"


def test_a_device_keeps_its_own_copy_of_the_peaks():
    peaks = {"bf16": 1e12}
    device = replace(DEVICE, peak_flop_per_s=peaks)
    peaks["bf16"] = 0.0
    assert device.peak("bf16") == 1e12


def test_equal_clusters_are_equal_and_hash_alike():
    assert cluster(2, 4) == cluster(2, 4)
    assert hash(cluster(2, 4)) == hash(cluster(2, 4))
    assert cluster(2, 4) != cluster(4, 2)


def test_a_cluster_prints_its_shape_memory_and_links():
    assert str(cluster(2, 4)) == "2 × 4 × toy (1.00 GiB; fast, slow)"
