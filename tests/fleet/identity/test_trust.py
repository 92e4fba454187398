"""Seals of cards against forgers, relays, hostile members (S4.13, S4.17); callers; revocation."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import ConfigError
from kakeya.fleet.cards.cards import Card, CardFault
from kakeya.fleet.cards.convert import MalformedCard, from_wire
from kakeya.fleet.identity.authority import Authority, authority_of, new_fleet
from kakeya.fleet.identity.certificates import certificate_der, read_key, read_leaf
from kakeya.fleet.identity.identity import Identity
from kakeya.fleet.identity.revocations import sign_list
from kakeya.fleet.identity.seal import seal
from kakeya.fleet.identity.trust import FleetTrust
from kakeya.v1 import distributed_pb2 as pb
from kakeya.wire.security import CertRole
from tests.laws import law

NOW = 1_700_000_000.0
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
FIRST = new_fleet("mini-1", NOW)
AUTHORITY: Authority = authority_of(FIRST)  # type: ignore[assignment]
ALICE = AUTHORITY.new_identity("alice", now=NOW)
MALLORY = AUTHORITY.new_identity("mallory", now=NOW)


def body_of(node_id: str, **fields: object) -> bytes:
    message = pb.NodeCapability(
        node_id=node_id,
        grpc_address="10.0.0.2:50051",
        announced_at_unix=NOW,
        ttl_seconds=120,
        incarnation=1,
        protocol_min=1,
        protocol_max=1,
        **fields,  # type: ignore[arg-type]
    )
    return message.SerializeToString()


def card_of(identity: Identity, body: bytes | None = None) -> bytes:
    return FleetTrust(identity).seal(body or body_of(identity.node_id))


def sealed_by(identity: Identity, body: bytes, certificate: bytes | None = None) -> bytes:
    """A card by somebody who has a key and does with it what he likes."""
    der = certificate_der(read_leaf(certificate or identity.tls.certificate))
    return seal(body, certificate=der, key=read_key(identity.tls.key))


def fault(wire: bytes, *, trust: FleetTrust | None = None, now: float = NOW) -> CardFault | None:
    return (trust or FleetTrust(FIRST)).fault_of(read(wire), now)


def read(wire: bytes) -> Card:
    return from_wire(wire)


def test_a_members_card_counts_everywhere_in_its_fleet_and_nowhere_else() -> None:
    wire = card_of(ALICE)
    assert fault(wire) is None
    assert fault(wire, trust=FleetTrust(MALLORY)) is None
    assert fault(wire, trust=FleetTrust(new_fleet("other", NOW))) is CardFault.FORGED


def test_a_card_without_seal_is_unsigned() -> None:
    assert fault(body_of(ALICE.node_id)) is CardFault.UNSIGNED
    assert fault(body_of("plain-node")) is CardFault.UNSIGNED


def test_a_relay_passes_on_what_it_cannot_read() -> None:
    newer = body_of(ALICE.node_id) + b"\xaa\x3f\x03new"  # field 1013, of a version to come
    assert fault(card_of(ALICE, newer)) is None


def test_no_byte_of_a_card_can_be_changed() -> None:
    wire = card_of(ALICE)
    trust = FleetTrust(FIRST)
    for at in range(len(wire)):
        for change in (0x01, 0x80):
            altered = bytearray(wire)
            altered[at] ^= change
            assert _is_refused(bytes(altered), trust), (at, change)


def test_no_byte_can_be_taken_away_or_put_in() -> None:
    wire = card_of(ALICE)
    trust = FleetTrust(FIRST)
    for at in range(len(wire)):
        assert _is_refused(wire[:at], trust), at
        assert _is_refused(wire[:at] + wire[at + 1 :], trust), at
        assert _is_refused(wire[:at] + b"\x08" + wire[at:], trust), at


def _is_refused(wire: bytes, trust: FleetTrust) -> bool:
    try:
        return trust.fault_of(read(wire), NOW) in (CardFault.FORGED, CardFault.UNSIGNED)
    except MalformedCard:
        return True


def _signature_twice(wire: bytes) -> bytes:
    return wire + wire[-67:]


def _field_behind(wire: bytes) -> bytes:
    return wire + b"\x18\x01"


def _unknown_field_behind(wire: bytes) -> bytes:
    return wire + b"\xaa\x3f\x03new"


def _upper_half(wire: bytes) -> bytes:
    s = int.from_bytes(wire[-32:], "big")
    return wire[:-32] + (ORDER - s).to_bytes(32, "big")


def _long_tag(wire: bytes) -> bytes:
    return wire[:-67] + b"\xfa\x86\x00\x40" + wire[-64:]


def _long_length(wire: bytes) -> bytes:
    return wire[:-67] + b"\xfa\x06\xc0\x00" + wire[-64:]


def _no_signature(wire: bytes) -> bytes:
    return wire[:-67]


def _empty_signature(wire: bytes) -> bytes:
    return wire[:-67] + b"\xfa\x06\x00"


def _zero_signature(wire: bytes) -> bytes:
    return wire[:-64] + bytes(64)


@pytest.mark.parametrize(
    "respell",
    [
        _signature_twice,
        _field_behind,
        _unknown_field_behind,
        _upper_half,
        _long_tag,
        _long_length,
        _no_signature,
        _empty_signature,
        _zero_signature,
    ],
)
def test_a_seal_has_one_spelling(respell: Callable[[bytes], bytes]) -> None:
    """Each but the last three says the same to a lenient reader; a twin would win ties."""
    assert fault(respell(card_of(ALICE))) is CardFault.FORGED


def test_even_the_owner_signs_once_and_shows_one_certificate() -> None:
    body = body_of(ALICE.node_id)
    twice = sealed_by(ALICE, card_of(ALICE, body))
    assert fault(twice) is CardFault.FORGED
    other = pb.NodeCapability(certificate=b"x").SerializeToString()
    assert fault(sealed_by(ALICE, body + other)) is CardFault.FORGED


@law(1200)
@given(st.binary(max_size=300))
def test_no_bytes_make_the_seal_raise(wire: bytes) -> None:
    trust = FleetTrust(FIRST)
    trust.warm([wire, wire + card_of(ALICE)[-67:]])


def test_a_member_speaks_for_nobody_else() -> None:
    lie = body_of(ALICE.node_id)
    assert fault(sealed_by(MALLORY, lie)) is CardFault.FORGED
    assert fault(sealed_by(MALLORY, lie, ALICE.tls.certificate)) is CardFault.FORGED
    own_label = body_of(MALLORY.node_id, label="alice")  # about itself it may lie
    assert fault(sealed_by(MALLORY, own_label)) is None


def test_a_card_moved_under_another_seal_is_forged() -> None:
    alice = card_of(ALICE)
    mallory = card_of(MALLORY)
    assert fault(alice[:-67] + mallory[-67:]) is CardFault.FORGED
    assert fault(body_of(MALLORY.node_id) + alice[-67:]) is CardFault.FORGED


@pytest.mark.parametrize("role", [CertRole.CLIENT, CertRole.ADMIN])
def test_only_members_have_cards(role: CertRole) -> None:
    assert fault(card_of(AUTHORITY.new_identity("x", role=role, now=NOW))) is CardFault.FORGED


def test_the_authority_itself_signs_no_cards() -> None:
    """Its certificate is of the fleet, but names nobody."""
    assert FIRST.ca_key is not None
    wire = seal(
        body_of(FIRST.node_id),
        certificate=certificate_der(read_leaf(FIRST.tls.authority)),
        key=read_key(FIRST.ca_key),
    )
    assert fault(wire) is CardFault.FORGED


def test_a_card_counts_as_long_as_its_certificate() -> None:
    short = AUTHORITY.new_identity("short", now=NOW, life_s=60)
    wire = card_of(short)
    trust = FleetTrust(FIRST)
    assert fault(wire, trust=trust, now=NOW + 60) is None
    assert fault(wire, trust=trust, now=NOW + 61) is CardFault.UNSIGNED
    assert fault(wire, trust=trust, now=NOW - 3 * 86_400) is CardFault.UNSIGNED
    assert fault(wire, trust=trust, now=NOW) is None


def test_a_replayed_card_is_the_card_that_it_was() -> None:
    """The seal says who, not when: order and age are the registry's; nothing here changes."""
    trust = FleetTrust(FIRST)
    wire = card_of(ALICE)
    assert [fault(wire, trust=trust) for _ in range(3)] == [None] * 3


def test_verdicts_are_remembered_and_a_flood_of_forgeries_forgets_no_honest_one() -> None:
    trust = FleetTrust(FIRST)
    honest = card_of(ALICE)
    trust.warm([honest])
    verdicts = trust._good
    trust.warm([honest[:-1] + bytes((i % 256,)) + bytes((i // 256,)) for i in range(2000)])
    assert len(verdicts) == 1
    assert len(trust._bad) <= 1024
    assert fault(honest, trust=trust) is None


def test_cards_can_be_warmed_in_threads_while_others_are_asked_for() -> None:
    trust = FleetTrust(FIRST)
    wires = [card_of(ALICE, body_of(ALICE.node_id, mlx_version=str(i))) for i in range(100)]
    threads = [threading.Thread(target=trust.warm, args=(wires,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert all(fault(wire, trust=trust) is None for wire in wires)
    for thread in threads:
        thread.join()


def test_a_renewed_certificate_seals_the_next_cards() -> None:
    trust = FleetTrust(ALICE)
    other = AUTHORITY.new_identity("alice", now=NOW)
    with pytest.raises(ValueError, match="another node"):
        trust.adopt(other)
    assert trust.identity == ALICE


# Callers


def test_a_caller_is_whom_its_certificate_names() -> None:
    trust = FleetTrust(FIRST)
    admin = AUTHORITY.new_identity("laptop", role=CertRole.ADMIN, now=NOW)
    for who, role in ((ALICE, CertRole.MEMBER), (admin, CertRole.ADMIN)):
        assert trust.caller_of(who.tls.certificate) == (who.node_id, role, who.not_after_at)


@pytest.mark.parametrize(
    "pem",
    [b"", b"rubbish", new_fleet("other", NOW).tls.certificate, FIRST.tls.authority],
    ids=["empty", "rubbish", "foreign", "authority"],
)
def test_nobody_else_is_a_caller(pem: bytes) -> None:
    assert FleetTrust(FIRST).caller_of(pem) is None


# Revocation


def test_a_revoked_member_counts_no_more_wherever_the_list_comes() -> None:
    told: list[frozenset[str]] = []
    first, alice = FleetTrust(FIRST), FleetTrust(ALICE, on_revoked=told.append)
    wire = card_of(MALLORY)
    assert fault(wire, trust=alice) is None
    first.revoke(MALLORY.node_id, NOW)
    version, blob = first.revocations
    assert alice.apply_revocations(blob)
    assert alice.revocations == (version, blob)
    assert told == [frozenset({MALLORY.node_id})]
    for trust in (first, alice):
        assert fault(wire, trust=trust) is CardFault.REVOKED
        assert trust.is_revoked(MALLORY.node_id)
        assert not trust.is_revoked(ALICE.node_id)
    assert fault(card_of(ALICE), trust=first) is None


def test_a_list_replaces_only_an_older_one() -> None:
    first, alice = FleetTrust(FIRST), FleetTrust(ALICE)
    old = first.revoke(MALLORY.node_id, NOW).blob
    new = first.revoke("a" * 51 + "q", NOW).blob
    assert alice.apply_revocations(new)
    assert not alice.apply_revocations(new)
    assert not alice.apply_revocations(old)
    assert alice.revoked.node_ids == {MALLORY.node_id, "a" * 51 + "q"}


def test_only_the_authority_makes_lists() -> None:
    alice = FleetTrust(ALICE)
    with pytest.raises(ConfigError, match="not the fleet's authority"):
        alice.revoke(MALLORY.node_id, NOW)
    other = FleetTrust(new_fleet("other", NOW))
    assert not alice.apply_revocations(other.revoke(ALICE.node_id, NOW).blob)
    forged = sign_list([ALICE.node_id], after=alice.revoked, key=read_key(MALLORY.tls.key), now=NOW)
    assert not alice.apply_revocations(forged.blob)
    assert alice.revocations == (0, b"")


def test_no_bit_of_a_list_can_be_changed() -> None:
    blob = FleetTrust(FIRST).revoke(MALLORY.node_id, NOW).blob
    alice = FleetTrust(ALICE)
    for at in range(len(blob)):
        for bit in range(8):
            altered = bytearray(blob)
            altered[at] ^= 1 << bit
            assert not alice.apply_revocations(bytes(altered))
        assert not alice.apply_revocations(blob[:at])
    assert not alice.apply_revocations(bytes(300_000))
    assert alice.apply_revocations(blob)


def test_an_authority_that_lost_its_list_loses_no_entry() -> None:
    before, after = FleetTrust(FIRST), FleetTrust(FIRST)
    held_by_fleet = before.revoke(MALLORY.node_id, NOW).blob
    after.revoke(ALICE.node_id, NOW + 10)  # made without knowing the other
    assert after.apply_revocations(held_by_fleet)
    assert after.revoked.node_ids == {MALLORY.node_id, ALICE.node_id}
    assert before.apply_revocations(after.revocations[1])
    assert before.revoked == after.revoked
    assert not after.apply_revocations(held_by_fleet)
    assert not after.apply_revocations(before.revocations[1])
