"""How many may be in at a time, so that no client keeps the others out.

As long as there is room, anybody comes in. Beyond that only who has fewer in than its part, which
is the bound divided among the clients that are there, itself included; and never more than twice as
many in all. So one client may take everything, and the next one still gets in at once.

A client's part is divided among its users in the same way: one that has fewer in than its part of
that comes in beyond it, beside what is counted, and never more than the bound in all. So neither
keeps a user those of the same client out, nor a client others, however many users it names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kakeya.core.errors import QueueFull

RETRY_S = 1.0


class FairBound:
    """Who is in, of `most` at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._inside: dict[str, Counter[str]] = {}
        self._total = 0
        self._beside = 0

    @property
    def total(self) -> int:
        """How many are in."""
        return self._total + self._beside

    def has_room(self, client: str, user: str = "") -> bool:
        """Whether one more of this client's user may come in."""
        return self._has_room_for(client) or self._has_room_beside(client, user)

    @contextmanager
    def member(self, client: str, user: str, says_full: str) -> Iterator[None]:
        """Be in. Raises QueueFull with `says_full` where there is no room."""
        is_beside = not self._has_room_for(client)
        if is_beside and not self._has_room_beside(client, user):
            raise QueueFull(f"{says_full}: try again later", retry_after_s=RETRY_S)
        self._count(client, user, 1, is_beside=is_beside)
        try:
            yield
        finally:
            self._count(client, user, -1, is_beside=is_beside)

    def _has_room_for(self, client: str) -> bool:
        if self._total < self._most:
            return True
        return self._in(client) < self._part(client) and self._total < 2 * self._most

    def _has_room_beside(self, client: str, user: str) -> bool:
        """Whether a user may come in although its client has its part."""
        users = self._inside.get(client, Counter())
        part = self._part(client)
        part_of_user = part // (len(users) + (user not in users))
        is_within = self._in(client) < 2 * part and self._beside < self._most
        return users[user] < part_of_user and is_within

    def _part(self, client: str) -> int:
        return self._most // (len(self._inside) + (client not in self._inside))

    def _in(self, client: str) -> int:
        return self._inside[client].total() if client in self._inside else 0

    def _count(self, client: str, user: str, one: int, *, is_beside: bool) -> None:
        if is_beside:
            self._beside += one
        else:
            self._total += one
        users = self._inside.setdefault(client, Counter())
        users[user] += one
        if not users[user]:
            del users[user]
        if not users:
            del self._inside[client]
