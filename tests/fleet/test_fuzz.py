"""Scan, decode, validate, merge and sync under bytes that nobody should send (RELIABILITY row 21).

Mutations of honest messages reach deeper than noise. Half are of their bytes (bits flip, pieces
are cut, doubled, swapped), of which most end in the scan; half are of their fields, whose values
nobody should send but whose framing is right, and end wherever they are looked at.
"""

from __future__ import annotations

import contextlib
import math
import random
import resource
from collections.abc import Callable

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kakeya.core.errors import KakeyaError
from kakeya.core.units import MIB
from kakeya.fleet.cards.cards import CardFault, Endpoint
from kakeya.fleet.view.slices import finish
from kakeya.v1 import distributed_pb2, fleet_pb2
from tests.fleet.nodes import NOW, make_wire, verifier
from tests.fleet.talk import Party, ToyTrust, exchange, make_party

MAX_GROWTH_BYTES = 200 * MIB
Kinds = list[tuple[type[Message], bytes]]
_FLOATS = (0.0, -1.0, math.nan, math.inf, -math.inf, 1e300, NOW, NOW + 61, NOW - 1e9)
_WHOLE = (0, 1, 2, 99, 512, 513, 2**31 - 1, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1, -1, -(2**31))
_TEXTS = ("", "a", "../x", "n1", "victim", "x" * 300, "\x00", "10.0.0.1:0", "h:1", "é" * 200)
_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def _honest(trust: bool) -> tuple[Kinds, Callable[[], Party]]:
    """Messages of every kind, and a maker of nodes that they were meant for."""

    def party(name: str) -> Party:
        return make_party(name, trust=ToyTrust(name) if trust else None)

    a, b = party("a"), party("b")
    ways = [Endpoint("10.0.0.1:1", "lan", 20, 0.5), Endpoint("[fe80::1%en0]:2", "thunderbolt", 10)]
    wires = [
        make_wire(f"n{i}", at=NOW - i, models=[verifier("m" * i, i)] * i, endpoints=ways, label="x")
        for i in range(6)
    ]
    trusted = [wire + ToyTrust.WORD for wire in wires]
    a.registry.merge(trusted if trust else wires, **a.times(0.0))
    for t in (1.0, 12.0):
        exchange(a, b, t)
    request = a.sync.request(**a.times(20.0))
    response = b.sync.answer(request, **b.times(20.0)).response
    fresh = party("fresh")
    first = fresh.sync.request(**fresh.times(20.0))
    answer = a.sync.answer(first, **a.times(20.0)).response
    push = fresh.sync.accept(answer, **fresh.times(20.0)).push or b""
    batch = a.sync.batch(**a.times(20.0))
    kinds: Kinds = [(fleet_pb2.SyncRequest, message) for message in (request, first)]
    kinds += [(fleet_pb2.SyncResponse, message) for message in (response, answer)]
    kinds += [(fleet_pb2.PushRequest, push), (distributed_pb2.ExchangeCapabilitiesRequest, batch)]
    cards = [*wires, a.registry.own.wire]
    return kinds + [(distributed_pb2.NodeCapability, wire) for wire in cards], lambda: party(
        "victim"
    )


def _mutate(kinds: Kinds, rng: random.Random) -> bytes:
    kind, message = rng.choice(kinds)
    if rng.random() < 0.5:
        return _break(message, [wire for _, wire in kinds], rng)
    parsed = kind.FromString(message)
    for _ in range(rng.randint(1, 4)):
        _reshape(parsed, rng)
    return parsed.SerializeToString()


def _reshape(message: Message, rng: random.Random) -> None:
    """Give a field, at any depth, a value or a length that no honest node would."""
    field = rng.choice(message.DESCRIPTOR.fields)
    value = getattr(message, field.name)
    is_message = field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
    if not field.is_repeated:
        if is_message:
            _reshape(value, rng)
        else:
            setattr(message, field.name, _odd(field, value, rng))
    elif not value or rng.random() < 0.2:
        for _ in range(rng.choice((1, 1, 1, 9, 9, 9, 65, 600))):
            if is_message:
                value.add()
            else:
                value.append(_odd(field, b"", rng))
    elif rng.random() < 0.3:
        del value[rng.randrange(len(value)) :]
    elif is_message:
        _reshape(rng.choice(value), rng)
    else:
        at = rng.randrange(len(value))
        value[at] = _odd(field, value[at], rng)


def _odd(field: FieldDescriptor, value: object, rng: random.Random) -> object:
    if field.cpp_type in _BITS:
        low, high = _BITS[field.cpp_type]
        return rng.choice([number for number in _WHOLE if low <= number <= high])
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice(_FLOATS)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if field.type != FieldDescriptor.TYPE_BYTES:
        return rng.choice(_TEXTS)
    data = value if isinstance(value, bytes) else b""
    return rng.choice((b"", data * 2, data[:-1], data[8:], rng.randbytes(rng.randint(1, 40))))


def _break(message: bytes, others: list[bytes], rng: random.Random) -> bytes:
    data = bytearray(message)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0:
                if data:
                    data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + rng.randint(1, 30)]
            case 2:
                data[at:at] = rng.randbytes(rng.randint(1, 12))
            case 3:
                data[at:at] = data[at : at + rng.randint(1, 60)]
            case 4:
                other = rng.choice(others)
                cut = rng.randrange(len(other) + 1)
                data[at:] = other[cut:]
            case _:
                data[at : at + 9] = b"\xff" * rng.randint(0, 9)
    return bytes(data)


def _feed(party: Party, message: bytes, t: float) -> int:
    """Offer one message as every kind; how many of them were taken for one."""
    times, taken = party.times(t), 0
    for take in (
        party.sync.answering,
        party.sync.accepting,
        party.sync.taking,
        party.sync.answering_batch,
        party.sync.taking_batch,
    ):
        with contextlib.suppress(KakeyaError):
            finish(take(message, **times))
            taken += 1
    report = party.registry.merge([message], **times)
    assert all(isinstance(fault, CardFault) for fault in report.dropped)
    return taken


def _fuzz(inputs: int, seed: int, *, trust: bool) -> None:
    rng = random.Random(seed)
    kinds, make = _honest(trust)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken = 0
    for start in range(0, inputs, 500):
        party = make()
        own = party.registry.own_card.life
        for i in range(min(500, inputs - start)):
            t = 20.0 + i * 0.1
            taken += _feed(party, _mutate(kinds, rng), t)
        # Whatever came, the node is itself, within its bounds, and talks on.
        assert party.registry.own_card.life == own
        assert party.registry.own.node_id == "victim"
        assert len(party.registry) <= 4096
        view = party.registry.snapshot(mono=80.0)
        assert all(card.announced_at <= NOW + 80 + 25 * 3600 for card in view)
        friend = make_party("friend", t=80.0, trust=ToyTrust("friend") if trust else None)
        exchange(friend, party, 80.0)
        assert "friend" in party.sees(80.0)
        assert "victim" in friend.sees(80.0)
    assert taken > inputs / 2, "hardly anything got past the scan"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert grown * 1024 <= MAX_GROWTH_BYTES


@pytest.mark.parametrize("trust", [pytest.param(False, marks=pytest.mark.slow), True])
def test_six_thousand_broken_messages_break_nothing(trust: bool) -> None:
    _fuzz(3000, seed=7, trust=trust)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_million_broken_messages_break_nothing(seed: int) -> None:
    _fuzz(100_000, seed=seed, trust=seed % 2 == 0)
