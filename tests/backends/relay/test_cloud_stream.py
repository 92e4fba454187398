"""Streams of OpenAI's API as parts of an answer, however their bytes are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.backends.relay.backend import Finished
from kakeya.backends.relay.cloud_stream import CloudStream
from kakeya.core.errors import PeerProtocol
from kakeya.text.tools.answer import Part, Said, Thought, ToolCall
from tests.backends.relay.upstream import delta, events
from tests.laws import law


def call(index: int, call_id: str, name: str, arguments: str) -> dict[str, object]:
    return {"index": index, "id": call_id, "function": {"name": name, "arguments": arguments}}


WHOLE = events(
    delta(role="assistant", content=""),
    delta(reasoning_content="well – "),
    delta(content="日本"),
    delta(content="語"),
    delta(tool_calls=[call(0, "call_a", "look", '{"at"')]),
    delta(tool_calls=[{"index": 0, "function": {"arguments": ': "sea"}'}}]),
    delta(tool_calls=[call(1, "call_b", "stop", "")]),
    delta("tool_calls"),
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"reasoning_tokens": 2},
        },
    },
)
FOUND = [
    Thought("well – "),
    Said("日本"),
    Said("語"),
    ToolCall(0, "look", '{"at": "sea"}', "call_a"),
    ToolCall(1, "stop", "{}", "call_b"),
    Finished(
        reason="tool_calls",
        prompt_tokens=9,
        completion_tokens=5,
        cached_tokens=4,
        reasoning_tokens=2,
    ),
]


def read(*pieces: bytes, is_stream: bool = True) -> list[Part | Finished]:
    stream = CloudStream("it", is_stream=is_stream)
    found: list[Part | Finished] = [part for piece in pieces for part in stream.feed(piece)]
    return [*found, *stream.finish()]


@given(st.lists(st.integers(0, len(WHOLE)), max_size=8))
@law(600)
def test_parts_do_not_depend_on_how_bytes_are_cut(cuts: list[int]) -> None:
    at = [0, *sorted(cuts), len(WHOLE)]
    assert read(*(WHOLE[a:b] for a, b in pairwise(at))) == FOUND


def test_a_call_is_handed_on_when_the_next_begins() -> None:
    stream = CloudStream("it", is_stream=True)
    begun = events(delta(tool_calls=[call(0, "a", "f", "{}")]))
    assert list(stream.feed(begun[: -len(b"data: [DONE]\n\n")])) == []
    assert list(stream.feed(events(delta(tool_calls=[call(1, "b", "g", "{}")])))) == [
        ToolCall(0, "f", "{}", "a")
    ]


def test_an_end_that_is_not_told_as_calls_is_one_of_calls() -> None:
    (_, end) = read(events(delta("stop", tool_calls=[call(0, "a", "f", "{}")])))
    assert end == Finished(reason="tool_calls")
    assert read(events(delta("content_filter", content="x")))[-1] == Finished(reason="stop")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"data: {\n\n", "sent '{'"),
        (b"data: [1]\n\n", "an answer of OpenAI's API is needed"),
        (b"<html>\n", "in the middle"),
        (events(delta(tool_calls=[call(0, "a", "f", "[1]")]), delta("stop")), "no JSON object"),
        (events(delta(tool_calls=[call(0, "a", "f", "{")]), delta("stop")), "no JSON object"),
    ],
)
def test_what_is_no_answer_is_a_fault(data: bytes, says: str) -> None:
    with pytest.raises(PeerProtocol, match=says):
        read(data)
    with pytest.raises(PeerProtocol):
        read(b"<html>", is_stream=False)


@given(st.binary(max_size=60))
@law(600)
def test_any_bytes_are_an_answer_or_a_fault(data: bytes) -> None:
    for is_stream in (True, False):
        with pytest.raises(PeerProtocol):
            read(b"data: " + data, is_stream=is_stream)
