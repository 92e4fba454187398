"""The models of the fleet by name, for the front doors of one node: its own, and those of peers.

A name that only this node serves gives its own model as it is, so a node alone pays nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from kakeya.backends.request import ModelNotFound
from kakeya.core.errors import InvalidArgument, KakeyaError, NotFound, PeerUnavailable
from kakeya.dispatch.peers.neighbours import MOST_QUOTED, ServingPeer, ServingPeers
from kakeya.dispatch.peers.quote import OwnModels, Quote, QuotedModel
from kakeya.dispatch.routed.embedder import RoutedEmbedder, VectorWeights
from kakeya.dispatch.routed.history import RouteHistory
from kakeya.dispatch.routed.images import RoutedImageModel, painters
from kakeya.dispatch.routed.model import RoutedModel
from kakeya.dispatch.routed.pulls import FleetPulls
from kakeya.fleet.cards.cards import CardRole
from kakeya.generation.image import ImageModel
from kakeya.generation.model import AdaptedId, EmbeddingModel, ModelDirectory, ServedModel
from kakeya.prefix.seam import PrefixClaim, TokenSource

AWAY_S = 300.0
"""A model that no node offers was offered so lately: its node starts again, or its group forms."""
_RESTART_S = 15.0
"""Until a node that is drained is there again, if its owner starts it at once."""


class RoutedModels(ModelDirectory):
    """A `ModelDirectory` of the fleet."""

    def __init__(
        self,
        own: OwnModels,
        peers: ServingPeers,
        history: RouteHistory,
        pulls: FleetPulls | None = None,
    ) -> None:
        """`pulls` are those that requests may have made; None = none."""
        self._pulls = pulls
        self._own = own
        self._draining = ""
        self._peers = peers
        self._history = history
        self._vectors = VectorWeights(history.clock)
        self._drawing: Counter[str] = Counter()
        self._offered_mono: dict[tuple[CardRole, str], float] = {}
        """When a peer last offered a model for a request, by its role and its name on cards: a
        client may name any number of adapters."""

    def drain(self, reason: str) -> None:
        """Begin nothing with the own models from now on: peers are asked for all."""
        self._draining = reason

    def get(self, model_id: str, client: str = "") -> ServedModel:
        """See `ModelDirectory`; "" is this node's default, or else the first model of a peer."""
        own: QuotedModel | None = None
        refused: KakeyaError | None = None
        try:
            own = self._own.get(model_id, client)
        except (NotFound, InvalidArgument) as unknown:
            refused = unknown
        name = own.model_id if own is not None else model_id or _first(self._peers.offering())
        offered = self._peers.offering(name) if name else ()
        self._note(CardRole.VERIFIER, offered)
        if own is not None and self._draining:
            if not offered:
                raise self._leaving(name)
            own = None
        if own is not None and not offered:
            return own
        if own is None and not offered and not self._may_come(name):
            elsewhere = self._peers.out_of_reach(name)
            if away := self._away(CardRole.VERIFIER, name, elsewhere):
                raise away
            if elsewhere:
                raise ModelNotFound(f"the model {name[:80]!r} is not served here; {elsewhere}")
            raise refused or NotFound("no model is served")
        return self._routed(name, client, own)

    async def adapted(self, client: str = "") -> tuple[AdaptedId, ...]:
        """Those of this node, then those that only peers have, by name; a node tells those that
        the client may name."""
        own, theirs = await asyncio.gather(self._own.adapted(client), self._peers.adapted(client))
        known = {one.model_id for one in own}
        return (*own, *(one for one in theirs if one.model_id not in known))

    def verifiers(self) -> tuple[ServedModel, ...]:
        """The own models, the default first, then those that only peers have, by name."""
        own = self._own.verifiers()
        known = {model.model_id for model in own}
        offered = {str(peer.offered.model_id) for peer in self._peers.offering()}
        offered |= self._pulls.names() if self._pulls and not self._draining else frozenset()
        return (*own, *(self._routed(name, "", None) for name in sorted(offered - known)))

    def embedder(self, model_id: str) -> EmbeddingModel:
        """See `ModelDirectory`."""
        with contextlib.suppress(NotFound):
            return self._own.embedder(model_id)
        offered = self._peers.offering(model_id, CardRole.EMBEDDER)
        self._note(CardRole.EMBEDDER, offered)
        if offered:
            return RoutedEmbedder(model_id, self._peers, self._vectors)
        if away := self._away(CardRole.EMBEDDER, model_id):
            raise away
        return self._own.embedder(model_id)

    def embedders(self) -> tuple[EmbeddingModel, ...]:
        """The own ones, then those that only peers have, by name."""
        own = self._own.embedders()
        known = {model.model_id for model in own}
        offered = self._peers.offering(role=CardRole.EMBEDDER)
        others = sorted({str(peer.offered.model_id) for peer in offered} - known)
        return (*own, *(RoutedEmbedder(name, self._peers, self._vectors) for name in others))

    def image_model(self, model_id: str) -> ImageModel:
        """See `ModelDirectory`; "" is the first one of this node, or else of a peer."""
        own: ImageModel | None = None
        refused: KakeyaError | None = None
        try:
            own = self._own.image_model(model_id)
        except NotFound as unknown:
            refused = unknown
        name = own.model_id if own is not None else model_id or _first(painters(self._peers))
        offered = painters(self._peers, name) if name else ()
        self._note(CardRole.TOOL, offered)
        if own is not None and self._draining and not offered:
            raise self._leaving(name)
        if own is not None and not offered:
            return own
        if refused is not None and not offered:
            raise self._away(CardRole.TOOL, name) or refused
        return self._routed_image(name, None if self._draining else own)

    def image_models(self) -> tuple[ImageModel, ...]:
        """The own ones, then those that only peers have, by name."""
        own = self._own.image_models()
        known = {model.model_id for model in own}
        others = sorted({str(peer.offered.model_id) for peer in painters(self._peers)} - known)
        return (*own, *(self._routed_image(name, None) for name in others))

    async def held(
        self, model_id: str, client: str, token_ids: Sequence[int], cuts: Sequence[int]
    ) -> Mapping[str, int]:
        """How many leading tokens of a history have their KV at each node now, by node id; of a
        peer that does not quote in time nothing is told."""
        found: dict[str, int] = {}
        with contextlib.suppress(KakeyaError):
            own = self._own.get(model_id, client)
            found[self._peers.own_id] = own.held_tokens(token_ids, cuts)
        peers = self._peers.offering(model_id)[:MOST_QUOTED]
        quotes = await self._peers.quotes(peers, model_id, client, token_ids, cuts)
        told = {node: one.cached_tokens for node, one in quotes.items() if isinstance(one, Quote)}
        return found | told

    def turn_elsewhere(self, claim: PrefixClaim, kv_key: str, tokens: TokenSource) -> bool:
        """Have the next turn of a conversation warm at the peer that serves it; False where this
        node does."""
        last = self._history.last_node(kv_key)
        peer = next(
            (one for one in self._peers.offering(claim.model_id) if one.node_id == last), None
        )
        if peer is None:
            return False
        self._peers.warm_turn(peer, claim, kv_key, tokens)
        return True

    def _routed(self, name: str, client: str, own: QuotedModel | None) -> RoutedModel:
        return RoutedModel(name, client, own, self._peers, self._history, self._pulls)

    def _may_come(self, name: str) -> bool:
        return self._pulls is not None and not self._draining and self._pulls.has(name)

    def _note(self, role: CardRole, offered: Sequence[ServingPeer]) -> None:
        if offered:
            name = str(offered[0].offered.model_id)
            self._offered_mono[role, name] = self._history.clock.mono()

    def _away(self, role: CardRole, name: str, elsewhere: str = "") -> PeerUnavailable | None:
        """The error of a model that peers offered lately: agents ask again, and have no use for a
        404."""
        named = name if (role, name) in self._offered_mono else name.rpartition(":")[0]
        offered_mono = self._offered_mono.get((role, named), -math.inf)
        if (ago_s := self._history.clock.mono() - offered_mono) >= AWAY_S:
            return None
        said = f"; {elsewhere}" if elsewhere else ""
        return PeerUnavailable(
            f"no node offers the model {name[:80]} just now, and one did {ago_s:.0f} s ago{said}",
            retry_after_s=_RESTART_S,
        )

    def _routed_image(self, model_id: str, own: ImageModel | None) -> RoutedImageModel:
        return RoutedImageModel(model_id, own, self._peers, self._drawing)

    def _leaving(self, name: str) -> PeerUnavailable:
        return PeerUnavailable(
            f"this node takes no requests: {self._draining}, and no other node has {name}",
            retry_after_s=_RESTART_S,
        )


def _first(offering: Sequence[ServingPeer]) -> str:
    return min((str(peer.offered.model_id) for peer in offering), default="")
