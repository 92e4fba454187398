"""Blocks as other processes see them: a place, and a stamp that says the block is still there.

A `PageRef` travels in messages; a `PageReader` in an engine turns it into bytes. It trusts the
stamp in front of the slab alone: the stamp appears when the block is committed, so no half of a
block is seen, and goes before the pages are used again.

    view   without a copy: the owner has pinned the block for this process
    read   a copy that is checked before and after: without a pin
"""

from __future__ import annotations

from kakeya.core.errors import Conflict, PageFreed
from kakeya.generation.kv import PageRef
from kakeya.memory.pages.slabs import MappedSlab, map_slab, order_memory


class PageReader:
    """The slabs that this process has mapped. For one thread; a context manager."""

    def __init__(self) -> None:
        self._read: dict[str, MappedSlab] = {}
        self._write: dict[str, MappedSlab] = {}

    def view(self, ref: PageRef) -> memoryview:
        """View a block that is pinned for us; read-only. Raises PageFreed."""
        slab = self._slab(ref, writable=False)
        _check(slab, ref)
        return slab.bytes_of(ref.first, ref.length)

    def check(self, ref: PageRef) -> None:
        """Raise PageFreed when a viewed block went, or its pages hold another one now; on any
        thread while it is mapped."""
        order_memory()
        _check(self._slab(ref, writable=False), ref)

    def read(self, ref: PageRef) -> bytes:
        """Copy a block, pinned or not. Raises PageFreed when it went, even while we copied."""
        slab = self._slab(ref, writable=False)
        _check(slab, ref)
        order_memory()
        copied = bytes(slab.bytes_of(ref.first, ref.length))
        order_memory()
        _check(slab, ref)
        return copied

    def fill(self, ref: PageRef) -> memoryview:
        """View a block that is being prepared for us; writable. Raises Conflict, PageFreed.

        Leave the view before the owner is asked to commit.
        """
        slab = self._slab(ref, writable=True)
        if slab.stamp(ref.first):
            raise Conflict(f"page {ref.first} of {ref.slab} is committed; only its owner writes it")
        return slab.bytes_of(ref.first, ref.length)

    def forget(self, slab: str) -> None:
        """Unmap a slab that its owner took away; harmless when it is not mapped."""
        for mapped in (self._read, self._write):
            if slab in mapped:
                mapped.pop(slab).close()

    def close(self) -> None:
        """Unmap everything; views that are still open keep their bytes."""
        for name in {*self._read, *self._write}:
            self.forget(name)

    def __enter__(self) -> PageReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _slab(self, ref: PageRef, *, writable: bool) -> MappedSlab:
        mapped = self._write if writable else self._read
        slab = mapped.get(ref.slab)
        if slab is None:
            slab = mapped[ref.slab] = map_slab(
                ref.slab, pages=ref.slab_pages, page_bytes=ref.page_bytes, writable=writable
            )
        return slab


def _check(slab: MappedSlab, ref: PageRef) -> None:
    found = slab.stamp(ref.first)
    if found != ref.stamp:
        raise PageFreed(
            f"page {ref.first} of {ref.slab} has stamp {found}, and {ref.stamp} was meant: "
            "the block was freed or is not committed"
        )
