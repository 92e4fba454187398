"""The facts of the whole fleet for pages: this node's, its view of the others, and theirs.

    page ── follow ──> FleetWatch ── one call each ──> live peers
                           └── each second ──> this node's facts

All pages share one watch; a page that reads slowly gets the newest value of each section.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial

from kakeya.core.clock import Clock
from kakeya.core.errors import KakeyaError, UnknownMethod
from kakeya.core.figures import Json
from kakeya.core.log import event
from kakeya.dispatch.peers.neighbours import LivePeer
from kakeya.dispatch.watch.facts import OwnSections
from kakeya.dispatch.watch.sections import CARD, FLEET, changed

_log = logging.getLogger(__name__)
GATHER_S = 0.1
"""What changes within it is told together."""
AGAIN_S, UNABLE_S = 5.0, 60.0
"""Until a peer is called again that broke off, or is of a build that tells nothing."""
MOST_WATCHED = 32
"""Peers that are called, of those that are not in doubt. Of others their cards are told."""
MOST_SECTIONS = 64
"""Of one peer; of more it is not told."""
FleetNews = dict[str, Json]
"""Changed sections by node id; a section that is gone is None."""


class _Follower:
    def __init__(self, news: FleetNews) -> None:
        self.news = news
        self.wake = asyncio.Event()
        if news:
            self.wake.set()

    def add(self, node_id: str, sections: Json) -> None:
        self.news.setdefault(node_id, {}).update(sections)
        self.wake.set()

    def take(self) -> FleetNews:
        self.wake.clear()
        taken, self.news = self.news, {}
        return taken


class FleetWatch:
    """See the module; lives on the event loop."""

    def __init__(
        self,
        facts: OwnSections,
        clock: Clock,
        *,
        own_id: str,
        live: Callable[[], Sequence[LivePeer]],
        watch: Callable[[LivePeer], AsyncIterator[tuple[str, object]]],
    ) -> None:
        """`live` are the peers that can be called, `watch` their sections as they change."""
        self.facts = facts
        self._clock = clock
        self._own_id = own_id
        self._live = live
        self._watch = watch
        self._told: FleetNews = {}
        self._followers: set[_Follower] = set()
        self._task: asyncio.Task[None] | None = None
        self._calls: dict[str, asyncio.Task[None]] = {}

    async def follow(self) -> AsyncGenerator[FleetNews, None]:
        """Yield all sections, and then those that changed, until the node drains."""
        one = _Follower({node_id: dict(told) for node_id, told in self._told.items()})
        self._followers.add(one)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="watch of the fleet")
        task = self._task
        try:
            while not task.done():
                waiting = asyncio.ensure_future(one.wake.wait())
                try:
                    await asyncio.wait((waiting, task), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waiting.cancel()
                await self._clock.sleep(GATHER_S)
                if news := one.take():
                    yield news
            task.result()
        finally:
            self._followers.discard(one)
            if not self._followers and self._task is task:
                # The next watch may begin before this one has ended, which may be cut short when
                # this is cancelled once more: so the two share nothing.
                self._task, self._told, self._calls = None, {}, {}
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        calls = self._calls
        try:
            async with aclosing(self.facts.changes(self.facts.now)) as changes:
                async for news in changes:
                    self._take_own(news)
                    self._call_peers()
        finally:
            ending = tuple(calls.values())
            for call in ending:
                call.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    def _take_own(self, news: Json) -> None:
        fleet = news.pop(FLEET, None)
        if isinstance(fleet, dict):
            cards = {str(card["node_id"]): card for card in fleet["nodes"]}
            news[FLEET] = {key: one for key, one in fleet.items() if key != "nodes"}
            for node_id in {*self._told, *cards}:
                self._take(node_id, {CARD: cards.get(node_id)})
        self._take(self._own_id, news)

    def _take(self, node_id: str, sections: Json) -> None:
        known = self._told.setdefault(node_id, {})
        news = changed({name: known.get(name) for name in sections}, sections)
        if not news:
            return
        known.update(news)
        for follower in self._followers:
            follower.add(node_id, news)

    def _call_peers(self) -> None:
        live = {peer.node_id: peer for peer in self._live()[:MOST_WATCHED]}
        for node_id in self._calls.keys() - live.keys():
            self._calls[node_id].cancel()
        for peer in live.values():
            if peer.node_id not in self._calls and not peer.is_suspect:
                call = asyncio.create_task(self._call(peer), name=f"watch of {peer.node_id}")
                self._calls[peer.node_id] = call
                call.add_done_callback(partial(self._ended, peer.node_id))

    def _ended(self, node_id: str, call: asyncio.Task[None]) -> None:
        if self._calls.get(node_id) is call:
            del self._calls[node_id]

    async def _call(self, peer: LivePeer) -> None:
        pause_s = AGAIN_S
        try:
            async for name, value in self._watch(peer):
                known = self._told.get(peer.node_id, {})
                if name != CARD and (name in known or len(known) < MOST_SECTIONS):
                    self._take(peer.node_id, {name: value})
        except UnknownMethod:
            pause_s = UNABLE_S
        except KakeyaError as failure:
            event(_log, "a peer is not watched", level=logging.DEBUG, error=failure.message)
        finally:
            if self._calls.get(peer.node_id) is asyncio.current_task():
                known = self._told.get(peer.node_id, {})
                self._take(peer.node_id, dict.fromkeys(known.keys() - {CARD}))
        await self._clock.sleep(pause_s)
