"""POST /v1/embeddings: OpenAI's client in every form, and refusals that name the field."""

from __future__ import annotations

import asyncio
import base64
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument
from kakeya.gateway.openai.embeddings import MAX_INPUTS, parse_embedding
from kakeya.generation.facts import ModelState
from tests.gateway.toy import ToyEmbedder, ToyModel, make_folder, serving
from tests.mlx.encoder_reference import WORDS, write_tokenizer

PARIS = [2, *map(WORDS.index, ("the", "capital", "of", "france", "is", "paris")), 3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


async def test_openais_client_gets_vectors_of_texts_in_order_and_usage(folder: Path) -> None:
    model = ToyEmbedder(folder)
    async with serving(embedders=[model]) as served:
        create = served.openai.embeddings.create
        made = await create(model="encoder", input=["The capital of France is Paris", "bread"])
        bread = [2, WORDS.index("bread"), 3]
        assert model.asked == [[PARIS, bread]]
        assert [one.embedding for one in made.data] == [[2, 3, len(PARIS)], [2, 3, 3]]
        assert [one.index for one in made.data] == [0, 1]
        assert (made.model, made.object) == ("encoder", "list")
        assert made.usage.prompt_tokens == made.usage.total_tokens == len(PARIS) + 3
        floats = await create(model="encoder", input="bread", encoding_format="float", user="me")
        assert floats.data[0].embedding == [2, 3, 3]


async def test_token_ids_are_taken_as_they_are(folder: Path) -> None:
    model = ToyEmbedder(folder)
    async with serving(embedders=[model]) as served:
        create = served.openai.embeddings.create
        assert (await create(model="encoder", input=[5, 6])).data[0].embedding == [5, 6, 2]
        made = await create(model="encoder", input=[[5], [7, 8, 9]])
        assert [one.embedding for one in made.data] == [[5, 5, 1], [7, 9, 3]]
        assert made.usage.prompt_tokens == 4
        mixed = {"model": "encoder", "input": ["bread", [4, 5], "paris"], "x_client_id": "bob"}
        answer = await served.http.post("/v1/embeddings", json={**mixed, "x_cooldown": 9})
        assert (answer.status_code, answer.headers["x-kakeya-ignored"]) == (200, "x_cooldown")
        assert [len(text) for text in model.asked[-1]] == [3, 2, 3]


async def test_base64_is_little_endian_float32(folder: Path) -> None:
    async with serving(embedders=[ToyEmbedder(folder)]) as served:
        body = {"model": "encoder", "input": "bread", "encoding_format": "base64"}
        answer = (await served.http.post("/v1/embeddings", json=body)).json()
        packed = base64.b64decode(answer["data"][0]["embedding"])
        assert struct.unpack("<3f", packed) == (2, 3, 3)


async def test_what_is_too_long_is_cut_off_only_where_the_client_says_so(folder: Path) -> None:
    model = ToyEmbedder(folder, context_tokens=5)
    long = "the capital of france"
    async with serving(embedders=[model]) as served:
        asked = {"model": "encoder", "input": ["bread", long]}
        refused = await served.http.post("/v1/embeddings", json=asked)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == "input[1]"
        assert error["code"] == "context_length_exceeded"
        assert "6 tokens; encoder takes at most 5" in error["message"]
        cut = await served.http.post("/v1/embeddings", json={**asked, "truncate": True})
        assert cut.status_code == 200
        assert model.asked == [[[2, WORDS.index("bread"), 3], [*PARIS[:4], 3]]]
        ids = {**asked, "input": list(range(4, 12)), "truncate": True}
        await served.http.post("/v1/embeddings", json=ids)
        assert model.asked[-1] == [[4, 5, 6, 7, 8]]


@pytest.mark.parametrize(
    ("nested", "size", "status"),
    [
        ((), 3, 200),
        ((), 2, 400),
        ((2,), 2, 200),
        ((2,), 1, 400),
        ((0,), 1, 200),
        ((0,), 4, 400),
    ],
)
async def test_dimensions_are_those_that_the_model_was_trained_for(
    folder: Path, nested: tuple[int, ...], size: int, status: int
) -> None:
    async with serving(embedders=[ToyEmbedder(folder, nested_sizes=nested)]) as served:
        body = {"model": "encoder", "input": "bread", "dimensions": size}
        answer = await served.http.post("/v1/embeddings", json=body)
        assert answer.status_code == status
        if status == 200:
            assert len(answer.json()["data"][0]["embedding"]) == size
        else:
            assert answer.json()["error"]["param"] == "dimensions"
            assert "3" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": {}}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [[1], [True]]}, "input[1][0]"),
        ({"input": [1, -1]}, "input[1]"),
        ({"input": [9999]}, "input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"encoding_format": False}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"truncate": "yes"}, "truncate"),
        ({"stream": False}, "stream"),
        ({"model": ""}, "model"),
    ],
)
async def test_a_refusal_names_the_field(
    folder: Path, fields: dict[str, object], param: str
) -> None:
    async with serving(embedders=[ToyEmbedder(folder)]) as served:
        body = {"model": "encoder", "input": "bread", **fields}
        answer = await served.http.post("/v1/embeddings", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


async def test_models_are_listed_with_what_they_can_do(folder: Path, tmp_path: Path) -> None:
    text = ToyModel(make_folder(tmp_path / "text"))
    async with serving(text, embedders=[ToyEmbedder(folder)]) as served:
        listed = (await served.http.get("/v1/models")).json()["data"]
        assert [(one["id"], one["role"]) for one in listed] == [
            ("toy", "verifier"),
            ("encoder", "embedder"),
        ]
        one = (await served.http.get("/v1/models/encoder")).json()
        assert one == listed[1]
        assert (one["capabilities"], one["dimensions"], one["context_length"]) == (
            ["embedding"],
            3,
            16,
        )
        missing = await served.http.post("/v1/embeddings", json={"model": "x", "input": "a"})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_node_of_embedders_alone_is_ready_when_they_are(folder: Path) -> None:
    model = ToyEmbedder(folder, state=ModelState.LOADING)
    async with serving(embedders=[model]) as served:
        assert (await served.http.get("/readyz")).status_code == 503
        model.state = ModelState.READY
        assert (await served.http.get("/readyz")).json()["model"] == "encoder"


async def test_a_client_that_leaves_ends_its_work(folder: Path) -> None:
    model = ToyEmbedder(folder, lasts=60)
    async with serving(embedders=[model]) as served:
        body = {"model": "encoder", "input": "bread"}
        asked = asyncio.create_task(served.http.post("/v1/embeddings", json=body))
        async with asyncio.timeout(30):
            await model.started.wait()
            asked.cancel()
            await model.cancelled.wait()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=8,
)
KEYS = st.sampled_from(["model", "input", "encoding_format", "dimensions", "user", "truncate", "n"])


@given(body=st.dictionaries(KEYS, JSON))
def test_any_body_is_read_or_refused(body: dict[str, object]) -> None:
    try:
        asked = parse_embedding(body)
    except InvalidArgument:
        return
    assert asked.inputs
    assert all(asked.inputs)
