"""The files of this package, checked while they are read: the catalogue of devices and links, and a user's cluster.

File keys carry their unit (``bandwidth_GBps``, ``latency_us``, ``memory_GiB``, ``peak_TFLOPs``) and are converted
here, once, to bytes, seconds and FLOP. GB is 10^9 bytes, GiB is 2^30 bytes, a TFLOP is 10^12 FLOP.

The catalogue is ``devices.yaml`` and ``links.yaml`` beside this file, every row with its source. A name that is not
there is an error that lists the nearest ones, never a default.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    FiniteFloat,
    StrictInt,
    Tag,
    ValidationError,
    model_validator,
)

from steelyard.errors import InvalidClusterError, nearest
from steelyard.files import MOST_YAML_BYTES, read_packaged_yaml
from steelyard.files import read_text as read_file
from steelyard.hardware.values import USUAL_BACKENDS, Backend, Device, DeviceType, Link, MeasuredLink, Vendor
from steelyard.limits import MOST_BYTES, MOST_DEVICES
from steelyard.units import GB, GIB, TERA

Positive = Annotated[FiniteFloat, Field(ge=1e-6, le=1e9)]
Count = Annotated[StrictInt, Field(gt=0, le=MOST_DEVICES)]
HostMemory = Annotated[Positive | None, Field(le=MOST_BYTES / GIB, exclude_if=lambda size: size is None)]
DtypeName = Literal["bf16", "fp16", "fp32", "tf32", "fp8", "mxfp8", "nvfp4"]
FileModelT = TypeVar("FileModelT", bound="FileModel")
MICRO = 1e-6
_MEASURED_TIMES = {"start_us": "start_s", "step_us": "step_s", "climb_us": "climb_s"}
"""What of a link is measured in time, in microseconds in a file, by what it is called in seconds."""
_TAGS = ("by name", "by ports", "in full", "one pool")


def _way_of_writing(entry: Any) -> str:
    if isinstance(entry, str):
        return "by name"
    if isinstance(entry, dict):
        return "by ports" if "ports_per_node" in entry and "bandwidth_GBps" not in entry else "in full"
    return "by ports" if isinstance(entry, SharedLink) else "in full"


class FileModel(BaseModel):
    """Frozen, and an unknown key is an error that names the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_keys(cls, data: Any) -> Any:
        unknown = [key for key in data if key not in cls.model_fields] if isinstance(data, dict) else []
        if unknown:
            raise InvalidClusterError(
                field=str(unknown[0]),
                found="an unknown key",
                expected="one of " + ", ".join(cls.model_fields),
                hint=nearest(str(unknown[0]), cls.model_fields),
            )
        return data


class MeasuredSpec(FileModel):
    """What collectives over a link were measured to do; see `MeasuredLink`."""

    rate: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1.0
    start_us: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    step_us: Annotated[FiniteFloat, Field(ge=0)] | None = None
    climb_us: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    few_ranks: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.0
    crowding: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    all_reduce_gain: Annotated[FiniteFloat, Field(ge=1)] = 1.0
    tree_rate: Annotated[FiniteFloat, Field(gt=0, le=1)] = 0.6
    has_low_latency: bool = True

    def to_measured(self) -> MeasuredLink:
        """The same in seconds."""
        values = dict(self)
        times = {name: values.pop(key) for key, name in _MEASURED_TIMES.items()}
        return MeasuredLink(**values, **{name: each and each * MICRO for name, each in times.items()})

    @classmethod
    def of(cls, measured: MeasuredLink) -> "MeasuredSpec":
        """The same in microseconds."""
        values = asdict(measured)
        times = {key: values.pop(name) for key, name in _MEASURED_TIMES.items()}
        return cls(**values, **{key: each and each / MICRO for key, each in times.items()})


class LinkSpec(FileModel):
    """A link described in full: peak GB/s per direction, latency in microseconds.

    Inside a node the rate is that of a device; between nodes that of a port, of which a node has ``ports_per_node``
    (one, where it is left out) for its devices to share.
    """

    name: str
    bandwidth_GBps: Positive  # noqa: N815
    latency_us: Annotated[FiniteFloat, Field(ge=0, le=1e9)]
    ports_per_node: Count | None = None
    source: str = "cluster file"
    notes: str = ""
    needs_profile: bool = False
    measured: MeasuredSpec = MeasuredSpec()

    def to_link(self) -> Link:
        """The link in bytes/s and seconds."""
        return Link(
            name=self.name,
            bytes_per_s=self.bandwidth_GBps * GB,
            latency_s=self.latency_us * MICRO,
            source=self.source,
            notes=self.notes,
            needs_profile=self.needs_profile,
            measured=self.measured.to_measured(),
        )


class LinkRow(LinkSpec):
    """A link of the catalogue, with the other names it goes by."""

    source: str
    is_network: bool = False
    """Whether it joins nodes and, where only its name is given, is one port of a node."""
    aliases: tuple[str, ...] = ()


class DeviceSpec(FileModel):
    """A device described in full; without peaks it is one that only a profile can describe.

    ``kind`` may be left out where the catalogue has a device of this name, whose type and backend are taken, ``vendor``
    and ``host_GBps`` likewise; ``backend`` where it is the usual one of the device type: nccl for gpu, gloo for cpu.
    """

    name: str
    kind: DeviceType | None = None
    vendor: Vendor | None = None
    backend: Backend | None = None
    memory_GiB: Annotated[Positive, Field(le=MOST_BYTES / GIB)] | None = None  # noqa: N815
    memory_GB: Annotated[Positive, Field(le=MOST_BYTES / GB)] | None = None  # noqa: N815
    memory_bandwidth_GBps: Positive | None = None  # noqa: N815
    host_GBps: Positive | None = Field(default=None, exclude_if=lambda rate: rate is None)  # noqa: N815
    peak_TFLOPs: dict[DtypeName, Positive] = {}  # noqa: N815
    source: str = "cluster file"
    notes: str = ""

    @model_validator(mode="after")
    def _one_memory(self) -> "DeviceSpec":
        if self.memory_GiB is not None and self.memory_GB is not None:
            raise ValueError("give memory_GiB or memory_GB, not both")
        if bool(self.peak_TFLOPs) != (self.memory_bandwidth_GBps is not None):
            raise ValueError("give peak_TFLOPs and memory_bandwidth_GBps together, or neither and use a profile")
        return self

    def to_device(self, known: Device | None = None) -> Device:
        """The device in bytes, bytes/s and FLOP/s; of a device type that is not stated it is what the ``known`` device
        is.

        Raises `InvalidClusterError` where neither says of what device type it is.
        """
        if self.kind is None and known is not None:
            device_type, usual = known.type, known.backend
        elif self.kind is not None:
            device_type, usual = self.kind, USUAL_BACKENDS[self.kind]
        else:
            raise InvalidClusterError(
                field="device.kind",
                found=f"nothing, and {self.name!r} is not in the catalogue",
                expected="gpu or cpu",
                hint="add kind: gpu, or kind: cpu for processes of a host",
            )
        memory = None if self.memory_GB is None else self.memory_GB * GB
        memory = memory if self.memory_GiB is None else self.memory_GiB * GIB
        host = None if known is None else known.host_bytes_per_s
        return Device(
            name=self.name,
            type=device_type,
            vendor=self.vendor or (None if known is None else known.vendor),
            backend=self.backend or usual,
            memory_bytes=None if memory is None else round(memory),
            peak_flop_per_s={dtype: rate * TERA for dtype, rate in self.peak_TFLOPs.items()},
            memory_bytes_per_s=None if self.memory_bandwidth_GBps is None else self.memory_bandwidth_GBps * GB,
            source=self.source,
            host_bytes_per_s=host if self.host_GBps is None else self.host_GBps * GB,
            notes=self.notes,
        )


class DeviceRow(DeviceSpec):
    """A device of the catalogue with the links it comes with.

    ``devices_per_port``: how many devices share one network port. ``switched_devices``: how many devices one switch
    joins at the speed of ``intra_link``, across node borders.
    """

    kind: DeviceType
    backend: Backend
    source: str
    intra_link: str
    inter_link: str
    devices_per_port: Count = 1
    switched_devices: Count | None = None
    aliases: tuple[str, ...] = ()


class SharedLink(FileModel):
    """A catalogue link of which a node has ``ports_per_node``, shared evenly by its devices."""

    name: str
    ports_per_node: Count


DeviceEntry = Annotated[
    Annotated[str, Tag("by name")] | Annotated[DeviceSpec, Tag("in full")], Discriminator(_way_of_writing)
]
LinkEntry = Annotated[
    Annotated[str, Tag("by name")] | Annotated[SharedLink, Tag("by ports")] | Annotated[LinkSpec, Tag("in full")],
    Discriminator(_way_of_writing),
]


class Versioned(FileModel):
    """A whole file, whose version stands first."""

    version: Literal[1]


class PoolSpec(FileModel):
    """One pool of a mixed cluster: what a `ClusterFile` has, without its version."""

    name: str | None = None
    num_nodes: Count
    devices_per_node: Count
    device: DeviceEntry
    intra_link: LinkEntry | None = None
    inter_link: LinkEntry | None = None
    host_memory_GiB: HostMemory = None  # noqa: N815


class ClusterFile(PoolSpec, Versioned):
    """A cluster as a user writes it; a link left out is the one that the catalogue gives the device.

    .. code-block:: yaml

        version: 1
        name: lab
        num_nodes: 4
        devices_per_node: 8
        device: a100-80gb               # or name, kind (gpu, cpu), memory_GiB, peak_TFLOPs, memory_bandwidth_GBps
        intra_link: nvlink-3            # or name, bandwidth_GBps, latency_us
        inter_link: 4xethernet-100      # ports of a node, one without a number; or name, bandwidth_GBps, latency_us,
                                        # ports_per_node
        host_memory_GiB: 1024           # what a node's processes may take of its host's memory; not checked without it
    """


def _as_tuple(found: object) -> object:
    """Lists of a plan file as tuples: behind a discriminator pydantic has them as values, no longer as JSON."""
    return tuple(found) if isinstance(found, list) else found


class PoolsFile(Versioned):
    """A cluster of several pools as a user writes it.

    .. code-block:: yaml

        version: 1
        link: 4xethernet-100            # between pools, as inter_link between nodes
        pools:
          - {num_nodes: 2, devices_per_node: 8, device: h100-80gb}
          - {num_nodes: 4, devices_per_node: 8, device: a100-40gb, inter_link: 4xethernet-100}
    """

    link: LinkEntry | None = None
    pools: Annotated[tuple[PoolSpec, ...], BeforeValidator(_as_tuple)]
    links: Annotated[tuple[LinkEntry, ...] | None, BeforeValidator(_as_tuple)] = None
    """One for each pool in place of ``link``, where they differ."""


HardwareFile = Annotated[
    Annotated[ClusterFile, Tag("one pool")] | Annotated[PoolsFile, Tag("pools")],
    Discriminator(
        lambda entry: (
            "pools" if isinstance(entry, PoolsFile) or (isinstance(entry, dict) and "pools" in entry) else "one pool"
        )
    ),
]


class Catalogue(Versioned):
    """The files ``devices.yaml`` and ``links.yaml``."""

    devices: tuple[DeviceRow, ...] = ()
    links: tuple[LinkRow, ...] = ()


def checked(data: Any, model: type[FileModelT], *, where: str) -> FileModelT:
    """The contents of a parsed file; raises `InvalidClusterError` naming the key that is wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"] if part not in _TAGS]
        raise InvalidClusterError(
            field=".".join([where, *path]),
            found="nothing" if first["type"] == "missing" else repr(first["input"]),
            expected=first["msg"].removeprefix("Value error, "),
            hint="" if len(path) > 1 else "the keys are " + ", ".join(model.model_fields),
        ) from error


def read_text(path: Path) -> str:
    """The text of a file that the user named; raises `InvalidClusterError` when it cannot be read."""
    try:
        return read_file(path, most_bytes=MOST_YAML_BYTES)
    except (OSError, ValueError) as error:
        raise InvalidClusterError(
            field="cluster",
            found=f"{path}: {error}",
            expected="a readable YAML file, or NODESxDEVICESxDEVICE",
            hint="check the path, or write for example 1x8xa100-80gb",
        ) from error


RowT = TypeVar("RowT", bound=DeviceRow | LinkRow)
_BANDWIDTH = re.compile(r"(?:[0-9]+\s*x\s*)?([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*(?:g|gb|gbps|gbit|gbit/s|gb/s|gbe)")
_PORTS = re.compile(r"\s*([1-9][0-9]*)\s*x\s*", re.IGNORECASE)


def devices() -> tuple[Device, ...]:
    """Every device of the catalogue, in the order of its file."""
    return tuple(row.to_device() for row in _catalogue("devices.yaml").devices)


def links() -> tuple[Link, ...]:
    """Every link of the catalogue, in the order of its file."""
    return tuple(row.to_link() for row in _catalogue("links.yaml").links)


def find_device(name: str) -> Device:
    """The catalogue device of that name or alias, in any case; raises `InvalidClusterError` with the nearest names."""
    return _look_up(name, _device_rows(), field="device").to_device()


def known_device(name: str) -> Device | None:
    """The catalogue device of that name or alias, in any case, or None where the catalogue has none."""
    row = _device_rows().get(name.strip().lower())
    return None if row is None else row.to_device()


def is_same_device(found: str, device: Device) -> bool:
    """Whether a driver's name of a device (NVIDIA H100 80GB HBM3) means one of the catalogue (h100-80gb).

    Sizes of memory are left out: every other part of the catalogue's name must occur.
    """
    words = re.findall(r"[a-z0-9]+", found.lower())
    parts = [part for part in device.name.lower().split("-") if not part.endswith("gb")]
    return all(any(word.startswith(part) for word in words) for part in parts)


def find_link(name: str) -> Link:
    """The catalogue link of that name or alias, in any case; raises `InvalidClusterError` with the nearest names."""
    return _look_up(name, _link_rows(), field="link").to_link()


def find_network(text: str, *, devices_per_node: int) -> Link:
    """The link between nodes that a text names, as one of the devices sees it that share the ports of a node.

    ``ethernet-25`` is one port per node; ``8xinfiniband-ndr``, or a name that begins so or ends in ``per GPU``, says
    otherwise. What is no network (NVLink) has the rate of its name for every device. Raises `InvalidClusterError` with
    the nearest names.
    """
    rows = _link_rows()
    key, ports = text.strip().lower(), _PORTS.match(text)
    if bandwidth := _BANDWIDTH.fullmatch(key):
        raise _unnamed_network(text, float(bandwidth[1]) * (8 if "GB" in text else 1), rows)
    row = _look_up(text if ports is None or key in rows else text[ports.end() :], rows, field="network")
    if not row.is_network or key.endswith(" per gpu"):
        return row.to_link()
    return row.to_link().shared(num_ports=int(ports[1]) if ports else 1, num_devices=devices_per_node)


def _unnamed_network(text: str, gigabits: float, rows: Mapping[str, LinkRow]) -> InvalidClusterError:
    """The error for a network of which only a bandwidth is given, with the names of those that come nearest."""
    rates = {row.name: 8 * row.bandwidth_GBps for row in rows.values() if row.is_network}
    least = min(abs(rate - gigabits) for rate in rates.values())
    names = [name for name, rate in rates.items() if abs(rate - gigabits) == least]
    return InvalidClusterError(
        field="network",
        found=f"{text!r}, a bandwidth",
        expected="the name of a link, which says its latency, too, and how many ports of it a node has",
        hint=f"write --network {names[-1]}, or 8x{names[-1]} for eight ports ({rates[names[0]]:g} Gbit/s each: "
        f"{', '.join(names)}; all: {', '.join(rates)})",
    )


def default_links(device_name: str, *, num_devices: int) -> tuple[Link, Link]:
    """The links a catalogue device comes with, inside a node and between nodes, on ``num_devices`` in all.

    Between nodes it is the network of that generation's reference system, or the switch itself while all devices hang
    on one (``switched_devices``). Raises `InvalidClusterError` for an unknown device.
    """
    row = _look_up(device_name, _device_rows(), field="device")
    intra_link = find_link(row.intra_link)
    if row.switched_devices is not None and num_devices <= row.switched_devices:
        return intra_link, intra_link
    return intra_link, find_link(row.inter_link).shared(num_ports=1, num_devices=row.devices_per_port)


def _look_up(name: str, rows: Mapping[str, RowT], *, field: str) -> RowT:
    key = name.strip().lower()
    if key not in rows:
        names = {row.name for row in rows.values()}
        longer = sorted(each for each in names if key and each.startswith(key))
        raise InvalidClusterError(
            field=field,
            found=repr(name),
            expected=f"a {field} of the catalogue, or one described in full in a cluster file",
            hint=f"did you mean {' or '.join(longer)}?" if longer else nearest(key, names),
        )
    return rows[key]


@cache
def _catalogue(file: str) -> Catalogue:
    return checked(read_packaged_yaml("steelyard.hardware", file), Catalogue, where=file)


@cache
def _device_rows() -> Mapping[str, DeviceRow]:
    rows = _catalogue("devices.yaml").devices
    return {name.lower(): row for row in rows for name in (row.name, *row.aliases)}


@cache
def _link_rows() -> Mapping[str, LinkRow]:
    rows = _catalogue("links.yaml").links
    return {name.lower(): row for row in rows for name in (row.name, *row.aliases)}
