"""What was measured, as tables for the terminal: a profile, and runs beside what was predicted of them."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from steelyard.plan.plan import Plan
from steelyard.profiles.profile import Profile
from steelyard.profiles.record import RunRecord
from steelyard.report.tables import cell, framed_table, number
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
    if profile.misfits:
        lines.append(
            f"warning: a latency and a rate miss collectives by up to: {', '.join(profile.misfits)}; plans that use "
            "them may be off as much: profile again on an idle machine, or with a larger --budget"
        )
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


def comparison_table(record: RunRecord) -> Table:
    """Step time and memory per rank, predicted and measured, with the prediction's error."""
    columns = map(number, ("predicted", "measured", "predicted / measured"))
    table = framed_table("Predicted against measured", "", *columns)
    table.add_row(*beside("step time", record.predicted_step_s, record.median_step_s, format_seconds), end_section=True)
    num_stages = 1 + max(rank.stage for rank in record.ranks)  # an elastic run may end under another plan
    for stage in range(num_stages if num_stages > 1 else 0):
        # those of its slowest rank
        measured = [rank.busy_s for rank in record.ranks if rank.stage == stage and rank.busy_s is not None]
        expected = None if record.predicted_busy_s is None else record.predicted_busy_s[stage]
        row = beside(f"work of stage {stage} in a step", expected, max(measured, default=None), format_seconds)
        table.add_row(*row, end_section=stage == num_stages - 1)
    uneven = [rank.imbalance for rank in record.ranks if rank.imbalance is not None]
    if uneven:
        mean = sum(uneven) / len(uneven)
        row = beside("imbalance of experts (assumed)", record.predicted_imbalance, mean, "{:.2f}".format)
        table.add_row(*row, end_section=True)
    for rank in record.ranks:
        name = f"memory of rank {rank.rank}" + (f" (stage {rank.stage})" if num_stages > 1 else "")
        expected = None if record.predicted_peak_bytes is None else record.predicted_peak_bytes[rank.stage]
        table.add_row(*beside(name, expected, rank.peak_bytes, format_bytes))
    return table


def beside(
    name: str, predicted: float | None, measured: float | None, show: Callable[[Any], str]
) -> tuple[str, str, str, str]:
    """A row of what was predicted and measured of one thing, and their ratio; None is what is not known."""
    return (
        name,
        cell(predicted, show),
        cell(measured, show),
        f"{predicted / measured:.2f}" if predicted is not None and measured else "–",
    )


def trial_table(trials: Sequence[tuple[Plan, RunRecord | None, str]]) -> Table:
    """A row for each plan that was tried with its words: predicted and measured step and memory of a rank."""
    columns = map(number, ("predicted", "measured", "ratio", "memory", "measured"))
    table = framed_table("Predicted and measured", "", *columns, "plan")
    for index, (plan, record, words) in enumerate(trials):
        expected_s = plan.prediction.step_time_s if plan.prediction else None
        expected = max(stage.total_bytes for stage in plan.prediction.stages) if plan.prediction else None
        peak = None if record is None else max(rank.peak_bytes for rank in record.ranks)
        ratio = None if record is None or expected_s is None else expected_s / record.median_step_s
        table.add_row(
            str(index),
            cell(expected_s, format_seconds),
            cell(None if record is None else record.median_step_s, format_seconds),
            cell(ratio, "{:.2f}".format),
            cell(expected, format_bytes),
            cell(peak, format_bytes),
            words,
        )
    return table
