"""The look of text on the terminal: consoles, tables, and paragraphs that keep numbers and names whole."""

import os
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions
from rich.table import Column, Table
from rich.text import Text

from steelyard.plan.choices import Advice
from steelyard.units import format_bytes, format_seconds

_UNWRAPPED = 10_000
"""Width in columns for files and pipes, whose readers search whole lines."""
_HELD = re.compile(r"(?<=[\d×±≤]) (?=\S)|(?<=\S) (?=[×(][+−\d])|(?<=steelyard) | (?=-o )|(?<= -o) ")
"""Blanks inside a quantity, ``82.3 s (+7.1%)``, or a command."""


def console(*, stderr: bool = False) -> Console:
    """Return a console that wraps lines on a terminal, or to ``COLUMNS`` if set, and nowhere else."""
    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal and not os.environ.get("COLUMNS"):
        made = Console(stderr=stderr, highlight=False, width=_UNWRAPPED)
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    """A label followed by a text, wrapped between words and never inside a quantity."""

    text: str
    label: str = ""
    indent: int = 10
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        lines = textwrap.wrap(
            _HELD.sub("\u00a0", self.text),
            max(options.max_width - self.indent, 20),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for number, line in enumerate(lines):
            start = Text((self.label if number == 0 else "").ljust(self.indent), style="bold")
            yield Text.assemble(start, (line.replace("\u00a0", " "), self.style), no_wrap=True, overflow="ignore")


def number(heading: str, *, whole: bool = True) -> Column:
    """Return a column set flush right, whose cells are never broken if ``whole``."""
    return Column(heading, justify="right", no_wrap=whole)


def name(heading: str = "") -> Column:
    """Return a column whose cells, such as names and links, stay on one line."""
    return Column(heading, no_wrap=True, overflow="ignore")


def folded(heading: str = "") -> Column:
    """Return a column whose cells take several lines rather than lose their ends."""
    return Column(heading, overflow="fold")


def cell(value: float | None, show: Callable[[Any], str]) -> str:
    """Return a value as ``show`` prints it, or a dash for None."""
    return "–" if value is None else show(value)


def framed_table(title: str, *columns: Column | str) -> Table:
    """Return an empty table with its title on the left."""
    return Table(*columns, title=title, title_justify="left", header_style="bold")


def plain_table(title: str, *columns: Column | str) -> Table:
    """Return an empty table without a frame."""
    table = framed_table(title, *columns)
    table.box, table.padding = box.SIMPLE, (0, 1, 0, 0)
    return table


def advice_table(changes: Sequence[Advice]) -> Table:
    """Return a row per change, the request itself first: minimum memory, saved memory, step time, effect."""
    table = plain_table(
        "What to change", name("change"), *map(number, ("minimum memory", "saves", "step")), "effect on the result"
    )
    own, *_ = changes
    memory = "" if own.fits else " and unlimited memory"
    table.caption, table.caption_justify = f"Percentages compare with the job as asked{memory}.", "left"
    for each in changes:
        short = f"{format_bytes(each.missing_bytes)} short"
        table.add_row(
            (each.options or "as asked").replace(" --", "\n--"),
            "no plan" if each.least_bytes is None else format_bytes(each.least_bytes),
            format_bytes(each.saved_bytes) if each.saved_bytes > 0 else "–",
            f"{format_seconds(each.step_s)} {round(100 * each.slowdown):+4d} %" if each.fits else short,
            each.result if each.options else "",
        )
    return table
