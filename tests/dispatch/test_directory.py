"""Finding models by name, and what their decodes tell about peers."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from kakeya.adapters.files.store import AdapterRecord
from kakeya.core.errors import InvalidArgument, NotFound
from kakeya.dispatch.directory import VerifierDirectory, failed_addresses
from kakeya.generation.frames import Done, Frame, SourceUsage, StopReason, Usage
from kakeya.generation.kv import KvOffer
from kakeya.generation.request import DecodeRequest
from tests.backends.fake_model import FakeModel

USAGE = Usage(
    sources=(
        SourceUsage(source="ngram", failed=1),
        SourceUsage(source="draft@10.0.0.1:5", failed=1, accepted=9),
        SourceUsage(source="draft@10.0.0.2:5", late=4, abstained=3),
    )
)


class NoAdapters:
    """What a node without adapters answers."""

    def find(self, model_id: str, client: str = "") -> AdapterRecord:
        raise NotFound(f"there is no adapter {model_id!r} here")

    def usable(self, client: str = "") -> tuple[AdapterRecord, ...]:
        return ()


def directory(*models: FakeModel, embedders: tuple[FakeModel, ...] = ()) -> VerifierDirectory:
    return VerifierDirectory(models, NoAdapters(), embedders)


def model(model_id: str) -> FakeModel:
    async def decode(_: DecodeRequest, __: KvOffer) -> AsyncGenerator[Frame, None]:
        yield Done(reason=StopReason.MAX_TOKENS)

    return FakeModel(decode, model_id=model_id)


async def test_the_first_model_is_the_default_and_unknown_ones_hear_what_there_is() -> None:
    models = directory(model("a"), model("b"))
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
    assert await models.adapted() == ()


def test_a_model_of_the_other_kind_says_what_it_can_do_and_which_models_can() -> None:
    models = directory(model("a"), embedders=(model("v"), model("w")))
    assert models.embedder("w").model_id == "w"
    assert [model.model_id for model in models.embedders()] == ["v", "w"]
    with pytest.raises(InvalidArgument, match=r"v makes embeddings .* writes text with a"):
        models.get("v")
    with pytest.raises(InvalidArgument, match=r"a writes text .* embeddings are made by v, w"):
        models.embedder("a")
    with pytest.raises(NotFound, match="'x' is not served here; embeddings are made by v, w"):
        models.embedder("x")
    with pytest.raises(NotFound, match="embeddings are made by no model"):
        directory().embedder("x")


def test_only_peers_that_failed_are_suspected() -> None:
    assert failed_addresses(USAGE) == ("10.0.0.1:5",)
