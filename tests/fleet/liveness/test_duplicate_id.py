"""Who really answers under this node's id, and who only plays its old cards back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from kakeya.core.clock import SystemClock
from kakeya.core.errors import Conflict
from kakeya.fleet.cards.cards import Card, Offer
from kakeya.fleet.gossip.service import CapabilityService, register
from kakeya.fleet.gossip.sync import Sync
from kakeya.fleet.identity.authority import authority_of, new_fleet
from kakeya.fleet.identity.trust import FleetTrust
from kakeya.fleet.liveness import duplicate_id
from kakeya.fleet.liveness.duplicate_id import DuplicateIdWatch, answers_as, refuse_taken_id
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.wire.server.health import NodeHealth
from kakeya.wire.tls import server_credentials
from tests.fakes import FakeClock
from tests.fleet.nodes import running_node
from tests.waiting import LIMIT_S

CLOCK = SystemClock()
FOUNDER = new_fleet("mini-1", CLOCK.wall())


def trusting(*, is_founder: bool = True) -> FleetTrust:
    authority = authority_of(FOUNDER)
    assert authority is not None
    other = authority.new_identity("mini-2", now=CLOCK.wall())
    return FleetTrust(FOUNDER if is_founder else other)


def registry_of(trust: FleetTrust | None, node_id: str = "plain") -> CapabilityRegistry:
    return CapabilityRegistry(
        trust.identity.node_id if trust else node_id,
        Offer(grpc_address="10.0.0.1:1"),
        now=CLOCK.wall(),
        mono=CLOCK.mono(),
        trust=trust,
    )


@asynccontextmanager
async def answering(card: Card, trust: FleetTrust | None) -> AsyncIterator[str]:
    """A server that answers GetNodeCapability with one card, under one identity."""
    registry = registry_of(trust, card.node_id)
    server = grpc.aio.server()
    service = CapabilityService(registry, Sync(registry, rng=random.Random(1)), clock=CLOCK)

    async def describe(request: bytes, context: object) -> bytes:
        return b"\n" + _varint(len(card.wire)) + card.wire

    service.describe = describe  # type: ignore[method-assign,assignment] # plays a card back
    register(server, service)
    if trust is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", server_credentials(trust.material))
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


def _varint(number: int) -> bytes:
    return bytes([number & 0x7F | 0x80, number >> 7]) if number > 0x7F else bytes([number])


async def test_a_copied_data_directory_is_found_out() -> None:
    own, copy = registry_of(trusting()).own, registry_of(trusting()).own
    async with answering(copy, trusting()) as address:
        assert await answers_as(own, address, trusting(), is_plain=_never)


async def test_a_member_that_plays_an_earlier_card_back_takes_no_id() -> None:
    own, earlier = registry_of(trusting()).own, registry_of(trusting()).own
    async with answering(earlier, trusting(is_founder=False)) as address:
        assert not await answers_as(own, address, trusting(), is_plain=_never)


async def test_this_very_node_is_no_stranger_and_nobody_is_nobody() -> None:
    own = registry_of(trusting()).own
    async with answering(own, trusting()) as address:
        assert not await answers_as(own, address, trusting(), is_plain=_never)
    assert not await answers_as(own, "127.0.0.1:1", trusting(), is_plain=_never)


async def test_without_identities_the_word_of_the_other_counts() -> None:
    own, other = registry_of(None).own, registry_of(None).own
    async with answering(other, None) as address:
        assert await answers_as(own, address, None)


class Newcomer:
    """A node that begins to look for others with its id."""

    def __init__(self, why_not_dial: str = "") -> None:
        self.clock = FakeClock(wall=CLOCK.wall())
        self.registry = registry_of(None)
        self.health = NodeHealth()
        self.namesake = DuplicateIdWatch(
            self.registry,
            None,
            self.health,
            clock=self.clock,
            why_not_dial=lambda _: why_not_dial,
            poke=lambda: None,
        )

    async def met(self, address: str, *, is_first: bool = True) -> str:
        """A round told of its id at this address. Why it serves nothing then, "" if it serves."""
        own, now = self.registry.own.node_id, self.clock.wall()
        self.registry.peers.conflicts.note(own, address, is_own=True, is_first=is_first, now=now)
        before = asyncio.all_tasks()
        self.namesake.look()
        await asyncio.gather(*(asyncio.all_tasks() - before))
        return self.health.reason()


async def test_who_came_second_serves_nothing_until_the_other_was_not_seen_for_long() -> None:
    node = Newcomer()
    async with answering(registry_of(None).own, None) as address:
        said = await node.met(address)
        assert f"the node at {address} had the id plain before this one" in said
    node.clock.advance(599)
    node.namesake.look()
    assert node.health.reason() == said
    assert node.registry.own.is_leaving
    node.clock.advance(2)
    node.namesake.look()
    assert node.health.reason() == ""
    assert not node.registry.own.is_leaving


async def test_who_was_first_serves_on() -> None:
    first, forbidden, alone = Newcomer(), Newcomer("its network is not ours"), Newcomer()
    async with answering(registry_of(None).own, None) as address:
        assert await first.met(address, is_first=False) == ""
        assert await forbidden.met(address) == ""
    assert await alone.met("127.0.0.1:1") == ""


async def test_a_node_that_stops_asks_nobody_any_more() -> None:
    node = Newcomer()
    node.namesake.cancel()
    async with answering(registry_of(None).own, None) as address:
        own = node.registry.own.node_id
        now = node.clock.wall()
        node.registry.peers.conflicts.note(own, address, is_own=True, is_first=True, now=now)
        before = asyncio.all_tasks()
        node.namesake.look()
        (asking,) = asyncio.all_tasks() - before
        node.namesake.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
    assert node.health.reason() == ""


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is late on a busy machine."""
    monkeypatch.setattr(duplicate_id, "_ASK_S", LIMIT_S)
    monkeypatch.setattr(duplicate_id, "_LIMIT_S", LIMIT_S)


async def test_a_start_is_refused_while_another_process_serves_under_the_id() -> None:
    async with running_node("me") as first, running_node("peer") as peer:
        await first.exchange(peer.address)
        copy, gone = registry_of(None, "me"), registry_of(None, "other")

        async def start(registry: CapabilityRegistry, why_not_dial: str = "") -> None:
            await refuse_taken_id(
                registry,
                ["127.0.0.1:1", peer.address],
                channels=peer.channels,
                trust=None,
                clock=CLOCK,
                why_not_dial=lambda _: why_not_dial,
            )

        with pytest.raises(Conflict, match=first.address):
            await start(copy)
        await start(copy, "its network is not ours")
        await start(gone)
        await start(first.registry)
        first.registry.give_way(now=CLOCK.wall(), mono=CLOCK.mono())
        await start(copy)


async def test_a_start_after_a_kill_is_not_refused() -> None:
    async with running_node("peer") as peer:
        async with running_node("me") as killed:
            await killed.exchange(peer.address)
        await refuse_taken_id(
            registry_of(None, "me"),
            [peer.address],
            channels=peer.channels,
            trust=None,
            clock=CLOCK,
            why_not_dial=lambda _: "",
        )


def _never(address: str) -> bool:
    """Loopback stands for another machine here."""
    return False
