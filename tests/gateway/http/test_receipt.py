"""The headers that tell of a request: with `[http] unknown = "warn"` what it was read without."""

from __future__ import annotations

import logging

import pytest

from kakeya.gateway.http.connection import HttpLimits
from tests.gateway.toy import ToyEmbedder, ToyModel, make_folder, serving

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "toy", "prompt": "hi", "max_tokens": 4},
    "/v1/embeddings": {"model": "encoder", "input": "hi"},
    "/v1/precache": {"model": "toy", "prompt": "hi"},
    "/v1/responses": {"model": "toy", "input": "hi"},
}
WARNS = HttpLimits(unknown="warn")
IGNORED = "x-kakeya-ignored"


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "toy")


@pytest.mark.parametrize("path", ROUTES)
async def test_unknown_parameters_are_named_where_they_are_not_refused(folder, path):
    body = {**ROUTES[path], "zeta": 1, "alpha": {"a": []}, "absent": None}
    for limits, status in ((HttpLimits(), 400), (WARNS, 200)):
        embedders = [ToyEmbedder(folder)]
        async with serving(ToyModel(folder), limits=limits, embedders=embedders) as served:
            reply = await served.http.post(path, json=body)
            known = await served.http.post(path, json=ROUTES[path])
        assert reply.status_code == status, reply.text
        assert known.status_code == 200
        assert IGNORED not in known.headers
        if status == 200:
            assert reply.headers[IGNORED] == "alpha, zeta"
        else:
            error = reply.json()["error"]
            assert IGNORED not in reply.headers
            assert error["message"] == '"zeta", "alpha" are not supported; leave them out'
            assert (error["param"], error["code"]) == ("zeta", "unsupported_parameter")


async def test_a_stream_names_them_before_its_first_event(folder):
    async with serving(ToyModel(folder), limits=WARNS) as served:
        body = {**CHAT, "stream": True, "zeta": 1}
        async with served.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            assert reply.status_code == 200
            assert reply.headers[IGNORED] == "zeta"
            assert (await reply.aread()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": 9}, "temperature"),
        ({"store": True}, "store"),
        ({"stream_options": {"fast": True}}, "stream_options.fast"),
    ],
)
async def test_a_parameter_with_a_wrong_value_is_refused_all_the_same(folder, change, param):
    async with serving(ToyModel(folder), limits=WARNS) as served:
        reply = await served.http.post("/v1/chat/completions", json={**CHAT, "zeta": 1, **change})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


async def test_no_name_breaks_the_header(folder):
    names = ["a, b", "line\r\nx-evil: 1", "schlüssel", "\x7f", ""]
    async with serving(ToyModel(folder), limits=WARNS) as served:
        reply = await served.http.post("/v1/chat/completions", json=CHAT | dict.fromkeys(names, 1))
        many = CHAT | {f"parameter_{i}": 1 for i in range(1000)}
        bounded = await served.http.post("/v1/chat/completions", json=many)
    assert reply.status_code == bounded.status_code == 200
    found = reply.headers[IGNORED].split(", ")
    assert sorted(found) == sorted(
        ["a%2C%20b", "line%0D%0Ax-evil%3A%201", "schl%C3%BCssel", "%7F", ""]
    )
    assert "x-evil" not in reply.headers
    assert len(bounded.headers[IGNORED]) == 2000


async def test_what_a_warning_quotes_ends_no_header(folder):
    search = {"type": "web_search\r\nx-evil: 1"}
    async with serving(ToyModel(folder)) as served:
        reply = await served.http.post(
            "/v1/responses", json=ROUTES["/v1/responses"] | {"tools": [search]}
        )
    assert reply.status_code == 200
    assert "x-evil" not in reply.headers
    assert reply.headers["x-kakeya-warning"].endswith("(web_search\\r\\nx-evil: 1)")


async def test_the_log_has_a_line_for_each_request_and_what_its_generation_was(folder, caplog):
    caplog.set_level(logging.INFO, logger="kakeya.requests")
    async with serving(ToyModel(folder)) as served:
        reply = await served.http.post("/v1/chat/completions", json=CHAT)
        await served.http.post("/v1/chat/completions", json={**CHAT, "zeta": 1})
        await served.http.get("/v1/models")
    done, refused = (one for one in caplog.records if one.message == "answered")
    usage = reply.json()["usage"]
    told = done.kakeya_fields
    assert told["request_id"] == reply.headers["x-request-id"]
    assert (told["status"], told["model"], told["node"]) == (200, "toy", "this")
    assert (told["prompt_tokens"], told["tokens"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert told["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 < told["first_token_s"] <= told["seconds"]
    assert 0 <= told["waited_s"] <= told["first_token_s"]
    assert refused.kakeya_fields["status"] == 400
