from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument
from kakeya.decoding.control.acceptance_rate import AcceptanceTable, Cell
from kakeya.decoding.control.controller import (
    KEPT_SOURCES,
    PROBE_COST,
    PROBE_STEPS,
    DraftController,
)
from kakeya.decoding.control.row_cost import RowCosts
from kakeya.decoding.control.shadow import ShadowScorer
from kakeya.decoding.draft.proposer import Draft

# Milliseconds of a forward by its rows, measured on different machines and models.
DENSE = {1: 35, 2: 38.9, 3: 45.9, 4: 50.8, 5: 59.9, 6: 69.3, 7: 77.4, 8: 85.8, 16: 155}
MOE = {1: 47.2, 2: 88.5, 4: 112, 8: 143, 16: 193}
SMALL = {1: 0.79, 2: 0.82, 4: 0.95, 8: 1.15, 16: 1.4}
MIDDLE = {1: 1.66, 2: 2.15, 4: 2.4, 8: 3.2, 16: 4.2}
NO_BLAS = {1: 4.9, 2: 7.7, 4: 13.2, 8: 24, 16: 45}
REAL = {1: 70, 2: 115, 4: 125, 8: 138, 16: 152}
TABLES = {
    "dense": DENSE,
    "moe": MOE,
    "small": SMALL,
    "middle": MIDDLE,
    "no_blas": NO_BLAS,
    "real": REAL,
}
DEPTH = 15


def cost(table: dict[int, float], rows: int) -> float:
    known = sorted(table)
    low = max(at for at in known if at <= rows)
    high = min(at for at in known if at >= rows)
    if low == high:
        return table[low]
    return table[low] + (table[high] - table[low]) * (rows - low) / (high - low)


def best_possible(table: dict[int, float], acceptance: float) -> float:
    return max(
        sum(acceptance**depth for depth in range(rows)) * table[1] / cost(table, rows)
        for rows in range(1, DEPTH + 2)
    )


def seeded(table: dict[int, float]) -> DraftController:
    controller = DraftController(max_rows=DEPTH)
    controller.seed_costs(table)
    return controller


def draft(size: int = DEPTH, match_length: int = 3, source: str = "s") -> Draft:
    return Draft(source=source, tokens=tuple(range(size)), match_length=match_length)


def simulate(
    table: dict[int, float],
    situation: Callable[[int, random.Random], tuple[Draft, float]],
    tokens: int,
    seed: int,
    controller: DraftController | None = None,
) -> float:
    """Speed against plain decoding, of a text in which each draft token is right by chance."""
    controller = controller or seeded(table)
    rng = random.Random(seed)
    spent = 0.0
    done = 0
    while done < tokens:
        offered, acceptance = situation(done, rng)
        size = len(offered.tokens)
        right = 0
        while right < size and rng.random() < acceptance:
            right += 1
        rows = controller.rows(offered)
        seconds = cost(table, rows + 1) * max(0.5, rng.gauss(1, 0.05))
        spent += seconds
        controller.observe_forward(rows + 1, seconds)
        if rows:
            controller.observe_verified(offered, rows, min(right, rows))
            done += min(right, rows) + 1
        else:
            emitted = (*range(right), -1) if right < size else tuple(range(right))
            if offered.tokens:
                controller.observe_shadow(offered, emitted)
            done += 1
    return done * table[1] / spent


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("acceptance", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9])
def test_is_never_slower_and_near_the_best_fixed_choice(name, acceptance):
    table = TABLES[name]
    speed = simulate(table, lambda *_: (draft(), acceptance), 3000, seed=1)
    assert speed >= 0.97
    assert speed >= 0.94 * best_possible(table, acceptance)


@pytest.mark.parametrize("name", TABLES)
def test_two_hundred_tokens_with_nothing_to_match_cost_at_most_a_twentieth(name):
    speeds = [
        simulate(TABLES[name], lambda *_: (draft(), 0.0), 200, seed=seed) for seed in range(20)
    ]
    assert min(speeds) >= 0.95
    assert sum(speeds) / len(speeds) >= 0.97


def test_a_fixed_block_would_be_slower_where_nothing_matches():
    """The control: what the tests above protect from."""
    assert cost(MIDDLE, 9) / MIDDLE[1] > 1.5


@pytest.mark.parametrize("name", TABLES)
def test_a_source_that_is_always_wrong_gets_no_rows_in_the_end(name):
    controller = seeded(TABLES[name])
    simulate(TABLES[name], lambda *_: (draft(), 0.0), 300, seed=2, controller=controller)
    before = controller.report().block_steps
    simulate(TABLES[name], lambda *_: (draft(), 0.0), 300, seed=3, controller=controller)
    assert controller.report().block_steps == before


def test_notices_within_a_few_tokens_that_a_copied_span_begins_and_ends():
    def spans(done: int, _: random.Random) -> tuple[Draft, float]:
        return draft(), float((done // 100) % 2)

    ideal = 200 / (100 + 100 / 16 * cost(MIDDLE, 16) / MIDDLE[1])
    assert simulate(MIDDLE, spans, 4000, seed=3) >= 0.9 * ideal


@pytest.mark.parametrize(("costs", "match_length"), [(REAL, 3), ({}, 5)])
def test_the_first_span_that_is_copied_gets_rows_though_nothing_was_learned(costs, match_length):
    """Not only the second one, which an agent may never ask for; with a sweep and without."""
    controller = DraftController(max_rows=DEPTH)
    if costs:
        controller.seed_costs(costs)
    assert controller.rows(draft(match_length=match_length)) >= 3


def test_long_matches_get_rows_where_short_ones_never_pay():
    def bursts(done: int, rng: random.Random) -> tuple[Draft, float]:
        if rng.random() < 0.2:
            return draft(match_length=20), 0.95
        return draft(match_length=1), 0.02

    controller = seeded(MIDDLE)
    assert simulate(MIDDLE, bursts, 2000, seed=4, controller=controller) > 1.2
    assert controller.rows(draft(match_length=1)) == 0
    assert controller.rows(draft(match_length=20)) >= 8


def test_an_unsure_token_ends_the_block_and_a_sure_one_does_not():
    controller = seeded(MIDDLE)
    rng = random.Random(8)
    for _ in range(300):
        values = tuple(rng.choice((0.97, 0.2)) for _ in range(6))
        offered = Draft(source="c", tokens=tuple(range(6)), confidence=values)
        right = 0
        while right < 6 and rng.random() < values[right]:
            right += 1
        controller.observe_shadow(offered, (*range(right), -1))
    sure = Draft(source="c", tokens=tuple(range(6)), confidence=(0.97,) * 6)
    unsure = Draft(source="c", tokens=tuple(range(6)), confidence=(0.97,) * 3 + (0.2,) * 3)
    assert controller.rows(sure) == 6
    assert controller.rows(unsure) in (3, 4)


def test_no_draft_no_rows():
    assert seeded(SMALL).rows(Draft(source="s")) == 0


def test_rows_are_bounded_by_the_limit_and_the_draft():
    controller = DraftController(max_rows=4)
    controller.seed_costs({1: 1.0, 5: 1.01})
    for _ in range(20):
        controller.observe_shadow(draft(10), tuple(range(10)))
    assert controller.rows(draft(10)) == 4
    assert controller.rows(draft(2)) == 2


def test_a_wait_that_eats_the_gain_turns_drafting_off():
    controller = seeded(MIDDLE)
    for _ in range(50):
        controller.observe_shadow(draft(4), (0, 1, -1))
    assert controller.rows(draft(4)) > 0
    assert controller.rows(draft(4), wait_s=2 * MIDDLE[1]) == 0


def test_the_budget_for_waiting_grows_with_the_acceptance():
    controller = seeded(MIDDLE)
    budgets = [controller.wait_budget_s("s")]
    for _ in range(3):
        for _ in range(20):
            controller.observe_shadow(draft(), tuple(range(DEPTH)))
        budgets.append(controller.wait_budget_s("s"))
    assert budgets == sorted(budgets)
    assert budgets[-1] > MIDDLE[1]


def test_a_source_that_keeps_the_step_waiting_for_nothing_is_asked_rarely():
    controller = seeded(MIDDLE)
    asked = waited = 0.0
    for _ in range(4000):
        controller.observe_forward(1, MIDDLE[1])
        if controller.wants("far"):
            asked += 1
            waited += 0.3
            controller.observe_wait("far", 0.3)
            controller.observe_shadow(draft(4, 0, "far"), (-1,))
    assert asked >= 8
    assert waited <= 0.01 * 4000 * MIDDLE[1]


def test_a_source_that_became_good_is_noticed_by_a_probe():
    controller = seeded(MIDDLE)
    for _ in range(30):
        controller.observe_wait("far", 0.3)
        controller.observe_shadow(draft(8, 0, "far"), (-1,))
    assert not controller.wants("far")
    for _ in range(5000):
        if controller.wants("far"):
            controller.observe_wait("far", 0.3)
            controller.observe_shadow(draft(8, 0, "far"), tuple(range(8)))
    assert controller.wants("far")
    assert controller.wait_budget_s("far") > 0.3


def waited_in_vain(controller: DraftController, wait_s: float) -> None:
    """A busy minute: the answers came too late, and what came was wrong for this text."""
    for _ in range(30):
        controller.observe_wait("far", wait_s, patience_s=wait_s)
        controller.observe_shadow(draft(8, 0, "far"), (-1,))


@pytest.mark.parametrize("wait_s", [0.5 * MIDDLE[1], 5 * MIDDLE[1], 500 * MIDDLE[1]])
def test_dear_waits_of_the_past_do_not_silence_a_source_that_can_be_asked_for_free(
    wait_s: float,
) -> None:
    """A generation of 192 tokens hears of it, however long it was waited for before."""
    controller = seeded(MIDDLE)
    waited_in_vain(controller, wait_s)
    asked = 0
    for _ in range(192):
        controller.observe_forward(1, MIDDLE[1])
        patience_s = controller.patience_s("far")
        if patience_s is not None:
            asked += 1
            assert patience_s == 0, "a probe waits for nothing"
            controller.observe_wait("far", 1e-4 * MIDDLE[1], patience_s=0)
    assert PROBE_STEPS <= asked <= 192 / 4


def test_probing_costs_its_share_of_plain_time_also_where_asking_is_dear() -> None:
    controller = seeded(MIDDLE)
    waited_in_vain(controller, MIDDLE[1])
    ask_s, spent_s, steps = 0.05 * MIDDLE[1], 0.0, 20_000
    for _ in range(steps):
        controller.observe_forward(1, MIDDLE[1])
        if controller.patience_s("far") is not None:
            spent_s += ask_s
            controller.observe_wait("far", ask_s, patience_s=0)
    assert 0 < spent_s <= 1.5 * PROBE_COST * steps * MIDDLE[1]


def test_good_drafts_whose_waits_were_dear_are_still_asked_for_and_waited_for_again() -> None:
    controller = seeded(MIDDLE)
    for _ in range(30):
        controller.observe_wait("far", 0.5, patience_s=0.5)
        controller.observe_shadow(draft(8, 0, "far"), tuple(range(8)))
    budget_s = controller.wait_budget_s("far")
    for _ in range(30):
        controller.observe_wait("far", 2 * budget_s, patience_s=2 * budget_s)
    assert controller.patience_s("far") == 0
    for _ in range(PROBE_STEPS):
        controller.observe_wait("far", 0.0, patience_s=0)
    assert controller.patience_s("far") == controller.wait_budget_s("far") > 0


def test_of_sources_without_end_the_ones_used_last_are_remembered():
    controller = seeded(MIDDLE)
    controller.observe_wait("lasting", 0.25)
    for at in range(3 * KEPT_SOURCES):
        controller.observe_wait(f"m@10.0.0.1:{at}", 0.01)
        controller.wants("lasting")
    report = controller.report()
    assert len(report.sources) == KEPT_SOURCES
    kept = {source.source: source.mean_wait_s for source in report.sources}
    assert kept["lasting"] == 0.25
    assert f"m@10.0.0.1:{3 * KEPT_SOURCES - 1}" in kept
    assert "m@10.0.0.1:0" not in kept


def test_the_report_counts_what_was_told():
    controller = seeded(SMALL)
    controller.observe_forward(1, 0.8)
    controller.observe_forward(5, 1.0)
    controller.observe_verified(draft(6), 4, 2)
    controller.observe_shadow(draft(3), (0, -1))
    controller.observe_wait("s", 0.25)
    report = controller.report()
    assert (report.plain_steps, report.block_steps) == (1, 1)
    (source,) = report.sources
    assert (source.drafts, source.offered) == (2, 9)
    assert (source.verified, source.accepted) == (4, 2)
    assert (source.shadowed, source.shadow_hits) == (2, 1)
    assert source.mean_wait_s == pytest.approx(0.25)
    assert [(count.tried, count.right) for count in source.per_depth] == [(2, 2), (2, 1), (1, 0)]


class TestShadow:
    def test_scores_a_draft_once_the_history_has_judged_it(self):
        controller = seeded(SMALL)
        shadow = ShadowScorer(controller)
        history = [9, 9]
        shadow.hold(draft(3), len(history))
        shadow.settle(history)
        history += [0, 1]
        shadow.settle(history)
        assert not controller.report().sources
        history += [2]
        shadow.settle(history)
        assert controller.report().sources[0].shadow_hits == 3
        shadow.settle(history)
        assert controller.report().sources[0].drafts == 1

    def test_scores_at_the_first_contradiction(self):
        controller = seeded(SMALL)
        shadow = ShadowScorer(controller)
        shadow.hold(draft(3), 1)
        shadow.settle([9, 5])
        (source,) = controller.report().sources
        assert (source.shadowed, source.shadow_hits) == (1, 0)

    def test_judges_what_there_is_at_the_end(self):
        controller = seeded(SMALL)
        shadow = ShadowScorer(controller)
        shadow.hold(draft(9), 1)
        shadow.close([9, 0, 1])
        (source,) = controller.report().sources
        assert (source.shadowed, source.shadow_hits) == (2, 2)


class TestRowCosts:
    def test_between_and_beyond_the_sweep_costs_go_on_in_lines(self):
        costs = RowCosts(12)
        costs.seed({1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4})
        assert costs.seconds(3) == pytest.approx(1.4)
        assert costs.seconds(12) == pytest.approx(3.2)

    def test_costs_never_fall_with_the_rows(self):
        costs = RowCosts(8)
        costs.seed({1: 1.0, 2: 0.7, 4: 1.6, 8: 1.5})
        table = costs.table()
        assert list(table) == sorted(table)

    def test_learns_another_cost(self):
        costs = RowCosts(8)
        costs.seed({1: 1.0, 4: 1.5})
        for _ in range(100):
            costs.observe(1, 1.0)
            costs.observe(4, 3.0)
        assert costs.seconds(4) / costs.seconds(1) == pytest.approx(3.0, rel=0.1)

    def test_a_machine_that_slows_down_makes_no_block_look_cheap(self):
        costs = RowCosts(8)
        costs.seed({1: 1.0, 4: 1.5, 8: 2.0})
        for _ in range(100):
            costs.observe(1, 2.0)
        assert costs.seconds(1) == pytest.approx(2.0, rel=0.05)
        assert costs.seconds(8) / costs.seconds(1) > 1.4

    def test_one_hiccup_changes_little(self):
        costs = RowCosts(8)
        costs.seed({1: 1.0, 4: 1.5})
        costs.observe(1, 500.0)
        assert costs.seconds(1) < 1.3

    @given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 10.0)), max_size=40))
    def test_asking_changes_nothing(self, taken):
        asked, left = RowCosts(8), RowCosts(8)
        for rows, seconds in taken:
            asked.observe(rows, seconds)
            left.observe(rows, seconds)
            assert asked.table()[0] == asked.seconds(1)
        assert left.table() == asked.table()

    def test_without_a_sweep_the_first_measurement_sets_the_scale(self):
        costs = RowCosts(8)
        costs.observe(1, 0.01)
        assert costs.seconds(1) == pytest.approx(0.01)
        assert costs.seconds(8) > costs.seconds(4) > 0.01

    @pytest.mark.parametrize("sweep", [{2: 1.0}, {1: 0.0}, {0: 1.0, 1: 1.0}])
    def test_refuses_a_sweep_without_a_plain_step(self, sweep):
        with pytest.raises(InvalidArgument):
            RowCosts(4).seed(sweep)


class TestAcceptance:
    def test_deep_tokens_of_short_matches_teach_the_first_ones_of_long_matches(self):
        table = AcceptanceTable(DEPTH)
        for _ in range(10):
            table.observe(draft(match_length=1), DEPTH, DEPTH)
        assert next(table.chain(draft(match_length=8), 1)) > 0.9

    def test_a_longer_match_is_never_thought_worse_than_shorter_ones_before_it_is_judged(self):
        table = AcceptanceTable(DEPTH)
        for _ in range(50):
            table.observe(draft(match_length=1), 1, 1)
        chain = list(table.chain(draft(match_length=1), DEPTH))
        assert chain == sorted(chain)

    @pytest.mark.parametrize("rate", [0.05, 0.3, 0.7, 0.95])
    def test_a_cell_learns_its_rate(self, rate):
        rng = random.Random(1)
        cell = Cell()
        late = []
        for at in range(3000):
            cell.observe(float(rng.random() < rate))
            if at > 200:
                late.append(cell.estimate(0.3))
        assert sum(late) / len(late) == pytest.approx(rate, abs=0.06)

    @pytest.mark.parametrize(("before", "after"), [(0.0, 1.0), (1.0, 0.0)])
    def test_a_cell_follows_an_abrupt_change(self, before, after):
        cell = Cell()
        for _ in range(200):
            cell.observe(before)
        for _ in range(5):
            cell.observe(after)
        assert abs(cell.estimate(0.3) - after) < 0.5

    def test_depths_that_were_never_judged_lean_on_the_one_before(self):
        table = AcceptanceTable(8)
        for _ in range(30):
            table.observe(draft(2), 2, 2)
        chain = list(table.chain(draft(8), 8))
        assert len(chain) == 8
        assert chain[7] == pytest.approx(chain[1])


def test_a_peer_whose_drafts_never_come_in_time_is_only_probed() -> None:
    controller = DraftController(max_rows=8)
    for _ in range(20):
        controller.observe_forward(1, 0.002)
    good = Draft(source="peer", tokens=(1, 2, 3))
    for _ in range(30):
        controller.observe_shadow(good, (1, 2, 3))  # it would be right, were it there
        controller.observe_wait("peer", 0.02, patience_s=0.02)  # and is far too slow
    asked = 0
    for _ in range(1000):
        if controller.patience_s("peer") is not None:
            asked += 1
            controller.observe_wait("peer", 0.0, patience_s=0.0, has_draft=False)
    assert asked < 350
    controller.observe_wait("peer", 0.0, patience_s=0.0)  # one draft was in time
    assert controller.patience_s("peer") is not None
