"""A model together with one of its adapters, as callers see it: `BASE:NAME` is a model like others.

The adapter is leased while a request decodes, which is sent behind its load. An engine that could
not load it, or was started anew and has empty slots, says that it does not know the adapter: it is
brought in again, and the decode goes on from the tokens committed so far.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from kakeya.adapters.files.store import AdapterRecord
from kakeya.adapters.lease import AdapterUse
from kakeya.adapters.manager import PATIENCE_S
from kakeya.core.clock import Clock
from kakeya.core.errors import Conflict, NotFound, PeerUnavailable
from kakeya.generation.continuation import Continuation
from kakeya.generation.facts import EngineStats, ModelFacts, ModelState
from kakeya.generation.frames import Frame, Tokens
from kakeya.generation.model import ServedModel
from kakeya.generation.request import DecodeRequest

_MOST_LOSSES = 3
"""Engines in a row that may end under a request without a token between them."""


class Adapters(Protocol):
    """What finds adapters and lends them: `AdapterManager`."""

    def find(self, model_id: str, client: str = "") -> AdapterRecord:
        """Find an adapter for a client. Raises NotFound, Denied."""
        ...

    def usable(self, client: str = "") -> tuple[AdapterRecord, ...]:
        """What a client may name."""
        ...

    async def acquire_again(self, record: AdapterRecord, patience_s: float) -> AdapterUse:
        """Lease a version. Raises Conflict when it was removed or replaced meanwhile."""
        ...

    def lost(self, lease: AdapterUse) -> None:
        """Note that an engine does not know a leased adapter."""
        ...


class AdaptedModel:
    """A `ServedModel`. Each request takes the version that is registered when it begins."""

    def __init__(
        self,
        base: ServedModel,
        model_id: str,
        record: Callable[[], AdapterRecord],
        adapters: Adapters,
        clock: Clock,
    ) -> None:
        """`record` finds the adapter as it is registered now. Raises NotFound when removed."""
        self._base = base
        self._model_id = model_id
        self._record = record
        self._adapters = adapters
        self._clock = clock

    @property
    def model_id(self) -> str:
        """BASE:NAME."""
        return self._model_id

    @property
    def state(self) -> ModelState:
        """That of the base: an adapter comes and goes with a request."""
        return self._base.state

    @property
    def last_error(self) -> str:
        """That of the base."""
        return self._base.last_error

    async def ready(self, timeout_s: float) -> ModelFacts:
        """Wait until the base serves. Raises NotFound when the adapter was removed."""
        self._record()
        return await self._base.ready(timeout_s)

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Frame, None]:
        """Stream frames, as the base does, with the adapter; and what acquiring it raises."""
        record, has_begun = self._record(), False
        job = Continuation(request, self._clock.mono())
        while True:
            left_s = job.left_s(self._clock.mono())
            patience_s = PATIENCE_S if left_s is None else left_s
            facts = await self._base.ready(patience_s)
            done = job.finish(facts.context_tokens, self._clock.mono())
            if done is not None:
                yield done
                return
            try:
                lease = await self._adapters.acquire_again(record, patience_s)
            except Conflict:
                latest = self._record()
                if has_begun or latest == record:
                    raise
                record = latest  # it was replaced before the first token
                continue
            with lease:
                rest = job.rest(self._clock.mono())
                asked = replace(rest, adapter_id=lease.adapter_id)
                try:
                    async with aclosing(self._base.decode(asked)) as frames:
                        async for frame in frames:
                            seen = job.take(frame, self._clock.mono())
                            has_begun = has_begun or isinstance(frame, Tokens)
                            if seen is not None:
                                yield seen
                except NotFound as unknown:
                    self._adapters.lost(lease)
                    self._note_loss(job, record, unknown)
                else:
                    return

    async def release(self, kv_key: str) -> None:
        """Forget the KV kept under a key."""
        await self._base.release(kv_key)

    async def stats(self) -> EngineStats:
        """Those of the base's engine."""
        return await self._base.stats()

    def _note_loss(self, job: Continuation, record: AdapterRecord, unknown: NotFound) -> None:
        job.interrupt()
        if job.losses_in_a_row >= _MOST_LOSSES:
            raise PeerUnavailable(
                f"the engine forgot adapter {record.model_id} {job.losses_in_a_row} times in a "
                f"row: {unknown.message}",
                retry_after_s=1.0,
            ) from None
