"""Panels as one SVG picture, written by hand: no browser, no library, readable in light and dark."""

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from steelyard.report.panels import Panel, PanelPoint

WIDTH, HEIGHT = 720, 340
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 44, 56
HEADING = 40
"""Height of the line above the panels."""

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1b1f24; }
  .heading { font-size: 15px; font-weight: 600; }
  .title { font-weight: 600; }
  .tick { font-size: 12px; fill: #57606a; }
  .page { fill: #ffffff; }
  .grid { stroke: #d8dee4; stroke-width: 1; }
  .axis { stroke: #57606a; stroke-width: 1; }
  .line { stroke: #0969da; stroke-width: 2; fill: none; }
  .point { fill: #0969da; }
  .chosen { fill: #bc4c00; stroke: #ffffff; stroke-width: 1.5; }
  .limit { stroke: #cf222e; stroke-width: 1.5; stroke-dasharray: 6 4; }
  .limit-text { fill: #cf222e; }
  .chosen-text { fill: #bc4c00; font-weight: 600; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .tick { fill: #9198a1; }
    .page { fill: #0d1117; }
    .grid { stroke: #2a313c; }
    .axis { stroke: #9198a1; }
    .line { stroke: #4493f8; }
    .point { fill: #4493f8; }
    .chosen { fill: #f0883e; stroke: #0d1117; }
    .limit { stroke: #f85149; }
    .limit-text { fill: #f85149; }
    .chosen-text { fill: #f0883e; }
  }
"""


def svg_figure(heading: str, panels: Sequence[Panel]) -> str:
    """The panels one below the other as a complete SVG file."""
    height = HEADING + HEIGHT * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(heading, {chr(34): "&quot;"})}">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}"/>',
        f'<text class="heading" x="{LEFT}" y="26">{escape(heading)}</text>',
    ]
    for index, panel in enumerate(panels):
        parts += [f'<g transform="translate(0 {HEADING + index * HEIGHT})">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def nice_ticks(low: float, high: float, wanted: int = 6) -> tuple[float, ...]:
    """Round numbers, about as many as wanted, from at or below ``low`` to at or above ``high``."""
    span = (high - low) or abs(high) or 1.0
    magnitude = 10.0 ** math.floor(math.log10(span / wanted))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if span / (factor * magnitude) <= wanted)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(index * step for index in range(first, last + 1))


def _panel(panel: Panel) -> list[str]:
    xs = [point.x for point in panel.points] + ([panel.limit[0]] if panel.limit else [])
    ys = [point.y for point in panel.points]
    x_ticks = panel.ticks or nice_ticks(min(xs), max(xs))
    y_ticks = nice_ticks(min(ys), max(ys))
    margin = 0.0 if panel.ticks is None else 0.04 * (max(x_ticks) - min(x_ticks))
    x_range = (min(x_ticks) - margin, max(x_ticks) + margin)
    scale = _Scale(x_range, (y_ticks[0], y_ticks[-1]))
    parts = [f'<text class="title" x="{LEFT}" y="24">{escape(panel.title)}</text>']
    parts += _axes(panel, scale, x_ticks, y_ticks)
    if panel.limit is not None:
        parts += _limit(scale, *panel.limit)
    parts.append(f'<polyline class="line" points="{_line(panel, scale)}"/>')
    return parts + [part for point in panel.points for part in _point(scale, point)]


class _Scale:
    """From numbers to places in the picture."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float]) -> None:
        self.x_range, self.y_range = x_range, y_range

    def x(self, value: float) -> float:
        low, high = self.x_range
        return round(LEFT + (value - low) / ((high - low) or 1.0) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return round(HEIGHT - BOTTOM - (value - low) / ((high - low) or 1.0) * (HEIGHT - TOP - BOTTOM), 1)


def _axes(panel: Panel, scale: _Scale, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in y_ticks:
        y = scale.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{_number(tick)}</text>')
    for tick in x_ticks:
        x = scale.x(tick)
        parts.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 5}"/>')
        parts.append(f'<text class="tick" x="{x}" y="{bottom + 20}" text-anchor="middle">{_number(tick)}</text>')
    middle = (TOP + bottom) / 2
    return [
        *parts,
        f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>',
        f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(panel.x_label)}</text>',
        f'<text transform="translate(20 {middle}) rotate(-90)" text-anchor="middle">{escape(panel.y_label)}</text>',
    ]


def _limit(scale: _Scale, value: float, text: str) -> list[str]:
    x = scale.x(value)
    near_right = x > WIDTH - 180
    anchor, shift = ("end", -6) if near_right else ("start", 6)
    return [
        f'<line class="limit" x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>',
        f'<text class="limit-text" x="{x + shift}" y="{TOP + 12}" text-anchor="{anchor}">{escape(text)}</text>',
    ]


def _line(panel: Panel, scale: _Scale) -> str:
    places: list[tuple[float, float]] = []
    for point in panel.points:
        if panel.is_staircase and places:
            places.append((scale.x(point.x), places[-1][1]))
        places.append((scale.x(point.x), scale.y(point.y)))
    return " ".join(f"{x},{y}" for x, y in places)


def _point(scale: _Scale, point: PanelPoint) -> list[str]:
    x, y = scale.x(point.x), scale.y(point.y)
    title = f"<title>{escape(point.text)}</title>"
    if not point.is_chosen:
        return [f'<circle class="point" cx="{x}" cy="{y}" r="3.5">{title}</circle>']
    anchor, shift = ("end", -10) if x > WIDTH - 120 else ("start", 10)
    return [
        f'<circle class="chosen" cx="{x}" cy="{y}" r="6.5">{title}</circle>',
        f'<text class="chosen-text" x="{x + shift}" y="{y - 9}" text-anchor="{anchor}">this plan</text>',
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"
