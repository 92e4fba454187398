"""A node that is drained: it takes nothing new, lets what runs end, and stops.

Requests that still reach it go to its peers, where they have the model, until those that ran before
have ended, and, where its owner wants that, until another node has its port. Then it leaves its
port, and it stops once the passed ones have ended, too. Its card offers nothing, so peers send
nothing here, but they may fetch the KV of its conversations until it stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

from kakeya.core.clock import Clock

PATIENCE_S = 60.0
STEP_S = 1.0
_LOOK_S = 0.1
REASON = "it is being drained"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainStep:
    """The requests that run or wait, `seconds` after the drain began."""

    requests: int
    seconds: float


class DrainedPort(Protocol):
    """The HTTP port of a node that is drained."""

    @property
    def is_taken(self) -> bool:
        """Whether the node that replaces it has the port."""
        ...

    @property
    def answering(self) -> int:
        """HTTP requests without a whole answer."""
        ...

    def close(self) -> None:
        """Let no more come."""
        ...


class DrainCall(Protocol):
    """The drain of a node: `NodeDrain.run`."""

    def __call__(
        self, patience_s: float, *, until_replaced: bool = False
    ) -> AsyncGenerator[DrainStep, None]:
        """Drain; the steps end with the drain."""
        ...


class NodeDrain:
    """The drain of one node. `begin` stops new work, `left` counts the requests that are here and
    came by a moment, `close` has it pass on no more, `stop` ends the node."""

    def __init__(
        self,
        *,
        begin: Callable[[str], None],
        left: Callable[[float], int],
        port: DrainedPort,
        close: Callable[[], None],
        stop: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._begin = begin
        self._left = left
        self._port = port
        self._close = close
        self._stop = stop
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._began_mono = 0.0
        self._until_mono = 0.0
        self._is_replaced = False

    @property
    def is_under_way(self) -> bool:
        """Whether the node takes nothing new any more."""
        return self._task is not None

    async def run(
        self, patience_s: float, *, until_replaced: bool = False
    ) -> AsyncGenerator[DrainStep, None]:
        """Drain, and yield at once and each second until nothing runs, and with `until_replaced`
        until another node has the port; a caller that leaves ends nothing. A second call follows
        the same drain, with its own patience where that is less."""
        now = self._clock.mono()
        self._is_replaced |= until_replaced
        if self._task is None:
            self._began_mono, self._until_mono = now, now + patience_s
            self._begin(REASON)
            self._task = asyncio.create_task(self._wait(), name="drain")
        self._until_mono = min(self._until_mono, now + patience_s)
        while True:
            yield self._step()
            done, _ = await asyncio.wait((self._task,), timeout=STEP_S)
            if done:
                break
        yield self._step()

    def _step(self) -> DrainStep:
        seconds = self._clock.mono() - self._began_mono
        return DrainStep(requests=self._running(), seconds=seconds)

    def _running(self) -> int:
        return max(self._left(self._clock.mono()), self._port.answering)

    async def _wait(self) -> None:
        # Clients that ask all the time have no end; what they ask from now on runs at peers.
        await self._end_of(lambda: self._left(self._began_mono))
        await self._end_of(lambda: self._is_replaced and not self._port.is_taken)
        self._port.close()
        self._close()
        # A request is answered for some time before it is counted: it is read and prepared first,
        # and a connection that was just accepted is no connection yet.
        await self._clock.sleep(_LOOK_S)
        await self._end_of(self._running)
        # The last step is told before the connection of the owner closes.
        asyncio.get_running_loop().call_later(_LOOK_S, self._stop)

    async def _end_of(self, left: Callable[[], object]) -> None:
        while left() and self._clock.mono() < self._until_mono:
            await self._clock.sleep(_LOOK_S)
