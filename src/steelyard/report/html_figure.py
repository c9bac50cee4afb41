"""Panels as one self-contained page with plotly inside: works offline, in light and dark."""

import html
from collections.abc import Sequence
from typing import Any

from steelyard.report.panels import Panel, PanelPoint

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
  :root {{ color-scheme: light dark; }}
  body {{ font: 16px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 60rem; padding: 0 1rem;
         color: #1b1f24; background: #ffffff; }}
  h1 {{ font-size: 1.2rem; }}
  p {{ color: #57606a; }}
  @media (prefers-color-scheme: dark) {{
    body {{ color: #e6edf3; background: #0d1117; }}
    p {{ color: #9198a1; }}
  }}
</style>
<script>{library}</script>
</head>
<body>
<h1>{title}</h1>
{figures}
<p>{note}</p>
<script>
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  function paint() {{
    const ink = dark.matches ? "#e6edf3" : "#1b1f24";
    const grid = dark.matches ? "#2a313c" : "#d8dee4";
    for (const figure of document.querySelectorAll(".plotly-graph-div")) {{
      Plotly.relayout(figure, {{
        "font.color": ink, "xaxis.gridcolor": grid, "yaxis.gridcolor": grid,
        "xaxis.linecolor": ink, "yaxis.linecolor": ink,
      }});
    }}
  }}
  dark.addEventListener("change", paint);
  paint();
</script>
</body>
</html>
"""

BLUE, ORANGE, RED = "#3b82d6", "#d4691e", "#d93a3f"
"""Colours that can be told apart on white and on black."""


def html_figure(title: str, panels: Sequence[Panel], *, note: str) -> str:
    """A complete page with one interactive chart for each panel; ``note`` is printed below them."""
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    figures = "\n".join(
        _figure(panel).to_html(
            full_html=False, include_plotlyjs=False, div_id=f"panel-{index}", config={"responsive": True}
        )
        for index, panel in enumerate(panels)
    )
    return PAGE.format(title=html.escape(title), library=get_plotlyjs(), figures=figures, note=html.escape(note))


def _figure(panel: Panel) -> Any:
    import plotly.graph_objects as go  # type: ignore[import-untyped]

    figure = go.Figure(layout=_layout(panel))
    figure.add_trace(
        go.Scatter(
            x=[point.x for point in panel.points],
            y=[point.y for point in panel.points],
            mode="lines+markers",
            line={"shape": "hv" if panel.is_staircase else "linear", "color": BLUE, "width": 2},
            marker={"size": 7, "color": BLUE},
            text=[point.text for point in panel.points],
            hovertemplate="%{text}<extra></extra>",
            name="best plans",
        )
    )
    chosen = [point for point in panel.points if point.is_chosen]
    if chosen:
        figure.add_trace(_chosen(chosen))
    if panel.limit is not None:
        figure.add_vline(
            x=panel.limit[0],
            line={"color": RED, "dash": "dash"},
            annotation={"text": panel.limit[1], "font": {"color": RED}},
        )
    return figure


def _chosen(points: list[PanelPoint]) -> Any:
    import plotly.graph_objects as go

    return go.Scatter(
        x=[point.x for point in points],
        y=[point.y for point in points],
        mode="markers",
        marker={"size": 14, "color": ORANGE, "symbol": "star"},
        text=[point.text for point in points],
        hovertemplate="%{text}<extra></extra>",
        name="this plan",
    )


def _layout(panel: Panel) -> dict[str, Any]:
    axis: dict[str, Any] = {"showline": True, "zeroline": False, "automargin": True}
    x_axis = axis | {"title": {"text": panel.x_label}}
    if panel.ticks is not None:
        x_axis |= {"tickmode": "array", "tickvals": list(panel.ticks)}
    return {
        "title": {"text": panel.title},
        "xaxis": x_axis,
        "yaxis": axis | {"title": {"text": panel.y_label}},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "height": 420,
        "margin": {"l": 60, "r": 20, "t": 60, "b": 60},
        "legend": {"orientation": "h", "y": 1.08, "x": 1, "xanchor": "right"},
        "hoverlabel": {"namelength": -1},
    }
