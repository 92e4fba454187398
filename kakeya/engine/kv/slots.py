"""KV that outlives its generation: one entry a key, least recently used first to go.

An entry is taken out while a generation works on it and put back afterwards, so nothing can be
dropped under a running sequence. The budget is for KV of both kinds: `held` counts bytes of the
entries that wait here, `lent` those that running sequences may use and parked ones hold (`room`),
and entries go when these need the space.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kakeya.engine.model import SequenceState


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptKv:
    """The KV of a history; `tokens` is as long as the state.

    `content` is the digest of the adapter that it was computed with, "" = the model alone. `cuts`
    are those of the request that it was prefilled for.
    """

    tokens: list[int]
    state: SequenceState
    nbytes: int
    content: str = ""
    cuts: tuple[int, ...] = ()


class KvSlots:
    """Entries within a byte budget."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._entries: OrderedDict[str, KeptKv] = OrderedDict()
        self._held_bytes = 0
        self._lent_bytes = 0

    @property
    def budget_bytes(self) -> int:
        """The bound of all KV, kept and running."""
        return self._budget_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all entries."""
        return self._held_bytes

    def bytes_by_key(self) -> dict[str, int]:
        """Bytes of each entry."""
        return {key: entry.nbytes for key, entry in self._entries.items()}

    def kept_bytes(self, key: str) -> int:
        """Bytes of the entry of `key`; 0 = none."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry.nbytes

    def kept_tokens(self, key: str) -> int:
        """Tokens of the history that `key` keeps KV of; 0 = none."""
        entry = self._entries.get(key)
        return 0 if entry is None else len(entry.tokens)

    def take(self, key: str) -> KeptKv | None:
        """Remove and return the entry of `key`."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._held_bytes -= entry.nbytes
        return entry

    def keep(
        self,
        key: str,
        tokens: list[int],
        state: SequenceState,
        content: str = "",
        cuts: tuple[int, ...] = (),
    ) -> None:
        """Put an entry in; older ones go where it does not fit, the entry itself where it can't.

        Its sequence may still count as running, so only entries are weighed here.
        """
        self.take(key)
        entry = KeptKv(tokens=tokens, state=state, nbytes=state.nbytes, content=content, cuts=cuts)
        if entry.nbytes > self._budget_bytes:
            return
        self._entries[key] = entry
        self._held_bytes += entry.nbytes
        self.shed(self._held_bytes - self._budget_bytes)

    def lend(self, size: int) -> None:
        """Note the bytes that sequences may use in all; entries that are in the way go."""
        self._lent_bytes = size
        self._fit()

    def set_budget(self, budget_bytes: int) -> None:
        """Set another budget; entries beyond it go at once."""
        self._budget_bytes = budget_bytes
        self._fit()

    def shed(self, size: int) -> int:
        """Drop entries, oldest first, until `size` bytes are gone or none is left.

        Returns the bytes that went.
        """
        before = self._held_bytes
        while self._entries and before - self._held_bytes < size:
            _, oldest = self._entries.popitem(last=False)
            self._held_bytes -= oldest.nbytes
        return before - self._held_bytes

    def _fit(self) -> None:
        self.shed(self._held_bytes + self._lent_bytes - self._budget_bytes)
