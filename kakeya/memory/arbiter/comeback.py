"""The times at which models that pressure evicted may load again. Pure; `now` is monotonic, in
seconds.

Memory has to be calm for a while first. A model that pressure evicts again and again waits longer
each time, so that its load does not itself make the pressure that evicts it.
"""

from __future__ import annotations

from kakeya.memory.arbiter.policy import PressureLevel
from kakeya.memory.arbiter.resident import ResidentKey

CALM_S = 10.0
"""Two polls of the machine."""
LONGEST_S = 640.0
SETTLED_S = 600.0
"""A model that stayed for so long counts as never evicted."""


class Comeback:
    """Follows pressure and evictions; tells which models may load without a request."""

    def __init__(self) -> None:
        self._calm_since_mono: float | None = float("-inf")
        self._pauses: dict[ResidentKey, float] = {}
        self._taken_mono: dict[ResidentKey, float] = {}

    def pressed(self, level: PressureLevel, now: float) -> None:
        """Note a change of the level of pressure."""
        self._calm_since_mono = now if level is PressureLevel.NOMINAL else None

    def taken(self, key: ResidentKey, now: float) -> None:
        """Note a model that pressure evicted."""
        before = self._taken_mono.get(key)
        is_repeated = before is not None and now - before < SETTLED_S
        pause_s = self._pauses.get(key, CALM_S) * 2 if is_repeated else CALM_S
        self._pauses[key] = min(LONGEST_S, pause_s)
        self._taken_mono[key] = now

    def may(self, key: ResidentKey, now: float) -> bool:
        """Whether a model may be loaded again now."""
        if self._calm_since_mono is None:
            return False
        taken_mono = self._taken_mono.get(key)
        if taken_mono is None:
            return True
        return now - max(taken_mono, self._calm_since_mono) >= self._pauses[key]
