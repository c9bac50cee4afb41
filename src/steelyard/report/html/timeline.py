"""The schedule of a step, pass by pass: a picture that needs no script, but supports zooming and tooltips with one.

Passes of one category are one path, so a step of thousands of them renders quickly. The picture is stretched over the
width of the page. Stage names and times are text next to it.
"""

import json
from collections.abc import Sequence

from steelyard.cost.simulator import Timeline
from steelyard.plan.plan import Plan
from steelyard.report.html.contents import ReportContents
from steelyard.report.html.markup import Html, folded, legend, section, table, tag
from steelyard.report.trace_events import PASSES, Slice, hidden_microbatches, stage_slices, without_hidden
from steelyard.units import format_seconds

WIDTH = 100_000
"""Width of the picture in units, which is one step."""
ROW, HEIGHT = 10, 8
"""Distance between stages, and height of a pass, in units."""
MOST_PASSES = 12_000
"""Maximum number of passes shown. A larger step shows only its first and its last microbatches."""
PASS_NAMES = {each: each for each in ("forward", "backward", "weight", "once", "bubble", "not shown")} | {
    "once": "optimizer"
}
MIN_SHARE = 0.0005


def timeline_section(found: ReportContents) -> Html | None:
    """Build the picture, the legend of its colours, and the bubbles of every stage by name; None without a timeline."""
    timeline, plan = found.timeline, found.plan
    if timeline is None:
        return None
    hidden = hidden_microbatches(plan.num_microbatches, max(2, MOST_PASSES // (2 * len(plan.parts))))
    stages = []
    for stage in range(timeline.pipeline.num_stages):
        passes = (each for each in stage_slices(timeline, stage, plan.num_chunks) if each.track == PASSES)
        stages.append(list(without_hidden(sorted(passes, key=lambda each: each.start_s), hidden)))
    categories = [
        category for category in PASS_NAMES if any(each.category == category for stage in stages for each in stage)
    ]
    pools = [f" on {name}" for name in found.stage_pools] or [""] * len(stages)
    times = (format_seconds(timeline.step_time_s * part / 4) for part in (1, 2, 3, 4))
    parts = [
        tag("p", _lead(timeline, plan, hidden, found.fixed_s)),
        tag(
            "div",
            _controls(),
            tag(
                "div",
                tag("div", [tag("span", f"stage {stage}", on) for stage, on in enumerate(pools)], class_="names"),
                tag("div", _picture(stages, categories, timeline.step_time_s), class_="view", tabindex="0"),
                class_="lanes",
                style=f"--stages:{len(stages)}",
            ),
            tag("div", [tag("span", text) for text in ("0", *times)], class_="axis"),
            _data(stages, timeline.step_time_s),
            class_="timeline",
            id="schedule",
        ),
        _legend(stages, categories, timeline.step_time_s),
    ]
    if len(stages) > 1:
        parts.append(folded("Bubbles by name", _bubble_table(timeline)))
    parts.append(tag("p", f"For a full trace: steelyard timeline {found.plan_file} -o trace.json", class_="hint"))
    return section("timeline", "One step, pass by pass", *parts)


def _lead(timeline: Timeline, plan: Plan, hidden: range, fixed_s: float) -> str:
    text = f"{plan.pipeline.schedule.title} with {plan.num_microbatches} microbatches, as simulated. "
    if timeline.pipeline.num_stages == 1:
        text = f"{plan.num_microbatches} microbatches one after another, as simulated; without stages nothing waits. "
    else:
        text += f"Stages wait for {timeline.bubble_share():.1%} of the time. "
    if fixed_s > 0:
        text += f"After the passes come {format_seconds(fixed_s)} that are fixed. "
    if hidden:
        text += f"Microbatches {hidden[0]} to {hidden[-1]} are drawn as one block."
    return text


def _controls() -> Html:
    names = {"whole": "Whole step", "start": "Start", "end": "End", "in": "+", "out": "−"}
    words = {"in": "zoom in", "out": "zoom out"}
    return tag(
        "div",
        [
            tag("button", text, type="button", data_zoom=name, aria_label=words.get(name))
            for name, text in names.items()
        ],
        tag("span", "drag to move, Ctrl and wheel or pinch to zoom", class_="hint"),
        class_="controls",
    )


def _picture(stages: Sequence[Sequence[Slice]], categories: Sequence[str], step_s: float) -> Html:
    paths = []
    for category in categories:
        drawn = ""
        for row, slices in enumerate(stages):
            for start, width in (_place(each, step_s) for each in slices if each.category == category):
                drawn += f"M{start} {row * ROW + 1}h{width}v{HEIGHT}h-{width}z"
        paths.append(tag("path", d=drawn, class_=f"pass {_look(category)}"))
    return tag(
        "svg",
        paths,
        viewBox=f"0 0 {WIDTH} {ROW * len(stages)}",
        preserveAspectRatio="none",
        role="img",
        aria_label="Passes and bubbles of every stage over the time of a step",
    )


def _place(each: Slice, step_s: float) -> tuple[int, int]:
    """Return the left edge and the width in units of the picture."""
    start, end = round(each.start_s / step_s * WIDTH), round(each.end_s / step_s * WIDTH)
    return start, max(end - start, 1)


def _data(stages: Sequence[Sequence[Slice]], step_s: float) -> Html:
    """Build the data of the script: name, microbatch, left edge and width per stage and slice."""
    names = list(dict.fromkeys(_name(each) for slices in stages for each in slices))
    index = {name: place for place, name in enumerate(names)}
    lanes = [
        [value for each in slices for value in (index[_name(each)], each.microbatch, *_place(each, step_s))]
        for slices in stages
    ]
    text = json.dumps({"step_s": step_s, "width": WIDTH, "names": names, "lanes": lanes}, separators=(",", ":"))
    return tag("script", Html(text.replace("<", "\\u003c")), type="application/json")


def _name(each: Slice) -> str:
    chunk = "" if each.chunk is None else f" of chunk {each.chunk}"
    is_told = each.category in ("bubble", "not shown")
    return (each.name if is_told else PASS_NAMES.get(each.category, each.category)) + chunk


def _legend(stages: Sequence[Sequence[Slice]], categories: Sequence[str], step_s: float) -> Html:
    """Build the legend: each type of pass with its share of all stages' time."""

    def share(category: str) -> float:
        seconds = sum(each.end_s - each.start_s for slices in stages for each in slices if each.category == category)
        return seconds / len(stages) / step_s

    return legend(
        (f"pass {_look(category)}", [tag("b", PASS_NAMES[category]), f" {share(category):.1%}"])
        for category in categories
    )


def _look(category: str) -> str:
    return category.replace(" ", "-")


def _bubble_table(timeline: Timeline) -> Html:
    sums: list[dict[str, float]] = []
    for stage in range(timeline.pipeline.num_stages):
        sums.append({})
        for bubble in timeline.bubbles(stage):
            sums[-1][bubble.reason] = sums[-1].get(bubble.reason, 0.0) + bubble.end_s - bubble.start_s
    reasons = list(dict.fromkeys(reason for each in sums for reason in each))
    rows = [
        [
            str(stage),
            *(_share(each.get(reason, 0.0), timeline.step_time_s) for reason in reasons),
            _share(sum(each.values()), timeline.step_time_s),
        ]
        for stage, each in enumerate(sums)
    ]
    return table(("stage", *reasons, "all"), rows, numeric=range(1, len(reasons) + 2))


def _share(seconds: float, step_s: float) -> str:
    return f"{format_seconds(seconds)} ({seconds / step_s:.1%})" if seconds / step_s >= MIN_SHARE else "–"
