"""One model of this node, run by an engine child that the agent owns.

Generations outlive the child: see `attempt`. The child's own life is `life`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Self

from kakeya.backends.attempt import Attempt
from kakeya.backends.engine.client import EngineMemoryLimits
from kakeya.backends.engine.life import Engine, EngineLife, EngineOptions, EngineSpec
from kakeya.backends.engine.process import Command
from kakeya.core.clock import Clock, SystemClock
from kakeya.core.errors import (
    InvalidArgument,
    InvariantBroken,
    KakeyaError,
    MemoryRefused,
)
from kakeya.core.log import event
from kakeya.decoding.draft.proposer import Draft
from kakeya.generation.facts import EngineStats, Footprint, ModelFacts
from kakeya.generation.frames import Frame
from kakeya.generation.kv import PageRef
from kakeya.generation.model import ServedModel
from kakeya.generation.request import DecodeRequest

__all__ = ["EngineBackend", "EngineOptions"]
_log = logging.getLogger(__name__)


class EngineBackend(EngineLife):
    """A `ServedModel` behind one engine child; an `async with` that starts and ends it."""

    def __init__(
        self,
        model_id: str,
        command: Command,
        *,
        options: EngineOptions | None = None,
        clock: Clock | None = None,
        runtime_dir: Path | None = None,
        env: Mapping[str, str] | None = None,
        on_change: Callable[[ServedModel], None] = lambda _: None,
    ) -> None:
        super().__init__(
            EngineSpec(model_id=model_id, command=command, runtime_dir=runtime_dir, env=env),
            options or EngineOptions(),
            clock=clock or SystemClock(),
            on_change=lambda: on_change(self),
        )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    @property
    def running(self) -> int:
        """Decodes that hold a place."""
        return self.gate.running

    @property
    def waiting(self) -> int:
        """Decodes that wait for a place."""
        return self.gate.waiting

    async def ready(self, timeout_s: float) -> ModelFacts:
        """Wait until it serves. Raises PeerUnavailable (with retry_after_s) when it will not."""
        await self.serving(timeout_s)
        if self.facts is None:
            raise InvariantBroken("a model that serves has facts", self.model_id)
        return self.facts

    def decode(self, request: DecodeRequest) -> AsyncGenerator[Frame, None]:
        """Stream frames; exactly one Done, last. Closing the iterator stops the work in one step.

        Raises QueueFull when too many wait, PeerUnavailable when no engine can take or finish it.
        """
        return Attempt(request, self, clock=self._clock).frames()

    def lend_for(self, request: DecodeRequest) -> AbstractAsyncContextManager[Self]:
        """Itself: it is held by what started it."""
        return nullcontext(self)

    async def draft(
        self,
        prefix: Sequence[int],
        size: int,
        *,
        seed: int | None = None,
        temperature: float | None = None,
    ) -> Draft:
        """Draft with this model. Never waits for a restart: a late draft is worth nothing."""
        if not prefix or size < 1:
            raise InvalidArgument(
                f"a draft needs a prefix and a size of at least 1, "
                f"not {len(prefix)} tokens and size {size}"
            )
        return await self._serving_now().client.draft(
            prefix,
            size,
            seed=seed,
            temperature=temperature,
            timeout_s=self.options.draft_timeout_s,
        )

    async def release(self, kv_key: str) -> None:
        """Forget the KV kept under a key; unknown keys and dead engines are fine."""
        if self.engine is None:
            return
        try:
            await self.engine.client.release(kv_key, self.options.call_timeout_s)
        except KakeyaError as error:
            # The engine's own bound on kept KV reclaims it; a dead one holds nothing.
            event(_log, "release failed", level=logging.DEBUG, kv_key=kv_key, error=error.message)

    async def stats(self) -> EngineStats:
        """Live numbers; zeros while the engine is not up."""
        return await self._stats() or EngineStats()

    # What the owner of memory asks of it

    async def set_limits(
        self, memory_bytes: int = 0, cache_bytes: int = 0, kv_bytes: int = 0
    ) -> Footprint:
        """Bound what the engine may occupy, now and after restarts; 0 = unchanged.

        Raises MemoryRefused when its model alone takes more and InvalidArgument for a KV bound in
        which no sequence fits (nothing is changed then), PeerUnavailable while it is not up (the
        next child gets them).
        """
        wanted = EngineMemoryLimits(
            memory_bytes=memory_bytes, cache_bytes=cache_bytes, kv_bytes=kv_bytes
        )
        before, self.limits = self.limits, self.limits.merged(wanted)
        engine = self._serving_now()
        try:
            footprint = await engine.client.set_limits(wanted, self.options.call_timeout_s)
        except (MemoryRefused, InvalidArgument):
            self.limits = before
            raise
        self.facts = await engine.client.describe(self.options.call_timeout_s)
        return footprint

    async def shrink(self, target_bytes: int) -> Footprint:
        """Have the engine give so many bytes back, as far as nobody uses them.

        Raises PeerUnavailable while it is not up, DeadlineExceeded when its model thread is busy.
        """
        client = self._serving_now().client
        return await client.shrink(target_bytes, self.options.call_timeout_s)

    async def footprint(self) -> Footprint | None:
        """What it occupies now; None while it is not up or does not answer."""
        stats = await self._stats()
        return None if stats is None else stats.footprint

    def hold(self) -> None:
        """Let no new sequence in until `resume`, `end` or `kill`; they wait."""
        self.gate.hold()

    def resume(self) -> None:
        """Let sequences in again."""
        self.gate.resume()

    # Adapters

    async def load_adapter(
        self,
        adapter_id: str,
        ref: PageRef,
        timeout_s: float,
        instead_of: str = "",
        sent: Callable[[], None] | None = None,
    ) -> int:
        """Have the engine take an adapter from pages that stay pinned, into the slot of another
        one that is idle; the bytes it takes there. `sent` is called when it was asked for: a decode
        with that adapter from then on comes behind it, and ends with NotFound where the load fails;
        one should come.

        Raises MemoryRefused without a slot or room, InvalidArgument when it does not fit the
        model, Conflict when the other one is in use or the pages were freed, UnknownMethod when
        the engine takes none: nothing is changed then. PeerUnavailable. A restarted
        engine holds none.
        """
        client = self._serving_now().client
        return await client.load_adapter(adapter_id, ref, timeout_s, instead_of, sent)

    async def unload_adapter(self, adapter_id: str) -> bool:
        """Free an adapter's slot; False where it had none. Raises Conflict for one in use."""
        client = self._serving_now().client
        return await client.unload_adapter(adapter_id, self.options.call_timeout_s)

    async def adapters(self) -> tuple[str, ...]:
        """What is in the engine's slots; nothing while it is not up."""
        return (await self.stats()).adapter_ids

    def _serving_now(self) -> Engine:
        if self.engine is None:
            raise self.unavailable()
        return self.engine

    async def _stats(self) -> EngineStats | None:
        if self.engine is None:
            return None
        try:
            return await self.engine.client.stats(self.options.call_timeout_s)
        except KakeyaError:
            return None
