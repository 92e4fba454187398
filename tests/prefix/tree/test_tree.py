"""What a tree of prefixes finds, what it lets go, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument
from kakeya.core.units import MIB, pack_ids
from kakeya.generation.retention import BlockClass, Retention
from kakeya.prefix.names.blocks import BlockChain
from kakeya.prefix.tree.answer import Insertion
from kakeya.prefix.tree.eviction import Age
from kakeya.prefix.tree.node import BlockFacts
from kakeya.prefix.tree.tree import MAX_TAILS, PrefixTree

SIZE = 4
CHAIN = BlockChain(bytes(32), SIZE)


def facts_of(tokens: list[int], **changed: object) -> BlockFacts:
    facts: dict[str, object] = {"nbytes": MIB, "recompute_s": 1.0, **changed}
    return BlockFacts(token_ids=pack_ids(tokens), **facts)  # type: ignore[arg-type]


class Shelf:
    """A tree, and histories by name: their ids, tails included."""

    def __init__(self, age: Age | None = None) -> None:
        self.tree: PrefixTree[str] = PrefixTree(SIZE, age=age)

    def ids(self, history: list[int]) -> list[bytes]:
        ids = list(CHAIN.ids(history))
        rest = history[len(ids) * SIZE :]
        return [*ids, CHAIN.tail_id(ids[-1] if ids else None, rest)] if rest else ids

    def put(self, history: list[int], now: float = 0.0, **changed: object) -> list[Insertion[str]]:
        ids = self.ids(history)
        return [
            self.tree.insert(
                ids,
                index,
                f"{index}@{now:g}",
                facts_of(history[index * SIZE : (index + 1) * SIZE], **changed),
                now,
            )
            for index in range(len(ids))
        ]

    def store(self, history: list[int], **changed: object) -> list[bool]:
        ids = self.ids(history)
        return [
            self.tree.stored(
                block_id,
                ids[index - 1] if index else None,
                facts_of(history[index * SIZE : (index + 1) * SIZE], **changed),
                0.0,
            )
            for index, block_id in enumerate(ids)
        ]


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


LONG = list(range(12))  # three blocks


def test_nothing_is_found_in_an_empty_tree(shelf: Shelf) -> None:
    assert shelf.tree.match(shelf.ids(LONG)).nodes == ()
    assert shelf.tree.tail(None, LONG) is None
    assert shelf.tree.victims(1) == []


def test_a_history_finds_what_it_shares_with_another(shelf: Shelf) -> None:
    shelf.put(LONG)
    found = shelf.tree.match(shelf.ids([*LONG[:8], 99, 99, 99, 99]))
    assert (found.depth_ram, found.depth_disk) == (2, 2)
    assert [node.payload for node in found.nodes] == ["0@0", "1@0"]


def test_a_block_without_the_one_before_it_is_refused(shelf: Shelf) -> None:
    ids = shelf.ids(LONG)
    assert not shelf.tree.insert(ids, 1, "p", facts_of(LONG[4:8]), 0.0)
    assert not shelf.tree.stored(ids[1], ids[0], facts_of(LONG[4:8]), 0.0)
    assert len(shelf.tree) == 0


def test_a_block_that_is_in_ram_is_refused(shelf: Shelf) -> None:
    shelf.put(LONG)
    assert [bool(done) for done in shelf.put(LONG)] == [False] * 3


def test_what_comes_with_state_takes_the_place_of_what_lacks_it(shelf: Shelf) -> None:
    shelf.put(LONG)
    ids = shelf.ids(LONG)
    pin = shelf.tree.pin(ids)
    assert pin is not None
    facts = facts_of(LONG[4:8], nbytes=3 * MIB, has_state=True)
    done = shelf.tree.insert(ids, 1, "with state", facts, 1.0)
    assert (done.taken, done.replaced) == (True, "1@0")
    assert shelf.tree.match(ids, needs_state=True).depth_ram == 2
    assert shelf.tree.ram_bytes == 5 * MIB
    assert not shelf.tree.insert(ids, 1, "again", facts, 2.0)
    assert shelf.tree.victims(1) == []
    pin.unpin()
    assert order_of(shelf, 9 * MIB) == ["2@0", "with state", "0@0"]


def test_disk_carries_a_prefix_on_where_ram_ends(shelf: Shelf) -> None:
    shelf.store(LONG)
    shelf.put(LONG[:4])
    found = shelf.tree.match(shelf.ids(LONG))
    assert (found.depth_ram, found.depth_disk) == (1, 3)


def test_a_gap_in_ram_is_bridged_by_disk(shelf: Shelf) -> None:
    shelf.put(LONG)
    shelf.store(LONG)
    assert shelf.tree.lose(shelf.ids(LONG)[1]) == ()
    found = shelf.tree.match(shelf.ids(LONG))
    assert (found.depth_ram, found.depth_disk) == (1, 3)
    assert found.nodes[2].payload == "2@0"


def test_what_lies_behind_a_lost_block_is_given_back_the_hindmost_first(shelf: Shelf) -> None:
    shelf.put(LONG)
    gone = shelf.tree.lose(shelf.ids(LONG)[0])
    assert [one.payload for one in gone] == ["2@0", "1@0"]
    assert len(shelf.tree) == 0


def test_disk_behind_a_lost_block_is_found_again_once_that_is_back(shelf: Shelf) -> None:
    shelf.put(LONG)
    ids = shelf.ids(LONG)
    shelf.tree.stored(ids[2], ids[1], facts_of(LONG[8:]), 0.0)
    assert [(one.payload, one.stored) for one in shelf.tree.lose(ids[1])] == [("2@0", True)]
    assert shelf.tree.match(ids).depth_disk == 1
    shelf.tree.insert(ids, 1, "again", facts_of(LONG[4:8]), 1.0)
    assert shelf.tree.match(ids).depth_disk == 3


def test_a_file_that_is_lost_takes_what_is_behind_it_out_of_ram(shelf: Shelf) -> None:
    shelf.put(LONG)
    shelf.store(LONG[:4])
    ids = shelf.ids(LONG)
    assert shelf.tree.lose(ids[0]) == ()
    assert [one.id for one in shelf.tree.unstored(ids[0])] == [ids[2], ids[1]]


def test_disk_behind_what_is_nowhere_carries_nothing_on(shelf: Shelf) -> None:
    shelf.put(LONG)
    shelf.store(LONG)
    ids = shelf.ids(LONG)
    for block_id in reversed(ids):
        shelf.tree.lose(block_id)
    shelf.tree.unstored(ids[0])
    assert not shelf.tree.insert(ids, 2, "p", facts_of(LONG[8:]), 0.0)
    assert shelf.tree.tail(ids[1], pack_ids(LONG[8:])) is None
    assert len(shelf.tree) == 3


def test_a_gap_in_ram_that_is_filled_again_leaves_the_order_as_it_was(shelf: Shelf) -> None:
    shelf.put(LONG)
    shelf.store(LONG)
    ids = shelf.ids(LONG)
    shelf.tree.lose(ids[1])
    assert [node.id for node in shelf.tree.victims(99 * MIB)] == [ids[2], ids[0]]
    shelf.tree.insert(ids, 1, "again", facts_of(LONG[4:8]), 1.0)
    assert [node.id for node in shelf.tree.victims(99 * MIB)] == ids[::-1]
    shelf.tree.lose(ids[2])
    shelf.tree.lose(ids[1])
    assert [node.id for node in shelf.tree.victims(1)] == [ids[0]]


def test_a_recurrent_model_goes_on_where_state_was_kept(shelf: Shelf) -> None:
    shelf.put(LONG[:8], has_state=True)
    shelf.put(LONG)
    ids = shelf.ids(LONG)
    found = shelf.tree.match(ids, needs_state=True)
    assert (found.depth_ram, found.depth_disk, len(found.nodes)) == (2, 2, 2)
    shelf.tree.lose(ids[2])
    shelf.store(LONG)
    assert shelf.tree.match(ids).depth_disk == 3
    assert shelf.tree.match(ids, needs_state=True).depth_disk == 2


# --- tails


def test_the_rest_of_a_prompt_is_found_behind_its_blocks(shelf: Shelf) -> None:
    shelf.put([*LONG, 50, 51])
    ids = shelf.ids(LONG)
    found = shelf.tree.tail(ids[-1], pack_ids([50, 51, 52]))
    assert found == (shelf.ids([*LONG, 50, 51])[-1], 2)
    assert shelf.tree.tail(ids[-1], pack_ids([50, 60]))[1] == 1  # type: ignore[index]
    assert shelf.tree.tail(ids[-1], pack_ids([60])) is None
    assert shelf.tree.tail(ids[0], pack_ids([50, 51])) is None


def test_a_whole_block_serves_the_prompt_that_leaves_it_midway(shelf: Shelf) -> None:
    shelf.put(LONG)
    ids = shelf.ids(LONG)
    assert shelf.tree.tail(ids[1], pack_ids([8, 9, 10, 77, 78, 79])) == (ids[2], 3)


def test_a_tail_in_ram_is_preferred_to_one_on_disk_that_shares_as_much(shelf: Shelf) -> None:
    shelf.store([*LONG, 50, 51])
    shelf.put([*LONG, 50, 60])
    assert shelf.tree.tail(shelf.ids(LONG)[-1], pack_ids([50, 70])) == (
        shelf.ids([*LONG, 50, 60])[-1],
        1,
    )
    assert shelf.tree.tail(shelf.ids(LONG)[-1], pack_ids([50, 51])) == (
        shelf.ids([*LONG, 50, 51])[-1],
        2,
    )


@pytest.mark.parametrize("nearest", [[50, 51], [50, 70]])
def test_of_two_neighbours_the_one_that_shares_more_is_found(
    shelf: Shelf, nearest: list[int]
) -> None:
    shelf.put([*LONG, 50, 51])
    shelf.put([*LONG, 50, 70])
    for beyond in (0, 1, 99):
        found = shelf.tree.tail(shelf.ids(LONG)[-1], pack_ids([*nearest, beyond]))
        assert found == (shelf.ids([*LONG, *nearest])[-1], 2)


def test_a_tail_with_state_is_taken_whole_or_not_at_all(shelf: Shelf) -> None:
    shelf.put([*LONG, 50, 51], has_state=True)
    last = shelf.ids(LONG)[-1]
    assert shelf.tree.tail(last, pack_ids([50, 60]), needs_state=True) is None
    assert shelf.tree.tail(last, pack_ids([50, 51, 60]), needs_state=True) is not None
    shelf.put([*LONG, 50, 51, 52], has_state=True)  # which is no longer of use to [50, 51, 60]
    assert shelf.tree.tail(last, pack_ids([50, 51, 60]), needs_state=True)[1] == 2  # type: ignore[index]


def test_a_longer_tail_takes_the_place_of_its_beginning(shelf: Shelf) -> None:
    shelf.put([*LONG, 50])
    shelf.store([*LONG, 50])
    done = shelf.put([*LONG, 50, 51], now=1.0)[-1]
    assert [(one.id, one.payload, one.stored) for one in done.dropped] == [
        (shelf.ids([*LONG, 50])[-1], "3@0", True)
    ]
    assert not shelf.put([*LONG, 50])[-1], "all of it is in RAM"


def test_a_whole_block_takes_the_place_of_its_beginning(shelf: Shelf) -> None:
    shelf.put([*LONG, 50])
    done = shelf.put([*LONG, 50, 51, 52, 53])[-1]
    assert [one.payload for one in done.dropped] == ["3@0"]


def test_a_pinned_tail_stays_though_it_is_needless(shelf: Shelf) -> None:
    shelf.put([*LONG, 50])
    pin = shelf.tree.pin(shelf.ids([*LONG, 50]))
    assert pin is not None
    assert shelf.put([*LONG, 50, 51])[-1].dropped == ()


def test_a_pin_keeps_no_needless_tail_that_was_lost_to_disk(shelf: Shelf) -> None:
    shelf.put([*LONG, 50])
    shelf.store([*LONG, 50])
    ids = shelf.ids([*LONG, 50])
    pin = shelf.tree.pin(ids)
    assert pin is not None
    shelf.tree.lose(ids[-1])
    done = shelf.put([*LONG, 50, 51])[-1]
    assert [(one.id, one.payload, one.stored) for one in done.dropped] == [(ids[-1], None, True)]
    pin.unpin()
    assert shelf.tree.node(ids[-1]) is None


def test_the_oldest_of_too_many_tails_goes(shelf: Shelf) -> None:
    for number in range(MAX_TAILS):
        shelf.put([*LONG, 50 + number], now=number)
    shelf.tree.touch(shelf.ids([*LONG, 50]), 100.0)
    done = shelf.put([*LONG, 99], now=101.0)[-1]
    assert [one.payload for one in done.dropped] == ["3@1"]
    assert shelf.tree.stats().tails == MAX_TAILS


def test_disk_takes_each_tail_that_is_known_and_no_more_than_the_most(shelf: Shelf) -> None:
    for number in range(MAX_TAILS):
        shelf.put([*LONG, 50 + number])
    assert all(shelf.store([*LONG, 50 + number])[-1] for number in range(MAX_TAILS))
    assert not shelf.store([*LONG, 99])[-1]
    assert shelf.tree.stats().tails == MAX_TAILS


def test_a_tail_that_replaces_another_costs_no_third_one_its_place(shelf: Shelf) -> None:
    for number in range(MAX_TAILS):
        shelf.put([*LONG, 50 + number], now=number)
    done = shelf.put([*LONG, 50 + MAX_TAILS - 1, 9], now=9.0)[-1]
    assert [one.payload for one in done.dropped] == [f"3@{MAX_TAILS - 1}"]


def test_a_block_is_what_lies_in_ram_or_else_on_disk(shelf: Shelf) -> None:
    """Computed again, it may carry the state that its file lacks."""
    ids = shelf.ids(LONG[:4])
    shelf.store(LONG[:4])
    node = shelf.tree.node(ids[0])
    assert node is not None

    def is_counted() -> tuple[bool, bool, int, int]:
        bytes_of = shelf.tree.stats()
        return node.has_state, node.is_written, bytes_of.ram_bytes, bytes_of.disk_bytes

    assert is_counted() == (False, True, 0, MIB)
    shelf.put(LONG[:4], nbytes=5 * MIB, has_state=True)
    assert is_counted() == (True, False, 5 * MIB, MIB)
    assert shelf.tree.match(ids, needs_state=True).depth_ram == 1
    shelf.tree.lose(ids[0])
    assert is_counted() == (False, True, 0, MIB)
    assert shelf.tree.match(ids, needs_state=True).depth_disk == 0
    shelf.put(LONG[:4], nbytes=5 * MIB, has_state=True)
    shelf.store(LONG[:4], nbytes=4 * MIB, has_state=True)
    assert is_counted() == (True, True, 5 * MIB, 4 * MIB)
    shelf.tree.lose(ids[0])
    assert shelf.tree.match(ids, needs_state=True).depth_disk == 1
    shelf.put(LONG[:4])
    assert is_counted() == (False, True, MIB, 4 * MIB)
    assert shelf.tree.match(ids, needs_state=True).depth_ram == 0
    shelf.tree.unstored(ids[0])
    assert is_counted() == (False, False, MIB, 0)


def test_what_only_a_poorer_copy_is_on_disk_of_is_worth_what_it_took_to_compute(
    shelf: Shelf,
) -> None:
    shelf.store([5, 5, 5, 5])
    shelf.put([5, 5, 5, 5], now=1.0, has_state=True)
    shelf.store([6, 6, 6, 6])
    shelf.put([6, 6, 6, 6], now=2.0)
    assert order_of(shelf, 1) == ["0@2"]


def test_nothing_lies_behind_a_tail(shelf: Shelf) -> None:
    shelf.put([0, 1])
    tail = shelf.ids([0, 1])[0]
    behind = CHAIN.tail_id(tail, [2])
    assert not shelf.tree.insert([tail, behind], 1, "p", facts_of([2]), 0.0)
    assert not shelf.tree.stored(behind, tail, facts_of([2]), 0.0)


# --- what goes


def order_of(shelf: Shelf, nbytes: int) -> list[str | None]:
    return [node.payload for node in shelf.tree.victims(nbytes)]


def test_the_end_of_a_history_goes_before_its_beginning(shelf: Shelf) -> None:
    shelf.put(LONG)
    assert order_of(shelf, 2 * MIB) == ["2@0", "1@0"]
    assert order_of(shelf, 99 * MIB) == ["2@0", "1@0", "0@0"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"block_class": BlockClass.SPECULATIVE}, {"block_class": BlockClass.ASSISTANT}),
        ({"block_class": BlockClass.ASSISTANT}, {"block_class": BlockClass.USER}),
        ({"block_class": BlockClass.TOOL}, {"block_class": BlockClass.SYSTEM}),
        ({"recompute_s": 1.0}, {"recompute_s": 2.0}),
        ({"nbytes": 2 * MIB}, {"nbytes": MIB}),
    ],
)
def test_what_is_worth_less_goes_first(
    shelf: Shelf, first: dict[str, object], second: dict[str, object]
) -> None:
    shelf.put([5, 5, 5, 5], now=2.0, **second)
    shelf.put([6, 6, 6, 6], now=1.0, **first)
    assert order_of(shelf, 1) == ["0@1"]


def test_a_tail_goes_before_a_block_that_is_like_it(shelf: Shelf) -> None:
    shelf.put([5, 5, 5, 5], now=1.0)
    shelf.put([6, 6, 6], now=2.0)
    assert order_of(shelf, 1) == ["0@2"]


def test_what_is_used_more_often_stays(shelf: Shelf) -> None:
    shelf.put([5, 5, 5, 5], now=1.0)
    shelf.put([6, 6, 6, 6], now=2.0)
    shelf.tree.touch(shelf.ids([5, 5, 5, 5]), 3.0)
    assert order_of(shelf, 1) == ["0@2"]


def test_what_disk_has_goes_before_what_would_have_to_be_computed(shelf: Shelf) -> None:
    shelf.put([5, 5, 5, 5], now=1.0)
    shelf.put([6, 6, 6, 6], now=2.0)
    shelf.store([6, 6, 6, 6])
    assert order_of(shelf, 1) == ["0@2"]
    shelf.tree.unstored(shelf.ids([6, 6, 6, 6])[0])
    assert order_of(shelf, 1) == ["0@1"]


def test_what_was_worth_much_goes_in_the_end_when_nobody_uses_it(shelf: Shelf) -> None:
    shelf.put([5, 5, 5, 5], recompute_s=10.0)
    for number in range(100):
        shelf.put([100 + number] * SIZE, now=1.0 + number)
        victim = shelf.tree.victims(1)[0]
        if victim.payload == "0@0":
            break
        shelf.tree.lose(victim.id)
    assert 8 <= number <= 11, "as long as ten others that are worth a tenth"


@pytest.mark.parametrize(("for_room", "first"), [(False, "0@2"), (True, "0@1")])
def test_what_goes_for_room_ages_the_others_and_what_expires_does_not(
    shelf: Shelf, for_room: bool, first: str
) -> None:
    shelf.put([5] * SIZE, recompute_s=100.0)
    shelf.put([6] * SIZE, now=1.0, recompute_s=2.0)
    shelf.tree.lose(shelf.ids([5] * SIZE)[0], for_room=for_room)
    shelf.put([7] * SIZE, now=2.0, recompute_s=1.0)
    assert order_of(shelf, 1) == [first]


@given(costs=st.lists(st.tuples(st.booleans(), st.floats(0.01, 9)), min_size=2, max_size=12))
def test_trees_that_share_an_age_have_one_order(costs: list[tuple[bool, float]]) -> None:
    """Whatever goes for room, nothing that stays in either tree is worth less."""
    age = Age()
    shelves = [Shelf(age), Shelf(age)]
    for number, (which, seconds) in enumerate(costs):
        shelves[which].put([number] * SIZE, recompute_s=seconds)
        if number % 3 < 2:
            continue
        heads = [(shelf.tree, shelf.tree.victims(1)) for shelf in shelves]
        tree, (victim,) = min(
            ((tree, plan) for tree, plan in heads if plan),
            key=lambda head: head[0].worth(head[1][0]),
        )
        least = tree.worth(victim)
        tree.lose(victim.id)
        left = [(shelf.tree, node) for shelf in shelves for node in shelf.tree]
        assert all(one.worth(node) >= least for one, node in left)
        # And what comes from now on, in either, is younger than what went.
        for index, shelf in enumerate(shelves):
            text = [1000 + 10 * number + index] * SIZE
            shelf.put(text, recompute_s=0.01)
            node = shelf.tree.node(shelf.ids(text)[0])
            assert node is not None
            assert shelf.tree.worth(node) > least


def test_what_is_used_again_is_as_young_as_what_comes(shelf: Shelf) -> None:
    shelf.put([5] * SIZE)
    shelf.put([6] * SIZE, recompute_s=100.0)
    shelf.tree.lose(shelf.ids([6] * SIZE)[0])
    shelf.put([7] * SIZE, now=1.0, recompute_s=1.5)
    assert order_of(shelf, 1) == ["0@0"]
    shelf.tree.touch(shelf.ids([5] * SIZE), 2.0)
    assert order_of(shelf, 1) == ["0@1"]


def test_what_is_pinned_stays_until_its_last_pin_ends(shelf: Shelf) -> None:
    shelf.put(LONG)
    ids = shelf.ids(LONG)
    one, other = shelf.tree.pin(ids[:2]), shelf.tree.pin(ids[:1])
    assert one is not None
    assert other is not None
    assert order_of(shelf, 99 * MIB) == ["2@0"]
    shelf.tree.lose(ids[2])
    with one:
        assert order_of(shelf, 1) == []
    assert order_of(shelf, 99 * MIB) == ["1@0"]
    other.unpin()
    assert order_of(shelf, 99 * MIB) == ["1@0", "0@0"]


def test_a_pinned_end_stays_and_with_it_its_beginning(shelf: Shelf) -> None:
    shelf.put(LONG)
    pin = shelf.tree.pin(shelf.ids(LONG))
    assert pin is not None
    assert order_of(shelf, 99 * MIB) == []
    pin.unpin()
    assert order_of(shelf, 99 * MIB) == ["2@0", "1@0", "0@0"]


def test_only_what_is_in_ram_from_the_beginning_can_be_pinned(shelf: Shelf) -> None:
    shelf.put(LONG)
    shelf.store(LONG)
    ids = shelf.ids(LONG)
    with pytest.raises(InvalidArgument, match="pin from the beginning on"):
        shelf.tree.pin(ids[1:])
    shelf.tree.lose(ids[0])
    assert shelf.tree.pin(ids) is None
    assert shelf.tree.pin([*ids, b"x" * 32]) is None


def test_a_use_makes_the_beginning_the_youngest(shelf: Shelf) -> None:
    shelf.put(LONG)
    used = shelf.tree.touch(shelf.ids(LONG), 5.0)
    assert [node.payload for node in used] == ["2@0", "1@0", "0@0"]


def test_a_use_leaves_the_heavier_class_and_the_longer_window(shelf: Shelf) -> None:
    shelf.put(LONG, block_class=BlockClass.TOOL, retention=Retention.LONG)
    shelf.tree.touch(shelf.ids(LONG), 5.0, block_class=BlockClass.SYSTEM)
    node = shelf.tree.node(shelf.ids(LONG)[0])
    assert node is not None
    assert (node.block_class, node.retention) == (BlockClass.SYSTEM, Retention.LONG)


@pytest.mark.parametrize("retention", Retention)
def test_a_prefix_stays_its_window_and_no_longer(shelf: Shelf, retention: Retention) -> None:
    shelf.put(LONG, retention=retention)
    assert shelf.tree.expired(retention.seconds) == []
    assert [n.payload for n in shelf.tree.expired(retention.seconds + 0.1)] == ["2@0", "1@0", "0@0"]


def test_a_prefix_stays_as_long_as_what_is_behind_it(shelf: Shelf) -> None:
    shelf.put(LONG[:8])
    shelf.put(LONG, retention=Retention.LONG)
    assert shelf.tree.expired(Retention.LONG.seconds) == []


# --- what cannot be meant


def test_a_block_of_other_tokens_or_behind_another_is_refused(shelf: Shelf) -> None:
    shelf.put(LONG)
    ids = shelf.ids(LONG)
    shelf.tree.lose(ids[2])
    shelf.tree.stored(ids[2], ids[1], facts_of(LONG[8:]), 0.0)
    with pytest.raises(InvalidArgument, match="comes with other tokens"):
        shelf.tree.insert(ids, 2, "p", facts_of([9, 9, 9, 9]), 0.0)
    with pytest.raises(InvalidArgument, match="is not behind"):
        shelf.tree.insert([ids[0], ids[2]], 1, "p", facts_of(LONG[8:]), 0.0)
    with pytest.raises(InvalidArgument, match="block 3 of 3 ids"):
        shelf.tree.insert(ids, 3, "p", facts_of(LONG[8:]), 0.0)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"nbytes": 0}, "a block of 0 bytes"),
        ({"recompute_s": -1.0}, "recompute_s of a block is -1.0"),
        ({"recompute_s": float("nan")}, "recompute_s of a block is nan"),
    ],
)
def test_facts_that_cannot_be_are_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        facts_of([1], **wrong)
    with pytest.raises(InvalidArgument, match="must take 4 each"):
        BlockFacts(token_ids=b"\1\2\3", nbytes=1)


def test_a_block_has_no_more_tokens_than_those_of_the_tree(shelf: Shelf) -> None:
    with pytest.raises(InvalidArgument, match="a block of 5 tokens; those of this tree have 4"):
        shelf.tree.insert([b"x" * 32], 0, "p", facts_of([1] * 5), 0.0)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), min_size=1, max_size=60))
def test_under_a_budget_bytes_are_bounded_and_the_rest_is_whole(
    asked: list[tuple[int, int]],
) -> None:
    """As an owner with room for ten blocks does it: evict what is short, then insert."""
    shelf, budget = Shelf(), 10 * MIB
    for now, (start, blocks) in enumerate(asked):
        history = [start, *range(blocks * SIZE - 1)]
        ids = shelf.ids(history)
        shelf.tree.touch(ids, now)
        for index in range(shelf.tree.match(ids).depth_ram, blocks):
            pin = shelf.tree.pin(ids[:index])
            assert pin is not None
            with pin:
                for node in shelf.tree.victims(shelf.tree.ram_bytes + MIB - budget):
                    assert shelf.tree.lose(node.id) == ()
            tokens = history[index * SIZE : (index + 1) * SIZE]
            assert shelf.tree.insert(ids, index, "p", facts_of(tokens), now)
            assert shelf.tree.ram_bytes <= budget
        assert shelf.tree.match(ids).depth_ram == blocks


def test_batch_blocks_go_before_all_others_the_least_of_them_first_until_another_class_uses_them(
    shelf: Shelf,
) -> None:
    other, dear, cheap = [5, 5, 5, 5], [6, 6, 6, 6], [7, 7, 7, 7]
    shelf.put(other, now=1.0, recompute_s=0.01)
    shelf.put(dear, now=2.0, recompute_s=100.0, block_class=BlockClass.BATCH)
    shelf.put(cheap, now=3.0, recompute_s=1.0, block_class=BlockClass.BATCH)
    assert order_of(shelf, 99 * MIB) == ["0@3", "0@2", "0@1"]
    shelf.tree.touch(shelf.ids(dear), 4.0, block_class=BlockClass.USER)
    assert order_of(shelf, 99 * MIB) == ["0@3", "0@1", "0@2"]
