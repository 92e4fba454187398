"""The way of blocks to disk: they wait in a bounded queue and are written one at a time.

A disk that fails is left alone for a while; blocks that come meanwhile are skipped and counted, and
so are blocks that do not fit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial

from kakeya.core.errors import InvalidArgument
from kakeya.core.log import event
from kakeya.prefix.disk.index import FileEntry
from kakeya.prefix.disk.kvb import StoredBlock, file_bytes, written_bytes
from kakeya.prefix.disk.queue import QueuedBlock, WriteQueue
from kakeya.prefix.disk.threads import Outage
from kakeya.prefix.disk.upkeep import DiskParts, Upkeep
from kakeya.prefix.names.blocks import BlockId

_log = logging.getLogger(__name__)


class BlockWriter:
    """The blocks that wait to be written, and the one that is being written."""

    def __init__(self, parts: DiskParts, upkeep: Upkeep) -> None:
        self._folder = parts.folder
        self._threads = parts.threads
        self._index = parts.index
        self._counts = parts.counts
        self._clock = parts.clock
        self._stored = parts.stored
        self._upkeep = upkeep
        self._queue = WriteQueue(parts.config.queue_bytes)
        self._writing: QueuedBlock | None = None
        self._outage = Outage("written", parts.config.retry_s)
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._is_open = True

    @property
    def problem(self) -> str:
        """Why nothing is written now; "" = it is."""
        return self._outage.problem

    @property
    def waiting(self) -> int:
        """How many blocks are on their way."""
        return len(self._queue) + (self._writing is not None)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the blocks on their way."""
        writing = self._writing
        return self._queue.waiting_bytes + (writing.block.payload_bytes if writing else 0)

    def on_its_way(self, block_id: BlockId) -> QueuedBlock | None:
        """The block of this id that waits or is being written."""
        waiting = self._queue.get(block_id)
        if waiting is not None:
            return waiting
        writing = self._writing
        if writing is not None and writing.is_wanted and writing.block.id == block_id:
            return writing
        return None

    def put(self, item: QueuedBlock) -> bool:
        """Let one wait; False = it is not written, and was released."""
        if not self._is_open or self._outage.is_on(self._clock.mono()):
            self._counts.skipped += 1
            item.release()
            return False
        dropped = self._queue.push(item)
        self._counts.dropped += len(dropped)
        self._wake.set()
        return item not in dropped

    def forget(self, ids: Iterable[BlockId]) -> None:
        """Drop these, and do not keep the one that is being written."""
        for block_id in ids:
            self._queue.drop(block_id)
            if self._writing is not None and self._writing.block.id == block_id:
                self._writing.is_wanted = False

    def clear(self) -> None:
        """Forget everything."""
        self._queue.clear()
        if self._writing is not None:
            self._writing.is_wanted = False

    def close(self) -> None:
        """Take no more blocks, and release those that wait."""
        self._is_open = False
        self._queue.clear()

    async def flush(self) -> None:
        """Wait until nothing waits."""
        while self.waiting:
            self._idle.clear()
            await self._idle.wait()

    async def run(self) -> None:
        """Write the blocks that come, for ever."""
        while True:
            self._wake.clear()
            while self._queue:
                await self._write(self._queue.pop())
            self._idle.set()
            await self._wake.wait()

    async def _write(self, item: QueuedBlock) -> None:
        self._writing = item
        try:
            await self._write_whole(item)
        except OSError as problem:
            self._counts.write_failures += 1
            self._outage.began(str(problem), self._clock.mono())
        except InvalidArgument as problem:
            self._counts.skipped += 1
            event(_log, "a block cannot be stored", level=logging.ERROR, problem=problem.message)
        finally:
            self._writing = None
            item.release()

    async def _write_whole(self, item: QueuedBlock) -> None:
        block = item.block
        known = self._index.get(block.id)
        if not item.is_wanted or (known is not None and is_as_good(known.block, block)):
            return  # forgotten, or found in the folder, since it was put
        if self._outage.is_on(self._clock.mono()):
            self._counts.skipped += 1
            return
        problem = await self._upkeep.make_room(written_bytes(block))
        if problem:
            self._counts.skipped += 1
            self._outage.began(problem, self._clock.mono())
            return
        if not item.is_wanted:
            return  # a wipe meanwhile may have reported that the folder is empty
        retention, mono, wall = item.retention, self._clock.mono(), self._clock.wall()
        write = partial(self._folder.write, block, item.payload, retention, wall)
        name, head = await self._threads.write(write)
        self._outage.ended()
        self._counts.writes += 1
        self._counts.written_bytes += file_bytes(head)
        if not item.is_wanted:
            self._threads.write_later(partial(self._folder.remove_all, (name,)))
            return
        if known is not None:
            self._threads.write_later(partial(self._folder.remove_all, (name,), keep=name))
        self._index.add(
            FileEntry(
                head=head,
                name=name,
                retention=max(retention, item.retention),
                used_mono=mono,
                told_mono=mono,
            )
        )
        self._stored((block.id,))


def is_as_good(known: StoredBlock | None, block: StoredBlock) -> bool:
    """Whether the stored block already has all that this one comes with."""
    return known is not None and known.has_state >= block.has_state
