"""Solved plans as an interactive page: controls for the axes, and the plan, its memory, time and cost at each point.

All content is built here, the plans as compressed JSON, whose texts repeat. ``explore.js`` only selects what is visible
and finds the nearest point that reaches a milestone.
"""

import base64
import json
import zlib
from collections import Counter
from importlib.metadata import version
from itertools import groupby, product

from steelyard.plan.choices import Exploration
from steelyard.plan.plan import Plan, part_name
from steelyard.plan.prediction import layers_text, shortfall
from steelyard.report.html.bars import bar_legend, memory_names, stacked_bars
from steelyard.report.html.markup import Child, Html, document, folded, join, legend, section, table, tag
from steelyard.report.html.page import main_strategy, pipeline_words
from steelyard.report.html.palette import MEMORY_COLOURS, colours, strategy_classes
from steelyard.report.html.strategies import describe_strategy
from steelyard.units import format_bytes, format_count, format_plural, format_seconds

BILLION = 10**9
_HOUR_S = 3600
_MILESTONES = {"fits": "To fit", "twice": "Twice the {}", "half": "Half the time"}
MOST_STRATEGIES = 4
"""Maximum number of strategies shown unfolded."""
_KEYS = ("engine", "lever", "size", "devices", "memory")
_SWITCHES = 2
"""Number of axes, the first ones, with values in no order: radio buttons, not sliders."""


def explore_page(found: Exploration) -> str:
    """Return the complete page as the text of one self-contained file."""
    title = f"{found.model} on {found.cluster}: explore"
    header = tag(
        "header",
        tag("p", "Explore", class_="kicker"),
        tag("h1", found.model, tag("span", " on "), found.cluster),
        tag("noscript", tag("p", "The controls of this page need JavaScript.", class_="note")),
    )
    size = "context" if found.axes[2].name == "sequence length" else "batch"
    hint = (
        "Plans here are the fastest found. The command may take a simpler one that is at most 1 % slower; with ",
        *(tag("code", "--simplify 0", class_="whole"), " it does not."),
    )
    answer = tag(
        "div",
        tag("p", id="choice", class_="hint"),
        tag("p", id="verdict", class_="decision", aria_live="polite"),
        tag("div", id="figures", class_="tiles"),
        tag("div", id="plan"),
        section(
            "milestones",
            "What to change next",
            [_milestone(key, words.format(size)) for key, words in _MILESTONES.items()],
        ),
        section(
            "map",
            "All solved plans at this " + found.axes[2].name,
            tag("p", "Step time by devices and memory per device; the colour is tokens per second.", class_="hint"),
            tag("div", class_="scroll", tabindex="0", id="cells"),
        ),
        section("command", "Plan it", tag("p", tag("code", id="line")), tag("p", *hint, class_="hint")),
        class_="answer",
    )
    footer = tag("footer", _notes(found), tag("p", f"Written by steelyard {version('steelyard')}."))
    packed = zlib.compress(json.dumps(_data(found), separators=(",", ":")).encode(), 9)
    data = tag("script", base64.b64encode(packed).decode(), type="text/plain", id="data")
    body = tag("div", _controls(found), answer, class_="explore")
    return document(title, title, (header, body, footer, data), script="explore.js")


def _controls(found: Exploration) -> Html:
    """Build the controls as native inputs with labels: radio buttons for engines and levers, sliders for other axes."""
    switches = []
    for key, axis in zip(_KEYS, found.axes[:_SWITCHES], strict=False):
        inputs = [
            tag("input", type="radio", name=key, value=str(index), checked=index == axis.own)
            for index in range(len(axis.words))
        ]
        radios = [tag("label", each, tag("span", words)) for each, words in zip(inputs, axis.words, strict=True)]
        switches.append(tag("fieldset", tag("legend", axis.name), radios))
    sliders = [
        tag(
            "div",
            tag("label", axis.name, for_=key),
            tag("output", axis.words[axis.own], for_=key, id=f"{key}-value"),
            tag("input", type="range", id=key, min=0, max=len(axis.words) - 1, step=1, value=axis.own),
            class_="slider",
        )
        for key, axis in zip(_KEYS[_SWITCHES:], found.axes[_SWITCHES:], strict=True)
    ]
    return tag(
        "form",
        sliders[::-1],
        switches,
        tag("button", "Back to what was asked", type="reset"),
        tag("p", "The address of this page keeps the choice.", class_="hint", id="kept"),
        class_="choose",
        aria_label="What to plan for",
    )


def _milestone(key: str, title: str) -> Html:
    return tag(
        "div",
        tag("b", title),
        tag("p", id=f"{key}-text"),
        tag("button", "Show", type="button", id=f"{key}-show"),
        class_="milestone",
    )


def _data(found: Exploration) -> dict[str, object]:
    """Return the data of the script: the axes, and for each solved point a plan with its verdict, or a reason."""
    points: dict[tuple[int, ...], object] = {}
    for point in found.points:
        if point.plan is None:
            points[point.place] = point.reason
        else:
            budget = found.axes[-1].values[point.place[-1]]
            points[point.place] = [point.plan, _verdict(found.plans[point.plan], budget, found)]
    return {
        "keys": _KEYS,
        "axes": [axis.model_dump(exclude={"own"}) for axis in found.axes],
        "own": [axis.own for axis in found.axes],
        "command": found.command,
        "points": [points.get(place) for place in product(*(range(len(axis.words)) for axis in found.axes))],
        "plans": [{**_figures(plan, found), "html": _plan(plan, found)} for plan in found.plans],
    }


def _verdict(plan: Plan, budget_bytes: int, found: Exploration) -> str:
    left = budget_bytes - _held(plan)
    fits = f"fits with {format_bytes(left)} per device to spare"
    text = fits if left >= 0 else shortfall(_held(plan), budget_bytes, found.margin_bytes)
    return f"{text[:1].upper()}{text[1:]}: {format_seconds(plan.step_s)} a step."


def _held(plan: Plan) -> int:
    assert plan.prediction is not None, "explored plans are predicted"
    return plan.prediction.stages[plan.prediction.fullest].total_bytes


def _figures(plan: Plan, found: Exploration) -> dict[str, object]:
    """Return numbers for comparisons, and the tiles: name, figure and the text below it."""
    assert plan.prediction is not None, "as before"
    tokens = plan.prediction.tokens_per_s_per_device * plan.num_devices
    tiles = [
        ["step time", format_seconds(plan.step_s), f"{plan.global_batch:,} samples of {plan.seq_len:,} tokens"],
        ["tokens/s", format_count(tokens), f"{plan.prediction.tokens_per_s_per_device:,.0f} per device"],
        ["memory of the fullest device", format_bytes(_held(plan)), ""],
    ]
    if found.price_per_device_hour is not None:
        cost = found.price_per_device_hour * plan.num_devices / _HOUR_S / tokens * BILLION
        tiles.append(["cost of 10⁹ tokens", f"{cost:,.2f}", f"at {found.price_per_device_hour:g} per device-hour"])
    tiles.append(["proof", *plan.prediction.certificate.brief])
    return {"step_s": plan.step_s, "tokens": tokens, "bytes": _held(plan), "step": tiles[0][1], "tiles": tiles}


def _plan(plan: Plan, found: Exploration) -> Html:
    """Build a plan: the memory of the fullest device by term, on the scale of the largest budget, and its layers."""
    prediction = plan.prediction
    assert prediction is not None, "explored plans are predicted"
    held = {name: float(size) for name, size in prediction.stages[prediction.fullest].memory_bytes.items()}
    names, budgets = memory_names([held]), found.axes[-1].values
    colour = colours(names, MEMORY_COLOURS)
    whole = max(*budgets, sum(held.values()))
    where = f"On stage {prediction.fullest}" if plan.num_stages > 1 else "On every device"
    return join(
        [
            section(
                "memory",
                "Memory of the fullest device",
                tag("p", f"{where}, an upper bound. The dashed line is the memory per device.", class_="hint"),
                stacked_bars([held], names, colour, whole, format_bytes, limits=[float(budgets[-1])]),
                bar_legend([held], names, colour, format_bytes),
            ),
            section(
                "layers",
                "The plan",
                tag("p", f"Train it {pipeline_words(plan)}, most layers as ", tag("b", main_strategy(plan)), "."),
                tag("p", f"Step time {prediction.accuracy}.", class_="hint"),
                [tag("p", text, class_="note") for text in prediction.warnings],
                plan_layers(plan),
            ),
        ]
    )


def plan_layers(plan: Plan) -> Html:
    """Build a bar for each group of equal stages with a part per run of layers, the strategies in words, a table."""
    chain, classes, rows, cells = plan.chain(), strategy_classes(plan.strategies), list[Html](), list[tuple[str, ...]]()
    most = max(len(part.layers) for part in plan.parts)
    for _, group in groupby(enumerate(plan.parts), key=lambda each: (each[1].num_devices, each[1].strategies)):
        parts = list(group)
        (first, part), (last, _) = parts[0], parts[-1]
        name = (
            f"stage {part_name(plan, first)}"
            if first == last
            else f"stages {part_name(plan, first)}–{part_name(plan, last)}"
        )
        runs = [(run.strategy, run.layers[1] + 1 - run.layers[0], run.layers) for run in part.runs]
        drawn = [
            tag(
                "i",
                class_=f"part {classes[strategy]}",
                style=f"width:{count / most:.2%}",
                title=f"{count} × {strategy}",
            )
            for strategy, count, _ in runs
        ]
        each = "" if first == last else " each"
        side = [tag("b", name), tag("small", format_plural(len(part.layers), "layer") + each)]
        rows.append(tag("div", tag("div", side, class_="side"), tag("div", drawn, class_="bar"), class_="row"))
        for strategy, count, layers in runs:
            where = layers_text(chain, *layers) if first == last else format_plural(count, "layer") + each
            cells.append((name, where, str(strategy)))
    items: list[tuple[str, Child]] = [
        (
            classes[strategy],
            [
                tag("b", str(strategy)),
                f" on {format_plural(count, 'layer')}",
                tag("small", describe_strategy(strategy)),
            ],
        )
        for strategy, count in Counter(plan.strategies).most_common()
    ]
    shown = [tag("div", rows, class_="bars"), legend(items[:MOST_STRATEGIES], is_tall=True)]
    rest = [] if len(items) <= MOST_STRATEGIES else [legend(items[MOST_STRATEGIES:], is_tall=True)]
    return join([*shown, folded("All strategies, and as a table", rest, table(("stage", "layers", "strategy"), cells))])


def _notes(found: Exploration) -> list[Html]:
    """Build notes on the number of solved points, the unsolved ones, and what was not tried."""
    solved, total = len(found.points), found.num_places
    notes = [f"{solved} of {total} places are solved, each by the search under its own memory, devices and length."]
    if solved < total:
        notes.append(
            f"The time ran out before {total - solved}, shown as not solved. A longer --time-limit solves them."
        )
    return [tag("p", text) for text in (*notes, *(f"Not tried: {each}" for each in found.left_out))]
