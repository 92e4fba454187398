"""Names in tables are what a person types next."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from kakeya.cli.show.tables import fitting_table

NAME = "Qwen-Coder-Instruct-of-thirty-billion"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_letter_of_a_name_is_lost_in_a_narrow_terminal(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), record=True)
    table = fitting_table(console, "1", "2", "3", "4", "5", right=("2",))
    table.add_row(NAME, "516.5 516", "694256120012", "0, 0000000000", "0000, 0000, 0000 0000")
    console.print(table)
    shown = console.export_text()
    assert "".join(re.findall("[A-Za-z-]", shown)) == NAME
