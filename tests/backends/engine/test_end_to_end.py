"""RuntimeService over a real engine child: what a gRPC client sees when parts die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from contextlib import aclosing

import pytest
from blockbuster import blockbuster_ctx

from kakeya.core.errors import PeerUnavailable
from kakeya.generation.facts import ModelState
from kakeya.generation.request import Sampling
from tests import fork_server
from tests.backends.engine.test_backend import FAST, HUNG_AT_TEN, _lines, backend, is_alive
from tests.sessions.conftest import running_node
from tests.sessions.toy import expected
from tests.waiting import until

PROMPT = [5, 6, 7]


async def test_a_killed_engine_costs_a_grpc_client_time_and_no_token():
    """Rows 29 and 34: the same tokens as without the fault, greedy and sampled."""
    async with backend(*HUNG_AT_TEN) as model, running_node(model) as node:
        for options in ({}, {"temperature": 1.0, "seed": 11}):
            sampling = Sampling(**options)
            async with await node.client.create_session() as session:
                await session.append(PROMPT)
                seen = []
                async for token in session.generate(40, **options):
                    seen.append(token)
                    if len(seen) == 10:
                        os.kill(model.pid, signal.SIGKILL)
                assert seen == expected(PROMPT, 40, sampling=sampling)[0]
                assert session.last_done.generated_tokens == 40
        assert model.restarts == 2
        assert node.service.stats.generates_failed == 0


async def test_a_grpc_client_that_leaves_stops_the_child(tmp_path):
    """Row 26, through both sockets."""
    record = tmp_path / "record"
    async with (
        backend("--delay-s", 0.01, "--record", record) as model,
        running_node(model) as node,
    ):
        session = await node.client.create_session()
        await session.append(PROMPT)
        async with aclosing(session.generate(9000)) as tokens:
            async for _ in tokens:
                break
        await until(lambda: "cancelled" in _lines(record))
        await until(lambda: model.running == 0)
        assert [token async for token in session.generate(2)]
        await session.close()
        await until(lambda: f"release {session.session_id}" in _lines(record))


async def test_a_stopping_server_lets_a_generation_end_at_its_grace():
    """Row 28 here: in flight until the grace is over, then a typed error; no child left."""
    async with backend("--delay-s", 0.01) as model, running_node(model) as node:
        session = await node.client.create_session()
        await session.append(PROMPT)
        seen = []

        async def consume():
            async for token in session.generate(9000):
                seen.append(token)

        reader = asyncio.create_task(consume())
        await until(lambda: len(seen) >= 3)
        child, started = model.pid, time.monotonic()
        node.service.drain("it is shutting down")
        await node.server.stop(0.5)
        with pytest.raises(PeerUnavailable):
            await reader
        assert 0.4 < time.monotonic() - started < 30.0
        assert seen == expected(PROMPT, len(seen))[0]
        await until(lambda: model.running == 0)
    assert not is_alive(child)


async def test_a_model_that_is_given_up_is_unavailable_and_its_sessions_survive():
    async with backend("--delay-s", 0.01, options=FAST) as model, running_node(model) as node:
        session = await node.client.create_session()
        await session.append(PROMPT)
        while model.state is not ModelState.FAILED:
            if model.state is ModelState.READY and model.pid is not None:
                # Gone already, perhaps, and not noticed yet.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(model.pid, signal.SIGKILL)
            await asyncio.sleep(0.02)
        with pytest.raises(PeerUnavailable, match="it died 5 times in 10 minutes"):
            await anext(session.generate(5))
        assert (await session.info()).history_length == 3


async def test_nothing_of_it_blocks_the_agents_event_loop():
    with blockbuster_ctx() as guard:
        fork_server.may_block(guard)
        async with backend("--delay-s", 0.001) as model, running_node(model) as node:
            async with await node.client.create_session() as session:
                await session.append(PROMPT)
                async for _ in session.generate(20):
                    pass
                os.kill(model.pid, signal.SIGKILL)
                assert len([token async for token in session.generate(20)]) == 20
        assert [health.failures for health in model.health()] == [0]
