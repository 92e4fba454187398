"""An hour of random load on a node whose budget is 1 GB, for scripts/soak.

Two text models, a draft model, adapters, a plug-in that embeds, and training jobs under leases
share it, while a host program tells of memory pressure now and then. KAKEYA_SOAK_MINUTES sets how
long (60). What must hold: the ledger, and what all processes occupy, stay within the budget at
every sample; each refusal is typed, says why and when to come again; whoever comes again as told is
served in the end; and afterwards nobody waits and nothing is held.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory_sight import Sight, children
from benchmarks.models import random_adapter, sized_model
from kakeya.cli.child import NodeProcess
from kakeya.core.process import resident_bytes
from kakeya.core.units import MIB
from tests.node.child_host import OUTCOMES, write_plugin
from tests.node.nodes import model_state
from tests.node.test_overload import linux
from tests.waiting import eventually

REST_S = 60.0
MINUTES = float(os.environ.get("KAKEYA_SOAK_MINUTES", "60"))
BUDGET_MB = 1024
TINY, DRAFT, OTHER = "kakeya-tiny", "kakeya-tiny-draft", "other-60"
ADAPTERS = 12
GIVE_UP_S = 300.0
"""A request that came again as told, and was not served in that time, is lost."""
REFUSALS = {
    *("memory_refused", "drain_timeout", "queue_full", "deadline_exceeded", "load_failed"),
    *("capacity_exhausted", "out_of_pages", "unavailable"),
}
WORDS = ("what", "is", "lent", "comes", "back", "def", "return", "None", "class", "if", "for")
JOB = """
import sys, time
held = bytearray(int(sys.argv[1]) * 1024 * 1024)
for place in range(0, len(held), 4096):
    held[place] = 1
time.sleep(float(sys.argv[2]))
"""


@dataclass
class Outcome:
    """One request until it was served: how often it was refused, and how."""

    what: str
    began_mono: float
    refusals: list[dict[str, Any]] = field(default_factory=list)
    is_served: bool = False
    took_s: float = 0.0


@dataclass
class Soak:
    """The load, and what became of it."""

    node: NodeProcess
    folder: Path
    ends_mono: float
    outcomes: list[Outcome] = field(default_factory=list)
    jobs: dict[int, int] = field(default_factory=dict)
    """MiB that each running job asked for, by its process."""
    job_ends: Counter[str] = field(default_factory=Counter)
    job_faults: list[str] = field(default_factory=list)
    too_large: list[tuple[int, int, int]] = field(default_factory=list)
    highest_bytes: int = 0

    def is_over(self) -> bool:
        return time.monotonic() >= self.ends_mono

    # Requests over HTTP.

    async def client(self, rng: random.Random) -> None:
        while not self.is_over():
            await asyncio.sleep(rng.expovariate(1 / 0.7))
            model = rng.choice([TINY, TINY, OTHER, f"{TINY}:{adapter_name(rng)}"])
            await self._ask(model, rng)

    async def _ask(self, model: str, rng: random.Random) -> None:
        text = " ".join(rng.choices(WORDS, k=rng.choice((5, 50, 400))))
        body = {"model": model, "max_tokens": rng.randint(1, 40), "stream": rng.random() < 0.5}
        body["messages"] = [{"role": "user", "content": text}]
        outcome = Outcome(model, time.monotonic())
        self.outcomes.append(outcome)
        while time.monotonic() - outcome.began_mono < GIVE_UP_S:
            refused = await asyncio.to_thread(post, self.node.http, body)
            if refused is None:
                outcome.is_served = True
                outcome.took_s = time.monotonic() - outcome.began_mono
                return
            outcome.refusals.append(refused)
            if refused["retry_after_s"] is None:
                return
            await asyncio.sleep(refused["retry_after_s"])

    # Training jobs.

    async def trainer(self, rng: random.Random) -> None:
        while not self.is_over():
            await asyncio.sleep(rng.uniform(1, 15))
            await self._train(rng.choice((64, 150, 300)), rng)

    async def _train(self, size_mb: int, rng: random.Random) -> None:
        seconds = rng.uniform(2, 20)
        outcome = Outcome(f"job of {size_mb} MB", time.monotonic())
        self.outcomes.append(outcome)
        while time.monotonic() - outcome.began_mono < GIVE_UP_S:
            status, said = await self._lease(size_mb, seconds, rng)
            if status in (0, -signal.SIGKILL):
                outcome.is_served = True
                outcome.took_s = time.monotonic() - outcome.began_mono
                self.job_ends["killed" if status else "done"] += 1
                return
            retry_s = 3.0 if status == 75 else None
            refused = {"code": f"exit {status}", "message": said, "retry_after_s": retry_s}
            outcome.refusals.append(refused)
            if retry_s is None:
                self.job_faults.append(f"exit {status}: {said}")
                return
            await asyncio.sleep(retry_s)

    async def _lease(self, size_mb: int, seconds: float, rng: random.Random) -> tuple[int, str]:
        # The interpreter itself needs some 12 MB of what is leased.
        work = (sys.executable, "-c", JOB, str(size_mb - 24), f"{seconds:.1f}")
        command = [*(sys.executable, "-m", "kakeya.cli.main", "lease", "run")]
        command += ["--mb", str(size_mb), "--wait", "60", "--data-dir", str(self.data)]
        process = await asyncio.create_subprocess_exec(
            *command, "--", *work, stderr=asyncio.subprocess.PIPE
        )
        self.jobs[process.pid] = size_mb
        killing = asyncio.create_task(kill_job(process, rng.uniform(2, 12), rng))
        try:
            _, said = await process.communicate()
        finally:
            killing.cancel()
            self.jobs.pop(process.pid, None)
        return process.returncode or 0, said.decode("utf-8", "replace").strip()[-300:]

    @property
    def data(self) -> Path:
        return self.folder / "node" / "data"

    # Adapters.

    async def curator(self, rng: random.Random) -> None:
        """Replace an adapter now and then."""
        while not self.is_over():
            await asyncio.sleep(rng.uniform(10, 40))
            await self.add_adapter(rng.randrange(ADAPTERS), rng)

    async def add_adapter(self, number: int, rng: random.Random) -> None:
        seed = rng.randrange(1 << 30)
        folder = await asyncio.to_thread(random_adapter, self.folder / f"a{number}", seed=seed)
        status, said = await cli(
            *("adapters", "add", f"adapter-{number}", "--base", TINY, "--path", str(folder)),
            *("--replace", "--data-dir", str(self.data)),
        )
        assert status == 0, said

    # Looking.

    async def look(self, sight: Sight) -> None:
        """What all that leases memory occupies: engines, pages, the plug-in's tables, jobs."""
        while True:
            memory = await sight.look()
            if memory:
                await asyncio.to_thread(self._compare, sight, memory)
            await asyncio.sleep(0.5)

    def _compare(self, sight: Sight, memory: dict[str, Any]) -> None:
        tables = sum(
            one["measured_bytes"] or 0
            for one in memory["residents"]
            if one["capability"] == "embed"
        )
        pages = sum(one["held_bytes"] for one in memory["tenants"] if one["name"] == "pages")
        jobs = sum(tree_bytes(pid) for pid in tuple(self.jobs) if is_training(pid))
        occupied = sight.samples[-1].engines_bytes + tables + pages + jobs
        self.highest_bytes = max(self.highest_bytes, occupied)
        if occupied > memory["budget_bytes"]:
            self.too_large.append((occupied, memory["budget_bytes"], jobs))


def adapter_name(rng: random.Random) -> str:
    """A few adapters are wanted far more often than the others."""
    return f"adapter-{min(ADAPTERS - 1, int(rng.paretovariate(1.0)) - 1)}"


def post(address: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """One request; None when it was served, else what was said: code, message, when to come."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=180)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        after = answer.getheader("retry-after")
    finally:
        connection.close()
    said = error_in(text) if answer.status == 200 else json.loads(text)["error"]
    if said is None:
        return None
    if after is None and answer.status in (200, 504):
        after = "1"  # The deadline was the caller's own, or headers were gone: come again at once.
    return {
        "status": answer.status,
        "code": said["code"],
        "message": said["message"],
        "retry_after_s": float(after) if after else None,
    }


def error_in(text: str) -> dict[str, Any] | None:
    """The error at the end of an answer that had begun; None in one that is whole."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if "data: " in line[:6]]
    if not events:
        assert json.loads(text)["choices"][0]["finish_reason"], text
        return None
    if events[-1] == "[DONE]":
        return None
    said: dict[str, Any] = json.loads(events[-1])["error"]
    return said


def is_training(pid: int) -> bool:
    """Whether a job has its lease: the command that waited for it has become it."""
    try:
        return b"lease" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def tree_bytes(pid: int) -> int:
    return sum(resident_bytes(one) or 0 for one in (pid, *children(pid)))


async def kill_job(process: asyncio.subprocess.Process, after_s: float, rng: random.Random) -> None:
    """Kill one job of four when it has its lease; one that waits for it still does so in peace."""
    await asyncio.sleep(after_s)
    if rng.random() < 0.25 and await asyncio.to_thread(is_training, process.pid):
        process.kill()


async def cli(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kakeya.cli.main", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    return process.returncode or 0, said.decode()


def unrest(node: NodeProcess) -> dict[str, Any]:
    """Who still has or wants memory, but for the embedder, which never stops."""
    memory: dict[str, Any] = node.api.get("/api/v1/status")["memory"]  # type: ignore[assignment]
    residents = [one for one in memory["residents"] if one["capability"] != "embed"]
    found = {
        "waiting": [one for one in memory["waiting"] if one["capability"] != "embed"],
        "foreign": memory["foreign"],
        "jobs": memory["leases"].get("leases", []),
        "used": [one for one in residents if one["leases"]],
    }
    return {what: those for what, those in found.items() if those}


async def come_to_rest(node: NodeProcess) -> None:
    until_mono = time.monotonic() + REST_S
    while found := await asyncio.to_thread(unrest, node):
        assert time.monotonic() < until_mono, f"still at work after {REST_S} s: {found}"
        await asyncio.sleep(0.5)


def embedded(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The refusals of the plug-in's requests, and how many were served."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [one for one in lines if one["code"]], sum(not one["code"] for one in lines)


@linux
@pytest.mark.slow
async def test_an_hour_of_everything_within_one_gigabyte(tmp_path: Path) -> None:
    plugins, told = tmp_path / "plugins", tmp_path / "embed.jsonl"
    await asyncio.to_thread(write_plugin, plugins)
    other = await asyncio.to_thread(sized_model, tmp_path / OTHER, 60)
    top = str(Path(__file__).parents[2])
    program = (
        *("env", f"PYTHONPATH={top}:{plugins}", f"{OUTCOMES}={told}"),
        *(sys.executable, "-m", "tests.node.child_host"),
    )
    flags = ("--model", TINY, "--model", str(other), "--proposer", DRAFT, "--no-mdns")
    async with NodeProcess(
        tmp_path / "node", "--memory-budget", str(BUDGET_MB), *flags, program=program
    ) as node:
        await eventually(
            "a model serves", lambda: model_state(node, TINY)["state"] == "ready", limit_s=90
        )
        soak = Soak(node, tmp_path, time.monotonic() + MINUTES * 60)
        sight = Sight(node)
        for number in range(ADAPTERS):
            await soak.add_adapter(number, random.Random(number))
        looking = asyncio.create_task(soak.look(sight))
        load: list[Callable[[random.Random], Awaitable[None]]] = [
            *(soak.client, soak.client, soak.client, soak.trainer, soak.trainer, soak.curator),
        ]
        async with asyncio.TaskGroup() as group:
            for seed, worker in enumerate(load):
                group.create_task(one_of(worker, random.Random(seed)))
        assert not looking.done(), looking
        looking.cancel()
        assert "Traceback" not in node.log_file.read_text(), node.log_file.read_text()[-3000:]
        tell(soak, sight, told)
        await come_to_rest(node)
    hold(soak, sight, told)


async def one_of(worker: Callable[[random.Random], Awaitable[None]], rng: random.Random) -> None:
    await worker(rng)


def tell(soak: Soak, sight: Sight, told: Path) -> None:
    """What happened, for the record."""
    refused, served = embedded(told)
    waits = sorted(one.took_s for one in soak.outcomes if one.is_served)
    figures = {
        "minutes": MINUTES,
        "requests": len(soak.outcomes),
        "served": sum(one.is_served for one in soak.outcomes),
        "refusals": Counter(r["code"] for one in soak.outcomes for r in one.refusals),
        "embeddings": served,
        "embeddings_refused": Counter(one["code"] for one in refused),
        "jobs": soak.job_ends,
        "samples": len(sight.samples),
        "unreadable": sight.unreadable,
        "highest_ledger_mib": max(one.committed_bytes for one in sight.samples) // MIB,
        "highest_occupied_mib": soak.highest_bytes // MIB,
        "over_ledger": len(sight.over_budget()),
        "over_occupied": len(soak.too_large),
        "p50_s": round(waits[len(waits) // 2], 2),
        "p99_s": round(waits[int(len(waits) * 0.99)], 2),
        "events": Counter(one["what"] for one in sight.events.values()),
    }
    print(json.dumps(figures))


def hold(soak: Soak, sight: Sight, told: Path) -> None:
    """The promises."""
    assert sight.unreadable <= 2
    assert not sight.over_budget(), json.dumps(sight.told_over)
    assert not soak.too_large
    lost = [one for one in soak.outcomes if not one.is_served]
    assert not lost, [(one.what, one.refusals[-2:]) for one in lost[:5]]
    assert not soak.job_faults
    refusals = [refused for one in soak.outcomes for refused in one.refusals]
    refused, served = embedded(told)
    assert served
    for one in (*refusals, *refused):
        assert one["message"], one
        assert one["code"] in REFUSALS or one["code"] == "exit 75", one
        assert one.get("retryable", True), one
    evicted = sight.named("evicted")
    assert all(one["why"] for one in evicted)
    assert soak.job_ends["done"]
