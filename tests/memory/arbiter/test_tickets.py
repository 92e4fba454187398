"""The queue for memory decides as a queue that is sorted and decided as a whole at each event."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import multiple, rule

from kakeya.core import errors
from kakeya.memory.arbiter.arbiter import Arbiter
from kakeya.memory.arbiter.plan import FOREVER, ArbiterOutcome
from kakeya.memory.arbiter.policy import Rules, periods, ticket_rank
from kakeya.memory.arbiter.queue import LoadTicket
from kakeya.memory.arbiter.resident import RequestPriority, ResidentKey
from kakeya.memory.arbiter.tickets import Tickets
from tests.laws import laws_of
from tests.memory.arbiter.test_laws import MODELS, WARMTHS, ArbiterMachine
from tests.memory.worlds import ask


def order(one: LoadTicket, now: float, rules: Rules) -> tuple[float, float, float]:
    return (
        ticket_rank(one.ask.priority, now - one.place_mono, rules),
        one.place_mono,
        one.lease,
    )


class SortedTickets(Tickets):
    """All requests in one list, sorted anew for each walk; each of them is looked at."""

    def of(self, key: ResidentKey) -> list[LoadTicket]:
        return [one for one in self._tickets.values() if one.ask.key == key]

    def wants(self, key: ResidentKey) -> bool:
        return key in self.wished or bool(self.of(key))

    def walk(
        self, now: float, rules: Rules, closed: Container[ResidentKey]
    ) -> Iterator[LoadTicket]:
        waiting = {(one.ask.key, one.ask.priority) for one in self._tickets.values()}
        away = [one for wish, one in self._kept.items() if wish not in waiting]
        all_of_them = [*self._tickets.values(), *away]
        return iter(sorted(all_of_them, key=lambda one: order(one, now, rules)))

    def is_behind(self, ticket: LoadTicket, now: float) -> bool:
        return False

    def urgency(self, key: ResidentKey, now: float, rules: Rules) -> tuple[float, float, float]:
        last = (math.inf, math.inf, math.inf)
        return min((order(one, now, rules) for one in self.of(key)), default=last)

    def keys_in_order(self, now: float, rules: Rules) -> list[ResidentKey]:
        line = sorted(self._tickets.values(), key=lambda one: order(one, now, rules))
        return list(dict.fromkeys(one.ask.key for one in line))

    def due(self, now: float, rules: Rules) -> Iterator[float]:
        for one in (*self._tickets.values(), *self._kept.values(), *self.wished.values()):
            yield one.place_mono + (periods(now - one.place_mono, rules.age_s) + 1) * rules.age_s
            if one.kept_until_mono is not None:
                yield one.kept_until_mono
            elif (limit_mono := one.limit_mono(rules)) is not None:
                yield limit_mono

    def next_deadline_mono(self, now: float) -> float:
        deadlines = (one.ask.deadline_mono for one in self._tickets.values())
        return min((at for at in deadlines if at > now), default=math.inf)


class Both:
    """An arbiter beside one with sorted requests, told of the same events.

    Time alone is told to the other one more often: to ours when it wants to wake, and after
    decisions that changed something, from which more may follow at the next event.
    """

    def __init__(self, budget: int, *, rules: Rules | None = None) -> None:
        self.ours, self.plain = Arbiter(budget, rules=rules), Arbiter(budget, rules=rules)
        self.plain._tickets = SortedTickets()
        self.wake_mono: float | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def tell(*args: Any, **more: Any) -> Any:
            return self.compared(
                getattr(self.ours, name)(*args, **more), getattr(self.plain, name)(*args, **more)
            )

        return tell

    def next_wake_mono(self, now: float) -> float | None:
        self.wake_mono = self.ours.next_wake_mono(now)
        wakes = (self.wake_mono, self.plain.next_wake_mono(now))
        return min((at for at in wakes if at is not None), default=None)

    def settle(self, now: float) -> ArbiterOutcome:
        is_due = self.wake_mono is not None and self.wake_mono <= now
        is_due = is_due or self.ours._last.wake_mono == -math.inf
        given = self.ours.settle(now) if is_due else ArbiterOutcome()
        return self.compared(given, self.plain.settle(now))

    def compared(self, given: Any, expected: Any) -> Any:
        assert told(given) == told(expected)
        assert self.ours.snapshot() == self.plain.snapshot()
        keys = {one.ask.key for one in self.plain._tickets._tickets.values()}
        now = max((one.asked_mono for one in self.plain._tickets._tickets.values()), default=0.0)
        for key in keys:
            assert self.ours.place_of(key, now) == self.plain.place_of(key, now)
        return given


def told(value: Any) -> Any:
    """What there is to compare: errors are what they say."""
    match value:
        case ArbiterOutcome():
            refusals = [(one.lease, one.key, told(one.error)) for one in value.refusals]
            return value.grants, refusals, value.plans, value.exhausted
        case errors.KakeyaError():
            return type(value), str(value), value.retry_after_s
        case tuple():
            return tuple(told(one) for one in value)
        case _:
            return value


class BothMachine(ArbiterMachine):
    arbiter_type = Both  # type: ignore[assignment]

    @rule(
        target=ArbiterMachine.leases,
        names=st.lists(st.sampled_from(sorted(MODELS)), min_size=1, max_size=2),
        wishes=st.lists(
            st.tuples(
                st.sampled_from(list(RequestPriority)), st.sampled_from([0.3, 4.0, 40.0, FOREVER])
            ),
            min_size=2,
            max_size=12,
        ),
        pause_s=st.sampled_from([0.0, 0.1, 2.5]),
    )
    def herd(
        self, names: list[str], wishes: list[tuple[RequestPriority, float]], pause_s: float
    ) -> object:
        """Many ask for the same, and time goes by between them."""
        asked = []
        for number, (priority, patience) in enumerate(wishes):
            name = names[number % len(names)]
            asked.append(self.ask(name, priority, WARMTHS[number % 3], patience, False))
            if pause_s:
                self.time_goes_by(pause_s)
        return multiple(*asked)

    @rule(names=st.sampled_from(sorted(MODELS)), patience=st.sampled_from([0.0, 2.0]))
    def decline(self, names: str, patience: float) -> None:
        role, size = MODELS[names]
        wish = ask(names, role, size, deadline=self.now + patience)
        _, outcome = self.arbiter.decline(wish, self.now)
        self.take(outcome)


TestSameDecisions = laws_of(BothMachine, cases=3_000, part=150)
