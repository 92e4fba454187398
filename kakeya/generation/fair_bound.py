"""A bound on the requests inside at a time, shared so that no client keeps the others out.

While there is room, each request enters. Beyond the bound a request enters only if its client has
fewer requests inside than the client's part: the bound divided among the clients that are inside,
its own included. The requests inside are never more than twice the bound. So one client may take
all the room, and the first request of the next client still enters at once.

A client's part is divided among its users in the same way. A user with fewer requests inside than
the user's part enters even when its client has its part; these entries are counted beside the
others, and are never more than the bound. So no user keeps another user of its client out, and no
client keeps another client out by naming many users.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kakeya.core.errors import QueueFull
from kakeya.generation.place_rate import PlaceRate


class FairBound:
    """The requests inside, `most` at a time; `mono` is a monotonic clock, in seconds."""

    def __init__(self, most: int, mono: Callable[[], float]) -> None:
        self._most = most
        self._rate = PlaceRate(mono)
        self._inside: dict[str, Counter[str]] = {}
        self._total = 0
        self._beside = 0

    @property
    def total(self) -> int:
        """Requests inside."""
        return self._total + self._beside

    @property
    def is_full(self) -> bool:
        """Whether a client that has its part is refused."""
        return self._total >= self._most

    def has_room(self, client: str, user: str = "") -> bool:
        """Whether one more request of this user of the client may enter."""
        return self._has_room_for(client) or self._has_room_beside(client, user)

    @contextmanager
    def member(self, client: str, user: str, says_full: str) -> Iterator[None]:
        """Stay inside for the `with`. Raises QueueFull with `says_full` when there is no room, and
        with the time at which the rate of places that become free promises one."""
        is_beside = not self._has_room_for(client)
        if is_beside and not self._has_room_beside(client, user):
            raise QueueFull(
                f"{says_full}: try again later", retry_after_s=self._rate.retry_after_s()
            )
        self._count(client, user, 1, is_beside=is_beside)
        if self.is_full:
            self._rate.full()
        try:
            yield
        finally:
            self._rate.freed(is_full=self.is_full)
            self._count(client, user, -1, is_beside=is_beside)

    def _has_room_for(self, client: str) -> bool:
        if self._total < self._most:
            return True
        return self._in(client) < self._part(client) and self._total < 2 * self._most

    def _has_room_beside(self, client: str, user: str) -> bool:
        """Whether a request of the user may enter although the client has its part."""
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
