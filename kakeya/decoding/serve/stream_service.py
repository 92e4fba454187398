"""DraftStreamService: one stream for each generation of a peer; its text is kept here.

A message carries the tokens that joined the text, so its cost does not depend on the length of the
text: each stream has an n-gram index, and a draft model finds the KV of the text that it had. Only
the newest message counts: a draft of a model is given up when the next message overtakes it.

Bounded by streams, by streams of one peer, by tokens over all; a silent stream is ended after a
while. A refused peer asks through ProposeBlock.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio

from kakeya.core.clock import Clock, SystemClock
from kakeya.core.errors import InvalidArgument, QueueFull, Unauthenticated
from kakeya.core.units import unpack_ids
from kakeya.decoding.draft.convert import (
    MAX_BLOCK_TOKENS,
    MAX_PREFIX_TOKENS,
    draft_to_wire,
    states_from_wire,
)
from kakeya.decoding.draft.proposer import Draft
from kakeya.decoding.draft.states import HiddenStates
from kakeya.decoding.ngram.ngram import KEPT_TOKENS, ROLLBACK, NGramIndex, NGramProposer
from kakeya.decoding.serve.service import (
    INLINE_TOKENS,
    ProposerQueue,
    ProposerService,
    failures_end,
)
from kakeya.generation.place_rate import PlaceRate
from kakeya.v1.distributed_pb2 import ProposeBlockRequest
from kakeya.v1.drafts_pb2 import DraftStreamRequest, DraftStreamResponse
from kakeya.v1.drafts_pb2_grpc import DraftStreamServiceServicer
from kakeya.wire.server.authorization import current_caller

Context = grpc.aio.ServicerContext[Any, Any]
Requests = AsyncIterator[DraftStreamRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """Bounds of all streams. A token of text without repetition takes 0.5 kB."""

    streams: int = 64
    streams_per_peer: int = 16
    tokens: int = KEPT_TOKENS
    idle_s: float = 60.0
    draft_s: float = 2.0
    """A draft that has waited for its turn for so long is not begun: it would come too late."""


class DraftStreamService(DraftStreamServiceServicer):
    """Serves the proposers of a ProposerService, under their names and in their queues."""

    def __init__(
        self,
        proposers: ProposerService,
        *,
        clock: Clock | None = None,
        limits: StreamLimits | None = None,
    ) -> None:
        self._proposers = proposers
        self._clock = clock or SystemClock()
        self._limits = limits or StreamLimits()
        self._streams: Counter[str] = Counter()
        self._rate = PlaceRate(self._clock.mono)
        self._text_rate = PlaceRate(self._clock.mono)
        self.held_tokens = 0  # in the texts of all streams
        self._silences: set[asyncio.Timeout] = set()
        self._is_draining = False

    def drain(self) -> None:
        """End every stream once its draft is told, and take no more: the node is stopping."""
        self._is_draining = True
        for silence in self._silences:
            silence.reschedule(0)

    @property
    def streams(self) -> int:
        """Streams that are open."""
        return self._streams.total()

    async def DraftStream(  # type: ignore[override]
        self, requests: Requests, context: Context
    ) -> None:
        """Draft for one generation until it ends, or falls silent."""
        async with failures_end(context):
            with self._seat(_peer(context)):
                await self._serve(requests, context)

    @contextmanager
    def _seat(self, peer: str) -> Iterator[None]:
        limits, open_of_peer = self._limits, self._streams[peer]
        if self._is_full(peer):
            raise QueueFull(
                f"this node drafts on {self.streams} streams, {open_of_peer} of them of {peer}, "
                f"and takes {limits.streams}, {limits.streams_per_peer} of one peer",
                retry_after_s=self._rate.retry_after_s(),
            )
        self._streams[peer] += 1
        if self._is_full(peer):
            self._rate.full()
        try:
            yield
        finally:
            self._rate.freed(is_full=self._is_full(peer))
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    def _is_full(self, peer: str) -> bool:
        limits = self._limits
        return self.streams >= limits.streams or self._streams[peer] >= limits.streams_per_peer

    async def _serve(self, requests: Requests, context: Context) -> None:
        message = await self._next(requests)
        if message is None:
            return
        text = _Text(self._proposers.desk(message.model_id), message, self._limits.draft_s)
        await context.send_initial_metadata(())
        is_refused = False
        try:
            while message is not None:
                await self._tell(text, message)
                if not message.size:
                    message = await self._next(requests)
                elif text.index is not None:
                    await context.write(text.look_up(message))
                    message = await self._next(requests)
                else:
                    message = await self._draft(text, message, requests, context)
        except QueueFull:
            is_refused = True  # it comes again, and needs the room that it leaves
            raise
        finally:
            if not is_refused:
                self._text_rate.freed(is_full=self._is_short())
            self.held_tokens -= len(text)

    def _is_short(self) -> bool:
        """Whether one more text of the mean length would not fit."""
        return self.held_tokens * (self.streams + 1) > self._limits.tokens * self.streams

    async def _next(self, requests: Requests) -> DraftStreamRequest | None:
        """The next message; None when the stream is over, silent for too long, or to end."""
        try:
            async with asyncio.timeout(0 if self._is_draining else self._limits.idle_s) as silence:
                self._silences.add(silence)
                try:
                    return await anext(requests, None)
                finally:
                    self._silences.discard(silence)
        except TimeoutError:
            return None

    async def _tell(self, text: _Text, message: DraftStreamRequest) -> None:
        """Bring a text up to date; in pieces, since a long one must not hold others up."""
        appended = text.check(message)
        before = len(text)
        text.cut(message.keep_tokens)
        self.held_tokens += len(text) - before
        if self.held_tokens + len(appended) > self._limits.tokens:
            raise QueueFull(
                f"the texts of all streams hold {self.held_tokens} tokens and may hold "
                f"{self._limits.tokens}; {len(appended)} more do not fit",
                retry_after_s=self._text_rate.retry_after_s(),
            )
        for start in range(0, len(appended), INLINE_TOKENS):
            if start:
                await asyncio.sleep(0)
            piece = appended[start : start + INLINE_TOKENS]
            text.extend(piece)
            self.held_tokens += len(piece)
        if self._is_short():
            self._text_rate.full()

    async def _draft(
        self, text: _Text, message: DraftStreamRequest, requests: Requests, context: Context
    ) -> DraftStreamRequest | None:
        """Answer unless the next message comes first; return that message."""
        reading = asyncio.ensure_future(self._next(requests))
        drafting = asyncio.ensure_future(text.draft(message, self._clock.mono()))
        try:
            await asyncio.wait((reading, drafting), return_when=asyncio.FIRST_COMPLETED)
            if drafting.done():
                await context.write(drafting.result())
            return await reading
        finally:
            drafting.cancel()
            reading.cancel()


class _Text:
    """The text of one stream, and the proposer that drafts after it."""

    def __init__(self, desk: ProposerQueue, opening: DraftStreamRequest, draft_s: float) -> None:
        self._desk = desk
        self._opening = opening
        self._draft_s = draft_s
        self._version = 0
        proposer = desk.proposer
        self._ngrams = proposer if isinstance(proposer, NGramProposer) else None
        self.index: NGramIndex | None = None if self._ngrams is None else self._ngrams.follow()
        self._tokens: list[int] = [] if self.index is None else self.index.tokens
        self._states: HiddenStates | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    def check(self, message: DraftStreamRequest) -> list[int]:
        """Return the tokens that a message appends. Raises InvalidArgument if it cannot follow."""
        keep, count, packed = message.keep_tokens, len(self), message.append_ids_le32
        if message.version <= self._version:
            raise InvalidArgument(
                f"version {message.version} follows {self._version}: it must rise"
            )
        undoable = ROLLBACK if self.index is None else self.index.undoable
        if not max(0, count - undoable) <= keep <= count:
            raise InvalidArgument(
                f"keep_tokens is {keep} of {count}: {undoable} tokens can be taken back now",
                param="keep_tokens",
            )
        if len(packed) % 4:
            raise InvalidArgument(
                f"append_ids_le32 has {len(packed)} bytes, that is no multiple of 4",
                param="append_ids_le32",
            )
        if not 1 <= keep + len(packed) // 4 <= MAX_PREFIX_TOKENS:
            raise InvalidArgument(
                f"the text would have {keep + len(packed) // 4} tokens, "
                f"it must have 1 to {MAX_PREFIX_TOKENS}",
                param="append_ids_le32",
            )
        if message.size > MAX_BLOCK_TOKENS:
            raise InvalidArgument(
                f"size is {message.size}, it must be 0 to {MAX_BLOCK_TOKENS}", param="size"
            )
        states = None
        if message.HasField("states"):
            states = states_from_wire(message.states, keep + len(packed) // 4)
        self._version = message.version
        self._take(keep, states)
        return unpack_ids(packed)

    def _take(self, keep: int, states: HiddenStates | None) -> None:
        """Keep the hidden states of tokens that stand, and add others."""
        held = self._states.between(0, keep) if self._states is not None else None
        self._states = held.followed_by(states) if held and states else states or held

    def cut(self, length: int) -> None:
        """Take tokens back."""
        if self.index is None:
            del self._tokens[length:]
        elif length < len(self):
            self.index.truncate(length)

    def extend(self, tokens: list[int]) -> None:
        """Append tokens."""
        if self.index is None:
            self._tokens += tokens
        else:
            self.index.extend(tokens)

    def look_up(self, message: DraftStreamRequest) -> DraftStreamResponse:
        """Draft from the stream's own index."""
        assert self._ngrams is not None
        assert self.index is not None
        return _answer(message, self._ngrams.draft_after(self.index, message.size))

    async def draft(self, message: DraftStreamRequest, now: float) -> DraftStreamResponse:
        """Draft with a proposer that serves others too, when it is its turn."""
        asked = ProposeBlockRequest(block_size=message.size, num_steps=1)
        if self._opening.HasField("seed"):
            asked.seed = self._opening.seed
            asked.temperature = self._opening.temperature
        draft = await self._desk.draft(asked, list(self._tokens), now + self._draft_s, self._states)
        return _answer(message, draft)


def _answer(message: DraftStreamRequest, draft: Draft) -> DraftStreamResponse:
    asked = ProposeBlockRequest(block_size=message.size, allow_short=True)
    return DraftStreamResponse(version=message.version, draft=draft_to_wire(draft, asked))


def _peer(context: Context) -> str:
    """The peer of a stream: by identity where there is one, else by host."""
    try:
        caller = current_caller()
    except Unauthenticated:  # a server without a guard
        return context.peer().rpartition(":")[0]
    return caller.node_id or caller.address.rpartition(":")[0]
