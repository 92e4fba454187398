"""A worked example of a plug-in: a re-ranker, which scores texts by the words of a question.

Its distribution would name it so:

    [project.entry-points."kakeya.capabilities"]
    rerank = "tests.memory.example_plugin:capability"

The model is a bag of word weights in real memory, so that its size can be measured.

The second one, a camera, is handed the arbiter, and keeps what images became there. The third is
the camera with work of its own: a capability is reached through the arbiter, by other plug-ins or
by itself. Clients of the node send JSON, so a handler for them reads JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from kakeya import (
    EMBEDDING,
    VISION,
    Capability,
    Loaded,
    MemoryArbiter,
    VisionEmbedding,
    Warmth,
    embedding_key,
    errors,
    normalised,
)

SIZES = {"small": 64 * 1024, "large": 256 * 1024}


@dataclass(frozen=True, slots=True)
class Question:
    """What a caller sends."""

    words: tuple[str, ...]
    texts: tuple[str, ...]


@dataclass(slots=True)
class Weights:
    """A loaded model. Nothing of a request is kept in it."""

    table: bytearray | None


class Reranker:
    """The handler."""

    async def load(self, model_key: str) -> Loaded:
        weights = Weights(bytearray(SIZES[model_key]))
        await asyncio.sleep(0)  # where a real one would read a file in a thread
        return Loaded(backend=weights, measured_bytes=SIZES[model_key])

    async def unload(self, model_key: str, backend: object) -> None:
        assert isinstance(backend, Weights)
        backend.table = None  # a second call changes nothing

    async def run(self, backend: object, payload: object) -> object:
        assert isinstance(backend, Weights)
        assert isinstance(payload, Question)
        if backend.table is None:
            raise errors.InvariantBroken("a run needs its model", "it was unloaded")
        scores = []
        for text in payload.texts:
            await asyncio.sleep(0)  # cancelled here, it ends at once
            scores.append(sum(word in text.split() for word in payload.words))
        return [payload.texts[n] for n in sorted(range(len(scores)), key=lambda n: -scores[n])]


def _estimate(model_key: str) -> int:
    if model_key not in SIZES:
        raise errors.NotFound(f"no re-ranker is called {model_key!r}; there are {', '.join(SIZES)}")
    return SIZES[model_key]


def capability() -> Capability:
    """What the entry point names. A re-ranker is worth to the node what an embedder is."""
    return Capability(
        name="rerank",
        role=EMBEDDING,
        handler=Reranker(),
        estimate=_estimate,
        warmth=Warmth(stay_warm_s=60, unload_after_s=600),
    )


@dataclass(frozen=True, slots=True)
class Image:
    """What a camera sends: RGB pixels."""

    pixels: bytes
    width: int
    height: int


class Camera:
    """Answers with the brightness of an image, and how many it projected: that is what costs."""

    def __init__(self, arbiter: MemoryArbiter) -> None:
        self._arbiter = arbiter
        self.projected = 0

    async def load(self, model_key: str) -> Loaded:
        return Loaded(backend=model_key, measured_bytes=1024)

    async def unload(self, model_key: str, backend: object) -> None:
        """Nothing is held beside what the arbiter keeps, and forgets with the weights."""

    async def run(self, backend: object, payload: object) -> object:
        assert isinstance(payload, Image)
        width, height = payload.width, payload.height
        key = embedding_key("camera-1", normalised(payload.pixels, width, height, side=8))
        known = self._arbiter.cached_embedding(key)
        if known is None:
            self.projected += 1
            rows = memoryview(payload.pixels)
            known = VisionEmbedding(tokens=rows, token_count=width * height, hidden_size=3)
            self._arbiter.cache_embedding(key, known)
        return sum(known.tokens), self.projected


def camera(arbiter: MemoryArbiter) -> Capability:
    """What another entry point names: a function with an argument is handed the arbiter."""
    return Capability(
        name="brightness", role=VISION, handler=Camera(arbiter), estimate=lambda _: 1024
    )


async def _watch(arbiter: MemoryArbiter) -> None:
    """Goes on until it is cancelled, as the node's event loop ends."""
    black = Image(bytes(3), 1, 1)
    while True:
        with contextlib.suppress(errors.Refused):  # not now
            await arbiter.request("brightness", "m", black)
        await asyncio.sleep(60)


class Watcher(Camera):
    """The camera, which looks once a minute. It is started on the event loop."""

    def __init__(self, arbiter: MemoryArbiter) -> None:
        super().__init__(arbiter)
        self._watching = asyncio.get_running_loop().create_task(_watch(arbiter))


def watcher(arbiter: MemoryArbiter) -> Capability:
    """What a third entry point names. Its task runs once this has returned, so registered."""
    return Capability(
        name="brightness", role=VISION, handler=Watcher(arbiter), estimate=lambda _: 1024
    )
