"""Adapters that lie in pages, read on the event loop, which need not wait for the model thread.

The model thread copies the content later, and then checks that the pages still held it.
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
    """A packed adapter that was read; it views its pages until `close`."""

    def __init__(
        self, packed: bytes | memoryview, check: Callable[[], None] = lambda: None
    ) -> None:
        """`packed` was checked where it was laid; `check` raises when something else lies there
        by now. Raises InvalidArgument for pages that hold no adapter."""
        self.content = digest(packed)
        self.adapter: PackedAdapter | None = unpack(packed, is_trusted=True)
        self.check = check

    def close(self) -> None:
        """Let the pages go, once no load uses them."""
        self.adapter = None


class AdapterPages:
    """Maps the slabs, and reads. Lives on the event loop.

    Mapping and unmapping a slab takes as long as reading an adapter, and adapters come one after
    the other: a slab stays mapped until its last adapter is closed, and for a moment. Not for
    longer, since a mapped slab that its owner removed goes on taking memory.
    """

    def __init__(self, keep_s: float = 1.0) -> None:
        """A slab without readers stays mapped for `keep_s`, and for twice that at the most."""
        self._keep_s = keep_s
        self._reader = PageReader()
        self._reads: dict[str, list[ReadAdapter]] = {}
        """Adapters of each mapped slab that are open, or were since the last look."""
        self._looking: asyncio.TimerHandle | None = None

    def read(self, ref: PageRef) -> ReadAdapter:
        """Read an adapter from pages pinned until `close`. Raises PageFreed, InvalidArgument."""
        reads = self._reads.setdefault(ref.slab, [])
        if self._looking is None:
            self._look_later()
        try:
            read = ReadAdapter(self._reader.view(ref), partial(self._reader.check, ref))
        except KakeyaError as refusal:
            # An error keeps the frames of its traceback, and with them views of the pages.
            raise refusal.with_traceback(None) from None
        reads.append(read)
        return read

    def _look_later(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(self._keep_s, self._look)

    def _look(self) -> None:
        """Unmap slabs that no adapter was read from since the last look, and none is open in."""
        for slab, reads in tuple(self._reads.items()):
            if reads:
                reads[:] = [read for read in reads if read.adapter is not None]
            else:
                self._reader.forget(slab)
                del self._reads[slab]
        self._looking = None
        if self._reads:
            self._look_later()
