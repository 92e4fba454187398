"""Adapters that lie in pages, read on the event loop: that need not wait for the model thread.

What stands in them is copied later, on that thread, which makes sure that it still stood there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from kakeya.adapters.files.packed import PackedAdapter, digest, unpack
from kakeya.core.errors import KakeyaError
from kakeya.generation.kv import PageRef
from kakeya.memory.pages.reader import PageReader


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
    the other: it stays mapped until the last one in it is closed, and for a moment. Not for longer,
    as one that its owner took away goes on taking memory, however much is read from others.
    """

    def __init__(self, keep_s: float = 1.0) -> None:
        """A slab that nobody reads is mapped for `keep_s`, and for twice that at the most."""
        self._keep_s = keep_s
        self._reader = PageReader()
        self._reads: dict[str, list[ReadAdapter]] = {}
        """From each slab that may be mapped: what is read now, or was since the last look."""
        self._looking: asyncio.TimerHandle | None = None

    def read(self, ref: PageRef) -> ReadAdapter:
        """Read one from pages that stay pinned until `close`. Raises PageFreed, InvalidArgument."""
        reads = self._reads.setdefault(ref.slab, [])
        if self._looking is None:
            self._look_later()
        try:
            read = ReadAdapter(self._reader.view(ref), partial(self._reader.check, ref))
        except KakeyaError as refusal:
            # Whoever has the error would hold views of the pages with its frames.
            raise refusal.with_traceback(None) from None
        reads.append(read)
        return read

    def _look_later(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(self._keep_s, self._look)

    def _look(self) -> None:
        """Let go of slabs of which nothing was read since the last time, nor is read yet."""
        for slab, reads in tuple(self._reads.items()):
            if reads:
                reads[:] = [read for read in reads if read.adapter is not None]
            else:
                self._reader.forget(slab)
                del self._reads[slab]
        self._looking = None
        if self._reads:
            self._look_later()
