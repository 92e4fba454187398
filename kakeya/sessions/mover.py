"""Sessions that move between nodes: a session is at one node of the fleet.

    leave   the node gives each session to a peer with the same weights, as soon as no operation
            runs on it, and has its KV made warm there
    bring   a session that is not here is taken over from the node that has it: its client asks this
            node now. A node that leaves does the same, and gives it away again behind the operation

A history is some kilobytes. Where a turn is computed, and from which KV, is decided anew for each
turn, as for any request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from weakref import WeakValueDictionary

from kakeya.core.clock import Clock
from kakeya.core.errors import (
    Conflict,
    DeadlineExceeded,
    KakeyaError,
    NotFound,
    PeerError,
    PeerUnavailable,
    Refused,
)
from kakeya.core.ids import SessionId
from kakeya.core.log import event
from kakeya.core.units import pack_ids
from kakeya.dispatch.peers.quote import OwnModels, QuotedModel, origin_of
from kakeya.generation.model import ModelDirectory
from kakeya.generation.retention import Retention
from kakeya.prefix.names.keys import CacheKeys
from kakeya.prefix.seam import CacheUse, Precache, PrefixClaim, Warmed
from kakeya.sessions.peers import SessionPeer, SessionPeers
from kakeya.sessions.session import MovedSession, Session
from kakeya.sessions.store import MOVING, SessionStore, is_session_id

_log = logging.getLogger(__name__)
HEARD_S = 5.0
"""How long a client that asks for an unknown session waits until this node knows its peers."""
READY_S = 30.0
SETTLE_S = 2.0
"""How long a node that stops waits for sessions with operations that it cut off."""
HANDED_S = 30.0
"""How long a session that was handed out is given again to the node that took it."""
_TRIES = 4
_AGAIN_S = 0.25


@dataclass(frozen=True, slots=True)
class _Handed:
    session: MovedSession
    taker: str
    until_mono: float


class SessionMover:
    """See the module; lives on the event loop. `heard` returns once this node knows its peers."""

    def __init__(
        self,
        store: SessionStore,
        own: OwnModels,
        models: ModelDirectory,
        peers: SessionPeers,
        precache: Precache,
        *,
        node_id: str,
        heard: Callable[[], Awaitable[object]],
        clock: Clock,
    ) -> None:
        self._store = store
        self._own = own
        self._models = models
        self._peers = peers
        self._precache = precache
        self._node_id = node_id
        self._heard = heard
        self._clock = clock
        self._is_leaving = False
        self._first: set[SessionId] = set()
        """Those of the moment when the node began to leave, until they have moved once."""
        self._warming = 0
        self._is_closed = False
        self._places: dict[str, SessionPeer] = {}
        """The peers that sessions were given to, by the ids of these."""
        self._handed: dict[str, _Handed] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        store.on_idle = self._idle

    # A node that leaves

    def leave(self) -> None:
        """Give every session away, from now on until the process ends."""
        if self._is_leaving:
            return
        self._is_leaving = True
        for session in self._store.sessions():
            self._first.add(session.session_id)
            if not session.is_busy:
                self._idle(session)

    def close(self) -> None:
        """Pass nothing on any more: a client that asks for a session is told its node."""
        self._is_closed = True

    @property
    def passes_on(self) -> bool:
        """Whether this node leaves, and passes on what it is asked."""
        return self._is_leaving and not self._is_closed

    @property
    def leaving(self) -> int:
        """How many of the sessions that were here as the node began to leave have to move, or to be
        warm at their node."""
        left = sum(session.session_id in self._first for session in self._store.sessions())
        return left + self._warming

    async def settled(self) -> None:
        """Wait until what moves has moved, for a moment at most."""
        for session in self._store.sessions():  # also one that came here for no operation
            if not session.is_busy:
                self._idle(session)
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=SETTLE_S)

    async def aclose(self) -> None:
        """End what is under way."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _idle(self, session: Session) -> None:
        if not self._is_leaving or session.operation == MOVING:
            return
        task = asyncio.create_task(self._give(session), name=f"move {session.session_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _give(self, session: Session) -> None:
        session_id = session.session_id
        try:
            peer = await self._given_to(session)
            if session_id in self._first:
                self._first.discard(session_id)
                warmed = await self._warmed(peer, session_id)
                event(
                    _log,
                    "session moved",
                    session=session_id,
                    node=peer.name,
                    tokens=session.history_length,
                    kv_carried=warmed.cached,
                    kv_computed=warmed.computed,
                )
        except Conflict:  # it moves behind the operation that began
            return
        except KakeyaError as failure:
            self._first.discard(session_id)
            event(
                _log,
                "a session, or its KV, did not move",
                level=logging.WARNING,
                session=session_id,
                error=failure.message,
            )

    async def _warmed(self, peer: SessionPeer, session_id: str) -> Warmed:
        self._warming += 1
        try:
            return await peer.warm(session_id)
        finally:
            self._warming -= 1

    async def _given_to(self, session: Session) -> SessionPeer:
        """The peer that has a session now. Raises the last refusal, Conflict while an operation
        runs on it."""
        last: KakeyaError = NotFound(f"no other node offers {session.model.model_id}")
        with self._store.operation(session.session_id, MOVING):
            moved = self._moved(session)
            for peer in self._peers.offering(session.model.model_id):
                try:
                    await peer.give(moved)
                except Conflict as failure:
                    last = Refused(failure.message)
                except KakeyaError as failure:
                    last = failure
                else:
                    self._store.forget(session)
                    self._places[session.session_id] = peer
                    return peer
        raise last

    def _moved(self, session: Session) -> MovedSession:
        own: QuotedModel | None = None
        with contextlib.suppress(KakeyaError):
            own = self._own.get(session.model.model_id, session.client)
        return MovedSession(
            session_id=session.session_id,
            model_id=session.model.model_id,
            client=session.client,
            label=session.label,
            stop_token_ids=session.stop_token_ids,
            history=session.history,
            idle_s=max(0.0, self._clock.mono() - session.used_mono),  # its move is no use of it
            weights=_weights(own),
        )

    # A node that a session comes to

    def accept(self, moved: MovedSession) -> None:
        """Take a session over from a node that leaves. Raises Refused where this one leaves too or
        has other weights, NotFound where it lacks the model, CapacityExhausted without room."""
        if self._is_leaving:
            raise Refused("this node takes no sessions: it leaves")
        own = self._own.get(moved.model_id, moved.client)
        if own.facts is None:
            raise Refused(f"{moved.model_id} was not loaded here yet")
        if moved.weights and moved.weights != _weights(own):
            raise Refused(f"the weights of {moved.model_id} here are not those of the session")
        model = self._models.get(moved.model_id, moved.client)
        self._store.adopt(moved, model, own.facts)

    async def warm(self, session_id: str) -> Warmed:
        """Have the KV of a session warm. Raises NotFound."""
        session = self._store.get(session_id)
        history = session.history

        async def tokens() -> Sequence[int]:
            return history

        if not history:
            return Warmed()
        content = sha256(pack_ids(history)).hexdigest()
        use = CacheUse(keys=CacheKeys(prefix_hash=f"ids-{content[:32]}"), retention=Retention.LONG)
        claim = PrefixClaim(
            model_id=session.model.model_id, facts=session.facts, client=session.client, use=use
        )
        return (await self._precache.warm(claim, tokens)).warmed

    def hand_out(self, session_id: str, *, taker: str = "", remove: bool = False) -> MovedSession:
        """The session that another node asks for. With `remove` it is there from now on, and that
        node may ask once more, since an answer can be lost. Raises NotFound, Conflict while an
        operation runs on it, InvariantBroken for one that failed."""
        now = self._clock.mono()
        self._handed = {k: one for k, one in self._handed.items() if now < one.until_mono}
        if self._store.find(session_id) is None and remove and taker:
            handed = self._handed.get(session_id)
            if handed is not None and handed.taker == taker:
                return handed.session
        with self._store.operation(session_id, MOVING) as session:
            moved = self._moved(session)
            if remove:
                self._store.forget(session)
                self._handed[session_id] = _Handed(moved, taker, now + HANDED_S)
        return moved

    async def bring(self, session_id: str) -> None:
        """Have a session here, if any node has it. Raises the errors of its model, Conflict while
        an operation runs on it elsewhere, DeadlineExceeded where a node that may have it is late
        twice, PeerUnavailable where this node begins nothing."""
        while (session := self._store.find(session_id)) is not None:
            if session.operation != MOVING:
                return
            await session.idle.wait()
        if not is_session_id(session_id):
            return
        if self._is_closed:
            raise self._moved_to(session_id)
        # It goes on without its client: on its way between two nodes the session is at neither.
        bringing = asyncio.create_task(self._brought(session_id), name=f"bring {session_id}")
        self._tasks.add(bringing)
        bringing.add_done_callback(self._tasks.discard)
        await asyncio.shield(bringing)

    async def _brought(self, session_id: str) -> None:
        async with self._locks.setdefault(session_id, asyncio.Lock()):
            if self._store.find(session_id) is None:
                await self._bring(session_id)

    def _moved_to(self, session_id: str) -> PeerUnavailable:
        peer = self._places.get(session_id)
        where = f"is at {peer.name} ({peer.address})" if peer is not None else "is not here"
        moved = PeerUnavailable(
            f"session {session_id} {where}, and this node stops: ask there, at any other node, or "
            "here again once it is replaced",
            retry_after_s=1.0,
        )
        moved.moved_to = "" if peer is None else peer.address
        return moved

    async def _bring(self, session_id: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARD_S):
                await self._heard()
        for left in reversed(range(_TRIES)):
            answers = await asyncio.gather(
                *(self._look(peer, session_id) for peer in self._peers.all())
            )
            found = [one for one in answers if isinstance(one, tuple)]
            if found:
                # Where the answer to a gift was lost, two nodes have it, and one of them went on.
                peer, moved = min(found, key=lambda one: one[1].idle_s)
                if await self._is_taken(peer, moved):
                    return
            busy = next((one for one in answers if isinstance(one, Conflict)), None)
            late = next((one for one in answers if isinstance(one, DeadlineExceeded)), None)
            if busy is None and not found:
                if late is None:
                    return
                if left < _TRIES - 1:  # it may be there, and a second time none can tell
                    raise late
            if not left:
                raise busy or Conflict(f"session {session_id} is on its way to another node")
            await self._clock.sleep(_AGAIN_S)

    async def _look(
        self, peer: SessionPeer, session_id: str
    ) -> tuple[SessionPeer, MovedSession] | KakeyaError:
        try:
            return peer, await peer.take(session_id)
        except KakeyaError as failure:
            return failure

    async def _is_taken(self, peer: SessionPeer, moved: MovedSession) -> bool:
        """Take a session from a peer, once it is sure that it can be here; False = the peer has it
        no more, another node was faster."""
        model = self._models.get(moved.model_id, moved.client)
        facts = await model.ready(READY_S)
        self._store.check_room()
        # What it has now: an operation may have run on it meanwhile.
        try:
            moved = await self._removed(peer, moved.session_id)
        except NotFound:
            return False
        self._store.adopt(moved, model, facts)
        event(
            _log,
            "session taken over",
            session=moved.session_id,
            node=peer.name,
            tokens=len(moved.history),
        )
        return True

    async def _removed(self, peer: SessionPeer, session_id: str) -> MovedSession:
        for left in reversed(range(_TRIES)):
            try:
                return await peer.take(session_id, taker=self._node_id, remove=True)
            except (PeerError, DeadlineExceeded):  # it may have been handed out
                if not left:
                    raise
                await self._clock.sleep(_AGAIN_S)
        raise AssertionError("the last try returned or raised")


def _weights(own: QuotedModel | None) -> str:
    return "" if own is None else origin_of(own.facts, own.adapter_digest).weights
