"""Who stays on disk, for how long, and who goes first: laws of the pure part."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kakeya.generation.retention import Retention
from kakeya.prefix.disk.index import (
    DiskIndex,
    FileEntry,
    IndexView,
    expired,
    name_of,
    parse_name,
    spent_lives,
    untold,
    victims,
)
from kakeya.prefix.disk.kvb import Head, HeaderSeal
from kakeya.prefix.names.blocks import ROOT, BlockId
from tests.prefix.disk.world import FINGERPRINT, block_of

OTHER = bytes(32)
NOW = 100_000.0


def entry_of(
    seed: int = 0,
    *,
    parent: BlockId = ROOT,
    index: int = 0,
    used_mono: float = NOW,
    retention: Retention = Retention.LONG,
    payload_bytes: int = 1000,
    fingerprint: bytes = FINGERPRINT,
) -> FileEntry:
    block, _ = block_of(
        seed, parent=parent, index=index, fingerprint=fingerprint, size=payload_bytes
    )
    seal = HeaderSeal(payload_at=64, part_crcs=())
    return FileEntry(
        head=Head(block=block, seal=seal),
        name=name_of(block.id, retention),
        retention=retention,
        used_mono=used_mono,
        told_mono=used_mono,
    )


def view_of(seed: int) -> IndexView:
    """A forest of blocks, some chains with gaps, some held, some of no use here."""
    rng = random.Random(seed)
    entries: list[FileEntry] = []
    for number in range(rng.randrange(13)):
        above = rng.choice([*entries, None])
        parent, index = (above.block.id, above.block.index + 1) if above else (ROOT, 0)
        if not rng.randrange(5):
            parent, index = bytes([number + 1]) * 32, index + 1  # it went before
        entries.append(
            entry_of(
                number,
                parent=parent,
                index=index,
                used_mono=NOW - rng.randrange(rng.choice([400, 4000, 90_000])),
                retention=rng.choice(list(Retention)),
                payload_bytes=rng.randint(1, 5000),
                fingerprint=above.block.fingerprint if above else rng.choice([FINGERPRINT, OTHER]),
            )
        )
    return IndexView(
        entries=tuple(entries),
        held=frozenset(entry.block.id for entry in entries if not rng.randrange(4)),
        usable=rng.choice([None, frozenset({FINGERPRINT})]),
    )


# Built from a seed: drawing every field of every entry takes a hundred times as long.
views = st.integers(0, 1 << 32).map(view_of)


def below(view: IndexView, entry: FileEntry) -> list[FileEntry]:
    children = [one for one in view.entries if one.block.parent == entry.block.id]
    return children + [one for child in children for one in below(view, child)]


def is_usable(view: IndexView, entry: FileEntry) -> bool:
    return view.usable is None or entry.block.fingerprint in view.usable


@given(views, st.integers(0, 40_000))
@settings(deadline=None)
def test_victims_free_what_is_needed_or_all_that_may_go(view: IndexView, need_bytes: int) -> None:
    chosen = victims(view, need_bytes, NOW)
    freed = sum(entry.size_bytes for entry in chosen)
    may_go = [entry for entry in view.entries if entry.block.id not in view.held]
    assert freed >= need_bytes or len(chosen) == len(may_go)
    assert not chosen or freed - chosen[-1].size_bytes < need_bytes, "not one more than needed"
    assert not {entry.block.id for entry in chosen} & view.held
    assert len({entry.block.id for entry in chosen}) == len(chosen)


@given(views)
@settings(deadline=None)
def test_no_block_goes_before_what_follows_it(view: IndexView) -> None:
    order = {entry.block.id: at for at, entry in enumerate(victims(view, 10**9, NOW))}
    for entry in view.entries:
        for later in below(view, entry):
            if {entry.block.id, later.block.id} <= order.keys():
                assert order[later.block.id] < order[entry.block.id]


@given(views)
@settings(deadline=None)
def test_blocks_that_no_model_here_can_use_go_first(view: IndexView) -> None:
    usable = [is_usable(view, entry) for entry in victims(view, 10**9, NOW)]
    assert usable == sorted(usable)


@given(views)
@settings(deadline=None)
def test_what_lives_keeps_its_whole_prefix_alive(view: IndexView) -> None:
    dead = {entry.block.id for entry in expired(view, NOW)}
    for entry in view.entries:
        family = [entry, *below(view, entry)]
        keeps = any(one.block.id in view.held or one.spent(NOW) <= 1.0 for one in family)
        assert (entry.block.id in dead) == (not keeps)


@given(views)
@settings(deadline=None)
def test_a_prefix_is_never_more_spent_than_what_follows_it(view: IndexView) -> None:
    spent = spent_lives(view, NOW)
    for entry in view.entries:
        assert spent[entry.block.id] <= entry.spent(NOW)
        for later in below(view, entry):
            assert spent[entry.block.id] <= spent[later.block.id]


@pytest.mark.parametrize("retention", Retention)
def test_a_block_expires_strictly_after_its_retention(retention: Retention) -> None:
    entry = entry_of(retention=retention)
    view = IndexView(entries=(entry,))
    assert expired(view, NOW + retention.seconds) == []
    assert expired(view, NOW + retention.seconds + 1) == [entry]
    assert expired(view, NOW - 1e9) == [], "a clock that ran back kills nothing"


def test_the_share_of_its_life_that_is_spent_says_who_goes_first() -> None:
    short = entry_of(1, retention=Retention.SHORT, used_mono=NOW - 60)  # 0.2 of its life
    long = entry_of(2, retention=Retention.LONG, used_mono=NOW - 360)  # 0.1
    extended = entry_of(3, retention=Retention.EXTENDED, used_mono=NOW - 72_000)  # 0.83
    view = IndexView(entries=(short, long, extended))
    assert victims(view, 3000, NOW) == [extended, short, long]
    assert victims(view, 0, NOW) == []


@given(st.binary(min_size=32, max_size=32), st.sampled_from(Retention))
@settings(deadline=None)
def test_a_name_is_safe_and_says_id_and_retention(block_id: bytes, retention: Retention) -> None:
    name = name_of(block_id, retention)
    assert parse_name(name) == (block_id, retention)
    assert name.isascii()
    assert name == name.lower()
    assert not {"/", "\\", "\0", ":"} & set(name)


@pytest.mark.parametrize("ending", [".kvb", ".weird.kvb", "..kvb", ".LONG.kvb"])
def test_a_name_without_a_retention_that_we_know_has_the_long_one(ending: str) -> None:
    assert parse_name("ab" * 32 + ending) == (b"\xab" * 32, Retention.LONG)


@pytest.mark.parametrize(
    "name",
    ["", "x.kvb", "ab" * 31 + ".long.kvb", "AB" * 32 + ".long.kvb", "ab" * 32 + ".a.b.kvb",
     "ab" * 32 + ".long.kvb.tmp", "ab" * 32, "ab" * 32 + ".long.kvb\n"],
)  # fmt: skip
def test_other_names_are_no_blocks(name: str) -> None:
    assert parse_name(name) is None


def test_a_use_is_told_to_the_file_once_it_matters() -> None:
    index = DiskIndex()
    entry = entry_of(retention=Retention.SHORT)
    index.add(entry)
    index.touch(entry.block.id, NOW + 37)  # an eighth of 300 s is 37.5
    assert untold(index.view()) == []
    touched = index.touch(entry.block.id, NOW + 38)
    assert touched is not None
    assert untold(index.view()) == [touched]
    index.told(touched, touched.name)
    assert untold(index.view()) == []
    longer = index.touch(entry.block.id, NOW + 38, Retention.EXTENDED)
    assert longer is not None
    assert untold(index.view()) == [longer], "its name says the shorter one"
    index.told(longer, name_of(entry.block.id, Retention.EXTENDED))
    assert untold(index.view()) == []


def test_only_what_is_still_as_it_was_seen_is_taken() -> None:
    index = DiskIndex()
    entry = entry_of()
    index.add(entry)
    index.touch(entry.block.id, NOW + 1)
    assert not index.take(entry), "it was used meanwhile"
    seen = index.get(entry.block.id)
    assert seen is not None
    index.hold([entry.block.id])
    assert not index.take(seen), "it is held meanwhile"
    index.let_go([entry.block.id])
    assert index.take(seen)
    assert not index.take(seen)


class Index(RuleBasedStateMachine):
    """An index beside a plain dict: bytes and tallies are conserved, retention only grows."""

    def __init__(self) -> None:
        super().__init__()
        self.index = DiskIndex()
        self.model: dict[BlockId, FileEntry] = {}
        self.holds: Counter[BlockId] = Counter()

    seeds = st.integers(0, 5)
    kinds = st.sampled_from(Retention)

    @rule(seed=seeds, kind=kinds, size=st.integers(1, 99), ours=st.booleans())
    def add(self, seed: int, kind: Retention, size: int, ours: bool) -> None:
        fingerprint = FINGERPRINT if ours else OTHER
        entry = entry_of(seed, retention=kind, payload_bytes=size, fingerprint=fingerprint)
        self.index.add(entry)
        self.model[entry.block.id] = entry

    @rule(seed=seeds)
    def drop(self, seed: int) -> None:
        block_id = entry_of(seed).block.id
        assert self.index.drop(block_id) == self.model.pop(block_id, None)

    @rule(seed=seeds, kind=st.none() | kinds, at=st.integers(-50, 50))
    def touch(self, seed: int, kind: Retention | None, at: int) -> None:
        block_id = entry_of(seed).block.id
        touched = self.index.touch(block_id, NOW + at, kind)
        known = self.model.get(block_id)
        assert (touched is None) == (known is None)
        if known is not None and touched is not None:
            self.model[block_id] = replace(
                known,
                used_mono=max(known.used_mono, NOW + at),
                retention=max(known.retention, kind or known.retention),
            )

    @rule(seeds=st.lists(seeds, max_size=4))
    def hold(self, seeds: list[int]) -> None:
        ids = [entry_of(seed).block.id for seed in seeds]
        self.index.hold(ids)
        self.holds.update(ids)

    @rule(seed=seeds)
    def let_go(self, seed: int) -> None:
        block_id = entry_of(seed).block.id
        if self.holds[block_id]:
            self.index.let_go([block_id])
            self.holds[block_id] -= 1

    @rule(seed=seeds)
    def take(self, seed: int) -> None:
        block_id = entry_of(seed).block.id
        seen = self.index.get(block_id)
        if seen is not None and self.index.take(seen):
            assert not self.holds[block_id]
            del self.model[block_id]

    @invariant()
    def nothing_is_lost_or_made(self) -> None:
        assert {entry.block.id: entry for entry in self.index} == self.model
        assert self.index.used_bytes == sum(entry.size_bytes for entry in self.model.values())
        kinds = Counter(entry.retention.label for entry in self.model.values())
        assert self.index.by_retention() == dict(kinds)
        for fingerprint, tally, _ in self.index.by_fingerprint():
            mine = [one for one in self.model.values() if one.block.fingerprint == fingerprint]
            assert (tally.blocks, tally.bytes) == (len(mine), sum(one.size_bytes for one in mine))
        assert self.index.view().held == {one for one, count in self.holds.items() if count}


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
