"""What can be set of sessions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """How many gRPC sessions there may be, and after how many idle seconds one is forgotten."""

    capacity: int
    idle_ttl_s: float
