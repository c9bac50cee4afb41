"""Measurements of a run compared with the prediction."""

from collections.abc import Iterable
from statistics import median

from steelyard.profiles.record import RankRecord, RunRecord
from steelyard.report.html.chart import Chart, Line, chart
from steelyard.report.html.contents import ReportContents
from steelyard.report.html.markup import Html, folded, section, table, tag
from steelyard.report.run_table import beside
from steelyard.units import format_bytes, format_plural, format_seconds

MOST_RANKS = 16
"""Maximum number of ranks shown. With more, only the fullest of each stage is shown."""


def measured_section(found: ReportContents) -> Html | None:
    """Build the section of step time, throughput and memory, predicted and measured, and the course of the run.

    None without a record.
    """
    record = found.record
    if record is None:
        return None
    ratio = found.prediction.step_time_s / record.median_step_s
    verdict = "as predicted" if abs(ratio - 1) < 0.01 else f"{abs(ratio - 1):.0%} {'less' if ratio < 1 else 'more'}"
    over = [rank for rank in record.ranks if rank.peak_bytes > _predicted_bytes(found, rank)]
    memory = (
        f"{format_plural(len(over), 'rank')} held more than the bound"
        if over
        else "no rank held more than was predicted"
    )
    typical = median(step.time_s for step in record.steps)
    losses = tuple((float(step.step), step.loss) for step in record.steps)
    rows = [
        (str(step.step), f"{step.loss:.4f}", format_seconds(step.time_s), f"{step.time_s / typical:.2f}")
        for step in record.steps
    ]
    lead = (
        f"{format_plural(len(record.steps), 'step')} on {record.num_devices} × {record.device}, median "
        f"{format_seconds(record.median_step_s)}; predicted {verdict}; {memory}."
    )
    return section(
        "measured",
        "Predicted and measured",
        tag("p", lead),
        table(("", "predicted", "measured", "predicted / measured"), _rows(found, record), numeric=(1, 2, 3)),
        chart(Chart(title="Loss of every step", x_label="step", y_label="loss", lines=(Line(points=losses),)))
        if len(losses) > 1
        else None,
        folded("Every step", table(("step", "loss", "time", "time / median"), rows, numeric=range(4))),
    )


def _rows(found: ReportContents, record: RunRecord) -> Iterable[tuple[str, ...]]:
    prediction = found.prediction
    yield beside("step time", prediction.step_time_s, record.median_step_s, format_seconds)
    speed = record.tokens_per_s / record.num_devices
    yield beside("tokens/s/device", prediction.tokens_per_s_per_device, speed, "{:,.0f}".format)
    if prediction.mfu is not None and record.mfu:
        yield beside("MFU", prediction.mfu, record.mfu, "{:.1%}".format)
    yield from _busy_rows(found, record)
    fullest = {rank.stage: rank for rank in sorted(record.ranks, key=lambda rank: (rank.peak_bytes, -rank.rank))}
    for rank in record.ranks if len(record.ranks) <= MOST_RANKS else (fullest[stage] for stage in sorted(fullest)):
        name = f"memory of rank {rank.rank} (stage {rank.stage})"
        yield beside(name, _predicted_bytes(found, rank), rank.peak_bytes, format_bytes)


def _busy_rows(found: ReportContents, record: RunRecord) -> Iterable[tuple[str, ...]]:
    """Yield a row per stage of a pipeline with the busy time per step of its busiest rank, predicted and measured."""
    busy: dict[int, float] = {}
    for rank in record.ranks:
        if rank.busy_s is not None:
            busy[rank.stage] = max(busy.get(rank.stage, 0.0), rank.busy_s)
    if found.plan.num_stages == 1:
        return
    for stage, seconds in sorted(busy.items()):
        if record.predicted_busy_s is not None:
            expected = record.predicted_busy_s[stage]
        else:
            expected = found.prediction.stages[stage].total_time_s * found.plan.num_microbatches
        yield beside(f"stage {stage} at work", expected, seconds, format_seconds)


def _predicted_bytes(found: ReportContents, rank: RankRecord) -> int:
    return found.prediction.stages[rank.stage].total_bytes
