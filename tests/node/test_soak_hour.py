"""An hour of faults in random order on four real nodes, for scripts/soak (row 35, small)."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from kakeya.cli.child import NodeProcess
from kakeya.core.units import MIB
from tests.node.nodes import QUICK, seen_by, verifier_node
from tests.node.test_fleet_of_nodes import generate
from tests.node.test_overload import linux, resident_bytes, send
from tests.waiting import eventually

HOUR_S = 3600.0
NAMES = ("verifier", "n1", "n2", "n3")


@dataclass
class Soak:
    """One node that is never killed, three that are; what the first weighs after each fault."""

    folder: Path
    verifier: NodeProcess
    rng: random.Random
    mortals: dict[str, NodeProcess] = field(default_factory=dict)
    weights: list[tuple[int, int]] = field(default_factory=list)
    """Resident bytes and open files."""

    async def start(self, name: str) -> None:
        flags = ("--node-id", name, "--proposer", "ngram", "--peer", self.verifier.grpc, *QUICK)
        self.mortals[name] = await NodeProcess(self.folder / name, *flags).__aenter__()

    async def killed(self) -> None:
        name = self.rng.choice(NAMES[1:])
        self.mortals[name].send(signal.SIGKILL)
        assert await self.mortals[name].wait() == -signal.SIGKILL
        await self.start(name)

    async def stopped(self) -> None:
        victim = self.mortals[self.rng.choice(NAMES[1:])]
        victim.send(signal.SIGSTOP)
        await asyncio.sleep(self.rng.uniform(0.5, 8.0))
        victim.send(signal.SIGCONT)

    async def left(self) -> None:
        name = self.rng.choice(NAMES[1:])
        assert await self.mortals[name].stop() == 0
        await self.start(name)

    async def garbage(self) -> None:
        host, _, port = self.verifier.grpc.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(self.rng.randbytes(200_000))
        writer.close()

    async def oversize(self) -> None:
        status = await send(self.verifier.grpc, bytes(5 * MIB), grpc.Compression.Gzip)
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED

    async def settle(self) -> None:
        """All see all, trust all, serve; nothing of the first node grew."""
        for node in (self.verifier, *self.mortals.values()):
            await eventually("all is well", lambda n=node: is_whole(n), limit_s=60, every_s=0.2)
        pid = self.verifier.pid
        files = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - names, not paths
        self.weights.append((resident_bytes(pid), files))


def is_whole(node: NodeProcess) -> bool:
    cards = seen_by(node)
    return cards.keys() == set(NAMES) and not any(card["is_suspect"] for card in cards.values())


@linux
@pytest.mark.slow
async def test_an_hour_of_faults_leaves_the_fleet_as_it_was(tmp_path: Path) -> None:
    async with verifier_node(tmp_path / "verifier") as verifier:
        soak = Soak(tmp_path, verifier, random.Random(35))
        plain = await generate(verifier, "off")
        for name in NAMES[1:]:
            await soak.start(name)
        faults: list[Callable[[], Awaitable[None]]] = [
            *(soak.killed, soak.stopped, soak.left, soak.garbage, soak.oversize),
        ]
        try:
            await soak.settle()
            end_mono = time.monotonic() + HOUR_S
            while time.monotonic() < end_mono:
                drafted = asyncio.create_task(generate(verifier, soak.rng.choice(["auto", "peer"])))
                await soak.rng.choice(faults)()
                assert await drafted == plain
                await soak.settle()
        finally:
            for node in soak.mortals.values():
                node.send(signal.SIGCONT)
                await node.stop()
        assert "Traceback" not in verifier.log_file.read_text()
    quarter = len(soak.weights) // 4
    before, after = soak.weights[quarter : 2 * quarter], soak.weights[-quarter:]
    grown = statistics.median(rss for rss, _ in after) - statistics.median(rss for rss, _ in before)
    assert grown <= 2 * MIB, "more than 1 MiB in half an hour, and what is noise"
    assert max(files for _, files in after) <= max(files for _, files in before) + 8
