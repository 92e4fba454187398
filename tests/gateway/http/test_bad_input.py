"""Input that kills or confuses other servers, sent as raw as it takes.

Each row gets a 4xx in the error envelope, and a normal request works afterwards. The first part
are the rows of the bad-input table of the performance notes.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import threading

import httpx
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from kakeya.core.errors import InvalidArgument
from kakeya.gateway.figures import HttpMetrics
from kakeya.gateway.http.body import MAX_DEPTH, OFFLOAD_BYTES, parse_body
from kakeya.gateway.http.callers import CallerCheck, Forbidden
from kakeya.gateway.http.connection import HttpLimits
from kakeya.gateway.http.edge import Edge
from kakeya.gateway.openai.messages import parse_messages
from tests.gateway.toy import Pace, ToyModel, make_folder, serving

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT = {"model": "toy", "prompt": "hi", "max_tokens": 4}
FUNCTION = {"type": "function", "function": {"name": "look"}}
NAMED = {"type": "function", "function": {"name": "another"}}


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "toy")


async def works(served) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        reply = await served.http.post(path, json=body)
        assert reply.status_code == 200, reply.text


def envelope(body: bytes | str) -> dict:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"]
    return error


CHAT_ROWS = [
    # what is changed in a good chat, the parameter that is named
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop[0]"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"top_k": 99999, "temperature": 1.0}, "top_k"),
    ({"logit_bias": {"999999": 5}}, "logit_bias"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"messages": []}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"max_tokens": True}, "max_tokens"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"max_tokens": -3}, "max_tokens"),
    ({"max_tokens": "4"}, "max_tokens"),
    ({"messages": None}, "messages"),
    # and more of the kind
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"model": ""}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 4.0}, "max_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_p": "0.1"}, "min_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": list("abcdefgh") * 5}, "stop"),
    ({"stop": "x" * 1001}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"fast": True}}, "stream_options.fast"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
    ({"messages": [{"role": "user", "content": "a", "prefix": True}]}, "messages[0].prefix"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [FUNCTION], "prefix": True}]},
        "messages[0].prefix",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": NAMED}, "tool_choice"),
    ({"tools": {"a": 1}}, "tools"),
    ({"tools": [FUNCTION, "x"]}, "tools[1]"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type"),
    ({"tools": [FUNCTION], "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"store": True}, "store"),
    ({"never_heard_of": 1}, "never_heard_of"),
    ({"prompt": "hi"}, "prompt"),
    ({"draft_policy": 5}, "draft_policy"),
    ({"draft_policy": "nonsense"}, "draft_policy"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "messages[0].tool_calls[0].function.name",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content[0].text",
    ),
]
TEXT_ROWS = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [""]}, "prompt[0]"),
    ({"prompt": [5, "a"]}, "prompt[1]"),
    ({"prompt": [5, -1]}, "prompt[1]"),
    ({"prompt": [5, True]}, "prompt[1]"),
    ({"prompt": [5, 1.0]}, "prompt[1]"),
    ({"prompt": [99999]}, "prompt"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": [["a"]]}, "prompt[0][0]"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"echo": True}, "echo"),
    ({"tools": [FUNCTION]}, "tools"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"messages": []}, "messages"),
]


async def test_wrong_parameters_are_named_and_nothing_breaks(folder):
    model = ToyModel(folder)
    async with serving(model) as served:
        for path, good, rows in (
            ("/v1/chat/completions", CHAT, CHAT_ROWS),
            ("/v1/completions", TEXT, TEXT_ROWS),
        ):
            for change, param in rows:
                body = json.dumps({**good, **change}).encode()
                head = {"content-type": "application/json"}
                reply = await served.http.post(path, content=body, headers=head)
                assert reply.status_code == 400, (change, reply.text)
                error = envelope(reply.content)
                assert error["param"] == param, (change, error)
                assert error["type"] == "invalid_request_error"
        assert model.requests == []
        await works(served)


PART = {"type": "text", "text": ""}


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (
            [{"role": "user", "content": ""}] * 4097,
            "messages holds 4097 messages; it may hold 4096",
        ),
        (
            [{"role": "user", "content": [PART] * 4097}],
            "messages holds 4097 parts; it may hold 4096",
        ),
        ([{"role": "user", "content": [PART] * 3}] * 1366, "messages holds 4098 parts"),
    ],
    ids=["messages", "parts of one", "parts of many"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/precache"])
async def test_more_messages_or_parts_than_a_chat_has_are_refused_with_the_limit(
    folder, path, messages, says
):
    async with serving(ToyModel(folder)) as served:
        reply = await served.http.post(path, json={"model": "toy", "messages": messages})
        error = envelope(reply.content)
        assert (reply.status_code, error["param"]) == (400, "messages")
        assert says in error["message"]
        await works(served)


async def test_a_large_body_is_read_off_the_loop_and_a_small_one_at_once():
    read_by = []

    def parse(body):
        read_by.append(threading.current_thread())
        return body

    for size in (10, OFFLOAD_BYTES):
        whole = {"a": "x" * size}
        assert await parse_body(json.dumps(whole).encode(), parse) == whole
    with pytest.raises(InvalidArgument, match="not valid JSON"):
        await parse_body(b"[" + b"1" * OFFLOAD_BYTES, parse)
    assert [thread is threading.main_thread() for thread in read_by] == [True, False]


UNSUPPORTED = [{"best_of": 2}, {"tools": [{"type": "custom"}]}, {"x": 1}, {"echo": True}]


@pytest.mark.parametrize("change", UNSUPPORTED, ids=str)
async def test_what_is_not_honoured_has_its_own_code(folder, change):
    async with serving(ToyModel(folder)) as served:
        reply = await served.http.post("/v1/chat/completions", json={**CHAT, **change})
    assert envelope(reply.content)["code"] == "unsupported_parameter"


async def test_a_number_of_thousands_of_digits_is_told_in_words_of_ours(folder):
    body = b'{"model": "toy", "prompt": "a", "seed": ' + b"9" * 5000 + b"}"
    async with serving(ToyModel(folder)) as served:
        reply = await served.http.post("/v1/completions", content=body)
    assert reply.status_code == 400
    assert (
        "a number has 5000 digits; no parameter needs over 4000"
        in envelope(reply.content)["message"]
    )


@pytest.mark.parametrize(
    "off",
    [
        {"seed": -1},
        {"seed": -12345},
        {"top_k": -1},
        {"max_tokens": -1},
        {"top_p": 0},
        {"stop": ""},
        {"stop": ["", "never said"]},
        {"stop": list("1234567")},
    ],
    ids=str,
)
async def test_values_by_which_clients_say_off_are_taken(folder, off):
    async with serving(ToyModel(folder, script="ab")) as served:
        reply = await served.http.post("/v1/chat/completions", json={**CHAT, **off})
    assert reply.status_code == 200, reply.text


def call(name: str = "f", arguments: object = "{}") -> dict[str, object]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


ASKED = {"role": "user", "content": "hi"}
PASTS = [
    [ASKED, {"role": "assistant", "content": None}, ASKED],
    [ASKED, {"role": "assistant"}, ASKED],
    [ASKED, {"role": "assistant", "content": []}, ASKED],
    [ASKED, {"role": "assistant", "content": "x", "reasoning_content": "because"}, ASKED],
    [ASKED, {"role": "assistant", "content": "x", "reasoning": ""}, ASKED],
    [{**ASKED, "id": "m1", "status": "completed"}],
    [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {}}]}],
    [{"role": "user", "content": [{"type": "input_text", "text": "hi"}, "and more"]}],
    [ASKED, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, ASKED],
    [
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call()]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ],
    [
        ASKED,
        {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{"}},
        {"role": "function", "name": "f", "content": None},
    ],
]


@pytest.mark.parametrize("messages", PASTS, ids=lambda messages: str(messages[-2:])[:60])
async def test_what_carries_the_past_of_a_conversation_is_taken(folder, messages):
    async with serving(ToyModel(folder, script="ab")) as served:
        reply = await served.http.post(
            "/v1/chat/completions", json={"model": "toy", "messages": messages}
        )
    assert reply.status_code == 200, reply.text


def test_arguments_of_a_call_are_an_object_for_the_template_where_they_are_one() -> None:
    asked = [
        ASKED,
        {"role": "assistant", "tool_calls": [call(arguments='{"a": 1}'), call(arguments="{a")]},
    ]
    past = parse_messages(asked)[0][1]
    read = [one["function"]["arguments"] for one in past["tool_calls"]]  # type: ignore[attr-defined]
    assert read == [{"a": 1}, "{a"]


def test_arguments_that_are_too_deep_for_an_object_stay_text() -> None:
    for levels in range(MAX_DEPTH - 2, 1100):
        deep = '{"a":' + "[" * levels + "]" * levels + "}"
        asked = [ASKED, {"role": "assistant", "tool_calls": [call(arguments=deep)]}]
        (past,) = parse_messages(asked)[0][1]["tool_calls"]  # type: ignore[misc]
        assert isinstance(past["function"]["arguments"], str) == (levels >= MAX_DEPTH)


@given(st.text(alphabet=st.characters(categories=["Cs", "L", "Nd"]), max_size=20))
def test_half_a_character_becomes_the_sign_for_it_and_all_else_stays(said: str) -> None:
    ((message,), _) = parse_messages([{"role": "user", "content": said}])
    content = str(message["content"])
    content.encode()
    assert len(content) == len(said)
    for sign, was in zip(content, said, strict=True):
        assert sign == ("\ufffd" if "\ud800" <= was <= "\udfff" else was)


PACKED = json.dumps(CHAT).encode()

# Without the time of packing, which would be in the names of the tests, and pytest-xdist
# asks every worker for the same names.
GZIPPED = gzip.compress(PACKED, mtime=0)


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("Identity", PACKED, 200),
        ("", PACKED, 200),
        ("gzip", GZIPPED, 200),
        ("GZIP", GZIPPED, 200),
        ("zstd", zstandard.compress(PACKED), 200),
        ("identity", b"\xef\xbb\xbf" + PACKED, 200),
        ("br", PACKED, 415),
        ("gzip, gzip", PACKED, 415),
        ("gzip", PACKED, 400),
        ("gzip", GZIPPED[:-9], 400),
        ("zstd", PACKED, 400),
        ("gzip", gzip.compress(bytes(5 << 20), mtime=0), 413),
        ("zstd", zstandard.compress(bytes(5 << 20)), 413),
    ],
    ids=lambda value: str(value)[:12],
)
async def test_packed_bodies_are_read_within_the_limit(folder, encoding, body, status):
    async with serving(ToyModel(folder, script="ab")) as served:
        head = {"content-type": "application/json", "content-encoding": encoding}
        reply = await served.http.post("/v1/chat/completions", content=body, headers=head)
        assert reply.status_code == status, reply.text
        await works(served)


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("//v1//chat/completions/", "/v1/chat/completions"),
        ("/v1/v1/completions", "/v1/completions"),
        ("/v1/healthz", "/healthz"),
        ("/nothing/like/it", ""),
    ],
)
async def test_a_path_that_nearly_exists_is_named(folder, path, near):
    async with serving(ToyModel(folder)) as served:
        reply = await served.http.post(httpx.URL(str(served.http.base_url) + path), json=CHAT)
    assert reply.status_code == 404
    message = envelope(reply.content)["message"]
    assert message.endswith(f"did you mean {near}?") if near else "did you mean" not in message


async def test_values_that_change_nothing_are_accepted(folder):
    no_ops = {
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "logprobs": False,
        "top_logprobs": None,
        "user": "me",
        "store": False,
        "metadata": {"run": "7"},
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "service_tier": "auto",
        "temperature": None,
        "stop": None,
        "seed": None,
        "stream_options": None,
        "reasoning_effort": None,
        "draft_policy": None,
    }
    echoed = {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None}
    body = {**CHAT, **no_ops, "messages": [*CHAT["messages"], echoed, *CHAT["messages"]]}
    async with serving(ToyModel(folder)) as served:
        reply = await served.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text


async def test_an_unknown_model_is_404_and_lists_the_served_ones(folder):
    async with serving(ToyModel(folder)) as served:
        reply = await served.http.post("/v1/completions", json={**TEXT, "model": "gpt"})
        assert reply.status_code == 404
        error = envelope(reply.content)
        assert (error["type"], error["code"]) == ("invalid_request_error", "model_not_found")
        assert "served: toy" in error["message"]
        await works(served)


BODIES = [
    b"",
    b"{",
    b"[]",
    b'"text"',
    b"null",
    b"5",
    b"\xff\xfe{}",
    b'{"model": "toy", "prompt": "caf\xe9"}',
    b'{"model": "toy", "prompt": "a", "temperature": NaN}',
    b'{"model": "toy", "prompt": "a", "temperature": Infinity}',
    b'{"model": "toy", "prompt": "a", "temperature": 1e999}',
    b'{"model": "toy", "model": "toy", "prompt": "a"}',
    b'{"model": "toy", "prompt": "a", "stream": true, "stream_options": {"a": 1, "a": 2}}',
    b'{"model": "toy", "prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"model": "toy", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"model": "toy", "prompt": ' + b"[" * 400 + b"]" * 400 + b"}",
    b'{"a":' * 100_000,
    b'{"model": "toy", "prompt": "a"} trailing',
    b'{"model": "toy", "prompt": "a\x00"}',
]


async def test_bodies_that_are_no_request_are_refused(folder):
    async with serving(ToyModel(folder)) as served:
        for body in BODIES:
            reply = await served.http.post("/v1/completions", content=body)
            assert reply.status_code == 400, body[:60]
            envelope(reply.content)
        await works(served)


def post(*headers: str, body: bytes = b"{}", host: str = "localhost") -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", f"Host: {host}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


RAW = [
    (post("Content-Length: -5"), 400),
    (post("Content-Length: 99999999999"), 413),
    (post("Content-Length: " + "9" * 15), 413),
    (post("Content-Length: 1x"), 400),
    (post("Content-Length: 2", "Content-Length: 3"), 400),
    (post("Content-Length: 2", "Transfer-Encoding: chunked"), 400),
    (post("Transfer-Encoding: chunked", body=b"zz\r\n"), 400),
    (post("Content-Length: 1", body=b'{"model": "toy"}'), 400),
    (post("Content-Length: 2", "Content-Encoding: gzip"), 400),
    (b"GARBAGE\r\n\r\n", 400),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", 400),
    (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
    (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
    (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
]


async def test_raw_nonsense_is_answered_in_json(folder):
    async with serving(ToyModel(folder)) as served:
        for request, status in RAW:
            answer = await served.raw(request)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status), (request[:80], answer[:200])
            assert b"content-type: application/json" in head
            length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-len"))
            envelope(body[: int(length.split(b":")[1])])
        await works(served)


async def test_a_chunked_body_is_a_body(folder):
    whole = json.dumps(TEXT).encode()
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in whole) + b"0\r\n\r\n"
    async with serving(ToyModel(folder)) as served:
        answer = await served.raw(post("Transfer-Encoding: chunked", body=pieces))
        assert answer.startswith(b"HTTP/1.1 200")


async def test_a_body_over_the_limit_is_413_announced_or_not(folder):
    async with serving(ToyModel(folder), limits=HttpLimits(body_bytes=2000)) as served:
        big = b'{"model": "toy", "prompt": "' + b"a" * 2000 + b'"}'

        async def in_pieces():
            yield big[:1500]
            yield big[1500:]

        for content in (big, in_pieces()):
            reply = await served.http.post("/v1/completions", content=content)
            assert reply.status_code == 413
            assert envelope(reply.content)["code"] == "request_too_large"
        await works(served)


async def test_a_body_that_does_not_come_is_408(folder):
    async with serving(ToyModel(folder), limits=HttpLimits(body_s=0.1)) as served:
        answer = await served.raw(post("Content-Length: 50"))
        assert answer.startswith(b"HTTP/1.1 408")
        await works(served)


async def test_routes_and_methods_that_do_not_exist_are_json(folder):
    async with serving(ToyModel(folder)) as served:
        for method, path, status in (
            ("GET", "/no", 404),
            ("POST", "/v1/images", 404),
            ("GET", "/v1/models/", 404),
            ("GET", "/v1/chat/completions", 405),
            ("DELETE", "/v1/models", 405),
            ("POST", "/healthz", 405),
        ):
            reply = await served.http.request(method, path)
            assert reply.status_code == status, (method, path)
            envelope(reply.content)
        assert (await served.http.get("/v1/completions")).headers["allow"] == "POST"


async def test_other_hosts_and_origins_are_kept_out(folder):
    async with serving(ToyModel(folder), hosts=frozenset({"Mini.local"})) as served:
        own = f"localhost:{served.port}"
        for headers, status in (
            ({"host": "evil.example"}, 403),
            ({"host": "127.0.0.1.evil.example"}, 403),
            ({"host": "localhost.evil.example:80"}, 403),
            ({"host": "192.168.1.7"}, 403),
            ({"host": "["}, 403),
            ({"host": ""}, 403),
            ({"host": "evil@localhost"}, 403),
            ({"host": "localhost/evil"}, 403),
            ({"host": "localhost evil"}, 403),
            ({"host": "localhost:80:80"}, 403),
            ({"host": "[::1%25evil]:80/"}, 403),
            ({"host": own, "origin": "http://evil.example"}, 403),
            ({"host": own, "origin": "null"}, 403),
            ({"host": own, "origin": f"http://localhost:{served.port + 1}"}, 403),
            ({"host": own, "origin": f"http://{own}"}, 200),
            ({"host": own}, 200),
            ({"host": "localhost."}, 200),
            ({"host": "127.0.0.1"}, 200),
            ({"host": "[::1]:99"}, 200),
            ({"host": "Mini.Local:8210"}, 200),
        ):
            for path in ("/healthz", "/v1/models"):
                reply = await served.http.get(path, headers=headers)
                assert reply.status_code == status, headers
                assert not [name for name in reply.headers if name.startswith("access-control")]
        reply = await served.http.post(
            "/v1/completions", json=TEXT, headers={"origin": "http://evil.example"}
        )
        assert reply.status_code == 403
        envelope(reply.content)


async def test_more_generations_than_places_are_told_to_come_again(folder):
    async with serving(ToyModel(folder), limits=HttpLimits(generations=0)) as served:
        reply = await served.http.post("/v1/completions", json=TEXT)
    assert reply.status_code == 503
    assert int(reply.headers["retry-after"]) >= 1
    assert int(reply.headers["retry-after-ms"]) >= 1
    assert reply.headers["x-ratelimit-remaining-requests"] == "0"
    assert envelope(reply.content)["type"] == "server_error"


async def test_a_client_that_took_all_places_keeps_no_other_out(folder):
    model = ToyModel(folder, pace=Pace(step_s=0.02))
    async with serving(model, limits=HttpLimits(generations=2)) as served:

        def ask(user):
            body = {**TEXT, "user": user, "max_tokens": 40}
            return asyncio.create_task(served.http.post("/v1/completions", json=body))

        flood = [ask("a") for _ in range(2)]
        while len(model.requests) < 2:
            assert not any(one.done() for one in flood)
            await asyncio.sleep(0.01)
        assert (await ask("a")).status_code == 503
        assert (await ask("b" * 100_000)).status_code == 200
        assert [(await one).status_code for one in flood] == [200, 200]
    assert max(len(request.client) for request in model.requests) < 100


@pytest.mark.parametrize(
    ("host", "own_address", "is_let_in"),
    [
        ("192.0.2.7:8210", "192.0.2.7", True),
        ("192.0.2.7", "::ffff:192.0.2.7", True),
        ("[fe80::1]:8210", "fe80::1%eth0", True),
        ("[fe80::1%eth0]:8210", "fe80::1%eth0", True),
        ("192.0.2.8:8210", "192.0.2.7", False),
        ("mini.example:8210", "192.0.2.7", False),
        ("192.0.2.7.evil.example", "192.0.2.7", False),
        ("192.0.2.7", "", False),
    ],
)
def test_the_address_that_a_connection_came_in_by_is_a_name_of_the_node(
    host: str, own_address: str, is_let_in: bool
) -> None:
    """A machine has more addresses than the one it advertises; a resolved name is none of them."""
    headers = Headers({"host": host})
    if is_let_in:
        CallerCheck().check(headers, own_address)
    else:
        with pytest.raises(Forbidden):
            CallerCheck().check(headers, own_address)


async def test_a_request_is_judged_by_the_address_of_its_own_connection() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    edge = Edge(
        app,
        admission=CallerCheck(),
        metrics=HttpMetrics(tuple),
        mono=lambda: 0.0,
        rng=random.Random(1),
    )
    for own, status in (("192.0.2.7", 200), ("192.0.2.9", 403)):
        sent: list[Message] = []

        async def send(message: Message, sent: list[Message] = sent) -> None:
            sent.append(message)

        async def receive() -> Message:
            return {"type": "http.request"}

        scope = {
            "type": "http",
            "path": "/",
            "method": "GET",
            "server": (own, 8210),
            "headers": [(b"host", b"192.0.2.7:8210")],
        }
        await edge(scope, receive, send)
        assert sent[0]["status"] == status
