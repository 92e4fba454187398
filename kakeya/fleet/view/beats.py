"""Beats: the sign that a node lives, told apart from its offer.

A body (the bytes of a card) stays as it is while its owner counts beats beside it, so gossip moves
a few bytes for each node in place of its card. A beat is proven by the owner's hash chain, of which
the card holds the end:

    v[512] is drawn at random;   v[i - 1] = SHA-256("kakeya-beat" | life | v[i])[:8]
    the card's anchor is v[0];   beat k is proven by v[k], a secret of the owner until it is beaten

A node that holds beat j believes beat k > j if k - j steps lead from v[k] to v[j]. An age needs no
proof: `card_table.py` accepts no age that would make a card younger than it can be.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_BEATS = 512
"""Beats of one body: 85 minutes at one each 10 s. A longer chain costs its verifiers more."""
VALUE_BYTES = 8
TENTH_S = 0.1
_PREFIX = b"kakeya-beat"

Keys = NDArray[np.uint64]
Numbers = NDArray[np.uint32]
Floats = NDArray[np.float64]


class Told(NamedTuple):
    """One card's beat as a message tells it. `proof` None = without a proof."""

    number: int
    age_s: float
    proof: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Beats:
    """Columns; entry i is one card's beat. Keys are unique.

    `ages_s` and `proofs` may end before `keys` do: entries beyond only name cards that the sender
    holds. Columns are there for fleets of 1,000 nodes and more; a shelf has 2 to 50.
    """

    keys: Keys
    numbers: Numbers
    ages_s: Floats
    proofs: Keys

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def told(self) -> int:
        """Count of entries, from the first on, that carry an age."""
        return len(self.ages_s)

    def entry(self, at: int) -> Told | None:
        """One entry; None if it only names the card."""
        if at >= self.told:
            return None
        proof = int(self.proofs[at]) if at < len(self.proofs) else None
        return Told(int(self.numbers[at]), float(self.ages_s[at]), proof)

    def places(self) -> dict[int, int]:
        """The entry number of each key."""
        return dict(zip(self.keys.tolist(), range(len(self)), strict=True))

    def tell(self, count: int) -> Beats:
        """The same cards, of which only the first `count` carry an age."""
        return Beats(self.keys, self.numbers, self.ages_s[:count], self.proofs[:count])


def no_beats() -> Beats:
    """Columns without entries."""
    return Beats(
        np.empty(0, np.uint64), np.empty(0, np.uint32), np.empty(0), np.empty(0, np.uint64)
    )


def step(life: int, value: bytes) -> bytes:
    """One step along the chain of a life, towards the anchor."""
    return hashlib.sha256(_PREFIX + life.to_bytes(8, "little") + value).digest()[:VALUE_BYTES]


class Chain:
    """The owner's values for one body."""

    def __init__(self, life: int, entropy: Callable[[int], bytes]) -> None:
        values = [entropy(VALUE_BYTES)]
        for _ in range(MAX_BEATS):
            values.append(step(life, values[-1]))
        self._values = values[::-1]

    @property
    def anchor(self) -> bytes:
        """The value of beat 0, which the card holds."""
        return self._values[0]

    def proof(self, number: int) -> int:
        """The value of a beat; it is a secret until the owner beats it."""
        return int.from_bytes(self._values[number], "little")


def leads_to(life: int, value: int, steps: int, known: int) -> bool:
    """Whether so many steps from `value` end at `known`: the proof of a later beat."""
    at = value.to_bytes(VALUE_BYTES, "little")
    for _ in range(steps):
        at = step(life, at)
    return int.from_bytes(at, "little") == known
