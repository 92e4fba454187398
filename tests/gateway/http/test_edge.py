"""How an error leaves, by the API of its path, and the ids of requests."""

from __future__ import annotations

import json
import logging

import pytest

from kakeya.core import errors
from kakeya.gateway.http.edge import envelope, error_body, error_format
from kakeya.gateway.http.request_ids import answer_id, request_id
from tests.gateway.toy import TEMPLATE, ToyModel, make_folder, serving

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path, template=TEMPLATE)


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/messages", "anthropic"),
        ("/v1/messages/count_tokens", "anthropic"),
        ("/v1/messages-of-mine", "openai"),
        ("/api/chat", "ollama"),
        ("/api/v1/status", "openai"),
        ("/v1/chat/completions", "openai"),
        ("/", "openai"),
    ],
)
def test_the_path_decides_the_body_of_an_error(path: str, shape: str) -> None:
    assert error_format(path) == shape


def test_each_api_has_errors_of_its_own() -> None:
    wrong = errors.InvalidArgument("top_k is 0", param="top_k")
    assert json.loads(envelope(wrong, "/v1/chat/completions")) == {
        "error": {
            "message": "top_k is 0",
            "type": "invalid_request_error",
            "param": "top_k",
            "code": "invalid_argument",
        }
    }
    assert json.loads(envelope(wrong, "/v1/messages")) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "top_k is 0"},
    }
    assert json.loads(envelope(wrong, "/api/chat")) == {"error": "top_k is 0"}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_anthropics_types_follow_the_status(status: int, kind: str) -> None:
    body = json.loads(error_body("no", status, code="any", path="/v1/messages"))
    assert body["error"]["type"] == kind


async def test_errors_of_the_router_and_of_the_check_have_the_form_of_their_path(folder):
    async with serving(ToyModel(folder)) as served:
        for path, read in (
            ("/v1/messages/no/such", lambda body: body["error"]["message"]),
            ("/api/no", lambda body: body["error"]),
            ("/no", lambda body: body["error"]["message"]),
        ):
            lost = await served.http.post(path, json={})
            assert (lost.status_code, read(lost.json())) == (404, f"there is no POST {path}")
            kept_out = await served.http.post(path, headers={"host": "evil.example"})
            assert (kept_out.status_code, "--http-host" in read(kept_out.json())) == (403, True)


async def test_every_answer_has_an_id_that_the_log_has_too(folder, caplog):
    async with serving(ToyModel(folder)) as served:
        with caplog.at_level(logging.DEBUG, logger="kakeya.requests"):
            replies = [
                await served.http.get("/healthz"),
                await served.http.post("/v1/messages/no/such"),
                await served.http.post("/v1/chat/completions", json=CHAT),
                await served.http.post("/v1/chat/completions", json={**CHAT, "stream": True}),
                await served.http.post("/v1/chat/completions", json={**CHAT, "model": "no"}),
            ]
    ids = [reply.headers["x-request-id"] for reply in replies]
    assert replies[2].json()["id"] == ids[2]
    assert f'"id":"{ids[3]}"' in replies[3].text
    assert len(set(ids)) == len(ids)
    assert [reply.headers["request-id"] for reply in replies] == ids
    fields = [getattr(record, "kakeya_fields") for record in caplog.records]  # noqa: B009
    assert [(line["request_id"], line["status"]) for line in fields] == [
        (reply.headers["x-request-id"], reply.status_code) for reply in replies
    ]
    assert [record.levelno for record in caplog.records] == [logging.DEBUG, *[logging.INFO] * 4]


@pytest.mark.parametrize(
    ("given", "echoed"), [("turn-7", "turn-7"), ("x" * 129, None), ("", None), (b"\xff", None)]
)
async def test_the_id_that_a_client_gives_is_echoed_if_it_is_one(folder, given, echoed):
    async with serving(ToyModel(folder)) as served:
        reply = await served.http.get("/healthz", headers={"x-client-request-id": given})
    assert reply.headers.get("x-client-request-id") == echoed


def test_a_request_takes_the_id_of_its_answer() -> None:
    scope = {"kakeya.request_id": "req_" + "a" * 24}
    assert answer_id(scope, "chatcmpl-") == "chatcmpl-" + "a" * 24 == request_id(scope)
