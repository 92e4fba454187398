"""Nodes of a fleet without a network: peers of toy models, which are lost at given places."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from kakeya.core.errors import KakeyaError, NotFound, PeerUnavailable, UnknownMethod
from kakeya.core.ids import ModelId
from kakeya.dispatch.peers.client import PeerDescription
from kakeya.dispatch.peers.neighbours import ServingPeer
from kakeya.dispatch.peers.quote import AnswerOrigin, Quote, origin_of, quote_of
from kakeya.dispatch.routed.history import RouteHistory
from kakeya.dispatch.routed.model import RoutedModel
from kakeya.dispatch.routing.candidate import RoutedRequest
from kakeya.fleet.cards.cards import CardRole, OfferedModel
from kakeya.fleet.placement.keepers import Keeping
from kakeya.generation.frames import Done, Frame, Progress, Tokens
from kakeya.generation.model import AdaptedId
from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.prefix.seam import PrefixClaim, TokenSource, WarmReport
from kakeya.prefix.warm.for_peers import PeerPrefix
from tests.dispatch.peers.world import QuotedToy, ToyEncoder, ToyKeeper, facts_of
from tests.fakes import FakeClock

OWN = "front"
BEFORE_ALL, BEFORE_END = -1, 10_000
"""Places of a loss: before any frame, and between the last token and the end."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The end of a try at a node after so many tokens; the node is away for `away_s`."""

    place: int
    away_s: float = 0.0
    failure: KakeyaError = field(default_factory=lambda: PeerUnavailable("the node is lost"))


@dataclass
class ToyNode:
    """A node of the fleet, and what came to it."""

    node_id: str
    model: QuotedToy
    away_until_mono: float = -math.inf
    is_suspect: bool = False
    vocabulary_digest: str = "words"
    asked: list[tuple[str, str, DecodeRequest, str]] = field(default_factory=list)
    """Model, client, request and policy of each try."""
    released: list[tuple[str, str, str]] = field(default_factory=list)
    quoted: list[str] = field(default_factory=list)
    """The clients of the requests that it quoted for."""
    quote_fails: str = ""
    is_old: bool = False
    """It does not say what computes an answer."""
    keeper: ToyKeeper = field(default_factory=ToyKeeper)
    life: int = 1


class ToyFleet:
    """The peers of one node, as `ServingPeers` tells them. Each try at any node, the own one
    included, takes the next of `losses`."""

    own_id = OWN

    def __init__(self, clock: FakeClock, nodes: Sequence[ToyNode] = ()) -> None:
        self.clock = clock
        self.nodes = {node.node_id: node for node in nodes}
        self.losses: deque[Loss] = deque()
        self.failures: list[tuple[str, KakeyaError]] = []
        self.described: set[str] = set()
        self.unreached: dict[str, str] = {}
        self.warmed: list[tuple[str, str]] = []
        self.tries: list[str] = []
        self.rates: dict[str, dict[str, float]] = {}
        """Of the nodes that share KV: the bytes/s from others."""
        self.adapters: tuple[AdaptedId, ...] = ()
        self.meanwhile: Callable[[], None] = lambda: None
        """What happens while quotes are on their way."""

    def is_here(self, node: ToyNode) -> bool:
        return node.away_until_mono <= self.clock.mono()

    def out_of_reach(self, model_id: str) -> str:
        return self.unreached.get(model_id, "")

    def offering(
        self, model_id: str = "", role: CardRole = CardRole.VERIFIER
    ) -> tuple[ServingPeer, ...]:
        found = []
        for node in self.nodes.values():
            its_role = (
                CardRole.EMBEDDER if isinstance(node.model, ToyEncoder) else CardRole.VERIFIER
            )
            names = ("", node.model.model_id)
            is_named = model_id in names or model_id.partition(":")[0] in names[1:]
            if self.is_here(node) and its_role is role and is_named:
                found.append(self.peer(node))
        return tuple(sorted(found, key=lambda one: (one.is_suspect, one.node_id)))

    def peer(self, node: ToyNode) -> ServingPeer:
        name = ModelId(node.model.model_id)
        digest = node.vocabulary_digest
        return ServingPeer(
            node_id=node.node_id,
            label=node.node_id,
            life=node.life,
            address=node.node_id,
            offered=OfferedModel(name, CardRole.VERIFIER, vocabulary_digest=digest),
            is_suspect=node.is_suspect,
        )

    def calls(self, peer: ServingPeer) -> ToyCalls:
        return ToyCalls(self, self.nodes[peer.node_id])

    async def quotes(
        self,
        peers: Sequence[ServingPeer],
        model_id: str,
        client: str,
        token_ids: Sequence[int],
        cuts: Sequence[int],
    ) -> Mapping[str, Quote | str]:
        found: dict[str, Quote | str] = {}
        for peer in peers:
            node = self.nodes[peer.node_id]
            node.quoted.append(client)
            found[peer.node_id] = node.quote_fails or quote_of(
                node.model, token_ids, cuts, self.rates.get(peer.node_id)
            )
        self.meanwhile()
        return found

    def kv_rates(self, model_id: str) -> Mapping[str, float] | None:
        return self.rates.get(OWN)

    async def adapted(self, client: str) -> tuple[AdaptedId, ...]:
        return self.adapters

    def abroad(self, kv_key: str) -> str:
        return f"{OWN}/{kv_key}" if kv_key else ""

    def warm_turn(
        self, peer: ServingPeer, claim: PrefixClaim, kv_key: str, tokens: TokenSource
    ) -> None:
        self.warmed.append((peer.node_id, kv_key))

    def failed(self, peer: ServingPeer, failure: KakeyaError) -> None:
        self.failures.append((peer.node_id, failure))

    def known(self, model_id: str, role: CardRole = CardRole.VERIFIER) -> PeerDescription | None:
        for peer in self.offering(model_id, role):
            if peer.node_id in self.described:
                return self.description(self.nodes[peer.node_id])
        return None

    async def describe(
        self,
        model_id: str,
        client: str,
        timeout_s: float,
        priority: GenerationPriority,
        *,
        role: CardRole = CardRole.VERIFIER,
    ) -> PeerDescription:
        for peer in self.offering(model_id, role):
            node = self.nodes[peer.node_id]
            if node.model.fails is not None:
                raise node.model.fails
            self.described.add(node.node_id)
            return self.description(node)
        raise NotFound(f"model {model_id!r} is not served by the fleet now")

    def description(self, node: ToyNode) -> PeerDescription:
        facts = node.model.facts or node.model.told
        return PeerDescription(facts=facts, manifest=node.model.manifest, text_digest="")

    async def disturbed(
        self, node: ToyNode, frames: AsyncGenerator[Frame, None]
    ) -> AsyncGenerator[Frame, None]:
        """The frames of a try at a node, up to its loss."""
        self.tries.append(node.node_id)
        loss = self.losses.popleft() if self.losses else None
        tokens = 0
        async with aclosing(frames):
            async for frame in frames:
                if loss is not None and self._is_due(loss, frame, tokens):
                    node.away_until_mono = self.clock.mono() + loss.away_s
                    raise loss.failure
                tokens += len(frame.token_ids) if isinstance(frame, Tokens) else 0
                yield frame

    @staticmethod
    def _is_due(loss: Loss, frame: Frame, tokens: int) -> bool:
        if isinstance(frame, Progress):
            return loss.place == BEFORE_ALL
        return isinstance(frame, Done) or tokens >= loss.place


@dataclass
class ToyCalls:
    """The calls of one node."""

    fleet: ToyFleet
    node: ToyNode

    async def decode(
        self,
        model_id: str,
        client: str,
        request: DecodeRequest,
        draft_policy: str,
        *,
        begun: Callable[[AnswerOrigin], None],
    ) -> AsyncGenerator[Frame, None]:
        self.node.asked.append((model_id, client, request, draft_policy))
        digest = self.node.model.adapter_digest
        frames = self.node.model.decode(request)
        async with aclosing(self.fleet.disturbed(self.node, frames)) as disturbed:
            async for frame in disturbed:
                if not self.node.is_old:
                    begun(origin_of(self.node.model.facts or self.node.model.told, digest))
                yield frame

    async def describe(
        self, model_id: str, client: str, wait_s: float, priority: GenerationPriority
    ) -> PeerDescription:
        await self.node.model.ready(wait_s, priority)
        return self.fleet.description(self.node)

    async def keeping(self, digest: bytes, timeout_s: float) -> Keeping:
        self._check()
        return self.node.keeper.keeping(digest)

    async def keep_warm(self, prefix: PeerPrefix) -> WarmReport | None:
        self._check()
        return await self.node.keeper.keep(prefix)

    def _check(self) -> None:
        if not self.fleet.is_here(self.node):
            raise PeerUnavailable("the node is lost")
        if self.node.is_old:
            raise UnknownMethod("no such method")

    async def release(self, model_id: str, client: str, kv_key: str) -> None:
        self.node.released.append((model_id, client, kv_key))
        if self.node.model.fails is not None:
            raise self.node.model.fails

    async def embed(
        self, model_id: str, texts: Sequence[Sequence[int]], size: int
    ) -> tuple[bytes, str]:
        assert isinstance(self.node.model, ToyEncoder)
        vectors = await self.node.model.embed(texts, size=size)
        return vectors, "" if self.node.is_old else origin_of(self.node.model.facts).weights


@dataclass
class OwnToy(QuotedToy):
    """The model of the own node, which is lost in its turn."""

    fleet: ToyFleet | None = None

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Frame, None]:
        assert self.fleet is not None
        node = ToyNode(OWN, self)
        async with aclosing(self.fleet.disturbed(node, super().decode(request))) as frames:
            async for frame in frames:
                yield frame


class Shelf:
    """One node's view of the fleet: `left` and `right` serve `toy`, and the own one with `own`."""

    def __init__(self, names: Sequence[str] = ("left", "right"), *, own: bool = False) -> None:
        self.clock = FakeClock()
        self.fleet = ToyFleet(self.clock, [ToyNode(name, QuotedToy()) for name in names])
        self.history = RouteHistory(self.clock)
        self.own = OwnToy(fleet=self.fleet) if own else None

    def node(self, name: str) -> ToyNode:
        return self.fleet.nodes[name]

    def told(self, name: str, **others: object) -> None:
        """Give a node facts of its own."""
        self.node(name).model.facts = facts_of(**others)

    def routed(self, model_id: str = "toy", client: str = "owner") -> RoutedModel:
        return RoutedModel(model_id, client, self.own, self.fleet, self.history)  # type: ignore[arg-type]

    def lose(self, *losses: Loss) -> None:
        self.fleet.losses.extend(losses)

    def left_over(self) -> int:
        """Requests that the ledger still counts, long after all have ended."""
        self.clock.advance(100.0)
        ledger = self.history.ledger
        ledger.corrected(RoutedRequest(prompt_tokens=1), (), self.clock.mono())
        return len(ledger)
