"""What it runs on: devices, links and clusters; every number with its source."""

from steelyard.hardware.catalogue import (
    default_links,
    devices,
    find_device,
    find_link,
    find_network,
    is_same_device,
    known_device,
    links,
)
from steelyard.hardware.files import ClusterFile
from steelyard.hardware.parse import (
    cluster_file,
    cluster_from_yaml,
    cluster_of,
    is_as_named,
    parse_cluster,
    with_network,
)
from steelyard.hardware.values import Backend, Cluster, Device, DeviceKind, Link

__all__ = [
    "Backend",
    "Cluster",
    "ClusterFile",
    "Device",
    "DeviceKind",
    "Link",
    "cluster_file",
    "cluster_from_yaml",
    "cluster_of",
    "default_links",
    "devices",
    "find_device",
    "find_link",
    "find_network",
    "is_as_named",
    "is_same_device",
    "known_device",
    "links",
    "parse_cluster",
    "with_network",
]
