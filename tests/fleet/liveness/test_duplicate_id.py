"""Who really answers under this node's id, and who only plays its old cards back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from kakeya.core.clock import SystemClock
from kakeya.fleet.cards.cards import Card, Offer
from kakeya.fleet.gossip.service import CapabilityService, register
from kakeya.fleet.gossip.sync import Sync
from kakeya.fleet.identity.authority import authority_of, new_fleet
from kakeya.fleet.identity.trust import FleetTrust
from kakeya.fleet.liveness.duplicate_id import DuplicateIdWatch, answers_as
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.wire.server.health import NodeHealth
from kakeya.wire.tls import server_credentials
from tests.fakes import FakeClock

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
    """A node that begins to look for others with its id; rounds of 10 s, so 30 s and a little."""

    def __init__(self, why_not_dial: str = "") -> None:
        self.clock = FakeClock(wall=CLOCK.wall())
        self.registry = registry_of(None)
        self.health = NodeHealth()
        self.namesake = DuplicateIdWatch(
            self.registry,
            None,
            self.health,
            clock=self.clock,
            started_mono=self.clock.mono(),
            interval_s=10.0,
            why_not_dial=lambda _: why_not_dial,
        )

    async def met(self, address: str) -> str:
        """A round told of its id at this address. Why it serves nothing then, "" if it serves."""
        own = self.registry.own.node_id
        self.registry.peers.conflicts.note(own, address, is_own=True, now=self.clock.wall())
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
    node.clock.advance(2)
    node.namesake.look()
    assert node.health.reason() == ""


async def test_who_was_first_serves_on() -> None:
    first, forbidden, alone = Newcomer(), Newcomer("its network is not ours"), Newcomer()
    first.clock.advance(36)
    async with answering(registry_of(None).own, None) as address:
        assert await first.met(address) == ""
        assert await forbidden.met(address) == ""
    assert await alone.met("127.0.0.1:1") == ""


async def test_a_node_that_stops_asks_nobody_any_more() -> None:
    node = Newcomer()
    node.namesake.cancel()
    async with answering(registry_of(None).own, None) as address:
        own = node.registry.own.node_id
        node.registry.peers.conflicts.note(own, address, is_own=True, now=node.clock.wall())
        before = asyncio.all_tasks()
        node.namesake.look()
        (asking,) = asyncio.all_tasks() - before
        node.namesake.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
    assert node.health.reason() == ""


def _never(address: str) -> bool:
    """Loopback stands for another machine here."""
    return False
