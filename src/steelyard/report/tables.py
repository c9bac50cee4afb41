"""How every table of the terminal looks, and cells that pages have as well."""

from collections.abc import Callable
from typing import Any

from rich import box
from rich.table import Column, Table

from steelyard.plan.choices import Advice
from steelyard.units import format_bytes, format_seconds


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


def advice_cells(each: Advice) -> tuple[str, ...]:
    """A change, the least memory with it, what that saves, the step, and what the change makes of training."""
    fits = f"{format_seconds(each.step_s)} {100 * each.slowdown:+4.0f} %"
    return (
        each.options or "as asked",
        "no plan" if each.least_bytes is None else format_bytes(each.least_bytes),
        format_bytes(each.saved_bytes) if each.saved_bytes > 0 else "–",
        fits if each.fits else f"{format_bytes(each.missing_bytes)} short",
        each.result if each.options else "",
    )
