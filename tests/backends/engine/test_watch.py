"""Engines that outgrow their lease: real children, a real arbiter, and streams that go on."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.backends.engine import watch
from kakeya.backends.engine.backend import EngineBackend
from kakeya.backends.engine.escalation import EscalationRules, Stage
from kakeya.backends.engine.kv_lender import most_kv_bytes
from kakeya.backends.engine.lease import with_copy
from kakeya.backends.engine.watch import EngineWatch, tenant_name
from kakeya.core.clock import SystemClock
from kakeya.core.errors import KvRefused
from kakeya.core.process import resident_bytes
from kakeya.generation.facts import Footprint, ModelState
from kakeya.generation.frames import Done, Tokens
from kakeya.generation.request import DecodeRequest, Sampling
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.arbiter.capability import Capability, Loaded
from kakeya.memory.arbiter.events import EngineDrained, EngineKilled, EngineShrunk, MemoryPressure
from kakeya.memory.arbiter.policy import PressureLevel, Rung, Tenant
from kakeya.memory.arbiter.resident import TEXT_TARGET, ResidentKey
from kakeya.memory.machine.pressure import FootprintPressure as PressureSight
from kakeya.memory.machine.pressure import Reading
from kakeya.memory.pressure_sources import footprint
from tests import findings
from tests.backends.engine.test_backend import FAST, is_alive
from tests.mlx.random_models import write_model
from tests.waiting import until

MIB = 1 << 20
GIB = 1 << 30
BLOCK_BYTES = 256 * 2 * 2 * 2 * 16 * 4
QUICK = EscalationRules(shrink_wait_s=0.1, ask_again_s=0.5, drain_s=0.3, end_s=30.0)
PATIENT = replace(FAST, start_timeout_s=120.0, resume_timeout_s=120.0, call_timeout_s=60.0)
"""Nothing here is about time: a busy machine may take its own."""
PROMPT = [3 + 7 * at % 90 for at in range(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights and a long context: KV is what takes the memory."""
    folder = write_model(tmp_path_factory.mktemp("model") / "llama", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return folder


def command(model: Path, *greedy: object):
    child = (
        ("tests.node.child_greedy", *map(str, greedy)) if greedy else ("kakeya.node.engine_main",)
    )

    def on_socket(socket: Path):
        options = ("--socket", str(socket), "--model", str(model), "--model-id", "toy")
        return (sys.executable, "-m", *child, *options, *findings.flags())

    return on_socket


class Handler:
    """Loads one backend, as a node's does."""

    def __init__(self, make) -> None:
        self.make = make
        self.backend: EngineBackend | None = None

    async def load(self, model_key: str) -> Loaded:
        self.backend = self.make()
        await self.backend.start()
        await self.backend.ready(120.0)
        return Loaded(backend=self.backend, measured_bytes=await size_of(self.backend))

    async def unload(self, model_key: str, backend: object) -> None:
        assert isinstance(backend, EngineBackend)
        await backend.aclose()

    async def run(self, backend: object, payload: object) -> object:
        raise NotImplementedError


async def size_of(backend: EngineBackend) -> int:
    size = await asyncio.to_thread(resident_bytes, backend.pid)
    assert size is not None
    return size


class World:
    """An arbiter with one loaded engine under watch, and what was told."""

    def __init__(self, arbiter: MemoryArbiter, watch: EngineWatch, backend: EngineBackend) -> None:
        self.arbiter, self.watch, self.backend = arbiter, watch, backend
        self.told: list[object] = []
        arbiter.on_event(self.told.append)

    def events(self, *kinds: type) -> list[object]:
        return [one for one in self.told if isinstance(one, kinds)]

    @property
    def stage(self) -> str:
        return str(self.watch.status()["toy"]["stage"])

    def resident(self):
        (found,) = self.arbiter.status().residents
        return found

    def tenant(self):
        (found,) = [t for t in self.arbiter.status().tenants if t.name == tenant_name("toy")]
        return found


@asynccontextmanager
async def world(
    model: Path, *greedy: object, poll_s: float = 0.05, rules=QUICK
) -> AsyncIterator[World]:
    handler = Handler(lambda: EngineBackend("toy", command(model, *greedy), options=PATIENT))
    clock = SystemClock()
    async with MemoryArbiter(budget=4 * GIB, clock=clock) as arbiter:
        arbiter.register(
            Capability(name="text", role=TEXT_TARGET, handler=handler, estimate=lambda _: GIB)
        )
        async with arbiter.acquire("text", "toy"):
            assert handler.backend is not None
            async with EngineWatch(arbiter, clock, rules=rules, poll_s=poll_s) as watch:
                yield World(arbiter, watch, handler.backend)


def request(**changes: object) -> DecodeRequest:
    sampling = Sampling(temperature=1.0, seed=11)
    plain = DecodeRequest(token_ids=PROMPT, max_tokens=700, sampling=sampling)
    return replace(plain, **changes)  # type: ignore[arg-type]


async def collect(backend: EngineBackend, asked: DecodeRequest) -> list[int]:
    tokens: list[int] = []
    async with aclosing(backend.decode(asked)) as frames:
        async for frame in frames:
            if isinstance(frame, Tokens):
                tokens.extend(frame.token_ids)
    assert isinstance(frame, Done)
    return tokens


class Pages:
    """A tenant that could give all that it holds, and notes when it is asked."""

    def __init__(self, held: int) -> None:
        self.held, self.asked = held, 0

    def usage(self) -> Tenant:
        return Tenant(name="pages", rung=Rung.PAGES, held_bytes=self.held, spare_bytes=self.held)

    async def shrink(self, size: int) -> None:
        self.asked += size
        self.held -= size


_UNDISTURBED: dict[Path, list[int]] = {}


async def undisturbed(model: Path) -> list[int]:
    """What `request` gives without any fault; computed once."""
    if model not in _UNDISTURBED:
        async with world(model) as here:
            _UNDISTURBED[model] = await collect(here.backend, request())
    return _UNDISTURBED[model]


async def test_idle_kv_above_the_lease_is_given_back_and_the_engine_lives(model: Path) -> None:
    async with world(model, poll_s=3600.0) as here:
        for key in range(6):
            asked = request(token_ids=[key, *PROMPT * 6], max_tokens=2, kv_key=str(key))
            await collect(here.backend, asked)
        await here.backend.shrink(1)  # spare buffers are gone: now it costs KV
        child, grown = here.backend.pid, await size_of(here.backend)
        kept = (await here.backend.stats()).kv_live_bytes
        assert kept > 5 * MIB
        pages = Pages(64 * MIB)
        here.arbiter.add_tenant(pages)
        here.arbiter.set_budget(grown + pages.held - MIB)
        here.watch.attach("toy", here.backend, grown - 2 * MIB)
        await here.watch.look()
        assert here.arbiter.status().committed_bytes <= grown + pages.held - MIB
        assert not pages.asked, "what the engine gave back, nobody else had to"
        (told,) = here.events(EngineShrunk)
        assert told.bytes > MIB
        assert "of a lease of" in told.reason
        assert (await here.backend.stats()).kv_live_bytes < kept
        assert await size_of(here.backend) < grown - MIB
        await here.watch.look()
        assert (here.backend.pid, here.backend.restarts) == (child, 0)


@pytest.mark.slow
async def test_one_that_does_not_shrink_is_drained_and_its_stream_ends_with_the_same_tokens(
    model: Path, tmp_path: Path
) -> None:
    wanted = await undisturbed(model)
    async with world(model, "once", tmp_path / "taken", 200) as here:
        lease = await size_of(here.backend) + 60 * MIB
        pages = Pages(64 * MIB)
        here.arbiter.add_tenant(pages)
        here.watch.attach("toy", here.backend, lease)
        first = here.backend.pid
        stream = asyncio.create_task(collect(here.backend, request()))
        await until(lambda: here.resident().bytes > 1.1 * lease or here.events(EngineDrained))
        reading = await PressureSight(lambda: footprint(here.arbiter.status())).read()
        assert reading is not None
        assert reading.level is PressureLevel.NOMINAL, "its own matter while the budget holds"
        await until(lambda: here.events(EngineDrained))
        assert not pages.asked
        assert await stream == wanted
        kinds = [type(one) for one in here.events(EngineShrunk, EngineDrained, EngineKilled)]
        assert list(dict.fromkeys(kinds)) == [EngineShrunk, EngineDrained]
        # The stream may end in the first engine, before the drain ends that one.
        await until(lambda: here.backend.pid not in (None, first))
        assert not is_alive(first)
        assert here.backend.restarts == 1
        assert here.events(EngineDrained)[0].bytes > lease
        await until(lambda: here.stage == Stage.WITHIN)
        assert await collect(here.backend, request(max_tokens=20)) == wanted[:20]


@pytest.mark.slow
async def test_while_it_drains_new_sequences_wait_and_are_served_by_the_next_engine(
    model: Path, tmp_path: Path
) -> None:
    patient = replace(QUICK, drain_s=2.0)
    async with world(model, "once", tmp_path / "taken", 200, rules=patient) as here:
        here.watch.attach("toy", here.backend, await size_of(here.backend) + 60 * MIB)
        first = asyncio.create_task(collect(here.backend, request()))
        await until(lambda: here.stage == Stage.DRAINING)
        second = asyncio.create_task(collect(here.backend, request(max_tokens=20)))
        await until(lambda: here.backend.waiting == 1)
        assert here.backend.running == 1
        assert here.backend.restarts == 0
        tokens = await second
        assert here.backend.restarts == 1
        assert (await first)[:20] == tokens


async def test_one_that_does_not_end_is_killed_and_its_stream_ends_with_the_same_tokens(
    model: Path, tmp_path: Path
) -> None:
    wanted = await undisturbed(model)
    strict = replace(QUICK, end_s=0.5)
    async with world(model, "stubborn", tmp_path / "taken", 200, rules=strict) as here:
        here.watch.attach("toy", here.backend, await size_of(here.backend) + 60 * MIB)
        stream = asyncio.create_task(collect(here.backend, request()))
        await until(lambda: here.events(EngineKilled))
        assert await stream == wanted
        kinds = [type(one) for one in here.events(EngineShrunk, EngineDrained, EngineKilled)]
        assert list(dict.fromkeys(kinds)) == [EngineShrunk, EngineDrained, EngineKilled]
        assert "did not end within 0.5 s" in here.events(EngineKilled)[0].reason
        # The stream may end in the first engine, before the kill.
        await until(lambda: here.backend.state is ModelState.READY)
        assert here.watch.status()["toy"]["steps"]["kill"] == 1


@pytest.mark.slow
async def test_an_engine_is_bounded_anew_in_each_child(model: Path) -> None:
    async with world(model) as here:
        bound = await size_of(here.backend) + 100 * MIB
        await here.backend.set_limits(memory_bytes=bound, kv_bytes=8 * BLOCK_BYTES)
        assert here.backend.facts.longest_tokens == 8 * 256
        here.backend.end("is tried out")
        await until(lambda: here.backend.restarts == 1 and here.backend.state is ModelState.READY)
        footprint = await here.backend.footprint()
        assert footprint is not None
        assert footprint.limit_bytes == bound
        assert here.backend.facts.longest_tokens == 8 * 256
        assert "asked to end" not in here.backend.last_error


async def attach(here: World, blocks: int = 8) -> int:
    """Watch an engine with so many blocks of KV; returns its lease."""
    lease = await size_of(here.backend) + 300 * MIB
    key, kv = ResidentKey("text", "toy"), blocks * BLOCK_BYTES
    most = most_kv_bytes(here.arbiter.status(), key, lease, kv)
    await here.backend.set_limits(memory_bytes=lease, kv_bytes=kv, kv_most_bytes=most)
    here.watch.attach("toy", here.backend, lease)
    return lease


async def hold_sessions(here: World, count: int) -> None:
    """Let so many sessions keep eight blocks each."""
    for key in range(count):
        asked = request(token_ids=[key, *PROMPT * 6], max_tokens=2, kv_key=str(key))
        await collect(here.backend, asked)
    await here.watch.look()


async def test_the_ledger_counts_an_engine_with_its_lease_and_its_idle_kv_once(model: Path) -> None:
    async with world(model, poll_s=3600.0) as here:
        lease = await attach(here)
        await here.watch.look()
        assert here.resident().bytes == lease
        await hold_sessions(here, 1)
        assert here.tenant().lent_bytes > MIB // 2
        assert here.resident().bytes == here.arbiter.status().committed_bytes == lease
        await hold_sessions(here, 3)
        grown, spare = here.watch.status()["toy"]["lease_bytes"], here.tenant().held_bytes
        assert spare == 16 * BLOCK_BYTES
        assert grown >= lease + with_copy(spare)
        assert here.resident().bytes + spare == grown
        assert here.arbiter.status().committed_bytes == grown
        here.watch.detach("toy")
        assert here.resident().bytes == grown
        assert not [t for t in here.arbiter.status().tenants if t.name == tenant_name("toy")]


async def test_a_prompt_longer_than_the_room_of_the_load_gets_more_and_gives_it_back_at_rest(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "REST_S", 3600.0)  # it is not seen at work between two looks
    async with world(model, poll_s=3600.0) as here:
        lease = await attach(here)
        await collect(here.backend, request(token_ids=PROMPT * 20, max_tokens=2))
        assert here.backend.limits.kv_bytes >= 25 * BLOCK_BYTES
        await here.watch.look()
        assert here.resident().bytes >= lease + with_copy(17 * BLOCK_BYTES)
        monkeypatch.setattr(watch, "REST_S", 0.0)
        await here.watch.look()
        assert here.backend.limits.kv_bytes == 8 * BLOCK_BYTES
        assert here.resident().bytes == here.backend.limits.memory_bytes == lease
        footprint = await here.backend.footprint()
        assert footprint is not None
        assert footprint.limit_bytes == lease


async def test_a_prompt_for_which_there_is_no_memory_now_is_told_how_many_tokens_there_is_for(
    model: Path,
) -> None:
    async with world(model, poll_s=3600.0) as here:
        lease = await attach(here)
        here.arbiter.hold("a job", 4 * GIB - lease - with_copy(4 * BLOCK_BYTES))
        with pytest.raises(KvRefused, match=f"8192 tokens at most, and {12 * 256} now") as refused:
            await collect(here.backend, request(token_ids=PROMPT * 20, max_tokens=2))
        assert refused.value.retry_after_s is not None
        await here.watch.look()
        with pytest.raises(KvRefused, match=f"{12 * 256} tokens at most") as hopeless:
            await collect(here.backend, request(token_ids=PROMPT * 20, max_tokens=2))
        assert hopeless.value.retry_after_s is None
        here.arbiter.hold("a job", 0)
        await here.watch.look()
        assert len(await collect(here.backend, request(token_ids=PROMPT * 20, max_tokens=2))) == 2


async def test_under_pressure_idle_kv_goes_before_any_model(model: Path) -> None:
    async with world(model, poll_s=3600.0) as here:
        here.watch.attach("toy", here.backend, await size_of(here.backend) + 300 * MIB)
        await collect(here.backend, request(token_ids=PROMPT * 6, max_tokens=2, kv_key="a"))
        await here.watch.look()
        assert here.tenant().spare_bytes == 0
        here.arbiter.observe(Reading(level=PressureLevel.CRITICAL, source="test"))
        assert here.events(MemoryPressure)
        here.arbiter.observe(Reading(level=PressureLevel.CRITICAL, source="test"))
        async with asyncio.timeout(120):
            while (await here.backend.stats()).kv_live_bytes:
                await asyncio.sleep(0.01)
        assert here.backend.state is ModelState.READY


async def test_what_pressure_takes_of_a_lease_makes_no_room_for_others(model: Path) -> None:
    """Else somebody is let in for it, and both are above the budget when the lease fills again."""
    async with world(model, poll_s=3600.0) as here:
        lease = await size_of(here.backend) + 300 * MIB
        here.watch.attach("toy", here.backend, lease)
        await collect(here.backend, request(token_ids=PROMPT * 6, max_tokens=2, kv_key="a"))
        await here.watch.look()
        here.arbiter.set_budget(lease)
        here.arbiter.observe(
            Reading(level=PressureLevel.LOW, source="test", available_bytes=1 << 40)
        )
        free = [here.arbiter.status().free_bytes]
        async with asyncio.timeout(120):
            while (await here.backend.stats()).kv_live_bytes:
                free.append(here.arbiter.status().free_bytes)
                await here.watch.look()
                here.arbiter.observe(
                    Reading(level=PressureLevel.LOW, source="test", available_bytes=1 << 40)
                )
        assert max(free) <= 0
        assert here.arbiter.status().committed_bytes == lease


@pytest.mark.slow
async def test_kv_that_is_given_up_for_others_makes_the_lease_smaller_until_it_is_asked_for(
    model: Path,
) -> None:
    async with world(model, poll_s=3600.0) as here:
        await attach(here)
        await hold_sessions(here, 4)
        lease, spare = here.watch.status()["toy"]["lease_bytes"], here.tenant().spare_bytes
        assert spare >= 24 * BLOCK_BYTES
        here.arbiter.set_budget(lease - MIB)
        await until(lambda: here.watch.status()["toy"]["lease_bytes"] < lease)
        lowered = lease - here.watch.status()["toy"]["lease_bytes"]
        assert MIB <= lowered <= with_copy(spare)
        await here.watch.look()
        assert here.arbiter.status().committed_bytes <= lease - MIB
        here.arbiter.set_budget(2 * lease)
        await hold_sessions(here, 4)
        assert here.tenant().spare_bytes >= 24 * BLOCK_BYTES


async def test_growth_counts_before_the_engine_has_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else others are let in for it meanwhile, and the next look finds both above the budget."""
    async with world(model, poll_s=3600.0) as here:
        await attach(here)
        answer, counted = here.backend.answer_want, []

        async def watched(memory_bytes: int, kv_bytes: int, free_bytes: int) -> None:
            counted.append((here.arbiter.status().committed_bytes, memory_bytes))
            await answer(memory_bytes, kv_bytes, free_bytes)

        monkeypatch.setattr(here.backend, "answer_want", watched)
        await collect(here.backend, request(token_ids=PROMPT * 20, max_tokens=2))
        ((committed, bound),) = counted
        assert committed == bound == here.arbiter.status().committed_bytes


@pytest.mark.slow
async def test_generations_that_outgrow_the_kv_together_all_come_to_their_end(model: Path) -> None:
    """The engine ends the youngest; the backend goes on with it when there is room again."""
    async with world(model) as here:
        wanted = [
            await collect(here.backend, request(token_ids=[first, *PROMPT], max_tokens=800))
            for first in range(3)
        ]
        await here.backend.set_limits(kv_bytes=9 * BLOCK_BYTES)
        together = await asyncio.gather(
            *(
                collect(here.backend, request(token_ids=[first, *PROMPT], max_tokens=800))
                for first in range(3)
            )
        )
        assert together == wanted
        assert here.backend.restarts == 0


async def test_a_drain_whose_watch_ends_lets_sequences_in_again(
    model: Path, tmp_path: Path
) -> None:
    never = replace(QUICK, drain_s=3600.0)
    async with world(model, "once", tmp_path / "taken", 200, rules=never) as here:
        here.watch.attach("toy", here.backend, await size_of(here.backend) + 60 * MIB)
        stream = asyncio.create_task(collect(here.backend, request(max_tokens=7000)))
        await until(lambda: here.stage == Stage.DRAINING)
        waits = asyncio.create_task(collect(here.backend, request(max_tokens=5)))
        await until(lambda: here.backend.waiting == 1)
        here.watch.detach("toy")
        assert len(await waits) == 5
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
        assert here.backend.restarts == 0


async def test_slots_for_adapters_are_lent_where_there_is_room_and_else_when_there_is(
    model: Path,
) -> None:
    async with world(model, poll_s=3600.0) as here:
        lease, slots = await size_of(here.backend) + 300 * MIB, 40 * MIB
        await here.backend.set_limits(memory_bytes=lease, kv_bytes=64 * BLOCK_BYTES)
        here.watch.attach("toy", here.backend, lease)
        await here.watch.look()
        assert here.resident().bytes == lease
        here.arbiter.set_budget(lease + slots - MIB)
        assert not await here.watch.lend_slots("toy", slots)
        assert here.resident().bytes == lease
        assert here.backend.limits.memory_bytes == lease
        here.arbiter.set_budget(lease + slots)
        await here.watch.look()
        assert here.resident().bytes == here.backend.limits.memory_bytes == lease + slots
        assert await here.watch.lend_slots("toy", slots // 2), "less was needed"
        assert here.resident().bytes == here.backend.limits.memory_bytes == lease + slots // 2
        assert here.arbiter.status().committed_bytes == lease + slots // 2


class Alive(EngineBackend):
    """An engine that lives, and answers as a test wants."""

    def __init__(self, name: str, folder: Path, answers: asyncio.Event) -> None:
        super().__init__(name, command(folder), options=PATIENT)
        self.answers, self.asked = answers, 0
        self.pid = os.getpid()

    async def footprint(self) -> Footprint | None:
        self.asked += 1
        await self.answers.wait()
        return None


async def test_an_engine_that_does_not_answer_keeps_nobody_from_looking_at_others(
    tmp_path: Path,
) -> None:
    never, now = asyncio.Event(), asyncio.Event()
    now.set()
    silent, other = Alive("silent", tmp_path, never), Alive("other", tmp_path, now)
    clock = SystemClock()
    async with (
        MemoryArbiter(budget=4 * GIB, clock=clock) as arbiter,
        EngineWatch(arbiter, clock, poll_s=0.01) as watch,
    ):
        for backend in (silent, other):
            watch.attach(backend.model_id, backend, 3 * GIB)
        await until(lambda: other.asked >= 3 and silent.asked)
        assert silent.asked == 1
        never.set()
        await until(lambda: silent.asked >= 2)


async def test_an_engine_that_grows_without_end_is_killed_before_the_machine_is_short(
    model: Path, tmp_path: Path
) -> None:
    """The watch itself sleeps; its stream goes on in the next engine."""
    async with world(model, "endless", tmp_path / "taken", 1, poll_s=3600.0) as here:
        first = here.backend.pid
        size = await size_of(here.backend)
        budget = size + 400 * MIB
        here.arbiter.set_budget(budget)
        here.watch.attach("toy", here.backend, size + 64 * MIB)
        tokens = await collect(here.backend, request())
        assert tokens == await undisturbed(model)
        # The stream may end in the first engine, before the kill.
        await until(lambda: here.events(EngineKilled))
        (told,) = here.events(EngineKilled)
        assert isinstance(told, EngineKilled)
        assert budget < told.bytes, "not before it is beyond the budget"
        assert "beyond its lease" in told.reason
        await until(lambda: here.backend.pid not in (None, first))
