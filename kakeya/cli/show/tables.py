"""How tables of the command line fit a terminal: no name in them is cut."""

from __future__ import annotations

from collections.abc import Collection

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.table import Table

WIDE = 100
"""Columns of a terminal from which lines between the columns of a table leave room for names."""
_PIPE = 200


def stdout_console() -> Console:
    """The terminal; a pipe or a file has no edge at which words would break."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE)


def fitting_table(
    console: Console, *headings: str, right: Collection[str] = (), title: str | None = None
) -> Table:
    """Make a table of these headings, some to the `right`, whose cells fold where they must."""
    table = Table(title=title, box=HEAVY_HEAD)
    if console.width < WIDE:
        table = Table(title=title, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    return table
