"""A model with an adapter, over a toy base whose engine forgets: what callers see of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.backends.adapted import AdaptedModel
from kakeya.core.clock import Clock
from kakeya.core.errors import Conflict, InvalidArgument, NotFound, PeerUnavailable
from kakeya.generation.frames import Done, Frame, StopReason, Tokens
from kakeya.generation.kv import KvOffer
from kakeya.generation.request import DecodeRequest
from tests.adapters.world import TINY, World, world
from tests.backends.fake_model import FakeModel
from tests.fakes import SettableClock
from tests.waiting import until

REQUEST = DecodeRequest(token_ids=[1, 2], max_tokens=6)


class Base(FakeModel):
    """Counts on from the last token; knows an adapter only when its engine holds it."""

    def __init__(self, node: World, clock: Clock | None = None) -> None:
        super().__init__(self.count_on, model_id=TINY, clock=clock)
        self.node = node
        self.asked: list[DecodeRequest] = []
        self.each_token: Callable[[int], None] = lambda _: None
        self.is_forgetful = False
        self.tokens = 0

    async def count_on(self, request: DecodeRequest, _: KvOffer) -> AsyncGenerator[Frame, None]:
        self.asked.append(request)
        last = request.token_ids[-1]
        for _ in range(request.max_tokens):
            while request.adapter_id in self.node.engine.loading:
                await asyncio.sleep(0)  # it comes behind that
            if self.is_forgetful or request.adapter_id not in self.node.engine.held:
                raise NotFound(f"adapter {request.adapter_id!r} is not loaded in this engine")
            last += 1
            yield Tokens(token_ids=(last,))
            self.tokens += 1
            self.each_token(self.tokens)
        yield Done(reason=StopReason.MAX_TOKENS)


def adapted(node: World, base: Base, model_id: str) -> AdaptedModel:
    return AdaptedModel(base, model_id, "", node.adapters)


async def said(model: AdaptedModel, request: DecodeRequest = REQUEST) -> list[int]:
    frames = [frame async for frame in model.decode(request)]
    assert isinstance(frames[-1], Done)
    return [token for f in frames if isinstance(f, Tokens) for token in f.token_ids]


async def test_an_engine_that_forgot_is_given_the_adapter_again_and_goes_on(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as node:
        base, model_id = Base(node), await node.add(1)

        def die(tokens: int) -> None:
            if tokens == 3:
                node.engine.restart(node.adapters)

        base.each_token = die
        assert await said(adapted(node, base, model_id)) == [3, 4, 5, 6, 7, 8]
        first, second = base.asked
        assert (list(first.token_ids), first.max_tokens) == ([1, 2], 6)
        assert (list(second.token_ids), second.max_tokens) == ([1, 2, 3, 4, 5], 3)
        assert len(node.engine.loads) == 2
        assert node.adapters.describe(node.adapters.records()[0]).leases == 0


async def test_a_deadline_is_of_the_first_token_however_often_the_engine_forgets(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as node:
        clock = SettableClock()
        base, model_id = Base(node, clock), await node.add(1)

        def forget(tokens: int) -> None:
            if tokens == 3:
                node.engine.restart(node.adapters)

        def load_slowly() -> None:
            clock.advance(10)
            base.is_forgetful = not base.asked

        base.each_token, node.engine.before_load = forget, load_slowly
        model = adapted(node, base, model_id)
        assert await said(model, replace(REQUEST, deadline_s=30)) == [3, 4, 5, 6, 7, 8]
        deadlines_s = [asked.deadline_s for asked in base.asked]
        assert deadlines_s == [pytest.approx(20, abs=5), pytest.approx(10, abs=5), None]


async def test_it_asks_the_engine_as_soon_as_the_load_was_sent(tmp_path: Path) -> None:
    async with world(tmp_path, slots=1) as node:
        base, first = Base(node), await node.add(1)
        second = await node.add(2)
        assert await said(adapted(node, base, first)) == [3, 4, 5, 6, 7, 8]
        loaded = asyncio.Event()
        node.engine.until = loaded
        answer = asyncio.create_task(said(adapted(node, base, second)))
        other = asyncio.create_task(node.adapters.acquire(second))
        await until(lambda: len(base.asked) == 2)
        assert node.engine.loading == {base.asked[1].adapter_id}
        assert not other.done(), "who does not come behind the load waits for its end"
        loaded.set()
        assert await answer == [3, 4, 5, 6, 7, 8]
        (await other).release()
        assert len(node.engine.loads) == 2


async def test_who_comes_while_an_adapter_is_on_its_way_goes_on_at_once_too(tmp_path: Path) -> None:
    async with world(tmp_path, slots=1) as node:
        base, first = Base(node), await node.add(1)
        second = await node.add(2)
        await said(adapted(node, base, first))
        loaded = node.engine.until = asyncio.Event()
        answers = [asyncio.create_task(said(adapted(node, base, second)))]
        await until(lambda: len(base.asked) == 2)
        answers.append(asyncio.create_task(said(adapted(node, base, second))))
        await until(lambda: len(base.asked) == 3)
        loaded.set()
        assert await asyncio.gather(*answers) == [[3, 4, 5, 6, 7, 8]] * 2
        assert len(node.engine.loads) == 2
        assert all(node.adapters.describe(one).leases == 0 for one in node.adapters.records())


async def test_once_a_load_was_refused_nothing_is_sent_behind_it(tmp_path: Path) -> None:
    async with world(tmp_path, slots=2) as node:
        base, first = Base(node), await node.add(1)
        second = await node.add(2)
        await said(adapted(node, base, first))
        node.engine.held["from an answer that was lost"] = b""
        adapter = node.adapters._table.get(node.adapters.find(second).version)
        was_coming, adapters = [], node.engine.adapters
        node.engine.before_load = lambda: was_coming.append(adapter.is_coming)

        async def look() -> tuple[str, ...]:
            was_coming.append(adapter.is_coming)
            return await adapters()

        node.engine.adapters = look
        assert await said(adapted(node, base, second)) == [3, 4, 5, 6, 7, 8]
        assert was_coming == [False] * 3
        assert base.asked[1].adapter_id == adapter.adapter_id, "it was sent behind the first one"


async def test_who_is_told_of_a_failed_load_before_its_answer_waits_for_that(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, slots=1) as node:
        base, first = Base(node), await node.add(1)
        second = await node.add(2)
        await said(adapted(node, base, first))
        answered = node.engine.until = asyncio.Event()
        node.engine.refusal = InvalidArgument("it does not fit the model")
        base.is_forgetful = True
        answer = asyncio.create_task(said(adapted(node, base, second)))
        await until(lambda: bool(node.engine.loading))
        node.engine.loading.clear()  # the request is computed, the load's answer is on its way
        await until(lambda: len(base.asked) == 2)
        await asyncio.sleep(0.02)
        assert not answer.done()
        answered.set()
        with pytest.raises(InvalidArgument, match="does not fit"):
            await answer
        assert len(base.asked) == 2


async def test_the_first_load_of_an_engine_is_waited_for(tmp_path: Path) -> None:
    """It makes the slots, and may find no room for them."""
    async with world(tmp_path) as node:
        base, model_id = Base(node), await node.add(1)
        loaded = node.engine.until = asyncio.Event()
        answer = asyncio.create_task(said(adapted(node, base, model_id)))
        await until(lambda: bool(node.engine.loading))
        await asyncio.sleep(0.02)
        assert not base.asked
        loaded.set()
        assert await answer == [3, 4, 5, 6, 7, 8]


async def test_a_load_that_fails_behind_a_request_is_told_as_it_is(tmp_path: Path) -> None:
    async with world(tmp_path, slots=1) as node:
        base, first = Base(node), await node.add(1)
        second = await node.add(2)
        await said(adapted(node, base, first))
        node.engine.refusal = InvalidArgument("it does not fit the model")
        with pytest.raises(InvalidArgument, match="does not fit"):
            await said(adapted(node, base, second))
        assert len(base.asked) == 2, "the second time it waited for the load"
        assert await said(adapted(node, base, first)) == [3, 4, 5, 6, 7, 8]
        node.engine.refusal = None
        assert await said(adapted(node, base, second)) == [3, 4, 5, 6, 7, 8]
        for record in node.adapters.records():
            assert node.adapters.describe(record).leases == 0


async def test_an_engine_that_dies_in_a_load_with_a_request_behind_it_serves_it_in_the_next(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, slots=1) as node:
        base, first = Base(node), await node.add(1)
        second = await node.add(2)
        await said(adapted(node, base, first))
        loaded = node.engine.until = asyncio.Event()
        answer = asyncio.create_task(said(adapted(node, base, second)))
        await until(lambda: len(base.asked) == 2)
        node.engine.restart(node.adapters)
        node.engine.until = None
        loaded.set()
        assert await answer == [3, 4, 5, 6, 7, 8]
        assert node.arena.snapshot().pool.pinned_pages == 0


async def test_one_that_always_forgets_is_given_up_with_a_sentence(tmp_path: Path) -> None:
    async with world(tmp_path) as node:
        base, model_id = Base(node), await node.add(1)
        base.is_forgetful = True
        with pytest.raises(PeerUnavailable, match=r"forgot adapter .* 3 times in a row"):
            await said(adapted(node, base, model_id))
        assert node.adapters.describe(node.adapters.records()[0]).leases == 0


async def test_a_request_ends_with_the_version_that_it_began_with(tmp_path: Path) -> None:
    async with world(tmp_path) as node:
        base, model_id = Base(node), await node.add(1, name="poet")
        model = adapted(node, base, model_id)
        frames = model.decode(REQUEST)
        await anext(frames)
        old = node.adapters.find(model_id).version
        await node.add(2, name="poet", is_replacing=True)
        rest = [frame async for frame in frames]
        assert isinstance(rest[-1], Done)
        assert [request.adapter_id for request in base.asked] == [old]
        await said(model)
        assert base.asked[-1].adapter_id == node.adapters.find(model_id).version != old


async def test_a_version_that_is_gone_when_its_engine_comes_back_is_said_so(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as node:
        base, model_id = Base(node), await node.add(1, name="poet")
        frames = adapted(node, base, model_id).decode(REQUEST)
        await anext(frames)
        await node.add(2, name="poet", is_replacing=True)
        node.engine.restart(node.adapters)
        with pytest.raises(Conflict, match="send it again"):
            _ = [frame async for frame in frames]


async def test_leaving_early_gives_the_adapter_back(tmp_path: Path) -> None:
    async with world(tmp_path) as node:
        base, model_id = Base(node), await node.add(1)
        frames = adapted(node, base, model_id).decode(REQUEST)
        await anext(frames)
        assert node.adapters.describe(node.adapters.records()[0]).leases == 1
        await frames.aclose()
        assert node.adapters.describe(node.adapters.records()[0]).leases == 0


async def test_a_cancelled_request_gives_the_adapter_back(tmp_path: Path) -> None:
    async with world(tmp_path) as node:
        base, model_id = Base(node), await node.add(1)
        is_there = asyncio.Event()
        base.each_token = lambda _: is_there.set()

        async def read() -> None:
            async for _ in adapted(node, base, model_id).decode(REQUEST):
                await asyncio.sleep(0.05)

        reading = asyncio.ensure_future(read())
        async with asyncio.timeout(60):
            await is_there.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            while node.adapters.describe(node.adapters.records()[0]).leases:
                await asyncio.sleep(0.005)
