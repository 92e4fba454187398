"""The way of one generation through the fleet: quotes of the nodes, then a decision; after the loss
of a node another one, for the tokens that are left."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256

from kakeya.core.errors import (
    Conflict,
    KakeyaError,
    LoadFailed,
    ModelLoading,
    NotFound,
    PeerError,
    PeerUnavailable,
    Refused,
)
from kakeya.core.units import pack_ids
from kakeya.dispatch.peers.neighbours import LATE, MOST_QUOTED, ServingPeer, ServingPeers
from kakeya.dispatch.peers.quote import (
    NO_ORIGIN,
    AnswerOrigin,
    Quote,
    QuotedModel,
    origin_of,
    quote_of,
)
from kakeya.dispatch.routed.history import RouteHistory
from kakeya.dispatch.routing.candidate import (
    UNKNOWN_OUTPUT_TOKENS,
    NodeLink,
    NodeSpeed,
    QueuedWork,
    RouteCandidate,
    RoutedRequest,
)
from kakeya.dispatch.routing.decision import NoRoute, RouteDecision, choose
from kakeya.fleet.cards.cards import CardRole, OfferedModel
from kakeya.generation.continuation import Continuation
from kakeya.generation.facts import ModelFacts, ModelState
from kakeya.generation.kv import NO_HOLDER, KvHolder
from kakeya.generation.request import DecodeRequest, GenerationPriority

ELSEWHERE = (PeerError, Refused, Conflict, LoadFailed, ModelLoading, NotFound)
"""Failures of one node that say nothing of another."""
RESUME_S = 30.0
"""How long a request that lost its node, or whose answer has begun, waits for one to go on."""
RETRY_S = 0.5
_MOST_LOSSES = 6
"""Losses of nodes in a row, without a token between them, that end a request: it may be what ends
them. A node that did not say that it can serve the request was not ended by it."""
_LEAST_BLOCK_TOKENS = 64
_LEAST_LEFT = 16
"""Tokens that are expected to follow of an answer that is longer than most."""
_UNKNOWN_LOAD_S = 30.0
"""Of a model that was never loaded: a guess, with which nodes that have it come first."""


def offering(
    peers: ServingPeers,
    model_id: str,
    facts: ModelFacts | None,
    role: CardRole = CardRole.VERIFIER,
) -> tuple[ServingPeer, ...]:
    """The peers that may serve a model, with the vocabulary of `facts` where these are known."""
    return tuple(
        peer for peer in peers.offering(model_id, role) if _has_words_of(facts, peer.offered)
    )


def _has_words_of(facts: ModelFacts | None, other: ModelFacts | OfferedModel | None) -> bool:
    """Whether token ids mean the same, as far as is known."""
    if facts is None or other is None:
        return True
    ours, theirs = facts.vocabulary_digest, other.vocabulary_digest
    return ours == theirs or not ours or not theirs


class RequestRoute:
    """The way of one generation through the fleet."""

    def __init__(
        self,
        model_id: str,
        client: str,
        own: QuotedModel | None,
        facts: ModelFacts | None,
        peers: ServingPeers,
        history: RouteHistory,
        *,
        origin: AnswerOrigin | None = None,
    ) -> None:
        """`own` is the model of this node with this name, None = it has none; the request is in
        the tokens of `facts`; `origin` began the answer, None = it has not begun."""
        self._model_id = model_id
        self._client = client
        self._own = own
        self._facts = facts
        self._peers = peers
        self._history = history
        self._clock = history.clock
        self._live: dict[str, ServingPeer] = {}
        self._quotes: dict[str, Quote] = {}
        self._lost: dict[str, str] = {}
        self._lost_last = ""
        self._losses = 0
        self._unsure: frozenset[str] = frozenset()
        """Nodes that are tried though they refuse or do not quote, since all do."""
        self._since_mono: float | None = None
        """Since when no node can be found; None = one took the request since."""
        self._last: KakeyaError | None = None
        self._origins: dict[str, AnswerOrigin] = {}
        """What computes the answer, by node that said it with its first token."""
        self._began_at = ""
        self.origin = origin
        """What computed the first token; None = there is none yet."""
        self.has_mixed_numerics = False
        """Whether parts of the answer were computed with unlike arithmetic."""

    def peer(self, node_id: str) -> ServingPeer:
        """A node of the last decision."""
        return self._live[node_id]

    def told_origin(self, node_id: str, origin: AnswerOrigin) -> None:
        """Note what a node says of what computes the answer there."""
        self._origins[node_id] = origin

    def began_at(self, node_id: str) -> None:
        """Note that tokens come from a node: others have to have its weights to go on."""
        self._losses, self._since_mono = 0, None
        if node_id == self._began_at:
            return
        self._began_at = node_id
        origin = self._origins.get(node_id, NO_ORIGIN)
        if node_id == self._peers.own_id and self._own is not None:
            origin = origin_of(self._own.facts, self._own.adapter_digest)
        elif origin == NO_ORIGIN and (quote := self._quotes.get(node_id)) is not None:
            origin = quote.origin
        if self.origin is None:
            self.origin = origin
        elif not origin.numerics or origin.numerics != self.origin.numerics:
            self.has_mixed_numerics = True

    def lost(self, node_id: str, failure: KakeyaError) -> None:
        """Note that a node did not finish the request."""
        self._lost[node_id] = failure.message
        self._lost_last = node_id
        self._began_at = ""
        if node_id not in self._unsure:
            self._losses, self._since_mono = self._losses + 1, None
        self._last = failure
        if (peer := self._live.get(node_id)) is not None:
            self._peers.failed(peer, failure)

    async def decide(self, job: Continuation) -> tuple[RouteDecision, RoutedRequest]:
        """Choose a node for what is left of a request. Raises the last failure, or NoRoute, where
        none can serve it."""
        if self._last is not None and self._losses >= _MOST_LOSSES:
            raise self._last
        if self._last is not None and self.origin is not None and not self.origin.weights:
            raise PeerUnavailable(
                f"{self._model_id}: the node that answered was lost, and no other is known to have "
                f"its weights: {self._last.message}",
                retry_after_s=1.0,
            )
        now = self._clock.mono()
        if self._since_mono is None:
            self._since_mono = now
        until_mono = self._since_mono + self._patience_s(job.rest(now))
        while True:
            rest = job.rest(self._clock.mono())
            told = self._told(rest)
            try:
                decision = choose(told, await self._candidates(rest, told))
            except NoRoute as none:
                failure = self._last or none
                # A refusal may be over when nodes were lost meanwhile: all are tried again.
                self._lost.clear()
                pause_s = RETRY_S
                if isinstance(failure, ModelLoading):  # the load goes on there
                    pause_s = max(RETRY_S, failure.retry_after_s or 0.0)
                if self._clock.mono() + pause_s - RETRY_S >= until_mono:
                    raise failure from None
                if self.origin is not None:
                    await self._learn_weights(rest.priority, until_mono)
                await self._clock.sleep(pause_s)
                continue
            if self._lost_last not in ("", decision.node_id):
                self._history.note_move()
            return decision, told

    async def _learn_weights(self, priority: GenerationPriority, until_mono: float) -> None:
        """Have a node load the model that never did: before that its weights have no digest."""
        for node_id, quote in self._quotes.items():
            peer, left_s = self._live.get(node_id), until_mono - self._clock.mono()
            if peer is None or quote.origin.weights or quote.refusal or left_s <= 0:
                continue
            with contextlib.suppress(KakeyaError):
                calls = self._peers.calls(peer)
                await calls.describe(self._model_id, self._client, left_s, priority)
                return

    def _patience_s(self, rest: DecodeRequest) -> float:
        """How long to wait for a node, at most until the request's deadline."""
        if self.origin is None and not isinstance(self._last, PeerError | ModelLoading):
            return 0.0
        return RESUME_S if rest.deadline_s is None else min(RESUME_S, rest.deadline_s)

    def _told(self, rest: DecodeRequest) -> RoutedRequest:
        facts = self._facts
        block = max(_LEAST_BLOCK_TOKENS, facts.kv_block_tokens if facts is not None else 0)
        return RoutedRequest(
            prompt_tokens=len(rest.token_ids),
            output_tokens=min(rest.max_tokens, UNKNOWN_OUTPUT_TOKENS),
            priority=rest.priority,
            deadline_s=rest.deadline_s,
            conversation=rest.kv_key,
            last_node=self._history.last_node(rest.kv_key),
            blocks=_block_names(rest.token_ids, block),
            block_tokens=block,
            kv_bytes_per_token=facts.kv_bytes_per_token if facts is not None else 0,
        )

    async def _candidates(
        self, rest: DecodeRequest, told: RoutedRequest
    ) -> Sequence[RouteCandidate]:
        offered = offering(self._peers, self._model_id, self._facts)
        left = [peer for peer in offered if peer.node_id not in self._lost]
        own_id = self._peers.own_id
        has_own = self._own is not None and own_id not in self._lost
        # A node in doubt would only delay the answer where another one can give it.
        trusted = [peer for peer in left if not peer.is_suspect]
        peers = _to_ask(trusted if trusted or has_own else left, told)
        self._live |= {peer.node_id: peer for peer in peers}
        answers: Mapping[str, Quote | str] = {}
        asked_mono = self._clock.mono()
        if peers:
            answers = await self._peers.quotes(
                peers, self._model_id, self._client, rest.token_ids, rest.cuts
            )
        found: list[RouteCandidate] = []
        if self._own is not None and has_own:
            rates = self._peers.kv_rates(self._model_id)
            quote: Quote | str = quote_of(self._own, rest.token_ids, rest.cuts, rates)
            if not _has_words_of(self._facts, self._own.facts):
                quote = "its vocabulary is not that of the prompt"
            found.append(self._candidate(own_id, quote, None))
        # What this node routed since then may be in no quote.
        age_s = self._clock.mono() - asked_mono
        found += [
            self._candidate(peer.node_id, answers[peer.node_id], peer, age_s) for peer in peers
        ]
        unsure: list[RouteCandidate] = []
        if all(one.unfit for one in found):
            # A node that would refuse now may let the request wait, and a late one may be busy.
            unsure = [one for one in found if one.unfit in (LATE, self._refusal(one.node_id))]
            found = [replace(one, unfit="") if one in unsure else one for one in found]
        self._unsure = frozenset(one.node_id for one in unsure)
        found = [replace(one, kv_rates=self._kv_rates(one.node_id)) for one in found]
        found += [RouteCandidate(node_id=one, unfit=why) for one, why in self._lost.items()]
        return self._history.ledger.corrected(told, found, self._clock.mono())

    def kv_holder(self, decision: RouteDecision, told: RoutedRequest) -> KvHolder:
        """The node from which the chosen one may fetch KV that it lacks: as foretold, or the one
        with the most, or else the one that served the conversation last, if it quotes no more."""
        chosen, most = decision.chosen, NO_HOLDER
        if chosen.fetched_tokens:
            tokens = chosen.warm_tokens + chosen.fetched_tokens
            return KvHolder(node_id=chosen.fetch.node_id, tokens=tokens)
        for node_id in self._kv_rates(chosen.node_id):
            held = self._quotes[node_id].cached_tokens
            if held > max(chosen.warm_tokens, most.tokens):
                most = KvHolder(node_id=node_id, tokens=held)
        if most is NO_HOLDER and told.last_node not in (*self._quotes, ""):
            return KvHolder(node_id=told.last_node)
        return most

    def _kv_rates(self, node_id: str) -> Mapping[str, float]:
        """The bytes/s with which KV comes to a node from those that compute as it does."""
        quote = self._quotes.get(node_id)
        if quote is None or not quote.kv_rates or not quote.origin.numerics:
            return {}
        found = {one: (quote.kv_rates.get(one), told) for one, told in self._quotes.items()}
        return {
            one: rate
            for one, (rate, told) in found.items()
            if rate and told.kv_rates is not None and told.origin == quote.origin
        }

    def _refusal(self, node_id: str) -> str:
        quote = self._quotes.get(node_id)
        return "" if quote is None else quote.refusal

    def _candidate(
        self, node_id: str, quote: Quote | str, peer: ServingPeer | None, age_s: float = 0.0
    ) -> RouteCandidate:
        if isinstance(quote, str):
            return RouteCandidate(node_id=node_id, unfit=quote)
        self._quotes[node_id] = quote
        unfit = quote.refusal
        if self.origin is not None and quote.origin.weights != self.origin.weights:
            unfit = "its weights are not those that began the answer"
        own = self._own
        if own is not None and own.adapter_digest:
            ours = origin_of(own.facts, own.adapter_digest).weights
            if ours and quote.origin.weights not in ("", ours):
                unfit = "its adapter of this name, or the model, is another one"
        load = quote.load
        return RouteCandidate(
            node_id=node_id,
            is_local=peer is None,
            state=ModelState.READY if quote.is_ready else ModelState.UNLOADED,
            load_s=_UNKNOWN_LOAD_S if quote.load_s is None else quote.load_s,
            speed=NodeSpeed(
                prefill_tokens_per_s=quote.prefill_tokens_per_s,
                decode_tokens_per_s=quote.tokens_per_s,
                piece_tokens=quote.piece_tokens,
                max_rows=quote.batch_rows,
            ),
            work=QueuedWork(
                prompt_tokens=load.waiting_tokens,
                prompts=load.waiting,
                rows=tuple(
                    max(_LEAST_LEFT, UNKNOWN_OUTPUT_TOKENS - tokens) for tokens in load.answers
                ),
                prompts_per_s=load.prompts_per_s,
                busy_share=load.busy_share,
            ),
            link=NodeLink(round_trip_s=0.0 if peer is None else peer.rtt_s),
            warm_tokens=max(quote.cached_tokens, quote.alike.tokens),
            held_tokens=quote.cached_tokens,
            sharers=quote.alike.requests,
            age_s=age_s,
            unfit=unfit,
        )


def _to_ask(peers: Sequence[ServingPeer], told: RoutedRequest) -> Sequence[ServingPeer]:
    """The peers to ask for quotes. Of more than MOST_QUOTED the node of the conversation's last
    turn, and others by a hash with the first block: prompts with one beginning ask the same ones,
    and all prompts together ask all."""
    if len(peers) <= MOST_QUOTED:
        return peers
    first = told.blocks[0] if told.blocks else b""

    def order(peer: ServingPeer) -> tuple[bool, bytes]:
        return peer.node_id != told.last_node, sha256(first + peer.node_id.encode()).digest()

    return sorted(peers, key=order)[:MOST_QUOTED]


def _block_names(token_ids: Sequence[int], block_tokens: int) -> tuple[bytes, ...]:
    digest, names = sha256(), []
    packed, size = pack_ids(token_ids), 4 * block_tokens
    for start in range(0, len(packed) - size + 1, size):
        digest.update(packed[start : start + size])
        names.append(digest.digest()[:16])
    return tuple(names)
