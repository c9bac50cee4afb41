"""Charts with axes, lines and points that stretch with the page. Only the lines are SVG, so text keeps its size."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from steelyard.report.html.markup import Html, legend, tag

LEAST_SPAN = 0.04
"""Minimum span of an axis as a fraction of the values, so that negligible differences look negligible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point with its title, its look and the ``label`` next to it."""

    x: float
    y: float
    title: str
    look: str
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    look: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Labelled axes with lines and points. The y axis begins at zero, so that heights are proportional to amounts.

    ``limit`` is a vertical line and its meaning.
    """

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    marks: tuple[Mark, ...] = ()
    limit: tuple[float, str] | None = None
    x_ticks: tuple[float, ...] | None = None
    """Ticks of the x axis; evenly spaced if None."""
    legend: tuple[tuple[str, str], ...] = ()
    """Looks of points and lines with their meanings."""


def nice_ticks(low: float, high: float, wanted: int = 6) -> tuple[float, ...]:
    """Return about ``wanted`` round numbers from at or below ``low`` to at or above ``high``."""
    span = (high - low) or abs(high) or 1.0
    magnitude = 10.0 ** math.floor(math.log10(span / wanted))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if span / (factor * magnitude) <= wanted)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(index * step for index in range(first, last + 1))


def staircase(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return the points joined by steps: from each point horizontally to the right until the next one begins."""
    steps: list[tuple[float, float]] = []
    for x, y in points:
        if steps:
            steps.append((x, steps[-1][1]))
        steps.append((x, y))
    return tuple(steps)


def chart(drawn: Chart) -> Html:
    """Build the chart as an element that fills the available width."""
    places = [point for line in drawn.lines for point in line.points] + [(mark.x, mark.y) for mark in drawn.marks]
    xs = [x for x, _ in places] + ([drawn.limit[0]] if drawn.limit else [])
    ys = [0.0, *(y for _, y in places)]
    x_ticks, y_ticks = drawn.x_ticks or nice_ticks(*_range(xs)), nice_ticks(*_range(ys), 5)
    frame = _Frame(x_ticks, y_ticks)
    place = frame.x(drawn.limit[0]) if drawn.limit else 0.0
    side = " left" if place > 55 else ""
    figure = tag(
        "figure",
        tag("div", drawn.y_label, class_="y-label"),
        tag(
            "div",
            _picture(drawn, frame),
            [
                tag("span", _number(tick, x_ticks), class_="tick x", style=f"left:{frame.x(tick):.2f}%")
                for tick in x_ticks
            ],
            [
                tag("span", _number(tick, y_ticks), class_="tick y", style=f"top:{frame.y(tick):.2f}%")
                for tick in y_ticks
            ],
            tag("span", drawn.limit[1], class_=f"limit-text{side}", style=f"left:{place:.2f}%")
            if drawn.limit
            else None,
            [_mark(mark, frame) for mark in drawn.marks],
            class_="plot",
        ),
        tag("div", drawn.x_label, class_="x-label"),
        class_="chart",
        role="group",
        aria_label=drawn.title,
    )
    return Html(figure + legend(drawn.legend)) if drawn.legend else figure


class _Frame:
    """Conversion of numbers to per cent of the plot's width and height."""

    def __init__(self, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> None:
        self.x_ticks, self.y_ticks = x_ticks, y_ticks

    def x(self, value: float) -> float:
        low, high = self.x_ticks[0], self.x_ticks[-1]
        return round(100 * (value - low) / ((high - low) or 1.0), 3)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return round(100 - 100 * (value - low) / ((high - low) or 1.0), 3)


def _picture(drawn: Chart, frame: _Frame) -> Html:
    grid = "".join(f"M0 {frame.y(tick):g}H100" for tick in frame.y_ticks)
    grid += "".join(f"M{frame.x(tick):g} 0V100" for tick in frame.x_ticks)
    paths = [tag("path", d=grid, class_="grid-lines")]
    if drawn.limit is not None:
        paths.append(tag("path", d=f"M{frame.x(drawn.limit[0]):g} 0V100", class_="limit-line"))
    for line in drawn.lines:
        if line.points:
            joined = "L".join(f"{frame.x(x):g} {frame.y(y):g}" for x, y in line.points)
            paths.append(tag("path", d=f"M{joined}", class_=f"line {line.look}".strip()))
    return tag("svg", paths, viewBox="0 0 100 100", preserveAspectRatio="none", aria_hidden="true")


def _mark(mark: Mark, frame: _Frame) -> Html:
    x, y = frame.x(mark.x), frame.y(mark.y)
    label = tag("em", mark.label, class_="left" if x > 60 else None) if mark.label else None
    return tag(
        "span", label, class_=f"mark {mark.look}", style=f"left:{x:.2f}%;top:{y:.2f}%", title=mark.title, tabindex="0"
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the minimum and the maximum of the values, widened if they are nearly the same."""
    low, high = min(values), max(values)
    room = max(0.0, (LEAST_SPAN * max(abs(low), abs(high)) or 1.0) - (high - low)) / 2
    return low - room, high + room


def _number(value: float, ticks: Sequence[float]) -> str:
    """Format a number with enough decimals to distinguish the ticks."""
    step = min((abs(after - before) for before, after in pairwise(ticks)), default=0.0)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:,.{decimals}f}"
