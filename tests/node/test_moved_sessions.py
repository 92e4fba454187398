"""gRPC sessions over the drain of their node: real nodes, real KV."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kakeya.node.datadir import is_left
from kakeya.sessions.client import Client, ClientSession
from tests.node.nodes import replaceable, run_cli, successor
from tests.waiting import eventually

TURNS = ([5, 6, 7] * 40, [8, 9] * 10, [10, 11] * 10, [12] * 5)
TOKENS = 24


async def turn(session: ClientSession, more: list[int]) -> list[int]:
    await session.append(more)
    return [token async for token in session.generate(TOKENS, seed=3, temperature=0.7)]


async def undisturbed(address: str) -> list[list[int]]:
    async with Client(address) as client, await client.create_session() as session:
        return [await turn(session, more) for more in TURNS]


@pytest.mark.slow
async def test_a_session_goes_on_at_a_peer_and_at_the_node_that_replaces_its_own(
    tmp_path: Path,
) -> None:
    async with replaceable(tmp_path) as (peer, old), AsyncExitStack() as stack:
        known = await undisturbed(peer.grpc)

        client = await stack.enter_async_context(Client(old.grpc))
        near, far = [await client.create_session() for _ in range(2)]
        for session in (near, far):
            assert await turn(session, TURNS[0]) == known[0]
        data = tmp_path / "node" / "data"
        draining = asyncio.create_task(
            asyncio.to_thread(
                run_cli, "drain", "--until-replaced", "--data-dir", str(data), "--json"
            )
        )
        await eventually("it is drained", lambda: is_left(data))
        # The node that is drained passes on what is asked of it.
        assert await turn(near, TURNS[1]) == known[1]
        new = await stack.enter_async_context(successor(tmp_path, peer, old))
        drained = await draining
        assert json.loads(drained.stdout)["cut_off"] == 0, drained
        assert await old.wait() == 0

        again = await stack.enter_async_context(Client(new.grpc))
        near = await again.resume_session(near.session_id)
        assert await turn(near, TURNS[2]) == known[2]
        there = await stack.enter_async_context(Client(peer.grpc))
        far = await there.resume_session(far.session_id)
        assert await turn(far, TURNS[1]) == known[1]
        for session in (near, far):
            await session.close()
