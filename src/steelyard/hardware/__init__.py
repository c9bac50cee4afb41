"""What it runs on: devices, links and clusters; every number with its source."""

from steelyard.hardware.catalogue import default_links, devices, find_device, find_link, links
from steelyard.hardware.parse import cluster_from_yaml, parse_cluster
from steelyard.hardware.values import Cluster, Device, Link

__all__ = [
    "Cluster",
    "Device",
    "Link",
    "cluster_from_yaml",
    "default_links",
    "devices",
    "find_device",
    "find_link",
    "links",
    "parse_cluster",
]
