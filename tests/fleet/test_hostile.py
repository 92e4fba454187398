"""A hostile member: it forges, replays, floods and lies; nothing but its own card is affected."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kakeya.core.errors import Refused
from kakeya.fleet.cards.cards import (
    DEFAULT_TTL_S,
    MAX_CARD_BYTES,
    MAX_FORGED,
    MAX_INCARNATION,
    Card,
    CardFault,
    Offer,
)
from kakeya.fleet.cards.convert import MAX_BATCH_BYTES, MalformedCard, from_wire, to_wire
from kakeya.fleet.gossip.messages import Digest, Parcel, encode_digest, encode_parcel
from kakeya.fleet.identity.authority import authority_of, new_fleet
from kakeya.fleet.identity.trust import FleetTrust
from kakeya.fleet.view.beats import MAX_BEATS, Beats, no_beats
from kakeya.fleet.view.card_table import MAX_STEPS
from kakeya.fleet.view.slices import finish
from tests.fleet.nodes import NOW, make_wire
from tests.fleet.talk import Party, ToyTrust, card_of, exchange, make_party


def _party(name: str, **options: object) -> Party:
    return make_party(name, trust=ToyTrust(name), **options)  # type: ignore[arg-type]


def _tell(victim: Party, key: int, number: int, age_s: float, proof: int, t: float) -> None:
    beats = Beats(
        np.array([key], np.uint64),
        np.array([number], np.uint32),
        np.array([age_s]),
        np.array([proof], np.uint64),
    )
    victim.sync.answer(encode_digest(Digest(held=beats)), **victim.times(t))


def _age_s(party: Party, name: str, t: float) -> float:
    age_s = party.registry.age_s(name, mono=party.times(t)["mono"])
    assert age_s is not None
    return age_s


def test_nobody_but_the_owner_can_beat_for_a_node() -> None:
    victim, dead = _party("victim"), _party("dead")
    exchange(victim, dead, 0.0)
    exchange(victim, dead, 10.0)
    held = card_of(victim, "dead", 10.0)
    assert held is not None
    proof = dead.registry.own_card.proof
    number = victim.registry.peers.held.number(held)
    for t in range(11, 140):
        for guess in (0, proof, proof + 1, 2**64 - 1):
            for later in (number + 1, number + 7, MAX_BEATS, MAX_BEATS + 1, 2**32 - 1):
                _tell(victim, held.key, later, 0.0, guess, float(t))
        _tell(victim, held.key, number, 0.0, proof, float(t))
    victim.registry.begin_round(**victim.times(10.0 + DEFAULT_TTL_S + 0.2))
    assert card_of(victim, "dead", 131.0) is None


def test_without_proofs_such_beats_would_be_believed() -> None:
    """The control: a fleet without identities has no secrets to prove by."""
    victim, dead = make_party("victim"), make_party("dead")
    exchange(victim, dead, 0.0)
    held = card_of(victim, "dead", 0.0)
    assert held is not None
    _tell(victim, held.key, 100, 0.0, 0, 119.0)
    assert card_of(victim, "dead", 200.0) is not None


def test_an_age_that_lies_young_is_bounded_by_what_was_heard_here() -> None:
    victim, relay, far = _party("victim"), _party("relay"), _party("far")
    exchange(far, relay, 0.0)
    exchange(relay, victim, 50.0)
    assert _age_s(victim, "far", 50.0) == pytest.approx(50.0, abs=0.2)
    held = card_of(victim, "far", 50.0)
    assert held is not None
    for t in (60.0, 70.0, 80.0):
        _tell(victim, held.key, 0, 0.0, held.anchor or 0, t)
        assert _age_s(victim, "far", t) >= t - 50.0


def test_an_age_that_lies_old_is_put_right_by_the_first_honest_word() -> None:
    victim, far, other = _party("victim"), _party("far"), _party("other")
    exchange(far, victim, 0.0)
    exchange(far, other, 100.0)
    own = far.registry.own_card
    _tell(victim, own.card.key, own.number, 4e8, own.proof, 100.0)
    assert card_of(victim, "far", 100.0) is not None  # it lived at 0 for certain
    exchange(other, victim, 101.0)
    assert _age_s(victim, "far", 101.0) == pytest.approx(1.0, abs=0.2)


def test_old_beats_and_bodies_of_the_dead_raise_nobody() -> None:
    victim, dead = _party("victim"), _party("dead")
    recorded = []
    for t in (0.0, 10.0, 20.0):
        recorded.append(dead.sync.request(**dead.times(t)))
        recorded.append(dead.sync.batch(**dead.times(t)))
        exchange(dead, victim, t)
    victim.registry.begin_round(**victim.times(200.0))
    assert "dead" not in victim.sees(200.0)
    for t in range(200, 1200, 25):
        victim.sync.answer(recorded[-2], **victim.times(float(t)))
        taken = finish(victim.sync.taking_batch(recorded[-1], **victim.times(float(t))))
        assert "dead" not in victim.sees(float(t))
    assert taken.report.dropped[CardFault.STALE] == 1
    exchange(dead, victim, 1210.0)
    assert "dead" in victim.sees(1210.0)


def test_one_message_cannot_make_a_node_hash_for_long() -> None:
    victim = _party("victim")
    crowd = [_party(f"n{i:03}") for i in range(200)]
    victim.registry.merge([p.registry.own.wire for p in crowd], **victim.times(0.0))
    keys = [p.registry.own.key for p in crowd]
    lies = Beats(
        np.array(keys, np.uint64),
        np.full(len(keys), MAX_BEATS, np.uint32),
        np.zeros(len(keys)),
        np.full(len(keys), 42, np.uint64),
    )
    assert len(keys) * MAX_BEATS > MAX_STEPS
    places = victim.registry.peers.held.places(lies.keys)
    assert victim.registry.peers.held.hear(lies, places, 1.0).tolist() == []


def test_a_node_that_was_away_for_long_is_proven_over_several_messages() -> None:
    """The bound on hashing delays, it does not exclude."""
    crowd = [_party(f"n{i:03}") for i in range(100)]
    hub, late = _party("hub"), _party("late")
    for t in range(400):
        for party in crowd:
            party.registry.beat(**party.times(float(t)))
    for party in crowd:
        exchange(party, hub, 400.0)
    for t in range(401, 405):
        exchange(late, hub, float(t))
    assert len(late.sees(405.0)) == 102
    numbers = [late.registry.peers.held.number(c) for c in late.registry.peers.held]
    assert sum(number > 300 for number in numbers) >= 100


def test_unsigned_cards_are_dropped_before_they_are_kept() -> None:
    victim = _party("victim")
    report = victim.registry.merge([make_wire("stranger")], **victim.times(0.0))
    assert report.dropped == {CardFault.UNSIGNED: 1}
    assert victim.sees(0.0) == {"victim"}


def test_who_is_revoked_falls_out_of_the_view_and_is_not_dialled_again() -> None:
    victim, thief = _party("victim"), _party("thief")
    exchange(victim, thief, 0.0)
    trust = victim.registry.trust
    assert isinstance(trust, ToyTrust)
    trust.revoked.add("thief")
    assert victim.registry.recheck(victim.times(1.0)["now"], mono=1.0) == ("thief",)
    exchange(thief, victim, 10.0)
    assert victim.sees(10.0) == {"victim"}
    assert victim.registry.remembered_addresses(victim.times(10.0)["now"]) == ()


@pytest.mark.parametrize("count", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_a_flood_of_strangers_costs_no_member_its_place(count: int) -> None:
    """Row 18, the registry's part: at the cap strangers are refused, members are renewed."""
    victim = make_party("victim")
    members = [make_party(f"m{i:02}") for i in range(count)]
    for member in members:
        exchange(member, victim, 0.0)
    limit = victim.registry.peers._limit
    for batch in range(3):
        wires = [make_wire(f"s{batch}-{i}") for i in range(1500)]
        push = encode_parcel(Parcel(beats=Beats(*_empty()), cards=wires))
        victim.sync.take(push, **victim.times(1.0))
        assert len(victim.registry) <= limit
    for member in members:
        exchange(member, victim, 100.0)
    assert {member.name for member in members} <= victim.sees(200.0)


def _empty() -> tuple[np.ndarray, ...]:
    return (np.empty(0, np.uint64), np.empty(0, np.uint32), np.empty(0), np.empty(0, np.uint64))


# --- whose card it is


@pytest.mark.parametrize(
    ("incarnation", "at"),
    [(1, NOW + 1), (MAX_INCARNATION - 2, NOW - 60), (MAX_INCARNATION - 2, NOW + 1)],
)
def test_what_others_write_under_a_nodes_own_id_means_nothing_to_it(
    incarnation: int, at: float
) -> None:
    """Else one message shows it a twin, for which it would not serve, or uses up its starts."""
    victim = _party("victim")
    before = victim.registry.incarnation
    forged = make_wire("victim", at=at, incarnation=incarnation, life=7, address="10.0.0.66:1")
    report = victim.registry.merge([forged], **victim.times(1.0))
    assert report.dropped == {CardFault.UNSIGNED: 1}
    assert not report.conflicts
    assert victim.registry.conflicts(victim.times(1.0)["now"]) == ()
    assert victim.registry.incarnation == before


def test_an_own_card_of_an_earlier_life_is_no_twin_whatever_age_is_told_of_it() -> None:
    recorded = _party("victim", address="10.0.0.1:1").registry.own
    victim = _party("victim", address="10.0.0.2:1", t=100.0, seed=9)
    beats = Beats(
        np.array([recorded.key], np.uint64),
        np.array([3], np.uint32),
        np.zeros(1),
        np.array([4], np.uint64),
    )
    victim.registry.merge([recorded.wire], beats=beats, **victim.times(110.0))
    assert victim.registry.conflicts(victim.times(110.0)["now"]) == ()


# --- what a message may cost: counted, since the time of a shared machine proves nothing


@pytest.mark.parametrize(
    "name", ["answering", "taking", "answering_batch", "accepting", "taking_batch"]
)
def test_a_message_of_hollow_fields_is_refused_before_it_is_read(name: str) -> None:
    """2 MiB of fields of two bytes kept the scan, and so every call here, busy for a second."""
    victim = _party("victim")
    with pytest.raises(Refused, match="at most 8192 fields"):
        finish(
            getattr(victim.sync, name)(b"\x78\x00" * (MAX_BATCH_BYTES // 2), **victim.times(0.0))
        )


@pytest.mark.parametrize(
    ("tag", "fault"),
    [(b"\x32", CardFault.TOO_MANY_MODELS), (b"\x5a", CardFault.TOO_MANY_ENDPOINTS)],
)
def test_a_card_of_hollow_parts_is_refused_before_they_become_objects(
    tag: bytes, fault: CardFault
) -> None:
    wire = make_wire("thick") + (tag + b"\x00") * ((MAX_CARD_BYTES - 100) // 2)
    with pytest.raises(MalformedCard) as refusal:
        from_wire(wire)
    assert refusal.value.fault is fault


FIRST = new_fleet("mini-1", NOW)
AUTHORITY = authority_of(FIRST)
assert AUTHORITY is not None
MALLORY = AUTHORITY.new_identity("mallory", now=NOW)


class CountingTrust(FleetTrust):
    """Counts the curve operations on cards."""

    judged = 0

    def _signer_of(self, wire: bytes):  # type: ignore[no-untyped-def]
        self.judged += 1
        return super()._signer_of(wire)


def _own_cards(count: int) -> list[bytes]:
    trust = FleetTrust(MALLORY)
    offer = Offer(grpc_address="10.0.0.66:1")
    made = (
        to_wire(MALLORY.node_id, offer, incarnation=i + 1, announced_at=NOW) for i in range(count)
    )
    return [trust.seal(body) for body in made]


def _forged(count: int) -> list[bytes]:
    (good,) = _own_cards(1)
    # The certificate is as good as ever, and every signature is another's.
    return [good[:-2] + i.to_bytes(2, "big") for i in range(count)]


def _signed_twice_over(count: int) -> list[bytes]:
    """With another fleet's certificates, each unlike the others."""
    other = authority_of(new_fleet("other", NOW))
    assert other is not None
    thieves = [other.new_identity(f"thief {i}", now=NOW) for i in range(count)]
    return [FleetTrust(who).seal(make_wire(who.node_id, address="10.0.0.66:1")) for who in thieves]


@pytest.mark.parametrize("make", [_own_cards, _forged, _signed_twice_over])
def test_one_message_cannot_make_a_node_check_many_signatures(
    make: Callable[[int], list[bytes]],
) -> None:
    """Neither with many cards that a member did sign nor with any number that nobody did."""
    trust = CountingTrust(FIRST)
    victim = make_party(FIRST.node_id, trust=trust)
    push = encode_parcel(Parcel(beats=no_beats(), cards=make(60)))
    for _ in range(3):
        work = victim.sync.verification(push, 2)
        if work is not None:
            work()
        report = victim.sync.take(push, **victim.times(1.0))
    assert sum(report.dropped.values()) <= 60
    assert 0 < trust.judged <= 3 * 2 * MAX_FORGED
    assert len(victim.registry.peers.unwanted._replaced) <= 3


def test_who_starts_hashes_nothing_for_cards_that_it_did_not_see_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A proof costs up to 512 hashes, and a newcomer hears of the whole fleet in one message."""
    crowd = [_party(f"n{i:02}") for i in range(40)]
    hub, late = _party("hub"), _party("late")
    for t in range(300):
        for party in crowd:
            party.registry.beat(**party.times(float(t)))
    for party in crowd:
        exchange(party, hub, 300.0)
    proven: list[Card] = []
    proves = late.registry.peers.held.proves

    def counted(card: Card, told: object) -> bool:
        proven.append(card)
        return proves(card, told)  # type: ignore[arg-type]

    monkeypatch.setattr(late.registry.peers.held, "proves", counted)
    exchange(late, hub, 301.0)
    assert len(late.sees(301.0)) == 42
    assert proven == []


def test_beats_of_thousands_of_replaced_cards_cost_a_few_proofs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    victim = _party("victim")
    lives = [
        make_party("many", trust=ToyTrust("many"), incarnation=i + 1, seed=i).registry.own
        for i in range(60)
    ]
    for i, card in enumerate(lives):
        victim.registry.merge([card.wire], **victim.times(float(i) / 100))
    proven: list[Card] = []

    def counted(card: Card, told: object) -> bool:
        proven.append(card)
        return False

    monkeypatch.setattr(victim.registry.peers.held, "proves", counted)
    keys = np.array([card.key for card in lives], np.uint64)
    lies = Beats(keys, np.full(60, MAX_BEATS, np.uint32), np.zeros(60), np.ones(60, np.uint64))
    victim.registry.hear(lies, **victim.times(50.0))
    assert 0 < len(proven) <= MAX_FORGED


# --- who says it


def test_nobody_can_make_a_node_blame_its_clock_in_the_name_of_others() -> None:
    """The key that comes first named the sender; a liar put a new one there each time."""
    victim, liar = _party("victim"), _party("liar")
    others = [_party(f"n{i}") for i in range(6)]
    for party in (*others, liar):
        exchange(party, victim, 0.0)
    for i, other in enumerate(others):
        t = 1.0 + i
        own = other.registry.own_card
        first = Beats(np.array([own.card.key], np.uint64), np.zeros(1, np.uint32), *_empty()[2:])
        lie = encode_digest(Digest(held=first, sent_at=NOW + 9000.0))
        victim.sync.answer(lie, **victim.times(t), peer="liar")
        victim.sync.answer(lie, **victim.times(t))  # nor by a connection that vouches for nobody
    skews = victim.sync.skews.by_peer(8.0)
    assert {name for name, skew_s in skews.items() if abs(skew_s) > 5} == {"liar"}
    assert not victim.sync.skews.is_own_fault(8.0)


def test_a_member_that_denies_to_know_beats_makes_nobody_waste_bodies() -> None:
    victim = _party("victim")
    body = make_wire("liar", is_plain=True) + ToyTrust.WORD
    assert victim.registry.merge([body], **victim.times(1.0)).changed == ("liar",)
    before = victim.registry.own
    for t in range(10, 110, 10):
        victim.registry.beat(**victim.times(float(t)))
        victim.registry.describe(**victim.times(10.0))
    assert victim.registry.own is before
