"""Random load through the whole arbiter, on a clock that jumps: nothing in use is ever taken, no
byte is above the budget, no request is lost. The toy models check at each step that they live."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from kakeya.core import errors
from kakeya.memory.api import MemoryArbiter, Terms
from kakeya.memory.arbiter.events import Event, Evicted, ModelLoad, ModelUnload
from kakeya.memory.arbiter.policy import PressureLevel
from kakeya.memory.arbiter.resident import ASR, TEXT_TARGET, VISION, RequestPriority, Warmth
from kakeya.memory.machine.pressure import Reading
from tests.fakes import FakeClock
from tests.laws import seeds
from tests.memory.toy import Toy, capability
from tests.memory.worlds import MANY

SIZES = {"a": 100, "b": 90, "c": 80}


class Working(Toy):
    """A toy whose work takes time."""

    def __init__(self, clock: FakeClock, rng: random.Random) -> None:
        super().__init__()
        self._clock = clock
        self._rng = rng

    async def load(self, model_key: str) -> object:  # type: ignore[override]
        await self._clock.sleep(self._rng.random())
        return await super().load(model_key)

    async def run(self, backend: object, payload: object) -> object:
        assert str(backend).removeprefix("backend of ") in self.live
        await self._clock.sleep(self._rng.random())
        return await super().run(backend, payload)


async def test_three_models_on_a_budget_for_two_answer_200_requests() -> None:
    clock, rng = FakeClock(), random.Random(3)
    toy = Working(clock, rng)
    told: list[Event] = []
    highest: list[int] = []
    async with MemoryArbiter(budget=200, clock=clock) as arbiter:
        arbiter.register(capability("any", MANY, toy, size=SIZES.__getitem__, max_waiting=200))
        arbiter.on_event(told.append)

        def check(_: Event) -> None:
            highest.append(sum(SIZES[one] for one in toy.live))
            highest.append(arbiter.status().committed_bytes)

        arbiter.on_event(check)

        async def ask(number: int) -> object:
            await clock.sleep(60 * rng.random())
            terms = Terms(
                priority=rng.choice(list(RequestPriority)), warmth=Warmth(stay_warm_s=300)
            )
            return await arbiter.request("any", rng.choice("abc"), number, terms)

        answers = await asyncio.gather(*(ask(number) for number in range(200)))
        assert len(answers) == 200
        assert sorted(toy.runs) == list(range(200))  # type: ignore[type-var]
    counts = Counter(type(one) for one in told)
    assert counts[ModelLoad] == counts[ModelUnload] == len(toy.loads) == len(toy.unloads)
    assert {one.reason for one in told if isinstance(one, Evicted)} == {"fit"}
    assert 100 < max(highest) <= 200
    assert not toy.live


@pytest.mark.parametrize("seed", seeds(3, first=1))
async def test_an_hour_of_anything_leaves_nothing_behind(seed: int) -> None:
    """Requests of several roles, some cancelled, some with little time, under changing pressure:
    each is answered, or refused with a typed error; afterwards nobody waits and nothing is held."""
    clock, rng = FakeClock(), random.Random(seed)
    toys = {name: Working(clock, rng) for name in ("see", "draw", "hear", "text", "any")}
    roles = {"see": VISION, "draw": VISION, "hear": ASR, "text": TEXT_TARGET, "any": MANY}
    ends: Counter[str] = Counter()
    async with MemoryArbiter(budget=300, clock=clock) as arbiter:
        for name, toy in toys.items():
            arbiter.register(capability(name, roles[name], toy, size=80, max_waiting=50))

        async def ask() -> None:
            await clock.sleep(3600 * rng.random())
            name, model = rng.choice(sorted(toys)), rng.choice("ab")
            terms = Terms(
                priority=rng.choice(list(RequestPriority)),
                timeout_s=rng.choice([2.0, 60.0, float("inf")]),
                warmth=rng.choice([Warmth(), Warmth(stay_warm_s=60, unload_after_s=120)]),
                may_displace_text=rng.random() < 0.1,
            )
            call = asyncio.ensure_future(arbiter.request(name, model, 1, terms))
            if rng.random() < 0.1:
                await clock.sleep(2 * rng.random())
                call.cancel()
            (end,) = await asyncio.gather(call, return_exceptions=True)
            assert isinstance(end, str | errors.KakeyaError | asyncio.CancelledError), end
            ends[type(end).__name__] += 1

        async def press() -> None:
            for _ in range(200):
                await clock.sleep(3600 / 200)
                level = rng.choice(
                    [
                        PressureLevel.NOMINAL,
                        PressureLevel.NOMINAL,
                        PressureLevel.LOW,
                        PressureLevel.CRITICAL,
                    ]
                )
                arbiter.observe(Reading(level=level, source="drill"))
                assert arbiter.status().committed_bytes <= 300

        await asyncio.gather(press(), *(ask() for _ in range(400)))
        arbiter.observe(Reading(level=PressureLevel.NOMINAL, source="drill"))
        status = arbiter.status()
        assert status.waiting == ()
        assert not [one for one in status.residents if one.leases]
    assert ends.total() == 400
    assert ends["str"] > 200
    assert not any(toy.live for toy in toys.values())
    assert all(len(toy.loads) >= len(toy.unloads) for toy in toys.values())
