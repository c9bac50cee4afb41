"""From what a user names to a `Cluster`: ``NODESxDEVICESxDEVICE`` or a cluster file."""

import re
from pathlib import Path

from steelyard.errors import InvalidClusterError
from steelyard.hardware.catalogue import default_links, find_device, find_link, known_device
from steelyard.hardware.files import ClusterFile, DeviceSpec, LinkSpec, SharedLink, read_text, read_yaml
from steelyard.hardware.values import Cluster, Device, Link

_SHORT = re.compile(r"\s*([0-9]{1,9})\s*x\s*([0-9]{1,9})\s*x\s*(\S.*?)\s*", re.IGNORECASE)


def parse_cluster(text: str) -> Cluster:
    """The cluster named by ``NODESxDEVICESxDEVICE`` (``8x8xh100-80gb``) or by the path of a YAML file.

    The short form takes the links that the catalogue gives the device. Raises `InvalidClusterError` for a text that is
    neither, an unknown device or link (with the nearest names), counts of zero, or a file that is not valid.
    """
    if text.strip().lower().endswith((".yaml", ".yml")):
        path = Path(text.strip())
        return cluster_from_yaml(read_text(path), where=str(path), name=path.stem)
    match = _SHORT.fullmatch(text)
    if match is None:
        raise InvalidClusterError(
            field="cluster",
            found=repr(text),
            expected="NODESxDEVICESxDEVICE, or a path that ends in .yaml",
            hint="write for example --cluster 1x8xa100-80gb",
        )
    num_nodes, devices_per_node = int(match.group(1)), int(match.group(2))
    device = find_device(match.group(3))
    intra_link, inter_link = _links_of(device.name, num_nodes=num_nodes, devices_per_node=devices_per_node)
    return Cluster(
        name=f"{num_nodes}x{devices_per_node}x{device.name}",
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        device=device,
        intra_link=intra_link,
        inter_link=inter_link,
    )


def cluster_from_yaml(text: str, *, where: str = "cluster file", name: str = "cluster") -> Cluster:
    """The cluster that a YAML text describes; ``name`` is used when the text gives none, ``where`` in errors."""
    return _cluster_of(read_yaml(text, ClusterFile, where=where), name=name)


def _cluster_of(file: ClusterFile, *, name: str) -> Cluster:
    if isinstance(file.device, DeviceSpec):
        device = file.device.to_device(known_device(file.device.name))
    else:
        device = find_device(file.device)
    return Cluster(
        name=file.name or name,
        num_nodes=file.num_nodes,
        devices_per_node=file.devices_per_node,
        device=device,
        intra_link=_intra_link(file, device),
        inter_link=_inter_link(file, device),
    )


def _intra_link(file: ClusterFile, device: Device) -> Link:
    if file.intra_link is not None:
        return _link_of(file.intra_link, devices_per_node=file.devices_per_node)
    if isinstance(file.device, DeviceSpec):
        raise _missing_link("intra_link", device.name)
    return _links_of(device.name, num_nodes=file.num_nodes, devices_per_node=file.devices_per_node)[0]


def _inter_link(file: ClusterFile, device: Device) -> Link | None:
    if file.inter_link is not None:
        return _link_of(file.inter_link, devices_per_node=file.devices_per_node)
    if file.num_nodes == 1:
        return None
    if isinstance(file.device, DeviceSpec):
        raise _missing_link("inter_link", device.name)
    return _links_of(device.name, num_nodes=file.num_nodes, devices_per_node=file.devices_per_node)[1]


def _link_of(entry: str | SharedLink | LinkSpec, *, devices_per_node: int) -> Link:
    if isinstance(entry, LinkSpec):
        return entry.to_link()
    if isinstance(entry, SharedLink):
        return find_link(entry.name).shared(num_ports=entry.ports_per_node, num_devices=devices_per_node)
    return find_link(entry)


def _links_of(device_name: str, *, num_nodes: int, devices_per_node: int) -> tuple[Link, Link | None]:
    intra_link, inter_link = default_links(device_name, num_devices=num_nodes * devices_per_node)
    return intra_link, inter_link if num_nodes > 1 else None


def _missing_link(field: str, device_name: str) -> InvalidClusterError:
    return InvalidClusterError(
        field=field,
        found=f"nothing, and {device_name!r} is described in the file, so the catalogue has no default for it",
        expected="a link name, or name, bandwidth_GBps and latency_us",
        hint=f"add for example {field}: pcie-4",
    )
