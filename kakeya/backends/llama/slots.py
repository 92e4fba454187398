"""The slots of one llama-server: which one a prompt takes, and which make room for it. Pure.

A slot holds the KV of one history until another takes its place; the KV of all slots shares one
room. The server may hold less of a history than is noted here, and then computes the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kakeya.generation.retention import Retention
from kakeya.prefix.names.blocks import TOKEN_BYTES, shared_tokens

_SIMILAR = 10
"""A prompt goes on in a slot that holds one part in so many of it, at least."""


@dataclass(slots=True, eq=False)
class Slot:
    """One slot; `packed` are the tokens of its history as `pack_ids` makes them."""

    index: int
    packed: bytes = b""
    retention: Retention = Retention.IN_MEMORY
    is_passing: bool = False
    """Its history was asked for once, and no person waits for it: it goes before others."""
    is_busy: bool = False
    used: int = 0
    """The number of its last use."""

    @property
    def tokens(self) -> int:
        """The length of its history."""
        return len(self.packed) // TOKEN_BYTES

    @property
    def order(self) -> tuple[bool, bool, int]:
        """The smallest goes first."""
        return bool(self.packed), not self.is_passing, self.used


class SlotTable:
    """All slots of a server, whose KV has room for so many tokens together."""

    def __init__(self, count: int, room_tokens: int) -> None:
        self.slots: Sequence[Slot] = tuple(Slot(index) for index in range(count))
        self._room_tokens = room_tokens
        self._uses = 0

    def take(self, packed: bytes) -> Slot | None:
        """Choose the slot for a prompt, busy from now on: the one that holds most of it, else the
        first to go. None = all are busy."""
        idle = [slot for slot in self.slots if not slot.is_busy]
        if not idle:
            return None
        chosen = max(idle, key=lambda slot: shared_tokens(slot.packed, packed))
        if shared_tokens(chosen.packed, packed) * TOKEN_BYTES * _SIMILAR < len(packed):
            chosen = min(idle, key=lambda slot: slot.order)
        chosen.is_busy = True
        self._uses += 1
        chosen.used = self._uses
        return chosen

    def leaving(self, chosen: Slot, tokens: int) -> list[Slot]:
        """Choose the idle slots that have to be emptied, the first to go in front, so that `chosen`
        can hold so many tokens; fewer where no more are idle."""
        others = [slot for slot in self.slots if slot is not chosen]
        over = sum(slot.tokens for slot in others) + tokens - self._room_tokens
        found = []
        for slot in sorted(others, key=lambda slot: slot.order):
            if over <= 0:
                break
            if slot.packed and not slot.is_busy:
                found.append(slot)
                over -= slot.tokens
        return found
