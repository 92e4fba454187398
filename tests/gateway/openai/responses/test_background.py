"""Responses in the background, by the real openai client."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from kakeya.core.clock import SystemClock
from kakeya.core.errors import PeerUnavailable
from kakeya.dispatch.job_store import FILE, JobStore
from kakeya.dispatch.jobs import JobQueue
from kakeya.dispatch.profiles import ProfileSpec
from kakeya.dispatch.registry import TaskRegistry
from tests.gateway.toy import Pace, Served, ToyModel, make_folder, serving
from tests.waiting import until

SLOW = Pace(step_s=0.02)
ASKED: dict[str, Any] = {"model": "toy", "input": "hi", "background": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "toy")


@asynccontextmanager
async def kept(model: ToyModel, home: Path | None = None, **more: Any) -> AsyncIterator[Served]:
    store = None if home is None else JobStore(home / FILE)
    jobs = JobQueue(store, clock=SystemClock(), rng=random.Random(1))
    async with jobs, serving(model, jobs=jobs, **more) as served:
        yield served


async def ended(served: Served, response: Response) -> Response:
    while response.status in ("queued", "in_progress"):
        await asyncio.sleep(0.01)
        response = await served.openai.responses.retrieve(response.id)
    return response


async def test_the_profile_of_a_client_names_the_model(folder: Path) -> None:
    profiles = {"p": ProfileSpec(agents=("AsyncOpenAI/",), model="toy")}
    model = ToyModel(folder, script="hello")
    async with kept(model, tasks=TaskRegistry(profiles=profiles)) as served:
        first = await served.openai.responses.create(**ASKED | {"model": "gpt-5"})
        last = await ended(served, first)
    assert (last.status, last.output_text) == ("completed", "hello")


async def test_a_response_is_polled_until_it_is_complete(folder: Path) -> None:
    gate = asyncio.Event()
    model = ToyModel(folder, script="hello world", gate=gate)
    async with kept(model) as served:
        first = await served.openai.responses.create(**ASKED, metadata={"a": "b"})
        assert (first.status, first.background, first.output) == ("queued", True, [])
        assert first.id.startswith("resp_")
        assert first._request_id == first.id
        await model.started.wait()
        seen = await served.openai.responses.retrieve(first.id)
        assert (seen.status, seen.metadata) == ("in_progress", {"a": "b"})
        gate.set()
        last = await ended(served, first)
        assert (last.status, last.output_text, last.id) == ("completed", "hello world", first.id)
        assert (last.background, last.store, last.created_at) == (True, True, first.created_at)
        assert last.usage is not None
        # A later request goes on from it, though this node keeps no other responses.
        more = await served.openai.responses.create(
            model="toy", input="more", previous_response_id=first.id
        )
        assert more.output_text == "hello world"
        prompt = model.tokenizer.decode(list(model.requests[-1].token_ids))
        assert "hello world" in prompt
        await served.openai.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await served.openai.responses.retrieve(first.id)


async def test_half_a_character_costs_no_response(folder: Path) -> None:
    async with kept(ToyModel(folder, script="hello")) as served:
        raw = b'{"model": "toy", "background": true, "input": "\\ud83d", "user": "\\udc00"}'
        answer = await served.http.post("/v1/responses", content=raw)
        last = await ended(served, Response.model_construct(**answer.json()))
        assert (last.status, last.output_text) == ("completed", "hello")


async def test_a_response_is_cancelled_and_its_decode_closed(folder: Path) -> None:
    model = ToyModel(folder, script="hello " * 200, pace=SLOW, context_tokens=4096)
    async with kept(model, store_bytes=10**6) as served:
        first = await served.openai.responses.create(**ASKED)
        await model.started.wait()
        for _ in range(2):
            cancelled = await served.openai.responses.cancel(first.id)
            assert (cancelled.status, cancelled.id) == ("cancelled", first.id)
        await until(lambda: model.open == 0)
        assert (await served.openai.responses.retrieve(first.id)).status == "cancelled"
        model.script = "hello"
        usual = await served.openai.responses.create(model="toy", input="hi")
        with pytest.raises(openai.BadRequestError, match="made at once"):
            await served.openai.responses.cancel(usual.id)
        with pytest.raises(openai.NotFoundError):
            await served.openai.responses.cancel("resp_nothing")


async def test_what_is_wrong_with_a_request_is_told_at_once(folder: Path) -> None:
    async with kept(ToyModel(folder, script="hello")) as served:
        with pytest.raises(openai.NotFoundError, match="not served"):
            await served.openai.responses.create(**ASKED | {"model": "toyy"})
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await served.openai.responses.create(**ASKED, temperature=9)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await served.openai.responses.create(**ASKED, previous_response_id="resp_no")
        assert (await served.http.get("/api/v1/jobs")).json()["data"] == []


async def test_a_response_that_fails_says_why(folder: Path) -> None:
    model = ToyModel(folder, script="hello", context_tokens=4)
    async with kept(model) as served:
        failed = await ended(served, await served.openai.responses.create(**ASKED))
        assert failed.status == "failed"
        assert failed.error is not None
        assert (failed.error.code, "tokens" in failed.error.message) == (
            "context_length_exceeded",
            True,
        )


async def test_a_stream_goes_on_from_any_of_its_events(folder: Path) -> None:
    model = ToyModel(folder, script="hello world of text", pace=SLOW)
    async with kept(model) as served:
        responses = served.openai.responses
        stream = await responses.create(**ASKED, stream=True)
        seen = []
        async for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
        await stream.close()  # its reader leaves, and the work goes on
        response_id = seen[0].response.id  # type: ignore[union-attr]
        rest = await responses.retrieve(
            response_id, stream=True, starting_after=seen[-1].sequence_number
        )
        seen += [event async for event in rest]
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        text = "".join(one.delta for one in seen if one.type == "response.output_text.delta")
        assert text == "hello world of text"
        last = seen[-1]
        assert last.type == "response.completed"
        assert last.response.id == response_id
        again = await responses.retrieve(response_id, stream=True)
        assert [event.type async for event in again] == [event.type for event in seen]
        assert (await responses.retrieve(response_id)).output_text == text
        assert len(model.requests) == 1


async def test_a_stream_of_a_cancelled_or_failed_response_ends(folder: Path) -> None:
    model = ToyModel(folder, script="hello " * 200, pace=SLOW, context_tokens=4096)
    async with kept(model) as served:
        responses = served.openai.responses
        stream = await responses.create(**ASKED, stream=True)
        events = []
        async for event in stream:
            if not events:
                await responses.cancel(event.response.id)  # type: ignore[union-attr]
            events.append(event)
        assert events[-1].type == "response.failed"
        assert events[-1].response.status == "cancelled"
        assert events[-1].sequence_number == len(events) - 1
        model.fail_after = 2
        failing = await responses.create(**ASKED, stream=True)
        last = [event async for event in failing][-1]
        assert last.type == "response.failed"
        assert last.response.error is not None
        response = await ended(served, last.response)
        assert (response.status, response.error) == ("failed", last.response.error)


async def test_events_that_are_not_kept_are_a_clear_error(folder: Path) -> None:
    async with kept(ToyModel(folder, script="hello"), store_bytes=10**6) as served:
        responses = served.openai.responses
        plain = await ended(served, await responses.create(**ASKED))
        usual = await responses.create(model="toy", input="hi")
        for response, words in ((plain, "are not kept"), (usual, "no copy of")):
            with pytest.raises(openai.BadRequestError, match=words):
                await responses.retrieve(response.id, stream=True)
        answer = await served.http.get(
            f"/v1/responses/{plain.id}", params={"stream": "true", "starting_after": "x"}
        )
        assert answer.json()["error"]["param"] == "starting_after"


async def test_a_response_that_ran_at_a_kill_is_made_again_as_it_was(
    folder: Path, tmp_path: Path
) -> None:
    home, left = tmp_path / "home", tmp_path / "left"
    await asyncio.to_thread(home.mkdir)
    model = ToyModel(folder, script="hello")
    headers = {"x-kakeya-client": "ann", "authorization": "Bearer secret"}
    async with kept(model, home, store_bytes=10**6) as served:
        client = served.openai.with_options(default_headers=headers)
        before = await client.responses.create(model="toy", input="hi", max_output_tokens=1)
        model.pace = Pace(step_s=600)
        asked = ASKED | {"input": "more", "previous_response_id": before.id}
        first = await client.responses.create(**asked)
        await until(lambda: len(model.requests) == 2)
        await asyncio.to_thread(shutil.copytree, home, left)
        again = model.requests[-1]
    written = await asyncio.to_thread((left / FILE).read_bytes)
    written += await asyncio.to_thread((left / f"{FILE}-wal").read_bytes)
    assert b"secret" not in written
    assert b'"ann"' in written
    model = ToyModel(folder, script="hello")
    async with kept(model, left) as served:
        last = await ended(served, first)
        assert (last.status, last.output_text) == ("completed", "hello")
        assert last.previous_response_id == before.id
        (request,) = model.requests
        assert request.token_ids == again.token_ids
        assert request.sampling == again.sampling  # the seed, too
        assert request.client == again.client == "ann"


async def test_a_model_that_is_away_for_a_moment_fails_no_response(folder: Path) -> None:
    model = ToyModel(folder, script="hello")
    tried = []

    async def ready(timeout_s: float, *args: object, **more: object) -> object:
        tried.append(timeout_s)
        if len(tried) == 1:
            raise PeerUnavailable("the engine starts again", retry_after_s=0.05)
        return model._facts()

    model.ready = ready  # type: ignore[assignment, method-assign]
    async with kept(model) as served:
        last = await ended(served, await served.openai.responses.create(**ASKED))
        assert (last.status, len(tried)) == ("completed", 2)
