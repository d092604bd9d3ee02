"""Make the parts of the screen's blocks: titles, grids of label and text, plain tables.

A grid of a label and its text reads the same at 80 columns, at 120, without colour, in a file.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

LABEL_WIDTH = 10
Row = tuple[str, str | Text | None]


def title(text: str) -> RenderableType:
    """Open a block."""
    return Rule(Text(text.strip(), "bold"), align="left", style="cyan", characters="─")


def heading(text: str) -> RenderableType:
    """Open a part of a block."""
    return Padding(Text(text, "bold"), (1, 0, 0, 2), expand=False)


def indented(block: RenderableType) -> RenderableType:
    """Set a part below its heading."""
    return Padding(block, (0, 0, 0, 2), expand=False)


def grid(rows: Iterable[Row]) -> RenderableType:
    """Lay out labels and texts; a row without text is left out."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=LABEL_WIDTH, style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        if text is not None:
            grid.add_row(label, Text(text) if isinstance(text, str) else text)
    return indented(grid)


def plain_table(*columns: str) -> Table:
    """Make a plain table; a column whose name begins with `>` is set to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim")
    for column in columns:
        name = column.removeprefix(">")
        table.add_column(name, justify="left" if name == column else "right", overflow="fold")
    return table


def joined(*parts: str | None) -> str | None:
    """List what is known, parted by commas; None where nothing is."""
    return ", ".join(part for part in parts if part) or None
