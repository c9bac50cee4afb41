"""The catalogue of devices and links that ships with the package, every row with its source.

The numbers stand in ``devices.yaml`` and ``links.yaml`` beside this file, which also say what they mean. A name that is
not there is an error that lists the nearest ones, never a default.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TypeVar

from steelyard.errors import InvalidClusterError, nearest
from steelyard.files import read_packaged_yaml
from steelyard.hardware.files import DeviceCatalogue, DeviceRow, LinkCatalogue, LinkRow, checked
from steelyard.hardware.values import Device, Link

RowT = TypeVar("RowT", bound=DeviceRow | LinkRow)
_PORTS = re.compile(r"\s*([1-9][0-9]*)\s*x\s*", re.IGNORECASE)


def devices() -> tuple[Device, ...]:
    """Every device of the catalogue, in the order of its file."""
    return tuple(row.to_device() for row in _device_catalogue().devices)


def links() -> tuple[Link, ...]:
    """Every link of the catalogue, in the order of its file."""
    return tuple(row.to_link() for row in _link_catalogue().links)


def find_device(name: str) -> Device:
    """The catalogue device of that name or alias, in any case; raises `InvalidClusterError` with the nearest names."""
    return _device_row(name).to_device()


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
    row = _look_up(text if ports is None or key in rows else text[ports.end() :], rows, field="network")
    if not row.is_network or key.endswith(" per gpu"):
        return row.to_link()
    return row.to_link().shared(num_ports=int(ports[1]) if ports else 1, num_devices=devices_per_node)


def default_links(device_name: str, *, num_devices: int) -> tuple[Link, Link]:
    """The links a catalogue device comes with, inside a node and between nodes, on ``num_devices`` in all.

    Between nodes it is the network of that generation's reference system, or the switch itself while all devices hang
    on one (``switched_devices``). Raises `InvalidClusterError` for an unknown device.
    """
    row = _device_row(device_name)
    intra_link = find_link(row.intra_link)
    if row.switched_devices is not None and num_devices <= row.switched_devices:
        return intra_link, intra_link
    return intra_link, find_link(row.inter_link).shared(num_ports=1, num_devices=row.devices_per_port)


def _device_row(name: str) -> DeviceRow:
    return _look_up(name, _device_rows(), field="device")


def _look_up(name: str, rows: Mapping[str, RowT], *, field: str) -> RowT:
    key = name.strip().lower()
    if key not in rows:
        raise InvalidClusterError(
            field=field,
            found=repr(name),
            expected=f"a {field} of the catalogue, or one described in full in a cluster file",
            hint=_nearest_names(key, {row.name for row in rows.values()}),
        )
    return rows[key]


def _nearest_names(key: str, names: set[str]) -> str:
    variants = sorted(name for name in names if key and name.startswith(key))
    return f"did you mean {' or '.join(variants)}?" if variants else nearest(key, names)


def _rows_by_name(rows: Iterable[RowT], *, where: str) -> Mapping[str, RowT]:
    by_name: dict[str, RowT] = {}
    for row in rows:
        for name in (row.name, *row.aliases):
            if name.lower() in by_name:
                raise InvalidClusterError(field=where, found=f"{name!r} twice", expected="each name and alias once")
            by_name[name.lower()] = row
    return by_name


@cache
def _device_catalogue() -> DeviceCatalogue:
    return checked(read_packaged_yaml("steelyard.hardware", "devices.yaml"), DeviceCatalogue, where="devices.yaml")


@cache
def _link_catalogue() -> LinkCatalogue:
    return checked(read_packaged_yaml("steelyard.hardware", "links.yaml"), LinkCatalogue, where="links.yaml")


@cache
def _device_rows() -> Mapping[str, DeviceRow]:
    return _rows_by_name(_device_catalogue().devices, where="devices.yaml")


@cache
def _link_rows() -> Mapping[str, LinkRow]:
    return _rows_by_name(_link_catalogue().links, where="links.yaml")
