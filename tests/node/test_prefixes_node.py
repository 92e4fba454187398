"""Prefix reuse with a real engine: no block of a shared prompt is computed twice, whatever dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from kakeya.generation.frames import Done, Progress
from kakeya.generation.kv import KvOffer
from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.generation.spec import ModelRole, ModelSpec
from kakeya.prefix.names.naming import Naming
from kakeya.prefix.pages.counts import Source
from kakeya.prefix.request import flights, turns
from tests.fakes import set_by
from tests.mlx.random_models import VOCAB, write_model
from tests.prefix.world import Answer, Node, ask, node, take, text

pytestmark = pytest.mark.asyncio(loop_scope="module")
SHARED = 2000
BLOCK = 256


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    """Nothing here is about a leader that stalls: a busy machine may stall one."""

    def patience_for(naming: Naming, index: int) -> flights.Patience:
        return replace(flights.patience_for(naming, index), fair_s=60.0)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(turns, "patience_for", patience_for)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    async with node(tmp_path_factory.mktemp("node")) as made:
        await made.named()
        yield made


def grid(world: Node) -> int:
    """From whose boundaries an engine goes on within a block."""
    assert world.model.facts is not None
    return world.model.facts.prefill_chunk_tokens


class Nothing:
    """The exchange of a request that begins from nothing and leaves nothing."""

    async def offer(self, token_ids: Sequence[int], pid: int) -> KvOffer:
        return KvOffer()

    def imported(self, tokens: int) -> None: ...

    def exported(self, index: int, tokens: int) -> None: ...

    def ended(self) -> None: ...


async def test_of_eight_at_once_nothing_shared_is_computed_twice(world: Node) -> None:
    shared, counts = text(1, SHARED), world.prefixes.counts
    prompts = [shared + text(100 + i, 10 + i) for i in range(8)]
    committed, rolled_back = counts.committed, counts.rolled_back
    answers = await asyncio.gather(*(ask(world, prompt, cuts=(SHARED,)) for prompt in prompts))
    # Seven blocks and what ends at the cut are everybody's, and each has a tail of its own.
    assert counts.committed - committed == SHARED // BLOCK + 1 + 8
    assert counts.rolled_back == rolled_back
    assert counts.waits >= 7
    leader, *followers = sorted(answers, key=lambda answer: answer.cached)
    assert leader.cached == 0
    assert {answer.cached for answer in followers} == {SHARED}
    await world.settled()
    world.check_conserved()
    # It is what each says with nothing to begin from.
    alone = await ask(world, prompts[3], kv=Nothing(), cuts=(SHARED,))
    assert alone.cached == 0
    assert alone.tokens == answers[3].tokens


async def test_a_repeated_prompt_is_all_there(world: Node) -> None:
    prompt = text(2, 300)
    cold, warm = await ask(world, prompt), await ask(world, prompt)
    assert (cold.cached, warm.cached) == (0, 299)
    assert cold.tokens == warm.tokens


async def test_of_equal_prompts_at_once_one_is_computed(world: Node) -> None:
    prompt = text(3, 300)
    answers = await asyncio.gather(*(ask(world, prompt) for _ in range(5)))
    assert sorted(answer.computed for answer in answers) == [1, 1, 1, 1, 300]
    assert len({tuple(answer.tokens) for answer in answers}) == 1


async def lead(world: Node, prompt: list[int], has_begun: asyncio.Event) -> None:
    request = DecodeRequest(token_ids=prompt, max_tokens=2)
    async with aclosing(world.model.decode(request)) as frames:
        async for frame in frames:
            if isinstance(frame, Progress) and frame.computed_tokens >= BLOCK:
                has_begun.set()


async def test_when_the_leader_is_cancelled_the_next_one_leads(world: Node) -> None:
    for seed in range(400, 430):
        shared, has_begun = text(seed, 1000), asyncio.Event()
        leader = asyncio.create_task(lead(world, shared + text(5, 30), has_begun))
        await set_by(leader, has_begun)
        follower = asyncio.create_task(ask(world, shared + text(6, 30)))
        gone = asyncio.create_task(ask(world, shared + text(7, 30)))
        while world.prefixes.waiting < 2 and not follower.done():
            await asyncio.sleep(0)
        if not (leader.done() or follower.done()):
            break  # else the engine was done before this process heard of its first block
        await asyncio.gather(leader, follower, gone)
    leader.cancel()
    gone.cancel()  # one that only waits
    ended = await asyncio.gather(leader, gone, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ended)
    answer = await follower
    assert BLOCK <= answer.cached < 1000
    await world.settled()
    world.check_conserved()


async def ask_while_warming(world: Node, shared: list[int]) -> tuple[Answer, Answer]:
    """Ask for a prompt when the first block of its beginning, which is warmed, is in pages."""
    warmed, committed = Answer(len(shared)), world.prefixes.counts.committed

    async def warm() -> None:
        request = DecodeRequest(
            token_ids=shared, max_tokens=0, priority=GenerationPriority.SPECULATIVE
        )
        async with aclosing(world.model.decode(request)) as frames:
            async for frame in frames:
                take(warmed, frame)

    warming = asyncio.create_task(warm())
    while world.prefixes.counts.committed == committed:
        await asyncio.sleep(0)
    asked = await ask(world, shared + text(10, 30))
    await warming
    return asked, warmed


async def test_a_request_does_not_wait_for_work_ahead_of_requests(world: Node) -> None:
    flights = world.prefixes.turns.flights
    supersedings = flights.supersedings
    for seed in range(300, 330):
        shared = text(seed, 1000)
        asked, warmed = await ask_while_warming(world, shared)
        assert asked.cached >= BLOCK
        await world.settled()
        if flights.supersedings != supersedings:
            break  # else the engine was done before this process heard of its first block
    assert flights.supersedings == supersedings + 1
    # The tokens that it was to compute were there in the end.
    assert warmed.cached > len(shared) - grid(world)
    world.check_conserved()


async def ask_and_kill(world: Node, prompts: list[list[int]], cut: int) -> list[Answer]:
    """Ask all at once, and kill the engine once two blocks of the first are in pages."""
    committed = world.prefixes.counts.committed
    tasks = [asyncio.create_task(ask(world, prompt, cuts=(cut,))) for prompt in prompts]
    while world.prefixes.counts.committed < committed + 2:
        await asyncio.sleep(0)  # at once: on a busy machine the leader is done a moment later
    os.kill(world.model.pid, signal.SIGKILL)
    return await asyncio.gather(*tasks)


@pytest.mark.slow
async def test_an_engine_killed_in_the_middle_goes_on_from_what_is_in_pages(world: Node) -> None:
    counts = world.prefixes.counts
    for seed in range(110, 120):
        shared = text(seed, 1500)
        prompts = [shared + text(200 + i, 20) for i in range(4)]
        committed = counts.committed
        answers = await ask_and_kill(world, prompts, len(shared))
        leader, *followers = sorted(answers, key=lambda answer: answer.cached)
        await world.settled()
        if leader.cached:
            break  # else the engine was done before this process heard of its second block
    assert leader.cached >= 2 * BLOCK
    assert all(answer.cached == len(shared) for answer in followers)
    assert counts.committed - committed == len(shared) // BLOCK + 1 + 4
    world.check_conserved()
    repeated = await ask(world, prompts[0], cuts=(len(shared),))
    assert repeated.cached == len(prompts[0]) - 1
    assert repeated.tokens == answers[0].tokens


async def test_a_conversation_goes_on_from_its_live_kv(world: Node) -> None:
    prompt = text(12, 300)
    live = world.prefixes.counts.tokens[Source.LIVE]
    first = await ask(world, prompt, 4, kv_key="slot:1")
    second = await ask(world, [*prompt, *first.tokens, *text(13, 20)], 1, kv_key="slot:1")
    assert second.cached == len(prompt) + 3
    assert world.prefixes.counts.tokens[Source.LIVE] - live == second.cached
    await world.settled()
    world.check_conserved()


@pytest.mark.slow
async def test_a_node_that_is_started_again_reads_its_prompts_from_disk(tmp_path: Path) -> None:
    prompt, cuts = text(20, 600), (500,)
    async with node(tmp_path) as first:
        await first.model.ready(60)
        assert not first.pages.arena.snapshot().pool.total_pages  # nothing is stored, nobody asks
        cold = await ask(first, prompt, cuts=cuts)
        await first.settled()
    async with node(tmp_path) as second:
        await second.model.ready(60)
        async with asyncio.timeout(60):
            while not second.pages.arena.snapshot().pool.total_pages:
                await asyncio.sleep(0.02)
        warm = await ask(second, prompt, cuts=cuts)
        assert warm.cached == len(prompt) - 1
        assert warm.tokens == cold.tokens
        tokens = second.prefixes.counts.tokens  # some may have come before they were asked for
        assert tokens[Source.DISK] + tokens[Source.PAGES] == len(prompt) - 1
        assert (await ask(second, prompt[:500] + text(21, 40), cuts=cuts)).cached == 500
        await second.settled()
        second.check_conserved()


async def test_a_warmed_prompt_has_no_tokens_and_one_end(world: Node) -> None:
    prompt = text(30, 300)
    request = DecodeRequest(token_ids=prompt, max_tokens=0, priority=GenerationPriority.SPECULATIVE)
    frames = [frame async for frame in world.model.decode(request)]
    assert [type(frame) for frame in frames if not isinstance(frame, Progress)] == [Done]
    assert (await ask(world, prompt)).cached == len(prompt) - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["falcon_h1", "gemma3"])
async def test_with_windows_and_state_too_all_of_a_shared_prompt_is_computed_once(
    tmp_path: Path, name: str
) -> None:
    await asyncio.to_thread(write_model, tmp_path / name, name)
    spec = ModelSpec(model_id=name, source=str(tmp_path / name), role=ModelRole.VERIFIER)
    shared = few(1, 200)
    async with node(tmp_path / "node", spec=spec) as first:
        await first.named()
        for begin in (10, 20):  # cold, and after a kill
            prompts = [shared + few(begin + i, 20) for i in range(4)]
            answers = await asyncio.gather(*(ask(first, p, cuts=(200,)) for p in prompts))
            assert sorted(answer.cached for answer in answers)[1:] == [200] * 3
            assert sum(answer.cached == 0 for answer in answers) == (begin == 10)
            if begin == 10:
                os.kill(first.model.pid, signal.SIGKILL)
        # The next turn goes on from where the prompt of this one ended.
        following = [*prompts[0], *few(30, 20)]
        turn = await ask(first, following, cuts=(200, 219))
        assert turn.cached == 219
        await first.settled()
        first.check_conserved()


def few(seed: int, length: int) -> list[int]:
    return [5 + token % (VOCAB - 5) for token in text(seed, length)]
