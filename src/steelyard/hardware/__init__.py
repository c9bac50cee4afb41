"""What it runs on: devices, links and clusters; every number with its source."""

from steelyard.hardware.files import (
    ClusterFile,
    HardwareFile,
    PoolsFile,
    default_links,
    devices,
    find_device,
    find_link,
    find_network,
    is_same_device,
    known_device,
    links,
)
from steelyard.hardware.parse import (
    cluster_file,
    cluster_of,
    hardware_file,
    is_as_named,
    parse_cluster,
    parse_pools,
    with_network,
)
from steelyard.hardware.values import Backend, Cluster, Device, DeviceType, Link, NodeGroup, Vendor, joined_pools

__all__ = [
    "Backend",
    "Cluster",
    "ClusterFile",
    "Device",
    "DeviceType",
    "HardwareFile",
    "Link",
    "NodeGroup",
    "PoolsFile",
    "Vendor",
    "cluster_file",
    "cluster_of",
    "default_links",
    "devices",
    "find_device",
    "find_link",
    "find_network",
    "hardware_file",
    "is_as_named",
    "is_same_device",
    "joined_pools",
    "known_device",
    "links",
    "parse_cluster",
    "parse_pools",
    "with_network",
]
