"""Frames of one generation on their way from the model thread to the wire.

The first frame leaves at once, and so do the first tokens, the end, and what asks for pages; those
between at most every FRAME_S: a fast model commits several tokens in that time, and one message for
all of them leaves the processor to the model. Slow models, whose steps take longer, are never held
up. What was imported, and the logits behind a prompt, travel with the next frame: nobody waits for
these, and the first token would.
Frames that leave together are one message: each costs both ends as much as a small step.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from kakeya.core.errors import KakeyaError
from kakeya.decoding.draft.decoder import FinishReason
from kakeya.engine.job import (
    DoneFrame,
    EngineFrame,
    ExportedFrame,
    ImportedFrame,
    LogitsFrame,
    ParkFrame,
    PrefillFrame,
    TokensFrame,
)
from kakeya.v1 import engine_pb2 as pb

FRAME_S = 0.02
"""The least time between two messages of one stream, ends excepted."""
_REASONS = {
    FinishReason.MAX_TOKENS: pb.DecodeDone.REASON_MAX_TOKENS,
    FinishReason.STOP_TOKEN: pb.DecodeDone.REASON_STOP_TOKEN,
    FinishReason.CONTEXT_FULL: pb.DecodeDone.REASON_CONTEXT_FULL,
}


class Outbox:
    """Filled on the model thread, read on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, frame_s: float = FRAME_S) -> None:
        self._loop = loop
        self._frame_s = frame_s
        self._frames: deque[EngineFrame | KakeyaError] = deque()
        self._filled = asyncio.Event()
        self._is_urgent = asyncio.Event()
        self._is_called = False
        self._has_spoken = False

    def put(self, frame: EngineFrame) -> None:
        """Add a frame; called on the model thread."""
        self._frames.append(frame)
        if isinstance(frame, DoneFrame | ParkFrame):
            self._loop.call_soon_threadsafe(self._hurry)
        elif isinstance(frame, TokensFrame) and not self._has_spoken:
            self._has_spoken = True
            self._loop.call_soon_threadsafe(self._hurry)
        # One call is enough for all that is appended before the loop looks.
        elif not self._is_called and not _can_wait(frame):
            self._is_called = True
            self._loop.call_soon_threadsafe(self._filled.set)

    def fail(self, failure: KakeyaError) -> None:
        """End with an error; called on the model thread."""
        self._frames.append(failure)
        self._loop.call_soon_threadsafe(self._hurry)

    def _hurry(self) -> None:
        self._is_urgent.set()
        self._filled.set()

    async def __aiter__(self) -> AsyncIterator[pb.DecodeResponse]:
        """Yield responses until the last frame."""
        await self._filled.wait()
        while True:
            # Nobody need call while this drains and pauses: it looks again by itself.
            self._is_called = True
            self._filled.clear()
            self._is_urgent.clear()
            responses = self._drain()
            if responses:
                is_over = responses[-1].HasField("done")
                responses[0].following.extend(responses[1:])
                yield responses[0]
                if is_over:
                    return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._frame_s):
                    await self._is_urgent.wait()
            # Before the look: a frame that is put behind it calls.
            self._is_called = False
            while not self._frames:
                await self._filled.wait()
                self._filled.clear()

    def _drain(self) -> list[pb.DecodeResponse]:
        """Take all frames; committed tokens that follow each other become one response."""
        responses: list[pb.DecodeResponse] = []
        tokens: list[int] = []
        while self._frames:
            frame = self._frames.popleft()
            if isinstance(frame, TokensFrame):
                tokens += frame.token_ids
                continue
            if isinstance(frame, KakeyaError):
                if not tokens and not responses:
                    raise frame
                # What was committed before it goes out first: it need not be computed again.
                self._frames.appendleft(frame)
                self._hurry()
                break
            if tokens:
                responses.append(_tokens_to_wire(tokens))
                tokens = []
            responses.append(_to_wire(frame))
        if tokens:
            responses.append(_tokens_to_wire(tokens))
        return responses


def _can_wait(frame: EngineFrame) -> bool:
    """Whether it travels with the next one: nobody does anything about it."""
    if isinstance(frame, PrefillFrame):
        return frame.computed_tokens == frame.cached_tokens
    return isinstance(frame, ImportedFrame | LogitsFrame)


def _tokens_to_wire(tokens: list[int]) -> pb.DecodeResponse:
    return pb.DecodeResponse(tokens=pb.CommittedTokens(token_ids=tokens))


def _to_wire(
    frame: ImportedFrame | ExportedFrame | ParkFrame | PrefillFrame | LogitsFrame | DoneFrame,
) -> pb.DecodeResponse:
    if isinstance(frame, ParkFrame):
        return pb.DecodeResponse(park=pb.KvPark(lengths=frame.lengths, number=frame.number))
    if isinstance(frame, ImportedFrame):
        return pb.DecodeResponse(imported=pb.KvImported(tokens=frame.tokens))
    if isinstance(frame, ExportedFrame):
        return pb.DecodeResponse(exported=pb.KvExported(index=frame.index, tokens=frame.tokens))
    if isinstance(frame, LogitsFrame):
        return pb.DecodeResponse(logits=pb.HistoryLogits(le_f32=frame.logits))
    if isinstance(frame, PrefillFrame):
        return pb.DecodeResponse(
            progress=pb.PrefillProgress(
                computed_tokens=frame.computed_tokens,
                total_tokens=frame.total_tokens,
                cached_tokens=frame.cached_tokens,
            )
        )
    return pb.DecodeResponse(
        done=pb.DecodeDone(
            reason=_REASONS[frame.reason],
            prefill_seconds=frame.prefill_s,
            total_seconds=frame.total_s,
            cached_tokens=frame.cached_tokens,
            forwards=frame.forwards,
            drafted=frame.drafted,
            verified=frame.verified,
            accepted=frame.accepted,
            sources=[
                pb.SourceStats(
                    source=tally.source,
                    drafts=tally.drafts,
                    drafted=tally.drafted,
                    verified=tally.verified,
                    accepted=tally.accepted,
                    abstained=tally.abstained,
                    failed=tally.failed,
                    late=tally.late,
                    shadowed=tally.shadowed,
                    shadow_hits=tally.shadow_hits,
                    mean_wait_ms=1000 * tally.wait_s / max(1, tally.drafts),
                )
                for tally in frame.sources
            ],
        )
    )
