"""The product's gossip at its default pace in virtual time: rounds to spread, nobody lost.

Every node is real but for its clock and its network (`benchmarks/virtual_fleet.py`). Rows are those
of the fault catalogue; marked slow are the same trials with as many nodes, seeds and hours as a row
asks for, and `scripts/simulate` runs them longer still.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import pytest

from benchmarks.audit import Audit, Findings
from benchmarks.faults import Faults
from benchmarks.trials import (
    GIVE_UP_ROUNDS,
    Case,
    Forgetful,
    cold_rounds,
    heal_rounds,
    hours,
    spread_rounds,
)
from benchmarks.virtual_fleet import Pace, VirtualFleet, VirtualNode
from benchmarks.virtual_time import run_virtual
from kakeya.fleet.cards.cards import DEFAULT_INTERVAL_S, DEFAULT_TTL_S

HOUR_S = 3600.0
MANY = [pytest.mark.slow]
Story = Callable[[VirtualFleet], Awaitable[None]]

# --- nobody is lost


def _assert_nobody_absent(found: Findings) -> None:
    assert found.pairs > 0
    assert (found.absent_pairs, found.ghosts, found.task_failures) == (0, 0, 0)
    assert 0.0 < found.oldest_age_s <= DEFAULT_TTL_S


@pytest.mark.parametrize(
    ("loss", "seconds"),
    [
        pytest.param(0.0, HOUR_S, marks=MANY),
        pytest.param(0.1, HOUR_S, marks=MANY),
        pytest.param(0.3, HOUR_S, marks=MANY),
        (0.3, 300.0),
    ],
)
def test_nobody_of_ten_is_falsely_absent(loss: float, seconds: float) -> None:
    _assert_nobody_absent(hours(Case(nodes=10, loss=loss), 1, seconds).findings)


@pytest.mark.parametrize(
    ("nodes", "loss", "seconds"),
    [
        pytest.param(100, 0.0, HOUR_S, marks=MANY),
        pytest.param(100, 0.1, HOUR_S, marks=MANY),
        pytest.param(100, 0.3, HOUR_S, marks=MANY),
        (25, 0.3, 150.0),
    ],
)
def test_nobody_of_many_is_falsely_absent(nodes: int, loss: float, seconds: float) -> None:
    _assert_nobody_absent(hours(Case(nodes=nodes, loss=loss), 1, seconds).findings)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [0.0, 0.1, 0.3])
def test_nobody_of_a_thousand_is_falsely_absent(loss: float) -> None:
    _assert_nobody_absent(hours(Case(nodes=1000, loss=loss), 1, 300.0).findings)


@pytest.mark.slow
def test_at_the_pace_of_other_nodes_twenty_five_lose_each_other() -> None:
    """The control, and why the default is not slower: one peer each 30 s."""
    found = hours(
        Case(nodes=25, loss=0.1, pace=Pace(interval_s=30.0, fanout=1)), 1, HOUR_S / 3
    ).findings
    assert found.nodes_ever_absent > 10


@pytest.mark.parametrize("seconds", [HOUR_S / 12, pytest.param(HOUR_S / 2, marks=MANY)])
def test_nodes_that_come_and_go_are_neither_missed_nor_seen_for_long(seconds: float) -> None:
    churn = Faults(churn_per_hour=60.0)
    found = hours(Case(nodes=10, loss=0.1, faults=churn), 3, seconds).findings
    assert (found.absent_pairs, found.ghosts) == (0, 0)


# --- rounds


@pytest.mark.parametrize(
    "loss", [pytest.param(0.0, marks=MANY), pytest.param(0.1, marks=MANY), 0.3]
)
@pytest.mark.parametrize(
    ("nodes", "seeds"),
    [
        (10, 1),
        pytest.param(25, 1, marks=MANY),
        pytest.param(10, 20, marks=MANY),
        pytest.param(25, 5, marks=MANY),
        pytest.param(100, 20, marks=MANY),
    ],
)
def test_news_spreads_in_logarithmic_rounds(nodes: int, seeds: int, loss: float) -> None:
    case = Case(nodes=nodes, loss=loss)
    assert case.goal_rounds is not None
    assert max(spread_rounds(case, seed) for seed in range(seeds)) <= case.goal_rounds


@pytest.mark.slow
def test_with_one_peer_a_round_news_takes_longer() -> None:
    """The control of the default fanout."""
    ours, lonely = (Case(nodes=25, loss=0.3, pace=Pace(fanout=fanout)) for fanout in (2, 1))
    assert spread_rounds(ours, 1) < spread_rounds(lonely, 1)


def test_a_fleet_that_starts_knowing_one_address_each_finds_itself() -> None:
    assert cold_rounds(Case(nodes=25), 1) <= 8


@pytest.mark.parametrize(
    ("nodes", "partition_s", "seeds"),
    [
        (10, 150.0, 1),
        pytest.param(10, 600.0, 20, marks=MANY),
        pytest.param(50, 600.0, 20, marks=MANY),
    ],
)
def test_a_split_longer_than_the_ttl_heals_within_four_rounds(
    nodes: int, partition_s: float, seeds: int
) -> None:
    """Row 7: 600 s, twenty seeds, no seeds in the other sense."""
    assert partition_s > DEFAULT_TTL_S
    case = Case(nodes=nodes, faults=Faults(partition_s=partition_s))
    assert max(heal_rounds(case, seed) for seed in range(seeds)) <= 4


@pytest.mark.slow
def test_without_remembered_addresses_a_split_never_heals() -> None:
    """The control of row 7."""
    case = Case(nodes=4, faults=Faults(partition_s=150.0), is_forgetful=True)
    assert heal_rounds(case, 1) == GIVE_UP_ROUNDS


# --- stories with a fleet


def _tell(story: Story, count: int = 10, **options: object) -> None:
    async def whole() -> None:
        fleet = VirtualFleet(count, seed=1, **options)  # type: ignore[arg-type]
        fleet.introduce_all()
        fleet.start()
        await story(fleet)
        assert sum(node.task_failures() for node in fleet.up()) == 0
        await fleet.stop()

    run_virtual(whole())


async def _rounds_until(condition: Callable[[], bool], limit: int) -> int:
    """Intervals that pass until the condition holds; fails after the limit."""
    begin = asyncio.get_running_loop().time()
    while not condition():
        await asyncio.sleep(DEFAULT_INTERVAL_S / 20)
        passed = asyncio.get_running_loop().time() - begin
        assert passed <= limit * DEFAULT_INTERVAL_S, f"not within {limit} rounds"
    return -int(-(asyncio.get_running_loop().time() - begin) // DEFAULT_INTERVAL_S)


def _are_complete(nodes: Iterable[VirtualNode], count: int) -> bool:
    return all(len(node.live()) == count for node in nodes)


def _after_seed_loss(**control: object) -> list[float]:
    """Completeness of the survivors' views, each of 40 intervals without the seed."""

    async def whole() -> list[float]:
        fleet = VirtualFleet(
            5,
            seed=3,
            contacts=lambda index, rng: (0,) if index else (),
            **control,  # type: ignore[arg-type]
        )
        fleet.start()
        await fleet.run(90)
        assert fleet.completeness() == 1.0
        await fleet.nodes["mini-00000"].kill()
        seen = []
        for _ in range(40):
            await fleet.run(DEFAULT_INTERVAL_S)
            seen.append(fleet.completeness())
        await fleet.stop()
        return seen

    return run_virtual(whole())


def test_the_loss_of_the_only_seed_blinds_nobody() -> None:
    """Row 8, and the control: peers that are only ever those on the command line."""
    assert set(_after_seed_loss()) == {1.0}
    alone = _after_seed_loss(registry_type=Forgetful, routes=lambda card: "")
    assert alone[-1] == pytest.approx(1 / 4)  # each sees itself


def test_one_way_reachability_is_enough_for_equal_views() -> None:
    """Row 6: nobody can dial one node; it dials the others."""

    async def story(fleet: VirtualFleet) -> None:
        hidden = fleet.nodes["mini-00001"].address
        fleet.network.is_cut = lambda source, target: target == hidden
        for _ in range(60):
            await fleet.run(DEFAULT_INTERVAL_S)
            assert fleet.completeness() == 1.0

    _tell(story, count=3)


def test_a_leaver_is_gone_from_all_views_in_ten_seconds_and_a_round() -> None:
    async def story(fleet: VirtualFleet) -> None:
        await fleet.run(60)
        await fleet.nodes["mini-00004"].leave()
        await fleet.run(2 * DEFAULT_INTERVAL_S)
        for _ in range(20):  # beyond the TTL, so that nobody hears of it again
            assert _are_complete(fleet.up(), 9)
            await fleet.run(DEFAULT_INTERVAL_S)

    _tell(story, loss=0.1)


# --- clocks


@pytest.mark.parametrize(
    "skew_s",
    [
        pytest.param(1.0, marks=MANY),
        pytest.param(30.0, marks=MANY),
        pytest.param(119.0, marks=MANY),
        3600.0,
    ],
)
def test_wrong_clocks_hide_nobody_and_raise_no_dead(skew_s: float) -> None:
    """Row 9: clocks up to so much ahead or behind; one node is killed."""

    async def story(fleet: VirtualFleet) -> None:
        audit = Audit(fleet)
        watch = asyncio.create_task(audit.watch())
        await fleet.run(300)
        await fleet.nodes["mini-00003"].kill()
        await fleet.run(900)
        watch.cancel()
        found = audit.findings()
        assert found.pairs > 0
        assert (found.absent_pairs, found.ghosts) == (0, 0)

    _tell(story, count=5, skews_s=[skew_s if i % 2 else -skew_s for i in range(5)])


@pytest.mark.parametrize("jump_s", [-3600.0, pytest.param(3600.0, marks=MANY), 365 * 86400.0])
def test_a_clock_that_jumps_hides_nobody(jump_s: float) -> None:
    """Rows 10 and 11: back an hour, ahead an hour and a year, and right again ten minutes later.

    While its clock is a year ahead a node that announces something new is not believed.
    """

    async def story(fleet: VirtualFleet) -> None:
        await fleet.run(60)
        node = fleet.nodes["mini-00002"]
        others = [other for other in fleet.up() if other is not node]
        node.clock.skew_s += jump_s
        for _ in range(60):
            await fleet.run(DEFAULT_INTERVAL_S)
            assert all(len(other.live()) >= 4 for other in others)
            if jump_s < 0:
                assert _are_complete(others, 5)
        node.clock.skew_s -= jump_s
        await _rounds_until(lambda: _are_complete(fleet.up(), 5), 2)

    _tell(story, count=5)


def test_after_sleep_the_view_is_full_within_two_rounds_and_nothing_old_is_used() -> None:
    """Row 12: a laptop's lid was closed for half an hour; two nodes died meanwhile."""

    async def story(fleet: VirtualFleet) -> None:
        await fleet.run(60)
        sleeper = fleet.nodes["mini-00003"]
        await sleeper.suspend()
        await fleet.run(300)
        for name in ("mini-00001", "mini-00004"):
            await fleet.nodes[name].kill()
        await fleet.run(1500)
        sleeper.wake(slept_s=1800.0)
        dead = {"mini-00001", "mini-00004"}
        await asyncio.sleep(1e-6)  # its round has begun, no answer has come yet
        assert dead <= sleeper.registry.suspects() or not dead & sleeper.live()
        await _rounds_until(lambda: _usable(sleeper) == set(fleet.nodes) - dead, 2)

    _tell(story, count=5)


def _usable(node: VirtualNode) -> set[str]:
    return node.live() - set(node.registry.suspects())


# --- the engine itself


def test_one_seed_tells_one_story() -> None:
    case = Case(nodes=5, loss=0.2, faults=Faults(churn_per_hour=60.0))
    told, again, other = (hours(case, seed, 60.0) for seed in (5, 5, 6))
    assert told == again
    assert told != other


def test_a_loop_on_which_nothing_will_happen_says_so() -> None:
    async def wait_for_nobody() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="no timer"):
        run_virtual(wait_for_nobody())
