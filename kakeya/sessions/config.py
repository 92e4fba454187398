"""Settings of gRPC sessions."""

from __future__ import annotations

from dataclasses import dataclass

from kakeya.core.settings import number, setting, whole
from kakeya.sessions.store import CAPACITY, IDLE_TTL_S


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """How many sessions a node keeps, and for how long."""

    capacity: int = setting(
        "the most sessions at the same time",
        whole(1, 100_000, "sessions"),
        CAPACITY,
        earlier=("KAKEYA_SESSION_CAPACITY",),
    )
    idle_ttl_s: float = setting(
        "how long a session without a call is kept",
        number(1, 7 * 86400, "seconds"),
        IDLE_TTL_S,
        key="sessions.idle_ttl",
        earlier=("KAKEYA_SESSION_IDLE_TTL",),
    )
