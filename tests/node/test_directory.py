"""Finding models by name, and what their decodes tell about peers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

import pytest

from kakeya.adapters.files.store import AdapterRecord
from kakeya.adapters.lease import AdapterUse
from kakeya.core.clock import SystemClock
from kakeya.core.errors import NotFound
from kakeya.generation.facts import EngineStats, ModelFacts, ModelState
from kakeya.generation.frames import Done, Frame, SourceUsage, StopReason, Tokens, Usage
from kakeya.generation.request import DecodeRequest
from kakeya.node.directory import VerifierDirectory, failed_addresses

USAGE = Usage(
    sources=(
        SourceUsage(source="ngram", failed=1),
        SourceUsage(source="draft@10.0.0.1:5", failed=1, accepted=9),
        SourceUsage(source="draft@10.0.0.2:5", late=4, abstained=3),
    )
)


class Model:
    """A served model of three frames, as the seam describes one."""

    state = ModelState.READY
    last_error = ""

    def __init__(self, model_id: str) -> None:
        self.model_id = model_id
        self.is_closed = False

    async def ready(self, timeout_s: float) -> ModelFacts:
        raise NotImplementedError

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Frame, None]:
        try:
            yield Tokens(token_ids=(1,))
            yield Tokens(token_ids=(2,))
            yield Done(reason=StopReason.MAX_TOKENS, usage=USAGE)
        finally:
            self.is_closed = True

    async def release(self, kv_key: str) -> None: ...

    async def stats(self) -> EngineStats:
        return EngineStats()


REQUEST = DecodeRequest(token_ids=[1], max_tokens=2)


class NoAdapters:
    """What a node without adapters answers."""

    def find(self, model_id: str, client: str = "") -> AdapterRecord:
        raise NotFound(f"there is no adapter {model_id!r} here")

    def usable(self, client: str = "") -> tuple[AdapterRecord, ...]:
        return ()

    async def acquire_again(self, record: AdapterRecord, patience_s: float) -> AdapterUse:
        raise AssertionError(record)

    def lost(self, lease: AdapterUse) -> None:
        raise AssertionError(lease)


def directory(
    *models: Model, told: Callable[[Usage], None] = lambda usage: None
) -> VerifierDirectory:
    return VerifierDirectory(models, told, NoAdapters(), SystemClock())


def test_the_first_model_is_the_default_and_unknown_ones_hear_what_there_is() -> None:
    models = directory(Model("a"), Model("b"))
    assert models.get("").model_id == models.get("a").model_id == "a"
    assert [model.model_id for model in models.verifiers()] == ["a", "b"]
    with pytest.raises(NotFound, match="'c' is not served here; this node serves a, b"):
        models.get("c")
    with pytest.raises(NotFound, match="--model"):
        directory().get("")
    with pytest.raises(NotFound, match="no adapter 'a:b' here"):
        models.get("a:b")
    with pytest.raises(NotFound, match="'c:b' is not served here; this node serves a, b"):
        models.get("c:b")
    assert models.adapted() == ()


async def test_a_whole_decode_is_told_once_and_frames_pass_unchanged() -> None:
    told: list[Usage] = []
    model = directory(Model("a"), told=told.append).get("a")
    frames = [frame async for frame in model.decode(REQUEST)]
    assert [type(frame) for frame in frames] == [Tokens, Tokens, Done]
    assert told == [USAGE]


async def test_leaving_a_decode_early_closes_the_model_below() -> None:
    below = Model("a")
    told: list[Usage] = []
    frames = directory(below, told=told.append).get("a").decode(REQUEST)
    await anext(frames)
    await frames.aclose()
    assert below.is_closed
    assert told == []


def test_only_peers_that_failed_are_suspected() -> None:
    assert failed_addresses(USAGE) == ("10.0.0.1:5",)
