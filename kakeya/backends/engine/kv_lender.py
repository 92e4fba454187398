"""The room for keys and values of one engine: lent from the ledger as sequences grow.

Spare memory of the ledger is lent at once. For a sequence that cannot begin or go on without more,
idle models make room, in its turn. Bytes that are only wished for take no room from others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kakeya.backends.engine.lease import EngineLease, with_copy, without_copy
from kakeya.core.errors import KakeyaError
from kakeya.core.log import event
from kakeya.generation.frames import KvWant
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.arbiter.plan import Snapshot
from kakeya.memory.arbiter.resident import ResidentKey

_log = logging.getLogger(__name__)
ROOM_S = 6.5
"""The longest wait for idle models to leave: after 5 s those that are kept warm go, too."""


class KvLender:
    """`tenant` names the engine's idle KV in the ledger; `counted` reports the lease there; `share`
    is that of the KV it could have which the engine may have at most."""

    def __init__(
        self,
        key: ResidentKey,
        lease: EngineLease,
        arbiter: MemoryArbiter,
        *,
        tenant: str,
        counted: Callable[[], None],
        share: float = 1.0,
    ) -> None:
        self._key = key
        self._lease = lease
        self._arbiter = arbiter
        self._tenant = tenant
        self._counted = counted
        self._share = share
        self._lending = asyncio.Lock()

    def most_bytes(self) -> int:
        """The most bytes of KV that the ledger can ever lend."""
        return self._most_bytes(self._arbiter.status())

    def free_bytes(self) -> int:
        """Bytes that the ledger would lend now, without models leaving for it."""
        ledger = self._arbiter.status()
        growth_bytes = self._most_bytes(ledger) - self._lease.kv_bytes
        return max(0, min(without_copy(ledger.spare_bytes), growth_bytes))

    async def lend(self, want: KvWant) -> None:
        """Answer an engine that asks for a larger KV bound."""
        async with self._lending:
            size = self._reserve(want)
            if not size and want.needed_bytes:
                size = await self._make_room(want.needed_bytes)
            # The ledger counts it before the engine has it: no other tenant gets the same room.
            self._lease.count(size)
            self._arbiter.grown(self._tenant)
            self._counted()
            if not await self._lease.raised(size, self.free_bytes()):
                self._counted()

    def _reserve(self, want: KvWant) -> int:
        """Reserve spare bytes: as many as are wished, else as are needed; 0 = neither."""
        for size in (want.wished_bytes, want.needed_bytes):
            may_ask = 0 < size <= self._growth_bytes()
            if may_ask and self._arbiter.may_grow(self._tenant, with_copy(size)):
                return size
        return 0

    async def _make_room(self, size: int) -> int:
        if size > self._growth_bytes() or with_copy(size) > self._room_bytes():
            return 0
        try:
            await self._arbiter.make_room(self._tenant, with_copy(size), ROOM_S)
        except KakeyaError as refused:
            event(
                _log, "no room for keys and values", model=self._key.model_key, reason=str(refused)
            )
            return 0
        return size

    def _room_bytes(self) -> int:
        """Free bytes, and those of idle models and of tenants that can leave."""
        ledger = self._arbiter.status()
        models = sum(
            one.bytes
            for one in ledger.residents
            if one.is_idle and not one.warmth.is_pinned and one.key != self._key
        )
        tenants = sum(one.expired_bytes + one.spare_bytes for one in ledger.tenants)
        return ledger.free_bytes + models + tenants

    def _growth_bytes(self) -> int:
        return self.most_bytes() - self._lease.kv_bytes

    def _most_bytes(self, ledger: Snapshot) -> int:
        lease = self._lease
        return most_kv_bytes(ledger, self._key, lease.bytes, lease.kv_bytes, share=self._share)


def most_kv_bytes(
    ledger: Snapshot,
    key: ResidentKey,
    lease_bytes: int,
    kv_bytes: int,
    *,
    share: float = 1.0,
) -> int:
    """The KV that an engine with such a lease, for so much KV, may have if all models left that
    can, and all pages; or a share of that, but no less than it has."""
    pinned = sum(one.bytes for one in ledger.residents if one.warmth.is_pinned and one.key != key)
    left = ledger.budget_bytes - sum(ledger.foreign.values()) - pinned - lease_bytes
    return max(kv_bytes, int(share * (kv_bytes + without_copy(max(0, left)))))
