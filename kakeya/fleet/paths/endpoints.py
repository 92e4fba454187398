"""Chooses among a node's addresses: the best one that works, used again when it returns.

    unknown --probe--> works --failure--> failed --probe--> works

The choice is the lowest (state, priority, round trip) with works < unknown < failed, so a failed
endpoint is never chosen while another works, and a better one that was never tried is probed
before it is used. Round trips decide only within one kind of network, and only by a clear margin;
the figure on the card counts until this node has measured its own.

    edge                                  is probed
    chosen, and there is another          each WATCH_S, so that a pulled cable costs seconds
    another, while the chosen one fails   at once
    unknown                               at once
    failed, worked before                 each REPROBE_S: so a link comes back into use
    failed, never worked                  more and more seldom, to MAX_REPROBE_S
    works, not chosen                     each MEASURE_S

A change is told when the new way worked before, during and after the failure of the old one, so
that a node that is merely busy on every way, or comes back on one before another, is no downgrade.
Pure: `mono` is given, probes are made by `routes.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kakeya.core.ids import NodeId
from kakeya.fleet.cards.cards import Endpoint
from kakeya.fleet.paths.addresses import UNKNOWN_PRIORITY

WATCH_S = 2.0
REPROBE_S = 15.0
MAX_REPROBE_S = 300.0
MEASURE_S = 60.0
MAX_PER_NODE = 4
"""Probes of one node at once."""
_MARGIN = 0.7
"""A way of the same kind replaces the chosen one at this share of its round trip, or less."""
_SMOOTHING = 0.3
"""Weight of the newest round trip."""


class EdgeState(IntEnum):
    """The state of one address; the order is the order of choice."""

    WORKS = 0
    UNKNOWN = 1
    FAILED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way to a node; `network` "" = its card does not say.

    `is_downgraded`: a better way worked before and does not now; `best` is the network of that way.
    """

    node_id: NodeId
    address: str
    network: str
    rtt_ms: float
    is_downgraded: bool
    best: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteChange:
    """A node is reached another way than before, and the new way has answered."""

    node_id: NodeId
    before: Endpoint
    after: Endpoint
    is_downgrade: bool


@dataclass(slots=True)
class _Edge:
    endpoint: Endpoint
    state: EdgeState = EdgeState.UNKNOWN
    rtt_ms: float = math.inf
    failures: int = 0
    has_worked: bool = False
    works_since_mono: float = math.inf
    worked_mono: float = -math.inf
    failed_mono: float = -math.inf
    tried_mono: float = -math.inf

    @property
    def priority(self) -> int:
        return self.endpoint.priority or UNKNOWN_PRIORITY


@dataclass(slots=True)
class _Ways:
    edges: dict[str, _Edge]
    chosen: str = ""
    """The address in use."""
    settled: _Edge | None = field(default=None)
    """The last way that was told of: it answered while it was the best."""

    def choose(self) -> None:
        self.chosen = min(self.edges.values(), key=self._rank).endpoint.address

    def _rank(self, edge: _Edge) -> tuple[int, int, float, str]:
        # The chosen one keeps its place against others that are only a little faster.
        margin = _MARGIN if edge.endpoint.address == self.chosen else 1.0
        rtt_ms = edge.rtt_ms if math.isfinite(edge.rtt_ms) else edge.endpoint.rtt_ms or math.inf
        return edge.state, edge.priority, rtt_ms * margin, edge.endpoint.address

    def interval_s(self, edge: _Edge) -> float:
        """Seconds from the last probe of an edge to the next; see the table above."""
        if edge.state is EdgeState.UNKNOWN:
            return 0.0
        if edge.endpoint.address == self.chosen:
            return WATCH_S
        if self.edges[self.chosen].state is EdgeState.FAILED:
            return WATCH_S
        if edge.state is EdgeState.WORKS:
            return MEASURE_S
        if edge.has_worked:
            return REPROBE_S
        return min(MAX_REPROBE_S, REPROBE_S * 2.0 ** min(edge.failures - 1, 10))

    def best_that_worked(self) -> _Edge | None:
        return min((e for e in self.edges.values() if e.has_worked), key=_priority, default=None)


def _priority(edge: _Edge) -> int:
    return edge.priority


def _urgency(due: tuple[float, NodeId, _Edge]) -> tuple[float, NodeId, str]:
    overdue_s, node_id, edge = due
    return -overdue_s, node_id, edge.endpoint.address


class RouteBook:
    """The ways to every node that has more than one; a node with one needs no choice."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, _Ways] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    # --- endpoints

    def learn(self, node_id: NodeId, endpoints: Sequence[Endpoint]) -> None:
        """Take the endpoints of a node; the state of known ones stays."""
        wanted = {endpoint.address: endpoint for endpoint in endpoints}
        if len(wanted) < 2:
            self._nodes.pop(node_id, None)
            return
        ways = self._nodes.setdefault(node_id, _Ways({}))
        if [edge.endpoint for edge in ways.edges.values()] == list(wanted.values()):
            return
        edges = {}
        for address, endpoint in wanted.items():
            edge = ways.edges.get(address)
            if edge is None:
                edge = _Edge(endpoint)
            edge.endpoint = endpoint
            edges[address] = edge
        ways.edges = edges
        if ways.settled is not None and ways.settled.endpoint.address not in edges:
            ways.settled = None  # an endpoint that left the card is neither lost nor taken back
        ways.choose()

    def keep_only(self, node_ids: Collection[NodeId]) -> None:
        """Forget every node but these."""
        for node_id in [n for n in self._nodes if n not in node_ids]:
            del self._nodes[node_id]

    def retry_all(self) -> None:
        """Probe failed addresses at once: a cable was plugged in or pulled."""
        for ways in self._nodes.values():
            for edge in ways.edges.values():
                if edge.state is EdgeState.FAILED:
                    edge.tried_mono = -math.inf

    def retry(self, address: str) -> None:
        """Probe one address at once: a call to it broke, which may be the node's doing."""
        for ways in self._claiming(address, None):
            ways.edges[address].tried_mono = -math.inf

    # --- results of calls

    def worked(
        self, node_id: NodeId, address: str, *, rtt_ms: float, mono: float
    ) -> RouteChange | None:
        """Note that the node answered at an address; returns the change that this completes."""
        ways = self._nodes.get(node_id)
        edge = ways.edges.get(address) if ways else None
        if ways is None or edge is None:
            return None
        is_first = edge.state is not EdgeState.WORKS or not math.isfinite(edge.rtt_ms)
        edge.rtt_ms = rtt_ms if is_first else edge.rtt_ms + _SMOOTHING * (rtt_ms - edge.rtt_ms)
        if edge.state is not EdgeState.WORKS:
            edge.works_since_mono = mono
        edge.state, edge.has_worked, edge.failures = EdgeState.WORKS, True, 0
        edge.worked_mono = edge.tried_mono = mono
        ways.choose()
        return self._settle(node_id, ways)

    def failed(self, address: str, *, mono: float, node_id: NodeId | None = None) -> None:
        """Note that an address gave no answer, or one that another node gave.

        Without a node id every node that claims the address is meant.
        """
        for ways in self._claiming(address, node_id):
            edge = ways.edges[address]
            edge.state, edge.failed_mono, edge.tried_mono = EdgeState.FAILED, mono, mono
            edge.failures += 1
            was_chosen = ways.chosen == address
            ways.choose()
            if was_chosen:
                # Whether the others still work decides between a lost link and a lost node.
                for other in ways.edges.values():
                    if other is not edge:
                        other.tried_mono = -math.inf

    def _claiming(self, address: str, node_id: NodeId | None) -> Iterable[_Ways]:
        found = self._nodes.values() if node_id is None else (self._nodes.get(node_id),)
        return [ways for ways in found if ways is not None and address in ways.edges]

    def _settle(self, node_id: NodeId, ways: _Ways) -> RouteChange | None:
        best, before = ways.edges[ways.chosen], ways.settled
        if before is None:
            # The first way is no change, and the best one may not have been tried yet.
            if all(edge.state is not EdgeState.UNKNOWN for edge in ways.edges.values()):
                ways.settled = best
            return None
        if best is before or best.state is not EdgeState.WORKS:
            return None
        is_lost = before.state is EdgeState.FAILED
        if is_lost and not best.works_since_mono <= before.failed_mono <= best.worked_mono:
            return None
        ways.settled = best
        return RouteChange(
            node_id=node_id,
            before=before.endpoint,
            after=best.endpoint,
            is_downgrade=best.priority > before.priority,
        )

    # --- decisions

    def address(self, node_id: NodeId) -> str:
        """The address to use for a node; "" for a node without a choice."""
        ways = self._nodes.get(node_id)
        return ways.chosen if ways else ""

    def due(self, mono: float, limit: int) -> tuple[tuple[NodeId, str], ...]:
        """The probes that are due, the longest overdue first; they count as tried from `mono` on.

        At most `MAX_PER_NODE` of one node, so that a node that names new addresses all the time
        does not keep the others waiting.
        """
        overdue = []
        for node_id, ways in self._nodes.items():
            of_node = [
                (mono - edge.tried_mono - ways.interval_s(edge), node_id, edge)
                for edge in ways.edges.values()
                if mono - edge.tried_mono >= ways.interval_s(edge)
            ]
            overdue += sorted(of_node, key=_urgency)[:MAX_PER_NODE]
        chosen = sorted(overdue, key=_urgency)[:limit]
        for _, _, edge in chosen:
            edge.tried_mono = mono
        return tuple((node_id, edge.endpoint.address) for _, node_id, edge in chosen)

    def is_spare(self, node_id: NodeId, address: str) -> bool:
        """Whether a way is neither in use nor the only other one: no connection is kept for it."""
        ways = self._nodes.get(node_id)
        return ways is not None and len(ways.edges) > 2 and address != ways.chosen

    def state(self, node_id: NodeId, address: str) -> EdgeState:
        """The state of one way; unknown, too, for a way that the node does not have."""
        ways = self._nodes.get(node_id)
        edge = ways.edges.get(address) if ways else None
        return EdgeState.UNKNOWN if edge is None else edge.state

    def routes(self) -> tuple[Route, ...]:
        """Every node's way, for status and metrics."""
        return tuple(self._route(node_id, ways) for node_id, ways in sorted(self._nodes.items()))

    def _route(self, node_id: NodeId, ways: _Ways) -> Route:
        now, best = ways.edges[ways.chosen], ways.best_that_worked()
        return Route(
            node_id=node_id,
            address=now.endpoint.address,
            network=now.endpoint.network,
            rtt_ms=now.rtt_ms if math.isfinite(now.rtt_ms) else 0.0,
            is_downgraded=best is not None and best.priority < now.priority,
            best=best.endpoint.network if best is not None else "",
        )
