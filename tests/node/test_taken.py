"""Who really answers under this node's id, and who only plays its old cards back."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from kakeya.core.clock import SystemClock
from kakeya.fleet.authority import authority_of, new_fleet
from kakeya.fleet.card_trust import FleetTrust
from kakeya.fleet.cards import Card, Offer
from kakeya.fleet.registry import CapabilityRegistry
from kakeya.fleet.service import CapabilityService, register
from kakeya.fleet.sync import Sync
from kakeya.node.taken import answers_as
from kakeya.wire.tls import server_credentials

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


def _never(address: str) -> bool:
    """Loopback stands for another machine here."""
    return False
