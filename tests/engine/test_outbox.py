"""When frames of a generation leave for the wire, and how many go together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kakeya.core.errors import MemoryRefused
from kakeya.decoding.decoder import FinishReason
from kakeya.engine.job import (
    DoneFrame,
    EngineFrame,
    ExportedFrame,
    ImportedFrame,
    PrefillFrame,
    TokensFrame,
)
from kakeya.engine.outbox import Outbox
from kakeya.v1 import engine_pb2 as pb

DONE = DoneFrame(
    reason=FinishReason.MAX_TOKENS,
    prefill_s=0.0,
    total_s=0.0,
    cached_tokens=0,
    forwards=1,
    drafted=0,
    verified=0,
    accepted=0,
)


def tokens(*token_ids: int) -> TokensFrame:
    return TokensFrame(token_ids=token_ids)


def outbox_of_this_loop() -> Outbox:
    """One that holds back for longer than any test waits."""
    return Outbox(asyncio.get_running_loop(), frame_s=3600.0)


async def sent(outbox: Outbox) -> list[str | None]:
    """What leaves until nothing more is going to."""
    kinds: list[str | None] = []
    responses: AsyncIterator[pb.DecodeResponse] = aiter(outbox)
    while True:
        coming = asyncio.ensure_future(anext(responses))
        done, _ = await asyncio.wait((coming,), timeout=0.05)
        if not done:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
            return kinds
        response = coming.result()
        kinds.append(response.WhichOneof("frame"))
        if response.HasField("done"):
            return kinds


async def put(*frames: EngineFrame) -> Outbox:
    """Frames that come one after the other, each once the loop has seen the one before."""
    outbox = outbox_of_this_loop()
    loop = asyncio.get_running_loop()

    def add(rest: tuple[EngineFrame, ...]) -> None:
        if rest:
            outbox.put(rest[0])
            loop.call_later(0.005, add, rest[1:])

    loop.call_soon(add, frames)
    return outbox


async def test_what_was_imported_waits_for_the_next_frame() -> None:
    assert await sent(await put(ImportedFrame(tokens=8))) == []
    whole = await put(ImportedFrame(tokens=8), PrefillFrame(computed_tokens=9, total_tokens=9))
    assert await sent(whole) == ["imported", "progress"]


async def test_the_first_tokens_leave_at_once_also_behind_other_frames() -> None:
    outbox = await put(
        PrefillFrame(computed_tokens=4, total_tokens=9),
        ExportedFrame(index=0),
        tokens(1),
        tokens(2),
    )
    assert await sent(outbox) == ["progress", "exported", "tokens"]


async def test_the_end_leaves_at_once_with_all_that_was_held_back() -> None:
    outbox = await put(tokens(1), tokens(2), tokens(3), DONE)
    assert await sent(outbox) == ["tokens", "tokens", "done"]


async def test_an_error_leaves_at_once_behind_the_tokens_in_front_of_it() -> None:
    outbox = await put(tokens(1))
    responses: AsyncIterator[pb.DecodeResponse] = aiter(outbox)
    async with asyncio.timeout(5):
        assert (await anext(responses)).tokens.token_ids == [1]
        outbox.put(tokens(2))
        outbox.fail(MemoryRefused("it has to make way"))
        assert (await anext(responses)).tokens.token_ids == [2]
        with pytest.raises(MemoryRefused):
            await anext(responses)
