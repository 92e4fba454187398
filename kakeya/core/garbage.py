"""Keep the collector of cyclic garbage from stopping the event loop.

A full collection visits every object that may be part of a cycle. Imports alone make 70,000 such
objects, which live as long as the process: each collection costs 25 to 50 ms in which no message
is answered. Objects that exist when a program is ready are therefore frozen; later objects, cards
and requests, are collected as usual.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def undisturbed() -> Iterator[None]:
    """Pause collections while modules are imported: imports make no garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def spare_what_is_there() -> int:
    """Freeze all objects that exist now; return the number of frozen objects over all calls.

    Blocks for one full collection, so call it before anything is served.
    """
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()
