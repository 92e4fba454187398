"""The arbiter as plug-ins use it: real tasks, toy models, a clock that only the tests move."""

from __future__ import annotations

import asyncio
import gc
import sys
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from types import FrameType

import pytest

from kakeya.core import errors
from kakeya.core.clock import SystemClock
from kakeya.memory.api import MemoryArbiter, Terms
from kakeya.memory.arbiter.capability import Loaded
from kakeya.memory.arbiter.events import (
    CapabilityRun,
    Event,
    Evicted,
    MemoryPressure,
    ModelLoad,
    ModelUnload,
)
from kakeya.memory.arbiter.plan import Exhausted, Reason
from kakeya.memory.arbiter.policy import PressureLevel, Rules, Rung, Tenant
from kakeya.memory.arbiter.resident import (
    ASR,
    DRAFTER,
    TEXT_TARGET,
    VISION,
    RequestPriority,
    Role,
    RolePriority,
    Warmth,
)
from kakeya.memory.embeddings import VisionEmbedding
from kakeya.memory.machine.pressure import Reading
from tests.fakes import FakeClock
from tests.memory.toy import Toy, capability
from tests.memory.worlds import ManualClock, key, until


@dataclass
class Shelf:
    """An arbiter that runs, two capabilities of one role and one each of others."""

    arbiter: MemoryArbiter
    clock: ManualClock
    see: Toy = field(default_factory=Toy)
    draw: Toy = field(default_factory=Toy)
    hear: Toy = field(default_factory=Toy)
    text: Toy = field(default_factory=Toy)
    events: list[Event] = field(default_factory=list)

    def register(self) -> None:
        self.arbiter.register(capability("see", VISION, self.see))
        self.arbiter.register(capability("draw", VISION, self.draw))
        self.arbiter.register(capability("hear", ASR, self.hear))
        self.arbiter.register(capability("text", TEXT_TARGET, self.text))
        self.arbiter.on_event(self.events.append)

    def told(self, kind: type[Event]) -> list[Event]:
        return [one for one in self.events if isinstance(one, kind)]

    def resident(self) -> set[str]:
        return {str(one.key) for one in self.arbiter.status().residents}

    def press(self, level: PressureLevel) -> None:
        self.arbiter.observe(Reading(level=level, source="test"))


@pytest.fixture
async def shelf() -> AsyncIterator[Shelf]:
    clock = ManualClock()
    async with MemoryArbiter(budget=1000, clock=clock, grace_s=0) as arbiter:
        shelf = Shelf(arbiter, clock)
        shelf.register()
        yield shelf
        for toy in (shelf.see, shelf.draw, shelf.hear, shelf.text):
            toy.load_gate.set()
            toy.unload_gate.set()
            toy.run_gate.set()
        await asyncio.sleep(0)


async def pump(turns: int = 30) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


# Registration.


async def test_there_is_exactly_one_handler_for_a_capability(shelf: Shelf) -> None:
    with pytest.raises(errors.Conflict, match="already registered"):
        shelf.arbiter.register(capability("see", VISION, Toy()))


async def test_what_nobody_registered_is_refused(shelf: Shelf) -> None:
    with pytest.raises(errors.NotFound, match="no capability registered as 'smell'"):
        await shelf.arbiter.request("smell", "m", 1)


async def test_a_plug_in_brings_a_role_of_its_own_but_no_second_meaning(shelf: Shelf) -> None:
    smell = Role(name="smell", priority=RolePriority(33), eviction="nothing")
    shelf.arbiter.register(capability("smell", smell, Toy()))
    assert await shelf.arbiter.request("smell", "m", 1) == "m did 1"
    other = Role(name="smell", priority=RolePriority(1), eviction="nothing")
    with pytest.raises(errors.Conflict, match="another meaning"):
        shelf.arbiter.register(capability("taste", other, Toy()))


async def test_it_works_only_between_start_and_shutdown() -> None:
    arbiter = MemoryArbiter(budget=1000, clock=ManualClock(), grace_s=0)
    arbiter.register(capability("see", VISION, Toy()))
    with pytest.raises(errors.Conflict, match="not started"):
        await arbiter.request("see", "m", 1)
    async with arbiter:
        pass
    with pytest.raises(errors.Refused, match="shutting down"):
        await arbiter.request("see", "m", 1)
    with pytest.raises(errors.Refused, match="shutting down"):
        arbiter.register(capability("hear", ASR, Toy()))
    with pytest.raises(errors.Conflict, match="cannot start after shutdown"):
        async with arbiter:
            pass


# Requests, loads, runs.


async def test_a_request_loads_runs_releases_and_the_model_stays_warm(shelf: Shelf) -> None:
    assert await shelf.arbiter.request("see", "m", 1) == "m did 1"
    assert await shelf.arbiter.request("see", "m", 2) == "m did 2"
    assert shelf.see.loads == ["m"]
    assert shelf.resident() == {"see:m"}
    assert [type(one) for one in shelf.events] == [ModelLoad, CapabilityRun, CapabilityRun]


async def test_concurrent_requests_share_one_load(shelf: Shelf) -> None:
    shelf.see.load_gate.clear()
    calls = [asyncio.ensure_future(shelf.arbiter.request("see", "m", n)) for n in range(3)]
    await pump()
    shelf.see.load_gate.set()
    assert sorted(await asyncio.gather(*calls)) == [f"m did {n}" for n in range(3)]  # type: ignore[type-var]
    assert shelf.see.loads == ["m"]


async def test_holders_share_one_load(shelf: Shelf) -> None:
    shelf.see.load_gate.clear()
    async with AsyncExitStack() as stack:
        entering = [
            asyncio.ensure_future(stack.enter_async_context(shelf.arbiter.acquire("see", "m")))
            for _ in range(3)
        ]
        await pump()
        shelf.see.load_gate.set()
        handles = await asyncio.gather(*entering)
        assert {handle.backend for handle in handles} == {"backend of m"}
    assert shelf.see.loads == ["m"]


async def test_loads_of_different_capabilities_overlap(shelf: Shelf) -> None:
    shelf.see.load_gate.clear()
    shelf.hear.load_gate.clear()
    calls = [asyncio.ensure_future(shelf.arbiter.request(name, "m", 1)) for name in ("see", "hear")]
    await until(lambda: shelf.see.loads and shelf.hear.loads)
    shelf.hear.load_gate.set()
    assert await calls[1] == "m did 1"
    shelf.see.load_gate.set()
    await calls[0]


async def test_runs_of_one_model_are_in_turn_and_capabilities_are_not(shelf: Shelf) -> None:
    shelf.see.run_gate.clear()
    calls = [asyncio.ensure_future(shelf.arbiter.request("see", "m", n)) for n in range(3)]
    await until(lambda: shelf.see.running)
    assert await shelf.arbiter.request("hear", "m", 1) == "m did 1"
    shelf.see.run_gate.set()
    await asyncio.gather(*calls)
    assert shelf.see.runs == [0, 1, 2]
    assert shelf.see.most_running == 1


async def test_a_capability_may_allow_several_runs_at_once(shelf: Shelf) -> None:
    toy = Toy()
    shelf.arbiter.register(capability("embed", DRAFTER, toy, concurrency=2))
    toy.run_gate.clear()
    calls = [asyncio.ensure_future(shelf.arbiter.request("embed", "m", n)) for n in range(3)]
    await until(lambda: toy.running == 2)
    await pump()
    toy.run_gate.set()
    await asyncio.gather(*calls)
    assert toy.most_running == 2


async def test_too_many_waiting_are_refused_and_a_cancelled_one_makes_place(shelf: Shelf) -> None:
    toy = Toy()
    shelf.arbiter.register(capability("embed", DRAFTER, toy, max_waiting=1))
    await shelf.arbiter.request("embed", "m", 0)
    toy.run_gate.clear()
    calls = [asyncio.ensure_future(shelf.arbiter.request("embed", "m", n)) for n in (1, 2)]
    await until(lambda: toy.running)
    with pytest.raises(errors.QueueFull) as refused:
        await shelf.arbiter.request("embed", "m", 3)
    assert refused.value.retry_after_s is not None
    calls[1].cancel()
    await asyncio.gather(calls[1], return_exceptions=True)
    last = asyncio.ensure_future(shelf.arbiter.request("embed", "m", 4))
    await pump()
    toy.run_gate.set()
    await asyncio.gather(calls[0], last)
    assert toy.runs == [0, 1, 4]


async def test_a_failing_run_fails_its_own_request_only_and_releases(shelf: Shelf) -> None:
    shelf.see.run_error = ValueError("bad picture")
    with pytest.raises(ValueError, match="bad picture"):
        await shelf.arbiter.request("see", "m", 1)
    shelf.see.run_error = None
    assert await shelf.arbiter.request("see", "m", 2) == "m did 2"
    assert [one.is_failed for one in shelf.told(CapabilityRun)] == [True, False]  # type: ignore[union-attr]
    shelf.press(PressureLevel.CRITICAL)
    await until(lambda: not shelf.resident())


async def test_a_failed_load_fails_all_who_share_it_and_is_tried_again(shelf: Shelf) -> None:
    shelf.see.load_error = OSError("no such file")
    calls = [
        asyncio.ensure_future(shelf.arbiter.acquire("see", "m").__aenter__()) for _ in range(2)
    ]
    for failed in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(failed, errors.LoadFailed)
        assert "no such file" in str(failed)
    shelf.see.load_error = errors.NotFound("no model is called m")
    with pytest.raises(errors.NotFound, match="called m"):
        await shelf.arbiter.request("see", "m", 1)
    shelf.see.load_error = None
    assert await shelf.arbiter.request("see", "m", 1) == "m did 1"


async def test_what_was_measured_is_counted(shelf: Shelf) -> None:
    shelf.see.measured = 321
    await shelf.arbiter.request("see", "m", 1)
    (one,) = shelf.arbiter.status().residents
    assert (one.estimate_bytes, one.measured_bytes) == (100, 321)
    shelf.arbiter.measure("see", "m", 400)
    assert shelf.arbiter.status().committed_bytes == 400


# Cancellation and deadlines.


async def test_cancelling_a_request_cancels_its_run_and_releases(shelf: Shelf) -> None:
    shelf.see.run_gate.clear()
    call = asyncio.ensure_future(shelf.arbiter.request("see", "m", 1))
    await until(lambda: shelf.see.running)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert shelf.see.cancelled == 1
    shelf.press(PressureLevel.CRITICAL)
    await until(lambda: not shelf.resident())


async def test_a_request_that_waits_can_be_cancelled(shelf: Shelf) -> None:
    """(d) Queued requests could not."""
    async with shelf.arbiter.acquire("see", "a"):
        call = asyncio.ensure_future(shelf.arbiter.request("see", "b", 1))
        await until(lambda: shelf.arbiter.status().waiting)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert not shelf.arbiter.status().waiting
    await pump()
    assert shelf.see.loads == ["a"]


async def test_cancelled_at_the_very_grant_nothing_leaks(shelf: Shelf) -> None:
    shelf.see.load_gate.clear()
    call = asyncio.ensure_future(shelf.arbiter.request("see", "m", 1))
    await until(lambda: shelf.see.loads)
    shelf.see.load_gate.set()
    for _ in range(20):
        if shelf.arbiter.status().residents[0].leases:
            break
        await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert not shelf.arbiter.status().residents[0].leases


async def test_a_run_beyond_its_time_is_cancelled(shelf: Shelf) -> None:
    shelf.see.run_gate.clear()
    call = asyncio.ensure_future(shelf.arbiter.request("see", "m", 1, Terms(timeout_s=3)))
    await until(lambda: shelf.see.running)
    shelf.clock.advance(3)
    with pytest.raises(errors.DeadlineExceeded, match="within 3 s"):
        await call
    assert shelf.see.cancelled == 1


@pytest.mark.parametrize("timeout_s", [3.0, float("inf")])
async def test_a_time_out_of_the_handlers_own_is_what_the_caller_gets(
    shelf: Shelf, timeout_s: float
) -> None:
    shelf.see.run_error = TimeoutError("the camera's socket timed out")
    with pytest.raises(TimeoutError, match="camera's socket"):
        await shelf.arbiter.request("see", "m", 1, Terms(timeout_s=timeout_s))


async def test_a_deadline_that_cannot_be_met_is_told_at_once_with_the_estimate(
    shelf: Shelf,
) -> None:
    """S3.4, R8. (d) There was no deadline-aware admission. A slow minute is forgotten."""
    shelf.see.load_gate.clear()
    call = asyncio.ensure_future(shelf.arbiter.request("see", "m", 1))
    await until(lambda: shelf.see.loads)
    shelf.clock.advance(47)
    shelf.see.load_gate.set()
    await call
    await shelf.arbiter.request("see", "m", 1, Terms(timeout_s=30))
    shelf.arbiter.unload("see", "m")
    await until(lambda: not shelf.resident())
    with pytest.raises(errors.DeadlineExceeded, match=r"estimated to take 47 s.*deadline is 30 s"):
        await shelf.arbiter.request("see", "m", 1, Terms(timeout_s=30))
    await until(lambda: shelf.resident() == {"see:m"} or shelf.see.loads == ["m", "m"])
    shelf.clock.advance(601)
    await shelf.arbiter.request("see", "m", 1, Terms(timeout_s=30))


@pytest.mark.parametrize(
    ("load_s", "run_s", "share"), [(40.0, 3.0, 0.1), (40.0, 3.0, 0.98), (0.5, 9.0, 0.9)]
)
async def test_a_time_too_short_for_load_and_run_is_told_at_once_and_the_next_try_is_served(
    load_s: float, run_s: float, share: float
) -> None:
    """S3.4: a holder that runs the model by itself says what it needs after the load."""
    clock = FakeClock()

    class Slow(Toy):
        async def load(self, model_key: str) -> Loaded:
            await clock.sleep(load_s)
            return await super().load(model_key)

    toy = Slow()
    terms = Terms(timeout_s=(load_s + run_s) * share, run_s=run_s)
    async with MemoryArbiter(budget=1000, clock=clock, grace_s=0) as arbiter:
        arbiter.register(capability("text", TEXT_TARGET, toy))
        async with arbiter.acquire("text", "m", Terms()):
            pass
        arbiter.unload("text", "m")
        await until(lambda: not arbiter.status().residents)
        began = clock.mono()
        with pytest.raises(errors.ModelLoading, match=r"to load and .* to answer") as refused:
            async with arbiter.acquire("text", "m", terms):
                pass
        assert clock.mono() == began
        await clock.sleep(refused.value.retry_after_s or 0.0)
        async with arbiter.acquire("text", "m", replace(terms, timeout_s=run_s)):
            assert clock.mono() <= began + max(1.0, load_s) + 0.001


async def test_a_load_that_is_nearly_over_is_not_counted_from_its_beginning(shelf: Shelf) -> None:
    async def begin() -> asyncio.Future[object]:
        shelf.see.load_gate.clear()
        loads = len(shelf.see.loads)
        call = asyncio.ensure_future(shelf.arbiter.request("see", "m", 1))
        await until(lambda: len(shelf.see.loads) > loads)
        return call

    first = await begin()
    shelf.clock.advance(6)
    shelf.see.load_gate.set()
    await first
    shelf.arbiter.unload("see", "m")
    await until(lambda: not shelf.resident())
    second = await begin()
    shelf.clock.advance(5.5)
    with pytest.raises(errors.DeadlineExceeded, match=r"estimated to take 0\.5 s"):
        await shelf.arbiter.request("see", "m", 2, Terms(timeout_s=0.4))
    third = asyncio.ensure_future(shelf.arbiter.request("see", "m", 3, Terms(timeout_s=3)))
    await until(lambda: len(shelf.arbiter.status().waiting) == 1)
    shelf.see.load_gate.set()
    assert await second == "m did 1"
    assert await third == "m did 3"


# Handles.


async def test_a_handle_is_released_once_and_useless_afterwards(shelf: Shelf) -> None:
    async with shelf.arbiter.acquire("see", "m") as handle:
        other = handle.retain()
        assert await handle.run(1) == "m did 1"
        handle.release()
        handle.release()
        for wish in ("use", "run", "retain"):
            with pytest.raises(errors.Conflict, match=f"cannot {wish} see:m after release"):
                await _do(handle, wish)
        assert other.backend == "backend of m"
    assert shelf.arbiter.status().residents[0].leases
    with other:
        pass
    assert not shelf.arbiter.status().residents[0].leases


async def _do(handle: object, wish: str) -> None:
    match wish:
        case "use":
            handle.backend  # type: ignore[attr-defined]  # noqa: B018
        case "run":
            await handle.run(1)  # type: ignore[attr-defined]
        case "retain":
            handle.retain()  # type: ignore[attr-defined]


async def test_a_holder_does_not_wait_for_who_waits_for_the_model(shelf: Shelf) -> None:
    """A swap waits for the holder, a request behind the swap; the holder's runs must go on."""
    async with shelf.arbiter.acquire("see", "a") as handle:
        swap = asyncio.ensure_future(shelf.arbiter.request("see", "b", 2))
        await until(lambda: shelf.arbiter.status().waiting)
        behind = asyncio.ensure_future(shelf.arbiter.request("see", "a", 3))
        await until(lambda: len(shelf.arbiter.status().waiting) == 2)
        running = asyncio.ensure_future(handle.run(1))
        await until(running.done)
        assert await running == "a did 1"
    assert await swap == "b did 2"
    assert await behind == "a did 3"


async def test_a_release_at_rest_walks_nothing_and_counts_no_tenant(shelf: Shelf) -> None:
    async with shelf.arbiter.acquire("see", "m"), shelf.arbiter.acquire("text", "m"):
        pass
    handle = shelf.arbiter.try_acquire("see", "m")
    assert handle is not None
    calls: list[str] = []

    def count(frame: FrameType, what: str, _: object) -> None:
        if what == "call" and "/kakeya/" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(count)
    try:
        handle.release()
    finally:
        sys.setprofile(None)
    assert not {"Arbiter.settle", "Keeper.count_tenants", "Keeper.take"} & set(calls)
    assert len([name for name in calls if "<genexpr>" not in name]) <= 30, calls
    resident = shelf.arbiter.find("see", "m")
    assert resident is not None
    assert resident.is_idle


async def test_a_held_model_survives_pressure_and_goes_when_released(shelf: Shelf) -> None:
    async with shelf.arbiter.acquire("see", "m") as handle:
        shelf.press(PressureLevel.CRITICAL)
        await pump()
        assert await handle.run(1) == "m did 1"
        assert shelf.told(Exhausted)
    await until(lambda: not shelf.resident())
    assert shelf.told(Evicted) == [Evicted(key=key("see:m"), reason="pressure", bytes=100)]  # type: ignore[arg-type]


# Swaps, events, pressure.


async def test_capabilities_of_one_role_take_turns(shelf: Shelf) -> None:
    for name in ("see", "draw", "see"):
        await shelf.arbiter.request(name, "m", 1)
    assert shelf.resident() == {"see:m"}
    assert [(one.key.capability, one.reason) for one in shelf.told(ModelUnload)] == [  # type: ignore[union-attr]
        ("see", "swap"),
        ("draw", "swap"),
    ]
    assert len(shelf.told(Evicted)) == 2


async def test_a_swap_waits_for_the_run_of_another_and_does_not_cancel_it(shelf: Shelf) -> None:
    shelf.see.run_gate.clear()
    running = asyncio.ensure_future(shelf.arbiter.request("see", "m", 1))
    await until(lambda: shelf.see.running)
    swap = asyncio.ensure_future(shelf.arbiter.request("draw", "m", 2))
    await pump()
    assert not shelf.see.unloads
    shelf.see.run_gate.set()
    assert await running == "m did 1"
    assert await swap == "m did 2"


async def test_events_tell_of_pressure_changes_only(shelf: Shelf) -> None:
    for level in (
        PressureLevel.LOW,
        PressureLevel.LOW,
        PressureLevel.CRITICAL,
        PressureLevel.NOMINAL,
    ):
        shelf.press(level)
    assert [one.level for one in shelf.told(MemoryPressure)] == [  # type: ignore[union-attr]
        PressureLevel.LOW,
        PressureLevel.CRITICAL,
        PressureLevel.NOMINAL,
    ]


async def test_a_listener_can_leave_and_one_that_raises_is_dropped(shelf: Shelf) -> None:
    heard: list[Event] = []
    calls: list[Event] = []

    def broken(happened: Event) -> None:
        calls.append(happened)
        raise RuntimeError("broken listener")

    shelf.arbiter.on_event(broken)
    leave = shelf.arbiter.on_event(heard.append)
    shelf.press(PressureLevel.LOW)
    shelf.press(PressureLevel.NOMINAL)
    assert heard
    count = len(heard)
    leave()
    leave()
    shelf.press(PressureLevel.LOW)
    assert len(calls) == 1
    assert len(heard) == count


async def test_an_idle_model_leaves_when_its_time_is_over(shelf: Shelf) -> None:
    terms = Terms(warmth=Warmth(stay_warm_s=1, unload_after_s=30))
    await shelf.arbiter.request("see", "m", 1, terms)
    await pump()
    shelf.clock.advance(29)
    await pump()
    assert shelf.resident() == {"see:m"}
    shelf.clock.advance(1)
    await until(lambda: not shelf.resident())
    assert shelf.told(ModelUnload) == [ModelUnload(key=key("see:m"), reason="idle")]  # type: ignore[arg-type]
    assert not shelf.told(Evicted), "nobody took it"


async def test_vision_displaces_idle_text_only_when_allowed(shelf: Shelf) -> None:
    """S0.34 by R3."""
    shelf.arbiter.set_budget(150)
    await shelf.arbiter.request("text", "m", 1)
    with pytest.raises(errors.MemoryRefused, match="cannot be evicted"):
        await shelf.arbiter.request("see", "m", 1)
    terms = Terms(priority=RequestPriority.HIGH, may_displace_text=True)
    call = asyncio.ensure_future(shelf.arbiter.request("see", "m", 1, terms))
    for _ in range(100):
        await pump(20)
        if call.done():
            break
        shelf.clock.advance(5)
    assert await call == "m did 1"
    assert shelf.told(Evicted) == [
        Evicted(key=key("text:m"), reason=Reason.SWAP, bytes=100, room_for=key("see:m"))
    ]


async def test_preload_begins_a_load_that_a_request_shares(shelf: Shelf) -> None:
    shelf.see.load_gate.clear()
    assert await shelf.arbiter.preload("see", "m")
    await until(lambda: shelf.see.loads)
    assert await shelf.arbiter.preload("see", "m")
    call = asyncio.ensure_future(shelf.arbiter.request("see", "m", 1))
    await pump()
    shelf.see.load_gate.set()
    assert await call == "m did 1"
    assert shelf.see.loads == ["m"]
    shelf.press(PressureLevel.LOW)
    assert not await shelf.arbiter.preload("hear", "m")


# Unloading.


async def test_an_unload_that_raises_is_survived(shelf: Shelf) -> None:
    shelf.see.unload_error = RuntimeError("stuck driver")
    await shelf.arbiter.request("see", "m", 1)
    await shelf.arbiter.request("draw", "m", 1)
    assert shelf.resident() == {"draw:m"}


async def test_an_unload_that_does_not_end_stops_nobody_and_stays_counted(shelf: Shelf) -> None:
    shelf.see.unload_gate.clear()
    await shelf.arbiter.request("see", "m", 1)
    call = asyncio.ensure_future(shelf.arbiter.request("draw", "m", 1))
    await until(lambda: shelf.see.unloads)
    await pump()
    assert not call.done()
    shelf.clock.advance(30)
    assert await call == "m did 1"
    assert shelf.arbiter.status().foreign == {"unload of see:m": 100}
    shelf.see.unload_gate.set()
    await until(lambda: not shelf.arbiter.status().foreign)


async def test_a_model_whose_unload_does_not_end_is_not_loaded_until_it_does(shelf: Shelf) -> None:
    shelf.see.unload_gate.clear()
    await shelf.arbiter.request("see", "m", 1)
    shelf.arbiter.unload("see", "m")
    await until(lambda: shelf.see.unloads)
    shelf.clock.advance(30)
    await until(lambda: not shelf.resident())
    for _ in range(2):
        with pytest.raises(errors.MemoryRefused, match="unload of see:m does not end") as refused:
            await shelf.arbiter.request("see", "m", 2)
        assert refused.value.retry_after_s == 30
    assert shelf.see.loads == ["m"]
    assert shelf.arbiter.status().foreign == {"unload of see:m": 100}
    assert shelf.arbiter.status().committed_bytes == 100
    shelf.see.unload_gate.set()
    await until(lambda: not shelf.arbiter.status().foreign)
    assert await shelf.arbiter.request("see", "m", 3) == "m did 3"


async def test_a_model_in_use_is_not_unloaded_by_hand(shelf: Shelf) -> None:
    async with shelf.arbiter.acquire("see", "m"):
        with pytest.raises(errors.Conflict):
            shelf.arbiter.unload("see", "m")
    shelf.arbiter.unload("see", "m")
    shelf.arbiter.unload("see", "m")
    await until(lambda: not shelf.resident())
    assert shelf.see.unloads == ["m"]


# Tenants and embeddings.


@dataclass
class Pages:
    held: int = 300
    spare: int = 200
    fault: BaseException | None = None
    asked: list[int] = field(default_factory=list)

    def usage(self) -> Tenant:
        return Tenant(name="pages", rung=Rung.PAGES, held_bytes=self.held, spare_bytes=self.spare)

    async def shrink(self, size: int) -> None:
        self.asked.append(size)
        if self.fault is not None:
            raise self.fault
        self.held -= size
        self.spare -= size


async def test_pressure_waits_for_no_slow_unload_and_a_load_for_all_before_it(
    shelf: Shelf,
) -> None:
    pages = Pages()
    shelf.arbiter.add_tenant(pages)
    shelf.see.unload_gate.clear()
    await shelf.arbiter.request("see", "m", 1)
    await shelf.arbiter.request("hear", "m", 1)
    swap = asyncio.ensure_future(shelf.arbiter.request("draw", "m", 1))
    await until(lambda: shelf.see.unloads)
    shelf.press(PressureLevel.CRITICAL)
    await until(lambda: pages.asked and shelf.hear.unloads)
    shelf.press(PressureLevel.NOMINAL)
    later = asyncio.ensure_future(shelf.arbiter.request("hear", "m", 2))
    await pump()
    assert shelf.hear.loads == ["m"], "it may count on the room that the swap makes"
    shelf.see.unload_gate.set()
    assert await asyncio.gather(swap, later) == ["m did 1", "m did 2"]


async def test_a_request_during_an_unload_loads_anew_when_that_has_ended(shelf: Shelf) -> None:
    shelf.see.unload_gate.clear()
    warm = Warmth(unload_after_s=5)
    await shelf.arbiter.request("see", "m", 1, Terms(warmth=warm))
    shelf.clock.advance(5)
    await until(lambda: shelf.see.unloads)
    calls = [asyncio.ensure_future(shelf.arbiter.request("see", "m", n)) for n in (2, 3)]
    await pump()
    assert shelf.see.loads == ["m"]
    shelf.see.unload_gate.set()
    assert await asyncio.gather(*calls) == ["m did 2", "m did 3"]
    assert (shelf.see.loads, shelf.see.unloads) == (["m", "m"], ["m"])


async def test_a_tenant_is_asked_for_one_thing_after_the_other(shelf: Shelf) -> None:
    pages, gate = Pages(spare=300), asyncio.Event()
    most = inside = 0
    plain = pages.shrink

    async def slow(size: int) -> None:
        nonlocal most, inside
        inside += 1
        most = max(most, inside)
        await gate.wait()
        await plain(size)
        inside -= 1

    pages.shrink = slow  # type: ignore[method-assign]
    shelf.arbiter.add_tenant(pages)
    for wanted in (50, 150):
        reading = Reading(level=PressureLevel.CRITICAL, source="test", spare_bytes=-wanted)
        shelf.arbiter.observe(reading)
    await pump()
    gate.set()
    await until(lambda: pages.held == 150)
    assert (pages.asked, most) == ([50, 100], 1)
    assert shelf.arbiter.status().committed_bytes == 150


async def test_a_tenant_that_leaves_while_it_gives_says_nothing_of_its_successor(
    shelf: Shelf,
) -> None:
    pages, gate = Pages(), asyncio.Event()

    async def slow(size: int) -> None:
        pages.asked.append(size)
        await gate.wait()
        pages.held -= size

    pages.shrink = slow  # type: ignore[method-assign]
    shelf.arbiter.add_tenant(pages)
    shelf.arbiter.observe(Reading(level=PressureLevel.CRITICAL, source="test", spare_bytes=-50))
    await until(lambda: pages.asked)
    shelf.arbiter.remove_tenant("pages")
    assert shelf.arbiter.status().committed_bytes == 0
    shelf.press(PressureLevel.NOMINAL)
    gate.set()
    await pump()
    shelf.arbiter.add_tenant(Pages(held=10, spare=0))
    assert shelf.arbiter.status().committed_bytes == 10
    assert await shelf.arbiter.request("see", "m", 1) == "m did 1"


async def test_a_tenant_whose_shrink_does_not_end_stops_nobody_and_stays_counted(
    shelf: Shelf,
) -> None:
    pages = Pages(held=850, spare=850)
    plain = pages.shrink

    async def slow(size: int) -> None:
        await shelf.draw.run_gate.wait()
        await plain(size)

    pages.shrink = slow  # type: ignore[method-assign]
    shelf.arbiter.add_tenant(pages)
    shelf.draw.run_gate.clear()
    await shelf.arbiter.request("see", "m", 1)
    first = asyncio.ensure_future(shelf.arbiter.request("hear", "m", 1))
    second = asyncio.ensure_future(shelf.arbiter.request("text", "m", 1))
    await pump()
    shelf.clock.advance(30)
    await until(first.done)
    shelf.clock.advance(30)  # past the turn of the one that was just loaded
    await until(second.done)
    assert shelf.see.unloads == shelf.hear.unloads == ["m"], "other room was found"
    status = shelf.arbiter.status()
    assert (status.committed_bytes, status.tenants[1].spare_bytes) == (950, 0)
    pages.held += 1
    shelf.draw.run_gate.set()
    await until(lambda: pages.held == 801)
    assert await shelf.arbiter.request("hear", "m", 2) == "m did 2"
    assert pages.asked == [50, 1], "and for no more while that did not end"


async def test_a_tenant_gives_room_before_a_model_goes(shelf: Shelf) -> None:
    pages = Pages()
    shelf.arbiter.add_tenant(pages)
    with pytest.raises(errors.Conflict):
        shelf.arbiter.add_tenant(pages)
    shelf.arbiter.set_budget(450)
    await shelf.arbiter.request("hear", "m", 1)
    await shelf.arbiter.request("see", "m", 1)
    assert pages.asked == [50]
    assert shelf.resident() == {"hear:m", "see:m"}


FAULTS = (RuntimeError("arena is broken"), asyncio.CancelledError())
"""The second is what gRPC raises when somebody closes the channel of a call."""


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
async def test_what_else_was_to_go_goes_although_a_tenant_failed(
    shelf: Shelf, fault: BaseException
) -> None:
    pages = Pages(held=100, spare=100, fault=fault)
    shelf.arbiter.add_tenant(pages)
    shelf.arbiter.set_budget(200)
    await shelf.arbiter.request("hear", "m", 1, Terms(warmth=Warmth()))
    waiting = asyncio.ensure_future(
        shelf.arbiter.request("hear", "larger", 1, Terms(warmth=Warmth()))
    )
    shelf.arbiter.observe(Reading(level=PressureLevel.CRITICAL, source="test", spare_bytes=-50))
    shelf.press(PressureLevel.NOMINAL)
    assert await waiting == "larger did 1"
    assert shelf.hear.unloads == ["m"]
    shelf.arbiter.set_budget(100)
    await until(lambda: shelf.hear.unloads == ["m", "larger"])
    assert pages.asked


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
async def test_a_load_that_is_cancelled_from_within_is_a_failed_one(
    shelf: Shelf, fault: BaseException
) -> None:
    shelf.see.load_error = fault
    with pytest.raises(errors.LoadFailed):
        await shelf.arbiter.request("see", "m", 1)
    shelf.see.load_error = None
    assert await shelf.arbiter.request("see", "m", 2) == "m did 2"


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
async def test_a_tenant_that_fails_to_shrink_is_survived(
    shelf: Shelf, fault: BaseException
) -> None:
    pages = Pages(fault=fault)
    shelf.arbiter.add_tenant(pages)
    shelf.arbiter.set_budget(450)
    await shelf.arbiter.request("hear", "m", 1, Terms(warmth=Warmth()))
    assert await shelf.arbiter.request("see", "m", 1, Terms(warmth=Warmth())) == "m did 1"
    assert shelf.resident() == {"see:m"}
    assert len(pages.asked) == 1


async def test_room_for_a_tenant_is_made_of_idle_text_in_its_turn(shelf: Shelf) -> None:
    shelf.arbiter.add_tenant(Pages(held=0, spare=0))
    shelf.arbiter.set_budget(110)
    await shelf.arbiter.request("text", "m", 1, Terms(warmth=Warmth(stay_warm_s=300)))
    assert not shelf.arbiter.may_grow("pages", 20), "it takes nobody's room"
    room = asyncio.create_task(shelf.arbiter.make_room("pages", 20, 10))
    await pump()
    assert not room.done(), "an equal that is kept warm goes first when it has aged"
    shelf.clock.advance(5)
    await asyncio.wait_for(room, 5)
    status = shelf.arbiter.status()
    assert (shelf.text.unloads, status.residents, status.committed_bytes) == (["m"], (), 20)
    shelf.arbiter.grown("pages")
    assert shelf.arbiter.status().committed_bytes == 0


async def test_room_for_a_tenant_is_never_made_of_what_is_in_use(shelf: Shelf) -> None:
    """And who uses it is joined by others meanwhile; in the end it is refused."""
    shelf.arbiter.add_tenant(Pages(held=0, spare=0))
    shelf.arbiter.set_budget(110)
    async with shelf.arbiter.acquire("see", "m"):
        room = asyncio.create_task(shelf.arbiter.make_room("pages", 20, 9))
        for _ in range(3):
            await pump()
            assert await shelf.arbiter.request("see", "m", 1) == "m did 1"
            shelf.clock.advance(3)
        with pytest.raises(errors.DeadlineExceeded):
            await asyncio.wait_for(room, 5)
        assert shelf.resident() == {"see:m"}


async def test_room_for_a_tenant_is_refused_under_critical_pressure_and_when_asker_leaves(
    shelf: Shelf,
) -> None:
    shelf.arbiter.add_tenant(Pages(held=0, spare=0))
    room = asyncio.create_task(shelf.arbiter.make_room("pages", 20, 10))
    await asyncio.sleep(0)
    room.cancel()
    await pump()
    assert shelf.arbiter.status().committed_bytes == 0
    with pytest.raises(errors.NotFound, match="no tenant is called"):
        await shelf.arbiter.make_room("sessions", 20, 10)
    shelf.press(PressureLevel.CRITICAL)
    with pytest.raises(errors.MemoryRefused, match="critical"):
        await shelf.arbiter.make_room("pages", 20, 10)


def _embedding(size: int = 8) -> VisionEmbedding:
    return VisionEmbedding(tokens=memoryview(bytes(size)), token_count=2, hidden_size=size // 2)


async def test_embeddings_are_counted_purged_at_low_and_dropped_with_vision(shelf: Shelf) -> None:
    shelf.arbiter.cache_embedding("old", _embedding())
    shelf.clock.advance(200)
    shelf.arbiter.cache_embedding("new", _embedding(16))
    assert shelf.arbiter.status().committed_bytes == 24
    shelf.clock.advance(100)
    shelf.press(PressureLevel.LOW)
    await until(lambda: shelf.arbiter.status().committed_bytes == 16)
    assert shelf.arbiter.cached_embedding("new") is not None
    shelf.press(PressureLevel.CRITICAL)
    await until(lambda: shelf.arbiter.status().committed_bytes == 0)
    shelf.press(PressureLevel.NOMINAL)
    shelf.arbiter.cache_embedding("new", _embedding())
    await shelf.arbiter.request("see", "m", 1)
    shelf.press(PressureLevel.LOW)
    await until(lambda: not shelf.resident())
    assert shelf.arbiter.cached_embedding("new") is None


async def test_images_fill_the_budget_and_never_more_and_no_model_goes_for_them() -> None:
    toy = Toy()
    async with MemoryArbiter(budget=100, clock=ManualClock(), grace_s=0) as arbiter:
        arbiter.register(capability("hear", ASR, toy, size=50))
        await arbiter.request("hear", "m", 1)
        for number in range(40):
            arbiter.cache_embedding(str(number), _embedding(20))
            assert arbiter.status().committed_bytes <= 100
        arbiter.observe(Reading(level=PressureLevel.NOMINAL, source="test"))
        await pump()
        assert not toy.unloads
        assert arbiter.status().committed_bytes == 90, "the newest two"
        assert arbiter.cached_embedding("39") is not None


async def test_images_leave_for_a_request_that_needs_their_room() -> None:
    async with MemoryArbiter(budget=100, clock=FakeClock(), grace_s=0) as arbiter:
        arbiter.register(capability("text", TEXT_TARGET, Toy(), size=50))
        for key_of in "abc":
            arbiter.cache_embedding(key_of, _embedding(30))
        assert await arbiter.request("text", "m", 1) == "m did 1"
        assert [arbiter.cached_embedding(one) is not None for one in "abc"] == [0, 0, 1]


async def test_a_run_holds_its_model_although_the_handle_is_released_meanwhile(
    shelf: Shelf,
) -> None:
    shelf.see.run_gate.clear()
    async with shelf.arbiter.acquire("see", "m") as handle:
        running = asyncio.ensure_future(handle.run(1))
        waiting = asyncio.ensure_future(handle.run(2))
        await until(lambda: shelf.see.running)
    shelf.press(PressureLevel.CRITICAL)
    await pump()
    assert not shelf.see.unloads
    shelf.see.run_gate.set()
    assert await asyncio.gather(running, waiting) == ["m did 1", "m did 2"]
    await until(lambda: shelf.see.unloads == ["m"])


# The end.


async def test_shutdown_unloads_everything_and_a_second_one_nothing() -> None:
    toy, text = Toy(), Toy()
    async with MemoryArbiter(budget=1000, clock=ManualClock()) as arbiter:
        arbiter.register(capability("see", VISION, toy, warmth=Warmth(is_pinned=True)))
        arbiter.register(capability("text", TEXT_TARGET, text))
        told: list[Event] = []
        arbiter.on_event(told.append)
        await arbiter.request("see", "m", 1)
        await arbiter.request("text", "m", 1)
        await arbiter.shutdown()
        await arbiter.shutdown()
    assert toy.unloads == text.unloads == ["m"]
    reasons = [one.reason for one in told if isinstance(one, ModelUnload)]
    assert reasons == ["shutdown", "shutdown"]


async def test_shutdown_gives_grace_then_refuses_who_waits_and_cancels_runs() -> None:
    """S3 (b): stop granting is one thing, killing another."""
    clock, toy = ManualClock(), Toy()
    arbiter = MemoryArbiter(budget=1000, clock=clock, grace_s=10)
    async with arbiter:
        arbiter.register(capability("see", VISION, toy))
        toy.run_gate.clear()
        running = asyncio.ensure_future(arbiter.request("see", "a", 1))
        await until(lambda: toy.running)
        waiting = asyncio.ensure_future(arbiter.request("see", "b", 2))
        await until(lambda: arbiter.status().waiting)
        end = asyncio.ensure_future(arbiter.shutdown())
        with pytest.raises(errors.Refused, match="shutting down"):
            await waiting
        await pump()
        assert not toy.cancelled
        assert not toy.unloads
        clock.advance(10)
        with pytest.raises(errors.Refused, match="shut down while see:a ran"):
            await running
        await end
        assert toy.unloads == ["a"]


async def test_shutdown_waits_for_runs_that_end_in_time() -> None:
    toy = Toy()
    arbiter = MemoryArbiter(budget=1000, clock=ManualClock(), grace_s=10)
    async with arbiter:
        arbiter.register(capability("see", VISION, toy))
        toy.run_gate.clear()
        running = asyncio.ensure_future(arbiter.request("see", "a", 1))
        await until(lambda: toy.running)
        end = asyncio.ensure_future(arbiter.shutdown())
        await pump()
        toy.run_gate.set()
        assert await running == "a did 1"
        await end
    assert (toy.unloads, toy.cancelled) == (["a"], 0)


async def test_a_load_under_way_at_shutdown_leaves_nothing_behind() -> None:
    """(d) It leaked."""
    clock, toy = ManualClock(), Toy()
    arbiter = MemoryArbiter(budget=1000, clock=clock, grace_s=0)
    async with arbiter:
        arbiter.register(capability("see", VISION, toy))
        toy.load_gate.clear()
        waiting = asyncio.ensure_future(arbiter.request("see", "a", 1))
        await until(lambda: toy.loads)
        end = asyncio.ensure_future(arbiter.shutdown())
        with pytest.raises(errors.Refused):
            await waiting
        await end
        assert not toy.live
        assert not arbiter.status().residents


async def test_a_handle_that_is_never_released_does_not_stop_the_end() -> None:
    clock, toy = ManualClock(), Toy()
    arbiter = MemoryArbiter(budget=1000, clock=clock, grace_s=0)
    async with arbiter:
        arbiter.register(capability("see", VISION, toy))
        leaked = arbiter.acquire("see", "a")
        handle = await leaked.__aenter__()
        end = asyncio.ensure_future(arbiter.shutdown())
        for _ in range(10):
            await pump()
            clock.advance(1)
        await end
        assert toy.unloads == ["a"]
        with pytest.raises(errors.Conflict, match="shut down"):
            _ = handle.backend
        handle.release()


# By the machine's own clock.


async def test_limits_ageing_and_cooldowns_pass_in_real_time() -> None:
    rules = Rules(age_s=0.02, drain_limit_s=0.1, cooldown_s=0.05)
    toy, low, text = Toy(), Toy(), Toy()
    async with MemoryArbiter(budget=250, clock=SystemClock(), rules=rules, grace_s=0) as arbiter:
        arbiter.register(capability("see", VISION, toy))
        arbiter.register(capability("hear", ASR, low))
        arbiter.register(capability("text", TEXT_TARGET, text))
        async with arbiter.acquire("see", "a"):
            with pytest.raises(errors.DrainTimeout):
                await arbiter.request("see", "b", 1)
            with pytest.raises(errors.DeadlineExceeded):
                await arbiter.request("see", "b", 1, Terms(timeout_s=0.05))
        assert await arbiter.request("hear", "a", 1) == "a did 1"
        async with asyncio.timeout(60):
            assert await arbiter.request("text", "a", 1) == "a did 1", "ageing made room"
        arbiter.observe(Reading(level=PressureLevel.LOW, source="test"))
        async with asyncio.timeout(60):
            while len(arbiter.status().residents) > 1:
                await asyncio.sleep(0.01)
    assert [toy.live, low.live, text.live] == [set()] * 3


async def test_hundreds_of_loads_leave_no_trace() -> None:
    class Heavy(Toy):
        async def load(self, model_key: str) -> Loaded:
            return Loaded(backend=bytearray(64 * 1024), measured_bytes=64 * 1024)

        async def unload(self, model_key: str, backend: object) -> None:
            return

        async def run(self, backend: object, payload: object) -> object:
            return payload

    async def cycle(arbiter: MemoryArbiter, count: int) -> int:
        for number in range(count):
            await arbiter.request("see", "ab"[number % 2], number)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    async with MemoryArbiter(budget=10**6, clock=SystemClock(), grace_s=0) as arbiter:
        arbiter.register(capability("see", VISION, Heavy()))
        tracemalloc.start()
        try:
            before = await cycle(arbiter, 100)
            after = await cycle(arbiter, 200)
        finally:
            tracemalloc.stop()
    assert after - before < 64 * 1024, "less than one model in 200 cycles"
