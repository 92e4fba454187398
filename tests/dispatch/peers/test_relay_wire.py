"""Whole requests and the parts of their answers cross between nodes as they are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.backends.relay.backend import Finished
from kakeya.backends.request import (
    ChatRequest,
    CompletionRequest,
    GenerationParams,
    Request,
    SamplingWish,
    ToolChoice,
)
from kakeya.core.errors import InvalidArgument, PeerProtocol
from kakeya.dispatch.peers.relay_wire import (
    PIECE_BYTES,
    images_from_wire,
    images_to_wire,
    part_from_wire,
    part_to_wire,
    request_from_wire,
    request_to_wire,
)
from kakeya.generation.image import ImageRequest
from kakeya.generation.request import GenerationPriority
from kakeya.text.chat import Chat
from kakeya.text.tools.answer import Said, Thought, ToolCall
from kakeya.v1 import relay_pb2 as pb
from tests.backends.relay.upstream import chat

TEXT = st.text(st.characters(exclude_categories=()), max_size=20)
"""Halves of characters too, which pieces of a stream may end with."""
WORDS = st.text(max_size=20)
NUMBERS = st.floats(-2, 2, width=32)
COUNTS = st.integers(0, 2**31)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.dictionaries(TEXT, JSON, max_size=3)
SAMPLING = st.builds(
    SamplingWish,
    temperature=st.none() | NUMBERS,
    top_p=st.none() | NUMBERS,
    top_k=st.none() | st.integers(-1, 9),
    seed=st.none() | st.integers(0, 2**64 - 1),
    min_p=st.none() | NUMBERS,
    presence_penalty=st.none() | NUMBERS,
    frequency_penalty=st.none() | NUMBERS,
    repetition_penalty=st.none() | NUMBERS,
    logit_bias=st.none()
    | st.dictionaries(st.integers(0, 99), NUMBERS, min_size=1, max_size=3).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
)
PARAMS = st.builds(
    GenerationParams,
    model=WORDS,
    max_tokens=st.none() | st.integers(1, 2**31),
    sampling=SAMPLING,
    stop=st.lists(WORDS, max_size=3).map(tuple),
    stream=st.booleans(),
    draft_policy=WORDS,
    deadline_s=st.none() | st.floats(0.1, 1e6),
    priority=st.sampled_from(GenerationPriority),
    user=WORDS,
    top_logprobs=st.none() | st.integers(0, 20),
)
CHATS = st.builds(
    ChatRequest,
    params=PARAMS,
    chat=st.builds(
        Chat,
        messages=st.lists(
            OBJECTS.map(lambda one: one | {"role": "user", "content": "hi"}), min_size=1, max_size=3
        ).map(tuple),
        tools=st.lists(OBJECTS, max_size=2).map(tuple),
        kwargs=OBJECTS,
        continues_last=st.booleans(),
        plain_tools=st.booleans(),
    ),
    tool_choice=st.builds(
        ToolChoice,
        mode=st.sampled_from(("auto", "none", "required")),
        names=st.lists(WORDS, max_size=2).map(tuple),
        is_parallel=st.booleans(),
    ),
    answer_schema=st.none() | OBJECTS,
    answer_schema_at=WORDS,
)
COMPLETIONS = st.builds(
    CompletionRequest,
    params=PARAMS,
    prompts=st.lists(
        TEXT | st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple), min_size=1
    ).map(tuple),
)
PARTS = st.one_of(
    st.builds(Said, TEXT),
    st.builds(Thought, TEXT),
    st.builds(ToolCall, st.integers(0, 9), TEXT, TEXT, TEXT),
    st.builds(
        Finished,
        reason=st.sampled_from(("stop", "length", "tool_calls")),
        prompt_tokens=COUNTS,
        completion_tokens=COUNTS,
        cached_tokens=COUNTS,
        reasoning_tokens=COUNTS,
        stop_string=TEXT,
    ),
)


@given(CHATS | COMPLETIONS)
def test_a_request_comes_as_it_was_sent(asked: Request) -> None:
    sent = request_to_wire(asked, "front").SerializeToString()
    message = pb.RelayedRequest.FromString(sent)
    assert message.client == "front"
    assert request_from_wire(message) == asked


@given(PARTS)
def test_a_part_comes_as_it_was_sent(part: Any) -> None:
    (message,) = part_to_wire(part)
    assert part_from_wire(pb.RelayedPart.FromString(message.SerializeToString())) == part


def test_a_sign_of_life_is_no_part() -> None:
    assert part_from_wire(pb.RelayedPart()) is None


@pytest.mark.parametrize("letter", ["a", "é", "漢", "🦊"])
def test_a_long_text_goes_in_pieces_of_whole_characters(letter: str) -> None:
    text = "." + letter * (2 * PIECE_BYTES // len(letter.encode()) + 7)
    messages = list(part_to_wire(Said(text)))
    assert len(messages) == 3
    assert max(len(one.said) for one in messages) <= PIECE_BYTES
    pieces = [part_from_wire(one) for one in messages]
    assert "".join(one.text for one in pieces if isinstance(one, Said)) == text


@given(
    st.builds(
        ImageRequest,
        prompt=TEXT,
        seed=st.integers(0, 2**53),
        count=st.integers(1, 10),
        size=st.none() | st.tuples(st.integers(64, 2048), st.integers(64, 2048)),
        steps=st.none() | st.integers(1, 150),
        priority=st.sampled_from(GenerationPriority),
        stay_warm_s=st.floats(0, 1e6),
    )
)
def test_a_request_for_images_comes_as_it_was_sent(asked: ImageRequest) -> None:
    message = images_to_wire("painter", asked, "front")
    assert (message.model_id, message.client) == ("painter", "front")
    assert images_from_wire(message) == asked


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages_json", b"["),
        ("messages_json", b"{}"),
        ("messages_json", b"[]"),
        ("messages_json", b"[1]"),
        ("messages_json", b'[{"content": "no role"}]'),
        ("tools_json", b'["a"]'),
        ("variables_json", b"[]"),
        ("variables_json", b"[" * 100_000),
        ("tool_choice", "maybe"),
        ("schema_json", b"7"),
    ],
)
def test_what_is_no_request_is_refused(field: str, value: object) -> None:
    message = request_to_wire(chat("up"), "front")
    setattr(message.chat, field, value)
    with pytest.raises(InvalidArgument):
        request_from_wire(message)


def test_a_request_without_a_prompt_and_a_text_that_is_none_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="prompt"):
        request_from_wire(pb.RelayedRequest(model_id="up"))
    with pytest.raises(PeerProtocol, match="no UTF-8"):
        part_from_wire(pb.RelayedPart(said=b"\xff"))
