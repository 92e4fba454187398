"""Upkeep of a store of blocks: victims, the last uses in file names, files that are gone.

It decides on frozen views in a thread, then acts on entries that are still as they were seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from kakeya.core.clock import Clock
from kakeya.core.units import format_bytes
from kakeya.prefix.disk.files import BlockFolder, Damage, FoundFile
from kakeya.prefix.disk.index import DiskIndex, FileEntry, IndexView, expired, untold, victims
from kakeya.prefix.disk.stats import Counts, DiskConfig
from kakeya.prefix.disk.threads import DiskThreads, Stop
from kakeya.prefix.names.blocks import BlockId

_LOOKS = 3
"""A victim may have been used while it was chosen; then others are chosen."""
Told = tuple[FileEntry, str]
"""An entry as its file shows it now, and the file's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskParts:
    """The parts that the halves of a store share. The index belongs to the event loop.

    `stored` and `lost` are told, on the loop, of ids that are on disk from now on, or no longer.
    """

    folder: BlockFolder
    threads: DiskThreads
    index: DiskIndex
    counts: Counts
    config: DiskConfig
    clock: Clock
    stored: Callable[[Collection[BlockId]], None]
    lost: Callable[[Collection[BlockId]], None]


class Upkeep:
    """Removes, renames and dates the files of an index that its store owns."""

    def __init__(self, parts: DiskParts) -> None:
        self._folder = parts.folder
        self._threads = parts.threads
        self._index = parts.index
        self._counts = parts.counts
        self._config = parts.config
        self._clock = parts.clock
        self._lost = parts.lost

    async def expire(self) -> None:
        """Remove expired blocks."""
        view, now_mono = self._index.view(), self._clock.mono()
        chosen = await self._threads.read(partial(expired, view, now_mono))
        gone, _ = await self._remove(chosen)
        self._counts.expired += len(gone)

    async def make_room(self, need_bytes: int) -> str:
        """Make room for `need_bytes` more; "" = they fit now, else why they do not.

        The room is bounded by the cap, and by the bytes that the disk is to keep free. Raises
        OSError when the disk cannot be asked, or a file cannot be removed.
        """
        free_bytes = await self._threads.write(self._folder.free_bytes)
        # A removed file becomes free room, so this bound stays while we remove.
        bound_bytes = self._index.used_bytes + free_bytes - self._config.keep_free_bytes
        limit_bytes = min(self._config.cap_bytes, bound_bytes)
        headroom_bytes = int(self._config.headroom * max(0, limit_bytes))
        for _ in range(_LOOKS):
            over_bytes = self._index.used_bytes + need_bytes - limit_bytes
            if over_bytes <= 0:
                return ""
            problem = await self._evict(over_bytes + headroom_bytes)
            if problem is not None and self._index.used_bytes + need_bytes > limit_bytes:
                raise problem
        if self._index.used_bytes + need_bytes <= limit_bytes:
            return ""
        return (
            f"{format_bytes(need_bytes)} more do not fit: the cap is "
            f"{format_bytes(self._config.cap_bytes)}, the disk has {format_bytes(free_bytes)} free "
            f"and is to keep {format_bytes(self._config.keep_free_bytes)}"
        )

    async def tell_uses(self) -> None:
        """Let files show the last uses and retentions of their blocks."""
        ahead_s = self._clock.wall() - self._clock.mono()
        tell = partial(self._tell, self._index.view(), ahead_s)
        for entry, name in await self._threads.write(tell):
            self._index.told(entry, name)

    async def find_gone(self) -> None:
        """Forget files that another process removed."""
        seen = {entry.name: entry for entry in self._index}
        # After every change that was asked before, so a name that is missing was not ours to move.
        missing = await self._threads.write(partial(self._folder.gone, tuple(seen)))
        gone = [seen[name].block.id for name in missing if self._has_name(seen[name])]
        for block_id in gone:
            self._index.drop(block_id)
        if gone:
            self._lost(gone)

    async def look_at_quarantine(self) -> None:
        """Count the files that were set aside."""
        found = await self._threads.read(self._folder.quarantined)
        self._counts.quarantined, self._counts.quarantined_bytes = found

    async def _evict(self, need_bytes: int) -> OSError | None:
        view, now_mono = self._index.view(), self._clock.mono()
        chosen = await self._threads.read(partial(victims, view, need_bytes, now_mono))
        gone, problem = await self._remove(chosen)
        self._counts.evicted += len(gone)
        self._counts.evicted_bytes += sum(entry.size_bytes for entry in gone)
        return problem

    async def _remove(
        self, chosen: Iterable[FileEntry]
    ) -> tuple[Sequence[FileEntry], OSError | None]:
        taken = [entry for entry in chosen if self._index.take(entry)]
        if not taken:
            return (), None
        names = [entry.name for entry in taken]
        kept = await self._threads.write(partial(self._folder.remove_all, names))
        for entry in taken:
            # A file that cannot be removed is no room, and can be read as well as before.
            if entry.name in kept and entry.block.id not in self._index:
                self._index.add(entry)
        gone = [entry for entry in taken if entry.name not in kept]
        self._lost([entry.block.id for entry in gone if entry.block.id not in self._index])
        return gone, next(iter(kept.values()), None)

    def _tell(self, view: IndexView, ahead_s: float) -> list[Told]:
        told: list[Told] = []
        for entry in untold(view):
            with contextlib.suppress(OSError):  # it went, or the folder is read-only
                used_at = entry.used_mono + ahead_s
                name = self._folder.tell(entry.name, entry.block.id, entry.retention, used_at)
                told.append((entry, name))
        return told

    def _has_name(self, seen: FileEntry) -> bool:
        entry = self._index.get(seen.block.id)
        return entry is not None and entry.name == seen.name


def look_through(
    folder: BlockFolder, wall: float, mono: float, stop: Stop
) -> tuple[list[FileEntry], Sequence[Damage]]:
    """Read the headers, parents first; a last use in the future counts as now."""
    contents = folder.scan(is_wanted=stop.is_unset)
    files = sorted(contents.files, key=lambda file: file.block.index)
    return [_entry(file, mono - max(0.0, wall - file.used_at)) for file in files], contents.damage


def _entry(file: FoundFile, used_mono: float) -> FileEntry:
    return FileEntry(
        head=file.head,
        name=file.name,
        retention=file.retention,
        used_mono=used_mono,
        told_mono=used_mono,
    )
