"""Step time and memory by term: a stacked bar for every stage, and the same as a table."""

from collections.abc import Callable, Mapping, Sequence

from steelyard.report.html.contents import ReportContents, term
from steelyard.report.html.markup import Child, Html, folded, legend, section, table, tag
from steelyard.report.html.palette import MEMORY_COLOURS, colours, time_colours
from steelyard.units import format_bytes, format_plural, format_seconds

LABEL_SHARES = (0.02, 0.0085)
"""Fraction of a bar that a name inside it needs, fixed and per letter, at the page's full width."""


def time_section(found: ReportContents) -> Html:
    """Build the section of the seconds per step on each stage by term, which with waiting add up to the step time."""
    stages = stage_seconds(found)
    step_s = found.prediction.step_time_s
    names = _names(stages)
    slowest = max(range(len(stages)), key=lambda index: _busy_s(stages[index]))
    lead = f"Of {format_seconds(step_s)} a step,"
    if len(stages) > 1:
        lead += f" stage {slowest} works longest, {format_seconds(_busy_s(stages[slowest]))}; the others wait for it"
    else:
        lead = f"A step takes {format_seconds(step_s)}"
    top = max(names, key=lambda name: sum(stage.get(name, 0.0) for stage in stages))
    total = sum(sum(stage.values()) for stage in stages)
    lead += f". {top.capitalize()} takes {sum(stage.get(top, 0.0) for stage in stages) / total:.0%} of all time."
    return section(
        "time",
        "Where the time goes",
        tag("p", lead),
        stacked_bars(stages, names, colours(names, time_colours()), step_s, format_seconds, below=found.stage_pools),
        bar_legend(stages, names, colours(names, time_colours()), format_seconds),
        folded("As a table", _table(stages, names, format_seconds, "a step")),
    )


def memory_section(found: ReportContents) -> Html:
    """Build the section of the bytes per device of each stage by term, compared with the budget."""
    prediction = found.prediction
    stages = [{name: float(size) for name, size in stage.memory_bytes.items()} for stage in prediction.stages]
    names = memory_names(stages)
    budgets = [float(each) for each in prediction.stage_budgets()]
    totals = [sum(stage.values()) for stage in stages]
    fullest = prediction.fullest
    where = f"Stage {fullest} is the fullest: " if len(stages) > 1 else "A device holds at most "
    lead = f"{where}{format_bytes(totals[fullest])} of {format_bytes(budgets[fullest])}."
    if len(stages) > 1:
        emptiest = max(range(len(stages)), key=lambda index: budgets[index] - totals[index])
        of = f" of {format_bytes(budgets[emptiest])}" if found.plan.is_mixed else ""
        lead += f" The emptiest holds {format_bytes(totals[emptiest])}{of}."
    lead += " Each figure is an upper bound."
    limits, colour = " and ".join(map(format_bytes, dict.fromkeys(budgets))), colours(names, MEMORY_COLOURS)
    return section(
        "memory",
        "What fills the memory",
        tag("p", lead),
        stacked_bars(
            stages, names, colour, max(*budgets, *totals), format_bytes, limits=budgets, below=found.stage_pools
        ),
        bar_legend(stages, names, colour, format_bytes, f"the budget of {limits}"),
        folded("As a table", _table(stages, names, format_bytes, "memory", left_of=budgets)),
    )


def stage_seconds(found: ReportContents) -> list[dict[str, float]]:
    """Return seconds per step of each stage by term. With waiting and fixed time they add up to the step time."""
    prediction, count = found.prediction, found.plan.num_microbatches
    stages = []
    for stage in prediction.stages:
        terms = {name: seconds * count for name, seconds in stage.time_s.items()}
        rest = prediction.step_time_s - sum(terms.values())
        fixed = max(rest, 0.0) if len(prediction.stages) == 1 else min(max(found.fixed_s, 0.0), max(rest, 0.0))
        terms |= {"waiting": max(rest - fixed, 0.0), "fixed": fixed}
        stages.append({name: seconds for name, seconds in terms.items() if seconds > 0})
    return stages


def _busy_s(terms: Mapping[str, float]) -> float:
    return sum(seconds for name, seconds in terms.items() if name not in ("waiting", "fixed"))


def _names(stages: Sequence[Mapping[str, float]]) -> list[str]:
    """Return all terms, the usual ones in their usual order, waiting and fixed last."""
    found = dict.fromkeys(name for stage in stages for name in stage)
    last = [name for name in ("waiting", "fixed") if name in found]
    usual = [name for name in time_colours() if name in found and name not in last]
    return [*usual, *(name for name in found if name not in usual and name not in last), *last]


def memory_names(stages: Sequence[Mapping[str, float]]) -> list[str]:
    """Return all terms of memory, the usual ones in their usual order."""
    names = [name for name in MEMORY_COLOURS if any(name in stage for stage in stages)]
    return names + [name for name in _names(stages) if name not in names]


def stacked_bars(
    stages: Sequence[Mapping[str, float]],
    names: Sequence[str],
    colour: Mapping[str, str],
    whole: float,
    show: Callable[[float], str],
    *,
    limits: Sequence[float] | None = None,
    labels: Sequence[str] | None = None,
    below: Sequence[str] = (),
) -> Html:
    """Build a bar for each of ``stages``, or for other things named by ``labels``. ``whole`` spans the page width.

    ``below`` is the text under the names. A dashed line shows the limit of each bar, a single one if all are equal.
    """
    labels = labels or [f"stage {index}" for index in range(len(stages))]
    margin, letter = LABEL_SHARES
    rows, is_common = [], limits is not None and len(set(limits)) == 1
    for index, stage in enumerate(stages):
        side = [tag("b", labels[index]), tag("small", below[index]) if below else None]
        total = sum(stage.values())
        parts = [
            tag(
                "i",
                name if stage[name] / whole >= margin + letter * len(name) else "",
                class_=f"part {colour[name]}",
                style=f"width:{stage[name] / whole:.3%}",
                title=f"{name}: {show(stage[name])} ({stage[name] / total:.1%})",
            )
            for name in names
            if stage.get(name)
        ]
        shown = total if limits is not None or len(stages) == 1 else _busy_s(stage)
        over = limits is not None and total > limits[index]
        own = _limit(limits[index] / whole) if limits is not None and not is_common else None
        rows.append(
            tag(
                "div",
                tag("div", side, class_="side") if len(stages) > 1 else None,
                tag("div", own, parts, class_="bar"),
                tag("div", show(shown), class_="end over" if over else "end"),
                class_="row",
            )
        )
    line = _limit(limits[0] / whole) if limits is not None and is_common else None
    return tag("div", line, rows, class_="bars" if len(stages) > 1 else "bars alone")


def _limit(share: float) -> Html:
    return tag("div", tag("i", style=f"left:{share:.3%}"), class_="limit", aria_hidden="true")


def bar_legend(
    stages: Sequence[Mapping[str, float]],
    names: Sequence[str],
    colour: Mapping[str, str],
    show: Callable[[float], str],
    budget: str | None = None,
) -> Html:
    """Build the legend: each term with its value (the mean over several stages) and its share of the total."""
    total = sum(sum(stage.values()) for stage in stages)
    items: list[tuple[str, Child]] = []
    for name in names:
        value = sum(stage.get(name, 0.0) for stage in stages)
        mean = "" if len(stages) == 1 else "mean "
        items.append((colour[name], [term(name), f" {mean}{show(value / len(stages))} ({value / total:.1%})"]))
    if budget is not None:
        items.append(("line", [tag("b", "dashed line"), f" {budget}"]))
    return legend(items)


def _table(
    stages: Sequence[Mapping[str, float]],
    names: Sequence[str],
    show: Callable[[float], str],
    total: str,
    *,
    left_of: Sequence[float] | None = None,
) -> Html:
    headings = ("stage", *names, total, *(("left",) if left_of is not None else ()))
    rows = []
    for index, stage in enumerate(stages):
        used = sum(stage.values())
        left = []
        if left_of is not None:
            rest = left_of[index] - used
            left = [show(rest) if rest >= 0 else f"over by {show(-rest)}"]
        rows.append([str(index), *(show(stage.get(name, 0.0)) for name in names), tag("b", show(used)), *left])
    caption = tag("p", f"Seconds of a step, {format_plural(len(stages), 'stage')}.") if left_of is None else None
    return Html((caption or "") + table(headings, rows, numeric=range(1, len(headings))))
