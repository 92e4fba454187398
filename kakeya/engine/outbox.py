"""Frames of one generation on their way from the model thread to the wire.

The first frame leaves at once, and so do the first tokens, the end, and requests for memory; frames
between leave at most every FRAME_S: a fast model commits several tokens in that time, and one
message for all of them leaves the processor to the model. A slow model, with longer steps, is never
held up. `KvImported` and `HistoryLogits` travel with the next frame, so that the first token does
not wait for them.
Frames that leave together are one message: each costs both ends as much as a small step.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from itertools import chain

from kakeya.core.errors import KakeyaError
from kakeya.generation.engine_wire import frames_to_wire
from kakeya.generation.frames import (
    Done,
    EngineFrame,
    HistoryLogits,
    KvImported,
    KvPark,
    KvWant,
    Progress,
    Tokens,
)
from kakeya.v1 import engine_pb2 as pb

FRAME_S = 0.02
"""The least time between two messages of one stream, ends excepted."""


class Outbox:
    """Filled on the model thread, read on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, frame_s: float = FRAME_S) -> None:
        self._loop = loop
        self._frame_s = frame_s
        self._frames: deque[EngineFrame | KakeyaError] = deque()
        self._filled = asyncio.Event()
        self._is_urgent = asyncio.Event()
        self._is_called = False
        self._has_sent_tokens = False

    def put(self, frame: EngineFrame) -> None:
        """Add a frame; called on the model thread."""
        self._frames.append(frame)
        if isinstance(frame, Done | KvPark | KvWant):
            self._loop.call_soon_threadsafe(self._hurry)
        elif isinstance(frame, Tokens) and not self._has_sent_tokens:
            self._has_sent_tokens = True
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
            # No call is needed while this drains and pauses: it looks again by itself.
            self._is_called = True
            self._filled.clear()
            self._is_urgent.clear()
            frames = self._drain()
            if frames:
                yield frames_to_wire(frames)
                if isinstance(frames[-1], Done):
                    return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._frame_s):
                    await self._is_urgent.wait()
            # Before the look: a frame that is put behind it calls.
            self._is_called = False
            while not self._frames:
                await self._filled.wait()
                self._filled.clear()

    def _drain(self) -> list[EngineFrame]:
        """Take all frames; committed tokens that follow each other become one frame."""
        frames: list[EngineFrame] = []
        tokens: list[Tokens] = []
        while self._frames:
            frame = self._frames.popleft()
            if isinstance(frame, Tokens):
                tokens.append(frame)
                continue
            if isinstance(frame, KakeyaError):
                if not tokens and not frames:
                    raise frame
                # Tokens committed before it go out first: they need not be computed again.
                self._frames.appendleft(frame)
                self._hurry()
                break
            if tokens:
                frames.append(_joined(tokens))
                tokens = []
            frames.append(frame)
        if tokens:
            frames.append(_joined(tokens))
        return frames


def _joined(frames: Sequence[Tokens]) -> Tokens:
    """Frames that follow each other as one."""
    return Tokens(
        token_ids=tuple(chain.from_iterable(frame.token_ids for frame in frames)),
        logprobs=tuple(chain.from_iterable(frame.logprobs for frame in frames)),
    )


def _can_wait(frame: EngineFrame) -> bool:
    """Whether a frame travels with the next one: the agent does nothing about it."""
    if isinstance(frame, Progress):
        return frame.computed_tokens == frame.cached_tokens
    return isinstance(frame, KvImported | HistoryLogits)
