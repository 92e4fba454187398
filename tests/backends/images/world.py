"""Image models of scripted workers in a real arbiter, beside a text model that is a process too."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kakeya.backends.engine.process import Command
from kakeya.backends.engine.watch import EngineWatch
from kakeya.backends.images.handler import ImageHandler, ImageModels
from kakeya.backends.images.model import IMAGE, ResidentPipeline, WorkerSetup
from kakeya.backends.model_life import TEXT
from kakeya.backends.sizes import LeaseSize
from kakeya.core.clock import SystemClock
from kakeya.core.process import resident_bytes
from kakeya.core.units import MIB
from kakeya.generation.image import ImageRequest
from kakeya.generation.manifest import Manifest
from kakeya.generation.spec import ModelRole, ModelSpec
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.arbiter.capability import Capability, Loaded
from kakeya.memory.arbiter.events import Event
from kakeya.memory.arbiter.policy import Rules
from kakeya.memory.arbiter.resident import DIFFUSION, TEXT_TARGET
from kakeya.memory.estimate.estimate import Estimate
from kakeya.memory.estimate.history import SizeHistory

IMAGE_BYTES, TEXT_BYTES = 90 * MIB, 80 * MIB
"""Estimates: a bare Python of the tests has 10 to 40 MiB, and they allocate 40 and 60."""
RULES = Rules(age_s=0.2, drain_limit_s=60.0)
"""A class of urgency is gained in 0.2 s, not 5."""
FOX = ImageRequest(prompt="a fox", seed=1)


def silent(share: float, phrase: str) -> None:
    pass


def pipeline_folder(folder: Path, kind: str = "StableDiffusionXLPipeline") -> Path:
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps({"_class_name": kind}))
    (folder / "megabytes").write_text("40")
    return folder


def scripted(spec: ModelSpec, resolved: str) -> Command:
    """The command of a scripted worker, as `engine_command` gives that of a real one."""

    def on_socket(socket: Path) -> Sequence[str]:
        program = (sys.executable, "-m", "tests.backends.images.scripted_worker")
        return (*program, "--socket", str(socket), "--model", resolved, "--model-id", spec.model_id)

    return on_socket


class TextProcess:
    """A text model: a process that holds memory. A run lasts until its payload, an event."""

    def __init__(self) -> None:
        self.loads = 0

    async def load(self, model_key: str) -> Loaded:
        self.loads += 1
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", "-c", "import os; b = os.urandom(60 << 20); print(); input()"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        assert await process.stdout.readline()
        size = await asyncio.to_thread(resident_bytes, process.pid)
        return Loaded(backend=process, measured_bytes=size)

    async def unload(self, model_key: str, backend: object) -> None:
        assert isinstance(backend, asyncio.subprocess.Process)
        if backend.returncode is None:
            backend.kill()
        await backend.wait()

    async def run(self, backend: object, payload: object) -> object:
        assert isinstance(backend, asyncio.subprocess.Process)
        assert isinstance(payload, asyncio.Event)
        await payload.wait()
        return f"said, while it was {'gone' if backend.returncode else 'there'}"


@dataclass
class ImageWorld:
    arbiter: MemoryArbiter
    image: ResidentPipeline
    text: TextProcess
    events: list[Event] = field(default_factory=list)

    def residents(self) -> dict[str, str]:
        return {one.key.capability: one.state.value for one in self.arbiter.status().residents}

    def told(self, kind: type[Event]) -> list[Event]:
        return [one for one in self.events if isinstance(one, kind)]


@asynccontextmanager
async def image_world(
    folder: Path, sockets: Path, *, budget: int = 1 << 40, may_displace_text: bool = False
) -> AsyncIterator[ImageWorld]:
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        arbiter = await stack.enter_async_context(
            MemoryArbiter(budget=budget, clock=clock, rules=RULES, grace_s=0)
        )
        source = pipeline_folder(folder / "fox")
        spec = ModelSpec(
            model_id="fox",
            source=str(source),
            role=ModelRole.DIFFUSION,
            manifest=Manifest(may_displace_text=may_displace_text),
        )
        models = await asyncio.to_thread(
            lambda: ImageModels(
                [spec],
                scripted,
                arbiter,
                WorkerSetup(sockets=sockets, start_timeout_s=60, patience_s=60),
                clock=clock,
                on_change=lambda: None,
            )
        )
        estimate = Estimate(
            base_bytes=IMAGE_BYTES,
            weights_bytes=0,
            kv_bytes=0,
            kv_bytes_per_token=0,
            source="headers",
            digest="fox",
        )
        sizes = {"fox": LeaseSize(estimate, 0)}
        watch = await stack.enter_async_context(EngineWatch(arbiter, clock))
        handler = ImageHandler(models.by_id, sizes, SizeHistory(), arbiter, watch.guard)
        text = TextProcess()
        world = ImageWorld(arbiter, models.by_id["fox"], text)
        arbiter.on_event(world.events.append)
        arbiter.register(
            Capability(name=IMAGE, role=DIFFUSION, handler=handler, estimate=lambda _: IMAGE_BYTES)
        )
        arbiter.register(
            Capability(name=TEXT, role=TEXT_TARGET, handler=text, estimate=lambda _: TEXT_BYTES)
        )
        yield world
