"""Memory of a real node: who is in it, who has to go and why, and who comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kakeya.backends import handler as engine_handler
from kakeya.backends.engine.backend import EngineBackend
from kakeya.backends.engine.engine import Engine, EngineOptions
from kakeya.backends.engine.restart import RestartPolicy
from kakeya.backends.engines import engine_command
from kakeya.backends.ring.weights import estimate_of
from kakeya.backends.sizes import FIRST_KV_TOKENS, LeaseSize
from kakeya.config import config
from kakeya.core import errors
from kakeya.core.clock import SystemClock
from kakeya.core.process import resident_bytes
from kakeya.core.tasks import Supervisor
from kakeya.core.units import MIB
from kakeya.generation.facts import Footprint, ModelState
from kakeya.generation.frames import Done, Frame
from kakeya.generation.kv import KvOffer
from kakeya.generation.manifest import Manifest
from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.generation.spec import EMBEDDED_FOLDER, ModelRole, ModelSpec
from kakeya.memory.arbiter.events import CapabilityRun, Event, MemoryPressure, ModelUnload
from kakeya.memory.arbiter.policy import PressureLevel
from kakeya.memory.arbiter.resident import RequestPriority, State, Warmth
from kakeya.memory.estimate.estimate import estimate_model
from kakeya.memory.estimate.size_file import SizeFile
from kakeya.memory.machine.panics import FIND_PERIOD_S, KEEP_S
from kakeya.node.memory import EngineSetup, NodeMemory
from tests import findings
from tests.memory.example_plugin import Question
from tests.memory.machine.test_panics import panic
from tests.memory.worlds import ManualClock
from tests.node.nodes import (
    DRAFTER,
    VERIFIER,
    NodeProcess,
    model_state,
    offers,
    run_cli,
    run_daemon,
    seen_by,
)
from tests.waiting import eventually, until

OTHER = "other-tiny"


def memory_of(node: NodeProcess) -> dict[str, Any]:
    found: dict[str, Any] = node.api.get("/api/v1/status")["memory"]
    return found


def residents(node: NodeProcess) -> set[str]:
    return {one["model"] for one in memory_of(node)["residents"] if one["state"] == "ready"}


def own_offers(node: NodeProcess) -> set[str]:
    return next(offers(card) for card in seen_by(node).values() if card["is_self"])


async def ready(node: NodeProcess, *model_ids: str) -> None:
    for model_id in model_ids:
        await eventually(
            f"{model_id} is ready",
            lambda name=model_id: model_state(node, name)["state"] == "ready",
            limit_s=60,
        )


async def press(folder: Path, level: str) -> None:
    told = await asyncio.to_thread(run_cli, "pressure", level, "--data-dir", str(folder / "data"))
    assert told.returncode == 0, told.stderr


async def samples(node: NodeProcess) -> dict[tuple[str, ...], float]:
    """What Prometheus scrapes, by name and labels' values."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://{node.http}/metrics")).text
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def ask(node: NodeProcess, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": "one", "max_tokens": 8, "temperature": 0, **more}
    async with httpx.AsyncClient(base_url=f"http://{node.http}", timeout=120) as client:
        return await client.post("/v1/completions", json=body)


def other_model(folder: Path) -> Path:
    """A second text model: the same weights under another name."""
    copy = folder / OTHER
    shutil.copytree(EMBEDDED_FOLDER / VERIFIER, copy)
    return copy


# Pressure


def evictions(node: NodeProcess) -> list[dict[str, Any]]:
    return memory_of(node)["last_evictions"]


async def test_pressure_takes_the_drafter_and_never_text_and_gives_it_back(tmp_path: Path) -> None:
    flags = ("--model", VERIFIER, "--proposer", DRAFTER)
    async with NodeProcess(tmp_path, *flags) as node:
        await ready(node, VERIFIER, DRAFTER)
        assert own_offers(node) == {VERIFIER, DRAFTER, "ngram"}
        await press(tmp_path, "low")
        await eventually("the card without it", lambda: DRAFTER not in own_offers(node))
        assert residents(node) == {VERIFIER}
        assert model_state(node, DRAFTER)["state"] == "unloaded"
        await eventually("it is told", lambda: evictions(node))
        await press(tmp_path, "TRIM_MEMORY_COMPLETE")
        await eventually("critical", lambda: memory_of(node)["level"] == "critical")
        assert (await ask(node, VERIFIER)).status_code == 200
        assert own_offers(node) == {VERIFIER, "ngram"}
        (evicted,) = evictions(node)
        assert "pressure was low by dispatched" in evicted["why"]
        shown = await asyncio.to_thread(run_cli, "status", "--node", node.http)
        assert "pressure critical by dispatched" in shown.stdout
        assert f"evicted {DRAFTER}" in shown.stdout
        counted = await samples(node)
        assert counted["kakeya_memory_pressure_level",] == 2
        assert counted["kakeya_memory_evictions_total", "draft", "pressure"] == 1
        assert counted["kakeya_memory_loads_total", VERIFIER, "loaded", "text"] == 1
        budget = memory_of(node)["budget_bytes"]
        assert counted["kakeya_memory_bytes", "budget"] == pytest.approx(budget)
        await press(tmp_path, "nominal")
        await eventually("it is back", lambda: DRAFTER in own_offers(node), limit_s=60)
        assert residents(node) == {VERIFIER, DRAFTER}


async def test_a_level_that_is_none_is_refused_with_those_that_are(tmp_path: Path) -> None:
    async with NodeProcess(tmp_path, "--proposer", "ngram") as node:
        assert memory_of(node)["level"] == "nominal"
        told = await asyncio.to_thread(
            run_cli, "pressure", "awful", "--data-dir", str(tmp_path / "data")
        )
        assert told.returncode == 1
        assert "'awful' is no level of memory pressure; known: nominal, low" in told.stderr
        told = await asyncio.to_thread(run_cli, "pressure", "low", "--free-mb", "9" * 20)
        assert (told.returncode, told.stderr.count("\n")) == (1, 1), "no traceback"


# Swaps


@asynccontextmanager
async def two_texts(folder: Path, budget_mb: int, *more: str) -> AsyncIterator[NodeProcess]:
    """Two text models on a node, each stated as 250 MB, the first one in memory; idle ones make way
    at once."""
    other = await asyncio.to_thread(other_model, folder)
    settings = folder / "node.toml"
    sizes = json.dumps([f"{model}=250" for model in (VERIFIER, OTHER)])
    settings.write_text(f"[memory]\nstay_warm_s = 0\nsizes_mb = {sizes}\n")
    flags = ("--model", VERIFIER, "--model", str(other), "--config", str(settings), *more)
    async with NodeProcess(folder, *flags, "--memory-budget", str(budget_mb)) as node:
        await ready(node, VERIFIER)
        yield node


def occupied(status: dict[str, Any]) -> int:
    """What all engines really occupy, by the system's account."""
    pids = [model["pid"] for model in status["models"] if model.get("pid")]
    return sum(resident_bytes(pid) or 0 for pid in pids)


async def sample(node: NodeProcess, seen: list[tuple[dict[str, Any], int]]) -> None:
    while True:
        status = await asyncio.to_thread(node.api.get, "/api/v1/status")
        seen.append((status["memory"], await asyncio.to_thread(occupied, status)))
        await asyncio.sleep(0.1)


async def test_text_models_that_do_not_fit_together_swap_and_every_request_is_answered(
    tmp_path: Path,
) -> None:
    async with two_texts(tmp_path, 500, "--proposer", DRAFTER) as node:
        await ready(node, DRAFTER)
        assert model_state(node, OTHER)["state"] == "unloaded"
        seen: list[tuple[dict[str, Any], int]] = []
        sampler = asyncio.create_task(sample(node, seen))
        order = [VERIFIER, OTHER] * 3
        random.Random(7).shuffle(order)
        answers = []
        # A fast machine is through with them before it was looked at often.
        while len(seen) <= 10 and not sampler.done():
            answers += await asyncio.gather(*(ask(node, model) for model in order))
        sampler.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampler
        assert [answer.status_code for answer in answers] == [200] * len(answers)
        texts = {answer.json()["choices"][0]["text"] for answer in answers}
        assert len(texts) == 1, "equal weights say the same"
        for memory, engines_bytes in seen:
            assert memory["committed_bytes"] <= memory["budget_bytes"]
            assert engines_bytes <= memory["budget_bytes"]
        events = memory_of(node)["last_events"]
        swapped = [one for one in events if one["what"] == "evicted" and one["model"] == VERIFIER]
        assert swapped
        assert f"to {OTHER} (swap)" in swapped[-1]["why"]


@pytest.mark.slow
async def test_a_model_that_was_swapped_out_finds_its_prompts_when_it_comes_back(
    tmp_path: Path,
) -> None:
    prompt = " ".join(f"Row {n} has {n} lamps." for n in range(60))
    async with two_texts(tmp_path, 500) as node:

        async def said_by(model: str) -> tuple[str, int]:
            """What it says, and how much of the prompt it had to compute."""
            answer = (await ask(node, model, prompt=prompt)).json()
            usage = answer["usage"]
            found = usage["prompt_tokens_details"]["cached_tokens"]
            return answer["choices"][0]["text"], usage["prompt_tokens"] - found

        said, computed = await said_by(VERIFIER)
        assert computed > 256
        # Equal weights under another name: what one engine computed is the other's too.
        assert await said_by(OTHER) == (said, 1)
        assert model_state(node, VERIFIER)["state"] == "unloaded"
        assert await said_by(VERIFIER) == (said, 1)
        assert model_state(node, OTHER)["state"] == "unloaded"


@pytest.mark.slow
async def test_a_stream_that_waits_says_the_place_of_its_model_in_line(tmp_path: Path) -> None:
    async with two_texts(tmp_path, 500) as node:
        held = asyncio.create_task(ask(node, VERIFIER, stream=True, max_tokens=6000))
        await eventually("it is in use", lambda: memory_of(node)["residents"][0]["leases"] == 1)
        body = {"model": OTHER, "prompt": "class P", "max_tokens": 2, "stream": True}
        said: list[str] = []
        async with httpx.AsyncClient(base_url=f"http://{node.http}", timeout=120) as client:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    said += [line] if line else []
                    held.cancel()
        assert said[0].startswith(f": waiting: 1st for memory, {OTHER}")
        assert said[-1] == "data: [DONE]"


@pytest.mark.slow
async def test_who_leaves_gives_up_its_place_and_who_has_no_time_for_a_load_is_told_at_once(
    tmp_path: Path,
) -> None:
    async with two_texts(tmp_path, 500) as node:
        stream = {"stream": True, "max_tokens": 6000}
        held = asyncio.create_task(ask(node, VERIFIER, **stream))
        await eventually("it is in use", lambda: memory_of(node)["residents"][0]["leases"] == 1)
        waiting = asyncio.create_task(ask(node, OTHER))
        await eventually("it waits", lambda: memory_of(node)["waiting"])
        assert model_state(node, OTHER)["waiting"] == 1
        waiting.cancel()
        await eventually("its place is free", lambda: not memory_of(node)["waiting"])
        assert model_state(node, OTHER)["waiting"] == 0
        held.cancel()
        await eventually("unused", lambda: memory_of(node)["residents"][0]["leases"] == 0)
        assert residents(node) == {VERIFIER}

        assert (await ask(node, OTHER)).status_code == 200
        assert residents(node) == {OTHER}
        both = {VERIFIER, OTHER, "ngram"}
        await eventually("a request would load it", lambda: own_offers(node) == both)
        refused = await ask(node, VERIFIER, deadline_s=0.05)
        assert refused.status_code == 503
        assert "is estimated to take" in refused.json()["error"]["message"]
        assert refused.json()["error"]["code"] == "model_loading"
        assert int(refused.headers["retry-after"]) >= 1
        await eventually("it is loaded for the next try", lambda: residents(node) == {VERIFIER})
        assert (await ask(node, VERIFIER, deadline_s=100)).status_code == 200


async def test_a_model_larger_than_the_budget_ends_the_start_with_both_sizes(
    tmp_path: Path,
) -> None:
    done = await asyncio.to_thread(
        run_daemon, "--data-dir", str(tmp_path), "--memory-budget", "100", "--http", "127.0.0.1:0"
    )
    assert done.returncode == 2
    assert f"model {VERIFIER} needs" in done.stderr
    assert "the memory budget is 100.0 MiB" in done.stderr


# One process


class ShiftedClock(SystemClock):
    """The machine's clock, which a test moves on."""

    ahead_s = 0.0

    def mono(self) -> float:
        return super().mono() + self.ahead_s


@asynccontextmanager
async def in_process(
    folder: Path,
    specs: Sequence[ModelSpec],
    clock: ShiftedClock,
    *,
    options: EngineOptions | None = None,
    environ: Mapping[str, str] | None = None,
    on_change: Callable[[], None] = lambda: None,
) -> AsyncIterator[NodeMemory]:
    def build() -> NodeMemory:
        return NodeMemory(
            config.load(("--data-dir", str(folder)), environ or {}).memory,
            specs,
            EngineSetup(
                command=engine_command("text", findings=findings.known()),
                options=options or EngineOptions(),
                sockets=None,
            ),
            data_dir=folder,
            clock=clock,
            rng=random.Random(1),
            on_change=on_change,
        )

    async with await asyncio.to_thread(build) as memory, Supervisor(clock) as tasks:
        await memory.start(tasks, "node")
        yield memory


TEXT_MODEL = ModelSpec(model_id=VERIFIER, source=VERIFIER, role=ModelRole.VERIFIER)
DRAFT_MODEL = ModelSpec(model_id=DRAFTER, source=DRAFTER, role=ModelRole.PROPOSER)
REQUEST = DecodeRequest(token_ids=[5, 6, 7], max_tokens=4)


async def test_a_model_that_was_given_up_leaves_the_ledger_and_is_tried_again_after_a_pause(
    tmp_path: Path,
) -> None:
    clock = ShiftedClock()
    options = EngineOptions(restart=RestartPolicy(max_deaths=1))
    async with in_process(tmp_path, [TEXT_MODEL], clock, options=options) as memory:
        model = memory.engines.get(VERIFIER)
        await until(lambda: model.state is ModelState.READY, "it is ready")
        assert model.backend is not None
        model.backend.kill("was to die in a test")
        await until(lambda: model.resident is None, "it left the ledger")
        assert model.state is ModelState.FAILED
        assert "died 1 times" in model.last_error
        with pytest.raises(errors.PeerUnavailable, match="tried again later") as refused:
            await model.ready(5)
        assert refused.value.retry_after_s is not None
        assert refused.value.retry_after_s > 20
        clock.ahead_s += 31
        told: list[Event] = []
        memory.arbiter.on_event(told.append)
        frames = [frame async for frame in model.decode(REQUEST)]
        assert isinstance(frames[-1], Done)
        assert model.state is ModelState.READY
        assert model.last_error == ""
        (run,) = [one for one in told if isinstance(one, CapabilityRun)]
        assert (str(run.key), run.is_failed) == (f"text:{VERIFIER}", False)
        # Peers ask no failed model: it comes back by itself too, after the longer pause.
        model.backend.kill("was to die again")
        await until(lambda: model.resident is None, "it left the ledger again")
        assert not model.may_come_back
        clock.ahead_s += 61
        await until(lambda: model.state is ModelState.READY, "it came back")


async def test_a_request_waits_for_a_load_and_its_model_leaves_the_card_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load takes of the time that a request gives its first token. A model is asked for as
    urgently as the generation is, whether it waits in the line for a load, or finds the model in
    memory. What holds the room of a model that is away takes it off the card."""
    wanted = {
        GenerationPriority.URGENT: RequestPriority.URGENT,
        GenerationPriority.HIGH: RequestPriority.HIGH,
        GenerationPriority.LOW: RequestPriority.LOW,
        GenerationPriority.BATCH: RequestPriority.BATCH,
        GenerationPriority.NORMAL: RequestPriority.NORMAL,
        GenerationPriority.SPECULATIVE: RequestPriority.BATCH,
    }
    asked: list[DecodeRequest] = []
    decode = Engine.decode

    def looked_at(
        engine: Engine, request: DecodeRequest, offer: KvOffer
    ) -> AsyncGenerator[Frame, None]:
        asked.append(request)
        return decode(engine, request, offer)

    monkeypatch.setattr(Engine, "decode", looked_at)
    clock, changes = ShiftedClock(), asyncio.Event()
    async with in_process(tmp_path, [TEXT_MODEL], clock, on_change=changes.set) as memory:
        model = memory.engines.get(VERIFIER)
        assert model.state is ModelState.LOADING
        for priority, told_priority in wanted.items():
            request = replace(REQUEST, priority=priority, deadline_s=1000)
            async with aclosing(model.decode(request)) as frames:
                first = asyncio.ensure_future(anext(frames))
                if not asked:
                    await until(lambda: model.waiting, "it waits")
                    clock.ahead_s += 600
                await first
                assert model.resident is not None
                assert list(model.resident.leases.values()) == [told_priority]
        left = [request.deadline_s or math.inf for request in asked]
        assert left[0] <= 400 < min(left[1:])

        told: list[Event] = []
        memory.arbiter.on_event(told.append)
        memory.arbiter.unload("text", VERIFIER)
        await until(lambda: any(isinstance(one, ModelUnload) for one in told), "it left")
        budget = memory.arbiter.budget_bytes
        for held, count in ((budget, 0), (0, 1)):
            changes.clear()
            memory.arbiter.hold("training", held)
            assert len(memory.engines.offered()) == count
            await until(changes.is_set, "it is told")


async def test_a_machine_that_panicked_takes_less_upon_itself_and_says_so(tmp_path: Path) -> None:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.00 +0000")
    text = panic('"prepare count underflow" @IOGPUMemory.cpp:550', timestamp=now)
    await asyncio.to_thread((tmp_path / "panic-full-1.panic").write_text, text)

    def build(reports: list[Path]) -> NodeMemory:
        return NodeMemory(
            config.load(("--data-dir", str(tmp_path)), {}).memory,
            [TEXT_MODEL],
            EngineSetup(
                command=engine_command("text"), options=EngineOptions(max_running=8), sockets=None
            ),
            data_dir=tmp_path,
            clock=SystemClock(),
            rng=random.Random(1),
            on_change=lambda: None,
            reports=reports,
        )

    careful = await asyncio.to_thread(build, [tmp_path])
    normal = await asyncio.to_thread(build, [])
    assert (careful.is_careful, normal.is_careful) == (True, False)
    assert careful.status()["budget_bytes"] < normal.status()["budget_bytes"]  # type: ignore[operator]
    assert "panic" in str(careful.status()["profile"])
    assert [memory.engines._options.max_running for memory in (careful, normal)] == [2, 8]
    recipes = [*careful.engines._recipes.values(), *normal.engines._recipes.values()]
    told = [tuple(recipe.command(tmp_path / "socket"))[-2:] for recipe in recipes]
    assert told == [("--max-running", "2"), ("--max-running", "8")]


async def test_a_model_at_repeated_panics_is_not_loaded_the_same_way_again(tmp_path: Path) -> None:
    """The second panic within a day takes drafts, half of the KV and all sequences but one; the
    third one all, unless its owner names it."""
    clock, reports = ShiftedClock(), tmp_path / "reports"
    reports.mkdir()
    stays = [[VERIFIER, clock.wall() - 90_000.0, None]]
    (tmp_path / "stays.json").write_text(json.dumps(stays))

    def build(*allowed: str) -> NodeMemory:
        environ = {"KAKEYA_MEMORY_AFTER_PANICS": ",".join(allowed)} if allowed else {}
        return NodeMemory(
            config.load(("--data-dir", str(tmp_path)), environ).memory,
            [TEXT_MODEL],
            EngineSetup(
                command=engine_command("text"), options=EngineOptions(max_running=8), sockets=None
            ),
            data_dir=tmp_path,
            clock=clock,
            rng=random.Random(1),
            on_change=lambda: None,
            reports=[reports],
        )

    def flags(memory: NodeMemory) -> list[str]:
        line = list(memory.engines._recipes[VERIFIER].command(tmp_path / "socket"))
        return line[line.index("--log-level") + 2 :]

    seen = []
    for count in range(3):
        at = datetime.fromtimestamp(clock.wall() - 80_000 + 20_000 * count, UTC)
        text = panic(f'"zone {count}" @z.c:1', timestamp=at.strftime("%Y-%m-%d %H:%M:%S.00 +0000"))
        text = text.replace("00000000-1111", f"0000000{count}-1111")
        await asyncio.to_thread((reports / f"panic-full-{count}.panic").write_text, text)
        memory = await asyncio.to_thread(build)
        seen.append((flags(memory), memory._care.kv_share(VERIFIER)))
    least = (["--draft-rows", "0", "--max-running", "1"], 0.5)
    assert seen == [(["--max-running", "2"], 1.0), least, least]
    async with memory, Supervisor(clock) as tasks:
        await memory.start(tasks, "node")
        model = memory.engines.get(VERIFIER)
        assert model.state is ModelState.FAILED
        with pytest.raises(errors.MemoryRefused, match=r"panicked.*3 times.*memory\.after_panics"):
            await anext(model.decode(REQUEST))
    async with await asyncio.to_thread(build, VERIFIER) as memory, Supervisor(clock) as tasks:
        await memory.start(tasks, "node")
        model = memory.engines.get(VERIFIER)
        async with aclosing(model.decode(REQUEST)) as frames:
            assert isinstance([frame async for frame in frames][-1], Done)
        assert model.backend is not None
        assert model.backend.options.max_running == 1
        begun = json.loads((tmp_path / "stays.json").read_text())
        assert begun[-1][0] == VERIFIER
        assert begun[-1][2] is None
    closed = json.loads((tmp_path / "stays.json").read_text())
    assert closed[-1][2] is not None


async def test_engines_that_start_when_care_has_begun_or_ended_are_run_so(tmp_path: Path) -> None:
    """The reports are read each hour; what runs already goes on as it is."""
    clock = ManualClock()

    def build() -> NodeMemory:
        return NodeMemory(
            config.load(("--data-dir", str(tmp_path)), {}).memory,
            [TEXT_MODEL],
            EngineSetup(command=engine_command("text"), options=EngineOptions(), sockets=None),
            data_dir=tmp_path,
            clock=clock,
            rng=random.Random(1),
            on_change=lambda: None,
            reports=[tmp_path],
        )

    def seen() -> tuple[bool, int, tuple[str, ...]]:
        backend = memory.engines.make(VERIFIER)
        command = tuple(memory.engines._recipes[VERIFIER].command(tmp_path / "socket"))
        return memory.is_careful, backend.options.max_running, command[-2:]

    memory = await asyncio.to_thread(build)
    normal = seen()
    most = EngineOptions().max_running
    assert normal == (False, most, ("--max-running", str(most)))
    at = datetime.fromtimestamp(clock.wall(), UTC).strftime("%Y-%m-%d %H:%M:%S.00 +0000")
    text = panic('"prepare count underflow" @IOGPUMemory.cpp:550', timestamp=at)
    await asyncio.to_thread((tmp_path / "panic-full-1.panic").write_text, text)
    reading = asyncio.create_task(memory._read_reports())

    def is_so(expected: object) -> bool:
        clock.advance(FIND_PERIOD_S)
        return seen() == expected

    await until(lambda: is_so((True, 2, ("--max-running", "2"))), "care")
    clock.advance(KEEP_S)
    await until(lambda: is_so(normal), "no care")
    reading.cancel()


async def test_a_draft_loads_nothing_and_holds_what_it_uses(tmp_path: Path) -> None:
    clock = ShiftedClock()
    async with in_process(tmp_path, [DRAFT_MODEL], clock) as memory:
        model = memory.engines.get(DRAFTER)
        await until(lambda: model.state is ModelState.READY, "it is ready")
        told: list[Event] = []
        memory.arbiter.on_event(told.append)
        draft = await model.draft([5, 6, 7], 3)
        assert len(draft.tokens) <= 3
        (run,) = told
        assert isinstance(run, CapabilityRun)
        assert (str(run.key), run.is_failed) == (f"draft:{DRAFTER}", False)
        running = {task.name for task in memory.health() if task.failures == 0}
        assert {"memory keeper", "engine watch"} <= running
        memory.dispatched.dispatch(PressureLevel.LOW)
        await until(lambda: model.state is ModelState.UNLOADED, "it went")
        with pytest.raises(errors.PeerUnavailable, match="not in memory"):
            await model.draft([5, 6, 7], 3)
        await until(lambda: model.resident is None, "it left the ledger")


async def test_a_drafter_that_left_for_idleness_comes_back_when_a_draft_is_asked_for(
    tmp_path: Path,
) -> None:
    clock = ShiftedClock()
    idle = {"KAKEYA_MEMORY_STAY_WARM_S": "60", "KAKEYA_MEMORY_UNLOAD_AFTER_S": "300"}
    async with in_process(tmp_path, [DRAFT_MODEL], clock, environ=idle) as memory:
        model = memory.engines.get(DRAFTER)
        await until(lambda: model.state is ModelState.READY, "it is ready")
        clock.ahead_s += 301
        memory.arbiter.hold("nothing", 0)
        await until(lambda: model.state is ModelState.UNLOADED, "it left")
        await until(lambda: model.resident is None, "it left the ledger")
        assert not model.may_come_back
        assert model.can_serve, "a peer that plans by cards can ask for it"
        with pytest.raises(errors.PeerUnavailable, match="not in memory"):
            await model.draft([5, 6, 7], 3)
        await until(lambda: model.state is ModelState.READY, "it came back")


async def test_plug_ins_of_installed_distributions_share_memory_with_the_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "site" / "rerankers-1.0.dist-info"
    await asyncio.to_thread(info.mkdir, parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rerankers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kakeya.capabilities]\nrerank = tests.memory.example_plugin:capability\n"
        "broken = tests.memory.no_such_plugin:capability\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    async with in_process(tmp_path, [TEXT_MODEL], ShiftedClock()) as memory:
        reports = {report.name: report.error for report in memory.plugins}
        assert reports["rerank"] is None
        assert "no_such_plugin" in str(reports["broken"])
        question = Question(words=("b",), texts=("a a", "a b"))
        assert await memory.arbiter.request("rerank", "small", question) == ["a b", "a a"]
        await until(lambda: memory.engines.get(VERIFIER).resident is not None, "text is there")
        status = memory.status()
        held = {(one["capability"], one["model"]) for one in status["residents"]}  # type: ignore[attr-defined]
        assert held == {("rerank", "small"), ("text", VERIFIER)}
        assert [one["name"] for one in status["plugins"]] == ["broken", "rerank"]  # type: ignore[attr-defined]


async def test_a_pinned_model_survives_pressure_and_a_wrong_pin_ends_the_start(
    tmp_path: Path,
) -> None:
    clock = ShiftedClock()
    pins = {"KAKEYA_MEMORY_PINNED": DRAFTER, "KAKEYA_MEMORY_STAY_WARM_S": "0"}
    async with in_process(tmp_path, [TEXT_MODEL, DRAFT_MODEL], clock, environ=pins) as memory:
        model = memory.engines.get(DRAFTER)
        await until(lambda: model.state is ModelState.READY, "it is ready")
        assert model.resident is not None
        assert model.resident.warmth.is_pinned
        told: list[Event] = []
        memory.arbiter.on_event(told.append)
        memory.dispatched.dispatch(PressureLevel.CRITICAL)
        await until(lambda: any(isinstance(one, MemoryPressure) for one in told), "it was felt")
        assert model.resident is not None
        assert not model.resident.is_leaving
    for wrong, says in (
        ({"KAKEYA_MEMORY_PINNED": "nobody"}, "memory.pinned names 'nobody'"),
        (pins | {"KAKEYA_MEMORY_BUDGET_MB": "200"}, "pinned and text models need"),
    ):
        with pytest.raises(errors.ConfigError, match=says):
            async with in_process(tmp_path, [TEXT_MODEL, DRAFT_MODEL], clock, environ=wrong):
                pass


async def test_a_manifest_counts_at_once_and_pins_that_do_not_fit_change_nothing(
    tmp_path: Path,
) -> None:
    models, environ = [TEXT_MODEL, DRAFT_MODEL], {"KAKEYA_MEMORY_BUDGET_MB": "200"}
    async with in_process(tmp_path, models, ShiftedClock(), environ=environ) as memory:
        await until(lambda: memory.engines.get(VERIFIER).can_serve, "text is there")
        text, draft = memory.engines.get(VERIFIER), memory.engines.get(DRAFTER)
        memory.take_manifests({VERIFIER: Manifest(stay_warm_s=7, thinking="on", backend="other")})
        assert text.resident is not None
        assert text.resident.warmth == Warmth(stay_warm_s=7)
        assert (text.manifest.thinking, text.manifest.backend) == ("on", "mlx")
        with pytest.raises(errors.ConfigError, match="pinned and text models need"):
            memory.take_manifests({VERIFIER: Manifest(), DRAFTER: Manifest(pin=True)})
        assert (text.manifest.stay_warm_s, draft.manifest.pin) == (7, None)

        def nobody() -> Any:
            raise AssertionError("it is not brought up")

        group = replace(TEXT_MODEL, model_id="big", ring=("--ring", "tensor"))
        pinned = replace(group, source=str(EMBEDDED_FOLDER / VERIFIER), manifest=Manifest(pin=True))
        whole = await asyncio.to_thread(estimate_of, EMBEDDED_FOLDER / VERIFIER)
        size = LeaseSize(whole, 150 * MIB)
        await memory.model_home().add_group(pinned, nobody, size, whole)
        memory.take_manifests({VERIFIER: Manifest(stay_warm_s=8)})
        assert text.manifest.stay_warm_s == 8, "a group that is up is in no one's way"


@pytest.mark.slow
async def test_what_a_load_took_is_remembered_for_the_next_start(tmp_path: Path) -> None:
    async with in_process(tmp_path, [DRAFT_MODEL], ShiftedClock()) as memory:
        model = memory.engines.get(DRAFTER)
        await until(lambda: model.state is ModelState.READY, "it is ready")
        resident = model.resident
        assert resident is not None
        assert resident.measured_bytes is not None
        lent, used = resident.measured_bytes, resident.measured_bytes - resident.unfilled_bytes
        assert 50 * MIB < used < lent
    async with in_process(tmp_path, [DRAFT_MODEL], ShiftedClock()) as memory:
        assert (tmp_path / "sizes.json").exists()
        again = memory.engines.get(DRAFTER).resident
        assert again is not None
    folder = EMBEDDED_FOLDER / DRAFTER
    fresh = await asyncio.to_thread(estimate_model, folder, kv_tokens=0, widens=True)
    assert again.estimate_bytes == used + fresh.work_bytes + FIRST_KV_TOKENS * 1024
    took_s = (await asyncio.to_thread(SizeFile(tmp_path).load)).load_s(fresh.digest, "draft")
    assert took_s
    assert 0.05 < took_s < 120


@pytest.mark.slow
async def test_what_an_engine_is_lent_counts_before_the_engine_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be more than was estimated, and the same room be given to somebody else meanwhile."""
    counted: list[tuple[int, int]] = []
    bound = EngineBackend.set_limits

    async def looked_at(backend: EngineBackend, *limits: int) -> Footprint:
        (resident,) = memory.arbiter.status().residents
        assert resident.state is State.LOADING
        counted.append((resident.bytes, limits[0]))
        return await bound(backend, *limits)

    monkeypatch.setattr(EngineBackend, "set_limits", looked_at)
    monkeypatch.setattr(engine_handler, "resident_bytes", lambda pid: 400 * MIB)
    async with in_process(tmp_path, [DRAFT_MODEL], ShiftedClock()) as memory:
        model = memory.engines.get(DRAFTER)
        await until(lambda: model.state is ModelState.READY, "it is ready")
        ((ledger_bytes, lent_bytes),) = counted
        assert ledger_bytes == lent_bytes
        assert model.resident is not None
        assert model.resident.estimate_bytes < 400 * MIB < lent_bytes
        assert model.resident.measured_bytes == lent_bytes
