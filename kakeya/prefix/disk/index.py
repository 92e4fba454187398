"""Which blocks are on disk, how long they stay, and which go first. Decides; touches no file.

A block's *spent life* is its time since the last use as a share of its retention: 0 just now, above
1 expired. It never counts as more spent than the blocks behind it in its chain, so a prefix lives
as long as any block that needs it, and goes after it: leaves first. Where room is needed, blocks of
fingerprints that no model here has go first, then the most spent; a held block never goes.

Victims are chosen on a frozen view, so that it can be done in a thread; `DiskIndex.take` then says
whether the entry is still as it was seen.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from kakeya.generation.retention import Retention
from kakeya.prefix.disk.kvb import Head, StoredBlock, file_bytes
from kakeya.prefix.names.blocks import BlockId
from kakeya.prefix.names.fingerprint import Facts

SUFFIX = ".kvb"
TEMPORARY = ".tmp"
"""Behind the name of a block that is being written, or was cut off."""
QUARANTINE = "quarantine"
"""The folder of damaged files."""
_NAME = re.compile(r"([0-9a-f]{64})(?:\.([^.]*))?" + re.escape(SUFFIX))
_TELL_SHARE = 1 / 8
"""A use is written to the file once it is this share of the retention later than the file says."""
Usable = Callable[[Mapping[bytes, Facts]], Collection[bytes]]
"""Chooses of fingerprints, each with the facts of its first block, those that can be used now, or
maybe later."""
_RETENTIONS = {retention.label: retention for retention in Retention}


def all_usable(known: Mapping[bytes, Facts]) -> Collection[bytes]:
    """Every fingerprint may be of use."""
    return known.keys()


def name_of(block_id: BlockId, retention: Retention) -> str:
    """Name the file of a block; an id with any bytes makes a name that any file system takes."""
    return f"{block_id.hex()}.{retention.label}{SUFFIX}"


def parse_name(name: str) -> tuple[BlockId, Retention] | None:
    """Read a name; one that tells no retention we know has the long one. None = not ours."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return bytes.fromhex(found[1]), _RETENTIONS.get(found[2], Retention.LONG)


def names_of(name: str) -> tuple[str, ...]:
    """A file's name, and those that it may have been given since: of other retentions."""
    parsed = parse_name(name)
    if parsed is None:
        return (name,)
    others = (name_of(parsed[0], retention) for retention in Retention if retention.is_on_disk)
    return (name, *(other for other in others if other != name))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFile:
    """How one file begins, its name, and the retention that counts."""

    head: Head
    name: str
    retention: Retention  # from now on; the block's own may be shorter

    @property
    def block(self) -> StoredBlock:
        """The block of the file."""
        return self.head.block

    @property
    def size_bytes(self) -> int:
        """Its bytes on disk."""
        return file_bytes(self.head)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry(BlockFile):
    """One file, and when it was last used."""

    used_mono: float
    told_mono: float  # the last use that the file itself shows

    def spent(self, now_mono: float) -> float:
        """How much of its life has passed since its last use; above 1 = expired."""
        return max(0.0, now_mono - self.used_mono) / self.retention.seconds

    @property
    def is_untold(self) -> bool:
        """Whether its file shows a retention or a use that are no longer right."""
        late_s = self.used_mono - self.told_mono
        return (
            late_s > _TELL_SHARE * self.retention.seconds
            or name_of(self.block.id, self.retention) != self.name
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexView:
    """The entries of an index at one moment."""

    entries: tuple[FileEntry, ...]
    held: frozenset[BlockId] = frozenset()
    usable: frozenset[bytes] | None = None  # fingerprints; None = all


@dataclass(slots=True, kw_only=True)
class Tally:
    """The blocks and bytes of one fingerprint."""

    facts: Facts
    blocks: int = 0
    bytes: int = 0


class DiskIndex:
    """The entries by block id, their bytes, the held ones, and the fingerprints of use."""

    def __init__(self, usable: Usable = all_usable) -> None:
        self._entries: dict[BlockId, FileEntry] = {}
        self._held: Counter[BlockId] = Counter()
        self._usable = usable
        self._by_retention: Counter[Retention] = Counter()
        self._by_fingerprint: dict[bytes, Tally] = {}
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._entries

    def __iter__(self) -> Iterator[FileEntry]:
        return iter(self._entries.values())

    def get(self, block_id: BlockId) -> FileEntry | None:
        """The entry of a block, if it is there."""
        return self._entries.get(block_id)

    def add(self, entry: FileEntry) -> None:
        """Take an entry in; it replaces another one of the same block."""
        self.drop(entry.block.id)
        self._entries[entry.block.id] = entry
        self.used_bytes += entry.size_bytes
        self._by_retention[entry.retention] += 1
        tally = self._by_fingerprint.setdefault(
            entry.block.fingerprint, Tally(facts=entry.block.facts)
        )
        tally.blocks += 1
        tally.bytes += entry.size_bytes

    def drop(self, block_id: BlockId) -> FileEntry | None:
        """Forget an entry; returns it."""
        entry = self._entries.pop(block_id, None)
        if entry is None:
            return None
        self.used_bytes -= entry.size_bytes
        self._by_retention[entry.retention] -= 1
        tally = self._by_fingerprint[entry.block.fingerprint]
        tally.blocks -= 1
        tally.bytes -= entry.size_bytes
        if not tally.blocks:
            del self._by_fingerprint[entry.block.fingerprint]
        return entry

    def take(self, seen: FileEntry) -> bool:
        """Forget an entry if it is as it was seen, and not held; returns whether it was."""
        if self._entries.get(seen.block.id) is not seen or seen.block.id in self._held:
            return False
        self.drop(seen.block.id)
        return True

    def touch(
        self, block_id: BlockId, now_mono: float, retention: Retention | None = None
    ) -> FileEntry | None:
        """A block was used; its retention only ever grows. None = it is not here."""
        entry = self._entries.get(block_id)
        if entry is None:
            return None
        kept = max(entry.retention, retention or entry.retention)
        touched = replace(entry, used_mono=max(now_mono, entry.used_mono), retention=kept)
        self._entries[block_id] = touched
        self._by_retention[entry.retention] -= 1
        self._by_retention[kept] += 1
        return touched

    def told(self, seen: FileEntry, name: str) -> None:
        """The file of an entry shows its use now, under this name."""
        entry = self._entries.get(seen.block.id)
        if entry is not None and entry.name == seen.name:
            self._entries[seen.block.id] = replace(entry, name=name, told_mono=seen.used_mono)

    def hold(self, ids: Iterable[BlockId]) -> None:
        """Let these stay whatever happens, until `let_go`; they need not be there."""
        self._held.update(ids)

    def let_go(self, ids: Iterable[BlockId]) -> None:
        """End one hold of each."""
        self._held.subtract(ids)
        self._held = +self._held

    def by_retention(self) -> dict[str, int]:
        """Blocks by the word of their retention."""
        return {kind.label: count for kind, count in self._by_retention.items() if count}

    def by_fingerprint(self) -> Iterator[tuple[bytes, Tally, bool]]:
        """Each fingerprint, the bytes of its blocks, and whether they can be used now."""
        usable = self._usable_now()
        for fingerprint, tally in self._by_fingerprint.items():
            yield fingerprint, tally, fingerprint in usable

    def view(self) -> IndexView:
        """The entries at this moment."""
        return IndexView(
            entries=tuple(self._entries.values()),
            held=frozenset(self._held),
            usable=self._usable_now(),
        )

    def _usable_now(self) -> frozenset[bytes]:
        known = {fingerprint: tally.facts for fingerprint, tally in self._by_fingerprint.items()}
        return frozenset(self._usable(known))


def untold(view: IndexView) -> list[FileEntry]:
    """Find entries whose use or retention the file does not show yet."""
    return [entry for entry in view.entries if entry.is_untold]


def expired(view: IndexView, now_mono: float) -> list[FileEntry]:
    """Find blocks that expired, and that no remaining block needs."""
    spent = spent_lives(view, now_mono)
    return [
        entry
        for entry in view.entries
        if spent[entry.block.id] > 1.0 and entry.block.id not in view.held
    ]


def victims(view: IndexView, need_bytes: int, now_mono: float) -> list[FileEntry]:
    """Choose blocks to free so many bytes, the first to go in front; fewer where no more may go."""
    if need_bytes <= 0:
        return []
    spent = spent_lives(view, now_mono)
    ordered = sorted(
        (entry for entry in view.entries if entry.block.id not in view.held),
        key=lambda entry: (
            view.usable is None or entry.block.fingerprint in view.usable,
            -spent[entry.block.id],
            -entry.block.index,
        ),
    )
    freed_bytes = 0
    for count, entry in enumerate(ordered, start=1):
        freed_bytes += entry.size_bytes
        if freed_bytes >= need_bytes:
            return ordered[:count]
    return ordered


def spent_lives(view: IndexView, now_mono: float) -> Mapping[BlockId, float]:
    """Tell the spent life of each block: its own, or the least of the blocks behind it."""
    spent = {
        entry.block.id: 0.0 if entry.block.id in view.held else entry.spent(now_mono)
        for entry in view.entries
    }
    for entry in sorted(view.entries, key=lambda entry: -entry.block.index):
        parent = entry.block.parent
        if parent in spent:
            spent[parent] = min(spent[parent], spent[entry.block.id])
    return spent
