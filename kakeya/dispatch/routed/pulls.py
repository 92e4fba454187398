"""Models that this node may pull for a request: no node offers them, and a peer has them on its
disk.

A model that a node offers loads there, which is sooner than a pull and a load here.
"""

from __future__ import annotations

from kakeya.backends.added.on_demand import OnDemandPulls
from kakeya.core.errors import NotFound, PeerUnavailable
from kakeya.dispatch.peers.neighbours import ServingPeers
from kakeya.dispatch.peers.quote import QuotedModel

RETRY_S = 10.0
"""Until a caller may try again: memory is given back in the meantime, or a card changes."""


class FleetPulls:
    """See the module."""

    def __init__(self, pulls: OnDemandPulls, peers: ServingPeers) -> None:
        self._pulls = pulls
        self._peers = peers
        self.waits_for = pulls.waits_for

    def has(self, model_id: str) -> bool:
        """Whether a peer would give a model."""
        return self._pulls.is_on and model_id in self._peers.on_disk()

    def names(self) -> frozenset[str]:
        """The models that a request would have pulled now."""
        if not self._pulls.is_on:
            return frozenset()
        found = self._peers.on_disk().items()
        return frozenset(name for name, way in found if not self._pulls.refusal(name, *way))

    async def bring(self, model_id: str, timeout_s: float) -> QuotedModel:
        """Pull a model; it is one of this node then. Raises NotFound, PeerUnavailable where no pull
        is begun, and as `OnDemandPulls.bring`."""
        way = self._peers.on_disk().get(model_id)
        if way is None:
            raise NotFound(f"model {model_id[:80]!r} is not served by the fleet now")
        if why := self._pulls.refusal(model_id, *way):
            raise PeerUnavailable(
                f"no node can load {model_id} now, and it is not pulled: {why}",
                retry_after_s=RETRY_S,
            )
        return await self._pulls.bring(model_id, timeout_s)
