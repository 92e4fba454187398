"""A node inside a program that has an embedder of its own: the daemon, and random work for a
plug-in through the node's arbiter. Flags are the daemon's.

What became of each request goes to the file named by SOAK_OUTCOMES, a JSON line each. The plug-in
is found by its entry point, as an installed one: see `write_plugin`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np

from kakeya.core import errors
from kakeya.memory.api import MemoryArbiter, Terms
from kakeya.memory.arbiter.capability import Capability, Loaded
from kakeya.memory.arbiter.policy import PressureLevel
from kakeya.memory.arbiter.resident import EMBEDDING, RequestPriority, Warmth
from kakeya.node import agent, daemon

MIB = 1 << 20
SIZES = {"embed-small": 60 * MIB, "embed-large": 120 * MIB}
OUTCOMES = "SOAK_OUTCOMES"
TRIES, RETRY_S = 60, 3.0
LIVE: dict[str, int] = {}
"""Bytes of the tables in memory, by model."""


class Embedder:
    """A table of numbers in real memory, and rows of it as answers."""

    async def load(self, model_key: str) -> Loaded:
        size = SIZES[model_key]
        table = await asyncio.to_thread(lambda: np.ones((size // 256, 64), dtype=np.float32))
        LIVE[model_key] = table.nbytes
        return Loaded(backend=[table], measured_bytes=table.nbytes)

    async def unload(self, model_key: str, backend: object) -> None:
        assert isinstance(backend, list)
        backend.clear()
        LIVE.pop(model_key, None)

    async def run(self, backend: object, payload: object) -> object:
        assert isinstance(backend, list)
        assert isinstance(payload, int)
        if not backend:
            raise errors.InvariantBroken("a run needs its model", "it was unloaded")
        await asyncio.sleep(0.02)
        return float(backend[0][payload].sum())


def _estimate(model_key: str) -> int:
    if model_key not in SIZES:
        raise errors.NotFound(f"no embedder is called {model_key!r}")
    return SIZES[model_key]


def capability() -> Capability:
    """What the entry point names."""
    return Capability(
        name="embed",
        role=EMBEDDING,
        handler=Embedder(),
        estimate=_estimate,
        warmth=Warmth(stay_warm_s=5, unload_after_s=60),
    )


def write_plugin(folder: Path) -> None:
    """Lay a distribution in a folder for PYTHONPATH that offers this module's capability."""
    info = folder / "soak_embedder-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: soak-embedder\nVersion: 1.0\n")
    entry = "[kakeya.capabilities]\nembed = tests.node.child_host:capability\n"
    (info / "entry_points.txt").write_text(entry)


class Host(agent.Agent):
    """A node, and the program around it."""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._file: IO[str] = await asyncio.to_thread(open, os.environ[OUTCOMES], "a", buffering=1)
        self._work = [
            asyncio.create_task(self._embed(self._memory.arbiter, random.Random(seed)))
            for seed in (1, 2)
        ]
        self._work.append(asyncio.create_task(self._press(random.Random(3))))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        self._file.close()
        await super().__aexit__(kind, value, trace)

    async def _embed(self, arbiter: MemoryArbiter, rng: random.Random) -> None:
        """Ask at random; try again as long as a refusal says that this may help."""
        while True:
            await asyncio.sleep(rng.expovariate(1 / 3))
            model = rng.choice(list(SIZES))
            terms = Terms(priority=rng.choice(list(RequestPriority)), timeout_s=rng.uniform(2, 30))
            for attempt in range(TRIES):
                arbiter.check_integrity()
                try:
                    await arbiter.request("embed", model, rng.randrange(1000), terms)
                except errors.KakeyaError as refused:
                    self._tell(model, attempt, refused)
                    if not refused.retryable:
                        break
                    await asyncio.sleep(refused.retry_after_s or RETRY_S)
                else:
                    self._tell(model, attempt, None)
                    break

    async def _press(self, rng: random.Random) -> None:
        """What a system does to a program now and then."""
        while True:
            await asyncio.sleep(rng.uniform(20, 90))
            level = PressureLevel.CRITICAL if rng.random() < 0.2 else PressureLevel.LOW
            self._memory.dispatched.dispatch(level)
            await asyncio.sleep(rng.uniform(1, 12))
            self._memory.dispatched.dispatch(PressureLevel.NOMINAL)

    def _tell(self, model: str, attempt: int, refused: errors.KakeyaError | None) -> None:
        line = {
            "model": model,
            "attempt": attempt,
            "at": time.time(),
            "live_bytes": sum(LIVE.values()),
            "code": refused.code if refused else "",
            "message": refused.message if refused else "",
            "retryable": refused.retryable if refused else False,
            "retry_after_s": refused.retry_after_s if refused else None,
        }
        self._file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    # The entry point imports this module anew, under its name: both must be one.
    from tests.node import child_host

    agent.Agent = child_host.Host  # type: ignore[misc]
    daemon.main()
