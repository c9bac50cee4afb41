"""Tests of the catalogue's numbers, and that every name in it can be reached."""

from importlib import resources

import pytest
import yaml

from steelyard.errors import InvalidClusterError
from steelyard.hardware import cluster_of, devices, links, parse_cluster
from steelyard.hardware.files import default_links, find_device, find_link
from steelyard.hardware.parse import cluster_file
from steelyard.hardware.values import UNMEASURED


def rows(file: str, key: str) -> list[dict[str, object]]:
    text = resources.files("steelyard.hardware").joinpath(file).read_text(encoding="utf-8")
    return yaml.safe_load(text)[key]


def names(file: str, key: str) -> list[str]:
    return [name for row in rows(file, key) for name in (row["name"], *row.get("aliases", ()))]


DEVICE_NAMES = names("devices.yaml", "devices")
LINK_NAMES = names("links.yaml", "links")
GPUS = [device for device in devices() if device.is_gpu]


@pytest.mark.parametrize("name", DEVICE_NAMES)
def test_every_device_name_parses_inside_a_cluster_text(name):
    assert parse_cluster(f"2x4x{name}").device == find_device(name)


@pytest.mark.parametrize("name", DEVICE_NAMES)
def test_device_names_are_read_in_any_case(name):
    assert find_device(name.upper()) == find_device(name)


@pytest.mark.parametrize("name", LINK_NAMES)
def test_every_link_name_is_reachable(name):
    assert find_link(name) in links()


@pytest.mark.parametrize("known", [DEVICE_NAMES, LINK_NAMES])
def test_every_name_and_alias_is_of_one_row(known):
    assert len({name.lower() for name in known}) == len(known)


def test_listings_hold_every_row_once():
    assert len({device.name for device in devices()}) == len(devices()) == len(rows("devices.yaml", "devices"))
    assert len({link.name for link in links()}) == len(links()) == len(rows("links.yaml", "links"))


@pytest.mark.parametrize("value", [*devices(), *links()], ids=lambda value: value.name)
def test_every_row_states_a_public_source_unless_only_a_profile_can_tell(value):
    assert value.source.startswith("none" if value.needs_profile else "https://")


@pytest.mark.parametrize("device", devices(), ids=lambda device: device.name)
def test_every_device_is_a_gpu_over_nccl_but_the_processes_of_a_host(device):
    assert (device.type, device.backend) == (("cpu", "gloo") if device.name == "cpu" else ("gpu", "nccl"))


@pytest.mark.parametrize("device", devices(), ids=lambda device: device.name)
def test_every_gpu_says_whose_it_is(device):
    assert (device.vendor is not None) == device.is_gpu


@pytest.mark.parametrize(
    ("name", "dtype", "flop_per_s"),
    [
        ("v100-16gb", "fp16", 125e12),
        ("a100-40gb", "bf16", 312e12),
        ("a100-80gb", "bf16", 312e12),
        ("a100-pcie-80gb", "fp16", 312e12),
        ("a100-80gb", "fp32", 19.5e12),
        ("a100-80gb", "tf32", 156e12),
        ("h100-80gb", "bf16", 989.4e12),
        ("h100-pcie-80gb", "bf16", 756e12),
        ("h100-nvl", "bf16", 835.5e12),
        ("h200", "bf16", 989.4e12),
        ("h20-96gb", "bf16", 148e12),
        ("h20-141gb", "fp8", 296e12),
        ("gh200-96gb", "bf16", 989.4e12),
        ("b200", "bf16", 2250e12),
        ("l4", "bf16", 121e12),
        ("l20", "bf16", 119.5e12),
        ("l40", "bf16", 181.05e12),
        ("l40s", "bf16", 362.05e12),
        ("a10", "bf16", 125e12),
        ("a10g", "bf16", 70e12),
        ("a30", "bf16", 165e12),
        ("a40", "bf16", 149.7e12),
        ("rtx-a4000", "bf16", 76.7e12),
        ("rtx-a5000", "bf16", 111.1e12),
        ("rtx-a6000", "bf16", 154.8e12),
        ("rtx-3060", "bf16", 25.5e12),
        ("rtx-3090", "bf16", 71e12),
        ("rtx-4070-ti-super", "bf16", 88.2e12),
        ("rtx-5080", "bf16", 112.6e12),
        ("rtx-5090", "bf16", 209.5e12),
        ("dgx-spark", "bf16", 125e12),
        ("rtx-6000-ada", "bf16", 364.2e12),
        ("rtx-pro-6000", "bf16", 503.8e12),
        ("t4", "fp16", 65e12),
        ("rtx-4090", "bf16", 165.2e12),
        ("titan-rtx", "fp16", 130.5e12),
        ("mi250x", "bf16", 191.5e12),
        ("mi300x", "bf16", 1307.4e12),
    ],
)
def test_peak_is_dense_and_in_powers_of_ten(name, dtype, flop_per_s):
    assert find_device(name).peak(dtype) == pytest.approx(flop_per_s, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "bytes_per_s"),
    [
        ("v100-32gb", 900e9),
        ("a100-40gb", 1555e9),
        ("a100-80gb", 2039e9),
        ("a100-pcie-80gb", 1935e9),
        ("h100-80gb", 3350e9),
        ("h100-96gb-hbm2e", 2400e9),
        ("h200", 4800e9),
        ("mi300x", 5300e9),
    ],
)
def test_memory_bandwidth_counts_decimal_gigabytes(name, bytes_per_s):
    assert find_device(name).known_memory_bytes_per_s() == pytest.approx(bytes_per_s, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "bytes_per_s"),
    [
        ("nvlink-2", 150e9),
        ("nvlink-3", 300e9),
        ("nvlink-4", 450e9),
        ("nvlink-5", 900e9),
        ("pcie-3", 15.75e9),
        ("pcie-4", 31.5e9),
        ("pcie-5", 63e9),
        ("infiniband-edr", 12.5e9),
        ("infiniband-hdr", 25e9),
        ("infiniband-ndr", 50e9),
        ("infiniband-xdr", 100e9),
        ("ethernet-10", 1.25e9),
        ("ethernet-25", 3.125e9),
        ("ethernet-100", 12.5e9),
        ("ethernet-200", 25e9),
        ("ethernet-400", 50e9),
    ],
)
def test_link_rate_is_per_direction(name, bytes_per_s):
    assert find_link(name).bytes_per_s == pytest.approx(bytes_per_s, rel=1e-12)


@pytest.mark.parametrize("link", links(), ids=lambda link: link.name)
def test_link_latency_is_between_one_and_a_hundred_microseconds(link):
    assert 1e-6 <= link.latency_s <= 100e-6


@pytest.mark.parametrize(
    ("name", "data_sheet_gb"),
    [("v100-16gb", 16), ("v100-32gb", 32), ("a100-40gb", 40), ("a100-80gb", 80), ("h100-80gb", 80), ("h200", 141)],
)
def test_usable_memory_is_a_little_below_the_data_sheet_read_as_gib(name, data_sheet_gb):
    assert 0.97 * data_sheet_gb < find_device(name).known_memory_bytes() / 1024**3 < data_sheet_gb


def test_memory_grows_with_the_name():
    order = ["v100-16gb", "l4", "v100-32gb", "a100-40gb", "l40s", "a100-80gb", "h100-nvl", "h200", "b200", "mi300x"]
    memory = [find_device(name).known_memory_bytes() for name in order]
    assert memory == sorted(memory)
    assert len(set(memory)) == len(memory)


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
def test_lower_precision_is_never_slower(device):
    peaks = [
        device.peak_flop_per_s[dtype]
        for dtype in ("fp32", "tf32", "fp16", "fp8", "mxfp8", "nvfp4")
        if dtype in device.peak_flop_per_s
    ]
    assert peaks == sorted(peaks)


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
def test_bf16_is_as_fast_as_fp16_or_absent(device):
    assert device.peak_flop_per_s.get("bf16", device.peak("fp16")) == device.peak("fp16")


@pytest.mark.parametrize("device", devices(), ids=lambda device: device.name)
def test_nodes_are_joined_by_a_link_no_faster_than_their_own(device):
    intra_link, inter_link = default_links(device.name, num_devices=1024)
    assert device.needs_profile or inter_link.bytes_per_s <= intra_link.bytes_per_s


@pytest.mark.parametrize(("num_devices", "inter_link"), [(8, "nvlink-5"), (72, "nvlink-5"), (76, "infiniband-ndr")])
def test_one_switch_carries_a_rack_across_its_trays(num_devices, inter_link):
    assert default_links("gb200", num_devices=num_devices)[1].name == inter_link


@pytest.mark.parametrize(("name", "bytes_per_s"), [("v100-32gb", 6.25e9), ("a100-80gb", 25e9), ("mi250x", 12.5e9)])
def test_devices_that_share_a_network_port_share_its_rate(name, bytes_per_s):
    assert default_links(name, num_devices=64)[1].bytes_per_s == bytes_per_s


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("a100", "a100-80gb"), ("h100", "h100-80gb"), ("v100", "v100-16gb"), ("rtx4060", "rtx-4080"), ("mi300", "mi300x")],
)
def test_unknown_device_names_the_nearest_ones(name, suggestion):
    with pytest.raises(InvalidClusterError, match=suggestion) as caught:
        find_device(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(("name", "suggestion"), [("nvlink", "nvlink-2"), ("infiniban-hdr", "infiniband-hdr")])
def test_unknown_link_names_the_nearest_ones(name, suggestion):
    with pytest.raises(InvalidClusterError, match=suggestion):
        find_link(name)


def test_unknown_device_without_neighbours_lists_all():
    with pytest.raises(InvalidClusterError, match=r"known: .*a100-80gb"):
        find_device("zzzzzz")


def test_a_name_without_its_memory_lists_all_variants():
    with pytest.raises(InvalidClusterError) as caught:
        find_device("a100")
    assert all(name in caught.value.hint for name in ("a100-40gb", "a100-80gb", "a100-pcie-40gb", "a100-pcie-80gb"))


def test_bf16_on_v100_is_an_error_that_says_what_to_use():
    with pytest.raises(InvalidClusterError, match="bf16") as caught:
        find_device("v100-16gb").peak("bf16")
    assert "fp16, fp32" in str(caught.value)


def test_peak_of_a_cpu_asks_for_a_profile():
    with pytest.raises(InvalidClusterError, match="steelyard profile"):
        find_device("cpu").peak("fp32")


def test_memory_bandwidth_of_a_cpu_asks_for_a_profile():
    with pytest.raises(InvalidClusterError, match="steelyard profile"):
        find_device("cpu").known_memory_bytes_per_s()


def test_memory_of_a_cpu_asks_for_a_number():
    with pytest.raises(InvalidClusterError, match="--memory"):
        find_device("cpu").known_memory_bytes()


def test_default_links_of_an_unknown_device_are_an_error():
    with pytest.raises(InvalidClusterError, match="no-such-device"):
        default_links("no-such-device", num_devices=8)


@pytest.mark.parametrize("device", ["rtx-3090", "rtx-4090", "l40s"])
def test_devices_without_peer_access_lose_more_than_their_share_of_the_rate_by_number(device):
    link = default_links(device, num_devices=8)[0]
    assert link.measured.crowding > 1
    assert "measured" in link.notes


def test_what_was_measured_of_a_link_is_written_and_read_with_the_cluster():
    cluster = parse_cluster("2x8xh100-80gb")
    assert cluster.intra_link.measured != UNMEASURED
    assert cluster_of(cluster_file(cluster), name=cluster.name).intra_link == cluster.intra_link
