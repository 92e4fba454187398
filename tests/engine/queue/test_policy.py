"""Laws of the order of generations: shares, urgency, age, and parking."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.engine.queue.fair_shares import FairShares
from kakeya.engine.queue.policy import (
    AGED_S,
    EQUAL_TOKENS,
    FLOOR_TURNS,
    HELD_S,
    INPUT_WEIGHT,
    OUTPUT_WEIGHT,
    PATIENCE_S,
    ROUND_S,
    Account,
    GenerationClaim,
    first,
    first_token_s,
    is_chunk_due,
    may_hold,
    may_pass,
    next_chunk,
    next_place,
    parking_order,
    passed,
    weakest,
)


def claim(
    number: int = 0,
    *,
    client: str = "a",
    priority: int = 2,
    used: int = 0,
    arrived_s: float = 0.0,
    work_s: float = 0.0,
) -> GenerationClaim:
    account = Account(client, priority, used)
    return GenerationClaim(account=account, number=number, arrived_s=arrived_s, work_s=work_s)


def test_the_order_is_class_then_share_then_work_then_arrival() -> None:
    urgent = claim(9, priority=0, used=10 * EQUAL_TOKENS, work_s=9.0)
    poor = claim(8, used=0, work_s=8.0)
    short = claim(7, used=EQUAL_TOKENS, work_s=0.1)
    shorter_and_rich = claim(6, used=EQUAL_TOKENS + 1, work_s=0.01)
    late = claim(11, used=EQUAL_TOKENS, work_s=0.1)
    queue = [late, shorter_and_rich, poor, short, urgent]
    order = []
    while queue:
        order.append(first(queue))
        queue.remove(order[-1])
    assert order == [urgent, short, late, poor, shorter_and_rich]


def test_a_short_prompt_goes_after_a_long_one_that_waited_for_its_own_work() -> None:
    long = claim(1, arrived_s=0.0, work_s=4.0)
    assert first([long, claim(2, arrived_s=3.8, work_s=0.1)]).number == 2
    assert first([long, claim(3, arrived_s=3.95, work_s=0.1)]).number == 1


def test_a_client_that_comes_back_is_lifted_to_those_that_are_present() -> None:
    shares = FairShares()
    busy, idle = shares.arrive("busy", 1), shares.arrive("idle", 1)
    shares.begin(busy)
    shares.leave(idle, was_running=False)
    busy.used += 5000
    shares.arrive("busy", 1)
    assert shares.arrive("idle", 1).used == 5000
    assert shares.arrive("new", 1).used == 5000


def test_a_client_that_used_much_keeps_its_debt_while_another_is_present_and_not_longer() -> None:
    shares = FairShares()
    other, much = shares.arrive("other", 1), shares.arrive("much", 1)
    much.used = 9000
    shares.leave(much, was_running=False)
    back = shares.arrive("much", 1)
    assert back.used == 9000
    shares.leave(other, was_running=False)
    shares.leave(back, was_running=False)
    assert shares.arrive("much", 1).used == 0


def test_classes_do_not_pay_for_each_other() -> None:
    shares = FairShares()
    shares.arrive("a", 2).used = 9000
    assert shares.arrive("a", 1).used == 0
    assert shares.arrive("a", 77).priority == 5
    assert shares.arrive("a", -1).priority == 0


def test_clients_that_left_are_not_remembered_for_ever() -> None:
    shares = FairShares()
    present = shares.arrive("present", 1)
    for at in range(5000):
        account = shares.arrive(str(at), 1)
        shares.begin(account)
        account.pay(3)
        present.pay(2)
        shares.leave(account, was_running=True)
    clients = shares._clients[1]
    assert len(clients.accounts) == 1
    assert 1 <= len(clients._debts) <= 1024
    shares.leave(shares.arrive("client", 1, "user"), was_running=False)
    assert not shares._users


def test_a_new_client_begins_at_the_level_of_those_that_waited_though_a_running_one_used_less():
    shares = FairShares()
    runs, waits = shares.arrive("runs", 1), shares.arrive("waits", 1)
    shares.begin(runs)
    waits.pay(5000)
    shares.begin(waits)
    assert runs.used == 0
    assert shares.arrive("new", 1).used == 5000


SIZES = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 500)), min_size=1, max_size=5)


@settings(deadline=None, max_examples=25)
@given(clients=st.lists(SIZES, min_size=2, max_size=4), places=st.integers(1, 8))
def test_clients_that_always_want_more_use_about_the_same(clients, places):
    """No two differ by more than what counts as equal, and what may run at a time."""
    shares = FairShares()
    names = [chr(97 + at) for at in range(len(clients))]
    todo = dict(zip(names, clients, strict=True))
    cost = {
        name: max(INPUT_WEIGHT * taken + OUTPUT_WEIGHT * made for taken, made in sizes)
        for name, sizes in todo.items()
    }
    made = 0

    def arrive(name: str) -> GenerationClaim:
        nonlocal made
        made += 1
        return GenerationClaim(account=shares.arrive(name, 1), number=made, arrived_s=0.0)

    queue = [arrive(name) for name in names for _ in range(2)]
    running: deque[tuple[GenerationClaim, int]] = deque()
    for _ in range(100):
        if len(running) == places:
            done, output = running.popleft()
            done.account.used += OUTPUT_WEIGHT * output
            shares.leave(done.account, was_running=True)
        chosen = first(queue)
        name = chosen.account.client
        queue.remove(chosen)
        shares.begin(chosen.account)
        queue.append(arrive(name))
        taken, output = todo[name][chosen.number % len(todo[name])]
        chosen.account.used += INPUT_WEIGHT * taken
        running.append((chosen, output))
        used = {one.account.client: one.account.used for one in queue}
        most = max(names, key=lambda one: used[one])
        gap = used[most] - min(used.values())
        assert gap <= EQUAL_TOKENS + places * cost[most]


@settings(deadline=None, max_examples=25)
@given(
    users=st.lists(st.integers(0, 12), min_size=2, max_size=4),
    size=st.integers(EQUAL_TOKENS, 4 * EQUAL_TOKENS),
)
def test_clients_use_about_the_same_however_many_users_they_name_and_so_do_these(users, size):
    """One place; each user always wants more, of one size. 0 = it names none."""
    shares = FairShares()
    waiting: list[GenerationClaim] = []
    asked: list[tuple[int, int]] = []

    def wait(client: int, user: int) -> None:
        account = shares.arrive(str(client), 1, str(user) if users[client] else "")
        waiting.append(GenerationClaim(account=account, number=len(asked), arrived_s=0.0))
        asked.append((client, user))

    used = [[0] * max(1, count) for count in users]
    for client, uses in enumerate(used):
        for user in range(len(uses)):
            wait(client, user)
            wait(client, user)
    for _ in range(100):
        chosen = first(waiting)
        client, user = asked[chosen.number]
        waiting.remove(chosen)
        shares.begin(chosen.account)
        chosen.account.pay(size)
        used[client][user] += size
        wait(client, user)
        shares.leave(chosen.account, was_running=True)
        for uses in (list(map(sum, used)), *used):
            assert max(uses) - min(uses) <= EQUAL_TOKENS + size


@settings(deadline=None)
@given(
    rivals=st.lists(st.tuples(st.integers(0, 5), st.floats(0, 5)), min_size=1, max_size=6),
    before=st.lists(st.integers(0, 5), max_size=4),
    priority=st.integers(0, 5),
    used=st.integers(0, 10**9),
)
def test_no_generation_starves_for_a_place(rivals, before, priority, used):
    """However urgent, poor and short the generations are that come without end."""
    older = [claim(at, client=f"o{at}", priority=one) for at, one in enumerate(before)]
    mine = claim(50, client="me", priority=priority, used=used, work_s=1e6)
    queue, now_s = [*older, mine], AGED_S
    for turn in range(FLOOR_TURNS * (len(older) + 1)):
        while len(queue) < len(older) + 1 + len(rivals):
            urgency, work_s = rivals[len(queue) % len(rivals)]
            number = 100 + turn * 10 + len(queue)
            queue.append(
                claim(number, client="r", priority=urgency, arrived_s=now_s, work_s=work_s)
            )
        chosen = next_place(queue, turn, now_s, lambda one: True)
        queue.remove(chosen)
        now_s += 0.01
        if chosen is mine:
            return
    raise AssertionError("starved")


def test_a_generation_without_room_holds_the_queue_only_after_a_long_wait() -> None:
    large = claim(1, priority=4)
    small = claim(2, priority=2, arrived_s=AGED_S)
    turn = FLOOR_TURNS - 1

    def fits(one: GenerationClaim) -> bool:
        return one is small

    assert next_place([large, small], turn, AGED_S, fits) is small
    assert next_place([large, small], turn, HELD_S, fits) is large
    assert next_place([large, small], turn, AGED_S, lambda one: True) is large
    assert next_place([large, small], turn, AGED_S - 1.0, lambda one: True) is small
    assert next_place([large, small], turn + 1, HELD_S, fits) is small


def test_speculative_work_never_holds_the_queue() -> None:
    large = claim(1, priority=5)
    small = claim(2, priority=2, arrived_s=HELD_S)
    turn = FLOOR_TURNS - 1
    assert next_place([large, small], turn, 9 * HELD_S, lambda one: one is small) is small
    assert next_place([large, small], turn, HELD_S, lambda one: True) is large
    assert not may_hold(large, 9 * HELD_S)
    behind = claim(3, priority=4)
    assert next_place([large, behind], turn, HELD_S, lambda one: one is large) is behind


@given(running=st.lists(st.integers(0, 5), max_size=5), mine=st.integers(0, 5))
def test_the_holder_of_the_queue_is_passed_only_while_it_waits_for_less_urgent_work_anyway(
    running, mine
):
    held = claim(0, priority=4)
    others = [claim(at, priority=one) for at, one in enumerate(running, 1)]
    passes = may_pass(claim(99, priority=mine), held, others)
    assert passes == (mine < 4 and any(one > mine for one in running))


@given(
    rivals=st.lists(st.tuples(st.integers(0, 5), st.floats(0, 5)), min_size=1, max_size=7),
    priority=st.integers(0, 5),
)
def test_no_generation_starves_for_a_chunk(rivals, priority):
    """Each gets one while the others take FLOOR_TURNS times as long as one of all prompts."""
    others = [
        claim(at, client="r", priority=one, work_s=work_s)
        for at, (one, work_s) in enumerate(rivals)
    ]
    mine = claim(99, client="me", priority=priority, used=10**9, work_s=1e6)
    chunks_s = {id(one): 0.01 + one.work_s / 10 for one in others} | {id(mine): 0.2}
    passed_s = spent_s = 0.0
    turn = 0
    while spent_s <= FLOOR_TURNS * sum(chunks_s.values()):
        turn += 1
        chosen, is_oldest = next_chunk([*others, mine], passed_s, lambda one: chunks_s[id(one)])
        if chosen is mine:
            return
        chosen.served = turn
        took_s = chunks_s[id(chosen)]
        passed_s = passed(passed_s, took_s, is_oldest=is_oldest)
        spent_s += took_s
    raise AssertionError("starved")


def test_chunks_by_age_take_their_part_of_the_time_however_long_they_are():
    urgent, batch = claim(1, priority=2), claim(2, priority=4)
    chunks_s = {urgent.number: 0.01, batch.number: 0.1}
    spent_s = dict.fromkeys(chunks_s, 0.0)
    passed_s = 0.0
    for turn in range(1, 1000):
        chosen, is_oldest = next_chunk([urgent, batch], passed_s, lambda one: chunks_s[one.number])
        chosen.served = turn
        took_s = chunks_s[chosen.number]
        passed_s = passed(passed_s, took_s, is_oldest=is_oldest)
        spent_s[chosen.number] += took_s
    assert sum(spent_s.values()) / FLOOR_TURNS == pytest.approx(spent_s[batch.number], rel=0.1)


CLAIMS = st.lists(
    st.builds(
        lambda number, client, priority: claim(number, client=client, priority=priority),
        st.integers(0, 99),
        st.sampled_from("abc"),
        st.integers(0, 5),
    ),
    max_size=8,
    unique_by=lambda one: one.number,
)


@given(
    running=CLAIMS,
    mine=st.builds(
        lambda p, c: claim(200, client=c, priority=p), st.integers(0, 5), st.sampled_from("abcd")
    ),
    now_s=st.floats(0, 2 * PATIENCE_S),
)
def test_less_urgent_work_is_parked_or_one_of_several_of_a_client_for_a_client_with_none(
    running, mine, now_s
):
    victims = parking_order(mine, running, now_s)
    below = [one for one in running if one.priority > mine.priority]
    if below:
        assert sorted(victims, key=lambda one: one.number) == sorted(
            below, key=lambda one: one.number
        )
        assert victims[0] is weakest(below)
    elif victims:
        (victim,) = victims
        owner = victim.account.client
        assert victim.priority == mine.priority
        assert now_s >= PATIENCE_S
        assert mine.account.client not in {one.account.client for one in running}
        # Its client still runs another one: it will not ask for a place back.
        assert sum(one.account.client == owner for one in running) >= 2


def test_the_weakest_is_the_youngest_of_the_least_urgent() -> None:
    running = [claim(1, priority=4), claim(2, priority=4), claim(3, priority=2)]
    assert weakest(running).number == 2


@given(chunks=st.lists(st.floats(1e-4, 0.3), min_size=1, max_size=200), is_mute=st.booleans())
def test_between_two_steps_is_one_chunk_or_what_fits_the_budget(chunks, is_mute):
    spent_s, done = 0.0, 0
    for next_s in chunks:
        if not is_chunk_due(done, spent_s, next_s, round_s=ROUND_S, is_first_token_due=is_mute):
            break
        spent_s, done = spent_s + next_s, done + 1
    assert done <= 1 or spent_s <= ROUND_S
    if is_mute:
        assert spent_s <= ROUND_S
    else:
        assert done >= 1


@given(
    works=st.lists(st.floats(0, 10), max_size=6),
    runs=st.integers(0, 4),
    every_s=st.floats(0, 5),
    stretch=st.floats(1, 3),
)
def test_a_first_token_is_expected_after_its_own_prompt_and_later_behind_more(
    works, runs, every_s, stretch
):
    mine = claim(50, arrived_s=0.0, work_s=2.0)
    others = [claim(at, priority=0, work_s=work_s) for at, work_s in enumerate(works)]
    running = [claim(100 + at) for at in range(runs)]

    def estimate(count: int) -> float:
        return first_token_s(
            mine,
            others[:count],
            running,
            places=2,
            place_every_s=every_s,
            stretch=stretch,
        )

    assert estimate(0) >= 2.0 * stretch
    for count in range(len(others)):
        assert estimate(count) <= estimate(count + 1)


def test_later_and_less_urgent_generations_do_not_delay_a_first_token() -> None:
    def expected_s(one: GenerationClaim, waiting: list[GenerationClaim]) -> float:
        return first_token_s(one, waiting, [], places=1, place_every_s=0.1, stretch=1.0)

    mine = claim(1, work_s=1.0)
    behind = [claim(2, work_s=1.5), claim(3, priority=4, work_s=0.1)]
    assert expected_s(mine, [mine, *behind]) == pytest.approx(1.0)
    late = claim(4, priority=4, work_s=2.0)
    assert expected_s(late, [mine, *behind]) == pytest.approx(1.0 + 1.5 + 0.1 + 2.0)
