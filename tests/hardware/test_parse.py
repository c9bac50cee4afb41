"""Tests of cluster texts and cluster files: their meaning, and the mistakes that are named."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import InvalidClusterError
from steelyard.hardware import Backend, cluster_of, parse_cluster, with_network
from steelyard.hardware.files import ClusterFile, find_device, find_link
from steelyard.hardware.parse import cluster_file, parse_pools, pools_from_yaml

FILE = {"version": 1, "num_nodes": 2, "devices_per_node": 8, "device": "a100-80gb"}
OWN_DEVICE = {
    "name": "mine",
    "kind": "gpu",
    "memory_GiB": 10,
    "peak_TFLOPs": {"bf16": 100, "fp32": 10},
    "memory_bandwidth_GBps": 500,
}
OWN_LINK = {"name": "wire", "bandwidth_GBps": 3, "latency_us": 20}


def read(**changes):
    return pools_from_yaml(yaml.safe_dump({**FILE, **changes}))


@given(st.integers(1, 1000), st.integers(1, 64))
def test_short_text_gives_nodes_then_devices(num_nodes, devices_per_node):
    cluster = parse_cluster(f"{num_nodes}x{devices_per_node}xa100-80gb")
    assert (cluster.num_nodes, cluster.devices_per_node) == (num_nodes, devices_per_node)


def test_short_text_takes_the_links_of_the_device():
    cluster = parse_cluster("8x8xh100-80gb")
    assert (cluster.intra_link, cluster.inter_link) == (find_link("nvlink-4"), find_link("infiniband-ndr"))


def test_one_node_has_no_link_to_others():
    assert parse_cluster("1x8xa100-80gb").inter_link is None


def test_an_alias_becomes_the_name():
    assert parse_cluster("1X8XA100-SXM4-80GB").name == "1x8xa100-80gb"


def test_cpu_processes_share_the_loopback_and_state_no_memory():
    cluster = parse_cluster("1x4xcpu")
    assert cluster.intra_link.needs_profile
    assert cluster.device.memory_bytes is None


@pytest.mark.parametrize(
    "text", ["", "8", "8x8", "a100-80gb", "8xa100-80gb", "x8xa100-80gb", "-1x8xa100-80gb", "1.5x8xl4"]
)
def test_a_text_that_is_no_cluster_says_what_to_write(text):
    with pytest.raises(InvalidClusterError, match="NODESxDEVICESxDEVICE"):
        parse_cluster(text)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("64xh100", "8x8xh100-80gb"),
        ("8xH100-80gb", "1x8xh100-80gb"),
        ("12xh100", "1x12xh100-80gb"),
        ("h100", "1x1xh100-80gb"),
        ("4xsomething", "1x8xa100-80gb"),
    ],
)
def test_a_cluster_without_nodes_is_answered_with_what_was_meant(text, meant):
    with pytest.raises(InvalidClusterError, match=f"--cluster {meant}"):
        parse_cluster(text)


@pytest.mark.parametrize("text", ["0x8xa100-80gb", "1x0xa100-80gb"])
def test_counts_of_zero_are_an_error(text):
    with pytest.raises(InvalidClusterError, match=r"NODESxDEVICESxDEVICE(.|\n)*to fix: write for example --cluster 1x"):
        parse_cluster(text)


def test_too_many_devices_are_an_error_that_says_what_to_do():
    with pytest.raises(InvalidClusterError, match=r"at most 65536\n  to fix: "):
        parse_cluster("65536x8xa100-80gb")


def test_an_unknown_device_in_a_text_names_the_nearest():
    with pytest.raises(InvalidClusterError, match=r"did you mean .*a100-80gb"):
        parse_cluster("1x8xa100-80")


def test_a_file_with_only_counts_and_a_device_equals_the_short_text():
    assert read(name="2x8xa100-80gb") == parse_cluster("2x8xa100-80gb")


def test_a_file_is_named_after_its_path(tmp_path):
    path = tmp_path / "lab.yaml"
    path.write_text(yaml.safe_dump(FILE))
    assert parse_cluster(str(path)).name == "lab"


def test_units_of_an_own_device_are_converted():
    device = read(device=OWN_DEVICE, intra_link="pcie-4", inter_link="ethernet-25").device
    assert device.memory_bytes == 10 * 1024**3
    assert device.peak("bf16") == 100e12
    assert device.memory_bytes_per_s == 500e9


def test_memory_in_decimal_gigabytes():
    device = {**OWN_DEVICE, "memory_GB": 10}
    del device["memory_GiB"]
    assert read(device=device, intra_link="pcie-4", inter_link="pcie-4").device.memory_bytes == 10 * 10**9


def test_units_of_an_own_link_are_converted():
    link = read(intra_link=OWN_LINK).intra_link
    assert link.bytes_per_s == 3e9
    assert link.latency_s == pytest.approx(20e-6)


def test_a_link_named_in_a_file_overrides_the_default():
    assert read(intra_link="pcie-4").intra_link == find_link("pcie-4")


@pytest.mark.parametrize(
    ("name", "bytes_per_s"),
    [
        ("ethernet-25", 3.125e9 / 8),
        ("infiniband-ndr", 50e9 / 8),
        ("2xethernet-100", 12.5e9 / 4),
        ("8 x InfiniBand-NDR", 50e9),
        ("400 Gb/s RDMA per GPU", 50e9),
        ("nvlink-5", 900e9),
    ],
)
def test_a_network_is_one_port_of_a_node_unless_its_name_says_otherwise(name, bytes_per_s):
    assert read(inter_link=name).inter_link.bytes_per_s == pytest.approx(bytes_per_s)
    assert with_network(parse_cluster("2x8xa100-80gb"), name).inter_link.bytes_per_s == pytest.approx(bytes_per_s)


@pytest.mark.parametrize("ports", [None, 1, 2, 8])
def test_an_own_network_is_one_port_of_a_node_unless_the_file_says_how_many(ports):
    link = OWN_LINK if ports is None else {**OWN_LINK, "ports_per_node": ports}
    assert read(inter_link=link).inter_link.bytes_per_s == pytest.approx(3e9 * (ports or 1) / 8)


@pytest.mark.parametrize("name", ["ethernet-26", "0xethernet-25", "8xethernet-26"])
def test_an_unknown_network_names_the_nearest(name):
    with pytest.raises(InvalidClusterError, match=r"network: found(.|\n)*ethernet-25"):
        with_network(parse_cluster("2x8xa100-80gb"), name)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"inter_link": "ethernet-25"},
        {"inter_link": {"name": "efa-100", "ports_per_node": 4}},
        {"device": OWN_DEVICE, "intra_link": OWN_LINK, "inter_link": {**OWN_LINK, "ports_per_node": 3}},
        {"num_nodes": 1, "device": {"name": "cpu", "memory_GiB": 4}, "intra_link": "loopback"},
    ],
)
def test_what_is_written_of_a_cluster_reads_back_as_the_same_cluster(changes):
    cluster = read(**changes)
    found = cluster_of(ClusterFile.model_validate_json(cluster_file(cluster).model_dump_json()), name="other")
    for mine, other in ((cluster.intra_link, found.intra_link), (cluster.inter_link, found.inter_link)):
        if mine is not None:
            assert (other.name, other.source, other.notes) == (mine.name, mine.source, mine.notes)
            assert (other.bytes_per_s, other.latency_s) == pytest.approx((mine.bytes_per_s, mine.latency_s), rel=1e-12)
    assert found.on(intra_link=cluster.intra_link, inter_link=cluster.inter_link) == cluster


def test_ports_of_a_node_are_shared_by_its_devices():
    assert read(inter_link={"name": "ethernet-100", "ports_per_node": 4}).inter_link.bytes_per_s == 6.25e9


def test_a_cpu_cluster_file_states_the_memory_of_a_process():
    cluster = read(num_nodes=1, devices_per_node=4, device={"name": "cpu", "memory_GiB": 4}, intra_link="loopback")
    assert cluster.device.known_memory_bytes() == 4 * 1024**3
    assert cluster.device.needs_profile


def own_device(**changes):
    device = {key: value for key, value in (OWN_DEVICE | changes).items() if value is not None}
    return read(device=device, intra_link="pcie-4", inter_link="ethernet-25").device


@pytest.mark.parametrize(("device_type", "backend"), [("gpu", "nccl"), ("cpu", "gloo")])
def test_an_own_device_has_the_usual_backend_of_its_type(device_type, backend):
    device = own_device(kind=device_type)
    assert (device.type, device.backend, device.is_gpu) == (device_type, backend, device_type == "gpu")


def test_an_own_gpu_may_communicate_over_gloo():
    assert own_device(backend="gloo").backend is Backend.GLOO


@pytest.mark.parametrize(("name", "device_type", "backend"), [("cpu", "cpu", "gloo"), ("H100-80GB", "gpu", "nccl")])
def test_an_own_device_of_a_catalogue_name_is_of_that_type(name, device_type, backend):
    device = own_device(name=name, kind=None)
    assert (device.type, device.backend) == (device_type, backend)


@pytest.mark.parametrize(("name", "vendor"), [("mi300x", "amd"), ("H100-80GB", "nvidia"), ("mine", None)])
def test_whose_an_own_device_is_the_catalogue_may_know(name, vendor):
    assert own_device(name=name).vendor == vendor


def test_a_gpu_of_which_only_a_profile_knows_the_rates_is_a_gpu():
    device = own_device(peak_TFLOPs=None, memory_bandwidth_GBps=None)
    assert device.needs_profile
    assert device.is_gpu


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "a100-80"}, "a100-80gb"),
        ({"intra_link": "nvlink-9"}, "nvlink-"),
        ({"inter_link": {"name": "ethernet-101", "ports_per_node": 4}}, "ethernet-100"),
        ({"nodes": 2}, "did you mean num_nodes"),
        ({"version": 2}, "version"),
        ({"num_nodes": 0}, "num_nodes"),
        ({"num_nodes": 1.5}, "num_nodes"),
        ({"num_nodes": True}, "num_nodes"),
        ({"intra_link": {**OWN_LINK, "bandwith_GBps": 3}}, "did you mean bandwidth_GBps"),
        ({"intra_link": {**OWN_LINK, "bandwidth_GBps": 0}}, "intra_link.bandwidth_GBps"),
        ({"intra_link": {**OWN_LINK, "bandwidth_GBps": float("inf")}}, "intra_link.bandwidth_GBps"),
        ({"intra_link": {**OWN_LINK, "latency_us": -1}}, "intra_link.latency_us"),
        ({"intra_link": {"name": "wire", "bandwidth_GBps": 3}}, "intra_link.latency_us"),
        ({"intra_link": 7}, "intra_link"),
        ({"inter_link": {"name": "ethernet-100", "ports_per_node": 0}}, "ports_per_node"),
        ({"device": {**OWN_DEVICE, "memory_GB": 10}}, "not both"),
        ({"device": {**OWN_DEVICE, "memory_Gib": 10}}, "did you mean memory_GiB"),
        ({"device": {**OWN_DEVICE, "peak_TFLOPs": {"bf61": 1}}}, "device.peak_TFLOPs"),
        ({"device": {**OWN_DEVICE, "peak_TFLOPs": {}}}, "together"),
        ({"device": OWN_DEVICE}, "intra_link"),
        ({"device": OWN_DEVICE, "intra_link": "pcie-4"}, "inter_link"),
        ({"device": 5}, "device"),
        ({"device": {"name": "mine", "memory_GiB": 10}}, r"device\.kind: found nothing(.|\n)*gpu or cpu"),
        ({"device": {**OWN_DEVICE, "kind": "tpu"}}, r"device\.kind: found 'tpu'(.|\n)*'gpu' or 'cpu'"),
        ({"device": {**OWN_DEVICE, "vendor": "acme"}}, r"device\.vendor: found 'acme'(.|\n)*'nvidia' or 'amd'"),
        ({"device": {**OWN_DEVICE, "backend": "mpi"}}, r"device\.backend: found 'mpi'(.|\n)*'nccl' or 'gloo'"),
        ({"device": {**OWN_DEVICE, "kind": "cpu", "backend": "nccl"}, "intra_link": "pcie-4"}, "nccl for a cpu"),
    ],
)
def test_a_mistake_in_a_file_is_named(changes, message):
    with pytest.raises(InvalidClusterError, match=message):
        read(**changes)


@pytest.mark.parametrize("text", ["", "- 1", "just words", "a: [", "version: 1"])
def test_a_text_that_is_no_cluster_file_is_a_user_error(text):
    with pytest.raises(InvalidClusterError):
        pools_from_yaml(text)


def test_a_missing_file_is_a_user_error(tmp_path):
    with pytest.raises(InvalidClusterError, match="readable YAML file"):
        parse_cluster(str(tmp_path / "absent.yaml"))


@pytest.mark.parametrize(
    ("device", "inter_link", "bytes_per_s"),
    [
        ("a100-80gb", "InfiniBand HDR 200 Gb/s per HCA", 25e9 / 8),
        ("h100-80gb", "8x400 Gb/s InfiniBand per node (DGX H100 reference architecture)", 50e9),
        ("h100-80gb", {"name": "efa-100", "ports_per_node": 32}, 50e9),
        ("a100-40gb", {"name": "efa-100", "ports_per_node": 4}, 6.25e9),
        ("a100-80gb", {"name": "omnipath-100", "ports_per_node": 4}, 6.25e9),
        ("a100-80gb", {"name": "infiniband-hdr", "ports_per_node": 4}, 12.5e9),
        ("a100-40gb", {"name": "ethernet-200", "ports_per_node": 8}, 25e9),
        ("h100-96gb-hbm2e", "400 Gb/s RDMA per GPU", 50e9),
        ("v100-16gb", {"name": "infiniband-edr", "ports_per_node": 1}, 12.5e9 / 8),
        ("a800", "8xinfiniband-hdr", 25e9),
        ("b300", "8xinfiniband-xdr", 100e9),
        ("gb300", "nvlink-5", 900e9),
    ],
)
def test_networks_of_published_runs_can_be_written(device, inter_link, bytes_per_s):
    cluster = read(device=device, inter_link=inter_link)
    assert cluster.device == find_device(device)
    assert cluster.inter_link.bytes_per_s == pytest.approx(bytes_per_s)


@pytest.mark.parametrize(
    ("text", "name"), [("100Gbps", "ethernet-100"), ("25GB/s", "ethernet-200"), ("8x95 Gbit/s", "ethernet-100")]
)
def test_a_network_that_is_a_bandwidth_gets_the_names_of_the_nearest_links(text: str, name: str) -> None:
    with pytest.raises(InvalidClusterError, match="a bandwidth") as caught:
        with_network(parse_cluster("2x8xh100-80gb"), text)
    assert f"--network {name}" in caught.value.hint
    assert all(known in caught.value.hint for known in ("infiniband-edr", "ethernet-400"))


def test_pools_of_two_vendors_are_refused_with_what_to_plan_instead() -> None:
    with pytest.raises(InvalidClusterError, match="NCCL and RCCL cannot share a process group") as caught:
        parse_pools("2x8xh100-80gb+1x8xmi300x")
    assert caught.value.found == "2x8xh100-80gb of NVIDIA and 1x8xmi300x of AMD"
    assert "--cluster 2x8xh100-80gb" in caught.value.hint
