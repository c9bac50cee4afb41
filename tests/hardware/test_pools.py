"""Tests of clusters of heterogeneous device groups: the short form, the file, and refusals."""

import pytest

from steelyard.errors import InvalidClusterError
from steelyard.hardware import (
    cluster_of,
    hardware_file,
    is_as_named,
    joined_pools,
    parse_cluster,
    parse_pools,
    with_network,
)
from steelyard.hardware.files import find_link
from steelyard.hardware.parse import cluster_file

SHORT = "2x8xh100-80gb+4x8xa100-40gb"
FILE = """
version: 1
link: 2xethernet-100
pools:
  - {num_nodes: 1, devices_per_node: 4, device: a100-80gb, name: new}
  - {num_nodes: 2, devices_per_node: 2, device: a100-80gb, inter_link: ethernet-25}
"""


def written(tmp_path, text):
    path = tmp_path / "pools.yaml"
    path.write_text(text)
    return parse_pools(str(path))


def test_the_short_form_has_the_pools_in_its_order():
    pools = parse_pools(SHORT)
    assert pools.pools == (parse_cluster("2x8xh100-80gb"), parse_cluster("4x8xa100-40gb"))
    assert (pools.name, pools.num_devices) == (SHORT, 48)


def test_pools_are_assumed_to_be_joined_by_the_slowest_of_their_networks():
    assert parse_pools(SHORT).links == (find_link("infiniband-hdr"),) * 2


def test_one_pool_is_the_cluster_that_it_is():
    assert parse_pools("2x8xh100-80gb") == parse_cluster("2x8xh100-80gb")


def test_a_file_lists_pools_and_their_link(tmp_path):
    pools = written(tmp_path, FILE)
    assert pools.name == "new+2x2xa100-80gb"
    assert [link.bytes_per_s for link in pools.links] == [6.25e9, 12.5e9]
    assert pools.pools[1].inter_link.name.startswith("ethernet-25")


@pytest.mark.parametrize("network", [None, "4xethernet-100"])
def test_a_plan_keeps_what_the_names_of_pools_do_not_say(tmp_path, network):
    for found in (parse_pools(SHORT), written(tmp_path, FILE)):
        pools = found if network is None else with_network(found, network)
        kept = hardware_file(pools)
        assert (kept is None) == is_as_named(pools)
        assert (parse_pools(pools.name) if kept is None else cluster_of(kept, name="lab")) == pools


def test_what_is_written_of_pools_reads_back_the_same(tmp_path):
    pools = written(tmp_path, FILE)
    assert cluster_of(cluster_file(pools), name="lab") == pools


def test_a_network_joins_the_nodes_of_the_pools_and_the_pools():
    pools = with_network(parse_pools("1x8xh100-80gb+2x4xa100-40gb"), "4xethernet-100")
    assert [link.bytes_per_s for link in pools.links] == [6.25e9, 12.5e9]
    assert pools.pools[0].inter_link is None
    assert pools.pools[1].inter_link == pools.links[1]


def test_memory_is_that_of_every_device():
    assert {pool.device.memory_bytes for pool in parse_pools(SHORT).with_memory(2**30).pools} == {2**30}


def test_some_of_the_pools_keep_their_links():
    pools = parse_pools("1x8xh100-80gb+1x8xa100-40gb+1x8xv100-16gb")
    some = [pools.pools[2], pools.pools[0]], [pools.links[2], pools.links[0]]
    assert joined_pools(*some).groups == (pools.groups[2], pools.groups[0])
    assert joined_pools(pools.pools[1:2], pools.links[1:2]) == pools.pools[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "1x8xh100-80gb+2x8xh100-80gb",
            r"^cluster: found h100-80gb in two device groups\n.*each device type once\n.*combine",
        ),
        ("1x8xh100-80gb+", r"^cluster: found ''\n.*several of them joined by \+"),
        ("1x8xh100-80gb+1x8xa100-40", r"^device: found 'a100-40'\n.*\n.*did you mean a100-40gb"),
    ],
)
def test_a_mistake_in_the_short_form_is_named(text, message):
    with pytest.raises(InvalidClusterError, match=message):
        parse_pools(text)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("link: 2xethernet-100\n", "", r"^link: found 0 for 2 device groups\n.*the link between the device groups"),
        (", name: new", ", name: 2x2xa100-80gb", r"^pools: found '2x2xa100-80gb' twice\n.*a unique name"),
        (", name: new", ", name: a+b", r"^pools: found 'a\+b'\n.*without a plus"),
        (", inter_link: ethernet-25", ", speed: 3", r"^speed: found an unknown key"),
        ("  - {num_nodes: 2, devices_per_node: 2, device: a100-80gb, inter_link: ethernet-25}\n", "", "two or more"),
    ],
    ids=["no link", "one name", "plus", "unknown key", "one pool"],
)
def test_a_mistake_in_a_file_of_pools_is_named(tmp_path, before, after, message):
    assert before in FILE
    with pytest.raises(InvalidClusterError, match=message):
        written(tmp_path, FILE.replace(before, after))


def test_where_one_device_type_is_meant_several_pools_are_refused():
    with pytest.raises(InvalidClusterError, match=r"2 device groups\n.*one device type"):
        parse_cluster(SHORT)
