"""One model of this node, run by an engine child that the agent owns.

Generations survive the child: see `attempt.py`. The child's life cycle is in `life.py`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Self

from kakeya.backends.attempt import Attempt
from kakeya.backends.engine.child import Child, ChildClient, engine_client
from kakeya.backends.engine.client import EngineMemoryLimits
from kakeya.backends.engine.engine import (
    Engine,
    EngineCheck,
    EngineOptions,
    EngineSpec,
    OtherRanks,
)
from kakeya.backends.engine.life import EngineLife
from kakeya.backends.engine.process import Command
from kakeya.core.clock import Clock, SystemClock
from kakeya.core.errors import (
    InvalidArgument,
    InvariantBroken,
    KakeyaError,
    MemoryRefused,
    PeerUnavailable,
)
from kakeya.core.log import event
from kakeya.decoding.draft.proposer import Draft
from kakeya.decoding.draft.states import HiddenStates
from kakeya.generation.continuation import Continuation
from kakeya.generation.facts import EngineStats, Footprint, ModelFacts
from kakeya.generation.frames import Frame
from kakeya.generation.kv import PageRef
from kakeya.generation.manifest import NO_MANIFEST
from kakeya.generation.model import ServedModel
from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.generation.waiting import RequestWait, WaitReason

_log = logging.getLogger(__name__)


class EngineBackend(EngineLife):
    """A `ServedModel` behind one engine child; an `async with` that starts and ends it."""

    def __init__(
        self,
        model_id: str,
        command: Command,
        *,
        client: Callable[[Child], ChildClient] = engine_client,
        options: EngineOptions | None = None,
        clock: Clock | None = None,
        runtime_dir: Path | None = None,
        env: Mapping[str, str] | None = None,
        others: Callable[[], AbstractAsyncContextManager[OtherRanks]] | None = None,
        check: EngineCheck | None = None,
        on_change: Callable[[ServedModel], None] = lambda _: None,
    ) -> None:
        super().__init__(
            EngineSpec(
                model_id=model_id,
                command=command,
                client=client,
                runtime_dir=runtime_dir,
                env=env,
                others=others,
                check=check,
            ),
            options or EngineOptions(),
            clock=clock or SystemClock(),
            on_change=lambda: on_change(self),
        )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    manifest = NO_MANIFEST  # of an engine by itself, without a `ResidentModel`

    @property
    def folder(self) -> Path | None:
        """None before the first load; see `ServedModel`."""
        return Path(self.facts.model_path) if self.facts else None

    def waits_for(self) -> RequestWait | None:
        """See `ServedModel`."""
        if self.progress is None:
            return None
        said = self.progress.describe()
        return RequestWait(reason=WaitReason.LOAD, model_id=self.model_id, progress=said)

    @property
    def running(self) -> int:
        """The number of decodes that hold a place."""
        return self.gate.running

    @property
    def waiting(self) -> int:
        """The number of decodes that wait for a place."""
        return self.gate.waiting

    async def ready(
        self, timeout_s: float, priority: GenerationPriority = GenerationPriority.NORMAL
    ) -> ModelFacts:
        """Wait until the model serves: an engine that starts does so for all its requests at once.

        Raises PeerUnavailable (with retry_after_s) if it fails.
        """
        await self.serving(timeout_s)
        if self.facts is None:
            raise InvariantBroken("a model that serves has facts", self.model_id)
        return self.facts

    def decode(self, request: DecodeRequest) -> AsyncGenerator[Frame, None]:
        """Stream frames; exactly one Done, last. Closing the iterator stops the work in one step.

        Raises QueueFull if too many wait, PeerUnavailable if no engine can take or finish it.
        """
        return Attempt(request, self, clock=self._clock).frames()

    def prompts_s(self, job: Continuation) -> float:
        """Nothing: a job that waits for the engine itself is told its place by it."""
        return 0.0

    def lend_for(self, request: DecodeRequest) -> AbstractAsyncContextManager[Self]:
        """Return itself: the code that started the backend holds it."""
        return nullcontext(self)

    async def draft(
        self,
        prefix: Sequence[int],
        size: int,
        *,
        seed: int | None = None,
        temperature: float | None = None,
        num_steps: int = 1,
        states: HiddenStates | None = None,
    ) -> Draft:
        """Draft with this model, without waiting for a restart: a late draft is worth nothing."""
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
            num_steps=num_steps,
            states=states,
            timeout_s=self.options.draft_timeout_s,
        )

    async def embed(
        self, texts: Sequence[Sequence[int]], *, size: int = 0, client: str = "", user: str = ""
    ) -> bytes:
        """See `EmbeddingModel`; after the death of an engine the next one begins anew.

        Raises QueueFull if too many wait, PeerUnavailable if no engine can take or finish it.
        """
        async with self.gate.turn(client, user):
            lost: Engine | None = None
            for left in reversed(range(self.options.max_losses_in_a_row)):
                engine = await self.serving(self.options.resume_timeout_s, other_than=lost)
                try:
                    return await engine.client.embed(texts, size, self.options.decode_timeout_s)
                except PeerUnavailable as error:
                    if not left:
                        raise
                    lost = engine if await self.is_lost(engine, error) else None
        raise self.unavailable()

    async def release(self, kv_key: str) -> None:
        """Forget the KV of a key; an unknown key or a dead engine is ignored."""
        if self.engine is None:
            return
        try:
            await self.engine.client.release(kv_key, self.options.call_timeout_s)
        except KakeyaError as error:
            # The engine's bound on kept KV reclaims it; a dead engine holds none.
            event(_log, "release failed", level=logging.DEBUG, kv_key=kv_key, error=error.message)

    async def stats(self) -> EngineStats:
        """Return live figures; zeros while the engine is not up."""
        return await self._stats() or EngineStats()

    # For the memory arbiter

    async def set_limits(
        self,
        memory_bytes: int = 0,
        cache_bytes: int = 0,
        kv_bytes: int = 0,
        kv_most_bytes: int = 0,
    ) -> Footprint:
        """Bound the memory of the engine, now and after restarts; 0 = unchanged.

        The bound of KV may later be raised to `kv_most_bytes`, for which the engine asks.

        Raises MemoryRefused if the model alone takes more and InvalidArgument for a KV bound in
        which no sequence fits (both change nothing), PeerUnavailable while the engine is not up
        (the next child gets the bounds).
        """
        wanted = EngineMemoryLimits(
            memory_bytes=memory_bytes,
            cache_bytes=cache_bytes,
            kv_bytes=kv_bytes,
            kv_most_bytes=kv_most_bytes,
        )
        footprint = await self._set_limits(wanted)
        self.facts = await self._serving_now().client.describe(self.options.call_timeout_s)
        return footprint

    async def answer_want(self, memory_bytes: int, kv_bytes: int, free_bytes: int) -> None:
        """Bound memory and KV as `set_limits`, in answer to an engine that asked for more; so many
        bytes could be lent beside these now."""
        wanted = EngineMemoryLimits(memory_bytes=memory_bytes, kv_bytes=kv_bytes)
        await self._set_limits(wanted, free_bytes)

    async def _set_limits(
        self, wanted: EngineMemoryLimits, free_bytes: int | None = None
    ) -> Footprint:
        before, self.limits = self.limits, self.limits.merged(wanted)
        client = self._serving_now().client
        try:
            return await client.set_limits(wanted, self.options.call_timeout_s, free_bytes)
        except (MemoryRefused, InvalidArgument):
            self.limits = before
            raise

    async def shrink(self, target_bytes: int) -> Footprint:
        """Ask the engine to free up to `target_bytes` unused bytes.

        Raises PeerUnavailable while it is not up, DeadlineExceeded if its model thread is busy.
        """
        client = self._serving_now().client
        return await client.shrink(target_bytes, self.options.call_timeout_s)

    async def footprint(self) -> Footprint | None:
        """Return the memory of the engine; None while it is not up or does not answer."""
        stats = await self._stats()
        return None if stats is None else stats.footprint

    def hold(self) -> None:
        """Admit no new sequence until `resume`, `end` or `kill`; new ones wait."""
        self.gate.hold()

    def resume(self) -> None:
        """Admit sequences again."""
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
        """Load an adapter from pinned pages into a free slot or that of an idle adapter.

        Returns the bytes of all slots. `sent` is called when the load is sent: a later decode with
        the adapter runs after the load, and ends with NotFound if the load fails. One should
        follow. A restarted engine holds no adapters.

        Raises MemoryRefused without a slot or room, InvalidArgument if the adapter does not fit the
        model, Conflict if the other adapter is in use or the pages were freed, UnknownMethod if
        the engine takes no adapters (all of these change nothing), PeerUnavailable.
        """
        client = self._serving_now().client
        return await client.load_adapter(adapter_id, ref, timeout_s, instead_of, sent)

    async def unload_adapter(self, adapter_id: str) -> bool:
        """Free an adapter's slot; False if it had none. Raises Conflict if it is in use."""
        client = self._serving_now().client
        return await client.unload_adapter(adapter_id, self.options.call_timeout_s)

    async def adapters(self) -> tuple[str, ...]:
        """List the adapters in the engine's slots; none while it is not up."""
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
