"""Conflicts: two processes under one node id, kept while fresh, told once for each address.

The cards order the same on every node (`cards.py`), so views never alternate; but an operator has
to hear of it, and the process that came second has to stop serving.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kakeya.core.ids import NodeId

FRESH_S = 600.0
"""Seconds for which a conflict is shown after the last sign of it."""
MAX_CONFLICTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class IdConflict:
    """One id at two addresses. `is_own`: it is this node's id, and `address` the other's.

    `is_first`: the process there says that it had this node's id first.
    """

    node_id: NodeId
    address: str
    is_own: bool
    first_at: float
    last_at: float
    is_first: bool = False


class Conflicts:
    """Conflicts by id and address; bounded, the longest quiet is forgotten first."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[NodeId, str], IdConflict] = OrderedDict()

    def note(
        self, node_id: NodeId, address: str, *, is_own: bool, now: float, is_first: bool = False
    ) -> bool:
        """Note a sign of a conflict; returns whether it is news."""
        known = self._seen.get((node_id, address))
        is_news = known is None or now - known.last_at > FRESH_S
        if known is not None and not is_news:
            is_first = is_first or known.is_first
        self._seen[node_id, address] = IdConflict(
            node_id=node_id,
            address=address,
            is_own=is_own,
            first_at=now if known is None or is_news else known.first_at,
            last_at=now,
            is_first=is_first,
        )
        self._seen.move_to_end((node_id, address))
        while len(self._seen) > MAX_CONFLICTS:
            self._seen.popitem(last=False)
        return is_news

    def fresh(self, now: float) -> tuple[IdConflict, ...]:
        """The conflicts of the last ten minutes, own ones first."""
        fresh = [c for c in self._seen.values() if abs(now - c.last_at) <= FRESH_S]
        return tuple(sorted(fresh, key=lambda conflict: not conflict.is_own))
