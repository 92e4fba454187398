"""Ollama's API over a real socket, by the real ollama client."""

from __future__ import annotations

from contextlib import asynccontextmanager

import httpx
import pytest

from kakeya.generation.facts import ModelState
from tests.gateway.toy import Pace, ToyEmbedder, ToyModel, make_folder, serving

HI = [{"role": "user", "content": "hi"}]
LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "toy")


@asynccontextmanager
async def client(*models: ToyModel, **fields):
    from ollama import AsyncClient  # here: it costs each worker of xdist time to collect

    async with serving(*models, **fields) as served:
        made = AsyncClient(f"http://127.0.0.1:{served.port}", trust_env=False)
        async with made._client:
            yield made


def raised(words: str):
    from ollama import ResponseError

    return pytest.raises(ResponseError, match=words)


async def test_a_chat_comes_whole_and_in_lines(folder):
    model = ToyModel(folder, script="hello world", pace=Pace(per_step=2))
    async with client(model) as one:
        whole = await one.chat("toy:latest", HI)
        stream = await one.chat("toy", HI, stream=True)
        found = [part async for part in stream]
    assert whole.message.content == "hello world"
    assert "".join(part.message.content for part in found) == "hello world"
    assert [part.done for part in found] == [False] * (len(found) - 1) + [True]
    for last in (whole, found[-1]):
        assert (last.done_reason, last.model) == ("stop", "toy")
        assert last.prompt_eval_count == len(model.requests[0].token_ids)
        assert last.eval_count == whole.eval_count
        assert last.total_duration == 2_000_000


async def test_a_call_of_a_tool_comes_with_its_arguments_and_its_history_is_taken_back(folder):
    model = ToyModel(folder, script="I look. " + CALL)
    async with client(model) as one:
        whole = await one.chat("toy", HI, tools=[LOOK])
        found = [part async for part in await one.chat("toy", HI, tools=[LOOK], stream=True)]
        told = {"role": "tool", "tool_name": "look", "content": "a tree"}
        await one.chat("toy", [*HI, whole.message, told], tools=[LOOK])
    calls = [call for part in found for call in part.message.tool_calls or ()]
    for (call,) in (whole.message.tool_calls, calls):
        assert (call.function.name, call.function.arguments) == ("look", {"at": 3})
    assert whole.message.content == "I look."
    assert "a tree" in model.tokenizer.decode(list(model.requests[-1].token_ids))


async def test_a_prompt_is_answered_as_a_chat_or_as_it_stands(folder):
    model = ToyModel(folder, script="world")
    async with client(model) as one:
        shown = await one.generate("toy", "hello", system="Be kind.", options={"num_predict": 3})
        raw = await one.generate("toy", "hello ", raw=True)
    assert (shown.response, raw.response) == ("world"[: len(shown.response)], "world")
    chat, prompt = model.requests
    assert "Be kind." in model.tokenizer.decode(list(chat.token_ids))
    assert chat.max_tokens == 3
    assert model.tokenizer.decode(list(prompt.token_ids)) == "hello "


async def test_a_request_without_a_prompt_loads_the_model(folder):
    model = ToyModel(folder)
    async with client(model) as one:
        for loaded in (
            await one.generate("toy"),
            await one.chat("toy"),
            *[part async for part in await one.generate("toy", stream=True)],
        ):
            assert (loaded.done, loaded.done_reason) == (True, "load")
    assert model.requests == []


async def test_a_client_raises_the_error_of_a_request_and_of_a_stream(folder):
    model = ToyModel(folder, fail_after=3, pace=Pace(step_s=0.001))
    async with client(model) as one:
        with raised("not served here") as caught:
            await one.chat("another", HI)
        assert caught.value.status_code == 404
        stream = await one.chat("toy", HI, stream=True)
        with raised("the engine is gone"):
            [part async for part in stream]
    assert model.open == 0


async def test_models_are_listed_and_described(folder):
    waiting = ToyModel(folder, "waiting", state=ModelState.UNLOADED)
    async with client(ToyModel(folder), waiting, embedders=(ToyEmbedder(folder),)) as one:
        listed = await one.list()
        loaded = await one.ps()
        shown = await one.show("toy:latest")
        encoder = await one.show("encoder")
        with raised("not served here"):
            await one.show("another")
        version = (await one._client.get("/api/version")).json()["version"]
    assert [model.model for model in listed.models] == ["toy", "waiting", "encoder"]
    assert [model.name for model in loaded.models] == ["toy", "encoder"]
    assert loaded.models[0].context_length == 512
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo["kakeya.context_length"] == 512
    assert "temperature" in shown.parameters
    assert encoder.capabilities == ["embedding"]
    assert version.count(".") == 2


async def test_vectors_of_texts_come_in_order(folder):
    encoder = ToyEmbedder(folder)
    async with client(embedders=(encoder,)) as one:
        one_text = await one.embed("encoder:latest", "hello")
        two = await one.embed("encoder", ["hello", "world of text"], options={}, keep_alive="1m")
        long = await one.embed("encoder", "text " * 50)
        with raised("at most"):
            await one.embed("encoder", "text " * 50, truncate=False)
    assert two.embeddings[0] == one_text.embeddings[0]
    assert len(two.embeddings) == 2
    assert two.prompt_eval_count == sum(map(len, encoder.asked[1]))
    assert long.prompt_eval_count == encoder.context_tokens
    assert two.model == "encoder"


async def test_what_is_not_applied_is_told_in_a_header(folder):
    async with serving(ToyModel(folder, script="a")) as served:
        body = {"model": "toy", "messages": HI, "options": {"num_ctx": 4096}}
        reply: httpx.Response = await served.http.post("/api/chat", json=body)
    assert "num_ctx" in reply.headers["x-kakeya-warning"]
    assert reply.headers["content-type"] == "application/x-ndjson"
