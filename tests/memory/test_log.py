"""The log of a node's memory: its lines, and how long it keeps them."""

from __future__ import annotations

import io

from rich.console import Console

from kakeya.cli.show.memory_tables import show_memory
from kakeya.core import errors
from kakeya.core.units import MIB
from kakeya.memory.arbiter.arbiter import Arbiter
from kakeya.memory.arbiter.events import (
    Evicted,
    LoadFailure,
    MemoryPressure,
    ModelLoad,
    ModelUnload,
    RequestRefused,
)
from kakeya.memory.arbiter.plan import Reason
from kakeya.memory.arbiter.policy import PressureLevel
from kakeya.memory.arbiter.resident import ResidentKey
from kakeya.memory.figures import describe_memory
from kakeya.memory.log import KEPT, MemoryLog
from kakeya.memory.machine.panics import NORMAL

KEY = ResidentKey("draft", "small")


def test_the_log_keeps_the_last_things_and_says_why() -> None:
    log = MemoryLog(lambda: 5.0)
    log.take(ModelLoad(key=KEY, load_s=1.0, estimate_bytes=MIB, measured_bytes=2 * MIB))
    log.take(MemoryPressure(level=PressureLevel.LOW, source="os"))
    log.take(Evicted(key=KEY, reason=Reason.PRESSURE, bytes=MIB))
    log.take(Evicted(key=KEY, reason=Reason.SWAP, bytes=MIB, room_for=ResidentKey("text", "big")))
    log.take(LoadFailure(key=KEY, error=errors.LoadFailed("a broken file")))
    log.take(RequestRefused(key=KEY, error=errors.MemoryRefused("no room")))
    assert [(one.what, one.why) for one in log.last()] == [
        ("loaded", "1.0 s, estimated 1.0 MiB, lent 2.0 MiB"),
        ("pressure low", "by os"),
        ("evicted", "gave 1.0 MiB: pressure was low by os"),
        ("evicted", "gave 1.0 MiB to big (swap)"),
        ("load failed", "a broken file"),
        ("refused", "no room"),
    ]
    job = ResidentKey("job", "train-1")
    log.take(ModelLoad(key=job, load_s=0.0, estimate_bytes=MIB, measured_bytes=MIB))
    log.take(ModelUnload(key=job, reason=Reason.RELEASE))
    assert [(one.what, one.model) for one in log.last()[-2:]] == [
        ("leased", "train-1"),
        ("lease ended", "train-1"),
    ]
    before = len(log.last())
    for _ in range(9):
        log.take(RequestRefused(key=KEY, error=errors.MemoryRefused("no room")))
        log.take(RequestRefused(key=job, error=errors.MemoryRefused("full", retry_after_s=10.0)))
    assert len(log.last()) == before + 1, "what is said again is told once, and who waits waits on"
    for level in (PressureLevel.NOMINAL, PressureLevel.LOW) * KEPT:
        log.take(MemoryPressure(level=level, source="os"))
    assert len(log.last()) == KEPT


def test_evictions_stay_to_be_seen_however_many_are_refused_since() -> None:
    log = MemoryLog(lambda: 5.0)
    log.take(Evicted(key=KEY, reason=Reason.SWAP, bytes=MIB, room_for=ResidentKey("text", "big")))
    for free in range(KEPT):
        log.take(RequestRefused(key=KEY, error=errors.MemoryRefused(f"{free} B are free")))
    assert {one.what for one in log.last()} == {"refused"}
    assert [(one.what, one.why) for one in log.evictions()] == [
        ("evicted", "gave 1.0 MiB to big (swap)")
    ]
    status = describe_memory(
        Arbiter(100).snapshot(),
        log,
        now=6.0,
        profile=NORMAL,
        plugins=(),
        engines={},
        leases={},
    )
    shown = Console(record=True, width=120, file=io.StringIO())
    show_memory(status, shown)
    text = shown.export_text()
    assert text.count("refused") == 6
    assert text.count("evicted small: gave 1.0 MiB to big (swap)") == 1
