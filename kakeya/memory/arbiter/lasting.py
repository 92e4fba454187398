"""How long a decision on the whole queue lasts.

A decision that changed nothing would change nothing again, until something is written into the
ledger, a request comes to the front of a queue or leaves it, or a time comes at which a rule says
another thing. Up to then a request that comes or goes behind another one needs no decision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kakeya.memory.arbiter.ledger import Ledger

_ROUNDING_S = 0.001
"""Times of rules are rounded, and some rules forgive a rounding error: no decision lasts up to the
very end."""


@dataclass(frozen=True, slots=True)
class LastingDecision:
    """A decision that changed nothing, with the ledger's changes before it. `wake_mono` is the time
    of the next one, but for deadlines."""

    changes: int = -1
    wake_mono: float = -math.inf

    def lasts(self, ledger: Ledger, now: float) -> bool:
        """Whether it still holds."""
        return ledger.changes == self.changes and now < self.wake_mono - _ROUNDING_S
