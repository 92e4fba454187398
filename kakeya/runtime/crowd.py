"""How many may be in at a time, so that no client keeps the others out.

As long as there is room, anybody comes in. Beyond that only who has fewer in than its part, which
is the bound divided among the clients that are there, itself included; and never more than twice as
many in all. So one client may take everything, and the next one still gets in at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kakeya.core.errors import QueueFull

RETRY_S = 1.0


class Crowd:
    """Who is in, of `most` at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._inside: dict[str, int] = {}
        self._total = 0

    @property
    def total(self) -> int:
        """How many are in."""
        return self._total

    def has_room(self, client: str) -> bool:
        """Whether one more of this client may come in."""
        if self._total < self._most:
            return True
        mine = self._inside.get(client, 0)
        clients = len(self._inside) + (not mine)
        return mine < self._most // clients and self._total < 2 * self._most

    @contextmanager
    def member(self, client: str, says_full: str) -> Iterator[None]:
        """Be in. Raises QueueFull with `says_full` where there is no room."""
        if not self.has_room(client):
            raise QueueFull(f"{says_full}: try again later", retry_after_s=RETRY_S)
        self._total += 1
        self._inside[client] = self._inside.get(client, 0) + 1
        try:
            yield
        finally:
            self._total -= 1
            self._inside[client] -= 1
            if not self._inside[client]:
                del self._inside[client]
