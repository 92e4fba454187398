from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from kakeya.core.errors import PeerUnavailable, UnknownMethod
from kakeya.dispatch.peers.neighbours import LivePeer
from kakeya.dispatch.watch.facts import OwnSections
from kakeya.dispatch.watch.fleet import MOST_SECTIONS, UNABLE_S, FleetNews, FleetWatch
from tests.fakes import FakeClock


class World:
    """This node's facts, and peers that tell what is put into their queues."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.facts = OwnSections(self.clock)
        self.facts.status = self.status
        self.told: dict[str, Any] = {"node": {"label": "own"}}
        self.cards = ["own", "peer"]
        self.reads = 0
        self.peers: dict[str, asyncio.Queue[Any]] = {"peer": asyncio.Queue()}
        self.calls: list[str] = []
        self.watch = FleetWatch(
            self.facts, self.clock, own_id="own", live=self.live, watch=self.tell
        )

    def status(self) -> dict[str, Any]:
        self.reads += 1
        cards = [{"node_id": one, "is_self": one == "own"} for one in self.cards]
        return {**self.told, "fleet": {"nodes": cards, "warnings": []}}

    def live(self) -> list[LivePeer]:
        return [
            LivePeer(node_id=one, label=one, life=1, address=f"{one}:1", is_suspect=False)
            for one in self.cards
            if one in self.peers
        ]

    async def tell(self, peer: LivePeer) -> AsyncIterator[tuple[str, object]]:
        self.calls.append(peer.node_id)
        while True:
            told = await self.peers[peer.node_id].get()
            if isinstance(told, Exception):
                raise told
            yield told


async def seen_until(news: Any, state: FleetNews, holds: Any) -> None:
    """Take news into what a page knows, until that holds."""
    while not holds(state):
        for node_id, told in (await anext(news)).items():
            known = state.setdefault(node_id, {})
            known.update(told)
            for name in [name for name, one in told.items() if one is None]:
                del known[name]


async def test_a_page_gets_all_and_then_what_changes() -> None:
    world, state = World(), {}
    async with aclosing(world.watch.follow()) as news:
        await seen_until(news, state, lambda now: "own" in now)
        assert state["own"]["node"] == {"label": "own"}
        assert state["own"]["fleet"] == {"warnings": []}
        assert state["peer"]["card"]["node_id"] == "peer"
        world.peers["peer"].put_nowait(("memory", {"level": "critical"}))
        await seen_until(news, state, lambda now: "memory" in now["peer"])
        world.told["node"] = {"label": "other"}
        got = await anext(news)
        assert got == {"own": {"node": {"label": "other"}}}
        world.cards.remove("peer")
        await seen_until(news, state, lambda now: now["peer"] == {})


async def test_a_page_that_comes_while_the_last_one_leaves_gets_all() -> None:
    for steps in range(5):
        world = World()
        first = world.watch.follow()
        await seen_until(first, {}, lambda now: "own" in now)
        leaving = asyncio.create_task(first.aclose())
        for _ in range(steps):
            await asyncio.sleep(0)
        for _ in range(2):
            async with (
                aclosing(world.watch.follow()) as news,
                aclosing(world.watch.follow()) as more,
            ):
                for one in (news, more):
                    await seen_until(one, {}, lambda now: "node" in now.get("own", {}))
        await leaving


async def test_a_page_that_leaves_is_cancelled_again_and_again_and_the_next_one_gets_all() -> None:
    """As an HTTP server does that ends a stream whose client is gone."""
    for steps in range(12):
        world = World()

        async def show(world: World = world) -> None:
            async with aclosing(world.watch.follow()) as news:
                await seen_until(news, {}, lambda now: "gone" in now)

        page = asyncio.create_task(show())
        while not world.calls:
            await asyncio.sleep(0)
        for _ in range(steps):
            page.cancel()
            await asyncio.sleep(0)
        page.cancel()
        state: FleetNews = {}
        async with aclosing(world.watch.follow()) as news:
            await seen_until(news, state, lambda now: "own" in now)
        assert state["own"].keys() == {"card", "node", "fleet"}
        await asyncio.gather(page, return_exceptions=True)


async def test_a_peer_tells_no_card_and_not_without_end() -> None:
    world, state = World(), {}
    async with aclosing(world.watch.follow()) as news:
        await seen_until(news, state, lambda now: "peer" in now)
        told = [("card", {"node_id": "other"}), *((f"s{at}", 1) for at in range(2 * MOST_SECTIONS))]
        for one in (*told, ("s0", "last")):
            world.peers["peer"].put_nowait(one)
        await seen_until(news, state, lambda now: now["peer"].get("s0") == "last")
        assert state["peer"]["card"]["node_id"] == "peer"
        assert len(state["peer"]) == MOST_SECTIONS


async def test_nothing_is_read_while_no_page_is_open() -> None:
    world = World()
    async with aclosing(world.watch.follow()) as first, aclosing(world.watch.follow()) as second:
        await anext(first)
        await anext(second)
        assert world.calls == ["peer"], "two pages share one watch"
    reads = world.reads
    await world.clock.sleep(60)
    assert world.reads == reads
    async with aclosing(world.watch.follow()) as again:
        assert (await anext(again))["own"]["node"] == {"label": "own"}


async def test_an_unchanged_fleet_is_told_once() -> None:
    world = World()
    async with aclosing(world.watch.follow()) as news:
        await anext(news)
        coming = asyncio.ensure_future(anext(news))
        await world.clock.sleep(30)
        assert not coming.done()
        world.told["node"] = {"label": "new"}
        assert await coming == {"own": {"node": {"label": "new"}}}


async def test_a_peer_that_breaks_off_is_called_again_and_one_that_cannot_tell_seldom() -> None:
    world, state = World(), {}
    peer = world.peers["peer"]
    async with aclosing(world.watch.follow()) as news:
        peer.put_nowait(("node", {"label": "peer"}))
        await seen_until(news, state, lambda now: "node" in now.get("peer", {}))
        peer.put_nowait(PeerUnavailable("lost"))
        await seen_until(news, state, lambda now: "node" not in now["peer"])
        assert state["peer"].keys() == {"card"}
        peer.put_nowait(("node", {"label": "back"}))
        await seen_until(news, state, lambda now: "node" in now["peer"])
        peer.put_nowait(UnknownMethod("an older build"))
        coming = asyncio.ensure_future(seen_until(news, state, lambda now: "old" in now["peer"]))
        await world.clock.sleep(UNABLE_S / 2)
        calls = len(world.calls)
        peer.put_nowait(("old", 1))
        await coming
        assert len(world.calls) == calls + 1


async def test_a_drain_ends_the_streams() -> None:
    world = World()
    async with aclosing(world.watch.follow()) as news:
        await anext(news)
        world.facts.drain()
        assert [one async for one in news] == []
