"""Blocks that wait to be written: bounded in bytes, the oldest goes first, each block once.

A payload may be lent (a view of pinned pages): its lender is told once when it is no longer needed,
whatever the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kakeya.generation.retention import Retention
from kakeya.prefix.disk.kvb import Payload, StoredBlock
from kakeya.prefix.names.blocks import BlockId


@dataclass(slots=True, kw_only=True, eq=False)
class QueuedBlock:
    """A block with its payload on the way to disk."""

    block: StoredBlock
    payload: Payload
    retention: Retention
    released: Callable[[], None] | None
    is_mapped: bool = False  # from a file: it takes no memory while it waits
    is_wanted: bool = True  # False: it was forgotten while it was being written
    _users: int = 0
    _is_over: bool = False

    @property
    def held_bytes(self) -> int:
        """The memory that it takes while it waits."""
        return 0 if self.is_mapped else self.block.payload_bytes

    def release(self) -> None:
        """Note that the payload is needed no more, but by its present readers."""
        self._is_over = True
        self._tell_lender()

    @contextmanager
    def in_use(self) -> Iterator[Payload]:
        """Read the payload, which does not change meanwhile."""
        self._users += 1
        try:
            yield self.payload
        finally:
            self._users -= 1
            self._tell_lender()

    def _tell_lender(self) -> None:
        if not self._is_over or self._users:
            return
        released, self.released = self.released, None
        self.payload = b""
        if released is not None:
            released()


class WriteQueue:
    """The blocks that wait, in the order in which they came."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._waiting: dict[BlockId, QueuedBlock] = {}
        self.waiting_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def get(self, block_id: BlockId) -> QueuedBlock | None:
        """The block that waits under this id."""
        return self._waiting.get(block_id)

    def push(self, item: QueuedBlock) -> list[QueuedBlock]:
        """Queue a block; returns the blocks that had to go for it, released, maybe the block
        itself."""
        gone = [one for one in (self.drop(item.block.id),) if one is not None]
        if item.held_bytes > self._most_bytes:
            item.release()
            return [*gone, item]
        while self.waiting_bytes + item.held_bytes > self._most_bytes:
            oldest = self.pop()
            oldest.release()
            gone.append(oldest)
        self._waiting[item.block.id] = item
        self.waiting_bytes += item.held_bytes
        return gone

    def pop(self) -> QueuedBlock:
        """Take the oldest out; it is the caller's to release. Raises StopIteration when empty."""
        block_id = next(iter(self._waiting))
        item = self._waiting.pop(block_id)
        self.waiting_bytes -= item.held_bytes
        return item

    def drop(self, block_id: BlockId) -> QueuedBlock | None:
        """Take one out that is no longer wanted, released; None = it does not wait."""
        item = self._waiting.pop(block_id, None)
        if item is not None:
            self.waiting_bytes -= item.held_bytes
            item.release()
        return item

    def clear(self) -> list[QueuedBlock]:
        """Take everything out, released."""
        return [gone for block_id in tuple(self._waiting) if (gone := self.drop(block_id))]
