"""Messages as bodies and events, without a server."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import PeerUnavailable
from kakeya.gateway.answer import GeneratedAnswer
from kakeya.gateway.anthropic.reply import MessageReply
from kakeya.gateway.anthropic.requests import parse_message
from kakeya.gateway.reply import AnswerHead
from kakeya.generation.frames import Done, Progress, StopReason, Tokens, Usage
from tests.gateway.openai.test_reply import Reader, ids_of, text_model


def reply() -> MessageReply:
    made = parse_message(
        {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    )
    made.head = AnswerHead(answer_id="msg_1", created_at=7, model="m", prompt_tokens=10)
    return made


def answer(**fields) -> GeneratedAnswer:
    stops = text_model().stops(fields.pop("stops", ()))
    return GeneratedAnswer(text_model().detokenizer(), stops=stops, **fields)


def events(written: bytes) -> list[dict]:
    found = []
    for one in written.split(b"\n\n")[:-1]:
        name, data = one.split(b"\n")
        found.append(json.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + found[-1]["type"].encode()
    return found


def streamed(made: GeneratedAnswer, frames: list) -> list[dict]:
    """The events of an answer."""
    to = reply()
    written = b""
    for frame in frames:
        for part in made.take(frame):
            written = (written or to.opening([made])) + to.part(made, part)
        if made.finish_reason is not None:
            break
    return events((written or to.opening([made])) + to.closing([made]))


def message_of(stream: list[dict]) -> dict:
    """The message that a client makes of a stream; asserts that the events are in order."""
    (first, *rest) = stream
    assert first["type"] == "message_start"
    message, is_open = first["message"], False
    for one in rest:
        match one["type"]:
            case "content_block_start":
                assert not is_open
                assert one["index"] == len(message["content"])
                message["content"].append(dict(one["content_block"]))
                is_open = True
            case "content_block_delta":
                assert is_open
                assert one["index"] == len(message["content"]) - 1
                block, delta = message["content"][-1], one["delta"]
                for name in ("text", "thinking", "signature"):
                    if name in delta:
                        block[name] += delta[name]
                if "partial_json" in delta:
                    block["input"] = json.loads(delta["partial_json"])
            case "content_block_stop":
                assert is_open
                is_open = False
            case "message_delta":
                assert not is_open
                message |= one["delta"]
                message["usage"] |= one["usage"]
    assert [one["type"] for one in rest[-2:]] == ["message_delta", "message_stop"]
    return message


@given(st.text(alphabet="ab <>!\n😀", max_size=30), st.sets(st.integers(1, 40)))
def test_the_deltas_of_a_stream_make_the_whole_message(text, cuts):
    token_ids = ids_of(text)
    ends = [*sorted(cut for cut in cuts if cut < len(token_ids)), len(token_ids)]
    frames: list = [
        Tokens(token_ids=token_ids[a:b]) for a, b in zip([0, *ends], ends, strict=False) if a < b
    ]
    frames.append(Done(reason=StopReason.STOP_TOKEN, usage=Usage(cached_tokens=4)))
    ids = iter(range(100))
    made = answer(reader=Reader(), draw_call_id=lambda: f"call_{next(ids)}")
    message = message_of(streamed(made, frames))
    whole = reply().whole([made])
    assert message == whole
    blocks = message["content"]
    assert all(one.get("text", "x") and one.get("signature", "x") for one in blocks)
    assert whole["stop_reason"] == ("tool_use" if "!" in text else "end_turn")


def test_a_message_names_the_stop_string_that_ended_it():
    frames = [Tokens(token_ids=ids_of("hello world")), Done(reason=StopReason.MAX_TOKENS)]
    message = message_of(streamed(answer(stops=["x", "o w", " wor"]), frames))
    assert message["content"] == [{"type": "text", "text": "hell"}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "o w")
    cut = message_of(streamed(answer(stops=["world!"]), frames))
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    special = message_of(
        streamed(answer(stops=["<|im_end|>"]), [Tokens(token_ids=(*ids_of("a"), 2))])
    )
    assert special["stop_sequence"] == "<|im_end|>"


def test_cached_tokens_are_not_among_the_input():
    frames = [
        Progress(computed_tokens=10, total_tokens=10, cached_tokens=4),
        Tokens(token_ids=ids_of("hello")),
        Done(reason=StopReason.MAX_TOKENS, usage=Usage(cached_tokens=4)),
    ]
    stream = streamed(answer(), frames)
    start, end = stream[0]["message"]["usage"], stream[-2]["usage"]
    for usage in (start, end):
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (6, 4)
        assert usage["cache_creation_input_tokens"] == 0
    assert end["output_tokens"] == len(ids_of("hello"))
    assert end["kakeya"]["drafted"] == 0


def test_a_stream_without_a_part_is_a_message_without_content():
    message = message_of(streamed(answer(), [Done(reason=StopReason.STOP_TOKEN)]))
    assert (message["content"], message["stop_reason"]) == ([], "end_turn")


def test_a_stream_that_waits_pings_and_one_that_fails_says_why():
    said, event = reply().keepalive("loading toy,\n 41 %").split(b"\n", 1)
    assert said == b": waiting: loading toy, 41 %"
    assert events(event) == [{"type": "ping"}]
    (error,) = events(reply().failure(PeerUnavailable("the engine is gone")))
    assert error["error"] == {"type": "overloaded_error", "message": "the engine is gone"}
