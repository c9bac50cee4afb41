"""How every table of the terminal looks."""

from rich import box
from rich.table import Table


def plain_table(title: str) -> Table:
    """An empty table with a heading above it on the left and no frame."""
    return Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE, padding=(0, 1, 0, 0))
