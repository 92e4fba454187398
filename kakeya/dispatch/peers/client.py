"""Calls of ServingService on a peer: errors name the peer, and a peer that hangs is found out."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from kakeya.core.errors import PeerProtocol
from kakeya.core.units import pack_ids
from kakeya.dispatch.peers.held_answers import AnswerCopy
from kakeya.dispatch.peers.quote import AnswerOrigin, Quote
from kakeya.dispatch.peers.wire import (
    copy_from_wire,
    copy_to_wire,
    manifest_from_wire,
    quote_from_wire,
    wait_from_wire,
)
from kakeya.fleet.placement.keepers import Keeping
from kakeya.generation.cuts import unmarked
from kakeya.generation.engine_wire import facts_from_wire, frames_from_wire, job_to_wire
from kakeya.generation.facts import ModelFacts
from kakeya.generation.frames import Done, Frame, Progress, Tokens
from kakeya.generation.kv import NO_KV
from kakeya.generation.manifest import Manifest
from kakeya.generation.model import AdaptedId
from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.generation.retention import Retention
from kakeya.generation.waiting import RequestWait
from kakeya.prefix.seam import Warmed, WarmOutcome, WarmReport
from kakeya.prefix.warm.for_peers import PeerPrefix
from kakeya.prefix.warm.prewarm import PREWARM_S
from kakeya.v1 import engine_pb2
from kakeya.v1 import serving_pb2 as pb
from kakeya.v1.serving_pb2_grpc import ServingServiceStub
from kakeya.wire import traces
from kakeya.wire.beats import hear
from kakeya.wire.calls import calling

if TYPE_CHECKING:
    from kakeya.v1.serving_pb2_grpc import ServingServiceAsyncStub

_TEXT_S = 60.0
_MARGIN_S = 5.0
"""Beside the seconds that the peer may take by itself."""
_SHORT_S = 2.0
_EMBED_S = 120.0
_WARM_S = PREWARM_S + 30.0
"""Prefixes are warmed one after the other, behind all requests."""
_LONGEST_S = 24 * 3600.0
"""Of an answer; one that no more is heard of ends long before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDescription:
    """A model as its node tells of it; `text_digest` "" = it has no text."""

    facts: ModelFacts
    manifest: Manifest
    text_digest: str


class PeerCalls:
    """The calls of one peer, over a channel that others use too."""

    def __init__(self, channel: grpc.aio.Channel, name: str) -> None:
        """Errors call the peer by `name`."""
        self._name = name
        self._stub: ServingServiceAsyncStub = ServingServiceStub(channel)

    async def describe(
        self, model_id: str, client: str, wait_s: float, priority: GenerationPriority
    ) -> PeerDescription:
        """Ask what a model is; the peer may load it for that. Raises the peer's errors."""
        request = pb.DescribeModelRequest(
            model_id=model_id, client=client, wait_seconds=wait_s, priority=priority
        )
        with calling(self._name):
            reply = await self._stub.DescribeModel(
                request, timeout=wait_s + _MARGIN_S, metadata=traces.metadata()
            )
        return PeerDescription(
            facts=facts_from_wire(reply.facts),
            manifest=manifest_from_wire(reply.manifest),
            text_digest=reply.text_digest,
        )

    async def quote(
        self,
        model_id: str,
        client: str,
        token_ids: Sequence[int],
        cuts: Sequence[int],
        timeout_s: float,
    ) -> Quote:
        """Ask how a request would be served now. Raises the peer's errors."""
        request = pb.QuoteRequest(
            model_id=model_id, client=client, token_ids_le32=pack_ids(token_ids), cuts=cuts
        )
        with calling(self._name):
            return quote_from_wire(await self._stub.Quote(request, timeout=timeout_s))

    async def adapted(self, client: str, timeout_s: float) -> tuple[AdaptedId, ...]:
        """The models with adapters that a client may name there. Raises the peer's errors."""
        request = pb.ListServedAdaptersRequest(client=client)
        with calling(self._name):
            reply = await self._stub.ListServedAdapters(request, timeout=timeout_s)
        return tuple(AdaptedId(model_id=one.model_id, parent=one.parent) for one in reply.adapters)

    async def text_files(self, model_id: str, client: str) -> AsyncIterator[tuple[str, bytes]]:
        """(name, data) of each part of the files of a model's text."""
        request = pb.ReadTextFilesRequest(model_id=model_id, client=client)
        with calling(self._name):
            async for part in self._stub.ReadTextFiles(request, timeout=_TEXT_S):
                yield part.name, part.data

    async def decode(
        self,
        model_id: str,
        client: str,
        request: DecodeRequest,
        draft_policy: str,
        *,
        begun: Callable[[AnswerOrigin], None] = lambda _: None,
    ) -> AsyncGenerator[Frame, None]:
        """Stream the frames of a generation. Closing the iterator cancels it on the peer. `begun`
        is told what computes it, before the first frame; an older node does not say it.

        Raises PeerUnavailable for a peer that is lost or silent, the errors with which the peer
        refuses, and PeerProtocol for a stream without an end.
        """
        message = pb.RoutedDecodeRequest(
            model_id=model_id,
            request=job_to_wire(request, NO_KV),
            draft_policy=draft_policy,
            retention=request.kv_retention,
            stay_warm_seconds=request.stay_warm_s,
            client=client,
            kv_holder=request.kv_holder.node_id,
            kv_holder_tokens=request.kv_holder.tokens,
        )
        told: RequestWait | None = None
        if request.wait is not None:
            request.wait.ask = lambda: told
        with calling(self._name):
            call = self._stub.Decode(message, timeout=_LONGEST_S, metadata=traces.metadata())
        try:
            while (answer := await hear(call, pb.RoutedDecodeResponse, self._name)) is not None:
                if not answer.HasField("frames"):
                    told = wait_from_wire(answer.wait, model_id)
                    continue
                if answer.weights or answer.numerics:
                    begun(AnswerOrigin(weights=answer.weights, numerics=answer.numerics))
                for frame in frames_from_wire(answer.frames):
                    if isinstance(frame, Tokens | Progress | Done):
                        told = None
                        yield frame
                        if isinstance(frame, Done):
                            return
            raise PeerProtocol(f"{self._name}: the answer ended without a done frame")
        finally:
            call.cancel()

    async def release(self, model_id: str, client: str, kv_key: str) -> None:
        """Have the KV of a key forgotten. Raises the peer's errors."""
        request = pb.ReleaseKvRequest(model_id=model_id, client=client, kv_key=kv_key)
        with calling(self._name):
            await self._stub.ReleaseKv(request, timeout=_SHORT_S)

    async def warm_turn(
        self,
        model_id: str,
        client: str,
        kv_key: str,
        token_ids: Sequence[int],
        retention: Retention,
    ) -> None:
        """Have the marked tokens warm, with which the next request of a key begins."""
        ids, cuts = unmarked(token_ids)
        request = pb.WarmTurnRequest(
            model_id=model_id,
            client=client,
            kv_key=kv_key,
            token_ids_le32=pack_ids(ids),
            cuts=cuts,
            retention=retention,
        )
        with calling(self._name):
            await self._stub.WarmTurn(request, timeout=_SHORT_S)

    async def keeping(self, digest: bytes, timeout_s: float) -> Keeping:
        """The peer's care for a prefix. Raises the peer's errors."""
        with calling(self._name):
            reply = await self._stub.KeepWarm(pb.KeepWarmRequest(digest=digest), timeout=timeout_s)
        return _keeping(reply.keeping)

    async def keep_warm(self, prefix: PeerPrefix) -> WarmReport | None:
        """Have a prefix kept warm, for as long as that is said again; the report of warming it.
        None = it is not known there without tokens. Raises the peer's errors."""
        ids, cuts = unmarked(prefix.tokens)
        request = pb.KeepWarmRequest(
            digest=prefix.digest,
            model_id=prefix.model_id,
            token_ids_le32=pack_ids(ids),
            cuts=cuts,
            holder=prefix.holder.node_id,
        )
        with calling(self._name):
            reply = await self._stub.KeepWarm(request, timeout=_WARM_S)
        if not reply.outcome:
            return None
        warmed = Warmed(
            tokens=reply.tokens, cached=reply.cached_tokens, computed=reply.computed_tokens
        )
        is_known = reply.outcome in set(WarmOutcome)
        outcome = WarmOutcome(reply.outcome) if is_known else WarmOutcome.FAILED
        return WarmReport(outcome=outcome, warmed=warmed, reason=reply.reason)

    async def embed(
        self, model_id: str, texts: Sequence[Sequence[int]], size: int
    ) -> tuple[bytes, str]:
        """The vectors of texts, as `EmbeddingModel.embed`, and the digest of the weights that made
        them, "" = not known. Raises the peer's errors."""
        asked = engine_pb2.EmbedRequest(token_ids_le32=map(pack_ids, texts), size=size)
        request = pb.EmbedTextsRequest(model_id=model_id, request=asked)
        with calling(self._name):
            reply = await self._stub.EmbedTexts(request, timeout=_EMBED_S)
        return reply.response.vectors_le_f32, reply.weights

    async def hold_answer(self, copy: AnswerCopy, frames_before: int) -> None:
        """Have a copy held, or, behind so many frames, what is new of one. Raises NotFound where
        these frames are not held, and the peer's other errors."""
        message = copy_to_wire(copy, frames_before)
        request = pb.HoldAnswerRequest(copy=message, frames_before=frames_before)
        with calling(self._name):
            await self._stub.HoldAnswer(request, timeout=_SHORT_S)

    async def find_answer(self, answer_id: str, client: str, *, forget: bool) -> AnswerCopy:
        """The copy of a client's answer, which the peer then may forget. Raises NotFound, and the
        peer's other errors."""
        request = pb.FindAnswerRequest(answer_id=answer_id, client=client, forget=forget)
        with calling(self._name):
            reply = await self._stub.FindAnswer(request, timeout=_SHORT_S)
        return copy_from_wire(reply.copy)

    async def describe_share(
        self, model_id: str, node_ids: Sequence[str], timeout_s: float
    ) -> pb.DescribeShareResponse:
        """What the peer can give to a ring group, with its links to these nodes. Raises the peer's
        errors."""
        request = pb.DescribeShareRequest(model_id=model_id, node_ids=node_ids)
        with calling(self._name):
            return await self._stub.DescribeShare(request, timeout=timeout_s)

    async def watch(self) -> AsyncGenerator[tuple[str, object], None]:
        """Yield what the peer tells of itself: each section with its value, as it changes. Ends
        when the peer drains. Raises the peer's errors."""
        with calling(self._name):
            call = self._stub.WatchNode(pb.WatchNodeRequest(), timeout=_LONGEST_S)
            try:
                async for told in call:
                    # NaN is no JSON to a page.
                    yield told.section, json.loads(told.json, parse_constant=lambda _: None)
            except (ValueError, RecursionError) as problem:
                raise PeerProtocol(f"{self._name}: what it tells is no JSON") from problem
            finally:
                call.cancel()

    async def probe(self, size: int, timeout_s: float) -> None:
        """Have so many bytes sent, to measure a link by. Raises the peer's errors."""
        with calling(self._name):
            await self._stub.DescribeShare(
                pb.DescribeShareRequest(probe_bytes=size), timeout=timeout_s
            )


def _keeping(raw: int) -> Keeping:
    return Keeping(raw) if raw in set(Keeping) else Keeping.NOTHING
