"""One file that is a whole page: the frame of ``page.html`` with style, content and, where there is one, a script."""

from importlib import resources
from string import Template

from steelyard.report.html.markup import Child, join, tag


def document(title: str, description: str, content: Child, *, script: str | None = None) -> str:
    """The text of the page; ``script`` is the name of a file beside this one."""
    return Template(_file("page.html")).substitute(
        title=join(title),
        description=tag("meta", name="description", content=description),
        style=_file("style.css"),
        content=join(content),
        script=f"<script>\n{_file(script)}</script>" if script else "",
    )


def _file(name: str) -> str:
    return resources.files("steelyard.report.html").joinpath(name).read_text(encoding="utf-8")
