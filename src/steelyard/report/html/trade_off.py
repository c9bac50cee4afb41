"""Trade-offs as charts: time against memory with a plan and its alternatives, and time and money against devices.

`trade_off_section` is a section of the page of a plan, `frontier_page` a separate page with the tables.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib.metadata import version

from steelyard.plan.choices import DevicePoint, FrontierPoint, TradeOffs
from steelyard.plan.prediction import Alternative
from steelyard.report.frontier_table import (
    OFFERS,
    device_table,
    figure_title,
    frontier_note,
    frontier_table,
    offer_table,
    point_table,
)
from steelyard.report.html.chart import Chart, Line, Mark, chart, nice_ticks, staircase
from steelyard.report.html.contents import ReportContents
from steelyard.report.html.markup import Html, document, folded, join, section, shown, tag
from steelyard.units import GIB, MIB, format_bytes, format_count, format_seconds

_LOOKS = {
    "here": "this plan",
    "step": "least time within a budget",
    "other": "best plans of other pipeline configurations, which lost",
}


def trade_off_charts(found: TradeOffs) -> tuple[Chart, ...]:
    """Return the charts of time against memory, and of time, throughput and cost against devices.

    The latter are drawn if there are several device counts, with cost if there is a price.
    """
    drawn = [memory_chart(found.points, found.budget_bytes)] if found.points else []
    counted = [point for point in found.devices if point.step_time_s is not None]
    if len(counted) > 1:
        drawn += _device_charts(found, counted)
    offered = [offer for offer in found.offers if offer.step_time_s is not None]
    return (*drawn, _offer_chart(offered)) if len(offered) > 1 else tuple(drawn)


def memory_chart(
    points: Sequence[FrontierPoint], budget_bytes: int, others: Sequence[Mark] = (), legend: tuple[str, ...] = ()
) -> Chart:
    """Return the chart of the minimum step time within a memory budget.

    ``others`` are further plans, with x in bytes, and ``legend`` lists the looks to explain.
    """
    unit, name = (GIB, "GiB") if budget_bytes >= GIB else (MIB, "MiB")

    def title(point: FrontierPoint) -> str:
        size, seconds = format_bytes(point.memory_bytes), format_seconds(point.step_time_s)
        return f"{size}, {seconds} a step: {point.setting}; {point.strategies}"

    marks = tuple(
        _mark(point.memory_bytes / unit, point.step_time_s, title(point), is_chosen=point.is_chosen)
        for point in reversed(points)
    )
    return Chart(
        title="Least step time within a memory budget",
        x_label=f"memory per device ({name})",
        y_label="step time (s)",
        lines=(Line(points=staircase(_places(marks))),),
        marks=(*marks, *(replace(mark, x=mark.x / unit) for mark in others)),
        limit=(budget_bytes / unit, f"budget {format_bytes(budget_bytes)}"),
        legend=tuple((f"point {look}", words) for look, words in _LOOKS.items() if look in legend),
    )


def _device_charts(found: TradeOffs, counted: list[DevicePoint]) -> list[Chart]:
    """Return the charts of step time, throughput and, with a price, cost against the number of devices.

    Throughput is compared with linear scaling from the smallest number of devices.
    """

    def drawn(
        title: str, y_label: str, height: Callable[[DevicePoint], float | None], words: Callable[[DevicePoint], str]
    ) -> Chart:
        marks = tuple(
            _mark(
                point.num_devices,
                height(point) or 0.0,
                f"{point.cluster}: {words(point)}",
                is_chosen=point.cluster == found.cluster,
            )
            for point in counted
        )
        return Chart(
            title=title,
            x_label="devices",
            y_label=y_label,
            lines=(Line(points=_places(marks)),),
            marks=marks,
            x_ticks=tuple(mark.x for mark in marks),
        )

    time = drawn(
        "Least step time on a number of devices",
        "step time (s)",
        lambda point: point.step_time_s,
        lambda point: f"{format_seconds(point.step_time_s or 0.0)} a step; {point.setting}; {point.strategies}",
    )
    speed = drawn(
        "Throughput on a number of devices",
        "tokens/s",
        lambda point: point.tokens_per_s,
        lambda point: f"{format_count(point.tokens_per_s or 0.0)} tokens/s",
    )
    fewest = min(speed.marks, key=lambda mark: mark.x)
    ideal = Line(points=tuple((mark.x, fewest.y * mark.x / fewest.x) for mark in speed.marks), look="ideal")
    words = f"ideal: as many tokens/s for every device as on {fewest.x:.0f}"
    charts = [time, replace(speed, lines=(*speed.lines, ideal), legend=(("ideal", words),))]
    if found.price_per_device_hour is None:
        return charts
    cost = drawn(
        f"Cost at {found.price_per_device_hour:g} per device-hour",
        "cost of a billion tokens",
        lambda point: point.cost_per_billion_tokens,
        lambda point: f"{point.cost_per_billion_tokens or 0.0:,.2f} per billion tokens",
    )
    return [*charts, cost]


def _offer_chart(offered: list[DevicePoint]) -> Chart:
    """Return the chart of step time against the cost of tokens, both from zero, with a line through the offers that are
    worth having."""
    marks = tuple(
        _mark(
            offer.cost_per_billion_tokens or 0.0,
            offer.step_time_s or 0.0,
            f"{offer.cluster}: {format_seconds(offer.step_time_s or 0.0)} a step, "
            f"{offer.cost_per_billion_tokens or 0.0:,.2f} per billion tokens; {offer.setting}; {offer.strategies}",
            is_chosen=False,
        )
        for offer in offered
    )
    worth = [mark for mark, offer in zip(marks, offered, strict=True) if offer.is_worth_having]
    return Chart(
        title="Least time for the money",
        x_label="cost of a billion tokens",
        y_label="step time (s)",
        lines=(Line(points=staircase(_places(worth))),),
        marks=marks,
        x_ticks=nice_ticks(0.0, max(mark.x for mark in marks)),
    )


def _mark(x: float, y: float, title: str, *, is_chosen: bool) -> Mark:
    return Mark(
        x=float(x), y=y, title=title, look="here" if is_chosen else "step", label="this plan" if is_chosen else ""
    )


def _places(marks: Iterable[Mark]) -> tuple[tuple[float, float], ...]:
    return tuple((mark.x, mark.y) for mark in marks)


def trade_off_section(found: ReportContents) -> Html:
    """Build the section of the gain from more memory and the cost of less."""
    points = found.study.points
    others = [each for each in found.prediction.alternatives if each.step_time_s and each.memory_bytes]
    parts = [tag("p", _lead(found)), chart(_chart(found, others))]
    if points:
        prediction = found.prediction
        made = point_table("", points, prediction.budget_bytes, prediction.device_bytes)
        parts.append(folded("The frontier as a table", shown(made)))
    return section("frontier", "Time against memory", *parts)


def _lead(found: ReportContents) -> str:
    study = found.study
    if not study.points:
        return (
            "This plan and those that lost. The frontier between them was not searched: steelyard report "
            f"{found.plan_file} --time-limit 10 does, and steelyard frontier shows only the frontier."
        )
    coverage = (
        "No better plan lies between its steps."
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
    looks = ("here", *(["step"] if points else []), *(["other"] if others else []))
    return memory_chart(
        [point.model_copy(update={"is_chosen": False}) for point in points], prediction.budget_bytes, marks, looks
    )


def frontier_page(found: TradeOffs) -> str:
    """Return the complete page as the text of one self-contained file."""
    footer = tag("footer", tag("p", f"Written by steelyard {version('steelyard')}."))
    return document(figure_title(found), figure_title(found), (frontier_content(found), footer))


def frontier_content(found: TradeOffs) -> Html:
    """Build the choice in one sentence, its charts, and all figures."""
    header = tag(
        "header",
        tag("p", "Trade-offs", class_="kicker"),
        tag("h1", found.model, tag("span", " on "), found.cluster),
        tag("p", _page_lead(found), class_="decision"),
    )
    drawn = [section(f"panel-{index}", each.title, chart(each)) for index, each in enumerate(trade_off_charts(found))]
    return join([header, *drawn, section("numbers", "In numbers", *_tables(found))])


def _page_lead(found: TradeOffs) -> str:
    chosen = next((point for point in found.points if point.is_chosen), None)
    batch = f"{found.global_batch:,} × {found.seq_len:,} tokens a step, {found.precision}"
    if found.offers:
        worth = [offer for offer in found.offers if offer.is_worth_having]
        return f"{batch}. Worth having: {', '.join(offer.cluster for offer in worth) or 'none, since nothing fits'}."
    if chosen is None:
        return f"{batch}. Within {found.limit_text} nothing fits."
    return (
        f"{batch}. Within {found.limit_text} a step takes at least "
        f"{format_seconds(chosen.step_time_s)}: {chosen.setting}; {chosen.strategies}."
    )


def _tables(found: TradeOffs) -> list[Html]:
    parts = []
    if found.points:
        parts += [shown(frontier_table(found)), tag("p", frontier_note(found), class_="hint")]
    if found.devices:
        by_number = shown(device_table(found))
        parts.append(folded("By number of devices", by_number) if parts else by_number)
    if found.offers:
        parts += [shown(offer_table(found)), tag("p", OFFERS, class_="hint")]
    return parts
