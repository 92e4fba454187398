"""POST /v1/responses over a real socket, by the real openai client."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from pydantic import BaseModel

from kakeya.core.errors import PeerUnavailable
from kakeya.gateway.http.connection import HttpLimits
from kakeya.gateway.openai.responses.store import PreviousResponseNotFound
from kakeya.generation.facts import ModelState
from tests.gateway.toy import ToyModel, make_folder, serving

LOOK = {
    "type": "function",
    "name": "look",
    "description": "Look there",
    "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'


class Place(BaseModel):
    at: int


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "toy")


def prompt_of(model: ToyModel) -> str:
    return model.tokenizer.decode(list(model.requests[-1].token_ids), skip_special_tokens=False)


async def test_a_text_is_answered_whole_and_streamed(folder):
    model = ToyModel(folder, script="hello world")
    async with serving(model) as served:
        responses = served.openai.responses
        asked = {"model": "toy", "input": "hi", "instructions": "be brief"}
        whole = await responses.create(**asked, metadata={"a": "b"}, user="me", store=True)
        stream = await responses.create(**asked, stream=True)
        events = [event async for event in stream]
    assert whole.output_text == "hello world"
    assert (whole.status, whole.object, whole.error) == ("completed", "response", None)
    assert (whole.metadata, whole.user, whole.store) == ({"a": "b"}, "me", False)
    assert whole._request_id == whole.id
    assert whole.id.startswith("resp_")
    usage = whole.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens == len(model.requests[0].token_ids)
    assert usage.input_tokens_details.cached_tokens == usage.input_tokens // 2
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert usage.kakeya["accepted"] == 2
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        *["created", "in_progress", "output_item.added", "content_part.added"],
        *["output_text.delta"] * deltas,
        *["output_text.done", "content_part.done", "output_item.done", "completed"],
    ]
    assert "".join(event.delta for event in events[4 : 4 + deltas]) == "hello world"
    assert events[-1].response.output_text == "hello world"
    assert prompt_of(model) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_the_synchronous_client_creates_streams_and_parses(folder):
    async with serving(ToyModel(folder, script='{"at": 3}')) as served:
        url = str(served.openai.base_url)

        def ask() -> list[object]:
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                whole = client.responses.create(model="toy", input="hi")
                parsed = client.responses.parse(model="toy", input="hi", text_format=Place)
                with client.responses.stream(model="toy", input="hi", text_format=Place) as stream:
                    done = [event for event in stream if event.type.endswith("text.done")]
                    last = stream.get_final_response()
            return [whole.output_text, parsed.output_parsed, done[0].parsed, last.output_parsed]

        said, *places = await asyncio.to_thread(ask)
    assert said == '{"at": 3}'
    assert places == [Place(at=3)] * 3


async def test_the_stream_helper_snapshots_calls_of_tools(folder):
    async with serving(ToyModel(folder, script="I look. " + CALL, context_tokens=4096)) as served:
        asked = {"model": "toy", "input": "hi", "tools": [LOOK]}
        async with served.openai.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            last = await stream.get_final_response()
        whole = await served.openai.responses.create(**asked)
    for response in (last, whole):
        text, call = response.output
        assert text.content[0].text == "I look."
        assert (call.name, json.loads(call.arguments), call.status) == (
            "look",
            {"at": 3},
            "completed",
        )
        assert call.call_id.startswith("call_")
    (delta,) = [event for event in events if event.type.endswith("arguments.delta")]
    (done,) = [event for event in events if event.type.endswith("arguments.done")]
    assert delta.snapshot == done.arguments == last.output[1].arguments


async def test_a_text_comes_with_the_logprobs_of_its_tokens_whole_and_streamed(folder):
    model = ToyModel(folder, script=f"hello 😀 {CALL}")
    asked = {
        "model": "toy",
        "input": "hi",
        "tools": [LOOK],
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    async with serving(model) as served:
        whole = await served.openai.responses.create(**asked)
        async with served.openai.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
    message, call = whole.output
    (part,) = message.content
    assert (part.text, call.name, whole.top_logprobs) == ("hello 😀", "look", 2)
    assert b"".join(bytes(one.bytes) for one in part.logprobs) == part.text.encode()
    assert {one.logprob for one in part.logprobs} == {-0.5}
    assert {len(one.top_logprobs) for one in part.logprobs} == {2}
    assert final.output[0].content[0].logprobs == part.logprobs
    for kind in ("delta", "done"):
        found = [one for one in events if one.type == f"response.output_text.{kind}"]
        told = [token for event in found for token in event.logprobs]
        assert [one.token for one in told] == [one.token for one in part.logprobs], kind


async def test_a_turn_comes_back_as_the_message_that_it_was(folder):
    model = ToyModel(folder, script="done", context_tokens=4096)
    async with serving(model) as served:
        items = [
            {"role": "developer", "content": [{"type": "input_text", "text": "obey"}]},
            {"type": "message", "role": "user", "content": "look"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 3}'},
            {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "a tree"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [
                    {"type": "input_text", "text": "a "},
                    {"type": "input_text", "text": "lake"},
                ],
            },
        ]
        answer = await served.openai.responses.create(
            model="toy", input=items, instructions="be brief", tools=[LOOK]
        )
    assert answer.output_text == "done"
    written = prompt_of(model)
    assert "be brief\n\nobey" in written
    for text in ("I look.", "a tree", "a lake"):
        assert text in written
    assert written.count("<|im_start|>assistant\n") == 2


async def test_max_output_tokens_leave_the_response_incomplete(folder):
    async with serving(ToyModel(folder, script="hello world")) as served:
        asked = {"model": "toy", "input": "hi", "max_output_tokens": 2}
        whole = await served.openai.responses.create(**asked)
        stream = await served.openai.responses.create(**asked, stream=True)
        last = [event async for event in stream][-1]
    assert last.type == "response.incomplete"
    for response in (whole, last.response):
        assert (response.status, response.output[-1].status) == ("incomplete", "incomplete")
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.usage.output_tokens == 2


async def test_a_stream_that_fails_ends_with_the_error(folder):
    model = ToyModel(folder, script="hello world", fail_after=2)
    async with serving(model) as served:
        stream = await served.openai.responses.create(model="toy", input="hi", stream=True)
        events = [event async for event in stream]
        with pytest.raises(openai.InternalServerError) as caught:
            await served.openai.responses.create(model="toy", input="hi")
    assert caught.value.code == PeerUnavailable.code
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == PeerUnavailable.code
    assert events[-1].response.output[0].type == "message"
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_a_failure_before_the_first_token_of_a_stream_is_a_status(folder):
    model = ToyModel(folder, state=ModelState.FAILED, last_error="no room")
    async with serving(model) as served:
        with pytest.raises(openai.InternalServerError, match="no room"):
            await served.openai.responses.create(model="toy", input="hi", stream=True)


async def test_a_stream_that_fails_while_the_model_loads_is_a_response_that_failed(folder):
    model = ToyModel(folder, state=ModelState.LOADING, loads="3 of 4 GB")
    limits = HttpLimits(keepalive_s=0.05, progress_s=0.05, ready_s=0.5)
    async with serving(model, limits=limits) as served:
        async with served.openai.responses.stream(model="toy", input="hi") as stream:
            events = [event async for event in stream]
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.failed",
    ]
    assert events[-1].response.error.message == "toy still loads"


async def test_functions_of_a_namespace_are_called_by_both_names(folder):
    call = CALL.replace("look", "eyes__look")
    model = ToyModel(folder, script=call, context_tokens=4096)
    eyes = {"type": "namespace", "name": "eyes__", "description": "To see", "tools": [LOOK]}
    async with serving(model) as served:
        answer = await served.openai.responses.create(model="toy", input="hi", tools=[eyes])
        (called,) = answer.output
        assert (called.namespace, called.name) == ("eyes__", "look")
        before = prompt_of(model)
        assert "[eyes__: To see] Look there" in prompt_of(model)
        back = [{"role": "user", "content": "hi"}, called.model_dump(exclude_none=True)]
        told = {"type": "function_call_output", "call_id": called.call_id, "output": "a tree"}
        await served.openai.responses.create(model="toy", input=[*back, told], tools=[eyes])
        assert prompt_of(model).startswith(before)
        assert "eyes__look" in prompt_of(model).split("<|im_start|>assistant")[1]
        await served.openai.responses.create(
            model="toy",
            input="hi",
            tools=[eyes],
            tool_choice={"type": "function", "namespace": "eyes__", "name": "look"},
        )


async def test_hosted_tools_are_left_out_with_a_warning(folder):
    model = ToyModel(folder, script="hello", context_tokens=4096)
    async with serving(model) as served:
        raw = await served.openai.responses.with_raw_response.create(
            model="toy",
            input=[{"role": "user", "content": "hi"}, {"type": "web_search_call", "id": "ws_1"}],
            tools=[{"type": "web_search_preview"}, LOOK, {"type": "code_interpreter"}],
            truncation="auto",
        )
        answer = raw.parse()
    assert [tool.name for tool in answer.tools] == ["look"]
    told = "; ".join(answer.kakeya["warnings"])
    assert raw.headers["x-kakeya-warning"] == told
    for word in ("input[1]", "tools[0]", "web_search_preview", "tools[2]", "truncation"):
        assert word in told
    assert len(answer.kakeya["warnings"]) == 4


async def test_what_clients_send_by_default_is_taken(folder):
    model = ToyModel(folder, script="hello")
    async with serving(model) as served:
        answer = await served.http.post(
            "/v1/responses",
            json={
                "model": "toy",
                "input": "hi",
                "store": False,
                "include": ["reasoning.encrypted_content"],
                "top_logprobs": 0,
                "reasoning": {"effort": "low", "summary": "auto"},
                "prompt_cache_key": "k",
                "client_metadata": {"a": "b"},
                "parallel_tool_calls": True,
                "service_tier": "auto",
                "text": {"format": {"type": "text"}, "verbosity": "medium"},
                "truncation": "disabled",
                "background": False,
                "previous_response_id": None,
                "tools": [],
                "tool_choice": "auto",
                "temperature": 0.5,
                "top_p": 0.9,
                "stream": False,
            },
        )
    assert answer.status_code == 200
    assert "kakeya" not in answer.json()
    sampling = model.requests[0].sampling
    assert (sampling.temperature, sampling.top_p) == (0.5, 0.9)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}, 1]}, "input[1]"),
        ({"input": [{"type": "reasoning", "summary": [1]}]}, "input[0].summary[0]"),
        ({"tools": {}}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "x"}]}, "tools[0]"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [1]}]}, "tools[0].tools[0]"),
        (
            {
                "tools": [
                    {"type": "function", "name": "a__look"},
                    {"type": "namespace", "name": "a", "tools": [LOOK]},
                ]
            },
            "tools[1].tools[0].name",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "b"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"color": "red"}}, "text.color"),
        ({"reasoning": "high"}, "reasoning"),
        ({"reasoning": {"effort": "vast"}}, "reasoning.effort"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"include": ["message.output_text.colours"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        ({"truncation": "some"}, "truncation"),
        ({"metadata": "x"}, "metadata"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"store": "yes"}, "store"),
        ({"background": "yes"}, "background"),
        ({"background": True, "store": False}, "store"),
        ({"conversation": "c"}, "conversation"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
async def test_bad_input_is_refused_by_its_name(folder, fields, param):
    async with serving(ToyModel(folder, script="hello")) as served:
        body = {"model": "toy", "input": "hi", **fields}
        answer = await served.http.post("/v1/responses", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_a_kept_response_is_gone_on_from_shown_and_deleted(folder):
    model = ToyModel(folder, script="hello")
    async with serving(model, store_bytes=10**6) as served:
        responses = served.openai.responses
        first = await responses.create(model="toy", input="hi", instructions="be brief")
        stream = await responses.create(
            model="toy", input="more", previous_response_id=first.id, stream=True
        )
        second = [event async for event in stream][-1].response
        third = await responses.create(
            model="toy", input="most", previous_response_id=second.id, store=False
        )
        assert (first.store, third.store) == (True, False)
        assert third.previous_response_id == second.id
        written = prompt_of(model)
        said = [part.partition("<|im_end|>")[0] for part in written.split("<|im_start|>")[1:-1]]
        assert said == [
            "user\nhi",
            "assistant\nhello",
            "user\nmore",
            "assistant\nhello",
            "user\nmost",
        ]
        shown = await responses.retrieve(second.id)
        assert shown.output == second.output
        await responses.delete(first.id)
        for gone in (first.id, third.id):
            with pytest.raises(openai.NotFoundError):
                await responses.retrieve(gone)
            with pytest.raises(openai.BadRequestError) as caught:
                await responses.create(model="toy", input="x", previous_response_id=gone)
            assert caught.value.code == PreviousResponseNotFound.code
        other = {"x-kakeya-client": "another"}
        assert (
            await served.http.get(f"/v1/responses/{second.id}", headers=other)
        ).status_code == 404


async def test_a_node_that_keeps_none_names_the_setting(folder):
    async with serving(ToyModel(folder, script="hello")) as served:
        with pytest.raises(openai.BadRequestError, match="http_store_mb"):
            await served.openai.responses.create(
                model="toy", input="hi", previous_response_id="resp_1"
            )
        with pytest.raises(openai.NotFoundError, match="http_store_mb"):
            await served.openai.responses.retrieve("resp_1")
