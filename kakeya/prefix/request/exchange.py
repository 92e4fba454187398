"""One request and its KV: the blocks that its engine begins from and fills, and its waits.

    approach   before a place at the engine is taken: claim missing pieces, or wait for the
               requests that compute them
    offer      for each engine process that is asked: wait as before, bring blocks from disk and
               peers, pin the blocks here, prepare pages for the rest
    imported, exported, history_logits, ended          as the engine tells
    next, saw  as its caller gets frames

An engine may still write to pages, or read from them, for a moment after its call was cut off. So
the pages of that call are used by no other request until the engine has come round to other work,
or its process is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from kakeya.core.errors import KakeyaError
from kakeya.core.log import event
from kakeya.generation.cuts import is_cut
from kakeya.generation.frames import Done, Frame, Progress, Tokens
from kakeya.generation.kv import KvHolder, KvOffer, KvPages, PageRef
from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.generation.retention import BlockClass
from kakeya.memory.pages.shared_arena import Filling
from kakeya.prefix.names.blocks import BlockId
from kakeya.prefix.names.naming import Naming, PrefixNames
from kakeya.prefix.names.pieces import Piece, path_to
from kakeya.prefix.pages.counts import PrefixCounts, Source
from kakeya.prefix.pages.pages import FingerprintBlocks, PrefixPages
from kakeya.prefix.pages.reach import carries_state, reach_of
from kakeya.prefix.peers.two_sided_fetch import Rendezvous
from kakeya.prefix.request.endings import PrefixEndings, RequestEnding
from kakeya.prefix.request.grant import EngineSeat, Fill, KvGrant
from kakeya.prefix.request.turns import Turn, Turns
from kakeya.prefix.tree.node import BlockFacts

_log = logging.getLogger(__name__)
MAX_WAITING = 256
"""Requests that may wait for blocks of other requests before they have a place; each looks at each
block."""

Bring = Callable[
    [FingerprintBlocks, Naming, Sequence[Piece], BlockClass, KvHolder],
    Awaitable[Mapping[BlockId, Source]],
]
"""Brings pieces of a history into pages from disk and peers; says where each lay."""
Joined = Callable[[list[BlockId]], None]
Meet = Callable[
    [FingerprintBlocks, Naming, Sequence[Piece], BlockClass, KvHolder, Joined],
    Awaitable[Rendezvous | None],
]
"""Has the hindmost blocks come from a peer meanwhile; tells which are in pages once they meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """The parts of a node that all its exchanges share.

    `landed` is told of each computed block that is in pages. `let_go` takes back the pages of an
    engine once it certainly uses them no more.
    """

    names: PrefixNames
    pages: PrefixPages
    turns: Turns
    counts: PrefixCounts
    endings: PrefixEndings
    bring: Bring
    meet: Meet
    landed: Callable[[FingerprintBlocks, BlockId], None]
    let_go: Callable[[KvGrant, EngineSeat], None]


class Superseded(Exception):
    """A more urgent request computes the pieces of this one, which comes back to wait; or a peer
    brought the rest of the prompt, and the request comes back with it."""


class PrefixExchange:
    """A `KvExchange`; inside its `with`, a request is known to other requests for the same
    prefix."""

    def __init__(self, tools: RequestContext, seat: EngineSeat, request: DecodeRequest) -> None:
        self._tools = tools
        self._seat = seat
        self._request = request
        self._can_yield = request.max_tokens == 0
        self._turn = Turn(
            tools.turns,
            seat.model_id,
            urgency=int(request.priority),
            can_yield=self._can_yield,
        )
        self._given: KvGrant | None = None
        self._ending = RequestEnding(tools.endings, tools.counts, request)
        self._rendezvous: Rendezvous | None = None
        self._has_more: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_answering = False
        self.may_be_superseded = True
        """Whether `next` may end otherwise than with a frame."""
        self._cached_tokens: int | None = None
        self._is_counted = False
        self._from_peers: dict[BlockId, Source] = {}
        self._block_class = request.priority.block_class

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended()
        self._turn.leave()

    @property
    def given(self) -> KvGrant | None:
        """The grant that an engine has now."""
        return self._given

    # --- for what serves the request

    async def approach(self, patience_s: float | None) -> None:
        """Claim missing pieces, or wait while another request computes them, so long at most.

        Requests beyond `MAX_WAITING` do not wait here: they go on to the queue for the engine,
        which may refuse them.
        """
        self._has_more = asyncio.get_running_loop().create_future()
        naming = self._tools.names.known(self._seat.model_id, self._request.adapter_id)
        turns, request = self._tools.turns, self._request
        if naming is not None and turns.waiting < MAX_WAITING:
            until_mono = None if patience_s is None else turns.clock.mono() + patience_s
            await self._turn.stand(naming, request.token_ids, request.cuts, until_mono)

    async def next(self, frames: AsyncGenerator[Frame, None]) -> Frame:
        """The next frame. Raises Superseded once a more urgent request took over, or a peer brought
        the rest; not where `may_be_superseded` is False."""
        coming = asyncio.ensure_future(anext(frames))
        waits: list[asyncio.Future[Any]] = [coming]
        if self._can_yield:
            waits.append(asyncio.ensure_future(self._turn.superseded.wait()))
        has_come = False
        try:
            await asyncio.wait((*waits, self._has_more), return_when=asyncio.FIRST_COMPLETED)
            has_come = coming.done()
        finally:
            if not has_come or len(waits) > 1:
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)
        if not has_come:
            raise Superseded
        return coming.result()

    def saw(self, frame: Frame) -> None:
        """Take note of a frame as its caller sees it."""
        match frame:
            case Tokens():
                if not self._is_answering or (self._given is not None and not self._given.is_over):
                    self._answers()
            case Progress():
                self._turn.heard()
                self._pass(frame.computed_tokens)
                self._cached_tokens = frame.cached_tokens
            case Done():
                self._over()
                self._count(frame.usage.cached_tokens)

    def _answers(self) -> None:
        if self._cached_tokens is not None:
            self._count(self._cached_tokens)  # its caller may leave before the end
        self._is_answering = True
        self.may_be_superseded = self._can_yield
        self._ending.answered()
        self._meet_nobody()
        self._over()

    def _joined(self, came: list[BlockId]) -> None:
        """Note that a peer brought all blocks that the engine has not computed yet."""
        self._from_peers.update(dict.fromkeys(came, Source.PEER))
        if not self._has_more.done():
            self._has_more.set_result(None)

    def _meet_nobody(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.end()
            self._rendezvous = None

    # --- for the caller of engines

    async def offer(self, token_ids: Sequence[int], pid: int) -> KvOffer:
        """Blocks of this history, pinned for the engine process, and pages for others."""
        self.ended()
        try:
            return await self._offer(token_ids, pid)
        except KakeyaError as problem:
            event(
                _log,
                "a prompt is computed without blocks",
                level=logging.WARNING,
                model=self._seat.model_id,
                reason=problem.message,
            )
            self.ended()
            return KvOffer()

    def imported(self, tokens: int) -> None:
        """The engine took so many tokens, and needs the blocks no longer."""
        if self._given is not None:
            self._given.took(tokens, self._tools.pages)
            self._turn.heard()

    def exported(self, index: int, tokens: int) -> None:
        """The engine filled the pages of a block, or of a tail with so many tokens."""
        given = self._given
        fill = given.fills.pop((index, tokens), None) if given is not None else None
        if given is None or fill is None:
            return
        piece, naming = fill.piece, given.naming
        facts = BlockFacts(
            token_ids=piece.packed,
            nbytes=fill.filling.block.pages * fill.filling.ref.page_bytes,
            recompute_s=naming.compute_s(piece.count),
            has_state=fill.has_state,
            block_class=self._block_class,
            retention=self._request.kv_retention,
        )
        ids = path_to(self._turn.pieces, piece)
        is_taken = self._tools.pages.commit(given.shelf, ids, index, fill.filling, facts)
        self._turn.heard()
        self._tools.turns.landed(piece.id)
        if is_taken:
            self._tools.landed(given.shelf, piece.id)
        if self._rendezvous is not None and not piece.is_tail:
            self._rendezvous.computed(index + 1)

    def history_logits(self, logits: bytes) -> None:
        """The engine tells the logits at the end of the prompt."""
        self._ending.told(logits)

    async def park(self, lengths: Sequence[int]) -> tuple[PageRef, ...]:
        """Pages for KV of this generation, which is set aside; see the protocol."""
        given, pages = self._given, self._tools.pages
        if given is None:
            return ()
        given.unpark(pages)
        asked = given.parks
        # Nor does parked KV evict the prefixes of all others.
        if sum(map(pages.arena.paged_bytes, lengths)) > max(
            pages.free_bytes, pages.budget_bytes // 2
        ):
            return ()
        came: list[Filling] = []
        try:
            for length in lengths:
                filling = await pages.prepare(given.naming, length, given.holder)
                if filling is None:
                    break
                came.append(filling)
            if len(came) == len(lengths) and self._given is given and given.parks == asked:
                given.parked, came = came, []
                return tuple(filling.ref for filling in given.parked)
        finally:
            for filling in came:
                pages.give_back(filling)
        return ()

    def ended(self) -> None:
        """No more comes from this engine process."""
        self._meet_nobody()
        self._ending.ended()
        given, self._given = self._given, None
        if given is not None:
            self._turn.give_up()
            self._tools.let_go(given, self._seat)

    # --- inside

    def _count(self, cached_tokens: int) -> None:
        """Count the tokens of the prompt, once."""
        if self._given is not None and not self._is_counted:
            self._is_counted = True
            self._given.count(cached_tokens, self._tools.counts)

    def _pass(self, computed_tokens: int) -> None:
        """Give up claims on pieces that were computed a block ago and not exported: they will not
        be, as where an engine goes on from KV that it decoded, and no request shall wait for
        them."""
        given = self._given
        if given is None:
            return
        size = given.naming.block_tokens
        passed = [
            fill.piece.id
            for (index, _), fill in given.fills.items()
            if (index + 2) * size <= computed_tokens
        ]
        if passed:
            self._turn.give_up(passed)

    def _over(self) -> None:
        """Give back the pages that were not filled: the prompt is computed."""
        if self._given is not None and self._given.over(self._tools.pages):
            self._turn.give_up()

    async def _offer(self, token_ids: Sequence[int], pid: int) -> KvOffer:
        tools, turn, facts = self._tools, self._turn, self._seat.facts
        naming = None
        if facts is not None:
            adapter_id = self._request.adapter_id
            naming = await tools.names.find(facts, pid, adapter_id, tokens=len(token_ids))
        if facts is None or naming is None:
            turn.leave()
            return KvOffer()
        shelf = tools.pages.shelf(naming)
        origins = dict(self._from_peers)
        while True:
            await turn.stand(naming, token_ids, self._request.cuts)
            wanted = (shelf, naming, turn.pieces, self._block_class, self._request.kv_holder)
            origins.update(await tools.bring(*wanted))
            if not turn.is_superseded:
                break
        if self._seat.pid != pid:
            return KvOffer()  # it ended meanwhile; the call to it will fail
        holder = tools.pages.arena.engine(self._seat.model_id, pid)
        given = self._given = KvGrant(pid, holder, shelf, naming, len(token_ids))
        blocks = self._blocks(given, origins)
        exports = await self._exports(given)
        if not self._is_answering and not self._from_peers and self._given is given:
            self._rendezvous = await tools.meet(*wanted, self._joined)
        logits = self._ending.offered(naming, turn.pieces, token_ids, facts.vocab_size)
        turn.asked()
        return KvOffer(
            blocks=blocks, exports=exports, logits=logits, wants_logits=self._ending.is_wanted
        )

    def _blocks(self, given: KvGrant, origins: Mapping[BlockId, Source]) -> tuple[KvPages, ...]:
        """Pin the blocks of the history that are here."""
        pages, shelf, naming = self._tools.pages, given.shelf, given.naming
        found = reach_of(shelf, self._turn.pieces, naming, in_ram=True)
        pages.touch(
            shelf,
            [node.id for node, _ in found],
            block_class=self._block_class,
            retention=self._request.kv_retention,
        )
        given.pins = pages.hold([node for node, _ in found], given.holder)
        given.kept = shelf.tree.pin([node.id for node, _ in found[: len(given.pins)]])
        blocks = []
        for (node, tokens), hold in zip(found, given.pins, strict=False):
            length = node.payload.length if node.payload else 0
            blocks.append(
                KvPages(
                    index=node.index,
                    pages=pages.arena.ref(hold.block, length),
                    has_state=node.has_state and tokens == node.tokens,
                    tokens=0 if tokens == naming.block_tokens else tokens,
                    is_cut=is_cut(node.facts.token_ids, tokens),
                )
            )
            given.offered.append((tokens, origins.get(node.id, Source.PAGES)))
        return tuple(blocks)

    async def _exports(self, given: KvGrant) -> tuple[KvPages, ...]:
        """Prepare pages for the pieces that this request claimed, as far as there are any."""
        pieces, wanted, pages = self._turn.pieces, self._turn.claimed(), self._tools.pages
        # One long prompt does not evict the prefixes of all others, and a speculative one evicts
        # nothing.
        is_speculative = self._request.priority is GenerationPriority.SPECULATIVE
        room = max(pages.free_bytes, 0 if is_speculative else pages.budget_bytes // 2)
        for piece in wanted:
            has_state = carries_state(given.naming, pieces, piece)
            length = given.naming.size(piece.count, has_state=has_state)
            room -= pages.arena.paged_bytes(length)
            if room < 0 and (is_speculative or given.fills):
                break
            filling = await pages.prepare(given.naming, length, given.holder, self._block_class)
            if filling is None:
                break
            given.fills[_place(piece)] = Fill(piece, filling, has_state)
        self._turn.give_up(piece.id for piece in wanted if _place(piece) not in given.fills)
        return tuple(
            KvPages(index=index, pages=fill.filling.ref, has_state=fill.has_state, tokens=tokens)
            for (index, tokens), fill in given.fills.items()
        )


def _place(piece: Piece) -> tuple[int, int]:
    """The name of a piece for an engine: its index, and its tokens where it is no whole block."""
    return piece.index, piece.count if piece.is_tail else 0
