"""ServingService: this node's models for the other nodes of its fleet.

A request of a peer is served as one of this node's own clients would be, in the same lines; it
never goes on to a third node.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import replace
from typing import Any

import grpc.aio

from kakeya.core.errors import CapacityExhausted, NotFound, Refused
from kakeya.dispatch.clients import Clients
from kakeya.dispatch.peers.held_answers import HeldAnswers
from kakeya.dispatch.peers.quote import OwnModels, QuotedModel, origin_of, quote_of
from kakeya.dispatch.peers.text_files import TextFiles
from kakeya.dispatch.peers.wire import (
    manifest_to_wire,
    priority_from_wire,
    quote_to_wire,
    wait_to_wire,
)
from kakeya.dispatch.watch.facts import OwnSections
from kakeya.generation.cuts import marked
from kakeya.generation.engine_wire import (
    facts_to_wire,
    frames_to_wire,
    ids_from_wire,
    request_from_wire,
)
from kakeya.generation.facts import ModelFacts
from kakeya.generation.frames import Done, Frame, Tokens
from kakeya.generation.kv import KvHolder
from kakeya.generation.model import DraftRouter, LoadableModel
from kakeya.generation.request import DecodeRequest
from kakeya.generation.retention import Retention
from kakeya.generation.waiting import WaitTeller
from kakeya.prefix.names.keys import CacheKeys
from kakeya.prefix.seam import CacheUse, Precache, PrefixClaim
from kakeya.prefix.warm.for_peers import PeerPrefix, PrefixesForPeers
from kakeya.v1 import engine_pb2
from kakeya.v1 import serving_pb2 as pb
from kakeya.v1.serving_pb2_grpc import ServingServiceServicer
from kakeya.wire import traces
from kakeya.wire.beats import with_beats
from kakeya.wire.status import errors_end

Context = grpc.aio.ServicerContext[Any, Any]


class ServingService(ServingServiceServicer):
    """The servicer; `clients` counts the requests of peers beside those of this node."""

    def __init__(
        self,
        models: OwnModels,
        router: DraftRouter,
        texts: TextFiles,
        clients: Clients,
        precache: Precache,
        for_peers: PrefixesForPeers,
        held: HeldAnswers,
        *,
        kv_rates: Callable[[str], Mapping[str, float] | None] = lambda model_id: None,
        share: Callable[[pb.DescribeShareRequest], Awaitable[pb.DescribeShareResponse]]
        | None = None,
        facts: OwnSections | None = None,
    ) -> None:
        """`kv_rates` are those of quotes for a model; `share` tells what this node gives to ring
        groups, and `facts` what it tells of itself; None = nothing."""
        self._kv_rates = kv_rates
        self._share = share
        self._facts = facts
        self._precache = precache
        self._for_peers = for_peers
        self._held = held
        self._models = models
        self._router = router
        self._texts = texts
        self._clients = clients
        self._draining = ""
        self.served = 0
        """Generations of peers that were begun."""

    def drain(self, reason: str) -> None:
        """Begin nothing from now on; what runs goes on."""
        self._draining = reason

    async def DescribeModel(
        self, request: pb.DescribeModelRequest, context: Context
    ) -> pb.DescribeModelResponse:
        """Tell the facts of a model."""
        async with errors_end(context):
            model = self._any(request.model_id, request.client)
            facts = model.facts
            if facts is None:
                self._refuse_new()
                priority = priority_from_wire(request.priority)
                with _span("DescribeModel", request.model_id, context):
                    facts = await model.ready(request.wait_seconds, priority)
            return pb.DescribeModelResponse(
                facts=facts_to_wire(facts),
                manifest=manifest_to_wire(model.manifest),
                text_digest=await self._texts.digest(facts.model_path),
            )
        raise AssertionError("abort returned")

    async def Quote(self, request: pb.QuoteRequest, context: Context) -> pb.QuoteResponse:
        """Tell how a request would be served now."""
        async with errors_end(context):
            self._refuse_new()
            model = self._models.get(request.model_id, request.client)
            ids = ids_from_wire(request.token_ids_le32)
            rates = self._kv_rates(request.model_id)
            return quote_to_wire(quote_of(model, ids, tuple(request.cuts), rates))
        raise AssertionError("abort returned")

    async def ListServedAdapters(
        self, request: pb.ListServedAdaptersRequest, context: Context
    ) -> pb.ListServedAdaptersResponse:
        """Tell the models with adapters that a client may name."""
        async with errors_end(context):
            found = [] if self._draining else await self._models.adapted(request.client)
            return pb.ListServedAdaptersResponse(
                adapters=[
                    pb.ServedAdapter(model_id=one.model_id, parent=one.parent) for one in found
                ]
            )
        raise AssertionError("abort returned")

    async def ReadTextFiles(  # type: ignore[override]
        self, request: pb.ReadTextFilesRequest, context: Context
    ) -> None:
        """Send the files of a model's text."""
        async with errors_end(context):
            facts = self._any(request.model_id, request.client).facts
            if facts is None:
                raise Refused(f"model {request.model_id} was not loaded here yet")
            async for name, data in self._texts.parts(facts.model_path):
                await context.write(pb.TextFilePart(name=name, data=data))

    async def Decode(  # type: ignore[override]
        self, request: pb.RoutedDecodeRequest, context: Context
    ) -> None:
        """Stream a generation, and a sign of life while there is nothing to stream."""
        async with errors_end(context):
            self._refuse_new()
            asked, model = self._asked(request)
            wait = WaitTeller(model.waits_for)
            self.served += 1
            with (
                _span("Decode", request.model_id, context),
                self._clients.request(asked.client, asked.user) as use,
            ):
                frames = model.decode(replace(asked, wait=wait))
                if traces.is_on():
                    frames = _timed(frames, request.model_id)
                async with aclosing(with_beats(frames)) as beaten:
                    async for frame in beaten:
                        if frame is None:
                            told = wait_to_wire(wait.ask())
                            await context.write(pb.RoutedDecodeResponse(wait=told))
                            continue
                        answer = pb.RoutedDecodeResponse(frames=frames_to_wire([frame]))
                        if not use.has_begun:
                            use.begin()
                            origin = origin_of(model.facts, model.adapter_digest)
                            answer.weights, answer.numerics = origin.weights, origin.numerics
                        await context.write(answer)

    async def ReleaseKv(
        self, request: pb.ReleaseKvRequest, context: Context
    ) -> pb.ReleaseKvResponse:
        """Forget the KV of one key."""
        async with errors_end(context):
            model = self._models.get(request.model_id, request.client)
            if model.facts is not None and request.kv_key:
                claim = _claim(
                    model.model_id, model.facts, request.client, request.kv_key, Retention.SHORT
                )
                await model.release(self._precache.kv_key(claim))
        return pb.ReleaseKvResponse()

    async def WarmTurn(self, request: pb.WarmTurnRequest, context: Context) -> pb.WarmTurnResponse:
        """Have the next turn of a conversation warm."""
        async with errors_end(context):
            model = self._models.get(request.model_id, request.client)
            history = marked(ids_from_wire(request.token_ids_le32), tuple(request.cuts))

            async def tokens() -> Sequence[int]:
                return history

            if model.facts is not None and request.kv_key:
                retention = _retention(request.retention)
                claim = _claim(
                    model.model_id, model.facts, request.client, request.kv_key, retention
                )
                self._precache.turn_ended(claim, tokens)
        return pb.WarmTurnResponse()

    async def KeepWarm(self, request: pb.KeepWarmRequest, context: Context) -> pb.KeepWarmResponse:
        """Keep a prefix of another node warm."""
        async with errors_end(context):
            self._refuse_new()
            if not request.model_id:
                return pb.KeepWarmResponse(keeping=self._for_peers.keeping(request.digest))
            ids = ids_from_wire(request.token_ids_le32)
            tokens = marked(ids, tuple(request.cuts))
            report = await self._for_peers.keep(
                PeerPrefix(
                    model_id=request.model_id,
                    digest=request.digest,
                    tokens=tokens,
                    holder=KvHolder(node_id=request.holder, tokens=len(ids)),
                )
            )
            keeping = self._for_peers.keeping(request.digest)
            if report is None:
                return pb.KeepWarmResponse(keeping=keeping)
            return pb.KeepWarmResponse(
                keeping=keeping,
                outcome=report.outcome,
                reason=report.reason,
                tokens=report.warmed.tokens,
                cached_tokens=report.warmed.cached,
                computed_tokens=report.warmed.computed,
            )
        raise AssertionError("abort returned")

    async def EmbedTexts(
        self, request: pb.EmbedTextsRequest, context: Context
    ) -> pb.EmbedTextsResponse:
        """Make vectors of texts."""
        async with errors_end(context):
            self._refuse_new()
            model = self._models.embedder(request.model_id)
            texts: Sequence[Sequence[int]] = [
                ids_from_wire(each) for each in request.request.token_ids_le32
            ]
            vectors = await model.embed(texts, size=request.request.size)
            response = engine_pb2.EmbedResponse(vectors_le_f32=vectors)
            weights = origin_of(model.facts).weights
            return pb.EmbedTextsResponse(response=response, weights=weights)
        raise AssertionError("abort returned")

    async def HoldAnswer(
        self, request: pb.HoldAnswerRequest, context: Context
    ) -> pb.HoldAnswerResponse:
        """Hold a copy of an answer."""
        async with errors_end(context):
            self._refuse_new()
            if not self._held.is_on:
                raise CapacityExhausted("this node holds no copies of answers (http_resume_mb 0)")
            self._held.hold(request.copy, request.frames_before)
        return pb.HoldAnswerResponse()

    async def FindAnswer(
        self, request: pb.FindAnswerRequest, context: Context
    ) -> pb.FindAnswerResponse:
        """Give the copy of an answer."""
        async with errors_end(context):
            found = self._held.find(request.answer_id, request.client)
            if found is None:
                raise NotFound(f"no copy of {request.answer_id[:80]!r} is held here")
            if request.forget:
                self._held.forget(request.answer_id, request.client)
            return pb.FindAnswerResponse(copy=found)
        raise AssertionError("abort returned")

    async def DescribeShare(
        self, request: pb.DescribeShareRequest, context: Context
    ) -> pb.DescribeShareResponse:
        """Tell what this node can give to a ring group."""
        async with errors_end(context):
            self._refuse_new()
            if self._share is None:
                raise Refused("this node gives nothing to ring groups")
            return await self._share(request)
        raise AssertionError("abort returned")

    async def WatchNode(  # type: ignore[override]
        self, request: pb.WatchNodeRequest, context: Context
    ) -> None:
        """Send the sections of this node, each when it changes."""
        async with errors_end(context):
            if self._facts is None:
                raise Refused("this node tells nothing of itself")
            async with aclosing(self._facts.changes(self._facts.own)) as changes:
                async for news in changes:
                    for name, value in news.items():
                        told = json.dumps(value, default=str).encode()
                        await context.write(pb.WatchNodeResponse(section=name, json=told))

    def _refuse_new(self) -> None:
        if self._draining:
            raise Refused(f"this node takes no requests: {self._draining}")

    def _any(self, model_id: str, client: str) -> LoadableModel:
        for model in self._models.embedders():
            if model.model_id == model_id:
                return model
        return self._models.get(model_id, client)

    def _asked(self, request: pb.RoutedDecodeRequest) -> tuple[DecodeRequest, QuotedModel]:
        asked = request_from_wire(request.request)
        model = self._models.get(request.model_id, request.client)
        facts = model.facts
        drafts = () if facts is None else self._router.sources(facts, request.draft_policy)
        retention = _retention(request.retention)
        kv_key = ""
        if facts is not None and asked.kv_key:
            claim = _claim(model.model_id, facts, request.client, asked.kv_key, retention)
            kv_key = self._precache.kv_key(claim)
        asked = replace(
            asked,
            draft_sources=drafts,
            kv_key=kv_key,
            kv_retention=retention,
            stay_warm_s=request.stay_warm_seconds,
            kv_holder=KvHolder(node_id=request.kv_holder, tokens=request.kv_holder_tokens),
        )
        return asked, model


def _span(name: str, model_id: str, context: Context) -> AbstractContextManager[None]:
    """The span of a call, below that of the node that makes it."""
    told = dict(context.invocation_metadata() or ())
    return traces.request(name, told, {"gen_ai.request.model": model_id})


async def _timed(frames: AsyncGenerator[Frame, None], model_id: str) -> AsyncGenerator[Frame, None]:
    """The same frames; at their end the span has its parts."""
    began_mono, first_s, prefill_s = time.monotonic(), None, None
    try:
        async with aclosing(frames):
            async for frame in frames:
                if isinstance(frame, Tokens) and first_s is None:
                    first_s = time.monotonic() - began_mono
                if isinstance(frame, Done):
                    prefill_s = frame.usage.prefill_s
                yield frame
    finally:
        traces.parts(
            ended_s=time.monotonic() - began_mono,
            first_token_s=first_s,
            prefill_s=prefill_s,
            facts={"gen_ai.request.model": model_id},
        )


def _claim(
    model_id: str, facts: ModelFacts, client: str, kv_key: str, retention: Retention
) -> PrefixClaim:
    """A conversation of a peer, by the key that the peer has for its KV."""
    use = CacheUse(keys=CacheKeys(conversation_id=kv_key), retention=retention)
    return PrefixClaim(model_id=model_id, facts=facts, client=client, use=use)


def _retention(raw: int) -> Retention:
    return Retention(raw) if raw in set(Retention) else Retention.LONG
