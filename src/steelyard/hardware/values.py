r"""Devices, links and clusters as values: rates in FLOP/s and bytes/s, memory in bytes, latency in seconds.

Ranks are node-major: with $D$ devices per node, rank $r$ is device $r \bmod D$ of node $\lfloor r / D \rfloor$.

Not modelled: more than two levels of links in a group, different links between its nodes, and oversubscribed switches.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, get_args

from steelyard.errors import InvalidClusterError
from steelyard.limits import MOST_BYTES, MOST_DEVICES, MOST_PER_S
from steelyard.precision import LayerPrecision
from steelyard.units import GB, format_bytes

_PROFILE_HINT = (
    "run `steelyard profile MODEL --seq-len TOKENS --processes N -o profile.json` here and pass --profile profile.json"
)

DeviceType = Literal["gpu", "cpu"]
"""A gpu has asynchronous streams, its own context and a caching allocator. A cpu is a process of the host and has none
of these."""
Vendor = Literal["nvidia", "amd"]


class Backend(StrEnum):
    """Library that runs collectives, by its name in torch."""

    NCCL = "nccl"
    GLOO = "gloo"

    @property
    def has_all_to_all(self) -> bool:
        """Whether it has an all-to-all; without one, DTensor all-gathers and slices."""
        return self is not Backend.GLOO

    @property
    def copies_what_it_scatters(self) -> bool:
        """Whether a reduce-scatter reduces a full copy of its tensor."""
        return self is Backend.GLOO


USUAL_BACKENDS: Mapping[DeviceType, Backend] = {"gpu": Backend.NCCL, "cpu": Backend.GLOO}
"""Torch's default backend for a device type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator (or a CPU process) as the framework sees it.

    ``type`` and ``backend``: device type and collective library, independent of which rates are known.
    ``vendor``: vendor of a gpu; None for a cpu, or if unknown.
    ``memory_bytes``: total memory as torch reports it, which is below the data sheet; None if unknown.
    ``peak_flop_per_s``: dense matmul peak per dtype name (``bf16``, ``fp16``, ``fp32``; also ``tf32`` and ``fp8`` if
    the device has them). ``fp32`` is the true fp32 rate, which torch uses by default; ``tf32`` must be enabled.
    Empty for a device that only a profile can describe. ``memory_bytes_per_s``: peak bandwidth of the device memory, or
    None. ``host_bytes_per_s``: bandwidth of copies from or to pinned host memory; None if unknown, and for a cpu, whose
    memory is the host's. ``cache_bytes``: size of the last cache before the device memory; None if unknown, where all
    bytes count as the memory's.
    ``source``: address of the data sheet. Raises `InvalidClusterError` if a number is not positive and finite, or if
    the backend does not match the device type.
    """

    name: str
    type: DeviceType
    backend: Backend
    memory_bytes: int | None
    peak_flop_per_s: Mapping[str, float] = field(hash=False)
    memory_bytes_per_s: float | None
    source: str
    vendor: Vendor | None = None
    host_bytes_per_s: float | None = None
    cache_bytes: float | None = None
    notes: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_flop_per_s", dict(self.peak_flop_per_s))
        if self.backend is Backend.NCCL and not self.is_gpu:
            raise InvalidClusterError(
                field=f"device {self.name!r}: backend",
                found=f"{self.backend} for a {self.type}",
                expected="a backend for CPU processes, such as gloo",
                hint="write backend: gloo, or kind: gpu",
            )
        for dtype, rate in self.peak_flop_per_s.items():
            _require_positive(f"device {self.name!r}: peak_flop_per_s[{dtype!r}]", rate)
        if self.memory_bytes is not None:
            _require_positive(f"device {self.name!r}: memory_bytes", self.memory_bytes, MOST_BYTES)
        for field_name in ("memory_bytes_per_s", "host_bytes_per_s", "cache_bytes"):
            if (rate := getattr(self, field_name)) is not None:
                _require_positive(f"device {self.name!r}: {field_name}", rate)

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a gpu, with its own streams, context and allocator."""
        return self.type == "gpu"

    @property
    def needs_profile(self) -> bool:
        """Whether no rates are known, in which case the device needs a measured profile."""
        return not self.peak_flop_per_s

    def peak(self, dtype: str, instead: Sequence[str] = get_args(LayerPrecision)) -> float:
        """Dense matmul peak for a dtype name, in FLOP/s.

        Raises `InvalidClusterError` if it is unknown, and suggests the fastest precision of ``instead`` that is known.
        """
        if dtype in self.peak_flop_per_s:
            return self.peak_flop_per_s[dtype]
        if self.needs_profile:
            raise InvalidClusterError(
                field="device",
                found=f"{self.name!r}, whose speed is not in the catalogue",
                expected="a device with a known peak, or a profile measured on it",
                hint=_PROFILE_HINT,
            )
        known = [each for each in instead if each in self.peak_flop_per_s]
        raise InvalidClusterError(
            field="--precision",
            found=f"{dtype!r} on device {self.name!r}, which has no matrix units for it or no known rate",
            expected="one of " + ", ".join(known or sorted(self.peak_flop_per_s)),
            hint=f"plan with --precision {max(known, key=self.peak_flop_per_s.__getitem__)}"
            if known
            else f"measure {dtype} with `steelyard profile`",
        )

    def known_memory_bytes(self) -> int:
        """Usable memory in bytes. Raises `InvalidClusterError` if neither catalogue nor cluster file states it."""
        if self.memory_bytes is None:
            raise InvalidClusterError(
                field="--memory",
                found=f"device {self.name!r}, whose memory is not stated",
                expected="the memory that one device (for cpu: one process) may use",
                hint="pass for example --memory 4GiB, or write memory_GiB in the cluster file"
                + ("; its speed is not known either: also pass --profile" if self.needs_profile else ""),
            )
        return self.memory_bytes

    def known_memory_bytes_per_s(self) -> float:
        """Peak bandwidth of the device memory in bytes/s. Raises `InvalidClusterError` if it is unknown."""
        if self.memory_bytes_per_s is None:
            raise InvalidClusterError(
                field="device",
                found=f"{self.name!r}, whose memory bandwidth is not stated",
                expected="a device with a known memory bandwidth, or a profile measured on it",
                hint=_PROFILE_HINT,
            )
        return self.memory_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """Measured behaviour of collectives on a link beyond rate and latency; see `steelyard.cost.communication`.

    ``rate``: fraction of the rate that is reached, relative to other links; ``start_s``: start-up time of every
    collective; ``step_s``: time of one ring step of small messages, None for the link's latency; ``climb_s``: constant
    of how slowly the rate rises with the message size; ``few_ranks``: divided by the squared number of ranks, the
    fraction of the rate that is lost; ``crowding``: exponent of half the number of ranks by which the rate falls;
    ``through_host``: whether messages pass through host memory, where all devices of a node crowd each other, whichever
    groups they form; ``all_reduce_gain``: rate of an all-reduce relative to an all-gather (reduction
    in the switch); ``tree_rate``: rate of an all-reduce over a tree of nodes relative to a ring; ``has_low_latency``:
    whether a network also has NCCL's low-latency protocol (LL128).
    """

    rate: float = 1.0
    start_s: float = 0.0
    step_s: float | None = None
    climb_s: float = 0.0
    few_ranks: float = 0.0
    crowding: float = 0.0
    through_host: bool = False
    all_reduce_gain: float = 1.0
    tree_rate: float = 0.6
    has_low_latency: bool = True

    def left(self, num_ranks: int) -> float:
        """Return the fraction of its share of the rate that a group of ``num_ranks`` ranks of a node reaches."""
        crowded = 1.0 if self.through_host else (2 / num_ranks) ** self.crowding
        return float(self.rate * (1 - self.few_ranks / num_ranks**2) * crowded)

    def host_share(self, num_devices: int) -> float:
        """Return the fraction of the rate that the host leaves to each of ``num_devices`` devices of a node."""
        return float((2 / max(num_devices, 2)) ** self.crowding) if self.through_host else 1.0


UNMEASURED = MeasuredLink()
"""Values for a link of which only rate and latency are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection between devices.

    ``bytes_per_s``: peak per device and per direction (a data sheet's "900 GB/s bidirectional" is 450e9 here).
    ``latency_s``: time of one step of a ring collective that carries no bytes. ``needs_profile``: whether both numbers
    are nominal and must be measured (processes of one host). Raises `InvalidClusterError` if the rate is not positive
    or the latency is negative.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    source: str
    notes: str = ""
    needs_profile: bool = False
    measured: MeasuredLink = UNMEASURED

    def __post_init__(self) -> None:
        _require_positive(f"link {self.name!r}: bytes_per_s", self.bytes_per_s)
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise InvalidClusterError(
                field=f"link {self.name!r}: latency_s", found=str(self.latency_s), expected="seconds, zero or more"
            )

    def rate_text(self, num_devices: int = 1) -> str:
        """Format the rate, and the rate per device if all devices of a node share it: ``31.5 GB/s, 1.69 among 8``."""
        rate = f"{self.bytes_per_s / GB:,.3g} GB/s"
        if not self.measured.crowding or num_devices < 3:
            return rate
        left = self.measured.left(num_devices) * self.measured.host_share(num_devices)
        return f"{rate}, {left * self.bytes_per_s / GB:.3g} among {num_devices}"

    def shared(self, *, num_ports: int, num_devices: int) -> "Link":
        """Return the share of this link for one of ``num_devices`` devices of a node with ``num_ports`` such ports."""
        _require_positive("num_ports", num_ports)
        _require_positive("num_devices", num_devices)
        if num_ports == num_devices:
            return self
        name = f"{self.name} ({num_ports} for {num_devices} devices)"
        return replace(self, name=name, bytes_per_s=self.bytes_per_s * num_ports / num_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Identical nodes of identical devices: ``intra_link`` joins the devices of a node, ``inter_link`` the nodes.

    ``inter_link`` may be None only with one node; ``outer_link`` joins a device to those of other groups, None if there
    are none. ``host_memory_bytes`` is the host memory that the processes of a node may use; None if unknown. Raises
    `InvalidClusterError` if a count is below one or the inter-node link is missing.
    """

    name: str
    num_nodes: int
    devices_per_node: int
    device: Device
    intra_link: Link
    inter_link: Link | None
    outer_link: Link | None = None
    host_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, count in (("num_nodes", self.num_nodes), ("devices_per_node", self.devices_per_node)):
            _require_positive(name, count, MOST_DEVICES)
        if self.host_memory_bytes is not None:
            _require_positive("host_memory_bytes", self.host_memory_bytes, MOST_BYTES)
        if self.num_nodes > 1 and self.inter_link is None:
            raise InvalidClusterError(
                field="inter_link",
                found=f"none for {self.num_nodes} nodes",
                expected="the link between the nodes",
                hint="name one in the cluster file, for example inter_link: infiniband-hdr",
            )

    @property
    def num_devices(self) -> int:
        """Number of devices in all nodes."""
        return self.num_nodes * self.devices_per_node

    def __str__(self) -> str:
        memory = "memory not stated" if self.device.memory_bytes is None else format_bytes(self.device.memory_bytes)
        links = self.intra_link.name if self.inter_link is None else f"{self.intra_link.name}, {self.inter_link.name}"
        return f"{self.num_nodes} × {self.devices_per_node} × {self.device.name} ({memory}; {links})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """One device group, or several groups of different devices, each with a unique name.

    Ranks are node-major and follow the order of the groups. Raises `InvalidClusterError` if there are more than
    `MOST_DEVICES` devices, if two groups have the same name, if a name contains a plus, if groups have GPUs of
    different vendors, or if a link between groups is missing.
    """

    groups: tuple[NodeGroup, ...]

    def __post_init__(self) -> None:
        if self.num_devices > MOST_DEVICES:
            raise InvalidClusterError(
                field="cluster",
                found=f"{self.num_devices} devices",
                expected=f"at most {MOST_DEVICES}",
                hint="give fewer nodes or devices per node",
            )
        names = [each.name for each in self.groups]
        if len(names) == 1:
            object.__setattr__(self, "groups", (replace(self.group, outer_link=None),))
            return
        for name in names:
            if names.count(name) > 1 or "+" in name:
                raise InvalidClusterError(
                    field="pools",
                    found=f"{name!r} twice" if names.count(name) > 1 else repr(name),
                    expected="a unique name for each device group, without a plus",
                    hint="add name: to each of them",
                )
        vendors = {each.device.vendor: each.name for each in self.groups if each.device.vendor}
        if len(vendors) > 1:
            raise InvalidClusterError(
                field="cluster",
                found=" and ".join(f"{name} of {vendor.upper()}" for vendor, name in vendors.items()),
                expected="GPUs of one vendor, because NCCL and RCCL cannot share a process group",
                hint=f"plan for each vendor separately, for example --cluster {next(iter(vendors.values()))}",
            )
        if None in self.links:
            raise InvalidClusterError(
                field="link",
                found=f"{len(names) - self.links.count(None)} for {len(names)} device groups",
                expected="the link between the device groups",
                hint="name one in the cluster file, for example link: infiniband-hdr",
            )

    @property
    def name(self) -> str:
        """Group names, joined by a plus."""
        return "+".join(each.name for each in self.groups)

    @property
    def num_devices(self) -> int:
        """Number of devices of all groups, which is the number of ranks."""
        return sum(each.num_devices for each in self.groups)

    @property
    def pools(self) -> "tuple[Cluster, ...]":
        """Clusters of one group each."""
        return tuple(Cluster(groups=(each,)) for each in self.groups)

    @property
    def links(self) -> tuple[Link | None, ...]:
        """Link of each group to the other groups; None if there are no others."""
        return tuple(each.outer_link for each in self.groups)

    @property
    def is_mixed(self) -> bool:
        """Whether there are several groups."""
        return len(self.groups) > 1

    @property
    def group(self) -> NodeGroup:
        """The device group. This and the properties below require a cluster of one group."""
        (only,) = self.groups
        return only

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.group.num_nodes

    @property
    def devices_per_node(self) -> int:
        """Number of devices per node."""
        return self.group.devices_per_node

    @property
    def device(self) -> Device:
        """Device of the group."""
        return self.group.device

    @property
    def intra_link(self) -> Link:
        """Link between the devices of a node."""
        return self.group.intra_link

    @property
    def inter_link(self) -> Link | None:
        """Link between the nodes."""
        return self.group.inter_link

    @property
    def host_memory_bytes(self) -> int | None:
        """Host memory in bytes that the processes of a node may use; None if unknown."""
        return self.group.host_memory_bytes

    def on(self, **changes: Any) -> "Cluster":
        """Return the cluster with these fields of its one group changed."""
        return Cluster(groups=(replace(self.group, **changes),))

    def with_memory(self, memory_bytes: int) -> "Cluster":
        """Return the cluster with ``memory_bytes`` per device, as ``--memory``."""
        groups = (replace(each, device=replace(each.device, memory_bytes=memory_bytes)) for each in self.groups)
        return Cluster(groups=tuple(groups))

    def __str__(self) -> str:
        links = ", ".join(dict.fromkeys(link.name for link in self.links if link is not None))
        return " + ".join(map(str, self.groups)) + (f"; {links} between device groups" if links else "")


def joined_pools(pools: Sequence[Cluster], links: Sequence[Link | None]) -> Cluster:
    """Join clusters of one group each into one cluster, with the link of each to the others."""
    groups = (replace(pool.group, outer_link=link) for pool, link in zip(pools, links, strict=True))
    return Cluster(groups=tuple(groups))


def _require_positive(name: str, value: float, most: float = MOST_PER_S) -> None:
    if isinstance(value, bool) or not 0 < value <= most:
        raise InvalidClusterError(
            field=name,
            found=f"{value!r:.40}",
            expected=f"a finite number above zero, at most {most:g}",
            hint=f"correct {name}",
        )
