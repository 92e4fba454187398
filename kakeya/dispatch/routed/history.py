"""What this node remembers of its routes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from kakeya.core.clock import Clock
from kakeya.core.figures import Figure, Json, counter
from kakeya.dispatch.routing.candidate import RoutedRequest
from kakeya.dispatch.routing.decision import RouteDecision
from kakeya.dispatch.routing.ledger import RouteLedger

_MOST_CONVERSATIONS = 4096


class RouteHistory:
    """The requests under way, the node that each conversation was served by, and counts."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.ledger = RouteLedger()
        self._keys = itertools.count(1)
        self._last: dict[str, str] = {}
        self.routed: Counter[str] = Counter()
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
        self.routed[node_id] += 1
        if request.conversation:
            self._last.pop(request.conversation, None)
            self._last[request.conversation] = node_id
            while len(self._last) > _MOST_CONVERSATIONS:
                del self._last[next(iter(self._last))]
        return key

    def note_move(self) -> None:
        """Note that a generation goes on at another node."""
        self.moved += 1

    def status(self) -> Json:
        """The counts as JSON."""
        return {"moved": self.moved, "by_node": dict(self.routed)}

    def figures(self) -> Iterator[Figure]:
        """The same as figures."""
        yield counter("kakeya_routed{node}", "Generations by the node chosen", dict(self.routed))
        yield counter("kakeya_routes_moved", "Generations that went on at another node", self.moved)
