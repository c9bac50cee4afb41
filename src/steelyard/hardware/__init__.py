"""What it runs on: devices, links and clusters; every number with its source."""

from steelyard.hardware.catalogue import default_links, devices, find_device, find_link, links
from steelyard.hardware.parse import cluster_from_yaml, parse_cluster
from steelyard.hardware.values import Backend, Cluster, Device, DeviceKind, Link

__all__ = [
    "Backend",
    "Cluster",
    "Device",
    "DeviceKind",
    "Link",
    "cluster_from_yaml",
    "default_links",
    "devices",
    "find_device",
    "find_link",
    "links",
    "parse_cluster",
]
