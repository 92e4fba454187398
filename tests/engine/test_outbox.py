"""When frames of a generation leave for the wire, and how many go together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.core.errors import MemoryRefused
from kakeya.engine.outbox import Outbox
from kakeya.generation.engine_wire import frames_from_wire
from kakeya.generation.frames import (
    Done,
    EngineFrame,
    HistoryLogits,
    KvExported,
    KvImported,
    Progress,
    StopReason,
    TokenLogprob,
    Tokens,
)
from kakeya.v1 import engine_pb2 as pb
from tests.engine.rig import frames_of

DONE = Done(reason=StopReason.MAX_TOKENS)


def tokens(*token_ids: int) -> Tokens:
    return Tokens(token_ids=token_ids)


def outbox_of_this_loop() -> Outbox:
    """One that holds back for longer than any test waits."""
    return Outbox(asyncio.get_running_loop(), frame_s=3600.0)


async def sent(outbox: Outbox) -> list[str | None]:
    """What leaves until nothing more is going to."""
    kinds: list[str | None] = []
    responses: AsyncIterator[pb.DecodeResponse] = aiter(outbox)
    while True:
        coming = asyncio.ensure_future(anext(responses))
        await asyncio.wait((coming,), timeout=0.05)
        for _ in range(100):  # where the machine stalled, what was due meanwhile comes first
            await asyncio.sleep(0)
        if not coming.done():
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
            return kinds
        kinds += [frame.WhichOneof("frame") for frame in frames_of(coming.result())]
        if kinds[-1] == "done":
            return kinds


async def put(*frames: EngineFrame) -> Outbox:
    """Frames that come one after the other, each once the loop has seen the one before."""
    outbox = outbox_of_this_loop()
    loop = asyncio.get_running_loop()

    def add(rest: tuple[EngineFrame, ...], passes: int = 0) -> None:
        if passes:
            loop.call_soon(add, rest, passes - 1)
        elif rest:
            outbox.put(rest[0])
            loop.call_soon(add, rest[1:], 10)

    loop.call_soon(add, frames)
    return outbox


def progress(computed: int, *, cached: int) -> Progress:
    return Progress(computed_tokens=computed, total_tokens=9, cached_tokens=cached)


async def test_what_was_imported_waits_for_the_next_frame() -> None:
    assert await sent(await put(KvImported(tokens=8))) == []
    assert await sent(await put(KvImported(tokens=8), progress(8, cached=8))) == []
    whole = await put(KvImported(tokens=8), progress(8, cached=8), progress(9, cached=8))
    assert await sent(whole) == ["imported", "progress", "progress"]


async def test_the_logits_behind_a_prompt_wait_for_the_next_frame() -> None:
    logits = HistoryLogits(logits=bytes(8))
    assert await sent(await put(tokens(1), logits)) == ["tokens"]
    assert await sent(await put(tokens(1), logits, DONE)) == ["tokens", "logits", "done"]
    assert await sent(await put(tokens(1), logits, tokens(2), DONE)) == [
        "tokens",
        "logits",
        "tokens",
        "done",
    ]


async def test_the_first_tokens_leave_at_once_also_behind_other_frames() -> None:
    outbox = await put(
        progress(4, cached=0),
        KvExported(index=0),
        tokens(1),
        tokens(2),
    )
    assert await sent(outbox) == ["progress", "exported", "tokens"]


async def test_log_probabilities_leave_with_their_tokens() -> None:
    made = [Tokens(token_ids=(at,), logprobs=(TokenLogprob(logprob=-at),)) for at in range(3)]
    outbox = await put(*made, DONE)
    frames = [frame async for message in outbox for frame in frames_from_wire(message)]
    told = [each for frame in frames if isinstance(frame, Tokens) for each in frame.logprobs]
    assert told == [TokenLogprob(logprob=-at) for at in range(3)]


async def test_the_end_leaves_at_once_with_all_that_was_held_back() -> None:
    outbox = await put(tokens(1), tokens(2), tokens(3), DONE)
    assert await sent(outbox) == ["tokens", "tokens", "done"]


async def test_an_error_leaves_at_once_behind_the_tokens_in_front_of_it() -> None:
    outbox = await put(tokens(1))
    responses: AsyncIterator[pb.DecodeResponse] = aiter(outbox)
    async with asyncio.timeout(60):
        assert (await anext(responses)).tokens.token_ids == [1]
        outbox.put(tokens(2))
        outbox.fail(MemoryRefused("it has to make way"))
        assert (await anext(responses)).tokens.token_ids == [2]
        with pytest.raises(MemoryRefused):
            await anext(responses)


class CountedLoop:
    """What an outbox calls of a loop; counts how often it is woken."""

    def __init__(self) -> None:
        self.calls = 0
        self._loop = asyncio.get_running_loop()

    def call_soon_threadsafe(self, call: Callable[[], object]) -> None:
        self.calls += 1
        self._loop.call_soon_threadsafe(call)


async def test_nobody_wakes_the_loop_while_it_holds_tokens_back() -> None:
    loop = CountedLoop()
    outbox = Outbox(loop, frame_s=3600.0)  # type: ignore[arg-type]
    responses = aiter(outbox)
    async with asyncio.timeout(60):
        outbox.put(tokens(0))
        assert (await anext(responses)).tokens.token_ids == [0]
        coming = asyncio.ensure_future(anext(responses))
        await asyncio.sleep(0)
        woken = loop.calls
        for token in range(1, 50):
            outbox.put(tokens(token))
        assert loop.calls == woken
        outbox.put(DONE)
        held_back, end = frames_of(await coming)
        assert held_back.tokens.token_ids == list(range(1, 50))
        assert end.HasField("done")


async def test_what_is_there_when_a_message_leaves_goes_with_it() -> None:
    outbox = outbox_of_this_loop()
    for frame in (KvImported(tokens=8), KvExported(index=1), tokens(1), tokens(2), DONE):
        outbox.put(frame)
    async with asyncio.timeout(60):
        (message,) = [message async for message in outbox]
    imported, exported, said, done = frames_of(message)
    assert imported.imported.tokens == 8
    assert exported.exported.index == 1
    assert said.tokens.token_ids == [1, 2]
    assert done.HasField("done")
    assert not any(frame.following for frame in message.following)


@given(
    frame_s=st.sampled_from([0.0, 0.0005, 0.002]),
    pauses_s=st.lists(st.sampled_from([0.0, 0.0, 0.0003, 0.003]), min_size=1, max_size=40),
)
@settings(max_examples=20, deadline=None)
def test_every_token_arrives_however_pauses_and_frames_meet(
    frame_s: float, pauses_s: list[float]
) -> None:
    async def receive() -> list[int]:
        outbox = Outbox(asyncio.get_running_loop(), frame_s)
        landed = threading.Event()

        def work() -> None:
            for token, pause_s in enumerate(pauses_s):
                outbox.put(tokens(token))
                landed.wait(pause_s)
            # Without the end to hurry it: what was held back leaves all the same.
            landed.wait(10)
            outbox.put(DONE)

        worker = threading.Thread(target=work)
        worker.start()
        got: list[int] = []
        try:
            async with asyncio.timeout(60):
                async for message in outbox:
                    for frame in frames_of(message):
                        got += frame.tokens.token_ids
                    if len(got) == len(pauses_s):
                        landed.set()
        finally:
            landed.set()
            worker.join()
        return got

    assert asyncio.run(receive()) == list(range(len(pauses_s)))
