"""Streams of responses that another gateway goes on with, by the real openai client."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from kakeya.core.clock import SystemClock
from kakeya.dispatch.profiles import ProfileSpec
from kakeya.dispatch.registry import TaskRegistry
from tests.dispatch.routed.copies import CopyFleet
from tests.gateway.resumable.pair import pair
from tests.gateway.toy import Pace, Served, ToyModel, make_folder, serving
from tests.waiting import LIMIT_S, until

SAID = "Hello there, how are you today? I am well, thank you. " * 3
ASKED: dict[str, Any] = {"model": "toy", "input": "hi"}
ONE_AT_A_TIME, SEVERAL = Pace(step_s=0.002), Pace(step_s=0.002, per_step=5)
TOOL = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "toy")


async def part_of(served: Served, events: int, **more: Any) -> list[ResponseStreamEvent]:
    """The first events of a new stream, whose client then loses its connection."""
    stream = await served.openai.responses.create(stream=True, **ASKED | more)
    got = []
    async for event in stream:
        got.append(event)
        if len(got) == events:
            break
    await stream.close()
    return got


async def rest_of(served: Served, got: list[ResponseStreamEvent]) -> list[ResponseStreamEvent]:
    stream = await served.openai.responses.retrieve(
        id_of(got), stream=True, starting_after=got[-1].sequence_number
    )
    return [event async for event in stream]


async def completed(served: Served, response_id: str) -> Response:
    """The response of a client that asks until it is complete."""
    async with asyncio.timeout(LIMIT_S):
        while (seen := await served.openai.responses.retrieve(response_id)).status != "completed":
            await asyncio.sleep(0.01)
    return seen


def id_of(got: list[ResponseStreamEvent]) -> str:
    assert got[0].type == "response.created"
    return got[0].response.id


def shown(events: list[ResponseStreamEvent]) -> list[Any]:
    """The parts of events that are equal at all nodes: all but ids of responses and their costs."""
    bodies = [event.model_dump() for event in events]
    for body in bodies:
        if response := body.get("response"):
            body["response"] = (response["status"], [one["type"] for one in response["output"]])
        body.pop("item_id", None)
        item = body.get("item") or {}
        item.pop("id", None)
        item.pop("call_id", None)
    return bodies


@pytest.mark.parametrize("events", [1, 2, 3, 9, 40])
@pytest.mark.parametrize("pace", [ONE_AT_A_TIME, SEVERAL], ids=["plain", "with drafts"])
async def test_another_node_tells_the_events_that_the_client_lacks(
    folder: Path, events: int, pace: Pace
) -> None:
    one, two = ToyModel(folder, script=SAID, pace=SEVERAL), ToyModel(folder, script=SAID, pace=pace)
    async with pair(one, two) as nodes:
        whole = await part_of(nodes.first, 10**6)
        got = await part_of(nodes.first, events)
        rest = await rest_of(nodes.second, got)
        assert shown(got + rest) == shown(whole)
        assert [event.sequence_number for event in got + rest] == list(range(len(whole)))
        last = rest[-1]
        assert last.type == "response.completed"
        assert (last.response.id, last.response.output_text) == (id_of(got), SAID)
        assert last.response.created_at == got[0].response.created_at  # type: ignore[union-attr]
        await until(lambda: one.open == two.open == 0)


async def test_a_node_alone_goes_on_with_what_its_client_lost_the_connection_to(
    folder: Path,
) -> None:
    model = ToyModel(folder, script=SAID, pace=ONE_AT_A_TIME)
    async with serving(model, copies=CopyFleet("one", clock=SystemClock()).at("one")) as served:
        whole = await part_of(served, 10**6)
        got = await part_of(served, 20)
        # At once: the node may not have seen yet that its client has left.
        assert shown(got + await rest_of(served, got)) == shown(whole)


async def test_a_call_keeps_its_id_and_the_text_before_it_its_place(folder: Path) -> None:
    script = 'Let me see.<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'
    one, two = (ToyModel(folder, script=script, pace=ONE_AT_A_TIME) for _ in range(2))
    async with pair(one, two) as nodes:
        whole = await part_of(nodes.first, 10**6, tools=[TOOL])
        again = [event async for event in await events_of(nodes.second, id_of(whole))]
        assert [one.model_dump() for one in again[:-1]] == [one.model_dump() for one in whole[:-1]]
        assert len(two.requests) == 0, "a complete answer is not computed again"


async def test_the_id_is_told_long_before_a_call_is_whole(folder: Path) -> None:
    script = '<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'
    one, two = (ToyModel(folder, script=script, pace=Pace(step_s=0.01)) for _ in range(2))
    async with pair(one, two) as nodes:
        got = await part_of(nodes.first, 2, tools=[TOOL])
        rest = await rest_of(nodes.second, got)
        assert len(two.requests) == 1, "the call was not whole"
        last = rest[-1]
        assert last.type == "response.completed"
        assert last.response.output[0].type == "function_call"


async def events_of(served: Served, response_id: str) -> Any:
    return await served.openai.responses.retrieve(response_id, stream=True)


async def test_a_response_is_shown_while_it_is_made_and_when_it_is_complete(folder: Path) -> None:
    one, two = (ToyModel(folder, script=SAID, pace=Pace(step_s=0.02)) for _ in range(2))
    async with pair(one, two, store_bytes=10**6) as nodes:
        got = await part_of(nodes.first, 5, metadata={"a": "b"})
        seen = await nodes.second.openai.responses.retrieve(id_of(got))
        assert (seen.status, seen.output, seen.metadata) == ("in_progress", [], {"a": "b"})
        await rest_of(nodes.second, got)
        for served in (nodes.first, nodes.second):
            assert (await completed(served, id_of(got))).output_text == SAID
        more = await nodes.second.openai.responses.create(
            model="toy", input="more", previous_response_id=id_of(got)
        )
        assert more.status == "completed"


async def test_an_answer_that_a_stop_string_ends_is_complete(folder: Path) -> None:
    one, two = (ToyModel(folder, script=SAID, pace=SEVERAL) for _ in range(2))
    async with pair(one, two) as nodes:
        got = await part_of(nodes.first, 10**6, extra_body={"stop": ["you"]})
        seen = await completed(nodes.second, id_of(got))
        assert seen.output_text == "Hello there, how are "
        assert not two.requests


async def test_earlier_responses_and_the_seed_go_along(folder: Path) -> None:
    one, two = ToyModel(folder, pace=ONE_AT_A_TIME), ToyModel(folder, pace=ONE_AT_A_TIME)
    async with pair(one, two, store_bytes=10**6) as nodes:
        first = await nodes.first.openai.responses.create(**ASKED | {"max_output_tokens": 5})
        more = {"previous_response_id": first.id, "max_output_tokens": 40, "temperature": 1.0}
        got = await part_of(nodes.first, 8, **more)
        await rest_of(nodes.second, got)
        asked, again = one.requests[-1], two.requests[-1]
        assert again.sampling == asked.sampling
        assert list(again.token_ids)[: len(asked.token_ids)] == list(asked.token_ids)
        assert again.prompt_tokens in (0, len(asked.token_ids))


async def test_no_copy_is_made_where_the_request_or_the_owner_says_no(folder: Path) -> None:
    one, two = (ToyModel(folder, script=SAID, pace=ONE_AT_A_TIME) for _ in range(2))
    profiles = {"quiet": ProfileSpec(clients=("quiet",), resumable=False)}
    async with pair(one, two, tasks=TaskRegistry(profiles=profiles)) as nodes:
        quiet = {"x-kakeya-client": "quiet"}
        for more in ({"extra_body": {"resumable": False}}, {"extra_headers": quiet}):
            got = await part_of(nodes.first, 5, **more)
            with pytest.raises((openai.NotFoundError, openai.BadRequestError)):
                await rest_of(nodes.second, got)
        assert not nodes.fleet.sent


async def test_a_response_goes_on_for_its_client_alone_and_not_once_it_is_deleted(
    folder: Path,
) -> None:
    one, two = (ToyModel(folder, script=SAID, pace=ONE_AT_A_TIME) for _ in range(2))
    async with pair(one, two) as nodes:
        ann = {"x-kakeya-client": "ann"}
        got = await part_of(nodes.first, 5, extra_headers=ann)
        with pytest.raises(openai.NotFoundError):
            await nodes.second.openai.responses.retrieve(id_of(got))
        seen = await nodes.second.openai.responses.retrieve(id_of(got), extra_headers=ann)
        assert seen.id == id_of(got)
        await until(lambda: one.open == 0)
        await until(lambda: not nodes.fleet.is_sending)
        await nodes.second.openai.responses.delete(id_of(got), extra_headers=ann)
        with pytest.raises(openai.NotFoundError):
            await nodes.second.openai.responses.retrieve(id_of(got), extra_headers=ann)
        with pytest.raises(openai.NotFoundError):
            await nodes.second.openai.responses.delete(id_of(got), extra_headers=ann)


@pytest.mark.parametrize("events", [1, 30])
async def test_a_long_complete_answer_is_told_again_to_its_end(folder: Path, events: int) -> None:
    script = SAID * 6
    one, two = (ToyModel(folder, script=script, context_tokens=4096) for _ in range(2))
    async with pair(one, two) as nodes:
        whole = await part_of(nodes.first, 10**6)
        async with asyncio.timeout(20):
            rest = await rest_of(nodes.second, whole[:events])
        assert shown(whole[:events] + rest) == shown(whole)
