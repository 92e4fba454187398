"""Keep a Mac awake for its models: network traffic alone does not stop its idle sleep.

    offered   while a model can be asked for, so that peers and clients always find it
    working   while a request or a job of another process uses memory or a model is pulled, and for
              a moment after it
    never     the owner's own settings decide

The assertion is held by `caffeinate`, one process, which ends with this one in whatever way that
ends. A lid that is closed, and a sleep that the user orders, go before it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from kakeya.core.clock import Clock
from kakeya.core.log import event

_log = logging.getLogger(__name__)
LINGER_S = 60.0
"""The least time of idle sleep that can be set: no request comes just too late."""
_AGAIN_S = 60.0
"""Between two starts of a program that fails or was ended."""


class StayAwake:
    """Holds the assertion while it is due; `run` is a supervised task."""

    def __init__(
        self,
        how: Literal["offered", "working", "never"],
        *,
        clock: Clock,
        platform: str = sys.platform,
        command: Sequence[str] = ("/usr/bin/caffeinate", "-i", "-w", str(os.getpid())),
    ) -> None:
        self._how: Literal["offered", "working", "never"]
        self._how = how if platform == "darwin" else "never"
        self._clock = clock
        self._command = tuple(command)
        self._worked_mono = float("-inf")
        self._is_due = False
        self._changed = asyncio.Event()
        self._has_warned = False
        self.is_held = False
        """Whether the program that holds the assertion runs."""

    def follow(self, *, offers: bool, works: bool) -> bool:
        """Note the node's state; whether the machine has to stay awake. Call it every few
        seconds: the moment after the last request ends by it."""
        now = self._clock.mono()
        if works:
            self._worked_mono = now
        match self._how:
            case "offered":
                is_due = offers or works
            case "working":
                is_due = now - self._worked_mono < LINGER_S
            case "never":
                is_due = False
        if is_due is not self._is_due:
            self._is_due = is_due
            self._changed.set()
        return is_due

    async def run(self) -> None:
        """Start and end the program as `follow` says, until cancelled."""
        while True:
            self._changed.clear()
            if self._is_due:
                await self._hold()
            else:
                await self._changed.wait()

    async def _hold(self) -> None:
        """Hold the assertion until it is not due, or the program ends by itself."""
        try:
            child = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )
        except OSError as problem:
            await self._failed(problem.strerror or repr(problem))
            return
        ended = asyncio.ensure_future(child.wait())
        self.is_held = True
        try:
            while self._is_due and not ended.done():
                self._changed.clear()
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait((ended, changed), return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
        finally:
            self.is_held = False
            if not ended.done():
                with suppress(ProcessLookupError):  # a signal to all of the group ended it first
                    child.terminate()
            await asyncio.shield(ended)
        if self._is_due:
            await self._failed(f"it ended with {child.returncode}")

    async def _failed(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            event(
                _log,
                "this Mac may fall asleep while it serves",
                level=logging.WARNING,
                command=" ".join(self._command),
                reason=reason,
            )
        await self._clock.sleep(_AGAIN_S, self._changed)
