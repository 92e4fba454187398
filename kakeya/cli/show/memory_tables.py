"""The ledger as a table of the command line. All texts are printable already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kakeya.cli.show.tables import fitting_table
from kakeya.core.units import format_bytes

Json = Mapping[str, object]
_SHOWN_EVENTS = 6
_SHOWN_EVICTIONS = 3


def show_memory(memory: Json, console: Console) -> None:
    """Print the residents with their bytes, the requests that wait, and the latest events."""
    if not memory:
        return
    source = "" if memory.get("level") == "nominal" else f" by {memory.get('source')}"
    console.print(
        f"memory  {_size(memory.get('committed_bytes'))} of {_size(memory.get('budget_bytes'))} "
        f"lent, {_size(memory.get('free_bytes'))} free; pressure {memory.get('level')}{source}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    profile = memory.get("profile")
    if isinstance(profile, dict) and profile.get("name") != "normal":
        line = f"profile {profile.get('name')}: {profile.get('reason')}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(_table(memory, console))
    waiting = [str(one.get("model")) for one in _objects(memory, "waiting")]
    if waiting:
        console.print(
            f"waiting  {', '.join(waiting)}", highlight=False, markup=False, soft_wrap=True
        )
    leases = memory.get("leases")
    for line in _about_leases(leases) if isinstance(leases, dict) else ():
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for one in _last(memory):
        about = f" {one.get('model')}" if one.get("model") else ""
        console.print(
            f"{_age(one.get('age_s'))} ago  {one.get('what')}{about}: {one.get('why')}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def _last(memory: Json) -> list[Json]:
    """Choose the latest events, and the latest evictions if they are older than those."""
    events = _objects(memory, "last_events")[:_SHOWN_EVENTS]
    evictions = _objects(memory, "last_evictions")[:_SHOWN_EVICTIONS]
    return [*events, *(one for one in evictions if one not in events)]


def _about_leases(leases: Json) -> Iterator[str]:
    """Print what the table lacks of leases: a held lease is a resident in the table."""
    if leases.get("problem"):
        yield f"leases  not given now: {leases.get('problem')}"
    if leases.get("is_drained"):
        yield "leases  drained: no new ones are given"
    for one in _objects(leases, "leases"):
        if one.get("state") == "waiting":
            note = f": {one.get('note')}" if one.get("note") else ""
            yield f"waiting  {one.get('name')} for a lease of {_size(one.get('bytes'))}{note}"


def _table(memory: Json, console: Console) -> Table:
    sizes = ("estimated", "measured", "lent", "users", "idle")
    headings = ("what", "role", "state", *sizes)
    table = fitting_table(console, *headings, right=sizes, title="memory")
    for row in _rows(memory):
        table.add_row(*map(escape, row))
    return table


def _rows(memory: Json) -> Iterator[tuple[str, ...]]:
    for one in _objects(memory, "residents"):
        yield (
            str(one.get("model")),
            str(one.get("role")),
            f"{one.get('state')}{', pinned' if one.get('is_pinned') else ''}",
            _size(one.get("estimate_bytes")),
            _size(one.get("measured_bytes")),
            _size(one.get("lent_bytes")),
            str(one.get("leases")),
            "" if one.get("leases") else _age(one.get("idle_s")),
        )
    for tenant in _objects(memory, "tenants"):
        held = tenant.get("held_bytes")
        if held:
            spare = f"{_size(tenant.get('spare_bytes'))} spare"
            yield (
                str(tenant.get("name")),
                str(tenant.get("rung")),
                spare,
                "",
                "",
                _size(held),
                "",
                "",
            )
    foreign = memory.get("foreign")
    if isinstance(foreign, dict):
        for holder, size in foreign.items():
            yield (str(holder), "other process", "", "", "", _size(size), "", "")


def _objects(source: Json, key: str) -> list[Json]:
    value = source.get(key)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _size(value: object) -> str:
    return format_bytes(value) if isinstance(value, int | float) else ""


def _age(value: object) -> str:
    return f"{value:.0f} s" if isinstance(value, int | float) else "?"
