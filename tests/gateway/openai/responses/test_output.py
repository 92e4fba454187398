"""The items of an answer: the same ones streamed and whole, and what the events add up to."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from kakeya.gateway.answer import GeneratedAnswer
from kakeya.gateway.openai.reply import compact
from kakeya.gateway.openai.responses.requests import parse_response
from kakeya.gateway.openai.responses.store import ResponseStore
from kakeya.gateway.reply import AnswerHead
from kakeya.generation.frames import Done, StopReason, TokenLogprob, Tokens
from kakeya.text.tools.answer import AnswerReader
from kakeya.text.tools.families import JSON_FAMILY
from kakeya.text.tools.thinking import ThinkingMarks
from tests.gateway.openai.test_reply import Reader, answer, ids_of, text_model

HEAD = AnswerHead(answer_id="resp_1", created_at=7, model="m", prompt_tokens=10)
CLOCK_S = 0.0


def reply(**fields):
    store = ResponseStore(most_bytes=0, mono=lambda: CLOCK_S)
    made = parse_response({"model": "m", "input": "hi", **fields}, store)
    made.head = HEAD
    return made


def events_of(written: bytes) -> list[dict]:
    *found, end = written.split(b"\n\n")
    assert end == b""
    events = []
    for one in found:
        name, data = one.split(b"\n")
        body = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + body["type"].encode()
        events.append(body)
    return events


def streamed(text: str, reason: StopReason) -> tuple[list[dict], GeneratedAnswer]:
    """The events of an answer whose text `Reader` reads, and the answer."""
    ids = iter(range(1000))
    made = answer(reader=Reader(), draw_call_id=lambda: f"call_{next(ids)}")
    writer = reply()
    written = writer.opening([made])
    frames = [Tokens(token_ids=(one,)) for one in ids_of(text)] if text else []
    for frame in (*frames, Done(reason=reason)):
        for part in made.take(frame):
            written += writer.part(made, part)
    return events_of(written + writer.closing([made])), made


ANSWERS = st.text(st.sampled_from('ab \n"\\é😀<>!'), max_size=30)
REASONS = st.sampled_from([StopReason.STOP_TOKEN, StopReason.MAX_TOKENS])


@given(ANSWERS, REASONS)
def test_the_events_of_a_stream_add_up_to_the_whole_answer(text, reason):
    events, made = streamed(text, reason)
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    whole = json.loads(compact(reply().whole([made])))
    last = events[-1]["response"]
    assert last == whole
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert events[-1]["type"] == (
        "response.completed" if reason is StopReason.STOP_TOKEN else "response.incomplete"
    )
    deltas: dict[int, str] = {}
    open_items: set[int] = set()
    for one in events:
        match one["type"].removeprefix("response."):
            case "output_item.added":
                assert not open_items
                assert one["output_index"] == len(deltas)
                open_items.add(one["output_index"])
                deltas[one["output_index"]] = ""
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                assert one["item_id"] == whole["output"][one["output_index"]]["id"]
                deltas[one["output_index"]] += one["delta"]
            case "output_item.done":
                open_items.remove(one["output_index"])
                assert one["item"] == whole["output"][one["output_index"]]
    assert not open_items
    assert list(deltas.values()) == [text_of(item) for item in whole["output"]]
    for kind, text in (("message", made.text), ("reasoning", made.thoughts)):
        assert "".join(text_of(item) for item in whole["output"] if item["type"] == kind) == text
    calls = [item for item in whole["output"] if item["type"] == "function_call"]
    assert [one["call_id"] for one in calls] == [call.call_id for call in made.calls]
    assert len({item["id"] for item in whole["output"]}) == len(whole["output"])


def text_of(item: dict) -> str:
    if item["type"] == "function_call":
        return item["arguments"]
    (part,) = item["content"]
    return part["text"]


SAID = st.text(st.sampled_from("ab \n<é😀"), max_size=12)
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


@given(
    st.sampled_from(["", "<think>ab</think>", "<think>\n</think>\n"]),
    st.lists(SAID | st.just(CALL), max_size=5),
    st.integers(1, 5),
)
def test_the_tokens_of_a_text_have_their_logprobs_in_its_item(thoughts, pieces, size):
    made = answer(
        reader=AnswerReader(thinking=ThinkingMarks("<think>", "</think>"), family=JSON_FAMILY),
        bytes_of=text_model().bytes_of,
        draw_call_id=lambda: "call_0",
    )
    writer = reply(include=["message.output_text.logprobs"])
    written, ids = writer.opening([made]), ids_of(thoughts + "".join(pieces))
    steps = [ids[at : at + size] for at in range(0, len(ids), size)]
    told = TokenLogprob(logprob=-0.5)
    frames = [Tokens(token_ids=step, logprobs=(told,) * len(step)) for step in steps]
    for frame in (*frames, Done(reason=StopReason.STOP_TOKEN)):
        for part in made.take(frame):
            written += writer.part(made, part)
    events = events_of(written + writer.closing([made]))
    whole = json.loads(compact(writer.whole([made])))
    assert events[-1]["response"] == whole
    for index, item in enumerate(whole["output"]):
        if item["type"] != "message":
            continue
        (part,) = item["content"]
        shown = b"".join(bytes(one["bytes"]) for one in part["logprobs"]).decode()
        assert shown.split() == part["text"].split(), "all but blanks beside a mark"
        for kind in ("delta", "done"):
            of_item = [
                one["logprobs"]
                for one in events
                if one["type"] == f"response.output_text.{kind}" and one["output_index"] == index
            ]
            found = [token for logprobs in of_item for token in logprobs]
            assert found == part["logprobs"], kind


def test_thoughts_are_an_item_of_their_own_in_front():
    events, made = streamed("<ab>c!", StopReason.STOP_TOKEN)
    reasoning, message, call = reply().whole([made])["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "ab"}]
    assert reasoning["summary"] == []
    assert (message["content"][0]["text"], call["name"]) == ("c", "look")
    assert "response.reasoning_text.done" in [one["type"] for one in events]


def test_a_complete_answer_of_thoughts_alone_has_an_empty_message():
    for reason, kinds in (
        (StopReason.STOP_TOKEN, ["reasoning", "message"]),
        (StopReason.MAX_TOKENS, ["reasoning"]),
    ):
        events, _ = streamed("<ab", reason)
        assert [item["type"] for item in events[-1]["response"]["output"]] == kinds
