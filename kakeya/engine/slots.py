"""KV that outlives its generation: one entry a key, least recently used first to go.

An entry is taken out while a generation works on it and put back afterwards, so nothing can be
dropped under a running sequence. `held` counts bytes of the entries that wait here.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kakeya.engine.model import SequenceState


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptKv:
    """The KV of a history; `tokens` is as long as the state."""

    tokens: list[int]
    state: SequenceState
    nbytes: int


class KvSlots:
    """Entries within a byte budget."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._entries: OrderedDict[str, KeptKv] = OrderedDict()
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all entries."""
        return self._held_bytes

    def bytes_by_key(self) -> dict[str, int]:
        """What each key holds."""
        return {key: entry.nbytes for key, entry in self._entries.items()}

    def take(self, key: str) -> KeptKv | None:
        """Remove and return the entry of `key`."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._held_bytes -= entry.nbytes
        return entry

    def keep(self, key: str, tokens: list[int], state: SequenceState) -> None:
        """Put an entry in; the oldest others go where it does not fit, itself where it can't."""
        self.take(key)
        entry = KeptKv(tokens=tokens, state=state, nbytes=state.nbytes)
        if entry.nbytes > self._budget_bytes:
            return
        self._entries[key] = entry
        self._held_bytes += entry.nbytes
        while self._held_bytes > self._budget_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._held_bytes -= oldest.nbytes
