"""Devices, links and clusters, with a source for every number."""

from steelyard.hardware.files import HardwareFile, PoolsFile, devices, is_same_device, known_device, links
from steelyard.hardware.parse import (
    FULL_NODE,
    cluster_of,
    hardware_file,
    is_as_named,
    parse_cluster,
    parse_pools,
    with_network,
)
from steelyard.hardware.values import Backend, Cluster, Device, DeviceType, Link, Vendor, joined_pools

__all__ = [
    "FULL_NODE",
    "Backend",
    "Cluster",
    "Device",
    "DeviceType",
    "HardwareFile",
    "Link",
    "PoolsFile",
    "Vendor",
    "cluster_of",
    "devices",
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
