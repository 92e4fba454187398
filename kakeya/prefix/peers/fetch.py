"""Fetches missing blocks of a history from peers, and bounds how much later that makes a request.

    fetch        a leading run, front to back, while nothing is computed; bounded by `due_s`
    fetch_back   back to front, while an engine computes from the front, until they meet

A few peers are asked at once; the best answer is taken, and when its peer fails in the middle the
next one goes on at the very block. Every failure ends here: the caller computes the rest.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum, auto

from kakeya.core.clock import Clock
from kakeya.core.errors import DeadlineExceeded, KakeyaError, PeerUnavailable
from kakeya.core.log import event
from kakeya.fleet.paths.link_rates import LinkRate, LinkRates
from kakeya.prefix.peers.auth import FleetKey
from kakeya.prefix.peers.choice import (
    BlockHolder,
    Hit,
    due_s,
    in_order,
    is_worth_asking,
    is_worth_meeting,
    to_ask,
)
from kakeya.prefix.peers.client import ChannelFor, PrefixPeer
from kakeya.prefix.peers.seams import BlockSink, MissingBlocks
from kakeya.prefix.peers.two_sided import Meeting, is_worth_while

_log = logging.getLogger(__name__)
PEERS_KEPT = 256
BESIDE_S = 1.0
"""How long a lookup may take beside a prefill, which does not wait for it."""
Stream = AsyncGenerator[tuple[int, bytearray], None]


class _End(Enum):
    """How a stream of blocks ended; another peer may go on where it is over."""

    OVER = auto()
    LATE = auto()
    FULL = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchStats:
    """Counts of fetches since the start. `wait_s` are the seconds that requests waited for them."""

    asked: int = 0
    hits: int = 0
    blocks: int = 0
    tokens: int = 0
    bytes: int = 0
    failures: int = 0
    late: int = 0
    met: int = 0
    wait_s: float = 0.0


class PeerFetch:
    """The peers of one node, by node id. `on_lost` is told of addresses where a call broke.

    A lookup may take `lookup_s`, or longer where the wanted blocks take long to compute.
    """

    def __init__(
        self,
        *,
        channel_for: ChannelFor,
        clock: Clock,
        rng: random.Random,
        fleet_key: FleetKey | None = None,
        on_lost: Callable[[str], None] = lambda address: None,
        links: LinkRates | None = None,
        lookup_s: float = 0.0,
    ) -> None:
        self._channel_for = channel_for
        self._clock = clock
        self._rng = rng
        self._fleet_key = fleet_key
        self._on_lost = on_lost
        self._lookup_s = lookup_s
        self._links = LinkRates() if links is None else links
        self._peers: OrderedDict[str, PrefixPeer] = OrderedDict()
        self.stats = FetchStats()

    async def fetch(
        self,
        wanted: MissingBlocks,
        holders: Iterable[BlockHolder],
        sink: BlockSink,
        *,
        late: Callable[[BlockHolder], None] = lambda holder: None,
    ) -> int:
        """Put the blocks that follow into the sink, in order; returns how many were taken, a tail
        counted.

        Ends with the last block that a peer has, or when waiting any longer could make the caller
        later than computing them; see `due_s`. `late` is told of a peer that may yet answer, or
        send, while they are computed: see `approach`.
        """
        began = self._clock.mono()
        taken, answered = 0, 0.0
        async with aclosing(self._hits(wanted, holders, late)) as hits:
            async for hit in hits:
                answered = answered or self._clock.mono()
                if hit.blocks <= wanted.have + taken:
                    continue
                order = range(wanted.have + taken, hit.end)
                peer = self._peer(hit.holder)
                async with aclosing(peer.fetch(hit, wanted, order)) as stream:
                    count, end = await self._run(stream, hit, wanted, taken, answered, sink)
                taken += count
                if end is _End.LATE:
                    late(hit.holder)
                is_all = wanted.have + taken >= len(wanted.ids)
                if is_all or end in (_End.LATE, _End.FULL) or wanted.have + taken > hit.blocks:
                    break
        self._count(wait_s=self._clock.mono() - began)
        return taken

    def prefers_meeting(
        self, wanted: MissingBlocks, holders: Iterable[BlockHolder]
    ) -> BlockHolder | None:
        """The peer to meet, as far as its link was measured; None = to fetch at once is sooner."""
        best: BlockHolder | None = None
        rates = self._rates()
        for holder in self._askable(holders):
            known = rates.get(holder.node_id)
            rate = known.bytes_per_s if known is not None else 0.0
            if is_worth_meeting(wanted, holder.blocks, rate):
                best = holder if best is None or holder.blocks > best.blocks else best
        return best

    async def approach(
        self, wanted: MissingBlocks, holder: BlockHolder
    ) -> tuple[Hit, Meeting] | None:
        """Lease the blocks of a peer, to be fetched from the last one; None = it is not worth
        it."""
        hit = await self._ask(holder, wanted, BESIDE_S)
        if hit is None or not hit.is_extended:
            return None
        if not is_worth_while(hit.blocks - wanted.have, block_s=wanted.block_s):
            return None
        return hit, Meeting(wanted.have, hit.blocks, block_s=wanted.block_s)

    async def fetch_back(
        self,
        hit: Hit,
        wanted: MissingBlocks,
        meeting: Meeting,
        sink: BlockSink,
        moved: Callable[[], None],
    ) -> None:
        """Put blocks from the last one towards the front, until they meet or the peer fails.

        `moved` is called after each. The prefill tells the meeting of its own blocks.
        """
        order = range(wanted.have, hit.blocks)[::-1]
        peer, has_sent = self._peer(hit.holder), False
        try:
            async with aclosing(peer.fetch(hit, wanted, order)) as stream:
                async for index, payload in stream:
                    has_sent = True
                    if not meeting.is_needed(index) or not await sink.put(index, payload):
                        return
                    if not meeting.is_needed(index):
                        return  # computed while it was put away
                    meeting.fetched(index)
                    self._took(wanted.fingerprint.block_tokens, payload)
                    moved()
                    if meeting.is_met:
                        peer.standing.sent()
                        return
        except KakeyaError as failure:
            self._failed(hit.holder, failure)
        except asyncio.CancelledError:
            if not has_sent:  # all was computed before its first block came
                peer.gave_up()
            raise

    def met(self) -> None:
        """Count a meeting that was worth it."""
        self._count(met=1)

    def forget(self, node_ids: Iterable[str]) -> None:
        """Forget the measurements of nodes that are gone."""
        for node_id in node_ids:
            self._peers.pop(node_id, None)

    # --- lookups

    async def _hits(
        self,
        wanted: MissingBlocks,
        holders: Iterable[BlockHolder],
        late: Callable[[BlockHolder], None],
    ) -> AsyncGenerator[Hit, None]:
        """Ask a few peers at once, and yield the hits that pay, the best first.

        One that has everything is yielded at once; the answers of the others are waited for only
        when it turns out to be of no use.
        """
        rates = self._rates()
        asked = to_ask(wanted, self._askable(holders), rates) if is_worth_asking(wanted) else ()
        self._count(asked=len(asked))
        limit_s = max(wanted.lookup_s, self._lookup_s)
        waiting = {
            asyncio.ensure_future(self._ask(holder, wanted, limit_s, late)) for holder in asked
        }
        hits: list[Hit] = []
        try:
            while waiting or hits:
                if waiting and not any(hit.blocks == len(wanted.ids) for hit in hits):
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    found = [hit for hit in (task.result() for task in done) if hit is not None]
                    hits = list(in_order(wanted, [*hits, *found], rates))
                elif hits:
                    self._count(hits=1)
                    yield hits.pop(0)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    def _askable(self, holders: Iterable[BlockHolder]) -> list[BlockHolder]:
        now, peers = self._clock.mono(), self._peers
        return [
            holder
            for holder in holders
            if holder.node_id not in peers or peers[holder.node_id].may_be_asked(now)
        ]

    async def _ask(
        self,
        holder: BlockHolder,
        wanted: MissingBlocks,
        limit_s: float,
        late: Callable[[BlockHolder], None] = lambda holder: None,
    ) -> Hit | None:
        try:
            return await self._peer(holder).lookup(holder, wanted, limit_s)
        except DeadlineExceeded as failure:
            late(holder)
            self._failed(holder, failure)
            return None
        except KakeyaError as failure:
            self._failed(holder, failure)
            return None

    # --- blocks

    async def _run(
        self,
        stream: Stream,
        hit: Hit,
        wanted: MissingBlocks,
        taken: int,
        answered: float,
        sink: BlockSink,
    ) -> tuple[int, _End]:
        """Take blocks while they come in time; how many came, and how that ended."""
        count = 0
        try:
            while True:
                rate = self._peer(hit.holder).rate.bytes_per_s
                due = answered + due_s(wanted, taken + count, rate)
                async with asyncio.timeout(due - self._clock.mono()):
                    index, payload = await anext(stream)
                tokens = hit.tail_tokens if index == hit.blocks else 0
                if not await sink.put(index, payload, tokens):
                    return count, _End.FULL
                count += 1
                self._took(tokens or wanted.fingerprint.block_tokens, payload)
        except StopAsyncIteration:
            return count, _End.OVER
        except TimeoutError:
            self._peer(hit.holder).gave_up()
            self._count(late=1)
            return count, _End.LATE
        except KakeyaError as failure:
            self._failed(hit.holder, failure)
            return count, _End.OVER

    def _rates(self) -> dict[str, LinkRate]:
        """The measured rates of links, by node id."""
        now = self._clock.mono()
        for peer in self._peers.values():
            peer.rate.age(now)
        return {node_id: peer.rate for node_id, peer in self._peers.items()}

    def _took(self, tokens: int, payload: Sequence[int]) -> None:
        self._count(blocks=1, tokens=tokens, bytes=len(payload))

    def _failed(self, holder: BlockHolder, failure: KakeyaError) -> None:
        self._count(failures=1)
        event(
            _log,
            "no prefix from a peer",
            level=logging.DEBUG,
            peer=holder.node_id,
            address=holder.address,
            reason=failure.message,
        )
        if isinstance(failure, PeerUnavailable):
            self._on_lost(holder.address)

    def _peer(self, holder: BlockHolder) -> PrefixPeer:
        peer = self._peers.get(holder.node_id)
        if peer is None:
            peer = self._peers[holder.node_id] = PrefixPeer(
                channel_for=self._channel_for,
                clock=self._clock,
                rng=self._rng,
                rate=self._links.link(holder.node_id),
                fleet_key=self._fleet_key,
            )
            if len(self._peers) > PEERS_KEPT:
                self._peers.popitem(last=False)
        self._peers.move_to_end(holder.node_id)
        return peer

    def _count(self, **more: float) -> None:
        was = self.stats
        self.stats = replace(was, **{name: getattr(was, name) + n for name, n in more.items()})
