"""Names in tables are what a person types next."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kakeya.cli.show.tables import fitting_table

NAME = "Qwen3-Coder-30B-A3B-Instruct-4bit-DWQ"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_letter_of_a_name_is_lost_in_a_narrow_terminal(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), record=True)
    table = fitting_table(console, "model", "size", "digest", "here", "peers", right=("size",))
    table.add_row(NAME, "516.5 MiB", "69425cb6dc12", "yes, configured", "mini-2, mini-3, mini-4")
    console.print(table)
    lines = console.export_text().splitlines()
    shown = "".join(line[: line.find("  ")] if width < 100 else line for line in lines)
    assert "…" not in shown
    letters = iter(shown)
    assert all(letter in letters for letter in NAME)
