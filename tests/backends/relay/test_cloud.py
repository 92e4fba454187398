"""A cloud on a real socket: answers, refusals, silence, and a client that leaves."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from kakeya.backends.relay.backend import Finished
from kakeya.backends.relay.config import CloudSettings
from kakeya.backends.relay.faults import UpstreamBusy, UpstreamDenied
from kakeya.backends.request import CompletionRequest
from kakeya.core.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    PeerError,
    PeerProtocol,
    PeerUnavailable,
    Unsupported,
)
from kakeya.text.tools.answer import Said
from tests.backends.relay.upstream import (
    answered,
    chat,
    delta,
    events,
    refuses,
    says,
    stalls,
    text_of,
    upstream,
)

KEY = "sk-very-secret"
ASKED = chat("cloud:west/m")


@asynccontextmanager
async def cloud(url: str, **settings):
    backend = CloudSettings(url=url, **settings).open("west")
    await backend.start()
    try:
        yield backend
    finally:
        await backend.stop()


async def test_an_answer_comes_with_its_account_and_the_key_goes_in_one_header(monkeypatch):
    monkeypatch.setenv("WEST_KEY", KEY)
    async with (
        upstream(says("Hello", " world")) as west,
        cloud(west.url, key_env="WEST_KEY") as backend,
    ):
        parts = await answered(backend.handle(ASKED))
    (asked,) = west.asked
    assert parts[:-1] == [Said("Hello"), Said(" world")]
    assert parts[-1] == Finished(reason="stop", prompt_tokens=7, completion_tokens=2)
    assert (asked.path, asked.body["model"]) == ("/v1/chat/completions", "m")
    assert asked.headers["authorization"] == f"Bearer {KEY}"


async def test_a_key_is_read_from_its_file_at_each_request(tmp_path):
    file = tmp_path / "key"
    async with upstream(says("x")) as west, cloud(west.url, key_file=file) as backend:
        with pytest.raises(UpstreamDenied, match="cannot be read"):
            await answered(backend.handle(ASKED))
        for key in ("one", "two"):
            await asyncio.to_thread(file.write_text, key + "\n")
            await answered(backend.handle(ASKED))
    assert [one.headers["authorization"] for one in west.asked] == ["Bearer one", "Bearer two"]


async def test_a_key_that_is_not_set_is_a_problem_before_any_request(monkeypatch):
    monkeypatch.delenv("WEST_KEY", raising=False)
    async with cloud("http://127.0.0.1:9/v1", key_env="WEST_KEY") as backend:
        assert "the variable WEST_KEY" in backend.health()
        with pytest.raises(UpstreamDenied, match="WEST_KEY"):
            await answered(backend.handle(ASKED))


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidArgument),
        (401, UpstreamDenied),
        (403, UpstreamDenied),
        (404, NotFound),
        (429, UpstreamBusy),
        (500, PeerError),
        (503, PeerUnavailable),
        (504, DeadlineExceeded),
        (302, PeerError),
    ],
)
async def test_a_refusal_is_typed_told_and_without_the_key(monkeypatch, status, kind):
    monkeypatch.setenv("WEST_KEY", KEY)
    told = {"error": {"message": f"no, {KEY}!", "param": "top_k"}}
    said = refuses(status, told, retry_after="7", location="/")
    async with upstream(said) as west, cloud(west.url, key_env="WEST_KEY") as backend:
        with pytest.raises(kind) as fault:
            await answered(backend.handle(ASKED))
    assert len(west.asked) == 1, "a redirect is not followed"
    assert f"the cloud west answered {status}: no, [key]!" in fault.value.message
    assert KEY not in repr(fault.value)
    if status in (429, 503):
        assert fault.value.retry_after_s == 7
    if status == 400:
        assert fault.value.param == "top_k"


async def test_silence_and_an_absent_service_are_different_faults():
    async with upstream(stalls) as west, cloud(west.url, timeout_s=0.3) as backend:
        with pytest.raises(DeadlineExceeded, match=r"the cloud west was silent for 0\.3 s"):
            await answered(backend.handle(ASKED))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    async with cloud(url) as backend:
        with pytest.raises(PeerError, match="does not answer") as fault:
            await answered(backend.handle(ASKED))
    assert not isinstance(fault.value, PeerUnavailable)


async def test_an_answer_that_breaks_off_is_a_fault():
    async def breaks(one) -> None:
        await one.start()
        await one.write(events(delta(content="half"))[:-16], more=False)

    async with upstream(breaks) as west, cloud(west.url) as backend:
        with pytest.raises(PeerProtocol, match="in the middle"):
            await answered(backend.handle(ASKED))


async def test_an_error_in_a_stream_is_a_fault():
    async def fails(one) -> None:
        await one.start()
        await one.write(events(delta(content="a"), {"error": {"message": "it broke"}}), more=False)

    async with upstream(fails) as west, cloud(west.url) as backend:
        with pytest.raises(PeerError, match="the cloud west failed: it broke"):
            await answered(backend.handle(ASKED))


async def test_a_client_that_leaves_closes_the_connection_to_the_cloud():
    gone = asyncio.Event()

    async def respond(one) -> None:
        await stalls(one)
        gone.set()

    async with upstream(respond) as west, cloud(west.url) as backend:
        async with aclosing(backend.handle(ASKED)) as parts:
            assert await anext(parts) == Said("one")
            assert not gone.is_set()
        await asyncio.wait_for(gone.wait(), 10)


async def test_a_service_that_does_not_stream_answers_too():
    message = {"role": "assistant", "content": "whole"}
    body = {"choices": [{"index": 0, "message": message, "finish_reason": "length"}]}
    async with upstream(refuses(200, body)) as west, cloud(west.url) as backend:
        parts = await answered(backend.handle(ASKED))
    assert parts == [Said("whole"), Finished(reason="length")]


async def test_a_prompt_goes_to_completions():
    async def respond(one) -> None:
        await one.start()
        said = {"text": "more", "finish_reason": "stop"}
        await one.write(events({"choices": [said]}), more=False)

    asked = CompletionRequest(params=replace(ASKED.params, max_tokens=3), prompts=((1, 2),))
    async with upstream(respond) as west, cloud(west.url) as backend:
        parts = await answered(backend.handle(asked))
    assert text_of(parts) == "more"
    assert west.asked[0].path == "/v1/completions"
    assert west.asked[0].body["prompt"] == [1, 2]
    assert west.asked[0].body["max_tokens"] == 3


def test_logprobs_are_refused_and_what_is_not_sent_is_named():
    backend = CloudSettings(url="http://127.0.0.1:9").open("west")
    with pytest.raises(Unsupported, match="logprobs"):
        backend.check(chat("cloud:west/m", top_logprobs=0))
    asked = chat("cloud:west/m", draft_policy="off")
    thinking = replace(asked.chat, kwargs={"reasoning_effort": "low", "thinking": True})
    assert backend.check(replace(asked, chat=thinking)) == ["draft_policy", "chat_template_kwargs"]
