"""The laws of the tree, held against any order of calls.

A plain model knows which ids are in RAM and on disk, and derives everything else by walking from
each block to its beginning. The tree must agree with it after every step: nothing in RAM that
cannot be reached, nothing kept that nobody can find, no byte lost, no pinned victim, parents after
their children.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kakeya.core.units import pack_ids
from kakeya.generation.retention import BlockClass, Retention
from kakeya.prefix.names.blocks import BlockChain
from kakeya.prefix.tree.answer import Gone, Pin
from kakeya.prefix.tree.node import BlockFacts, Node
from kakeya.prefix.tree.tree import MAX_TAILS, PrefixTree

SIZE = 4
CHAIN = BlockChain(bytes(32), SIZE)
# Few blocks, so that histories share prefixes, and more tails than one block may have.
BEGINNINGS = st.lists(st.sampled_from((0, 1)), max_size=3).map(
    lambda kinds: [kind for kind in kinds for _ in range(SIZE)]
)
TAILS = st.sampled_from(((), (), (0,), (0, 0), (0, 1), (1, 1), (2,), (3,), (4,), (5,)))
HISTORIES = st.builds(lambda start, tail: [*start, *tail], BEGINNINGS, TAILS).filter(bool)


@dataclass
class Known:
    """What the model was told of one id; with and without state it lies in other facts."""

    parent: bytes | None
    tokens: tuple[int, ...]
    index: int
    in_ram: BlockFacts | None = None
    on_disk: BlockFacts | None = None


def chain_of(history: list[int]) -> list[bytes]:
    """Ids of the whole blocks and of the tail, if there is one."""
    ids = list(CHAIN.ids(history))
    rest = history[len(ids) * SIZE :]
    return [*ids, CHAIN.tail_id(ids[-1] if ids else None, rest)] if rest else ids


class Tree(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.tree: PrefixTree[int] = PrefixTree(SIZE)
        self.now = 0.0
        self.payloads = 0
        self.known: dict[bytes, Known] = {}
        self.ram: dict[bytes, int] = {}
        self.disk: set[bytes] = set()
        self.pins: list[Pin[int]] = []

    # --- the model

    def path(self, block_id: bytes | None) -> list[bytes]:
        """The ids from the beginning to this one."""
        found: list[bytes] = []
        while block_id is not None:
            found.append(block_id)
            block_id = self.known[block_id].parent
        return found[::-1]

    def here(self, block_id: bytes) -> bool:
        return block_id in self.ram or block_id in self.disk

    def reached(self, block_id: bytes | None) -> bool:
        return all(map(self.here, self.path(block_id)))

    def kept(self) -> set[bytes]:
        """What the tree must know: what is here, and all before it."""
        return {above for one in {*self.ram, *self.disk} for above in self.path(one)}

    def pinned(self) -> set[bytes]:
        """What is in RAM and pinned; a pin says nothing of a copy of what was lost."""
        return {
            node.id
            for pin in self.pins
            for node in pin.nodes
            if node.id in self.ram and self.tree.node(node.id) is node
        }

    def under(self, parent: bytes | None) -> set[bytes]:
        return {one for one in self.kept() if self.known[one].parent == parent}

    def is_tail(self, block_id: bytes) -> bool:
        return len(self.known[block_id].tokens) < SIZE

    def leave(self, gone: tuple[Gone[int], ...]) -> None:
        """Take out what the tree said can no longer be reached; it must be all of that."""
        unreached = {one for one in self.ram if not self.reached(one)}
        assert {one.id for one in gone} == unreached
        assert len(gone) == len(unreached)
        for place, one in enumerate(gone):
            assert one.payload == self.ram.pop(one.id)
            assert one.stored == (one.id in self.disk)
            later = {other.id for other in gone[place + 1 :]}
            assert later.isdisjoint(other for other in later if one.id in self.path(other))

    # --- steps

    def learn(self, history: list[int], facts: BlockFacts | None = None) -> list[bytes]:
        ids = chain_of(history)
        for index, block_id in enumerate(ids):
            tokens = tuple(history[index * SIZE : (index + 1) * SIZE])
            parent = ids[index - 1] if index else None
            self.known.setdefault(block_id, Known(parent, tokens, index))
        return ids

    def facts_of(self, block_id: bytes, nbytes: int, cost: int, state: bool) -> BlockFacts:
        return BlockFacts(
            token_ids=pack_ids(self.known[block_id].tokens),
            nbytes=nbytes,
            recompute_s=float(cost),
            has_state=state,
            block_class=list(BlockClass)[cost % len(BlockClass)],
            retention=list(Retention)[nbytes % len(Retention)],
        )

    def has_state(self, block_id: bytes) -> bool:
        """Whether state lies in RAM, or else on disk."""
        known = self.known[block_id]
        facts = known.in_ram if block_id in self.ram else known.on_disk
        return facts is not None and facts.has_state

    @rule(history=HISTORIES, nbytes=st.integers(1, 9), cost=st.integers(0, 9), state=st.booleans())
    def compute(self, history: list[int], nbytes: int, cost: int, state: bool) -> None:
        """Insert a history from its beginning, as after a prefill."""
        for index in range(len(self.learn(history))):
            self.insert(history, index, nbytes, cost, state)

    @rule(
        history=HISTORIES,
        index=st.integers(0, 4),
        nbytes=st.integers(1, 9),
        cost=st.integers(0, 9),
        state=st.booleans(),
    )
    def insert(self, history: list[int], index: int, nbytes: int, cost: int, state: bool) -> None:
        ids = self.learn(history)
        index = min(index, len(ids) - 1)
        block_id, parent = ids[index], self.known[ids[index]].parent
        facts = self.facts_of(block_id, nbytes, cost, state)
        covered = (
            self.is_tail(block_id)
            and not facts.has_state
            and any(
                other in self.ram
                and other != block_id
                and self.known[other].tokens[: facts.tokens] == self.known[block_id].tokens
                for other in self.under(parent)
            )
        )
        is_there = block_id in self.ram and self.has_state(block_id) >= facts.has_state
        self.payloads += 1
        done = self.tree.insert(ids, index, self.payloads, facts, self.now)
        assert bool(done) == (not is_there and self.reached(parent) and not covered)
        if not done:
            assert (done.dropped, done.replaced) == ((), None)
            return
        assert done.replaced == self.ram.get(block_id)
        self.ram[block_id] = self.payloads
        self.known[block_id].in_ram = facts
        self.check_dropped(done.dropped, block_id)

    def check_dropped(self, dropped: tuple[Gone[int], ...], newest: bytes) -> None:
        parent, tokens = self.known[newest].parent, self.known[newest].tokens
        tails = {one for one in self.under(parent) if self.is_tail(one)}
        pinned = self.pinned()
        needless = {
            one
            for one in tails - pinned - {newest}
            if not self.has_state(one)
            and tokens[: len(self.known[one].tokens)] == self.known[one].tokens
        }
        for one in dropped:
            assert one.id in tails - pinned - {newest}
            assert one.payload == self.ram.pop(one.id, None)
            assert one.stored == (one.id in self.disk)
            self.disk.discard(one.id)
        assert needless <= {one.id for one in dropped}
        left = tails - {one.id for one in dropped}
        if self.is_tail(newest):
            assert len(left) <= MAX_TAILS or left <= pinned | {newest}
            assert len(left) >= min(MAX_TAILS, len(tails - needless))
        else:
            assert {one.id for one in dropped} == needless

    @precondition(lambda self: self.kept() - self.ram.keys())
    @rule(data=st.data())
    def read_back(self, data: st.DataObject) -> None:
        """Insert a block that is only on disk, or that is missing between others."""
        absent = sorted(self.kept() - self.ram.keys())
        path = self.path(data.draw(st.sampled_from(absent)))
        history = [token for one in path for token in self.known[one].tokens]
        self.insert(history, len(path) - 1, 1, 1, False)

    @precondition(lambda self: self.ram)
    @rule(data=st.data())
    def write_through(self, data: st.DataObject) -> None:
        """Store what is in RAM, from its beginning."""
        for block_id in self.path(data.draw(st.sampled_from(sorted(self.ram)))):
            self.store_block(block_id, 1, self.has_state(block_id))

    @rule(history=HISTORIES, index=st.integers(0, 4), nbytes=st.integers(1, 9), state=st.booleans())
    def store(self, history: list[int], index: int, nbytes: int, state: bool) -> None:
        ids = self.learn(history)
        self.store_block(ids[min(index, len(ids) - 1)], nbytes, state)

    def store_block(self, block_id: bytes, nbytes: int, state: bool) -> None:
        parent = self.known[block_id].parent
        tails = sum(map(self.is_tail, self.under(parent)))
        full = self.is_tail(block_id) and block_id not in self.kept() and tails >= MAX_TAILS
        allowed = (parent is None or parent in self.kept()) and not full
        facts = self.facts_of(block_id, nbytes, 1, state)
        assert self.tree.stored(block_id, parent, facts, self.now) == allowed
        if allowed:
            self.disk.add(block_id)
            self.known[block_id].on_disk = facts

    @precondition(lambda self: self.disk)
    @rule(data=st.data())
    def unstore(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.disk)))
        self.disk.discard(block_id)
        self.leave(self.tree.unstored(block_id))

    @precondition(lambda self: self.ram)
    @rule(data=st.data(), for_room=st.booleans())
    def lose(self, data: st.DataObject, for_room: bool) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.ram)))
        del self.ram[block_id]
        self.leave(self.tree.lose(block_id, for_room=for_room))

    @rule(nbytes=st.integers(0, 40))
    def evict(self, nbytes: int) -> None:
        before = dict(self.ram)
        chosen = self.tree.victims(nbytes)
        again = self.tree.victims(nbytes)
        assert [node.id for node in chosen] == [node.id for node in again], "a question changed it"
        assert len(set(chosen)) == len(chosen)
        freed = 0
        for node in chosen:
            assert freed < nbytes, "more than was asked for"
            assert node.id not in self.pinned()
            assert self.worth(node) == min(map(self.worth, self.leaves())), "not the least worth"
            freed += node.nbytes
            del self.ram[node.id]
            behind = {one for one in self.ram if node.id in self.path(one)}
            assert not behind, "went while what is behind it stays"
            assert self.tree.lose(node.id) == ()
        assert freed >= nbytes or not self.may_go(), f"{before} could give more than {freed}"

    def worth(self, node: Node[int]) -> float:
        return self.tree._order.worth(node)

    def leaves(self) -> list[Node[int]]:
        """What can go now: in RAM, not pinned, and nothing behind it in RAM."""
        behind = {above for one in self.ram for above in self.path(one)[:-1]}
        return [self.node(one) for one in self.may_go() - behind]

    def may_go(self) -> set[bytes]:
        held = {above for one in self.pinned() for above in self.path(one)}
        return set(self.ram) - held

    @rule(history=HISTORIES, passed=st.integers(0, 400), block_class=st.sampled_from(BlockClass))
    def touch(self, history: list[int], passed: int, block_class: BlockClass) -> None:
        self.now += passed
        ids = self.learn(history)
        known = self.kept()
        length = next((n for n, one in enumerate(ids) if one not in known), len(ids))
        used = self.tree.touch(ids, self.now, block_class=block_class)
        assert [node.id for node in used] == [i for i in reversed(ids[:length]) if i in self.ram]
        for block_id in ids[:length]:
            node = self.node(block_id)
            assert node.used_s == self.now
            assert node.block_class.weight >= block_class.weight

    @rule(history=HISTORIES)
    def pin_history(self, history: list[int]) -> None:
        self.pin_all(self.learn(history))

    @precondition(lambda self: self.ram)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        self.pin_all(self.path(data.draw(st.sampled_from(sorted(self.ram)))))

    def pin_all(self, ids: list[bytes]) -> None:
        pin = self.tree.pin(ids)
        assert (pin is not None) == all(one in self.ram for one in ids)
        if pin is not None:
            self.pins.append(pin)

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), twice=st.booleans())
    def unpin(self, data: st.DataObject, twice: bool) -> None:
        pin = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        pin.unpin()
        if twice:
            pin.unpin()

    @rule(history=HISTORIES, state=st.booleans())
    def match(self, history: list[int], state: bool) -> None:
        ids = self.learn(history)
        disk = next((n for n, one in enumerate(ids) if not self.here(one)), len(ids))
        ram = next((n for n, one in enumerate(ids) if one not in self.ram), len(ids))
        if state:
            disk, ram = (
                max((n for n in range(1, d + 1) if self.has_state(ids[n - 1])), default=0)
                for d in (disk, ram)
            )
        found = self.tree.match(ids, needs_state=state)
        assert (found.depth_ram, found.depth_disk) == (ram, disk)
        assert [node.id for node in found.nodes] == ids[:disk]
        assert [node.payload for node in found.nodes[:ram]] == [self.ram[i] for i in ids[:ram]]

    @rule(history=HISTORIES, state=st.booleans())
    def tail(self, history: list[int], state: bool) -> None:
        ids = CHAIN.ids(history)
        depth = self.tree.match(ids).depth_disk
        parent, rest = ids[depth - 1] if depth else None, history[depth * SIZE :]
        ranks: dict[bytes, tuple[int, bool]] = {}
        for one in self.under(parent):
            shared = 0
            tokens = self.known[one].tokens
            while shared < min(len(tokens), len(rest)) and tokens[shared] == rest[shared]:
                shared += 1
            usable = not state or (self.has_state(one) and shared == len(tokens))
            if shared and usable and self.here(one):
                ranks[one] = (shared, one in self.ram)
        found = self.tree.tail(parent, pack_ids(rest[:SIZE]), needs_state=state)
        if found is None:
            assert not ranks
        else:
            assert ranks[found[0]] == max(ranks.values())
            assert found[1] == ranks[found[0]][0]

    @rule(passed=st.integers(0, 4000))
    def expire(self, passed: int) -> None:
        self.now += passed
        found = self.tree.expired(self.now)
        for node in found:
            assert self.now - node.used_s > node.retention.seconds
            assert node.id not in self.pinned()
            del self.ram[node.id]
            assert not any(node.id in self.path(one) for one in self.ram)
            assert self.tree.lose(node.id, for_room=False) == ()
        for one in self.may_go():
            still = [o for o in self.ram if one in self.path(o)]
            assert any(
                o in self.pinned()
                or self.now - self.node(o).used_s <= self.node(o).retention.seconds
                for o in still
            ), "unseen for longer than its window, and all behind it too"

    # --- what always holds

    def node(self, block_id: bytes) -> Node[int]:
        node = self.tree.node(block_id)
        assert node is not None
        return node

    @invariant()
    def is_what_the_model_knows(self) -> None:
        assert {node.id for node in self.tree} == self.kept()
        assert {node.id: node.payload for node in self.tree if node.in_ram} == self.ram
        assert {node.id for node in self.tree if node.stored} == self.disk
        for node in self.tree:
            assert node.has_state == self.has_state(node.id) or not node.is_here
            on_disk = self.known[node.id].on_disk
            is_as_good = on_disk is not None and on_disk.has_state >= node.has_state
            assert node.is_written == (node.stored and is_as_good)

    @invariant()
    def everything_in_ram_is_reached(self) -> None:
        assert all(map(self.reached, self.ram))

    @invariant()
    def bytes_are_accounted(self) -> None:
        stats = self.tree.stats()
        assert stats.ram_blocks == len(self.ram)
        assert stats.disk_blocks == len(self.disk)
        assert stats.ram_bytes == self.tree.ram_bytes
        in_ram = [self.known[one].in_ram for one in self.ram]
        on_disk = [self.known[one].on_disk for one in self.disk]
        assert stats.ram_bytes == sum(facts.nbytes for facts in in_ram if facts is not None)
        assert stats.disk_bytes == sum(facts.nbytes for facts in on_disk if facts is not None)
        assert stats.tails == sum(map(self.is_tail, self.kept()))

    @invariant()
    def nodes_hang_together(self) -> None:
        live = {above for one in self.ram for above in self.path(one)}
        under: dict[bytes | None, set[bytes]] = {}
        for one in self.kept():
            under.setdefault(self.known[one].parent, set()).add(one)
        for node in self.tree:
            known, below = self.known[node.id], under.get(node.id, set())
            assert node.index == known.index
            assert (node.parent.id if node.index and node.parent else None) == known.parent
            assert node.live_children == len(below & live)
            assert {child.id for child in node.children} == below
            packed = [child.facts.token_ids for child in node.children]
            assert packed == sorted(packed)
            assert {child.id for child in node.tails} == set(filter(self.is_tail, below))
            assert not (node.is_tail and below)

    @invariant()
    def what_may_go_is_in_order(self) -> None:
        heap = {id(entry) for entry in self.tree._order._heap}
        for node in self.tree:
            assert (node.entry is not None) == node.may_go
            assert node.entry is None or id(node.entry) in heap

    @invariant()
    def what_is_pinned_is_pinned_from_its_beginning(self) -> None:
        for node in self.tree:
            assert node.pins >= sum(child.pins for child in node.children if child.in_ram)


class LongTree(Tree):
    """The same, at length."""


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=25, stateful_step_count=50, deadline=None)
TestTreeAtLength = pytest.mark.slow(LongTree.TestCase)
TestTreeAtLength.settings = settings(max_examples=1000, stateful_step_count=50, deadline=None)
