"""Requests as bodies of OpenAI's API."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kakeya.backends.relay.cloud_body import chat_body
from kakeya.backends.request import ChatRequest, SamplingWish
from kakeya.gateway.openai.requests import parse_chat
from tests.backends.relay.upstream import chat

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "call_a", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}


def sent(asked: ChatRequest) -> dict[str, object]:
    return chat_body(asked, "m", "max_tokens")


def test_what_is_given_is_sent_and_nothing_else() -> None:
    assert sent(chat("x")) == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": "Hello!"}],
    }
    wish = SamplingWish(temperature=0.5, seed=3, top_k=4, logit_bias=((7, -1.0),))
    body = sent(chat("x", max_tokens=9, stop=("a",), user="u", sampling=wish))
    given = {"temperature": 0.5, "seed": 3, "top_k": 4, "max_tokens": 9, "user": "u"}
    assert body == sent(chat("x")) | given | {"stop": ["a"], "logit_bias": {"7": -1.0}}


@pytest.mark.parametrize(
    "choice",
    [
        "none",
        "required",
        {"type": "function", "function": {"name": "look"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "auto",
                "tools": [{"type": "function", "function": {"name": "look"}}],
            },
        },
    ],
)
def test_a_body_is_read_as_the_request_that_it_is_made_of(choice: object) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look!"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_a", "content": "the sea"},
        {"role": "assistant", "content": "It is", "prefix": True},
    ]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = parse_chat(
        {
            "model": "m",
            "messages": messages,
            "tools": [TOOL],
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "reasoning_effort": "low",
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
            "stream": True,
            "temperature": 0.25,
            "stop": "end",
        }
    ).asked
    body = sent(asked)
    assert body["messages"][2]["tool_calls"] == [CALL]
    assert parse_chat(body).asked == asked


def test_thoughts_of_earlier_answers_are_not_sent() -> None:
    past = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    asked = chat("x")
    asked = replace(asked, chat=replace(asked.chat, messages=(*asked.chat.messages, past)))
    assert sent(asked)["messages"][1] == {"role": "assistant", "content": "yes"}
