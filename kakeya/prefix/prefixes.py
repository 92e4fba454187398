"""The prefixes of a node: KV of prompts that outlives generations, engines and restarts.

    a request   `exchange`, which `ResidentModel.decode` takes part in
    pages       blocks by fingerprint, in one budget               pages/pages.py
    disk        every block, written through                       disk/transfer.py
    peers       asked for missing blocks                           peers/peers.py
    turns       which request computes a piece that several want   request/turns.py
    endings     the logits behind whole prompts                    request/endings.py

Nothing here fails a request: without blocks a prompt is computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self
from weakref import WeakSet

from kakeya.core.clock import Clock
from kakeya.core.figures import Figure, Json
from kakeya.core.tasks import Supervisor, TaskHealth, every
from kakeya.generation.cuts import unmarked
from kakeya.generation.facts import ModelFacts
from kakeya.generation.kv import KvHolder
from kakeya.generation.request import DecodeRequest
from kakeya.generation.retention import BlockClass, Retention
from kakeya.memory.pages.node_arena import NodeArena
from kakeya.prefix.disk.read_back import Recall
from kakeya.prefix.disk.stats import DiskConfig, DiskStats
from kakeya.prefix.disk.store import FOLDER, BlockStore
from kakeya.prefix.disk.transfer import PrefixDisk
from kakeya.prefix.figures import prefix_figures, prefix_status
from kakeya.prefix.names.blocks import BlockId
from kakeya.prefix.names.fingerprint import Facts
from kakeya.prefix.names.naming import Naming, PrefixNames, paged_kv_bytes
from kakeya.prefix.names.pieces import Piece
from kakeya.prefix.pages.counts import PrefixCounts, Source
from kakeya.prefix.pages.pages import FingerprintBlocks, PrefixPages
from kakeya.prefix.pages.pins import PrefixPins
from kakeya.prefix.pages.reach import in_pages, reach_of
from kakeya.prefix.peers.seams import PeerSource
from kakeya.prefix.peers.two_sided_fetch import Rendezvous
from kakeya.prefix.request.endings import PrefixEndings
from kakeya.prefix.request.exchange import PrefixExchange, RequestContext
from kakeya.prefix.request.grant import EngineSeat
from kakeya.prefix.request.revoked import RevokedGrants
from kakeya.prefix.request.turns import Turns
from kakeya.prefix.seam import Wiped

WEIGHTS_FILE = "weights.json"
TEND_S = 5.0
SWEEP_S = 60.0
INDEX_S = 2.0
"""Seconds that the first requests wait for the scan of the folder of blocks."""
PINNED_SHARE = 0.5
"""The share of the pages for KV that pins may take together; the rest serves requests."""


class NodePrefixes:
    """See the module; an `async with`, entered once the arena is there and before models serve."""

    def __init__(
        self,
        arena: NodeArena,
        *,
        memory_bytes: int,
        disk_bytes: int,
        data_dir: Path,
        adapter_digest: Callable[[str], str],
        clock: Clock,
        rng: random.Random,
        served: Callable[[], Collection[str]],
        adapters: Callable[[], Collection[str]],
        key: bytes = b"",
        tenant: str = "",
    ) -> None:
        """`memory_bytes` of pages are for KV, `disk_bytes` on disk; 0 = none.

        `adapter_digest` finds the digest of an adapter's content by the id that engines know it by.
        With `key` the ids cannot be computed outside of the `tenant`. `served` names the models of
        this node, `adapters` has the digests of their adapters; blocks of other models and adapters
        leave the disk first.
        """
        self._memory_bytes = memory_bytes
        self._served = served
        self._adapters = adapters
        self._clock = clock
        self._rng = rng
        self.counts = PrefixCounts()
        self.names = PrefixNames(
            adapter_digest, key=key, tenant=tenant, file=data_dir / WEIGHTS_FILE
        )
        self.pages = PrefixPages(
            arena,
            budget_bytes=memory_bytes,
            clock=clock,
            counts=self.counts,
            dropped=self._forget,
            used=self._used,
            opened=self._stock,
        )
        self.turns = Turns(self.pages, clock=clock, counts=self.counts)
        self.store: BlockStore | None = None
        self._disk: PrefixDisk | None = None
        if disk_bytes > 0 and memory_bytes > 0:
            self.store = BlockStore(
                data_dir / FOLDER,
                DiskConfig(cap_bytes=disk_bytes),
                clock=clock,
                stored=self._stored,
                lost=self._lost,
                usable=self._usable,
            )
            self._disk = PrefixDisk(self.store, self.pages, clock=clock, counts=self.counts)
        self.endings = PrefixEndings(self._disk, clock=clock)
        self.elsewhere: PeerSource | None = None
        self.others: Callable[[], Collection[bytes]] = frozenset
        """The seeds of further files in the store, of use to models of this node."""
        self._leaving = RevokedGrants(self.pages, clock)
        self._tools = RequestContext(
            names=self.names,
            pages=self.pages,
            turns=self.turns,
            counts=self.counts,
            endings=self.endings,
            bring=self._bring,
            meet=self._meet,
            landed=self._landed,
            let_go=self._leaving.let_go,
        )
        self._exchanges: WeakSet[PrefixExchange] = WeakSet()
        self._pins = PrefixPins()
        self._tasks = Supervisor(clock)
        self._swept_mono = clock.mono()
        self._is_swept = False
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            if self.store is not None:
                await stack.enter_async_context(self.store)
            await stack.enter_async_context(self._tasks)
            stack.callback(self._pins.clear)
            stack.push_async_callback(self._leaving.aclose)
            stack.push_async_callback(self.names.aclose)
            if self._disk is not None:
                self._tasks.start("prefixes to disk", self._disk.write)
                stack.push_async_callback(self._disk.flush)
            if self.is_on:
                self._tasks.start("prefixes", self._tend)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def is_on(self) -> bool:
        """Whether any KV is kept."""
        return self._memory_bytes > 0

    # --- requests

    def exchange(self, seat: EngineSeat, request: DecodeRequest) -> PrefixExchange | None:
        """Make the exchange of a request with the prefixes; None = the request takes no part."""
        if not self.is_on or request.kv is not None:
            return None
        exchange = PrefixExchange(self._tools, seat, request)
        self._exchanges.add(exchange)
        return exchange

    @property
    def waiting(self) -> int:
        """Requests that wait for a piece that another request computes."""
        return self.turns.waiting

    # --- prefixes that are looked after

    async def has_name(self, facts: ModelFacts) -> bool:
        """See `PrefixNames.has_name`."""
        return await self.names.has_name(facts)

    def keep(
        self,
        model_id: str,
        adapter_id: str,
        token_ids: Sequence[int],
        retention: Retention,
        *,
        block_class: BlockClass = BlockClass.SPECULATIVE,
        pin: str = "",
    ) -> int:
        """Refresh the blocks of a marked prefix, for at least this long; how many tokens are in
        pages.

        With a name for a pin, these blocks are not evicted until `release`, or until another
        prefix has that name.
        """
        naming = self.names.known(model_id, adapter_id)
        if naming is None:
            return 0
        shelf = self.pages.shelf(naming)
        pieces = naming.pieces(*unmarked(token_ids))
        found = reach_of(shelf, pieces, naming, in_ram=True)
        ids = [node.id for node, _ in found]
        on_disk = [node.id for node, _ in reach_of(shelf, pieces, naming, in_ram=False)]
        used = list(dict.fromkeys([*on_disk, *ids]))
        self.pages.touch(shelf, used, block_class=block_class, retention=retention)
        if pin:
            self._pins.pin(pin, adapter_id, shelf, ids)
        return sum(tokens for _, tokens in found)

    def held(self, model_id: str, token_ids: Sequence[int], cuts: Sequence[int]) -> int:
        """How many leading tokens of a history have their KV in pages or on disk. Changes
        nothing."""
        naming = self.names.known(model_id, "")
        if naming is None or not token_ids:
            return 0
        pieces = naming.pieces(token_ids, cuts)
        found = reach_of(self.pages.shelf(naming), pieces, naming, in_ram=False)
        return min(sum(tokens for _, tokens in found), len(token_ids) - 1)

    @property
    def most_pinned_bytes(self) -> int:
        """The bytes that all pins may take together."""
        return int(PINNED_SHARE * self._memory_bytes)

    def pinned_bytes(
        self, model_id: str, adapter_id: str, token_ids: Sequence[int], pin: str
    ) -> int:
        """The bytes that all pins take, if this one holds the pages of this prefix."""
        naming = self.names.known(model_id, adapter_id)
        if naming is None:
            return self._pins.bytes_with(pin, ())
        found = in_pages(self.pages.shelf(naming), naming, token_ids)
        return self._pins.bytes_with(pin, [node for node, _ in found])

    def release(self, pin: str) -> None:
        """End a pin; harmless when there is none."""
        self._pins.release(pin)

    def adapter_retired(self, adapter_id: str) -> None:
        """End the pins of an adapter that was replaced or removed."""
        self._pins.drop(adapter_id)

    async def wipe(self) -> Wiped:
        """Drop all KV, in pages and on disk. A block that an engine reads goes after the read;
        blocks that are computed later are kept."""
        if self.store is not None:
            await self.store.ready()
        self._pins.clear()
        if self._disk is not None:
            self._disk.forget()
        blocks = self.pages.clear()
        self.endings.clear()
        if self.store is None:
            return Wiped(blocks=blocks)
        done = await self.store.wipe()
        return Wiped(blocks=blocks, files=done.files, kept=done.kept, has_disk=True)

    async def recall(self, naming: Naming, nbytes: int) -> Recall:
        """Bring back blocks as `ReadBack.recall` does, and the endings of prompts."""
        if self._disk is None:
            return Recall([])
        came = await self._disk.reading.recall(self.pages.shelf(naming), naming, nbytes)
        await self.endings.recall()
        return came

    def free_bytes(self) -> int:
        """The bytes that speculative KV may take without an eviction."""
        return self.pages.free_bytes

    def bytes_of(self, facts: ModelFacts, tokens: int) -> int:
        """The bytes that so many more tokens of a model take in pages; 0 = its KV is in no
        blocks."""
        return paged_kv_bytes(facts, tokens, self.pages.arena.paged_bytes)

    # --- what there is

    def status(self) -> Json:
        """Blocks, tokens and waits, as JSON."""
        return prefix_status(*self._told())

    def figures(self) -> Iterator[Figure]:
        """The same numbers."""
        return prefix_figures(*self._told())

    def _told(self) -> tuple[PrefixPages, Turns, PrefixCounts, DiskStats | None, PrefixEndings]:
        disk = self.store.stats() if self.store is not None else None
        return self.pages, self.turns, self.counts, disk, self.endings

    def health(self) -> tuple[TaskHealth, ...]:
        """Its background tasks."""
        return self._tasks.health()

    # --- between the parts

    async def _bring(
        self,
        shelf: FingerprintBlocks,
        naming: Naming,
        pieces: Sequence[Piece],
        block_class: BlockClass,
        told: KvHolder,
    ) -> dict[BlockId, Source]:
        """Bring pieces from disk, then from peers, as long as that is sooner than computing."""
        origins: dict[BlockId, Source] = {}
        await self._look_through_disk()
        if self._disk is not None:
            came = await self._disk.reading.bring(
                shelf, naming, pieces, block_class, self.turns.landed
            )
            origins.update(dict.fromkeys(came, Source.DISK))
        if self.elsewhere is not None:
            whole = [piece.id for piece in pieces if not piece.is_tail]
            have = shelf.tree.match(whole).depth_ram
            if have < len(whole):
                fetched = await self.elsewhere.fetch(shelf, naming, pieces, have, block_class, told)
                for block_id in fetched:
                    self.turns.landed(block_id)
                origins.update(dict.fromkeys(fetched, Source.PEER))
        return origins

    async def _look_through_disk(self) -> None:
        """Wait a moment for the scan of the disk, right after a start."""
        if self.store is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(INDEX_S):
                await self.store.ready()

    def _usable(self, known: Mapping[bytes, Facts]) -> Collection[bytes]:
        ours = self.names.usable(known, self._served(), self._adapters)
        return ours | (known.keys() & set(self.others()))

    async def _meet(
        self,
        shelf: FingerprintBlocks,
        naming: Naming,
        pieces: Sequence[Piece],
        block_class: BlockClass,
        told: KvHolder,
        joined: Callable[[list[BlockId]], None],
    ) -> Rendezvous | None:
        """Fetch the missing blocks from a peer, from the last one on, where that is of use."""
        whole = [piece.id for piece in pieces if not piece.is_tail]
        have = shelf.tree.match(whole).depth_ram
        if self.elsewhere is None or have == len(whole):
            return None

        def landed(came: list[BlockId]) -> None:
            for block_id in came:
                self.turns.landed(block_id)
            joined(came)

        return await self.elsewhere.rendezvous(
            shelf, naming, pieces, have, block_class, told, landed
        )

    def _landed(self, shelf: FingerprintBlocks, block_id: BlockId) -> None:
        if self._disk is not None:
            self._disk.keep(shelf, block_id)

    @property
    def is_at_rest(self) -> bool:
        """Whether no request is under way, no call was cut off and no block waits for the disk."""
        is_written = self._disk is None or not self._disk.waiting
        is_quiet = not self._leaving and not len(self.turns.flights) and not self.waiting
        return self.pages.is_at_rest and is_quiet and is_written

    def check_integrity(self) -> None:
        """Check the laws that hold between any two events. Raises InvariantBroken."""
        self.pages.check_integrity()
        self.turns.flights.check_integrity()

    async def _tend(self) -> None:
        await every(TEND_S, self._look_after, clock=self._clock, rng=self._rng, is_shared=True)

    async def _look_after(self) -> None:
        """Renew the pins in use; now and then, drop expired blocks."""
        for exchange in self._exchanges:
            if exchange.given is not None:
                exchange.given.renew()
        self._leaving.renew()
        if self._disk is not None:
            self._disk.renew()
        now = self._clock.mono()
        # After a start, as soon as it is known which blocks can be used.
        is_first = not self._is_swept and self.names.are_known(self._served())
        if is_first or now - self._swept_mono >= SWEEP_S:
            self._swept_mono, self._is_swept = now, True
            self.counts.expired += self.pages.expire()
            if self.store is not None:
                await self.store.sweep()

    def _stock(self, shelf: FingerprintBlocks) -> None:
        if self._disk is not None:
            self._disk.stock(shelf)

    def _stored(self, ids: Collection[BlockId]) -> None:
        if self._disk is not None:
            self._disk.stored(ids)

    def _lost(self, ids: Collection[BlockId]) -> None:
        if self._disk is not None:
            self._disk.lost(ids)

    def _forget(self, ids: Collection[BlockId]) -> None:
        if self.store is not None:
            self.store.forget(ids)

    def _used(self, shelf: FingerprintBlocks, ids: Sequence[BlockId], retention: Retention) -> None:
        """Note that blocks are used: those that were for memory alone are written now."""
        if self.store is None or not retention.is_on_disk:
            return
        self.store.touch(ids, retention)
        for block_id in ids:
            node = shelf.tree.node(block_id)
            if node is not None and node.in_ram and not node.retention.is_on_disk:
                self._landed(shelf, block_id)
