"""The facts of a node in sections, still enough that a section changes only with what it tells.

A section is a top-level entry of the node's status, as its owner tells it. Ages go in steps; counts
of the gossip and sizes that the system measures, which never stand still, are left out. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from kakeya.core.figures import Json

AGE_STEPS_S = (0, 5, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 21600, 86400)
"""An age is told as the last step that it has passed."""
_AGES = frozenset({"age_s", "idle_s", "warm_s", "uptime_s", "for_s"})
_LEFT_OUT = frozenset(
    {"gossip", "skew_s", "last_events", "available_bytes", "measured_bytes", "resident_bytes"}
)
FLEET, CARD = "fleet", "card"
_RINGS, _SINCE = "rings", "seconds"
"""For so long a ring group has been as it is: an age too."""


def sections_of(status: Mapping[str, object]) -> Json:
    """The sections of a status, by name."""
    told = still(status)
    assert isinstance(told, dict)
    return told


def still(value: object, ages: frozenset[str] = _AGES) -> object:
    """A copy of JSON whose ages go in steps."""
    match value:
        case Mapping():
            told = ((key, one) for key, one in value.items() if key not in _LEFT_OUT)
            return {key: _stepped(key, one, ages) for key, one in told}
        case list() | tuple():
            return [still(one, ages) for one in value]
        case _:
            return value


def _stepped(key: str, value: object, ages: frozenset[str]) -> object:
    if isinstance(value, int | float):
        if key in ages:
            return AGE_STEPS_S[max(0, bisect_right(AGE_STEPS_S, value) - 1)]
        return value
    return still(value, ages | {_SINCE} if key == _RINGS else ages)


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> Json:
    """The sections that are new or other than before; None for those that are gone."""
    found: Json = {key: one for key, one in after.items() if before.get(key) != one}
    return found | dict.fromkeys(before.keys() - after.keys())
