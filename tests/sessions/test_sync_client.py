"""The blocking client: the calls of the other one, without a loop of the caller's."""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import TypeVar

import pytest

from kakeya.core.errors import InvalidArgument, NotFound, PeerUnavailable
from kakeya.generation.request import Sampling
from kakeya.sessions.client import Client, GenerateEnd
from kakeya.sessions.sync_client import SyncClient, SyncSession
from tests.sessions.conftest import running_node
from tests.sessions.toy import HashServedModel, expected
from tests.waiting import eventually

T = TypeVar("T")
PROMPT = [3, 1, 4]


async def blocking(work: Callable[[], T]) -> T:
    """Run a program of a thread without a loop."""
    return await asyncio.to_thread(work)


async def run(
    program: str,
    address: str,
    meanwhile: Callable[[asyncio.subprocess.Process], Awaitable[None]] | None = None,
) -> tuple[list[str], str, int | None]:
    """Run a program in a process of its own; its words, its traceback if any, its status."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, address),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    if meanwhile is not None:
        await meanwhile(child)
    said, problems = await child.communicate()
    _, _, traceback = problems.decode().partition("Traceback")  # gRPC may have words of its own
    return said.decode().split(), traceback, child.returncode


async def test_a_session_generates_what_the_asyncio_client_does() -> None:
    async with running_node() as node:

        def program() -> tuple[list[int], int, SyncSession]:
            with SyncClient(node.address) as client, client.create_session() as session:
                assert session.append(PROMPT) == len(PROMPT)
                tokens = list(session.generate(20, temperature=0.7, seed=5))
                return tokens, session.info().history_length, session

        tokens, length, session = await blocking(program)
        assert tokens == expected(PROMPT, 20, sampling=Sampling(temperature=0.7, seed=5))[0]
        assert length == 23
        assert session.last_done is not None
        assert session.last_done.end is GenerateEnd.MAX_TOKENS
        assert session.session_id


async def test_failures_are_those_of_the_other_client() -> None:
    async with running_node() as node:

        def program() -> None:
            with SyncClient(node.address) as client:
                with pytest.raises(NotFound, match="nothing"):
                    client.create_session(model_id="nothing")
                session = client.create_session()
                session.append(PROMPT)
                with pytest.raises(InvalidArgument) as caught:
                    list(session.generate(5, temperature=-1))
                assert caught.value.param == "temperature"
                session.close()
                with pytest.raises(NotFound):
                    session.close()

        await blocking(program)

    def too_late() -> None:
        with (
            SyncClient(node.address) as client,
            pytest.raises(PeerUnavailable, match=r"127\.0\.0\.1"),
        ):
            client.create_session()

    await blocking(too_late)
    with pytest.raises(InvalidArgument, match="client_name"):
        SyncClient("127.0.0.1:1", client_name="é")


async def test_a_generator_that_is_closed_early_ends_the_generation_at_the_node() -> None:
    model = HashServedModel()
    async with running_node(model) as node:

        def program() -> list[int]:
            with SyncClient(node.address) as client, client.create_session() as session:
                session.append(PROMPT)
                with closing(session.generate(5000)) as tokens:
                    taken = [next(tokens), next(tokens)]
                return taken + list(session.generate(3))

        taken = await blocking(program)
        assert taken[:2] == expected(PROMPT, 2)[0]
        assert model.closed_early == 1


CELL = """
import asyncio, sys
from kakeya import SyncClient
async def cell():
    with SyncClient(sys.argv[1]) as client, client.create_session() as session:
        session.append([3, 1, 4])
        print(*session.generate(4))
asyncio.run(cell())
"""


async def test_a_loop_that_runs_in_the_same_thread_does_not_matter() -> None:
    """As in a notebook, whose cells run on a loop."""
    async with running_node() as node:
        said, problems, status = await run(CELL, node.address)
    assert (said, problems, status) == ([str(t) for t in expected(PROMPT, 4)[0]], "", 0)


async def test_threads_share_a_client() -> None:
    async with running_node() as node:
        client = SyncClient(node.address)

        def program(first: int) -> list[int]:
            with client.create_session() as session:
                session.append([first])
                return list(session.generate(30))

        answers = await asyncio.gather(
            *(asyncio.to_thread(program, first) for first in range(1, 9))
        )
        await blocking(client.close)
    assert answers == [expected([first], 30)[0] for first in range(1, 9)]


CTRL_C = """
import sys
from kakeya import SyncClient
with SyncClient(sys.argv[1]) as client, client.create_session() as session:
    session.append([3, 1, 4])
    try:
        print("waiting", flush=True)
        for token in session.generate(5000):
            pass
    except KeyboardInterrupt:
        print("left", flush=True)
    print(session.info().history_length)
"""


async def test_ctrl_c_ends_the_wait_and_cancels_the_call() -> None:
    model = HashServedModel(gate=asyncio.Event())
    async with running_node(model) as node:

        async def interrupt(child: asyncio.subprocess.Process) -> None:
            await eventually("the generation waits", lambda: len(model.requests) == 1)
            child.send_signal(signal.SIGINT)

        said, problems, status = await run(CTRL_C, node.address, interrupt)
        assert (said, problems, status) == (["waiting", "left", "3"], "", 0)
        assert model.closed_early == 1


LEFT = """
import sys
from kakeya import SyncClient
client = SyncClient(sys.argv[1])
session = client.create_session()
session.append([3, 1, 4])
tokens = session.generate(5000)
print(next(tokens))
"""


async def test_a_program_that_closes_nothing_ends() -> None:
    async with running_node() as node:
        said, problems, status = await run(LEFT, node.address)
    assert (said, problems, status) == ([str(expected(PROMPT, 1)[0][0])], "", 0)


def test_arguments_and_words_are_those_of_the_other_client() -> None:
    for name in ("create_session", "warm", "watch", "__init__"):
        here, there = getattr(SyncClient, name), getattr(Client, name)
        assert inspect.signature(here).parameters == inspect.signature(there).parameters
        assert here.__doc__ == there.__doc__
