"""Work that is done in slices, so that other work of the event loop comes between them.

A generator yields wherever it may be paused; between two slices its owner's state is whole. A
caller without an event loop runs it to its end at once. Slices are there for fleets of 1,000 nodes
and more: a merge on a shelf of 2 to 50 nodes is one slice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")
Slices = Generator[None, None, Result]


def finish(work: Slices[Result]) -> Result:
    """Do all the work now."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Result = end.value
            return result


async def in_slices(work: Slices[Result]) -> Result:
    """Do the work slice by slice; other ready tasks of the loop run between them."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Result = end.value
            return result
        await asyncio.sleep(0)
