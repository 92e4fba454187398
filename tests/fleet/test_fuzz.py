"""Scan, decode, validate, merge and sync under bytes that nobody should send (RELIABILITY row 21).

Mutations of honest messages reach deeper than noise: bits flip, pieces are cut, doubled, swapped.
"""

from __future__ import annotations

import contextlib
import random
import resource
from collections.abc import Callable

import pytest

from kakeya.core.errors import KakeyaError
from kakeya.core.units import MIB
from kakeya.fleet.cards import CardFault, Endpoint
from tests.fleet.nodes import NOW, make_wire, verifier
from tests.fleet.talk import Party, ToyTrust, exchange, make_party

MAX_GROWTH_BYTES = 200 * MIB


def _honest(trust: bool) -> tuple[list[bytes], Callable[[], Party]]:
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
    messages = [request, response, first, answer, push, a.sync.batch(**a.times(20.0))]
    return [*messages, *wires, a.registry.own.wire], lambda: party("victim")


def _mutate(message: bytes, others: list[bytes], rng: random.Random) -> bytes:
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


def _feed(party: Party, message: bytes, t: float) -> None:
    times = party.times(t)
    for take in (
        party.sync.answer,
        party.sync.accept,
        party.sync.take,
        party.sync.answer_batch,
        party.sync.take_batch,
    ):
        with contextlib.suppress(KakeyaError):
            take(message, **times)
    report = party.registry.merge([message], **times)
    assert all(isinstance(fault, CardFault) for fault in report.dropped)


def _fuzz(inputs: int, seed: int, *, trust: bool) -> None:
    rng = random.Random(seed)
    messages, make = _honest(trust)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for start in range(0, inputs, 500):
        party = make()
        own = party.registry.own_card.life
        for i in range(min(500, inputs - start)):
            t = 20.0 + i * 0.1
            _feed(party, _mutate(rng.choice(messages), messages, rng), t)
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
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert grown * 1024 <= MAX_GROWTH_BYTES


@pytest.mark.parametrize("trust", [False, True])
def test_ten_thousand_broken_messages_break_nothing(trust: bool) -> None:
    _fuzz(5000, seed=7, trust=trust)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_million_broken_messages_break_nothing(seed: int) -> None:
    _fuzz(100_000, seed=seed, trust=seed % 2 == 0)
