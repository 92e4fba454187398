"""Responses in the background that another gateway goes on with, by the real openai client."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from kakeya.dispatch.profiles import ProfileSpec
from kakeya.dispatch.registry import TaskRegistry
from tests.gateway.resumable.pair import pair
from tests.gateway.toy import Pace, Served, ToyModel, make_folder
from tests.waiting import until

SAID = "Hello there, how are you today? I am well, thank you. " * 3
SLOW = Pace(step_s=0.01)
STILL_AT_WORK = Pace(step_s=1.0)
"""Of a node that is lost or cancels: minutes of work, so that it never ends before that."""
ASKED: dict[str, Any] = {"model": "toy", "input": "hi", "background": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "toy")


def toys(folder: Path, script: str | None = SAID, first: Pace = SLOW) -> list[ToyModel]:
    return [ToyModel(folder, script=script, pace=pace) for pace in (first, SLOW)]


async def ended(served: Served, response_id: str) -> Response:
    """The response of a client that polls a gateway until it has ended."""
    while True:
        seen = await served.openai.responses.retrieve(response_id)
        if seen.status not in ("queued", "in_progress"):
            return seen
        await asyncio.sleep(0.01)


async def test_it_goes_on_where_it_is_polled_after_the_loss_of_its_node(folder: Path) -> None:
    one, two = toys(folder, first=STILL_AT_WORK)
    async with pair(one, two) as nodes:
        first = await nodes.first.openai.responses.create(**ASKED, metadata={"a": "b"})
        await until(lambda: bool(nodes.fleet.held["two"].find(first.id, "127.0.0.1").frames))  # type: ignore[union-attr]
        seen = await nodes.second.openai.responses.retrieve(first.id)
        assert (seen.status, seen.metadata) == ("in_progress", {"a": "b"})
        assert not two.requests, "its own node makes it"
        await nodes.lose_first()
        last = await ended(nodes.second, first.id)
        assert (last.status, last.output_text, last.id) == ("completed", SAID, first.id)
        assert (last.created_at, last.background) == (first.created_at, True)
        assert two.requests[0].prompt_tokens > 0, "it began with the tokens of the lost node"
        # It is a job of that node from then on: later requests go on from it.
        more = await nodes.second.openai.responses.create(
            model="toy", input="more", previous_response_id=first.id, max_output_tokens=3
        )
        assert more.previous_response_id == first.id


async def test_each_node_tells_the_moment_at_which_it_was_asked_for(folder: Path) -> None:
    """However long it waits for its model."""
    one, two = toys(folder, "hello world")
    one.loaded.clear()
    async with pair(one, two) as nodes:
        first = await nodes.first.openai.responses.create(**ASKED)
        seen = await nodes.second.openai.responses.retrieve(first.id)
        await asyncio.sleep(1.1)  # of wall time: moments are told in seconds
        one.loaded.set()
        last = await ended(nodes.second, first.id)
        own = await ended(nodes.first, first.id)
        told = {one.created_at for one in (first, seen, last, own)}
        assert told == {first.created_at}


async def test_it_is_polled_at_another_node_while_its_own_makes_it(folder: Path) -> None:
    one, two = toys(folder, "hello world")
    async with pair(one, two) as nodes:
        first = await nodes.first.openai.responses.create(**ASKED)
        last = await ended(nodes.second, first.id)
        assert (last.status, last.output_text) == ("completed", "hello world")
        assert not two.requests, "a complete answer is not computed again"


async def test_one_that_waits_for_its_model_is_made_elsewhere_from_its_request(
    folder: Path,
) -> None:
    one, two = toys(folder, None)
    one.loaded.clear()
    async with pair(one, two, store_bytes=10**6) as nodes:
        usual = await nodes.second.openai.responses.create(
            model="toy", input="hi", max_output_tokens=8, extra_body={"seed": 3}
        )
        before = len(two.requests)
        first = await nodes.first.openai.responses.create(
            **ASKED, max_output_tokens=8, extra_body={"seed": 3}
        )
        seen = await nodes.second.openai.responses.retrieve(first.id)
        assert seen.status == "queued"
        await nodes.lose_first()
        last = await ended(nodes.second, first.id)
        assert last.output_text == usual.output_text
        assert len(two.requests) == before + 1


async def test_its_events_go_on_elsewhere_from_the_last_one(folder: Path) -> None:
    one, two = toys(folder)
    async with pair(one, two) as nodes:
        stream = await nodes.first.openai.responses.create(**ASKED, stream=True)
        got = []
        async for event in stream:
            got.append(event)
            if len(got) == 30:
                break
        await stream.close()
        await nodes.lose_first()
        response_id = got[0].response.id  # type: ignore[union-attr]
        rest = await nodes.second.openai.responses.retrieve(
            response_id, stream=True, starting_after=got[-1].sequence_number
        )
        got += [event async for event in rest]
        assert [event.sequence_number for event in got] == list(range(len(got)))
        assert got[-1].response.output_text == SAID  # type: ignore[union-attr]


async def test_one_that_was_cancelled_is_told_of_elsewhere(folder: Path) -> None:
    one, two = toys(folder, first=STILL_AT_WORK)
    async with pair(one, two) as nodes:
        seeded = ASKED | {"extra_body": {"seed": 3}}
        first = await nodes.first.openai.responses.create(**seeded)
        await one.started.wait()
        with pytest.raises(openai.ConflictError, match="node one makes it"):
            await nodes.second.openai.responses.cancel(first.id)
        await nodes.first.openai.responses.cancel(first.id)
        assert (await ended(nodes.second, first.id)).status == "cancelled"
        with pytest.raises(openai.ConflictError, match="failed or was cancelled"):
            await nodes.second.openai.responses.create(
                **seeded, stream=True, extra_headers={"Last-Event-ID": f"{first.id}:0"}
            )
        assert not two.requests, "it is not made again"
        await nodes.first.openai.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await nodes.second.openai.responses.retrieve(first.id)


async def test_one_of_a_lost_node_is_cancelled_elsewhere(folder: Path) -> None:
    one, two = toys(folder, first=STILL_AT_WORK)
    async with pair(one, two) as nodes:
        first = await nodes.first.openai.responses.create(**ASKED)
        await nodes.lose_first()
        assert (await nodes.second.openai.responses.cancel(first.id)).status == "cancelled"


async def test_no_copy_of_it_is_made_where_the_request_or_the_owner_says_no(folder: Path) -> None:
    one, two = toys(folder, "hello")
    profiles = {"quiet": ProfileSpec(clients=("quiet",), resumable=False)}
    async with pair(one, two, tasks=TaskRegistry(profiles=profiles)) as nodes:
        quiet = {"x-kakeya-client": "quiet"}
        for more in ({"extra_body": {"resumable": False}}, {"extra_headers": quiet}):
            first = await nodes.first.openai.responses.create(**ASKED | more)
            await ended(nodes.first, first.id)
            with pytest.raises(openai.NotFoundError, match="held for this client by this node"):
                await nodes.second.openai.responses.retrieve(first.id)
        assert not nodes.fleet.sent
