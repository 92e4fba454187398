"""Keeps the collector of cyclic garbage from stopping the event loop.

A full collection visits every object that may be part of a cycle. Imports alone make 70,000 of
them, for good: 25 to 50 ms in which no message is answered, at times that nobody chooses. What is
there once a program is ready is therefore taken out of the collector's sight; what comes later,
cards and requests, is collected as ever.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def undisturbed() -> Iterator[None]:
    """Collect nothing meanwhile: imports make no garbage, and would be visited again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def spare_what_is_there() -> int:
    """Never visit again what exists now; returns how many objects that are, over all calls.

    Blocks for one full collection, so call it before anything is served.
    """
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()
