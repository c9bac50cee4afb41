r"""Seconds of collectives, from measurements where the profile has them and from the cluster's links where not.

With $n$ ranks, tensor bytes $b$ (the whole tensor that is gathered or reduced), $k$ ranks of the group in each node,
rate $w$ and latency $\ell$ of a link, a ring takes

$$t = c\Big((n - N)\,\ell_\text{intra} + (N-1)\,\ell_\text{inter}\Big) + \frac{n-1}{n}\,\frac{c\,b}{w}, \qquad
w = \min(w_\text{intra}, k\,w_\text{inter}) \text{ across nodes, } w_\text{intra} \text{ inside one}$$

Rates and latencies are those of the cluster times what is reached of them (`LinkEfficiency`).

| symbol | name                 | unit | meaning                                                        |
|--------|----------------------|------|----------------------------------------------------------------|
| $c$    | passes               | –    | 2 for all-reduce, 1 for all-gather and reduce-scatter           |
| $N$    |                      | –    | nodes that the group spans                                      |
| $\ell$ | `Link.latency_s`     | s    | of one hop                                                      |
| $w$    | `Link.bytes_per_s`   | B/s  | per device and direction; a node has one outward link per device |

All groups of a stage communicate at once and share what leads out of a node: the ports of a node are divided among its
devices (`Link.shared`), and a group gets the shares of its $k$ ranks there, no more, whoever else is silent.

A measured collective takes latency + bytes / rate as fitted. An all-to-all moves (n−1)/n of one rank's tensor $b$, and
no ring helps it: what is for ranks of other nodes leaves each device by its own outward link,

$$t = (k - 1)\,\ell_\text{intra} + (N-1)\,\ell_\text{inter}
+ \max\Big(\frac{k-1}{n}\,\frac{b}{w_\text{intra}}, \frac{n-k}{n}\,\frac{b}{w_\text{inter}}\Big)$$

Source: Thakur et al. 2005 (ring algorithms). Not modelled: congestion in the switches between nodes, trees.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

from steelyard.cost.efficiency import IDEAL_LINKS, LinkEfficiency
from steelyard.errors import InvalidProfileError
from steelyard.hardware import Cluster, Link
from steelyard.profiles.profile import CollectiveKind, Profile

_PASSES: dict[CollectiveKind, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


class Group(NamedTuple):
    """Process groups by their shape: ``size`` ranks, each ``stride`` after the last, in stages of ``span`` ranks."""

    size: int
    stride: int
    span: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The links that a group's ring goes over: rate per rank, latency of the whole round."""

    bytes_per_s: float
    latency_s: float


def collective_s(
    kind: CollectiveKind,
    tensor_bytes: float,
    group: Group,
    cluster: Cluster,
    profile: Profile,
    reached: LinkEfficiency = IDEAL_LINKS,
) -> float:
    """Seconds of one collective; 0 for a group of one rank.

    Raises `InvalidProfileError` for a kind that has no cost here (`send_recv_s` prices transfers), and where the
    cluster's rates are unknown and the profile did not measure this collective.
    """
    if group.size == 1 or tensor_bytes == 0:
        return 0.0
    return collective(kind, group, cluster, profile, reached)(tensor_bytes)


def collective(
    kind: CollectiveKind, group: Group, cluster: Cluster, profile: Profile, reached: LinkEfficiency = IDEAL_LINKS
) -> Callable[[float], float]:
    """Seconds of one collective over two ranks or more, by the bytes of its tensor; raises as `collective_s`."""
    if kind not in _PASSES:
        raise InvalidProfileError(
            field="collectives",
            found=kind,
            expected="one of " + ", ".join(_PASSES),
            hint="this collective has no cost yet",
        )
    measured = profile.collective(kind, group.size, strided=group.stride > 1)
    if measured is not None:
        return measured.time_s
    if cluster.intra_link.needs_profile:
        raise InvalidProfileError(
            field="collectives",
            found=f"no {kind} over {group.size} ranks",
            expected=f"a measurement: the rates of {cluster.name} are not in the catalogue",
            hint="run steelyard profile with as many processes as the plan has",
        )
    if kind == "all_to_all":
        return partial(_exchange_s, group=group, cluster=cluster, reached=reached)
    path, passes, fraction = _path(group, cluster, reached), _PASSES[kind], (group.size - 1) / group.size
    return lambda tensor_bytes: passes * (path.latency_s + fraction * tensor_bytes / path.bytes_per_s)


def _exchange_s(tensor_bytes: float, group: Group, cluster: Cluster, reached: LinkEfficiency) -> float:
    """Seconds of an all-to-all that was not measured; inside and between nodes at the same time."""
    inside = _reached(cluster.intra_link, reached, inside=True)
    near = _members_per_node(group, cluster)
    seconds = (near - 1) / group.size * tensor_bytes / inside.bytes_per_s
    latency_s = (near - 1) * inside.latency_s
    if near < group.size and cluster.inter_link is not None:
        outside = _reached(cluster.inter_link, reached, inside=cluster.inter_link is cluster.intra_link)
        seconds = max(seconds, (group.size - near) / group.size * tensor_bytes / outside.bytes_per_s)
        latency_s += (-(-group.size // near) - 1) * outside.latency_s
    return latency_s + seconds


def send_recv_s(
    num_bytes: float, *, distance: int, cluster: Cluster, profile: Profile, reached: LinkEfficiency = IDEAL_LINKS
) -> float:
    """Seconds to hand ``num_bytes`` to the rank ``distance`` further on, the same on every rank at once."""
    measured = profile.collective("send_recv", 2, strided=distance > 1)
    if measured is not None:
        return measured.time_s(num_bytes)
    link = _link_at(distance, cluster)
    if link.needs_profile:
        raise InvalidProfileError(
            field="collectives",
            found="no send_recv",
            expected=f"a measurement: the rates of {cluster.name} are not in the catalogue",
            hint="run steelyard profile",
        )
    path = _reached(link, reached, inside=link is cluster.intra_link)
    return path.latency_s + num_bytes / path.bytes_per_s


def _link_at(distance: int, cluster: Cluster) -> Link:
    crosses = cluster.num_nodes > 1 and (
        distance >= cluster.devices_per_node or cluster.devices_per_node % (2 * distance) != 0
    )
    return cluster.inter_link if crosses and cluster.inter_link is not None else cluster.intra_link


def _reached(link: Link, reached: LinkEfficiency, *, inside: bool) -> Path:
    rate, latency = (reached.intra, reached.intra_latency) if inside else (reached.inter, reached.inter_latency)
    return Path(bytes_per_s=rate * link.bytes_per_s, latency_s=latency * link.latency_s)


@lru_cache(maxsize=16384)
def _path(group: Group, cluster: Cluster, reached: LinkEfficiency) -> Path:
    intra = _reached(cluster.intra_link, reached, inside=True)
    per_node = _members_per_node(group, cluster)
    if per_node >= group.size or cluster.inter_link is None:
        return replace(intra, latency_s=(group.size - 1) * intra.latency_s)
    inter = _reached(cluster.inter_link, reached, inside=cluster.inter_link is cluster.intra_link)
    rate = per_node * inter.bytes_per_s
    if per_node > 1:
        rate = min(rate, intra.bytes_per_s)
    borders = -(-group.size // per_node) - 1
    inside = group.size - 1 - borders
    return Path(bytes_per_s=rate, latency_s=inside * intra.latency_s + borders * inter.latency_s)


@lru_cache(maxsize=16384)
def _members_per_node(group: Group, cluster: Cluster) -> int:
    """Fewest ranks of any such group that share a node with another one of it (at least 1)."""
    size = cluster.devices_per_node
    if cluster.num_nodes == 1:
        return group.size
    extent = (group.size - 1) * group.stride + 1
    fewest = group.size
    for offset in {start % size for start in range(0, cluster.num_devices, max(1, group.span))}:
        for lane in range(min(group.stride, size)):
            nodes = [(offset + lane + index * group.stride) // size for index in range(group.size)]
            fewest = min(fewest, nodes.count(nodes[0]))
        if extent > size:
            fewest = min(fewest, max(1, size // group.stride))
    return max(1, fewest)
