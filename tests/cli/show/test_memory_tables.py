"""The memory of a node as a table."""

from __future__ import annotations

import io

from rich.console import Console

from kakeya.cli.show.memory_tables import show_memory
from kakeya.core.units import MIB


def test_the_table_says_which_leases_wait_and_why_none_is_given() -> None:
    held = {"state": "granted", "name": "held", "bytes": MIB}
    waits = {"state": "waiting", "name": "train", "bytes": 3 * MIB, "note": "2.0 MiB are free"}
    leases = {"problem": "no store", "is_drained": True, "leases": [held, waits]}
    console = Console(width=200, record=True, file=io.StringIO())
    show_memory({"budget_bytes": MIB, "leases": leases}, console)
    text = console.export_text()
    assert "waiting  train for a lease of 3.0 MiB: 2.0 MiB are free" in text
    assert "not given now: no store" in text
    assert "drained" in text
    assert "held" not in text


def test_names_stay_whole_in_a_narrow_window() -> None:
    size = 266 * MIB + MIB // 2
    resident = {
        "model": "kakeya-tiny",
        "role": "text-target",
        "state": "ready",
        "estimate_bytes": size,
        "measured_bytes": size,
        "lent_bytes": size,
        "leases": 0,
        "idle_s": 123.0,
        "is_pinned": True,
    }
    console = Console(width=80, record=True, file=io.StringIO())
    show_memory({"budget_bytes": MIB, "residents": [resident]}, console)
    text = console.export_text()
    for word in (
        "kakeya-tiny ",
        "text-target ",
        "ready, pinned ",
        "estimated",
        "266.5 MiB",
        "123 s",
    ):
        assert word in text, text
