"""Leases as one table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from kakeya.cli.show.labels import NodeLabels
from kakeya.cli.show.tables import fitting_table, stdout_console
from kakeya.core.units import format_bytes
from kakeya.memory.leases.lease import LeaseState


def show_leases(
    leases: Sequence[Mapping[str, object]], *, granter: str | None, is_drained: bool
) -> None:
    """Print which jobs hold memory, and which wait."""
    console = stdout_console()
    if leases:
        console.print(_table(leases, console))
    else:
        console.print("no leases")
    for one in leases:
        if one["note"]:
            words = "waits for " if one["state"] == LeaseState.WAITING else ""
            text = f"{one['id']} {words}{one['note']}"
            console.print(text, highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"granted by node {NodeLabels().of(granter)}"
        if granter
        else "no node runs here; each command takes what is free"
    )
    if is_drained:
        console.print("drained: no leases are given until `kakeya lease drain --off`")


def _table(leases: Sequence[Mapping[str, object]], console: Console) -> Table:
    headings = ("lease", "state", "memory", "used", "priority", "pid", "for", "")
    table = fitting_table(console, *headings)
    for one in leases:
        leased, used = int(str(one["bytes"])), int(str(one["used_bytes"]))
        resources = ", ".join(map(str, _listed(one["resources"])))
        notes = [resources]
        notes += ["uses more than it leased"] if one["is_over"] else []
        table.add_row(
            str(one["id"]),
            str(one["state"]),
            format_bytes(leased),
            format_bytes(used) if used else "",
            str(one["priority"]),
            str(one["pid"]),
            f"{float(str(one['for_s'])):.0f} s",
            "; ".join(note for note in notes if note),
        )
    return table


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else ()
