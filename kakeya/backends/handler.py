"""The arbiter's handler of text and draft models: it loads and unloads engine children.

A load makes a new backend: the child starts and describes its model, its footprint is measured, its
lease bounds it, and it is watched. An unload ends the child. If a child dies in between, its
backend restarts it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from kakeya.backends.care import PanicCare
from kakeya.backends.engine.backend import EngineBackend
from kakeya.backends.engine.engine import EngineOptions
from kakeya.backends.engine.guard import GuardedEngine
from kakeya.backends.engine.kv_lender import most_kv_bytes
from kakeya.backends.engine.lease import EngineLease
from kakeya.backends.engine.watch import EngineWatch
from kakeya.backends.engines import Engines
from kakeya.backends.sizes import LeaseSize, Lent
from kakeya.core.errors import InvalidArgument, InvariantBroken, KakeyaError, PeerUnavailable
from kakeya.core.log import event
from kakeya.core.process import resident_bytes
from kakeya.core.units import MIB
from kakeya.generation.frames import Frame
from kakeya.generation.request import DecodeRequest
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.arbiter.capability import Loaded
from kakeya.memory.arbiter.resident import ResidentKey
from kakeya.memory.estimate.history import WORKING_SET, SizeHistory

_log = logging.getLogger(__name__)
CACHE_BYTES = 256 * MIB
"""The most bytes of unused buffers that an engine keeps."""


class EngineHandler:
    """See the module; `sizes` are the leases by model id."""

    def __init__(
        self,
        engines: Engines,
        sizes: Mapping[str, LeaseSize],
        history: SizeHistory,
        watch: EngineWatch,
        options: EngineOptions,
        arbiter: MemoryArbiter,
        care: PanicCare,
    ) -> None:
        self._care = care
        self._engines = engines
        self._sizes = sizes
        self._history = history
        self._watch = watch
        self._arbiter = arbiter
        self._start_timeout_s = options.start_timeout_s

    async def load(self, model_key: str) -> Loaded:
        """Start a child and wait until it serves. Raises PeerUnavailable if it was given up."""
        model = self._engines.get(model_key)
        await self._care.begin(model_key)
        backend = self._engines.make(model_key)
        key = ResidentKey(model.capability, model_key)
        load = GuardedEngine(key, EngineLease(backend, self._sizes[model_key].bytes))
        model.opened(backend)
        try:
            with self._watch.guard.loading(load):
                await backend.start()
                await backend.ready(self._start_timeout_s)
                lent = await self._lend(model_key, backend, model.capability)
                await self._bound(key, backend, lent)
                facts = await backend.ready(self._start_timeout_s)
        except BaseException as problem:
            model.closed()
            if isinstance(problem, Exception):
                model.load_failed(str(problem))
            await backend.aclose()
            model.ended()
            await self._care.end(model_key)
            raise
        model.settled(facts)
        if facts.working_set_bytes != self._history.newest_bytes(*WORKING_SET):
            self._history.note(*WORKING_SET, facts.working_set_bytes)
        self._watch.attach(
            model_key,
            backend,
            lent.bytes,
            capability=model.capability,
            kv_share=self._care.kv_share(model_key),
        )
        return Loaded(
            backend=backend, measured_bytes=lent.bytes, unfilled_bytes=lent.unfilled_bytes
        )

    async def unload(self, model_key: str, backend: object) -> None:
        """End the child; return when the system has its memory back."""
        engine = _engine(backend)
        self._watch.detach(model_key)
        model = self._engines.get(model_key)
        if model.backend is engine:
            model.closed()
        await engine.aclose()
        model.ended()
        await self._care.end(model_key)

    async def run(self, backend: object, payload: object) -> object:
        """Run a DecodeRequest to its end; return its frames. Raises InvalidArgument."""
        if not isinstance(payload, DecodeRequest):
            raise InvalidArgument(
                f"{type(payload).__name__} is not a DecodeRequest", param="payload"
            )
        frames: list[Frame] = [frame async for frame in _engine(backend).decode(payload)]
        return tuple(frames)

    async def _lend(self, model_id: str, backend: EngineBackend, kind: str) -> Lent:
        pid = backend.pid
        footprint = None if pid is None else await asyncio.to_thread(resident_bytes, pid)
        size = self._sizes[model_id]
        if footprint:
            self._history.note(size.estimate.digest, kind, footprint)
        ledger = self._arbiter.status()
        lent = size.lent(footprint, ledger.free_bytes - ledger.promised_bytes)
        # The ledger counts it before the engine learns of it: no other tenant gets the same room.
        self._arbiter.measure(kind, model_id, lent.bytes, unfilled_bytes=lent.bytes)
        return lent

    async def _bound(self, key: ResidentKey, backend: EngineBackend, lent: Lent) -> None:
        cache_bytes = min(CACHE_BYTES, lent.bytes // 4)
        try:
            most = most_kv_bytes(
                self._arbiter.status(),
                key,
                lent.bytes,
                lent.kv_bytes,
                share=self._care.kv_share(key.model_key),
            )
            await backend.set_limits(lent.bytes, cache_bytes, lent.kv_bytes, most)
        except PeerUnavailable:
            pass  # the child died just now; the next one is bounded before it serves
        except KakeyaError as problem:
            # The child is watched all the same, and ended if it outgrows its lease.
            event(
                _log,
                "engine not bounded",
                level=logging.WARNING,
                model=key.model_key,
                error=problem.message,
            )


def _engine(backend: object) -> EngineBackend:
    if not isinstance(backend, EngineBackend):
        raise InvariantBroken("text and draft models are engines", repr(backend))
    return backend
