"""``steelyard models``, ``devices`` and ``links``: known names, with the source of every number."""

from collections.abc import Mapping, Sequence

from rich.table import Table
from typing_extensions import TypedDict

from steelyard.cli.options import AsJson, print_json, prints
from steelyard.cost.efficiency import catalogue_rates
from steelyard.hardware import devices as known_devices
from steelyard.hardware import links as known_links
from steelyard.model.read import chain_from_config, config_hash, load_config, model_names, model_source, packaged_split
from steelyard.plan.prediction import CatalogueRates
from steelyard.report.tables import cell, console, folded, name
from steelyard.units import GB, TERA, format_bytes, format_seconds


class KnownModel(TypedDict):
    """A packaged model."""

    name: str
    family: str
    blocks: int
    hidden_size: int
    vocab_size: int
    source: str


class KnownDevice(TypedDict):
    """A device of the catalogue; without rates where it has to be profiled."""

    name: str
    kind: str
    backend: str
    memory_bytes: int | None
    peak_flop_per_s: dict[str, float]
    host_bytes_per_s: float | None
    rates: CatalogueRates | None
    source: str


class KnownLink(TypedDict):
    """A link of the catalogue, in one direction."""

    name: str
    bytes_per_s: float
    latency_s: float
    source: str


@prints(list[KnownModel])
def models(as_json: AsJson = False) -> None:
    """List the packaged models by name and Hugging Face ID. Others are given by the path of a config.json."""
    table, content = _table("model", "family", "blocks × width", of="Hugging Face ID, or source"), []
    for each in model_names():
        config = load_config(each)[1]
        split = packaged_split(config_hash(config), must_hold=False)  # with any version of transformers
        chain = chain_from_config(config, name=each, split=split)
        family, blocks, source = chain.family.model_type, chain.num_layers - 2, model_source(chain.name)
        sizes = {"hidden_size": chain.hidden_size, "vocab_size": chain.vocab_size}
        content.append({"name": chain.name, "family": family, "blocks": blocks, **sizes, "source": source})
        hub_id = source.removeprefix("https://huggingface.co/").removesuffix("/blob/main/config.json")
        table.add_row(chain.name, family, f"{blocks} × {chain.hidden_size:,}", hub_id)
    _print(table, content, as_json)


def _table(first: str, *others: str, of: str = "source") -> Table:
    """Return a table of names, which stay on one line so that they can be copied."""
    return Table(name(first), *others, folded(of), header_style="bold")


def _print(table: Table, content: Sequence[Mapping[str, object]], as_json: bool) -> None:
    if as_json:
        print_json(content)
    else:
        console().print(table)


@prints(list[KnownDevice])
def devices(as_json: AsJson = False) -> None:
    """List the devices of the catalogue, with sources."""
    table, content = _table("device", "memory", "bf16 or fp16 TFLOP/s", "efficiency"), []
    for device in known_devices():
        rates = None if device.needs_profile else catalogue_rates(device.name)
        same = ("backend", "memory_bytes", "peak_flop_per_s", "host_bytes_per_s")
        known = {"name": device.name, "kind": device.type} | {each: getattr(device, each) for each in same}
        content.append(known | {"rates": rates and rates.model_dump(mode="json"), "source": device.source})
        peak = device.peak_flop_per_s.get("bf16", device.peak_flop_per_s.get("fp16"))
        table.add_row(
            device.name,
            cell(device.memory_bytes, format_bytes),
            "measured by profile" if peak is None else f"{peak / TERA:.0f}",
            "–" if rates is None else rates.brief,
            device.source,
        )
    _print(table, content, as_json)


@prints(list[KnownLink])
def links(as_json: AsJson = False) -> None:
    """List the links of the catalogue, with sources."""
    table, content = _table("link", "GB/s per direction", "latency"), []
    for link in known_links():
        content.append({each: getattr(link, each) for each in ("name", "bytes_per_s", "latency_s", "source")})
        table.add_row(link.name, f"{link.bytes_per_s / GB:.4g}", format_seconds(link.latency_s), link.source)
    _print(table, content, as_json)
