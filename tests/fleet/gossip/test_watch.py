"""A program that watches a fleet: all cards, then each change, over what breaks in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import grpc.aio
import pytest

from kakeya.core.clock import SystemClock
from kakeya.core.errors import DeadlineExceeded, PeerUnavailable, UnknownMethod
from kakeya.fleet.cards.cards import Offer
from kakeya.fleet.gossip import watch_service
from kakeya.fleet.gossip.watch_service import FleetWatchService
from kakeya.fleet.gossip.watching import FleetChange
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.sessions.client import Client
from kakeya.v1.fleet_pb2_grpc import FleetServiceServicer, add_FleetServiceServicer_to_server
from tests.fakes import FakeClock
from tests.fleet.nodes import make_wire, verifier

CLOCK = SystemClock()


class Watched:
    """A node of which there is only what a watcher meets."""

    def __init__(self, node_id: str, address: str = "127.0.0.1:0") -> None:
        now, mono = CLOCK.wall(), CLOCK.mono()
        self.registry = CapabilityRegistry(node_id, Offer(), now=now, mono=mono)
        self.service = FleetWatchService(self.registry, clock=CLOCK)
        self._wanted = address

    async def start(self) -> None:
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        add_FleetServiceServicer_to_server(self.service, self._server)
        port = self._server.add_insecure_port(self._wanted)
        await self._server.start()
        self.address = f"127.0.0.1:{port}"
        self.announce(grpc_address=self.address)

    async def stop(self) -> None:
        self.service.drain()
        await self._server.stop(0)

    def announce(self, **fields: object) -> None:
        offer = replace(self.registry.offer, **fields)  # type: ignore[arg-type]
        self.registry.announce(offer, now=CLOCK.wall(), mono=CLOCK.mono())

    def hear(self, node_id: str, **fields: object) -> None:
        wire = make_wire(node_id, at=CLOCK.wall(), **fields)  # type: ignore[arg-type]
        report = self.registry.merge([wire], now=CLOCK.wall(), mono=CLOCK.mono())
        assert report.changed == (node_id,), report

    def lose(self, node_id: str) -> None:
        later = CLOCK.mono() + 1000
        assert self.registry.expire(now=CLOCK.wall() + 1000, mono=later) == (node_id,)


@asynccontextmanager
async def watched(node_id: str, address: str = "127.0.0.1:0") -> AsyncIterator[Watched]:
    node = Watched(node_id, address)
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


@asynccontextmanager
async def watching(client: Client) -> AsyncIterator[Callable[[], asyncio.Task[FleetChange]]]:
    """Yields a call that awaits the next change."""
    async with client, aclosing(client.watch()) as changes:

        async def following() -> FleetChange:
            async with asyncio.timeout(60):
                return await anext(changes)

        yield lambda: asyncio.create_task(following())


def ids(cards: tuple) -> list[str]:
    return [card.node_id for card in cards]


async def test_all_cards_come_first_and_then_each_change() -> None:
    async with watched("me") as node:
        node.hear("left", models=[verifier("m")])
        async with watching(Client(node.address)) as following:
            first = await following()
            assert ids(first.cards) == ids(first.changed) == ["me", "left"]
            assert not first.gone
            assert not first.suspects
            node.hear("right")
            second = await following()
            assert ids(second.cards) == ["me", "left", "right"]
            assert ids(second.changed) == ["right"]
            node.registry.mark_failed("left", mono=CLOCK.mono())
            assert (await following()).suspects == {"left"}
            node.registry.mark_alive("left")
            assert (await following()).suspects == set()
            node.announce(models=(verifier("own"),))
            (own,) = (await following()).changed
            assert [model.model_id for model in own.models] == ["own"]


async def test_a_watcher_is_no_node() -> None:
    async with watched("me") as node, watching(Client(node.address)) as following:
        await following()
        assert len(node.registry) == 1


async def test_nodes_that_fell_silent_are_gone_with_their_last_cards() -> None:
    async with watched("me") as node:
        node.hear("left", label="the left one")
        async with watching(Client(node.address)) as following:
            await following()
            node.lose("left")
            change = await following()
            assert ids(change.cards) == ["me"]
            assert [card.label for card in change.gone] == ["the left one"]


async def test_a_new_body_of_the_same_content_is_no_change() -> None:
    async with watched("me") as node, watching(Client(node.address)) as following:
        before = (await following()).cards[0]
        node.registry.restamp(now=CLOCK.wall(), mono=CLOCK.mono())
        waiting = following()
        await asyncio.sleep(4 * watch_service.GATHER_S)
        node.hear("left")
        change = await waiting
        assert ids(change.changed) == ["left"]
        assert change.cards[0].announced_at > before.announced_at


async def test_a_large_fleet_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_service, "MAX_PART_BYTES", 300)
    async with watched("me") as node:
        for number in range(30):
            node.hear(f"n{number:02}", label="x" * 60)
        async with watching(Client(node.address)) as following:
            assert len((await following()).cards) == 31


async def test_the_watch_goes_on_when_the_node_is_back() -> None:
    async with watched("me") as node:
        node.hear("left", address="127.0.0.1:9")
        async with watching(Client(node.address)) as following:
            await following()
            await node.stop()
            lost = await following()
            assert node.address in lost.problem
            assert ids(lost.cards) == ["me", "left"]
            async with watched("me", node.address) as again:
                again.hear("right")
                change = await following()
                assert change.problem == ""
                seen = {*ids(change.cards)}
                while seen != {"me", "right"}:
                    seen = {*ids((await following()).cards)}


async def test_another_node_of_the_fleet_goes_on_where_one_is_gone() -> None:
    async with watched("one") as one, watched("two") as two:
        one.hear("two", address=two.address)
        two.hear("one", address=one.address)
        async with watching(Client(one.address)) as following:
            await following()
            await one.stop()
            assert (await following()).problem
            change = await following()
            assert change.problem == ""
            assert ids(change.cards) == ["two", "one"]
            two.lose("one")
            assert ids((await following()).gone) == ["one"]


async def test_the_pauses_between_tries_grow_and_are_bounded() -> None:
    clock = FakeClock()
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(0)
        if len(slept) == 8:
            raise InterruptedError

    clock.sleep = sleep  # type: ignore[method-assign]
    async with watched("me") as node, watching(Client(node.address, clock=clock)) as following:
        await following()
        await node.stop()
        assert (await following()).problem
        with pytest.raises(InterruptedError):
            await following()
    assert slept == [0.5, 1, 2, 4, 8, 8, 8, 8]


async def test_an_address_without_a_node_is_told_at_once() -> None:
    async with watched("me") as node:
        address = node.address
    async with watching(Client(address)) as following:
        with pytest.raises(PeerUnavailable, match=address):
            await following()


async def test_a_node_of_an_earlier_version_is_named() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with watching(Client(f"127.0.0.1:{port}")) as following:
        with pytest.raises(UnknownMethod):
            await following()
    await server.stop(0)


async def test_a_node_that_takes_the_call_and_says_nothing_is_not_waited_for() -> None:
    class Silent(FleetServiceServicer):
        async def Watch(self, request, context):  # type: ignore[override]
            await asyncio.Event().wait()

    server = grpc.aio.server()
    add_FleetServiceServicer_to_server(Silent(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with watching(Client(f"127.0.0.1:{port}", timeout_s=0.2)) as following:
        with pytest.raises(DeadlineExceeded, match=r"no view in 0\.2 s"):
            await following()
    await server.stop(0)


async def test_a_node_that_stops_ends_its_watches_without_a_failure() -> None:
    async with watched("me") as node, watching(Client(node.address)) as following:
        await following()
        node.service.drain()
        assert (await following()).problem == (f"{node.address} ended the watch: the node stops")
