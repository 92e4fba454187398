"""The peers of this node as sources of models: their lists, manifests and pieces."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kakeya.core.clock import Clock
from kakeya.core.errors import KakeyaError, NotFound, PeerProtocol, PeerUnavailable, UnknownMethod
from kakeya.fleet.cards.cards import Card
from kakeya.fleet.cards.names import names_of
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.v1 import weights_pb2 as pb
from kakeya.v1.weights_pb2_grpc import WeightsServiceStub
from kakeya.weights.manifest import WeightsManifest
from kakeya.weights.wire import held_from_wire, manifest_from_wire
from kakeya.wire.calls import calling
from kakeya.wire.channels import Channels

if TYPE_CHECKING:
    from kakeya.v1.weights_pb2_grpc import WeightsServiceAsyncStub

_HEARD_S = 6.0
"""A silent peer ends a round of gossip after 5 s."""
_LIST_S = 5.0
_MANIFEST_S = 1800.0
"""A peer may have to read all of a large model first; one that is gone is noticed by pings."""
STALL_S = 10.0
"""A peer that sends nothing of a piece for so long hangs."""
_PIECE_S = 300.0
_WATCH_S = 24 * 3600.0
_MOST_ENTRIES = 2_000


class PeerRoutes(Protocol):
    """The choice of a node's address."""

    def address_for(self, card: Card) -> str:
        """The address of the node of a card now."""
        ...


class Neighbours(Protocol):
    """The parts of the fleet that are needed here; `NodeFleet` has them."""

    @property
    def registry(self) -> CapabilityRegistry:
        """The peers."""
        ...

    @property
    def channels(self) -> Channels:
        """The channels to peers."""
        ...

    @property
    def routes(self) -> PeerRoutes:
        """The addresses of peers."""
        ...

    def why_not_dial(self, address: str) -> str:
        """Why an address of a card is not dialled; "" = it may be."""
        ...


@dataclass(frozen=True, slots=True)
class WeightsOffer:
    """A model at a peer; no digest = it was not computed yet, or is not known before the end."""

    name: str
    bytes: int
    digest: str
    is_whole: bool
    is_begun: bool = False
    """Of one that is fetched from the hub: whether the download has begun."""


@dataclass(frozen=True, slots=True)
class WeightsPeer:
    """A live node."""

    node_id: str
    label: str
    address: str


class WeightsPeers:
    """See the module; lives on the event loop."""

    def __init__(
        self,
        plane: Neighbours,
        clock: Clock,
        heard: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """`heard` waits for the first round of gossip, None = it is over."""
        self._plane = plane
        self._clock = clock
        self._heard = heard

    @property
    def own_id(self) -> str:
        """The id of this node."""
        return str(self._plane.registry.node_id)

    async def known(self) -> None:
        """Wait until peers are known, a few seconds at most: a node that has just been started
        knows none."""
        if self._heard is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HEARD_S):
                    await self._heard()
            self._heard = None

    def all(self) -> tuple[WeightsPeer, ...]:
        """The live nodes that may be called, by label."""
        found, cards = [], self._plane.registry.live_peers(mono=self._clock.mono())
        names = names_of(cards)
        for card in cards:
            address = self._plane.routes.address_for(card)
            if card.is_extended and address and not self._plane.why_not_dial(address):
                found.append(WeightsPeer(card.node_id, names[card.node_id], address))
        return tuple(sorted(found, key=lambda peer: (peer.label, peer.node_id)))

    def named(self, name: str) -> WeightsPeer:
        """The peer with a label, an id or an address. Raises NotFound."""
        peers = self.all()
        for peer in peers:
            if name in (peer.label, peer.node_id, peer.address):
                return peer
        known = ", ".join(peer.label for peer in peers) or "none"
        raise NotFound(f"no peer is called {name[:80]!r}; the live peers are {known}")

    async def offers(
        self, peers: Sequence[WeightsPeer]
    ) -> tuple[Mapping[WeightsPeer, Sequence[WeightsOffer]], Mapping[str, str]]:
        """What peers have, and, by label, why others did not tell it."""

        async def ask(peer: WeightsPeer) -> Sequence[WeightsOffer] | KakeyaError:
            try:
                with calling(peer.label):
                    answer = await self._stub(peer).ListWeights(
                        pb.ListWeightsRequest(), timeout=_LIST_S
                    )
            except UnknownMethod:  # an older node, or one that gives none
                return []
            except KakeyaError as failure:
                return failure
            return [
                WeightsOffer(one.name, one.bytes, one.digest, one.is_whole, one.is_begun)
                for one in answer.models[:_MOST_ENTRIES]
            ]

        answers = dict(zip(peers, await asyncio.gather(*map(ask, peers)), strict=True))
        told = {peer: one for peer, one in answers.items() if not isinstance(one, KakeyaError)}
        silent = {
            peer.label: one.message for peer, one in answers.items() if isinstance(one, KakeyaError)
        }
        return told, silent

    async def manifest(self, peer: WeightsPeer, name: str, digest: str) -> WeightsManifest:
        """The manifest of a peer's model. Raises the peer's errors, and PeerProtocol for one that
        is wrong."""
        request = pb.GetManifestRequest(name=name, digest=digest)
        with calling(peer.label):
            told = await self._stub(peer).GetManifest(request, timeout=_MANIFEST_S)
        return await asyncio.to_thread(manifest_from_wire, told, digest, peer.label)

    async def watch(self, peer: WeightsPeer, digest: str, count: int) -> AsyncIterator[set[int]]:
        """The pieces that a peer has of a model that it fetches itself, whenever there are more."""
        request = pb.WatchPiecesRequest(digest=digest)
        with calling(peer.label):
            async for told in self._stub(peer).WatchPieces(request, timeout=_WATCH_S):
                yield held_from_wire(told, count)

    async def piece(
        self,
        peer: WeightsPeer,
        digest: str,
        piece: int,
        size: int,
        came: Callable[[int], None],
    ) -> bytearray:
        """The bytes of a piece, not proven yet; `came` hears of bytes as they come. Raises the
        peer's errors, PeerUnavailable for a silent one, PeerProtocol for more or fewer bytes."""
        request = pb.ReadPieceRequest(digest=digest, piece=piece)
        with calling(peer.label):
            call = self._stub(peer).ReadPiece(request, timeout=_PIECE_S)
        data, have = bytearray(size), 0  # growing it would copy it several times
        try:
            while have <= size:
                with calling(peer.label):
                    try:
                        async with asyncio.timeout(STALL_S):
                            part = await call.read()
                    except TimeoutError:
                        raise PeerUnavailable(
                            f"{peer.label}: it sent nothing for {STALL_S:g} s"
                        ) from None
                if not isinstance(part, pb.PiecePart):
                    break
                data[have : have + len(part.data)] = part.data
                have += len(part.data)
                came(len(part.data))
        finally:
            call.cancel()
        if have != size:
            raise PeerProtocol(
                f"{peer.label}: piece {piece} has {have} bytes or more; it must have {size}"
            )
        return data

    def _stub(self, peer: WeightsPeer) -> WeightsServiceAsyncStub:
        return WeightsServiceStub(self._plane.channels.get(peer.address, peer.node_id))
