"""An hour of random arrivals, cancels and kills on a node that keeps prefixes, for scripts/soak.

Conversations grow, prompts are shared, prefixes are sent ahead; memory and disk for them are small,
so blocks are evicted and read back; clients leave, engines are killed, memory is short, files are
damaged, and the node is restarted, once in peace and once by SIGKILL. KAKEYA_SOAK_MINUTES sets how
long (60), KAKEYA_SOAK_SEED what happens (0). What must hold at every look and whenever all rest:
pages, pins, bytes on disk and cached tokens add up; whoever is refused is told why, and is served
when it comes again; and every answer is the one that an engine gives which begins from nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.memory_sight import children
from kakeya.backends.engine.restart import RestartPolicy
from kakeya.cli.child import NodeProcess
from kakeya.core.errors import KakeyaError
from kakeya.core.process import resident_bytes
from kakeya.core.units import MIB
from kakeya.prefix.seam import WarmOutcome
from tests.node.nodes import model_state, run_cli
from tests.node.soak_load import (
    MODEL,
    Answer,
    Body,
    Cold,
    Message,
    Refusal,
    ask,
    exact_program,
    warm,
)
from tests.node.soak_load import words as some_words
from tests.node.soak_sight import adds_up, file_bytes, spoil, unrest
from tests.node.test_overload import linux
from tests.waiting import eventually

MINUTES = float(os.environ.get("KAKEYA_SOAK_MINUTES", "60"))
SEED = int(os.environ.get("KAKEYA_SOAK_SEED", "0"))
PAGES_MB, DISK_MB, BUDGET_MB = 16, 6, 512
GIVE_UP_S = 300.0
"""A request that came again as told, and was not served in that time, is lost."""
REST_S = 90.0
MOST_TOKENS = 1500
"""A conversation that is longer begins anew."""
TALKERS = 5
REFUSALS = {
    *("memory_refused", "drain_timeout", "queue_full", "deadline_exceeded", "load_failed"),
    *("capacity_exhausted", "out_of_pages", "unavailable"),
}
AGENT_MIB, ENGINE_MIB, GROWTH_MIB = 400, 500, 32
CONFIG = f"""
[precache]
memory_mb = {PAGES_MB}
disk_mb = {DISK_MB}
parallel = 3
[[precache.prompts]]
system = "You are the keeper of a shelf of small machines."
"""


def shared_systems() -> list[str]:
    return [some_words(random.Random(f"system {n}"), 100 + 150 * n) for n in range(3)]


def fixed_prompts() -> list[Body]:
    """Greedy requests that are asked again and again, some with a beginning in common."""
    bodies = []
    for number, length in enumerate((4, 30, 90, 150, 260, 400, 600, 900)):
        rng = random.Random(f"fixed {number}")
        messages = [{"role": "user", "content": some_words(rng, length)}]
        if number % 2:
            system = shared_systems()[number % 3]
            messages.insert(0, {"role": "system", "content": system})
        bodies.append({"messages": messages, "max_tokens": 24, "temperature": 0})
    return bodies


@dataclass
class Soak:
    """The load, what became of it, and what was seen meanwhile."""

    folder: Path
    http: httpx.AsyncClient
    cold: Cold
    ends_mono: float = 0.0
    node: NodeProcess | None = None
    starts: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    refusals: list[Refusal] = field(default_factory=list)
    lost: list[tuple[Body, Refusal | None]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    to_judge: deque[tuple[Body, Answer]] = field(default_factory=lambda: deque(maxlen=32))
    fixed: list[tuple[Body, Answer]] = field(default_factory=list)
    weights: list[tuple[int, int, int]] = field(default_factory=list)
    """Start of the node, resident bytes of the agent, of its engines."""
    highest: Counter[str] = field(default_factory=Counter)
    reused: Counter[str] = field(default_factory=Counter)
    at_work: int = 0
    may_work: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def data(self) -> Path:
        return self.folder / "node" / "data"

    def is_over(self) -> bool:
        return time.monotonic() >= self.ends_mono

    def status(self) -> dict[str, Any]:
        assert self.node is not None
        return self.node.api.get("/api/v1/status")

    async def start(self) -> None:
        program = exact_program(self.folder / "site")
        config = self.folder / "node.toml"
        config.write_text(CONFIG)
        flags = ("--model", MODEL, "--no-mdns", "--memory-budget", str(BUDGET_MB))
        node = NodeProcess(
            self.folder / "node", *flags, "--config", str(config), program=program, start_s=90
        )
        self.node = await node.__aenter__()
        self.starts += 1

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Take part, unless all are to rest."""
        await self.may_work.wait()
        self.at_work += 1
        try:
            yield
        finally:
            self.at_work -= 1

    # Requests.

    async def served(self, body: Body, what: str = "ask") -> Answer | None:
        """Ask until it is served; None when it was not in the end, which is noted."""
        began_mono, last = time.monotonic(), None
        while time.monotonic() - began_mono < GIVE_UP_S:
            start, node = self.starts, self.node
            self.counts[what] += 1
            try:
                assert node is not None
                answer = await ask(self.http, node.http, body)
            except Refusal as refused:
                last = refused
                self.refusals.append(refused)
                if refused.retry_after_s is None:
                    break
                await asyncio.sleep(refused.retry_after_s)
                continue
            except (httpx.TransportError, AssertionError) as problem:
                await asyncio.sleep(1)
                if self.node is node and self.starts == start and node is not None:
                    self.faults.append(f"a connection broke: {problem!r}")
                self.counts["broken"] += node is not None
                continue
            self.times_s.append(time.monotonic() - began_mono)
            if not 0 <= answer.cached < answer.prompt:
                self.faults.append(f"{answer.cached} of {answer.prompt} tokens were cached")
            self.tokens["prompt"] += answer.prompt
            self.tokens["cached"] += answer.cached
            return answer
        self.lost.append((body, last))
        return None

    async def left(self, body: Body, after_s: float) -> None:
        """Ask, and leave some time later, wherever that is."""
        self.counts["leaving"] += 1
        with suppress(TimeoutError, Refusal, httpx.TransportError, AssertionError):
            async with asyncio.timeout(after_s):
                assert self.node is not None
                await ask(self.http, self.node.http, body)
                self.counts["leaving too late"] += 1

    async def talker(self, rng: random.Random) -> None:
        """Two conversations, one of them named."""
        rooms: list[list[Message]] = [[], []]
        name = f"{rng.random():.9f}"
        while not self.is_over():
            await asyncio.sleep(rng.expovariate(1 / 1.0))
            async with self.working():
                place = rng.randrange(2)
                more: Body = {}
                if place:
                    key = rng.choice(("conversation_id", "prompt_cache_key"))
                    more = {key: name, "prompt_cache_retention": rng.choice(("short", "long"))}
                await self._turn(rooms, place, rng, more)

    async def _turn(
        self, rooms: list[list[Message]], place: int, rng: random.Random, more: Body
    ) -> None:
        messages = rooms[place] or [{"role": "system", "content": rng.choice(shared_systems())}]
        said = {"role": "user", "content": some_words(rng, rng.choice((3, 20, 120)))}
        body: Body = {"model": MODEL, "messages": [*messages, said], **more}
        body |= {"max_tokens": rng.randint(1, 40), "stream": rng.random() < 0.6}
        body |= rng.choice(
            (
                {"temperature": 0},
                {"temperature": 0, "stop": ["return"]},
                {"temperature": 0.7, "top_p": 0.9, "seed": rng.randrange(1 << 40)},
                {"temperature": 1.2, "top_k": 20, "seed": rng.randrange(1 << 40)},
            )
        )
        body |= {"priority": rng.randrange(3), "user": f"user-{rng.randrange(4)}"}
        body |= {"stream_options": {"include_usage": True}} if body["stream"] else {}
        if rng.random() < 0.2:
            await self.left(body, rng.expovariate(1 / 0.4))
            return
        answer = await self.served(body)
        if answer is None:
            return
        self.to_judge.append((body, answer))
        reply = {"role": "assistant", "content": answer.text}
        rooms[place] = [] if answer.prompt > MOST_TOKENS else [*messages, said, reply]

    async def asker(self, rng: random.Random) -> None:
        """The fixed prompts: alone, several at once, after a client of the same prompt left."""
        while not self.is_over():
            await asyncio.sleep(rng.expovariate(1 / 2.0))
            async with self.working():
                chosen = [rng.choice(self.fixed) for _ in range(rng.choice((1, 1, 2, 4)))]
                if rng.random() < 0.3:
                    body = {"model": MODEL, "stream": True, **chosen[0][0]}
                    await self.left(body, rng.expovariate(1 / 0.3))
                await asyncio.gather(*(self._fixed(body, cold, rng) for body, cold in chosen))

    async def _fixed(self, body: Body, cold: Answer, rng: random.Random) -> None:
        asked = {"model": MODEL, **body, "priority": rng.randrange(3)}
        if rng.random() < 0.5:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = await self.served(asked, "fixed")
        if answer is not None:
            self.cold.compare(asked, answer, cold)

    async def warmer(self, rng: random.Random) -> None:
        """Prefixes that are sent ahead; a few are pinned until all rest."""
        while not self.is_over():
            await asyncio.sleep(rng.expovariate(1 / 6.0))
            async with self.working():
                system = {"role": "system", "content": rng.choice(shared_systems())}
                said = {"role": "user", "content": some_words(rng, rng.choice((5, 200)))}
                body: Body = {"model": MODEL, "messages": rng.choice(([system], [system, said]))}
                body["retention"] = rng.choice(("short", "long", "extended"))
                body["pin"] = len(body["messages"]) == 1 and rng.random() < 0.3
                await self._warm(body, rng.expovariate(1 / 0.5) if rng.random() < 0.3 else 150.0)

    async def _warm(self, body: Body, stays_s: float) -> None:
        node, start = self.node, self.starts
        if node is None:
            return
        try:
            async with asyncio.timeout(stays_s):
                said = await warm(self.http, node.http, body)
        except TimeoutError:
            self.counts["warm left"] += 1
        except httpx.TransportError as problem:
            await asyncio.sleep(1)
            if self.starts == start and self.node is not None:
                self.faults.append(f"/v1/precache: {problem!r}")
        except Refusal as refused:
            self.refusals.append(refused)
        else:
            self.counts[f"warm {said['status']}"] += 1
            if said["status"] not in set(WarmOutcome) or said["status"] == WarmOutcome.FAILED:
                self.faults.append(f"/v1/precache said {said}")

    async def judge(self, rng: random.Random) -> None:
        """Ask the cold node about what was answered last, one after the other."""
        while not self.is_over():
            await asyncio.sleep(rng.expovariate(1 / 0.5))
            if self.to_judge:
                body, answer = self.to_judge.pop()
                self.cold.compare(body, answer, await self.cold.answer(body))

    # Faults.

    async def killer(self, rng: random.Random) -> None:
        """Kill the engine, but not so often that its node gives it up, as it should."""
        policy = RestartPolicy()
        killed: list[float] = []
        while not self.is_over():
            await asyncio.sleep(rng.uniform(8, 40))
            if len(policy.recent(time.monotonic(), killed)) >= policy.max_deaths - 2:
                continue
            with suppress(KakeyaError, AssertionError, ProcessLookupError):
                state = await asyncio.to_thread(lambda: model_state(self._up(), MODEL))
                if state["pid"]:
                    os.kill(state["pid"], signal.SIGKILL)
                    killed.append(time.monotonic())
                    self.counts["kills"] += 1

    def _up(self) -> NodeProcess:
        assert self.node is not None
        return self.node

    async def presser(self, rng: random.Random) -> None:
        while not self.is_over():
            await asyncio.sleep(rng.uniform(10, 40))
            level, free = rng.choice(("low", "critical")), rng.choice(("0", "20"))
            await self.press(level, "--free-mb", free)
            await asyncio.sleep(rng.uniform(1, 8))
            await self.press("nominal")

    async def press(self, level: str, *flags: str) -> None:
        arguments = ("pressure", level, *flags, "--data-dir", str(self.data))
        start = self.starts
        done = await asyncio.to_thread(run_cli, *arguments)
        self.counts[f"pressure {level}"] += done.returncode == 0
        if done.returncode and self.starts == start and self.node is not None:
            self.faults.append(f"kakeya pressure: {done.stderr}")

    async def spoiler(self, rng: random.Random) -> None:
        while not self.is_over():
            await asyncio.sleep(rng.uniform(2, 8))
            self.counts["damaged files"] += await asyncio.to_thread(spoil, self.data, rng)

    async def restarter(self, rng: random.Random) -> None:
        began_mono = time.monotonic()
        for share, number in ((0.35, signal.SIGTERM), (0.7, signal.SIGKILL)):
            at_mono = began_mono + share * (self.ends_mono - began_mono)
            await asyncio.sleep(max(0.0, at_mono - time.monotonic()))
            node, self.node = self._up(), None
            node.send(number)
            status = await node.stop()
            if status != (0 if number == signal.SIGTERM else -number):
                self.faults.append(f"the node ended with {status} by {number.name}")
            await self.start()

    # Looking.

    async def looker(self) -> None:
        """Add up what the node says of itself, and what it weighs."""
        while True:
            await asyncio.sleep(0.5)
            if self.node is None:
                continue
            start = self.starts
            try:
                status = await asyncio.to_thread(self.status)
            except (KakeyaError, AssertionError) as problem:
                if self.node is not None and self.starts == start:
                    self.faults.append(f"status: {problem}")
                continue
            self.counts["looks"] += 1
            self.faults += adds_up(status)
            await asyncio.to_thread(self._weigh)

    def _weigh(self) -> None:
        node, start = self.node, self.starts
        on_disk = file_bytes(self.data)
        self.highest["disk_bytes"] = max(self.highest["disk_bytes"], on_disk)
        if on_disk > DISK_MB * MIB:
            self.faults.append(f"{on_disk} bytes of blocks are on disk, {DISK_MB} MiB may be")
        if node is not None:
            agent = resident_bytes(node.pid) or 0
            engines = sum(resident_bytes(pid) or 0 for pid in children(node.pid))
            self.weights.append((start, agent, engines))

    async def rester(self) -> None:
        """Have all rest now and then, and see that nothing is held then."""
        every_s = min(60.0, max(20.0, MINUTES * 60 / 6))
        while not self.is_over():
            await asyncio.sleep(every_s)
            self.may_work.clear()
            try:
                await self.rest()
            finally:
                self.may_work.set()

    async def rest(self) -> None:
        """Wait until nobody asks, and then until nothing is held."""
        until_mono = time.monotonic() + GIVE_UP_S + REST_S
        while self.at_work or self.node is None:
            assert time.monotonic() < until_mono, f"{self.at_work} requests do not end"
            await asyncio.sleep(0.2)
        for system in shared_systems():
            messages = [{"role": "system", "content": system}]
            await self._warm({"model": MODEL, "messages": messages}, 60.0)  # ends its pin
        until_mono, found = time.monotonic() + REST_S, ["nothing was seen"]
        while found and time.monotonic() < until_mono:
            await asyncio.sleep(0.3)
            with suppress(KakeyaError, AssertionError):
                found = unrest(await asyncio.to_thread(self.status))
        self.counts["rests"] += 1
        self.faults += [f"at rest: {one}" for one in found]


def figures(soak: Soak) -> dict[str, Any]:
    """What happened, for the record."""
    waits = sorted(soak.times_s) or [0.0]
    agents = [agent for _, agent, _ in soak.weights]
    return {
        "minutes": MINUTES,
        "seed": SEED,
        "served": len(soak.times_s),
        "lost": len(soak.lost),
        "refusals": Counter(one.code for one in soak.refusals),
        "counts": soak.counts,
        "compared": soak.cold.compared,
        "differing": len(soak.cold.differing),
        "prompt_tokens": soak.tokens["prompt"],
        "cached_tokens": soak.tokens["cached"],
        "last_prefixes": soak.reused,
        "disk_mib": soak.highest["disk_bytes"] / MIB,
        "agent_mib": [min(agents) // MIB, max(agents) // MIB] if agents else [],
        "engines_mib": max((one for *_, one in soak.weights), default=0) // MIB,
        "growth_mib": round(growth(soak) / MIB, 1),
        "p50_s": round(waits[len(waits) // 2], 2),
        "p99_s": round(waits[int(len(waits) * 0.99)], 2),
        "faults": Counter(fault.partition(":")[0][:60] for fault in soak.faults),
    }


def growth(soak: Soak) -> float:
    """By how much an agent grew from the second to the last quarter of its life, at most."""
    found = [0.0]
    for start in range(1, soak.starts + 1):
        sizes = [agent for its_start, agent, _ in soak.weights if its_start == start and agent]
        quarter = len(sizes) // 4
        if quarter >= 5:
            first, last = sizes[quarter : 2 * quarter], sizes[-quarter:]
            found.append(statistics.median(last) - statistics.median(first))
    return max(found)


def hold(soak: Soak) -> None:
    """The promises."""
    assert not soak.faults, soak.faults[:5]
    assert not soak.cold.differing, soak.cold.differing[:3]
    assert not soak.lost, soak.lost[:3]
    for refused in soak.refusals:
        assert refused.message, refused
        assert refused.code in REFUSALS, refused
        assert refused.retry_after_s is not None, refused
    assert max(agent for _, agent, _ in soak.weights) <= AGENT_MIB * MIB
    assert max(engines for *_, engines in soak.weights) <= ENGINE_MIB * MIB
    assert growth(soak) <= GROWTH_MIB * MIB
    assert soak.cold.compared
    assert soak.tokens["cached"] > soak.tokens["prompt"] // 4


@linux
@pytest.mark.slow
async def test_an_hour_of_prefixes_gives_the_answers_of_a_cold_engine(tmp_path: Path) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
    program = exact_program(tmp_path / "site", KAKEYA_PRECACHE_MEMORY_MB="0")
    reference = NodeProcess(
        tmp_path / "cold", "--model", MODEL, "--no-mdns", program=program, start_s=90
    )
    async with (
        httpx.AsyncClient(timeout=180, limits=limits, trust_env=False) as http,
        reference as cold_node,
    ):
        soak = Soak(tmp_path, http, Cold(cold_node, http))
        await soak.start()
        try:
            for node in (cold_node, soak._up()):
                await eventually("it serves", partial(is_ready, node), limit_s=120)
            soak.fixed = [(body, await soak.cold.answer(body)) for body in fixed_prompts()]
            soak.ends_mono = time.monotonic() + MINUTES * 60
            soak.may_work.set()
            await run_all(soak)
            await soak.press("nominal")
            await soak.rest()
            soak.reused.update(soak.status()["prefixes"]["tokens"])
            print(json.dumps(figures(soak)))
        finally:
            if soak.node is not None:
                await soak.node.stop()
    log = (tmp_path / "node" / "node.log").read_text()
    found = {"faults": soak.faults, "differing": soak.cold.differing}
    found["refusals"] = Counter(repr(one) for one in soak.refusals).most_common(50)
    (tmp_path / "found.json").write_text(json.dumps(found, indent=1))
    assert "OpenBLAS is missing" in log
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:3000]
    hold(soak)


def is_ready(node: NodeProcess) -> bool:
    return bool(model_state(node, MODEL)["state"] == "ready")


async def run_all(soak: Soak) -> None:
    """All of the load until its end; the first worker that fails ends it."""
    looking = asyncio.create_task(soak.looker())
    load: Sequence[Callable[[random.Random], Awaitable[None]]] = [
        *([soak.talker] * TALKERS),
        *(soak.asker, soak.asker, soak.warmer, soak.judge),
        *(soak.killer, soak.presser, soak.spoiler, soak.restarter),
    ]
    async with asyncio.TaskGroup() as group:
        for number, worker in enumerate(load):
            group.create_task(_run(worker, random.Random(f"{SEED} {number}")))
        group.create_task(soak.rester())
    assert not looking.done(), looking
    looking.cancel()


async def _run(worker: Callable[[random.Random], Awaitable[None]], rng: random.Random) -> None:
    await worker(rng)
