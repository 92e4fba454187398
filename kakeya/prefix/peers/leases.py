"""Leases: the blocks that a lookup found stay for half a minute, for its caller.

    granted --LEASE_S--> over
       \\-- opened --> stays while a stream reads it, and its time begins anew when that ends

A lease pins blocks as long as the pinned bytes of all leases fit a budget; beyond it, and after a
stream has read it to its end, a lease pins nothing, and its blocks may be evicted. Each caller has
a number of leases, of which the oldest makes room for the next. Pure but for the releases of pins:
methods take `now` in monotonic seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kakeya.core.errors import NotFound, QueueFull
from kakeya.core.units import MIB
from kakeya.prefix.names.blocks import BlockId
from kakeya.prefix.names.fingerprint import KvFingerprint
from kakeya.prefix.peers.seams import BlockPart, BlockSource

LEASE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLimits:
    """How many leases there may be, and the bytes that they keep from eviction together."""

    leases: int = 256
    per_caller: int = 16
    pinned_bytes: int = 512 * MIB


@dataclass(slots=True, kw_only=True)
class BlockLease:
    """Blocks of one history, from its beginning; `sizes` are the announced bytes.

    With `tail_tokens` the last one is a tail of so many.
    """

    lease_id: str
    caller: str
    source: BlockSource = field(repr=False)
    block_tokens: int
    ids: tuple[BlockId, ...] = field(repr=False)
    sizes: tuple[int, ...]
    ends_mono: float
    unpin: Callable[[], None] | None = field(repr=False)
    tail_tokens: int = 0
    streams: int = 0

    @property
    def pinned_bytes(self) -> int:
        """The bytes that it keeps from eviction."""
        return 0 if self.unpin is None else sum(self.sizes)

    def tokens_of(self, index: int) -> int:
        """How many tokens one of its blocks has."""
        is_tail = self.tail_tokens and index == len(self.ids) - 1
        return self.tail_tokens if is_tail else self.block_tokens

    def let_go(self) -> None:
        """Let its blocks be evicted."""
        unpin, self.unpin = self.unpin, None
        if unpin is not None:
            unpin()


class BlockLeases:
    """All leases of a node. `draw` makes ids that cannot be guessed."""

    def __init__(self, draw: Callable[[], str], limits: LeaseLimits | None = None) -> None:
        self._draw = draw
        self._limits = limits or LeaseLimits()
        self._leases: OrderedDict[str, BlockLease] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def pinned_bytes(self) -> int:
        """The bytes that all leases keep from eviction."""
        return sum(lease.pinned_bytes for lease in self._leases.values())

    def grant(
        self,
        caller: str,
        source: BlockSource,
        fingerprint: KvFingerprint,
        ids: Sequence[BlockId],
        sizes: Sequence[int],
        now: float,
        *,
        tail: BlockPart | None = None,
    ) -> BlockLease:
        """Lease these blocks, and a tail behind them.

        Raises QueueFull while all leases there may be are being read.
        """
        self.expire(now)
        self._make_room(caller)
        held = tuple(ids)
        if tail is not None:
            held, sizes = (*held, tail.id), (*sizes, tail.size)
        fits = self.pinned_bytes + sum(sizes) <= self._limits.pinned_bytes
        lease = BlockLease(
            lease_id=self._draw(),
            caller=caller,
            source=source,
            block_tokens=fingerprint.block_tokens,
            ids=held,
            sizes=tuple(sizes),
            ends_mono=now + LEASE_S,
            unpin=source.pin(held) if fits else None,
            tail_tokens=0 if tail is None else tail.tokens,
        )
        self._leases[lease.lease_id] = lease
        return lease

    @contextmanager
    def open(self, lease_id: str, caller: str, clock: Callable[[], float]) -> Iterator[BlockLease]:
        """Read a lease; it does not end meanwhile. Raises NotFound, for another's lease too."""
        self.expire(clock())
        lease = self._leases.get(lease_id)
        if lease is None or lease.caller != caller:
            raise NotFound(
                f"there is no lease {lease_id[:64]!r}; they end {LEASE_S:.0f} s after their lookup "
                "or their last use, so look up again"
            )
        lease.streams += 1
        try:
            yield lease
        finally:
            lease.streams -= 1
            lease.ends_mono = clock() + LEASE_S

    def expire(self, now: float) -> int:
        """End the leases whose time is over; returns how many."""
        over = [
            lease for lease in self._leases.values() if not lease.streams and lease.ends_mono <= now
        ]
        for lease in over:
            self._end(lease)
        return len(over)

    def clear(self) -> None:
        """End all; streams that read them go on without pins."""
        for lease in tuple(self._leases.values()):
            self._end(lease)

    def _make_room(self, caller: str) -> None:
        own = [lease for lease in self._leases.values() if lease.caller == caller]
        limits = self._limits
        if len(own) >= limits.per_caller:
            candidates = own
        elif len(self._leases) >= limits.leases:
            candidates = list(self._leases.values())
        else:
            return
        idle = next((lease for lease in candidates if not lease.streams), None)
        if idle is None:
            raise QueueFull(
                f"{len(self._leases)} leases are being read, {len(own)} of them by {caller}; "
                f"there may be {limits.leases}, {limits.per_caller} of one caller",
                # A constant: the bounds of streams, which read leases, are below those of leases,
                # so no rate of this bound can ever be measured.
                retry_after_s=1.0,
            )
        self._end(idle)

    def _end(self, lease: BlockLease) -> None:
        self._leases.pop(lease.lease_id, None)
        lease.let_go()
