"""KV of who makes place lies in the node's pages and comes back, with a real engine; no page stays
behind, whatever dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
import pytest_asyncio

from kakeya.backends.engine.kv_lender import KvLender
from kakeya.backends.engine.process import Command
from kakeya.backends.engines import engine_command
from kakeya.core.units import KV_BLOCK_TOKENS
from kakeya.generation.frames import Tokens
from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.generation.spec import ModelSpec
from tests.fakes import set_by
from tests.prefix.world import Answer, Node, ask, node, take, text

pytestmark = pytest.mark.asyncio(loop_scope="module")
BATCH, URGENT = 1000, 1100
TOKENS, BATCH_TOKENS = 40, 400
"""The batch has to be at work still when the urgent one comes, on a busy machine too."""


def command(spec: ModelSpec, resolved: str) -> Command:
    """An engine that waits for pages: a busy agent may need more than its moment to lend them."""
    real = engine_command("text")(spec, resolved)
    return lambda socket: (sys.executable, "-m", "tests.node.child_parking", *real(socket)[3:])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    async with node(tmp_path_factory.mktemp("node"), command=command) as made:
        facts = await made.named()
        backend = made.model.backend
        # Room for one of them.
        assert backend is not None
        bound = facts.kv_bytes_per_token * KV_BLOCK_TOKENS * 7
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(KvLender, "most_bytes", lambda _: bound)
            await backend.set_limits(kv_bytes=bound, kv_most_bytes=bound)
            yield made


def parked(world: Node) -> int:
    """Pages that hold KV of those that were set aside."""
    given = [exchange.given for exchange in world.prefixes._exchanges]
    return sum(len(one.parked) for one in given if one is not None)


class Batch:
    """A generation that is set aside in the middle of its answer."""

    def __init__(self, world: Node, seed: int) -> None:
        self.prompt = text(seed, BATCH)
        self._world = world
        self._begin()

    def _begin(self) -> None:
        self.answer = Answer(BATCH)
        self._has_spoken = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        request = DecodeRequest(
            token_ids=self.prompt,
            max_tokens=BATCH_TOKENS,
            priority=GenerationPriority.BATCH,
            client="batch",
        )
        async with aclosing(self._world.model.decode(request)) as frames:
            async for frame in frames:
                take(self.answer, frame)
                if isinstance(frame, Tokens):
                    self._has_spoken.set()

    async def until_parked(self, seed: int) -> asyncio.Task[Answer]:
        """Have an urgent one take its place and its room."""
        for _ in range(5):
            await set_by(self.task, self._has_spoken)
            prompt = text(seed, URGENT)
            urgent = asyncio.create_task(
                ask(
                    self._world, prompt, TOKENS, priority=GenerationPriority.URGENT, client="urgent"
                )
            )
            while not (self.task.done() or urgent.done()):
                if parked(self._world):
                    return urgent
                await asyncio.sleep(0.001)
            await asyncio.gather(self.task, urgent)
            self._begin()  # it was done before the urgent one came
        raise AssertionError("it was never set aside")


@pytest.mark.slow
async def test_it_goes_on_from_there_and_nothing_is_computed_again(world, caplog):
    caplog.set_level(logging.INFO)
    batch = Batch(world, 1)
    urgent = await batch.until_parked(2)
    assert len((await urgent).tokens) == TOKENS
    await batch.task
    assert not [one for one in caplog.records if "makes way" in one.message]
    assert parked(world) == 0
    await world.settled()
    world.check_conserved()
    alone = await ask(world, batch.prompt, BATCH_TOKENS)
    assert batch.answer.tokens == alone.tokens
    assert batch.answer.usage.forwards <= BATCH_TOKENS


async def test_one_that_is_given_up_meanwhile_leaves_no_page_behind(world):
    batch = Batch(world, 3)
    urgent = await batch.until_parked(4)
    batch.task.cancel()
    await asyncio.gather(batch.task, return_exceptions=True)
    assert len((await urgent).tokens) == TOKENS
    await world.settled()
    world.check_conserved()


@pytest.mark.slow
async def test_when_the_engine_dies_meanwhile_both_go_on_and_no_page_stays(world):
    batch = Batch(world, 5)
    urgent = await batch.until_parked(6)
    assert world.model.pid is not None
    os.kill(world.model.pid, signal.SIGKILL)
    assert len((await urgent).tokens) == TOKENS
    await batch.task
    await world.settled()
    world.check_conserved()
    assert batch.answer.tokens == (await ask(world, batch.prompt, BATCH_TOKENS)).tokens
