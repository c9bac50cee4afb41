"""Tests of the time of collectives, against numbers worked out by hand and against laws."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.cost.communication import Group, send_recv_s
from steelyard.errors import InvalidProfileError
from steelyard.hardware import Cluster, parse_cluster
from steelyard.hardware.files import find_link
from steelyard.profiles.profile import Collective, CollectiveProfile
from tests.cost.examples import cluster, collective_s, job, unprofiled_job

COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
collectives = st.sampled_from(COLLECTIVES)
groups = st.sampled_from(
    [Group(size=n, stride=stride, span=16) for n in (2, 4, 8, 16) for stride in (1, 2, 4) if n * stride <= 16]
)
num_bytes = st.integers(0, 2**40)


def _seconds(collective: Collective, size: float, group: Group, **rates: float) -> float:
    machines = cluster(2, 8, **rates)
    return collective_s(collective, size, group, machines, job(machines).profile)


def test_all_gather_inside_a_node_takes_the_rings_time() -> None:
    group = Group(size=4, stride=1, span=4)
    assert _seconds("all_gather", 1e9, group) == pytest.approx(3 * 1e-6 + 3 / 4 * 1e9 / 100e9)


def test_all_reduce_takes_two_passes() -> None:
    group = Group(size=4, stride=1, span=4)
    assert _seconds("all_reduce", 1e9, group) == pytest.approx(2 * (3 * 1e-6 + 3 / 4 * 1e9 / 100e9))


def test_a_group_that_fills_two_nodes_uses_every_outward_link() -> None:
    group = Group(size=16, stride=1, span=16)  # 8 ranks in each node: 8 links of 10 GB/s
    assert _seconds("all_gather", 1e9, group) == pytest.approx(14 * 1e-6 + 1e-5 + 15 / 16 * 1e9 / 80e9)


def test_a_strided_group_uses_as_many_outward_links_as_it_has_ranks_in_a_node() -> None:
    group = Group(size=4, stride=4, span=16)  # ranks 0, 4 | 8, 12
    assert _seconds("all_gather", 1e9, group) == pytest.approx(2 * 1e-6 + 1e-5 + 3 / 4 * 1e9 / 20e9)


def test_a_group_of_one_rank_per_node_uses_one_outward_link() -> None:
    group = Group(size=2, stride=8, span=16)
    assert _seconds("all_gather", 1e9, group) == pytest.approx(1e-5 + 1 / 2 * 1e9 / 10e9)


def test_a_strided_group_inside_a_node_uses_the_inner_link() -> None:
    group = Group(size=4, stride=2, span=8)
    assert _seconds("all_gather", 1e9, group) == pytest.approx(3e-6 + 3 / 4 * 1e9 / 100e9)


def test_an_all_to_all_inside_a_node_keeps_what_is_its_own() -> None:
    group = Group(size=4, stride=1, span=4)
    assert _seconds("all_to_all", 1e9, group) == pytest.approx(2e-6 + 3 / 4 * 1e9 / 100e9)


def test_what_an_all_to_all_sends_to_other_nodes_leaves_by_each_ranks_own_link() -> None:
    group = Group(size=16, stride=1, span=16)
    assert _seconds("all_to_all", 1e9, group) == pytest.approx(7e-6 + 1e-5 + 8 / 16 * 1e9 / 10e9)


def test_a_rank_that_hands_to_its_neighbour_in_the_node_uses_the_inner_link() -> None:
    machines = cluster(2, 8)
    profile = job(machines).profile
    assert send_recv_s(1e9, distance=4, cluster=machines, profile=profile) == pytest.approx(1e-6 + 1e9 / 100e9)


def test_a_rank_that_hands_to_another_node_uses_the_outer_link() -> None:
    machines = cluster(2, 8)
    profile = job(machines).profile
    assert send_recv_s(1e9, distance=8, cluster=machines, profile=profile) == pytest.approx(1e-5 + 1e9 / 10e9)


def test_a_measurement_takes_the_place_of_the_formula() -> None:
    measured = CollectiveProfile(
        kind="all_gather", group_size=4, strided=False, latency_s=0.5, bytes_per_s=2.0, max_relative_error=0.0
    )
    machines = cluster()
    profile = job(machines).profile.model_copy(update={"collectives": (measured,)})
    assert collective_s("all_gather", 10, Group(size=4, stride=1, span=8), machines, profile) == 0.5 + 10 / 2.0


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_collective_of_unknown_rate_is_an_error(collective: Collective) -> None:
    unprofiled = unprofiled_job()
    with pytest.raises(InvalidProfileError, match=f"no {collective} over 4 ranks"):
        collective_s(collective, 1.0, Group(size=4, stride=1, span=4), unprofiled.cluster, unprofiled.profile)


def test_a_transfer_of_unknown_rate_is_an_error() -> None:
    unprofiled = unprofiled_job()
    with pytest.raises(InvalidProfileError, match="no send_recv"):
        send_recv_s(1.0, distance=2, cluster=unprofiled.cluster, profile=unprofiled.profile)


def test_an_unknown_collective_is_an_error() -> None:
    with pytest.raises(InvalidProfileError, match="broadcast"):
        _seconds("broadcast", 1.0, Group(size=4, stride=1, span=4))  # type: ignore[arg-type]


def test_a_group_of_one_rank_communicates_nothing() -> None:
    assert _seconds("all_reduce", 1e9, Group(size=1, stride=1, span=8)) == 0


@pytest.mark.slow
@given(collectives, groups, num_bytes, num_bytes)
def test_more_bytes_are_never_cheaper(collective: Collective, group: Group, one: int, other: int) -> None:
    fewer, more = sorted((one, other))
    assert _seconds(collective, fewer, group) <= _seconds(collective, more, group)


@pytest.mark.slow
@given(collectives, groups, num_bytes, st.floats(1e6, 1e12), st.floats(1, 100))
def test_a_faster_link_is_never_slower(
    collective: Collective, group: Group, size: int, bytes_per_s: float, factor: float
) -> None:
    slow = _seconds(collective, size, group, inter_bytes_per_s=bytes_per_s)
    assert _seconds(collective, size, group, inter_bytes_per_s=bytes_per_s * factor) <= slow
    slow = _seconds(collective, size, group, intra_bytes_per_s=bytes_per_s)
    assert _seconds(collective, size, group, intra_bytes_per_s=bytes_per_s * factor) <= slow


@given(groups)
def test_groups_that_communicate_at_once_share_the_ports_of_a_node(group: Group) -> None:
    """All groups of this shape together never get more than 8 links of 10 GB/s out of a node."""
    size = 1e15
    rate = (group.size - 1) / group.size * size / _seconds("all_gather", size, group)
    crosses = (group.size - 1) * group.stride >= 8
    num_groups = 16 // group.size
    groups_of_a_node = num_groups if crosses else num_groups / 2
    assert not crosses or groups_of_a_node * rate <= 80e9 * 1.001


def _node(link: str, *, num_nodes: int = 1, num_devices: int = 8) -> Cluster:
    return parse_cluster(f"{num_nodes}x{num_devices}xh100-80gb").on(intra_link=find_link(link))


def _on(
    link: str, collective: Collective, size: float, ranks: int, *, num_nodes: int = 1, num_devices: int = 8
) -> float:
    machines = _node(link, num_nodes=num_nodes, num_devices=num_devices)
    group = Group(size=ranks, stride=1, span=ranks)
    return collective_s(collective, size, group, machines, job(machines).profile)


@pytest.mark.slow
@given(
    collectives, st.sampled_from(["nvlink-3", "nvlink-4", "nvlink-5", "pcie-4-host", "pcie-5"]), num_bytes, num_bytes
)
def test_more_bytes_are_never_cheaper_on_a_measured_link(
    collective: Collective, link: str, one: int, other: int
) -> None:
    fewer, more = sorted((one, other))
    for ranks, num_nodes in ((2, 1), (8, 1), (64, 8)):
        assert _on(link, collective, fewer, ranks, num_nodes=num_nodes) <= _on(
            link, collective, more, ranks, num_nodes=num_nodes
        )


def test_the_rate_climbs_with_the_message() -> None:
    rates = [size / _on("nvlink-4", "all_gather", size, 8) for size in (2.0**20, 2.0**24, 2.0**30)]
    assert rates[0] < 0.3 * rates[2]
    assert rates[1] < 0.8 * rates[2]


def test_devices_without_peer_access_share_what_two_have() -> None:
    two, eight = (_on("pcie-4-host", "all_gather", 2.0**30, count, num_devices=count) for count in (2, 8))
    assert eight > 10 * two


def test_devices_without_peer_access_crowd_the_host_whichever_groups_they_form() -> None:
    size = 2.0**30
    two, four, eight = ((n - 1) / n * size / _on("pcie-4-host", "all_gather", size, n) for n in (2, 4, 8))
    assert two == pytest.approx(eight, rel=0.01)
    assert four == pytest.approx(eight, rel=0.01)
    across = 15 / 16 * size / _on("pcie-4-host", "all_gather", size, 16, num_nodes=2)
    assert across < 1.3 * eight


@pytest.mark.parametrize("distance", [1, 2, 4])
def test_transfers_without_peer_access_crowd_the_host(distance: int) -> None:
    two, eight = (_node("pcie-4-host", num_devices=count) for count in (2, 8))
    alone = send_recv_s(1e9, distance=1, cluster=two, profile=job(two).profile)
    assert send_recv_s(1e9, distance=distance, cluster=eight, profile=job(eight).profile) > 10 * alone


def test_a_switch_that_reduces_makes_an_all_reduce_cheaper_than_its_halves() -> None:
    halves = sum(_on("nvlink-4", collective, 2.0**30, 8) for collective in ("all_gather", "reduce_scatter"))
    assert _on("nvlink-4", "all_reduce", 2.0**30, 8) < 0.95 * halves


def test_a_small_all_reduce_over_many_nodes_takes_a_tree() -> None:
    few, many = (_on("nvlink-4", "all_reduce", 1.0, 8 * nodes, num_nodes=nodes) for nodes in (4, 128))
    assert many < 4 * few


def test_gathering_from_a_thousand_ranks_takes_their_rings_latency() -> None:
    few, many = (_on("nvlink-4", "all_gather", 1.0, 8 * nodes, num_nodes=nodes) for nodes in (4, 128))
    assert many > 25 * few


def test_fewer_ports_than_devices_are_shared_evenly() -> None:
    machines = cluster(2, 8)
    assert machines.inter_link is not None
    shared = machines.on(inter_link=machines.inter_link.shared(num_ports=2, num_devices=8))
    group = Group(size=2, stride=8, span=16)
    alone, together = (collective_s("all_gather", 1e12, group, each, job(each).profile) for each in (machines, shared))
    assert together == pytest.approx(4 * alone, rel=1e-3)


@pytest.mark.slow
@given(collectives, num_bytes, st.sampled_from([2, 4]))
def test_a_group_over_nodes_is_never_faster_than_one_inside(collective: Collective, size: int, degree: int) -> None:
    inside, across = (Group(size=degree, stride=stride, span=16) for stride in (1, 16 // degree))
    assert _seconds(collective, size, across) >= _seconds(collective, size, inside)
