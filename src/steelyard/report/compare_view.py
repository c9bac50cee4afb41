"""Two plans side by side: time by term, memory by term, and the layers that differ."""

from collections.abc import Callable, Iterator
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from steelyard.plan.plan import Plan
from steelyard.plan.prediction import Prediction, layers_text
from steelyard.report.plan_table import decision, pipeline_text
from steelyard.report.tables import Paragraph, number, plain_table
from steelyard.units import format_bytes, format_seconds

LEAST = 1e-9
"""Seconds or bytes below this count as zero."""
ALIKE = "All layers have the same stage and strategy in both plans."


def compare_view(first: Plan, second: Plan, names: tuple[str, str] = ("first", "second")) -> RenderableType:
    """Return both headlines, then the differences; terms only if both plans have a prediction."""
    parts: list[RenderableType] = [
        Paragraph(text=f"{name}: {decision(plan)}. {pipeline_text(plan)}", indent=0, style="bold")
        for name, plan in zip(names, (first, second), strict=True)
    ]
    for title, terms, show in compared_terms(first, second):
        table = plain_table(title, "", *(number(column) for column in (*names, "difference")))
        *rows, total = term_rows(terms, show)
        for row in rows:
            table.add_row(*row)
        table.add_row(*total, style="bold")
        parts.append(table)
    return Group(*parts, layer_table(first, second, names))


Terms = tuple[dict[str, float], dict[str, float]]


def compared_terms(first: Plan, second: Plan) -> Iterator[tuple[str, Terms, Callable[[float], str]]]:
    """Yield time and memory of both plans by term, if both have a prediction."""
    if first.prediction is not None and second.prediction is not None:
        times = step_terms(first, first.prediction), step_terms(second, second.prediction)
        yield "Step time, slowest stage", times, format_seconds
        sizes = fullest_terms(first.prediction), fullest_terms(second.prediction)
        yield "Memory of the fullest stage", sizes, format_bytes


def term_rows(terms: Terms, show: Callable[[float], str]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the name of each term, its amount in both plans, and the difference; the total last."""
    names = dict.fromkeys(name for each in terms for name in each)
    amounts = {name: tuple(each.get(name, 0.0) for each in terms) for name in names}
    kept = {name: both for name, both in amounts.items() if max(map(abs, both)) > LEAST}
    for name, (before, after) in (*kept.items(), ("total", tuple(sum(each.values()) for each in terms))):
        difference = ("+" if after >= before else "−") + show(abs(after - before))
        yield name, show(before), show(after), "–" if abs(after - before) < LEAST else difference


def step_terms(plan: Plan, prediction: Prediction) -> dict[str, float]:
    """Return seconds per step on the slowest stage by term; ``waiting and fixed`` is the rest."""
    slowest = max(prediction.stages, key=lambda stage: stage.total_time_s)
    terms = {name: seconds * plan.num_microbatches for name, seconds in slowest.time_s.items()}
    return terms | {"waiting and fixed": max(0.0, prediction.step_time_s - sum(terms.values()))}


def fullest_terms(prediction: Prediction) -> dict[str, float]:
    """Return bytes of the fullest stage by term."""
    fullest = max(prediction.stages, key=lambda stage: stage.total_bytes)
    return {name: float(size) for name, size in fullest.memory_bytes.items()}


def changed_layers(first: Plan, second: Plan) -> Iterator[tuple[int, int, str, str]]:
    """Yield runs of layers that differ: first and last layer, and their stage and strategy in each plan."""
    pairs = list(zip(_layers(first), _layers(second), strict=True))
    for (before, after), run in groupby(enumerate(pairs), key=lambda item: item[1]):
        places = [index for index, _ in run]
        if before != after:
            yield places[0], places[-1], before, after


def layer_table(first: Plan, second: Plan, names: tuple[str, str]) -> RenderableType:
    """Return a row per run of layers that differs."""
    chain, rows = first.chain(), list(changed_layers(first, second))
    if not rows:
        return Text(ALIKE)
    table = plain_table("Layers that differ", "layers", *names)
    for start, end, before, after in rows:
        table.add_row(layers_text(chain, start, end), before, after)
    return table


def _layers(plan: Plan) -> list[str]:
    return [
        f"stage {plan.pipeline.stage_of(index)}: {strategy}"
        for index, part in enumerate(plan.parts)
        for strategy in part.strategies
    ]
