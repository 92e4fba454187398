"""The lease of one engine: its memory after the load, and the room for KV, which grows and shrinks.

    grows     when the engine asks: sequences need it, or kept KV would have to go
    shrinks   when other models need the room, and at rest; never below the room of the load

A cache grows by copying one of its arrays, so KV is lent with a part more (`with_copy`).

Adapter slots are lent beside that. If there is no free memory for them, the engine takes them out
of its KV bound.
"""

from __future__ import annotations

from kakeya.backends.engine.backend import EngineBackend
from kakeya.core.errors import InvalidArgument, KakeyaError, MemoryRefused

_COPIED_PART = 16
"""One array of one layer, twice, is at most one part in so many of the KV of 16 layers and more."""


def with_copy(kv_bytes: int) -> int:
    """The bytes that so much KV takes while it grows."""
    return kv_bytes + kv_bytes // _COPIED_PART


def without_copy(size: int) -> int:
    """The KV that can grow within so many bytes."""
    parts, rest = divmod(size, _COPIED_PART + 1)
    return parts * _COPIED_PART + min(rest, _COPIED_PART - 1)


class EngineLease:
    """The lease of one backend's engine; each change sets new bounds in the engine."""

    def __init__(self, backend: EngineBackend, lease_bytes: int) -> None:
        self.backend = backend
        self.slot_bytes = 0
        """Bytes of the adapter slots in the engine."""
        self.lent_slot_bytes = 0
        """Bytes of the slots that are lent beside the lease."""
        self._granted_bytes = lease_bytes
        self._first_kv_bytes = backend.limits.kv_bytes

    @property
    def bytes(self) -> int:
        """The bytes that the engine may occupy now."""
        return self._granted_bytes + self.lent_slot_bytes

    @property
    def kv_bytes(self) -> int:
        """The part of it that is for KV; 0 = KV has no bound."""
        return self.backend.limits.kv_bytes

    @property
    def short_bytes(self) -> int:
        """The bytes that slots take of the KV bound."""
        return max(0, self.slot_bytes - self.lent_slot_bytes)

    @property
    def spare_kv_bytes(self) -> int:
        """The bytes that can be given up."""
        return max(0, self.kv_bytes - self.short_bytes - self._first_kv_bytes)

    def count(self, kv_bytes: int) -> None:
        """Count more KV for the engine; the caller then calls `raised`."""
        self._granted_bytes += with_copy(kv_bytes)

    async def raised(self, kv_bytes: int, free_bytes: int) -> bool:
        """Answer an engine with a KV bound that is larger by counted bytes, 0 = as before; False if
        it refuses, and they count no more. `free_bytes` could be lent beside them now."""
        if await self._bound(kv_bytes, free_bytes):
            return True
        self._granted_bytes -= with_copy(kv_bytes)
        return False

    async def lower(self, size: int) -> int:
        """Give up at most `size` spare bytes of the lease; return their number."""
        part = min(size, self.spare_kv_bytes)
        if part <= 0 or not await self._bound(-part):
            return 0
        self._granted_bytes -= with_copy(part)
        return part

    async def lent(self, change: int) -> None:
        """Tell the engine that more or fewer bytes are lent for slots; its KV bound follows.

        If the model occupies bytes that were to be taken away, they stay lent.
        """
        limits = self.backend.limits
        if not limits.memory_bytes:
            return
        try:
            await self.backend.set_limits(memory_bytes=limits.memory_bytes + change)
        except MemoryRefused:
            self.lent_slot_bytes -= change
        except KakeyaError:
            pass  # the child is gone; the next one gets the same bounds

    async def _bound(self, change: int, free_bytes: int | None = None) -> bool:
        """Change the engine's KV bound by some bytes, and its memory bound with it; False if it
        refuses, and keeps its old bounds.

        If the child does not answer or is gone, the next child gets the new bounds.
        """
        limits = self.backend.limits
        more = with_copy(change) if change > 0 else -with_copy(-change)
        memory = limits.memory_bytes + more if limits.memory_bytes else 0
        kv_bytes = limits.kv_bytes + change
        try:
            if free_bytes is None:
                await self.backend.set_limits(memory_bytes=memory, kv_bytes=kv_bytes)
            else:
                await self.backend.answer_want(memory, kv_bytes, free_bytes)
        except (MemoryRefused, InvalidArgument):
            return False
        except KakeyaError:
            pass
        return True
