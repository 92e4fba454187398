"""Large messages are taken in slices, and mean the same as taken whole."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.units import MIB
from kakeya.fleet.cards.convert import (
    MAX_BATCH_BYTES,
    MAX_BATCH_CARDS,
    join_cards,
    scan_cards,
    split_cards,
)
from kakeya.fleet.cards.framing import write_number
from kakeya.fleet.gossip.messages import Parcel, encode_parcel
from kakeya.fleet.gossip.sync import Sync
from kakeya.fleet.view import merging
from kakeya.fleet.view.beats import no_beats
from kakeya.fleet.view.merging import SLICE_CARDS
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.fleet.view.slices import Slices, in_slices
from tests.fleet.nodes import NOW, make_registry, make_wire


def _strangers(count: int, platform: str) -> list[bytes]:
    return [make_wire(f"n{number:05}", platform=platform) for number in range(count)]


Taking = Callable[[Sync, list[bytes]], Slices[object]]
TAKING: dict[str, Taking] = {
    "full": lambda sync, wires: sync.answering_batch(join_cards(wires), now=NOW, mono=0.0),
    "push": lambda sync, wires: sync.taking(
        encode_parcel(Parcel(beats=no_beats(), cards=wires)), now=NOW, mono=0.0
    ),
}


@pytest.mark.parametrize("taking", TAKING.values(), ids=TAKING)
async def test_the_largest_message_leaves_the_loop_free_between_a_few_cards(
    taking: Taking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken whole it stalled the loop for 200 ms."""
    registry = make_registry()
    wires = _strangers(MAX_BATCH_CARDS, "x" * 240)
    assert 0.5 * MIB < len(join_cards(wires)) <= MAX_BATCH_BYTES
    taken = 0
    take = registry.peers.take

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal taken
        taken += 1
        return take(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(registry.peers, "take", counted)
    work = taking(Sync(registry, rng=random.Random(1)), wires)
    task = asyncio.create_task(in_slices(work))
    seen = [0]
    while not task.done():
        await asyncio.sleep(0)
        seen.append(taken)
    assert seen[-1] == MAX_BATCH_CARDS
    assert max(later - earlier for earlier, later in pairwise(seen)) <= SLICE_CARDS
    assert len(registry) == MAX_BATCH_CARDS


BATCHES = st.lists(
    st.builds(
        lambda node, at: make_wire(f"n{node}", at=NOW - at),
        st.integers(0, 6),
        st.integers(0, 3),
    ),
    max_size=12,
)


@given(BATCHES, BATCHES, st.lists(st.booleans(), max_size=30))
def test_merges_between_each_others_slices_give_the_view_of_one_after_the_other(
    one: list[bytes], two: list[bytes], turns: list[bool]
) -> None:
    def view(registry: CapabilityRegistry) -> list[bytes]:
        return [card.wire for card in registry.snapshot(mono=1.0)[1:]]

    whole, sliced = make_registry(), make_registry()
    for batch in (one, two):
        whole.merge(batch, now=NOW, mono=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "SLICE_CARDS", 1)
        works = [sliced.merging(batch, no_beats(), now=NOW, mono=0.0) for batch in (one, two)]
        for is_second in (*turns, *[False] * 30, *[True] * 30):
            next(works[is_second], None)
    assert view(sliced) == view(whole)


# --- quick reading means the same as careful reading


def _written(length: int, extra: int) -> bytes:
    """A length in as many bytes as one likes: protobuf reads leading zeros too."""
    number = bytearray(write_number(length))
    for _ in range(extra):
        number[-1] |= 0x80
        number.append(0)
    return bytes(number)


CARDS = st.tuples(st.binary(max_size=300), st.integers(0, 3))
OTHERS = st.sampled_from([b"\x78\x01", b"\x12\x03abc", b"\xfd\x06abcd", b"\x8a\x01\x00"])


@given(st.lists(CARDS | OTHERS, max_size=20))
def test_cards_are_found_however_their_lengths_are_written(
    fields: list[tuple[bytes, int] | bytes],
) -> None:
    cards = [field[0] for field in fields if isinstance(field, tuple)]
    message = b"".join(
        field
        if isinstance(field, bytes)
        else b"\x0a" + _written(len(field[0]), field[1]) + field[0]
        for field in fields
    )
    assert split_cards(message) == cards
    assert scan_cards(message, 1) == cards
