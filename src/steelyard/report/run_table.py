"""Tables of measurements for the terminal: a profile, and runs next to their predictions."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from steelyard.plan.plan import Plan
from steelyard.profiles.profile import Profile
from steelyard.profiles.record import RunRecord
from steelyard.report.tables import Paragraph, cell, framed_table, number
from steelyard.units import MIB, format_bytes, format_seconds


def profile_view(profile: Profile) -> RenderableType:
    """Return the measured costs of a profile, and what was measured where."""
    identity = profile.identity
    title = (
        f"{identity.model_name}, {identity.seq_len} tokens, {identity.precision} on {identity.num_devices} × "
        f"{identity.device} ({identity.method} {identity.created})"
    )
    tables = (layer_table(profile), collective_table(profile))
    lines = (Paragraph(text=line, indent=0) for line in machine_lines(profile))
    return Group(Paragraph(text=title, indent=0, style="bold"), *tables, *lines)


def machine_lines(profile: Profile) -> list[str]:
    """Return lines on the machine: shared cores, sharding overhead, misfits, allocator."""
    lines = []
    if profile.busy_speeds:
        speeds = ", ".join(f"{speed:.2f}" for speed in profile.busy_speeds)
        lines.append(f"processes share cores: relative speed while 1, 2, … of them compute: {speeds}")
    if profile.sharding:
        added = ", ".join(f"{format_seconds(each.seconds)} over {each.group_size}" for each in profile.sharding)
        lines.append(f"sharding overhead per layer and microbatch, without its collectives: {added} ranks")
    if profile.misfits:
        lines.append(
            f"warning: latency and rate fit these collectives badly: {', '.join(profile.misfits)}; plans that use them "
            "have this error: profile again on an idle machine, or with a larger --budget"
        )
    if profile.reserved_over_allocated is None:
        lines.append("memory: reserved equals allocated (the CPU allocator caches nothing)")
    else:
        lines.append(f"memory: reserved {profile.reserved_over_allocated:.2f} × allocated")
    return lines


def layer_table(profile: Profile) -> Table:
    """Return measured seconds per layer type, shape and number of samples on a rank."""
    table = Table(
        "layer", "shape", *map(number, ("samples per rank", "forward", "backward", "saved")), header_style="bold"
    )
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
    """Return fitted latency and rate per collective."""
    table = Table("collective", *map(number, ("ranks", "latency", "rate", "largest error")), header_style="bold")
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
    """Return step time and memory per rank, predicted and measured, and their ratio."""
    columns = map(number, ("predicted", "measured", "predicted / measured"))
    table = framed_table("Predicted and measured", "", *columns)
    table.add_row(*beside("step time", record.predicted_step_s, record.median_step_s, format_seconds), end_section=True)
    num_stages = 1 + max(rank.stage for rank in record.ranks)  # an elastic run may end under another plan
    for stage in range(num_stages if num_stages > 1 else 0):
        # its slowest rank
        measured = [rank.busy_s for rank in record.ranks if rank.stage == stage and rank.busy_s is not None]
        expected = None if record.predicted_busy_s is None else record.predicted_busy_s[stage]
        row = beside(f"busy time of stage {stage} per step", expected, max(measured, default=None), format_seconds)
        table.add_row(*row, end_section=stage == num_stages - 1)
    uneven = [rank.imbalance for rank in record.ranks if rank.imbalance is not None]
    if uneven:
        mean = sum(uneven) / len(uneven)
        row = beside("expert load imbalance (assumed)", record.predicted_imbalance, mean, "{:.2f}".format)
        table.add_row(*row, end_section=True)
    for rank in record.ranks:
        name = f"memory of rank {rank.rank}" + (f" (stage {rank.stage})" if num_stages > 1 else "")
        expected = None if record.predicted_peak_bytes is None else record.predicted_peak_bytes[rank.stage]
        table.add_row(*beside(name, expected, rank.peak_bytes, format_bytes))
    return table


def beside(
    name: str, predicted: float | None, measured: float | None, show: Callable[[Any], str]
) -> tuple[str, str, str, str]:
    """Return a row of one quantity, predicted and measured, and their ratio; None for unknown values."""
    return (
        name,
        cell(predicted, show),
        cell(measured, show),
        f"{predicted / measured:.2f}" if predicted is not None and measured else "–",
    )


def trial_table(trials: Sequence[tuple[Plan, RunRecord | None, str]]) -> Table:
    """Return a row per measured plan: step time and memory of a rank, predicted and measured."""
    columns = map(number, ("predicted\nstep", "measured\nstep", "ratio", "predicted\nmemory", "measured\nmemory"))
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
