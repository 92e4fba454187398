"""One generation over fake engines: what it holds and waits for, and what its caller sees."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from kakeya.backends.attempt import Attempt
from kakeya.core.errors import MemoryRefused, PeerUnavailable
from kakeya.generation.frames import Done, Frame, StopReason, Tokens, Usage
from kakeya.generation.kv import KvOffer
from kakeya.generation.request import DecodeRequest
from kakeya.generation.waiting import WaitReason, WaitTeller
from tests.backends.fake_model import FakeEngine, FakeModel
from tests.fakes import FakeClock

REQUEST = DecodeRequest(token_ids=[1, 2], max_tokens=3, deadline_s=60)
USAGE = Usage(total_s=0.5)


async def count_on(request: DecodeRequest, _: KvOffer) -> AsyncGenerator[Frame, None]:
    for number in range(request.max_tokens):
        yield Tokens(token_ids=(len(request.token_ids) + number,))
    yield Done(reason=StopReason.MAX_TOKENS, usage=USAGE)


async def die(request: DecodeRequest, _: KvOffer) -> AsyncGenerator[Frame, None]:
    yield Tokens(token_ids=(len(request.token_ids),))
    raise PeerUnavailable("it died")


async def refuse(_: DecodeRequest, __: KvOffer) -> AsyncGenerator[Frame, None]:
    raise MemoryRefused("others need the room", retry_after_s=30.0)
    yield


class HeldModel(FakeModel):
    """Says what is held of it."""

    is_held = False
    may_be_had = asyncio.Event()

    @asynccontextmanager
    async def lend_for(self, request: DecodeRequest) -> AsyncIterator[FakeModel]:
        await self.may_be_had.wait()
        self.is_held = True
        try:
            yield self
        finally:
            self.is_held = False

    @property
    def is_free(self) -> bool:
        return not self.is_held and self.gate.running == self.gate.waiting == 0


@pytest.fixture
def model() -> HeldModel:
    made = HeldModel(count_on, clock=FakeClock())
    made.may_be_had = asyncio.Event()
    made.may_be_had.set()
    return made


def tokens(frames: list[Frame]) -> list[int]:
    return [token for frame in frames if isinstance(frame, Tokens) for token in frame.token_ids]


async def test_nothing_is_held_when_the_last_frame_comes_and_usage_is_told_once(
    model: HeldModel,
) -> None:
    told: list[Usage] = []
    frames: list[Frame] = []
    async with aclosing(model.decode(REQUEST, on_usage=told.append)) as decoded:
        async for frame in decoded:
            frames.append(frame)
            assert model.is_free == isinstance(frame, Done)
    assert tokens(frames) == [2, 3, 4]
    assert told == [USAGE]


async def test_leaving_early_gives_everything_back_and_tells_no_usage(model: HeldModel) -> None:
    told: list[Usage] = []
    decoded = model.decode(REQUEST, on_usage=told.append)
    await anext(decoded)
    assert not model.is_free
    await decoded.aclose()
    assert model.is_free
    assert told == []


async def test_another_engine_goes_on_from_what_was_committed_within_the_same_place(
    model: HeldModel,
) -> None:
    model.engine = FakeEngine(die)
    model.next_engine = lambda: FakeEngine(count_on)
    frames = [frame async for frame in model.decode(REQUEST)]
    assert tokens(frames) == [2, 3, 4]
    assert model.losses == ["it died"]


async def test_one_that_makes_way_pauses_and_goes_on(model: HeldModel) -> None:
    model.engine = FakeEngine(refuse)
    began_mono = model.clock.mono()

    async def reborn() -> None:
        await model.clock.sleep(10.0)
        model.engine = FakeEngine(count_on)

    coming = asyncio.create_task(reborn())
    frames = [frame async for frame in model.decode(REQUEST)]
    await coming
    assert tokens(frames) == [2, 3, 4]
    assert model.clock.mono() - began_mono == pytest.approx(30.0)


async def test_it_says_what_it_waits_for(model: HeldModel) -> None:
    model.may_be_had.clear()
    teller = WaitTeller(model.waits_for)
    attempt = Attempt(replace(REQUEST, wait=teller), model, clock=model.clock)
    async with aclosing(attempt.frames()) as frames:
        first = asyncio.ensure_future(anext(frames))
        await asyncio.sleep(0)
        assert attempt.waits_for is WaitReason.MEMORY
        model.gate.hold()
        model.may_be_had.set()
        await asyncio.sleep(0.01)
        assert attempt.waits_for is WaitReason.HELD
        assert teller.describe() == "memory for generations, fake"
        model.gate.resume()
        await first
        assert attempt.waits_for is None
        assert teller.describe() == ""
