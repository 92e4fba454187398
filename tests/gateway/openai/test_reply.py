"""Events and bodies as bytes, and answers without a server."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kakeya.gateway.answer import GeneratedAnswer
from kakeya.gateway.openai.reply import ChatReply, CompletionReply, usage_body
from kakeya.gateway.openai.requests import parse_chat, parse_completion
from kakeya.gateway.reply import AnswerHead
from kakeya.generation.frames import Done, Progress, StopReason, TokenLogprob, Tokens, Usage
from kakeya.text.text import TextModel
from kakeya.text.tools.answer import Called, Part, Said, Thought
from tests.gateway.toy import make_folder


@functools.cache
def text_model() -> TextModel:
    with tempfile.TemporaryDirectory() as folder:
        return TextModel(make_folder(Path(folder)), lambda: 0.0)


HEAD = AnswerHead(answer_id="a-1", created_at=7, model='m"\u2028', prompt_tokens=10)


def chat(**fields) -> ChatReply:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    reply = parse_chat(body)
    reply.head = HEAD
    return reply


def completion(**fields) -> CompletionReply:
    reply = parse_completion({"model": "m", "prompt": "hi", **fields})
    reply.head = HEAD
    return reply


def parsed(event: bytes) -> dict:
    head, _, rest = event.partition(b"data: ")
    assert head == b""
    assert rest.endswith(b"\n\n")
    assert rest.count(b"\n") == 2
    return json.loads(rest)


def events(written: bytes) -> list[dict]:
    *found, end = written.split(b"\n\n")
    assert end == b""
    return [parsed(one + b"\n\n") for one in found if one != b"data: [DONE]"]


@given(st.text(min_size=1), st.booleans())
def test_any_text_survives_its_event(text, include_usage):
    for reply in (chat, completion):
        written = reply(stream=True, stream_options={"include_usage": include_usage})
        chunk = parsed(written.part(answer(), Said(text)))
        (choice,) = chunk["choices"]
        shown = choice["delta"]["content"] if reply is chat else choice["text"]
        assert shown == text
        assert ("usage" in chunk) == include_usage
        assert (chunk["id"], chunk["created"], chunk["model"]) == ("a-1", 7, 'm"\u2028')


def test_a_stream_opens_with_the_role_and_closes_with_the_reason():
    reply = chat(stream=True, stream_options={"include_usage": True})
    opening = parsed(reply.opening([answer()]))["choices"][0]
    assert opening["delta"] == {"role": "assistant", "content": ""}
    made = answer()
    made.take(Done(reason=StopReason.MAX_TOKENS))
    last, usage = events(reply.closing([made]))
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "length")
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 10
    assert reply.closing([made]).endswith(b"data: [DONE]\n\n")
    assert completion().opening(()) == b""


class Reader:
    """Reads `<` as the beginning of a thought, `>` as its end, `!` as a call."""

    def __init__(self) -> None:
        self.is_thinking = False

    thought_tokens = 0

    def feed(self, text, tokens=0):
        found = []
        for character in text:
            if character in "<>":
                self.is_thinking = character == "<"
            elif character == "!":
                found.append(Called("look", '{"at": 1}'))
            else:
                found.append(Thought(character) if self.is_thinking else Said(character))
        return found

    def finish(self):
        return []


def read(text: str, **fields) -> tuple[GeneratedAnswer, list[Part]]:
    ids = iter(range(100))
    made = answer(reader=Reader(), draw_call_id=lambda: f"call_{next(ids)}", **fields)
    parts = [*made.take(Tokens(token_ids=ids_of(text)))]
    if made.finish_reason is None:
        parts += made.take(Done(reason=StopReason.STOP_TOKEN))
    return made, parts


def test_thoughts_and_calls_have_fields_of_their_own_streamed_and_whole():
    reply = chat(stream=True)
    made, parts = read("<ab>c!!")
    deltas = [parsed(reply.part(made, part))["choices"][0]["delta"] for part in parts]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "ab"
    assert "".join(delta.get("content", "") for delta in deltas) == "c"
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    function = {"name": "look", "arguments": '{"at": 1}'}
    assert calls == [
        {"index": i, "id": f"call_{i}", "type": "function", "function": function} for i in (0, 1)
    ]
    (choice,) = reply.whole([made])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "c",
        "refusal": None,
        "reasoning_content": "ab",
        "tool_calls": [{k: v for k, v in call.items() if k != "index"} for call in calls],
    }
    assert read("!")[0].calls
    assert reply.whole([read("!")[0]])["choices"][0]["message"]["content"] is None


def test_without_parallel_calls_the_first_one_ends_the_answer():
    made, parts = read("a!b!", has_one_call=True)
    assert [type(part).__name__ for part in parts] == ["Said", "ToolCall"]
    assert (made.finish_reason, len(made.calls)) == ("tool_calls", 1)


def test_a_call_that_max_tokens_followed_is_no_end_of_the_models_own():
    made = answer(reader=Reader(), draw_call_id=lambda: "call_0")
    made.take(Tokens(token_ids=ids_of("!")))
    made.take(Done(reason=StopReason.MAX_TOKENS))
    assert made.finish_reason == "length"


def test_each_token_comes_with_its_logprob_once():
    reply = chat(stream=True, logprobs=True, top_logprobs=1)
    token_ids = ids_of("hello")
    made = answer(bytes_of=text_model().bytes_of)
    found = tuple(TokenLogprob(logprob=-0.5, top=((one, -0.25),)) for one in token_ids)
    (part,) = made.take(Tokens(token_ids=token_ids, logprobs=found))
    content = parsed(reply.part(made, part))["choices"][0]["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == "hello"
    assert bytes(byte for one in content for byte in one["bytes"]) == b"hello"
    assert [one["logprob"] for one in content] == [-0.5] * len(token_ids)
    assert [one["top_logprobs"][0]["logprob"] for one in content] == [-0.25] * len(token_ids)
    made.take(Done(reason=StopReason.MAX_TOKENS))
    (last,) = events(reply.closing([made]))
    assert last["choices"][0]["logprobs"] is None


def test_tokens_behind_a_stop_string_have_no_logprobs():
    made = answer(bytes_of=text_model().bytes_of, stops=["wor"])
    token_ids = ids_of("hello world, and so on")
    found = tuple(TokenLogprob(logprob=-0.5) for _ in token_ids)
    made.take(Tokens(token_ids=token_ids, logprobs=found))
    assert len(made.take_logprobs()) == made.completion_tokens < len(token_ids)


def test_a_stop_string_behind_a_call_leaves_the_call_to_its_client():
    made, _ = read("!ab", stops=["b"])
    assert (made.finish_reason, len(made.calls)) == ("tool_calls", 1)


def test_several_answers_share_one_account():
    reply = chat(n=2, stream=True)
    assert [
        one["choices"][0]["index"]
        for one in events(reply.opening([answer(row=row) for row in (0, 1)]))
    ] == [0, 1]
    rows = [answer(row=row) for row in (0, 1)]
    for row in rows:
        row.take(Progress(computed_tokens=4, total_tokens=10, cached_tokens=4))
        row.take(Tokens(token_ids=ids_of("hello")))
        row.take(Done(reason=StopReason.MAX_TOKENS, usage=Usage(cached_tokens=4, accepted=1)))
    body = reply.whole(rows)
    assert [one["index"] for one in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 2 * len(ids_of("hello"))
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert body["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 2


def answer(**fields) -> GeneratedAnswer:
    stops = text_model().stops(fields.pop("stops", ()))
    return GeneratedAnswer(text_model().detokenizer(), stops=stops, **fields)


def said(made: GeneratedAnswer, frame) -> str:
    parts = made.take(frame)
    assert all(isinstance(part, Said) and part.text for part in parts)
    return "".join(part.text for part in parts)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(text_model().tokenizer.encode(text).ids)


def test_an_answer_ends_with_the_engines_reason():
    for reason, finish in (
        (StopReason.MAX_TOKENS, "length"),
        (StopReason.CONTEXT_FULL, "length"),
        (StopReason.STOP_TOKEN, "stop"),
    ):
        made = answer()
        assert said(made, Progress(computed_tokens=1, total_tokens=2)) == ""
        assert said(made, Tokens(token_ids=ids_of("hello"))) == "hello"
        assert made.finish_reason is None
        assert said(made, Done(reason=reason)) == ""
        assert made.finish_reason == finish


def test_half_a_character_at_the_end_is_shown_as_such():
    made = answer()
    half = ids_of("😀")[:-1] or ids_of("é")[:1]
    assert said(made, Tokens(token_ids=half)) == ""
    assert said(made, Done(reason=StopReason.MAX_TOKENS)) == "\ufffd"


def test_what_was_held_back_for_a_stop_string_comes_with_the_end():
    made = answer(stops=["world!"])
    assert said(made, Tokens(token_ids=ids_of("hello worl"))) == "hello "
    assert said(made, Done(reason=StopReason.MAX_TOKENS)) == "worl"
    assert made.finish_reason == "length"


def test_a_stop_string_ends_an_answer_inside_a_frame_and_what_was_cached_is_told():
    made = answer(stops=["wor"])
    made.take(Progress(computed_tokens=7, total_tokens=9, cached_tokens=7))
    made.take(Progress(computed_tokens=9, total_tokens=9, cached_tokens=7))
    heard = len(ids_of("hello world"))
    assert said(made, Tokens(token_ids=ids_of("hello world, and so on"))) == "hello "
    assert (made.finish_reason, made.usage) == ("stop", None)
    body = usage_body([made], 10, made.cached_tokens)
    assert body == {
        "prompt_tokens": 10,
        "completion_tokens": heard,
        "total_tokens": 10 + heard,
        "prompt_tokens_details": {"cached_tokens": 7},
        "completion_tokens_details": {"reasoning_tokens": 0, "accepted_prediction_tokens": 0},
    }


@given(
    cuts=st.sets(st.integers(1, 20)),
    stop=st.sampled_from(["o w", "l", "return", "so on", "!"]),
)
def test_an_answer_and_its_length_do_not_depend_on_what_was_committed_together(cuts, stop):
    tokens = ids_of("hello world, and so on: return 3!")
    alone, together = answer(stops=[stop]), answer(stops=[stop])
    heard = [take_all(alone, [tokens[i : i + 1] for i in range(len(tokens))])]
    ends = [*sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    frames = [tokens[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    heard.append(take_all(together, frames))
    assert heard[0] == heard[1]
    assert alone.completion_tokens == together.completion_tokens
    assert alone.finish_reason == together.finish_reason


def take_all(made, frames):
    """The text, as a client hears it that listens until the answer has a reason to end."""
    text = ""
    for frame in frames:
        if made.finish_reason is None:
            text += said(made, Tokens(token_ids=tuple(frame)))
    return text


def test_the_stop_token_is_counted_and_not_shown():
    made = answer(stop_token_ids=frozenset({2}))
    assert said(made, Tokens(token_ids=(*ids_of("a"), 2))) == "a"
    made.take(Done(reason=StopReason.STOP_TOKEN, usage=Usage(cached_tokens=4)))
    assert made.completion_tokens == 2
    assert made.cached_tokens == 4
