"""Which residents take nobody new, since others wait for their room, and for how long at most.

Who waits is served when those who use a resident have let go, however long they take: so the door
stays shut. But one who uses it for hours would keep all others from it, and help nobody. So a door
that was shut for long opens once for all who wait at it; the next time it stays shut for twice as
long. However long a use takes, who waits for its end is served at last, and nobody else waits much
longer than that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from kakeya.memory.arbiter.policy import Rules
from kakeya.memory.arbiter.resident import ResidentKey


@dataclass(slots=True)
class _Door:
    since_mono: float
    limit_s: float

    @property
    def until_mono(self) -> float:
        return self.since_mono + self.limit_s


class DrainGate:
    """Those that are shut."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._shut: dict[ResidentKey, _Door] = {}

    @property
    def are_open(self) -> bool:
        """Whether no door is shut."""
        return not self._shut

    def to_open(self, now: float) -> frozenset[ResidentKey]:
        """Which were shut for long enough."""
        return frozenset(key for key, door in self._shut.items() if now >= door.until_mono)

    def walked(
        self, claims: Collection[ResidentKey], opened: Collection[ResidentKey], now: float
    ) -> None:
        """The line was walked: who waits in it claims these, and `opened` let in who waited."""
        still = {key: self._shut.get(key, _Door(now, self._rules.shut_s)) for key in claims}
        again = {key: _Door(now, 2 * self._shut[key].limit_s) for key in opened}
        self._shut = still | again

    def due(self) -> Iterator[float]:
        """When one opens, in monotonic seconds."""
        for door in self._shut.values():
            yield door.until_mono
