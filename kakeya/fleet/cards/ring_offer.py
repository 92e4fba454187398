"""What a card says of the rank that its node has in a ring group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class RingOffer(NamedTuple):
    """The rank of a node in a ring group; `group_id` differs at each start of the group."""

    group_id: str
    model_id: str
    backend: str
    split: str
    rank: int
    ranks: int

    @property
    def texts(self) -> Sequence[str]:
        """Its texts, which are as long as their writer likes."""
        return self[:4]
