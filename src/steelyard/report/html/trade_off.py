"""Time against memory: the frontier, this plan on it, the plans that lost, and the budget."""

from steelyard.report.html.chart import Chart, Line, Mark, chart, staircase
from steelyard.report.html.contents import ReportContents
from steelyard.report.html.markup import Html, folded, section, table, tag
from steelyard.units import GIB, MIB, format_bytes, format_count, format_seconds


def trade_off_section(found: ReportContents) -> Html:
    """What more memory would buy, and what less would cost."""
    points = found.study.points
    others = [each for each in found.prediction.alternatives if each.step_time_s and each.memory_bytes]
    parts = [tag("p", _lead(found)), chart(_chart(found)), _legend(bool(points), bool(others))]
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


def _chart(found: ReportContents) -> Chart:
    prediction = found.prediction
    unit, name = (GIB, "GiB") if prediction.budget_bytes >= GIB else (MIB, "MiB")
    points = [(point.memory_bytes / unit, point.step_time_s) for point in reversed(found.study.points)]
    marks = [
        Mark(
            x=point.memory_bytes / unit,
            y=point.step_time_s,
            title=f"{format_bytes(point.memory_bytes)}, {format_seconds(point.step_time_s)}: {point.setting}; "
            f"{point.strategies}",
            look="step",
        )
        for point in found.study.points
    ]
    marks += [
        Mark(
            x=each.memory_bytes / unit,
            y=each.step_time_s,
            title=f"{each.description}: {format_bytes(each.memory_bytes)}, {format_seconds(each.step_time_s)}, "
            f"{each.reason}",
            look="other",
        )
        for each in prediction.alternatives
        if each.step_time_s and each.memory_bytes
    ]
    own = f"this plan: {format_bytes(found.peak_bytes)}, {format_seconds(prediction.step_time_s)}"
    here = Mark(x=found.peak_bytes / unit, y=prediction.step_time_s, title=own, look="here", label="this plan")
    return Chart(
        title="Step time against memory per device",
        x_label=f"memory per device ({name})",
        y_label="step time (s)",
        lines=(Line(points=staircase(points)),),
        marks=(*marks, here),
        limit=(prediction.budget_bytes / unit, f"budget {format_bytes(prediction.budget_bytes)}"),
    )


def _legend(has_frontier: bool, has_others: bool) -> Html:
    items = [("here", "this plan")]
    if has_frontier:
        items.append(("step", "least time within a budget"))
    if has_others:
        items.append(("other", "best plans of other pipeline settings, which lost"))
    return tag(
        "ul",
        [tag("li", tag("i", class_=f"swatch point {look}"), tag("span", text)) for look, text in items],
        class_="legend",
    )
