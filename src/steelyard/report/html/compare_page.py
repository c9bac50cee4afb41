"""Two plans as a page: their time and memory as bars of one scale, and the layers that differ."""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version

from steelyard.plan.plan import Plan, headline
from steelyard.plan.prediction import layers_text
from steelyard.report.compare_view import changed_layers, fullest_terms, signed, step_terms
from steelyard.report.html.bars import stacked_bars
from steelyard.report.html.contents import term
from steelyard.report.html.markup import Html, document, legend, section, table, tag
from steelyard.report.html.palette import MEMORY_COLOURS, colours, time_colours
from steelyard.units import format_bytes, format_seconds


def compare_page(first: Plan, second: Plan, names: tuple[str, str]) -> str:
    """The complete page as the text of one file; terms only where both plans have a prediction."""
    title = f"{names[0]} and {names[1]}"
    header = tag(
        "header",
        tag("p", "Two plans", class_="kicker"),
        tag("h1", names[0], tag("span", " and "), names[1]),
        [
            tag("p", tag("b", name), f": {'; '.join(headline(plan).splitlines())}")
            for name, plan in zip(names, (first, second), strict=True)
        ],
    )
    sections = []
    if first.prediction is not None and second.prediction is not None:
        times = step_terms(first, first.prediction), step_terms(second, second.prediction)
        known = time_colours() | {"waiting and fixed": time_colours()["waiting"]}
        sections.append(_terms("time", "Time of a step, slowest stage", times, names, known, format_seconds))
        sizes = fullest_terms(first.prediction), fullest_terms(second.prediction)
        sections.append(_terms("memory", "Memory of the fullest stage", sizes, names, MEMORY_COLOURS, format_bytes))
    sections.append(section("layers", "Layers that differ", _layers(first, second, names)))
    footer = tag("footer", tag("p", f"Written by steelyard {version('steelyard')}."))
    return document(title, title, (header, *sections, footer))


def _terms(
    name: str,
    title: str,
    terms: tuple[dict[str, float], dict[str, float]],
    names: tuple[str, str],
    known: Mapping[str, str],
    show: Callable[[float], str],
) -> Html:
    """Both plans as bars of one scale, and every term of both with the difference."""
    kept = list(dict.fromkeys(each for plan in terms for each in plan if plan[each] > 0))
    colour, totals = colours(kept, known), [sum(plan.values()) for plan in terms]
    rows: list[Sequence[str | Html]] = [
        (term(each), show(before), show(after), signed(after - before, show))
        for each in kept
        for before, after in [(terms[0].get(each, 0.0), terms[1].get(each, 0.0))]
    ]
    rows.append((tag("b", "total"), *map(show, totals), signed(totals[1] - totals[0], show)))
    return section(
        name,
        title,
        stacked_bars(terms, kept, colour, max(totals), show, labels=names),
        legend((colour[each], term(each)) for each in kept),
        table(("", *names, "difference"), rows, numeric=(1, 2, 3)),
    )


def _layers(first: Plan, second: Plan, names: tuple[str, str]) -> Html:
    chain = first.chain()
    rows = [(layers_text(chain, start, end), *both) for start, end, *both in changed_layers(first, second)]
    if not rows:
        return tag("p", "All layers have the same stage and strategy in both.")
    return table(("layers", *names), rows)
