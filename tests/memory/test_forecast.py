"""Estimates of waits for memory: what is told is what comes, where uses and loads take as long as
was expected of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kakeya.memory.api import MemoryArbiter
from kakeya.memory.arbiter.arbiter import Arbiter
from kakeya.memory.arbiter.plan import ArbiterOutcome, Ask, Plan, Terms
from kakeya.memory.arbiter.resident import (
    TEXT_TARGET,
    LeaseId,
    RequestPriority,
    ResidentKey,
    Warmth,
)
from kakeya.memory.forecast import Forecast, Rehearsal, UsualTimes
from tests.fakes import FakeClock
from tests.memory.toy import Toy, capability
from tests.memory.worlds import ManualClock, World, ask, key
from tests.waiting import until

WARM = Warmth(stay_warm_s=300)
LOAD_S, UNLOAD_S = 3.0, 0.5


def text(model: str, priority: RequestPriority = RequestPriority.NORMAL) -> Ask:
    return ask(f"text:{model}", "text-target", 60, priority=priority, warmth=WARM, deadline=1e6)


@dataclass
class TimedWorld(World):
    """One in which uses, loads and unloads take their times."""

    use_s: dict[str, float] = field(default_factory=dict)
    ends: list[tuple[float, int, object]] = field(default_factory=list)
    began: dict[ResidentKey, float] = field(default_factory=dict)
    got: dict[ResidentKey, float] = field(default_factory=dict)

    def take(self, outcome: ArbiterOutcome) -> None:
        for grant in outcome.grants:
            self.got.setdefault(grant.key, self.now)
            self.began[grant.key] = self.now
            self._later(self.use_s[grant.key.model_key], self._over(grant.lease))
        super().take(outcome)

    def _over(self, lease: LeaseId) -> object:
        return lambda: self.take(self.arbiter.release(lease, self.now))

    def _carry_out(self, plan: Plan) -> None:
        room_s = UNLOAD_S * len(plan.evict)
        for place, eviction in enumerate(plan.evict, 1):
            gone = eviction.key
            self._later(
                UNLOAD_S * place,
                lambda gone=gone: self.take(self.arbiter.unloaded(gone, self.now)),
            )
        if plan.load is not None:
            self._later(room_s, lambda: self._begin(plan))

    def _begin(self, plan: Plan) -> None:
        goes_on, outcome = self.arbiter.begin_load(plan, self.now)
        self.take(outcome)
        if goes_on and (model := plan.load) is not None:
            self.began[model] = self.now
            self._later(LOAD_S, lambda: self.take(self.arbiter.loaded(model, None, self.now)))

    def _later(self, seconds: float, step: object) -> None:
        self.ends.append((self.now + seconds, len(self.ends), step))

    def live(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            self.ends.sort(key=lambda one: one[:2])
            due = self.arbiter.next_wake_mono(self.now)
            at = min([end, *(one[0] for one in self.ends[:1]), *([due] if due else [])])
            self.now = at
            while self.ends and self.ends[0][0] <= self.now:
                self.ends.pop(0)[2]()  # type: ignore[operator]
                self.ends.sort(key=lambda one: one[:2])
            self.take(self.arbiter.settle(self.now))
            if at >= end:
                return

    @property
    def times(self) -> UsualTimes:
        return UsualTimes(
            load_s=lambda _: LOAD_S,
            load_left_s=lambda one: self.began.get(one, self.now) + LOAD_S - self.now,
            unload_s=lambda _: UNLOAD_S,
            use_s=self._use_s,
            asks_per_s=lambda _: 0.0,
        )

    def _use_s(self, one: ResidentKey, waiting: int, more: int) -> float:
        whole_s = self.use_s[one.model_key]
        return whole_s if waiting + more else self.began[one] + whole_s - self.now


def town(**use_s: float) -> TimedWorld:
    return TimedWorld(Arbiter(100), use_s=use_s)


def foretold(world: TimedWorld) -> dict[ResidentKey, float]:
    before = world.arbiter.snapshot()
    found = Rehearsal(world.arbiter, world.times, world.now).run()
    assert world.arbiter.snapshot() == before, "it changed something"
    return found


@pytest.mark.parametrize("use_s", [1.0, 12.0, 40.0])
def test_a_wait_for_a_model_in_use_is_told_from_the_end_of_its_use_and_the_load(
    use_s: float,
) -> None:
    world = town(a=use_s, b=1.0)
    world.ask(text("a"))
    world.live(LOAD_S + UNLOAD_S)
    world.ask(text("b"))
    told = world.now + foretold(world)[key("text:b")]
    world.live(100)
    assert world.got[key("text:b")] == pytest.approx(told, abs=0.01)


@given(
    uses=st.lists(st.floats(0.2, 30), min_size=4, max_size=4),
    asks=st.lists(
        st.tuples(st.sampled_from("bcd"), st.sampled_from(list(RequestPriority))),
        min_size=1,
        max_size=6,
    ),
)
@settings(deadline=None, max_examples=40)
def test_models_that_wait_are_told_when_they_come(
    uses: list[float], asks: list[tuple[str, RequestPriority]]
) -> None:
    """Of several models in turn, by the rules of the arbiter: ageing, turns, drains."""
    world = town(**dict(zip("abcd", uses, strict=True)))
    world.ask(text("a"))
    world.live(LOAD_S)
    for model, priority in asks:
        world.ask(text(model, priority))
    told = {one: world.now + in_s for one, in_s in foretold(world).items()}
    assert told.keys() == {key(f"text:{model}") for model, _ in asks}
    world.live(400)
    for one, at in told.items():
        assert world.got[one] == pytest.approx(at, abs=0.01)


@given(st.integers(1, 9), st.integers(0, 6), st.floats(0.1, 4.0), st.floats(0.1, 4.0))
@settings(deadline=None, max_examples=40)
def test_each_request_that_ends_is_followed_by_another_of_some_model(
    held: int, waiting: int, b_per_s: float, c_per_s: float
) -> None:
    """Those for b come until it is loaded, share the load, and prolong its use before c's turn."""
    world = town(a=20.0, b=1.0, c=1.0)
    for _ in range(held):
        world.ask(text("a"))
    world.live(LOAD_S)
    for model in "bc":
        for _ in range(1 + waiting):
            world.ask(text(model))
        world.live(0.1)
    rates = {"b": b_per_s, "c": c_per_s}
    used: list[tuple[int, int]] = []

    def use_s(one: ResidentKey, waiting: int, more: int) -> float:
        if one.model_key == "b":
            used.append((waiting, more))
        return 5 + 0.5 * more if waiting else 0.1 if more else 20.0

    times = replace(world.times, use_s=use_s, asks_per_s=lambda one: rates.get(one.model_key, 0.0))
    told = Rehearsal(world.arbiter, times, world.now).run()
    more = round(held * b_per_s / (b_per_s + c_per_s))
    assert used[0] == (1 + waiting, more)
    assert told[key("text:b")] == pytest.approx(20 + UNLOAD_S + LOAD_S)
    uses_s = max(5.0, 5 + 0.5 * more)
    latest_s = told[key("text:b")] + uses_s + UNLOAD_S + LOAD_S
    assert latest_s - 0.01 <= told[key("text:c")] <= latest_s + 1.0


def test_requests_that_find_a_model_open_keep_it_in_use_until_its_room_is_claimed() -> None:
    """A request claims the room of its equals after the 5 s of a class."""
    world = town(a=4.0, b=1.0)
    world.ask(text("a"))
    world.live(LOAD_S + 3)
    world.ask(text("b"))
    loads_s = UNLOAD_S + LOAD_S

    def told_s(per_s: float) -> float:
        times = replace(
            world.times,
            use_s=lambda _, waiting, more: 8.0 if waiting + more else 1.0,
            asks_per_s=lambda one: per_s if one.model_key == "a" else 0.0,
        )
        return Rehearsal(world.arbiter, times, world.now).run()[key("text:b")]

    assert told_s(0.0) == pytest.approx(5.0 + loads_s)
    assert told_s(0.5) == pytest.approx(4.0 + 8.0 + loads_s)


def test_many_requests_of_one_model_are_rehearsed_as_one() -> None:
    """A rehearsal takes as many steps for 200 of each model as for one."""
    decisions = []
    for each in (1, 200):
        world = town(a=20.0, **dict.fromkeys("bcdef", 3.0))
        world.ask(text("a"))
        world.live(LOAD_S)
        for model in "bcdef":
            for _ in range(each):
                world.ask(text(model))
        asked: Counter[str] = Counter()
        times = replace(
            world.times, unload_s=lambda one, asked=asked: asked.update([str(one)]) or UNLOAD_S
        )
        rehearsal = Rehearsal(world.arbiter, times, world.now)
        told = rehearsal.run()
        decisions.append((told, asked))
    assert decisions[0] == decisions[1]


def test_a_use_without_a_known_end_gives_no_estimate() -> None:
    world = town(a=5.0, b=1.0)
    world.ask(text("a"))
    world.live(LOAD_S + 1)
    world.ask(text("b"))
    times = UsualTimes(
        load_s=lambda _: LOAD_S,
        load_left_s=lambda _: 0.0,
        unload_s=lambda _: UNLOAD_S,
        use_s=lambda *_: None,
        asks_per_s=world.times.asks_per_s,
    )
    assert Forecast(world.arbiter, times, FakeClock(mono=world.now)).seconds(key("text:b")) is None


async def test_a_request_in_line_for_memory_is_told_seconds() -> None:
    clock = ManualClock()
    texts = replace(capability("text", TEXT_TARGET, Toy()), use_s=lambda *_: 40.0)
    async with MemoryArbiter(budget=150, clock=clock) as memory:
        memory.register(texts)
        async with memory.acquire("text", "held"):
            waits = asyncio.create_task(memory.request("text", "next", 1, Terms(timeout_s=120)))
            await until(lambda: memory.status().waiting)
            wait = memory.wait_of("text", "next")
            assert wait is not None
            assert wait.describe() == "1st for memory, next, about 43 s"  # 3 s of a first load
            clock.advance(20)
            later = memory.wait_of("text", "next")
            assert later is not None
            assert later.seconds == pytest.approx(43.0, abs=0.1)
        assert await waits
