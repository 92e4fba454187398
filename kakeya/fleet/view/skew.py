"""Offsets of the peers' clocks from this node's, from the send times that peers tell.

Nothing is decided by them: ages travel without clocks. They are shown and warned of. When at least
half of three or more peers disagree with this node, its own clock is wrong.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict

from kakeya.core.ids import NodeId

WARN_S = 5.0
"""Offset from which a warning is shown: half of the time that a node may wait for an answer."""
MIN_PEERS = 3
"""Fewer peers cannot show which clock is wrong."""
_KEPT_S = 3600.0
_MAX_PEERS = 1024


class Skews:
    """The latest estimate for each peer; bounded."""

    def __init__(self) -> None:
        self._offsets: OrderedDict[NodeId, tuple[float, float]] = OrderedDict()
        self._started_at = 0.0
        """Wall time at the zero of the monotonic clock."""

    def note(
        self, node_id: NodeId, *, sent_at: float, now: float, rtt_s: float, mono: float
    ) -> None:
        """Note the send time in a message that arrived just now; 0 = the peer tells none."""
        if sent_at == 0.0 or not math.isfinite(sent_at):
            return
        if abs((now - mono) - self._started_at) > WARN_S:
            # The own clock was set, or this machine slept: earlier offsets are to another clock.
            self._offsets.clear()
            self._started_at = now - mono
        self._offsets[node_id] = (sent_at - (now - rtt_s / 2), mono)
        self._offsets.move_to_end(node_id)
        while len(self._offsets) > _MAX_PEERS:
            self._offsets.popitem(last=False)

    def by_peer(self, mono: float) -> dict[NodeId, float]:
        """Seconds by which each peer's clock is ahead of this node's, from the last hour."""
        kept = self._offsets.items()
        return {node_id: offset for node_id, (offset, at) in kept if mono - at <= _KEPT_S}

    def own(self, mono: float) -> float | None:
        """Seconds by which the fleet is ahead of this node, in the median; None = no peer told."""
        offsets = list(self.by_peer(mono).values())
        return statistics.median(offsets) if offsets else None

    def is_own_fault(self, mono: float) -> bool:
        """Whether so many peers disagree that this node's clock must be the wrong one."""
        offsets = self.by_peer(mono).values()
        off = sum(abs(offset) > WARN_S for offset in offsets)
        return len(offsets) >= MIN_PEERS and 2 * off >= len(offsets)
