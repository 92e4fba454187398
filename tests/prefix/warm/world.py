"""A node's precache over a model without a process: one KV a slot, and blocks by content.

The toy engine reuses what the real one does: the KV kept under the request's key as far as it
agrees, or else whole blocks, and the tail, of prompts that were computed before. It decodes the
hash of the history, so a conversation has the same answers whatever was reused.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace

from kakeya.core.clock import Clock
from kakeya.core.errors import NotFound, PeerUnavailable
from kakeya.generation.facts import EngineStats, ModelFacts, ModelState
from kakeya.generation.frames import Done, Frame, Progress, StopReason, Tokens, Usage
from kakeya.generation.manifest import NO_MANIFEST, Manifest
from kakeya.generation.request import DecodeRequest
from kakeya.generation.retention import BlockClass, Retention
from kakeya.prefix.config import PrecacheConfig
from kakeya.prefix.names.keys import CacheKeys
from kakeya.prefix.seam import CacheUse, PrefixClaim, Wiped
from kakeya.prefix.warm.ahead import NodePrecache
from kakeya.prefix.warm.declared_prompts import DeclaredPrompt
from kakeya.prefix.warm.source import ModelSource
from kakeya.text.text import Texts
from tests.fakes import FakeClock
from tests.sessions.toy import ToyDirectory, next_token

BLOCK = 64


class StillClock(FakeClock):
    """Moves only by `advance`."""

    async def _jump(self) -> None:
        return None


@dataclass
class Pages:
    """`KeptPrefixes` of whole blocks and tails, by (model, adapter, tokens)."""

    is_on: bool = True
    room_tokens: int = 1 << 30
    kept: dict[tuple[str, str, tuple[int, ...]], Retention] = field(default_factory=dict)
    pinned: dict[str, tuple[str, str, tuple[int, ...]]] = field(default_factory=dict)
    classes: list[BlockClass] = field(default_factory=list)
    is_named: bool = True

    def add(self, model_id: str, adapter_id: str, tokens: Sequence[int]) -> None:
        for end in [*range(BLOCK, len(tokens) + 1, BLOCK), len(tokens)]:
            self.kept.setdefault((model_id, adapter_id, tuple(tokens[:end])), Retention.SHORT)

    def find(self, model_id: str, adapter_id: str, tokens: Sequence[int]) -> int:
        due = tuple(tokens)[:-1]
        if (model_id, adapter_id, due) in self.kept:
            return len(due)
        length = 0
        while (model_id, adapter_id, due[: length + BLOCK]) in self.kept and length < len(due):
            length += BLOCK
        return min(length, len(due))

    async def has_name(self, facts: ModelFacts) -> bool:
        return self.is_named

    def keep(self, model_id, adapter_id, token_ids, retention, *, block_class, pin="") -> int:
        found = self.find(model_id, adapter_id, token_ids)
        if found:
            self.kept[model_id, adapter_id, tuple(token_ids)[:found]] = retention
            self.classes.append(block_class)
        if pin:
            self.pinned[pin] = model_id, adapter_id, tuple(token_ids)
        return found

    @property
    def most_pinned_bytes(self) -> int:
        return self.room_tokens // 2

    def pinned_bytes(self, model_id, adapter_id, token_ids, pin) -> int:
        others = sum(len(ids) - 1 for name, (*_, ids) in self.pinned.items() if name != pin)
        return others + self.find(model_id, adapter_id, token_ids)

    def release(self, pin) -> None:
        self.pinned.pop(pin, None)

    def free_bytes(self) -> int:
        return self.room_tokens

    async def wipe(self) -> Wiped:
        gone, self.kept = len(self.kept), {}
        return Wiped(blocks=gone)

    def bytes_of(self, facts, tokens) -> int:
        return tokens


@dataclass
class SlottedModel:
    """See the module."""

    pages: Pages
    model_id: str = "toy"
    folder: str = ""
    context: int = 100_000
    vocab: int = 97
    block_tokens: int = BLOCK
    state: ModelState = ModelState.READY
    last_error: str = ""
    manifest: Manifest = NO_MANIFEST
    pid: int | None = 1
    gate: asyncio.Event | None = None
    fault: bool = False
    slots: dict[str, list[int]] = field(default_factory=dict)
    requests: list[DecodeRequest] = field(default_factory=list)

    async def ready(self, timeout_s: float) -> ModelFacts:
        return self.facts

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts(
            model_id=self.model_id,
            model_path=self.folder,
            vocab_size=self.vocab,
            context_tokens=self.context,
            eos_token_ids=(0,),
            kv_bytes_per_token=1,
            kv_block_tokens=self.block_tokens,
        )

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Frame, None]:
        self.requests.append(request)
        history = list(request.token_ids)
        held = self.slots.get(request.kv_key, []) if request.kv_key else []
        agreed = next(
            (i for i, (a, b) in enumerate(zip(held, history, strict=False)) if a != b), len(held)
        )
        cached = min(
            max(agreed, self.pages.find(self.model_id, "", history)), max(0, len(history) - 1)
        )
        yield Progress(computed_tokens=cached, total_tokens=len(history) - 1)
        if self.gate is not None:
            await self.gate.wait()
        if self.fault:
            raise PeerUnavailable(f"the engine of {self.model_id} is gone")
        # D KV is never exported: only what a prefill computed behind what was computed so.
        if agreed <= self.pages.find(self.model_id, "", history):
            self.pages.add(self.model_id, "", history[:-1])
        for _ in range(request.max_tokens):
            history.append(next_token(history[-8:], request.sampling, self.vocab))
            yield Tokens(token_ids=(history[-1],))
        if request.kv_key:
            self.slots[request.kv_key] = history[:-1]
        yield Done(reason=StopReason.MAX_TOKENS, usage=Usage(cached_tokens=cached))

    async def release(self, kv_key: str) -> None:
        self.slots.pop(kv_key, None)

    async def stats(self) -> EngineStats:
        return EngineStats()


@dataclass
class Turn:
    """What a turn cost: its prompt, what of it was there, and what the one before left."""

    prompt: int
    cached: int
    known: int

    @property
    def created(self) -> int:
        return self.prompt - self.cached


@dataclass
class World:
    models: tuple[SlottedModel, ...]
    pages: Pages
    precache: NodePrecache
    waiting: list[str] = field(default_factory=list)

    @property
    def model(self) -> SlottedModel:
        return self.models[0]

    @property
    def warmed(self) -> list[DecodeRequest]:
        """What was computed that nobody asked for."""
        return [r for model in self.models for r in model.requests if r.max_tokens == 0]

    async def claim(self, conversation: str, model: int = 0, **more: object) -> PrefixClaim:
        served = self.models[model]
        use = CacheUse(keys=CacheKeys(conversation_id=conversation))
        claim = PrefixClaim(model_id=served.model_id, facts=await served.ready(0), use=use)
        return replace(claim, **more)

    async def turn(
        self, history: list[int], said: Sequence[int], conversation: str, model: int = 0
    ) -> Turn:
        """One turn as a door makes it; the history grows by what was said and answered."""
        claim = await self.claim(conversation, model)
        known = len(history)
        history += said
        request = DecodeRequest(
            token_ids=tuple(history), max_tokens=8, kv_key=self.precache.kv_key(claim)
        )
        prompt = len(history)
        async with aclosing(self.models[model].decode(request)) as frames:
            async for frame in frames:
                if isinstance(frame, Tokens):
                    history += frame.token_ids
                if isinstance(frame, Done):
                    cached = frame.usage.cached_tokens
        ended = tuple(history)

        async def tokens() -> Sequence[int]:
            return ended

        self.precache.turn_ended(claim, tokens)
        return Turn(prompt, cached, known)

    async def settle(self) -> None:
        """Until all that waits was warmed."""
        for _ in range(100_000):
            stats = self.precache._prewarmer.stats
            if not stats.queued and not stats.running:
                return
            await asyncio.sleep(0)
        raise AssertionError("the prewarmer does not come to an end")


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(97) for _ in range(length)]


@asynccontextmanager
async def precache_world(
    clock: Clock,
    *,
    parallel: int = 4,
    names: Sequence[str] = ("toy",),
    prompts: Sequence[DeclaredPrompt] = (),
    folder: str = "",
    keep_alive_s: float = 240.0,
    usable_bytes: int = 1 << 34,
) -> AsyncIterator[World]:
    pages = Pages()
    models = tuple(SlottedModel(pages, name, folder, vocab=320 if folder else 97) for name in names)
    directory = ToyDirectory(models)
    waiting: list[str] = []

    def no_adapter(model_id: str, client: str):
        raise NotFound(model_id)

    source = ModelSource(directory, pages, adapter=no_adapter, is_needed=lambda: bool(waiting))
    config = PrecacheConfig(
        memory_bytes=1 << 30,
        disk_bytes=0,
        parallel=parallel,
        keep_alive_s=keep_alive_s,
        sweep_s=60.0,
        prompts=tuple(prompts),
    )
    precache = NodePrecache(
        config,
        directory,
        source,
        Texts(clock.wall),
        usable_bytes=lambda: usable_bytes,
        wipe=pages.wipe,
        clock=clock,
        rng=random.Random(3),
    )
    async with precache:
        yield World(models, pages, precache, waiting)
