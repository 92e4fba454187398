"""First-hand contacts: nodes that this node met by certificate, and their addresses.

News from relays can be old: the card and beats of a node that is gone look as alive to a newcomer
as they once did. And any card can name any address. So a node counts as met when it called here, or
answered a call, under its own certificate; and only an answer proves that it is at an address.

Values only; a fleet without identities has no use for them.
"""

from __future__ import annotations

from kakeya.core.ids import NodeId
from kakeya.fleet.cards.cards import MAX_ENDPOINTS

MAX_PLACES = MAX_ENDPOINTS + 1
"""Addresses of one node: its own and its endpoints. Of more, the latest are kept."""


class FirstHandContacts:
    """Met nodes and their addresses; the owner forgets nodes that it no longer holds."""

    def __init__(self) -> None:
        self._places: dict[NodeId, dict[str, None]] = {}
        self._at: dict[str, NodeId] = {}

    def has(self, node_id: str) -> bool:
        """Whether a node was met in its present life here."""
        return node_id in self._places

    def at(self, address: str) -> NodeId | None:
        """The node that answered last at an address."""
        return self._at.get(address)

    def met(self, node_id: NodeId) -> None:
        """Note that a node called here."""
        self._places.setdefault(node_id, {})

    def answered(self, node_id: NodeId, address: str) -> None:
        """Note that a node answered at an address."""
        before = self._at.get(address)
        if before is not None and before != node_id:
            self._places[before].pop(address, None)
        places = self._places.setdefault(node_id, {})
        places.pop(address, None)
        places[address] = None
        self._at[address] = node_id
        if len(places) > MAX_PLACES:
            self.missed(node_id, next(iter(places)))

    def missed(self, node_id: NodeId, address: str) -> None:
        """Note that a node no longer answers at an address; it stays met."""
        if self._at.get(address) == node_id:
            del self._at[address]
            self._places[node_id].pop(address, None)

    def forget(self, node_id: NodeId) -> None:
        """Forget a node that is gone."""
        for address in self._places.pop(node_id, {}):
            del self._at[address]
