"""Blocks of KV on disk, which survive engines and restarts. Owns the folder and its index.

Everything is best effort: a disk that is full, read-only, slow or broken, and files that are cut
off, flipped or foreign, cost a cold prefill and are counted; nothing here fails a request. Writes
wait in a bounded queue and are made by one thread; reads have threads of their own, so that none
waits behind a flush. The index belongs to the event loop; after a start it is rebuilt from the
headers in a thread, and a lookup meanwhile is a miss.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

from kakeya.core.clock import Clock
from kakeya.core.errors import InvalidArgument
from kakeya.core.log import event
from kakeya.core.tasks import Supervisor
from kakeya.generation.retention import Retention
from kakeya.prefix.disk.files import BlockFolder, Damage, Verified
from kakeya.prefix.disk.index import DiskIndex, FileEntry, Usable, all_usable
from kakeya.prefix.disk.kvb import DamagedBlock, Payload, StoredBlock
from kakeya.prefix.disk.queue import QueuedBlock
from kakeya.prefix.disk.stats import Counts, DiskConfig, DiskStats, uses_of
from kakeya.prefix.disk.threads import DiskThreads, Outage, Stop
from kakeya.prefix.disk.upkeep import DiskParts, Upkeep, look_through
from kakeya.prefix.disk.wipe import Removal
from kakeya.prefix.disk.writer import BlockWriter, is_as_good
from kakeya.prefix.names.blocks import BlockId

_log = logging.getLogger(__name__)
FOLDER = "precache"
"""Where a node keeps its blocks, in its data directory."""
_BATCH = 256
"""Entries that are taken into the index at once: a fraction of a millisecond each."""
Into = Callable[[StoredBlock], memoryview | None]


def _nobody(_ids: Collection[BlockId]) -> None:
    return


class BlockStore:
    """The blocks in one folder; an `async with`. For one event loop, and one process.

    `stored` and `lost` are called on the loop with ids that are on disk from now on, or no longer,
    but not for blocks that the caller itself forgets. A start tells its blocks parents first.
    """

    def __init__(
        self,
        folder: Path,
        config: DiskConfig,
        *,
        clock: Clock,
        stored: Callable[[Collection[BlockId]], None] = _nobody,
        lost: Callable[[Collection[BlockId]], None] = _nobody,
        usable: Usable = all_usable,
    ) -> None:
        """`usable` is asked each time: all other fingerprints are the first to go."""
        self._clock = clock
        self._config = config
        self._folder = BlockFolder(folder, quarantine_bytes=config.quarantine_bytes)
        self._threads = DiskThreads(config.readers)
        self._index = DiskIndex(usable)
        self._counts = Counts()
        self._reads = Outage("read", config.retry_s)
        parts = DiskParts(
            folder=self._folder,
            threads=self._threads,
            index=self._index,
            counts=self._counts,
            config=config,
            clock=clock,
            stored=stored,
            lost=lost,
        )
        self._stored, self._lost = stored, lost
        self._upkeep = Upkeep(parts)
        self._writer = BlockWriter(parts, self._upkeep)
        self._supervisor = Supervisor(clock)
        self._ready = asyncio.Event()
        self._is_indexed = False
        self._is_open = False

    async def __aenter__(self) -> Self:
        self._is_open = True
        self._supervisor.start("precache disk", self._work)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Write the blocks that wait, for `config.flush_s` at most, and end."""
        if not self._is_open:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.flush_s):
                await self.flush()
                await self._upkeep.tell_uses()
        self._is_open = False
        await self._supervisor.aclose()
        self._writer.close()
        self._threads.close()

    async def ready(self) -> None:
        """Wait until the folder was looked through."""
        await self._ready.wait()

    async def flush(self) -> None:
        """Wait until nothing waits to be written."""
        await self.ready()
        await self._writer.flush()

    # What is there.

    def has(self, block_id: BlockId) -> bool:
        """Whether a block is on disk, or on its way there."""
        return self.block(block_id) is not None

    def block(self, block_id: BlockId) -> StoredBlock | None:
        """The facts of a block, such as its bytes, without reading it."""
        waiting = self._writer.on_its_way(block_id)
        if waiting is not None:
            return waiting.block
        entry = self._index.get(block_id)
        return None if entry is None else entry.block

    def ids(self) -> tuple[BlockId, ...]:
        """Every block on disk."""
        return tuple(entry.block.id for entry in self._index)

    def entries(self) -> tuple[FileEntry, ...]:
        """Every block on disk with its retention and last use."""
        return tuple(self._index)

    def stats(self) -> DiskStats:
        """The content and the counts."""
        return DiskStats(
            blocks=len(self._index),
            used_bytes=self._index.used_bytes,
            cap_bytes=self._config.cap_bytes,
            queued=self._writer.waiting,
            queued_bytes=self._writer.waiting_bytes,
            is_ready=self._ready.is_set(),
            trouble=self._writer.problem or self._reads.problem,
            counts=replace(self._counts),
            by_retention=self._index.by_retention(),
            by_fingerprint=uses_of(self._index),
        )

    # What is used.

    def touch(self, ids: Iterable[BlockId], retention: Retention | None = None) -> None:
        """Let the lives of blocks begin anew, because they are in use, here or in memory.

        A longer retention is taken over; the files show both later. Unknown ones are fine.
        """
        now_mono = self._clock.mono()
        for block_id in ids:
            self._index.touch(block_id, now_mono, retention)
            waiting = self._writer.on_its_way(block_id)
            if waiting is not None and retention is not None:
                waiting.retention = max(waiting.retention, retention)

    def hold(self, ids: Iterable[BlockId]) -> Callable[[], None]:
        """Let blocks stay, here or not yet, until the returned function is called."""
        held = tuple(ids)
        self._index.hold(held)
        left = [held]
        return lambda: self._index.let_go(left.pop() if left else ())

    # Reading.

    async def get(self, block_id: BlockId) -> tuple[StoredBlock, bytearray] | None:
        """Read a block for a peer; None = it is not there, or damaged.

        The proof is SHA-256.
        """
        room: list[bytearray] = []

        def into(block: StoredBlock) -> memoryview:
            room.append(bytearray(block.payload_bytes))
            return memoryview(room[-1])

        block = await self._read(block_id, into, is_lent=True)
        return None if block is None else (block, room[-1])

    async def read_into(self, block_id: BlockId, view: memoryview) -> bool:
        """Read a payload straight into a view of exactly its size, and prove it by its parts.

        False = the block is not there, damaged, or of another size, and the view holds anything.
        When this is cancelled, nothing writes to the view any more once it has ended.
        """
        flat = view.cast("B")
        block = await self._read(
            block_id,
            lambda block: flat if block.payload_bytes == len(flat) else None,
            is_lent=False,
        )
        return block is not None

    # Changing.

    async def put(
        self,
        block: StoredBlock,
        payload: Payload,
        released: Callable[[], None] | None = None,
        *,
        is_mapped: bool = False,
    ) -> bool:
        """Queue a block to be written; False = it is there already, or cannot be written now.

        The payload must not change until it is written; with `released` it is only lent, and that
        is called once, on the loop, as soon as it is not needed any more. One that is mapped from a
        file takes no memory while it waits. A block that came without its state is written again
        when it comes with it. Raises InvalidArgument.
        """
        given_bytes = memoryview(payload).nbytes
        if given_bytes != block.payload_bytes:
            raise InvalidArgument(
                f"block {block.id.hex()} came with {given_bytes} bytes; "
                f"{block.payload_bytes} were announced"
            )
        item = QueuedBlock(
            block=block,
            payload=payload,
            retention=block.retention,
            released=released,
            is_mapped=is_mapped,
        )
        if is_as_good(self.block(block.id), block):
            self.touch((block.id,), block.retention)
            item.release()
            return False
        return self._writer.put(item)

    def forget(self, ids: Iterable[BlockId]) -> None:
        """Let blocks go, on disk and on their way there; unknown ones are fine."""
        gone = tuple(ids)
        self._writer.forget(gone)
        dropped = [entry for block_id in gone if (entry := self._index.drop(block_id))]
        if dropped and self._is_open:
            names = [entry.name for entry in dropped]
            self._threads.write_later(partial(self._folder.remove_all, names))

    async def sweep(self) -> None:
        """Remove expired blocks and those above the limit; let the files show the last uses.

        A start leaves blocks above the limit to the first sweep, or a write: `usable` may know
        little yet.
        """
        await self.ready()
        if not self._is_indexed:
            await self._index_folder()
        await self._upkeep.expire()
        with contextlib.suppress(OSError):  # the next write says so
            await self._upkeep.make_room(0)
        await self._upkeep.tell_uses()
        await self._upkeep.find_gone()
        await self._upkeep.look_at_quarantine()

    async def verify(self) -> Verified:
        """Read every block whole; damaged files are set aside."""
        await self.ready()
        seen = {entry.name: entry for entry in self._index}
        names = [(entry.name, entry.block.id) for entry in seen.values()]
        stop = Stop()
        found = await self._threads.read(partial(self._folder.verify, names, stop.is_unset), stop)
        for damage in found.damage:
            self._lose(seen[damage.name])
        self._report_damage(found.damage)
        await self._upkeep.look_at_quarantine()
        return found

    async def wipe(self) -> Removal:
        """Remove every block and the quarantine. A file that cannot be removed is reported, and not
        read any more; the next start finds it."""
        await self.ready()
        self._writer.clear()
        gone = self.ids()
        for block_id in gone:
            self._index.drop(block_id)
        self._lost(gone)
        done = await self._threads.write(self._folder.wipe)
        await self._upkeep.look_at_quarantine()
        return done

    # The start.

    async def _work(self) -> None:
        if not self._ready.is_set():
            await self._index_folder()
            self._ready.set()
            await self._upkeep.expire()
            await self._upkeep.look_at_quarantine()
        await self._writer.run()

    async def _index_folder(self) -> None:
        stop = Stop()
        wall, mono = self._clock.wall(), self._clock.mono()
        try:
            entries, damage = await self._threads.write(
                partial(look_through, self._folder, wall, mono, stop), stop
            )
        except OSError as problem:
            self._reads.began(str(problem), self._clock.mono())
            return
        self._is_indexed = True
        self._reads.ended()
        entries = [entry for entry in entries if entry.block.id not in self._index]
        for first in range(0, len(entries), _BATCH):
            batch = entries[first : first + _BATCH]
            for entry in batch:
                self._index.add(entry)
            self._stored([entry.block.id for entry in batch])
            await asyncio.sleep(0)
        self._report_damage(damage)

    # Reading, behind the scenes.

    async def _read(self, block_id: BlockId, into: Into, *, is_lent: bool) -> StoredBlock | None:
        waiting = self._writer.on_its_way(block_id)
        if not self._is_open:
            block = None
        elif waiting is not None:
            block = await self._copy(waiting, into)
        else:
            block = await self._read_file(block_id, into, is_lent=is_lent)
        if block is None:
            self._counts.misses += 1
            return None
        self._counts.hits += 1
        self._counts.read_bytes += block.payload_bytes
        self.touch((block_id,))
        return block

    async def _copy(self, waiting: QueuedBlock, into: Into) -> StoredBlock | None:
        view = into(waiting.block)
        if view is None:
            return None
        with waiting.in_use() as payload:
            whole = memoryview(payload).cast("B")
            await self._threads.read(partial(view.__setitem__, slice(None), whole))
        return waiting.block

    async def _read_file(
        self, block_id: BlockId, into: Into, *, is_lent: bool
    ) -> StoredBlock | None:
        entry = self._index.get(block_id)
        while entry is not None:
            stop = Stop()
            try:
                known = None if is_lent else entry.head
                read = partial(
                    self._folder.read, entry.name, block_id, into, stop.is_unset, known=known
                )
                block = await self._threads.read(read, stop)
            except FileNotFoundError:
                self._lose(entry)  # unless it has another name now
                entry = self._index.get(block_id)
            except DamagedBlock as problem:
                self._lose(entry)
                self._report_damage((Damage(name=entry.name, problem=str(problem)),))
                return None
            except OSError as problem:
                self._counts.read_failures += 1
                self._reads.began(str(problem), self._clock.mono())
                return None
            else:
                self._reads.ended()
                return block
        return None

    def _lose(self, seen: FileEntry) -> None:
        entry = self._index.get(seen.block.id)
        if entry is not None and entry.name == seen.name:
            self._index.drop(entry.block.id)
            self._lost((entry.block.id,))

    def _report_damage(self, damage: Sequence[Damage]) -> None:
        self._counts.damaged += len(damage)
        if damage:
            event(
                _log,
                "damaged files of stored KV are set aside",
                level=logging.WARNING,
                files=len(damage),
                first=damage[0].name,
                problem=damage[0].problem,
            )
