"""HTML as values: elements that escape their text and attributes, and the frame of a whole page.

Because elements escape, no section can forget it. `document` puts style, content and a script into ``page.html``.
"""

import html
from collections.abc import Iterable
from importlib import resources
from string import Template

from rich.table import Table

VOID = frozenset({"meta", "br", "line", "path", "rect", "circle", "polyline", "input"})
"""Elements that have no content."""


class Html(str):
    """Text that is already markup and is not escaped again."""

    __slots__ = ()


Child = Html | str | Iterable["Child"] | None


def tag(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """Build an element.

    ``class_`` stands for class and ``data_name`` for data-name. An attribute of None or False is omitted, and one of
    True has no value.
    """
    shown = "".join(_attribute(key, value) for key, value in attributes.items() if value is not None)
    if name in VOID:
        return Html(f"<{name}{shown}/>")
    return Html(f"<{name}{shown}>{join(children)}</{name}>")


def join(children: Child) -> Html:
    """Join the children, escaping plain text among them."""
    if children is None:
        return Html("")
    if isinstance(children, Html):
        return children
    if isinstance(children, str):
        return Html(html.escape(children, quote=False))
    return Html("".join(join(child) for child in children))


def table(headings: Iterable[str], rows: Iterable[Iterable[Child]], *, numeric: Iterable[int] = ()) -> Html:
    """Build a table that scrolls by itself if it is wider than the page. ``numeric`` columns are flush right."""
    right = set(numeric)

    def cells(name: str, row: Iterable[Child], **attributes: str) -> list[Html]:
        return [
            tag(name, cell, class_="number" if index in right else None, **attributes) for index, cell in enumerate(row)
        ]

    return tag(
        "div",
        tag(
            "table",
            tag("thead", tag("tr", cells("th", headings, scope="col"))),
            tag("tbody", [tag("tr", cells("td", row)) for row in rows]),
        ),
        class_="scroll",
        tabindex="0",
    )


def shown(made: Table) -> Html:
    """Build a table of the terminal for a page; rows with a style are in bold."""
    right = [index for index, column in enumerate(made.columns) if column.justify == "right"]
    headings = (str(column.header).replace("\n", " ") for column in made.columns)
    cells = zip(*(map(str, column.cells) for column in made.columns), strict=True)
    rows = ([tag("b", each) if row.style else each for each in own] for row, own in zip(made.rows, cells, strict=True))
    return table(headings, rows, numeric=right)


def folded(summary: str, *children: Child) -> Html:
    """Build content that opens when its summary is clicked."""
    return tag("details", tag("summary", summary), *children)


def legend(items: Iterable[tuple[str, Child]], *, is_tall: bool = False) -> Html:
    """Build a legend from pairs of swatch classes and words. ``is_tall`` if the words are sentences."""
    rows = [tag("li", tag("i", class_=f"swatch {look}"), tag("span", words)) for look, words in items]
    return tag("ul", rows, class_="legend tall" if is_tall else "legend")


def section(name: str, title: str, *children: Child) -> Html:
    """Build a section of the page with its heading. ``name`` is its anchor."""
    return tag("section", tag("h2", title), *children, id=name)


def _attribute(key: str, value: str | float | bool) -> str:
    name = key.rstrip("_").replace("_", "-")
    if isinstance(value, bool):
        return f" {name}" if value else ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return f' {name}="{html.escape(text)}"'


def document(title: str, description: str, content: Child, *, script: str | None = None) -> str:
    """Return the text of the page. ``script`` is the name of a file in this folder."""
    return Template(_file("page.html")).substitute(
        title=join(title),
        description=tag("meta", name="description", content=description),
        style=_file("style.css"),
        content=join(content),
        script=f"<script>\n{_file(script)}</script>" if script else "",
    )


def fragment(content: Child) -> str:
    """Return a part of a notebook, with the style of the pages scoped to this content."""
    scoped = _file("style.css").replace(":root", ":scope").replace("body {", ":scope {")
    scoped += ":scope { max-width: 68rem; padding: 1rem; }\n"
    return tag("div", Html(f"<style>@scope {{\n{scoped}}}</style>"), content, class_="steelyard")


def _file(name: str) -> str:
    return resources.files("steelyard.report.html").joinpath(name).read_text(encoding="utf-8")
