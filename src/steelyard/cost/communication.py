r"""Seconds of collectives, from the profile if it has measured them, else from the cluster's links.

With $n$ ranks, tensor bytes $b$ (the whole tensor that is gathered or reduced), $k$ ranks of the group in each node,
rate $w$ and latency $\ell$ of a link, a ring inside a node takes

$$t = \sigma + c\,(n - 1)\,\lambda + x + \sqrt{\tau x}, \qquad x = \frac{n-1}{n}\,\frac{c\,b}{w\,g}
\Big/ \Big(1 - \frac{f}{n^2}\Big)\Big(\frac{2}{n}\Big)^{p}$$

and one across nodes the shorter of two protocols, that of large messages and one of less latency and rate,

$$t = \min\big(L + x + \sqrt{\tau x},\; 0.48\,L + y + \sqrt{\tau y}\big), \qquad y = x / 0.765, \qquad
L = c\big((n - N)\,\ell_\text{intra} + (N-1)\,\ell_\text{inter}\big), \quad
w = \min(w_\text{intra}, k\,w_\text{inter})$$

An all-reduce across nodes may go along a tree instead, at $r$ of the rate, with
$L = 2(k-1)\,\ell_\text{intra} + 2 \log_2(N)\,\ell_\text{inter}$ and the same two protocols.

Rates and latencies are those of the cluster times the reached fractions (`LinkEfficiency`); measured values of a link
are used unchanged.

| symbol | name                 | unit | meaning                                                        |
|--------|----------------------|------|----------------------------------------------------------------|
| $c$    | passes               | –    | 2 for all-reduce, 1 for all-gather and reduce-scatter           |
| $N$    |                      | –    | nodes that the group spans                                      |
| $\ell$ | `Link.latency_s`     | s    | of one hop of a large message                                   |
| $w$    | `Link.bytes_per_s`   | B/s  | per device and direction; a node has one outward link per device |
| $\sigma, \lambda, \tau$ | `MeasuredLink` | s | start, step of a small message, climb                      |
| $f, p, g, r$ | `MeasuredLink` | –  | few ranks, crowding, gain of an all-reduce, rate of a tree      |

All groups of a stage communicate at once and share the ports of a node, which are divided among its devices
(`Link.shared`): a group gets the shares of its $k$ ranks there and no more, even if other groups are idle. If messages
pass through host memory, all $D$ devices of a node crowd it likewise: $(2/D)^p$ takes the place of $(2/n)^p$, also for
rings across nodes and for transfers (`MeasuredLink.host_share`).

A measured collective takes latency + bytes / rate as fitted. An all-to-all moves (n−1)/n of one rank's tensor $b$
without a ring: each device sends the data for other nodes over its own outward link. Inside a node its latency is
$\sigma + \log_2(n)\,\lambda$, and across nodes

$$t = (k - 1)\,\ell_\text{intra} + (N-1)\,\ell_\text{inter}
+ \max\Big(\frac{k-1}{n}\,\frac{b}{w_\text{intra}}, \frac{n-k}{n}\,\frac{b}{w_\text{inter}}\Big)$$

Source: Thakur et al. 2005 (ring algorithms); the protocols' latency and rate are those that NCCL 2.27 assumes of LL128
and Simple (src/graph/tuning.cc); `benchmarks/collectives.py` says how well it holds. Not modelled: congestion in the
switches between nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import log2, sqrt
from typing import NamedTuple

from steelyard.cost.efficiency import IDEAL_LINKS, LinkEfficiency
from steelyard.errors import InvalidProfileError
from steelyard.hardware import Cluster, Link
from steelyard.hardware.values import UNMEASURED
from steelyard.profiles.profile import Collective, Profile

LOW_LATENCY, LOW_RATE = 0.48, 0.765
"""Latency and rate of NCCL's LL128 protocol relative to Simple."""
_PASSES: dict[Collective, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


class Group(NamedTuple):
    """Process groups by their shape: ``size`` ranks, each ``stride`` after the last, in stages of ``span`` ranks."""

    size: int
    stride: int
    span: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Links of a group's ring: rate per rank, latency of the whole ring, and latency of a tree of nodes."""

    bytes_per_s: float
    latency_s: float
    start_s: float = 0.0
    num_nodes: int = 0
    """Number of nodes of the group; 0 inside one node."""
    tree_latency_s: float = 0.0


def collective_time(
    collective: Collective, group: Group, cluster: Cluster, profile: Profile, reached: LinkEfficiency = IDEAL_LINKS
) -> Callable[[float], float]:
    """Return a function from tensor bytes to seconds of one collective over two ranks or more.

    Raises `InvalidProfileError` if the collective has no cost here (`send_recv_s` prices transfers), or if the
    cluster's rates are unknown and the profile did not measure it.
    """
    if collective not in _PASSES:
        raise InvalidProfileError(
            field="collectives",
            found=collective,
            expected="one of " + ", ".join(_PASSES),
            hint="this collective has no cost model",
        )
    measured = profile.collective(collective, group.size, strided=group.stride > 1)
    if measured is not None:
        return measured.time_s
    _check_rate(cluster.intra_link, f"no {collective} over {group.size} ranks")
    if collective == "all_to_all":
        return partial(_exchange_s, group=group, cluster=cluster, reached=reached)
    path, passes, fraction = _path(group, cluster, reached), _PASSES[collective], (group.size - 1) / group.size
    traffic = passes * fraction
    if not path.num_nodes:
        link = cluster.intra_link.measured
        s_per_byte = traffic / path.bytes_per_s / (link.all_reduce_gain if collective == "all_reduce" else 1.0)
        latency_s, climb_s = path.start_s + passes * path.latency_s, link.climb_s
        return partial(_climbing_s, latency_s=latency_s, s_per_byte=s_per_byte, climb_s=climb_s)
    s_per_byte = traffic / path.bytes_per_s
    lines: _Lines = ((passes * path.latency_s, s_per_byte),)
    if collective == "all_reduce":
        lines += ((path.tree_latency_s, s_per_byte / cluster.intra_link.measured.tree_rate),)
    network = cluster.inter_link.measured if cluster.inter_link is not None else UNMEASURED
    if network.has_low_latency:
        lines += tuple((LOW_LATENCY * latency_s, each_s / LOW_RATE) for latency_s, each_s in lines)
    return partial(_least_s, lines=lines, climb_s=network.climb_s)


_Lines = tuple[tuple[float, float], ...]
"""Latency in seconds, and seconds per byte, of each alternative."""


def _least_s(tensor_bytes: float, lines: _Lines, climb_s: float) -> float:
    return min(_climbing_s(tensor_bytes, latency_s, s_per_byte, climb_s) for latency_s, s_per_byte in lines)


def _climbing_s(tensor_bytes: float, latency_s: float, s_per_byte: float, climb_s: float) -> float:
    carried_s = tensor_bytes * s_per_byte
    return latency_s + carried_s + sqrt(climb_s * carried_s)


def _exchange_s(tensor_bytes: float, group: Group, cluster: Cluster, reached: LinkEfficiency) -> float:
    """Seconds of an all-to-all that was not measured; inside and between nodes at the same time."""
    near = _members_per_node(group, cluster)
    if near == group.size or cluster.inter_link is None:
        path = _path(group, cluster, reached)
        latency_s = path.start_s + log2(group.size) * path.latency_s / (group.size - 1)
        climb_s = cluster.intra_link.measured.climb_s
        return _climbing_s(tensor_bytes, latency_s, (group.size - 1) / group.size / path.bytes_per_s, climb_s)
    num_devices = cluster.devices_per_node
    inside = _reached(cluster.intra_link, reached, num_devices, inside=True)
    seconds = (near - 1) / group.size * tensor_bytes / inside.bytes_per_s
    latency_s = (near - 1) * inside.latency_s
    outside = _reached(cluster.inter_link, reached, num_devices, inside=cluster.inter_link is cluster.intra_link)
    seconds = max(seconds, (group.size - near) / group.size * tensor_bytes / outside.bytes_per_s)
    latency_s += (-(-group.size // near) - 1) * outside.latency_s
    return latency_s + seconds


def send_recv_s(
    num_bytes: float, *, distance: int, cluster: Cluster, profile: Profile, reached: LinkEfficiency = IDEAL_LINKS
) -> float:
    """Seconds to send ``num_bytes`` to the rank at ``distance``, on every rank at the same time."""
    measured = profile.collective("send_recv", 2, strided=distance > 1)
    if measured is not None:
        return measured.time_s(num_bytes)
    size = cluster.devices_per_node
    crosses = cluster.num_nodes > 1 and (distance >= size or size % (2 * distance) != 0)
    link = cluster.inter_link if crosses and cluster.inter_link is not None else cluster.intra_link
    _check_rate(link, "no send_recv")
    path = _reached(link, reached, size, inside=link is cluster.intra_link)
    return path.latency_s + num_bytes / path.bytes_per_s


def crossing_s(
    num_bytes: float, sides: Sequence[tuple[int, Link, int, LinkEfficiency]], profiles: Sequence[Profile]
) -> float:
    """Seconds to send ``num_bytes`` from one group of ranks to another in even parts, at the rate of the slower group.

    ``sides`` has for both groups the number of ranks, the link of a rank to the other group, the number of devices per
    node and the efficiency of the link. Raises `InvalidProfileError` if rates are unknown and neither profile measured
    a transfer.
    """
    ranks = min(size for size, _, _, _ in sides)
    measured = [found for each in profiles if (found := each.collective("send_recv", 2, strided=True)) is not None]
    if measured:
        return max(each.time_s(num_bytes / ranks) for each in measured)
    for _, link, _, _ in sides:
        _check_rate(link, "no send_recv")
    paths = [(size, _reached(link, reached, count, inside=False)) for size, link, count, reached in sides]
    rate = min(size * path.bytes_per_s for size, path in paths)
    return max(path.latency_s for _, path in paths) + num_bytes / rate


def _check_rate(link: Link, found: str) -> None:
    """Raise `InvalidProfileError` if the rate of a link without measurements is unknown."""
    if link.needs_profile:
        raise InvalidProfileError(
            field="collectives",
            found=found,
            expected=f"a measurement, because the rate of {link.name} is not in the catalogue",
            hint="run steelyard profile with the plan's number of processes",
        )


def _reached(link: Link, reached: LinkEfficiency, num_devices: int, *, inside: bool) -> Path:
    rate, latency = (reached.intra, reached.intra_latency) if inside else (reached.inter, reached.inter_latency)
    return Path(
        bytes_per_s=rate * link.bytes_per_s * link.measured.host_share(num_devices), latency_s=latency * link.latency_s
    )


@lru_cache(maxsize=16384)
def _path(group: Group, cluster: Cluster, reached: LinkEfficiency) -> Path:
    num_devices = cluster.devices_per_node
    intra = _reached(cluster.intra_link, reached, num_devices, inside=True)
    per_node = _members_per_node(group, cluster)
    if per_node >= group.size or cluster.inter_link is None:
        measured = cluster.intra_link.measured
        step_s = intra.latency_s if measured.step_s is None else measured.step_s
        return Path(
            bytes_per_s=intra.bytes_per_s * measured.left(group.size),
            latency_s=(group.size - 1) * step_s,
            start_s=measured.start_s,
        )
    inter = _reached(cluster.inter_link, reached, num_devices, inside=cluster.inter_link is cluster.intra_link)
    rate = per_node * inter.bytes_per_s
    if per_node > 1:
        rate = min(rate, intra.bytes_per_s)
    borders = -(-group.size // per_node) - 1
    inside = group.size - 1 - borders
    return Path(
        bytes_per_s=rate,
        latency_s=inside * intra.latency_s + borders * inter.latency_s,
        num_nodes=borders + 1,
        tree_latency_s=2 * ((per_node - 1) * intra.latency_s + log2(borders + 1) * inter.latency_s),
    )


def num_places(group: Group, cluster: Cluster) -> int:
    """Number of nodes that a group spans, or its number of ranks if it lies inside one node."""
    nodes = -(-group.size // _members_per_node(group, cluster))
    return group.size if nodes == 1 else nodes


@lru_cache(maxsize=16384)
def _members_per_node(group: Group, cluster: Cluster) -> int:
    """Minimum number of ranks per node over all groups of this shape (at least 1)."""
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
