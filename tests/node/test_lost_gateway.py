"""Three real nodes. The one that a client is connected to is killed, and the others go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.node.nodes import NodeProcess, Shelf, client_of, metric, shelf_of
from tests.node.test_routed_node import MODEL, STORY, endless
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": STORY,
    "max_tokens": 300,
    "temperature": 0.7,
    "seed": 5,
    "stream": True,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shelf]:
    async with shelf_of(tmp_path_factory.mktemp("shelf"), MODEL) as nodes:
        yield nodes


def copies(*peers: NodeProcess) -> float:
    """Copies of answers in the memory of these nodes."""
    return sum(metric(peer, "kakeya_held_answers") for peer in peers)


async def events(
    node: NodeProcess,
    method: str,
    path: str,
    kill_at: int = 0,
    peers: Sequence[NodeProcess] = (),
    **more: Any,
) -> list[tuple[str, str]]:
    """Ids and bodies of the events that a node streams; it is killed behind so many, 0 = never,
    once one of its peers has a copy."""
    before = await asyncio.to_thread(copies, *peers)
    found: list[tuple[str, str]] = []
    event_id = ""
    async with (
        httpx.AsyncClient(base_url=f"http://{node.http}", timeout=60, trust_env=False) as client,
        client.stream(method, path, **more) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        with contextlib.suppress(httpx.TransportError):
            async for line in answer.aiter_lines():
                if line.startswith("id: "):
                    event_id = line[4:]
                elif line.startswith("data: ") and event_id:
                    found.append((event_id, line[6:]))
                    event_id = ""
                    if len(found) == kill_at:
                        await eventually("a peer has a copy", lambda: copies(*peers) > before)
                        node.send(signal.SIGKILL)
                        break  # what is on its way is lost too
    return found


def said(told: list[tuple[str, str]]) -> list[object]:
    """What each event adds."""
    bodies = [json.loads(body) if body.startswith("{") else body for _, body in told]
    return [
        body if isinstance(body, str) else (body.get("choices"), body.get("delta"))
        for body in bodies
    ]


async def test_the_other_nodes_tell_the_rest_of_a_chat_whose_node_was_killed(shelf: Shelf) -> None:
    path, asked = "/v1/chat/completions", ASKED | {"logit_bias": endless()}
    whole = await events(shelf.front, "POST", path, json=asked)
    peers = tuple(shelf.minis.values())
    got = await events(shelf.front, "POST", path, kill_at=40, peers=peers, json=asked)
    answer_id, _, number = got[-1][0].rpartition(":")
    assert int(number) == len(got) - 1 < len(whole) - 1
    last = {"Last-Event-ID": got[-1][0]}
    by_get = await events(shelf.minis["left"], "GET", f"{path}/{answer_id}", headers=last)
    by_post = await events(shelf.minis["right"], "POST", path, json=asked, headers=last)
    for rest in (by_get, by_post):
        assert said(got + rest) == said(whole)
        assert [one for one, _ in got + rest] == [f"{answer_id}:{n}" for n in range(len(whole))]


async def test_a_response_in_the_background_goes_on_where_it_is_polled(shelf: Shelf) -> None:
    """Behind the test before it, which leaves two nodes; it leaves one."""
    left, right = shelf.minis["left"], shelf.minis["right"]
    asked: dict[str, Any] = {
        "model": MODEL,
        "input": STORY[0]["content"],
        "max_output_tokens": 600,
        "temperature": 0.7,
        "extra_body": {"seed": 5, "logit_bias": endless()},
    }
    async with client_of(right) as client:
        whole = await client.responses.create(**asked)
        before = await asyncio.to_thread(copies, right)
        async with client_of(left) as first:
            begun = await first.responses.create(**asked, background=True)
            while (await first.responses.retrieve(begun.id)).status == "queued":
                await asyncio.sleep(0.01)
        await eventually("its peer has a copy", lambda: copies(right) > before)
        left.send(signal.SIGKILL)
        async with asyncio.timeout(150):
            while True:
                seen = await client.responses.retrieve(begun.id)
                if seen.status not in ("queued", "in_progress"):
                    break
                await asyncio.sleep(0.1)
    assert (seen.status, seen.id) == (whole.status, begun.id)
    assert seen.output_text == whole.output_text
