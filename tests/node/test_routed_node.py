"""Three real nodes: one without the model, two with it. What the first is asked, the others answer,
whichever of them is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

import kakeya
from kakeya.sessions.client import Client
from tests.node.nodes import NodeProcess, Shelf, client_of, run_cli, shelf_of
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = "kakeya-tiny-tools"
FOLDER = Path(kakeya.__file__).parent / "models" / MODEL
FEW = 1
STORY = [{"role": "user", "content": "Tell me about the sea."}]


class OneModelShelf(Shelf):
    """With a client of its front node."""

    def __init__(self, front: NodeProcess, minis: dict[str, NodeProcess]) -> None:
        super().__init__(front, minis)
        self.openai = client_of(front)

    async def chat(self, **more: Any) -> openai.types.chat.ChatCompletion:
        asked: dict[str, Any] = {"model": MODEL, "messages": STORY, "max_tokens": 24} | more
        return await self.openai.chat.completions.create(temperature=0, **asked)

    def busy(self) -> list[str]:
        """The nodes that decode now."""
        return [
            name
            for name, node in self.minis.items()
            if any(model["running"] for model in node.api.get("/api/v1/status")["models"])
        ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OneModelShelf]:
    folder = tmp_path_factory.mktemp("shelf")
    config = folder / "minis.toml"
    config.write_text(f'[models."{MODEL}"]\nmax_tokens = {FEW}\n')
    async with shelf_of(folder, MODEL, "--config", str(config)) as nodes:
        found = OneModelShelf(nodes.front, nodes.minis)
        async with found.openai:
            yield found


def endless() -> dict[str, int]:
    """A bias with which no answer ends by itself."""
    config = json.loads((FOLDER / "generation_config.json").read_text())
    ends = config["eos_token_id"]
    return {str(one): -100 for one in (ends if isinstance(ends, list) else [ends])}


async def test_what_the_owner_says_of_a_model_counts_at_each_node_from_the_first_request_on(
    shelf: OneModelShelf,
) -> None:
    """First in this file: the front has heard nothing of the model but its name."""
    said = await shelf.openai.chat.completions.create(model=MODEL, messages=STORY)
    assert said.usage is not None
    assert said.usage.completion_tokens == FEW


async def test_every_dialect_is_answered_by_a_neighbour_as_by_the_model_itself(
    shelf: OneModelShelf,
) -> None:
    import anthropic  # here: it costs each worker of xdist seconds to collect

    assert [model.id async for model in shelf.openai.models.list()] == [MODEL]
    here = await shelf.chat(n=2)
    async with client_of(shelf.minis["left"]) as own:
        there = await own.chat.completions.create(
            model=MODEL, messages=STORY, max_tokens=24, temperature=0, n=2
        )
    said = [one.message.content for one in here.choices]
    assert said == [one.message.content for one in there.choices]
    async with anthropic.AsyncAnthropic(
        base_url=f"http://{shelf.front.http}", api_key="none", max_retries=0
    ) as claude:
        message = await claude.messages.create(
            model=MODEL, messages=STORY, max_tokens=24, extra_body={"temperature": 0}
        )
    assert message.content[0].text.strip() == (said[0] or "").strip()
    shape = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    named = {
        "type": "json_schema",
        "json_schema": {"name": "city", "strict": True, "schema": shape},
    }
    shaped = await shelf.chat(response_format=named, max_tokens=60)
    assert json.loads(shaped.choices[0].message.content or "")["city"] in ("Rome", "Oslo")
    async with (
        Client(shelf.front.grpc) as client,
        await client.create_session(model_id=MODEL) as session,
    ):
        await session.append([1, 2, 3])
        assert len([token async for token in session.generate(8)]) == 8


async def test_a_call_is_forced_and_logprobs_are_told_through_a_neighbour(
    shelf: OneModelShelf,
) -> None:
    function = {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    called = await shelf.chat(
        tools=[{"type": "function", "function": function}], tool_choice="required", max_tokens=80
    )
    calls = called.choices[0].message.tool_calls or []
    assert calls[0].function.name == "get_weather"
    told = await shelf.chat(logprobs=True, top_logprobs=2)
    assert told.choices[0].logprobs is not None
    assert len(told.choices[0].logprobs.content or []) > 1


async def test_explain_names_the_node_and_why(shelf: OneModelShelf) -> None:
    candidates: set[str] = set()
    async with asyncio.timeout(60):  # a node whose quote comes too late is not asked for 3 s
        while candidates != set(shelf.minis):
            answer = await shelf.chat()
            explained = shelf.front.api.get(f"/api/v1/requests/{answer.id}")
            (route,) = explained["routes"]
            assert route["node"] in shelf.minis
            candidates = {one["node"] for one in route["candidates"]}
    data = str(shelf.front.log_file.parent / "data")
    said = await asyncio.to_thread(run_cli, "explain", answer.id, "--data-dir", data)
    assert f"node     {route['node']}: " in said.stdout


async def test_a_client_that_leaves_ends_its_answer_on_the_neighbour(shelf: OneModelShelf) -> None:
    stream = await shelf.openai.chat.completions.create(
        model=MODEL,
        messages=STORY,
        max_tokens=2000,
        stream=True,
    )
    await anext(aiter(stream))
    await stream.close()
    await eventually("no node decodes any more", lambda: not shelf.busy())


async def test_a_client_goes_on_with_its_response_at_another_node(shelf: OneModelShelf) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "input": STORY[0]["content"],
        "max_output_tokens": 300,
        "temperature": 0.7,
        "extra_body": {"seed": 5, "logit_bias": endless()},
    }
    whole = await shelf.openai.responses.create(**asked)
    said, response_id, number = "", "", 0
    stream = await shelf.openai.responses.create(stream=True, **asked)
    async for event in stream:
        number = event.sequence_number
        if event.type == "response.created":
            response_id = event.response.id
        elif event.type == "response.output_text.delta":
            said += event.delta
            if len(said) > 30:
                break
    await stream.close()
    for node in (shelf.minis["left"], shelf.minis["right"], shelf.front):
        rest = ""
        async with client_of(node) as other:
            events = await other.responses.retrieve(response_id, stream=True, starting_after=number)
            async for event in events:
                rest += event.delta if event.type == "response.output_text.delta" else ""
        assert said + rest == whole.output_text, node.node_id


async def test_an_answer_goes_on_at_the_other_node_when_its_node_is_killed(
    shelf: OneModelShelf,
) -> None:
    """Last in this file: one of the nodes is gone after it."""
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": "import os",
        "max_tokens": 900,
        "temperature": 0.7,
        "seed": 5,
        "logit_bias": endless(),
    }
    whole = await shelf.openai.completions.create(**asked)
    await shelf.says_over_a_kill(shelf.openai, whole.choices[0].text, **asked)


async def test_a_drained_node_ends_its_answers_and_takes_no_new_ones(shelf: OneModelShelf) -> None:
    """After the test before it, which leaves one node: that one goes too."""
    (name,) = [one for one, node in shelf.minis.items() if node.is_running]
    node = shelf.minis[name]
    asked: dict[str, Any] = {"model": MODEL, "prompt": "import os", "max_tokens": 40}
    stream = await shelf.openai.completions.create(stream=True, **asked)
    await anext(aiter(stream))
    data = str(node.log_file.parent / "data")
    drained = await asyncio.to_thread(run_cli, "drain", "--data-dir", data, "--json")
    assert json.loads(drained.stdout)["cut_off"] == 0, drained
    assert [chunk.choices[0].finish_reason async for chunk in stream][-1] in ("length", "stop")
    assert await node.wait() == 0
    with pytest.raises(openai.APIStatusError) as refused:
        await shelf.openai.completions.create(**asked)
    assert refused.value.status_code in (404, 503)
