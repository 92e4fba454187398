import random
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kakeya.adapters.tiers import Adapter, AdapterTable, Move, Tier, TierRules
from kakeya.adapters.usage_window import AccessWindow
from kakeya.core.errors import Conflict, InvariantBroken, NotFound
from tests.laws import laws_of

BASE = "m"


def used(table: AdapterTable, adapter: Adapter, times: int, now: float) -> None:
    for _ in range(times):
        table.lease(adapter, now)
        table.release(adapter, now)


def filled(count: int, rules: TierRules | None = None) -> tuple[AdapterTable, list[Adapter]]:
    table = AdapterTable(rules)
    return table, [table.add(f"a{number}", BASE) for number in range(count)]


def carry_out(table: AdapterTable, moves: tuple[Move, ...]) -> None:
    for move in moves:
        adapter = table.get(move.adapter_id)
        match move.to:
            case Tier.HOT:
                if move.instead_of:
                    table.left_slot(table.get(move.instead_of))
                table.entered_slot(adapter)
            case Tier.WARM:
                table.entered_pages(adapter)
            case Tier.COLD:
                table.left_pages(adapter)


def test_ten_uses_in_a_minute_make_hot_one_makes_warm_none_makes_cold() -> None:
    table, (busy, nearly, seldom, never) = filled(4)
    used(table, busy, 10, 100.0)
    used(table, nearly, 9, 100.0)
    used(table, seldom, 1, 100.0)
    moves = table.rebalance(100.0, {BASE: 8})
    assert [(m.adapter_id, m.to) for m in moves] == [
        ("a0", Tier.WARM),
        ("a1", Tier.WARM),
        ("a2", Tier.WARM),
    ]
    ratings = [adapter.rating for adapter in (busy, nearly, seldom, never)]
    assert ratings == [Tier.HOT, Tier.WARM, Tier.WARM, Tier.COLD]


def test_who_deserves_a_slot_comes_into_pages_first() -> None:
    table, adapters = filled(2)
    for adapter in adapters:
        used(table, adapter, 10, 0.0)
    for tier in (Tier.WARM, Tier.HOT):
        moves = table.rebalance(0.0, {BASE: 2})
        assert [move.to for move in moves] == [tier] * 2
        carry_out(table, moves)
    assert table.rebalance(0.0, {BASE: 2}) == ()


def test_the_threshold_and_the_rank_must_both_hold() -> None:
    table, adapters = filled(5)
    for times, adapter in zip((50, 40, 30, 20, 3), adapters, strict=True):
        used(table, adapter, times, 0.0)
    table.rebalance(0.0, {BASE: 2})
    assert [a.rating for a in adapters] == [Tier.HOT] * 2 + [Tier.WARM] * 3


def test_no_more_are_hot_than_the_engine_has_slots_and_each_engine_has_its_own() -> None:
    table = AdapterTable()
    ours = [table.add(f"a{n}", BASE) for n in range(3)]
    theirs = [table.add(f"b{n}", "other") for n in range(3)]
    for adapter in ours + theirs:
        used(table, adapter, 20, 0.0)
    table.rebalance(0.0, {BASE: 1, "other": 2})
    assert sum(a.rating is Tier.HOT for a in ours) == 1
    assert sum(a.rating is Tier.HOT for a in theirs) == 2


def test_only_so_many_are_warm() -> None:
    table, adapters = filled(9, TierRules(warm_places=4))
    for number, adapter in enumerate(adapters):
        used(table, adapter, 1 + number % 5, 0.0)
    table.rebalance(0.0, {})
    assert sorted(Counter(a.rating for a in adapters).items()) == [(Tier.COLD, 5), (Tier.WARM, 4)]


def test_uses_are_forgotten_after_the_window() -> None:
    table, (adapter,) = filled(1)
    used(table, adapter, 10, 0.0)
    assert table.uses(adapter, 54.9) == 10
    assert table.uses(adapter, 60.0) == 0


def test_a_hot_one_stays_until_half_of_its_uses_are_left() -> None:
    table, (adapter,) = filled(1)
    used(table, adapter, 5, 0.0)
    used(table, adapter, 5, 30.0)
    table.entered_pages(adapter)
    carry_out(table, table.rebalance(30.0, {BASE: 1}))
    table.rebalance(61.0, {BASE: 1})  # five are left
    assert adapter.rating is Tier.HOT
    used(table, adapter, 4, 89.0)
    table.rebalance(92.0, {BASE: 1})  # four are left
    assert adapter.rating is Tier.WARM
    assert adapter.is_hot  # nobody wants its slot


def test_a_slightly_busier_one_does_not_take_the_place_of_a_hot_one() -> None:
    table, (first, second) = filled(2)
    used(table, first, 20, 0.0)
    table.entered_pages(first)
    carry_out(table, table.rebalance(0.0, {BASE: 1}))
    used(table, second, 24, 1.0)
    table.entered_pages(second)
    assert Move(adapter_id="a1", to=Tier.HOT, instead_of="a0") not in table.rebalance(1, {BASE: 1})
    used(table, second, 2, 2.0)
    assert Move(adapter_id="a1", to=Tier.HOT, instead_of="a0") in table.rebalance(2.0, {BASE: 1})


def test_a_warm_one_lingers_and_then_goes_cold() -> None:
    table, (adapter,) = filled(1)
    used(table, adapter, 1, 0.0)
    carry_out(table, table.rebalance(0.0, {}))
    assert table.rebalance(65.0, {}) == ()
    assert table.rebalance(91.0, {}) == (Move(adapter_id="a0", to=Tier.COLD),)


def test_what_is_leased_or_moving_is_never_told_to_move() -> None:
    table, (held, moved, wanted) = filled(3)
    for adapter in (held, moved):
        table.entered_slot(adapter)
        table.entered_pages(adapter)
    table.lease(held, 0.0)
    moved.is_moving = True
    used(table, wanted, 50, 200.0)
    moves = table.rebalance(200.0, {BASE: 2})
    assert {m.adapter_id for m in moves} <= {"a2"}
    assert not any(m.instead_of for m in moves)
    assert table.victim(BASE) is None


def test_the_one_that_idles_longest_makes_room_and_hot_ones_last() -> None:
    table, (hot, old, new) = filled(3)
    for adapter, now in ((hot, 1.0), (old, 2.0), (new, 3.0)):
        used(table, adapter, 20 if adapter is hot else 1, now)
        table.entered_slot(adapter)
    table.rebalance(3.0, {BASE: 3})
    order = []
    while (victim := table.victim(BASE)) is not None:
        order.append(victim)
        table.left_slot(victim)
    assert order == [old, new, hot]


def test_the_end_of_an_engine_empties_its_slots_only() -> None:
    table = AdapterTable()
    ours, theirs = table.add("a", BASE), table.add("b", "other")
    for adapter in (ours, theirs):
        table.entered_slot(adapter)
        table.entered_pages(adapter)
    assert table.emptied(BASE) == (ours,)
    assert (ours.tier, theirs.tier) == (Tier.WARM, Tier.HOT)
    assert table.emptied(BASE) == ()


def test_a_retired_one_takes_no_lease_and_a_used_one_is_not_removed() -> None:
    table, (adapter,) = filled(1)
    table.lease(adapter, 0.0)
    with pytest.raises(Conflict, match="in use"):
        table.remove(adapter)
    adapter.is_retired = True
    with pytest.raises(Conflict, match="being removed"):
        table.lease(adapter, 0.0)
    table.release(adapter, 1.0)
    with pytest.raises(InvariantBroken):
        table.release(adapter, 1.0)
    table.remove(adapter)
    with pytest.raises(NotFound, match="a0"):
        table.get("a0")


def test_a_row_of_a_removed_one_is_used_again_without_its_uses() -> None:
    table, (adapter,) = filled(1)
    used(table, adapter, 30, 0.0)
    table.rebalance(0.0, {BASE: 1})
    table.remove(adapter)
    another = table.add("b", BASE)
    assert table.uses(another, 0.0) == 0
    assert table.rebalance(0.0, {BASE: 1}) == ()


def test_the_window_counts_as_a_list_of_times_would() -> None:
    rng = random.Random(5)
    window, times, now = AccessWindow(60.0, 12), {0: [], 1: []}, 1000.0
    rows = [window.add(), window.add()]
    for _ in range(4000):
        now += rng.expovariate(1.0) if rng.random() < 0.99 else rng.uniform(0, 90)
        row = rng.choice(rows)
        window.touch(row, now)
        times[row].append(int(now / 5.0))
        expected = sum(1 for at in times[row] if int(now / 5.0) - at < 12)
        assert window.count(row, now) == expected
    assert window.counts(now).tolist() == [window.count(row, now) for row in rows]


class Tiers(RuleBasedStateMachine):
    """Whatever is used, moved and lost: bounds hold, and nobody in use is told to move."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = {BASE: 2, "n": 1}
        self.table = AdapterTable(TierRules(warm_places=3, hot_uses=3))
        self.now = 0.0
        self.held: list[Adapter] = []

    @rule(number=st.integers(0, 30), base=st.sampled_from((BASE, "n")))
    def add(self, number: int, base: str) -> None:
        if f"{base}{number}" not in self.table:
            self.table.add(f"{base}{number}", base)

    @precondition(lambda self: len(self.table))
    @rule(data=st.data(), times=st.integers(1, 5), keep=st.booleans())
    def use(self, data: st.DataObject, times: int, keep: bool) -> None:
        adapter = data.draw(st.sampled_from(sorted(self.table, key=lambda a: a.adapter_id)))
        if adapter.is_retired:
            return
        used(self.table, adapter, times, self.now)
        if keep:
            self.table.lease(adapter, self.now)
            self.held.append(adapter)

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        self.table.release(self.held.pop(), self.now)

    @rule(pause=st.floats(0.1, 50))
    def wait(self, pause: float) -> None:
        self.now += pause

    @rule(base=st.sampled_from((BASE, "n")))
    def engine_ends(self, base: str) -> None:
        self.table.emptied(base)

    @precondition(lambda self: len(self.table))
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        adapter = data.draw(st.sampled_from(sorted(self.table, key=lambda a: a.adapter_id)))
        adapter.is_retired = True
        if not adapter.leases:
            self.table.left_slot(adapter)
            self.table.left_pages(adapter)
            self.table.remove(adapter)

    @rule()
    def rebalance(self) -> None:
        moves = self.table.rebalance(self.now, self.slots)
        assert len({move.adapter_id for move in moves}) == len(moves)
        for move in moves:
            assert not (move.instead_of and self.table.get(move.instead_of).leases)
            assert move.to is not Tier.COLD or not self.table.get(move.adapter_id).leases
            assert not self.table.get(move.adapter_id).is_retired or move.to is Tier.COLD
            if move.to > (tier := self.table.get(move.adapter_id).tier):
                assert move.to == tier + 1, "between neighbours"
        carry_out(self.table, moves)
        for base, slots in self.slots.items():
            assert sum(a.rating is Tier.HOT for a in self.table if a.base == base) <= slots
        assert sum(a.rating is Tier.WARM for a in self.table) <= 3

    @invariant()
    def no_engine_has_more_than_its_slots(self) -> None:
        for base, slots in self.slots.items():
            assert len(self.table.hot(base)) <= slots
        for adapter in self.table:
            assert (adapter in self.table.hot(adapter.base)) == adapter.is_hot
            assert (adapter in self.table.warm()) == adapter.is_warm


TestTiers = laws_of(Tiers, cases=60, part=3, steps=50)


def test_ten_thousand_adapters_under_a_zipf_load_settle_and_stay_quick() -> None:
    """Ten minutes of 50 uses a second; figures are printed, the laws are asserted."""
    rng = np.random.default_rng(7)
    weights = 1.0 / np.arange(1, 10_001) ** 1.2
    drawn = rng.choice(10_000, size=30_000, p=weights / weights.sum())
    table, adapters = filled(10_000)
    slots = {BASE: 100}
    hits = moves = 0
    busy_s = balance_s = 0.0
    for number, index in enumerate(drawn.tolist()):
        now = number / 50
        adapter = adapters[index]
        if number >= 15_000:
            hits += adapter.is_hot
        began = time.perf_counter()
        if not adapter.is_hot:  # a request brings it in, as the manager does
            if len(table.hot(BASE)) == slots[BASE]:
                out = table.victim(BASE)
                assert out is not None
                table.left_slot(out)
            table.entered_slot(adapter)
        table.lease(adapter, now)
        table.release(adapter, now)
        busy_s += time.perf_counter() - began
        if number % 250 == 0:
            began = time.perf_counter()
            found = table.rebalance(now, slots)
            balance_s += time.perf_counter() - began
            moves += len(found)
            carry_out(table, found)
            assert len(table.hot(BASE)) <= 100
            assert len(table.warm()) <= 1000 + 100
    best = weights[:100].sum() / weights.sum()
    print(
        f"hot hits {hits / 15_000:.3f} (the first hundred draw {best:.3f}), "
        f"{busy_s / 30_000 * 1e6:.1f} us a use, {balance_s / 120 * 1e3:.2f} ms a rebalance, "
        f"{moves} moves"
    )
    assert hits / 15_000 > 0.85 * best
