"""Lines and bodies of Ollama's API, without a server."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import PeerUnavailable
from kakeya.gateway.answer import GeneratedAnswer
from kakeya.gateway.ollama.requests import parse_chat, parse_generate
from kakeya.gateway.reply import AnswerHead
from kakeya.generation.frames import Done, StopReason, TokenLogprob, Tokens, Usage
from tests.gateway.openai.test_reply import Reader, ids_of, text_model

HEAD = AnswerHead(answer_id="a", created_at=7, model="m", prompt_tokens=10)
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def chat(**fields):
    reply = parse_chat(BODY | fields)
    reply.head = HEAD
    return reply


def generate():
    reply = parse_generate({"model": "m", "prompt": "hi"})
    reply.head = HEAD
    return reply


def lines(written: bytes) -> list[dict]:
    *found, end = written.split(b"\n")
    assert end == b""
    return [json.loads(line) for line in found]


@pytest.mark.parametrize("make", [chat, generate])
@given(st.text(alphabet="ab <>!\n😀", max_size=30), st.sets(st.integers(1, 40)))
def test_the_lines_of_a_stream_make_the_whole_body(make, text, cuts):
    token_ids = ids_of(text)
    ends = [*sorted(cut for cut in cuts if cut < len(token_ids)), len(token_ids)]
    frames: list = [
        Tokens(token_ids=token_ids[a:b]) for a, b in zip([0, *ends], ends, strict=False) if a < b
    ]
    frames.append(Done(reason=StopReason.STOP_TOKEN, usage=Usage(total_s=0.5, prefill_s=0.25)))
    ids = iter(range(100))
    made = GeneratedAnswer(
        text_model().detokenizer(), reader=Reader(), draw_call_id=lambda: f"call_{next(ids)}"
    )
    reply = make()
    written = reply.opening(())
    for frame in frames:
        for part in made.take(frame):
            written += reply.part(made, part)
    *found, last = lines(written + reply.closing([made]))
    whole = make().whole([made])
    assert not any(one["done"] for one in found)
    assert [one[key] for one in (last, whole) for key in ("done", "done_reason")] == [
        True,
        "stop",
    ] * 2
    assert last["eval_duration"] == last["prompt_eval_duration"] == 250_000_000
    assert (last["prompt_eval_count"], last["eval_count"]) == (10, len(token_ids))
    shown = [one.get("message", one) for one in found]
    of_whole = whole.get("message", whole)
    name = "content" if "message" in whole else "response"
    assert "".join(one[name] for one in shown) == of_whole[name]
    assert "".join(one.get("thinking", "") for one in shown) == of_whole.get("thinking", "")
    calls = [call for one in shown for call in one.get("tool_calls", ())]
    assert calls == of_whole.get("tool_calls", [])
    assert len(calls) == (text.count("!") if name == "content" else 0)
    without = {"message", "response", "thinking"}
    assert {k: v for k, v in last.items() if k not in without} == {
        k: v for k, v in whole.items() if k not in without
    }


def test_an_answer_that_is_cut_off_says_so_and_tokens_come_with_their_logprobs():
    reply = chat(logprobs=True, top_logprobs=1)
    made = GeneratedAnswer(text_model().detokenizer(), bytes_of=text_model().bytes_of)
    token_ids = ids_of("hello")
    found = tuple(TokenLogprob(logprob=-0.5, top=((one, -0.25),)) for one in token_ids)
    (part,) = made.take(Tokens(token_ids=token_ids, logprobs=found))
    (line,) = lines(reply.part(made, part))
    assert "".join(one["token"] for one in line["logprobs"]) == "hello"
    assert [one["top_logprobs"][0]["logprob"] for one in line["logprobs"]] == [-0.25] * len(found)
    made.take(Done(reason=StopReason.MAX_TOKENS))
    (last,) = lines(reply.closing([made]))
    assert last["done_reason"] == "length"
    assert "logprobs" not in last


def test_a_stream_is_silent_while_it_waits_and_says_why_it_fails():
    assert chat().keepalive("loading") == b""
    assert lines(chat().failure(PeerUnavailable("gone"))) == [{"error": "gone"}]
