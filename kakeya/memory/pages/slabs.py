"""Slabs: shared memory that one process owns and others map by name.

    name        /kk-TOKEN-N        at most 31 bytes, the limit of macOS; mode 0600
    contents    stamps, 8 bytes a page, up to a multiple of 16 KiB  |  pages

A stamp is that of the committed block which begins at the page, or 0.

POSIX shared memory objects (`shm_open`), on Linux and macOS alike: an engine maps a slab that was
added after its start by a name in a message, where a descriptor would need a socket of its own.
They are memory on both systems, unlike a mapped file on macOS, which the kernel would write to
disk. `multiprocessing.shared_memory` stands on the same calls, but its tracker removes an object
when the first process that opened it ends; so the calls are used themselves.

A name outlives its maker. So every owner has a file that lists its names and is locked while it
lives: the lock goes with the process, however it dies, and the next owner removes the slabs that an
unlocked file lists.
"""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found,unused-ignore]
import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from kakeya.core.errors import Conflict, InvalidArgument, OutOfPages, PageFreed

_STAMP = 8
_HEADER_UNIT = 16 * 1024  # the largest page of the machines we run on
_SUFFIX = ".arena"


def header_bytes(pages: int) -> int:
    """The length of a slab's stamps, padded so that the pages behind them are aligned."""
    return -(-pages * _STAMP // _HEADER_UNIT) * _HEADER_UNIT


class MappedSlab:
    """One mapped slab: its bytes, and the stamps in front of them."""

    def __init__(self, name: str, mapping: mmap.mmap, *, pages: int, page_bytes: int) -> None:
        self.name = name
        self.pages = pages
        self.page_bytes = page_bytes
        self._mapping = mapping
        whole = memoryview(mapping)
        header = header_bytes(pages)
        self._stamps = whole[: pages * _STAMP].cast("Q")
        self._data = whole[header : header + pages * page_bytes]
        whole.release()

    def bytes_of(self, first: int, length: int) -> memoryview:
        """View `length` bytes from the beginning of a page; writable where the slab is."""
        start = first * self.page_bytes
        return self._data[start : start + length]

    def stamp(self, first: int) -> int:
        """Read the stamp of the block that begins at a page; 0 for none."""
        return self._stamps[first]

    def publish(self, first: int, stamp: int) -> None:
        """Write the stamp of a block, after all stores to its pages."""
        order_memory()
        self._stamps[first] = stamp

    def retract(self, first: int) -> None:
        """Clear the stamp of a block, before any later store to its pages."""
        self._stamps[first] = 0
        order_memory()

    def close(self) -> None:
        """Unmap; bytes that are still viewed are unmapped with their last view."""
        self._stamps.release()
        with suppress(BufferError):
            self._data.release()
        with suppress(BufferError):
            self._mapping.close()


_fence = threading.Lock()


def order_memory() -> None:
    """Keep stores before this call before those after it, as other cores see them.

    A release followed by an acquire of the same lock is a full barrier on the machines we run
    on; Python has no other.
    """
    with _fence:
        pass
    with _fence:
        pass


def map_slab(name: str, *, pages: int, page_bytes: int, writable: bool = False) -> MappedSlab:
    """Map a slab of another process. Raises PageFreed when it is gone, InvalidArgument."""
    size = header_bytes(pages) + pages * page_bytes
    try:
        handle = _posixshmem.shm_open(name, os.O_RDWR if writable else os.O_RDONLY, mode=0o600)
    except FileNotFoundError:
        raise PageFreed(f"slab {name} is gone; its owner took it away or ended") from None
    try:
        found = os.fstat(handle).st_size
        if found < size:
            raise InvalidArgument(f"slab {name} has {found} bytes, and {size} were announced")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapping = mmap.mmap(handle, size, mmap.MAP_SHARED, access)
    finally:
        os.close(handle)
    return MappedSlab(name, mapping, pages=pages, page_bytes=page_bytes)


class SlabStore:
    """The slabs of one owner. Opening it removes what dead owners left in the same folder."""

    def __init__(self, folder: Path, token: str, *, pages: int, page_bytes: int) -> None:
        """`token`: 1..20 letters and digits that no living owner on this machine has."""
        if not (token.isascii() and token.isalnum() and len(token) <= 20):
            raise InvalidArgument(
                f"the token of a slab store is {token!r}; 1..20 letters or digits"
            )
        self._folder = folder
        self._token = token
        self._pages = pages
        self._page_bytes = page_bytes
        self._made = count()
        self._is_closed = False
        self._slabs: dict[str, MappedSlab] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / f"{token}{_SUFFIX}"
        with _folder_lock(folder):
            self.leftovers = _remove_leftovers(folder)
            self._names = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self._names, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def make(self) -> MappedSlab:
        """Make one slab, all of its memory there. Raises OutOfPages when the machine has none.

        Like `remove`, any thread may call it.
        """
        if self._is_closed:
            raise Conflict("the slab store is closed and makes no slab")
        name = f"/kk-{self._token}-{next(self._made)}"
        size = header_bytes(self._pages) + self._pages * self._page_bytes
        try:
            # First, so that no death leaves it unlisted.
            os.write(self._names, f"{name}\n".encode())
            mapping = _map(name, size)
        except OSError as error:  # full or limited: no request fails for it
            raise OutOfPages(
                f"the machine has no {size} bytes of shared memory: {error}"
            ) from error
        slab = MappedSlab(name, mapping, pages=self._pages, page_bytes=self._page_bytes)
        self._slabs[name] = slab
        if self._is_closed:  # meanwhile, by another thread, which may have missed it
            self.remove(slab)
            raise Conflict("the slab store was closed while it made a slab")
        return slab

    def remove(self, slab: MappedSlab) -> None:
        """Remove a slab; processes keep the mapping of its old bytes; harmless twice."""
        if self._slabs.pop(slab.name, None) is not None:
            _unlink(slab.name)
            slab.close()

    def close(self) -> None:
        """Take all slabs away, and the list of them; harmless twice."""
        if self._is_closed:
            return
        self._is_closed = True
        for slab in tuple(self._slabs.values()):
            self.remove(slab)
        self._path.unlink(missing_ok=True)
        os.close(self._names)

    def __enter__(self) -> SlabStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _map(name: str, size: int) -> mmap.mmap:
    """Make shared memory of this name, on Linux all of it present. Raises OSError, and then leaves
    nothing."""
    handle = _posixshmem.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
    try:
        os.ftruncate(handle, size)
        if sys.platform == "linux":
            os.posix_fallocate(handle, 0, size)  # else a full tmpfs kills at the first touch
        # macOS reserves nothing: pages come at the first touch, and can be swapped. There the
        # arbiter alone bounds slabs, which grow only while the machine is calm.
        return mmap.mmap(handle, size)
    except OSError:
        _unlink(name)
        raise
    finally:
        os.close(handle)


def _unlink(name: str) -> bool:
    try:
        _posixshmem.shm_unlink(name)
    except FileNotFoundError:
        return False
    return True


def _remove_leftovers(folder: Path) -> tuple[str, ...]:
    """Remove the slabs of dead owners; returns their names. Under the folder's lock."""
    removed = []
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        handle = os.open(path, os.O_RDWR)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # it lives
            names = path.read_text("ascii", errors="replace").split("\n")
            own = f"/kk-{path.name.removesuffix(_SUFFIX)}-"
            removed += [name for name in names if name.startswith(own) and _unlink(name)]
            path.unlink()
        finally:
            os.close(handle)
    return tuple(removed)


def remove_leftovers(folder: Path) -> tuple[str, ...]:
    """Remove slabs of dead owners without being an owner; returns their names. Raises OSError."""
    if not folder.is_dir():
        return ()
    with _folder_lock(folder):
        return _remove_leftovers(folder)


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Hold off other owners between making a list and locking it."""
    handle = os.open(folder / "arenas.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
