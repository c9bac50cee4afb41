"""Parser and writer for clusters: ``NODESxDEVICESxDEVICE``, several of them joined by ``+``, or a file."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from steelyard.errors import InvalidClusterError
from steelyard.files import parse_yaml
from steelyard.hardware import files
from steelyard.hardware.values import Cluster, Device, Link, NodeGroup, joined_pools
from steelyard.limits import MOST_DEVICES
from steelyard.units import GB, GIB, MIB, TERA

FULL_NODE = 8
"""Devices of a fully populated node."""
_SHORT = re.compile(r"\s*([1-9][0-9]{0,8})\s*x\s*([1-9][0-9]{0,8})\s*x\s*(\S.*?)\s*", re.IGNORECASE)


def parse_cluster(text: str) -> Cluster:
    """Return the cluster named by ``NODESxDEVICESxDEVICE`` (``8x8xh100-80gb``) or by the path of a YAML file.

    The short form uses the catalogue's links for the device. Raises `InvalidClusterError` if the text is neither, a
    device or link is unknown (with the nearest names), a count is zero, the file is invalid, or there are several
    device groups, for which use `parse_pools`.
    """
    found = parse_pools(text)
    if found.is_mixed:
        raise InvalidClusterError(
            field="cluster",
            found=f"{found.name}, a mixed cluster of {len(found.pools)} device groups",
            expected="a cluster of one device type",
            hint="name one of the groups; `plan`, `explain` and `frontier --price` accept several",
        )
    return found


def parse_pools(text: str) -> Cluster:
    """Return the cluster that a text names, with one device group as in `parse_cluster` or several.

    Write several as ``2x8xh100-80gb+4x8xa100-40gb``, or list them under ``pools`` in a file. In the short form the link
    between them is assumed to be the slowest of their networks. Raises as `parse_cluster`, and if two device groups
    have the same device.
    """
    if text.strip().lower().endswith((".yaml", ".yml")):
        path = Path(text.strip())
        return pools_from_yaml(files.read_text(path), where=str(path), name=path.stem)
    pools = [_short(part) for part in text.split("+")]
    if len(pools) == 1:
        return pools[0]
    names = [pool.device.name for pool in pools]
    for name in names:
        if names.count(name) > 1:
            raise InvalidClusterError(
                field="cluster",
                found=f"{name} in two device groups",
                expected="each device type once",
                hint="combine their nodes into one group, or describe groups of the same device in a cluster file",
            )
    return joined_pools(pools, _assumed_links(pools))


def _assumed_links(pools: Sequence[Cluster]) -> tuple[Link, ...]:
    """Return, for each device group, the slowest of the catalogue's networks for their devices."""
    networks = [files.default_links(pool.device.name, num_devices=MOST_DEVICES)[1] for pool in pools]
    return (min(networks, key=lambda link: link.bytes_per_s),) * len(pools)


def _short(text: str) -> Cluster:
    match = _SHORT.fullmatch(text)
    if match is None:
        raise InvalidClusterError(
            field="cluster",
            found=repr(text),
            expected="NODESxDEVICESxDEVICE, several of them joined by +, or a path that ends in .yaml",
            hint=f"write for example --cluster {_meant(text) or '1x8xa100-80gb'}",
        )
    num_nodes, devices_per_node = int(match.group(1)), int(match.group(2))
    device = files.find_device(match.group(3))
    intra_link, inter_link = _links_of(device.name, num_nodes=num_nodes, devices_per_node=devices_per_node)
    group = NodeGroup(
        name=f"{num_nodes}x{devices_per_node}x{device.name}",
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        device=device,
        intra_link=intra_link,
        inter_link=inter_link,
    )
    return Cluster(groups=(group,))


def _meant(text: str) -> str:
    """Return the cluster that ``64xh100`` means, in nodes of eight; empty if no device has this name."""
    match = re.fullmatch(r"(?:([0-9]{1,9})\s*x\s*)?(.+)", text.strip(), re.IGNORECASE)
    named = match.group(2).lower() if match else ""
    device = files.known_device(named) or next((each for each in files.devices() if each.name.startswith(named)), None)
    if not match or not device:
        return ""
    count = int(match.group(1) or 1)
    nodes = count // FULL_NODE if count > FULL_NODE and count % FULL_NODE == 0 else 1
    return f"{nodes}x{count // nodes}x{device.name}"


def pools_from_yaml(text: str, *, where: str = "cluster file", name: str = "cluster") -> Cluster:
    """Return the cluster that a YAML text describes.

    ``name`` is the name of a cluster whose text has none; ``where`` names the text in errors.
    """
    try:
        content = parse_yaml(text)
    except ValueError as error:
        raise InvalidClusterError(field=where, found=str(error), expected="a YAML mapping") from error
    if isinstance(content, dict) and "pools" in content:
        return cluster_of(files.checked(content, files.PoolsFile, where=where), name=name)
    return cluster_of(files.checked(content, files.ClusterFile, where=where), name=name)


def with_network(cluster: Cluster, network: str) -> Cluster:
    """Return the cluster with the named link (see `find_network`) between nodes and device groups, as ``--network``."""
    groups = []
    for each in cluster.groups:
        link = files.find_network(network, devices_per_node=each.devices_per_node)
        inside = link if each.num_nodes > 1 or not cluster.is_mixed else each.inter_link
        groups.append(replace(each, inter_link=inside, outer_link=link))
    return Cluster(groups=tuple(groups))


def is_as_named(cluster: Cluster) -> bool:
    """Return whether the name ``NODESxDEVICESxDEVICE`` alone describes the cluster, except for its memory."""
    if cluster.is_mixed:
        return all(map(is_as_named, cluster.pools)) and _assumed_links(cluster.pools) == cluster.links
    if _SHORT.fullmatch(cluster.name) is None:
        return False
    try:
        named = parse_cluster(cluster.name)
    except InvalidClusterError:
        return False
    return named.on(device=replace(named.device, memory_bytes=cluster.device.memory_bytes)) == cluster


@lru_cache(maxsize=8)  # a search assembles hundreds of plans of one cluster
def hardware_file(cluster: Cluster) -> files.ClusterFile | files.PoolsFile | None:
    """Return the cluster file that a plan stores besides the name; None if the name alone describes the cluster."""
    return None if is_as_named(cluster) else cluster_file(cluster)


def cluster_file(cluster: Cluster) -> files.ClusterFile | files.PoolsFile:
    """Return the file that `cluster_of` reads back as this cluster; devices and links of the catalogue by name."""
    found = []
    for group in cluster.groups:
        device, ports = group.device, group.devices_per_node
        found.append(
            {
                "name": group.name,
                "num_nodes": group.num_nodes,
                "devices_per_node": ports,
                "device": device.name if files.known_device(device.name) == device else _spec(device),
                "intra_link": group.intra_link.name
                if group.intra_link in files.links()
                else _link_spec(group.intra_link),
                "inter_link": group.inter_link and _link_spec(group.inter_link, ports_per_node=ports),
                "host_memory_GiB": group.host_memory_bytes and group.host_memory_bytes / GIB,
            }
        )
    if not cluster.is_mixed:
        return files.ClusterFile.model_validate({"version": 1, **found[0]})
    outer = [
        each.outer_link and _link_spec(each.outer_link, ports_per_node=each.devices_per_node) for each in cluster.groups
    ]
    return files.PoolsFile.model_validate({"version": 1, "pools": found, "links": outer})


def _spec(device: Device) -> files.DeviceSpec:
    memory, rate, known = device.memory_bytes, device.memory_bytes_per_s, files.known_device(device.name)
    host = None if known and known.host_bytes_per_s == device.host_bytes_per_s else device.host_bytes_per_s
    cache = None if known and known.cache_bytes == device.cache_bytes else device.cache_bytes
    return files.DeviceSpec.model_validate(
        {
            "name": device.name,
            "kind": device.type,
            "vendor": device.vendor,
            "backend": device.backend,
            "memory_GiB": None if memory is None else memory / GIB,
            "memory_bandwidth_GBps": None if rate is None else rate / GB,
            "host_GBps": host and host / GB,
            "cache_MiB": cache and cache / MIB,
            "peak_TFLOPs": {dtype: peak / TERA for dtype, peak in device.peak_flop_per_s.items()},
            "source": device.source,
            "notes": device.notes,
        }
    )


def _link_spec(link: Link, *, ports_per_node: int | None = None) -> files.LinkSpec:
    return files.LinkSpec(
        name=link.name,
        bandwidth_GBps=link.bytes_per_s / GB,
        latency_us=link.latency_s / files.MICRO,
        ports_per_node=ports_per_node,
        source=link.source,
        notes=link.notes,
        needs_profile=link.needs_profile,
        measured=files.MeasuredSpec.of(link.measured),
    )


def cluster_of(file: files.ClusterFile | files.PoolsFile, *, name: str) -> Cluster:
    """Return the cluster that a file describes; ``name`` is used if the file has none.

    A device group without a name is named as in the short form. Raises `InvalidClusterError` if ``pools`` has only one.
    """
    if isinstance(file, files.ClusterFile):
        return Cluster(groups=(_group_of(file, name),))
    if len(file.pools) < 2:
        raise InvalidClusterError(
            field="pools",
            found=str(len(file.pools)),
            expected="two or more",
            hint="leave pools: out for a single group",
        )
    groups, links = [], file.links or (file.link,) * len(file.pools)
    for spec, entry in itertools.zip_longest(file.pools, links[: len(file.pools)]):
        device = spec.device if isinstance(spec.device, str) else spec.device.name
        group = _group_of(spec, f"{spec.num_nodes}x{spec.devices_per_node}x{device}")
        groups.append(replace(group, outer_link=_network(entry, spec.devices_per_node)))
    return Cluster(groups=tuple(groups))


def _group_of(file: files.PoolSpec, name: str) -> NodeGroup:
    own, num_nodes, ports = file.device, file.num_nodes, file.devices_per_node
    device = files.find_device(own) if isinstance(own, str) else own.to_device(files.known_device(own.name))
    for field, is_missing in (("intra_link", True), ("inter_link", num_nodes > 1)):
        if is_missing and getattr(file, field) is None and isinstance(own, files.DeviceSpec):
            raise InvalidClusterError(
                field=field,
                found=f"nothing, and {own.name!r} is described in the file, so the catalogue has no default for it",
                expected="a link name, or name, bandwidth_GBps and latency_us",
                hint=f"add for example {field}: pcie-4",
            )
    if file.intra_link is None:
        intra_link, _ = _links_of(device.name, num_nodes=num_nodes, devices_per_node=ports)
    elif isinstance(file.intra_link, str):
        intra_link = files.find_link(file.intra_link)
    else:
        intra_link = _link_of(file.intra_link, devices_per_node=ports, ports_unsaid=ports)
    inter_link = _network(file.inter_link, ports)
    if file.inter_link is None and num_nodes > 1:
        _, inter_link = _links_of(device.name, num_nodes=num_nodes, devices_per_node=ports)
    return NodeGroup(
        name=file.name or name,
        num_nodes=num_nodes,
        devices_per_node=ports,
        device=device,
        intra_link=intra_link,
        inter_link=inter_link,
        host_memory_bytes=None if file.host_memory_GiB is None else round(file.host_memory_GiB * GIB),
    )


def _network(entry: files.LinkEntry | None, devices_per_node: int) -> Link | None:
    """Return the link of a device out of its node, or None if the entry is None."""
    if isinstance(entry, str):
        return files.find_network(entry, devices_per_node=devices_per_node)
    return None if entry is None else _link_of(entry, devices_per_node=devices_per_node, ports_unsaid=1)


def _link_of(entry: files.SharedLink | files.LinkSpec, *, devices_per_node: int, ports_unsaid: int) -> Link:
    link = entry.to_link() if isinstance(entry, files.LinkSpec) else files.find_link(entry.name)
    return link.shared(num_ports=entry.ports_per_node or ports_unsaid, num_devices=devices_per_node)


def _links_of(device_name: str, *, num_nodes: int, devices_per_node: int) -> tuple[Link, Link | None]:
    intra_link, inter_link = files.default_links(device_name, num_devices=num_nodes * devices_per_node)
    return intra_link, inter_link if num_nodes > 1 else None
