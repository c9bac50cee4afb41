"""Predicted against measured after a run."""

from rich.table import Table

from steelyard.plan.plan import Plan
from steelyard.profiles.record import RunRecord
from steelyard.units import format_bytes, format_seconds


def comparison_table(plan: Plan, record: RunRecord) -> Table:
    """Step time and memory per rank, predicted and measured, with the prediction's error."""
    table = Table(title="Predicted against measured", title_justify="left", header_style="bold")
    table.add_column("")
    for column in ("predicted", "measured", "predicted / measured"):
        table.add_column(column, justify="right")
    predicted_s = record.predicted_step_s
    table.add_row(
        "step time",
        "–" if predicted_s is None else format_seconds(predicted_s),
        format_seconds(record.median_step_s),
        "–" if predicted_s is None else f"{predicted_s / record.median_step_s:.2f}",
        end_section=True,
    )
    predicted_bytes = record.predicted_peak_bytes
    for rank in record.ranks:
        expected = None if predicted_bytes is None else predicted_bytes[rank.stage]
        table.add_row(
            f"memory of rank {rank.rank}" + (f" (stage {rank.stage})" if plan.num_stages > 1 else ""),
            "–" if expected is None else format_bytes(expected),
            format_bytes(rank.peak_bytes),
            "–" if expected is None else f"{expected / rank.peak_bytes:.2f}",
        )
    return table
