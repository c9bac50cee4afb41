"""Time against memory: the frontier, this plan on it, the plans that lost, and the budget."""

from collections.abc import Sequence

from steelyard.plan.prediction import Alternative
from steelyard.report.html.chart import Chart, Mark, chart
from steelyard.report.html.contents import ReportContents
from steelyard.report.html.markup import Html, folded, section, table, tag
from steelyard.report.html.trade_off_charts import memory_chart
from steelyard.units import format_bytes, format_count, format_seconds


def trade_off_section(found: ReportContents) -> Html:
    """What more memory would buy, and what less would cost."""
    points = found.study.points
    others = [each for each in found.prediction.alternatives if each.step_time_s and each.memory_bytes]
    parts = [tag("p", _lead(found)), chart(_chart(found, others))]
    if points:
        rows = [
            (
                format_bytes(point.memory_bytes),
                format_seconds(point.step_time_s),
                format_count(point.tokens_per_s),
                point.setting,
                point.strategies,
            )
            for point in points
        ]
        headings = ("memory per device", "step", "tokens/s", "pipeline", "strategies")
        parts.append(folded("The frontier as a table", table(headings, rows, numeric=(0, 1, 2))))
    return section("frontier", "Time against memory", *parts)


def _lead(found: ReportContents) -> str:
    study = found.study
    if not study.points:
        return (
            "This plan beside those that lost. The frontier between them was not searched: steelyard report "
            f"{found.plan_file} --time-limit 10 does, steelyard frontier shows it on its own."
        )
    coverage = (
        "No plan worth having lies between its steps."
        if study.is_complete
        else "Between two steps the time lies between theirs; --time-limit looks at more of them."
    )
    fastest, slowest = study.points[0], study.points[-1]
    text = f"The line is the least step time within each memory budget among {study.scope}. {coverage}"
    if len(study.points) > 1:
        text += (
            f" It reaches from {format_seconds(slowest.step_time_s)} in {format_bytes(slowest.memory_bytes)} to "
            f"{format_seconds(fastest.step_time_s)} in {format_bytes(fastest.memory_bytes)}."
        )
    return text


def _chart(found: ReportContents, others: Sequence[Alternative]) -> Chart:
    prediction, points = found.prediction, found.study.points
    marks = [
        Mark(
            x=each.memory_bytes or 0,
            y=each.step_time_s or 0.0,
            title=f"{each.description}: {format_bytes(each.memory_bytes or 0)}, "
            f"{format_seconds(each.step_time_s or 0.0)}, {each.reason}",
            look="other",
        )
        for each in others
    ]
    own = f"this plan: {format_bytes(found.peak_bytes)}, {format_seconds(prediction.step_time_s)}"
    marks.append(Mark(x=found.peak_bytes, y=prediction.step_time_s, title=own, look="here", label="this plan"))
    shown = ("here", *(["step"] if points else []), *(["other"] if others else []))
    return memory_chart(
        [point.model_copy(update={"is_chosen": False}) for point in points], prediction.budget_bytes, marks, shown
    )
