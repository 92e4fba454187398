"""Events and bodies as bytes, and answers without a server."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kakeya.gateway.answer import GeneratedAnswer
from kakeya.gateway.openai.stream import ChunkWriter, usage_body
from kakeya.generation.frames import Done, Progress, StopReason, Tokens, Usage
from kakeya.text.text import TextModel
from tests.gateway.toy import make_folder


@functools.cache
def text_model() -> TextModel:
    with tempfile.TemporaryDirectory() as folder:
        return TextModel(make_folder(Path(folder)), lambda: 0.0)


def writer(dialect="chat", *, include_usage=False, model='m"\u2028') -> ChunkWriter:
    return ChunkWriter(
        dialect, answer_id="a-1", created_at=7, model=model, include_usage=include_usage
    )


def parsed(event: bytes) -> dict:
    head, _, rest = event.partition(b"data: ")
    assert head == b""
    assert rest.endswith(b"\n\n")
    assert rest.count(b"\n") == 2
    return json.loads(rest)


@given(st.text(), st.booleans())
def test_any_text_survives_its_event(text, include_usage):
    for dialect in ("chat", "completion"):
        chunk = parsed(writer(dialect, include_usage=include_usage).text(text))
        (choice,) = chunk["choices"]
        shown = choice["delta"]["content"] if dialect == "chat" else choice["text"]
        assert shown == text
        assert ("usage" in chunk) == include_usage
        assert (chunk["id"], chunk["created"], chunk["model"]) == ("a-1", 7, 'm"\u2028')


def test_a_stream_opens_with_the_role_and_closes_with_the_reason():
    chat = writer()
    assert parsed(chat.first())["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    last = parsed(chat.last("length"))["choices"][0]
    assert (last["delta"], last["finish_reason"]) == ({}, "length")
    assert writer("completion").first() == b""
    assert parsed(chat.usage({"total_tokens": 3}))["choices"] == []


def answer(**fields) -> GeneratedAnswer:
    stops = text_model().stops(fields.pop("stops", ()))
    return GeneratedAnswer(text_model().detokenizer(), stops=stops, **fields)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(text_model().tokenizer.encode(text).ids)


def test_an_answer_ends_with_the_engines_reason():
    for reason, finish in (
        (StopReason.MAX_TOKENS, "length"),
        (StopReason.CONTEXT_FULL, "length"),
        (StopReason.STOP_TOKEN, "stop"),
    ):
        made = answer()
        assert made.take(Progress(computed_tokens=1, total_tokens=2)) == ""
        assert made.take(Tokens(token_ids=ids_of("hello"))) == "hello"
        assert made.finish_reason is None
        assert made.take(Done(reason=reason)) == ""
        assert made.finish_reason == finish


def test_half_a_character_at_the_end_is_shown_as_such():
    made = answer()
    half = ids_of("😀")[:-1] or ids_of("é")[:1]
    assert made.take(Tokens(token_ids=half)) == ""
    assert made.take(Done(reason=StopReason.MAX_TOKENS)) == "\ufffd"


def test_what_was_held_back_for_a_stop_string_comes_with_the_end():
    made = answer(stops=["world!"])
    assert made.take(Tokens(token_ids=ids_of("hello worl"))) == "hello "
    assert made.take(Done(reason=StopReason.MAX_TOKENS)) == "worl"
    assert made.finish_reason == "length"


def test_a_stop_string_ends_an_answer_inside_a_frame_and_what_was_cached_is_told():
    made = answer(stops=["wor"])
    made.take(Progress(computed_tokens=7, total_tokens=9, cached_tokens=7))
    made.take(Progress(computed_tokens=9, total_tokens=9, cached_tokens=7))
    heard = len(ids_of("hello world"))
    assert made.take(Tokens(token_ids=ids_of("hello world, and so on"))) == "hello "
    assert (made.finish_reason, made.usage) == ("stop", None)
    body = usage_body(made, 10)
    assert body == {
        "prompt_tokens": 10,
        "completion_tokens": heard,
        "total_tokens": 10 + heard,
        "prompt_tokens_details": {"cached_tokens": 7},
    }


@given(
    cuts=st.sets(st.integers(1, 20)),
    stop=st.sampled_from(["o w", "l", "return", "so on", "!"]),
)
def test_an_answer_and_its_length_do_not_depend_on_what_was_committed_together(cuts, stop):
    tokens = ids_of("hello world, and so on: return 3!")
    alone, together = answer(stops=[stop]), answer(stops=[stop])
    said = [take_all(alone, [tokens[i : i + 1] for i in range(len(tokens))])]
    ends = [*sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    frames = [tokens[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    said.append(take_all(together, frames))
    assert said[0] == said[1]
    assert alone.completion_tokens == together.completion_tokens
    assert alone.finish_reason == together.finish_reason


def take_all(made, frames):
    """The text, as a client hears it that listens until the answer has a reason to end."""
    said = ""
    for frame in frames:
        if made.finish_reason is None:
            said += made.take(Tokens(token_ids=tuple(frame)))
    return said


def test_the_stop_token_is_counted_and_not_shown():
    made = answer(stop_token_ids=frozenset({2}))
    assert made.take(Tokens(token_ids=(*ids_of("a"), 2))) == "a"
    made.take(Done(reason=StopReason.STOP_TOKEN, usage=Usage(cached_tokens=4)))
    assert made.completion_tokens == 2
    assert usage_body(made, 10)["prompt_tokens_details"] == {"cached_tokens": 4}
