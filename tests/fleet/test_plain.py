"""Nodes without our extensions: recorded bytes of theirs, and a real one among ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from kakeya.fleet.cards.convert import join_cards, split_cards
from kakeya.fleet.gossip.round import EXCHANGE_METHOD, SYNC_METHOD
from kakeya.fleet.placement.placement import plan_spec_decode_placement
from kakeya.v1 import distributed_pb2 as pb
from tests.fakes import FakeClock
from tests.fleet.nodes import NOW, at, make_registry, proposer, running_node, verifier
from tests.fleet.plain_node import running_plain_node

RECORDED = Path(__file__).parent / "recorded"
CARDS = ("exchange_request.bin", "exchange_response.bin", "node_response.bin", "later_card.bin")


@pytest.mark.parametrize("name", CARDS)
def test_recorded_cards_are_taken_and_passed_on_to_the_byte(name: str) -> None:
    message = (RECORDED / name).read_bytes()
    wires = split_cards(message)
    assert join_cards(wires) == message
    registry = make_registry()
    report = registry.merge(wires, **at(NOW))
    assert report.dropped == {}
    assert len(report.changed) == len(wires)
    assert sorted(card.wire for card in registry.snapshot(mono=0.0)[1:]) == sorted(wires)
    assert all(card.is_plain and not card.is_extended for card in registry.snapshot(mono=0.0)[1:])


def test_a_recorded_card_is_read_as_it_was_meant() -> None:
    registry = make_registry()
    registry.merge(split_cards((RECORDED / "exchange_request.bin").read_bytes()), **at(NOW))
    card = registry.get("old-2", mono=0.0)
    assert card is not None
    assert (card.grpc_address, card.ring_address) == ("10.0.0.2:50051", "old-2:0")
    assert (card.platform, card.unified_memory_bytes, card.mlx_version) == (
        "mac-m2-16gb",
        16 << 30,
        "0.29.1",
    )
    assert card.models[0] == ("Qwen3-0.6B", 1, "8bit", 41.25, "", "")
    assert (card.announced_at, card.ttl_s, card.incarnation) == (NOW - 2, 120.0, 0)
    plan = plan_spec_decode_placement(registry.snapshot(mono=0.0), now=NOW)
    assert {plan.verifier_node, plan.proposer_node} <= {"old-1", "old-2", "old-3"}


def test_what_is_newer_than_this_build_is_kept_and_ignored() -> None:
    registry = make_registry()
    registry.merge(split_cards((RECORDED / "later_card.bin").read_bytes()), **at(NOW))
    card = registry.get("old-4", mono=0.0)
    assert card is not None
    assert [model.role for model in card.models] == [1, 2, 77]
    assert card.endpoints == (("[fe80::1%en0]:50051", "thunderbolt", 2, 0.31),)
    assert card.wire.endswith(b"new")


def test_our_cards_are_read_by_who_knows_nine_fields() -> None:
    registry = make_registry(models=[verifier("m", 3.0)])
    batch = join_cards([registry.own.wire])
    (card,) = pb.ExchangeCapabilitiesRequest.FromString(batch).known_nodes
    assert (card.node_id, card.ttl_seconds) == ("me", 120.0)
    assert card.announced_at_unix == NOW


# --- a real one among ours


class _Counter:
    """Counts the calls of one node by method."""

    def __init__(self, channels: object) -> None:
        self.paths: list[str] = []
        self._channels = channels

    def get(self, address: str) -> object:
        channel = self._channels.get(address)  # type: ignore[attr-defined]
        outer = self

        class Counted:
            def unary_unary(self, path: str) -> object:
                outer.paths.append(path)
                return channel.unary_unary(path)

        return Counted()


async def test_a_plain_node_is_exchanged_with_in_full_after_one_try() -> None:
    async with running_node("a") as a, running_node("b") as b:
        async with running_plain_node("old", a.clock.wall) as old:
            gossip = a.gossip()
            counter = _Counter(a.channels)
            gossip._exchanger._channels = counter  # type: ignore[assignment]
            for _ in range(3):
                done = await gossip.round([old.address, b.address])
                assert done.errors == {}
            assert counter.paths.count(EXCHANGE_METHOD) == 3
            assert counter.paths.count(SYNC_METHOD) == 1 + 3  # one try, and b each time
            assert a.known() == ["a", "b", "old"]
            assert old.live() == {"a", "b"}


@pytest.mark.parametrize("skew_s", [pytest.param(0.0, marks=pytest.mark.slow), 30.0])
async def test_for_an_hour_nobody_expires_in_a_fleet_of_both_kinds(skew_s: float) -> None:
    """Plain and ours see each other throughout, though ours meet only through the plain one."""
    clock = FakeClock(NOW)
    ahead = FakeClock(NOW + skew_s)
    async with running_node("a", clock=clock, models=[proposer("ngram")]) as a:
        async with running_node("b", clock=ahead) as b:
            async with running_plain_node("old", clock.wall) as old:
                for round_ in range(360):
                    await a.exchange(old.address)
                    await old.exchange(b.address)
                    if round_ > 0:
                        assert old.live() == {"a", "b"}
                        assert a.known() == ["a", "b", "old"]
                        assert b.known() == ["b", "a", "old"]
                    clock.advance(10.0)
                    ahead.advance(10.0)
                    a.registry.begin_round(now=clock.wall(), mono=clock.mono())
                    b.registry.begin_round(now=ahead.wall(), mono=ahead.mono())
                card = b.card_of("a")
                assert card.is_plain  # what the plain node did not know, it dropped
                assert card.offers(2)[0].model_id == "ngram"


async def test_a_plain_card_that_came_round_does_not_displace_the_owners_own() -> None:
    """Through a plain node our cards lose their incarnation, so they order below the original."""
    async with running_node("a") as a, running_node("b") as b, running_node("c") as c:
        async with running_plain_node("old", a.clock.wall) as old:
            await a.exchange(b.address)
            await a.exchange(old.address)
            await old.exchange(b.address)
            assert not b.card_of("a").is_plain
            await old.exchange(c.address)
            assert c.card_of("a").is_plain
            await c.exchange(b.address)
            assert not c.card_of("a").is_plain
            assert b.registry.conflicts(b.clock.wall()) == ()
            assert c.registry.conflicts(c.clock.wall()) == ()
            assert a.registry.conflicts(a.clock.wall()) == ()
            assert a.registry.incarnation == 1
