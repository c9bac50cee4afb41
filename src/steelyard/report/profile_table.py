"""A profile as tables for the terminal: seconds of layers and rates of collectives."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from steelyard.profiles.profile import Profile
from steelyard.units import MIB, format_bytes, format_seconds


def profile_view(profile: Profile) -> RenderableType:
    """What was measured, on what."""
    identity = profile.identity
    title = (
        f"{identity.model_name}, {identity.seq_len} tokens, {identity.precision} on {identity.num_devices} × "
        f"{identity.device} ({identity.method} {identity.created})"
    )
    tables = (layer_table(profile), collective_table(profile))
    return Group(Text(title, style="bold"), *tables, *map(Text, machine_lines(profile)))


def machine_lines(profile: Profile) -> list[str]:
    """What was measured of the machine beside layers and collectives."""
    lines = []
    if profile.busy_speeds:
        speeds = ", ".join(f"{speed:.2f}" for speed in profile.busy_speeds)
        lines.append(f"processes share cores: speed while 1, 2, … of them compute over that while all do: {speeds}")
    if profile.sharding:
        added = ", ".join(f"{format_seconds(each.seconds)} over {each.group_size}" for each in profile.sharding)
        lines.append(f"sharding adds to a layer and microbatch, beside its collectives alone: {added} ranks")
    if profile.reserved_over_allocated is None:
        lines.append("memory: a CPU's allocator keeps nothing, so reserved is allocated")
    else:
        lines.append(f"memory: reserved {profile.reserved_over_allocated:.2f} × allocated")
    return lines


def layer_table(profile: Profile) -> Table:
    """Measured seconds of each layer type, shape and number of samples on a rank."""
    table = Table("layer", "shape", "samples on a rank", "forward", "backward", "saved", header_style="bold")
    for layer in profile.layers:
        for index, time in enumerate(layer.times):
            table.add_row(
                layer.kind if index == 0 else "",
                layer.shape_text if index == 0 else "",
                str(time.samples),
                format_seconds(time.forward_s),
                format_seconds(time.backward_s),
                format_bytes(layer.saved_bytes.at(time.samples)),
            )
    return table


def collective_table(profile: Profile) -> Table:
    """Fitted latency and rate of each collective."""
    table = Table("collective", "ranks", "latency", "rate", "worst misfit", header_style="bold")
    for each in profile.collectives:
        table.add_row(
            each.kind,
            f"{each.group_size}{' strided' if each.strided else ''}",
            format_seconds(each.latency_s),
            f"{each.bytes_per_s / MIB:,.0f} MiB/s",
            f"{each.max_relative_error:.0%}",
        )
    return table
