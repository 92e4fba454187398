"""A model of the fleet, as one of this node's: each request goes to the node that serves it best,
and goes on at another one when that node is lost.

    ready     the facts of the model, from here or from a peer; nothing loads where a peer has it
    decode    quotes of the nodes -> one scored decision -> the frames of the chosen node; after a
              loss the decision is made anew for the tokens that are left

`backends/attempt` goes on over losses of engines of one node, this over losses of nodes. Both count
committed tokens with a `Continuation`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from kakeya.core.clock import Clock
from kakeya.core.errors import (
    Conflict,
    KakeyaError,
    LoadFailed,
    NotFound,
    PeerError,
    Refused,
    UnknownMethod,
)
from kakeya.core.log import event
from kakeya.core.units import pack_ids
from kakeya.dispatch.peers.neighbours import ServingPeer, ServingPeers
from kakeya.dispatch.peers.quote import Quote, QuotedModel, numerics_of, quote_of, weights_of
from kakeya.dispatch.routing.candidate import (
    NodeLink,
    NodeSpeed,
    QueuedWork,
    RouteCandidate,
    RoutedRequest,
)
from kakeya.dispatch.routing.decision import NoRoute, RouteDecision, choose
from kakeya.dispatch.routing.ledger import RouteLedger
from kakeya.generation.continuation import Continuation
from kakeya.generation.facts import EngineStats, ModelFacts, ModelState
from kakeya.generation.frames import Done, Frame, Tokens
from kakeya.generation.manifest import NO_MANIFEST, Manifest
from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.generation.waiting import RequestWait

_log = logging.getLogger(__name__)
RESUME_S = 30.0
"""How long a request that lost its node, or whose answer has begun, waits for one to go on."""
RETRY_S = 0.5
_MOST_LOSSES = 6
"""Losses of nodes in a row, without a token between them, that end a request."""
_MOST_CONVERSATIONS = 4096
_LEAST_BLOCK_TOKENS = 64
_ELSEWHERE = (PeerError, Refused, Conflict, LoadFailed, NotFound, UnknownMethod)
"""Failures of one node that say nothing of another."""


class RouteBook:
    """What this node remembers of its routes: the requests under way, and the node that each
    conversation was served by."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.ledger = RouteLedger()
        self._keys = itertools.count(1)
        self._last: dict[str, str] = {}
        self.routed: dict[str, int] = {}
        """Generations by the node that they were sent to."""
        self.moved = 0
        """Generations that went on at another node."""

    def last_node(self, conversation: str) -> str:
        """The node that served a conversation last; "" = none is known."""
        return self._last.get(conversation, "")

    def begin(self, request: RoutedRequest, decision: RouteDecision) -> str:
        """Note a route, before the next one is decided; returns its key in the ledger."""
        key, node_id = str(next(self._keys)), decision.node_id
        self.ledger.begin(key, request, decision, self.clock.mono())
        self.routed[node_id] = self.routed.get(node_id, 0) + 1
        if request.conversation:
            self._last.pop(request.conversation, None)
            self._last[request.conversation] = node_id
            while len(self._last) > _MOST_CONVERSATIONS:
                del self._last[next(iter(self._last))]
        return key


class RoutedModel:
    """A `ServedModel` for one client; see the module."""

    def __init__(
        self, model_id: str, client: str, own: QuotedModel | None, peers: ServingPeers,
        book: RouteBook,
    ) -> None:
        """`own` is the model of this node with this name; None = it has none."""
        self._model_id = model_id
        self._client = client
        self._own = own
        self._peers = peers
        self._book = book
        self._clock = book.clock
        self.decisions: list[RouteDecision] = []
        """Of its generations, in order."""

    @property
    def model_id(self) -> str:
        """The name that callers use."""
        return self._model_id

    @property
    def manifest(self) -> Manifest:
        """That of this node, or else of a peer that was asked."""
        if self._own is not None:
            return self._own.manifest
        known = self._peers.known(self._model_id)
        return NO_MANIFEST if known is None else known.manifest

    @property
    def state(self) -> ModelState:
        """READY where this node or a peer serves it."""
        if self._own is not None and self._own.state is ModelState.READY:
            return ModelState.READY
        if self._offering():
            return ModelState.READY
        return ModelState.UNLOADED if self._own is None else self._own.state

    @property
    def last_error(self) -> str:
        """That of the own model; "" where there is none."""
        return "" if self._own is None else self._own.last_error

    @property
    def facts(self) -> ModelFacts | None:
        """Those of this node, or else of a peer that was asked."""
        if self._own is not None and self._own.facts is not None:
            return self._own.facts
        known = self._peers.known(self._model_id)
        return None if known is None else known.facts

    @property
    def folder(self) -> Path | None:
        """The folder of the own model."""
        return None if self._own is None else self._own.folder

    def waits_for(self) -> RequestWait | None:
        """What the own model waits for."""
        return None if self._own is None or self._offering() else self._own.waits_for()

    async def ready(
        self, timeout_s: float, priority: GenerationPriority = GenerationPriority.NORMAL
    ) -> ModelFacts:
        """See `ServedModel`. Where a peer serves the model, nothing is loaded here."""
        own = self._own
        if own is not None and (own.facts is not None or not self._offering()):
            return own.facts or await own.ready(timeout_s, priority)
        try:
            return (
                await self._peers.describe(self._model_id, self._client, timeout_s, priority)
            ).facts
        except KakeyaError:
            if own is None:
                raise
            return await own.ready(timeout_s, priority)

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Frame, None]:
        """See `ServedModel`. Raises the failure of the last node where no other can go on."""
        clock = self._clock
        job = Continuation(request, clock.mono())
        route = _Route(self, request)
        while True:
            rest = job.rest(clock.mono())
            decision, told = await route.decide(rest, has_begun=job.has_begun)
            key = self._book.begin(told, decision)
            try:
                async with aclosing(self._frames(decision.node_id, route, rest)) as frames:
                    async for frame in frames:
                        taken = job.take(frame, clock.mono())
                        if isinstance(taken, Tokens):
                            self._book.ledger.first_token(key, clock.mono())
                            route.began_at(decision.node_id)
                        if taken is not None:
                            yield taken
                        if isinstance(taken, Done):
                            return
            except _ELSEWHERE as failure:
                job.interrupt()
                route.lost(decision.node_id, failure)
                event(
                    _log,
                    "a node did not finish a request",
                    level=logging.WARNING,
                    model=self._model_id,
                    node=decision.node_id,
                    tokens=job.tokens,
                    error=failure.message,
                )
            finally:
                self._book.ledger.end(key, clock.mono())
            facts = self.facts
            if facts is not None and (done := job.finish(facts.context_tokens, clock.mono())):
                yield done
                return

    async def release(self, kv_key: str) -> None:
        """Forget the KV of a key, here and at the node that served its last request."""
        if self._own is not None:
            await self._own.release(kv_key)
        last = self._book.last_node(kv_key)
        for peer in self._offering():
            if peer.node_id == last:
                try:
                    await self._peers.calls(peer).release(self._model_id, self._abroad(kv_key))
                except KakeyaError as failure:  # it is a matter of room, not of right and wrong
                    self._peers.failed(peer, failure)

    async def stats(self) -> EngineStats:
        """Those of the own engine."""
        return EngineStats() if self._own is None else await self._own.stats()

    # Between the parts of this module

    def _offering(self) -> tuple[ServingPeer, ...]:
        """The peers that may serve it, with the tokens of the own model where there is one."""
        found = self._peers.offering(self._model_id)
        facts = None if self._own is None else self._own.facts
        if facts is None or not facts.vocabulary_digest:
            return found
        same = ("", facts.vocabulary_digest)
        return tuple(peer for peer in found if peer.offered.vocabulary_digest in same)

    def _abroad(self, kv_key: str) -> str:
        """The name of KV at other nodes, which have keys of their own."""
        return f"{self._peers.own_id}/{kv_key}" if kv_key else ""

    def _frames(
        self, node_id: str, route: _Route, rest: DecodeRequest
    ) -> AsyncGenerator[Frame, None]:
        if node_id == self._peers.own_id and self._own is not None:
            return self._own.decode(rest)
        peer = route.peer(node_id)
        policy = "auto" if rest.draft_sources else "off"
        asked = replace(rest, draft_sources=(), kv_key=self._abroad(rest.kv_key))
        return self._peers.calls(peer).decode(self._model_id, asked, policy)


class _Route:
    """The way of one generation through the fleet."""

    def __init__(self, model: RoutedModel, request: DecodeRequest) -> None:
        self._model = model
        self._peers = model._peers
        self._own = model._own
        self._book = model._book
        self._clock = model._clock
        self._request = request
        self._live: dict[str, ServingPeer] = {}
        self._quotes: dict[str, Quote] = {}
        self._lost: dict[str, str] = {}
        self._losses = 0
        self._last: KakeyaError | None = None
        self._weights = ""

    def peer(self, node_id: str) -> ServingPeer:
        """A node of the last decision."""
        return self._live[node_id]

    def began_at(self, node_id: str) -> None:
        """Note that tokens come from a node: others have to have its weights to go on."""
        self._losses = 0
        quote = self._quotes.get(node_id)
        self._weights = self._weights or (quote.weights if quote is not None else "")

    def lost(self, node_id: str, failure: KakeyaError) -> None:
        """Note that a node did not finish the request."""
        self._lost[node_id] = failure.message
        self._losses += 1
        self._last = failure
        if (peer := self._live.get(node_id)) is not None:
            self._peers.failed(peer, failure)

    async def decide(
        self, rest: DecodeRequest, *, has_begun: bool
    ) -> tuple[RouteDecision, RoutedRequest]:
        """Choose a node. Raises the last failure, or NoRoute, where none can serve the request."""
        if self._last is not None:
            if self._losses >= _MOST_LOSSES:
                raise self._last
            self._model._book.moved += 1
        is_patient = has_begun or isinstance(self._last, PeerError)
        until_mono = self._clock.mono() + (RESUME_S if is_patient else 0.0)
        while True:
            told = self._told(rest)
            try:
                decision = choose(told, await self._candidates(rest, told))
            except NoRoute as none:
                failure = self._last or none
                # A refusal may be over when nodes were lost meanwhile: all are tried again.
                self._lost.clear()
                if self._clock.mono() >= until_mono:
                    raise failure from None
                await self._clock.sleep(RETRY_S)
                continue
            self._model.decisions.append(decision)
            return decision, told

    def _told(self, rest: DecodeRequest) -> RoutedRequest:
        facts = self._model.facts
        block = max(_LEAST_BLOCK_TOKENS, facts.kv_block_tokens if facts is not None else 0)
        return RoutedRequest(
            prompt_tokens=len(rest.token_ids),
            output_tokens=min(rest.max_tokens, RoutedRequest(prompt_tokens=0).output_tokens),
            priority=rest.priority,
            deadline_s=rest.deadline_s,
            conversation=rest.kv_key,
            last_node=self._book.last_node(rest.kv_key),
            blocks=_block_names(rest.token_ids, block),
            block_tokens=block,
            kv_bytes_per_token=facts.kv_bytes_per_token if facts is not None else 0,
        )

    async def _candidates(
        self, rest: DecodeRequest, told: RoutedRequest
    ) -> Sequence[RouteCandidate]:
        peers = [peer for peer in self._model._offering() if peer.node_id not in self._lost]
        self._live |= {peer.node_id: peer for peer in peers}
        answers: Mapping[str, Quote | str] = {}
        if peers:
            answers = await self._peers.quotes(
                peers, self._model.model_id, rest.client, rest.token_ids, rest.cuts
            )
        found = []
        own, own_id = self._own, self._peers.own_id
        if own is not None and own_id not in self._lost:
            quote = quote_of(own, rest.token_ids, rest.cuts)
            found.append(self._candidate(own_id, quote, None))
        for peer in peers:
            answer = answers.get(peer.node_id, "it was not asked: too many nodes have the model")
            found.append(self._candidate(peer.node_id, answer, peer))
        found += [RouteCandidate(node_id=one, unfit=why) for one, why in self._lost.items()]
        return self._book.ledger.corrected(told, found, self._clock.mono())

    def _candidate(
        self, node_id: str, quote: Quote | str, peer: ServingPeer | None
    ) -> RouteCandidate:
        if isinstance(quote, str):
            return RouteCandidate(node_id=node_id, unfit=quote)
        self._quotes[node_id] = quote
        unfit = quote.refusal
        if self._weights and quote.weights != self._weights:
            unfit = "its weights are not those that began the answer"
        load = quote.load
        return RouteCandidate(
            node_id=node_id,
            is_local=peer is None,
            state=ModelState.READY if quote.is_ready else ModelState.UNLOADED,
            load_s=_UNKNOWN_LOAD_S if quote.load_s is None else quote.load_s,
            speed=NodeSpeed(
                prefill_tokens_per_s=quote.prefill_tokens_per_s,
                decode_tokens_per_s=quote.tokens_per_s,
                max_rows=quote.batch_rows,
            ),
            work=QueuedWork(
                prompt_tokens=load.waiting_tokens, rows=(0,) * (load.decoding + load.waiting)
            ),
            link=NodeLink(round_trip_s=0.0 if peer is None else peer.rtt_s),
            warm_tokens=quote.cached_tokens,
            is_warm_exact=True,
            unfit=unfit,
        )


_UNKNOWN_LOAD_S = 30.0
"""Of a model that was never loaded: a guess, with which nodes that have it come first."""


def _block_names(token_ids: Sequence[int], block_tokens: int) -> tuple[bytes, ...]:
    digest, names = sha256(), []
    packed, size = pack_ids(token_ids), 4 * block_tokens
    for start in range(0, len(packed) - size + 1, size):
        digest.update(packed[start : start + size])
        names.append(digest.digest()[:16])
    return tuple(names)
