"""Adapters that lie in pages, read on the event loop: that need not wait for the model thread.

What stands in them is copied later, on that thread, which makes sure that it still stood there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from kakeya.core.errors import KakeyaError
from kakeya.memory.adapter_format import PackedAdapter, digest, unpack
from kakeya.memory.page_ref import PageReader, PageRef


class ReadAdapter:
    """A packed adapter that was read; it views what it was read from until `close`."""

    def __init__(
        self, packed: bytes | memoryview, check: Callable[[], None] = lambda: None
    ) -> None:
        """`packed` was checked where it was laid; `check` raises when something else lies there
        by now. Raises InvalidArgument for what is no adapter."""
        self.content = digest(packed)
        self.adapter: PackedAdapter | None = unpack(packed, is_trusted=True)
        self.check = check

    def close(self) -> None:
        """When nobody loads it any more, whoever still knows of it."""
        self.adapter = None


class AdapterPages:
    """Maps the slabs, and reads. Lives on the event loop.

    To map a slab and to unmap it takes as long as to read an adapter, and adapters come one after
    the other: it stays mapped until the last one is closed, and for a moment. Not for longer, as
    one that its owner took away goes on taking memory.
    """

    def __init__(self, keep_s: float = 1.0) -> None:
        self._keep_s = keep_s
        self._reader = PageReader()
        self._reads: list[ReadAdapter] = []
        self._closing: asyncio.TimerHandle | None = None

    def read(self, ref: PageRef) -> ReadAdapter:
        """Read one from pages that stay pinned until `close`. Raises PageFreed, InvalidArgument."""
        self._forget_closed()
        self._close_later()
        try:
            read = ReadAdapter(self._reader.view(ref), partial(self._reader.check, ref))
        except KakeyaError as refusal:
            # Whoever has the error would hold views of the pages with its frames.
            raise refusal.with_traceback(None) from None
        self._reads.append(read)
        return read

    def _forget_closed(self) -> None:
        self._reads = [read for read in self._reads if read.adapter is not None]

    def _close_later(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
        self._closing = asyncio.get_running_loop().call_later(self._keep_s, self._close)

    def _close(self) -> None:
        self._forget_closed()
        if self._reads:
            self._close_later()
        else:
            self._reader.close()
