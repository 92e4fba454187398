"""Slots of cards by their keys, for all keys of a message at once.

A key has one entry in a table, chosen by its lowest bits; the latest card with the same bits takes
it, and the others are looked up one by one in a dictionary. A message of 10,000 keys so costs a
tenth of a millisecond, and cards with keys made to collide cost as much as the dictionary does.
The table is there for fleets of 1,000 nodes and more; for a shelf of 2 to 50 nodes the dictionary
would do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kakeya.fleet.view.beats import Keys

Places = NDArray[np.intp]
_MIN_ENTRIES = 256
_ENTRIES_PER_KEY = 8
"""Enough that only about one card in twenty shares its entry with another."""


class KeyTable:
    """Places by keys; places count from 0."""

    def __init__(self) -> None:
        self._place_by_key: dict[int, int] = {}
        self._resize(_MIN_ENTRIES)

    def __len__(self) -> int:
        return len(self._place_by_key)

    def find(self, keys: Keys) -> Places:
        """The place by each key; -1 = none."""
        at = (keys & self._mask).view(np.intp)
        places: Places = self._places.take(at)
        missed = (self._keys.take(at) != keys).nonzero()[0]
        if len(missed):
            get = self._place_by_key.get
            places[missed] = [get(key, -1) for key in keys[missed].tolist()]
        return places

    def put(self, key: int, place: int) -> None:
        """Note the place of a key."""
        self._place_by_key[key] = place
        if len(self._place_by_key) * _ENTRIES_PER_KEY > len(self._keys):
            self._resize(2 * len(self._keys))
        else:
            self._enter(key, place)

    def drop(self, key: int) -> None:
        """Forget a key. Raises KeyError if it has no place."""
        del self._place_by_key[key]
        at = key & self._last
        if int(self._keys[at]) == key:
            self._places[at] = -1

    def _enter(self, key: int, place: int) -> None:
        at = key & self._last
        self._keys[at], self._places[at] = key, place

    def _resize(self, entries: int) -> None:
        self._last = entries - 1
        self._mask = np.uint64(entries - 1)
        # An empty entry names a key that belongs there and has no place.
        self._keys: Keys = np.arange(entries, dtype=np.uint64)
        self._places: Places = np.full(entries, -1, np.intp)
        for key, place in self._place_by_key.items():
            self._enter(key, place)
