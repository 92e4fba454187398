"""A worked example of a plug-in: a re-ranker, which scores texts by the words of a question.

Its distribution would name it so:

    [project.entry-points."kakeya.capabilities"]
    rerank = "tests.memory.example_plugin:capability"

The model is a bag of word weights in real memory, so that its size can be measured.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kakeya.core import errors
from kakeya.memory.capability import Capability, Loaded
from kakeya.memory.resident import EMBEDDING, Warmth

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
