"""Models of the files of this package: the catalogue of devices and links, and a user's cluster file.

File keys carry their unit (``bandwidth_GBps``, ``latency_us``, ``memory_GiB``, ``peak_TFLOPs``) and are converted
here, once, to bytes, seconds and FLOP. GB is 10^9 bytes, GiB is 2^30 bytes, a TFLOP is 10^12 FLOP.

The catalogue is ``devices.yaml`` and ``links.yaml`` in this directory, with a source for every row. An unknown name is
an error that lists the nearest ones, never a default.
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
from steelyard.units import GB, GIB, MIB, TERA

Positive = Annotated[FiniteFloat, Field(ge=1e-6, le=1e9)]
Count = Annotated[StrictInt, Field(gt=0, le=MOST_DEVICES)]
HostMemory = Annotated[Positive | None, Field(le=MOST_BYTES / GIB, exclude_if=lambda size: size is None)]
DtypeName = Literal["bf16", "fp16", "fp32", "tf32", "fp8", "mxfp8", "nvfp4"]
FileModelT = TypeVar("FileModelT", bound="FileModel")
MICRO = 1e-6
_MEASURED_TIMES = {"start_us": "start_s", "step_us": "step_s", "climb_us": "climb_s"}
"""Measured times of a link: key in files (microseconds) to field name (seconds)."""
_TAGS = ("by name", "by ports", "in full", "one pool")


def _way_of_writing(entry: Any) -> str:
    if isinstance(entry, str):
        return "by name"
    if isinstance(entry, dict):
        return "by ports" if "ports_per_node" in entry and "bandwidth_GBps" not in entry else "in full"
    return "by ports" if isinstance(entry, SharedLink) else "in full"


class FileModel(BaseModel):
    """Base of all file models: frozen, and an unknown key is an error that suggests the nearest known one."""

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
    """Measured behaviour of collectives on a link; see `MeasuredLink`."""

    rate: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1.0
    start_us: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    step_us: Annotated[FiniteFloat, Field(ge=0)] | None = None
    climb_us: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    few_ranks: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.0
    crowding: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    through_host: bool = False
    all_reduce_gain: Annotated[FiniteFloat, Field(ge=1)] = 1.0
    tree_rate: Annotated[FiniteFloat, Field(gt=0, le=1)] = 0.6
    has_low_latency: bool = True

    def to_measured(self) -> MeasuredLink:
        """Convert to a `MeasuredLink`, with times in seconds."""
        values = dict(self)
        times = {name: values.pop(key) for key, name in _MEASURED_TIMES.items()}
        return MeasuredLink(**values, **{name: each and each * MICRO for name, each in times.items()})

    @classmethod
    def of(cls, measured: MeasuredLink) -> "MeasuredSpec":
        """Convert from a `MeasuredLink`, with times in microseconds."""
        values = asdict(measured)
        times = {key: values.pop(name) for key, name in _MEASURED_TIMES.items()}
        return cls(**values, **{key: each and each / MICRO for key, each in times.items()})


class LinkSpec(FileModel):
    """A link described in full: peak GB/s per direction, latency in microseconds.

    Inside a node the rate is per device. Between nodes it is per port: the devices of a node share ``ports_per_node``
    ports (default: one).
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
        """Convert to a `Link`, in bytes/s and seconds."""
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
    """A link of the catalogue, with its aliases."""

    source: str
    is_network: bool = False
    """Whether it joins nodes, in which case its name alone means one port per node."""
    aliases: tuple[str, ...] = ()


class DeviceSpec(FileModel):
    """A device described in full. Without peaks it needs a measured profile.

    ``kind``, ``vendor``, ``host_GBps`` and ``cache_MiB`` default to those of the catalogue device of this name.
    ``backend`` defaults to that of the device type: nccl for gpu, gloo for cpu.
    """

    name: str
    kind: DeviceType | None = None
    vendor: Vendor | None = None
    backend: Backend | None = None
    memory_GiB: Annotated[Positive, Field(le=MOST_BYTES / GIB)] | None = None  # noqa: N815
    memory_GB: Annotated[Positive, Field(le=MOST_BYTES / GB)] | None = None  # noqa: N815
    memory_bandwidth_GBps: Positive | None = None  # noqa: N815
    host_GBps: Positive | None = Field(default=None, exclude_if=lambda rate: rate is None)  # noqa: N815
    cache_MiB: Positive | None = Field(default=None, exclude_if=lambda size: size is None)  # noqa: N815
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
        """Convert to a `Device`, in bytes, bytes/s and FLOP/s. A missing device type is that of the ``known`` device.

        Raises `InvalidClusterError` if neither states the device type.
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
        host, cache = (None, None) if known is None else (known.host_bytes_per_s, known.cache_bytes)
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
            cache_bytes=cache if self.cache_MiB is None else self.cache_MiB * MIB,
            notes=self.notes,
        )


class DeviceRow(DeviceSpec):
    """A device of the catalogue, with its default links.

    ``devices_per_port``: number of devices that share one network port. ``switched_devices``: number of devices that
    one switch joins at the speed of ``intra_link``, across nodes.
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
    """A catalogue link with ``ports_per_node`` ports, shared evenly by the devices of a node."""

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
    """A whole file, with its version first."""

    version: Literal[1]


class PoolSpec(FileModel):
    """One device group of a heterogeneous cluster: a `ClusterFile` without its version."""

    name: str | None = None
    num_nodes: Count
    devices_per_node: Count
    device: DeviceEntry
    intra_link: LinkEntry | None = None
    inter_link: LinkEntry | None = None
    host_memory_GiB: HostMemory = None  # noqa: N815


class ClusterFile(PoolSpec, Versioned):
    """A cluster file. A missing link is the catalogue's default for the device.

    .. code-block:: yaml

        version: 1
        name: lab
        num_nodes: 4
        devices_per_node: 8
        device: a100-80gb               # or name, kind (gpu, cpu), memory_GiB, peak_TFLOPs, memory_bandwidth_GBps
        intra_link: nvlink-3            # or name, bandwidth_GBps, latency_us
        inter_link: 4xethernet-100      # ports per node, default 1; or name, bandwidth_GBps, latency_us,
                                        # ports_per_node
        host_memory_GiB: 1024           # host memory for the processes of a node; not checked without it
    """


def _as_tuple(found: object) -> object:
    """Convert a list of a plan file to a tuple: after a discriminator pydantic no longer parses it as JSON."""
    return tuple(found) if isinstance(found, list) else found


class PoolsFile(Versioned):
    """A cluster file with several device groups.

    .. code-block:: yaml

        version: 1
        link: 4xethernet-100            # between device groups, written as inter_link
        pools:
          - {num_nodes: 2, devices_per_node: 8, device: h100-80gb}
          - {num_nodes: 4, devices_per_node: 8, device: a100-40gb, inter_link: 4xethernet-100}
    """

    link: LinkEntry | None = None
    pools: Annotated[tuple[PoolSpec, ...], BeforeValidator(_as_tuple)]
    links: Annotated[tuple[LinkEntry, ...] | None, BeforeValidator(_as_tuple)] = None
    """One link per device group, in place of ``link``, if they differ."""


HardwareFile = Annotated[
    Annotated[ClusterFile, Tag("one pool")] | Annotated[PoolsFile, Tag("pools")],
    Discriminator(
        lambda entry: (
            "pools" if isinstance(entry, PoolsFile) or (isinstance(entry, dict) and "pools" in entry) else "one pool"
        )
    ),
]


class Catalogue(Versioned):
    """Contents of ``devices.yaml`` or ``links.yaml``."""

    devices: tuple[DeviceRow, ...] = ()
    links: tuple[LinkRow, ...] = ()


def checked(data: Any, model: type[FileModelT], *, where: str) -> FileModelT:
    """Validate the contents of a parsed file. Raises `InvalidClusterError`, which names the wrong key."""
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
    """Read a file that the user named. Raises `InvalidClusterError` if it cannot be read."""
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
    """Return all devices of the catalogue in file order."""
    return tuple(row.to_device() for row in _catalogue("devices.yaml").devices)


def links() -> tuple[Link, ...]:
    """Return all links of the catalogue in file order."""
    return tuple(row.to_link() for row in _catalogue("links.yaml").links)


def find_device(name: str) -> Device:
    """Return the catalogue device of this name or alias, ignoring case.

    Raises `InvalidClusterError`, with the nearest names, if there is none.
    """
    return _look_up(name, _device_rows(), field="device").to_device()


def known_device(name: str) -> Device | None:
    """Return the catalogue device of this name or alias, ignoring case, or None if there is none."""
    row = _device_rows().get(name.strip().lower())
    return None if row is None else row.to_device()


def is_same_device(found: str, device: Device) -> bool:
    """Return whether a driver's device name (NVIDIA H100 80GB HBM3) matches a catalogue device (h100-80gb).

    Every part of the catalogue's name except memory sizes must occur.
    """
    words = re.findall(r"[a-z0-9]+", found.lower())
    parts = [part for part in device.name.lower().split("-") if not part.endswith("gb")]
    return all(any(word.startswith(part) for word in words) for part in parts)


def find_link(name: str) -> Link:
    """Return the catalogue link of this name or alias, ignoring case.

    Raises `InvalidClusterError`, with the nearest names, if there is none.
    """
    return _look_up(name, _link_rows(), field="link").to_link()


def find_network(text: str, *, devices_per_node: int) -> Link:
    """Return one device's share of the inter-node link that a text names.

    ``ethernet-25`` is one port per node and ``8xinfiniband-ndr`` eight; a link ending in ``per GPU`` is one per device.
    A link that is not a network (NVLink) has its full rate for every device. Raises `InvalidClusterError`, with the
    nearest names, if the link is unknown.
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
    """Return the error for a network given only by its bandwidth, with the links of the nearest bandwidth."""
    rates = {row.name: 8 * row.bandwidth_GBps for row in rows.values() if row.is_network}
    least = min(abs(rate - gigabits) for rate in rates.values())
    names = [name for name, rate in rates.items() if abs(rate - gigabits) == least]
    return InvalidClusterError(
        field="network",
        found=f"{text!r}, a bandwidth",
        expected="a link name, which defines the latency, with the number of ports per node",
        hint=f"write --network {names[-1]}, or 8x{names[-1]} for eight ports ({rates[names[0]]:g} Gbit/s each: "
        f"{', '.join(names)}; all: {', '.join(rates)})",
    )


def default_links(device_name: str, *, num_devices: int) -> tuple[Link, Link]:
    """Return the default links of a catalogue device, inside a node and between nodes, for ``num_devices`` in total.

    Between nodes it is the network of the generation's reference system, or the switch itself if one joins all devices
    (``switched_devices``). Raises `InvalidClusterError` if the device is unknown.
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
            expected=f"a {field} of the catalogue, or one fully described in a cluster file",
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
