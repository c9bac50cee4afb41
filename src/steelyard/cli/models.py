"""``steelyard models``, ``devices`` and ``links``: what is known by name, with the source of every number."""

from rich.console import Console
from rich.table import Column, Table

from steelyard.cli.options import AsJson, print_json
from steelyard.cost.efficiency import catalogue_rates
from steelyard.hardware import devices as known_devices
from steelyard.hardware import links as known_links
from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config, config_hash, load_config, model_names, model_source, packaged_split
from steelyard.units import GB, TERA, format_bytes, format_seconds


def models(as_json: AsJson = False) -> None:
    """List the models that are packaged by name or id on the hub; any other is a path to its config.json."""
    chains = [_shown(name) for name in model_names()]
    if as_json:
        print_json(
            [
                {
                    "name": c.name,
                    "family": c.family.model_type,
                    "blocks": c.num_layers - 2,
                    "hidden_size": c.hidden_size,
                    "vocab_size": c.vocab_size,
                    "source": model_source(c.name),
                }
                for c in chains
            ]
        )
        return
    table = _table("model", "family", "blocks × width", of="hub id, or source")
    for chain in chains:
        table.add_row(
            chain.name,
            chain.family.model_type,
            f"{chain.num_layers - 2} × {chain.hidden_size:,}",
            model_source(chain.name).removeprefix("https://huggingface.co/").removesuffix("/blob/main/config.json"),
        )
    Console().print(table)


def _table(name: str, *others: str, of: str = "source") -> Table:
    """A table of what is known by name: names, which are there to be copied, stay whole in the narrowest terminal."""
    return Table(Column(name, no_wrap=True), *others, Column(of, overflow="fold"), header_style="bold")


def _shown(name: str) -> ModelChain:
    """A packaged model, also where another transformers is installed than it was split with."""
    _, config = load_config(name)
    return chain_from_config(config, name=name, split=packaged_split(config_hash(config), must_hold=False))


def devices(as_json: AsJson = False) -> None:
    """List the devices of the catalogue with the source of their numbers."""
    known = known_devices()
    if as_json:
        print_json(
            [
                {
                    "name": d.name,
                    "kind": d.type,
                    "backend": d.backend,
                    "memory_bytes": d.memory_bytes,
                    "peak_flop_per_s": dict(d.peak_flop_per_s),
                    "host_bytes_per_s": d.host_bytes_per_s,
                    "rates": None if d.needs_profile else catalogue_rates(d.name).model_dump(mode="json"),
                    "source": d.source,
                }
                for d in known
            ]
        )
        return
    table = _table("device", "memory", "bf16 or fp16 TFLOP/s", "part reached")
    for device in known:
        peaks = device.peak_flop_per_s
        peak = peaks.get("bf16", peaks.get("fp16"))
        table.add_row(
            device.name,
            "–" if device.memory_bytes is None else format_bytes(device.memory_bytes),
            "measured by profile" if peak is None else f"{peak / TERA:.0f}",
            "–" if device.needs_profile else catalogue_rates(device.name).brief,
            device.source,
        )
    Console().print(table)


def links(as_json: AsJson = False) -> None:
    """List the links of the catalogue with the source of their numbers."""
    known = known_links()
    if as_json:
        print_json(
            [
                {"name": x.name, "bytes_per_s": x.bytes_per_s, "latency_s": x.latency_s, "source": x.source}
                for x in known
            ]
        )
        return
    table = _table("link", "GB/s, a direction", "latency")
    for link in known:
        table.add_row(link.name, f"{link.bytes_per_s / GB:.4g}", format_seconds(link.latency_s), link.source)
    Console().print(table)
