"""The order of requests that each want an adapter, where only so many adapters fit. Pure.

The adapter with the most requests goes first, so that few adapters serve many. Each `age_s` that
its oldest request has waited makes an adapter a whole class more urgent, so a rare adapter is never
passed over for ever: nothing stands before a request once all requests are served that came before
it, or less than `age_s` after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from kakeya.core.errors import InvalidArgument

MAX_ROWS = 256
AGE_S = 2.0
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class AdapterBatch(Generic[Item]):
    """Requests that run together: rows with their keys, the most urgent key first."""

    rows: tuple[tuple[str, Item], ...]


class BatchFormer(Generic[Item]):
    """Waiting requests by adapter. Each is in exactly one place: here, or in one batch."""

    def __init__(self, *, max_rows: int = MAX_ROWS, age_s: float = AGE_S) -> None:
        if max_rows < 1 or age_s <= 0.0:
            raise InvalidArgument(f"a batch has {max_rows} rows and ages by {age_s} s; more is due")
        self._max_rows = max_rows
        self._age_s = age_s
        self._pending: dict[str, deque[tuple[float, Item]]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, key: str, item: Item, now: float) -> None:
        """Queue a request before those that came later.

        `now` is when it came, in monotonic seconds; a request that comes back from a batch that
        could not run keeps its time.
        """
        queue = self._pending.setdefault(key, deque())
        place = len(queue)
        while place and queue[place - 1][0] > now:
            place -= 1
        queue.insert(place, (now, item))
        self._length += 1

    def remove(self, key: str, item: Item) -> bool:
        """Take out a request without its caller; False = it is not here."""
        queue = self._pending.get(key, deque())
        found = next((index for index, (_, one) in enumerate(queue) if one is item), None)
        if found is None:
            return False
        del queue[found]
        self._length -= 1
        if not queue:
            del self._pending[key]
        return True

    def oldest(self, *, but: str | None = None) -> float | None:
        """When the oldest request came, of all keys but `but`; None = there is none."""
        since = (queue[0][0] for key, queue in self._pending.items() if key != but)
        return min(since, default=None)

    def order(self, now: float) -> tuple[str, ...]:
        """The keys in the order in which they are served."""
        return tuple(sorted(self._pending, key=lambda key: self._urgency(key, now)))

    def form(
        self, now: float, *, places: int, resident: Collection[str] = ()
    ) -> AdapterBatch[Item]:
        """Take out the next batch: at most the cap, with at most `places` keys that are not
        resident. Requests that do not fit wait on."""
        rows: list[tuple[str, Item]] = []
        for key in self.order(now):
            if len(rows) == self._max_rows:
                break
            if key not in resident:
                if not places:
                    continue
                places -= 1
            rows += self._take(key, self._max_rows - len(rows))
        self._length -= len(rows)
        return AdapterBatch(tuple(rows))

    def _urgency(self, key: str, now: float) -> tuple[int, int, float]:
        queue = self._pending[key]
        since = queue[0][0]
        return -int((now - since) / self._age_s), -len(queue), since

    def _take(self, key: str, most: int) -> list[tuple[str, Item]]:
        queue = self._pending[key]
        taken = [(key, queue.popleft()[1]) for _ in range(min(most, len(queue)))]
        if not queue:
            del self._pending[key]
        return taken
