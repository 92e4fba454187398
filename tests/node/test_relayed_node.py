"""Two real nodes: one has a cloud, commands and no model; what the other is asked for them, the
first answers, as far as its owner shares it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from tests.backends.relay.upstream import Exchange, Upstream, says, stalls, upstream
from tests.node.nodes import QUICK, NodeProcess, client_of, run_cli, seen_by
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
HELLO = [{"role": "user", "content": "hello"}]
BACKENDS = """
[clouds.west]
url = "{url}"
models = ["large"]
shared = true

[clouds.private]
url = "{url}"
models = ["large"]

[commands.up]
argv = ["tr", "a-z", "A-Z"]
shared = true

[commands.bad]
argv = ["sh", "-c", "echo it is broken >&2; exit 3"]
shared = true

[commands.secret]
argv = ["cat"]
"""


class World:
    """A front node without backends, the node with them, and its cloud."""

    def __init__(self, front: NodeProcess, mini: NodeProcess, west: Upstream) -> None:
        self.front, self.mini, self.west = front, mini, west
        self.openai = client_of(front)
        self.left = asyncio.Event()

    async def said(self, model: str, **more: Any) -> Any:
        return await self.openai.chat.completions.create(model=model, messages=HELLO, **more)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("relayed")
    left = asyncio.Event()

    async def respond(one: Exchange) -> None:
        if "stall" in json.dumps(one.body):
            await stalls(one)
            left.set()
        else:
            await says("salt", " water")(one)

    async with upstream(respond) as west:
        config = folder / "mini.toml"
        config.write_text(BACKENDS.format(url=west.url))
        plain = ("--proposer", "ngram", *QUICK)
        front = NodeProcess(folder / "front", "--node-id", "front", *plain)
        async with front:
            flags = ("--node-id", "mini", "--peer", front.grpc, "--config", str(config), *plain)
            async with NodeProcess(folder / "mini", *flags) as mini:
                await eventually(
                    "the front hears of what the mini shares",
                    lambda: "cloud:west/large" in str(seen_by(front).get("mini")),
                )
                found = World(front, mini, west)
                found.left = left
                async with found.openai:
                    yield found


async def test_what_a_peer_shares_is_listed_with_its_node_and_the_rest_is_told_to_no_node(
    world: World,
) -> None:
    listed = world.front.api.get("/v1/models")["data"]
    assert [(one["id"], one["kind"], one["nodes"]) for one in listed] == [
        ("bad", "commands", ["mini"]),
        ("cloud:west/large", "clouds", ["mini"]),
        ("up", "commands", ["mini"]),
    ]
    own = {one["id"]: "nodes" in one for one in world.mini.api.get("/v1/models")["data"]}
    assert own == dict.fromkeys(
        ("cloud:west/large", "cloud:private/large", "up", "bad", "secret"), False
    )
    card = str(seen_by(world.front)["mini"])
    assert "secret" not in card
    assert "private" not in card
    for name in ("secret", "cloud:private/large"):
        with pytest.raises(openai.NotFoundError):
            await world.said(name)


async def test_each_dialect_is_answered_through_the_peer(world: World) -> None:
    whole = await world.said("up")
    assert whole.choices[0].message.content == "HELLO"
    cloud = await world.said("cloud:west/large")
    assert cloud.choices[0].message.content == "salt water"
    assert (cloud.usage.prompt_tokens, cloud.usage.completion_tokens) == (7, 2)
    pieces = [
        chunk.choices[0].delta.content
        async for chunk in await world.said("cloud:west/large", stream=True)
        if chunk.choices and chunk.choices[0].delta.content
    ]
    assert pieces == ["salt", " water"]
    response = await world.openai.responses.create(model="up", input="hello")
    assert response.output_text == "HELLO"
    async with httpx.AsyncClient(
        base_url=f"http://{world.front.http}", trust_env=False, timeout=60
    ) as http:
        body = {"model": "up", "messages": HELLO, "max_tokens": 9}
        message = await http.post("/v1/messages", json=body)
        assert message.json()["content"][0]["text"] == "HELLO"
        assert message.headers["x-kakeya-ignored"] == "max_tokens"
        explained = await http.get(f"/api/v1/requests/{whole.id}")
    assert explained.json()["backend"] == "mini"
    said = await asyncio.to_thread(run_cli, "explain", whole.id, "--node", world.front.http)
    assert "mini" in said.stdout


async def test_errors_keep_their_types(world: World) -> None:
    with pytest.raises(openai.InternalServerError, match="ended with 3: it is broken") as failed:
        await world.said("bad")
    assert failed.value.status_code == 502
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        await world.said("up", logprobs=True)
    with pytest.raises(openai.NotFoundError):
        await world.said("cloud:west/small")


async def test_a_client_that_leaves_ends_the_work_of_the_cloud(world: World) -> None:
    stream = await world.openai.chat.completions.create(
        model="cloud:west/large", messages=[{"role": "user", "content": "stall"}], stream=True
    )
    await anext(aiter(stream))
    await stream.close()
    async with asyncio.timeout(60):
        await world.left.wait()


async def test_a_node_that_leaves_takes_its_backends_along(world: World) -> None:
    """Last in this file."""
    assert await world.mini.stop() == 0
    await eventually("its models are gone", lambda: not world.front.api.get("/v1/models")["data"])
    with pytest.raises(openai.NotFoundError):
        await world.said("up")
