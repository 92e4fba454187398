"""The way of an engine that outgrew its lease: shrink, drain, end, kill, in this order."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kakeya.backends.engine.escalation import (
    EndIt,
    EngineSight,
    Escalation,
    EscalationRules,
    HoldIt,
    KillIt,
    ResumeIt,
    ShrinkIt,
    Stage,
)
from tests.laws import law

LEASE = 1000
RULES = EscalationRules()
POLL_S = 2.0


def sight(resident: int, *, running: int = 1, child: int = 1, lease: int = LEASE) -> EngineSight:
    return EngineSight(child=child, resident_bytes=resident, lease_bytes=lease, running=running)


def follow(
    way: Escalation, seen: list[EngineSight], start: float = 0.0
) -> list[tuple[float, object]]:
    steps = [
        (start + POLL_S * at, way.see(one, start + POLL_S * at)) for at, one in enumerate(seen)
    ]
    return [(at, step) for at, step in steps if step is not None]


def test_an_engine_that_keeps_growing_is_asked_drained_ended_and_killed() -> None:
    steps = follow(Escalation(), [sight(1200)] * 20)
    assert [(at, type(step)) for at, step in steps] == [
        (0, ShrinkIt),
        (4, HoldIt),
        (14, EndIt),
        (20, KillIt),
    ]
    assert steps[0][1] == ShrinkIt(250, "occupied 1.2 KiB of a lease of 1000 B")
    assert steps[3][1].reason.endswith("and did not end within 5 s")


def test_one_that_shrinks_is_left_alone() -> None:
    way = Escalation()
    assert len(follow(way, [sight(1200), *[sight(940)] * 20])) == 1
    assert way.stage is Stage.WITHIN


def test_a_little_above_it_is_only_asked_now_and_then() -> None:
    way = Escalation()
    steps = follow(way, [sight(1050)] * 46)
    assert [(at, type(step)) for at, step in steps] == [
        (0, ShrinkIt),
        (30, ShrinkIt),
        (60, ShrinkIt),
        (90, ShrinkIt),
    ]


def test_around_its_lease_it_is_not_asked_at_each_look() -> None:
    way = Escalation()
    steps = follow(way, [sight(1010), sight(990)] * 10)
    assert [at for at, _ in steps] == [0, 32]


@given(st.lists(st.integers(900, 1300), min_size=1, max_size=20), st.floats(0, 1000))
@law(3600)
def test_one_that_is_settled_is_asked_at_most(seen: list[int], later_s: float) -> None:
    way = Escalation()
    follow(way, [sight(one) for one in seen])
    if way.is_settled(seen[-1], LEASE):
        step = way.see(sight(seen[-1]), POLL_S * len(seen) + later_s)
        assert step is None or isinstance(step, ShrinkIt)


def test_one_a_little_above_its_lease_is_settled_and_one_far_above_is_not() -> None:
    for resident, is_settled in ((940, True), (990, True), (1050, True), (1200, False)):
        way = Escalation()
        follow(way, [sight(1050), sight(resident)])
        assert way.is_settled(resident, LEASE) is is_settled


def test_without_sequences_a_drain_ends_at_once() -> None:
    steps = follow(Escalation(), [sight(1200, running=0)] * 5)
    assert [(at, type(step)) for at, step in steps] == [(0, ShrinkIt), (4, HoldIt), (6, EndIt)]


def test_one_that_comes_back_within_its_lease_while_drained_is_rescued() -> None:
    way = Escalation()
    steps = follow(way, [*[sight(1200)] * 4, sight(1000), *[sight(900)] * 20])
    assert [type(step) for _, step in steps] == [ShrinkIt, HoldIt, ResumeIt]
    assert way.stage is Stage.WITHIN


def test_one_that_dies_by_itself_while_drained_lets_sequences_in_again() -> None:
    way = Escalation()
    follow(way, [sight(1200)] * 4)
    assert way.see(sight(500, child=2), 8.0) == ResumeIt()
    assert way.stage is Stage.WITHIN


def test_one_whose_next_child_is_above_at_once_is_not_ended_for_ever() -> None:
    """It was leased too little: it is asked, and ended ever more rarely."""
    way, child, ends = Escalation(), 1, []
    for at in range(5400):
        step = way.see(sight(2000, running=0, child=child), float(at))
        if isinstance(step, EndIt):
            ends.append(at)
            child += 1
    gaps = [b - a for a, b in pairwise(ends)]
    assert gaps[:5] == [61, 121, 241, 481, 961]
    assert len(ends) < 12


def test_a_larger_lease_ends_it() -> None:
    way = Escalation()
    follow(way, [sight(1200)] * 4)
    assert way.see(sight(1200, lease=1300), 8.0) == ResumeIt()


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[float, EngineSight]]:
    now, child, seen = 0.0, 1, []
    for _ in range(draw(st.integers(1, 60))):
        now += draw(st.sampled_from((0.5, 2.0, 2.0, 2.0, 6.0, 31.0)))
        child += draw(st.sampled_from((0, 0, 0, 0, 0, 0, 0, 1)))
        resident = draw(st.sampled_from((300, 940, 960, 1000, 1001, 1050, 1101, 1500, 1500, 1500)))
        lease = draw(st.sampled_from((1000, 1000, 1000, 1000, 1200)))
        seen.append(
            (now, sight(resident, running=draw(st.integers(0, 2)), child=child, lease=lease))
        )
    return seen


_ORDER = {ShrinkIt: 0, HoldIt: 1, EndIt: 2, KillIt: 3}


@given(lives())
@law(600)
def test_no_step_is_left_out_or_reversed_and_nothing_happens_within_the_lease(seen) -> None:
    way = Escalation()
    child, reached, held, asked_at = None, -1, False, -100.0
    for now, one in seen:
        if one.child != child:
            child, reached = one.child, -1
        step = way.see(one, now)
        if step is None:
            continue
        if isinstance(step, ResumeIt):
            assert held
            held, reached = False, min(reached, 0)
            continue
        assert one.resident_bytes > one.lease_bytes, "nothing is done within the lease"
        place = _ORDER[type(step)]
        assert place == reached + 1 or (place == reached == 0), "each step follows the one before"
        reached = place
        if isinstance(step, ShrinkIt):
            assert step.bytes > 0
            assert not held
        else:
            assert one.resident_bytes > 1.0 * one.lease_bytes
        if isinstance(step, HoldIt):
            assert one.resident_bytes > RULES.high * one.lease_bytes
            assert now - asked_at >= RULES.shrink_wait_s
            held = True
        if isinstance(step, EndIt):
            held = False
        if isinstance(step, ShrinkIt):
            asked_at = now
    assert held == (way.stage is Stage.DRAINING)


@given(lives(), st.integers(1, 3))
@law(600)
def test_what_stays_far_above_is_gone_in_the_end_unless_one_was_ended_lately(seen, running) -> None:
    way = Escalation()
    for now, one in seen:
        way.see(one, now)
    last, child = seen[-1][0], seen[-1][1].child
    may_end = way.may_end(last)
    steps = follow(way, [sight(5000, running=running, child=child)] * 60, start=last + POLL_S)
    if may_end and way.stage is not Stage.KILLED:
        raise AssertionError(f"{way.stage} after {steps}")
