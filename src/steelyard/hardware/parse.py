"""From what a user names to a `Cluster` or a `MixedCluster`: ``NODESxDEVICESxDEVICE``, several of them, or a file."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from steelyard.errors import InvalidClusterError
from steelyard.hardware.files import (
    MICRO,
    ClusterFile,
    DeviceSpec,
    LinkEntry,
    LinkSpec,
    MeasuredSpec,
    PoolsFile,
    PoolSpec,
    SharedLink,
    checked,
    default_links,
    find_device,
    find_link,
    find_network,
    known_device,
    links,
    read_mapping,
    read_text,
)
from steelyard.hardware.values import Cluster, Device, Link, MixedCluster, joined_pools
from steelyard.limits import MOST_DEVICES
from steelyard.units import GB, GIB, TERA

_SHORT = re.compile(r"\s*([0-9]{1,9})\s*x\s*([0-9]{1,9})\s*x\s*(\S.*?)\s*", re.IGNORECASE)


def parse_cluster(text: str) -> Cluster:
    """The cluster named by ``NODESxDEVICESxDEVICE`` (``8x8xh100-80gb``) or by the path of a YAML file.

    The short form takes the links that the catalogue gives the device. Raises `InvalidClusterError` for a text that is
    neither, an unknown device or link (with the nearest names), counts of zero, a file that is not valid, or several
    pools, which `parse_pools` takes.
    """
    found = parse_pools(text)
    if isinstance(found, MixedCluster):
        raise InvalidClusterError(
            field="cluster",
            found=f"{found.name}, which has {len(found.pools)} pools of unlike devices",
            expected="a cluster of one device type",
            hint="name one of the pools; `plan`, `explain` and `frontier --price` take several",
        )
    return found


def parse_pools(text: str) -> Cluster | MixedCluster:
    """The cluster that a text names, of one pool as in `parse_cluster` or of several.

    Several are joined by a plus, as in ``2x8xh100-80gb+4x8xa100-40gb``, or are listed under ``pools`` in a file. In the
    short form they are taken to be joined by the slowest of their own networks. Raises as `parse_cluster`, and for a
    device that is named in two pools.
    """
    if text.strip().lower().endswith((".yaml", ".yml")):
        path = Path(text.strip())
        return pools_from_yaml(read_text(path), where=str(path), name=path.stem)
    pools = [_short(part) for part in text.split("+")]
    if len(pools) == 1:
        return pools[0]
    names = [pool.device.name for pool in pools]
    for name in names:
        if names.count(name) > 1:
            raise InvalidClusterError(
                field="cluster",
                found=f"{name} in two pools",
                expected="each device once",
                hint="add up their nodes into one pool, or describe pools of the same device in a cluster file",
            )
    return MixedCluster(pools=tuple(pools), links=_assumed_links(pools))


def _assumed_links(pools: Sequence[Cluster]) -> tuple[Link, ...]:
    """The slowest network that the catalogue gives one of the pools' devices, for each of them."""
    networks = [default_links(pool.device.name, num_devices=MOST_DEVICES)[1] for pool in pools]
    return (min(networks, key=lambda link: link.bytes_per_s),) * len(pools)


def _short(text: str) -> Cluster:
    match = _SHORT.fullmatch(text)
    if match is None:
        raise InvalidClusterError(
            field="cluster",
            found=repr(text),
            expected="NODESxDEVICESxDEVICE, several of them joined by +, or a path that ends in .yaml",
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


def pools_from_yaml(text: str, *, where: str = "cluster file", name: str = "cluster") -> Cluster | MixedCluster:
    """The cluster, or the pools, of a YAML text; ``name`` is for one that gives none, ``where`` for errors."""
    content = read_mapping(text, where=where)
    if not isinstance(content, dict) or "pools" not in content:
        return cluster_of(checked(content, ClusterFile, where=where), name=name)
    return pools_of(checked(content, PoolsFile, where=where))


def with_network(cluster: Cluster | MixedCluster, network: str) -> Cluster | MixedCluster:
    """The cluster with the named link between its nodes, as `find_network` reads it: what ``--network`` asks for.

    Of several pools, between the nodes of each and between the pools.
    """
    links = [find_network(network, devices_per_node=pool.devices_per_node) for pool in cluster.pools]
    is_alone = len(links) == 1
    pools = [
        replace(pool, inter_link=link) if is_alone or pool.num_nodes > 1 else pool
        for pool, link in zip(cluster.pools, links, strict=True)
    ]
    return joined_pools(pools, links)


def is_as_named(cluster: Cluster | MixedCluster) -> bool:
    """Whether its name alone, ``NODESxDEVICESxDEVICE``, says what it is, its memory left out."""
    if isinstance(cluster, MixedCluster):
        if not all(map(is_as_named, cluster.pools)):
            return False
        return tuple(_assumed_links(cluster.pools)) == cluster.links
    if _SHORT.fullmatch(cluster.name) is None:
        return False
    try:
        named = parse_cluster(cluster.name)
    except InvalidClusterError:
        return False
    return replace(named, device=replace(named.device, memory_bytes=cluster.device.memory_bytes)) == cluster


def hardware_file(cluster: Cluster | MixedCluster) -> ClusterFile | PoolsFile | None:
    """What a plan keeps of a cluster beside its name: the file that describes it, None where the name says it all."""
    if is_as_named(cluster):
        return None
    return pools_file(cluster) if isinstance(cluster, MixedCluster) else cluster_file(cluster)


def cluster_file(cluster: Cluster) -> ClusterFile:
    """The file that `cluster_of` reads back as this cluster; what the catalogue has is written by its name."""
    inter_link = cluster.inter_link
    ports = cluster.devices_per_node
    return ClusterFile(
        version=1,
        name=cluster.name,
        num_nodes=cluster.num_nodes,
        devices_per_node=cluster.devices_per_node,
        device=cluster.device.name if known_device(cluster.device.name) == cluster.device else _spec(cluster.device),
        intra_link=cluster.intra_link.name if cluster.intra_link in links() else _link_spec(cluster.intra_link),
        inter_link=None if inter_link is None else _link_spec(inter_link, ports_per_node=ports),
    )


def pools_file(cluster: MixedCluster) -> PoolsFile:
    """The file that `pools_of` reads back as these pools."""
    return PoolsFile(
        version=1,
        pools=tuple(
            PoolSpec(**{name: getattr(cluster_file(pool), name) for name in PoolSpec.model_fields})
            for pool in cluster.pools
        ),
        links=tuple(
            _link_spec(link, ports_per_node=pool.devices_per_node)
            for pool, link in zip(cluster.pools, cluster.links, strict=True)
        ),
    )


def pools_of(file: PoolsFile) -> MixedCluster:
    """The pools that a file describes; one without a name is called as the short form would call it."""
    pools = []
    for spec in file.pools:
        device = spec.device if isinstance(spec.device, str) else spec.device.name
        own = ClusterFile(version=1, **{name: getattr(spec, name) for name in PoolSpec.model_fields})
        pools.append(cluster_of(own, name=f"{spec.num_nodes}x{spec.devices_per_node}x{device}"))
    entries = file.links or (file.link,) * len(pools)
    links = [_outer_link(entry, pool) for entry, pool in zip(entries, pools, strict=False) if entry is not None]
    return MixedCluster(pools=tuple(pools), links=tuple(links))


def _outer_link(entry: LinkEntry, pool: Cluster) -> Link:
    if isinstance(entry, str):
        return find_network(entry, devices_per_node=pool.devices_per_node)
    return _link_of(entry, devices_per_node=pool.devices_per_node, ports_unsaid=1)


def _spec(device: Device) -> DeviceSpec:
    memory, rate = device.memory_bytes, device.memory_bytes_per_s
    return DeviceSpec.model_validate(
        {
            "name": device.name,
            "kind": device.type,
            "vendor": device.vendor,
            "backend": device.backend,
            "memory_GiB": None if memory is None else memory / GIB,
            "memory_bandwidth_GBps": None if rate is None else rate / GB,
            "peak_TFLOPs": {dtype: peak / TERA for dtype, peak in device.peak_flop_per_s.items()},
            "source": device.source,
            "notes": device.notes,
        }
    )


def _link_spec(link: Link, *, ports_per_node: int | None = None) -> LinkSpec:
    return LinkSpec(
        name=link.name,
        bandwidth_GBps=link.bytes_per_s / GB,
        latency_us=link.latency_s / MICRO,
        ports_per_node=ports_per_node,
        source=link.source,
        notes=link.notes,
        needs_profile=link.needs_profile,
        measured=MeasuredSpec.of(link.measured),
    )


def cluster_of(file: ClusterFile, *, name: str) -> Cluster:
    """The cluster that a file describes; ``name`` is used when the file gives none."""
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
        if isinstance(file.intra_link, str):
            return find_link(file.intra_link)
        return _link_of(file.intra_link, devices_per_node=file.devices_per_node, ports_unsaid=file.devices_per_node)
    if isinstance(file.device, DeviceSpec):
        raise _missing_link("intra_link", device.name)
    return _links_of(device.name, num_nodes=file.num_nodes, devices_per_node=file.devices_per_node)[0]


def _inter_link(file: ClusterFile, device: Device) -> Link | None:
    if isinstance(file.inter_link, str):
        return find_network(file.inter_link, devices_per_node=file.devices_per_node)
    if file.inter_link is not None:
        return _link_of(file.inter_link, devices_per_node=file.devices_per_node, ports_unsaid=1)
    if file.num_nodes == 1:
        return None
    if isinstance(file.device, DeviceSpec):
        raise _missing_link("inter_link", device.name)
    return _links_of(device.name, num_nodes=file.num_nodes, devices_per_node=file.devices_per_node)[1]


def _link_of(entry: SharedLink | LinkSpec, *, devices_per_node: int, ports_unsaid: int) -> Link:
    link = entry.to_link() if isinstance(entry, LinkSpec) else find_link(entry.name)
    return link.shared(num_ports=entry.ports_per_node or ports_unsaid, num_devices=devices_per_node)


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
