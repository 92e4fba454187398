"""A handler whose loads and runs tests hold at gates, and which checks how it is called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from kakeya.memory.arbiter.capability import Capability, Loaded
from kakeya.memory.arbiter.resident import Role, Warmth


@dataclass
class Toy:
    """Counts; a gate that is closed holds the next step."""

    measured: int | None = None
    loads: list[str] = field(default_factory=list)
    unloads: list[str] = field(default_factory=list)
    runs: list[object] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    cancelled: int = 0
    live: set[str] = field(default_factory=set)
    load_gate: asyncio.Event = field(default_factory=asyncio.Event)
    run_gate: asyncio.Event = field(default_factory=asyncio.Event)
    unload_gate: asyncio.Event = field(default_factory=asyncio.Event)
    load_error: BaseException | None = None
    run_error: Exception | None = None
    unload_error: Exception | None = None

    def __post_init__(self) -> None:
        for gate in (self.load_gate, self.run_gate, self.unload_gate):
            gate.set()

    async def load(self, model_key: str) -> Loaded:
        assert model_key not in self.live, "loaded once"
        self.loads.append(model_key)
        await self.load_gate.wait()
        if self.load_error is not None:
            raise self.load_error
        self.live.add(model_key)
        return Loaded(backend=f"backend of {model_key}", measured_bytes=self.measured)

    async def unload(self, model_key: str, backend: object) -> None:
        assert backend == f"backend of {model_key}"
        self.unloads.append(model_key)
        await self.unload_gate.wait()
        self.live.discard(model_key)
        if self.unload_error is not None:
            raise self.unload_error

    async def run(self, backend: object, payload: object) -> object:
        model_key = str(backend).removeprefix("backend of ")
        assert model_key in self.live, "a model in use is never taken"
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.run_gate.wait()
            assert model_key in self.live, "a model in use is never taken"
            self.runs.append(payload)
            if self.run_error is not None:
                raise self.run_error
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return f"{model_key} did {payload}"


def capability(
    name: str,
    role: Role,
    toy: Toy,
    *,
    size: int | Callable[[str], int] = 100,
    warmth: Warmth | None = None,
    concurrency: int = 1,
    max_waiting: int = 10,
) -> Capability:
    return Capability(
        name=name,
        role=role,
        handler=toy,
        estimate=size if callable(size) else lambda _: size,
        warmth=warmth,
        concurrency=concurrency,
        max_waiting=max_waiting,
    )
