"""Two plans as a page: their time and memory as bars on one scale, and the layers that differ."""

from collections.abc import Callable
from importlib.metadata import version

from steelyard.plan.plan import Plan, decision, pipeline_text
from steelyard.plan.prediction import layers_text
from steelyard.report.explain_view import ALIKE, Terms, changed_layers, compared_terms, term_rows
from steelyard.report.html.bars import stacked_bars
from steelyard.report.html.contents import term
from steelyard.report.html.markup import Html, document, legend, section, table, tag
from steelyard.report.html.palette import MEMORY_COLOURS, colours, time_colours


def compare_page(first: Plan, second: Plan, names: tuple[str, str]) -> str:
    """Return the complete page as the text of one file, with terms only if both plans have a prediction."""
    title = f"{names[0]} and {names[1]}"
    header = tag(
        "header",
        tag("p", "Two plans", class_="kicker"),
        tag("h1", names[0], tag("span", " and "), names[1]),
        [
            tag("p", tag("b", name), f": {decision(plan)}. {pipeline_text(plan)}")
            for name, plan in zip(names, (first, second), strict=True)
        ],
    )
    compared = zip(("time", "memory"), compared_terms(first, second), strict=False)
    sections = [_terms(name, *of_both, names) for name, of_both in compared]
    chain = first.chain()
    rows = [(layers_text(chain, start, end), *both) for start, end, *both in changed_layers(first, second)]
    layers = table(("layers", *names), rows) if rows else tag("p", ALIKE)
    sections.append(section("layers", "Layers that differ", layers))
    footer = tag("footer", tag("p", f"Written by steelyard {version('steelyard')}."))
    return document(title, title, (header, *sections, footer))


def _terms(name: str, title: str, terms: Terms, show: Callable[[float], str], names: tuple[str, str]) -> Html:
    """Build the section of both plans as bars on one scale, and every term of both with the difference."""
    rows = list(term_rows(terms, show))
    kept = [each for each, *_ in rows[:-1]]
    known = MEMORY_COLOURS | time_colours() | {"waiting and fixed": time_colours()["waiting"]}
    colour, most = colours(kept, known), max(sum(plan.values()) for plan in terms)
    return section(
        name,
        title,
        stacked_bars(terms, kept, colour, most, show, labels=names),
        legend((colour[each], term(each)) for each in kept),
        table(("", *names, "difference"), [(term(each), *shown) for each, *shown in rows], numeric=(1, 2, 3)),
    )
