"""The limits of a store of blocks, and its counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kakeya.core.errors import ConfigError
from kakeya.core.units import GIB, MIB
from kakeya.prefix.disk.index import DiskIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskConfig:
    """The limits of a store: bytes on disk, bytes in the queue, threads. Raises ConfigError."""

    cap_bytes: int  # of all blocks together
    keep_free_bytes: int = GIB  # of the disk, for other programs; the store gives way below it
    quarantine_bytes: int = 64 * MIB  # of damaged files, kept for a look into the cause
    queue_bytes: int = 256 * MIB  # that wait to be written: seven blocks of an 8B model
    headroom: float = 1 / 16  # free this share of the cap more than is needed, so it is rare
    readers: int = 4  # threads; one reads and proves 0.3-1.5 GB/s
    flush_s: float = 5.0  # how long closing waits for what still has to be written
    retry_s: tuple[float, ...] = (5.0, 30.0, 120.0, 600.0)  # after the 1st, 2nd, ... failed write

    def __post_init__(self) -> None:
        for name in ("cap_bytes", "queue_bytes", "readers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("keep_free_bytes", "quarantine_bytes", "headroom", "flush_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if not self.retry_s:
            raise ConfigError("retry_s is empty; it must name one wait at least")


@dataclass(slots=True, kw_only=True)
class Counts:
    """Counts since the start; all but the quarantine's only grow."""

    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    read_failures: int = 0  # that were no damage: the disk did not answer
    writes: int = 0
    written_bytes: int = 0
    write_failures: int = 0
    dropped: int = 0  # from the queue, because more came than the disk takes
    skipped: int = 0  # not written: no room, too large, or the disk is known to fail
    damaged: int = 0
    expired: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    quarantined: int = 0  # files there now, and their bytes
    quarantined_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FingerprintUse:
    """The blocks and bytes of one fingerprint."""

    fingerprint: str  # hex
    model_id: str  # as the first block of it says
    blocks: int
    bytes: int
    is_usable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStats:
    """The content and the counts of a store. `trouble` is why nothing is written, or ""."""

    blocks: int
    used_bytes: int
    cap_bytes: int
    queued: int
    queued_bytes: int
    is_ready: bool
    trouble: str
    counts: Counts
    by_retention: Mapping[str, int] = field(default_factory=dict)  # blocks
    by_fingerprint: tuple[FingerprintUse, ...] = ()  # the largest first


def uses_of(index: DiskIndex) -> tuple[FingerprintUse, ...]:
    """The use of each fingerprint, the largest first."""
    uses = [
        FingerprintUse(
            fingerprint=fingerprint.hex(),
            model_id=str(tally.facts.get("model_id", "")),
            blocks=tally.blocks,
            bytes=tally.bytes,
            is_usable=is_usable,
        )
        for fingerprint, tally, is_usable in index.by_fingerprint()
    ]
    return tuple(sorted(uses, key=lambda use: -use.bytes))
