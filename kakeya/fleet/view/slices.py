"""Work that is done in slices, so that other work of the event loop comes between them.

A generator yields wherever it may be paused; between two slices its owner's state is whole. Who
has no loop to share runs it to its end at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")
Slices = Generator[None, None, Result]


def finish(work: Slices[Result]) -> Result:
    """Do all of it now."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Result = end.value
            return result


async def in_slices(work: Slices[Result]) -> Result:
    """Do it slice by slice, everything else that is ready between them."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Result = end.value
            return result
        await asyncio.sleep(0)
