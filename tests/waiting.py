"""Waiting, in real time, for what another task, thread or process is about to do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 60.0
"""A busy machine is late, and no fault of the code; a test that waits so long has failed."""


async def until(
    holds: Callable[[], object], what: str = "what was waited for", limit_s: float = LIMIT_S
) -> float:
    """Wait on the loop until `holds()` is true; returns the seconds that it took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < limit_s, f"not within {limit_s:g} s: {what}"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


async def eventually(
    what: str, probe: Callable[[], Any], *, limit_s: float = LIMIT_S, every_s: float = 0.05
) -> Any:
    """Wait until `probe()`, run in a thread, gives something true; return it."""
    deadline = time.monotonic() + limit_s
    while not (found := await asyncio.to_thread(probe)):
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        await asyncio.sleep(every_s)
    return found


def wait_until(what: str, probe: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """Wait, without a loop, until `probe()` gives something true; return it."""
    deadline = time.monotonic() + limit_s
    while not (found := probe()):
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(0.01)
    return found
