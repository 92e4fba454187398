"""Meet in the middle: a prefill from the front, a fetch from the back, until nothing lies between.

    [ computed here ........ front )   not yet   [ back ........ fetched from a peer ] end

The prefill begins at once and needs no peer; a peer only moves `back` towards it. When they meet,
the prefill is ended and the request is made anew with all blocks, which costs a *switch*: it is
worth it only if the fetched blocks would have taken longer to compute. So a peer that is slow, dies
or lies costs nothing:

    time <= prefill of everything            when it never switches
    time <= prefill up to back + switch      when it does, as it is then sure to be sooner

`Meeting` follows both sides; `is_sooner` says beforehand, from measured rates, whether to begin.
Both are pure.
"""

from __future__ import annotations

import math
from enum import StrEnum

from kakeya.core.errors import InvalidArgument

SWITCH_S = 0.15
"""Seconds to end a prefill, import its blocks and the fetched ones, and go on: a chunk that was
under way is lost, and two messages to an engine."""


def is_worth_while(count: int, *, block_s: float, switch_s: float = SWITCH_S) -> bool:
    """Whether a meeting over `count` blocks can ever pay: nothing of it is computed yet."""
    return (count - 1) * block_s > switch_s


class Side(StrEnum):
    """Where a block came from."""

    COMPUTED = "computed"
    FETCHED = "fetched"


class Meeting:
    """The blocks [first, end) of one history. Raises InvalidArgument for an empty range."""

    def __init__(self, first: int, end: int, *, block_s: float, switch_s: float = SWITCH_S) -> None:
        if not 0 <= first < end:
            raise InvalidArgument(f"blocks {first} to {end} are none to meet over")
        self._first, self._end = first, end
        self._front, self._back = first, end
        self._block_s, self._switch_s = block_s, switch_s

    @property
    def front(self) -> int:
        """Blocks before this one are computed."""
        return self._front

    @property
    def back(self) -> int:
        """Blocks from this one on are fetched."""
        return self._back

    @property
    def is_met(self) -> bool:
        """Whether nothing is missing."""
        return self._front >= self._back

    @property
    def pays(self) -> bool:
        """Whether to end the prefill and take the fetched blocks: that saves more than it costs.

        The block that the prefill is at may be all but done, so it saves nothing.
        """
        left = self._end - self._front
        return self.is_met and is_worth_while(left, block_s=self._block_s, switch_s=self._switch_s)

    def computed(self, blocks: int) -> None:
        """The prefill has the blocks before this one; told late or twice, it changes nothing."""
        self._front = min(max(self._front, blocks), self._end)

    def is_needed(self, index: int) -> bool:
        """Whether a fetched block is the next one from the back, and not computed yet."""
        return index == self._back - 1 and index >= self._front

    def fetched(self, index: int) -> None:
        """A needed block came. Raises InvalidArgument for any other: it would be there twice."""
        if not self.is_needed(index):
            raise InvalidArgument(
                f"block {index} came from the back, where {self._back - 1} was due and those "
                f"before {self._front} are computed"
            )
        self._back = index

    def sides(self) -> dict[int, Side]:
        """Where each block that is here came from, by index."""
        computed = dict.fromkeys(range(self._first, self._front), Side.COMPUTED)
        return computed | dict.fromkeys(
            range(max(self._front, self._back), self._end), Side.FETCHED
        )


def is_sooner(count: int, *, block_s: float, fetch_s: float, switch_s: float = SWITCH_S) -> bool:
    """Whether meeting over `count` blocks takes less time than to compute or to fetch them all.

    True of links that are about as fast as the prefill: a much faster one is done before the
    prefill has begun, a much slower one brings nothing that is worth a switch.
    """
    if block_s <= 0 or not 0 < fetch_s < math.inf:
        return False
    if not is_worth_while(count, block_s=block_s, switch_s=switch_s):
        return False
    both_s = count * block_s * fetch_s / (block_s + fetch_s) + switch_s
    return both_s < count * min(block_s, fetch_s)
