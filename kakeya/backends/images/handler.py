"""The arbiter's handler of image models.

A load starts a worker, which loads the pipeline, and measures it; a run draws, and measures at each
step: what the system lent for an image stays with the process. A worker that outgrows the budget is
ended by the guard of engines. An unload ends the process, so that the system has all its memory
back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kakeya.backends.engine.guard import EngineGuard, GuardedEngine
from kakeya.backends.engines import EngineCommand
from kakeya.backends.images.model import IMAGE, ResidentPipeline, WorkerSetup
from kakeya.backends.sizes import LeaseSize
from kakeya.core.clock import Clock
from kakeya.core.errors import ConfigError, InvalidArgument, InvariantBroken
from kakeya.core.process import resident_bytes
from kakeya.generation.image import ImageRequest
from kakeya.generation.manifest import DIFFUSERS
from kakeya.generation.spec import ModelRole, ModelSpec, resolve
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.arbiter.capability import Loaded
from kakeya.memory.arbiter.resident import ResidentKey
from kakeya.memory.estimate.history import SizeHistory


class PipelineLease:
    """The lease of an image model, as the ledger has it."""

    def __init__(
        self, backend: ResidentPipeline, arbiter: MemoryArbiter, estimate_bytes: int
    ) -> None:
        self.backend = backend
        self._arbiter = arbiter
        self._estimate_bytes = estimate_bytes

    @property
    def bytes(self) -> int:
        """The bytes that the worker may occupy now."""
        resident = self._arbiter.find(IMAGE, self.backend.model_id)
        return self._estimate_bytes if resident is None else resident.bytes


class ImageHandler:
    """See the module; `sizes` are the leases by model id."""

    def __init__(
        self,
        models: Mapping[str, ResidentPipeline],
        sizes: Mapping[str, LeaseSize],
        history: SizeHistory,
        arbiter: MemoryArbiter,
        guard: EngineGuard,
    ) -> None:
        self._models = models
        self._sizes = sizes
        self._history = history
        self._arbiter = arbiter
        self._guard = guard
        self._guarded: dict[str, GuardedEngine] = {}

    async def load(self, model_key: str) -> Loaded:
        """Start a worker and wait until it draws. Raises LoadFailed and ConfigError."""
        model, size = self._models[model_key], self._sizes[model_key]
        lease = PipelineLease(model, self._arbiter, size.bytes)
        worker = GuardedEngine(ResidentKey(IMAGE, model_key), lease)
        self._guard.add(worker)
        try:
            footprint = await asyncio.to_thread(resident_bytes, await model.open()) or 0
        except BaseException:
            self._guard.remove(worker)
            await model.close()
            raise
        self._guarded[model_key] = worker
        estimate = size.estimate
        self._history.note(estimate.digest, IMAGE, footprint)
        lent = max(footprint + estimate.work_bytes, estimate.work_bytes)
        return Loaded(
            backend=model,
            measured_bytes=lent if footprint else None,
            unfilled_bytes=estimate.work_bytes if footprint else 0,
        )

    async def unload(self, model_key: str, backend: object) -> None:
        """End the worker."""
        self._guard.remove(self._guarded.pop(model_key))
        await _pipeline(backend).close()

    async def run(self, backend: object, payload: object) -> object:
        """Draw the images of an ImageRequest. Raises InvalidArgument, and the errors of
        `ImageModel.draw`."""
        if not isinstance(payload, ImageRequest):
            raise InvalidArgument(
                f"{type(payload).__name__} is not an ImageRequest; clients ask for images with "
                "POST /v1/images/generations",
                param="payload",
            )
        model = _pipeline(backend)
        worker = self._guarded[model.model_id]
        # The guard measures it all the time, in its own thread.
        drawn = await model.perform(payload, lambda: self._count(model, worker.guarded_bytes))
        pid = model.pid
        used = None if pid is None else await asyncio.to_thread(resident_bytes, pid)
        self._count(model, used or 0)
        return drawn

    def _count(self, model: ResidentPipeline, used: int) -> None:
        """Count a worker that has outgrown its lease."""
        resident = self._arbiter.find(IMAGE, model.model_id)
        if resident is not None and used > resident.bytes:
            self._arbiter.measure(IMAGE, model.model_id, used)


class ImageModels:
    """The image models of a node, in configured order."""

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        command: EngineCommand,
        memory: MemoryArbiter,
        setup: WorkerSetup,
        *,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        """Of the specs, those of other roles are left out. Raises ConfigError for a folder without
        a pipeline that a node draws with, and for a manifest that names another backend."""
        drawing = [spec for spec in specs if spec.role is ModelRole.DIFFUSION]
        for spec in drawing:
            spec.manifest.check_options(spec.model_id, DIFFUSERS, known=())
            if spec.manifest.backend:
                raise ConfigError(
                    f"models.{spec.model_id}.backend is {spec.manifest.backend!r}, and models that "
                    f"draw are run by {DIFFUSERS}; leave it out"
                )
        self.sources = {spec.model_id: resolve(spec) for spec in drawing}
        """Model id -> its folder."""
        self.by_id = {
            spec.model_id: ResidentPipeline(
                spec,
                Path(self.sources[spec.model_id]),
                command(spec, self.sources[spec.model_id]),
                memory,
                setup,
                clock=clock,
                on_change=on_change,
            )
            for spec in drawing
        }

    def offered(self) -> tuple[str, ...]:
        """List the models of which a request would be served now."""
        return tuple(model_id for model_id, model in self.by_id.items() if model.can_serve)


def _pipeline(backend: object) -> ResidentPipeline:
    if not isinstance(backend, ResidentPipeline):
        raise InvariantBroken("image models are pipelines", repr(backend))
    return backend
