"""The slots of one llama-server, and their KV saved and restored: a history survives its server.

    a prompt     takes the slot that holds most of it; where the archive holds more, that is
                 restored into the slot first
    saved        a history whose slot is about to be taken or emptied, and all when the server ends

The server reads and writes plain files in the private folder of its socket. A file that was written
is mapped and unlinked at once; one that is to be read is unlinked behind the answer. Nothing here
fails a request: without saved KV a prompt is computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import mmap
import os
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kakeya.backends.engine.child import Child
from kakeya.backends.llama.archive import MOST_TOKENS, SlotArchive
from kakeya.backends.llama.http import call
from kakeya.backends.llama.slots import Slot, SlotTable
from kakeya.core.errors import KakeyaError, PeerProtocol
from kakeya.core.log import event
from kakeya.core.units import GIB, MIB, pack_ids
from kakeya.generation.facts import ModelFacts
from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.generation.retention import Retention
from kakeya.prefix.disk.kvb import StoredBlock
from kakeya.prefix.disk.read_back import FIRST_RATE
from kakeya.prefix.names.blocks import TOKEN_BYTES, shared_tokens

_log = logging.getLogger(__name__)
LEAST_TOKENS = 256
"""Shorter histories are not saved, and no fewer tokens are restored."""
_ANSWER_TOKENS = 1024
"""For so many tokens of an answer there is to be room at its start; most are shorter."""
_CALL_S = 30.0
"""The limit of one save or restore."""
_NAMED_S = 1.0
"""How long a prompt waits for the digest of the weights, where the archive may hold its begin, or
its slot a history that would be lost."""
_SPARE_BYTES = GIB
"""The disk keeps so many bytes free beside a file of a slot."""
_ZEROS = bytes(MIB)


@dataclass(slots=True, order=True)
class _Place:
    """A place in the line for a slot."""

    priority: int
    number: int
    packed: bytes = field(compare=False)
    slot: asyncio.Future[Slot] = field(default_factory=asyncio.Future, compare=False)


class SlotKeeper:
    """See the module. Lives as long as the client of one child."""

    def __init__(
        self,
        child: Child,
        table: SlotTable,
        archive: SlotArchive,
        facts: Callable[[], ModelFacts | None],
    ) -> None:
        self._child = child
        self._table = table
        self._archive = archive
        self._facts = facts
        self._seed = b""
        self._naming: asyncio.Task[None] | None = None
        self._works: set[asyncio.Task[None]] = set()
        self._line: list[_Place] = []
        self._numbers = itertools.count()
        self._made = 0
        archive.holders.add(self)

    def name(self, path: Path, state: str, traits: Sequence[str]) -> None:
        """Name the model, whose file had this state when its server loaded it."""
        if self._naming is None:
            naming = self._name(path, state, traits)
            self._naming = asyncio.create_task(naming, name=f"name of {self._child.model_id}")

    async def aclose(self) -> None:
        """Leave the archive; what is under way ends first."""
        self._archive.holders.discard(self)
        if self._naming is not None:
            self._naming.cancel()
            await asyncio.gather(self._naming, return_exceptions=True)
        await asyncio.gather(*self._works, return_exceptions=True)

    @asynccontextmanager
    async def turn(self, request: DecodeRequest, committed: Sequence[int]) -> AsyncIterator[int]:
        """Wait for a slot, the most urgent request first, and hold it; yield its number.

        `committed` are the tokens of the answer, those that there are at the end of the turn.
        """
        packed = pack_ids(request.token_ids)
        slot = await self._taken(packed, request.priority)
        preparing = self._begin(self._prepare(slot, packed, request.max_tokens))
        try:
            await asyncio.shield(preparing)
        except BaseException:
            preparing.add_done_callback(lambda _: self._leave(slot))
            raise
        try:
            slot.packed = packed
            slot.retention = request.kv_retention
            slot.is_passing = request.priority is GenerationPriority.BATCH
            yield slot.index
            slot.packed += pack_ids(committed[:-1])  # the last token is in no KV yet
        finally:
            self._leave(slot)

    async def keep(self, timeout_s: float) -> None:
        """Save the histories of idle slots, the last used first, until the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                if self._naming is not None and any(map(self._is_worth_saving, self._table.slots)):
                    await asyncio.wait((self._naming,))
                for slot in sorted(self._table.slots, key=lambda slot: -slot.used):
                    if not slot.is_busy:
                        await asyncio.shield(self._begin(self._save(slot)))

    async def forget(self) -> None:
        """Empty the idle slots; what a busy one holds is not saved."""
        await asyncio.gather(*self._works, return_exceptions=True)
        for slot in self._table.slots:
            if slot.is_busy:
                slot.retention = Retention.IN_MEMORY
            elif slot.packed:
                await asyncio.shield(self._begin(self._empty(slot)))

    async def _taken(self, packed: bytes, priority: int) -> Slot:
        place = _Place(priority, next(self._numbers), packed)
        heapq.heappush(self._line, place)
        self._let_in()
        try:
            return await place.slot
        except asyncio.CancelledError:
            if place.slot.done() and not place.slot.cancelled():
                self._leave(place.slot.result())
            raise

    def _leave(self, slot: Slot) -> None:
        slot.is_busy = False
        self._let_in()

    def _let_in(self) -> None:
        """Give idle slots to those that wait."""
        while self._line:
            place = self._line[0]
            slot = None if place.slot.cancelled() else self._table.take(place.packed)
            if slot is not None:
                place.slot.set_result(slot)
            elif not place.slot.cancelled():
                return
            heapq.heappop(self._line)

    async def _name(self, path: Path, state: str, traits: Sequence[str]) -> None:
        try:
            self._seed = await self._archive.seed(self._child.model_id, path, state, traits)
        except KakeyaError as fault:
            self._tell("conversations are not kept", fault.message)

    def _begin(self, coroutine: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Begin work that is done to its end, also when the caller is cancelled: the server would
        write a file that nothing removes."""
        task = asyncio.create_task(coroutine, name=f"slots of {self._child.model_id}")
        self._works.add(task)
        task.add_done_callback(self._works.discard)
        return task

    async def _prepare(self, slot: Slot, packed: bytes, max_tokens: int) -> None:
        """Have as much of a prompt in its slot as there is, and room for the rest."""
        have = shared_tokens(slot.packed, packed)
        block, shared = await self._find(packed)
        if (
            block is None
            or shared - have < LEAST_TOKENS
            or not self._is_sooner(block, shared - have)
        ):
            block = None
        if block is not None or 2 * have < slot.tokens:
            await self._save(slot)
        needed = len(packed) // TOKEN_BYTES + min(max_tokens, _ANSWER_TOKENS)
        for other in self._table.leaving(slot, max(needed, block.tokens if block else 0)):
            other.is_busy = True
            try:
                await self._save(other)
                await self._empty(other)
            finally:
                self._leave(other)
        if block is not None:
            await self._restore(slot, block)

    async def _find(self, packed: bytes) -> tuple[StoredBlock | None, int]:
        await self._archive.ready()
        if self._archive.holds(self._child.model_id):
            await self._named()
        return self._archive.best(self._seed, packed)

    async def _named(self) -> bool:
        if not self._seed and self._naming is not None:
            await asyncio.wait((self._naming,), timeout=_NAMED_S)
        return bool(self._seed)

    def _is_sooner(self, block: StoredBlock, tokens: int) -> bool:
        """Whether a file is likely read before so many tokens are computed."""
        facts = self._facts()
        rate = facts.prefill_tokens_per_second if facts else 0.0
        return not rate or block.payload_bytes / FIRST_RATE < tokens / rate

    def _is_worth_saving(self, slot: Slot) -> bool:
        facts = self._facts()
        if facts is None or not slot.retention.is_on_disk or slot.is_passing:
            return False
        if not LEAST_TOKENS <= slot.tokens <= MOST_TOKENS:
            return False
        rate = facts.prefill_tokens_per_second
        return not rate or facts.kv_bytes_per_token / FIRST_RATE < 1 / rate

    async def _save(self, slot: Slot) -> None:
        if not self._is_worth_saving(slot) or not await self._named():
            return
        block, shared = self._archive.best(self._seed, slot.packed)
        store = self._archive.store
        if store is None or (block is not None and shared >= slot.tokens - 1):
            if store is not None and block is not None:
                store.touch((block.id,), slot.retention)
            return
        path = self._path(slot)
        began_mono = self._child.clock.mono()
        try:
            await asyncio.to_thread(_check_room, path.parent)
            await self._ask(slot, "save", path)
            payload = await asyncio.to_thread(_taken, path)
            tokens = await self._archive.put(
                self._seed,
                self._child.model_id,
                payload,
                slot.retention,
                self._child.clock.wall(),
            )
            self._note("conversation saved", tokens, payload.nbytes, began_mono)
        except (OSError, KakeyaError) as fault:
            self._tell("conversation not saved", str(fault))
        finally:
            await asyncio.to_thread(path.unlink, missing_ok=True)

    async def _restore(self, slot: Slot, block: StoredBlock) -> None:
        path, store = self._path(slot), self._archive.store
        began_mono = self._child.clock.mono()
        try:
            view = await asyncio.to_thread(_room_of, path, block.payload_bytes)
            if store is None or not await store.read_into(block.id, view):
                return  # damaged: the store has set it aside
            view.release()
            slot.packed = b""
            try:
                await self._ask(slot, "restore", path)
            except PeerProtocol:
                store.forget((block.id,))  # proven, and of no use to this server
                raise
            slot.packed = block.packed_ids
            self._note("conversation restored", block.tokens, block.payload_bytes, began_mono)
        except (OSError, KakeyaError) as fault:
            self._tell("conversation not restored", str(fault))
        finally:
            await asyncio.to_thread(path.unlink, missing_ok=True)

    async def _empty(self, slot: Slot) -> None:
        slot.packed = b""
        try:
            await self._ask(slot, "erase", self._path(slot))
        except (OSError, KakeyaError) as fault:
            self._tell("slot not emptied", str(fault))

    async def _ask(self, slot: Slot, action: str, path: Path) -> None:
        """Have the server do one thing with a slot. Raises OSError, PeerProtocol if it refuses."""
        where = f"/slots/{slot.index}?action={action}"
        async with asyncio.timeout(_CALL_S):
            async with call(self._child.socket, where, {"filename": path.name}) as answer:
                told = await answer.whole()
                if answer.status != 200:
                    raise PeerProtocol(f"llama-server refused to {action} a slot: {told}"[:300])

    def _path(self, slot: Slot) -> Path:
        self._made += 1
        return self._child.socket.with_name(f"slot-{slot.index}-{self._made}.kv")

    def _note(self, what: str, tokens: int, nbytes: int, began_mono: float) -> None:
        seconds = self._child.clock.mono() - began_mono
        model = self._child.model_id
        event(_log, what, model=model, tokens=tokens, bytes=nbytes, seconds=round(seconds, 3))

    def _tell(self, what: str, why: str) -> None:
        event(_log, what, level=logging.WARNING, model=self._child.model_id, reason=why)


def _check_room(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _SPARE_BYTES:
        raise OSError(f"the disk of {folder} has {free} bytes free")


def _taken(path: Path) -> memoryview:
    """Map a file that was written, and remove its name: its content goes with the last view."""
    with path.open("rb") as file:
        path.unlink()
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _room_of(path: Path, nbytes: int) -> memoryview:
    """Make a private file with room for so many bytes, and map it.

    The room is there for good: a write to a map that the disk has no room for would end the agent.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "r+b", buffering=0) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
        else:
            for at in range(0, nbytes, MIB):
                file.write(_ZEROS[: nbytes - at])
        return memoryview(mmap.mmap(file.fileno(), nbytes))
