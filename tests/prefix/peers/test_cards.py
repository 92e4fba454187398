from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from kakeya.fleet.cards.cards import CacheOffer, Offer
from kakeya.fleet.cards.convert import from_wire, to_wire
from kakeya.prefix.peers.cards import LOOK_S, MAX_OWN_CACHES, REFRESH_S, OwnCaches, holders
from kakeya.prefix.peers.filter import MAX_BYTES, Filter
from tests.prefix.peers import world as w


def sources(blocks: int = 3, kinds: int = 1) -> w.Sources:
    made = w.Sources()
    for n in range(kinds):
        kind = w.fingerprint(weights_digest=f"w{n}") if n else w.fingerprint()
        made.add(kind, w.MemorySource(w.chain(blocks, kind), size=10))
    return made


def a_card(node_id: str, caches: tuple[CacheOffer, ...]):
    offer = Offer(grpc_address=f"{node_id}:1", caches=caches)
    return from_wire(to_wire(node_id, offer, incarnation=1, announced_at=1.0))


def found(cards, blocks: int = 6, have: int = 0, kind=None):
    kind = kind or w.fingerprint()
    ids = w.chain(blocks, kind)
    all_found = holders(cards, kind, ids, have, address_of=lambda card: card.grpc_address)
    return {holder.node_id: holder.blocks for holder in all_found}


def own_card(blocks: int, node_id: str = "n"):
    own = OwnCaches(sources(blocks))
    own.refresh(0.0, nodes=1)
    return a_card(node_id, own.offered)


def test_a_card_names_the_blocks_that_are_here():
    cards = [own_card(3, "a"), own_card(5, "b"), own_card(0, "c"), a_card("d", ())]
    assert found(cards) == {"a": 3, "b": 5}
    assert found(cards, have=3) == {"b": 5}
    assert found(cards, have=5) == {}


def test_of_another_kind_of_kv_a_card_names_nothing():
    assert found([own_card(3)], kind=w.fingerprint(layout="other")) == {}


FULL = b"\x01\x01" + b"\xff" * 64


@pytest.mark.parametrize("packed", [b"", b"rubbish", b"\x09\x01" + bytes(64), FULL], ids=repr)
def test_a_cache_without_a_filter_that_can_be_read_may_hold_anything(packed):
    compatibility = w.fingerprint().to_wire().SerializeToString(deterministic=True)
    assert found([a_card("n", (CacheOffer(compatibility, packed),))]) == {"n": 0}


@pytest.mark.parametrize("compatibility", [b"", b"\xff\xff"], ids=repr)
def test_what_is_no_fingerprint_is_passed_over(compatibility):
    @dataclass
    class Odd:
        node_id: str
        caches: tuple[CacheOffer, ...]
        grpc_address: str = "x:1"

    assert found([Odd("n", (CacheOffer(compatibility, b""),))]) == {}


def test_a_node_that_may_not_be_called_is_no_holder():
    ids = w.chain(3)
    assert holders([own_card(3)], w.fingerprint(), ids, 0, address_of=lambda card: "") == []


def test_the_card_is_made_anew_when_it_is_time_and_something_changed():
    made = sources(3)
    own = OwnCaches(made)
    assert own.refresh(0.0, nodes=1)
    source = made.source(w.fingerprint().exact())
    assert source is not None
    source.blocks.update(w.MemorySource(w.chain(5), size=10).blocks)
    assert not own.refresh(REFRESH_S - 1, nodes=1)
    assert own.refresh(REFRESH_S, nodes=1)
    assert own.epoch == 2
    assert not own.refresh(10 * REFRESH_S, nodes=1)
    source.blocks.popitem()
    assert not own.refresh(10 * REFRESH_S + LOOK_S - 1, nodes=1)
    assert own.refresh(10 * REFRESH_S + LOOK_S, nodes=1)
    source.blocks.clear()
    assert not own.refresh(20 * REFRESH_S, nodes=32 * 20)
    assert own.refresh(20 * REFRESH_S, nodes=32)
    assert own.offered == ()


def test_all_filters_together_are_no_larger_than_one_may_be():
    own = OwnCaches(sources(blocks=2000, kinds=6))
    own.refresh(0.0, nodes=1)
    assert len(own.offered) == MAX_OWN_CACHES
    assert sum(len(cache.filter) for cache in own.offered) <= MAX_BYTES + 2 * MAX_OWN_CACHES
    assert len(a_card("n", own.offered).wire) < 8192 // 2


def test_of_more_blocks_than_it_holds_a_filter_names_the_first_told_and_few_that_are_not_here():
    own = OwnCaches(sources(blocks=4000))
    own.refresh(0.0, nodes=1)
    names = Filter.from_bytes(own.offered[0].filter)
    ids = w.chain(4000)
    assert all(names.may_hold(block_id) for block_id in ids[:1600])
    rng = random.Random(1)
    wrong = sum(names.may_hold(rng.randbytes(32)) for _ in range(4000))
    assert wrong / 4000 < 0.02
