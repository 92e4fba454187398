"""What llama-server says, as it was recorded, and what it is asked."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.backends.llama.gbnf import gbnf
from kakeya.backends.llama.wire import CompletionReader, completion_body, events_of, failure_of
from kakeya.core.errors import (
    ContextLengthExceeded,
    InvalidArgument,
    KakeyaError,
    MemoryRefused,
    PeerProtocol,
    PeerUnavailable,
    Unsupported,
)
from kakeya.generation.frames import Done, Frame, Progress, StopReason, TokenLogprob, Tokens
from kakeya.generation.request import DecodeRequest, Sampling
from kakeya.text.grammar import AnswerShape, ModelMarks, answer_grammar, schema_of
from kakeya.text.tools.families import JSON_FAMILY

RECORDED = b"""\
data: {"index":0,"content":"","tokens":[0],"stop":false,"id_slot":-1,"tokens_predicted":0,\
"tokens_evaluated":4,"prompt_progress":{"total":4,"cache":1,"processed":4,"time_ms":107}}

data: {"index":0,"content":"')","tokens":[336],"stop":false,"id_slot":-1,"tokens_predicted":1,\
"tokens_evaluated":4,"completion_probabilities":[{"id":336,"token":"')","bytes":[39,41],\
"logprob":-1.5,"top_logprobs":[{"id":336,"token":"')","bytes":[39,41],"logprob":-1.5},\
{"id":410,"token":"\\",","bytes":[34,44],"logprob":-1.75}]}]}

: a comment

data: {"index":0,"content":"\xf0\x9f\x98\x80","tokens":[95],"stop":false,"id_slot":-1,\
"tokens_predicted":3,"tokens_evaluated":4,"completion_probabilities":[{"id":95,"token":"",\
"bytes":[128],"logprob":-0.25,"top_logprobs":[{"id":95,"token":"","bytes":[128],\
"logprob":-0.25}]}]}

data: {"stop":true,"stop_type":"limit","truncated":false,"tokens_predicted":3,"timings":{\
"cache_n":1,"prompt_n":3,"prompt_ms":107.5,"predicted_n":3,"predicted_ms":1.5}}

"""
"""A stream of three tokens of which the second, the beginning of a character, has no event."""
ASKED = DecodeRequest(token_ids=[5, 6, 7, 8], max_tokens=3)
ENDS = frozenset({2})
FULL = "Context size has been exceeded."


def spell(text: str, count: int, last: int) -> Sequence[int]:
    assert (text, count, last) == ("\U0001f600", 1, 95)
    return [77]


def read(data: bytes, asked: DecodeRequest = ASKED) -> list[Frame]:
    events, rest = events_of(data)
    assert rest == b""
    return list(CompletionReader(asked, spell, ENDS).frames(events))


def test_a_recorded_stream() -> None:
    progress, tokens, done = read(RECORDED, replace(ASKED, top_logprobs=1))
    assert progress == Progress(computed_tokens=4, total_tokens=4, cached_tokens=1)
    assert tokens == Tokens(
        token_ids=(336, 77, 95),
        logprobs=(
            TokenLogprob(logprob=-1.5, top=((336, -1.5),)),
            TokenLogprob(logprob=-9999.0),
            TokenLogprob(logprob=-0.25, top=((95, -0.25),)),
        ),
    )
    assert isinstance(done, Done)
    assert done.reason is StopReason.MAX_TOKENS
    assert (done.usage.prefill_s, done.usage.cached_tokens, done.usage.forwards) == (0.1075, 1, 3)


@pytest.mark.law
@given(cuts=st.lists(st.integers(0, len(RECORDED)), max_size=6))
def test_a_stream_may_come_in_any_pieces(cuts: list[int]) -> None:
    reader = CompletionReader(ASKED, spell, ENDS)
    places = [0, *sorted(cuts), len(RECORDED)]
    rest, ids = b"", []
    for start, end in itertools.pairwise(places):
        events, rest = events_of(rest + RECORDED[start:end])
        ids += [
            one
            for frame in reader.frames(events)
            if isinstance(frame, Tokens)
            for one in frame.token_ids
        ]
    assert ids == [336, 77, 95]


def test_a_stop_token_ends_the_stream_where_it_stands() -> None:
    _, tokens, done = read(RECORDED, replace(ASKED, stop_token_ids=frozenset({336})))
    assert tokens == Tokens(token_ids=(336,))
    assert isinstance(done, Done)
    assert done.reason is StopReason.STOP_TOKEN


def test_an_end_behind_half_a_character_is_told() -> None:
    final = {"stop": True, "stop_type": "eos", "truncated": False, "tokens_predicted": 2}
    tokens, done = read(f"data: {json.dumps(final)}\n\n".encode(), replace(ASKED, top_logprobs=0))
    assert isinstance(tokens, Tokens)
    assert tokens.token_ids == (2,)
    assert len(tokens.logprobs) == 1
    assert isinstance(done, Done)
    assert done.reason is StopReason.STOP_TOKEN


@pytest.mark.parametrize("data", [b"data: 1\n\n", b"data: {\n\n", b'data: {"stop": true}\n\n'])
def test_another_answer_breaks_the_protocol(data: bytes) -> None:
    with pytest.raises(PeerProtocol):
        read(data)


@pytest.mark.parametrize(
    ("status", "told", "error"),
    [
        (400, {"type": "invalid_request_error", "message": "wrong"}, InvalidArgument),
        (400, {"type": "exceed_context_size_error", "message": "long"}, ContextLengthExceeded),
        (
            500,
            {"type": "server_error", "message": "Context size has been exceeded."},
            MemoryRefused,
        ),
        (501, {"type": "not_supported_error", "message": "no"}, Unsupported),
        (503, {"type": "unavailable_error", "message": "Loading model"}, PeerUnavailable),
        (500, {}, PeerUnavailable),
    ],
)
def test_errors_have_types(status: int, told: dict[str, str], error: type[KakeyaError]) -> None:
    assert type(failure_of(status, {"error": told}, "m")) is error
    if told:
        with pytest.raises(error):
            read(b"data: " + json.dumps({"error": {**told, "code": status}}).encode() + b"\n\n")


def body(request: DecodeRequest) -> dict[str, object]:
    return completion_body(request, lambda ids: f"<{list(ids)}>")


def test_what_is_asked() -> None:
    sampling = Sampling(temperature=0.5, top_k=7, seed=1 << 40, logit_bias=((3, -100.0),))
    asked = body(replace(ASKED, sampling=sampling))
    assert (asked["prompt"], asked["n_predict"], asked["n_probs"]) == ([5, 6, 7, 8], 3, 0)
    assert (asked["temperature"], asked["top_k"]) == (0.5, 7)
    assert asked["logit_bias"] == [[3, -100.0]]
    assert 0 <= int(str(asked["seed"])) < 1 << 31
    assert body(ASKED)["temperature"] == 0.0
    assert body(replace(ASKED, top_logprobs=0))["n_probs"] == 1
    # Other noise for what is left of an answer, and penalties that see all of it.
    rest = body(replace(ASKED, prompt_tokens=2, sampling=sampling))
    assert rest["seed"] != asked["seed"]
    assert rest["repeat_last_n"] == 5


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
MARKS = ModelMarks(family=JSON_FAMILY, tokens={})


def test_a_grammar_is_sent_as_gbnf_and_what_only_the_server_knows_as_a_schema() -> None:
    grammar = answer_grammar(AnswerShape(schema=SCHEMA), (), MARKS)
    forced = body(replace(ASKED, grammar=grammar))
    assert (forced["grammar"], forced["grammar_type"]) == (gbnf(grammar), "tool_calls")
    assert "generation_prompt" not in forced
    rest = body(replace(ASKED, grammar=grammar, prompt_tokens=3))
    assert rest["generation_prompt"] == "<[8]>"
    dated = {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}
    own = answer_grammar(AnswerShape(schema=dated), (), MARKS)
    assert body(replace(ASKED, grammar=own))["json_schema"] == schema_of(own) == dated
    other = answer_grammar(AnswerShape(schema={"type": "string", "format": "email"}), (), MARKS)
    for wrong, says in (("%llguidance {}\nstart: /a+/", "this form"), (other, "'format'")):
        with pytest.raises(Unsupported, match=says):
            body(replace(ASKED, grammar=wrong))
    with pytest.raises(Unsupported, match="adapters"):
        body(replace(ASKED, adapter_id="mine"))
