"""The clouds and commands of the whole fleet for the front doors of one node: its own, and those
that peers share. A name that this node knows itself is never asked of a peer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from kakeya.backends.relay.backend import ANY, Finished
from kakeya.backends.relay.cloud_body import whole_name
from kakeya.backends.relay.relays import RelayedModel, Relays
from kakeya.backends.request import Request
from kakeya.core.errors import DeadlineExceeded, KakeyaError, PeerUnavailable
from kakeya.core.ids import ModelId
from kakeya.dispatch.peers.neighbours import ServingPeer, ServingPeers
from kakeya.dispatch.routed.route import ELSEWHERE
from kakeya.fleet.cards.cards import CardRole, OfferedModel
from kakeya.generation.model import ModelDirectory
from kakeya.text.tools.answer import Part

TEXT = "text/"
"""What the capability of a backend that answers in text begins with; its kind follows."""

MOST_TOLD = 24
MOST_BYTES = 100
"""Of a name and its kind: all of them together leave most of a card to the rest of it."""


def offered(own: Relays) -> list[OfferedModel]:
    """The shared backends of this node as its card tells of them; beyond `MOST_TOLD` none."""
    found = [
        OfferedModel(model_id=ModelId(name), role=CardRole.TOOL, capability=f"{TEXT}{kind}")
        for kind, name in own.offered()
        if len(name.encode()) + len(kind) <= MOST_BYTES
    ]
    return found[:MOST_TOLD]


class PeerRelay:
    """A `Relay` of peers: the first of them that takes a request answers it. It is asked whether it
    does before the answer is, so none is asked for twice."""

    def __init__(self, kind: str, offering: Sequence[ServingPeer], peers: ServingPeers) -> None:
        """`offering` are the peers with the backend, at least one, the best first."""
        self.kind = kind
        self.nodes = tuple(peer.label for peer in offering)
        self._offering = offering
        self._peers = peers
        self._taker = offering[0]

    @property
    def name(self) -> str:
        """See `Relay`: that of the peer that takes the request, or would be asked first."""
        return self._taker.label

    @property
    def problem(self) -> str:
        """See `Relay`."""
        if not all(peer.is_suspect for peer in self._offering):
            return ""
        return f"{', '.join(self.nodes)} may be lost"

    async def check(self, asked: Request) -> Sequence[str]:
        """See `Relay`. Raises the last peer's error where none takes the request."""
        last: KakeyaError = PeerUnavailable(f"no node answers for {asked.params.model} now")
        for peer in self._offering:
            try:
                ignored = await self._peers.relay_calls(peer).check(asked)
            except (*ELSEWHERE, DeadlineExceeded) as failure:
                self._peers.failed(peer, failure)
                last = failure
            else:
                self._taker = peer
                return ignored
        raise last

    async def answer(self, asked: Request) -> AsyncGenerator[Part | Finished, None]:
        """See `Relay`. Raises PeerUnavailable where the peer is lost."""
        try:
            async with aclosing(self._peers.relay_calls(self._taker).answer(asked)) as parts:
                async for part in parts:
                    yield part
        except KakeyaError as failure:
            self._peers.failed(self._taker, failure)
            raise


class RoutedRelays:
    """A `RelayDirectory` of the fleet."""

    def __init__(self, own: Relays, models: ModelDirectory, peers: ServingPeers) -> None:
        """`models` are those of the fleet that write text: peers' backends do not take their
        names."""
        self._own = own
        self._models = models
        self._peers = peers

    def find(self, model_id: str) -> RelayedModel | None:
        """See `RelayDirectory`."""
        return self._own.find(model_id) or self._elsewhere(model_id)

    def models(self, named: Sequence[str] = ()) -> list[RelayedModel]:
        """See `RelayDirectory`: the own ones, then those that only peers have, by name."""
        own = self._own.models(named)
        known = {one.model_id for one in own}
        told = sorted(str(one.offered.model_id) for one in self._offering())
        names = dict.fromkeys((*(one for one in told if not one.endswith(ANY)), *named))
        found = (self._elsewhere(name) for name in names if name not in known)
        return [*own, *(one for one in found if one is not None)]

    def _elsewhere(self, model_id: str) -> RelayedModel | None:
        name = whole_name(model_id)
        peers = [one for one in self._offering() if _is_of(name, one.offered.model_id)]
        if not peers or any(model_id == one.model_id for one in self._models.verifiers()):
            return None
        kind = peers[0].offered.capability.removeprefix(TEXT)
        return RelayedModel(model_id, PeerRelay(kind, peers, self._peers))

    def _offering(self) -> list[ServingPeer]:
        """The peers with a backend, once for each name that they offer; those in doubt last."""
        tools = self._peers.offering(role=CardRole.TOOL)
        return [one for one in tools if one.offered.capability.startswith(TEXT)]


def _is_of(name: str, told: str) -> bool:
    front = told.removesuffix(ANY)
    return name == told if front == told else name.startswith(front) and name != front
