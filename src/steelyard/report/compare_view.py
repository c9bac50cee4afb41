"""Two plans side by side: time by term, memory by term, and the layers that differ."""

from collections.abc import Callable, Iterator
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from steelyard.plan.plan import Plan, headline
from steelyard.plan.prediction import Prediction, layers_text
from steelyard.report.tables import number, plain_table
from steelyard.units import format_bytes, format_seconds

LEAST = 1e-9
"""Less than this, of seconds or bytes, is nothing."""


def compare_view(first: Plan, second: Plan, names: tuple[str, str] = ("first", "second")) -> RenderableType:
    """Both headlines, then what differs; terms only where both plans have a prediction."""
    parts: list[RenderableType] = [
        Text(f"{name}: {headline(plan)}", style="bold") for name, plan in zip(names, (first, second), strict=True)
    ]
    if first.prediction is not None and second.prediction is not None:
        times = step_terms(first, first.prediction), step_terms(second, second.prediction)
        parts.append(_term_table("Time of a step, slowest stage", times, names, format_seconds))
        sizes = fullest_terms(first.prediction), fullest_terms(second.prediction)
        parts.append(_term_table("Memory of the fullest stage", sizes, names, format_bytes))
    return Group(*parts, layer_table(first, second, names))


def step_terms(plan: Plan, prediction: Prediction) -> dict[str, float]:
    """Seconds of a step on the slowest stage by term; ``waiting and fixed`` is what no term accounts for."""
    slowest = max(prediction.stages, key=lambda stage: stage.total_time_s)
    terms = {name: seconds * plan.num_microbatches for name, seconds in slowest.time_s.items()}
    return terms | {"waiting and fixed": max(0.0, prediction.step_time_s - sum(terms.values()))}


def fullest_terms(prediction: Prediction) -> dict[str, float]:
    """Bytes of the fullest stage by term."""
    fullest = max(prediction.stages, key=lambda stage: stage.total_bytes)
    return {name: float(size) for name, size in fullest.memory_bytes.items()}


def changed_layers(first: Plan, second: Plan) -> Iterator[tuple[int, int, str, str]]:
    """Runs of layers of which both plans say something else: first and last layer, and what each plan does."""
    pairs = list(zip(_layers(first), _layers(second), strict=True))
    for (before, after), run in groupby(enumerate(pairs), key=lambda item: item[1]):
        places = [index for index, _ in run]
        if before != after:
            yield places[0], places[-1], before, after


def layer_table(first: Plan, second: Plan, names: tuple[str, str]) -> RenderableType:
    """A row for every run of layers that differs."""
    chain, rows = first.chain(), list(changed_layers(first, second))
    if not rows:
        return Text("All layers have the same stage and strategy in both.")
    table = plain_table("Layers that differ", "layers", *names)
    for start, end, before, after in rows:
        table.add_row(layers_text(chain, start, end), before, after)
    return table


def _layers(plan: Plan) -> list[str]:
    return [
        f"stage {index % plan.num_stages}: {strategy}"
        for index, part in enumerate(plan.parts)
        for strategy in part.strategies
    ]


def _term_table(
    title: str, terms: tuple[dict[str, float], dict[str, float]], names: tuple[str, str], show: Callable[[float], str]
) -> Table:
    table = plain_table(title, "", *(number(column, whole=True) for column in (*names, "difference")))
    first, second = terms
    for name in dict.fromkeys((*first, *second)):
        before, after = first.get(name, 0.0), second.get(name, 0.0)
        if max(abs(before), abs(after)) > LEAST:
            table.add_row(name, show(before), show(after), signed(after - before, show))
    before, after = sum(first.values()), sum(second.values())
    table.add_row("total", show(before), show(after), signed(after - before, show), style="bold")
    return table


def signed(value: float, show: Callable[[float], str]) -> str:
    """A difference with its sign, as ``show`` prints amounts."""
    if abs(value) < LEAST:
        return "–"
    return ("+" if value >= 0 else "−") + show(abs(value))
