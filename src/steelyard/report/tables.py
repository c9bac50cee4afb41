"""How every table of the terminal looks."""

from collections.abc import Callable
from typing import Any

from rich import box
from rich.table import Column, Table


def number(heading: str, *, whole: bool = False) -> Column:
    """A column that is set flush right; what is ``whole`` is never broken into lines."""
    return Column(heading, justify="right", no_wrap=whole)


def cell(value: float | None, show: Callable[[Any], str]) -> str:
    """A value as ``show`` prints it; a dash for what is not known."""
    return "–" if value is None else show(value)


def framed_table(title: str, *columns: Column | str) -> Table:
    """An empty table with a heading above it on the left."""
    return Table(*columns, title=title, title_justify="left", header_style="bold")


def plain_table(title: str, *columns: Column | str) -> Table:
    """The same without a frame."""
    table = framed_table(title, *columns)
    table.box, table.padding = box.SIMPLE, (0, 1, 0, 0)
    return table
