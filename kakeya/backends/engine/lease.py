"""What one engine may occupy: its lease, and the part of it that was given up for others.

Only KV can be given up, and of the KV bound only what is above one whole context: the longest
request that the engine takes stays possible.

Slots for adapters are lent beside that. Where nobody had room to lend for them, the engine takes
them out of its KV bound.
"""

from __future__ import annotations

from kakeya.backends.engine.backend import EngineBackend
from kakeya.core.errors import InvalidArgument, KakeyaError, MemoryRefused
from kakeya.core.units import KV_BLOCK_TOKENS


class EngineLease:
    """The lease of one backend's engine. Lowering and restoring it bounds the engine anew."""

    def __init__(self, backend: EngineBackend, lease_bytes: int) -> None:
        self.backend = backend
        self.lowered_bytes = 0
        self.slot_bytes = 0
        """What slots for adapters take in the engine."""
        self.lent_slot_bytes = 0
        """What of it was lent beside the rest."""
        self._granted_bytes = lease_bytes

    @property
    def bytes(self) -> int:
        """What the engine may occupy now."""
        return self._granted_bytes + self.lent_slot_bytes - self.lowered_bytes

    @property
    def short_bytes(self) -> int:
        """What slots take of the KV bound."""
        return max(0, self.slot_bytes - self.lent_slot_bytes)

    @property
    def is_lowered(self) -> bool:
        """Whether a part is given up."""
        return self.lowered_bytes > 0

    @property
    def spare_kv_bytes(self) -> int:
        """What could be given up."""
        facts, bound = self.backend.facts, self.backend.limits.kv_bytes
        if facts is None or bound == 0:
            return 0
        blocks = -(-facts.context_tokens // KV_BLOCK_TOKENS)
        context = blocks * KV_BLOCK_TOKENS * facts.kv_bytes_per_token + facts.kv_fixed_bytes
        return max(0, bound - self.short_bytes - context)

    async def lower(self, size: int) -> int:
        """Give up to `size` bytes of the lease up, as far as they are spare; how many it were."""
        part = min(size, self.spare_kv_bytes)
        if part <= 0 or not await self._bound(-part):
            return 0
        self.lowered_bytes += part
        return part

    def regain(self) -> int:
        """Count what was given up as the engine's again, so that nobody else is given it, and say
        how much that is: `restore` it then."""
        part, self.lowered_bytes = self.lowered_bytes, 0
        return part

    async def restore(self, part: int) -> None:
        """Let the engine have this again; where it refuses, it stays given up."""
        if not await self._bound(part):
            self.lowered_bytes += part

    async def lent(self, change: int) -> None:
        """Let the engine know that so much more or less is lent for slots; what it says of its
        context follows. Where its model occupies what was to be taken away, it stays lent."""
        limits = self.backend.limits
        if not limits.memory_bytes:
            return
        try:
            await self.backend.set_limits(memory_bytes=limits.memory_bytes + change)
        except MemoryRefused:
            self.lent_slot_bytes -= change
        except KakeyaError:
            pass  # it is gone; the next child gets the same

    async def _bound(self, change: int) -> bool:
        """Bound the engine by so much more or less; False where it refuses, and keeps its bounds.

        One that does not answer, or is gone, has them as soon as there is a next child.
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
