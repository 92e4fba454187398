"""Pages of other origins: what a browser asks first, and what it reads of every answer."""

from __future__ import annotations

import pytest

from tests.gateway.toy import ToyModel, make_folder, serving

PAGE = "app://obsidian.md"
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path)


def preflight(origin: str, **more: str) -> dict[str, str]:
    return {"origin": origin, "access-control-request-method": "POST", **more}


async def test_a_preflight_lets_a_listed_page_send_what_it_asks(folder):
    asked = preflight(
        PAGE,
        **{
            "access-control-request-headers": "authorization,content-type,x-stainless-os",
            "access-control-request-private-network": "true",
        },
    )
    async with serving(ToyModel(folder), origins=frozenset({PAGE})) as served:
        reply = await served.http.options("/v1/chat/completions", headers=asked)
    assert (reply.status_code, reply.content) == (204, b"")
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert "POST" in reply.headers["access-control-allow-methods"]
    allowed = reply.headers["access-control-allow-headers"]
    assert allowed == asked["access-control-request-headers"]
    assert reply.headers["access-control-allow-private-network"] == "true"
    assert reply.headers["vary"] == "Origin"


@pytest.mark.parametrize("origin", ["http://evil.example", "null", PAGE + ".evil"])
async def test_a_page_that_is_not_listed_is_let_nothing(folder, origin):
    async with serving(ToyModel(folder), origins=frozenset({PAGE})) as served:
        for reply in (
            await served.http.options("/v1/models", headers=preflight(origin)),
            await served.http.get("/v1/models", headers={"origin": origin}),
        ):
            assert reply.status_code == 403
            assert "http_origins" in reply.json()["error"]["message"]
            assert not [name for name in reply.headers if name.startswith("access-control")]


async def test_every_answer_to_a_listed_page_can_be_read_errors_and_streams_too(folder):
    async with serving(ToyModel(folder), origins=frozenset({"app://*"})) as served:
        for path, body, status in (
            ("/v1/chat/completions", CHAT, 200),
            ("/v1/chat/completions", {**CHAT, "stream": True}, 200),
            ("/v1/chat/completions", {**CHAT, "model": "no"}, 404),
            ("/v1/no", {}, 404),
            ("/v1/messages/no/such", {}, 404),
        ):
            reply = await served.http.post(path, json=body, headers={"origin": PAGE})
            assert (reply.status_code, path) == (status, path)
            assert reply.headers["access-control-allow-origin"] == PAGE
            assert reply.headers["access-control-expose-headers"] == "*"


async def test_control_a_program_without_an_origin_reads_none_of_it(folder):
    async with serving(ToyModel(folder), origins=frozenset({PAGE})) as served:
        reply = await served.http.get("/v1/models")
        options = await served.http.options("/v1/models")
    assert not [name for name in reply.headers if name.startswith("access-control")]
    assert options.status_code == 405
