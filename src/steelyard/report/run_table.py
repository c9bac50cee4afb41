"""Predicted against measured after a run."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from steelyard.plan.plan import Plan
from steelyard.profiles.record import RunRecord
from steelyard.report.tables import cell, framed_table, number
from steelyard.units import format_bytes, format_seconds


def comparison_table(record: RunRecord) -> Table:
    """Step time and memory per rank, predicted and measured, with the prediction's error."""
    columns = map(number, ("predicted", "measured", "predicted / measured"))
    table = framed_table("Predicted against measured", "", *columns)
    table.add_row(*beside("step time", record.predicted_step_s, record.median_step_s, format_seconds), end_section=True)
    num_stages = 1 + max(rank.stage for rank in record.ranks)  # an elastic run may end under another plan
    for stage in range(num_stages if num_stages > 1 else 0):
        table.add_row(*_busy_row(record, stage), end_section=stage == num_stages - 1)
    _add_imbalance_row(table, record)
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


def _add_imbalance_row(table: Table, record: RunRecord) -> None:
    """How uneven the routing was where experts are divided, on average over all ranks, beside what was assumed."""
    measured = [rank.imbalance for rank in record.ranks if rank.imbalance is not None]
    if not measured:
        return
    mean = sum(measured) / len(measured)
    row = beside("imbalance of experts (assumed)", record.predicted_imbalance, mean, "{:.2f}".format)
    table.add_row(*row, end_section=True)


def _busy_row(record: RunRecord, stage: int) -> tuple[str, str, str, str]:
    """The seconds of a step in which a stage works, those of its slowest rank."""
    measured = [rank.busy_s for rank in record.ranks if rank.stage == stage and rank.busy_s is not None]
    expected = None if record.predicted_busy_s is None else record.predicted_busy_s[stage]
    return beside(f"work of stage {stage} in a step", expected, max(measured, default=None), format_seconds)
