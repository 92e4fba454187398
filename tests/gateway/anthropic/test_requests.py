"""Bodies of /v1/messages to conversations, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kakeya.backends.request import ToolChoice
from kakeya.core.errors import KakeyaError
from kakeya.gateway.anthropic.messages import call_id_of, tool_use_id_of
from kakeya.gateway.anthropic.requests import parse_message
from tests.gateway.toy import ToyModel, make_folder, serving

HI = {"role": "user", "content": "hi"}
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
BODY = {"model": "toy", "max_tokens": 4, "messages": [HI]}
USE = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 3}}


def chat(**fields):
    return parse_message(BODY | fields).asked.chat


def turn(role: str, *content: object) -> dict:
    return {"role": role, "content": list(content)}


def said(text: str, **fields: object) -> dict:
    return {"type": "text", "text": text, **fields}


def test_a_conversation_with_a_call_becomes_messages_as_templates_take_them():
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    hidden = {"type": "redacted_thinking", "data": "x"}
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [said("a tree", **cached)],
    }
    found = chat(
        system=[said("Be brief."), said("Be kind.", **cached)],
        messages=[
            HI,
            turn("assistant", thought, hidden, said("I "), said("look."), USE),
            turn("user", said("what is it?"), result),
        ],
        tools=[LOOK],
    )
    call = {"name": "look", "arguments": {"at": 3}}
    assert found.messages == (
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        HI,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "content": "a tree", "tool_call_id": "call_1", "name": "look"},
        {"role": "user", "content": "what is it?"},
    )
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    assert found.tools == ({"type": "function", "function": function},)
    assert not found.continues_last


@pytest.mark.parametrize(
    ("content", "shown"),
    [("gone", "Error: gone"), (None, "Error: "), ([], "Error: "), ([said("a"), said("b")], 0)],
)
def test_a_result_that_is_an_error_says_so(content, shown):
    result = {"type": "tool_result", "tool_use_id": "x", "content": content, "is_error": True}
    found = chat(messages=[HI, turn("assistant", USE), turn("user", result)])
    assert found.messages[-1]["content"] == (shown or "Error: a\n\nb")


def test_a_systems_message_behind_the_first_turn_is_the_users():
    late = {"role": "system", "content": "be short"}
    found = chat(messages=[late, HI, late, {"role": "user", "content": "go on"}], system="Be kind.")
    reminder = "<system-reminder>\nbe short\n</system-reminder>"
    assert [(one["role"], one["content"]) for one in found.messages] == [
        ("system", "Be kind.\n\nbe short"),
        ("user", f"hi\n\n{reminder}\n\ngo on"),
    ]


def test_an_answer_at_the_end_is_gone_on_with():
    found = chat(messages=[HI, turn("assistant", said("hel")), turn("assistant", said("lo"))])
    assert (found.messages[-1]["content"], found.continues_last) == ("hello", True)


@pytest.mark.parametrize("call_id", ["call_abc", "functions.look:0", "123456789"])
def test_an_id_of_a_call_comes_back_as_it_was(call_id):
    assert call_id_of(tool_use_id_of(call_id)) == call_id


FORCED = ToolChoice(mode="required", is_parallel=False)


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ({"type": "auto"}, ToolChoice()),
        ({"type": "none"}, ToolChoice(mode="none", is_parallel=False)),
        ({"type": "any"}, FORCED),
        ({"type": "any", "disable_parallel_tool_use": False}, ToolChoice(mode="required")),
        ({"type": "tool", "name": "look"}, replace(FORCED, names=("look",))),
    ],
)
def test_the_choice_of_tools_is_read(given, choice):
    assert parse_message(BODY | {"tools": [LOOK], "tool_choice": given}).asked.tool_choice == choice
    single = given | {"disable_parallel_tool_use": True}
    asked = parse_message(BODY | {"tools": [LOOK], "tool_choice": single}).asked
    assert not asked.tool_choice.is_parallel


def test_thinking_effort_and_format_reach_the_template_and_the_grammar():
    schema = {"type": "object"}
    asked = parse_message(
        BODY
        | {
            "thinking": {"type": "adaptive", "display": "summarized"},
            "output_config": {"effort": "max", "format": {"type": "json_schema", "schema": schema}},
        }
    ).asked
    thinks = {"enable_thinking": True, "thinking": True}
    assert asked.chat.kwargs == {"reasoning_effort": "xhigh", **thinks}
    assert asked.answer_schema == schema
    off = chat(thinking={"type": "disabled"}, chat_template_kwargs={"a": 1}).kwargs
    assert off == {"a": 1, "enable_thinking": False, "thinking": False}
    assert chat(speed="standard", diagnostics={"previous_message_id": None}).kwargs == {}
    beta = {"type": "json_schema", "schema": schema}
    assert parse_message(BODY | {"output_format": beta}).asked.answer_schema == schema


def test_tools_of_anthropics_servers_are_left_out_and_told():
    search = {"type": "web_search_20250305", "name": "web_search"}
    edits = {"edits": [{"type": "clear_thinking_20251015"}]}
    asked = parse_message(BODY | {"tools": [search, LOOK], "context_management": edits}).asked
    assert [tool["function"]["name"] for tool in asked.chat.tools] == ["look"]
    search_said, edits_said = asked.params.left_out
    assert "web_search_20250305" in search_said
    assert "context_management" in edits_said


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
ROWS = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"model": None}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [HI] * 4097}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [turn("user")]}, "messages[0].content"),
    ({"messages": [turn("user", "hi")]}, "messages[0].content[0]"),
    ({"messages": [turn("user", {"type": "text"})]}, "messages[0].content[0].text"),
    ({"messages": [turn("user", IMAGE)]}, 'messages[0].content[0].type="image"'),
    ({"messages": [turn("user", {"type": "document"})]}, 'messages[0].content[0].type="document"'),
    ({"messages": [turn("user", USE)]}, 'messages[0].content[0].type="tool_use"'),
    ({"messages": [HI, turn("assistant", {**USE, "input": 5})]}, "messages[1].content[0].input"),
    ({"messages": [HI, turn("assistant", {**USE, "id": 5})]}, "messages[1].content[0].id"),
    ({"messages": [HI, turn("assistant", {**USE, "name": 5})]}, "messages[1].content[0].name"),
    ({"messages": [HI, turn("assistant", USE)]}, "messages[1]"),
    ({"messages": [turn("user", {"type": "tool_result"})]}, "messages[0].content[0].tool_use_id"),
    (
        {
            "messages": [
                turn("user", {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]})
            ]
        },
        'messages[0].content[0].content[0].type="image"',
    ),
    ({"system": 5}, "system"),
    ({"system": [IMAGE]}, 'system[0].type="image"'),
    ({"temperature": 1.5}, "temperature"),
    ({"top_p": -1}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"stop_sequences": [5]}, "stop_sequences[0]"),
    ({"stream": "yes"}, "stream"),
    ({"tools": {}}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [LOOK | {"description": 5}]}, "tools[0].description"),
    ({"tools": [LOOK | {"strict": 5}]}, "tools[0].strict"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
    ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice"),
    ({"thinking": True}, "thinking"),
    ({"thinking": {"type": "some"}}, "thinking.type"),
    ({"output_config": {"effort": "most"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json"}}}, "output_config.format"),
    ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
    ({"metadata": 5}, "metadata"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id"),
    ({"service_tier": "best"}, 'service_tier="best"'),
    ({"speed": "fast"}, 'speed="fast"'),
    ({"diagnostics": 5}, "diagnostics=5"),
    ({"mcp_servers": [{}]}, '"mcp_servers"'),
    ({"n": 2}, '"n"'),
]


@pytest.mark.parametrize(("change", "named"), ROWS)
def test_what_is_wrong_is_named(change, named):
    with pytest.raises(KakeyaError) as caught:
        parse_message(BODY | change)
    assert caught.value.message.startswith(f"{named} ")


async def test_errors_have_anthropics_form_whatever_the_body(tmp_path):
    async with serving(ToyModel(make_folder(tmp_path / "toy"))) as served:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            for body, status, kind in (
                (b"{", 400, "invalid_request_error"),
                (b'{"messages": 5, "max_tokens": 3, "model": "toy"}', 400, "invalid_request_error"),
                (json.dumps(BODY | {"model": "b"}).encode(), 404, "not_found_error"),
                (
                    json.dumps(BODY | {"system": "tree " * 2000}).encode(),
                    400,
                    "invalid_request_error",
                ),
            ):
                reply = await served.http.post(path, content=body)
                assert (reply.status_code, reply.json()["type"]) == (status, "error")
                assert reply.json()["error"]["type"] == kind
                assert reply.headers["request-id"]
        assert (await served.http.get("/v1/messages")).json()["type"] == "error"
