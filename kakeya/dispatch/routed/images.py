"""An image model of the fleet, as one of this node's: a request is drawn by one node that has it,
and by another one where that fails to, from the first image on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kakeya.backends.images.model import IMAGE
from kakeya.core.errors import KakeyaError, PeerUnavailable, UnknownMethod
from kakeya.dispatch.peers.neighbours import ServingPeer, ServingPeers
from kakeya.dispatch.routed.route import ELSEWHERE
from kakeya.fleet.cards.cards import CardRole
from kakeya.generation.facts import ModelState
from kakeya.generation.image import DrawnImage, ImageModel, ImageRequest, PipelineKind, Tell
from kakeya.generation.manifest import NO_MANIFEST, Manifest
from kakeya.generation.waiting import RequestWait, WaitTeller


def painters(peers: ServingPeers, model_id: str = "") -> tuple[ServingPeer, ...]:
    """The peers that would draw with a model, "" = with any; those in doubt last."""
    return tuple(
        peer
        for peer in peers.offering(role=CardRole.TOOL)
        if peer.offered.capability == IMAGE and model_id in ("", peer.offered.model_id)
    )


class RoutedImageModel:
    """An `ImageModel`; see the module."""

    def __init__(
        self,
        model_id: str,
        own: ImageModel | None,
        peers: ServingPeers,
        drawing: Counter[str],
    ) -> None:
        """`own` is the model of this node with this name, None = it has none; `drawing` counts the
        requests of this node that are drawn, by node."""
        self._model_id = model_id
        self._own = own
        self._peers = peers
        self._drawing = drawing

    @property
    def model_id(self) -> str:
        """The name that callers use."""
        return self._model_id

    @property
    def nodes(self) -> Sequence[str]:
        """The labels of the peers that would draw."""
        return [peer.label for peer in painters(self._peers, self._model_id)]

    @property
    def kind(self) -> PipelineKind | None:
        """That of the own model."""
        return None if self._own is None else self._own.kind

    @property
    def state(self) -> ModelState:
        """READY where this node has none: peers offer what they would serve."""
        return ModelState.READY if self._own is None else self._own.state

    @property
    def last_error(self) -> str:
        """That of the own model."""
        return "" if self._own is None else self._own.last_error

    @property
    def manifest(self) -> Manifest:
        """That of the own model."""
        return NO_MANIFEST if self._own is None else self._own.manifest

    def waits_for(self) -> RequestWait | None:
        """What the own model waits for."""
        return None if self._own is None else self._own.waits_for()

    async def draw(
        self, request: ImageRequest, tell: Tell, wait: WaitTeller | None = None
    ) -> tuple[DrawnImage, ...]:
        """See `ImageModel`. Raises the failure of the last node where none can draw."""
        last: KakeyaError = PeerUnavailable(f"no node draws with {self._model_id} now")
        for peer in self._in_order():
            node_id = self._node_id(peer)
            self._drawing[node_id] += 1
            try:
                if peer is not None:
                    calls = self._peers.relay_calls(peer)
                    return await calls.draw(self._model_id, request, tell, wait)
                if self._own is not None:
                    return await self._own.draw(request, tell, wait)
            except ELSEWHERE as failure:
                # A node of an older build draws for its own clients alone, and serves text.
                if peer is not None and not isinstance(failure, UnknownMethod):
                    self._peers.failed(peer, failure)
                last = failure
            finally:
                self._drawing[node_id] -= 1
        raise last

    def _in_order(self) -> list[ServingPeer | None]:
        """The nodes that may draw, None = this one, the one with the fewest requests first; of
        those with as many this one."""
        nodes: list[ServingPeer | None] = [None] * (self._own is not None)
        nodes += painters(self._peers, self._model_id)

        def order(peer: ServingPeer | None) -> tuple[bool, int]:
            return peer is not None and peer.is_suspect, self._drawing[self._node_id(peer)]

        return sorted(nodes, key=order)

    def _node_id(self, peer: ServingPeer | None) -> str:
        return self._peers.own_id if peer is None else peer.node_id
