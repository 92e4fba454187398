"""Blocks of a peer that come from the end while an engine computes from the beginning.

    engine   [ exported ........ front )            ( back ........ held ]   from the peer

The fetched blocks are held in pages that no request sees, because no prefix leads to them yet. When
the two sides meet and that saves time, they join the blocks before them, and the engine is asked
anew: it then begins from all of them. In any other case their pages are given back, and the engine
has not noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kakeya.memory.pages.shared_arena import Filling
from kakeya.prefix.names.blocks import BlockId
from kakeya.prefix.peers.sink import PageSink
from kakeya.prefix.peers.two_sided import Meeting


class HeldBlocks:
    """Fetched blocks of one history, out of sight until `join`. A `BlockSink`."""

    def __init__(self, sink: PageSink) -> None:
        self._sink = sink
        self._held: dict[int, Filling] = {}
        self._is_over = False

    async def put(self, index: int, payload: bytearray, tail_tokens: int = 0) -> bool:
        """Hold a block; False = there are no pages for it, or it is a tail, which nothing meets."""
        filling = None if tail_tokens else await self._sink.fill(payload)
        if filling is None:
            return False
        if self._is_over:
            self._sink.give_back(filling)
            return False
        self._held[index] = filling
        return True

    def join(self, first: int) -> list[BlockId]:
        """Let all use the blocks from `first` on; those before it lead to them. Which joined."""
        behind = [index for index in sorted(self._held) if index >= first]
        came = [index for index in behind if self._sink.commit(index, self._held.pop(index))]
        self.end()
        return [self._sink.ids[index] for index in came]

    def end(self) -> None:
        """Give back blocks that did not join."""
        self._is_over = True
        held, self._held = self._held, {}
        for filling in held.values():
            self._sink.give_back(filling)


class Rendezvous:
    """One request that meets one peer, once the peer has told its blocks. `met` is set once these
    have joined."""

    def __init__(self, held: HeldBlocks, joined: Callable[[list[BlockId]], None]) -> None:
        self._held = held
        self._joined = joined
        self._meeting: Meeting | None = None
        self._computed = 0
        self._task: asyncio.Task[None] | None = None
        self.met = asyncio.Event()

    def begin(self, task: asyncio.Task[None]) -> None:
        """Note the task that asks and fetches."""
        self._task = task

    def agree(self, meeting: Meeting) -> None:
        """Note over which blocks they meet."""
        self._meeting = meeting
        meeting.computed(self._computed)

    def computed(self, blocks: int) -> None:
        """Note that the engine has so many blocks of the history."""
        self._computed = blocks
        if self._meeting is not None:
            self._meeting.computed(blocks)
            self.look()

    def look(self) -> None:
        """Join, if it is time to; called whenever either side moved."""
        if self._meeting is not None and self._meeting.pays and not self.met.is_set():
            came = self._held.join(self._meeting.front)
            self.end()
            if came:
                self._joined(came)
                self.met.set()

    def end(self) -> None:
        """Fetch no more, and give back blocks that did not join; harmless twice."""
        if self._task is not None:
            self._task.cancel()
        self._held.end()
