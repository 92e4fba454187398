"""A node's models, pages and prefixes in this process, with real engine children."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from kakeya.backends.engine.engine import EngineOptions
from kakeya.backends.engines import EngineCommand, engine_command
from kakeya.backends.resident import ResidentModel
from kakeya.config import config
from kakeya.core.clock import SystemClock
from kakeya.core.tasks import Supervisor
from kakeya.generation.facts import ModelFacts
from kakeya.generation.frames import Done, Frame, Tokens, Usage
from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.generation.spec import ModelRole, ModelSpec
from kakeya.node.memory import EngineSetup, NodeMemory
from kakeya.node.pages import NodePages
from kakeya.prefix.prefixes import NodePrefixes

TINY = "kakeya-tiny"


@dataclass(eq=False)
class Node:
    """What a node has of models and of their prompts."""

    memory: NodeMemory
    pages: NodePages
    model: ResidentModel

    @property
    def prefixes(self) -> NodePrefixes:
        return self.pages.prefixes

    async def named(self) -> ModelFacts:
        """Wait for the model, and for the name of its weights: a request waits a second for it."""
        facts = await self.model.ready(60)
        assert self.model.pid is not None
        assert await self.prefixes.names.find(facts, self.model.pid, "") is not None
        return facts

    def check_conserved(self) -> None:
        """Nothing is pinned, filled or claimed when nobody is asking."""
        prefixes, pool = self.prefixes, self.pages.arena.snapshot().pool
        held = prefixes.pages
        in_trees = sum(shelf.tree.stats().ram_blocks for shelf in held.shelves())
        prefixes.check_integrity()
        assert prefixes.is_at_rest
        assert pool.pinned_pages == 0
        assert in_trees == pool.blocks
        assert all(shelf.tree.stats().pinned_blocks == 0 for shelf in held.shelves())

    async def settled(self) -> None:
        """Wait until what was cut off is over, and the disk has everything."""
        async with asyncio.timeout(60):
            while not self.prefixes.is_at_rest:
                await asyncio.sleep(0.02)
            await self.prefixes.store.flush()
            await asyncio.sleep(0.02)


@dataclass
class Answer:
    """What came of a generation."""

    prompt: int
    tokens: list[int] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)

    @property
    def cached(self) -> int:
        return self.usage.cached_tokens

    @property
    def computed(self) -> int:
        return self.prompt - self.usage.cached_tokens


async def ask(
    node: Node,
    prompt: Sequence[int],
    max_tokens: int = 2,
    *,
    priority: GenerationPriority = GenerationPriority.NORMAL,
    **more: object,
) -> Answer:
    """Generate to the end."""
    answer = Answer(len(prompt))
    request = DecodeRequest(token_ids=prompt, max_tokens=max_tokens, priority=priority, **more)
    async with aclosing(node.model.decode(request)) as frames:
        async for frame in frames:
            take(answer, frame)
    return answer


def take(answer: Answer, frame: Frame) -> None:
    if isinstance(frame, Tokens):
        answer.tokens += frame.token_ids
    elif isinstance(frame, Done):
        answer.usage = frame.usage


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 3000) for _ in range(length)]


@asynccontextmanager
async def node(
    folder: Path,
    *,
    command: EngineCommand | None = None,
    spec: ModelSpec | None = None,
    options: EngineOptions | None = None,
    memory_mb: int = 64,
    disk_mb: int = 256,
    environ: Mapping[str, str] | None = None,
) -> AsyncIterator[Node]:
    clock = SystemClock()
    settings = await asyncio.to_thread(
        config.load, ("--data-dir", str(folder)), dict(environ or {})
    )
    precache = replace(settings.precache, memory_bytes=memory_mb << 20, disk_bytes=disk_mb << 20)
    spec = spec or ModelSpec(model_id=TINY, source=TINY, role=ModelRole.VERIFIER)

    def build() -> NodeMemory:
        return NodeMemory(
            settings.memory,
            [spec],
            EngineSetup(
                command=command or engine_command("text", adapters=settings.adapters),
                options=options or EngineOptions(),
                sockets=None,
            ),
            data_dir=folder,
            clock=clock,
            rng=random.Random(1),
            on_change=lambda: None,
        )

    async with await asyncio.to_thread(build) as memory:
        pages = NodePages(
            settings.adapters, precache, memory, data_dir=folder, clock=clock, rng=random.Random()
        )
        async with pages, Supervisor(clock) as tasks:
            await memory.start(tasks, "node")
            yield Node(memory, pages, memory.engines.get(spec.model_id))
