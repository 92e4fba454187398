"""Three real nodes: one without the model, two with it and with trained adapters. A model with an
adapter is named at the first as at the nodes that have it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio

from kakeya.sessions.client import Client
from tests.node.nodes import VERIFIER, NodeProcess, Shelf, client_of, run_cli, shelf_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
TRAINED = Path(__file__).parents[1] / "adapters" / "trained"
BOTH, ONE = f"{VERIFIER}:recipe", f"{VERIFIER}:letter"
PROMPT = "Take two"


async def add(folder: Path, name: str, *more: str) -> None:
    words = ("add", name, "--base", VERIFIER, "--path", str(TRAINED / name), *more)
    done = await asyncio.to_thread(run_cli, "adapters", *words, "--data-dir", str(folder / "data"))
    assert done.returncode == 0, done.stderr


async def text(node: NodeProcess, model: str, tokens: int = 24) -> str:
    async with client_of(node) as client:
        answer = await client.completions.create(
            model=model, prompt=PROMPT, max_tokens=tokens, temperature=0
        )
    return answer.choices[0].text


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shelf]:
    folder = tmp_path_factory.mktemp("shelf")
    async with shelf_of(folder, VERIFIER) as nodes:
        for name in nodes.minis:
            await add(folder / name, "recipe")
        await add(folder / "left", "letter")
        await add(folder / "right", "march", "--owner", "ann")
        yield nodes


async def names(shelf: Shelf, client: str = "") -> dict[str, str | None]:
    async with client_of(shelf.front, client) as asking:
        return {one.id: getattr(one, "parent", None) async for one in asking.models.list()}


async def test_adapters_of_neighbours_are_listed_for_the_clients_that_may_name_them(
    shelf: Shelf,
) -> None:
    public = {VERIFIER: None, BOTH: VERIFIER, ONE: VERIFIER}
    assert await names(shelf) == public
    assert await names(shelf, "ann") == public | {f"{VERIFIER}:march": VERIFIER}
    with pytest.raises(openai.PermissionDeniedError):
        await text(shelf.front, f"{VERIFIER}:march")
    with pytest.raises(openai.NotFoundError):
        await text(shelf.front, f"{VERIFIER}:none")


async def test_an_adapter_of_a_neighbour_answers_in_every_dialect(shelf: Shelf) -> None:
    import anthropic  # here: it costs each worker of xdist seconds to collect

    front, left = shelf.front, shelf.minis["left"]
    plain = await text(left, VERIFIER)
    for model in (BOTH, ONE):
        here = await text(left, model)
        assert here != plain
        assert await text(front, model) == here
    # A node with the model takes what only its neighbour has the adapter for.
    assert await text(shelf.minis["right"], ONE) == await text(left, ONE)

    story = [{"role": "user", "content": PROMPT}]
    said = []
    for node in (left, front):
        async with client_of(node) as client:
            chat = await client.chat.completions.create(
                model=BOTH,
                messages=story,  # type: ignore[arg-type]
                max_tokens=12,
                temperature=0,
            )
        async with anthropic.AsyncAnthropic(
            base_url=f"http://{node.http}", api_key="none", max_retries=0
        ) as claude:
            message = await claude.messages.create(
                model=BOTH,
                messages=story,  # type: ignore[arg-type]
                max_tokens=12,
                extra_body={"temperature": 0},
            )
        async with httpx.AsyncClient(base_url=f"http://{node.http}", timeout=120) as ollama:
            tags = (await ollama.get("/api/tags")).json()["models"]
            asked = {"model": BOTH, "messages": story, "stream": False}
            options = {"num_predict": 12, "temperature": 0}
            reply = (await ollama.post("/api/chat", json=asked | {"options": options})).json()
        assert BOTH in {one["name"].removesuffix(":latest") for one in tags}
        said.append((chat.choices[0].message.content, message.content[0], reply["message"]))
    assert said[0] == said[1]

    spoken = []
    for node in (left, front):
        async with (
            Client(node.grpc) as calls,
            await calls.create_session(model_id=BOTH) as session,
        ):
            await session.append([5, 6, 7])
            spoken.append([token async for token in session.generate(12)])
    assert spoken[0] == spoken[1]


async def test_an_answer_with_an_adapter_goes_on_at_a_node_with_the_same_adapter(
    shelf: Shelf,
) -> None:
    """Last in this file: one node is gone afterwards."""
    whole = await text(shelf.front, BOTH, tokens=400)
    asked = {"model": BOTH, "prompt": PROMPT, "max_tokens": 400, "temperature": 0}
    async with client_of(shelf.front) as client:
        await shelf.says_over_a_kill(client, whole, **asked)
