"""What is done to the machines of a drill: engines, agents and links are lost at random and come
back, and nodes are drained and replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from scripts.agents import MODEL
from tests.node.test_routed_namespaces import get
from tests.node.test_three_namespaces import Mini

RING_FLAGS = ("--exchange-interval", "1")
FLAGS = ("--model", MODEL, *RING_FLAGS)
_REST_S = (3.0, 15.0)
"""Between the end of a fault of a machine and its next one."""
_LAST_S = (0.5, 25.0)
"""How long a fault lasts that ends by itself."""
_PATIENCE_S = "40"
ENGINES = ("engine killed", "engine stopped")
"""The faults of a machine whose agent and links must last."""


class Faults:
    """The faults of one machine after the other. `done` counts them."""

    def __init__(self, rng: random.Random, flags: Sequence[str]) -> None:
        """`flags`: those with which nodes are started again."""
        self._rng = rng
        self._flags = flags
        self.done: Counter[str] = Counter()
        self.kinds: dict[str, Callable[[Mini], Awaitable[None]]] = {
            "engine killed": self._kill_engine,
            "engine stopped": self._stop_engine,
            "agent killed": self._kill,
            "agent stopped": self._stop,
            "cable pulled": self._pull,
            "link silent": self._silence,
            "drained": self._drain,
        }

    async def trouble(
        self,
        mini: Mini,
        goes_on: Callable[[], bool],
        *,
        kinds: Sequence[str] = (),
        rests_x: float = 1.0,
    ) -> None:
        """Let a machine have faults of these kinds (none = any), with rests between them that are
        so many times as long as usual."""
        while True:
            await asyncio.sleep(self._rng.uniform(*_REST_S) * rests_x)
            if not goes_on():
                return
            kind = self._rng.choice(kinds or list(self.kinds))
            print(f"{time.strftime('%T')} {mini.label}: {kind}", flush=True)
            self.done[kind] += 1
            began = time.monotonic()
            await self.kinds[kind](mini)
            took_s = time.monotonic() - began
            print(f"{time.strftime('%T')} {mini.label}: back, {took_s:.1f} s", flush=True)

    async def _last(self) -> None:
        await asyncio.sleep(self._rng.uniform(*_LAST_S))

    async def _kill_engine(self, mini: Mini) -> None:
        _signal(await _engine(mini), signal.SIGKILL)

    async def _stop_engine(self, mini: Mini) -> None:
        pid = await _engine(mini)
        _signal(pid, signal.SIGSTOP)
        await self._last()
        _signal(pid, signal.SIGCONT)

    async def _kill(self, mini: Mini) -> None:
        assert mini.node is not None
        await asyncio.to_thread(mini.node.stop, 15.0, signal.SIGKILL)
        await self._last()
        await start(mini, self._flags)

    async def _stop(self, mini: Mini) -> None:
        assert mini.node is not None
        _signal(mini.node.pid, signal.SIGSTOP)
        await self._last()
        _signal(mini.node.pid, signal.SIGCONT)

    async def _pull(self, mini: Mini) -> None:
        await asyncio.to_thread(mini.machine.cut)
        await self._last()
        await asyncio.to_thread(mini.machine.heal)

    async def _silence(self, mini: Mini) -> None:
        await asyncio.to_thread(mini.machine.cut, silently=True)
        await self._last()
        await asyncio.to_thread(mini.machine.heal)

    async def _drain(self, mini: Mini) -> None:
        assert mini.node is not None
        told = await asyncio.to_thread(mini.kakeya, "drain", "--patience", _PATIENCE_S)
        status = await asyncio.to_thread(mini.node.process.wait, 30)
        print(f"{time.strftime('%T')} {mini.label}: {told}, exit {status}", flush=True)
        await start(mini, self._flags)


async def start(mini: Mini, flags: Sequence[str], *more: str) -> None:
    """Start the node of a machine."""
    await asyncio.to_thread(mini.start, *flags, *more)


async def _engine(mini: Mini) -> int:
    """The process of the model's engine, or of a rank of it; 0 while there is none."""
    with contextlib.suppress(ValueError):  # it does not answer: another engine's fault
        status = await asyncio.to_thread(get, mini, "/api/v1/status")
        own = [one for one in status["models"] if one["model_id"] == MODEL]
        return next((int(one["pid"] or 0) for one in own + status["rings"]["ranks"]), 0)
    return 0


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if pid:
            os.kill(pid, number)
