"""The arbiter's handler of image models.

A load starts a worker, which loads the pipeline, and measures it; a run draws, and measures again:
what the system lent for an image stays with the process. An unload ends the process, so that the
system has all its memory back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

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
from kakeya.memory.estimate.history import SizeHistory


class ImageHandler:
    """See the module; `sizes` are the leases by model id."""

    def __init__(
        self,
        models: Mapping[str, ResidentPipeline],
        sizes: Mapping[str, LeaseSize],
        history: SizeHistory,
        arbiter: MemoryArbiter,
    ) -> None:
        self._models = models
        self._sizes = sizes
        self._history = history
        self._arbiter = arbiter

    async def load(self, model_key: str) -> Loaded:
        """Start a worker and wait until it draws. Raises LoadFailed and ConfigError."""
        model = self._models[model_key]
        footprint = await asyncio.to_thread(resident_bytes, await model.open()) or 0
        estimate = self._sizes[model_key].estimate
        self._history.note(estimate.digest, IMAGE, footprint)
        lent = max(footprint + estimate.work_bytes, estimate.work_bytes)
        return Loaded(
            backend=model,
            measured_bytes=lent if footprint else None,
            unfilled_bytes=estimate.work_bytes if footprint else 0,
        )

    async def unload(self, model_key: str, backend: object) -> None:
        """End the worker."""
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
        drawn = await model.perform(payload)
        await self._measure(model)
        return drawn

    async def _measure(self, model: ResidentPipeline) -> None:
        """Count a worker that has outgrown its lease."""
        pid = model.pid
        used = None if pid is None else await asyncio.to_thread(resident_bytes, pid)
        resident = self._arbiter.find(IMAGE, model.model_id)
        if resident is not None and used and used > resident.bytes:
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


def _pipeline(backend: object) -> ResidentPipeline:
    if not isinstance(backend, ResidentPipeline):
        raise InvariantBroken("image models are pipelines", repr(backend))
    return backend
