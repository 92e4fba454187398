"""The lease of one engine, and the part of it that was given up for other models.

Only KV can be given up, and of the KV bound only the part above one whole context: the longest
request that the engine takes stays possible.

Adapter slots are lent beside that. If there is no free memory for them, the engine takes them out
of its KV bound.
"""

from __future__ import annotations

from kakeya.backends.engine.backend import EngineBackend
from kakeya.core.errors import InvalidArgument, KakeyaError, MemoryRefused
from kakeya.core.units import KV_BLOCK_TOKENS


class EngineLease:
    """The lease of one backend's engine; each change sets new bounds in the engine."""

    def __init__(self, backend: EngineBackend, lease_bytes: int) -> None:
        self.backend = backend
        self.lowered_bytes = 0
        self.slot_bytes = 0
        """Bytes of the adapter slots in the engine."""
        self.lent_slot_bytes = 0
        """Bytes of the slots that are lent beside the lease."""
        self._granted_bytes = lease_bytes

    @property
    def bytes(self) -> int:
        """The bytes that the engine may occupy now."""
        return self._granted_bytes + self.lent_slot_bytes - self.lowered_bytes

    @property
    def short_bytes(self) -> int:
        """The bytes that slots take of the KV bound."""
        return max(0, self.slot_bytes - self.lent_slot_bytes)

    @property
    def is_lowered(self) -> bool:
        """Whether a part of the lease is given up."""
        return self.lowered_bytes > 0

    @property
    def spare_kv_bytes(self) -> int:
        """The bytes that could be given up."""
        facts, bound = self.backend.facts, self.backend.limits.kv_bytes
        if facts is None or bound == 0:
            return 0
        blocks = -(-facts.context_tokens // KV_BLOCK_TOKENS)
        context = blocks * KV_BLOCK_TOKENS * facts.kv_bytes_per_token + facts.kv_fixed_bytes
        return max(0, bound - self.short_bytes - context)

    async def lower(self, size: int) -> int:
        """Give up at most `size` spare bytes of the lease; return their number."""
        part = min(size, self.spare_kv_bytes)
        if part <= 0 or not await self._bound(-part):
            return 0
        self.lowered_bytes += part
        return part

    def regain(self) -> int:
        """Count the given-up bytes for the engine again; return their number.

        From now on no other tenant gets them; the caller then calls `restore`.
        """
        part, self.lowered_bytes = self.lowered_bytes, 0
        return part

    async def restore(self, part: int) -> None:
        """Raise the engine's bounds again; if the engine refuses, the bytes stay given up."""
        if not await self._bound(part):
            self.lowered_bytes += part

    async def lent(self, change: int) -> None:
        """Tell the engine that more or fewer bytes are lent for slots; its context limit follows.

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

    async def _bound(self, change: int) -> bool:
        """Change the engine's bounds by some bytes; False if it refuses, and keeps its old bounds.

        If the child does not answer or is gone, the next child gets the new bounds.
        """
        limits = self.backend.limits
        memory = limits.memory_bytes + change if limits.memory_bytes else 0
        try:
            await self.backend.set_limits(memory_bytes=memory, kv_bytes=limits.kv_bytes + change)
        except (MemoryRefused, InvalidArgument):
            return False
        except KakeyaError:
            pass
        return True
