"""A model of the fleet, as one of this node's.

    ready     the facts of the model, from here or from a peer; nothing loads where a peer has it
    decode    quotes of the nodes -> one scored decision -> the frames of the chosen node; after a
              loss the decision is made anew for the tokens that are left

`backends/attempt` goes on over losses of engines of one node, this over losses of nodes. Both count
committed tokens with a `Continuation`.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path

from kakeya.core.errors import KakeyaError
from kakeya.core.log import event
from kakeya.dispatch.peers.neighbours import ServingPeer, ServingPeers
from kakeya.dispatch.peers.quote import NO_ORIGIN, AnswerOrigin, QuotedModel
from kakeya.dispatch.routed.history import RouteHistory
from kakeya.dispatch.routed.pulls import FleetPulls
from kakeya.dispatch.routed.route import ELSEWHERE, RequestRoute, offering
from kakeya.dispatch.routing.decision import RouteDecision
from kakeya.generation.continuation import Continuation
from kakeya.generation.facts import EngineStats, ModelFacts, ModelState
from kakeya.generation.frames import Done, Frame, Tokens
from kakeya.generation.manifest import NO_MANIFEST, Manifest
from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.generation.waiting import RequestWait

_log = logging.getLogger(__name__)
MOST_DECISIONS = 64
"""A gRPC session makes one for each turn, and lasts for days."""


class RoutedModel:
    """A `ServedModel` for one client; see the module."""

    def __init__(
        self,
        model_id: str,
        client: str,
        own: QuotedModel | None,
        peers: ServingPeers,
        history: RouteHistory,
        pulls: FleetPulls | None = None,
    ) -> None:
        """`own` is the model of this node with this name; None = it has none. `pulls` may bring
        it."""
        self._pulls = pulls
        self._model_id = model_id
        self._client = client
        self._own = own
        self._peers = peers
        self._history = history
        self._clock = history.clock
        self._told: ModelFacts | None = None
        """The facts that its caller has: the requests are in these tokens."""
        self.began_with = NO_ORIGIN
        """What its last answer began with."""
        self.decisions: deque[RouteDecision] = deque(maxlen=MOST_DECISIONS)
        """Of its generations, in order: the latest."""

    @property
    def model_id(self) -> str:
        """The name that callers use."""
        return self._model_id

    @property
    def served_by(self) -> str:
        """The label of the peer that gave the last answer; "" = this node did, or none was."""
        chosen = self.decisions[-1].node_id if self.decisions else self._peers.own_id
        if chosen == self._peers.own_id:
            return ""
        labels = {peer.node_id: peer.label for peer in self._peers.live()}
        return labels.get(chosen, chosen)

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
        if self._is_loaded_elsewhere():
            return ModelState.READY
        return ModelState.UNLOADED if self._own is None else self._own.state

    @property
    def last_error(self) -> str:
        """That of the own model; "" where there is none."""
        return "" if self._own is None else self._own.last_error

    @property
    def facts(self) -> ModelFacts | None:
        """Those that `ready` told, of this node, or of a peer that was asked."""
        told = self._told or (None if self._own is None else self._own.facts)
        if told is not None:
            return told
        known = self._peers.known(self._model_id)
        return None if known is None else known.facts

    @property
    def folder(self) -> Path | None:
        """The folder of the own model."""
        return None if self._own is None else self._own.folder

    def waits_for(self) -> RequestWait | None:
        """What the own model waits for, or how far its pull is."""
        own = self._own
        if own is None:
            return self._pulls.waits_for(self._model_id) if self._pulls else None
        return None if self._is_loaded_elsewhere() else own.waits_for()

    async def ready(
        self, timeout_s: float, priority: GenerationPriority = GenerationPriority.NORMAL
    ) -> ModelFacts:
        """See `ServedModel`. Where a peer serves the model, nothing is loaded here; one that none
        offers is pulled, where it may be."""
        if self._own is None and self._pulls is not None and not self._offering():
            began_mono = self._clock.mono()
            self._own = await self._pulls.bring(self._model_id, timeout_s)
            timeout_s = max(0.0, timeout_s - (self._clock.mono() - began_mono))
        self._told = await self._ready(timeout_s, priority)
        return self._told

    async def _ready(self, timeout_s: float, priority: GenerationPriority) -> ModelFacts:
        own = self._own
        if own is not None and (own.facts is not None or not self._is_loaded_elsewhere()):
            return own.facts or await own.ready(timeout_s, priority)
        try:
            return (
                await self._peers.describe(self._model_id, self._client, timeout_s, priority)
            ).facts
        except KakeyaError:
            if own is None:
                raise
            return await own.ready(timeout_s, priority)

    async def decode(
        self, request: DecodeRequest, origin: AnswerOrigin | None = None
    ) -> AsyncGenerator[Frame, None]:
        """See `ServedModel`. `origin` is what the answer began with elsewhere: nodes with other
        weights are not chosen. Raises the failure of the last node where no other can go on."""
        clock = self._clock
        job = Continuation(request, clock.mono())
        facts = self.facts
        route = RequestRoute(
            self._model_id,
            self._client,
            self._own,
            facts,
            self._peers,
            self._history,
            origin=origin,
        )
        while True:
            decision, told = await route.decide(job)
            holder = route.kv_holder(decision, told)
            rest = replace(job.rest(clock.mono()), kv_holder=holder)
            self.decisions.append(decision)
            key = self._history.begin(told, decision)
            try:
                async with aclosing(self._frames(decision.node_id, route, rest)) as frames:
                    async for frame in frames:
                        taken = job.take(frame, clock.mono())
                        if isinstance(taken, Tokens):
                            self._history.ledger.first_token(key, clock.mono())
                            route.began_at(decision.node_id)
                            self.began_with = route.origin or NO_ORIGIN
                        if taken is not None:
                            yield _told(taken, route)
                        if isinstance(taken, Done):
                            return
            except ELSEWHERE as failure:
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
                self._history.ledger.end(key, clock.mono())
            most = sys.maxsize if facts is None else facts.context_tokens
            if (done := job.finish(most, clock.mono())) is not None:
                yield _told(done, route)
                return

    async def release(self, kv_key: str) -> None:
        """Forget the KV of a key, here and at the node that served its last request."""
        if self._own is not None:
            await self._own.release(kv_key)
        last = self._history.last_node(kv_key)
        for peer in self._offering():
            if peer.node_id == last:
                try:
                    await self._peers.calls(peer).release(
                        self._model_id, self._client, self._peers.abroad(kv_key)
                    )
                except KakeyaError as failure:  # it is a matter of room, not of right and wrong
                    self._peers.failed(peer, failure)

    async def stats(self) -> EngineStats:
        """Those of the own engine."""
        return EngineStats() if self._own is None else await self._own.stats()

    # Between the parts of this module

    def _is_loaded_elsewhere(self) -> bool:
        """Whether a peer has it, or had it, in memory: what it is can be told without a load."""
        return any(peer.offered.vocabulary_digest for peer in self._offering())

    def _offering(self) -> tuple[ServingPeer, ...]:
        return offering(self._peers, self._model_id, self.facts)

    def _frames(
        self, node_id: str, route: RequestRoute, rest: DecodeRequest
    ) -> AsyncGenerator[Frame, None]:
        if node_id == self._peers.own_id and self._own is not None:
            return self._own.decode(rest)
        peer = route.peer(node_id)
        asked = replace(rest, draft_sources=(), kv_key=self._peers.abroad(rest.kv_key))
        return self._peers.calls(peer).decode(
            self._model_id,
            self._client,
            asked,
            _policy(rest),
            begun=partial(route.told_origin, node_id),
        )


def _policy(request: DecodeRequest) -> str:
    """The policy for another node: what its words mean there, so a peer may be this node; as `auto`
    where they name a source, which this node alone may know."""
    if request.draft_policy in ("ngram", "peer"):
        return request.draft_policy
    return "auto" if request.draft_sources else "off"


def _told(frame: Frame, route: RequestRoute) -> Frame:
    """The last frame says whether nodes of unlike arithmetic computed the answer."""
    if not isinstance(frame, Done) or not route.has_mixed_numerics:
        return frame
    return replace(frame, usage=replace(frame.usage, mixed_numerics=True))
