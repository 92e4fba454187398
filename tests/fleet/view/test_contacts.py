"""Whom a node met itself: it goes by that where cards can lie, and where relays tell old news."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import PlacementError
from kakeya.core.ids import NodeId
from kakeya.fleet.cards.cards import Endpoint
from kakeya.fleet.placement.placement import plan_spec_decode_placement
from kakeya.fleet.view.beats import Beats
from kakeya.fleet.view.contacts import MAX_PLACES, FirstHandContacts
from tests.fleet.members import House, Member, member, sealed_card
from tests.fleet.nodes import NOW, proposer, verifier
from tests.fleet.talk import Party, ToyTrust, exchange, make_party
from tests.waiting import until

DRAFT = proposer("draft")


# --- the values


NODES = st.sampled_from([NodeId(name) for name in "abc"])
ADDRESSES = st.integers(0, 14).map(lambda i: f"10.0.0.{i}:1")
STEPS = st.tuples(st.sampled_from(["met", "answered", "missed", "forget"]), NODES, ADDRESSES)


@given(st.lists(STEPS, max_size=80))
def test_a_meeting_says_who_answered_last_and_costs_little(
    steps: list[tuple[str, NodeId, str]],
) -> None:
    contacts = FirstHandContacts()
    at: dict[str, NodeId] = {}
    met: set[NodeId] = set()
    for what, node_id, address in steps:
        match what:
            case "met":
                contacts.met(node_id)
                met.add(node_id)
            case "answered":
                contacts.answered(node_id, address)
                met.add(node_id)
                at[address] = node_id
            case "missed":
                contacts.missed(node_id, address)
                at = {a: n for a, n in at.items() if (a, n) != (address, node_id)}
            case "forget":
                contacts.forget(node_id)
                met.discard(node_id)
                at = {a: n for a, n in at.items() if n != node_id}
        assert what != "answered" or contacts.at(address) == node_id
        assert {name for name in "abc" if contacts.has(name)} == met
        # What is said is true; of a node at many addresses the oldest are forgotten.
        assert contacts._at.items() <= at.items()
    for name in "abc":
        places = [address for address, node in contacts._at.items() if node == name]
        assert len(places) <= MAX_PLACES
        assert places == [] or set(contacts._places[NodeId(name)]) == set(places)


# --- what relays tell may be long over


def _can_place(party: Party, t: float) -> bool:
    mono = party.times(t)["mono"]
    registry = party.registry
    try:
        plan_spec_decode_placement(
            registry.snapshot(mono=mono),
            now=party.times(t)["now"],
            suspects=registry.suspects(),
            proposer_model="draft",
        )
    except PlacementError:
        return False
    return True


def _party(name: str, *, is_secured: bool = True, drafts: bool = False) -> Party:
    return make_party(
        name,
        trust=ToyTrust(name) if is_secured else None,
        models=[DRAFT] if drafts else [verifier("m")],
    )


def _recorded(dead: Party, beats: int) -> list[Beats]:
    """What its owner said of each of its beats."""
    said = []
    for t in range(1, beats + 1):
        dead.registry.beat(**dead.times(float(t)))
        own = dead.registry.own_card
        said.append(
            Beats(
                np.array([own.card.key], np.uint64),
                np.array([own.number], np.uint32),
                np.zeros(1),
                np.array([own.proof], np.uint64),
            )
        )
    return said


def test_recorded_beats_of_who_is_gone_bring_a_newcomer_to_place_nothing_there() -> None:
    """Each is proven and later than the one before, as if the node lived; nobody gives it work."""
    dead, fresh = _party("dead", drafts=True), _party("fresh")
    recorded = _recorded(dead, 60)
    fresh.registry.merge([dead.registry.own.wire], beats=recorded[0], **fresh.times(1000.0))
    for i, said in enumerate(recorded):
        t = 1000.0 + 10 * i
        fresh.registry.hear(said, **fresh.times(t))
        fresh.registry.begin_round(**fresh.times(t))
        assert "dead" in fresh.sees(t)  # the control: it looks alive
        assert fresh.registry.suspects() == {"dead"}
        assert not _can_place(fresh, t)


def test_one_beat_told_again_and_again_makes_nobody_younger() -> None:
    dead, fresh = _party("dead", drafts=True), _party("fresh")
    (said,) = _recorded(dead, 1)
    fresh.registry.merge([dead.registry.own.wire], beats=said, **fresh.times(1000.0))
    for t in range(1000, 1120):
        fresh.registry.hear(said, **fresh.times(float(t)))
        age_s = fresh.registry.age_s("dead", mono=fresh.times(float(t))["mono"])
        assert age_s == pytest.approx(t - 1000)
    assert fresh.registry.begin_round(**fresh.times(1121.0)).gone == ("dead",)


@pytest.mark.parametrize("is_caller", [False, True])
def test_who_calls_or_answers_is_placed_on_at_once(is_caller: bool) -> None:
    one, two = _party("one"), _party("two", drafts=True)
    if is_caller:
        exchange(two, one, 1.0)
    else:
        exchange(one, two, 1.0)
    assert _can_place(one, 1.0)
    assert one.registry.suspects() == frozenset()


def test_who_is_gone_has_to_be_met_anew() -> None:
    one, two = _party("one"), _party("two", drafts=True)
    exchange(one, two, 1.0)
    one.registry.begin_round(**one.times(200.0))
    two.registry.restamp(**two.times(201.0))
    one.registry.merge([two.registry.own.wire], **one.times(201.0))
    assert one.registry.suspects() == {"two"}


def test_without_identities_hearsay_is_all_there_is() -> None:
    one, relay = (_party(name, is_secured=False) for name in ("one", "relay"))
    two = _party("two", is_secured=False, drafts=True)
    exchange(relay, two, 1.0)
    exchange(one, relay, 2.0)
    assert _can_place(one, 2.0)


# --- who is at an address, over TLS


@dataclass
class Scene:
    """A watcher and an honest node that run, and what a hostile member says of itself."""

    watcher: Member
    honest: Member
    hostile_id: str
    hostile_card: bytes

    @property
    def channel(self) -> grpc.aio.Channel:
        return self.watcher.channels.get(self.honest.address)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    house = House()
    mallory = house.identity("mallory")
    async with (
        member(house.identity("watcher")) as watcher,
        member(house.identity("honest"), models=[DRAFT]) as honest,
    ):
        other = "127.0.0.1:9"
        endpoints = [Endpoint(other, "lan", 20), Endpoint(honest.address, "lan", 20)]
        claim = sealed_card(mallory, honest.address, models=[DRAFT], endpoints=endpoints)
        yield Scene(watcher, honest, mallory.node_id, claim)


async def test_a_claim_to_the_address_of_an_absent_node_does_not_shut_it_out(scene: Scene) -> None:
    """The claimant's certificate was expected there, which the honest node does not have."""
    watcher, honest = scene.watcher, scene.honest
    watcher.learn(scene.hostile_card)
    await until(lambda: watcher.prober.last(scene.hostile_id) is not None)
    done = await watcher.exchange(honest.address)
    assert done.errors == {}
    assert honest.node_id in watcher.known()
    await until(lambda: watcher.registry.node_at(honest.address) == honest.node_id)


async def test_each_of_two_that_claim_one_address_is_looked_for_as_itself(scene: Scene) -> None:
    watcher, honest = scene.watcher, scene.honest
    watcher.learn(scene.hostile_card, honest.registry.own.wire)
    await until(lambda: watcher.registry.suspects() == {scene.hostile_id})
    channel = scene.channel
    for _ in range(3):
        watcher.registry.mark_failed(scene.hostile_id, mono=watcher.clock.mono())
        await until(lambda: watcher.registry.suspects() == {scene.hostile_id})
        assert (await watcher.exchange(honest.address)).errors == {}
    assert scene.channel is channel
    assert watcher.prober.outgoing() == ()


async def test_looking_for_a_liar_at_an_address_costs_the_node_there_no_connection(
    scene: Scene,
) -> None:
    watcher, honest = scene.watcher, scene.honest
    watcher.learn(honest.registry.own.wire)
    await until(lambda: watcher.registry.suspects() == frozenset())
    channel = scene.channel
    await channel.channel_ready()
    watcher.learn(scene.hostile_card)
    for _ in range(3):
        watcher.routes.interfaces_changed()
        watcher.routes.tick()
        await until(lambda: not watcher.routes._under_way)
    assert scene.channel is channel
    assert channel.get_state() is grpc.ChannelConnectivity.READY
    assert watcher.registry.suspects() == {scene.hostile_id}


async def test_what_is_heard_of_by_relays_is_used_after_one_probe(scene: Scene) -> None:
    """No round goes by: an honest fleet starts as fast as it answers."""
    watcher, honest = scene.watcher, scene.honest
    watcher.learn(honest.registry.own.wire)
    assert watcher.registry.suspects() == {honest.node_id}
    await until(lambda: not watcher.registry.suspects())
    assert watcher.registry.node_at(honest.address) == honest.node_id


async def test_a_node_that_moved_is_no_more_expected_where_it_was(scene: Scene) -> None:
    """Another node may be there next."""
    watcher, honest = scene.watcher, scene.honest
    watcher.learn(honest.registry.own.wire)
    await until(lambda: watcher.registry.node_at(honest.address) == honest.node_id)
    offer = honest.registry.offer
    moved = type(offer)(grpc_address="127.0.0.1:9", models=offer.models)
    clock = honest.clock
    honest.registry.announce(moved, now=clock.wall(), mono=clock.mono())
    watcher.learn(honest.registry.own.wire)
    assert watcher.registry.node_at(honest.address) == ""


async def test_a_forbidden_address_on_a_card_is_not_dialled(scene: Scene) -> None:
    watcher, honest = scene.watcher, scene.honest
    watcher.prober._dialer._may_dial = lambda address: False
    watcher.learn(honest.registry.own.wire)
    await until(lambda: watcher.prober.last(honest.node_id) is not None)
    assert watcher.channels.addresses == frozenset()


def test_a_claim_and_a_move_do_not_make_the_lost_be_forgotten() -> None:
    """A partition heals by the addresses of who is gone."""
    one = make_party("one", trust=ToyTrust("one"))
    lost = make_party("lost", trust=ToyTrust("lost"), address="10.0.0.7:1")
    mallory = make_party("mallory", trust=ToyTrust("mallory"), address="10.0.0.7:1", t=300.0)
    exchange(one, lost, 1.0)
    one.registry.begin_round(**one.times(200.0))
    exchange(one, mallory, 300.0)
    moved = type(mallory.registry.offer)(grpc_address="10.0.0.8:1")
    mallory.registry.announce(moved, **mallory.times(301.0))
    exchange(one, mallory, 302.0)
    assert one.registry.remembered_addresses(NOW + 303.0) == ("10.0.0.7:1",)
