"""Which slot a prompt takes, and which are emptied for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kakeya.backends.llama.slots import SlotTable
from kakeya.core.units import pack_ids


def filled(table: SlotTable, tokens: list[int]) -> int:
    """Take a slot for a prompt, and leave it holding that."""
    slot = table.take(pack_ids(tokens))
    assert slot is not None
    slot.packed, slot.is_busy = pack_ids(tokens), False
    return slot.index


def test_a_prompt_goes_on_in_its_slot_and_a_new_one_takes_an_empty_one() -> None:
    table = SlotTable(3, 1000)
    first, other = list(range(100)), list(range(500, 600))
    assert filled(table, first) == 0
    assert filled(table, other) == 1
    assert filled(table, [*first, 7, 8]) == 0
    assert filled(table, [*other[:20], *range(50)]) == 1
    assert filled(table, [*other[:2], *range(900, 990)]) == 2  # too little of it is the same


def test_a_history_of_a_batch_goes_first_and_then_the_one_that_was_not_used_for_longest() -> None:
    table = SlotTable(3, 1000)
    for start in (0, 100, 200):
        filled(table, list(range(start, start + 50)))
    table.slots[2].is_passing = True
    assert filled(table, list(range(700, 750))) == 2
    table.slots[2].is_passing = False
    assert filled(table, list(range(800, 850))) == 0


def test_a_busy_slot_is_not_taken() -> None:
    table = SlotTable(2, 1000)
    tokens = pack_ids(range(10))
    taken = [table.take(tokens), table.take(tokens)]
    assert {slot.index for slot in taken if slot} == {0, 1}
    assert table.take(tokens) is None


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    busy=st.sets(st.integers(0, 5)),
    needed=st.integers(0, 120),
)
def test_what_is_emptied_makes_room_and_no_more_than_needed(
    lengths: list[int], busy: set[int], needed: int
) -> None:
    table = SlotTable(len(lengths), 100)
    for slot, length in zip(table.slots, lengths, strict=True):
        slot.packed = pack_ids(range(length))
        slot.used = length
        slot.is_busy = slot.index in busy
    chosen = table.slots[0]
    gone = table.leaving(chosen, needed)
    held = sum(slot.tokens for slot in table.slots[1:]) + needed
    freed = sum(slot.tokens for slot in gone)
    idle = [slot for slot in table.slots[1:] if slot.packed and not slot.is_busy]
    assert set(gone) <= set(idle)
    assert held - freed <= 100 or len(gone) == len(idle)
    assert not gone or held - (freed - gone[-1].tokens) > 100
    assert [slot.used for slot in gone] == sorted(slot.used for slot in gone)
